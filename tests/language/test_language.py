"""Language models: LoRA beside a base that stays as it is, the loss in slices, and a folder that answers."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from export.huggingface_types import tiny_of
from onward import finetune
from onward.api import CheckpointState, Module
from onward.cli.app import app
from onward.data.conversations import IGNORED, Batches, Encoder, Example, pack
from onward.errors import DataError, ModelError, OnwardError
from onward.export import from_transformers
from onward.graph.passes.lora import add_adapters
from onward.language.chat import read_template
from onward.language.finetune import LanguageModel, load_adapters
from onward.language.training_models import Recipe, build_language_artifacts, open_base, prepare_training
from onward.lora import LoRA
from onward.pipeline import load as load_any
from onward.pipeline.evaluate import open_source
from onward.train.history import History
from onward.train.trainer import Trainer

LINES = [
    {"prompt": "where does the path end", "completion": " at a bridge"},
    {"prompt": "hello there", "completion": " friend"},
    {"text": "the ferry leaves at noon"},
    {"prompt": "prices rose by", "completion": " March economists had said"},
]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} </s> {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
LORA = LoRA(rank=4, alpha=8.0, targets=["*q_proj*", "*v_proj*"])


def load(folder: Path) -> Any:
    """A folder's pipeline."""
    return load_any(folder)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    folder = tmp_path_factory.mktemp("language") / "base"
    model, tokenizer = tiny_of("llama", "text-generation")
    tokenizer.chat_template = TEMPLATE
    from_transformers((model, tokenizer), "text-generation", folder, opset=18)
    return folder, model, tokenizer


class Torch:
    """The same adapters in torch, beside the same weights."""

    def __init__(self, model: Any, adapters: dict[str, np.ndarray], lora: LoRA) -> None:
        self.model, self.scale = model, lora.alpha / lora.rank
        self.values = {name: torch.tensor(value, requires_grad=True) for name, value in adapters.items()}

    def loss(self, batch: dict[str, np.ndarray]) -> torch.Tensor:
        weights = dict(self.model.named_parameters())
        for name in {name.rpartition(".")[0] for name in self.values}:
            change = self.values[f"{name}.lora_b"] @ self.values[f"{name}.lora_a"]
            plain = name.removesuffix(".transposed")
            weights[plain] = weights[plain].detach() + self.scale * change
        inputs = {name: torch.tensor(value) for name, value in batch.items()}
        return torch.func.functional_call(self.model, weights, kwargs={**inputs, "use_cache": False}).loss


def encode(lines: Any, base: Any, render: Any = None, *, longest: int = 32) -> list[Example]:
    encoder = Encoder(base.tokenizer, render, 5, longest, base.vocabulary)
    return encoder.examples(dict(enumerate(lines, 1)))


def batches(folder: Path, lines: Any = LINES, size: int = 2) -> tuple[Any, Batches]:
    opened = open_base(folder)
    names = [*opened.inputs, "labels"]
    return opened, Batches(encode(lines, opened), size, pad=0, names=names, shuffle=False)


def by_name(data: Batches, names: Sequence[str]) -> list[dict[str, np.ndarray]]:
    return [dict(zip(names, batch)) for batch in data.epoch(0)]


@pytest.mark.parametrize("slices", [1, 3, 8])
@pytest.mark.parametrize("output_layer", [False, True], ids=["attention", "output layer"])
def test_the_loss_in_slices_and_its_gradients_are_those_of_torch(
    base: Any, slices: int, output_layer: bool
) -> None:
    folder, model, _ = base
    opened, data = batches(folder)
    lora = dataclasses.replace(LORA, targets=["*q_proj*", "*lm_head*"]) if output_layer else LORA
    made = build_language_artifacts(opened, lora, Recipe(slices=slices))
    trainer = Trainer(made, progress=False)
    start = {name: np.asarray(value) for name, value in trainer.state.to_data().trainable.items()}
    random = np.random.default_rng(0)
    start = {name: random.normal(0, 0.1, value.shape).astype(np.float32) for name, value in start.items()}
    for name, value in start.items():
        trainer.state.parameters[name].data = value
    reference = Torch(model, start, LORA)
    for batch in by_name(data, [*opened.inputs, "labels"]):
        expected = reference.loss(batch)
        gradients = torch.autograd.grad(expected, list(reference.values.values()))
        loss = trainer.module(*[batch[name] for name in [*opened.inputs, "labels"]])
        assert float(np.asarray(loss)) == pytest.approx(float(expected.detach()), rel=1e-5)
        scale = max(float(gradient.abs().max()) for gradient in gradients)
        for name, gradient in zip(reference.values, gradients):
            own = trainer.state.parameters[name].grad
            np.testing.assert_allclose(own, gradient.numpy(), atol=1e-5 * scale, err_msg=name)
        trainer.module.lazy_reset_grad()


@pytest.mark.parametrize("targets", ["*q_proj*", "*lm_head*"])
def test_scores_never_exist_whole(base: Any, targets: str) -> None:
    opened, _ = batches(base[0])
    words = opened.vocabulary
    made = build_language_artifacts(opened, dataclasses.replace(LORA, targets=targets), Recipe(slices=8))
    for model in (made.training, made.evaluation):
        widths = [
            value.shape[-1]
            for node in model.graph
            for value in node.outputs
            if node.op_type not in ("Transpose", "Identity", "Constant")
            and "lora" not in (node.name or "")
            and value.shape
            and len(value.shape) >= 2
        ]
        assert words not in widths
    # what only the gradient needs is not in the evaluation model
    products = [
        sum(node.op_type in ("MatMul", "Gemm") for node in m.graph) for m in (made.training, made.evaluation)
    ]
    assert products[1] < products[0] / 2


def test_the_runtime_computes_one_slice_of_scores_after_the_other(base: Any, tmp_path: Path) -> None:
    opened, _ = batches(base[0])
    made = build_language_artifacts(opened, LORA, Recipe(slices=4))
    options: Any = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    ort.InferenceSession(ir.to_proto(made.training).SerializeToString(), options)
    graph = onnx.load(tmp_path / "optimized.onnx").graph
    maker = {name: node for node in graph.node for name in node.output}

    def needs(node: onnx.NodeProto, other: onnx.NodeProto) -> bool:
        seen, waiting = set(), [node]
        while waiting:
            for name in waiting.pop().input:
                made_by = maker.get(name)
                if made_by is not None and made_by.name not in seen:
                    seen.add(made_by.name)
                    waiting.append(made_by)
        return other.name in seen

    exponentials = [node for node in graph.node if node.op_type == "Exp"]
    shares = [
        node for node in exponentials if maker[maker[node.input[0]].input[0]].op_type.endswith("MatMul")
    ]
    assert len(shares) == 4
    shares.sort(key=lambda node: sum(needs(node, other) for other in shares))
    for before, after in itertools.pairwise(shares):
        readers = [node for node in graph.node if before.output[0] in node.input]
        assert sorted(node.op_type.removeprefix("Fused") for node in readers) == ["MatMul", "ReduceSum"]
        assert all(needs(after, reader) for reader in readers)


def test_positions_without_a_label_are_not_multiplied_with_the_output_layer(base: Any) -> None:
    opened, data = batches(base[0])
    made = build_language_artifacts(opened, LORA, Recipe(slices=2))
    (places,) = (node for node in made.evaluation.graph if node.op_type == "NonZero")
    graph = made.evaluation.graph
    graph.outputs.append(places.outputs[0])
    trainer = Trainer(build_language_artifacts(batches(base[0])[0], LORA, Recipe(slices=2)), progress=False)
    values = {name: np.asarray(v) for name, v in trainer.state.to_data().parameters().items()}
    session = ort.InferenceSession(
        ir.to_proto(made.evaluation).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    every = by_name(data, [*opened.inputs, "labels"])
    for batch in every:
        needed = {value.name: {**batch, **values}[value.name] for value in session.get_inputs()}
        loss, rows = session.run(None, needed)
        assert rows.shape[1] == (batch["labels"][:, 1:] != IGNORED).sum() and np.isfinite(loss)
    nothing = {**every[0], "labels": np.full_like(every[0]["labels"], IGNORED)}
    loss = trainer.module(*[nothing[name] for name in [*opened.inputs, "labels"]])
    assert float(np.asarray(loss)) == 0.0  # no label counts: no loss, no gradient
    assert all(not np.any(parameter.grad) for _, parameter in trainer.state.parameters)


def test_fifty_steps_follow_torch(base: Any) -> None:
    folder, model, _ = base
    opened, data = batches(folder)
    trainer = Trainer(
        build_language_artifacts(opened, LORA, Recipe(slices=4)), learning_rate=1e-2, progress=False
    )
    start = {name: np.array(value) for name, value in trainer.state.to_data().trainable.items()}
    reference = Torch(model, start, LORA)
    optimizer = torch.optim.AdamW(reference.values.values(), lr=1e-2, weight_decay=0.0)
    losses = []
    for _ in range(25):
        for batch in by_name(data, [*opened.inputs, "labels"]):
            optimizer.zero_grad()
            loss = reference.loss(batch)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    history = trainer.fit(data, epochs=25)
    assert len(losses) == 50
    assert losses[-1] < 0.7 * losses[0]
    np.testing.assert_allclose([row["loss"] for row in history.steps], losses, rtol=1e-3)


def test_a_trained_model_writes_with_its_cache_what_torch_writes(base: Any, tmp_path: Path) -> None:
    folder, _, tokenizer = base
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    result = finetune(
        folder, LINES, lora=LORA, epochs=20, batch_size=2, learning_rate=2e-2, hold_out=0.25, progress=False
    )
    assert result.metrics["perplexity"] == pytest.approx(math.exp(result.metrics["eval_loss"]))
    result.export(tmp_path / "merged")
    result.export(tmp_path / "apart", merge=False)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    merged, _ = tiny_of("llama", "text-generation")
    weights = dict(merged.named_parameters())
    with torch.no_grad():
        for name in {name.rpartition(".")[0] for name in result.adapters}:
            change = result.adapters[f"{name}.lora_b"] @ result.adapters[f"{name}.lora_a"]
            weights[name.removesuffix(".transposed")] += torch.tensor(LORA.alpha / LORA.rank * change)
    for prompt in ("where does the path end", "hello there", "nobody expected"):
        encoded = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        ids = merged.generate(**encoded, do_sample=False, max_new_tokens=8, pad_token_id=0)[0]
        expected = tokenizer.decode(ids[encoded["input_ids"].shape[1] :], skip_special_tokens=True)
        for where in ("merged", "apart"):
            assert load(tmp_path / where)(prompt, max_new_tokens=8) == expected
    with pytest.raises(ModelError, match="the base's own folder"):
        result.export(folder)


def test_a_tied_output_layer_is_adapted_under_its_own_name(tmp_path: Path) -> None:
    """peft's `lm_head`: the embedding that shares its weight stays as it is."""
    model, tokenizer = tiny_of("llama", "text-generation", tie_word_embeddings=True)
    from_transformers((model, tokenizer), "text-generation", tmp_path / "base", opset=18)
    result = finetune(
        tmp_path / "base", LINES, lora=LoRA(rank=2, targets=["*lm_head*"]), epochs=10, learning_rate=3e-2,
        progress=False,
    )  # fmt: skip
    assert set(result.adapters) == {"lm_head.weight.lora_a", "lm_head.weight.lora_b"}
    result.save_adapters(tmp_path / "adapters")
    settings = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert settings["target_modules"] == ["lm_head"]
    load_adapters(tmp_path / "base", tmp_path / "adapters").export(tmp_path / "merged")
    weight = model.model.embed_tokens.weight.detach()
    change = 8.0 * result.adapters["lm_head.weight.lora_b"] @ result.adapters["lm_head.weight.lora_a"]
    with torch.no_grad():
        model.lm_head.weight = torch.nn.Parameter(weight + torch.tensor(change))
    for prompt in ("where does the path end", "hello there"):
        encoded = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        ids = model.generate(**encoded, do_sample=False, max_new_tokens=8, pad_token_id=0)[0]
        expected = tokenizer.decode(ids[encoded["input_ids"].shape[1] :], skip_special_tokens=True)
        assert load(tmp_path / "merged")(prompt, max_new_tokens=8) == expected


def spoil(folder: Path, **changes: Any) -> None:
    """Write other settings or tensors into a folder of adapters."""
    tensors = load_file(folder / "adapter_model.safetensors")
    path = folder / "adapter_config.json"
    settings = json.loads(path.read_text()) | changes.get("settings", {})
    path.write_text(json.dumps(settings))
    change = changes.get("tensors")
    if change is not None:
        save_file(change(tensors), folder / "adapter_model.safetensors")
    if changes.get("cut"):
        data = (folder / "adapter_model.safetensors").read_bytes()
        (folder / "adapter_model.safetensors").write_bytes(data[: len(data) // 2])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"settings": {"r": 8}}, "has shape .*, and adapter_config.json says rank 8"),
        ({"settings": {"use_dora": True}}, "use_dora has no form here"),
        ({"settings": {"modules_to_save": ["norm"]}}, "modules_to_save has no form here"),
        ({"tensors": lambda t: {k: v for k, v in t.items() if "lora_B" not in k}}, "only one of its two matrices"),
        ({"tensors": lambda t: {k: np.ones((*v.shape[:-1], 4), np.float32) if "lora_A" in k else v
                                for k, v in t.items()}}, "is it another base's"),
        ({"tensors": lambda t: {k.replace("q_proj", "p_proj"): v for k, v in t.items()}},
         "p_proj', which this base does not have"),
        ({"cut": True}, "adapter_model.safetensors"),
    ],
    ids=["rank", "dora", "whole modules", "half a pair", "another width", "another name", "cut short"],
)  # fmt: skip
def test_a_wrong_adapter_is_one_clear_error(
    base: Any, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    result = LanguageModel(base[0] / "model.onnx", base[0], {}, LORA, adapters_of(base[0]), History(), {})
    result.save_adapters(tmp_path / "adapters")
    assert load_adapters(base[0], tmp_path / "adapters").adapters.keys() == result.adapters.keys()
    spoil(tmp_path / "adapters", **changes)
    with pytest.raises(OnwardError, match=message):
        load_adapters(base[0], tmp_path / "adapters")


def adapters_of(folder: Path) -> dict[str, np.ndarray]:
    model = open_base(folder).model
    return {name: model.graph.initializers[name].const_value.numpy() for name in add_adapters(model, LORA)}  # type: ignore[union-attr]


def test_adapters_go_to_peft_and_come_back(base: Any, tmp_path: Path) -> None:
    result = finetune(base[0], LINES, lora=LORA, epochs=1, batch_size=2, progress=False)
    result.save_adapters(tmp_path / "adapters")
    settings = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["peft_type"]) == (4, 8.0, "LORA")
    assert "model.layers.0.self_attn.q_proj" in settings["target_modules"]
    again = load_adapters(base[0], tmp_path / "adapters")
    assert again.adapters.keys() == result.adapters.keys()
    for name, value in result.adapters.items():
        np.testing.assert_array_equal(again.adapters[name], value)
    again.export(tmp_path / "one")
    result.export(tmp_path / "two")
    assert load(tmp_path / "one")("hello there") == load(tmp_path / "two")("hello there")
    other, tokenizer = tiny_of("gpt2", "text-generation")
    from_transformers((other, tokenizer), "text-generation", tmp_path / "other")
    with pytest.raises(OnwardError, match="which this base does not have"):
        load_adapters(tmp_path / "other", tmp_path / "adapters")


@pytest.mark.parametrize("scheme", ["int8-weights", "int4"])
def test_a_quantized_base_stays_quantized(base: Any, tmp_path: Path, scheme: str) -> None:
    _, model, tokenizer = base
    from_transformers((model, tokenizer), "text-generation", tmp_path / "small", quantize=scheme, opset=18)
    result = finetune(
        tmp_path / "small", LINES, lora=LORA, epochs=10, batch_size=2, learning_rate=1e-2, progress=False
    )
    first, last = result.history.steps[0]["loss"], result.history.steps[-1]["loss"]
    assert last < first
    result.export(tmp_path / "out")
    exported = onnx.load(tmp_path / "out" / "model.onnx")
    kinds = {onnx.TensorProto.DataType.Name(tensor.data_type) for tensor in exported.graph.initializer}
    assert kinds & {"UINT8", "INT8", "UINT4", "INT4"}
    assert isinstance(load(tmp_path / "out")("hello there"), str)


def test_only_the_assistants_words_count(base: Any) -> None:
    folder, _, tokenizer = base
    opened = open_base(folder)
    messages = [
        {"role": "user", "content": "where does the path end"},
        {"role": "assistant", "content": "at a bridge"},
        {"role": "user", "content": "why"},
        {"role": "assistant", "content": "hello friend"},
    ]
    render = read_template(folder).render
    for prompt in (True, False):
        expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        assert render(messages, prompt=prompt) == expected
    (example,) = encode([{"messages": messages}], opened, render, longest=64)
    said = [token for token, label in zip(example.ids, example.labels) if label != IGNORED]
    assert opened.tokenizer.decode(said, skip_special_tokens=False) == "at a bridge </s> hello friend </s>"
    (plain,) = encode(LINES[:1], opened)
    answer = [token for token, label in zip(plain.ids, plain.labels) if label != IGNORED]
    assert opened.tokenizer.decode(answer) == "at a bridge" and answer[-1] == 5


def test_examples_are_packed_and_batched_by_length() -> None:
    examples = [Example([1] * n, [1] * n) for n in (5, 3, 9, 2, 4)]
    packed = pack(examples, 10)
    assert sorted(len(example.ids) for example in packed) == [5, 9, 9]
    assert all(len(example.ids) <= 10 for example in packed)
    assert sum(label != IGNORED for example in packed for label in example.labels) == 23 - len(examples)
    data = Batches(examples, 2, pad=0, names=["input_ids", "attention_mask"], seed=1)
    assert data.count == 3
    seen = [int(row.sum()) for _, mask in data.epoch(0) for row in mask]
    assert sorted(seen) == [2, 3, 4, 5, 9]
    assert all(ids.shape[1] % 16 == 0 for ids, _ in data.epoch(0))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_packed_examples_do_not_see_each_other(base: Any, tmp_path: Path, kind: str) -> None:
    """Losses and gradients of a packed row are those of its examples alone, with rotary and learned positions."""
    folder = base[0]
    if kind != "llama":
        folder = tmp_path / "base"
        from_transformers(tiny_of(kind, "text-generation"), "text-generation", folder, opset=18)
    lora = LoRA(rank=4, alpha=8.0, targets="attention")
    _, files = prepare_training(folder, lora, Recipe(slices=2, packing=True))
    trainer = Trainer(files, progress=False)
    names = list(trainer.module.signature.inputs)
    assert {"segment_ids", "position_ids"} <= set(names)
    (row,) = pack(encode(LINES, open_base(folder)), 64)
    assert len(row.parts()) == len(LINES)
    data = Batches([row], 1, pad=0, names=names)
    random = np.random.default_rng(0)
    for name, parameter in trainer.state.parameters:
        changed = random.normal(0, 0.1, np.shape(parameter.data)).astype(np.float32)
        trainer.state.parameters[name].data = changed

    def step(example: Example) -> tuple[float, dict[str, np.ndarray]]:
        loss = float(np.asarray(trainer.module(*data.batch([example]).values())))
        gradients = {name: np.array(value.grad) for name, value in trainer.state.parameters}
        trainer.module.lazy_reset_grad()
        return loss, gradients

    together, gradients = step(row)
    alone = [(*step(part), part.counted()) for part in row.parts()]
    total = sum(count for *_, count in alone)
    assert together == pytest.approx(sum(loss * count for loss, _, count in alone) / total, rel=1e-5)
    for name, gradient in gradients.items():
        expected = sum(parts[name] * count for _, parts, count in alone) / total
        np.testing.assert_allclose(gradient, expected, atol=1e-4 * np.abs(expected).max(), err_msg=name)
    # without marks the second example sees the first
    seen = step(Example(row.ids, row.labels))[0]
    assert abs(seen - together) > 1e-3 * together


def test_packing_a_model_whose_tokens_meet_elsewhere_is_refused(
    base: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []

    def first_layer(node: Any) -> bool:
        found.append(node)
        return len(found) == 1

    monkeypatch.setattr("onward.graph.passes.separate_examples._is_attention", first_layer)
    with pytest.raises(ModelError, match="packing changes this model's loss"):
        finetune(base[0], LINES, lora=LORA, packing=True, progress=False)


def test_training_models_are_kept_for_the_next_run(
    base: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONWARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("onward.language.training_models._WORTH_KEEPING", 0.0)
    folder = tmp_path / "base"
    shutil.copytree(base[0], folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def run() -> list[float]:
        options: Any = {"lora": LORA, "epochs": 2, "batch_size": 2, "learning_rate": 1e-2, "progress": False}
        return [row["loss"] for row in finetune(folder, LINES, **options).history.steps]

    first = run()
    (kept,) = (tmp_path / "cache" / "language").iterdir()
    with monkeypatch.context() as patch:
        patch.setattr("onward.language.training_models.open_base", None)  # nothing is made again
        assert run() == first
    (kept / "training.onnx").write_bytes(b"damaged")
    assert run() == first
    (folder / "model.onnx").write_bytes(before["model.onnx"])  # another file, though the same bytes
    assert run() == first
    assert len(list((tmp_path / "cache" / "language").iterdir())) == 2
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_conversation_is_answered_and_streamed(base: Any) -> None:
    folder, _, tokenizer = base
    answer = load(folder)
    messages = [{"role": "user", "content": "where does the path end"}]
    text = answer(messages, max_new_tokens=6)
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == answer(prompt, max_new_tokens=6)
    assert "".join(answer.stream(messages, max_new_tokens=6)) == text
    word = text.split()[1]
    assert answer(messages, max_new_tokens=6, stop=word) == text[: text.index(word)]
    assert "".join(answer.stream(messages, max_new_tokens=6, stop=[word])) == text[: text.index(word)]


def test_a_run_resumes_where_it_stopped_and_ends_when_nothing_improves(base: Any, tmp_path: Path) -> None:
    options: Any = {
        "lora": LORA, "batch_size": 2, "learning_rate": 1e-2, "schedule": "constant", "warmup": 0, "progress": False
    }  # fmt: skip
    whole = finetune(base[0], LINES, epochs=3, **options)
    run: Any = {"output_directory": tmp_path / "run", **options}
    finetune(base[0], LINES, epochs=1, **run)
    with pytest.raises(OnwardError, match="has an earlier run"):
        finetune(base[0], LINES, epochs=3, **run)
    resumed = finetune(base[0], LINES, epochs=3, resume=True, **run)
    assert [row["loss"] for row in resumed.history.steps] == [row["loss"] for row in whole.history.steps]
    # held-out texts that the model only forgets end the run early, and the best epoch is the result
    held = [{"text": "nobody expected March politics"}]
    short = finetune(
        base[0], LINES, eval_data=held, epochs=20, patience=1, **{**options, "learning_rate": 5e-2}
    )
    assert len(short.history.epochs) < 20
    best = min(row["eval_loss"] for row in short.history.epochs)
    assert short.metrics["eval_loss"] == best


QUESTION = [{"messages": [{"role": "user", "content": "why"}]}]


def without(name: str, data: Any = LINES) -> Any:
    return lambda folder: ((folder / name).unlink(), data)[1]


def written(name: str, text: str) -> Any:
    return lambda folder: (
        (folder / name).write_text(text),
        folder / name if name == "chat.jsonl" else LINES,
    )[1]


BAD: list[tuple[str, Any, type[Exception], str]] = [
    ("no template", without("chat_template.jinja", QUESTION), DataError, "no chat template"),
    (
        "an unknown line",
        lambda f: [{"question": "why"}],
        DataError,
        "line 1: has question; expected messages",
    ),
    ("a number for a text", lambda f: [{"text": 5}], DataError, "line 1: 'text' is '5', and must be text"),
    (
        "nothing said",
        lambda f: [{"messages": [{"role": "user", "content": None}]}],
        DataError,
        "line 1: the content of a message of 'user' is null",
    ),
    (
        "roles in the wrong order",
        lambda f: (
            (f / "chat_template.jinja").write_text("{{ raise_exception('the user begins') }}"),
            QUESTION,
        )[1],
        DataError,
        "line 1: .* refuses these messages: the user begins",
    ),
    ("nothing to learn", lambda f: QUESTION, DataError, "line 1: nothing to learn"),
    ("no answer", lambda f: [{"prompt": "why"}], DataError, "line 1: has a prompt and no completion"),
    (
        "an answer beyond what the model reads",
        lambda f: [{"text": "why"}, {"prompt": "why " * 70, "completion": "so"}],
        DataError,
        "line 2: nothing to learn from within 64 tokens: the answer begins after 70",
    ),
    ("broken JSON", written("chat.jsonl", '{"text": 1}\n{'), DataError, "line 2: not a JSON object"),
    ("no file", lambda f: f / "missing.jsonl", DataError, "no such file"),
    ("no tokenizer", without("tokenizer.json"), ModelError, "no tokenizer.json"),
    ("no model", without("model.onnx"), ModelError, "no model.onnx"),
    (
        "weights of torch",
        lambda f: (f / "model.onnx").rename(f / "model.safetensors") and LINES,
        ModelError,
        "no model.onnx, but weights of PyTorch",
    ),
    (
        "a classifier",
        written("onward.json", '{"format": 1, "task": "fill-mask"}'),
        ModelError,
        "two sources disagree on the task",
    ),
]


@pytest.mark.parametrize(("spoil", "error", "message"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_bad_input_is_one_clear_error(
    base: Any, tmp_path: Path, spoil: Any, error: Any, message: str
) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(base[0], folder)
    data = spoil(folder)
    with pytest.raises(error, match=message):
        finetune(folder, data, lora=LORA, progress=False)


def test_a_token_outside_the_vocabulary_is_named(base: Any) -> None:
    opened = open_base(base[0])
    with pytest.raises(DataError, match=r"line 1: token .* is outside the model's vocabulary of 6"):
        encode(LINES[:1], dataclasses.replace(opened, vocabulary=6))


def test_adamw_is_that_of_transformers(base: Any) -> None:
    made = build_language_artifacts(open_base(base[0]), LORA, Recipe(slices=1))
    about = json.loads(made.optimizer.metadata_props["onward.optimizer"])
    assert about["hyperparameters"]["eps"] == 1e-8 and about["weight_decay"] == 0


def test_a_template_cannot_run_code(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(ModelError, match="refuses these messages"):
        read_template(tmp_path).render([{"role": "user", "content": "why"}])


@pytest.mark.parametrize(
    "source",
    [
        "'x' * 10**9",
        "'%999999999d' % 1",
        "'%*d' % (999999999, 1)",
        "'{:999999999}'.format(1)",
        "'x'.center(999999999)",
    ],
)
def test_a_template_cannot_make_much_of_little(tmp_path: Path, source: str) -> None:
    (tmp_path / "chat_template.jinja").write_text(f"{{{{ {source} }}}}")
    with pytest.raises(ModelError, match=r"large|characters|not valid Jinja"):
        read_template(tmp_path).render([{"role": "user", "content": "why"}])


def test_a_template_may_format_and_pad_a_little(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(
        "{{ '%5d' % 7 }}{{ '{:3}|'.format(8) }}{{ 'x'.center(3) }}{{ 7 % 4 }}"
    )
    assert read_template(tmp_path).render([{"role": "user", "content": "12345678"}]) == "    7  8| x 3"


def test_the_command_writes_training_models_for_browsers(base: Any, tmp_path: Path) -> None:
    asked = ["artifacts", str(base[0]), "--lora", "2", "-o", str(tmp_path / "made")]
    result = CliRunner().invoke(app, [*asked, "--loss", "mse"])
    assert result.exit_code != 0 and not (tmp_path / "made").exists()
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output
    state = CheckpointState.load_checkpoint(tmp_path / "made" / "checkpoint")
    module = Module(tmp_path / "made" / "training_model.onnx", state)
    words = np.asarray([[3, 4, 5, 6]])
    feeds = {"input_ids": words, "attention_mask": np.ones_like(words), "labels": words}
    before, after = (float(module(*(feeds[name] for name in module.input_names()))) for _ in range(2))
    assert before == after > 0
    assert all(
        name.endswith((".A", ".B")) or "lora" in name for name, p in state.parameters if p.requires_grad
    )


def test_what_a_large_file_is_for_is_read_without_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thrice as bytes and thrice parsed, a base of 500 MB took 1.5 GB before its training began."""
    file = tmp_path / "model.onnx"
    weight = onnx.numpy_helper.from_array(np.zeros((9 * 2**20,), np.float32), "w")
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Add", ["x", "w"], ["y"])], "large",
        [onnx.helper.make_tensor_value_info("x", 1, [9 * 2**20])],
        [onnx.helper.make_tensor_value_info("y", 1, [9 * 2**20])], [weight],
    )  # fmt: skip
    onnx.save(onnx.helper.make_model(graph), file)

    def refuse(path: Path, role: str) -> bytes:
        raise AssertionError(f"{path} is read whole")

    monkeypatch.setattr("onward.graph.gate._read", refuse)
    assert [spec.name for spec in open_source(file).inputs] == ["x"]
