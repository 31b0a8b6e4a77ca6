"""A small 4-bit decoder with adapters, which trains in browsers and in Node.js as it does in Python."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from onward.api import CheckpointState, Module, Optimizer
from onward.language.finetune import write_language_artifacts

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import language_model
import ready_made

RATE = 0.05
# tokens of each step
ROWS = np.random.default_rng(0).integers(0, 90, (5, 12))
_SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def write_decoder(base: Path, folder: Path) -> list[Path]:
    """Write a base and what trains it; the files of the latter."""
    ready_made.write_base(base, _SIZES, language_model.words(96))
    return write_language_artifacts(base, folder, slices=4)


def decoder_losses(folder: Path) -> list[float]:
    """Python's losses of the steps."""
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state)
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(RATE)
    losses = []
    for row in ROWS[:, None]:
        given = {"input_ids": row, "labels": row, "attention_mask": np.ones_like(row)}
        losses.append(float(np.asarray(module(*(given[name] for name in module.input_names())))))
        optimizer.step()
        module.lazy_reset_grad()
    return losses
