"""Put a torch module's weights into a graph that was exported without them, ready for inference.

Knows ONNX protobufs and torch tensors. A matrix that is only ever read transposed, as every Linear's is, is
stored transposed: the transposition would cost time at every load and hide the matrix from quantizers. One that
is also read as it is, such as an output layer tied to its embedding, is stored once and transposed by the graph.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper

from onward.errors import ExportError
from onward.export.quantize.transposes import common_transposition, drop, readers

__all__ = ["add_weights", "serialized", "take_weights"]


def take_weights(
    model: onnx.ModelProto, module: torch.nn.Module, *, inputs: Collection[str]
) -> dict[str, np.ndarray]:
    """Remove every graph input that is not among `inputs`; the module's tensors to be stored in their place."""
    graph = model.graph
    tensors = dict(module.named_parameters(remove_duplicate=False))
    tensors |= dict(module.named_buffers(remove_duplicate=False))
    wanted = [value.name for value in graph.input if value.name not in inputs]
    unknown = [name for name in wanted if name not in tensors]
    if unknown:
        raise ExportError(f"the exporter made inputs of its own: {', '.join(unknown)}")
    readers_of = readers(graph, wanted)
    renamed: dict[str, str] = {}
    outputs = {value.name for value in graph.output}
    weights: dict[str, np.ndarray] = {}
    for name in wanted:
        value = tensors[name].detach().cpu().numpy()
        perm = common_transposition(readers_of[name])
        if perm is not None and not outputs & {node.output[0] for node in readers_of[name]}:
            # Under another name: whoever looks for the parameter must not find its transpose.
            stored = f"{name}.transposed"
            renamed |= {node.output[0]: stored for node in readers_of[name]}
            value = value.transpose(perm)
        else:
            stored = name
        weights[stored] = value
    kept = [value for value in graph.input if value.name in inputs]
    del graph.input[:]
    graph.input.extend(kept)
    drop(graph, renamed)
    return weights


def add_weights(model: onnx.ModelProto, weights: Mapping[str, np.ndarray]) -> None:
    """Store the weights in the model, in place."""
    for name, value in weights.items():
        # Filled in place: a tensor made elsewhere and appended would be copied twice more.
        tensor = model.graph.initializer.add(**_header(name, value))
        tensor.raw_data = _little_endian(value).tobytes()


def serialized(model: onnx.ModelProto, weights: Mapping[str, np.ndarray]) -> bytes:
    """The model's bytes with the weights in it, which are copied once and never held by the message.

    Written in the wire format: a field is its key (number and type), its length, and its bytes.
    """
    parts: list[Any] = [model.graph.SerializeToString(deterministic=True)]
    for name, value in weights.items():
        data = np.ascontiguousarray(_little_endian(value)).reshape(-1).view(np.uint8)
        header = onnx.TensorProto(**_header(name, value)).SerializeToString(deterministic=True)
        header += _key(onnx.TensorProto, "raw_data") + _varint(len(data))
        parts += [_key(onnx.GraphProto, "initializer") + _varint(len(header) + len(data)), header, data]
    rest = onnx.ModelProto()
    rest.CopyFrom(model)
    rest.ClearField("graph")
    before = rest.SerializeToString(deterministic=True) + _key(onnx.ModelProto, "graph")
    return b"".join([before, _varint(sum(map(len, parts))), *parts])


def _header(name: str, value: np.ndarray) -> dict[str, Any]:
    return {"name": name, "data_type": helper.np_dtype_to_tensor_dtype(value.dtype), "dims": value.shape}


def _little_endian(value: np.ndarray) -> np.ndarray:
    return value.astype(value.dtype.newbyteorder("<"), copy=False)


def _key(message: Any, field: str) -> bytes:
    """The key of a field that has a length: its number, and 2 for "length-delimited"."""
    return _varint(message.DESCRIPTOR.fields_by_name[field].number << 3 | 2)


def _varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; the high bit says that more follow."""
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*digits, value])
