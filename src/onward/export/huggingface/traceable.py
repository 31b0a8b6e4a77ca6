"""The base of the wrappers: a traceable module with named inputs, and tokenized example inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from onward.errors import ExportError

if TYPE_CHECKING:
    from onward.export.huggingface.find_model import Source
    from onward.export.huggingface.tasks import Axes

TOKENS: Axes = {0: "batch", 1: "sequence"}

# Different lengths, so that every batch is padded; a pair, so that segment ids are not all zero.
TEXTS: tuple[str | tuple[str, str], ...] = (
    "The ferry leaves at noon.",
    "Nobody expected the small library to train a network on a phone, least of all the people who wrote it.",
    ("Where does the path end?", "The path follows the river for two miles and ends at a wooden bridge."),
    "Why?",
    "Prices rose by 3.5% in March; economists had expected less, and said so at length, as economists do.",
)


@dataclass(frozen=True)
class Traceable:
    """A module that takes tensors in the order of `inputs` and returns those of `outputs`.

    `example` is what to trace with; `cases` are other inputs, at other sizes, to compare the export on.
    """

    module: nn.Module
    inputs: Mapping[str, Axes]
    outputs: Mapping[str, Axes]
    example: Mapping[str, Tensor]
    cases: Sequence[Mapping[str, Tensor]]
    parts: Callable[[], Mapping[str, Traceable]] | None = None
    """The same model as several graphs by file name, where a folder is to have those instead."""


class Adapter(nn.Module):
    """Call `function` with tensors by name, while owning the model's parameters under the model's own names.

    The model is not a submodule: it would prefix every parameter. Its children are shared instead.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        function: Callable[[dict[str, Tensor]], Sequence[Tensor]],
    ) -> None:
        super().__init__()
        self._parameters = dict(model._parameters)
        self._modules = dict(model._modules)
        self._buffers = dict(model._buffers)
        self._non_persistent_buffers_set = set(model._non_persistent_buffers_set)
        self.training = model.training
        self.names = tuple(names)
        self.function = function

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.function(dict(zip(self.names, tensors))))


def encode(
    source: Source,
    texts: Sequence[str | tuple[str, str]],
    names: Sequence[str],
    *,
    side: str | None = None,
) -> dict[str, Tensor]:
    """Tokenize with the model's own tokenizer, padded and cut to the model's longest input.

    Padding is done here: many generators' tokenizers have no padding token, and giving them one would change
    the caller's object.
    """
    tokenizer = source.tokenizer
    if tokenizer is None:
        raise ExportError(f"{source.origin}: has no tokenizer; pass (model, tokenizer)")
    # Without a limit a text that is too long indexes beyond the table of positions.
    limit = {"truncation": True, "max_length": source.max_length} if source.max_length else {}
    rows = [
        tokenizer(*(text if isinstance(text, tuple) else (text,)), return_attention_mask=True, **limit)
        for text in texts
    ]
    width = max(len(row["input_ids"]) for row in rows)
    if width == 0:
        raise ExportError(f"{source.origin}: the tokenizer turns text into no tokens; is it the model's own?")
    fillers = {"input_ids": pad_id(tokenizer), "attention_mask": 0, "token_type_ids": 0}
    left = (side or getattr(tokenizer, "padding_side", "right")) == "left"
    batch: dict[str, Tensor] = {}
    for name in names:
        padded = []
        for row in rows:
            values = list(row.get(name) or [0] * len(row["input_ids"]))
            # in the order that the tokenizer itself pads in
            filler = [fillers[name]] * (width - len(values))
            padded.append(filler + values if left else values + filler)
        batch[name] = torch.tensor(padded, dtype=torch.int64)
    return batch


def pad_id(tokenizer: Any) -> int:
    """The id to pad with: the tokenizer's own, else its end-of-text, else 0 (masked anyway)."""
    for name in ("pad_token_id", "eos_token_id"):
        value = getattr(tokenizer, name, None)
        if isinstance(value, int):
            return value
    return 0


def image_size(source: Source, model: Any) -> tuple[int, int]:
    """Height and width of the pictures for an export: what the model's processor makes, if the model takes it."""
    processor = source.processor or {}
    settings = processor if isinstance(processor, Mapping) else processor.to_dict()
    own = _sides(setting(model, "image_size", None))
    processed = _sides((settings.get("do_center_crop") and settings.get("crop_size")) or settings.get("size"))
    if own is None or processed is None or own == processed:
        return own or processed or (224, 224)
    channels = int(setting(model, "num_channels", 3))
    try:
        with torch.no_grad():
            # A processor may be another model's: the only proof that its size fits is a run.
            model(pixel_values=torch.zeros(1, channels, *processed))
    except Exception:  # positions of another size, or more inputs
        return own
    return processed


def _sides(size: Any) -> tuple[int, int] | None:
    """Height and width of a setting; of one that leaves a side to the picture, a square."""
    if isinstance(size, Mapping):
        sides = {name: side for name, side in size.items() if side}
        size = (
            [sides[k] for k in ("height", "width")] if "height" in sides else next(iter(sides.values()), None)
        )
    if not size:
        return None
    return (int(size), int(size)) if isinstance(size, int) else (int(size[0]), int(size[1]))


def setting(model: Any, name: str, default: Any) -> Any:
    """A setting of a model, or of the part of it that looks at pictures."""
    parts = ("vision_config", "backbone_config", "encoder")
    configs = [model.config, *(getattr(model.config, part, None) for part in parts)]
    return next((getattr(c, name) for c in configs if getattr(c, name, None) is not None), default)


def call(source: Source, model: Any) -> Callable[[dict[str, Tensor]], Sequence[Tensor]]:
    """A model's call with tensors by name, and of its answer the tensors of the task."""

    def run(batch: dict[str, Tensor]) -> Sequence[Tensor]:
        answer = model(**batch, return_dict=True)
        return tuple(output_of(source, answer, name) for name in source.task.outputs)

    return run


def output_of(source: Source, answer: Any, name: str) -> Tensor:
    """One tensor of a model's output, or an error that says what it gives instead."""
    aliases = {"logits": ("logits", "prediction_logits"), "waveform": ("waveform", "audio_values")}
    for key in aliases.get(name, (name,)):
        if key in answer:
            return answer[key]
    raise ExportError(
        f"{source.origin}: {type(source.model).__name__} gives no {name!r}, which task {source.task.name!r} "
        f"needs; it gives {', '.join(answer.keys())}"
    )
