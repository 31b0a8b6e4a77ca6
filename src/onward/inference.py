"""The inference model: the evaluation model with weights inside and nothing of training.

Chosen outputs only; what they do not need is dropped; the result is loaded and run on the stock runtime
before it replaces an older file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from onward.checkpoint import CheckpointData

__all__ = ["export"]


def export(
    eval_model: str | os.PathLike[str],
    state: CheckpointData,
    outputs: Sequence[str],
    path: str | os.PathLike[str],
) -> None:
    """Write the inference model."""
    raise NotImplementedError
