"""Prunes a model to some of its outputs, or extracts the part between some values and others."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onward.errors import SEE_NAMES, ModelError, did_you_mean
from onward.graph.cleanup import remove_unused


def extract(model: ir.Model, *, inputs: Sequence[str], outputs: Sequence[str]) -> ir.Model:
    """A copy that computes `outputs` and is given `inputs`, any values of the main graph, by their names.

    Includes everything else that the outputs need: the model's own inputs, initializers, and nodes that read only
    those.

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
        source = find_value(graph, name)
        replacement = ir.Value(name=name, type=source.type, shape=source.shape)
        source.name = f"{name}/computed"  # its node may stay, for other outputs
        source.replace_all_uses_with(replacement, replace_graph_outputs=True)
        graph.inputs.append(replacement)
    return prune(part, outputs)


def values_of(graph: ir.Graph) -> dict[str, ir.Value]:
    """Every input, initializer and node output of a graph, by name; bodies not included."""
    values: dict[str, ir.Value] = {value.name or "": value for value in graph.inputs}
    values.update(dict(graph.initializers.items()))
    for node in graph:
        values.update({output.name: output for output in node.outputs if output.name})
    return values


def find_value(graph: ir.Graph, name: str) -> ir.Value:
    """The input, initializer or intermediate of a graph with this name."""
    return find_values(graph, [name])[0]


def find_values(graph: ir.Graph, names: Sequence[str]) -> list[ir.Value]:
    """The inputs, initializers or intermediates of a graph with these names."""
    values = values_of(graph)
    for name in names:
        if name not in values:
            hint = did_you_mean(name, values, most=3)
            raise ModelError(f"'{name}' is not found in the graph{hint}", hint=SEE_NAMES)
    return [values[name] for name in names]


def prune(model: ir.Model, outputs: Sequence[str]) -> ir.Model:
    """Make the named values the model's outputs, in this order, and remove everything that they do not need.

    Any value of the main graph may be named. Inputs that nothing reads go too. Changes the model and
    returns it.

    >>> from onward.graph.load import load_model
    >>> import onnx.parser
    >>> model = load_model(onnx.parser.parse_model(
    ...     '<ir_version: 10, opset_import: ["": 21]> g (float[N] x, float[N] t) => (float[N] loss)'
    ...     '{ y = Relu(x)  loss = Sub(y, t) }'))
    >>> pruned = prune(model, ["y"])
    >>> [value.name for value in pruned.graph.inputs], [node.op_type for node in pruned.graph]
    (['x'], ['Relu'])
    """
    if isinstance(outputs, str) or not outputs:
        raise ModelError("Expected a non empty vector of graph output names: a list with at least one name.")
    # One value cannot be two outputs of a graph.
    if len(set(outputs)) != len(outputs):
        raise ModelError(f"an output is named twice: {list(outputs)}")
    graph = model.graph
    new_outputs = [find_value(graph, name) for name in outputs]
    graph.outputs.clear()
    graph.outputs.extend(new_outputs)
    remove_unused(model)
    # remove_unused keeps inputs: elsewhere they are the model's interface.
    used_inputs = [value for value in graph.inputs if value.uses() or value.is_graph_output()]
    graph.inputs.clear()
    graph.inputs.extend(used_inputs)
    return model
