"""A Hugging Face model that was trained becomes a folder that answers as the trained model does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onward
from export.tiny_transformers import tiny_pair
from onward.errors import ExportError
from onward.export import artifacts_from_transformers, save_pipeline

TEXTS = ["the ferry leaves at noon", "why", "nobody expected a small library"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, onward.Trainer]:
    """A classifier with a new head of three classes, after a few steps."""
    work = tmp_path_factory.mktemp("deployment")
    for part in tiny_pair("bert", "text-classification"):
        part.save_pretrained(work / "bert")
    artifacts = artifacts_from_transformers(
        work / "bert", "text-classification", work / "artifacts", labels=["sea", "land", "air"], max_length=6
    )
    trainer = onward.Trainer(artifacts, learning_rate=1e-2, progress=False)
    ids = np.array([[2, 9, 8, 3], [2, 7, 3, 0], [2, 11, 12, 3]])
    batch = {"input_ids": ids, "attention_mask": (ids > 0).astype(np.int64), "token_type_ids": 0 * ids}
    trainer.fit({**batch, "labels": np.array([0, 1, 2])}, epochs=3, batch_size=3)
    return artifacts, trainer


def test_the_folder_gives_the_trained_model_s_scores_under_its_labels(
    trained: tuple[Path, onward.Trainer], tmp_path: Path
) -> None:
    artifacts, trainer = trained
    save_pipeline(artifacts, trainer.state, tmp_path / "classifier")
    classify = onward.load(tmp_path / "classifier")
    feed, encodings = classify.encode(TEXTS)
    assert max(len(encoding.ids) for encoding in encodings) == 6
    logits = np.asarray(trainer.predict(feed, outputs=["logits"])["logits"])
    for answer, row in zip(classify(TEXTS, top_k=None), logits):
        scores = np.exp(row) / np.exp(row).sum()
        ranked = sorted(zip(["sea", "land", "air"], scores), key=lambda pair: -pair[1])
        assert [entry["label"] for entry in answer] == [label for label, _ in ranked]
        assert [entry["score"] for entry in answer] == pytest.approx([score for _, score in ranked], abs=1e-5)


def test_int8_is_smaller_and_its_cost_is_recorded(
    trained: tuple[Path, onward.Trainer], tmp_path: Path
) -> None:
    artifacts, trainer = trained
    whole = save_pipeline(artifacts, trainer.state, tmp_path / "fp32")
    small = save_pipeline(artifacts, trainer.state, tmp_path / "int8", quantize="int8")
    assert small.size < whole.size
    kept = [t for t in onnx.load(small.path).graph.initializer if t.data_type == onnx.TensorProto.FLOAT]
    assert not [
        t.name for t in kept if len(t.dims) == 2 and "attention" in t.name
    ]  # training transposes them
    assert small.path == tmp_path / "int8" / "model.onnx"
    card = json.loads((tmp_path / "int8" / "onward.json").read_text(encoding="utf-8"))
    assert card["quantize"] == "int8"
    assert card["quantization"]["cosine_mean"] > 0.9
    assert card["parity"]["passed"]
    assert "sample" not in card
    assert onward.load(tmp_path / "int8")(TEXTS[0])["label"] in ("sea", "land", "air")


def test_a_trained_generator_writes_what_torch_writes(tmp_path: Path) -> None:
    model, tokenizer = tiny_pair("gpt2", "text-generation")
    artifacts = artifacts_from_transformers((model, tokenizer), "text-generation", tmp_path / "artifacts")
    save_pipeline(artifacts, artifacts / "checkpoint", tmp_path / "writer")
    written = onward.load(tmp_path / "writer")(TEXTS, max_new_tokens=5)
    for text, got in zip(TEXTS, written):
        ids = tokenizer(text, return_tensors="pt")
        out = model.generate(**ids, max_new_tokens=5, do_sample=False, pad_token_id=0)[0]
        assert got == tokenizer.decode(out[ids["input_ids"].shape[1] :], skip_special_tokens=True)


def test_a_model_that_ignores_segments_is_saved_without_them(tmp_path: Path) -> None:
    pair = tiny_pair("deberta", "token-classification")
    artifacts = artifacts_from_transformers(pair, "token-classification", tmp_path / "artifacts")
    save_pipeline(artifacts, artifacts / "checkpoint", tmp_path / "tagger")
    tag = onward.load(tmp_path / "tagger")
    assert list(tag.card["inputs"]) == ["input_ids", "attention_mask"]
    assert [token["text"] for token in tag("the ferry leaves")] == ["the", "ferry", "leaves"]


def test_saving_and_answering_need_neither_torch_nor_transformers(
    trained: tuple[Path, onward.Trainer], tmp_path: Path
) -> None:
    artifacts, _ = trained
    program = f"""
import sys
sys.modules["torch"] = sys.modules["transformers"] = None
import onward
from onward.export import save_pipeline
save_pipeline({str(artifacts)!r}, {str(artifacts / "checkpoint")!r}, {str(tmp_path / "folder")!r})
print(onward.load({str(tmp_path / "folder")!r})("why")["label"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in ("sea", "land", "air")


def wrong_labels(work: Path, labels: Any, task: str = "text-classification", **options: Any) -> None:
    artifacts_from_transformers(tiny_pair("bert", task), task, work, labels=labels, **options)


WRONG: list[tuple[str, Any, type[Exception], str]] = [
    ("one string", lambda work: wrong_labels(work, "ab"), TypeError, "must be a list of names"),
    ("a name twice", lambda work: wrong_labels(work, ["a", "a"]), ValueError, "must be different"),
    ("none", lambda work: wrong_labels(work, []), ValueError, "at least one"),
    ("too many", lambda work: wrong_labels(work, list("abcde")), ValueError, "5 labels for a model with 2"),
    (
        "not a classifier",
        lambda work: wrong_labels(work, ["a", "b"], "question-answering"),
        ValueError,
        "labels are for classifiers",
    ),
    (
        "no tokens",
        lambda work: wrong_labels(work, None, max_length=0),
        ValueError,
        "max_length is 0",
    ),
    (
        "other artifacts",
        lambda work: save_pipeline(work.parent, "checkpoint", work),
        ExportError,
        "save_pipeline takes the directory of artifacts_from_transformers",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), [c[1:] for c in WRONG], ids=[c[0] for c in WRONG])
def test_bad_input_is_one_clear_error(tmp_path: Path, call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call(tmp_path / "work")
    assert list(tmp_path.iterdir()) == []
