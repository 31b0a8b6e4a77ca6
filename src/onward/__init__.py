"""Onward: train any ONNX model on the stock onnxruntime wheel.

Names are imported lazily, so that `import onward` is fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onward import api, artifacts, distributed, export, federated, limits, lora, onnxblock, optim
    from onward.artifacts import build_artifacts, generate_artifacts
    from onward.autodiff.check import check_gradient
    from onward.autodiff.gradient import gradient
    from onward.errors import OnwardError
    from onward.head import replace_head
    from onward.pipeline.finetune import finetune
    from onward.pipeline.load import load
    from onward.train.trainer import Trainer

__all__ = [
    "OnwardError",
    "Trainer",
    "api",
    "artifacts",
    "build_artifacts",
    "check_gradient",
    "distributed",
    "export",
    "federated",
    "finetune",
    "generate_artifacts",
    "gradient",
    "limits",
    "load",
    "lora",
    "onnxblock",
    "optim",
    "replace_head",
]

_MODULES = frozenset(
    {"api", "artifacts", "distributed", "export", "federated", "limits", "lora", "onnxblock", "optim"}
)
_ATTRIBUTES = {
    "OnwardError": "onward.errors",
    "Trainer": "onward.train.trainer",
    "build_artifacts": "onward.artifacts",
    "check_gradient": "onward.autodiff.check",
    "finetune": "onward.pipeline.finetune",
    "generate_artifacts": "onward.artifacts",
    "gradient": "onward.autodiff.gradient",
    "load": "onward.pipeline",
    "replace_head": "onward.head",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"onward.{name}")
    if name in _ATTRIBUTES:
        return getattr(importlib.import_module(_ATTRIBUTES[name]), name)
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("onward")
    raise AttributeError(f"module 'onward' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
