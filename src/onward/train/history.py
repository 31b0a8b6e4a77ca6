"""What happened in a run, as rows: one for each logged step and one for each evaluation."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

__all__ = ["MOST_STEPS", "History"]

MOST_STEPS = 4000


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
    # beyond some thousand, only steps whose number this divides are kept
    every: int = 1

    def log(self, row: dict[str, Any]) -> None:
        """Add a step; a long run keeps every other one, then every fourth and so on, so that its log stays small."""
        if row["step"] % self.every == 0:
            self.steps.append(row)
        if len(self.steps) > MOST_STEPS:
            self.every *= 2
            self.steps = [row for row in self.steps if row["step"] % self.every == 0]

    def last(self, name: str) -> Any:
        """The newest value of a column of `epochs`."""
        for row in reversed(self.epochs):
            if name in row:
                return row[name]
        raise KeyError(
            f"no epoch has '{name}'; there are {sorted({key for row in self.epochs for key in row})}"
        )

    def cut(self, step: int, epoch: int) -> None:
        """Forget what came after a step and after some whole epochs, which a resumed run does again."""
        self.steps = [row for row in self.steps if row["step"] <= step]
        self.epochs = [row for row in self.epochs if row["step"] <= step and row["epoch"] <= epoch]

    def write_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the epochs as a CSV file."""
        columns = list(dict.fromkeys(key for row in self.epochs for key in row))
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(self.epochs)

    def save(self, path: Path) -> None:
        """Write all rows as JSON; an older file is replaced whole."""
        temporary = path.with_name(f".{path.name}.new")
        temporary.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")
        os.replace(temporary, path)

    @classmethod
    def load(cls, path: Path) -> History:
        """Read what `save` wrote; nothing where there is no such file."""
        if not path.is_file():
            return cls()
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            return cls(
                steps=list(found["steps"]),
                epochs=list(found["epochs"]),
                range_test=list(found.get("range_test", ())),
                confusion=list(found.get("confusion", ())),
                classes=list(found.get("classes", ())),
                every=max(1, int(found.get("every", 1))),
            )
        except (ValueError, KeyError, TypeError):
            return cls()  # a log is not worth failing a resume for
