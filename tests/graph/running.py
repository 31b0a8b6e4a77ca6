"""Runs models before and after, for the tests of this directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from onnx import helper

from onward.graph.dialect.normalize import normalize

MICROSOFT = "com.microsoft"


def run(model: onnx.ModelProto, feeds: Mapping[str, Any]) -> list[Any]:
    """All outputs, on stock onnxruntime, as written: no optimization."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, dict(feeds))


def in_dialect(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model after `normalize`, checked: valid, standard operators only, opset 21, no Constant nodes."""
    proto = ir.to_proto(normalize(model))
    onnx.checker.check_model(proto, full_check=True)
    assert {node.domain for node in proto.graph.node} <= {""}
    assert [(entry.domain, entry.version) for entry in proto.opset_import] == [("", 21)]
    assert "Constant" not in {node.op_type for node in proto.graph.node}
    return proto


def node_model(
    op_type: str,
    inputs: Sequence[np.ndarray | None],
    *,
    opset: int,
    domain: str = "",
    outputs: int | Sequence[str] = 1,
    constants: Sequence[int] = (),
    dynamic: bool = False,
    **attributes: Any,
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A model of one node, and its feeds; inputs numbered in `constants` become initializers."""
    names = [f"x{i}" if x is not None else "" for i, x in enumerate(inputs)]
    infos, initializers, feeds = [], [], {}
    for index, (name, x) in enumerate(zip(names, inputs)):
        if x is None:
            continue
        if index in constants:
            initializers.append(onnx.numpy_helper.from_array(x, name))
            continue
        shape = [f"{name}_{axis}" for axis in range(x.ndim)] if dynamic else list(x.shape)
        infos.append(helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), shape))
        feeds[name] = x
    results = [f"y{i}" for i in range(outputs)] if isinstance(outputs, int) else list(outputs)
    node = helper.make_node(op_type, names, results, name="the_node", domain=domain, **attributes)
    values = [onnx.ValueInfoProto(name=name) for name in results if name]
    graph = helper.make_graph([node], "g", infos, values, initializer=initializers)
    imports = [helper.make_opsetid("", opset)]
    if domain:
        imports.append(helper.make_opsetid(domain, 1))
    return helper.make_model(graph, opset_imports=imports, ir_version=8), feeds


def assert_same(before: Sequence[Any], after: Sequence[Any], *, tolerance: float = 2e-5) -> None:
    """Equal types and shapes; numbers equal to the rounding of another order of operations."""
    assert len(before) == len(after)
    for expected, found in zip(before, after):
        if isinstance(expected, list):
            assert_same(expected, found, tolerance=tolerance)
            continue
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        if expected.dtype.kind == "V":  # the narrow types of ml_dtypes
            expected, found = expected.astype(np.float32), found.astype(np.float32)
        if expected.dtype.kind in "fc":
            wide = np.complex128 if expected.dtype.kind == "c" else np.float64
            np.testing.assert_allclose(
                found.astype(wide), expected.astype(wide), rtol=tolerance, atol=tolerance
            )
        else:
            np.testing.assert_array_equal(found, expected)
