"""Decoders as model builders publish them: fused operators, 4-bit weights in a file of their own, a cache."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

from onward.lora import LoRA
from onward.pipeline import load
from onward.pipeline.language import _artifacts, _open, finetune_language_model
from onward.train.trainer import Trainer

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import language_model
import ready_made

SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    "form",
    [
        ready_made.Form(),
        ready_made.Form(half=True, zeros=True, packed=True),
        ready_made.Form(bits=8, rotary_apart=True),
    ],
    ids=["4 bits", "float16, zero points, one product", "8 bits, rotary apart"],
)
def test_a_ready_made_base_trains_and_writes(tmp_path: Path, form: ready_made.Form) -> None:
    ready_made.write_base(tmp_path / "base", SIZES, language_model.words(96), form=form)
    before = {path.name: path.read_bytes() for path in (tmp_path / "base").iterdir()}
    session = ort.InferenceSession(tmp_path / "base" / "model.onnx", providers=["CPUExecutionProvider"])
    ids = np.asarray([[5, 6, 7, 8, 9, 10]])
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    if form.rotary_apart:
        feeds["position_ids"] = np.arange(6)[None]
    for value in session.get_inputs():
        if value.name.startswith("past_key_values."):
            feeds[value.name] = np.zeros((1, 2, 0, 16), np.float16 if form.half else np.float32)
    logits = torch.tensor(np.asarray(session.run(["logits"], feeds)[0], np.float32))
    expected = torch.nn.functional.cross_entropy(logits[0, :-1], torch.tensor(ids[0, 1:]))
    opened = _open(tmp_path / "base")
    trainer = Trainer(
        _artifacts(opened, LoRA(rank=4, targets=["*attn.q*"]), slices=3, recompute=None), progress=False
    )
    given = {**feeds, "labels": ids}
    loss = trainer.module(*[given[name] for name in trainer.module.input_names()])
    # the runtime multiplies 4-bit weights with inputs of 8 bits, training with floats
    assert float(np.asarray(loss)) == pytest.approx(float(expected), rel=0.02)
    lines = [{"prompt": "w9 w8", "completion": " w7 w6"}, {"text": "w1 w2 w3 w4"}]
    result = finetune_language_model(
        tmp_path / "base", lines, epochs=30, learning_rate=1e-2, max_length=32, progress=False
    )
    assert result.history.epochs[-1]["loss"] < 0.1 * result.history.epochs[0]["loss"]
    assert load(result.export(tmp_path / "out"))("w9 w8", max_new_tokens=4).split() == ["w7", "w6"]
    # packed weights are multiplied as they are, and not dequantized for each token
    kinds = Counter(node.op_type for node in onnx.load(tmp_path / "out" / "model.onnx").graph.node)
    assert (
        kinds["MatMulNBits"] == (5 if form.packed else 7) * 2 + 1
        and not kinds["DequantizeLinear"]
        and kinds["GroupQueryAttention"] == 2
    )
    assert {path.name: path.read_bytes() for path in (tmp_path / "base").iterdir()} == before


def test_weights_are_dequantized_for_each_product_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready_made.write_base(tmp_path, SIZES, language_model.words(96))
    ids = np.asarray([[5, 6, 7, 8, 9, 10]])
    given = {"input_ids": ids, "attention_mask": np.ones_like(ids), "labels": ids}
    gradients = []
    for late in (True, False):
        if not late:
            monkeypatch.setattr("onward.pipeline.language.dequantize_late", lambda model: model)
        made = _artifacts(
            _open(tmp_path), LoRA(rank=4, targets=["*q_proj*", "*down_proj*"]), slices=3, recompute=None
        )
        layers = [
            node
            for node in made.training.graph
            if node.op_type == "DequantizeLinear" and "layers" in (node.inputs[0].name or "")  # type: ignore[union-attr]
        ]
        users = [len(node.outputs[0].uses()) for node in layers]
        assert max(users) == (1 if late else 2), users
        assert all(isinstance(node.inputs[0].const_value, ir.ExternalTensor) for node in layers)  # type: ignore[union-attr]
        trainer = Trainer(made, progress=False)
        for name in made.trainable:  # B starts at zero, and A's gradient with it
            array = np.asarray(trainer.state.parameters[name].data)
            trainer.state.parameters[name].data = np.full_like(array, 0.01)
        trainer.module(*[given[name] for name in trainer.module.input_names()])
        gradients.append({name: trainer.state.parameters[name].grad for name in made.trainable})
    for name, gradient in gradients[0].items():
        assert np.abs(gradient).max() > 0
        np.testing.assert_array_equal(gradient, gradients[1][name])
