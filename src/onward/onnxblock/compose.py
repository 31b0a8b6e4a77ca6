"""Runs blocks on onnx-ir models: names and protos inside, values and models outside."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import onnx
import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.dialect.normalize import normalize
from onward.onnxblock.base import Block
from onward.onnxblock.context import empty_base, sharing

__all__ = ["apply_block", "optimizer_from_block"]

# Weights above this size, or in other files, are shown to blocks by name, type and shape only: no block
# needs the numbers.
_HEADER_ONLY = 4096


def apply_block(block: Block, model: ir.Model, names: Sequence[str]) -> tuple[list[str], ir.Model]:
    """Build a loss block onto a model, which is taken over; returns what the block named, and the new model."""
    order = list(model.graph.initializers)
    large = {
        name: value.const_value
        for name, value in model.graph.initializers.items()
        if value.const_value is not None
        and (value.const_value.nbytes > _HEADER_ONLY or isinstance(value.const_value, ir.ExternalTensor))
    }
    for name in large:
        model.graph.initializers.pop(name)
    proto = ir.to_proto(model)
    proto.graph.initializer.extend(_header(name, tensor) for name, tensor in large.items())
    with sharing(proto):
        made = block(*names)
    results = [made] if isinstance(made, str) else list(made)
    for tensor in [tensor for tensor in proto.graph.initializer if tensor.name in large]:
        proto.graph.initializer.remove(tensor)
        proto.graph.input.append(
            onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        )
    composed = normalize(proto)
    graph = composed.graph
    for value in [value for value in graph.inputs if value.name in large]:
        graph.inputs.remove(value)
        value.const_value = large[value.name or ""]
        graph.register_initializer(value)
    for name in [*order, *(name for name in list(graph.initializers) if name not in order)]:
        if name in graph.initializers:
            graph.initializers[name] = graph.initializers.pop(name)
    return results, composed


def _header(name: str, tensor: ir.TensorProtocol) -> onnx.TensorProto:
    return onnx.TensorProto(name=name, data_type=int(tensor.dtype), dims=tensor.shape.numpy())


def optimizer_from_block(block: Block, parameters: Mapping[str, ir.TensorProtocol]) -> ir.Model:
    """The optimizer model that a user's own block builds, in the sequence form."""
    trainable = [_header(name, tensor) for name, tensor in parameters.items()]
    with empty_base() as accessor:
        block((trainable, []))
        model = ir.from_proto(accessor.model)
    inputs = {value.name for value in model.graph.inputs}
    if not {"params", "gradients"} <= inputs:
        raise ModelError(
            f"the optimizer block {type(block).__name__} must build a graph with the inputs 'params' and "
            f"'gradients' (sequences of tensors); it has {sorted(name or '' for name in inputs)}"
        )
    model.metadata_props["onward.role"] = "optimizer"
    model.metadata_props["onward.optimizer"] = json.dumps({"name": type(block).__name__, "sequences": True})
    return model
