"""Preferences: DPO and ORPO against torch, by the formulas of TRL's trainers, and what a run of them reports."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from export.huggingface_types import tiny_of
from onward import finetune
from onward.data.conversations import Batches, Encoder
from onward.errors import DataError
from onward.export import from_transformers
from onward.language.training_models import Recipe, build_language_artifacts, open_base
from onward.lora import LoRA
from onward.train.trainer import Trainer

PAIRS = [
    {"prompt": "where does the path end", "chosen": " at a bridge", "rejected": " March"},
    {"prompt": "hello there", "chosen": " friend", "rejected": " prices rose by politics"},
    {"prompt": "prices rose by", "chosen": " March economists", "rejected": " the ferry"},
    {"prompt": "nobody expected", "chosen": " the path", "rejected": " economists had said"},
]
LORA = LoRA(rank=4, alpha=8.0, targets=["*q_proj*", "*v_proj*"])
BETA = 0.3


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("preferences") / "base"
    model, tokenizer = tiny_of("llama", "text-generation")
    from_transformers((model, tokenizer), "text-generation", folder, opset=18)
    return folder, model


class Torch:
    """The same adapters beside the same weights in torch, with the losses of TRL."""

    def __init__(self, model: Any, adapters: dict[str, np.ndarray]) -> None:
        self.model = model
        self.values = {name: torch.tensor(value, requires_grad=True) for name, value in adapters.items()}

    def token_scores(self, batch: dict[str, np.ndarray], *, adapted: bool = True) -> torch.Tensor:
        """log p of each next token, [rows, length − 1]"""
        weights = dict(self.model.named_parameters())
        for name in {name.rpartition(".")[0] for name in self.values} if adapted else ():
            change = self.values[f"{name}.lora_b"] @ self.values[f"{name}.lora_a"]
            plain = name.removesuffix(".transposed")
            weights[plain] = weights[plain].detach() + LORA.alpha / LORA.rank * change
        inputs = {name: torch.tensor(batch[name]) for name in ("input_ids", "attention_mask")}
        call = {**inputs, "use_cache": False}
        logits = torch.func.functional_call(self.model, weights, kwargs=call).logits[:, :-1]
        ids = inputs["input_ids"][:, 1:]
        return logits.log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)

    def answer_scores(self, batch: dict[str, np.ndarray], **options: Any) -> torch.Tensor:
        """log p of each answer, and how many tokens it has, [rows]"""
        answers = torch.tensor(batch["labels"][:, 1:] != -100)
        return torch.stack([(self.token_scores(batch, **options) * answers).sum(-1), answers.sum(-1).float()])

    def loss(self, name: str, batch: dict[str, np.ndarray]) -> torch.Tensor:
        if name == "dpo":
            policy, reference = self.answer_scores(batch)[0], self.answer_scores(batch, adapted=False)[0]
            ratios = (policy - reference.detach()).reshape(-1, 2)
            return -functional.logsigmoid(BETA * (ratios[:, 0] - ratios[:, 1])).mean()
        sums, counts = self.answer_scores(batch)
        means = (sums / counts).reshape(-1, 2)
        odds = means - torch.log1p(-torch.exp(means))
        every = torch.tensor(batch["attention_mask"][::2, 1:])
        likelihood = -(self.token_scores(batch)[::2] * every).sum() / every.sum()
        return likelihood - BETA * functional.logsigmoid(odds[:, 0] - odds[:, 1]).mean()


def trainer_of(
    folder: Path, loss: Any, **options: Any
) -> tuple[Trainer, Batches, list[dict[str, np.ndarray]]]:
    """A trainer, its batches of two pairs, and the same with labels of the answers alone, for torch."""
    opened = open_base(folder)
    made = build_language_artifacts(opened, LORA, Recipe(loss, BETA, slices=3))
    trainer = Trainer(made, progress=False, **options)
    pairs = Encoder(opened.tokenizer, None, 5, 32, opened.vocabulary).pairs(dict(enumerate(PAIRS, 1)))
    names = list(trainer.module.signature.inputs)
    plain_names = ["input_ids", "attention_mask", "labels"]
    plain = Batches(pairs, 2, pad=0, names=plain_names, shuffle=False)
    whole = Batches(pairs, 2, pad=0, names=names, shuffle=False)
    return trainer, whole, [dict(zip(plain_names, batch)) for batch in plain.epoch(0)]


def with_reference(
    data: Batches, names: Sequence[str], reference: Torch, plain: list[dict[str, np.ndarray]]
) -> list[Any]:
    """The batches with what torch says of the base."""
    whole = []
    for arrays, same in zip(data.epoch(0), plain):
        batch = dict(zip(names, arrays))
        if "reference" in batch:
            batch["reference"] = reference.answer_scores(same, adapted=False)[0].detach().numpy()
        whole.append(batch)
    return whole


@pytest.mark.parametrize("loss", ["dpo", "orpo"])
def test_the_loss_and_its_gradients_are_those_of_torch(base: Any, loss: str) -> None:
    trainer, data, plain = trainer_of(base[0], loss)
    random = np.random.default_rng(0)
    start = {}
    for name, parameter in trainer.state.parameters:
        start[name] = random.normal(0, 0.1, np.shape(parameter.data)).astype(np.float32)
        trainer.state.parameters[name].data = start[name]
    reference = Torch(base[1], start)
    for batch, same in zip(
        with_reference(data, list(trainer.module.signature.inputs), reference, plain), plain
    ):
        expected = reference.loss(loss, same)
        gradients = torch.autograd.grad(expected, list(reference.values.values()))
        value, *_ = trainer.module(*batch.values())
        assert float(np.asarray(value)) == pytest.approx(float(expected.detach()), rel=1e-5)
        scale = max(float(gradient.abs().max()) for gradient in gradients)
        for name, gradient in zip(reference.values, gradients):
            own = trainer.state.parameters[name].grad
            np.testing.assert_allclose(own, gradient.numpy(), atol=1e-5 * scale, err_msg=name)
        trainer.module.lazy_reset_grad()


@pytest.mark.parametrize("loss", ["dpo", "orpo"])
def test_fifty_steps_follow_torch(base: Any, loss: str) -> None:
    trainer, data, plain = trainer_of(base[0], loss, learning_rate=2e-3)
    start = {name: np.array(value) for name, value in trainer.state.to_data().trainable.items()}
    reference = Torch(base[1], start)
    whole = with_reference(data, list(trainer.module.signature.inputs), reference, plain)
    optimizer = torch.optim.AdamW(reference.values.values(), lr=2e-3, weight_decay=0.0)
    expected = []
    for _ in range(25):
        for same in plain:
            optimizer.zero_grad()
            value = reference.loss(loss, same)
            value.backward()
            optimizer.step()
            expected.append(float(value.detach()))
    history = trainer.fit(whole, epochs=25)
    losses = [row["loss"] for row in history.steps]
    assert losses[-1] < losses[0] - 0.05
    np.testing.assert_allclose(losses, expected, rtol=1e-3)


@pytest.mark.parametrize("loss", ["dpo", "orpo"])
def test_a_run_raises_chosen_answers_above_rejected_ones(
    base: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    monkeypatch.setenv("ONWARD_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, PAIRS)))
    options: Any = {"loss": loss, "beta": BETA, "epochs": 6, "batch_size": 2, "learning_rate": 1e-2}
    result = finetune(base[0], path, eval_data=path, lora=LORA, progress=False, **options)
    first, last = result.history.epochs[0], result.history.epochs[-1]
    assert last["reward_margin"] > first["reward_margin"]
    assert last["reward_accuracy"] >= first["reward_accuracy"] > 0
    references = list((tmp_path / "cache" / "references").glob("*.npy"))
    assert len(references) == (loss == "dpo")
    if references:  # the next run reads what the base thinks of the answers
        with monkeypatch.context() as patch:
            patch.setattr("onward.tasks.text_generation._score_pairs", None)
            again = finetune(base[0], path, eval_data=path, lora=LORA, progress=False, **options)
        assert again.metrics == pytest.approx(result.metrics)


ONE = PAIRS[0]
BAD = [
    ({"prompt": "why", "chosen": "so"}, {"loss": "dpo"}, "line 3: has no rejected"),
    ({**ONE, "rejected": ONE["chosen"]}, {"loss": "orpo"}, "line 3: chosen and rejected are the same answer"),
    ({**ONE, "chosen": 5}, {"loss": "dpo"}, "line 3: '5' must be text"),
    (ONE, {}, "line 1: has chosen and rejected answers, which are for another loss"),
    (ONE, {"loss": "dpo", "packing": True}, "packing is not for dpo"),
    ({**ONE, "prompt": [{"role": "user", "content": "why"}]}, {"loss": "dpo"}, "no chat template"),
]


@pytest.mark.parametrize(("row", "options", "message"), BAD, ids=[message for _, _, message in BAD])
def test_wrong_preferences_are_one_error_with_file_and_line(
    base: Any, tmp_path: Path, row: Any, options: dict[str, Any], message: str
) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(f"{json.dumps(ONE)}\n\n{json.dumps(row)}\n")
    with pytest.raises((DataError, TypeError), match=message) as caught:
        finetune(base[0], path, lora=LORA, progress=False, **options)
    if "line" in message:
        assert str(path) in str(caught.value)
