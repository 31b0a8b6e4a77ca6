"""Metrics against scikit-learn and their formulas."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from sklearn import metrics as reference

from onward.train.evaluation import join
from onward.train.metrics import METRICS, compute, find_metrics

RNG = np.random.default_rng(0)
SCORES, LABELS = RNG.normal(size=(60, 5)).astype(np.float32), RNG.integers(0, 4, 60)
CHOSEN = SCORES.argmax(1)


def value(name: str, output: np.ndarray, target: np.ndarray, **ignored: int) -> float:
    found = compute(
        {name: METRICS[name]},
        {"scores": output, "loss": np.asarray(0.7)},
        {"x": SCORES, "y": target},
        ignored=ignored,
    )
    return found[name]


def test_accuracy_and_f1_are_scikit_learns() -> None:
    # class 4 is never a label, and is chosen sometimes
    assert value("accuracy", SCORES, LABELS) == pytest.approx(reference.accuracy_score(LABELS, CHOSEN))
    assert value("f1", SCORES, LABELS) == pytest.approx(reference.f1_score(LABELS, CHOSEN, average="macro"))


@pytest.mark.parametrize("ignored", [-100, 2])
def test_ignored_labels_are_not_judged(ignored: int) -> None:
    labels = LABELS.copy()
    labels[::3] = ignored
    counted = labels != ignored
    for name, wanted in (
        ("accuracy", reference.accuracy_score(labels[counted], CHOSEN[counted])),
        ("f1", reference.f1_score(labels[counted], CHOSEN[counted], average="macro")),
    ):
        assert value(name, SCORES, labels, y=ignored) == pytest.approx(wanted)


@pytest.mark.parametrize("shape", [(12, 5), (12, 1)])
def test_one_score_for_each_label_goes_by_its_sign(shape: tuple[int, ...]) -> None:
    scores = RNG.normal(size=shape)
    targets = RNG.integers(0, 2, shape).astype(np.float32)
    wanted = reference.accuracy_score(targets.ravel(), (scores > 0).ravel())
    assert value("accuracy", scores, targets) == pytest.approx(wanted)
    assert value("f1", scores, targets) == pytest.approx(
        reference.f1_score(targets.ravel(), (scores > 0).ravel(), average="macro")
    )


@pytest.mark.parametrize("axis", [1, 2])
def test_classes_may_be_on_axis_1_or_last(axis: int) -> None:
    scores = RNG.normal(size=(6, 7, 4))
    labels = RNG.integers(0, 4, (6, 7))
    given = np.moveaxis(scores, 2, axis)
    assert value("accuracy", given, labels) == pytest.approx(np.mean(scores.argmax(2) == labels))


def test_errors_of_regression_are_scikit_learns() -> None:
    target = RNG.normal(size=SCORES.shape).astype(np.float32)
    assert value("mse", SCORES, target) == pytest.approx(reference.mean_squared_error(target, SCORES))
    assert value("mae", SCORES, target) == pytest.approx(reference.mean_absolute_error(target, SCORES))


def test_a_column_and_a_vector_are_compared_one_by_one() -> None:
    found, target = np.arange(4.0).reshape(4, 1), np.arange(4.0) + 1
    assert value("mse", found, target) == 1.0
    with pytest.raises(ValueError, match=r"output of shape \(4, 1\) and a target of shape \(3,\)"):
        value("mse", found, target[:3])
    with pytest.raises(ValueError, match=r"scores of shape \(60, 5\) and labels of shape \(59,\)"):
        value("accuracy", SCORES, LABELS[1:])


def test_perplexity_is_e_to_the_loss() -> None:
    assert value("perplexity", SCORES, LABELS) == pytest.approx(math.exp(0.7))


def test_padding_is_not_judged() -> None:
    labels = join([np.array([[0, 1, 2]]), np.array([[3], [1]])])
    assert labels.tolist() == [[0, 1, 2], [3, -1, -1], [1, -1, -1]]
    scores = join([np.eye(4, dtype=np.float32)[[[0, 1, 0]]], np.eye(4, dtype=np.float32)[[[3], [0]]]])
    assert np.isnan(scores[1, 1]).all()
    assert value("accuracy", scores, labels) == pytest.approx(3 / 5)
    targets = join([np.ones((1, 2), np.float32), np.zeros((1, 1), np.float32)])
    assert value("mse", np.zeros((2, 2)), targets) == pytest.approx(2 / 3)


def test_functions_see_labels_as_they_are() -> None:
    def share(outputs: Any, inputs: Any) -> float:
        return float(np.mean(inputs["y"] == -100))

    labels = LABELS.copy()
    labels[:15] = -100
    assert compute({"share": share}, {}, {"y": labels}, ignored={"y": -100}) == {"share": 0.25}


def test_metrics_are_found_by_name_function_or_both() -> None:
    def own(outputs: Any, inputs: Any) -> float:
        return 1.0

    assert list(find_metrics("accuracy")) == ["accuracy"]
    assert list(find_metrics(["f1", own])) == ["f1", "own"]
    assert find_metrics({"mine": own, "top": "accuracy"}) == {"mine": own, "top": METRICS["accuracy"]}


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "unknown": (["acuracy"], ValueError, "no metric 'acuracy'.*did you mean 'accuracy'"),
    "a column's name": ({"loss": "mse"}, ValueError, "cannot be called 'loss'"),
    "twice": ([lambda o, i: 0.0, lambda o, i: 1.0], ValueError, "two metrics are called '<lambda>'"),
    "a number": ([3], TypeError, "a name or a function, got int"),
}


@pytest.mark.parametrize(("given", "error", "message"), WRONG.values(), ids=WRONG)
def test_wrong_metrics_are_refused(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        find_metrics(given)


def test_a_model_with_a_loss_alone_has_nothing_to_judge() -> None:
    with pytest.raises(ValueError, match="no output but the loss"):
        compute({"accuracy": METRICS["accuracy"]}, {"loss": np.asarray(1.0)}, {"y": LABELS}, ignored={})


def test_the_figures_of_scikit_learn() -> None:
    """top-k, AUC, confusion and R² are those of the field's reference."""
    from sklearn import metrics as reference

    from onward.train.metrics import METRICS, confusion

    rng = np.random.default_rng(0)
    scores, labels = rng.normal(size=(80, 6)), rng.integers(0, 6, 80)
    scores[np.arange(80), labels] += 1
    shares = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    outputs, inputs = {"scores": scores}, {"labels": labels}
    for k in (3, 5):
        expected = reference.top_k_accuracy_score(labels, scores, k=k)
        assert METRICS[f"top{k}"](outputs, inputs) == pytest.approx(expected)
    assert METRICS["auc"](outputs, inputs) == pytest.approx(
        reference.roc_auc_score(labels, shares, multi_class="ovr")
    )
    two = {"scores": scores[:, :2]}, {"labels": labels % 2}
    assert METRICS["auc"](*two) == pytest.approx(
        reference.roc_auc_score(labels % 2, scores[:, 1] - scores[:, 0])
    )
    one = {"scores": np.round(scores[:, 0], 1)}, {"labels": (labels == 0).astype(np.float32)}
    assert METRICS["auc"](*one) == pytest.approx(reference.roc_auc_score(labels == 0, one[0]["scores"]))
    matrix = confusion(outputs, inputs)
    assert matrix is not None
    np.testing.assert_array_equal(matrix, reference.confusion_matrix(labels, scores.argmax(axis=1)))
    target = scores[:, :1] * 2 + rng.normal(size=(80, 1))
    assert METRICS["r2"]({"y": scores[:, :1]}, {"t": target[:, 0]}) == pytest.approx(
        reference.r2_score(target[:, 0], scores[:, 0])
    )


@pytest.mark.parametrize("kind", [np.uint8, np.int64])
def test_labels_that_the_loss_ignores_are_in_no_metric_of_bytes_either(kind: type) -> None:
    outputs = {"scores": np.eye(2, dtype=np.float32)[[0, 1, 1]]}
    labels = {"labels": np.asarray([0, 1, 255], kind)}
    assert compute(find_metrics(["accuracy"]), outputs, labels, ignored={"labels": 255}) == {"accuracy": 1.0}
