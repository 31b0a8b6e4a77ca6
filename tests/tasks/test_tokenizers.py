"""Kinds of tokenizers: question answering, tagging and chat answer as transformers does.

Three tiny random models, exported once; beside each lies one tokenizer after the other, as published folders have it.
Here are those that differ most; `benchmarks/tokenizer_answers.py` runs all thirty-two.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from export.huggingface_types import tiny_of
from export.tiny_tokenizers import tokenizer_of
from onward.export import from_transformers
from onward.pipeline.load import load

QUICK = [
    "bytes with a first space (RoBERTa)",
    "SentencePiece BPE (Llama)",
    "SentencePiece BPE without a first space (Gemma)",
    "pieces of words (BERT)",
    "bytes, offsets trimmed (RoBERTa)",
    "unigram, doubled marks (XLM-R)",
    "unigram, marks last (XLNet)",
    "letters (CANINE's way)",
]
WORDS = 320  # as many as the largest vocabulary has
CONTEXT = (
    "The ferry leaves at noon. Nobody expected a small library, I'm sure!  Where the path\nends "
    "there is a bridge: 日本語 words, 1234 of them."
)
QUESTIONS = ["Where does the path end?", "who", "Isn't it 日本語?"]
# with these the likeliest spans of some models begin or end with a special token between question and context
INSIDE = [
    ("river library March path 日本語 is who",
     "is March library sport why Where bridge 12 nobody's does ferry 日本語."),
    ("nobody's noon 日本語 bridge why", "March Where sport the river."),
    ("river why", "does ferry who."),
    ("end", "is sport the small bridge Where March path it."),
]  # fmt: skip
LABELS = dict(enumerate(["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]))
TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] | trim }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
CHATS = [
    [{"role": "user", "content": "Where does the path end? "}],
    [
        {"role": "system", "content": "Say it's noon."},
        {"role": "user", "content": "日本語  words"},
        {"role": "assistant", "content": "Why?"},
        {"role": "user", "content": "it's  done"},
    ],
]


class Exported:
    """A model as a folder that somebody published, whose tokenizer is exchanged."""

    def __init__(self, folder: Path, kind: str, task: str, **settings: Any) -> None:
        self.model, _ = tiny_of(kind, task, vocab_size=WORDS, pad_token_id=0, eos_token_id=3, **settings)
        self.folder = folder / "published"
        from_transformers((self.model, tokenizer_of(QUICK[0])), task, folder / "ours", check=False)
        self.model.config.save_pretrained(self.folder)
        shutil.copy(folder / "ours" / "model.onnx", self.folder)

    def with_tokenizer(self, kind: str, **settings: Any) -> tuple[Any, Any]:
        """The loaded folder, and the tokenizer as transformers has it."""
        tokenizer = tokenizer_of(kind, **settings)
        for path in self.folder.glob("*token*"):
            path.unlink()
        tokenizer.save_pretrained(self.folder)
        return load(self.folder), tokenizer


def make_reader(folder: Path) -> Exported:
    return Exported(folder, "distilbert", "question-answering")


def make_tagger(folder: Path) -> Exported:
    names = {"id2label": LABELS, "label2id": {name: index for index, name in LABELS.items()}}
    return Exported(folder, "distilbert", "token-classification", **names)


def make_writer(folder: Path) -> Exported:
    settings = {"bos_token_id": 2, "max_position_embeddings": 256}
    return Exported(folder, "llama", "text-generation", **settings)


def answer_in_torch(
    model: Any, tokenizer: Any, question: str, context: str, *, top_k: int
) -> list[dict[str, Any]]:
    """The rules of `QuestionAnsweringPipeline` of transformers 4, which version 5 no longer has."""
    encoded = tokenizer(
        question, context, truncation="only_second", max_length=60, stride=8,
        return_overflowing_tokens=True, return_offsets_mapping=True,
    )  # fmt: skip
    answers: list[dict[str, Any]] = []
    for window, ids in enumerate(encoded["input_ids"]):
        encoding = encoded.encodings[window]
        mask = [part == 1 for part in encoded.sequence_ids(window)]
        candidates = np.array(mask) | (np.array(ids) == tokenizer.cls_token_id)
        with torch.no_grad():
            outputs = model(input_ids=torch.tensor([ids]))
        parts = []
        for scores in (outputs.start_logits, outputs.end_logits):
            numbers = np.where(candidates, scores[0].numpy(), -10000.0)
            numbers = np.exp(numbers - numbers.max())
            parts.append(numbers / numbers.sum())
            parts[-1][0] = 0.0
        joint = np.tril(np.triu(np.outer(*parts)), 14)
        for cell in np.argsort(-joint, axis=None)[: 2 * top_k + 10]:
            first, last = np.unravel_index(cell, joint.shape)
            if not (candidates[first] and candidates[last]) or not joint[first, last]:
                continue
            words = encoding.token_to_word(int(first)), encoding.token_to_word(int(last))
            if None in words:
                begin, end = encoding.offsets[first][0], encoding.offsets[last][1]
            else:
                begin, end = encoding.word_to_chars(words[0], 1)[0], encoding.word_to_chars(words[1], 1)[1]
            text = context[begin:end]
            same = next((one for one in answers if one["answer"].lower() == text.lower()), None)
            if same is not None:
                same["score"] += joint[first, last]
            else:
                answers.append({"answer": text, "score": joint[first, last], "start": begin, "end": end})
    return sorted(answers, key=lambda one: -one["score"])[:top_k]


def check_questions(reader: Exported, kind: str) -> None:
    ours, tokenizer = reader.with_tokenizer(kind)
    pipeline = None
    if transformers.__version__.startswith("4."):
        pipeline = transformers.pipeline("question-answering", model=reader.model, tokenizer=tokenizer)
    for question, context in [*((question, CONTEXT) for question in QUESTIONS), *INSIDE]:
        for top_k in (1, 3):
            got = ours(question, context, top_k=top_k, doc_stride=8)
            if pipeline is not None:
                expected = pipeline(question=question, context=context, top_k=top_k, doc_stride=8)
                expected = expected if isinstance(expected, list) else [expected]
            else:
                expected = answer_in_torch(reader.model, tokenizer, question, context, top_k=top_k)
            got = got if isinstance(got, list) else [got]
            assert [(e["answer"], e["start"], e["end"]) for e in got] == [
                (e["answer"], e["start"], e["end"]) for e in expected
            ]
            assert [e["score"] for e in got] == pytest.approx([e["score"] for e in expected], abs=1e-5)


def check_names(tagger: Exported, kind: str) -> None:
    ours, tokenizer = tagger.with_tokenizer(kind)
    theirs = transformers.pipeline("token-classification", model=tagger.model, tokenizer=tokenizer)
    for strategy in ("none", "simple", "first", "average", "max"):
        for text in (CONTEXT[:70], QUESTIONS[2]):
            got, expected = (each(text, aggregation_strategy=strategy) for each in (ours, theirs))
            assert [(e["label"], e["start"], e["end"]) for e in got] == [
                (e.get("entity_group", e.get("entity")), e["start"], e["end"]) for e in expected
            ]
            scores = [float(e["score"]) for e in expected]
            assert [e["score"] for e in got] == pytest.approx(scores, abs=1e-5)


def check_conversations(writer: Exported, kind: str) -> None:
    ours, tokenizer = writer.with_tokenizer(kind, chat_template=TEMPLATE)
    theirs = transformers.pipeline("text-generation", model=writer.model, tokenizer=tokenizer)
    for messages in CHATS:
        got = ours(messages, max_new_tokens=8)
        expected = theirs(messages, max_new_tokens=8, do_sample=False, return_full_text=False)
        assert got == expected[0]["generated_text"]
        assert "".join(ours.stream(messages, max_new_tokens=8)) == got


CHECKS = {
    "questions": (make_reader, check_questions),
    "names": (make_tagger, check_names),
    "conversations": (make_writer, check_conversations),
}


@pytest.fixture(scope="module", params=CHECKS)
def exported(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Exported]:
    return request.param, CHECKS[request.param][0](tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("kind", QUICK)
def test_answers_are_those_of_transformers(exported: tuple[str, Exported], kind: str) -> None:
    CHECKS[exported[0]][1](exported[1], kind)
