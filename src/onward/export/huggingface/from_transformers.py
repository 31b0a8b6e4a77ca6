"""Exports Hugging Face models: to a file, to bytes, to a folder for `onward.load`, or for training.

Loading is in `find_model`, calling a model in `wrappers`, quantization in `quantize`, and writing in `folder`; the
exporter and the comparison with torch are below the public calls.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx import helper

from onward import contract
from onward.contract import EXPORT_OPSET
from onward.errors import ExportError, ModelError
from onward.export.huggingface.cards import describe
from onward.export.huggingface.find_model import Source, load_source
from onward.export.huggingface.folder import METADATA_KEY, MODEL, PIPELINE, staged, write_card
from onward.export.huggingface.task_losses import with_loss
from onward.export.huggingface.wrappers import adapt
from onward.export.parity import Report, compare, merge
from onward.export.quantize.quantizer import measure, scheme_name
from onward.export.quantize.quantizer import quantize as quantize_model
from onward.export.torch.replace import replaced
from onward.export.torch.tracers import OPSETS, trace_torchscript
from onward.export.transposes import common_transposition, read_directly
from onward.graph.dialect.lower import lower
from onward.graph.dialect.normalize import normalize
from onward.graph.gate import read_proto
from onward.info.metadata import info_from_card, info_to_metadata
from onward.model_metadata import read_names

if TYPE_CHECKING:
    from onward.export.huggingface.traceable import Traceable

__all__ = ["HFOnnx", "artifacts_from_transformers", "from_transformers"]


_ONE_FILE = 2**31 - 2**24
"""Bytes of weights that still fit in one protobuf message, with room for the graph."""


def from_transformers(
    model: Any,
    task: str = "default",
    path: str | PathLike[str] | None = None,
    quantize: bool | str = False,
    opset: int = EXPORT_OPSET,
    *,
    training: bool = False,
    pooling: str | None = None,
    normalize: bool | None = None,
    check: bool = True,
    rtol: float = 1e-5,
    atol: float = 1e-5,
) -> bytes | Path:
    """Export a model id, a folder or a (model, tokenizer) tuple to ONNX, checked against torch.

    `path` is a file when it ends in `.onnx`, else a folder with the model, its tokenizer and `onward.json`,
    which `onward.load` loads; without it the model is returned as bytes. `task="auto"` reads the task
    from the configuration. `pooling` ("mean", "cls", "max", or several joined by "+") and `normalize`
    override a sentence-transformers folder's own settings. `training=True` gives a forward model for
    `generate_artifacts`: dropout active, parameters under their own names.

    Raises `ParityError` when an output differs from torch by more than `atol + rtol * max|output|`;
    `check=False` skips the comparison.

    >>> from_transformers("sentence-transformers/all-MiniLM-L6-v2", "pooling", "minilm").name
    'minilm'
    """
    scheme = scheme_name(quantize)
    if training and scheme:
        raise ValueError("a model to train cannot be quantized: quantize its inference export instead")
    _check_opset(opset)
    settings = _Settings(scheme, opset, check, rtol, atol)
    if path is None:
        source = load_source(model, task, pooling=pooling, normalize=normalize)
        exported = _export(source, settings, training=training)
        if not isinstance(exported.model, bytes):
            raise _too_large(source)
        small = exported.model if scheme is None else quantize_model(exported.model, scheme)
        assert isinstance(small, bytes)
        return small
    target = Path(path)
    with staged(target) as stage:
        source = load_source(model, task, pooling=pooling, normalize=normalize)
        single = target.suffix == ".onnx"
        if single or training:
            file = stage / (target.name if single else MODEL)
            exported = {file.name: _export(source, settings, file, training=training)}
        else:
            exported = _export_parts(source, settings)
        for name, part in exported.items():
            _write_model(part, scheme, stage / name)
        if not single:
            _write_folder(exported, scheme, stage, source)
    return target


def artifacts_from_transformers(
    model: Any,
    task: str = "auto",
    directory: str | PathLike[str] = "artifacts",
    *,
    loss: Any = None,
    optimizer: Any = None,
    opset: int = EXPORT_OPSET,
    requires_grad: Sequence[str] | None = None,
    frozen_params: Sequence[str] | None = None,
    labels: Sequence[str] | None = None,
    max_length: int | None = None,
    pooling: str | None = None,
    normalize: bool | None = None,
    rtol: float = 1e-5,
    atol: float = 1e-5,
    artifact_options: Mapping[str, Any] | None = None,
) -> Path:
    """Write training artifacts of a Hugging Face model, with the loss of its task; return the directory.

    `labels` names the classes of a classifier; a folder without a head of that many gets a new one, random.
    The directory's `pipeline` folder holds the tokenizer and what `save_pipeline` needs after training;
    `max_length` is how many tokens that pipeline will read, where it shall be fewer than the model can.

    The loss is part of the graph and labels are inputs: `labels` (class ids, or ids per token with -100
    ignored; for text-generation the input ids themselves), `start_positions` and `end_positions` for question
    answering. Another loss, such as `losses.multiple_negatives` on pooled embeddings, can be given instead. The task's
    own outputs stay available beside the loss. Which parameters train follows `requires_grad` of the model
    unless named. The default optimizer is AdamW. `artifact_options` go to `generate_artifacts`.

    >>> artifacts_from_transformers("my-bert", "text-classification", "artifacts").name
    'artifacts'
    """
    _check_opset(opset)
    from onward import artifacts
    from onward.artifacts.write import older_members

    source = load_source(
        model, task, pooling=pooling, normalize=normalize, labels=labels, max_length=max_length
    )
    if loss is None and source.task.loss in ("picture", "depth"):
        # Labels are pictures too, whose sizes would have to follow the input's: training has one size.
        source = replace(source, task=replace(source.task, sizes="fixed"))
    with adapt(source, training=True) as traceable:
        card = describe(source, traceable.inputs, traceable.outputs, opset=opset)
        sample = _sample(traceable) if source.task.kind == "text" and source.tokenizer is not None else None
        about, options = info_to_metadata(info_from_card(card, "the export")), dict(artifact_options or {})
        if loss is None:
            traceable = with_loss(source, traceable)
        with ExitStack() as stack:
            # the tokenizer is one of the set: a new one beside old models would read other tokens
            target = Path(directory)
            aside = stack.enter_context(staged(target, single=False, older=older_members(target)))
            path = None
            if _weight_bytes(traceable.module) > _ONE_FILE:
                path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="onward-"))) / MODEL
            forward = _for_training(traceable, path, _Settings(None, opset, True, rtol, atol))
            recorded = _properties(_graph_of(forward))
            recorded_trainable = read_names(recorded, contract.REQUIRES_GRAD)
            still = read_names(recorded, contract.FROZEN_PARAMS)
            trainable = list(recorded_trainable if requires_grad is None else requires_grad)
            frozen = still if frozen_params is None else frozen_params
            artifacts.generate_artifacts(
                forward,
                requires_grad=trainable,
                frozen_params=[name for name in frozen if name not in set(trainable)],
                loss=loss,
                optimizer=artifacts.OptimType.AdamW if optimizer is None else optimizer,
                artifact_directory=aside,
                additional_output_names=[name for name in traceable.outputs if name != "loss"],
                metadata={**about, **(options.pop("metadata", None) or {})},
                **options,
            )
            with staged(aside / PIPELINE, single=False) as stage:
                _save_companions(source, stage)
                write_card({**card, "sample": sample}, stage)
    return Path(directory)


class HFOnnx:
    """Export with the signature of txtai's pipeline of the same name: always one file, or bytes.

    >>> onnx_bytes = HFOnnx()("my-bert", "pooling", quantize=True)
    """

    def __call__(
        self,
        path: Any,
        task: str = "default",
        output: str | PathLike[str] | None = None,
        quantize: bool | str = False,
        opset: int = 14,
    ) -> bytes | str:
        """Export `path` for `task` to the file `output`, and return that path, or the model as bytes."""
        if output is None or Path(output).suffix == ".onnx":
            exported = from_transformers(path, task, output, quantize, opset)
            return exported if isinstance(exported, bytes) else fspath(exported)
        # Other endings mean a folder to from_transformers, and a file here.
        target = Path(output)
        exported = from_transformers(path, task, None, quantize, opset)
        assert isinstance(exported, bytes)
        with staged(target, single=True) as stage:
            (stage / target.name).write_bytes(exported)
        return fspath(output)


@dataclass(frozen=True)
class _Settings:
    """How to export: the scheme to quantize by, the opset, and whether and how closely to compare with torch."""

    scheme: str | None
    opset: int
    check: bool
    rtol: float
    atol: float


@dataclass(frozen=True)
class _Exported:
    """An export that has passed its comparison with torch, still in float32."""

    model: bytes | onnx.ModelProto | Path
    """Whole, in memory because it is too large for bytes, or already in its place."""
    card: dict[str, Any]
    parity: Report | None
    feeds: Sequence[Mapping[str, np.ndarray]]


def _metadata(card: Mapping[str, Any], scheme: str | None) -> dict[str, str]:
    """The card for the file's own metadata, without measured figures: two exports are identical."""
    return {METADATA_KEY: json.dumps({**card, "quantize": scheme}, sort_keys=True)}


def _export(source: Source, settings: _Settings, path: Path | None = None, *, training: bool) -> _Exported:
    with adapt(source, training=training) as traceable:
        if training:
            card = describe(source, traceable.inputs, traceable.outputs, opset=settings.opset)
            card["training"] = True
            if len(card.get("labels") or ()) == 1 and card["problem_type"] is None:
                card["problem_type"] = "regression"  # what the model's own loss takes one label for
            large = _weight_bytes(traceable.module) > _ONE_FILE
            if large and path is None:
                raise _too_large(source)
            forward = _for_training(traceable, path if large else None, settings)
            proto = _graph_of(forward)
            used_inputs = {value.name for value in proto.graph.input}
            card["inputs"] = {name: axes for name, axes in card["inputs"].items() if name in used_inputs}
            onnx.helper.set_model_props(proto, {**_properties(proto), **_metadata(card, None)})
            if isinstance(forward, Path):
                onnx.save(proto, forward)
                return _Exported(forward, card, None, ())
            return _Exported(proto.SerializeToString(deterministic=True), card, None, ())

        return _export_one(source, traceable, settings)


def _export_parts(source: Source, settings: _Settings) -> dict[str, _Exported]:
    """The graphs of a folder by file name: one, or several where a model is exported in parts."""
    with adapt(source) as traceable:
        parts = {MODEL: traceable} if traceable.parts is None else traceable.parts()
        return {name: _export_one(source, part, settings) for name, part in parts.items()}


def _export_one(source: Source, traceable: Traceable, settings: _Settings) -> _Exported:
    opset = settings.opset

    def metadata(used: Traceable) -> dict[str, str]:
        return _metadata(describe(source, used.inputs, used.outputs, opset=opset), settings.scheme)

    model, traceable = _trace(traceable, opset=opset, metadata=metadata)
    card = describe(source, traceable.inputs, traceable.outputs, opset=opset)
    subject = f"{source.origin} ({source.task.name}, opset {opset})"
    report = None
    if settings.check:
        report = _check_parity(model, traceable, rtol=settings.rtol, atol=settings.atol)
        report.raise_if_failed(subject)
    feeds = [{name: case[name].numpy() for name in traceable.inputs} for case in traceable.cases]
    return _Exported(model, card, report, feeds)


def _sample(traceable: Traceable) -> dict[str, list[Any]]:
    """A padded batch of texts as the tokenizer gives it: what `save_pipeline` proves its model on."""
    return {name: value.tolist() for name, value in traceable.cases[-1].items()}


def _for_training(traceable: Traceable, path: Path | None, settings: _Settings) -> onnx.ModelProto | Path:
    """The forward model; in a file, with its weights beside it, where a path is given."""
    from onward.export.torch.from_torch import from_torch

    return from_torch(
        traceable.module,
        tuple(traceable.example[name] for name in traceable.inputs),
        path,
        external_data=path is not None,
        training=True,
        opset=settings.opset,
        input_names=list(traceable.inputs),
        output_names=list(traceable.outputs),
        dynamic_axes={**traceable.inputs, **traceable.outputs},
        check=settings.check,
        rtol=settings.rtol,
        atol=settings.atol,
    )


def _graph_of(model: onnx.ModelProto | Path) -> onnx.ModelProto:
    """The model without the weights that a file has beside it."""
    return read_proto(model) if isinstance(model, Path) else model


def _too_large(source: Source) -> ExportError:
    return ExportError(
        f"{source.origin}: over 2 GB of weights do not fit in bytes; pass path=… to write a file "
        "with its weights beside it"
    )


def _write_model(exported: _Exported, scheme: str | None, path: Path) -> None:
    model = exported.model
    if isinstance(model, Path):
        return
    if isinstance(model, bytes):
        if scheme is not None:
            model = quantize_model(model, scheme)
            assert isinstance(model, bytes)
        path.write_bytes(model)
        return
    onnx.save(model, path, save_as_external_data=True, location=f"{path.name}.data")
    if scheme is not None:
        large = path.rename(path.with_name(f"float32-{path.name}"))
        quantize_model(large, scheme, path=path)
        large.unlink()


def _properties(model: onnx.ModelProto) -> dict[str, str]:
    return {prop.key: prop.value for prop in model.metadata_props}


def _save_companions(source: Source, folder: Path) -> None:
    """The tokenizer and the processor in Hugging Face's own files, which others read too."""
    if source.tokenizer is not None:
        source.tokenizer.save_pretrained(fspath(folder))
    if isinstance(source.processor, Mapping):
        text = json.dumps(source.processor, indent=2, default=str)
        (folder / "preprocessor_config.json").write_text(text, encoding="utf-8")
    elif source.processor is not None:
        source.processor.save_pretrained(fspath(folder))


def _write_folder(exported: Mapping[str, _Exported], scheme: str | None, stage: Path, source: Source) -> None:
    _save_companions(source, stage)
    parts = list(exported.values())
    card: dict[str, Any] = {**parts[0].card, "quantize": scheme}
    if len(parts) > 1:
        card["parts"] = {
            name: {"inputs": part.card["inputs"], "outputs": part.card["outputs"]}
            for name, part in exported.items()
        }
        # What the whole takes is what its first part takes; what it gives, its last.
        card["outputs"] = parts[-1].card["outputs"]
    reports = [part.parity for part in parts if part.parity is not None]
    if reports:
        report = merge(*reports)
        card["parity"] = {**report.to_dict(), "notes": list(report.notes)}
    measured = [
        measure(part.model, stage / name, part.feeds)
        for name, part in exported.items()
        if scheme is not None and isinstance(part.model, bytes)
    ]
    if len(measured) == 1:
        card["quantization"] = measured[0].to_dict()
    elif measured:
        card["quantization"] = {name: report.to_dict() for name, report in zip(exported, measured)}
    write_card(card, stage)


# ---- the exporter, and the comparison with torch ------------------------------------------------------------


def _check_opset(opset: int) -> None:
    """Reject an opset that the exporter does not support."""
    if opset not in OPSETS["torchscript"]:
        opsets = OPSETS["torchscript"]
        raise ValueError(f"unsupported opset {opset}: choose {opsets.start} to {opsets.stop - 1}")


def _weight_bytes(module: torch.nn.Module) -> int:
    """Bytes that the module's distinct tensors take; tied weights count once."""
    tensors = {t.data_ptr(): t for t in (*module.parameters(), *module.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _trace(
    traceable: Traceable, *, opset: int, metadata: Callable[[Traceable], Mapping[str, str]] | None = None
) -> tuple[bytes | onnx.ModelProto, Traceable]:
    """Export to ONNX: bytes, or for a model over 2 GB the model in memory, which no bytes can hold.

    Returned with it is what was really exported: an input that the model accepts and ignores is left out, as
    DeBERTa without segment embeddings ignores `token_type_ids`. `metadata` gives entries of the model for it.
    """
    model = _graph_at_opset(traceable, opset=opset)
    graph_inputs = {value.name for value in model.graph.inputs}
    used = replace(
        traceable, inputs={name: axes for name, axes in traceable.inputs.items() if name in graph_inputs}
    )
    # Weights are put in last: until then the graph is small, and every step over it quick.
    weights = _take_weights(model, traceable.module, inputs=used.inputs)
    proto = ir.to_proto(model)
    _fix_axes(proto, traceable)
    if metadata is not None:
        onnx.helper.set_model_props(proto, dict(metadata(used)))
    if _weight_bytes(traceable.module) <= _ONE_FILE:
        return serialized(proto, weights), used
    add_weights(proto, weights)
    return proto, used


def _check_parity(
    model: bytes | onnx.ModelProto, traceable: Traceable, *, rtol: float, atol: float
) -> Report:
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

    # optimized, as users run it: a fusion that is wrong must show here
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


def _graph_at_opset(traceable: Traceable, *, opset: int) -> ir.Model:
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
        proto = trace_torchscript(
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


def _take_weights(
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
        # A Linear's weight: transposed once here rather than at every load.
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
