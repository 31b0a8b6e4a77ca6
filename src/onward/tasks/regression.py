"""Regression: numbers of a text, an image, a sound or a row of a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from onward import losses
from onward.data.match_inputs import InputSpec
from onward.errors import DataError
from onward.graph.load import load_model
from onward.graph.passes.head import SCALE, stand_on
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
_LOSSES: dict[str, losses.LossFunction] = {
    "mse": losses.mse, "l1": losses.l1, "huber": losses.huber, "smooth-l1": losses.smooth_l1
}  # fmt: skip
predictor = Classifier
COLUMNS = ()


def read(data: Any, source: Source, options: Options, *, like: Data | None = None) -> Data:
    """Samples and their numbers."""
    return read_labelled(data, source, options, TARGET, classes=None, like=like)


def adapt(source: Source, data: Data, options: Options) -> Adapted:
    """The model with a head for as many numbers as the target has; its own, where that has learned numbers."""
    mean, deviation = _measure(data)
    head = find_head(source, options)
    if source.info.is_regression and head is None and source.width == len(mean):
        note = f"the model's own head goes on: it predicts {len(mean)} already"
        weights = load_model(source.model).graph.initializers
        scale = [name for name in SCALE if name in weights]
        return Adapted(source.model, None, note, problem_type="regression", frozen=scale)
    new = replace_head(
        source.model, classes=len(mean), head=head, seed=options.seed, mean=mean, deviation=deviation
    )
    note = f"a new head for {len(mean)} number{'s' if len(mean) > 1 else ''}"
    note += f", of mean {_write(mean)} and deviation {_write(deviation)}"
    return Adapted(new, None, note, problem_type="regression", frozen=SCALE)


def _measure(data: Data) -> tuple[np.ndarray, np.ndarray]:
    """The mean and the standard deviation of each number of the target."""
    target = np.asarray(data.arrays[TARGET.name], np.float64)
    columns = target.reshape(len(target), -1)
    if not np.isfinite(columns).all():
        row = int(np.argwhere(~np.isfinite(columns))[0][0])
        raise DataError(f"the number to predict of sample {row} is {_write(columns[row])}")
    deviation = columns.std(axis=0)
    # numbers that are all the same have no deviation to measure them by
    return columns.mean(axis=0), np.where(deviation > 0, deviation, 1.0)


def loss(options: Options, data: Data, adapted: Adapted) -> losses.LossFunction:
    """The loss of the options in deviations of the target: prices in thousands train like shares of one."""
    _, deviation = _measure(data)
    function = _LOSSES[options.loss]

    def compute(op: Any, predictions: ir.Value, target: ir.Value) -> ir.Value:
        scale = op.constant(stand_on(predictions, deviation))
        return function(op, op.Div(predictions, scale), op.Div(target, scale))

    return compute


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
