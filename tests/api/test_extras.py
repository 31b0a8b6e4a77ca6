"""What a checkpoint says besides its tensors may be anything: a word in place of a number is one error everywhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from onward import checkpoint
from onward.api import CheckpointState, Module
from onward.checkpoint import to_portable
from onward.errors import OnwardError
from onward.train.trainer import Trainer
from small_models import write_classifier

READERS: dict[str, Callable[[Path], object]] = {
    "Module": lambda folder: Module(
        folder / "training_model.onnx", CheckpointState.load_checkpoint(folder / "checkpoint")
    ),
    "Trainer": lambda folder: Trainer(folder),
    "to_portable": lambda folder: to_portable(
        checkpoint.load(folder / "checkpoint"), folder / "again.bin", layout=folder / "state.bin"
    ),
}


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artifacts")
    write_classifier(folder, portable=True)
    return folder


# a trainer brings a seed of its own
@pytest.mark.parametrize(
    ("reader", "name"),
    [
        (reader, name)
        for reader in READERS
        for name in ("seed", "train_step")
        if (reader, name) != ("Trainer", "seed")
    ],
)
@pytest.mark.parametrize("value", ["many", "7", float("nan"), float("inf")])
def test_an_extra_that_is_no_number_is_one_error(
    artifacts: Path, reader: str, name: str, value: object
) -> None:
    path = artifacts / "checkpoint"
    before = path.read_bytes()
    data = checkpoint.load(path)
    data.extras[name] = value  # type: ignore[assignment]
    try:
        checkpoint.save(data, path)
        with pytest.raises(OnwardError, match=f"'{name}' is .*not a finite number"):
            READERS[reader](artifacts)
    finally:
        path.write_bytes(before)
