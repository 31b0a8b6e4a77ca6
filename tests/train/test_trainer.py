"""Trainer: a run in one call, equal to the same run by hand."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from onward import Trainer, checkpoint
from onward.api import CheckpointState, LinearLRScheduler
from onward.artifacts import LossType, OptimType, build_artifacts, generate_artifacts
from onward.errors import ModelError, OnwardError
from onward.onnxblock import loss as losses
from onward.onnxblock import optim
from onward.train.callbacks import Callback, EarlyStopping, improves
from onward.train.history import History
from small_models import (
    classifier,
    load,
    one_thread,
    snapshot,
    start,
    with_weights,
    write_classifier,
    write_normalized,
)
from trainer_runs import data, kept


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_classifier(tmp_path_factory.mktemp("artifacts"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SGD, so that updates add up visibly."""
    return write_classifier(tmp_path_factory.mktemp("plain"), optimizer=OptimType.SGD)


def make(artifacts: Any, **options: Any) -> Trainer:
    return Trainer(artifacts, **{"learning_rate": 0.05, "session_options": one_thread(), **options})


# ---- training ------------------------------------------------------------------------------------


def test_a_run_equals_the_same_run_by_hand(artifacts: Path) -> None:
    trainer = make(artifacts, gradient_accumulation_steps=2, schedule="linear", warmup=1)
    x, labels = data(size=32)
    history = trainer.fit((x, labels), epochs=2, batch_size=4, shuffle=False)

    state, module, optimizer = start(artifacts)
    scheduler = LinearLRScheduler(optimizer, 1, 8, 0.05)
    optimizer.gradient_scale = 0.5
    expected = []
    for _ in range(2):
        for index in range(0, 32, 8):
            window = [module(x[i : i + 4], labels[i : i + 4])[0] for i in (index, index + 4)]
            expected.append((float(np.mean(window)), optimizer.get_learning_rate()))
            optimizer.step()
            module.lazy_reset_grad()
            scheduler.step()
    assert snapshot(trainer.state) == snapshot(state)
    assert [row["loss"] for row in history.steps] == pytest.approx([loss for loss, _ in expected], rel=1e-6)
    assert [row["learning_rate"] for row in history.steps] == [rate for _, rate in expected]
    assert trainer.step == trainer.total_steps == 8 and trainer.epoch == 2


@pytest.mark.parametrize("sizes", [(8, 8), (4, 4, 4, 4), (4, 4, 5, 3), (6, 6, 4), (1, 2, 4, 9)])
def test_accumulation_equals_the_larger_batch(plain: Path, sizes: tuple[int, ...]) -> None:
    x, labels = data(size=16)
    whole, parts = make(plain), make(plain, gradient_accumulation_steps=len(sizes))
    ends = np.cumsum([0, *sizes])
    pieces = [(x[a:b], labels[a:b]) for a, b in itertools.pairwise(ends)]
    one = whole.fit([(x, labels)] * 3, epochs=1)
    two = parts.fit(pieces * 3, epochs=1)
    assert whole.step == parts.step == 3
    for name, parameter in whole.state.parameters:
        np.testing.assert_allclose(parts.state.parameters[name].data, parameter.data, rtol=2e-5, atol=1e-7)
    for key in ("loss", "gradient_norm"):
        assert [r[key] for r in two.steps] == pytest.approx([r[key] for r in one.steps], rel=1e-5)


def test_labels_that_are_ignored_do_not_weigh(tmp_path: Path) -> None:
    folder = write_classifier(
        tmp_path, optimizer=OptimType.SGD, loss=losses.CrossEntropyLoss(ignore_index=-100)
    )
    x, labels = data(size=12)
    labels = labels.copy()
    labels[1:4] = labels[8:12] = -100  # one of four counts, all, none
    whole, parts = make(folder), make(folder, gradient_accumulation_steps=3)
    whole.fit([(x, labels)])
    parts.fit([(x[i : i + 4], labels[i : i + 4]) for i in (0, 4, 8)])
    for name, parameter in whole.state.parameters:
        np.testing.assert_allclose(parts.state.parameters[name].data, parameter.data, rtol=2e-5, atol=1e-7)
    assert parts.evaluate((x, labels), batch_size=4) == pytest.approx(
        whole.evaluate((x, labels), batch_size=12)
    )


def test_the_last_window_of_an_epoch_may_be_smaller(plain: Path) -> None:
    trainer = make(plain, gradient_accumulation_steps=3)
    trainer.fit(data(size=20), batch_size=4, epochs=2)  # five batches: windows of three and two
    assert trainer.step == trainer.total_steps == 4


def test_clipping(plain: Path) -> None:
    free, clipped = make(plain), make(plain, clip_norm=0.01, learning_rate=1.0)
    before = np.concatenate([p.data.ravel() for _, p in clipped.state.parameters])
    norm = free.fit([data(size=8)]).steps[0]["gradient_norm"]
    assert clipped.fit([data(size=8)]).steps[0]["gradient_norm"] == pytest.approx(
        norm, rel=1e-5
    )  # before clipping
    after = np.concatenate([p.data.ravel() for _, p in clipped.state.parameters])
    assert norm > 0.01 and np.linalg.norm(after - before) == pytest.approx(0.01, rel=1e-3)


def test_it_learns(artifacts: Path) -> None:
    trainer = make(artifacts, metrics=["accuracy"])
    before = trainer.evaluate(data(1))["accuracy"]
    history = trainer.fit(data(size=300), data(1, size=200), epochs=15)
    assert history.last("accuracy") > 0.9 > before


FORMS: dict[str, Any] = {
    "dict": lambda x, y: {"labels": y, "x": x},
    "list of tuples": lambda x, y: [(x[i : i + 8], y[i : i + 8]) for i in range(0, 32, 8)],
    "generator function of dicts": lambda x, y: (
        lambda: ({"x": x[i : i + 8], "labels": y[i : i + 8]} for i in range(0, 32, 8))
    ),
    "DataLoader": lambda x, y: DataLoader(TensorDataset(torch.tensor(x), torch.tensor(y)), batch_size=8),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_form_of_data_trains_the_same(artifacts: Path, form: Any) -> None:
    x, labels = data(size=32)
    expected, found = make(artifacts), make(artifacts)
    expected.fit((x, labels), (x, labels), batch_size=8, shuffle=False, epochs=2)
    found.fit(form(x, labels), form(x, labels), batch_size=8, shuffle=False, epochs=2)
    assert snapshot(found.state) == snapshot(expected.state)
    assert found.history.last("eval_loss") == expected.history.last("eval_loss")
    np.testing.assert_array_equal(found.predict(form(x, labels)), expected.predict(x))


def test_shuffling_differs_by_epoch_and_seed_only(plain: Path) -> None:
    def run(seed: int) -> dict[str, bytes]:
        trainer = make(plain, seed=seed)
        trainer.fit(data(size=32), batch_size=8, epochs=2)
        return snapshot(trainer.state)

    assert run(1) == run(1) != run(2)


def test_an_iterator_trains_for_one_epoch(artifacts: Path) -> None:
    trainer = make(artifacts)
    trainer.fit(iter([data(size=8)] * 3))
    assert trainer.step == 3
    before = snapshot(trainer.state)
    for arguments in ((iter([data()]),), ([data()], iter([data()]))):
        with pytest.raises(ValueError, match="used up after one epoch"):
            trainer.fit(*arguments, epochs=2)
    assert snapshot(trainer.state) == before


def test_a_second_fit_trains_on(plain: Path, tmp_path: Path) -> None:
    trainer = make(plain, output_directory=tmp_path, schedule="linear")
    trainer.fit(data(size=32), batch_size=8, epochs=2)
    first = snapshot(trainer.state)
    history = trainer.fit(data(size=32), batch_size=8, epochs=1)
    assert snapshot(trainer.state) != first
    assert [row["epoch"] for row in history.epochs] == [1, 2, 3] and trainer.step == trainer.total_steps == 12
    rates = [row["learning_rate"] for row in history.steps]
    assert rates[:8] == pytest.approx([0.05 * (1 - s / 8) for s in range(8)])
    assert rates[8:] == pytest.approx([0.05 * (1 - s / 4) for s in range(4)])  # a schedule of its own
    assert checkpoint.load_latest(tmp_path).path.name == "checkpoint-000000000012"
    again = make(plain, output_directory=tmp_path, schedule="linear")
    again.fit(data(size=32), batch_size=8, epochs=1, resume=True)
    assert again.step == 12 and snapshot(again.state) == snapshot(trainer.state)


def test_artifacts_in_memory_train_from_their_initial_state_each_time() -> None:
    made = build_artifacts(
        classifier(),
        requires_grad=["w1", "b1", "w2", "b2"],
        loss=LossType.CrossEntropyLoss,
        optimizer=OptimType.AdamW,
    )
    runs = [make(made, metrics=["accuracy"]) for _ in range(2)]
    for trainer in runs:
        trainer.fit(data(), data(1), epochs=2)
    assert snapshot(runs[0].state) == snapshot(runs[1].state)
    assert runs[0].history.last("accuracy") == runs[1].history.last("accuracy")


def test_batch_norm_trains_and_predicts(tmp_path: Path) -> None:
    trainer = make(write_normalized(tmp_path), metrics=["accuracy"])
    trainer.fit(data(size=200), data(1), epochs=5)
    assert np.any(trainer.state.parameters["mean"].data)
    found = trainer.predict(data(1)[0])
    accuracy = float(np.mean(np.argmax(np.asarray(found), 1) == data(1)[1]))
    assert trainer.evaluate(data(1))["accuracy"] == pytest.approx(accuracy)


# ---- evaluation and prediction -------------------------------------------------------------------


def test_evaluation_is_the_mean_over_samples_whatever_the_batches(artifacts: Path) -> None:
    trainer = make(artifacts, metrics=["accuracy", "f1", "perplexity"])
    found = [trainer.evaluate(data(size=47), batch_size=size) for size in (47, 10, 1)]
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-5)
    assert found[0]["perplexity"] == pytest.approx(np.exp(found[0]["loss"]))
    _, module = load(artifacts)
    assert found[0]["loss"] == pytest.approx(float(module.eval()(*data(size=47))[0]), rel=1e-6)


def test_metrics_judge_the_forward_output_whatever_else_is_returned(tmp_path: Path) -> None:
    folder = write_classifier(tmp_path, additional_output_names=["h"])
    seen: dict[str, list[str]] = {}

    def look(outputs: Any, inputs: Any) -> float:
        seen["outputs"], seen["inputs"] = list(outputs), list(inputs)
        return float(outputs["h"].shape[1])

    trainer = make(folder, metrics=["accuracy", look])
    found = trainer.evaluate(data())
    assert seen == {"outputs": ["scores", "h", "loss"], "inputs": ["x", "labels"]}
    scores = np.asarray(trainer.predict(data()[0]))
    assert found["accuracy"] == pytest.approx(np.mean(scores.argmax(1) == data()[1])) and found["look"] == 8


def test_evaluation_refuses_labels_without_a_class(artifacts: Path) -> None:
    x, labels = data()
    with pytest.raises(ValueError, match="'labels' has label 3"):
        make(artifacts).evaluate((x, labels + 1))


def test_predict_gives_outputs_or_any_value_by_name(artifacts: Path) -> None:
    trainer = make(artifacts)
    x, labels = data(size=21)
    p = {name: parameter.data for name, parameter in trainer.state.parameters}
    hidden = np.tanh(x @ p["w1"] + p["b1"])
    scores = trainer.predict(x, batch_size=8)
    assert isinstance(scores, np.ndarray)
    np.testing.assert_allclose(scores, hidden @ p["w2"] + p["b2"], rtol=1e-5, atol=1e-6)
    both = trainer.predict((x.astype(np.float64), labels), outputs=["h", "scores"], batch_size=8)
    assert isinstance(both, dict) and list(both) == ["h", "scores"]
    np.testing.assert_allclose(both["h"], hidden, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(both["scores"], scores)
    with pytest.raises(ModelError, match="could not be found"):
        trainer.predict(x, outputs=["nope"])


def test_sequences_of_different_lengths_are_evaluated(tmp_path: Path) -> None:
    text = (
        "net (int64[n, t] ids) => (float[n, t, 5] scores) { e = Gather (table, ids)  scores = MatMul (e, w) }"
    )
    model = with_weights(text, table=(9, 6), w=(6, 5))
    block = TokenLoss(ignore_index=-100)
    generate_artifacts(
        model,
        requires_grad=["table", "w"],
        loss=block,
        optimizer=OptimType.AdamW,
        artifact_directory=tmp_path,
    )
    rng = np.random.default_rng(0)
    batches = []
    for length in (3, 7, 5):
        ids = rng.integers(0, 9, (4, length))
        batches.append((ids, np.where(rng.random(ids.shape) < 0.3, -100, ids % 5)))
    trainer = make(tmp_path, metrics=["accuracy", "perplexity"])
    trainer.fit(batches, batches, epochs=40, shuffle=False)
    assert trainer.history.last("accuracy") > 0.95
    terms = [(float(trainer.evaluate([pair])["loss"]), np.sum(pair[1] >= 0)) for pair in batches]
    wanted = sum(loss * count for loss, count in terms) / sum(count for _, count in terms)
    assert trainer.evaluate(batches)["loss"] == pytest.approx(wanted, rel=1e-5)


class TokenLoss(losses.CrossEntropyLoss):
    """Cross entropy over scores whose classes are last."""

    def build(self, scores: str, labels_name: str = "labels") -> Any:  # type: ignore[override]
        import onnx

        model = self.base
        node = onnx.helper.make_node("Transpose", [scores], [f"{scores}.first"], perm=[0, 2, 1])
        model.graph.node.append(node)
        return super().build(f"{scores}.first", labels_name)


# ---- files ---------------------------------------------------------------------------------------


def test_checkpoints_are_kept_as_asked_and_the_best_apart(artifacts: Path, tmp_path: Path) -> None:
    trainer = make(artifacts, output_directory=tmp_path, keep=3, metrics=["accuracy"])
    history = trainer.fit(
        data(size=40), data(1), epochs=5, batch_size=8, save_every=2, best_metric="accuracy"
    )
    assert [name for name in kept(tmp_path) if name != "best"] == [
        f"checkpoint-{step:012d}" for step in (22, 24, 25)
    ]
    scores = [row["accuracy"] for row in history.epochs]
    assert trainer.best == {
        "metric": "accuracy",
        "value": max(scores),
        "epoch": scores.index(max(scores)) + 1,
    }
    best = make(artifacts, metrics=["accuracy"])
    for name, parameter in CheckpointState.load_checkpoint(tmp_path / "best").parameters:
        best.state.parameters[name] = parameter.data
    assert best.evaluate(data(1))["accuracy"] == max(scores)
    assert sorted(p.name for p in tmp_path.iterdir() if not p.name.startswith("checkpoint-")) == [
        "best", "history.json", "report.html",
    ]  # fmt: skip


def test_nothing_is_written_without_a_directory(artifacts: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    make(artifacts).fit(data(), data(1), epochs=2, save_every=1)
    assert not list(tmp_path.iterdir())


def test_history_has_a_row_for_each_update_and_each_epoch(artifacts: Path, tmp_path: Path) -> None:
    trainer = make(artifacts, output_directory=tmp_path, metrics=["accuracy"])
    history = trainer.fit(data(size=40), data(1), epochs=2, batch_size=8, log_every=3)
    assert [row["step"] for row in history.steps] == [3, 6, 9]
    assert all(
        set(row) == {"step", "epoch", "loss", "learning_rate", "gradient_norm"} for row in history.steps
    )
    assert [row["epoch"] for row in history.epochs] == [1, 2]
    assert set(history.epochs[0]) == set(trainer.columns)
    saved = json.loads((tmp_path / "history.json").read_text())
    assert saved["steps"] == history.steps and saved["epochs"] == history.epochs
    assert sum(map(sum, saved["confusion"])) == len(data(1)[1])
    assert History.load(tmp_path / "history.json") == history
    history.write_csv(tmp_path / "epochs.csv")
    head, *rows = (tmp_path / "epochs.csv").read_text().splitlines()
    assert head.split(",")[:2] == ["epoch", "step"] and len(rows) == 2
    assert History.load(tmp_path / "missing.json") == History()
    history.epochs[0]["loss"] = "x" * 10_000
    history.save(tmp_path / "history.json")
    assert History.load(tmp_path / "history.json") == History()
    with pytest.raises(KeyError, match="no epoch has 'nope'"):
        history.last("nope")


def test_the_report_needs_no_network(artifacts: Path, tmp_path: Path) -> None:
    trainer = make(artifacts, output_directory=tmp_path / "a<b>&c", metrics=["accuracy"])
    trainer.fit(data(size=40), data(1), epochs=3, batch_size=8)
    page = (tmp_path / "a<b>&c" / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|//[a-z]|<script|<link|@import|url\(", page)
    assert page.count("<svg") >= 4 and "accuracy" in page and "Loss" in page
    assert ">log</text>" in page.partition("Gradient norm")[2].partition("</svg>")[0]
    assert ">log</text>" not in page.partition("<h2>Loss")[2].partition("</svg>")[0]
    for link in re.findall(r'href="([^"]+)"', page):
        assert (tmp_path / "a<b>&c" / link).exists()
    trainer.save_report(tmp_path / "other.html", {"note": "<b>"})
    assert "&lt;b&gt;" in (tmp_path / "other.html").read_text(encoding="utf-8")


def test_a_report_of_little_or_of_infinities_is_still_a_page(artifacts: Path, tmp_path: Path) -> None:
    trainer = make(artifacts)
    trainer.save_report(tmp_path / "empty.html")
    trainer.history.steps = [{"step": i, "loss": v, "learning_rate": 0.0, "gradient_norm": 0.0}
                             for i, v in enumerate((np.nan, np.inf, 1e30, -1e-30))]  # fmt: skip
    trainer.history.epochs = [{"epoch": 1, "step": 3, "loss": np.nan, "accuracy": np.inf, "note": "a < b"}]
    trainer.save_report(tmp_path / "odd.html")
    for name in ("empty.html", "odd.html"):
        page = (tmp_path / name).read_text(encoding="utf-8")
        assert page.startswith("<!doctype html>") and page.rstrip().endswith("</html>")
    assert "a &lt; b" in page and "NaN" not in re.findall(r'points="([^"]*)"', page)


def test_export_writes_the_forward_outputs(artifacts: Path, tmp_path: Path) -> None:
    import onnxruntime as ort

    trainer = make(artifacts)
    trainer.fit(data())
    trainer.export(tmp_path / "model.onnx")
    (found,) = ort.InferenceSession(tmp_path / "model.onnx").run(None, {"x": data()[0]})
    np.testing.assert_allclose(found, trainer.predict(data()[0]), rtol=1e-6)


# ---- callbacks -----------------------------------------------------------------------------------


class Log(Callback):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_start(self, trainer: Trainer) -> None:
        self.calls.append("start")

    def on_step(self, trainer: Trainer, row: dict[str, Any]) -> None:
        self.calls.append(f"step {row['step']}")

    def on_epoch(self, trainer: Trainer, row: dict[str, Any]) -> None:
        self.calls.append(f"epoch {row['epoch']}")

    def on_end(self, trainer: Trainer) -> None:
        self.calls.append("end")


def test_callbacks_are_called_in_order_and_at_the_end_of_failures(artifacts: Path) -> None:
    log = Log()
    make(artifacts, callbacks=[log]).fit(data(size=8), epochs=2, batch_size=4)
    assert log.calls == ["start", "step 1", "step 2", "epoch 1", "step 3", "step 4", "epoch 2", "end"]
    log = Log()
    x, labels = data(size=8)
    with pytest.raises(ValueError, match="label 9"):
        make(artifacts, callbacks=[log]).fit([(x, labels), (x, labels * 0 + 9)])
    assert log.calls == ["start", "step 1", "end"]


def test_early_stopping_waits_for_its_patience(artifacts: Path) -> None:
    class Given(EarlyStopping):
        """Watches a curve that the test gives."""

        curve = (3.0, 2.0, 2.5, 1.95, 2.0, 2.0, 2.0, 1.0)

        def on_epoch(self, trainer: Trainer, row: dict[str, Any]) -> bool:
            row["loss"] = self.curve[row["epoch"] - 1]
            return super().on_epoch(trainer, row)

    for patience, delta, epochs in ((1, 0.0, 3), (2, 0.0, 6), (3, 0.0, 7), (2, 0.1, 4), (4, 0.0, 8)):
        trainer = make(artifacts, callbacks=[Given("loss", patience=patience, min_delta=delta)])
        assert len(trainer.fit(data(size=8), epochs=8).epochs) == epochs


def test_the_direction_of_a_metric() -> None:
    assert [improves(name) for name in ("loss", "eval_loss", "mse", "perplexity", "cer", "wer", "accuracy", "f1")] == [
        -1, -1, -1, -1, -1, -1, 1, 1,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "form", [lambda: data(size=8), lambda: lambda: iter([data(size=8)])], ids=["arrays", "stream"]
)
@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_a_bar_on_terminals_and_lines_in_files(
    artifacts: Path, terminal: bool, form: Any, monkeypatch: Any
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    stream = io.StringIO()
    stream.isatty = lambda: terminal  # type: ignore[method-assign]
    with contextlib.redirect_stderr(stream), contextlib.redirect_stdout(io.StringIO()) as out:
        make(artifacts).fit(form(), epochs=2)
    assert ("\x1b[" in stream.getvalue()) is terminal and not out.getvalue()
    if not terminal:
        lines = stream.getvalue().splitlines()
        assert [line.partition(" loss")[0] for line in lines] == ["epoch 1:", "epoch 2:"]


# ---- mistakes ------------------------------------------------------------------------------------


def test_impossible_settings_are_refused_before_training(artifacts: Path) -> None:
    for options, message in (
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps is 0"),
        ({"keep": 0}, "keep is 0"), ({"clip_norm": -1}, "clip_norm is -1"),
        ({"on_nonfinite": "panic"}, "on_nonfinite is 'panic'"), ({"metrics": ["acc"]}, "no metric 'acc'"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            make(artifacts, **options)
    log = Log()
    for options, fit, message in (
        ({}, {"epochs": 0}, "epochs is 0"), ({}, {"log_every": 0}, "log_every is 0"),
        ({}, {"save_every": -1}, "save_every is -1"), ({}, {"batch_size": 0}, "batch_size is 0"),
        ({"schedule": "cosin"}, {}, "no schedule 'cosin'.*did you mean 'cosine'"), ({"warmup": -1}, {}, "warmup is -1"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            make(artifacts, callbacks=[log], **options).fit(data(), **fit)
    with pytest.raises(KeyError, match="best_metric is 'accuracy', the epochs have"):
        make(artifacts, callbacks=[log], metrics=["accuracy"]).fit(data(), best_metric="accuracy")
    with pytest.raises(ValueError, match="needs the number of batches"):
        make(artifacts, callbacks=[log], schedule="linear").fit(lambda: iter([data()]))
    assert not log.calls
    with pytest.raises(KeyError, match="early stopping watches 'eval_loss', the epochs have"):
        make(artifacts, callbacks=[EarlyStopping()]).fit(data())
    for wrong in ({"patience": 0}, {"mode": "up"}):
        with pytest.raises(ValueError, match=r"patience is 0|mode is 'up'"):
            EarlyStopping(**wrong)


def test_data_without_a_batch_is_an_error(artifacts: Path) -> None:
    with pytest.raises(ValueError, match="the training data has no batch"):
        make(artifacts).fit([])
    with pytest.raises(ValueError, match="the evaluation data has no batch"):
        make(artifacts).evaluate(lambda: iter(()))
    with pytest.raises(ValueError, match="the data has no batch"):
        make(artifacts).predict(lambda: iter(()))


def test_missing_artifacts_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no directory of artifacts"):
        Trainer(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"lacks training_model.onnx and checkpoint"):
        Trainer(tmp_path)
    folder = write_classifier(tmp_path / "a", optimizer=None)
    with pytest.raises(ModelError, match="no optimizer model"):
        Trainer(folder)
    folder = write_classifier(tmp_path / "b", prefix="my_")
    with pytest.raises(ModelError, match="lacks training_model"):
        Trainer(folder)
    trainer = make(folder, prefix="my_")
    (folder / "my_eval_model.onnx").unlink()
    trainer.fit(data(size=8))
    without = make(folder, prefix="my_")
    for use in (lambda: without.evaluate(data()), lambda: without.predict(data()[0])):
        with pytest.raises(ModelError, match="Eval model was not provided"):
            use()


def test_skipped_updates_go_on(plain: Path) -> None:
    x, labels = data(size=24)
    bad = x.copy()
    bad[9] = np.nan
    trainer = make(plain, on_nonfinite="skip")
    trainer.fit((bad, labels), batch_size=8, shuffle=False)
    reference = make(plain)
    reference.fit([(x[:8], labels[:8]), (x[16:], labels[16:])])
    assert snapshot(trainer.state) == snapshot(reference.state)


def test_groups_of_parameters_reach_the_optimizer(tmp_path: Path) -> None:
    from onward.optim import ParameterGroup

    folder = write_classifier(
        tmp_path, optimizer=optim.SGD(), parameter_groups=[ParameterGroup(("b?",), learning_rate_scale=0.0)]
    )
    trainer = make(folder)
    before = snapshot(trainer.state)
    trainer.fit(data())
    after = snapshot(trainer.state)
    assert {name for name in before if before[name] != after[name]} == {"w1", "w2"}


@pytest.mark.parametrize("with_folder", [True, False], ids=["in a folder", "in memory"])
def test_export_after_early_stopping_writes_the_best_epoch(
    artifacts: Path, with_folder: bool, tmp_path: Path
) -> None:
    states: list[dict[str, np.ndarray]] = []

    class Remember(Callback):
        def on_epoch(self, trainer: Trainer, row: dict[str, Any]) -> None:
            states.append({name: parameter.data for name, parameter in trainer.state.parameters})

    # the loss of training falls, that of labels at random rises: the first epochs are the best
    x, labels = data(1)
    trainer = make(
        artifacts,
        learning_rate=0.3,
        output_directory=tmp_path / "run" if with_folder else None,
        callbacks=[EarlyStopping(patience=2), Remember()],
    )
    trainer.fit(data(), (x, np.roll(labels, 1)), epochs=50)
    assert trainer.best is not None and trainer.best["epoch"] == len(states) - 2
    written = {}
    for epoch, name in ((None, "default"), ("best", "best"), ("last", "last")):
        trainer.export(tmp_path / f"{name}.onnx", epoch=epoch)  # type: ignore[arg-type]
        model = onnx.load(tmp_path / f"{name}.onnx")
        written[name] = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    for name, state in (("default", states[-3]), ("best", states[-3]), ("last", states[-1])):
        np.testing.assert_array_equal(written[name]["w2"], state["w2"])
    assert not np.array_equal(states[-1]["w2"], states[-3]["w2"])


def test_export_writes_the_last_epoch_where_nothing_stopped_early(artifacts: Path, tmp_path: Path) -> None:
    trainer = make(artifacts)
    trainer.fit(data(), data(1), epochs=2)
    trainer.export(tmp_path / "model.onnx")
    with pytest.raises(OnwardError, match="no best epoch was kept"):
        trainer.export(tmp_path / "best.onnx", epoch="best")
    (found,) = [t for t in onnx.load(tmp_path / "model.onnx").graph.initializer if t.name == "w2"]
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(found), trainer.state.parameters["w2"].data)


def test_a_trainer_stopped_with_ctrl_c_writes_the_report(artifacts: Path, tmp_path: Path) -> None:
    class Press(Callback):
        def on_step(self, trainer: Trainer, row: dict[str, Any]) -> None:
            if row["step"] == 3:
                signal.raise_signal(signal.SIGINT)

    trainer = make(artifacts, output_directory=tmp_path, callbacks=[Press()])
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(data(), epochs=5, batch_size=8)
    assert checkpoint.load_latest(tmp_path).path.name.endswith("3")
    assert "Training of" in (tmp_path / "report.html").read_text("utf-8")


def test_a_run_ends_after_a_number_of_updates(artifacts: Path, tmp_path: Path) -> None:
    def run(**options: Any) -> Trainer:
        trainer = make(artifacts, output_directory=tmp_path / "run", resume=True)
        trainer.fit(data(size=40), data(1), epochs=2, batch_size=8, evaluate_every=3, **options)
        return trainer

    assert (first := run(max_updates=7)).step == 7
    assert [row["step"] for row in first.history.evaluations] == [3, 6]
    whole = make(artifacts)
    whole.fit(data(size=40), data(1), epochs=2, batch_size=8)
    assert snapshot(run().state) == snapshot(whole.state)
