"""A teacher in the step: its loss is the formula's, with labels or without, and one of other classes is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from onward import artifacts
from onward.api import CheckpointState, Module
from onward.artifacts.teacher import Distillation
from onward.errors import ModelError

ROWS, FEATURES = 6, 5


def linear(outputs: int = 3, seed: int = 0, *, name: str = "x", classes: str = "") -> onnx.ModelProto:
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> net (float[n, {FEATURES}] {name}) => (float[n, {outputs}] y) '
        f"{{ y = MatMul({name}, w) }}"
    )
    weight = np.random.default_rng(seed).normal(size=(FEATURES, outputs)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    if classes:
        model.metadata_props.add(key="onward.classes", value=json.dumps(classes.split()))
    return model


X = np.random.default_rng(3).normal(size=(ROWS, FEATURES)).astype(np.float32)
LABELS = np.arange(ROWS) % 3


def answers(model: onnx.ModelProto) -> np.ndarray:
    return np.asarray(
        onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": X})[0], np.float64
    )


def log_softmax(scores: np.ndarray) -> np.ndarray:
    return scores - np.log(np.exp(scores).sum(1, keepdims=True))


def loss_of(folder: Path, *inputs: np.ndarray, **options: Any) -> float:
    artifacts.generate_artifacts(linear(), artifact_directory=folder, **options)
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    assert list(state.to_data().trainable) == ["w"] and not state.to_data().frozen
    return float(Module(folder / "training_model.onnx", state)(*inputs))


def test_scores_of_classes_are_compared_at_a_temperature(tmp_path: Path) -> None:
    student, taught = (log_softmax(answers(m) / 3) for m in (linear(), linear(seed=1)))
    divergence = 9 * np.mean(np.sum(np.exp(taught) * (taught - student), axis=1))
    own = -np.mean(log_softmax(answers(linear()))[np.arange(ROWS), LABELS])
    teacher = Distillation(linear(seed=1), temperature=3, weight=0.25)
    loss = loss_of(tmp_path, X, LABELS, loss="cross-entropy", teacher=teacher)
    assert loss == pytest.approx(0.75 * own + 0.25 * divergence, rel=1e-5)


def test_vectors_and_numbers_need_no_labels(tmp_path: Path) -> None:
    student, taught = answers(linear()), answers(linear(seed=1))
    lengths = np.linalg.norm(student, axis=1) * np.linalg.norm(taught, axis=1)
    cosines = np.sum(student * taught, axis=1) / lengths
    assert loss_of(tmp_path, X, teacher=linear(seed=1)) == pytest.approx(1 - cosines.mean(), rel=1e-5)
    numbers = Distillation(linear(seed=1), kind="numbers")
    loss = loss_of(tmp_path / "numbers", X, teacher=numbers)
    assert loss == pytest.approx(np.mean((student - taught) ** 2), rel=1e-5)


def test_a_vocabulary_is_on_the_last_axis(tmp_path: Path) -> None:
    student, teacher = (
        onnx.parser.parse_model(
            '<ir_version: 8, opset_import: ["": 17]> net (float[n, t, 5] x) => (float[n, t, 3] logits) '
            "{ logits = MatMul(x, w) }"
        )
        for _ in range(2)
    )
    for seed, model in enumerate((student, teacher)):
        model.graph.initializer.extend(linear(seed=seed).graph.initializer)
    artifacts.generate_artifacts(student, artifact_directory=tmp_path, teacher=teacher)
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    loss = float(Module(tmp_path / "training_model.onnx", state)(X.reshape(2, 3, FEATURES)))
    own, taught = (log_softmax(answers(linear(seed=seed)) / 2) for seed in (0, 1))
    assert loss == pytest.approx(4 * np.mean(np.sum(np.exp(taught) * (taught - own), axis=1)), rel=1e-5)


def test_a_teacher_leaves_no_trace_in_the_deployed_model(tmp_path: Path) -> None:
    model = linear()
    before = model.SerializeToString()
    artifacts.generate_artifacts(model, artifact_directory=tmp_path, teacher=model)
    assert model.SerializeToString() == before
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")
    module.export_model_for_inferencing(tmp_path / "small.onnx", ["y"])
    deployed = onnx.load(tmp_path / "small.onnx")
    assert [tensor.name for tensor in deployed.graph.initializer] == ["w"] and len(deployed.graph.node) == 1


# the teacher, and what its error says
REFUSED = {
    "other width": (linear(4), r"the teacher answers \['n', '4'\] and the model \['n', '3'\]"),
    "other classes": (linear(classes="cat dog cow"), "other classes: 'cat' where the model has 'dog'"),
    "other input": (
        onnx.parser.parse_model(
            '<ir_version: 8, opset_import: ["": 17]> net (int64[n, 3] z) => (float[n, 3] y) { y = Cast<to=1>(z) }'
        ),
        "the teacher reads 'z'",
    ),
    "no file": ("missing.onnx", "no teacher at 'missing.onnx'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_teacher_that_does_not_fit_is_an_error(case: str, tmp_path: Path) -> None:
    teacher, message = REFUSED[case]
    with pytest.raises(ModelError, match=message):
        artifacts.generate_artifacts(
            linear(classes="dog cat cow"), loss="cross-entropy", artifact_directory=tmp_path, teacher=teacher
        )


@pytest.mark.parametrize(
    ("options", "message"), [({"temperature": 0}, "temperature is 0"), ({"weight": 2}, "is 2")]
)
def test_settings_that_mean_nothing_are_errors(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Distillation("self", **options)  # type: ignore[arg-type]
