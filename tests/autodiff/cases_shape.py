"""Cases of reshaping, permuting, repeating, cutting and joining."""

import numpy as np
from cases import Case

F32 = np.float32
END, START = np.iinfo(np.int64).max, np.iinfo(np.int64).min


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def model(op: str, label: str, signature: str, body: str, **feeds) -> Case:
    """A model in ONNX's text form; floats are sampled for feeds that are shapes."""
    rng = np.random.default_rng(3)
    arrays = {
        name: rng.uniform(0.2, 2.0, feed).astype(F32) if isinstance(feed, tuple) else np.asarray(feed)
        for name, feed in feeds.items()
    }
    text = f'<ir_version: 10, opset_import: ["": 21]> g {signature} {{ {body} }}'
    return Case(op, text=text, feeds=arrays, label=label)


def sliced(label: str, shape, starts, ends, axes=None, steps=None) -> list[Case]:
    """A slice with constant bounds of known and of symbolic sizes, and one whose bounds only the run knows."""
    constants = {1: ints(*starts), 2: ints(*ends)}
    if axes is not None:
        constants[3] = ints(*axes)
    if steps is not None:
        constants[3] = ints(*(range(len(steps)) if axes is None else axes))
        constants[4] = ints(*steps)
    dims = ",".join("ABC"[: len(shape)])
    out = ",".join("DEF"[: len(shape)])
    count = len(starts)
    fixed = [f"k{i} = Constant<value_ints={c.tolist()}>()" for i, c in constants.items() if i > 2]
    names = ", ".join(["x0", "s", "e", *(f"k{i}" for i in constants if i > 2)])
    return [
        Case("Slice", shapes=[shape], constants=constants, label=label),
        Case("Slice", shapes=[shape], constants=constants, label=label, symbolic=True),
        model(
            "Slice",
            f"{label}-run-time",
            f"(float[{dims}] x0, int64[{count}] s, int64[{count}] e) => (float[{out}] y)",
            " ".join([*fixed, f"y = Slice({names})"]),
            x0=shape,
            s=constants[1],
            e=constants[2],
        ),
    ]


def padded(
    label: str, pads, mode="constant", shape=(3, 4), axes=None, symbolic=False, reference="onnx"
) -> Case:
    constants = {1: ints(*pads)}
    if axes is not None:
        constants |= {2: None, 3: ints(*axes)}
    return Case(
        "Pad",
        shapes=[shape],
        constants=constants,
        attributes={"mode": mode},
        label=f"{mode}-{label}",
        symbolic=symbolic,
        reference=reference,
    )


RESHAPES = [
    Case("Reshape", shapes=[(2, 6)], constants={1: ints(3, 4)}),
    Case("Reshape", shapes=[(2, 6)], constants={1: ints(0, -1, 2)}, label="copied"),
    Case("Reshape", shapes=[(2, 6)], constants={1: ints(0, -1, 2)}, label="copied", symbolic=True),
    Case("Reshape", shapes=[(2, 6)], constants={1: ints(-1)}, label="flat", symbolic=True),
    Case("Reshape", shapes=[(1,)], constants={1: ints()}, label="to-scalar"),
    Case("Reshape", shapes=[()], constants={1: ints(1, 1)}, label="from-scalar"),
    Case("Reshape", shapes=[(0, 3)], constants={1: ints(3, 0)}, attributes={"allowzero": 1}, label="empty"),
    Case(
        "Reshape",
        shapes=[(0, 3)],
        constants={1: ints(3, 0)},
        attributes={"allowzero": 1},
        label="empty",
        symbolic=True,
    ),
    model(
        "Reshape",
        "one-unknown-size",
        "(float[N,4] x0) => (float[A,B] y)",
        "s = Constant<value_ints=[4, -1]>() y = Reshape(x0, s)",
        x0=(2, 4),
    ),
    model(
        "Reshape",
        "run-time",
        "(float[A,B] x0, int64[2] s) => (float[C,D] y)",
        "y = Reshape(x0, s)",
        x0=(2, 6),
        s=[4, 3],
    ),
    *(
        Case("Flatten", shapes=[(2, 3, 2)], attributes={"axis": axis}, symbolic=axis < 0)
        for axis in (0, 1, -1, 3)
    ),
    Case("Squeeze", shapes=[(1, 3, 1)]),
    Case("Squeeze", shapes=[(1, 3, 1)], symbolic=True, constants={1: ints(-1)}),
    Case("Squeeze", shapes=[(1, 3, 1)], constants={1: ints(0, 2)}, label="axes"),
    Case("Unsqueeze", shapes=[(3, 2)], constants={1: ints(0, -1)}),
    Case("Unsqueeze", shapes=[(3, 2)], constants={1: ints(1)}, symbolic=True),
    Case("Unsqueeze", shapes=[()], constants={1: ints(0)}, label="scalar"),
    Case("Unsqueeze", shapes=[(2,)], constants={1: ints()}, label="no-axes"),
    Case("Transpose", shapes=[(2, 3, 2)]),
    Case("Transpose", shapes=[(2, 3, 2)], attributes={"perm": [1, 2, 0]}),
    Case("Transpose", shapes=[(2, 3, 2)], attributes={"perm": [2, 0, 1]}, symbolic=True),
]

REPEATS = [
    Case("Expand", shapes=[(3, 1)], constants={1: ints(2, 3, 4)}),
    Case("Expand", shapes=[(3, 1)], constants={1: ints(1, 4)}, symbolic=True),
    Case("Expand", shapes=[(3, 2)], constants={1: ints(1)}, label="smaller"),
    Case("Expand", shapes=[()], constants={1: ints(2, 2)}, label="scalar"),
    model(
        "Expand",
        "run-time",
        "(float[A,1] x0, int64[3] s) => (float[C,D,E] y)",
        "y = Expand(x0, s)",
        x0=(3, 1),
        s=[2, 1, 2],
    ),
    Case("Tile", shapes=[(2, 3)], constants={1: ints(2, 3)}),
    Case("Tile", shapes=[(2, 3)], constants={1: ints(1, 2)}, symbolic=True),
    Case("Tile", shapes=[(2, 3)], constants={1: ints(1, 1)}, label="once"),
    Case("Tile", shapes=[(2, 3)], constants={1: ints(0, 2)}, label="never"),
    model(
        "Tile",
        "run-time",
        "(float[A,B] x0, int64[2] r) => (float[C,D] y)",
        "y = Tile(x0, r)",
        x0=(2, 3),
        r=[2, 2],
    ),
    model(
        "Range",
        "float",
        "(float x0, float limit, float delta) => (float[N] y)",
        "y = Range(x0, limit, delta)",
        x0=np.array(0.5, F32),
        limit=np.array(2.2, F32),
        delta=np.array(0.4, F32),
    ),
]

LAYOUTS = [
    *(
        Case(
            "DepthToSpace",
            shapes=[(1, 8, 1, 2)],
            attributes={"blocksize": 2, "mode": mode},
            symbolic=symbolic,
        )
        for mode in ("DCR", "CRD")
        for symbolic in (False, True)
    ),
    Case("SpaceToDepth", shapes=[(1, 2, 2, 4)], attributes={"blocksize": 2}),
    Case("SpaceToDepth", shapes=[(1, 2, 2, 4)], attributes={"blocksize": 2}, symbolic=True),
    Case(
        "ReverseSequence",
        shapes=[(3, 2, 2)],
        constants={1: ints(3, 2)},
        attributes={"time_axis": 0, "batch_axis": 1},
    ),
    Case(
        "ReverseSequence",
        shapes=[(2, 3)],
        constants={1: ints(3, 2)},
        attributes={"time_axis": 1, "batch_axis": 0},
        symbolic=True,
    ),
    Case("Trilu", shapes=[(3, 4)]),
    Case("Trilu", shapes=[(2, 3, 3)], constants={1: np.array(-1)}, attributes={"upper": 0}),
    Case("Trilu", shapes=[(3, 4)], constants={1: np.array(1)}, symbolic=True),
]

JOINS = [
    Case("Concat", shapes=[(2, 3), (2, 1), (2, 2)], attributes={"axis": 1}),
    Case("Concat", shapes=[(2, 3), (1, 3)], attributes={"axis": -2}, symbolic=True),
    Case("Concat", shapes=[(2, 3)], attributes={"axis": 0}),
    Case("Concat", shapes=[(2, 3), (0, 3)], attributes={"axis": 0}, label="empty"),
    Case("Concat", shapes=[(2, 3), (2, 1), (2, 2)], attributes={"axis": 1}, wrt=["x1"], label="one"),
    Case(
        "Concat",
        shapes=[(2, 3), (2, 1), (2, 2)],
        attributes={"axis": 1},
        wrt=["x2"],
        label="one",
        symbolic=True,
    ),
    Case("Concat", shapes=[(2,), (2,)], attributes={"axis": 0}, wrt=["x0"], label="first", symbolic=True),
    Case("Split", shapes=[(2, 6)], constants={1: ints(1, 2, 3)}, attributes={"axis": 1}, outputs=3),
    Case("Split", shapes=[(5, 2)], attributes={"num_outputs": 3}, outputs=3),
    Case("Split", shapes=[(5, 2)], attributes={"num_outputs": 3}, outputs=3, symbolic=True),
    *(
        Case(
            "Split",
            shapes=[(2, 7)],
            constants={1: ints(1, 2, 3, 1)},
            attributes={"axis": -1},
            outputs=4,
            of=of,
            symbolic=symbolic,
            label=f"used={of}",
        )
        for of in ([1], [0], [0, 2], [1, 3], [3])
        for symbolic in (False, True)
    ),
    *(
        Case(
            "Split",
            shapes=[(7, 2)],
            attributes={"num_outputs": 3},
            outputs=3,
            of=of,
            symbolic=symbolic,
            label=f"even-used={of}",
        )
        for of in ([0, 2], [1], [2])
        for symbolic in (False, True)
    ),
    model(
        "Split",
        "output-left-out",
        "(float[A,B] x0) => (float[C,D] y)",
        "s = Constant<value_ints=[1, 2, 1]>() y, , z = Split<axis=1>(x0, s)",
        x0=(2, 4),
    ),
    model(
        "Split",
        "run-time",
        "(float[A,B] x0, int64[3] s) => (float[C,D] y0, float[E,F] y2)",
        "y0, y1, y2 = Split<axis=1>(x0, s)",
        x0=(2, 4),
        s=[1, 2, 1],
    ),
]

CUTS = [
    *sliced("middle", (3, 6), [1], [4], [1]),
    *sliced("from-start", (3, 6), [0], [4], [-1]),
    *sliced("to-end", (3, 6), [2], [END], [1]),
    *sliced("negative-start", (3, 6), [-2], [END], [1]),
    *sliced("negative-both", (3, 6), [-5], [-2], [1]),
    *sliced("all", (3, 4), [0], [END], [1]),
    *sliced("two-axes", (4, 5), [1, -3], [3, END]),
    *sliced("beyond", (3, 4), [1, -100], [100, 2]),
    *sliced("nothing", (3, 4), [3], [1], [1]),
    *sliced("outside", (3, 4), [7], [9], [1]),
    *sliced("turned", (3, 4), [-1], [START], [1], [-1]),
    *sliced("turned-middle", (2, 6), [4], [1], [1], [-1]),
    *sliced("turned-from-end", (2, 6), [-1], [2], [1], [-1]),
    *sliced("turned-to-start", (2, 6), [3], [START], [1], [-1]),
    *sliced("turned-beyond", (2, 4), [100], [-100], [1], [-1]),
    *sliced("turned-nothing", (2, 4), [1], [3], [1], [-1]),
    *sliced("every-second", (4, 6), [0, 1], [END, END], [0, 1], [2, 2]),
    *sliced("every-third", (2, 8), [1], [END], [1], [3]),
    *sliced("every-third-from-middle", (2, 9), [5], [END], [1], [3]),
    *sliced("turned-by-two", (2, 7), [5], [0], [1], [-2]),
    model(
        "Slice",
        "axes-and-steps-at-run-time",
        "(float[A,B] x0, int64[1] s, int64[1] e, int64[1] a, int64[1] t) => (float[C,D] y)",
        "y = Slice(x0, s, e, a, t)",
        x0=(2, 6),
        s=[4],
        e=[0],
        a=[1],
        t=[-2],
    ),
    *(
        Case("CenterCropPad", shapes=[(4, 5)], constants={1: ints(*to)}, label=f"to={to}", symbolic=symbolic)
        for to in ((3, 3), (7, 8), (2, 8))
        for symbolic in (False, True)
    ),
    Case("CenterCropPad", shapes=[(2, 4, 3)], constants={1: ints(5, 2)}, attributes={"axes": [-1, 1]}),
]

PADS = [
    padded("both", [1, 0, 2, 3]),
    padded("both", [1, 0, 2, 3], symbolic=True),
    padded("none", [0, 0, 0, 0]),
    padded("axes", [1, 2], axes=[-1]),
    padded("axes", [1, 2, 0, 1], axes=[1, 0], symbolic=True),
    # ONNX's evaluator has no negative pads.
    padded("negative", [-1, 1, 2, -2], reference="onnxruntime"),
    padded("negative", [-1, 0, 0, -2], symbolic=True, reference="onnxruntime"),
    *(padded("both", [2, 1, 1, 3], mode=mode) for mode in ("reflect", "edge", "wrap")),
    *(padded("both", [2, 1, 1, 3], mode=mode, symbolic=True) for mode in ("reflect", "edge", "wrap")),
    *(padded("axes", [2, 1], mode=mode, axes=[-1]) for mode in ("reflect", "edge", "wrap")),
    *(padded("end", [0, 0, 0, 2], mode=mode) for mode in ("reflect", "edge", "wrap")),
    *(padded("single", [2, 3], mode=mode, shape=(1,)) for mode in ("edge", "wrap")),
    padded("far", [0, 9, 0, 7], mode="wrap"),
    padded("far", [0, 9, 0, 7], mode="wrap", symbolic=True),
    *(
        padded("negative", [-1, 1], mode=mode, shape=(4,), reference="onnxruntime")
        for mode in ("edge", "reflect")
    ),
    Case(
        "Pad",
        shapes=[(2, 3), ()],
        label="value",
        attributes={"mode": "constant"},
        constants={1: ints(1, 0, 0, 2)},
    ),
    Case(
        "Pad",
        shapes=[(2, 3), (1,)],
        label="value-vector",
        constants={1: ints(1, 2), 3: ints(1)},
        reference="onnxruntime",
    ),
    Case("Pad", shapes=[(2, 3), ()], label="value", constants={1: ints(1, 0, 0, 2)}, symbolic=True),
    *(
        model(
            "Pad",
            f"{mode}-run-time",
            "(float[A,B] x0, int64[4] p) => (float[C,D] y)",
            f'y = Pad<mode="{mode}">(x0, p)',
            x0=(3, 4),
            p=[1, 2, 0, 1],
        )
        for mode in ("constant", "reflect", "edge", "wrap")
    ),
    model(
        "Pad",
        "constant-axes-at-run-time",
        "(float[A,B] x0, int64[2] p, int64[1] a) => (float[C,D] y)",
        "y = Pad(x0, p, , a)",
        x0=(3, 4),
        p=[1, 2],
        a=[1],
    ),
]

CASES = [*RESHAPES, *REPEATS, *LAYOUTS, *JOINS, *CUTS, *PADS]
