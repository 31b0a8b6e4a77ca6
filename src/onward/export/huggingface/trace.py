"""Exports a traceable Hugging Face model to ONNX with the TorchScript exporter, and compares it with torch."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from os import fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir
import torch

from onward.contract import EXPORT_OPSET
from onward.errors import ExportError, ModelError
from onward.export.huggingface.embed_weights import add_weights, serialized, take_weights
from onward.export.parity import Report, compare, merge
from onward.export.torch import torchscript
from onward.graph.dialect.lower import lower
from onward.graph.dialect.normalize import normalize

if TYPE_CHECKING:
    from onward.export.huggingface.traceable import Traceable

__all__ = ["ONE_FILE", "check_opset", "check_parity", "trace", "weight_bytes"]

ONE_FILE = 2**31 - 2**24
"""Bytes of weights that still fit in one protobuf message, with room for the graph."""


def check_opset(opset: int) -> None:
    """Reject an opset that the exporter does not support."""
    if opset not in torchscript.OPSETS:
        known = torchscript.OPSETS
        raise ValueError(f"unsupported opset {opset}: choose {known.start} to {known.stop - 1}")


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
    kept = {value.name for value in model.graph.input}
    used = replace(traceable, inputs={name: axes for name, axes in traceable.inputs.items() if name in kept})
    weights = take_weights(model, traceable.module, inputs=list(used.inputs))
    _fix_axes(model, traceable)
    if metadata is not None:
        onnx.helper.set_model_props(model, dict(metadata(used)))
    if weight_bytes(traceable.module) <= ONE_FILE:
        return serialized(model, weights), used
    add_weights(model, weights)
    return model, used


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
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    names = list(traceable.outputs)
    reports = []
    for case in traceable.cases:
        shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in list(case.items())[:1])
        with torch.no_grad():
            reference = traceable.module(*case.values())
        got = session.run(names, {name: case[name].numpy() for name in traceable.inputs})
        expected = {name: value.numpy() for name, value in zip(names, reference)}
        found = dict(zip(names, map(np.asarray, got)))
        kept = {name: _kept(traceable, case, name, expected[name], found[name]) for name in names}
        left_out = {name: int(np.count_nonzero(~mask)) for name, mask in kept.items() if mask is not None}
        notes = tuple(
            f"{name} at {shapes}: {count} positions of padding not compared"
            for name, count in left_out.items()
            if count
        )
        report = compare(
            {name: value if kept[name] is None else value[kept[name]] for name, value in expected.items()},
            {name: value if kept[name] is None else value[kept[name]] for name, value in found.items()},
            rtol=rtol,
            atol=atol,
            case=shapes,
        )
        reports.append(merge(report, notes=notes))
    return merge(*reports)


def _kept(
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


def _export(traceable: Traceable, *, opset: int) -> onnx.ModelProto:
    """The graph at this opset; below 13 a newer one converted, for the tracer's own forms there are partly invalid."""
    if opset >= 13:
        return _traced(traceable, opset=opset)
    try:
        return ir.to_proto(lower(normalize(_traced(traceable, opset=EXPORT_OPSET)), opset))
    except ModelError as lacking:
        try:
            return _traced(traceable, opset=opset)
        except ExportError as error:
            raise ExportError(f"{error}\nA newer export cannot be converted either: {lacking}") from None


def _traced(traceable: Traceable, *, opset: int) -> onnx.ModelProto:
    """The graph alone, with weights as inputs: carrying them through the exporter takes a third of its time."""
    with warnings.catch_warnings(), torch.no_grad(), _without_late_inference():
        # Tracer warnings about Python branches: the parity check at other sizes is what settles them.
        warnings.simplefilter("ignore")
        return torchscript.trace(
            traceable.module,
            tuple(traceable.example.values()),
            inputs=dict(traceable.inputs),
            outputs=dict(traceable.outputs),
            opset=opset,
        )


@contextmanager
def _without_late_inference() -> Iterator[None]:
    """Keep the exporter from inferring types twice more when every node is written.

    It takes a quarter of an export, since the weights are serialized for it, and changes nothing in the graph:
    outputs have their traced shapes, and `_fix_axes` names the axes.
    """
    backend: Any = torch._C
    name = "_jit_pass_onnx_graph_shape_type_inference"
    infer = getattr(backend, name, None)
    if infer is None:  # another version of torch, which takes its time
        yield
        return
    setattr(backend, name, lambda *arguments: None)
    try:
        yield
    finally:
        setattr(backend, name, infer)


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
