"""Lines of conversations as people have them: every common form, and one clear error with file and line for others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onward.data.conversations import IGNORED, Encoder, Example, read_lines
from onward.errors import DataError

ASK, SAY = {"role": "user", "content": "why"}, {"role": "assistant", "content": "so"}
ROW = {"prompt": "why", "completion": " so"}


class Letters:
    """A token for every character."""

    class Encoding:
        def __init__(self, text: str) -> None:
            self.ids = [ord(letter) for letter in text]
            self.offsets = [(index, index + 1) for index in range(len(text))]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Letters.Encoding:
        return self.Encoding(text)


def render(messages: Any, *, prompt: bool) -> str:
    return "".join(f"[{m['role']}]{m['content']}\n" for m in messages) + ("[assistant]" if prompt else "")


ENCODER = Encoder(Letters(), render, 0, 64, 2**16)


def said(example: Example) -> str:
    """What the loss counts, as text."""
    return "".join(chr(label) for label in example.labels if label != IGNORED)


def rows_of(content: bytes, folder: Path) -> list[Any]:
    (folder / "chat.jsonl").write_bytes(content)
    return list(read_lines(folder / "chat.jsonl").values())


@pytest.mark.parametrize(
    "content",
    [
        b"%s\n%s\n",
        b"%s\r\n\r\n%s\r\n",
        b"\xef\xbb\xbf%s\n \n%s",
        b"[%s, %s]",
        b"\xef\xbb\xbf[\n  %s,\r\n\n %s\n]\n",
    ],
    ids=["lines", "CRLF and empty lines", "a byte order mark", "a list in one line", "a list in many lines"],
)
def test_lines_and_lists_are_read_however_they_were_saved(content: bytes, tmp_path: Path) -> None:
    rows = [ROW, {"text": "ünïcödé 日本語 🚢\u2028]"}]
    written = [json.dumps(row, ensure_ascii=False).encode() for row in rows]
    assert rows_of(content % tuple(written), tmp_path) == rows


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [ASK, SAY]}, "so\n"),
        ({"conversations": [{"from": "human", "value": "why"}, {"from": "gpt", "value": "so"}]}, "so\n"),
        ({"prompt": [ASK], "completion": [SAY]}, "so\n"),
        ({"prompt": [ASK], "completion": "so"}, "so\n"),
        (ROW, " so\0"),
        ({"text": "so"}, "so\0"),
    ],
    ids=["messages", "ShareGPT", "two lists", "a list and text", "two texts", "text"],
)
def test_what_the_model_is_to_say_counts(row: dict[str, Any], expected: str) -> None:
    (example,) = ENCODER.examples({1: row})
    assert said(example) == expected


@pytest.mark.parametrize("prompt", [{"prompt": [ASK]}, {}], ids=["with a prompt", "two conversations"])
def test_two_conversations_differ_in_their_answers(prompt: dict[str, Any]) -> None:
    before = [] if prompt else [ASK]
    other = {"role": "assistant", "content": "no"}
    (pair,) = ENCODER.pairs({1: {**prompt, "chosen": [*before, SAY], "rejected": [*before, other]}})
    assert (said(pair.chosen), said(pair.rejected)) == ("so\n", "no\n")


LISTED = json.dumps([ROW, {"prompt": "why"}], indent=1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a"}\n{"text": "\xe9"}\n', "line 2: not UTF-8"),
        (b'{"text": "a"}\n\n[1]\n', "line 3: not a JSON object"),
        (b"[1, 2]", "line 1: '1' is no JSON object"),
        (b'[{"text": "a"}', "not a JSON list"),
        (b"[" * 10_000, "not a JSON list"),
        (b"[]", "is an empty list"),
        (b"\n \n", "has no lines"),
        (LISTED.encode(), "line 6, example 2: has a prompt and no completion"),
        (b'{"instruction": "a", "output": "b"}', "line 1: has instruction, output; expected messages"),
        (b'{"prompt": "why", "completion": " "}', "line 1: the answer is empty"),
        (b'{"messages": [{"role": "user", "content": "a"}]}', "line 1: nothing to learn from: no answer"),
        (json.dumps({"messages": [ASK, {**SAY, "content": ""}]}).encode(), "of 'assistant' is empty"),
        (json.dumps({"messages": [ASK, {**SAY, "content": 5}]}).encode(), "content of a message is 5"),
        (json.dumps({"prompt": "a" * 70, "completion": " b"}).encode(), "the answer begins after 70"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_one_error_with_its_line(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        Encoder(Letters(), render, 0, 64, 2**16, str(path)).examples(read_lines(path))


@pytest.mark.parametrize(("limit", "hint"), [(64, "shorten it"), (128, "raise max_length")])
def test_a_prompt_that_is_too_long_is_not_cured_by_more_than_the_model_reads(limit: int, hint: str) -> None:
    encoder = Encoder(Letters(), render, 0, 64, 2**16, limit=limit)
    with pytest.raises(DataError) as caught:
        encoder.examples({1: {"prompt": "a" * 70, "completion": " b"}})
    assert str(caught.value.hint).startswith(hint)
