"""Cases of picking and placing by index."""

import numpy as np
from cases import Case, distinct, normal
from cases_shape import ints, model

F32 = np.float32


def zeros_among(rng, shape):
    """Every third number is 0."""
    x = normal(rng, shape)
    x.reshape(-1)[::3] = 0
    return x


def shifted(rng, shape):
    """Distinct, and different from every number of `distinct`."""
    return distinct(rng, shape) + np.float32(0.11)


def both(**case) -> list[Case]:
    return [Case(**case), Case(**case, symbolic=True)]


def feeding(op: str, label: str, text: str, output: str, x, *rest, **attributes) -> Case:
    """The indices are an input of a type of their own."""
    kind = {"int32": "int32", "int64": "int64"}[str(rest[0].dtype)]
    dims = ",".join(str(n) for n in rest[0].shape)
    given = ", ".join(f"{k} = {v}" for k, v in attributes.items())
    return model(
        op,
        label,
        f"(float[{text}] x0, {kind}[{dims}] i) => (float[{output}] y)",
        f"y = {op}<{given}>(x0, i)" if given else f"y = {op}(x0, i)",
        x0=x,
        i=rest[0],
    )


GATHERS = [
    *both(op="Gather", shapes=[(4, 3)], constants={1: ints(1, 3, 1, -1)}, label="rows"),
    *both(op="Gather", shapes=[(4, 3)], constants={1: ints(1, 2)}, label="run-of-rows"),
    *both(op="Gather", shapes=[(4, 3)], constants={1: ints(0, 1, 2, 3)}, label="every-row"),
    *both(op="Gather", shapes=[(4, 3)], constants={1: np.array(-2)}, label="one-row"),
    *both(op="Gather", shapes=[(2, 4, 2)], constants={1: np.array(2)}, attributes={"axis": 1}, label="one"),
    *both(
        op="Gather",
        shapes=[(2, 4, 2)],
        constants={1: np.array([[0, 2, 2], [3, 0, -4]])},
        attributes={"axis": -2},
        label="matrix",
    ),
    *both(op="Gather", shapes=[(5,)], constants={1: np.array([[0, 2], [2, 2]])}, label="vector"),
    *both(op="Gather", shapes=[(3, 2)], constants={1: np.zeros((0,), np.int64)}, label="nothing"),
    feeding("Gather", "small-table", "5,3", "A,B,3", (5, 3), np.array([[0, 2, 2], [-1, 0, 1]])),
    feeding("Gather", "small-table-int32", "5,3", "A,3", (5, 3), np.array([0, 2, 2], np.int32)),
    feeding("Gather", "large-table", "130,2", "A,B,2", (130, 2), np.array([[0, 129, 2], [-1, 0, 1]])),
    feeding("Gather", "large-table-int32", "130,2", "A,2", (130, 2), np.array([5, -1, 5], np.int32)),
    feeding("Gather", "three-axes", "3,2,2", "A,2,2", (3, 2, 2), np.array([2, 0, 2])),
    *both(
        op="GatherElements",
        shapes=[(3, 4)],
        constants={1: np.array([[0, 1, 2, 0], [0, -1, 2, 1]])},
        label="axis=0",
    ),
    *both(
        op="GatherElements",
        shapes=[(3, 2)],
        constants={1: np.array([[0, 1, 1], [0, 0, -1]])},
        attributes={"axis": -1},
        label="axis=-1",
        reference="onnxruntime",  # ONNX's own wants all other sizes equal
    ),
    *both(
        op="GatherND", shapes=[(3, 4)], constants={1: np.array([[0, 1], [2, -1], [0, 1]])}, label="elements"
    ),
    *both(op="GatherND", shapes=[(3, 4)], constants={1: np.array([[2], [0], [2]])}, label="rows"),
    *both(op="GatherND", shapes=[(2, 2, 3)], constants={1: np.array([[[0, 1]], [[1, 0]]])}, label="slices"),
    *both(
        op="GatherND",
        shapes=[(2, 3, 2)],
        constants={1: np.array([[1], [-1]])},
        attributes={"batch_dims": 1},
        label="batch",
    ),
    *both(
        op="GatherND",
        shapes=[(2, 2, 3)],
        constants={1: np.array([[[0], [2]], [[1], [1]]])},
        attributes={"batch_dims": 2},
        label="two-batches",
    ),
]

SCATTERS = [
    *(
        Case(
            "ScatterElements",
            shapes=[(3, 4), (2, 4)],
            constants={1: index},
            attributes={"axis": axis, "reduction": reduction},
            sample=[distinct, shifted],
            label=f"{reduction},axis={axis}",
            symbolic=symbolic,
            # ONNX's own wants the sizes of all other axes to be equal.
            reference="onnx" if axis == 0 else "onnxruntime",
        )
        for reduction in ("none", "add", "mul", "max", "min")
        for axis, index, symbolic in [
            (0, np.array([[0, 1, 2, 0], [1, -1, 0, 1]]), False),
            (-1, np.array([[0, 1, -1, 2], [1, 2, 0, 3]]), True),
        ]
    ),
    *(
        Case(
            "ScatterElements",
            shapes=[(4,), (5,)],
            constants={1: ints(0, 1, 1, 0, -1)},
            attributes={"reduction": reduction},
            sample=[distinct, shifted],
            label=f"{reduction},repeated",
        )
        for reduction in ("add", "mul", "max", "min")
    ),
    *(
        Case(
            "ScatterND",
            shapes=[(3, 2), shape],
            constants={1: index},
            attributes={"reduction": reduction},
            sample=[distinct, shifted],
            label=f"{reduction},{label}",
            symbolic=symbolic,
        )
        for reduction in ("none", "add", "mul", "max", "min")
        for label, shape, index, symbolic in [
            ("rows", (2, 2), np.array([[2], [0]]), False),
            ("rows", (2, 2), np.array([[2], [0]]), True),
            ("elements", (3,), np.array([[2, 1], [0, 0], [1, -1]]), True),
        ]
    ),
    *(
        Case(
            "ScatterND",
            shapes=[(3, 2), (3, 2)],
            constants={1: np.array([[2], [0], [2]])},
            attributes={"reduction": reduction},
            sample=[distinct, shifted],
            label=f"{reduction},repeated",
        )
        for reduction in ("add", "mul", "max", "min")
    ),
    *(
        Case(
            op,
            shapes=[(3, 2), (4,)] if op == "ScatterND" else [(3,), (4,)],
            constants={
                1: np.array([[2, 1], [0, 0], [2, 1], [0, 0]]) if op == "ScatterND" else ints(1, 0, 0, 1)
            },
            attributes={"reduction": "mul"},
            sample=[zeros_among, zeros_among],
            label="zero-factors",
        )
        for op in ("ScatterElements", "ScatterND")
    ),
]

CHOICES = [
    *both(op="Compress", shapes=[(3, 2)], constants={1: np.array([0, 1, 1, 0, 1], bool)}, label="flat"),
    *both(op="Compress", shapes=[(3, 2)], constants={1: np.array([0, 1], bool)}, attributes={"axis": 0}),
    *both(op="Compress", shapes=[(2, 3)], constants={1: np.array([1, 0, 1], bool)}, attributes={"axis": -1}),
    *(
        Case(
            "TopK",
            shapes=[(3, 5)],
            constants={1: ints(2)},
            attributes={"axis": axis, "largest": largest, "sorted": is_sorted},
            sample=distinct,
            outputs=2,
            of=[0],
            symbolic=symbolic,
            # Without an order the evaluators differ.
            reference="onnx" if is_sorted else "onnxruntime",
        )
        for axis, largest, is_sorted, symbolic in [(-1, 1, 1, False), (0, 0, 1, True), (1, 1, 0, False)]
    ),
    *(
        Case(
            "OneHot",
            shapes=[(2,)],
            constants={0: np.array([[0, 2], [-1, 7]]), 1: np.array(3)},
            attributes={"axis": axis},
            symbolic=axis == 1,
        )
        for axis in (-1, 0, 1)
    ),
    *both(op="Unique", shapes=[(2, 3)], sample=distinct),
    Case("Unique", shapes=[(3, 2)], attributes={"axis": 0, "sorted": 0}, sample=distinct, outputs=4, of=[0]),
]

CASES = [*GATHERS, *SCATTERS, *CHOICES]
