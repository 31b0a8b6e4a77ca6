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

from export.huggingface_types import tiny_of
from export.tiny_tokenizers import tokenizer_of
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


TEXTS = [
    "The ferry leaves at noon.",
    "Nobody expected, I'm sure, a small library!",
    "日本語 words: isn't it?",
]
READERS = [
    "bytes (GPT-2)",
    "SentencePiece BPE (Llama)",
    "unigram, lower case (ALBERT)",
    "pieces of words (BERT)",
]


def read_by(
    folder: Path, reader: str, task: str, kind: str = "distilbert", **settings: Any
) -> tuple[Any, Any]:
    """Onward's pipeline beside that of transformers, with a tokenizer of a published kind."""
    tokenizer = tokenizer_of(reader)
    model, _ = tiny_of(kind, task, vocab_size=len(tokenizer), pad_token_id=0, eos_token_id=3, **settings)
    from_transformers((model, tokenizer), task, folder / kind / task, check=False)
    return load(folder / kind / task), transformers.pipeline(task, model=model, tokenizer=tokenizer)


def same_scores(got: Any, expected: Any) -> None:
    assert [e["score"] for e in got] == pytest.approx([float(e["score"]) for e in expected], abs=1e-5)


@pytest.mark.parametrize("reader", READERS)
def test_names_are_tagged_and_grouped_as_by_transformers(tmp_path: Path, reader: str) -> None:
    labels = dict(enumerate(["O", "B-PER", "I-PER", "B-LOC-X", "I-LOC-X", "MISC"]))
    known = {"id2label": labels, "label2id": {name: index for index, name in labels.items()}}
    ours, theirs = read_by(tmp_path, reader, "token-classification", **known)
    for strategy in ("none", "simple", "first", "average", "max"):
        for options in ({}, {"ignore_labels": ["B-PER", "PER"]}):
            options["aggregation_strategy"] = strategy
            together = ours(TEXTS, **options)
            for text, got in zip(TEXTS, together):
                expected = theirs(text, **options)
                assert [(e["label"], e["start"], e["end"]) for e in got] == [
                    (e.get("entity_group", e.get("entity")), e["start"], e["end"]) for e in expected
                ]
                assert all(text[e["start"] : e["end"]] == e["text"] for e in got)
                same_scores(got, expected)
    assert [e["label"] for e in ours(TEXTS[0], group=True)] == [
        e["label"] for e in ours(TEXTS[0], aggregation_strategy="simple")
    ]
    with pytest.raises(ValueError, match="choose one of none, simple"):
        ours(TEXTS[0], aggregation_strategy="best")


@pytest.mark.parametrize("reader", READERS)
def test_masks_are_filled_as_by_transformers(tmp_path: Path, reader: str) -> None:
    ours, theirs = read_by(tmp_path, reader, "fill-mask")
    for text, options in (
        ("The <mask> leaves at noon.", {"top_k": 3}),
        ("<mask> path <mask> ends.", {"top_k": 2}),
        ("The <mask> leaves", {"targets": ["ferry", "path", "n"]}),
    ):
        expected, got = theirs(text, **options), ours(text, **options)
        if isinstance(expected[0], list):
            assert len(got) == len(expected) == 2
            expected, got = [*expected[0], *expected[1]], [*got[0], *got[1]]
        assert [(e["token"], e["text"]) for e in got] == [
            (e["token_str"].strip(), e["sequence"]) for e in expected
        ]
        same_scores(got, expected)
    with pytest.raises(ValueError, match="put <mask>"):
        ours(TEXTS[0])


@pytest.mark.parametrize("kind", ["distilbert", "bart"])
@pytest.mark.parametrize("names", [["entailment", "neutral", "contradiction"], ["no", "maybe", "Entailed"]])
def test_labels_of_a_call_are_scored_as_by_transformers(tmp_path: Path, kind: str, names: list[str]) -> None:
    known = {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
    ours, theirs = read_by(tmp_path, READERS[-1], "zero-shot-classification", kind, num_labels=3, **known)
    for options in ({}, {"multi_label": True}, {"hypothesis_template": "It says {}!"}):
        for labels in (["river", "path, end", "prices"], "river, path", ["noon"]):
            got, expected = ours(TEXTS[0], labels, **options), theirs(TEXTS[0], labels, **options)
            assert [e["label"] for e in got] == expected["labels"]
            assert [e["score"] for e in got] == pytest.approx(expected["scores"], abs=1e-5)
    with pytest.raises(TypeError, match="needs labels"):
        ours(TEXTS[0])
    with pytest.raises(ValueError, match="where the label goes"):
        ours(TEXTS[0], ["river"], hypothesis_template="It says so")


@pytest.mark.parametrize(("count", "kind"), [(1, None), (1, "regression"), (3, "multi_label_classification")])
def test_scores_are_those_of_the_kind_of_problem(tmp_path: Path, count: int, kind: str | None) -> None:
    settings = {"num_labels": count, "problem_type": kind}
    pipeline, model, tokenizer = exported(tmp_path, "bert", "text-classification", **settings)
    theirs = transformers.pipeline("text-classification", model=model, tokenizer=tokenizer)
    for function in (None, "softmax", "sigmoid", "none"):
        options = {"top_k": None, "function_to_apply": function}
        for text, found in zip([TEXT, LONG], pipeline([TEXT, LONG], **options)):
            expected = {e["label"]: e["score"] for e in theirs(text, **options)}
            assert {e["label"]: e["score"] for e in found} == pytest.approx(expected, abs=1e-5)
    pair = {"text": TEXT, "text_pair": LONG}
    assert pipeline(pair)["score"] == pytest.approx(theirs(pair)["score"], abs=1e-5)
    with pytest.raises(ValueError, match="choose one of softmax"):
        pipeline(TEXT, function_to_apply="tanh")


def test_a_decoder_classifies_the_same_alone_and_in_a_batch(tmp_path: Path) -> None:
    pipeline, model, tokenizer = exported(tmp_path, "gpt2", "text-classification", pad_token_id=0)
    theirs = transformers.pipeline("text-classification", model=model, tokenizer=tokenizer)
    for text, found in zip([TEXT, LONG], pipeline([TEXT, LONG], top_k=None)):
        expected = {e["label"]: e["score"] for e in theirs(text, top_k=None)}
        assert {e["label"]: e["score"] for e in found} == pytest.approx(expected, abs=1e-5)


def test_answers_are_the_likeliest_spans_of_the_context(tmp_path: Path) -> None:
    pipeline, model, tokenizer = exported(tmp_path, "bert", "question-answering")
    question = "where does the path end"
    outputs = answer(model, tokenizer, question, LONG)
    encoded = tokenizer(question, LONG, return_offsets_mapping=True)
    # the context and [CLS], which says "no answer", share all probability
    weighed = torch.tensor([part == 1 for part in encoded.sequence_ids()])
    weighed[0] = True
    start, end = (
        outputs[k][0].masked_fill(~weighed, -torch.inf).softmax(-1) for k in ("start_logits", "end_logits")
    )
    none = float(start[0] * end[0])
    start[0] = end[0] = 0
    joint = torch.outer(start, end).triu().tril(3)
    expected = []
    for place in joint.flatten().argsort(descending=True)[:2].tolist():
        first, last = divmod(place, joint.shape[1])
        left, right = encoded["offset_mapping"][first][0], encoded["offset_mapping"][last][1]
        score = pytest.approx(float(joint[first, last]), abs=1e-6)
        expected.append({"answer": LONG[left:right], "score": score, "start": left, "end": right})
    got = pipeline(question, LONG, max_answer_len=4)
    assert got == expected[0]
    assert pipeline(question, LONG, max_answer_len=4, top_k=2) == expected
    assert pipeline([(question, LONG)], max_answer_len=4) == [got]
    assert pipeline({"question": question, "context": LONG}, max_answer_len=4) == got
    several = pipeline(question, LONG, top_k=100, handle_impossible_answer=True)
    assert [e["score"] for e in several if not e["answer"]] == [pytest.approx(none, abs=1e-6)]
    with pytest.raises(ValueError, match="top_k is 0"):
        pipeline(question, LONG, top_k=0)


def test_a_tokenizer_that_pads_on_the_left_has_the_context_first(tmp_path: Path) -> None:
    """As transformers' pipeline asks such models: they were trained so."""
    model, tokenizer = tiny_pair("bert", "question-answering")
    tokenizer.padding_side = "left"
    from_transformers((model, tokenizer), "question-answering", tmp_path / "model")
    pipeline: Any = load(tmp_path / "model")
    question = "where does the path end"
    got = pipeline(question, LONG, max_answer_len=4, align_to_words=False)
    outputs = answer(model, tokenizer, LONG, question)
    encoded = tokenizer(LONG, question, return_offsets_mapping=True)
    weighed = torch.tensor([part == 0 for part in encoded.sequence_ids()])
    weighed[0] = True
    start, end = (
        outputs[k][0].masked_fill(~weighed, -torch.inf).softmax(-1) for k in ("start_logits", "end_logits")
    )
    start[0] = end[0] = 0
    joint = torch.outer(start, end).triu().tril(3)
    first, last = divmod(int(joint.argmax()), joint.shape[1])
    left, right = encoded["offset_mapping"][first][0], encoded["offset_mapping"][last][1]
    assert (got["answer"], got["start"]) == (LONG[left:right], left)
    assert got["score"] == pytest.approx(float(joint.max()), abs=1e-6)


def test_a_context_longer_than_the_model_is_read_in_windows(tmp_path: Path) -> None:
    pipeline, _, _ = exported(tmp_path, "bert", "question-answering")
    far = " ".join([TEXT] * 40) + " " + LONG
    got = pipeline("why", far)
    assert far[got["start"] : got["end"]] == got["answer"] != ""
    best_alone = max(pipeline("why", part)["score"] for part in (TEXT, LONG))
    assert got["score"] > 0 and best_alone > 0
    with pytest.raises(ValueError, match="fills the model's 60 tokens"):
        pipeline(far, TEXT)


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
    answer = match(image, labels, hypothesis_template="the {}")
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


@pytest.mark.parametrize("place", ["model.onnx", "onnx/model.onnx", "onnx/model_quantized.onnx"])
def test_a_folder_that_others_published_answers_as_our_own(tmp_path: Path, place: str) -> None:
    """The files are those that optimum and onnx-community have beside their models; there is no onward.json."""
    names = {"id2label": {0: "O", 1: "B-PER", 2: "I-PER"}, "label2id": {"O": 0, "B-PER": 1, "I-PER": 2}}
    tokenizer = tokenizer_of("pieces of words (BERT)")
    model, _ = tiny_of("distilbert", "token-classification", vocab_size=len(tokenizer), **names)
    from_transformers((model, tokenizer), "token-classification", tmp_path / "ours", check=False)
    published = tmp_path / "theirs"
    model.config.save_pretrained(published)
    tokenizer.save_pretrained(published)
    (published / place).parent.mkdir(exist_ok=True)
    shutil.copy(tmp_path / "ours" / "model.onnx", published / place)
    theirs = load(published if place.endswith("model.onnx") else published / place)
    assert theirs(TEXTS) == load(tmp_path / "ours")(TEXTS)
    config = json.loads((published / "config.json").read_text())
    for wrong, message in (
        ({"architectures": ["DistilBertForQuestionAnswering"]}, "needs the outputs end_logits, start_logits"),
        ({"architectures": ["T5ForConditionalGeneration"]}, "an encoder and a decoder"),
        ({"id2label": {"a": "O"}}, "no numbers"),
        ({"architectures": 3}, "not a list of names"),
    ):
        (published / "config.json").write_text(json.dumps({**config, **wrong}))
        with pytest.raises(ModelError, match=message):
            load(published if place.endswith("model.onnx") else published / place)


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
