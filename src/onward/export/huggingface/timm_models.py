"""timm models through the same entry as transformers': an image classifier, with its own preprocessing settings.

Knows what a timm model says of itself (`pretrained_cfg`, `num_classes`); does not import timm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from onward.errors import ExportError
from onward.export.huggingface.find_model import Source
from onward.export.huggingface.tasks import task_named

__all__ = ["from_timm"]

_FILTERS = {"lanczos": 1, "bilinear": 2, "bicubic": 3, "nearest": 0}


class _Classifier(nn.Module):
    """A timm model that is called as transformers' are; its parameters keep their names."""

    main_input_name = "pixel_values"

    def __init__(self, model: nn.Module, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self._parameters, self._buffers = model._parameters, model._buffers
        self._modules = model._modules
        self._non_persistent_buffers_set = model._non_persistent_buffers_set
        self.training = model.training
        self._forward = model.forward
        channels, height, width = settings["input_size"]
        names = settings.get("label_names") or [f"LABEL_{i}" for i in range(int(settings["num_classes"]))]
        self.config = SimpleNamespace(
            model_type="timm",
            image_size=(height, width),
            num_channels=channels,
            num_labels=len(names),
            id2label=dict(enumerate(names)),
            is_encoder_decoder=False,
            problem_type=None,
        )

    def forward(self, pixel_values: Tensor, return_dict: bool = True) -> dict[str, Tensor]:
        return {"logits": self._forward(pixel_values)}


def from_timm(model: Any, task: str) -> Source:
    """A timm model as a source of the task image-classification."""
    name = "image-classification" if task in ("auto", "default") else task
    if name != "image-classification":
        raise ExportError(f"a timm model is exported for 'image-classification', not for {task!r}")
    given = model.pretrained_cfg
    settings = dict(given) if isinstance(given, Mapping) else dict(given.to_dict())
    classes = int(getattr(model, "num_classes", 0) or settings.get("num_classes") or 0)
    if not classes:
        raise ExportError("the timm model has no classifier: create it with num_classes=…")
    names = settings.get("label_names")
    settings |= {"num_classes": classes, "label_names": names if names and len(names) == classes else None}
    settings.setdefault("input_size", (3, 224, 224))
    wrapped = _Classifier(model, settings)
    return Source(
        model=wrapped,
        task=task_named(name),
        called=name,
        origin=str(settings.get("architecture") or type(model).__name__),
        processor=_processor(settings),
        borrowed=True,
    )


def _processor(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Resize the shorter side a little larger than the crop, crop the middle, normalize."""
    _, height, width = settings["input_size"]
    edge = math.floor(min(height, width) / float(settings.get("crop_pct") or 0.875))
    return {
        "do_resize": True,
        "size": {"shortest_edge": edge},
        "resample": _FILTERS.get(str(settings.get("interpolation") or "bilinear"), 2),
        "do_center_crop": True,
        "crop_size": {"height": height, "width": width},
        "image_mean": list(settings.get("mean") or (0.485, 0.456, 0.406)),
        "image_std": list(settings.get("std") or (0.229, 0.224, 0.225)),
    }
