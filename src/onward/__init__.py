"""Onward: train any ONNX model on the stock onnxruntime wheel.

Names are imported lazily, so that `import onward` is fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onward import api, artifacts, distributed, export, federated, limits, lora, onnxblock, optim
    from onward.api.module import Module
    from onward.api.optimizer import Optimizer
    from onward.api.state import CheckpointState
    from onward.artifacts import build_artifacts, generate_artifacts
    from onward.autodiff.check import check_gradient
    from onward.autodiff.gradient import gradient
    from onward.errors import OnwardError
    from onward.head import replace_head
    from onward.pipeline.evaluate import evaluate_model as evaluate_model
    from onward.pipeline.finetune import finetune
    from onward.pipeline.finetune import plan_finetuning as plan_finetuning
    from onward.pipeline.load import load
    from onward.train.trainer import Trainer

__all__ = [
    "CheckpointState",
    "Module",
    "OnwardError",
    "Optimizer",
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
    "CheckpointState": "onward.api.state",
    "Module": "onward.api.module",
    "OnwardError": "onward.errors",
    "Optimizer": "onward.api.optimizer",
    "Trainer": "onward.train.trainer",
    "build_artifacts": "onward.artifacts",
    "check_gradient": "onward.autodiff.check",
    "evaluate_model": "onward.pipeline.evaluate",
    "finetune": "onward.pipeline.finetune",
    "generate_artifacts": "onward.artifacts",
    "plan_finetuning": "onward.pipeline.finetune",
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
