"""The files of a run: its checkpoints, the best state, the history. Rank 0 writes them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from onward.checkpoint import store
from onward.errors import OnwardError
from onward.train.history import History
from onward.train.progress import Position

if TYPE_CHECKING:
    from onward.checkpoint.content import CheckpointData
    from onward.train.engines import Engine

HISTORY, BEST, REPORT = "history.json", "best", "report.html"


class RunFiles:
    """The folder of a run, or none; `keep` is how many checkpoints stay.

    `remember_best` keeps the best state in memory where there is no folder.
    """

    def __init__(self, directory: Path | None, keep: int, *, remember_best: bool = False) -> None:
        self.directory, self._keep, self._remembers = directory, keep, remember_best
        self._best: CheckpointData | None = None

    def save(self, engine: Engine, position: Position, history: History, *, best: bool) -> Path | None:
        """Write what a resume needs, and with `best` the state as that of the best epoch; collective.

        Returns the checkpoint's path where it was written.
        """
        if self.directory is None:
            if best and self._remembers:
                self._best = _copy(engine.gather(include_optimizer_state=False))
            return None
        # batch-norm statistics of the ranks drift apart: what is saved is their mean
        engine.reconcile()
        # collective: every rank takes part, also those that write nothing
        # without the optimizer's state, a third of the size: nobody resumes from the best
        parameters = engine.gather(include_optimizer_state=False) if best else None
        data = engine.gather(include_optimizer_state=True)
        path: Path | None = None
        with engine.all_or_none(), self.writing():
            if data is not None:
                data.extras["trainer"] = position.to_json()
                # the checkpoint last: a run that is killed before it does the epoch again, and writes the same
                if parameters is not None:
                    store.save(parameters, self.directory / BEST)
                history.save(self.directory / HISTORY)
                path = store.save_step(data, self.directory, step=position.step, keep=self._keep)
        return path

    def has_checkpoints(self) -> bool:
        """Whether there is a run to resume."""
        return self.directory is not None and any(self.directory.glob("checkpoint-*"))

    def load(self) -> CheckpointData | None:
        """The latest checkpoint that is whole; None where nothing was saved yet."""
        if self.directory is None or not self.has_checkpoints():
            return None
        latest = store.load_latest(self.directory)
        try:
            Position.from_json(str(latest.data.extras["trainer"]))
        except (KeyError, ValueError, TypeError):
            raise OnwardError(f"'{latest.path}' was not saved by a Trainer: it cannot be resumed") from None
        store.rotate(self.directory, keep=self._keep)  # a run that died after saving may not have got to it
        return latest.data

    def load_best(self) -> CheckpointData | None:
        """The state of the best epoch, where it was kept."""
        if self.directory is None or not (self.directory / BEST).is_file():
            return self._best
        return store.load(self.directory / BEST)

    def load_history(self, position: Position) -> History:
        """The history up to a position."""
        history = History() if self.directory is None else History.load(self.directory / HISTORY)
        # it is saved before the checkpoint: a kill between the two leaves rows of updates that are made again
        history.cut(position.step, position.epoch)
        return history

    def make_directory(self) -> None:
        """Make the folder where it is not there."""
        if self.directory is not None:
            with self.writing():
                self.directory.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Say of a full or read-only disk what it means for the run."""
        try:
            yield
        except OSError as error:
            raise OnwardError(
                f"cannot write the run to '{self.directory}': {error.strerror or error}. Checkpoints that "
                "are there are whole: free space or choose another output_directory, and resume with resume=True",
                hint="free some space, or choose another folder with -o; resume with --resume",
            ) from error


def _copy(data: CheckpointData | None) -> CheckpointData | None:
    """A state of its own: the arrays of a gathered one are those in training."""
    if data is None:
        return None
    trainable, frozen = (
        {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in group.items()}
        for group in (data.trainable, data.frozen)
    )
    return dataclasses.replace(data, trainable=trainable, frozen=frozen)
