"""Labels that may hold together: the forms of data, their errors, the figures, and models from data to answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onward
from cli.test_finetune import published
from onward.data.match_inputs import InputSpec, specs_of
from onward.data.read import Data, DataOptions, read_data
from onward.errors import DataError
from onward.info.model_info import ModelInfo
from onward.tasks import find_task
from onward.tasks.choose_task import choose_task
from onward.tasks.multi_label import TARGET, average_precision
from onward.tasks.protocol import Adapted

Values = dict[str, Any]
LABELS = ["cat", "dog", "owl"]
TRUTHS = [[True, True, False], [False, False, True], [False, True, False]]
INPUTS = [*specs_of(published("table").graph), TARGET]
TABLES = {
    "cells.csv": "a,b,c,labels\n1,2,3,cat|dog\n4,5,6,owl\n7,8,9,dog\n",
    "lists.jsonl": "\n".join(
        json.dumps({"a": 1, "b": 2, "c": 3, "labels": labels})
        for labels in (["cat", "dog"], ["owl"], ["dog"])
    ),
    "columns.csv": "cat,a,dog,b,owl,c\n1,1,1,2,0,3\n0,4,0,5,1,6\n0,7,1,8,0,9\n",
}
COLUMNS = {"label": "cat,dog,owl"}


def write(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder / name


def examples(count: int = 120) -> tuple[np.ndarray, np.ndarray]:
    """Learnable: each label says whether a number is above a bound of its own."""
    x = np.random.default_rng(0).normal(size=(count, 3)).astype(np.float32)
    return x, x > np.asarray([0.0, 0.3, -0.3], np.float32)


@pytest.mark.parametrize("name", TABLES)
def test_cells_lists_and_columns_of_labels_are_the_same_data(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, name, TABLES[name])
    options = DataOptions(**COLUMNS if name == "columns.csv" else {})
    data = read_data([(None, path)], INPUTS, options)
    assert data.classes == LABELS and (data.arrays or {})["labels"].tolist() == TRUTHS
    assert (data.arrays or {})["x"].shape == (3, 3)


def test_the_models_labels_decide_the_order_and_find_their_columns(tmp_path: Path) -> None:
    order = ["owl", "cat", "dog"]
    for name, text in TABLES.items():
        data = read_data([(None, write(tmp_path, name, text))], INPUTS, DataOptions(classes=order))
        assert data.classes == order
        assert (data.arrays or {})["labels"].tolist() == [[c, a, b] for a, b, c in TRUTHS]


def test_a_row_of_zeros_is_a_sample_without_a_label(tmp_path: Path) -> None:
    path = write(tmp_path, "t.csv", "a,b,c,cat,dog\n1,2,3,0,0\n4,5,6,1,1\n")
    data = read_data([(None, path)], INPUTS, DataOptions(label="cat,dog"))
    assert (data.arrays or {})["labels"].tolist() == [[False, False], [True, True]]


ROW = "a,b,c,labels\n1,2,3,cat\n4,5,6,"
MISTAKES: list[tuple[str, str, Values, str]] = [
    ("t.csv", ROW + "cat|emu\n", {"classes": LABELS}, "t.csv', row 3: the label 'emu' is none of cat, dog, owl"),
    ("t.csv", ROW + '""\n', {}, "t.csv', row 3: the set of labels is empty"),
    ("t.csv", ROW + "cat||dog\n", {}, "t.csv', row 3: 'cat||dog' has an empty label"),
    ("t.jsonl", '{"a": 1, "b": 2, "c": 3, "labels": ["x"]}\n{"a": 1, "b": 2, "c": 3, "labels": []}', {},
     "t.jsonl', row 2: the set of labels is empty"),
    ("t.jsonl", '{"a": 1, "b": 2, "c": 3, "labels": ["x"]}\n{"a": 1, "b": 2, "c": 3, "labels": ["x|y"]}', {},
     "t.jsonl', row 2: 'labels' has 'x|y'"),
    ("t.jsonl", '{"a": 1, "labels": ["x"]}\n{"a": 1, "labels": "x"}', {}, "t.jsonl', row 2: 'labels' is no list"),
    ("t.csv", "a,b,c,cat,dog\n1,2,3,0,1\n4,5,6,2,1\n", {"label": "cat,dog"},
     "t.csv', row 3: 'cat' is 2, and the column of a label has 0 and 1"),
    ("t.csv", "a,b,c,cat\n1,2,3,0\n4,5,6,1\n", {"label": "cat,dog"}, "t.csv' has no column 'dog'"),
    ("t.jsonl", '{"a": 1, "b": 2, "c": 3, "labels": ["x"]}\n{"a": 1, "b": 2, "c": 3}', {},
     "line 2: 'labels' is not in every line"),
    ("t.csv", "a,b,c,cat,emu\n1,2,3,0,1\n", {"label": "cat,emu", "classes": LABELS}, "the label 'emu' is none of cat"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "options", "message"), MISTAKES, ids=[m[3][:40] for m in MISTAKES])
def test_wrong_labels_are_an_error_that_says_where(
    tmp_path: Path, name: str, text: str, options: Values, message: str
) -> None:
    with pytest.raises(DataError) as error:
        read_data([(None, write(tmp_path, name, text))], INPUTS, DataOptions(**options))
    assert message in str(error.value) and error.value.hint


INFO = ModelInfo.stated("config.json", problem_type="multi_label_classification")
X = np.zeros((3, 3), np.float32)
CHOICES: list[tuple[str, Any, Values, ModelInfo]] = [
    ("multi-label", "cells.csv", {}, ModelInfo()),
    ("multi-label", "lists.jsonl", {}, ModelInfo()),
    ("multi-label", "columns.csv", COLUMNS, ModelInfo()),
    ("multi-label", (X, np.asarray(TRUTHS)), {}, ModelInfo()),
    ("multi-label", (X, [["cat", "dog"], ["owl"], ["dog"]]), {}, ModelInfo()),
    ("multi-label", (X, ["cat", "dog", "dog"]), {}, INFO),
    ("classification", (X, ["cat", "dog", "dog"]), {}, ModelInfo()),
    ("classification", (X, np.eye(3)), {}, ModelInfo()),
    ("classification", "columns.csv", {"label": "cat"}, ModelInfo()),
    ("classification", "columns.csv", {}, ModelInfo()),
    ("classification", "cells.csv", {"loss": "cross-entropy"}, ModelInfo()),
    ("regression", "columns.csv", {"loss": "mse"}, INFO),
]


@pytest.mark.parametrize(("kind", "data", "values", "info"), CHOICES)
def test_the_data_or_the_model_say_that_labels_hold_together(
    tmp_path: Path, kind: str, data: Any, values: Values, info: ModelInfo
) -> None:
    source = write(tmp_path, data, TABLES[data]) if isinstance(data, str) else data
    assert choose_task(info, INPUTS[:1], source, values)[0].name == f"tabular-{kind}"


def test_figures_are_those_of_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(1)
    truths = rng.random((60, 5)) < 0.3
    logits = np.round(rng.normal(size=(60, 5)) + truths, 1)  # rounded: equal scores count together
    functions = find_task("tabular-multi-label").functions
    info = ModelInfo(labels=tuple("vwxyz"))
    figures, rows = functions.scores({"y": logits}, Data({"labels": truths}), info)
    called = logits >= 0
    assert figures == pytest.approx(
        {
            "mAP": metrics.average_precision_score(truths, logits, average="macro"),
            "f1_micro": metrics.f1_score(truths, called, average="micro"),
            "f1_macro": metrics.f1_score(truths, called, average="macro"),
        }
    )
    precision, recall, f1, samples = metrics.precision_recall_fscore_support(truths, called)
    for i, row in enumerate(rows):
        average = metrics.average_precision_score(truths[:, i], logits[:, i])
        assert row[0] == "vwxyz"[i]
        assert row[1:] == pytest.approx([precision[i], recall[i], f1[i], average, samples[i]])


def test_a_label_that_nothing_has_is_left_out_of_means() -> None:
    assert np.isnan(average_precision(np.arange(3.0), np.zeros(3, bool)))
    functions = find_task("tabular-multi-label").functions
    logits, truths = np.asarray([[3.0, -1], [-3, -1]]), np.asarray([[True, False], [False, False]])
    figures, rows = functions.scores({"y": logits}, Data({"labels": truths}), ModelInfo())
    assert figures == {"mAP": 1.0, "f1_micro": 1.0, "f1_macro": 1.0}
    assert np.isnan(rows[1][1:5]).all() and rows[1][5] == 0


@pytest.mark.parametrize(
    ("weights", "expected"), [("balanced", [3.0, 1.0, 1.0]), ([1, 2, 3], [1.0, 2.0, 3.0])]
)
def test_balanced_weights_count_samples_with_a_label_as_much_as_those_without(
    weights: Any, expected: list[float]
) -> None:
    task = find_task("tabular-multi-label")
    # one of four, none, all
    data = Data({"labels": np.asarray([[1, 0, 1], [0, 0, 1], [0, 0, 1], [0, 0, 1]], bool)})
    loss = task.functions.loss(task.options({"class_weights": weights}), data, Adapted(None, None, ""))
    assert loss.keywords["pos_weight"].tolist() == expected


def test_a_trained_model_answers_with_the_labels_that_hold(tmp_path: Path) -> None:
    x, truths = examples()
    lists = [[name for name, truth in zip(LABELS, row) if truth] or ["none"] for row in truths]
    result = onward.finetune(published("table"), (x, lists), epochs=30, learning_rate=0.05, progress=False)
    assert result.task == "tabular-multi-label" and result.metrics["mAP"] > 0.95
    assert result.classes == [*LABELS[:2], "none", "owl"]
    result.export(tmp_path / "m.onnx")
    loaded: Any = onward.load(tmp_path / "m.onnx")
    assert loaded.info.problem_type == "multi_label_classification"
    assert loaded.info.task == "tabular-classification"
    everything, one = np.asarray([2, 2, 2], np.float32), np.asarray([-2, 2, -2], np.float32)
    assert sorted(answer["label"] for answer in loaded(everything)) == LABELS
    assert [answer["label"] for answer in loaded(one)] == ["dog"]
    assert loaded([everything, one], top_k=1) == [loaded(everything)[:1], loaded(one)]
    assert len(loaded(one, threshold=0.0)) == 4 and loaded(one, threshold=1.0) == []
    with pytest.raises(ValueError, match="threshold is 2"):
        loaded(one, threshold=2)
    assert result.predict(one) == loaded(one)


def test_a_head_with_the_datas_labels_goes_on_in_its_own_order() -> None:
    model = published("table")
    del model.metadata_props[:]
    own = ["owl", "emu", "dog", "cat"]
    model.metadata_props.add(key="onward.classes", value=json.dumps(own))
    x, truths = examples()
    lists = [[name for name, truth in zip(LABELS, row) if truth] or ["emu"] for row in truths]
    result = onward.finetune(
        model, (x, lists), epochs=30, learning_rate=0.05, class_weights="balanced", progress=False
    )
    assert result.classes == own and any("own head goes on" in note for note in result.notes)
    assert result.metrics["mAP"] > 0.9
    assert [answer["label"] for answer in result.predict(np.asarray([-2, -2, 2], np.float32))] == ["owl"]


def test_texts_with_a_column_for_each_label(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    onnx.save(published("text"), tmp_path / "model.onnx")
    words = ["[PAD]", "[UNK]", "you", "are", "fool", "kill", "nice"]
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    rows = ["text,insult,threat"]
    for index in range(64):
        insult, threat = index % 2, index // 2 % 2
        rows.append(f"you are {'fool ' * insult}{'kill ' * threat}nice,{insult},{threat}")
    data = write(tmp_path, "comments.csv", "\n".join(rows))
    result = onward.finetune(
        tmp_path / "model.onnx", data, epochs=15, learning_rate=0.1, hold_out=0.25, progress=False
    )
    assert result.task == "text-multi-label" and result.metrics["f1_micro"] == 1.0
    assert result.predict("you are nice") == []
    assert {answer["label"] for answer in result.predict("kill fool")} == {"insult", "threat"}


def test_a_matrix_without_names_has_numbers_for_labels() -> None:
    result = onward.finetune(published("table"), examples(24), epochs=1, progress=False)
    assert result.task == "tabular-multi-label" and result.classes == ["0", "1", "2"]
    with pytest.raises(DataError, match=r"sample 0: the labels have 2\.0"):
        task = find_task("tabular-multi-label")
        onward.finetune(published("table"), (X, np.full((3, 2), 2.0)), task=task.name, progress=False)


def test_a_teacher_of_labels_is_followed_score_by_score(tmp_path: Path) -> None:
    data = examples(60)
    teacher = onward.finetune(published("table"), data, epochs=4, learning_rate=0.1, progress=False)
    teacher.export(tmp_path / "teacher.onnx")
    pupil = onward.finetune(
        published("table"), data, epochs=16, learning_rate=0.1, hold_out=0.0, progress=False,
        teacher=tmp_path / "teacher.onnx", teacher_weight=1.0,
    )  # fmt: skip
    for row in data[0][:5]:
        theirs, own = (
            {answer["label"]: answer["score"] for answer in one.predict(row, threshold=0.0)}
            for one in (teacher, pupil)
        )
        assert own == pytest.approx(theirs, abs=0.1)


def test_mixup_draws_all_labels_of_one_of_two_pictures() -> None:
    # every picture has one grey, and that of its labels
    truths = np.arange(16)[:, None] // [1, 2, 4, 8] % 2 == 1
    pixels = np.broadcast_to(np.arange(16)[:, None, None, None] / 16, (16, 3, 16, 16)).astype(np.float32)
    data = Data({"pixels": pixels, "labels": truths})
    specs = [*specs_of(published().graph), InputSpec("target", np.dtype(np.float32), (None, 4))]
    task = find_task("image-multi-label")
    options = task.options({"augment": ["mixup=1"], "batch_size": 16, "seed": 0})
    mixed, drawn = next(task.functions.batches(data, specs, options, training=True).epoch(0))
    assert {tuple(row) for row in drawn} <= {tuple(row) for row in truths.astype(np.float32)}
    greys = mixed[:, 0, 0, 0] * 16
    assert len(np.unique(drawn, axis=0)) < 16 and (np.abs(greys - np.round(greys)) > 0.01).any()
