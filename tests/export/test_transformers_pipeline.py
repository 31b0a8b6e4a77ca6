"""An exported folder answers by itself: each task's answer against the model it came from."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from export.tiny_transformers import tiny_pair
from onward.data import preprocess as signals
from onward.errors import ExportError, ModelError
from onward.export import from_transformers
from onward.pipeline.load import load

TEXT = "the ferry leaves at noon"
LONG = "nobody expected a small library to train a network on the phone"


def exported(folder: Path, architecture: str, task: str, **settings: Any) -> tuple[Any, Any, Any]:
    """A pipeline beside the model and tokenizer that it was exported from."""
    model, tokenizer = tiny_pair(architecture, task, **settings)
    from_transformers((model, tokenizer), task, folder / "exported")
    return load(folder / "exported"), model, tokenizer


def answer(model: Any, tokenizer: Any, *texts: Any) -> Any:
    with torch.no_grad():
        return model(**tokenizer(*texts, return_tensors="pt", return_token_type_ids=True))


def test_embeddings_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    pipeline, model, tokenizer = exported(tmp_path, "bert", "pooling")
    texts = [TEXT, LONG, "why", "hello"]
    together = pipeline(texts, batch_size=3)
    assert together.shape == (4, 16)
    for text, row in zip(texts, together):
        expected = answer(model, tokenizer, text).last_hidden_state[0].mean(0)
        np.testing.assert_allclose(row, expected, atol=1e-5)
        np.testing.assert_allclose(pipeline(text), row, atol=1e-5)


def test_hidden_states_come_without_padding(tmp_path: Path) -> None:
    pipeline, model, tokenizer = exported(tmp_path, "distilbert", "default")
    for text, states in zip([TEXT, LONG], pipeline([TEXT, LONG])):
        with torch.no_grad():
            expected = model(
                **tokenizer(text, return_tensors="pt", return_token_type_ids=False)
            ).last_hidden_state
        np.testing.assert_allclose(states, expected[0], atol=1e-5)


@pytest.mark.parametrize(
    "problem", ["single_label_classification", "multi_label_classification", "regression"]
)
def test_classification_gives_labels_with_scores(tmp_path: Path, problem: str) -> None:
    labels = {0: "sport", 1: "politics", 2: "weather"}
    pipeline, model, tokenizer = exported(
        tmp_path, "bert", "text-classification", id2label=labels, problem_type=problem
    )
    logits = answer(model, tokenizer, TEXT).logits[0]
    scores = {
        "single_label_classification": logits.softmax(-1),
        "multi_label_classification": logits.sigmoid(),
    }
    expected = scores.get(problem, logits)
    best = int(expected.argmax())
    assert pipeline(TEXT) == {"label": labels[best], "score": pytest.approx(float(expected[best]), abs=1e-6)}
    everything = pipeline([TEXT], top_k=None)[0]
    assert {a["label"]: a["score"] for a in everything} == pytest.approx(
        {labels[i]: float(value) for i, value in enumerate(expected)}, abs=1e-6
    )


def test_zero_shot_ranks_labels_by_entailment(tmp_path: Path) -> None:
    labels = {0: "contradiction", 1: "entailment"}
    pipeline, model, tokenizer = exported(tmp_path, "bert", "zero-shot-classification", id2label=labels)
    names = ["sport", "politics"]
    pairs = [answer(model, tokenizer, TEXT, f"This example is {name}.").logits[0, 1] for name in names]
    expected = dict(zip(names, torch.stack(pairs).softmax(0).tolist()))
    assert {a["label"]: a["score"] for a in pipeline(TEXT, names)} == pytest.approx(expected, abs=1e-6)
    with pytest.raises(TypeError, match="needs labels"):
        pipeline(TEXT)


def test_token_classification_labels_every_word_and_groups_names(tmp_path: Path) -> None:
    labels = {0: "O", 1: "B-PLACE", 2: "I-PLACE"}
    pipeline, model, tokenizer = exported(tmp_path, "bert", "token-classification", id2label=labels)
    tokens = pipeline([LONG, TEXT])[1]
    best = answer(model, tokenizer, TEXT).logits[0, 1:-1].softmax(-1).max(-1)
    assert [token["text"] for token in tokens] == TEXT.split()
    assert [token["label"] for token in tokens] == [labels[int(i)] for i in best.indices]
    assert [token["score"] for token in tokens] == pytest.approx(best.values.tolist(), abs=1e-6)
    for group in pipeline(TEXT, group=True):
        assert group["label"] == "PLACE"
        assert TEXT[group["start"] : group["end"]] == group["text"]


@pytest.mark.parametrize("strategy", ["simple", "first", "average", "max"])
def test_names_are_grouped_as_transformers_groups_them(tmp_path: Path, strategy: str) -> None:
    labels = {0: "O", 1: "B-PLACE", 2: "I-PLACE"}
    pipeline, model, tokenizer = exported(tmp_path, "bert", "token-classification", id2label=labels)
    theirs = transformers.pipeline("token-classification", model=model, tokenizer=tokenizer)
    for text in (TEXT, LONG, "Prices rose, by March"):
        expected = theirs(text, aggregation_strategy=strategy)
        got = pipeline(text, aggregation_strategy=strategy)
        assert [(e["label"], e["start"], e["end"]) for e in got] == [
            (e["entity_group"], e["start"], e["end"]) for e in expected
        ]
        assert [e["score"] for e in got] == pytest.approx([float(e["score"]) for e in expected], abs=1e-5)
    with pytest.raises(ValueError, match="choose one of none, simple"):
        pipeline(TEXT, aggregation_strategy="best")


@pytest.mark.parametrize(("count", "kind"), [(1, None), (1, "regression"), (3, "multi_label_classification")])
def test_scores_are_those_of_the_kind_of_problem(tmp_path: Path, count: int, kind: str | None) -> None:
    settings = {"num_labels": count, "problem_type": kind}
    pipeline, model, tokenizer = exported(tmp_path, "bert", "text-classification", **settings)
    theirs = transformers.pipeline("text-classification", model=model, tokenizer=tokenizer)
    for text, found in zip([TEXT, LONG], pipeline([TEXT, LONG], top_k=None)):
        expected = {e["label"]: e["score"] for e in theirs(text, top_k=None)}
        assert {e["label"]: e["score"] for e in found} == pytest.approx(expected, abs=1e-5)


def test_a_decoder_classifies_the_same_alone_and_in_a_batch(tmp_path: Path) -> None:
    pipeline, model, tokenizer = exported(tmp_path, "gpt2", "text-classification", pad_token_id=0)
    theirs = transformers.pipeline("text-classification", model=model, tokenizer=tokenizer)
    for text, found in zip([TEXT, LONG], pipeline([TEXT, LONG], top_k=None)):
        expected = {e["label"]: e["score"] for e in theirs(text, top_k=None)}
        assert {e["label"]: e["score"] for e in found} == pytest.approx(expected, abs=1e-5)


def test_an_answer_is_the_likeliest_span_of_the_context(tmp_path: Path) -> None:
    pipeline, model, tokenizer = exported(tmp_path, "bert", "question-answering")
    question = "where does the path end"
    outputs = answer(model, tokenizer, question, LONG)
    encoded = tokenizer(question, LONG, return_offsets_mapping=True)
    inside = torch.tensor([part == 1 for part in encoded.sequence_ids()])
    start, end = (outputs[k][0].softmax(-1) * inside for k in ("start_logits", "end_logits"))
    joint = torch.outer(start, end).triu()
    first, last = divmod(int(joint.argmax()), joint.shape[1])
    left, right = encoded["offset_mapping"][first][0], encoded["offset_mapping"][last][1]
    got = pipeline(question, LONG)
    assert got == {
        "answer": LONG[left:right],
        "score": pytest.approx(float(joint.max()), abs=1e-6),
        "start": left,
        "end": right,
    }
    assert pipeline([(question, LONG)]) == [got]


def test_a_context_longer_than_the_model_is_read_in_windows(tmp_path: Path) -> None:
    pipeline, _, _ = exported(tmp_path, "bert", "question-answering")
    far = " ".join([TEXT] * 40) + " " + LONG
    got = pipeline("why", far)
    assert far[got["start"] : got["end"]] == got["answer"] != ""
    best_alone = max(pipeline("why", part)["score"] for part in (TEXT, LONG))
    assert got["score"] > 0 and best_alone > 0
    with pytest.raises(ValueError, match="fills the model's 60 tokens"):
        pipeline(far, TEXT)


def test_a_mask_is_filled_with_the_likeliest_words(tmp_path: Path) -> None:
    pipeline, model, tokenizer = exported(tmp_path, "bert", "fill-mask")
    text = "the [MASK] leaves at noon"
    probabilities = answer(model, tokenizer, text).logits[0, 2].softmax(-1)
    expected = probabilities.topk(3)
    got = pipeline([LONG + " [MASK]", text], top_k=3)[1]
    assert [c["score"] for c in got] == pytest.approx(expected.values.tolist(), abs=1e-6)
    assert [c["token"] for c in got] == [tokenizer.decode([i]).strip() for i in expected.indices]
    assert len(pipeline("[MASK] [MASK]")) == 2
    with pytest.raises(ValueError, match=r"put \[MASK\]"):
        pipeline(TEXT)


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_generated_text_is_what_torch_generates(tmp_path: Path, architecture: str) -> None:
    pipeline, model, tokenizer = exported(tmp_path, architecture, "text-generation")
    texts = [TEXT, "hello there"]
    expected = []
    for text in texts:
        encoded = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
        ids = model.generate(**encoded, do_sample=False, max_new_tokens=12, pad_token_id=0)[0]
        expected.append(tokenizer.decode(ids, skip_special_tokens=True))
    # Together, so that the shorter prompt is padded.
    assert pipeline(texts, max_new_tokens=12, full_text=True) == expected
    assert pipeline(TEXT, max_new_tokens=12) == expected[0].removeprefix(TEXT)


@pytest.mark.parametrize("architecture", ["t5", "bart"])
def test_text_to_text_is_what_torch_generates(tmp_path: Path, architecture: str) -> None:
    pipeline, model, tokenizer = exported(tmp_path, architecture, "text2text", forced_eos_token_id=None)
    encoded = tokenizer(TEXT, return_tensors="pt", return_token_type_ids=False)
    ids = model.generate(**encoded, do_sample=False, num_beams=1, max_new_tokens=6)[0, 1:]
    assert pipeline([TEXT, LONG], max_new_tokens=6)[0] == tokenizer.decode(ids, skip_special_tokens=True)


def test_images_and_sound_are_classified(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).normal(size=(3, 16, 16)).astype(np.float32)
    pipeline, model, _ = exported(tmp_path / "image", "vit", "image-classification")
    with torch.no_grad():
        expected = model(torch.tensor(pixels[None])).logits[0].softmax(-1)
    assert pipeline(pixels)["score"] == pytest.approx(float(expected.max()), abs=1e-6)

    wave = np.random.default_rng(0).normal(size=5000).astype(np.float32)
    pipeline, model, _ = exported(tmp_path / "sound", "wav2vec2", "audio-classification")
    with torch.no_grad():
        expected = model(torch.tensor(wave[None])).logits[0].softmax(-1)
    assert pipeline([wave])[0]["score"] == pytest.approx(float(expected.max()), abs=1e-6)


def test_an_image_is_matched_with_the_labels_that_a_call_names(tmp_path: Path) -> None:
    match, model, tokenizer = exported(tmp_path, "clip", "zero-shot-image-classification")
    image = np.random.default_rng(0).normal(size=(3, 16, 16)).astype(np.float32)
    labels = ["ferry", "small library", "river"]
    texts = tokenizer([f"the {label}" for label in labels], padding=True, return_tensors="pt")
    with torch.no_grad():
        scores = model(**texts, pixel_values=torch.from_numpy(image)[None]).logits_per_image[0].softmax(0)
    answer = match(image, labels, template="the {}")
    assert {entry["label"]: entry["score"] for entry in answer} == pytest.approx(
        dict(zip(labels, scores.tolist())), abs=1e-5
    )
    assert answer[0]["label"] == labels[int(scores.argmax())]
    with pytest.raises(TypeError, match="needs labels"):
        match(image)


def test_an_image_is_scaled_cropped_and_normalised_as_its_processor_would() -> None:
    checker = (np.indices((8, 12)).sum(0) // 4 % 2 * 255).astype(np.uint8)
    settings = {
        "size": {"shortest_edge": 4},
        "resample": 2,
        "do_center_crop": True,
        "crop_size": {"height": 4, "width": 4},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    prepared = signals.image(np.stack([checker] * 3, axis=-1), settings)
    assert prepared.shape == (3, 4, 4)
    assert prepared.min() >= -1 and prepared.max() <= 1
    # Shrinking by two is symmetric about the middle of a constant patch, and a constant stays one.
    constant = signals.image(np.full((8, 12, 3), 51, np.uint8), settings)
    np.testing.assert_allclose(constant, 51 / 255 * 2 - 1, atol=1e-6)
    with pytest.raises(ValueError, match="height, width, channels"):
        signals.image(np.zeros((2, 2, 2, 2)), settings)


def test_resizing_agrees_with_torch_antialiased_interpolation() -> None:
    picture = np.random.default_rng(0).integers(0, 256, (20, 31, 3)).astype(np.uint8)
    settings = {"size": {"height": 9, "width": 14}, "resample": 2, "do_rescale": False, "do_normalize": False}
    tensor = torch.tensor(picture, dtype=torch.float64).permute(2, 0, 1)[None]
    expected = torch.nn.functional.interpolate(tensor, (9, 14), mode="bilinear", antialias=True)[0]
    # Each of the two passes rounds to whole numbers, as bytes do.
    np.testing.assert_allclose(signals.image(picture, settings), expected, atol=1.01)


def test_a_wave_is_normalised_where_the_model_wants_it() -> None:
    wave = signals.sound(np.arange(100.0), {"do_normalize": True})
    assert wave.mean() == pytest.approx(0, abs=1e-6) and wave.std() == pytest.approx(1, abs=1e-5)
    np.testing.assert_array_equal(signals.sound([1.0, 3.0], None), [1.0, 3.0])


def test_the_card_says_what_was_exported_and_how_well(tmp_path: Path) -> None:
    from_transformers(tiny_pair("bert", "pooling"), "pooling", tmp_path / "folder", quantize="int8")
    card = json.loads((tmp_path / "folder" / "onward.json").read_text(encoding="utf-8"))
    assert card["task"] == "pooling" and card["quantize"] == "int8" and card["opset"] == 18
    assert card["inputs"]["input_ids"] == {"0": "batch", "1": "sequence"}
    assert card["pooling"] == {"modes": ["mean"], "normalize": False}
    assert card["parity"]["passed"] and card["parity"]["max_rel"] < 1e-5
    assert card["quantization"]["bytes_after"] == (tmp_path / "folder" / "model.onnx").stat().st_size
    assert {path.name for path in (tmp_path / "folder").iterdir()} >= {
        "model.onnx",
        "onward.json",
        "tokenizer.json",
    }
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_folder_answers_without_torch_and_transformers(healthy: Path) -> None:
    program = f"""
import sys
sys.modules["torch"] = sys.modules["transformers"] = None  # importing either now fails
from onward.pipeline import load
print(load({str(healthy)!r})("some text").shape)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ran.stdout.strip(), ran.returncode) == ("(16,)", 0), ran.stderr


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return from_transformers(
        tiny_pair("bert", "pooling"), "pooling", tmp_path_factory.mktemp("model") / "folder"
    )  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("name", "text", "error", "message"),
    [
        ("onward.json", None, ExportError, "no onward.json"),
        ("onward.json", "{", ExportError, "not a readable card"),
        ("onward.json", '{"format": 9}', ExportError, "expected format 1"),
        ("onward.json", '{"format": 1, "task": "cooking"}', ModelError, "'cooking'; known: default"),
        ("tokenizer.json", None, ModelError, "no tokenizer.json"),
        ("model.onnx", None, ModelError, "no model.onnx"),
    ],
)
def test_a_broken_folder_is_one_clear_error(
    tmp_path: Path, healthy: Path, name: str, text: str | None, error: type[Exception], message: str
) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(healthy, folder)
    if text is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(text)
    with pytest.raises(error, match=message):
        load(folder)
