"""Classification where several labels may hold for one sample: each has a probability of its own, by a sigmoid.

How samples are read and batches are made is that of every classification; the targets are truth values, a column for
each label (`onward.data.label_sets`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from onward import losses
from onward.artifacts.names import LossType
from onward.data.label_sets import join_lists
from onward.data.labels import numbered_classes
from onward.data.match_inputs import InputSpec
from onward.errors import DataError
from onward.escape import first_of
from onward.head import keep_head, replace_head
from onward.tasks.check_options import OptionError
from onward.tasks.classifier import THRESHOLD, MultiLabelClassifier
from onward.tasks.figures import WORST, class_table, sample_figure
from onward.tasks.labelled import find_head, labelled_batches, read_labelled
from onward.tasks.protocol import Adapted, Arrays, Scores, Source
from onward.tasks.scores import joint_metrics, sigmoid

if TYPE_CHECKING:
    from onward.data.read import Data
    from onward.info.model_info import ModelInfo
    from onward.tasks.options import LabelSets, Training, Weights
    from onward.train.metrics import Metric
    from onward.train.report import Figure

    class Options(LabelSets, Weights, Training):
        """The options of every multi-label classification."""


TARGET = InputSpec("labels", np.dtype(np.bool_), (None, None))
_PROBLEM = "multi_label_classification"
predictor = MultiLabelClassifier
COLUMNS = ("label", "precision", "recall", "F1", "average precision", "samples")


def read(data: Any, source: Source, options: Options, *, like: Data | None = None) -> Data:
    """Samples and the truth of each label; in memory lists of words do as well as `cat|dog` or a matrix."""
    if isinstance(data, tuple | list) and data:
        data = (*data[:-1], join_lists(data[-1]))
    return read_labelled(data, source, options, TARGET, classes=_label_names(options), like=like)


def _label_names(options: Options) -> list[str] | None:
    """The labels that the options name; None where the data or the model decides."""
    classes = options.classes
    if classes in (None, "data"):
        return None
    names = [name.strip() for name in classes.split(",")] if isinstance(classes, str) else list(classes)
    if len(set(names)) != len(names) or "" in names:
        raise OptionError(
            f"classes are {first_of(names)}: one is empty or there twice", hint="name each once"
        )
    return names


def adapt(source: Source, data: Data, options: Options) -> Adapted:
    """The model with a score for each label; its own head where it has every label of the data, in its order."""
    model, own = source.model, list(source.info.class_names or ())
    names, head = _label_names(options), find_head(source, options)
    arrays = data.arrays
    fits = own and data.classes and set(data.classes) <= set(own) and source.width in (None, len(own))
    if names is None and head is None and fits:
        truths = np.zeros((data.samples or 0, len(own)), bool)
        truths[:, [own.index(name) for name in data.classes or ()]] = arrays[TARGET.name]
        arrays[TARGET.name], data.classes = truths, own
        note = f"the model's own head goes on: it has {first_of(own)}"
        return Adapted(keep_head(model), own, note, problem_type=_PROBLEM)
    labels = names or data.classes or numbered_classes(np.shape(arrays[TARGET.name])[1])
    if labels is None:
        raise DataError("the data has more labels than can be numbered", "name them: classes=[…]")
    why = f"its own are {first_of(own)}" if own else "the model names no labels"
    new = replace_head(model, classes=labels, head=head, seed=options.seed)
    note = f"a new head for {first_of(labels)}, of which several may hold: {why}"
    return Adapted(new, labels, note, problem_type=_PROBLEM)


def loss(options: Options, data: Data, adapted: Adapted) -> Any:
    """Binary cross-entropy of each label, with the weights of its positive samples that the options ask for."""
    if options.class_weights is None:
        return LossType.BCEWithLogitsLoss
    weights = _positive_weights(options.class_weights, np.asarray(data.arrays[TARGET.name]))
    return functools.partial(losses.bce_with_logits, pos_weight=weights)


def _positive_weights(weights: Any, truths: np.ndarray) -> np.ndarray:
    """Samples without each label over those with it, so that both sides weigh the same; or the user's numbers."""
    if isinstance(weights, str):
        if weights != "balanced":
            raise ValueError(f"class_weights is '{weights}': it is 'balanced', or a number for each label")
        positive = truths.sum(axis=0)
        # a label that no sample has, or every one, has nothing to balance
        mixed = (positive > 0) & (positive < len(truths))
        return np.where(mixed, (len(truths) - positive) / np.maximum(positive, 1), 1.0).astype(np.float32)
    numbers = np.asarray(weights, np.float32)
    if numbers.shape != truths.shape[1:]:
        raise ValueError(f"class_weights has {numbers.size} numbers, and there are {truths.shape[1]} labels")
    return numbers


def metrics(options: Options, adapted: Adapted) -> Mapping[str, Metric]:
    """What is computed after each epoch."""
    return joint_metrics(
        ("mAP", "f1_micro", "f1_macro"),
        lambda outputs, inputs: _score(next(iter(outputs.values())), list(inputs.values())[-1], None)[0],
    )


def batches(data: Data, specs: Sequence[InputSpec], options: Options, *, training: bool) -> Any:
    """Batches of samples and the truth of their labels."""
    return labelled_batches(data, specs, options, target=TARGET.name, training=training)


def show(outputs: Arrays, inputs: Arrays, data: Data, adapted: Adapted) -> list[Figure]:
    """The scores of each label, and the samples with the largest loss."""
    logits, truths = next(iter(outputs.values())), np.asarray(data.arrays[TARGET.name], bool)
    _, rows = _score(logits, truths, adapted.labels)
    labels = np.asarray([str(row[0]) for row in rows])
    worst = np.argsort(-np.logaddexp(0, np.where(truths, -logits, logits)).mean(axis=1), kind="stable")
    title = "The samples that are hardest for the model"
    said = sigmoid(logits) >= THRESHOLD
    figures = [
        sample_figure(
            data,
            int(row),
            title,
            f"{_write(labels[truths[row]])}; the model says {_write(labels[said[row]])}",
        )
        for row in worst[:WORST]
    ]
    return [*class_table("Labels", COLUMNS, rows), *figures]


def _write(labels: np.ndarray) -> str:
    return ", ".join(labels) or "none"


def scores(outputs: Arrays, data: Data, info: ModelInfo) -> Scores:
    """Mean average precision and F1, micro and macro, and a row for each label."""
    values = next(iter(outputs.values()))
    # a file that ends in its sigmoid: the figures are those of scores
    if "probabilities" in info.outputs.values():
        with np.errstate(divide="ignore"):
            values = np.log(values) - np.log1p(-values)
    return _score(values, np.asarray(data.arrays[TARGET.name]), info.labels)


def _score(logits: np.ndarray, truths: np.ndarray, labels: Sequence[str] | None) -> Scores:
    if logits.shape != truths.shape:
        raise DataError(
            f"scores of shape {list(logits.shape)} and labels of shape {list(truths.shape)} do not go together",
            "is the model's first output its scores, and the data of its labels?",
        )
    truths, called = truths > 0.5, sigmoid(logits) >= THRESHOLD
    hits, calls, samples = (table.sum(axis=0) for table in (truths & called, called, truths))
    with np.errstate(invalid="ignore"):  # 0 of 0 is NaN, and is left out of means
        columns = hits / calls, hits / samples, 2 * hits / (calls + samples)
    precisions = [average_precision(logits[:, i], truths[:, i]) for i in range(logits.shape[1])]
    named = labels is not None and len(labels) == logits.shape[1]
    names = list(labels or ()) if named else [str(number) for number in range(logits.shape[1])]
    rows = [
        [name, *(float(column[i]) for column in columns), precisions[i], int(samples[i])]
        for i, name in enumerate(names)
    ]
    figures = {
        "mAP": _mean(precisions),
        "f1_micro": float(2 * hits.sum() / max(calls.sum() + samples.sum(), 1)),
        "f1_macro": _mean(columns[2]),
    }
    return figures, rows


def _mean(values: Any) -> float:
    """The mean of the labels that have a value."""
    values = np.asarray(values, np.float64)
    return float(np.nanmean(values)) if not np.isnan(values).all() else float("nan")


def average_precision(scores: np.ndarray, truths: np.ndarray) -> float:
    """Σ (Rₙ − Rₙ₋₁)·Pₙ over falling scores, equal ones together, as scikit-learn has it; NaN without a positive.

    >>> round(average_precision(np.array([0.9, 0.8, 0.7]), np.array([True, False, True])), 4)
    0.8333
    """
    if not truths.any():
        return float("nan")
    order = np.argsort(-scores, kind="stable")
    hits = np.cumsum(truths[order])
    # equal scores are one step of the curve: their order would be chance
    ends = np.append(np.flatnonzero(np.diff(scores[order])), len(scores) - 1)
    return float(np.sum(np.diff(hits[ends], prepend=0) * hits[ends] / (ends + 1)) / hits[-1])
