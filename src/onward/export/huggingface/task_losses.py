"""The loss that each Hugging Face task is fine-tuned with, added to a traceable model.

Knows tasks and torch's losses. The loss becomes the first output and the labels become inputs, so that the
training graph needs nothing added. Labels of -100 are ignored, as everywhere in transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from onward.errors import ExportError
from onward.export.huggingface.find_model import Source
from onward.export.huggingface.tasks import Axes
from onward.export.huggingface.traceable import Adapter, Traceable

__all__ = ["with_loss"]

_Outputs = Mapping[str, Tensor]


def with_loss(source: Source, traceable: Traceable) -> Traceable:
    """The same model with label inputs and a scalar `loss` before its outputs."""
    labels, loss = _objective(source, traceable)
    inner = traceable.module
    assert isinstance(inner, Adapter)
    names, outputs = list(traceable.inputs), list(traceable.outputs)

    def run(batch: dict[str, Tensor]) -> Sequence[Tensor]:
        values = inner.function({name: batch[name] for name in names})
        return (loss(dict(zip(outputs, values)), batch), *values)

    module = Adapter(inner, [*names, *labels], run)
    return Traceable(
        module=module,
        inputs={**traceable.inputs, **{name: axes for name, (axes, _) in labels.items()}},
        outputs={"loss": {}, **traceable.outputs},
        example={**traceable.example, **{name: value for name, (_, value) in labels.items()}},
        cases=(),
    )


def _objective(
    source: Source, traceable: Traceable
) -> tuple[Mapping[str, tuple[Axes, Tensor]], Callable[[_Outputs, Mapping[str, Tensor]], Tensor]]:
    task = source.task.name
    rows = next(iter(traceable.example.values())).shape[0]
    batch: Axes = {0: "batch"}
    if task == "question-answering":
        positions = torch.arange(rows) % 3 + 1
        example = {"start_positions": (batch, positions), "end_positions": (batch, positions.flip(0))}
        return example, _span
    if task in ("text-classification", "image-classification", "audio-classification"):
        classes = int(source.model.config.num_labels)
        kind = getattr(source.model.config, "problem_type", None)
        if kind is None:
            kind = "regression" if classes == 1 else "single_label_classification"
        if kind == "single_label_classification":
            return {"labels": (batch, torch.arange(rows) % classes)}, _single_label
        example = torch.linspace(0, 1, rows * classes).reshape(rows, classes)
        return {"labels": (batch, example)}, _regression if kind == "regression" else _multi_label
    if task in ("token-classification", "fill-mask", "text-generation", "text2text"):
        key = "decoder_input_ids" if task == "text2text" else "input_ids"
        ids = traceable.example[key]
        classes = int(source.model.config.num_labels if task == "token-classification" else 0)
        example = ids % classes if classes else ids.clone()
        # Some labels to ignore, so that the example has them as real ones do.
        example[:, 0] = -100
        return {
            "labels": (traceable.inputs[key], example)
        }, _shifted if task == "text-generation" else _tokens
    if task == "zero-shot-image-classification":
        return {}, _contrast
    raise ExportError(f"task {task!r} has no loss of its own: pass loss=… (for example LossType.MSELoss)")


def _single_label(outputs: _Outputs, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(outputs["logits"], batch["labels"])


def _multi_label(outputs: _Outputs, batch: Mapping[str, Tensor]) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs["logits"], batch["labels"])


def _regression(outputs: _Outputs, batch: Mapping[str, Tensor]) -> Tensor:
    return F.mse_loss(outputs["logits"], batch["labels"])


def _tokens(outputs: _Outputs, batch: Mapping[str, Tensor]) -> Tensor:
    logits = outputs["logits"]
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


def _shifted(outputs: _Outputs, batch: Mapping[str, Tensor]) -> Tensor:
    """Each position predicts the next token; labels are the input's own ids, shifted here."""
    following = {"labels": batch["labels"][:, 1:]}
    return _tokens({"logits": outputs["logits"][:, :-1]}, following)


def _span(outputs: _Outputs, batch: Mapping[str, Tensor]) -> Tensor:
    start = F.cross_entropy(outputs["start_logits"], batch["start_positions"], ignore_index=-100)
    end = F.cross_entropy(outputs["end_logits"], batch["end_positions"], ignore_index=-100)
    return (start + end) / 2


def _contrast(outputs: _Outputs, batch: Mapping[str, Tensor]) -> Tensor:
    """Image i belongs to text i, among all of the batch, and text i to image i."""
    logits = outputs["logits_per_image"]
    pairs = torch.arange(logits.shape[0])
    return (F.cross_entropy(logits, pairs) + F.cross_entropy(logits.t(), pairs)) / 2
