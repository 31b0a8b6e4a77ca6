"""A training run that uses everything a resume must keep: dropout, accumulation, a schedule, metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from onward import Trainer
from small_models import one_thread


def data(seed: int = 0, size: int = 48) -> tuple[np.ndarray, np.ndarray]:
    """Learnable: the label is the largest of the first three numbers."""
    x = np.random.default_rng(seed).normal(size=(size, 4)).astype(np.float32)
    return x, np.argmax(x[:, :3], axis=1)


def make(artifacts: Path, output: Path | None, **options: Any) -> Trainer:
    chosen: dict[str, Any] = {
        "learning_rate": 0.02,
        "schedule": "cosine",
        "warmup": 2,
        "gradient_accumulation_steps": 2,
        "metrics": ["accuracy"],
        "seed": 5,
        "session_options": one_thread(),
    }
    return Trainer(artifacts, output_directory=output, **{**chosen, **options})


def kept(output: Path) -> dict[str, bytes]:
    """What must be equal, byte for byte: the checkpoints and the best state."""
    return {
        file.name: file.read_bytes()
        for file in sorted(output.iterdir())
        if file.name == "best" or file.name.startswith("checkpoint-")
    }
