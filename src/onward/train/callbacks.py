"""Callbacks: observe a training run, and stop it."""

from __future__ import annotations

import math
import os
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onward.train.trainer import Trainer

__all__ = ["Callback", "EarlyStopping", "LogFile", "Progress"]

# seconds between two lines about updates where there is no terminal
_EVERY = 30.0


class Callback:
    """Base class of callbacks: override the methods you need. Return True from a method to stop training."""

    def on_start(self, trainer: Trainer) -> bool | None:
        """Before the first batch; also of a resumed run."""

    def on_step(self, trainer: Trainer, row: dict[str, Any]) -> bool | None:
        """After each update."""

    def on_epoch(self, trainer: Trainer, row: dict[str, Any]) -> bool | None:
        """After each epoch, with its loss and metrics."""

    def on_end(self, trainer: Trainer) -> None:
        """After the last batch, also when training stops early or fails."""


class EarlyStopping(Callback):
    """Stops when a metric has not improved by `min_delta` for `patience` epochs."""

    def __init__(
        self, metric: str = "eval_loss", *, patience: int = 3, min_delta: float = 0.0, mode: str = "auto"
    ) -> None:
        if patience <= 0:
            raise ValueError(f"patience is {patience}: it must be positive")
        if mode not in ("auto", "min", "max"):
            raise ValueError(f"mode is '{mode}': choose auto, min or max")
        self.metric, self.patience, self.min_delta = metric, patience, min_delta
        # a metric that falls is maximized with its sign turned
        self._sign = improves(metric) if mode == "auto" else (-1.0 if mode == "min" else 1.0)
        self._best, self._waited = -math.inf, 0

    def on_start(self, trainer: Trainer) -> bool:
        if self.metric not in trainer.columns:
            raise KeyError(
                f"early stopping watches '{self.metric}', the epochs have {', '.join(trainer.columns)}"
            )
        self._best, self._waited = -math.inf, 0
        for row in trainer.history.epochs:  # a resumed run remembers, a second fit starts anew
            if row["epoch"] > trainer.first_epoch:
                self._see(row)
        return self._waited >= self.patience

    def on_epoch(self, trainer: Trainer, row: dict[str, Any]) -> bool:
        self._see(row)
        return self._waited >= self.patience

    def _see(self, row: dict[str, Any]) -> None:
        value = self._sign * float(row[self.metric])
        if value > self._best + self.min_delta:
            self._best, self._waited = value, 0
        else:
            self._waited += 1


class Progress(Callback):
    """A progress bar on a terminal; elsewhere, as in a log file, a line for each epoch and every half minute."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._lines, self._spoke = False, 0.0

    def on_start(self, trainer: Trainer) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        self._spoke = time.monotonic()
        if not console.is_terminal:
            self._lines = True
            return
        self._bar = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[shown]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._bar.start()
        self._task = self._bar.add_task("", total=trainer.total_steps, epoch=trainer.epoch + 1, shown="")
        self._bar.update(self._task, completed=trainer.step)

    def on_step(self, trainer: Trainer, row: dict[str, Any]) -> None:
        if self._bar is not None:
            speed = row.get("samples_per_second")
            shown = f"loss {row['loss']:.4f}" + (f"  {speed:.0f}/s" if speed else "")
            self._bar.update(self._task, completed=trainer.step, epoch=trainer.epoch + 1, shown=shown)
        elif self._lines and time.monotonic() - self._spoke > _EVERY:
            self._spoke = time.monotonic()
            of = f" of {trainer.total_steps}" if trainer.total_steps else ""
            print(
                f"epoch {row['epoch']}, update {row['step']}{of}: loss {row['loss']:.4f}",
                file=sys.stderr,
                flush=True,
            )

    def on_epoch(self, trainer: Trainer, row: dict[str, Any]) -> None:
        # on stderr, as all progress: stdout is for results
        figures = "  ".join(
            f"{k} {v:.4g}" for k, v in row.items() if isinstance(v, float) and "second" not in k
        )
        if self._bar is not None:
            self._bar.console.print(f"epoch {row['epoch']}: {figures}")
        elif self._lines:
            print(f"epoch {row['epoch']}: {figures}", file=sys.stderr, flush=True)

    def on_end(self, trainer: Trainer) -> None:
        self._lines = False
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class LogFile(Callback):
    """Writes a line for every epoch, and for updates every few seconds, into a file as the run goes."""

    def __init__(self, path: str | os.PathLike[str], *, every: float = 5.0) -> None:
        self._path, self._every = path, every
        self._file: Any = None
        self._wrote = -math.inf

    def on_start(self, trainer: Trainer) -> None:
        self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115 - closed when the run ends
        self._write("start", {"updates done": trainer.step, "updates in all": trainer.total_steps})

    def on_step(self, trainer: Trainer, row: dict[str, Any]) -> None:
        if time.monotonic() - self._wrote > self._every:
            self._write("update", row)

    def on_epoch(self, trainer: Trainer, row: dict[str, Any]) -> None:
        self._write("epoch", row)

    def on_end(self, trainer: Trainer) -> None:
        if self._file is not None:
            self._write("end", {"updates done": trainer.step})
            self._file.close()
            self._file = None

    def _write(self, what: str, row: dict[str, Any]) -> None:
        self._wrote = time.monotonic()
        shown = "  ".join(f"{k} {v:.6g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
        self._file.write(f"{time.strftime('%F %T')}  {what}: {shown}\n")
        self._file.flush()


def improves(metric: str) -> float:
    """−1 for a metric that should fall, 1 for one that should rise."""
    falling = ("loss", "mse", "mae", "perplexity", "error")
    return -1.0 if metric.endswith(falling) else 1.0
