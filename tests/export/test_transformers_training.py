"""Training artifacts of Hugging Face models: each task's loss and gradients are those of transformers and torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from export.tiny_transformers import tiny_pair
from onward.errors import ExportError
from onward.export import artifacts_from_transformers

TEXTS = ["the ferry leaves at noon", "nobody expected a small library", "why"]
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def text(tokenizer: Any, **labels: Any) -> dict[str, torch.Tensor]:
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return {**tokenizer(TEXTS, padding=True, return_tensors="pt", return_token_type_ids=True), **labels}


def tokens(batch: dict[str, torch.Tensor], classes: int) -> dict[str, torch.Tensor]:
    labels = batch["input_ids"] % classes
    return {**batch, "labels": labels.masked_fill(batch["attention_mask"] == 0, -100)}


def single_label(model: Any, tokenizer: Any) -> dict[str, torch.Tensor]:
    return text(tokenizer, labels=torch.tensor([0, 1, 1]))


def multi_label(model: Any, tokenizer: Any) -> dict[str, torch.Tensor]:
    return text(tokenizer, labels=torch.tensor([[0.0, 1.0], [1.0, 1.0], [1.0, 0.0]]))


def span(model: Any, tokenizer: Any) -> dict[str, torch.Tensor]:
    return text(tokenizer, start_positions=torch.tensor([1, 2, 0]), end_positions=torch.tensor([2, 3, 1]))


def per_token(model: Any, tokenizer: Any) -> dict[str, torch.Tensor]:
    return tokens(text(tokenizer), model.config.num_labels)


def next_token(model: Any, tokenizer: Any) -> dict[str, torch.Tensor]:
    batch = tokens(text(tokenizer), model.config.vocab_size)
    return {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}


def text_to_text(model: Any, tokenizer: Any) -> dict[str, torch.Tensor]:
    batch = next_token(model, tokenizer)
    start = torch.zeros(len(TEXTS), 1, dtype=torch.int64)
    return {**batch, "decoder_input_ids": torch.cat([start, batch["input_ids"][:, :-1]], dim=1)}


def picture(model: Any, tokenizer: Any) -> dict[str, torch.Tensor]:
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    return {"pixel_values": pixels, "labels": torch.tensor([1, 0])}


def captions(model: Any, tokenizer: Any) -> dict[str, torch.Tensor]:
    pixels = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    return {**tokenizer(TEXTS, padding=True, return_tensors="pt"), "pixel_values": pixels}


CASES: list[tuple[str, str, Any, dict[str, Any]]] = [
    ("bert", "text-classification", single_label, STILL),
    ("bert", "text-classification", multi_label, {**STILL, "problem_type": "multi_label_classification"}),
    ("bert", "question-answering", span, STILL),
    ("bert", "token-classification", per_token, STILL),
    ("gpt2", "text-generation", next_token, {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    ("qwen3_moe", "text-generation", next_token, {}),
    ("t5", "text2text", text_to_text, {"dropout_rate": 0.0}),
    ("vit", "image-classification", picture, STILL),
    ("clip", "zero-shot-image-classification", captions, {}),
]


@pytest.mark.parametrize(
    ("architecture", "task", "batch", "settings"), CASES, ids=[f"{c[0]}-{c[2].__name__}" for c in CASES]
)
def test_loss_and_gradients_are_those_of_torch(
    tmp_path: Path, architecture: str, task: str, batch: Any, settings: dict[str, Any]
) -> None:
    model, tokenizer = tiny_pair(architecture, task, **settings)
    inputs = batch(model, tokenizer)
    folder = artifacts_from_transformers((model, tokenizer), task, tmp_path / "artifacts")

    expected = model(**inputs, **({"return_loss": True} if architecture == "clip" else {})).loss
    expected.backward()
    session = onnxruntime.InferenceSession(folder / "training_model.onnx", providers=["CPUExecutionProvider"])
    parameters = dict(model.named_parameters())
    feed: dict[str, np.ndarray] = {"lazy_reset_grad": np.array([True])}
    for value in session.get_inputs():
        name = value.name.removesuffix("_grad.accumulation.buffer")
        if name in parameters:
            feed[value.name] = parameters[name].detach().numpy()
        elif name in inputs:
            feed[name] = inputs[name].numpy()
        elif name == "random_seed":
            feed[name] = np.zeros(value.shape, np.int64 if "int64" in value.type else np.float32)
    names = [output.name for output in session.get_outputs()]
    got = dict(zip(names, session.run(names, feed)))

    np.testing.assert_allclose(got["loss"], expected.detach(), rtol=1e-5)
    suffix = "_grad.accumulation.out"
    gradients = {name.removesuffix(suffix): value for name, value in got.items() if name.endswith(suffix)}
    assert set(gradients) == {name for name, value in parameters.items() if value.grad is not None}
    # torch keeps the padding row of an embedding as it is; a lookup in ONNX has no such exception (documented).
    padding = {
        f"{name}.weight": module.padding_idx
        for name, module in model.named_modules()
        if getattr(module, "padding_idx", None) is not None
    }
    # Gradients that are zero but for rounding, as those of keys' biases, have the rounding of the largest.
    rounding = 1e-7 * max(
        1.0, *(float(p.grad.abs().max()) for p in parameters.values() if p.grad is not None)
    )
    for name, gradient in gradients.items():
        if name in padding:
            gradient[padding[name]] = 0
        reference = parameters[name].grad
        assert reference is not None
        scale = float(reference.abs().max())
        np.testing.assert_allclose(gradient, reference, atol=1e-4 * scale + rounding, err_msg=name)


def test_frozen_parameters_of_the_model_stay_frozen(tmp_path: Path) -> None:
    model, tokenizer = tiny_pair("bert", "text-classification")
    model.bert.requires_grad_(False)
    folder = artifacts_from_transformers((model, tokenizer), "text-classification", tmp_path / "artifacts")
    session = onnxruntime.InferenceSession(folder / "training_model.onnx", providers=["CPUExecutionProvider"])
    trained = [output.name.split("_grad.")[0] for output in session.get_outputs() if "_grad." in output.name]
    assert sorted(trained) == ["classifier.bias", "classifier.weight"]


def test_a_task_without_a_loss_of_its_own_asks_for_one(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="'pooling' has no loss of its own"):
        artifacts_from_transformers(tiny_pair("bert", "pooling"), "pooling", tmp_path / "artifacts")
    assert list(tmp_path.iterdir()) == []
