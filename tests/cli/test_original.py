"""`onward convert` with what onnxruntime-training 1.19.2 wrote (see fixtures/make_original.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onward import checkpoint

ORIGINAL = Path(__file__).parent / "fixtures" / "original"
MEASURED = json.loads((ORIGINAL / "losses.json").read_text(encoding="utf-8"))


def losses(run: Any, artifacts: str, name: str, steps: int) -> list[float]:
    """The loss of every step, each an epoch of one batch, as the original trained."""
    found = run(
        "train", artifacts, "-d", ORIGINAL / "data.npz", "-b", 16, "-e", steps, "--no-shuffle",
        "--lr", MEASURED["rates"][name], "-o", "trained", "--json",
    ).json  # fmt: skip
    return [row["loss"] for row in found["epochs"]]


@pytest.mark.parametrize("name", MEASURED["losses"])
def test_converted_artifacts_train_as_they_did(place: Path, run: Any, name: str) -> None:
    found = run("convert", ORIGINAL / name, "ours", "--json").json
    assert (found["trainable"], found["frozen"]) == (["w1", "b1", "w2"], ["b2"])
    wanted = MEASURED["losses"][name]
    np.testing.assert_allclose(losses(run, "ours", name, len(wanted)), wanted, rtol=2e-6)


def test_a_run_of_the_original_goes_on_where_it_stopped(place: Path, run: Any) -> None:
    """Its momenta and its step count come along: a run from zero would take other steps."""
    run("convert", ORIGINAL / "adamw-later", "ours")
    made = checkpoint.load("ours/checkpoint")
    assert made.properties == {"epoch": MEASURED["middle"]}
    assert [group.step for group in made.optimizer] == [MEASURED["middle"]]
    rest = MEASURED["losses"]["adamw"][MEASURED["middle"] :]
    np.testing.assert_allclose(losses(run, "ours", "adamw", len(rest)), rest, rtol=2e-6)


def test_nothing_of_the_original_is_left_in_the_graphs(place: Path, run: Any) -> None:
    run("convert", ORIGINAL / "adamw", "ours")
    for path in sorted(Path("ours").glob("*.onnx")):
        assert {node.domain for node in onnx.load(path).graph.node} <= {"", "ai.onnx"}, path


def test_a_prefix_is_kept(place: Path, run: Any) -> None:
    Path("old").mkdir()
    for path in (ORIGINAL / "sgd").iterdir():
        Path("old", f"v1-{path.name}").write_bytes(path.read_bytes())
    run("convert", "old", "ours", "--prefix", "v1-")
    assert run("train", "ours", "-d", ORIGINAL / "data.npz", "--prefix", "v1-", "--json").json["steps"] == 1


@pytest.mark.parametrize("name", ["adamw", "adamw-later"])
def test_its_checkpoints_get_a_checksum_and_safetensors(place: Path, run: Any, name: str) -> None:
    source = ORIGINAL / name / "checkpoint"
    run("convert", source, "ours")
    run("convert", source, "weights.safetensors")
    run("convert", "weights.safetensors", "again", "--into", "ours")
    assert run("inspect", source, "--json").json["integrity"].startswith("no checksum")
    assert run("inspect", "ours", "--json").json["integrity"] == "checksum verified"
    one, two = checkpoint.load("ours"), checkpoint.load("again")
    assert one.parameters().keys() == two.parameters().keys() == {"w1", "b1", "w2", "b2"}
    for parameter, array in one.parameters().items():
        np.testing.assert_array_equal(array, two.parameters()[parameter])


MISMATCHED = {
    "another model's checkpoint": (
        "checkpoint",
        "artifacts/checkpoint",
        "'w1' has shape [16, 4], the eval model takes [6, 4]",
    ),
    "no optimizer of the original's": (
        "optimizer_model.onnx",
        "model.onnx",
        "no optimizer of onnxruntime-training",
    ),
    "a model cut short": ("eval_model.onnx", None, "is not an ONNX model, or is cut short"),
    "a checkpoint cut short": ("checkpoint", None, "checkpoint"),
}


@pytest.mark.parametrize("case", MISMATCHED)
def test_files_that_do_not_belong_together_are_refused(artifacts: Path, run: Any, case: str) -> None:
    name, other, message = MISMATCHED[case]
    Path("old").mkdir()
    for path in (ORIGINAL / "adamw").iterdir():
        Path("old", path.name).write_bytes(path.read_bytes())
    spoilt = Path("old", name)
    spoilt.write_bytes(spoilt.read_bytes()[:100] if other is None else Path(other).read_bytes())
    result = run("convert", "old", "new", code=1)
    assert message in result.stderr
    assert [line.split(":")[0] for line in result.stderr.splitlines()] == ["error", "hint"]
    assert not Path("new").exists()
