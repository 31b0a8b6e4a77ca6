"""Encoders with decoders: one training graph whose loss and gradients are torch's, and files that answer as torch."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers

from export.huggingface_types import tiny_of
from export.published_parts import publish_parts
from onward import finetune
from onward.data.conversations import Example
from onward.errors import DataError, ModelError, OnwardError
from onward.export import from_transformers
from onward.language.seq2seq import SequenceModel, build_encoder_decoder, read_encoder_decoder
from onward.language.training_models import Recipe
from onward.lora import LoRA
from onward.pipeline.evaluate import evaluate_model
from onward.pipeline.load import load
from onward.tasks.sequence_to_sequence import Sample, SourceBatches
from onward.train.history import History
from onward.train.trainer import Trainer

LINES = [
    {"prompt": "where does the path end", "completion": "at a bridge"},
    {"input": "the ferry leaves", "answer": "at noon"},
    {"prompt": "prices rose by March", "target": "economists had said"},
    {"prompt": "hello there", "completion": "friend"},
]
TEXTS = [line.get("prompt") or line["input"] for line in LINES]
LORA = LoRA(rank=2, alpha=4.0, targets="attention")
TASKS = {"t5": "text2text", "bart": "text2text", "whisper": "automatic-speech-recognition"}
LAYOUTS = {
    "merged": ("encoder_model.onnx", "decoder_model_merged.onnx"),
    "two steps": ("encoder_model.onnx", "decoder_model.onnx", "decoder_with_past_model.onnx"),
}


def make(kind: str, folder: Path) -> Any:
    """A tiny model in a folder of Onward's own; BART's bias of each word is not zero, as Marian's."""
    model, tokenizer = tiny_of(kind, TASKS[kind])
    if kind == "bart":
        model.final_logits_bias.copy_(torch.linspace(-1, 1, model.config.vocab_size)[None])
    source: Any = (model, tokenizer)
    if kind == "whisper":
        extractor = transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=1)
        for part in (model, tokenizer, extractor):
            part.save_pretrained(folder.parent / "torch")
        source = str(folder.parent / "torch")
    from_transformers(source, TASKS[kind], folder, check=False)
    return model


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """A base of each kind and its model, made once."""

    @functools.cache
    def base(kind: str) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp(kind) / "base"
        return folder, make(kind, folder)

    return base


def optimum_folder(model: Any, folder: Path) -> Path:
    """T5 as optimum exports it without a cache: the decoder reads hidden states, and weights have numbers for names."""

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = model.get_encoder()

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            return self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state

    class Decoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder, self.lm_head = model.get_decoder(), model.lm_head

        def forward(self, encoder_attention_mask: Any, input_ids: Any, encoder_hidden_states: Any) -> Any:
            states = self.decoder(
                input_ids=input_ids, encoder_hidden_states=encoder_hidden_states,
                encoder_attention_mask=encoder_attention_mask, use_cache=False,
            ).last_hidden_state  # fmt: skip
            return self.lm_head(states * model.model_dim**-0.5)

    folder.mkdir()
    ids, states = torch.ones(2, 5, dtype=torch.int64), torch.zeros(2, 5, model.config.d_model)
    reads = {"encoder_attention_mask": ids, "input_ids": ids[:, :3], "encoder_hidden_states": states}
    for name, module, inputs, output in (
        ("encoder_model", Encoder(), {"input_ids": ids, "attention_mask": ids}, "last_hidden_state"),
        ("decoder_model", Decoder(), reads, "logits"),
    ):
        axes = {key: {0: "batch_size", 1: f"{key}_length"} for key in inputs}
        torch.onnx.export(
            module.eval(), tuple(inputs.values()), str(folder / f"{name}.onnx"), input_names=list(inputs),
            output_names=[output], dynamic_axes=axes, opset_version=17, dynamo=False,
        )  # fmt: skip
    return folder


def write_settings(model: Any, ours: Path, folder: Path) -> None:
    """What lies beside published models."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((ours / name).read_bytes())


def weights_with(model: Any, adapters: Any, lora: LoRA) -> dict[str, torch.Tensor]:
    """The weights of torch's model with adapters added, by the names of its modules."""
    base = dict(model.named_parameters())
    weights = dict(base)
    # Whisper's encoder runs the decoder's layers for the size of the batch alone: what is in both is the decoder's
    for name in sorted({name.rpartition(".")[0] for name in adapters}, reverse=True):
        plain = name.partition("/")[2].removesuffix(".transposed")
        change = adapters[f"{name}.lora_b"] @ adapters[f"{name}.lora_a"]
        weights[plain] = base[plain].detach() + lora.alpha / lora.rank * change
    return weights


def random_adapters(shapes: dict[str, Any], size: float = 0.2) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {name: random.normal(0, size, value.shape).astype(np.float32) for name, value in shapes.items()}


def samples_for(kind: str) -> list[Sample]:
    """A batch of unlike lengths, whose first token of the decoder does not count."""
    targets = [[0, 7, 9, 11, 5], [0, 8, 5]]
    random = np.random.default_rng(1)
    sounds = [random.normal(0, 1, (8, 100)).astype(np.float32) for _ in targets]
    sources = sounds if kind == "whisper" else [[7, 8, 9, 10, 5], [12, 5]]
    return [Sample(source, Example(ids, [-100, *ids[1:]]), "", "") for source, ids in zip(sources, targets)]


def compare_with_torch(folder: Path, kind: str, model: Any) -> None:
    """Loss and gradients of one batch, by all adapters of both parts."""
    opened = read_encoder_decoder(folder)
    _, artifacts = build_encoder_decoder(folder, LORA, Recipe(slices=3))
    trainer = Trainer(artifacts, progress=False)
    shapes = {name: np.asarray(v) for name, v in trainer.state.to_data().trainable.items()}
    for name, value in random_adapters(shapes).items():
        trainer.state.parameters[name].data = value
    names = list(trainer.module.signature.inputs)
    samples = samples_for(kind)
    batch = SourceBatches(opened, samples, 2, names=names).batch(samples)
    loss = float(np.asarray(trainer.module(*batch.values())))
    values = {n: torch.tensor(v, requires_grad=True) for n, v in random_adapters(shapes).items()}
    inputs = {name: torch.tensor(array) for name, array in batch.items()}
    labels = inputs.pop("labels")
    weights = weights_with(model, values, LORA)
    logits = torch.func.functional_call(model, weights, kwargs={**inputs, "use_cache": False}).logits
    expected = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
    )
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
    gradients = torch.autograd.grad(
        expected, list(values.values()), allow_unused=True, materialize_grads=True
    )
    scale = max(float(gradient.abs().max()) for gradient in gradients)
    assert any(name.startswith("encoder/") for name in values) and any(
        n.startswith("decoder/") for n in values
    )
    for name, gradient in zip(values, gradients):
        own = trainer.state.parameters[name].grad
        np.testing.assert_allclose(own, gradient.numpy(), atol=1e-5 * scale, err_msg=name)


@pytest.mark.parametrize("kind", TASKS)
def test_loss_and_gradients_of_both_parts_are_those_of_torch(bases: Any, kind: str) -> None:
    folder, model = bases(kind)
    compare_with_torch(folder, kind, model)


def test_a_decoder_that_reads_hidden_states_learns_as_in_torch(bases: Any, tmp_path: Path) -> None:
    ours, model = bases("t5")
    folder = optimum_folder(model, tmp_path / "published")
    write_settings(model, ours, folder)
    compare_with_torch(folder, "t5", model)


def trained(folder: Path) -> SequenceModel:
    """A model whose adapters change what it writes."""
    lora, artifacts = build_encoder_decoder(folder, LORA, Recipe())
    shapes = dict(artifacts.checkpoint.trainable)
    return SequenceModel(read_encoder_decoder(folder), lora, random_adapters(shapes), History(), {})


def written_in_torch(model: Any, result: SequenceModel, texts: list[str]) -> list[str]:
    """What transformers writes with the merged weights."""
    values = {name: torch.tensor(value) for name, value in result.adapters.items()}
    merged = weights_with(model, values, result.lora)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    tokenizer = result.base.tokenizer
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(merged[name])
        answers = []
        for text in texts:
            ids = torch.tensor([tokenizer.encode(text).ids])
            row = model.generate(input_ids=ids, max_new_tokens=7, do_sample=False, num_beams=1)[0].tolist()
            answers.append(tokenizer.decode([token for token in row if token not in (0, 5)]))
        for name, value in model.named_parameters():
            value.copy_(before[name])
    return answers


@pytest.mark.parametrize("kind", ["t5", "bart"])
@pytest.mark.parametrize("layout", ["our own", *LAYOUTS])
def test_the_merged_folder_writes_what_torch_writes_with_the_merged_weights(
    bases: Any, tmp_path: Path, kind: str, layout: str
) -> None:
    ours, model = bases(kind)
    folder = ours
    if layout != "our own":
        folder = tmp_path / "published"
        publish_parts(ours, folder / "onnx", LAYOUTS[layout])
        write_settings(model, ours, folder)
    result = trained(folder)
    before = load(folder)(TEXTS, max_new_tokens=7)
    result.export(tmp_path / "merged")
    answers = load(tmp_path / "merged")(TEXTS, max_new_tokens=7)
    assert answers == written_in_torch(model, result, TEXTS) and answers != before
    # branches that share a weight share what it became
    for name, file in result.base.files.items():
        merged = onnx.load(tmp_path / "merged" / file.relative_to(folder))
        sizes = [floats_in(model) for model in (merged, onnx.load(file))]
        assert sizes[0] == sizes[1], name


def floats_in(model: onnx.ModelProto) -> int:
    """How many numbers of the weights of products a file has."""
    return sum(int(np.prod(t.dims)) for t in model.graph.initializer if t.data_type == 1 and len(t.dims) == 2)


def write_sound(path: Path, seconds: float) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16000)
        noise = np.random.default_rng(0).normal(0, 3000, int(16000 * seconds))
        file.writeframes(noise.astype("<i2").tobytes())


def write_lines(path: Path, lines: Any) -> Path:
    path.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    return path


@pytest.mark.parametrize("kind", ["t5", "whisper"])
def test_a_run_learns_the_lines_resumes_and_reports_answers(bases: Any, tmp_path: Path, kind: str) -> None:
    folder, _ = bases(kind)
    if kind == "whisper":
        for index in range(2):
            write_sound(tmp_path / f"{index}.wav", 0.5 + index / 4)
        lines = [{"audio": "0.wav", "text": "the ferry"}, {"path": "1.wav", "text": "a bridge"}]
    else:
        lines = LINES
    data = write_lines(tmp_path / "lines.jsonl", lines)
    settings: dict[str, Any] = {
        "eval_data": data, "batch_size": 2, "learning_rate": 5e-3, "progress": False, "schedule": "constant",
    }  # fmt: skip
    whole = finetune(folder, data, epochs=4, output_directory=tmp_path / "whole", **settings)
    losses = [row["loss"] for row in whole.history.epochs]
    assert losses[-1] < losses[0]
    finetune(folder, data, epochs=2, output_directory=tmp_path / "parts", **settings)
    resumed = finetune(folder, data, epochs=4, output_directory=tmp_path / "parts", resume=True, **settings)
    assert [row["loss"] for row in resumed.history.epochs] == losses
    for name, array in whole.adapters.items():
        assert np.array_equal(array, resumed.adapters[name]), name
    rate = "wer" if kind == "whisper" else "exact_match"
    assert all(rate in row for row in whole.history.epochs)
    report = (tmp_path / "whole" / "report.html").read_text(encoding="utf-8")
    assert "Answers to held-out samples" in report and rate.replace("_", " ") in report
    # what the epoch's figures were measured on is what the folder answers
    whole.export(tmp_path / "result")
    figures = evaluate_model(tmp_path / "result", data, load=None, options=None).figures  # type: ignore[arg-type]
    assert figures["loss"] == pytest.approx(whole.metrics["eval_loss"], rel=1e-5)
    best = min(whole.history.epochs, key=lambda row: row["eval_loss"])
    assert figures[rate] == pytest.approx(best[rate])


TEXT_ERRORS = [
    ({"completion": "noon"}, r"line 2: has no prompt; a line is \{\"prompt\": …, \"completion\": …\}"),
    ({"prompt": "why"}, "line 2: has no completion"),
    ({"prompt": "why", "completion": " "}, "line 2: the text to write is ' '"),
    ({"prompt": "", "completion": "noon"}, "line 2: the text to read is ''"),
    ({"prompt": "why", "completion": "a", "answer": "b"}, "line 2: has both completion and answer"),
]


@pytest.mark.parametrize(("line", "message"), TEXT_ERRORS)
def test_a_line_that_cannot_be_used_is_named(bases: Any, tmp_path: Path, line: Any, message: str) -> None:
    folder, _ = bases("t5")
    data = write_lines(tmp_path / "lines.jsonl", [LINES[0], line])
    with pytest.raises(DataError, match=message):
        finetune(folder, data, progress=False)


@pytest.mark.parametrize(
    ("name", "seconds", "message"),
    [
        ("missing.wav", None, r"line 1: cannot read the sound '.*missing\.wav'"),
        ("long.wav", 1.5, "line 1: the sound lasts 1.5 seconds, and the model reads 1 at once"),
    ],
)
def test_a_sound_that_cannot_be_used_is_named(
    bases: Any, tmp_path: Path, name: str, seconds: float | None, message: str
) -> None:
    if seconds:
        write_sound(tmp_path / name, seconds)
    data = write_lines(tmp_path / "lines.jsonl", [{"audio": name, "text": "noon"}])
    with pytest.raises(DataError, match=message):
        finetune(bases("whisper")[0], data, progress=False)


def test_a_model_of_several_languages_needs_to_know_which(bases: Any, tmp_path: Path) -> None:
    folder = tmp_path / "base"
    shutil.copytree(bases("whisper")[0], folder)
    card = json.loads((folder / "onward.json").read_text(encoding="utf-8"))
    card["generation"]["speech"] = {
        "languages": {"<|en|>": 7, "<|de|>": 8}, "tasks": {"transcribe": 9, "translate": 10}, "no_timestamps_id": 11,
    }  # fmt: skip
    (folder / "onward.json").write_text(json.dumps(card), encoding="utf-8")
    write_sound(tmp_path / "0.wav", 0.5)
    data = write_lines(tmp_path / "lines.jsonl", [{"audio": "0.wav", "text": "noon"}])
    with pytest.raises(DataError, match="line 1: has no language; the model knows en, de"):
        finetune(folder, data, progress=False)
    with pytest.raises(DataError, match="unknown language 'fr'"):
        finetune(folder, data, progress=False, language="fr")
    result = finetune(folder, data, progress=False, language="de", eval_data=data)
    assert result.history.epochs[0]["wer"] >= 0


def test_a_folder_that_lacks_a_part_and_targets_that_match_nothing_are_refused(
    bases: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "base"
    shutil.copytree(bases("t5")[0], folder)
    with pytest.raises(
        OnwardError, match=r"'lstm' matches no weight of a product; the model has encoder\.block"
    ):
        finetune(folder, LINES, progress=False, targets=["lstm"])
    result = trained(folder)
    with pytest.raises(ModelError, match="own folder"):
        result.export(folder)
    wrong = dataclasses.replace(result, adapters={n: v[:1, :1] for n, v in result.adapters.items()})
    with pytest.raises(ModelError, match="another base's"):
        wrong.export(tmp_path / "wrong")
    (folder / "decoder_model.onnx").unlink()
    with pytest.raises(ModelError, match=r"no decoder_model\.onnx"):
        finetune(folder, LINES, progress=False)


def test_a_decoder_of_two_branches_is_not_trained_to_be_quantized(bases: Any, tmp_path: Path) -> None:
    from cli.conftest import call

    ours, model = bases("t5")
    publish_parts(ours, tmp_path / "base" / "onnx", LAYOUTS["merged"])
    write_settings(model, ours, tmp_path / "base")
    write_lines(tmp_path / "lines.jsonl", LINES)
    line = ["--data", tmp_path / "lines.jsonl", "--output", tmp_path / "new", "--quantize", "int8-weights"]
    output = call("finetune", tmp_path / "base", *line, code=1).output
    assert "has its weights in branches" in output and "epoch" not in output
    assert not (tmp_path / "new").exists()
