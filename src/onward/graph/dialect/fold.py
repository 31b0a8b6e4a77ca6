"""Constant folding of an incoming model, so that ranks that depend on constants are known.

Exporters that do not fold (`do_constant_folding=False`, which training needs) leave axes and shapes as chains of
nodes over `Constant` nodes. Any operator may be part of one: what `graph.evaluate` cannot compute, ONNX's reference
evaluator computes in the model's own opset. Initializers of real numbers are parameters, and are not folded.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from onward.graph.compute import compute
from onward.graph.nodes import RANDOM, stops_gradient, subgraphs_of

__all__ = ["constant_names", "fold_constant_nodes", "replace_by_constants"]

# Shapes, axes and conditions; tables that a model computes once are the runtime's to compute.
_SMALL = 1024


def constant_names(model: ir.Model) -> set[str]:
    """The names of what Constant nodes give: constants even where they are real numbers."""
    return {
        node.outputs[0].name or ""
        for node in model.graph.all_nodes()
        if node.op_type == "Constant" and node.domain == ""
    }


def fold_constant_nodes(model: ir.Model, opset: int, constants: set[str], *, sizes: bool = True) -> bool:
    """Replace nodes whose inputs are known by constants; returns whether there were any.

    `constants` names the initializers of real numbers that no one trains; what is computed here joins them.
    With `sizes`, shapes are taken as inferred.
    """
    return _fold(model.graph, model.graph, opset, constants, sizes)


def _fold(root: ir.Graph, graph: ir.Graph, opset: int, constants: set[str], sizes: bool) -> bool:
    changed = False
    for node in list(graph):
        for inner in subgraphs_of(node):
            changed = _fold(root, inner, opset, constants, sizes) or changed
        measures = node.op_type in ("Shape", "Size")
        arrays = None if measures and not sizes else _computed(node, opset, constants)
        if arrays is not None:
            constants.update(value.name or "" for value in replace_by_constants(root, node, arrays))
            changed = True
    return changed


def replace_by_constants(root: ir.Graph, node: ir.Node, arrays: Sequence[np.ndarray]) -> list[ir.Value]:
    """Let the users of a node read initializers of the outermost graph, which are returned."""
    made = []
    for value, array in zip(node.outputs, arrays):
        if not value.name:
            continue
        constant = ir.Value(name=value.name)
        value.name = None
        constant.const_value = ir.tensor(np.ascontiguousarray(array).reshape(array.shape), name=constant.name)
        constant.dtype, constant.shape = constant.const_value.dtype, ir.Shape(array.shape)
        root.register_initializer(constant)
        ir.convenience.replace_all_uses_with(value, constant)
        made.append(constant)
    assert node.graph is not None
    node.graph.remove(node, safe=True)
    return made


def _computed(node: ir.Node, opset: int, constants: set[str]) -> list[np.ndarray] | None:
    if node.domain != "" or node.op_type in RANDOM or not node.inputs or subgraphs_of(node):
        return None
    if stops_gradient(node) or any(value.is_graph_output() for value in node.outputs):
        return None
    if node.op_type in ("Shape", "Size"):
        return _measured(node)
    if not all(value is None or _is_known(value, constants) for value in node.inputs):
        return None
    feeds = [None if value is None else value.const_value.numpy() for value in node.inputs]  # type: ignore[union-attr]
    own = node.version or opset
    found = (
        compute(node.op_type, {n: a.value for n, a in node.attributes.items()}, feeds) if own >= 13 else None
    )
    found = found if found is not None else _by_reference(node, own, feeds)
    if found is None or len(found) < len(node.outputs):
        return None
    if any(not isinstance(array, np.ndarray) or array.size > _SMALL for array in found):
        return None
    return found


def _is_known(value: ir.Value, constants: set[str]) -> bool:
    tensor = value.const_value
    if tensor is None or value.is_graph_input() or not value.is_initializer() or tensor.size > _SMALL:
        return False
    if tensor.dtype in (ir.DataType.STRING, ir.DataType.UNDEFINED):
        return False
    return value.name in constants or not tensor.dtype.is_floating_point()


def _by_reference(node: ir.Node, opset: int, feeds: Sequence[np.ndarray | None]) -> list[np.ndarray] | None:
    """The result of onnx's reference evaluator; None where it fails: the run will report the problem."""
    if node.op_type in ("ConstantOfShape", "Expand", "Tile", "Range") and not _is_small(node):
        return None
    proto = ir.to_proto(node)
    given = {name: array for name, array in zip(proto.input, feeds) if array is not None}
    inputs = [
        onnx.helper.make_tensor_value_info(
            name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape
        )
        for name, array in given.items()
    ]
    outputs = [onnx.ValueInfoProto(name=name) for name in proto.output if name]
    graph = onnx.helper.make_graph([proto], "constant", inputs, outputs)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)])
    try:
        found = ReferenceEvaluator(model).run(None, given)
    except Exception:
        return None
    named = dict(zip([output.name for output in outputs], found))
    if not all(isinstance(array, np.ndarray | np.generic) for array in named.values()):
        return None
    return [np.asarray(named[name]) if name else np.zeros(0) for name in proto.output]


def _is_small(node: ir.Node) -> bool:
    """Whether inference knows that a node's output is small: evaluating it would make it."""
    shape = node.outputs[0].shape
    if shape is None or not all(isinstance(dim, int) for dim in shape):
        return False
    return int(np.prod(shape.numpy(), initial=1)) <= _SMALL


def _measured(node: ir.Node) -> list[np.ndarray] | None:
    """A shape of which every size asked for is known."""
    source = node.inputs[0]
    if source is None or source.shape is None:
        return None
    dims = list(source.shape)
    if node.op_type == "Shape":
        dims = dims[node.attributes.get_int("start", 0) : node.attributes.get_int("end", None)]
    if not all(isinstance(dim, int) for dim in dims):
        return None
    sizes = np.asarray(dims, np.int64)
    return [sizes if node.op_type == "Shape" else np.asarray(sizes.prod(), np.int64)]
