"""Exports a traceable Hugging Face model to ONNX with the TorchScript exporter, and compares it with torch."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from os import fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx import helper

from onward.contract import EXPORT_OPSET
from onward.errors import ExportError, ModelError
from onward.export.parity import Report, compare, merge
from onward.export.torch import torchscript
from onward.export.torch.replace import replaced
from onward.export.transposes import common_transposition, read_directly
from onward.graph.dialect.lower import lower
from onward.graph.dialect.normalize import normalize

if TYPE_CHECKING:
    from onward.export.huggingface.traceable import Traceable

ONE_FILE = 2**31 - 2**24
"""Bytes of weights that still fit in one protobuf message, with room for the graph."""


def check_opset(opset: int) -> None:
    """Reject an opset that the exporter does not support."""
    if opset not in torchscript.OPSETS:
        opsets = torchscript.OPSETS
        raise ValueError(f"unsupported opset {opset}: choose {opsets.start} to {opsets.stop - 1}")


def weight_bytes(module: torch.nn.Module) -> int:
    """Bytes that the module's distinct tensors take; tied weights count once."""
    tensors = {t.data_ptr(): t for t in (*module.parameters(), *module.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def trace(
    traceable: Traceable, *, opset: int, metadata: Callable[[Traceable], Mapping[str, str]] | None = None
) -> tuple[bytes | onnx.ModelProto, Traceable]:
    """Export to ONNX: bytes, or for a model over 2 GB the model in memory, which no bytes can hold.

    Returned with it is what was really exported: an input that the model accepts and ignores is left out, as
    DeBERTa without segment embeddings ignores `token_type_ids`. `metadata` gives entries of the model for it.
    """
    model = _export(traceable, opset=opset)
    graph_inputs = {value.name for value in model.graph.inputs}
    used = replace(
        traceable, inputs={name: axes for name, axes in traceable.inputs.items() if name in graph_inputs}
    )
    weights = take_weights(model, traceable.module, inputs=used.inputs)
    proto = ir.to_proto(model)
    _fix_axes(proto, traceable)
    if metadata is not None:
        onnx.helper.set_model_props(proto, dict(metadata(used)))
    if weight_bytes(traceable.module) <= ONE_FILE:
        return serialized(proto, weights), used
    add_weights(proto, weights)
    return proto, used


def check_parity(model: bytes | onnx.ModelProto, traceable: Traceable, *, rtol: float, atol: float) -> Report:
    """Run torch and onnxruntime on the same inputs at several sizes and report how far apart they are."""
    if not isinstance(model, bytes):
        with tempfile.TemporaryDirectory(prefix="onward-parity-") as folder:
            path = Path(folder) / "model.onnx"
            # A copy: saving with the weights outside takes them out of the message that is saved.
            clone = onnx.ModelProto()
            clone.CopyFrom(model)
            onnx.save(clone, path, save_as_external_data=True, location="model.onnx.data")
            return _compare(fspath(path), traceable, rtol=rtol, atol=atol)
    return _compare(model, traceable, rtol=rtol, atol=atol)


def _compare(model: bytes | str, traceable: Traceable, *, rtol: float, atol: float) -> Report:
    from onward.ort_session import create_session, quiet_options

    session = create_session(model, quiet_options(threads=torch.get_num_threads()))
    names = list(traceable.outputs)
    reports = []
    for case in traceable.cases:
        shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in list(case.items())[:1])
        with torch.no_grad():
            reference = traceable.module(*case.values())
        got = session.run(names, {name: case[name].numpy() for name in traceable.inputs})
        expected = {name: value.numpy() for name, value in zip(names, reference)}
        outputs = dict(zip(names, map(np.asarray, got)))
        masks = {name: _unpadded_mask(traceable, case, name, expected[name], outputs[name]) for name in names}
        left_out = {name: int(np.count_nonzero(~mask)) for name, mask in masks.items() if mask is not None}
        notes = tuple(
            f"{name} at {shapes}: {count} positions of padding not compared"
            for name, count in left_out.items()
            if count
        )
        report = compare(
            {name: value if masks[name] is None else value[masks[name]] for name, value in expected.items()},
            {name: value if masks[name] is None else value[masks[name]] for name, value in outputs.items()},
            rtol=rtol,
            atol=atol,
            case=shapes,
        )
        reports.append(merge(report, notes=notes))
    return merge(*reports)


def _unpadded_mask(
    traceable: Traceable, case: Mapping[str, torch.Tensor], name: str, theirs: np.ndarray, ours: np.ndarray
) -> np.ndarray | None:
    """The positions of an output to compare, [batch, sequence]; None where all are.

    Padding is left out: nothing uses its values, and torch itself is ten times as far from float64 there as at real
    tokens. A position where one of the two is non-finite is always compared.
    """
    axes, mask = traceable.inputs.get("attention_mask"), case.get("attention_mask")
    if axes is None or mask is None or mask.ndim != 2 or ours.shape != theirs.shape:
        return None
    if any(traceable.outputs[name].get(axis) != axes.get(axis) for axis in (0, 1)):
        return None
    beyond = tuple(range(2, ours.ndim))
    strange = ~(np.isfinite(ours) & np.isfinite(theirs))
    return (mask.numpy() != 0) | (strange.any(axis=beyond) if beyond else strange)


def _export(traceable: Traceable, *, opset: int) -> ir.Model:
    """The graph at this opset; below 13 a newer one converted, for the tracer's own forms there are partly invalid."""
    if opset >= 13:
        return _traced(traceable, opset=opset)
    try:
        return lower(normalize(_traced(traceable, opset=EXPORT_OPSET)), opset)
    except ModelError as lacking:
        try:
            return _traced(traceable, opset=opset)
        except ExportError as error:
            raise ExportError(f"{error}\nA newer export cannot be converted either: {lacking}") from None


def _traced(traceable: Traceable, *, opset: int) -> ir.Model:
    """The graph alone, with weights as inputs: carrying them through the exporter takes a third of its time."""
    # The exporter would infer types twice more when every node is written: a quarter of an export, since the weights
    # are serialized for it. Outputs have their traced shapes without it, and `_fix_axes` names the axes.
    infer = (torch._C, "_jit_pass_onnx_graph_shape_type_inference", lambda *arguments: None)
    with warnings.catch_warnings(), torch.no_grad(), replaced(infer):
        # Tracer warnings about Python branches: the parity check at other sizes is what settles them.
        warnings.simplefilter("ignore")
        proto = torchscript.trace(
            traceable.module,
            tuple(traceable.example.values()),
            inputs=dict(traceable.inputs),
            outputs=dict(traceable.outputs),
            opset=opset,
        )
    return ir.from_proto(proto)


def _fix_axes(model: onnx.ModelProto, traceable: Traceable) -> None:
    """Name every dynamic axis and give every other its size.

    The exporter invents names such as "Divembeddings_dim_1" for sizes that it could not infer.
    """
    ports = {**traceable.inputs, **traceable.outputs}
    wrong = [
        (value.name, index, dim)
        for value in (*model.graph.input, *model.graph.output)
        for index, dim in enumerate(value.type.tensor_type.shape.dim)
        if dim.dim_param != ports.get(value.name, {}).get(index, "")
    ]
    if not wrong:
        return
    with torch.no_grad():
        answers = traceable.module(*traceable.example.values())
    shapes = {name: value.shape for name, value in traceable.example.items()}
    shapes |= {name: value.shape for name, value in zip(traceable.outputs, answers)}
    for name, index, dim in wrong:
        if index in ports[name]:
            dim.dim_param = ports[name][index]
        else:
            dim.dim_value = shapes[name][index]


# --- Put a torch module's weights into a graph that was exported without them, ready for inference.
#
# Knows ONNX protobufs and torch tensors. A matrix that is only ever read transposed, as every Linear's is, is
# stored transposed: the transposition would cost time at every load and hide the matrix from quantizers. One
# that is also read as it is, such as an output layer tied to its embedding, is stored once and transposed by
# the graph.


def take_weights(
    model: ir.Model, module: torch.nn.Module, *, inputs: Collection[str]
) -> dict[str, np.ndarray]:
    """Remove every graph input that is not among `inputs`; the module's tensors to be stored in their place."""
    graph = model.graph
    tensors = dict(module.named_parameters(remove_duplicate=False))
    tensors |= dict(module.named_buffers(remove_duplicate=False))
    values = [value for value in graph.inputs if value.name not in inputs]
    unknown = [value.name or "" for value in values if value.name not in tensors]
    if unknown:
        raise ExportError(f"the exporter made inputs of its own: {', '.join(unknown)}")
    weights: dict[str, np.ndarray] = {}
    for value in values:
        name = value.name or ""
        array = tensors[name].detach().cpu().numpy()
        graph.inputs.remove(value)
        perm = common_transposition(value)
        if perm is not None:
            read_directly(value)
            # Under another name: whoever looks for the parameter must not find its transpose.
            name, array = f"{name}.transposed", array.transpose(perm)
            value.name = name
        weights[name] = array
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
    outer = onnx.ModelProto()
    outer.CopyFrom(model)
    outer.ClearField("graph")
    before = outer.SerializeToString(deterministic=True) + _key(onnx.ModelProto, "graph")
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
