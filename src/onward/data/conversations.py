"""Texts and conversations for language models: from JSON lines to token batches with labels.

A line is `{"messages": [{"role", "content"}, …]}`, `{"prompt", "completion"}` or `{"text"}`; one with two answers of
which one is preferred `{"prompt", "chosen", "rejected"}`, or two conversations without the prompt. What the model is
not to learn to say, the prompts and the user's turns, has the label -100. Knows tokenizers and templates by what they
do; nothing of models.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onward.data.collate import CollatedBatches, shuffle_batches
from onward.errors import DataError, LimitError, ModelError
from onward.reading import parse_json

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


@dataclass(frozen=True)
class Pair:
    """Two answers to a prompt, the preferred one first, and the log probabilities that both had before training."""

    chosen: Example
    rejected: Example
    reference: tuple[float, float] = (0.0, 0.0)


# objects by where they stand: the number of a line, or words for it
Lines = Mapping[int | str, Mapping[str, Any]]
# names of the roles in the conversations that ShareGPT began
_SPEAKERS = {"human": "user", "gpt": "assistant"}


def read_lines(path: Path) -> Lines:
    """The objects of a JSON lines file by the numbers of their lines, or of a file that is one JSON list."""
    if not path.is_file():
        raise DataError(f"'{path}': no such file")
    lines: dict[int | str, Mapping[str, Any]] = {}
    listed, number = None, 0
    try:
        with open(path, "rb") as file:
            # bytes, so that what is no UTF-8 is reported with its line
            for number, raw in enumerate(file, 1):
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                if not lines and text.lstrip().startswith("["):
                    listed = text + file.read().decode("utf-8")
                elif text.strip():
                    lines[number] = parse_json(text)
    except UnicodeDecodeError as error:
        raise DataError(f"'{path}' line {number}: not UTF-8 ({error.reason})", "save it as UTF-8") from error
    except (ValueError, LimitError) as error:
        raise DataError(f"'{path}' line {number}: not a JSON object ({error})", _one_a_line()) from error
    if listed is not None:
        return _read_list(path, listed, number)
    if not lines:
        raise DataError(f"'{path}' has no lines", _one_a_line())
    return lines


def lines_of(data: Any) -> tuple[Lines, str]:
    """The lines of a file, or objects that are in memory, and how errors name them."""
    if isinstance(data, str | os.PathLike):
        return read_lines(Path(data)), f"'{os.fspath(data)}'"
    return dict(enumerate(data, 1)), "data"


def _one_a_line() -> str:
    return 'examples are one JSON object a line, such as {"prompt": "…", "completion": "…"}'


def _read_list(path: Path, text: str, line: int) -> Lines:
    """The objects of a JSON list, each by its number and the line that it begins in."""
    try:
        count = len(parse_json(text, list))  # refuses what is nested too deep before anything recurses
    except (ValueError, LimitError) as error:
        raise DataError(f"'{path}': not a JSON list ({error})", _one_a_line()) from error
    lines: dict[int | str, Mapping[str, Any]] = {}
    decoder, offset, seen = json.JSONDecoder(), text.index("["), 0
    for number in range(1, count + 1):
        offset = _SPACE.match(text, offset + 1).end()  # type: ignore[union-attr]
        line, seen = line + text.count("\n", seen, offset), offset
        value, offset = decoder.raw_decode(text, offset)
        if not isinstance(value, dict):
            raise DataError(f"'{path}' line {line}: {str(value)[:40]!r} is no JSON object", _one_a_line())
        lines[f"line {line}, example {number}"] = value
        offset = _SPACE.match(text, offset).end()  # type: ignore[union-attr]
    if not lines:
        raise DataError(f"'{path}' is an empty list", _one_a_line())
    return lines


_SPACE = re.compile(r"[ \t\r\n]*")


def place_of(where: str, number: int | str) -> str:
    """How errors name an object of a file, or of data in memory."""
    return f"{where} {number}" if isinstance(number, str) else f"{where} line {number}"


def needs_template(line: Mapping[str, Any]) -> bool:
    """Whether a line has messages, which only a chat template makes a text of."""
    return any(isinstance(line.get(name), list) for name in ("messages", "conversations", "prompt", "chosen"))


@dataclass(frozen=True)
class Encoder:
    """How lines become tokens: `end` closes a text, `longest` is the most tokens, `where` names the data in errors.

    `limit` is how many tokens the model reads, where that is known.
    """

    tokenizer: Any
    render: Render | None
    end: int | None
    longest: int
    vocabulary: int
    where: str = "data"
    limit: int | None = None

    def examples(self, lines: Lines) -> list[Example]:
        """Every line as an example, cut at the longest length; a line without a label that counts is an error."""
        by_place = {place_of(self.where, number): line for number, line in lines.items()}
        return [self._cut(self._encode(line, where), where) for where, line in by_place.items()]

    def pairs(self, lines: Lines) -> list[Pair]:
        """Every line as a pair of answers to the same prompt, each cut at the longest length."""
        pairs = []
        for number, line in lines.items():
            where = place_of(self.where, number)
            line = _with_prompt(line)
            missing = [name for name in ("prompt", "chosen", "rejected") if name not in line]
            if missing:
                raise DataError(
                    f"{where}: has no {' and no '.join(missing)}; preferences are prompt, chosen and rejected"
                )
            if line["chosen"] == line["rejected"]:
                raise DataError(f"{where}: chosen and rejected are the same answer")
            chosen, rejected = (
                self._cut(self._answer(line["prompt"], line[name], where), where)
                for name in ("chosen", "rejected")
            )
            pairs.append(Pair(chosen, rejected))
        return pairs

    def _answer(self, prompt: Any, answer: Any, where: str) -> Example:
        """A prompt with an answer: two texts, or a conversation up to its last messages and these."""
        if isinstance(prompt, list):
            last = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
            if not isinstance(last, list):
                raise DataError(f"{where}: an answer is {str(answer)[:40]!r}, and must be text or messages")
            return self._conversation([*prompt, *last], where, first=len(prompt))
        for text in (prompt, answer):
            if not isinstance(text, str):
                raise DataError(
                    f"{where}: {str(text)[:40]!r} must be text, as the prompt and the answers are"
                )
        if not answer.strip():
            raise DataError(f"{where}: the answer is empty", "leave the line out")
        return self._completion(prompt, answer)

    def _encode(self, line: Mapping[str, Any], where: str) -> Example:
        if "text" in line and not isinstance(line["text"], str):
            raise DataError(f"{where}: 'text' is {str(line['text'])[:40]!r}, and must be text")
        if "messages" in line:
            return self._conversation(line["messages"], where)
        if isinstance(line.get("conversations"), list):
            return self._conversation(list(map(_renamed, line["conversations"])), where)
        if "prompt" in line and "completion" in line:
            return self._answer(line["prompt"], line["completion"], where)
        if "text" in line:
            ids = self.tokenizer.encode(line["text"]).ids + self._ending()
            return Example(ids, list(ids))
        if "chosen" in line and "rejected" in line:
            raise DataError(
                f"{where}: has chosen and rejected answers, which are for another loss",
                "learn preferences with loss='dpo' or 'orpo' (--loss dpo)",
            )
        if "prompt" in line:
            raise DataError(f"{where}: has a prompt and no completion")
        raise DataError(f"{where}: has {', '.join(line)}; expected messages, prompt and completion, or text")

    def _ending(self) -> list[int]:
        return [] if self.end is None else [self.end]

    def _completion(self, prompt: str, completion: str) -> Example:
        before = self.tokenizer.encode(prompt).ids
        whole = self.tokenizer.encode(prompt + completion).ids + self._ending()
        shared = _shared(before, whole)
        return Example(whole, [IGNORED] * shared + whole[shared:])

    def _conversation(self, messages: Any, where: str, *, first: int = 0) -> Example:
        if self.render is None:
            raise DataError(
                f"{where}: has messages, and the tokenizer has no chat template; give prompt and completion instead"
            )
        try:
            return _encode_conversation(messages, self.tokenizer, self.render, where, first=first)
        except ModelError as error:  # of the template
            raise DataError(f"{where}: {error}") from error

    def _cut(self, example: Example, where: str) -> Example:
        if example.ids and max(example.ids) >= self.vocabulary:
            raise DataError(
                f"{where}: token {max(example.ids)} is outside the model's vocabulary of {self.vocabulary}; "
                "is the tokenizer the model's own?"
            )
        cut = Example(example.ids[: self.longest], example.labels[: self.longest])
        if cut.counted():
            return cut
        if not example.counted():
            raise DataError(
                f"{where}: nothing to learn from: no answer of the assistant", "leave the line out"
            )
        first = next(index for index, label in enumerate(example.labels) if index and label != IGNORED)
        more = "shorten it" if self.longest == self.limit else "raise max_length (--max-length)"
        raise DataError(
            f"{where}: nothing to learn from within {self.longest} tokens: the answer begins after {first}",
            f"{more} or leave the line out",
        )


def _with_prompt(line: Mapping[str, Any]) -> Mapping[str, Any]:
    """Two conversations as their common beginning, which is the prompt, and two answers."""
    chosen, rejected = line.get("chosen"), line.get("rejected")
    if "prompt" in line or not isinstance(chosen, list) or not isinstance(rejected, list):
        return line
    count = min(_shared(chosen, rejected), len(chosen) - 1, len(rejected) - 1)
    if count < 1:
        return line
    return {**line, "prompt": chosen[:count], "chosen": chosen[count:], "rejected": rejected[count:]}


def _renamed(message: Any) -> Any:
    """A message in the words of chat templates."""
    if not isinstance(message, Mapping) or "from" not in message:
        return message
    return {"role": _SPEAKERS.get(message["from"], message["from"]), "content": message.get("value")}


def _encode_conversation(
    messages: Any, tokenizer: Any, render: Render, where: str, *, first: int = 0
) -> Example:
    """The whole conversation; the assistant's turns count, found by where the text before and after them ends.

    Of the messages before number `first` none counts.
    """
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: messages must be a list of role and content")
    for message in messages:
        if (
            not isinstance(message, Mapping)
            or not isinstance(message.get("role"), str)
            or "content" not in message
        ):
            raise DataError(
                f"{where}: a message is an object with role and content, not {str(message)[:60]!r}"
            )
        content, role = message["content"], message["role"]
        if not content and not message.get("tool_calls"):
            state = "null" if content is None else "empty"
            if state == "null" or role == "assistant":
                raise DataError(f"{where}: the content of a message of {role!r} is {state}")
        if not isinstance(content, str | list | None):
            raise DataError(f"{where}: the content of a message is {content!r}, and must be text")
    text = render(messages, prompt=False)
    encoding = tokenizer.encode(text, add_special_tokens=False)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant" and index >= first:
            start = render(messages[:index], prompt=True)
            stop = render(messages[: index + 1], prompt=False)
            spans.append((_common(start, text), _common(stop, text)))
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


def _shared(a: Sequence[Any], b: Sequence[Any]) -> int:
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    return count


def pack(examples: Sequence[Example], length: int) -> list[Example]:
    """Examples put behind one another up to `length` tokens, the longest first: fewer batches, less padding.

    The first token of each is no label: nothing before it says what it should be.
    """
    packed: list[tuple[list[int], list[int], list[int]]] = []
    # first fit, decreasing: at worst about 11/9 of the fewest rows possible
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


class Batches(CollatedBatches):
    """Batches of like length, padded on the right, in another order in each epoch; `names` are the model's inputs.

    The two answers of a pair are rows behind one another, and a batch has so many pairs.
    """

    def __init__(
        self,
        samples: Sequence[Example | Pair],
        batch_size: int,
        *,
        pad: int,
        names: Sequence[str],
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        self._examples, self._pad, self._names = list(samples), pad, list(names)
        super().__init__(
            len(samples),
            lambda rows: list(self.batch([self._examples[row] for row in rows]).values()),
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            lengths=list(map(self._length, samples)),
        )

    def _length(self, sample: Any) -> int:
        return max(len(row.ids) for row in _rows(sample))

    def _order(self, number: int) -> np.ndarray:
        rng = np.random.default_rng([self._seed, number])
        order = np.arange(self.samples)
        if self._shuffle:
            rng.shuffle(order)
        # texts differ in length more than other samples: all are sorted, for evaluation too
        assert self._lengths is not None
        order = order[np.argsort(-self._lengths[order], kind="stable")]
        return shuffle_batches(order, self._size, rng) if self._shuffle else order

    def batch(self, samples: Sequence[Example | Pair]) -> dict[str, np.ndarray]:
        """Some samples as the model takes them."""
        arrays = self._columns([row for sample in samples for row in _rows(sample)])
        if "answers" in self._names:  # of ORPO, which learns the chosen texts with their prompts
            ids, mask, labels = (arrays[name] for name in ("input_ids", "attention_mask", "labels"))
            arrays["answers"] = (labels != IGNORED).astype(np.int64)
            labels[::2, 1:] = np.where(mask[::2, 1:], ids[::2, 1:], IGNORED)
        if "reference" in self._names:
            scores = [score for sample in samples if isinstance(sample, Pair) for score in sample.reference]
            arrays["reference"] = np.asarray(scores, np.float32)
        return {name: arrays[name] for name in self._names}

    def _columns(self, examples: Sequence[Example]) -> dict[str, np.ndarray]:
        """Examples as arrays by the names of inputs, padded to a common width."""
        width = padded_width(len(example.ids) for example in examples)
        ids = np.full((len(examples), width), self._pad, np.int64)
        labels = np.full((len(examples), width), IGNORED, np.int64)
        mask, segments = np.zeros((2, len(examples), width), np.int64)
        positions = np.tile(np.arange(width), (len(examples), 1))
        for row, example in enumerate(examples):
            size = len(example.ids)
            ids[row, :size], mask[row, :size] = example.ids, 1
            labels[row, 1:size] = example.labels[1:]  # nothing says what the first token should be
            for start in example.starts:
                segments[row, start:size] += 1
                positions[row, start:] = np.arange(width - start)
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": positions,
            "segment_ids": segments,
            "labels": labels,
        }


def padded_width(lengths: Iterable[int]) -> int:
    """The longest of some lengths, rounded up so that memory plans are found again."""
    return -(-max(lengths, default=1) // _STEP) * _STEP


def _rows(sample: Example | Pair) -> tuple[Example, ...]:
    return (sample.chosen, sample.rejected) if isinstance(sample, Pair) else (sample,)
