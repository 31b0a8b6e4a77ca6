"""Regression: numbers of a text, an image, a sound or a row of a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.artifacts.names import loss_type
from onward.data.match_inputs import InputSpec
from onward.head import replace_head
from onward.tasks.classifier import Classifier
from onward.tasks.figures import WORST, sample_figure
from onward.tasks.labelled import find_head, labelled_batches, read_labelled
from onward.tasks.protocol import Adapted, Arrays, Scores, Source
from onward.train.metrics import mae, mse, r2

if TYPE_CHECKING:
    from onward.data.read import Data
    from onward.info.model_info import ModelInfo
    from onward.tasks.options import Numbers, Training, Weights
    from onward.train.report import Figure

    class Options(Numbers, Weights, Training):
        """The options of every regression."""


TARGET = InputSpec("target", np.dtype(np.float32), None)
predictor = Classifier
COLUMNS = ()


def read(data: Any, source: Source, options: Options, *, like: Data | None = None) -> Data:
    """Samples and their numbers."""
    return read_labelled(data, source, options, TARGET, classes=None, like=like)


def adapt(source: Source, data: Data, options: Options) -> Adapted:
    """The model with a head for as many numbers as the target has; its own, where that has learned numbers."""
    numbers = int(np.prod(np.shape(data.arrays[TARGET.name])[1:], initial=1))
    head = find_head(source, options)
    if source.info.is_regression and head is None and source.width == numbers:
        note = f"the model's own head goes on: it predicts {numbers} already"
        return Adapted(source.model, None, note, problem_type="regression")
    new = replace_head(source.model, classes=numbers, head=head, seed=options.seed)
    note = f"a new head for {numbers} number{'s' if numbers > 1 else ''}"
    return Adapted(new, None, note, problem_type="regression")


def loss(options: Options, data: Data, adapted: Adapted) -> Any:
    """The loss of the options."""
    return loss_type(options.loss)


def metrics(options: Options, adapted: Adapted) -> dict[str, str]:
    """What is computed after each epoch."""
    return {"mae": "mae"}


def batches(data: Data, specs: Sequence[InputSpec], options: Options, *, training: bool) -> Any:
    """Batches of samples and numbers."""
    return labelled_batches(data, specs, options, target=TARGET.name, training=training)


def show(outputs: Arrays, inputs: Arrays, data: Data, adapted: Adapted) -> list[Figure]:
    """The samples whose numbers are furthest from their targets."""
    numbers = next(iter(outputs.values())).reshape(data.samples or 0, -1)
    targets = np.asarray(data.arrays[TARGET.name]).reshape(len(numbers), -1)
    if numbers.shape != targets.shape:
        return []
    worst = np.argsort(-np.abs(numbers - targets).max(axis=1), kind="stable")[:WORST]
    title = "The samples that are furthest off"
    return [
        sample_figure(data, int(row), title, f"{_write(targets[row])}; the model says {_write(numbers[row])}")
        for row in worst
    ]


def _write(numbers: np.ndarray) -> str:
    return ", ".join(f"{number:.4g}" for number in numbers[:4]) + (" …" if len(numbers) > 4 else "")


def scores(outputs: Arrays, data: Data, info: ModelInfo) -> Scores:
    """Mean absolute and squared differences and the share of the variance that is explained."""
    inputs = {TARGET.name: np.asarray(data.arrays[TARGET.name])}
    return {"mae": mae(outputs, inputs), "mse": mse(outputs, inputs), "r2": r2(outputs, inputs)}, []
