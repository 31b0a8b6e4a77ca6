"""What is computed before the run is what the runtime computes, to the bit; anything else is left to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

import onward
from onward.graph.compute import COMPUTABLE, compute
from onward.graph.dialect.normalize import normalize

INT, REALS = np.int64, np.float32
VECTOR = np.array([7, -3, 5, 0], INT)
REAL = np.array([[1.7, -2.5, 0.1], [3.3, 4.0, -0.0]], REALS)
GRID = np.arange(24, dtype=INT).reshape(2, 3, 4)

Case = tuple[str, dict[str, Any], list[Any]]
CASES: list[Case] = [
    ("Abs", {}, [VECTOR]),
    ("Add", {}, [REAL, np.array([0.1, 0.2, 0.3], REALS)]),
    ("And", {}, [np.array([True, False]), np.array([True, True])]),
    ("Cast", {"to": onnx.TensorProto.FLOAT}, [VECTOR]),
    ("Cast", {"to": onnx.TensorProto.INT64}, [REAL]),
    ("CastLike", {}, [VECTOR, REAL]),
    ("Ceil", {}, [REAL]),
    ("Concat", {"axis": 0}, [VECTOR, np.array([9], INT)]),
    ("Constant", {"value": numpy_helper.from_array(VECTOR)}, []),
    ("Constant", {"value_ints": [1, 2]}, []),
    ("Constant", {"value_int": 3}, []),
    ("ConstantOfShape", {"value": numpy_helper.from_array(np.array([2], INT))}, [np.array([2, 3], INT)]),
    ("ConstantOfShape", {}, [np.array([2, 3], INT)]),
    ("Div", {}, [VECTOR, np.array([2, 2, -2, 3], INT)]),
    ("Div", {}, [REAL, np.array(0.3, REALS)]),
    ("Equal", {}, [VECTOR, np.array(5, INT)]),
    ("Expand", {}, [np.array([[1], [2]], INT), np.array([2, 1, 3], INT)]),
    ("Flatten", {"axis": 2}, [GRID]),
    ("Flatten", {"axis": -1}, [GRID]),
    ("Floor", {}, [REAL]),
    ("Gather", {"axis": 1}, [GRID, np.array([[0, -1]], INT)]),
    ("GatherElements", {"axis": 1}, [REAL, np.array([[0, -1], [2, 1]], INT)]),
    ("Greater", {}, [VECTOR, np.array(0, INT)]),
    ("GreaterOrEqual", {}, [VECTOR, np.array(0, INT)]),
    ("Identity", {}, [VECTOR]),
    ("Less", {}, [VECTOR, np.array(0, INT)]),
    ("LessOrEqual", {}, [VECTOR, np.array(0, INT)]),
    ("Max", {}, [VECTOR, np.array([1], INT), np.array([6], INT)]),
    ("Min", {}, [VECTOR, np.array([1], INT)]),
    ("Mod", {}, [VECTOR, np.array([2, 2, -2, 3], INT)]),
    ("Mod", {"fmod": 1}, [VECTOR, np.array([2, 2, -2, 3], INT)]),
    ("Mul", {}, [REAL, REAL]),
    ("Neg", {}, [VECTOR]),
    ("NonZero", {}, [np.array([[True, False], [True, True]])]),
    ("Not", {}, [np.array([True, False])]),
    ("Or", {}, [np.array([True, False]), np.array([False, False])]),
    ("Range", {}, [np.array(7, INT), np.array(0, INT), np.array(-2, INT)]),
    ("ReduceMax", {}, [GRID, np.array([1], INT)]),
    ("ReduceMin", {"keepdims": 0}, [GRID]),
    ("ReduceProd", {"keepdims": 0}, [VECTOR, np.array([0], INT)]),
    ("ReduceSum", {"noop_with_empty_axes": 1}, [GRID, np.array([], INT)]),
    ("ReduceSum", {}, [GRID, np.array([-1, 0], INT)]),
    ("Reshape", {}, [GRID, np.array([0, -1], INT)]),
    ("Slice", {}, [GRID, np.array([-1, 0], INT), np.array([np.iinfo(INT).min, 2], INT), np.array([2, 1], INT),
                   np.array([-2, 1], INT)]),
    ("Slice", {}, [VECTOR, np.array([1], INT), np.array([np.iinfo(INT).max], INT)]),
    ("Slice", {}, [VECTOR, np.array([9], INT), np.array([12], INT)]),
    ("Split", {"axis": 2}, [GRID, np.array([1, 3], INT)]),
    ("Sqrt", {}, [np.array([2.0, 9.0], REALS)]),
    ("Squeeze", {}, [np.array([[[4]]], INT), np.array([0, -1], INT)]),
    ("Squeeze", {}, [np.array([[[4]]], INT)]),
    ("Sub", {}, [VECTOR, np.array([1], INT)]),
    ("Tile", {}, [VECTOR, np.array([2], INT)]),
    ("Transpose", {"perm": [2, 0, 1]}, [GRID]),
    ("Transpose", {}, [GRID]),
    ("Unsqueeze", {}, [VECTOR, np.array([-1, 0], INT)]),
    ("Where", {}, [np.array([True, False]), np.array([1, 2], INT), np.array(3, INT)]),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{len(case[2])}")
def test_equals_the_runtime(case: Case) -> None:
    op_type, attributes, inputs = case
    found = compute(op_type, attributes, inputs)
    assert found is not None
    outputs = [f"y{index}" for index in range(len(found))]
    names = [f"x{index}" for index in range(len(inputs))]
    node = helper.make_node(op_type, names, outputs, **attributes)
    graph = helper.make_graph(
        [node],
        "g",
        [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
            for name, x in zip(names, inputs)
        ],
        [onnx.ValueInfoProto(name=name) for name in outputs],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    expected = ort.InferenceSession(model.SerializeToString()).run(None, dict(zip(names, inputs)))
    for have, want in zip(found, expected, strict=True):
        assert isinstance(want, np.ndarray)
        assert have.dtype == want.dtype and have.shape == want.shape
        assert np.ascontiguousarray(have).tobytes() == want.tobytes()


def test_every_operator_has_a_case() -> None:
    assert {op_type for op_type, _, _ in CASES} == COMPUTABLE


LEFT: dict[str, Case] = {
    "an operator that is not known": ("Softmax", {}, [REAL]),
    "a sum of floats, whose order is the runtime's": ("ReduceSum", {}, [REAL]),
    "a narrow type": ("Add", {}, [REAL.astype(np.float16), REAL.astype(np.float16)]),
    "a division by zero": ("Div", {}, [VECTOR, VECTOR]),
    "a place that is not there": ("Gather", {}, [VECTOR, np.array([9], INT)]),
    "shapes that do not fit": ("Add", {}, [VECTOR, np.array([1, 2], INT)]),
    "a large result": ("ConstantOfShape", {}, [np.array([1 << 20, 1 << 20], INT)]),
    "a long list": ("Range", {}, [np.array(0, INT), np.array(1 << 40, INT), np.array(1, INT)]),
    "an infinity as an integer": ("Cast", {"to": onnx.TensorProto.INT64}, [np.array([np.inf], REALS)]),
}


@pytest.mark.parametrize("case", LEFT.values(), ids=LEFT)
def test_is_left_to_the_runtime(case: Case) -> None:
    assert compute(*case) is None


def test_one_module_of_graph_asks_the_reference_evaluator() -> None:
    source = Path(onward.__file__).parent / "graph"
    asking = [
        path.name for path in source.rglob("*.py") if "onnx.reference" in path.read_text(encoding="utf-8")
    ]
    assert asking == ["compute.py"]


def test_a_condition_of_sums_of_a_value_with_itself_is_computed_once_for_each_sum() -> None:
    sums = "\n".join(f"v{i} = Add (v{i - 1}, v{i - 1})" for i in range(1, 61))
    text = f"""<ir_version: 8, opset_import: ["": 18]> g (float[4, 2] x) => (float[4, 2] y) {{
        zero = Constant <value_ints = [0]> () s = Shape (x) n = Gather (s, zero) v0 = Sub (n, n) {sums}
        c = Equal (v60, zero)
        y = If (c) <then_branch = t () => (float[4, 2] a) {{ a = Neg (x) }},
                    else_branch = e () => (float[4, 2] b) {{ b = Relu (x) }}> }}"""
    model = normalize(onnx.parser.parse_model(text))
    assert {node.op_type for node in model.graph} & {"If", "Neg", "Relu"} == {"Neg"}
