"""Constant folding: nodes whose inputs are constants become initializers.

For graphs that were built here, numpy computes what `compute` knows. For models that come in, ONNX's reference
evaluator computes the rest in the model's own opset: exporters that do not fold (`do_constant_folding=False`, which
training needs) leave axes and shapes as chains of nodes, and any operator may be part of one. Initializers of real
numbers are parameters, and are not folded, unless a caller names them as constants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from onward import contract
from onward.graph.compute import compute, measure, run_reference
from onward.graph.nodes import RANDOM, new_initializer, stops_gradient, subgraphs_of

# Shapes, axes and conditions: a table that a model computes once would grow the file, and is the runtime's to make.
SMALL = 1024
_MEASURES = frozenset({"Shape", "Size"})
# Their results may be large however small their inputs are: evaluating them would make them.
_GROWING = frozenset({"ConstantOfShape", "Expand", "Tile", "Range"})


def constant_names(model: ir.Model) -> set[str]:
    """The names of what Constant nodes give: constants even where they are real numbers."""
    return {
        node.outputs[0].name or ""
        for node in model.graph.all_nodes()
        if node.op_type == "Constant" and node.domain == ""
    }


def fold_constants(
    model: ir.Model, *, constants: set[str] | None = None, opset: int | None = None, sizes: bool = True
) -> bool:
    """Replace nodes whose inputs are known by constants; returns whether there were any.

    `constants` names the initializers of real numbers that no one trains; what is computed here joins them. With
    `opset`, the reference evaluator is asked too. With `sizes`, shapes are taken as inferred.
    """
    return _fold(model.graph, model.graph, set() if constants is None else constants, opset, sizes)


def _fold(root: ir.Graph, graph: ir.Graph, constants: set[str], opset: int | None, sizes: bool) -> bool:
    changed = False
    for node in list(graph):
        for inner in subgraphs_of(node):
            changed = _fold(root, inner, constants, opset, sizes) or changed
        # An output stays what a node computes: not every reader takes an initializer for one.
        if (node.op_type in _MEASURES and not sizes) or any(
            value.is_graph_output() for value in node.outputs
        ):
            continue
        arrays = evaluate(node, lambda value: constant_array(value, constants), opset=opset)
        if arrays is not None:
            constants.update(_replace_by_constants(root, node, arrays))
            changed = True
    return changed


def _replace_by_constants(root: ir.Graph, node: ir.Node, arrays: Sequence[np.ndarray]) -> list[str]:
    """Let the users of a node read initializers of the outermost graph, whose names are returned."""
    names = []
    for value, array in zip(node.outputs, arrays):
        if not value.name:
            continue
        name, value.name = value.name, None
        constant = new_initializer(root, name, ir.tensor(np.ascontiguousarray(array).reshape(array.shape)))
        ir.convenience.replace_all_uses_with(value, constant)
        names.append(name)
    assert node.graph is not None
    node.graph.remove(node, safe=True)
    return names


def constant_array(value: ir.Value, constants: set[str]) -> np.ndarray | None:
    """The numbers of a small initializer that does not train; real numbers only where `constants` names them."""
    tensor = value.const_value
    # An initializer that is an input as well is a default, which the caller may replace.
    if tensor is None or value.is_graph_input() or not value.is_initializer() or tensor.size > SMALL:
        return None
    if tensor.dtype in (ir.DataType.STRING, ir.DataType.UNDEFINED) or _is_state(value):
        return None
    return tensor.numpy() if value.name in constants or not tensor.dtype.is_floating_point() else None


def _is_state(value: ir.Value) -> bool:
    """Whether the graph gives the initializer's next value: a counter of steps is a whole number, but no constant."""
    following = f"{value.name}{contract.NEXT}"
    return value.graph is not None and any(output.name == following for output in value.graph.outputs)


def evaluate(
    node: ir.Node, array_of: Callable[[ir.Value], np.ndarray | None], *, opset: int | None = None
) -> list[np.ndarray] | None:
    """The outputs of a node whose inputs `array_of` knows; None where they are not, or where one is large."""
    if node.domain != "" or node.op_type in RANDOM or subgraphs_of(node) or stops_gradient(node):
        return None
    if node.op_type in _MEASURES:
        source = node.inputs[0]
        if source is None or source.shape is None:
            return None
        start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", None)
        sizes = measure(node.op_type, source.shape, start, end)
        return None if sizes is None else [sizes]
    feeds: list[np.ndarray | None] = []
    for value in node.inputs:
        array = None if value is None else array_of(value)
        if value is not None and array is None:
            return None
        feeds.append(array)
    outputs = compute(node.op_type, {name: attr.value for name, attr in node.attributes.items()}, feeds)
    # A node without inputs, such as RandomNormal or a Constant of text, has nothing that makes it constant.
    if outputs is None and opset is not None and node.inputs and _stays_small(node):
        outputs = run_reference(ir.to_proto(node), feeds, node.version or opset)
    if outputs is None or len(outputs) < len(node.outputs) or any(array.size > SMALL for array in outputs):
        return None
    return outputs


def _stays_small(node: ir.Node) -> bool:
    if node.op_type not in _GROWING:
        return True
    shape = node.outputs[0].shape
    if shape is None or not all(isinstance(dim, int) for dim in shape):
        return False
    return int(np.prod(shape.numpy(), initial=1)) <= SMALL
