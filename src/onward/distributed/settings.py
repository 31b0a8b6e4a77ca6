"""The settings of a distributed run: files, sizes, policies; validated before anything starts."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from onward.api.module import NonFinitePolicy
    from onward.api.optimizer import Optimizer
    from onward.api.schedulers import LRScheduler
    from onward.runtime.devices import DeviceLike
    from onward.train.callbacks import Callback
    from onward.train.metrics import Metric

__all__ = ["Grid", "RunnerSettings", "make_grid"]

PathLike = str | os.PathLike[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Files:
    """Which models train, and from which state."""

    artifacts: PathLike | None = None
    training_model: Path = Path("training_model.onnx")
    eval_model: Path | None = Path("eval_model.onnx")
    optimizer_model: Path = Path("optimizer_model.onnx")
    checkpoint: Path = Path("checkpoint")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Updates:
    """How long a run is, and how parameters change."""

    epochs: int = 1
    num_train_steps: int | None = None
    learning_rate: float = 1e-3
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    clip_norm: float | None = None
    gradient_accumulation_steps: int = 1
    on_nonfinite: NonFinitePolicy = "raise"
    seed: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Ranks:
    """How ranks share data, the reduction of gradients and the state."""

    data_parallel_size: int | None = None
    horizontal_parallel_size: int = 1
    statistics: Literal["average", "rank0"] = "average"
    shard_optimizer: bool = False
    compress: bool = False
    reduce_group_size: int = 1
    loss_reduction: Literal["mean", "sum"] = "mean"
    count: Callable[[Sequence[Any]], float] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Stages:
    """How a model is cut into the stages of a pipeline."""

    pipeline_parallel_size: int = 1
    cuts: Sequence[str | Sequence[str]] | None = None
    stages: Mapping[str, int] | None = None
    micro_batches: int | None = None
    pipeline_schedule: Literal["1f1b", "gpipe"] = "1f1b"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Checkpoints:
    """What a run writes, and what it reports."""

    checkpoint_directory: PathLike | None = None
    checkpoint_every: int = 100
    keep_checkpoints: int = 2
    evaluate_every: int | None = None
    metrics: Sequence[str | Metric] = ()
    best_metric: str | None = None
    callbacks: Sequence[Callback] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunnerSettings(_Files, _Updates, _Ranks, _Stages, _Checkpoints):
    """The settings of a `TrainingRunner`; the same on every rank.

    Files: `artifacts` is a folder of `generate_artifacts`, or name the four files. Only rank 0 reads the
    checkpoint.

    Length: `epochs`, or at most `num_train_steps` batches (a multiple of `gradient_accumulation_steps`).

    Updates: `learning_rate`, or a `scheduler` made for the optimizer; `clip_norm` limits the norm of all gradients.

    Data parallel: `statistics` says how ranks reconcile batch-norm statistics (their mean, or rank 0's);
    `shard_optimizer` keeps only a share of the optimizer state on each rank; `compress` sends gradients as
    bfloat16; `reduce_group_size` reduces them in two levels, in groups of so many neighbours. `loss_reduction`
    is how the loss treats its batch; `count` gives a batch's weight where that is not its number of samples
    (or of labels that are not ignored).

    Pipeline: `pipeline_parallel_size` stages, cut after the values in `cuts` (one or several names for each
    cut), by `stages` (node or output name → stage), or balanced by cost; `micro_batches` of each batch.

    Checkpoints: every `checkpoint_every` updates and at the end of each epoch to `checkpoint_directory`, from which a
    run resumes; rank 0 also keeps the history, a report and the best epoch there. `metrics`, `best_metric` and
    `callbacks` are those of `Trainer`; callbacks are called on rank 0.

    >>> RunnerSettings(artifacts="out", epochs=3).training_model.name
    'training_model.onnx'
    """

    timeout: float = 600.0
    backend: Literal["gloo", "nccl"] | None = None
    device: DeviceLike = "cpu"
    threads: int = 1

    def __post_init__(self) -> None:
        folder = Path(self.artifacts) if self.artifacts is not None else Path()
        for name in ("training_model", "eval_model", "optimizer_model", "checkpoint"):
            value = getattr(self, name)
            if value is not None:
                # frozen for those who read it
                object.__setattr__(self, name, folder / value)
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}: it must be at least 1")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm is {self.clip_norm}: it must be positive, or None for none")
        if self.num_train_steps is not None and self.num_train_steps % self.gradient_accumulation_steps:
            raise ValueError(
                "Number of training steps must be a multiple of number of gradient accumulation step: "
                f"num_train_steps is {self.num_train_steps}, gradient_accumulation_steps "
                f"{self.gradient_accumulation_steps}"
            )
        if self.cuts is not None and len(self.cuts) != self.pipeline_parallel_size - 1:
            raise ValueError(
                f"Number of cuts does not match number of pipeline stages: {len(self.cuts)} cuts make "
                f"{len(self.cuts) + 1} stages, pipeline_parallel_size is {self.pipeline_parallel_size}"
            )
        if self.cuts is not None and self.stages is not None:
            raise ValueError("cuts and stages both say how to split the model: give one of them")
        if self.stages and self.pipeline_parallel_size == 1:
            raise ValueError("stages names pipeline stages, but pipeline_parallel_size is 1")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name} is '{getattr(self, name)}': choose {' or '.join(map(str, choices))}"
                )


_COUNTS = (
    "epochs", "num_train_steps", "gradient_accumulation_steps", "data_parallel_size", "horizontal_parallel_size",
    "pipeline_parallel_size", "micro_batches", "reduce_group_size", "checkpoint_every", "keep_checkpoints",
    "evaluate_every", "threads",
)  # fmt: skip
# checked here: a type alone stops nobody
_CHOICES: dict[str, tuple] = {
    "statistics": ("average", "rank0"),
    "loss_reduction": ("mean", "sum"),
    "pipeline_schedule": ("1f1b", "gpipe"),
    "backend": ("gloo", "nccl", None),
    "on_nonfinite": ("raise", "skip", "ignore"),
}


@dataclasses.dataclass(frozen=True)
class Grid:
    """Where a rank is: data fastest, then pipeline."""

    data: int
    pipeline: int
    rank: int

    @property
    def stage(self) -> int:
        """The pipeline stage of this rank."""
        return self.rank // self.data

    @property
    def replica(self) -> int:
        """Which copy of the model this rank is a part of."""
        return self.rank % self.data


def make_grid(parameters: RunnerSettings, *, rank: int, world: int) -> Grid:
    """The place of a rank; an error where the sizes do not fit the world.

    >>> make_grid(RunnerSettings(pipeline_parallel_size=2), rank=3, world=4)
    Grid(data=2, pipeline=2, rank=3)
    """
    data, horizontal, pipeline = (
        parameters.data_parallel_size,
        parameters.horizontal_parallel_size,
        parameters.pipeline_parallel_size,
    )
    for name, size in (("horizontal_parallel_size", horizontal), ("pipeline_parallel_size", pipeline)):
        if world % size:
            raise ValueError(f"world_size({world}) is not divisible by {name}({size})")
    if data is None:
        data = max(1, world // (horizontal * pipeline))
    if data * horizontal * pipeline != world:
        raise ValueError(
            f"data({data}) * horizontal({horizontal}) * pipeline({pipeline}) != world_size({world})"
        )
    if horizontal > 1:
        raise ValueError(
            f"horizontal_parallel_size is {horizontal}: splitting single operators over ranks is not supported; "
            "use data_parallel_size and pipeline_parallel_size"
        )
    return Grid(data, pipeline, rank)
