"""Options of tasks: one set of names and defaults for Python, the command line and the config file; none is ignored."""

from __future__ import annotations

import itertools
import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from typer.main import get_command

import onward
from cli.test_finetune import draw, published
from onward.cli.app import app
from onward.tasks import OPTIONS, TASKS, find_task
from onward.tasks.check_options import OptionError, fields_of

Run = Any
NAMES = sorted({name for options in OPTIONS.values() for name in fields_of(options)})
PAIRS = [
    (task, name) for task, name in itertools.product(TASKS, NAMES) if name not in fields_of(OPTIONS[task])
]


@pytest.mark.parametrize(("task", "name"), PAIRS)
def test_an_option_of_another_task_is_refused(task: str, name: str) -> None:
    with pytest.raises(OptionError, match=f"{name} is no option of {task}") as error:
        TASKS[task].options({name: 1})
    owners = [other for other, options in OPTIONS.items() if name in fields_of(options)]
    assert all(owner in error.value.hint for owner in owners) and f"{task} takes epochs" in error.value.hint


def test_a_misspelt_option_and_task_have_a_suggestion() -> None:
    with pytest.raises(OptionError) as error:
        TASKS["image-classification"].options({"epoch": 3})
    assert "did you mean epochs?" in error.value.hint
    with pytest.raises(OptionError) as error:
        find_task("image-clasification")
    assert "did you mean 'image-classification'?" in error.value.hint


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"epochs": 0}, "epochs is 0: it must be 1 or more"),
        ({"hold_out": 0.95}, "hold_out is 0.95: it must be 0 or more, at most 0.9"),
        ({"learning_rate": float("nan")}, "learning_rate is nan: it must be a finite number"),
        ({"loss": "cros-entropy"}, "did you mean 'cross-entropy'"),
        ({"rank": 4}, "rank is for adapters, and none were asked for"),
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        TASKS["image-classification"].options(values)


def test_one_name_stands_for_a_list_of_one() -> None:
    options = TASKS["image-classification"].options(
        {"augment": "flip", "metrics": "f1", "frozen_params": "fc.*"}
    )
    assert (options.augment, options.metrics, options.frozen_params) == (["flip"], ["f1"], ["fc.*"])


def test_every_option_of_python_is_one_of_the_command_line_and_the_config_file() -> None:
    spellings = {
        flag for parameter in get_command(app).commands["finetune"].params for flag in parameter.opts
    }  # type: ignore[attr-defined]
    for options in OPTIONS.values():
        for name, (_, _, option) in fields_of(options).items():
            assert option.python or f"--{name.replace('_', '-')}" in spellings
            assert set(option.flags) <= spellings


@pytest.mark.parametrize("task", TASKS)
def test_help_for_a_task_shows_its_options_alone(task: str, run: Run) -> None:
    shown = run("finetune", "--task", task, "--help").stdout
    # rich shortens long names in a narrow terminal: their beginning is enough
    for name in NAMES:
        (_, _, option) = next(fields_of(o)[name] for o in OPTIONS.values() if name in fields_of(o))
        if not option.python:
            spelling = re.compile(rf"--{name.replace('_', '-')}"[:16] + r"(?![a-z-]*-[a-z])")
            assert bool(spelling.search(shown)) == (name in fields_of(OPTIONS[task])), name


@pytest.fixture
def points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table model with class names of its own, and data."""
    monkeypatch.chdir(tmp_path)
    model = published("table")
    del model.metadata_props[:]
    model.metadata_props.add(key="onward.classes", value=json.dumps(["oak", "fir", "yew", "ash"]))
    onnx.save(model, "model.onnx")
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(80, 3))
    words = np.asarray(["fir", "oak", "yew"])[rows.argmax(axis=1)]
    lines = ["a,b,c,tree", *(f"{a:.4f},{b:.4f},{c:.4f},{w}" for (a, b, c), w in zip(rows, words))]
    Path("trees.csv").write_text("\n".join(lines))
    lines = ["a,b,c,height", *(f"{a:.4f},{b:.4f},{c:.4f},{a + b:.4f}" for a, b, c in rows)]
    Path("heights.csv").write_text("\n".join(lines))
    return tmp_path


TABLE = {
    "epochs": 3, "learning_rate": 0.02, "standardize": True, "label_smoothing": 0.1, "class_weights": "balanced",
    "schedule": "cosine", "hold_out": 0.25, "seed": 7, "gradient_accumulation_steps": 2, "batch_size": 8,
    "warmup": 2, "clip_norm": 0.5, "ema": 0.9, "metrics": ["accuracy", "f1"],
}  # fmt: skip
PICTURES = {
    "epochs": 2, "learning_rate": 0.01, "normalize": "half", "augment": ["flip"], "seed": 3,
    "hold_out": 0.5, "batch_size": 4, "optimizer": "sgd", "batch_norm": "frozen", "label_smoothing": 0.05,
}  # fmt: skip


@pytest.mark.parametrize(("data", "options"), [("trees.csv", TABLE), ("pictures", PICTURES)])
def test_python_the_command_line_and_the_config_file_give_the_same(
    points: Path, run: Run, data: str, options: dict[str, Any]
) -> None:
    if data == "pictures":
        draw(Path(data), 6)
        onnx.save(published(), "model.onnx")
    python = onward.finetune("model.onnx", data, progress=False, **options).metrics
    flags: list[Any] = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            flags.append(flag)
        else:
            flags += [part for one in (value if isinstance(value, list) else [value]) for part in (flag, one)]
    base = ["finetune", "model.onnx", "-d", data, "--json"]
    command = run(*base, "-o", "flags.onnx", *flags).json["metrics"]
    lines = [f"{name.replace('_', '-')} = {json.dumps(value)}" for name, value in options.items()]
    Path("onward.toml").write_text("\n".join(["[finetune]", *lines]))
    file = run(*base, "-o", "file.onnx", "--config", "onward.toml").json["metrics"]
    assert python == pytest.approx(command) and command == pytest.approx(file)
    assert onnx.load("flags.onnx").graph == onnx.load("file.onnx").graph


def test_the_task_is_found_and_said_with_its_reason(points: Path, run: Run) -> None:
    said = run("finetune", "model.onnx", "-d", "trees.csv", "-o", "a.onnx").stderr
    assert "task: tabular-classification, because 'trees.csv' is a table" in said
    found = run("finetune", "model.onnx", "-d", "heights.csv", "-o", "b.onnx", "--json").json
    assert found["task"] == "tabular-regression" and "mae" in found["metrics"]
    assert run("finetune", "model.onnx", "-d", "trees.csv", "-o", "c.onnx", "--loss", "mse", code=1)
    draw(Path("pictures"), 4)
    onnx.save(published(), "image.onnx")
    found = run("finetune", "image.onnx", "-d", "pictures", "-o", "d.onnx", "--json").json
    assert found["task"] == "image-classification"


def test_a_head_with_the_classes_of_the_data_goes_on_and_another_is_replaced(points: Path, run: Run) -> None:
    before = onnx.numpy_helper.to_array(
        next(t for t in onnx.load("model.onnx").graph.initializer if t.name == "fc_w")
    )
    said = run("finetune", "model.onnx", "-d", "trees.csv", "-o", "on.onnx", "-e", 1, "--lr", 1e-5)
    assert "the model's own head goes on: it has oak, fir, yew, ash" in said.stderr
    after = next(t for t in onnx.load("on.onnx").graph.initializer if t.name == "fc_w")
    np.testing.assert_allclose(onnx.numpy_helper.to_array(after), before, atol=1e-3)
    assert onward.load("on.onnx").classes == ["oak", "fir", "yew", "ash"]  # type: ignore[union-attr]
    # its order is the model's, not the alphabet's: training finds the trees by it
    result = onward.finetune("model.onnx", "trees.csv", epochs=30, learning_rate=0.05, progress=False)
    assert result.metrics["accuracy"] > 0.8
    assert result.predict({"a": 3.0, "b": 0.0, "c": 0.0})["label"] == "fir"
    text = Path("trees.csv").read_text().replace("fir", "elm")
    Path("others.csv").write_text(text)
    said = run("finetune", "model.onnx", "-d", "others.csv", "-o", "new.onnx", "-e", 1).stderr
    assert "a new head for elm, oak, yew: its own are oak, fir, yew, ash" in said


def test_a_rare_class_counts_with_balanced_weights(points: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 3)).astype(np.float32)
    labels = (x[:, 0] > 1.5).astype(np.int64)  # one in fifteen
    recalls = []
    for weights in (None, "balanced"):
        result = onward.finetune(
            "model.onnx", (x, labels), epochs=6, class_weights=weights, hold_out=0.0, progress=False
        )
        answers = result.predict(list(x[labels == 1]))
        recalls.append(np.mean([answer["label"] == "1" for answer in answers]))
    assert recalls[1] > recalls[0]


SAME_WORDS = [
    ("train", "--gradient-accumulation-steps"),
    ("train", "--accumulation"),
    ("train", "--learning-rate"),
]
SAME_WORDS += [(command, flag) for command in ("distributed", "finetune") for _, flag in SAME_WORDS[:3]]
SAME_WORDS += [
    (command, flag) for command in ("train", "distributed", "finetune") for flag in ("--lr", "--output")
]


@pytest.mark.parametrize(("command", "flag"), SAME_WORDS)
def test_commands_that_train_have_the_same_words(command: str, flag: str) -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    assert flag in {spelling for parameter in commands[command].params for spelling in parameter.opts}


def test_options_of_other_data_are_refused_by_train(points: Path, run: Run) -> None:
    run("artifacts", "model.onnx", "--classes", "fir,oak,yew")
    for flags in (
        ["--normalize", "imagenet"],
        ["--max-length", 4],
        ["--sample-rate", 100],
        ["--text-column", "a"],
    ):
        said = run("train", "artifacts", "-d", "trees.csv", *flags, code=1).stderr
        assert f"{flags[0].replace('sample-rate', 'sampling-rate')}" in said and "'trees.csv'" in said


def test_the_task_is_logged_in_python(points: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "onward"):
        onward.finetune("model.onnx", "trees.csv", epochs=1, progress=False)
    assert "task: tabular-classification" in caplog.text
