"""Callbacks: observe a training run, stop it, and log it for TensorBoard, MLflow or Weights & Biases."""

from __future__ import annotations

import functools
import importlib
import math
import os
import socket
import struct
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from onward.errors import OnwardError

if TYPE_CHECKING:
    from onward.train.trainer import Trainer

__all__ = ["Callback", "EarlyStopping", "EventFile", "LogFile", "MLflow", "Progress", "WeightsAndBiases"]

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
    falling = ("loss", "mse", "mae", "perplexity", "error", "cer", "wer")
    return -1.0 if metric.endswith(falling) else 1.0


# --- Logs metrics to MLflow or Weights & Biases; both packages are optional.


class MLflow(Callback):
    """Logs settings, updates and epochs to MLflow: `Trainer(…, callbacks=[MLflow("flowers")])`."""

    def __init__(self, experiment: str | None = None, *, run_name: str | None = None) -> None:
        self._mlflow = _load("mlflow")
        self._experiment, self._run_name = experiment, run_name

    def on_start(self, trainer: Trainer) -> None:
        if self._experiment is not None:
            self._mlflow.set_experiment(self._experiment)
        self._mlflow.start_run(run_name=self._run_name)
        self._mlflow.log_params({name: str(value) for name, value in trainer.settings.items()})

    def on_step(self, trainer: Trainer, row: dict[str, Any]) -> None:
        self._mlflow.log_metrics(_figures(row, "update/"), step=row["step"])

    def on_epoch(self, trainer: Trainer, row: dict[str, Any]) -> None:
        self._mlflow.log_metrics(_figures(row, "epoch/"), step=row["step"])

    def on_end(self, trainer: Trainer) -> None:
        # `on_start` may have failed before there was one
        if self._mlflow.active_run() is not None:
            self._mlflow.end_run()


class WeightsAndBiases(Callback):
    """Logs settings, updates and epochs to Weights & Biases: `Trainer(…, callbacks=[WeightsAndBiases("flowers")])`."""

    def __init__(self, project: str | None = None, *, run_name: str | None = None) -> None:
        self._wandb = _load("wandb")
        self._project, self._run_name = project, run_name
        self._run: Any = None

    def on_start(self, trainer: Trainer) -> None:
        self._run = self._wandb.init(
            project=self._project, name=self._run_name, config=dict(trainer.settings)
        )

    def on_step(self, trainer: Trainer, row: dict[str, Any]) -> None:
        self._run.log(_figures(row, "update/"), step=row["step"])

    def on_epoch(self, trainer: Trainer, row: dict[str, Any]) -> None:
        self._run.log(_figures(row, "epoch/"), step=row["step"])

    def on_end(self, trainer: Trainer) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None


def _load(name: str) -> Any:
    try:
        # only where a run asks for it: both packages are optional
        return importlib.import_module(name)
    except ImportError as error:
        raise OnwardError(f"the package {name} is not installed: pip install {name}") from error


def _figures(row: Mapping[str, Any], prefix: str) -> dict[str, float]:
    return {
        f"{prefix}{name}": float(value)
        for name, value in row.items()
        if isinstance(value, int | float) and name != "step" and math.isfinite(value)
    }


# --- TensorBoard event files, written without TensorBoard: scalars only.
#
# An event file is a row of records: a length, its checksum, a protobuf `Event`, its checksum. The few fields that a
# scalar needs are written by hand: tensorboardX, measured beside this, takes several times as long for an update's
# figures, and more than a second to load.


class EventFile(Callback):
    """Writes the figures of every update and epoch of a run into a folder that TensorBoard reads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: BinaryIO | None = None

    def on_start(self, trainer: Trainer) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard takes the files that have `tfevents` in their names
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}.onward"
        self._file = open(self._folder / name, "wb")  # noqa: SIM115 - closed when the run ends
        # the version of the format, which readers want first
        self._write(_text(3, "brain.Event:2"))

    def on_step(self, trainer: Trainer, row: dict[str, Any]) -> None:
        self._scalars("update", row, row["step"])

    def on_epoch(self, trainer: Trainer, row: dict[str, Any]) -> None:
        self._scalars("epoch", row, row["step"])
        if self._file is not None:
            # a run is watched while it goes on
            self._file.flush()

    def on_end(self, trainer: Trainer) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _scalars(self, group: str, row: dict[str, Any], step: int) -> None:
        values = b"".join(
            _part(1, _text(1, f"{group}/{name}") + _float(2, float(value)))
            for name, value in row.items()
            if isinstance(value, int | float) and name not in ("step", "epoch") and math.isfinite(value)
        )
        self._write(_number(2, step) + _part(5, values))

    def _write(self, fields: bytes) -> None:
        if self._file is None:
            return
        event = _double(1, time.time()) + fields
        length = struct.pack("<Q", len(event))
        self._file.write(length + _checksum(length) + event + _checksum(event))


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", value)


def _float(field: int, value: float) -> bytes:
    return _varint(field << 3 | 5) + struct.pack("<f", value)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _text(field: int, value: str) -> bytes:
    return _part(field, value.encode())


def _part(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


@functools.cache
def _remainders() -> list[int]:
    """CRC-32C of each byte: whole bytes at a time take an eighth of the time of bits."""
    remainders = list(range(256))
    for _ in range(8):
        remainders = [crc >> 1 ^ (0x82F63B78 if crc & 1 else 0) for crc in remainders]
    return remainders


def _checksum(data: bytes) -> bytes:
    """CRC-32C, rotated and offset as the format wants it."""
    crc, remainders = 0xFFFFFFFF, _remainders()
    for byte in data:
        crc = crc >> 8 ^ remainders[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
