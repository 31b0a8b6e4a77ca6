"""The history of a run, as rows: one for each logged step and one for each evaluation."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onward.errors import LimitError
from onward.escape import csv_cell
from onward.files import write_bytes
from onward.reading import read_json

if TYPE_CHECKING:
    from onward.train.report import Figure

__all__ = ["MOST_STEPS", "History"]

MOST_STEPS = 4000
_LONGEST = 200  # characters of a metric's name


@dataclasses.dataclass
class History:
    """Rows of a run: `steps` have loss, learning rate and gradient norm; `epochs` also the metrics.

    >>> history = History()
    >>> history.epochs.append({"epoch": 1, "loss": 0.5})
    >>> history.last("loss")
    0.5
    """

    steps: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    epochs: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    # the trial by which learning_rate="auto" was found
    range_test: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    # of the best epoch: how many samples of each class (row) were taken for which (column)
    confusion: list[list[int]] = dataclasses.field(default_factory=list)
    classes: list[str] = dataclasses.field(default_factory=list)
    # evaluations between the ends of epochs, by the update that they came after
    evaluations: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    # updates that were not applied because a loss or a gradient was not finite
    skipped: int = 0
    # of the best epoch: what a report shows of its evaluation; not saved, a resumed run makes them anew
    figures: list[Figure] = dataclasses.field(default_factory=list, repr=False, compare=False)
    # beyond some thousand, only steps whose number this divides are kept
    every: int = 1

    def log(self, row: dict[str, Any]) -> None:
        """Add a step; a long run keeps every other one, then every fourth and so on, so that its log stays small."""
        if row["step"] % self.every == 0:
            self.steps.append(row)
        if len(self.steps) > MOST_STEPS:
            self.every *= 2
            self.steps = [row for row in self.steps if row["step"] % self.every == 0]

    @property
    def losses(self) -> list[float]:
        """The loss of every update that was logged."""
        return [row["loss"] for row in self.steps]

    def last(self, name: str) -> Any:
        """The newest value of a column of `epochs`."""
        for row in reversed(self.epochs):
            if name in row:
                return row[name]
        raise KeyError(
            f"no epoch has '{name}'; there are {sorted({key for row in self.epochs for key in row})}"
        )

    def cut(self, step: int, epoch: int) -> None:
        """Remove rows after a step and after a number of epochs, which a resumed run repeats."""
        self.steps = [row for row in self.steps if row["step"] <= step]
        self.evaluations = [row for row in self.evaluations if row["step"] <= step]
        self.epochs = [row for row in self.epochs if row["step"] <= step and row["epoch"] <= epoch]

    def write_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the epochs as a CSV file."""
        columns = list(dict.fromkeys(key for row in self.epochs for key in row))
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, columns)
        writer.writerow({name: csv_cell(name) for name in columns})
        writer.writerows({name: csv_cell(cell) for name, cell in row.items()} for row in self.epochs)
        write_bytes(path, text.getvalue().encode())

    def save(self, path: Path) -> None:
        """Write all rows as JSON; an older file is replaced whole."""
        rows = {name: value for name, value in vars(self).items() if name != "figures"}
        write_bytes(path, json.dumps(rows).encode())

    @classmethod
    def load(cls, path: Path) -> History:
        """Read what `save` wrote; nothing where there is no such file."""
        if not path.is_file():
            return cls()
        try:
            document = read_json(path)
            return cls(
                steps=_rows(document["steps"], "step"),
                epochs=_rows(document["epochs"], "step", "epoch"),
                range_test=_rows(document.get("range_test", ())),
                confusion=_counts(document.get("confusion", ())),
                classes=[str(name) for name in document.get("classes", ())],
                evaluations=_rows(document.get("evaluations", ()), "step"),
                skipped=max(0, int(document.get("skipped", 0))),
                every=max(1, int(document.get("every", 1))),
            )
        except (ValueError, KeyError, TypeError, OSError, LimitError):
            return cls()  # a log is not worth failing a resume for


def _rows(rows: Any, *counts: str) -> list[dict[str, Any]]:
    """Rows of plain cells, each with these counts; a `ValueError` for anything else."""
    for row in list(rows):
        if not isinstance(row, dict) or not all(type(row.get(name)) is int for name in counts):
            raise ValueError("not a row of a history")
        if any(isinstance(cell, dict | list) for cell in row.values()):
            raise ValueError("a cell of a history that is a table")
        if any(isinstance(text, str) and len(text) > _LONGEST for text in (*row, *row.values())):
            raise ValueError("a name or a cell of a history that is a text")
    return list(rows)


def _counts(table: Any) -> list[list[int]]:
    """A square of counts; a `ValueError` for anything else."""
    rows = [list(row) for row in table]
    if any(len(row) != len(rows) or not all(type(cell) is int for cell in row) for row in rows):
        raise ValueError("not a table of counts")
    return rows
