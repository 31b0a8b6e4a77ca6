"""Checkpoints go from Python to the page and back, and damage is found on the way."""

from __future__ import annotations

import base64
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from checkpoint.samples import encoded, fingerprint, sample
from onward import checkpoint
from onward.api import CheckpointState, Module, Optimizer
from onward.errors import CheckpointError
from onward.export import for_inference
from web.models import make_data
from web.test_training import RATE, python_curve

if TYPE_CHECKING:
    from web.browser import Browser

FIXTURES = Path(__file__).parents[1] / "checkpoint" / "fixtures"


def as_text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def resave(harness: Browser, content: bytes) -> bytes:
    answer = harness.evaluate(
        "(text) => harness.resave({checkpoint: Uint8Array.from(atob(text), (c) => c.charCodeAt(0))})",
        as_text(content),
    )
    return base64.b64decode(answer)


@pytest.mark.parametrize("seed", [0, 3])
def test_the_page_writes_the_bytes_that_python_wrote(harness: Browser, seed: int) -> None:
    content = encoded(sample(seed))
    assert resave(harness, content) == content


def test_tensors_behind_the_flatbuffer_are_read(harness: Browser) -> None:
    again = checkpoint.decode(resave(harness, encoded(sample(1), external_threshold=0)))
    assert fingerprint(again) == fingerprint(sample(1))


@pytest.mark.parametrize("name", ["original.ckpt", "original_nominal.ckpt"])
def test_files_of_the_original_are_read(harness: Browser, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", checkpoint.UncheckedCheckpointWarning)
        original = checkpoint.load(FIXTURES / name)
    again = checkpoint.decode(resave(harness, (FIXTURES / name).read_bytes()))
    assert fingerprint(again) == fingerprint(original)


def test_python_goes_on_where_the_page_stopped_and_exports(
    harness: Browser, models: dict[str, Path], tmp_path: Path
) -> None:
    whole, _ = python_curve(models["cnn"], "cnn")
    found = harness.evaluate("harness.curve", {"name": "cnn", "count": 60, "rate": RATE, "seed": 7})
    (tmp_path / "checkpoint").write_bytes(base64.b64decode(found["checkpoint"]))
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(models["cnn"] / "training_model.onnx", state, models["cnn"] / "eval_model.onnx")
    optimizer = Optimizer(models["cnn"] / "optimizer_model.onnx", module)
    data = make_data("cnn")
    module.eval()
    loss = float(module(data.x[:64], data.labels[:64]))
    np.testing.assert_allclose(loss, found["evaluation"], rtol=0, atol=1e-4)
    module.train()
    losses = []
    for i in range(60, 100):
        losses.append(float(module(data.x[16 * i : 16 * (i + 1)], data.labels[16 * i : 16 * (i + 1)])))
        optimizer.step()
        module.lazy_reset_grad()
    np.testing.assert_allclose(losses, whole[60:], rtol=0, atol=1e-4)
    report = for_inference(
        models["cnn"] / "eval_model.onnx",
        state,
        ["logits"],
        tmp_path / "model.onnx",
        inputs={"x": data.x[:8]},
    )
    assert report.parity is not None and report.parity.max_abs < 1e-4


def test_python_goes_on_in_the_middle_of_an_accumulation(
    harness: Browser, models: dict[str, Path], tmp_path: Path
) -> None:
    """50 steps of which three make an update: two gradients wait in the checkpoint."""
    whole, _ = python_curve(models["mlp"], "mlp", accumulate=3)
    found = harness.evaluate(
        "harness.curve", {"name": "mlp", "count": 50, "rate": RATE, "seed": 7, "accumulate": 3}
    )
    (tmp_path / "checkpoint").write_bytes(base64.b64decode(found["checkpoint"]))
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(models["mlp"] / "training_model.onnx", state)
    optimizer = Optimizer(models["mlp"] / "optimizer_model.onnx", module)
    data = make_data("mlp")
    losses = []
    for i in range(50, 100):
        losses.append(float(module(data.x[16 * i : 16 * (i + 1)], data.labels[16 * i : 16 * (i + 1)])))
        if (i + 1) % 3 == 0:
            optimizer.step()
            module.lazy_reset_grad()
    np.testing.assert_allclose(losses, whole[50:], rtol=0, atol=1e-4)


def test_the_page_goes_on_where_python_stopped(
    harness: Browser, models: dict[str, Path], tmp_path: Path
) -> None:
    whole, _ = python_curve(models["mlp"], "mlp")
    state = CheckpointState.load_checkpoint(models["mlp"] / "checkpoint")
    module = Module(models["mlp"] / "training_model.onnx", state, seed=7)
    optimizer = Optimizer(models["mlp"] / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(RATE)
    data = make_data("mlp")
    for i in range(50):
        module(data.x[16 * i : 16 * (i + 1)], data.labels[16 * i : 16 * (i + 1)])
        optimizer.step()
        module.lazy_reset_grad()
    state.properties["epoch"] = 3
    CheckpointState.save_checkpoint(state, tmp_path / "checkpoint", include_optimizer_state=True)
    found = harness.evaluate(
        "({text, ...rest}) => harness.resume({...rest, checkpoint: Uint8Array.from(atob(text), "
        "(c) => c.charCodeAt(0))})",
        {
            "name": "mlp",
            "first": 50,
            "count": 50,
            "text": as_text((tmp_path / "checkpoint").read_bytes()),
        },
    )
    np.testing.assert_allclose(found["losses"], whole[50:], rtol=0, atol=1e-4)
    assert found["rate"] == RATE
    assert found["properties"] == [["epoch", 3]]


def test_every_damaged_checkpoint_is_refused(harness: Browser) -> None:
    """Seeded flips, cuts and blocks of zeros; whatever still loads would be silent garbage."""
    content = encoded(sample(0))
    rng = np.random.default_rng(0)
    damaged = []
    for _ in range(120):
        spoiled = bytearray(content)
        at = int(rng.integers(len(content)))
        match int(rng.integers(3)):
            case 0:
                spoiled[at] ^= 1 << int(rng.integers(8))
            case 1:
                del spoiled[at:]
            case _:
                spoiled[at : at + 16] = bytes(b ^ 0xFF for b in spoiled[at : at + 16])
        damaged.append(as_text(bytes(spoiled)))
    answers = harness.evaluate(
        "(all) => Promise.all(all.map((base64) => harness.refusal({base64})))", damaged
    )
    assert {answer and answer[0] for answer in answers} == {"CheckpointError"}


def test_structure_is_verified_where_no_checksum_protects_it(harness: Browser) -> None:
    """Words of a file without trailer are changed: a clear refusal or a sound load, never another error."""
    content = (FIXTURES / "original.ckpt").read_bytes()
    rng = np.random.default_rng(1)
    damaged = []
    for _ in range(200):
        spoiled = bytearray(content)
        at = int(rng.integers(len(content) // 4)) * 4
        spoiled[at : at + 4] = int(rng.choice([0, 1, 2**31 - 1, 2**32 - 1, len(content)])).to_bytes(
            4, "little"
        )
        damaged.append(as_text(bytes(spoiled)))
    answers = harness.evaluate(
        "(all) => Promise.all(all.map((base64) => harness.refusal({base64})))", damaged
    )
    assert {answer and answer[0] for answer in answers} <= {"CheckpointError", None}
    expected = []
    for text in damaged:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                checkpoint.decode(base64.b64decode(text))
            expected.append(None)
        except CheckpointError:
            expected.append("CheckpointError")
    assert [answer and answer[0] for answer in answers] == expected
