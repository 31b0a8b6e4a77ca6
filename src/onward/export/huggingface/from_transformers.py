"""Exports Hugging Face models: to a file, to bytes, to a folder for `onward.load`, or for training.

The public calls only. Loading is in `find_model`, calling a model in `wrappers`, the exporter and the comparison
with torch in `trace`, quantization in `quantize`, and writing in `folder`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from os import PathLike, fspath
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

from onward import contract
from onward.contract import EXPORT_OPSET
from onward.errors import ExportError
from onward.export.huggingface import trace
from onward.export.huggingface.cards import describe
from onward.export.huggingface.find_model import Source, load_source
from onward.export.huggingface.folder import METADATA_KEY, MODEL, PIPELINE, staged, write_card
from onward.export.huggingface.task_losses import with_loss
from onward.export.huggingface.wrappers import adapt
from onward.export.parity import Report, merge
from onward.export.quantize.quantizer import measure, scheme_name
from onward.export.quantize.quantizer import quantize as quantize_model
from onward.graph.gate import read_proto
from onward.info.metadata import info_from_card, info_to_metadata
from onward.model_metadata import read_names

if TYPE_CHECKING:
    from onward.export.huggingface.traceable import Traceable

__all__ = ["HFOnnx", "artifacts_from_transformers", "from_transformers"]


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
    trace.check_opset(opset)
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
    trace.check_opset(opset)
    from onward import artifacts

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
            path = None
            if trace.weight_bytes(traceable.module) > trace.ONE_FILE:
                path = Path(stack.enter_context(TemporaryDirectory(prefix="onward-"))) / MODEL
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
                artifact_directory=directory,
                additional_output_names=[name for name in traceable.outputs if name != "loss"],
                metadata={**about, **(options.pop("metadata", None) or {})},
                **options,
            )
    with staged(Path(directory) / PIPELINE, single=False) as stage:
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
            large = trace.weight_bytes(traceable.module) > trace.ONE_FILE
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

    model, traceable = trace.trace(traceable, opset=opset, metadata=metadata)
    card = describe(source, traceable.inputs, traceable.outputs, opset=opset)
    subject = f"{source.origin} ({source.task.name}, opset {opset})"
    report = None
    if settings.check:
        report = trace.check_parity(model, traceable, rtol=settings.rtol, atol=settings.atol)
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
