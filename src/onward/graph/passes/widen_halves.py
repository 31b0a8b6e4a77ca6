"""Lets a model that computes in 16 bits compute in float32; what it stores stays as it is.

Published decoders often have scales, norms and tables in float16, and the CPU has few kernels for it. Each stored
tensor is widened where it is read; of a table, only the rows that are looked up. Works before normalization.
"""

from __future__ import annotations

import onnx_ir as ir

__all__ = ["compute_in_float32", "has_halves"]

_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_NUMBERS = tuple(int(kind) for kind in _HALVES)
_FLOAT = ir.DataType.FLOAT


def has_halves(model: ir.Model) -> bool:
    """Whether a model stores or makes floating numbers of 16 bits."""
    stored = any(value.dtype in _HALVES for value in model.graph.initializers.values())
    return stored or any(value.dtype in _HALVES for value in model.graph.inputs)


def compute_in_float32(model: ir.Model) -> ir.Model:
    """Widen every number of 16 bits to float32, in place; inputs and outputs become float32 too."""
    for graph in model.graphs():
        for value in graph.inputs:
            if value.dtype in _HALVES:
                value.dtype = _FLOAT
        for node in list(graph):
            _widen(node)
    for value in list(model.graph.initializers.values()):
        if value.dtype in _HALVES:
            _widen_stored(model.graph, value)
    return model


def _widen(node: ir.Node) -> None:
    for value in node.outputs:
        if value.dtype in _HALVES:
            value.dtype = _FLOAT
    for name, attribute in list(node.attributes.items()):
        if attribute.type == ir.AttributeType.TENSOR and not attribute.is_ref():
            tensor = attribute.as_tensor()
            if tensor.dtype in _HALVES:
                wide = ir.tensor(tensor.numpy().astype("float32"), name=tensor.name)
                node.attributes[name] = ir.AttrTensor(name, wide)
        elif (
            name in ("to", "dtype")
            and attribute.type == ir.AttributeType.INT
            and attribute.as_int() in _NUMBERS
        ):
            node.attributes[name] = ir.AttrInt64(name, int(_FLOAT))


def _widen_stored(graph: ir.Graph, value: ir.Value) -> None:
    """Read a stored tensor through a Cast: after the lookup where it is a table, before anything else."""
    users = list(value.uses())
    looked_up = [(node, index) for node, index in users if node.op_type == "Gather" and index == 0]
    for node, _ in looked_up:
        result = node.outputs[0]
        wide = _cast(node, result, after=True)
        for user, place in [(user, place) for user, place in result.uses() if user is not wide.producer()]:
            user.replace_input_with(place, wide)
        assert value.dtype is not None
        result.dtype = value.dtype
        if result.is_graph_output():
            owner = node.graph
            assert owner is not None
            wide.name, result.name = result.name, f"{result.name}.stored"
            owner.outputs[owner.outputs.index(result)] = wide
    rest = [(node, index) for node, index in users if (node, index) not in looked_up]
    by_graph: dict[ir.Graph, ir.Value] = {}
    for node, index in rest:
        owner = node.graph
        assert isinstance(owner, ir.Graph)
        if owner not in by_graph:
            by_graph[owner] = _cast(node, value, after=False)
        node.replace_input_with(index, by_graph[owner])


def _cast(node: ir.Node, value: ir.Value, *, after: bool) -> ir.Value:
    made = ir.Node("", "Cast", [value], [ir.AttrInt64("to", int(_FLOAT))], num_outputs=1)
    made.name = f"{value.name}/widened"
    result = made.outputs[0]
    result.name, result.shape, result.type = f"{value.name}.widened", value.shape, ir.TensorType(_FLOAT)
    owner = node.graph
    assert owner is not None
    if after:
        owner.insert_after(node, made)
    else:  # the first of the graph: every later node may read it
        owner.insert_before(next(iter(owner)), made)
    return result
