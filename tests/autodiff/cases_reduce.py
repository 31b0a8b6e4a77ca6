"""Cases of reductions and of the cumulative sum."""

import numpy as np
from cases import Case, distinct, normal, positive

F32 = np.float32
SAMPLES = {"ReduceLogSum": positive, "ReduceMax": distinct, "ReduceMin": distinct}
REDUCTIONS = [
    "ReduceSum",
    "ReduceMean",
    "ReduceMax",
    "ReduceMin",
    "ReduceProd",
    "ReduceL1",
    "ReduceL2",
    "ReduceLogSum",
    "ReduceLogSumExp",
    "ReduceSumSquare",
]
# label: (shape, axes, attributes, symbolic)
FORMS = {
    "all": ((2, 3), None, {}, False),
    "all-dropped": ((2, 3), None, {"keepdims": 0}, True),
    "axis": ((2, 3), [1], {}, False),
    "negative-axes": ((2, 3, 2), [-1, 0], {"keepdims": 0}, False),
    "symbolic": ((2, 3, 2), [-2], {"keepdims": 0}, True),
    "empty-axes-are-all": ((2, 3), [], {"keepdims": 0}, False),
    "empty-axes-are-none": ((2, 3), [], {"noop_with_empty_axes": 1, "keepdims": 0}, False),
    "no-axes-are-none": ((2, 3), None, {"noop_with_empty_axes": 1}, True),
    "scalar": ((), None, {}, False),
}


def reduction(op: str, label: str) -> Case:
    shape, axes, attributes, symbolic = FORMS[label]
    return Case(
        op,
        shapes=[shape],
        constants={} if axes is None else {1: np.array(axes, np.int64)},
        attributes=attributes,
        sample=SAMPLES.get(op, normal),
        symbolic=symbolic,
        label=label,
        # ONNX's evaluator fails at this one.
        reference="onnxruntime" if (op, label) == ("ReduceLogSumExp", "scalar") else "onnx",
    )


def at_run_time(op: str, axes: list[int], keepdims: int) -> Case:
    """The axes are computed, so that only the run knows them."""
    rank = 3 if keepdims else 1
    return Case(
        op,
        text=f"""<ir_version: 10, opset_import: ["": 21]>
        g (float[2,N,2] x0, int64[2] axes) => (float[{",".join("ABC"[:rank])}] y)
        {{ y = {op}<keepdims={keepdims}>(x0, axes) }}""",
        feeds={
            "x0": SAMPLES.get(op, normal)(np.random.default_rng(1), (2, 3, 2)),
            "axes": np.array(axes),
        },
        label=f"run-time-axes-{keepdims}",
    )


def fed(op: str, values, label: str, **attributes) -> Case:
    array = np.array(values, F32)
    return Case(
        op,
        shapes=[array.shape],
        feeds={"x0": array},
        constants={1: np.array([1])},
        attributes=attributes,
        label=label,
    )


CASES = [
    *(reduction(op, label) for op in REDUCTIONS for label in FORMS),
    *(at_run_time(op, [2, 0], keepdims) for op in REDUCTIONS for keepdims in (0, 1)),
    fed("ReduceProd", [[0.0, 2.0, 3.0], [0.0, 0.0, 2.0], [1.0, 2.0, 3.0]], "zeros"),
    fed("ReduceLogSumExp", [[80.0, -80.0], [90.0, 89.0]], "large"),
    Case("ReduceSum", shapes=[(0, 3)], constants={1: np.array([0])}, label="empty"),
    Case("ReduceMean", shapes=[(3, 0)], constants={1: np.array([0])}, label="empty"),
    *(
        Case(
            "CumSum",
            shapes=[(3, 4)],
            constants={1: np.array(axis)},
            attributes={"exclusive": exclusive, "reverse": reverse},
            label=f"axis={axis},exclusive={exclusive},reverse={reverse}",
        )
        for axis, exclusive, reverse in [(0, 0, 0), (1, 1, 0), (-1, 0, 1), (-2, 1, 1)]
    ),
    Case("CumSum", shapes=[(3, 4)], constants={1: np.array(1)}, symbolic=True),
]
