"""Texts and conversations for language models: from JSON lines to token batches with labels.

A line is `{"messages": [{"role", "content"}, …]}`, `{"prompt", "completion"}` or `{"text"}`. What the model is not
to learn to say, the prompts and the user's turns, has the label -100. Knows tokenizers and templates by what they
do; nothing of models.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onward.errors import DataError, LimitError, ModelError
from onward.reading import parse_json

__all__ = ["Batches", "Example", "encode_lines", "pack", "read_lines"]

IGNORED = -100
# Lengths are rounded up to a multiple of this: few shapes, so that memory plans are found again.
_STEP = 16

Render = Callable[..., str]


@dataclass(frozen=True)
class Example:
    """Token ids and, for each, what is to be said there: the same id, or -100; and where each of several begins."""

    ids: list[int]
    labels: list[int]
    starts: tuple[int, ...] = (0,)

    def parts(self) -> list[Example]:
        """The examples that were put behind one another."""
        edges = [*self.starts, len(self.ids)]
        return [Example(self.ids[a:b], self.labels[a:b]) for a, b in itertools.pairwise(edges)]

    def counted(self) -> int:
        """How many labels the loss counts: the first token's is never one."""
        return sum(label != IGNORED for label in self.labels[1:])


def read_lines(path: Path) -> list[Mapping[str, Any]]:
    """The objects of a JSON lines file."""
    if not path.is_file():
        raise DataError(f"'{path}': no such file")
    lines = []
    number = 1
    try:
        with open(path, encoding="utf-8") as file:
            for text in file:
                if text.strip():
                    lines.append(parse_json(text))
                number += 1
    except (ValueError, LimitError) as error:
        raise DataError(f"'{path}' line {number}: not a JSON object ({error})") from error
    if not lines:
        raise DataError(f"'{path}' has no lines")
    return lines


def encode_lines(
    lines: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    render: Render | None,
    *,
    end: int | None,
    max_length: int,
    vocabulary: int,
    where: str = "data",
) -> list[Example]:
    """Every line as an example, cut at `max_length`; lines without a label that counts are an error."""
    examples = []
    for number, line in enumerate(lines, 1):
        place = f"{where} line {number}"
        for name in ("prompt", "completion", "text"):
            if name in line and not isinstance(line[name], str):
                raise DataError(f"{place}: '{name}' is {str(line[name])[:40]!r}, and must be text")
        if "messages" in line:
            if render is None:
                raise DataError(
                    f"{place}: has messages, and the tokenizer has no chat template; give prompt and completion instead"
                )
            try:
                made = _conversation(line["messages"], tokenizer, render, place)
            except ModelError as error:  # of the template
                raise DataError(f"{place}: {error}") from error
        elif "prompt" in line and "completion" in line:
            made = _completion(line["prompt"], line["completion"], tokenizer, end)
        elif "text" in line:
            ids = tokenizer.encode(line["text"]).ids + ([] if end is None else [end])
            made = Example(ids, list(ids))
        else:
            raise DataError(
                f"{place}: has {', '.join(line)}; expected messages, prompt and completion, or text"
            )
        if made.ids and max(made.ids) >= vocabulary:
            raise DataError(
                f"{place}: token {max(made.ids)} is outside the model's vocabulary of {vocabulary}; "
                "is the tokenizer the model's own?"
            )
        cut = Example(made.ids[:max_length], made.labels[:max_length])
        if all(label == IGNORED for label in cut.labels[1:]):
            raise DataError(
                f"{place}: nothing to learn from within {max_length} tokens (no answer of the assistant); "
                "raise max_length or leave the line out"
            )
        examples.append(cut)
    return examples


def _completion(prompt: str, completion: str, tokenizer: Any, end: int | None) -> Example:
    before = tokenizer.encode(prompt).ids
    whole = tokenizer.encode(prompt + completion).ids + ([] if end is None else [end])
    shared = _shared(before, whole)
    return Example(whole, [IGNORED] * shared + whole[shared:])


def _conversation(messages: Any, tokenizer: Any, render: Render, place: str) -> Example:
    """The whole conversation; the assistant's turns count, found by where the text before and after them ends."""
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{place}: messages must be a list of role and content")
    for message in messages:
        if (
            not isinstance(message, Mapping)
            or not isinstance(message.get("role"), str)
            or "content" not in message
        ):
            raise DataError(
                f"{place}: a message is an object with role and content, not {str(message)[:60]!r}"
            )
        if message["content"] is None and not message.get("tool_calls"):
            raise DataError(f"{place}: the content of a message of {message['role']!r} is null")
    text = render(messages, prompt=False)
    encoding = tokenizer.encode(text, add_special_tokens=False)
    spans = []
    for index, message in enumerate(messages):
        if isinstance(message, Mapping) and message.get("role") == "assistant":
            start = render(messages[:index], prompt=True)
            stop = render(messages[: index + 1], prompt=False)
            first = _common(start, text)
            spans.append((first, _common(stop, text)))
    labels = [
        token if any(start < right and left < stop for start, stop in spans) and right > left else IGNORED
        for token, (left, right) in zip(encoding.ids, encoding.offsets)
    ]
    return Example(list(encoding.ids), labels)


def _common(a: str, b: str) -> int:
    """How many characters two texts begin with in common: templates may end a prompt otherwise than a turn."""
    count = 0
    for one, other in zip(a, b):
        if one != other:
            break
        count += 1
    return count


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    return count


def pack(examples: Sequence[Example], length: int) -> list[Example]:
    """Examples put behind one another up to `length` tokens, the longest first: fewer batches, less padding.

    The first token of each is no label: nothing before it says what it should be.
    """
    packed: list[tuple[list[int], list[int], list[int]]] = []
    for example in sorted(examples, key=lambda example: -len(example.ids)):
        labels = [IGNORED, *example.labels[1:]]
        for ids, marks, starts in packed:
            if len(ids) + len(example.ids) <= length:
                starts.append(len(ids))
                ids += example.ids
                marks += labels
                break
        else:
            packed.append((list(example.ids), labels, [0]))
    return [Example(ids, labels, tuple(starts)) for ids, labels, starts in packed]


class Batches:
    """Batches of like length, padded on the right, in another order each time they are gone through."""

    def __init__(
        self,
        examples: Sequence[Example],
        batch_size: int,
        *,
        pad: int,
        inputs: Sequence[str],
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}: it must be 1 or more")
        self._examples, self._size, self._pad = list(examples), batch_size, pad
        self._inputs, self._shuffle = list(inputs), shuffle
        self._random = np.random.default_rng(seed)

    def __len__(self) -> int:
        return -(-len(self._examples) // self._size)

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        order = np.arange(len(self._examples))
        if self._shuffle:
            self._random.shuffle(order)
        # Like lengths together; equal ones keep the order of chance.
        order = np.asarray(sorted(order, key=lambda index: -len(self._examples[index].ids)))
        groups = [order[start : start + self._size] for start in range(0, len(order), self._size)]
        if self._shuffle:
            self._random.shuffle(groups)  # type: ignore[arg-type]
        for group in groups:
            yield self.batch([self._examples[index] for index in group])

    def batch(self, chosen: Sequence[Example]) -> dict[str, np.ndarray]:
        """Some examples as the model takes them."""
        longest = max(len(example.ids) for example in chosen)
        width = -(-longest // _STEP) * _STEP
        ids = np.full((len(chosen), width), self._pad, np.int64)
        labels = np.full((len(chosen), width), IGNORED, np.int64)
        mask, segments = np.zeros((2, len(chosen), width), np.int64)
        positions = np.tile(np.arange(width), (len(chosen), 1))
        for row, example in enumerate(chosen):
            size = len(example.ids)
            ids[row, :size], labels[row, :size], mask[row, :size] = example.ids, example.labels, 1
            for start in example.starts:
                segments[row, start:size] += 1
                positions[row, start:] = np.arange(width - start)
        batch = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "segment_ids": segments}
        return {**{name: batch[name] for name in self._inputs}, "labels": labels}
