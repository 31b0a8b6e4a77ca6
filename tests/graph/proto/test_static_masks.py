"""Attention under a constant mask: fewer operators, the same loss and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onward.api import CheckpointState, Module
from onward.artifacts import LossType, generate_artifacts
from onward.graph.proto.static_masks import simplify_static_masks
from onward.runtime import step
from onward.runtime.devices import Device

LENGTH, WIDTH = 6, 4
CAUSAL = np.triu(np.ones((LENGTH, LENGTH), bool), 1)
LOW = float(np.finfo(np.float32).min)


def attention(
    folder: Path, mask: np.ndarray, *, low: float = LOW, zeros: bool = True, keep: bool = False
) -> Path:
    """Artifacts of one head; `zeros` writes zeros over the softmax again, `keep` says what is not masked."""
    again = "shown = Where(again, nothing, soft)" if zeros else "shown = Identity(soft)"
    masking = "Where(mask, scores, low)" if keep else "Where(mask, low, scores)"
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 18]>
        net (float[N, {LENGTH}, {WIDTH}] x) => (float[N, {LENGTH}, {WIDTH}] y) {{
            q = MatMul(x, wq)
            k = MatMul(x, wk)
            v = MatMul(x, wv)
            turned = Transpose<perm = [0, 2, 1]>(k)
            scores = MatMul(q, turned)
            masked = {masking}
            soft = Softmax<axis = -1>(masked)
            {again}
            y = MatMul(shown, v)
        }}
    """)
    rng = np.random.default_rng(0)
    constants = {name: rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) for name in ("wq", "wk", "wv")}
    constants |= {"mask": ~mask if keep else mask, "low": np.float32(low), "nothing": np.float32(0)}
    constants |= {"again": mask} if zeros else {}
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(np.asarray(a), n) for n, a in constants.items()
    )
    generate_artifacts(
        model, requires_grad=["wq", "wk", "wv"], loss=LossType.MSELoss, artifact_directory=folder
    )
    return folder


def run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, simplify: bool
) -> tuple[float, dict[str, Any], int]:
    """The loss, the gradients, and how many nodes went away."""
    removed = []

    def change(model: onnx.ModelProto) -> int:
        before = len(model.graph.node)
        count = simplify_static_masks(model) if simplify else 0
        removed.append(before - len(model.graph.node))
        return count

    monkeypatch.setattr(step, "simplify_static_masks", change)
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, device=Device("cpu", memory="device"))
    x = np.random.default_rng(1).normal(size=(3, LENGTH, WIDTH)).astype(np.float32)
    loss = float(module(x, x[::-1].copy()))
    return loss, module.memory.gradients.arrays(), removed[0]


@pytest.mark.parametrize("given", [{}, {"zeros": False}, {"keep": True}, {"low": float("-inf")}], ids=str)
def test_loss_and_gradients_stay(given: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = attention(tmp_path, CAUSAL, **given)
    loss, gradients, removed = run(folder, monkeypatch, simplify=True)
    expected, others, _ = run(folder, monkeypatch, simplify=False)
    assert removed >= (1 if given.get("zeros") is False else 4)
    assert loss == pytest.approx(expected, rel=1e-6)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, others[name], rtol=1e-5, atol=1e-7, err_msg=name)


LEFT_ALONE = {
    "a row without any key": {"mask": np.vstack([np.ones((1, LENGTH), bool), CAUSAL[1:]])},
    "scores that a network may reach": {"mask": CAUSAL, "low": -1e4},
}


@pytest.mark.parametrize("given", LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_what_may_matter_is_left(given: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(attention(tmp_path, **given), monkeypatch, simplify=True)[2] == 0
