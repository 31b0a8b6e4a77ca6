"""What a run of the benchmark is told, and where its files are."""

from __future__ import annotations

import dataclasses
from pathlib import Path

__all__ = ["CACHE", "ENGINES", "HERE", "MODELS", "Settings"]

HERE = Path(__file__).parents[1]
CACHE = HERE / ".cache"
MODELS = ("mlp", "encoder-8x128", "encoder-2x32", "decoder", "resnet", "mobilenet", "lstm")
ENGINES = ("onward", "torch-fused", "torch", "torch-compile", "ort-training")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Choices of one run. `rounds` of None leaves the number to each section."""

    models: tuple[str, ...] = MODELS
    engines: tuple[str, ...] = ENGINES
    cache: Path = CACHE
    """Where models, inputs and artifacts are kept for the next run."""
    threads: int = 2
    rounds: int | None = None
    turn_ms: float = 200.0
    """How long an engine is timed in one turn, roughly: short turns meet the same moments of a machine."""
    pause: float = 0.15
    """Seconds between turns. Threads spin after a run, onnxruntime's for up to 0.1 s and OpenMP's for 0.01 s,
    and would take a core from the engine that has the next turn."""

    def rounds_or(self, usual: int) -> int:
        return self.rounds or usual
