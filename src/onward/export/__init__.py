"""Exports models from PyTorch, Hugging Face or a training run to ONNX files.

Names are imported lazily, so that `import onward.export` is fast and torch or transformers are imported only by
the functions that need them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onward.export.batch_size import dynamic_batch as dynamic_batch
    from onward.export.batch_size import fixed_batch as fixed_batch
    from onward.export.huggingface.assign import assign_detections as assign_detections
    from onward.export.huggingface.from_transformers import HFOnnx as HFOnnx
    from onward.export.huggingface.from_transformers import (
        artifacts_from_transformers as artifacts_from_transformers,
    )
    from onward.export.huggingface.from_transformers import from_transformers as from_transformers
    from onward.export.inference import for_inference as for_inference
    from onward.export.inference import save_pipeline as save_pipeline
    from onward.export.parity import Report as Report
    from onward.export.parity import compare as compare
    from onward.export.torch.from_torch import artifacts_from_torch as artifacts_from_torch
    from onward.export.torch.from_torch import from_torch as from_torch

_HOMES = {
    "from_torch": "onward.export.torch",
    "artifacts_from_torch": "onward.export.torch",
    "from_transformers": "onward.export.huggingface.from_transformers",
    "artifacts_from_transformers": "onward.export.huggingface.from_transformers",
    "dynamic_batch": "onward.export.batch_size",
    "fixed_batch": "onward.export.batch_size",
    "assign_detections": "onward.export.huggingface.assign",
    "HFOnnx": "onward.export.huggingface.from_transformers",
    "for_inference": "onward.export.inference",
    "save_pipeline": "onward.export.inference",
    "Report": "onward.export.parity",
    "compare": "onward.export.parity",
}

__all__ = [
    "HFOnnx",
    "Report",
    "artifacts_from_torch",
    "artifacts_from_transformers",
    "assign_detections",
    "compare",
    "dynamic_batch",
    "fixed_batch",
    "for_inference",
    "from_torch",
    "from_transformers",
    "save_pipeline",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'onward.export' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
