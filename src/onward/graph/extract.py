"""A part of a model as a model: from some of its values to others."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onward.graph.prune import find_value, prune

__all__ = ["extract"]


def extract(model: ir.Model, *, inputs: Sequence[str], outputs: Sequence[str]) -> ir.Model:
    """A copy that computes `outputs` and is given `inputs`, any values of the main graph, by their names.

    Whatever else the outputs need (the model's own inputs, initializers, nodes that read only those) comes
    along.

    >>> from onward.graph.load import load_model
    >>> import onnx.parser
    >>> model = load_model(onnx.parser.parse_model(
    ...     '<ir_version: 10, opset_import: ["": 21]> g (float[N] x, float[N] t) => (float[N] z)'
    ...     '{ y = Relu(x)  z = Sub(y, t) }'))
    >>> part = extract(model, inputs=["y"], outputs=["z"])
    >>> [value.name for value in part.graph.inputs], [node.op_type for node in part.graph]
    (['t', 'y'], ['Sub'])
    """
    part = model.clone()
    graph = part.graph
    for name in inputs:
        made = find_value(graph, name)
        given = ir.Value(name=name, type=made.type, shape=made.shape)
        made.name = f"{name}/made"
        made.replace_all_uses_with(given, replace_graph_outputs=True)
        graph.inputs.append(given)
    return prune(part, outputs)
