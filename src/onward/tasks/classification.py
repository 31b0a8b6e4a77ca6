"""Classification: the label of a text, an image, a sound or a row of a table.

The first half trains a model to classify, the second has the answers of exported folders.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from onward import losses
from onward.artifacts.names import LossType
from onward.data.labels import numbered_classes
from onward.data.match_inputs import InputSpec
from onward.errors import DataError
from onward.escape import first_of
from onward.head import keep_head, replace_head
from onward.tasks.classifier import Classifier, MultiLabelClassifier
from onward.tasks.figures import WORST, class_table, sample_figure
from onward.tasks.labelled import find_head, labelled_batches, read_labelled
from onward.tasks.protocol import Adapted, Arrays, Scores, Source
from onward.tasks.scores import softmax

if TYPE_CHECKING:
    from onward.data.read import Data
    from onward.info.model_info import ModelInfo
    from onward.tasks.options import Classes, Training, Weights
    from onward.train.report import Figure

    class Options(Classes, Weights, Training):
        """The options of every classification."""


TARGET = InputSpec("labels", np.dtype(np.int64), (None,))
COLUMNS = ("class", "precision", "recall", "F1", "samples")


def read(data: Any, source: Source, options: Options, *, like: Data | None = None) -> Data:
    """Samples and the numbers of their classes."""
    return read_labelled(data, source, options, TARGET, classes=class_names(options), like=like)


def class_names(options: Any) -> list[str] | int | None:
    """The classes that the options name: names, a number, or None where the data or the model decides."""
    classes = options.classes
    if classes is None or classes == "data":
        return None
    if isinstance(classes, str):
        return int(classes) if classes.isdecimal() else [name.strip() for name in classes.split(",")]
    return classes if isinstance(classes, int) else list(classes)


def adapt(source: Source, data: Data, options: Options) -> Adapted:
    """The model with a head for the classes.

    A model whose own labels have every class of the data keeps its head, which has learned more than the data
    teaches; the labels of the data are numbered in its order then, whatever their own.
    """
    model, info, scores = source.model, source.info, options.loss != "nll"
    own = list(info.class_names or ())
    names, head = class_names(options), find_head(source, options)
    fits = own and data.classes and set(data.classes) <= set(own) and source.width in (None, len(own))
    if options.classes == "data" and head is None and fits:
        order = np.asarray([own.index(name) for name in data.classes or ()])
        arrays = data.arrays
        arrays[TARGET.name] = order[np.asarray(arrays[TARGET.name])]
        data.classes = own
        said = f"the model's own head goes on: it has {first_of(own)}"
        return Adapted(keep_head(model, scores=scores), own, said)
    if options.classes is None:
        if head is not None:
            raise ValueError("head needs classes: it is the layer to replace")
        return Adapted(model, data.classes, "the model keeps its head")
    if names is None:
        labels = np.asarray(data.arrays[TARGET.name])
        names = data.classes or (int(labels.max()) + 1 if labels.size else 1)
    labels_of_head = (numbered_classes(names) or []) if isinstance(names, int) else names
    if isinstance(names, int) and data.classes is not None:
        labels_of_head = data.classes
    why = f"its own are {first_of(own)}" if own else "the model names no classes"
    new = replace_head(model, classes=names, head=head, scores=scores, seed=options.seed)
    return Adapted(new, labels_of_head, f"a new head for {first_of(labels_of_head)}: {why}")


def loss(options: Options, data: Data, adapted: Adapted) -> Any:
    """The loss, with the weights of classes and the smoothing of labels that the options ask for."""
    function = losses.nll if options.loss == "nll" else losses.cross_entropy
    settings: dict[str, Any] = {}
    if options.class_weights is not None:
        settings["weight"] = _weights(options.class_weights, data, adapted.labels)
    if options.label_smoothing:
        if options.loss == "nll":
            raise ValueError(
                "label_smoothing needs loss='cross-entropy': nll has no part for the other classes"
            )
        settings["label_smoothing"] = options.label_smoothing
    if not settings:
        return LossType.NLLLoss if options.loss == "nll" else LossType.CrossEntropyLoss
    return functools.partial(function, **settings)


def _weights(weights: Any, data: Data, classes: Sequence[str] | None) -> np.ndarray:
    """samples / (classes · samples of the class), as scikit-learn's "balanced"; or the user's numbers."""
    labels = np.asarray(data.arrays[TARGET.name])
    count = len(classes) if classes is not None else int(labels.max()) + 1
    if isinstance(weights, str):
        if weights != "balanced":
            raise ValueError(f"class_weights is '{weights}': it is 'balanced', or a number for each class")
        # negative labels are those that the loss ignores
        sizes = np.bincount(labels[labels >= 0], minlength=count)
        return (sizes.sum() / (np.count_nonzero(sizes) * np.maximum(sizes, 1))).astype(np.float32)
    numbers = np.asarray(weights, np.float32)
    if numbers.shape != (count,):
        raise ValueError(f"class_weights has {numbers.size} numbers, and there are {count} classes")
    return numbers


def metrics(options: Options, adapted: Adapted) -> dict[str, str]:
    """What is computed after each epoch."""
    return {"accuracy": "accuracy"}


def batches(data: Data, specs: Sequence[InputSpec], options: Options, *, training: bool) -> Any:
    """Batches of samples and labels."""
    return labelled_batches(data, specs, options, target=TARGET.name, training=training)


def show(outputs: Arrays, inputs: Arrays, data: Data, adapted: Adapted) -> list[Figure]:
    """The scores of each class, and the samples with the largest loss."""
    logits, targets = next(iter(outputs.values())), np.asarray(data.arrays[TARGET.name])
    if logits.ndim != 2 or targets.ndim != 1 or len(logits) != len(targets):
        return []
    _, rows = _score(logits, targets, adapted.labels)
    labels = [row[0] for row in rows]
    probabilities = softmax(logits)
    counted = np.flatnonzero((targets >= 0) & (targets < len(labels)))
    right = probabilities[counted, targets[counted]]
    worst = counted[np.argsort(right, kind="stable")[:WORST]]
    figures = [
        sample_figure(
            data, int(row), "The samples that are hardest for the model",
            f"{labels[targets[row]]}; the model says {labels[logits[row].argmax()]} {probabilities[row].max():.0%}",
        )
        for row in worst
    ]  # fmt: skip
    return [*class_table("Classes", COLUMNS, rows), *figures]


def predictor(session: Any, info: ModelInfo, tokenizer: Any) -> Classifier:
    """A classifier of files, texts or rows; where several labels may hold, one that answers with those."""
    if info.is_multi_label:
        return MultiLabelClassifier(session, info, tokenizer)
    return Classifier(session, info, tokenizer)


def scores(outputs: Arrays, data: Data, info: ModelInfo) -> Scores:
    """Accuracy and mean F1, and a row for each class: its name, precision, recall, F1 and samples."""
    return _score(next(iter(outputs.values())), np.asarray(data.arrays[TARGET.name]), info.labels)


def _score(logits: np.ndarray, targets: np.ndarray, labels: Sequence[str] | None) -> Scores:
    if logits.ndim != 2 or targets.ndim != 1:
        raise DataError(
            f"scores of shape {list(logits.shape)} and labels of shape {list(targets.shape)} are no classification",
            "is the model's first output its scores?",
        )
    predicted, count = logits.argmax(axis=1), logits.shape[1]
    if targets.size and not 0 <= targets.min() <= targets.max() < count:
        raise DataError(
            f"a label is {targets.max()}, and the model has {count} classes", "is it another model's data?"
        )
    names = labels if labels is not None and len(labels) == count else numbered_classes(count) or range(count)
    rows = []
    for index, name in enumerate(names):
        hits = int(np.sum((predicted == index) & (targets == index)))
        called, samples = int(np.sum(predicted == index)), int(np.sum(targets == index))
        # a class that nothing is in, and that nothing is taken for, has no score: NaN, and is left out of the mean
        precision = hits / called if called else np.nan
        recall = hits / samples if samples else np.nan
        f1 = 2 * hits / (called + samples) if called + samples else np.nan
        rows.append([name, precision, recall, f1, samples])
    figures = {"accuracy": float(np.mean(predicted == targets))}
    return {**figures, "f1": float(np.nanmean([row[3] for row in rows]))}, rows
