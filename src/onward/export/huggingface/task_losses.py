"""The loss that each Hugging Face task is fine-tuned with, added to a traceable model.

`LOSSES` has one for each name in the table of tasks. The loss becomes the first output and the labels become
inputs, so that the training graph needs nothing added. Labels of -100 are ignored, as everywhere in transformers.
A detector's labels are one for each of its boxes: which box is to find which object is decided before the step,
on the host, by `assign_detections`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from onward.errors import ExportError
from onward.export.huggingface.tasks import Axes
from onward.export.huggingface.traceable import Adapter, Traceable

if TYPE_CHECKING:
    from onward.export.huggingface.find_model import Source

_Outputs = Mapping[str, Tensor]
_Labels = Mapping[str, tuple[Axes, Tensor]]
_Loss = Callable[[_Outputs, Mapping[str, Tensor]], Tensor]
_BATCH: Axes = {0: "batch"}


def with_loss(source: Source, traceable: Traceable) -> Traceable:
    """The same model with label inputs and a scalar `loss` before its outputs."""
    if source.task.loss is None:
        raise ExportError(
            f"task {source.task.name!r} has no loss of its own",
            hint="export it without artifacts and train pairs with onward finetune --task embeddings; or pass loss=…, "
            "such as onward.losses.multiple_negatives: rows of a batch are then the two texts of each pair",
        )
    labels, loss = LOSSES[source.task.loss](source, traceable)
    inner = traceable.module
    assert isinstance(inner, Adapter)
    names, outputs = list(traceable.inputs), list(traceable.outputs)

    def run(batch: dict[str, Tensor]) -> Sequence[Tensor]:
        values = inner.function({name: batch[name] for name in names})
        return (loss(dict(zip(outputs, values)), batch), *values)

    return Traceable(
        module=Adapter(inner, [*names, *labels], run),
        inputs={**traceable.inputs, **{name: axes for name, (axes, _) in labels.items()}},
        outputs={"loss": {}, **traceable.outputs},
        example={**traceable.example, **{name: value for name, (_, value) in labels.items()}},
        cases=(),
    )


def _rows(traceable: Traceable) -> int:
    return next(iter(traceable.example.values())).shape[0]


def _outputs(traceable: Traceable) -> dict[str, Tensor]:
    """The model's outputs for its example: labels are shaped like them."""
    with torch.no_grad():
        return dict(zip(traceable.outputs, traceable.module(*traceable.example.values())))


def _classes(source: Source, traceable: Traceable) -> tuple[_Labels, _Loss]:
    rows, classes = _rows(traceable), int(source.model.config.num_labels)
    kind = getattr(source.model.config, "problem_type", None)
    if kind is None:
        kind = "regression" if classes == 1 else "single_label_classification"
    # The rule by which transformers itself chooses, where the configuration does not say.
    if kind == "single_label_classification":
        return {"labels": (_BATCH, torch.arange(rows) % classes)}, _single_label
    example = torch.linspace(0, 1, rows * classes).reshape(rows, classes)
    return {"labels": (_BATCH, example)}, _regression if kind == "regression" else _multi_label


def _choice(source: Source, traceable: Traceable) -> tuple[_Labels, _Loss]:
    return {"labels": (_BATCH, torch.arange(_rows(traceable)) % 2)}, _single_label


def _span(source: Source, traceable: Traceable) -> tuple[_Labels, _Loss]:
    positions = torch.arange(_rows(traceable)) % 3 + 1
    example = {"start_positions": (_BATCH, positions), "end_positions": (_BATCH, positions.flip(0))}
    return example, _ends


def _per_token(loss: _Loss, *, key: str = "input_ids", labels: bool = False) -> Callable[..., Any]:
    """A label for each token of `key`: its class, or a token id."""

    def objective(source: Source, traceable: Traceable) -> tuple[_Labels, _Loss]:
        ids = traceable.example[key]
        example = ids % int(source.model.config.num_labels) if labels else ids.clone()
        # Some labels to ignore, so that the example has them as real ones do.
        example[:, 0] = -100
        return {"labels": (traceable.inputs[key], example)}, loss

    return objective


def _frames(source: Source, traceable: Traceable) -> tuple[_Labels, _Loss]:
    """A class for each frame; more labels than there are frames are allowed, and ignored."""
    logits = _outputs(traceable)["logits"]
    rows, frames = logits.shape[0], 4 * logits.shape[1]
    example = torch.arange(rows * frames).reshape(rows, frames) % logits.shape[2]

    def loss(outputs: _Outputs, batch: Mapping[str, Tensor]) -> Tensor:
        return _tokens(outputs, {"labels": batch["labels"][:, : outputs["logits"].shape[1]]})

    return {"labels": ({0: "batch", 1: "label_frames"}, example)}, loss


def _speaker(source: Source, traceable: Traceable) -> tuple[_Labels, _Loss]:
    objective = source.model.objective

    def loss(outputs: _Outputs, batch: Mapping[str, Tensor]) -> Tensor:
        """Cross entropy of cosines, that of the right speaker less a margin, all of them scaled up"""
        cosines = F.normalize(outputs["logits"], dim=1) @ F.normalize(objective.weight, dim=0)
        right = F.one_hot(batch["labels"], cosines.shape[1]).to(cosines.dtype)
        return F.cross_entropy(objective.scale * (cosines - objective.margin * right), batch["labels"])

    speakers = objective.weight.shape[1]
    return {"labels": (_BATCH, torch.arange(_rows(traceable)) % speakers)}, loss


def _ctc(source: Source, traceable: Traceable) -> tuple[_Labels, _Loss]:
    config = source.model.config
    # Token ids, padded with -100. A trace needs as many frames as labels with blanks between; two are enough.
    example = torch.arange(2 * _rows(traceable)).reshape(-1, 2) % (config.vocab_size - 1) + 1
    example[example == config.pad_token_id] = 0 if config.pad_token_id else 1
    reduction, lenient = config.ctc_loss_reduction, bool(config.ctc_zero_infinity)

    def loss(outputs: _Outputs, batch: Mapping[str, Tensor]) -> Tensor:
        logs = F.log_softmax(outputs["logits"], dim=-1)
        return ctc(
            logs, batch["labels"], blank=config.pad_token_id, reduction=reduction, zero_infinity=lenient
        )

    return {"labels": ({0: "batch", 1: "label_sequence"}, example)}, loss


@torch.jit.script
def _alignments(logs: Tensor, states: Tensor, skips: Tensor) -> Tensor:
    """log p of all alignments that end in each state, over all frames; a Loop in the exported graph."""
    # Finite for log 0: -inf less -inf would be NaN in the gradient of logsumexp.
    alpha = torch.full_like(states, 0, dtype=logs.dtype) - 1e30
    alpha = torch.cat([torch.zeros_like(alpha[:, :1]), alpha[:, 1:]], dim=1)
    # Scripted, as a trace would unroll the frames of the example.
    for frame in range(logs.shape[1]):
        emitted = logs[:, frame].gather(1, states)
        one = F.pad(alpha, [1, 0], value=-1e30)[:, :-1]
        two = F.pad(alpha, [2, 0], value=-1e30)[:, :-2] + skips
        alpha = torch.logsumexp(torch.stack([alpha, one, two], dim=2), dim=2) + emitted
    return alpha


def ctc(logs: Tensor, labels: Tensor, *, blank: int, reduction: str, zero_infinity: bool) -> Tensor:
    """−log Σ p(alignment), as `torch.nn.functional.ctc_loss`, which has no export; labels < 0 are padding."""
    lengths = (labels >= 0).sum(1)
    safe = torch.where(labels >= 0, labels, torch.full_like(labels, blank))
    blanks = torch.full_like(safe, blank)
    states = torch.cat([torch.stack([blanks, safe], dim=2).flatten(1), blanks[:, :1]], dim=1)
    before = F.pad(states, [2, 0], value=blank)[:, :-2]
    skips = torch.where((states != blank) & (states != before), 0.0, -1e30).to(logs.dtype)
    alpha = _alignments(logs, states, skips)
    end = (2 * lengths).unsqueeze(1)
    last = alpha.gather(1, torch.cat([end, (end - 1).clamp(min=0)], dim=1))
    last = torch.where(torch.cat([end < 0, end == 0], dim=1), torch.full_like(last, -1e30), last)
    each = -torch.logsumexp(last, dim=1)
    # more labels than frames have no alignment
    each = torch.where(each < 1e29, each, torch.full_like(each, 0.0 if zero_infinity else float("inf")))
    return (each / lengths.clamp(min=1)).mean() if reduction == "mean" else each.sum()


def _pixels(source: Source, traceable: Traceable) -> tuple[_Labels, _Loss]:
    """A class for each pixel of the input; the scores are made as large first."""
    height, width = traceable.example["pixel_values"].shape[-2:]
    classes, ignored = (
        int(source.model.config.num_labels),
        int(getattr(source.model.config, "semantic_loss_ignore_index", 255)),
    )
    rows = _rows(traceable)
    example = (torch.arange(rows * height * width) % classes).reshape(rows, height, width)
    example[:, 0, 0] = ignored

    def loss(outputs: _Outputs, batch: Mapping[str, Tensor]) -> Tensor:
        # the scores, not the labels, are resized: classes have no values in between
        scores = F.interpolate(outputs["logits"], (height, width), mode="bilinear", align_corners=False)
        return F.cross_entropy(scores, batch["labels"], ignore_index=ignored)

    return {"labels": (_BATCH, example)}, loss


def _depth(source: Source, traceable: Traceable) -> tuple[_Labels, _Loss]:
    """Eigen's scale-invariant error of logarithms; labels of 0 or less are holes"""
    example = _outputs(traceable)["predicted_depth"].abs() + 1.0

    def loss(outputs: _Outputs, batch: Mapping[str, Tensor]) -> Tensor:
        labels = batch["labels"]
        valid = (labels > 0).to(labels.dtype)
        # the logarithm of a hole's zero would be infinite, and its product with the mask NaN
        depth = outputs["predicted_depth"].clamp(min=1e-6)
        off = (torch.log(labels.clamp(min=1e-6)) - torch.log(depth)) * valid
        count = valid.sum().clamp(min=1.0)
        mean = off.sum() / count
        return torch.sqrt((off * off).sum() / count - 0.5 * mean * mean)

    return {"labels": (_BATCH, example)}, loss


def _patches(source: Source, traceable: Traceable) -> tuple[_Labels, _Loss]:
    """|pixels − reconstruction| over the hidden patches; the picture itself is the label"""
    size = source.model.config.patch_size
    channels = traceable.example["pixel_values"].shape[1]

    def loss(outputs: _Outputs, batch: Mapping[str, Tensor]) -> Tensor:
        pixels, hidden = batch["pixel_values"], batch["bool_masked_pos"]
        side = pixels.shape[-1] // size
        spread = hidden.reshape(-1, side, side).repeat_interleave(size, 1).repeat_interleave(size, 2)
        mask = spread.unsqueeze(1).to(pixels.dtype)
        off = (pixels - outputs["reconstruction"]).abs() * mask
        return off.sum() / (mask.sum() + 1e-5) / channels

    return {}, loss


def _regressed(output: str, error: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    """The error of an output whose label is shaped like it."""

    def objective(source: Source, traceable: Traceable) -> tuple[_Labels, _Loss]:
        example = _outputs(traceable)[output] + 0.1

        def loss(outputs: _Outputs, batch: Mapping[str, Tensor]) -> Tensor:
            return error(outputs[output], batch["labels"])

        return {"labels": (traceable.outputs[output], example)}, loss

    return objective


def _values(source: Source, traceable: Traceable) -> tuple[_Labels, _Loss]:
    """The mean squared error of a forecast."""
    if getattr(source.model.config, "loss", "mse") not in ("mse", None):
        raise ExportError(
            "a forecast of a distribution has no loss here: set config.loss to 'mse', or pass loss=…"
        )
    example = _outputs(traceable)["prediction_outputs"] + 0.1

    def loss(outputs: _Outputs, batch: Mapping[str, Tensor]) -> Tensor:
        return F.mse_loss(outputs["prediction_outputs"], batch["future_values"])

    return {"future_values": (_BATCH, example)}, loss


def _assigned(source: Source, traceable: Traceable) -> _Labels:
    """One label for each box that the model proposes: a class, or the number of classes for "no object"."""
    outputs = _outputs(traceable)
    rows, boxes = outputs["pred_boxes"].shape[:2]
    classes = torch.full((rows, boxes), int(source.model.config.num_labels))
    classes[:, 0] = 0
    return {
        "class_labels": (_BATCH, classes),
        "boxes": (_BATCH, torch.full((rows, boxes, 4), 0.5)),
    }


def _boxes(source: Source, traceable: Traceable) -> tuple[_Labels, _Loss]:
    config = source.model.config
    classes = int(config.num_labels)

    def loss(outputs: _Outputs, batch: Mapping[str, Tensor]) -> Tensor:
        weight = torch.ones(classes + 1)
        # Nearly all boxes find nothing: at full weight the model would learn to say so always.
        weight[-1] = config.eos_coefficient
        # torch wants classes on the second axis
        scored = F.cross_entropy(outputs["logits"].transpose(1, 2), batch["class_labels"], weight)
        return scored + _box_terms(config, classes, outputs, batch)

    return _assigned(source, traceable), loss


def _focal_boxes(source: Source, traceable: Traceable) -> tuple[_Labels, _Loss]:
    config = source.model.config
    classes, alpha = int(config.num_labels), float(config.focal_alpha)

    def loss(outputs: _Outputs, batch: Mapping[str, Tensor]) -> Tensor:
        logits = outputs["logits"]
        target = F.one_hot(batch["class_labels"], classes + 1)[..., :-1].to(logits.dtype)
        p = torch.sigmoid(logits)
        missed = p * (1 - target) + (1 - p) * target
        # focal loss with γ = 2, as all detectors of transformers have it
        each = F.binary_cross_entropy_with_logits(logits, target, reduction="none") * missed * missed
        each = each * (alpha * target + (1 - alpha) * (1 - target))
        return each.sum() / _objects(classes, batch) + _box_terms(config, classes, outputs, batch)

    return _assigned(source, traceable), loss


def _weight(config: Any, name: str, default: float) -> float:
    value = getattr(config, name, None)
    return float(default if value is None else value)


def _objects(classes: int, batch: Mapping[str, Tensor]) -> Tensor:
    return (batch["class_labels"] < classes).sum().clamp(min=1).to(torch.float32)


def _box_terms(config: Any, classes: int, outputs: _Outputs, batch: Mapping[str, Tensor]) -> Tensor:
    """L1 and generalized IoU of the boxes that have an object, divided by how many there are"""
    matched = (batch["class_labels"] < classes).to(torch.float32)
    boxes, targets = outputs["pred_boxes"], batch["boxes"]
    distance = ((boxes - targets).abs().sum(-1) * matched).sum()
    overlap = ((1 - _generalized_iou(_corners(boxes), _corners(targets))) * matched).sum()
    weighted = _weight(config, "bbox_loss_coefficient", 5.0) * distance
    weighted = weighted + _weight(config, "giou_loss_coefficient", 2.0) * overlap
    return weighted / _objects(classes, batch)


def _corners(boxes: Tensor) -> Tensor:
    x, y, w, h = boxes.unbind(-1)
    return torch.stack([x - w / 2, y - h / 2, x + w / 2, y + h / 2], dim=-1)


def _generalized_iou(a: Tensor, b: Tensor) -> Tensor:
    def area(box: Tensor) -> Tensor:
        return (box[..., 2] - box[..., 0]) * (box[..., 3] - box[..., 1])

    low, high = torch.maximum(a[..., :2], b[..., :2]), torch.minimum(a[..., 2:], b[..., 2:])
    shared = (high - low).clamp(min=0).prod(-1)
    union = area(a) + area(b) - shared
    around = torch.maximum(a[..., 2:], b[..., 2:]) - torch.minimum(a[..., :2], b[..., :2])
    # The box around both: where they do not touch, it alone has a gradient that brings them together.
    hull = around.clamp(min=0).prod(-1)
    return shared / union - (hull - union) / hull


def _masks(source: Source, traceable: Traceable) -> tuple[_Labels, _Loss]:
    """Cross entropy of classes, and binary cross entropy and dice of the masks that have an object"""
    config = source.model.config
    outputs = _outputs(traceable)
    rows, queries, height, width = outputs["masks_queries_logits"].shape
    classes = int(config.num_labels)
    ids = torch.full((rows, queries), classes)
    ids[:, 0] = 0
    labels: _Labels = {
        "class_labels": (_BATCH, ids),
        "mask_labels": (_BATCH, torch.zeros(rows, queries, height, width)),
    }

    def loss(outputs: _Outputs, batch: Mapping[str, Tensor]) -> Tensor:
        weight = torch.ones(classes + 1)
        weight[-1] = _weight(config, "no_object_weight", 0.1)
        scored = F.cross_entropy(
            outputs["class_queries_logits"].transpose(1, 2), batch["class_labels"], weight
        )
        matched = (batch["class_labels"] < classes).to(torch.float32)
        logits, target = outputs["masks_queries_logits"].flatten(2), batch["mask_labels"].flatten(2)
        binary = (
            F.binary_cross_entropy_with_logits(logits, target, reduction="none").mean(2) * matched
        ).sum()
        p = torch.sigmoid(logits)
        # the ones keep an empty mask's share finite
        dice = 1 - (2 * (p * target).sum(2) + 1) / (p.sum(2) + target.sum(2) + 1)
        count = _objects(classes, batch)
        return (
            _weight(config, "class_weight", _weight(config, "cross_entropy_weight", 1.0)) * scored
            + _weight(config, "mask_weight", 5.0) * binary / count
            + _weight(config, "dice_weight", 5.0) * (dice * matched).sum() / count
        )

    return labels, loss


def _contrast(source: Source, traceable: Traceable) -> tuple[_Labels, _Loss]:
    def loss(outputs: _Outputs, batch: Mapping[str, Tensor]) -> Tensor:
        """Image i belongs to text i, among all of the batch, and text i to image i."""
        logits = outputs["logits_per_image"]
        pairs = torch.arange(logits.shape[0])
        return (F.cross_entropy(logits, pairs) + F.cross_entropy(logits.t(), pairs)) / 2

    return {}, loss


def _sigmoid_contrast(source: Source, traceable: Traceable) -> tuple[_Labels, _Loss]:
    def loss(outputs: _Outputs, batch: Mapping[str, Tensor]) -> Tensor:
        """−Σ log σ(±logit), + where image and text belong together, divided by how many pairs do"""
        # one row a text, as transformers has it for this loss
        logits = outputs["logits_per_image"].t()
        index = torch.arange(logits.shape[0])
        signs = 2 * (index.unsqueeze(0) == index.unsqueeze(1)).to(logits.dtype) - 1
        return -F.logsigmoid(signs * logits).sum(-1).mean()

    return {}, loss


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


def _ends(outputs: _Outputs, batch: Mapping[str, Tensor]) -> Tensor:
    start = F.cross_entropy(outputs["start_logits"], batch["start_positions"], ignore_index=-100)
    end = F.cross_entropy(outputs["end_logits"], batch["end_positions"], ignore_index=-100)
    return (start + end) / 2


LOSSES: Mapping[str, Callable[[Source, Traceable], tuple[_Labels, _Loss]]] = {
    "classes": _classes,
    "choice": _choice,
    "span": _span,
    "token classes": _per_token(_tokens, labels=True),
    "tokens": _per_token(_tokens),
    "next token": _per_token(_shifted),
    "target tokens": _per_token(_tokens, key="decoder_input_ids"),
    "frames": _frames,
    "speaker": _speaker,
    "ctc": _ctc,
    "pixels": _pixels,
    "depth": _depth,
    "patches": _patches,
    "picture": _regressed("reconstruction", F.l1_loss),
    "values": _values,
    # the noise that a network sees in a sample
    "noise": _regressed("out_sample", F.mse_loss),
    "boxes": _boxes,
    "focal boxes": _focal_boxes,
    "masks": _masks,
    "contrast": _contrast,
    "sigmoid contrast": _sigmoid_contrast,
}
