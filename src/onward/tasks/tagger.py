"""The labels of tokens, words or characters of a text, and the names that they make."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.tasks.inputs import in_batch
from onward.tasks.protocol import Predictor
from onward.tasks.scores import softmax

if TYPE_CHECKING:
    from onward.pipeline.load import Pipeline


@dataclasses.dataclass(frozen=True)
class Tagger(Predictor):
    """A loaded tagger. Call it with a text or a list of texts.

    The answer is `{"label", "score", "text", "start", "end"}` for each name; `group=False` gives a label for each word
    (or character), those called O too.
    """

    def __call__(self, inputs: Any, *, group: bool = True) -> Any:
        """The names in one text, or in each of a list."""
        done, labels = self.info.preprocessing, self.info.labels
        assert done is not None and labels is not None
        answers = []
        for text in inputs if isinstance(inputs, list) else [inputs]:
            encoding = self.tokenizer.encode(text)
            columns = {"attention_mask": encoding.attention_mask, "token_type_ids": encoding.type_ids}
            feed = {
                value.name: np.asarray([columns.get(value.name, encoding.ids)], np.int64)
                for value in self.session.get_inputs()
            }
            logits = self.run(feed)[0]
            words = encoding.word_ids
            # training put a word's label at its first token, so that the others have learned nothing
            entries = _label_tokens(
                text, encoding, logits, labels, words="first",
                begins=lambda position, words=words: words[position] != words[position - 1],
            )  # fmt: skip
            names = [one for one in _join_names(text, entries) if one["label"] != "O"] if group else entries
            answers.append(names)
        return answers if isinstance(inputs, list) else answers[0]


STRATEGIES = ("none", "simple", "first", "average", "max")
"""How labels of tokens become names: each token alone, runs of tokens, or runs of words."""


def tag(
    pipeline: Pipeline,
    inputs: Any,
    *,
    group: bool = False,
    aggregation_strategy: str | None = None,
    ignore_labels: Sequence[str] = ("O",),
) -> Any:
    """The labels of tokens, or of names where a strategy joins tokens."""
    strategy = aggregation_strategy or ("simple" if group else "none")
    if strategy not in STRATEGIES:
        raise ValueError(f"aggregation_strategy is {strategy!r}; choose one of {', '.join(STRATEGIES)}")

    def answer(texts: list[str]) -> list[Any]:
        feed, encodings = pipeline.encode(texts)
        logits = pipeline.run(feed)["logits"]
        results = []
        for text, encoding, row in zip(texts, encodings, logits):
            entries = _label_tokens(
                text,
                encoding,
                pipeline.trim(row, encoding),
                pipeline.card["labels"],
                words=strategy if strategy in ("first", "average", "max") else None,
                begins=lambda index, text=text, encoding=encoding: _begins_word(
                    pipeline, text, encoding, index
                ),
            )
            entries = entries if strategy == "none" else _join_names(text, entries)
            results.append([entry for entry in entries if entry["label"] not in ignore_labels])
        return results

    return in_batch(inputs, answer)


def _begins_word(pipeline: Pipeline, text: str, encoding: Any, index: int) -> bool:
    """Whether a token begins a word, as transformers decides: by the mark of later pieces, else by spaces alone."""
    start, end = encoding.offsets[index]
    if encoding.ids[index] == pipeline.card["tokenizer"].get("unk_id"):
        return True
    if getattr(pipeline.tokenizer.model, "continuing_subword_prefix", None):
        return len(encoding.tokens[index]) == end - start
    return start == 0 or " " in text[start - 1 : start + 1]


def _label_tokens(
    text: str,
    encoding: Any,
    logits: np.ndarray,
    labels: Sequence[str],
    *,
    words: str | None = None,
    begins: Any = None,
) -> list[dict[str, Any]]:
    """The best label of every token of the text, or of every word; special tokens are left out.

    A word's scores are those of its first token, the mean of all, or those of its surest token (`words`);
    `begins(index)` says which tokens begin one.
    """
    probabilities = softmax(logits)
    groups: list[list[int]] = []
    for index, special in enumerate(encoding.special_tokens_mask):
        if special:
            continue
        if words is None or not groups or begins(index):
            groups.append([])
        groups[-1].append(index)
    entries = []
    for group in groups:
        rows = probabilities[group]
        row = rows.mean(axis=0) if words == "average" else rows[0]
        if words == "max":
            row = rows[int(rows.max(axis=1).argmax())]
        start, end = encoding.offsets[group[0]][0], encoding.offsets[group[-1]][1]
        best = int(row.argmax())
        entries.append(
            {
                "label": labels[best],
                "score": float(row[best]),
                "text": text[start:end],
                "start": start,
                "end": end,
            }
        )
    return entries


def _join_names(text: str, tokens: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Runs of one name as one entry: B- begins one, anything else goes on; the score is the mean."""
    groups: list[list[Mapping[str, Any]]] = []
    for token in tokens:
        label = str(token["label"])
        if groups and not label.startswith("B-") and _name(label) == _name(groups[-1][-1]["label"]):
            groups[-1].append(token)
        else:
            groups.append([token])
    return [
        {
            "label": str(group[0]["label"]).split("-", 1)[-1],
            "score": float(np.mean([token["score"] for token in group])),
            "text": text[group[0]["start"] : group[-1]["end"]],
            "start": group[0]["start"],
            "end": group[-1]["end"],
        }
        for group in groups
    ]


def _name(label: str) -> str:
    return label[2:] if label.startswith(("B-", "I-")) else label
