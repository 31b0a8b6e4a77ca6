"""Sequences whose parts have tags: CoNLL files of one word a line, and JSON lines; words or characters."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onward.errors import DataError
from onward.reading import parse_json, read_text

CONLL = frozenset({".conll", ".txt", ".iob", ".bio", ".tsv"})
_WORDS = ("tokens", "words", "characters", "text")
_TAGS = ("ner_tags", "tags", "labels", "pos_tags")
_HINT = 'a line is {"tokens": ["Ada", "ran"], "tags": ["B-PER", "O"]}, or a word and its tag, with empty lines between'


@dataclass(frozen=True)
class Tagged:
    """One sequence: its words (or characters), a tag for each, and the line of the file where it begins."""

    words: list[str]
    tags: list[str]
    line: int


def is_tagged(path: Path) -> bool:
    """Whether a file looks like tagged sequences: by its ending, or by the names in its first line of JSON."""
    if path.suffix.lower() in CONLL - {".txt", ".tsv"}:
        return path.is_file()
    if path.suffix.lower() not in (".jsonl", ".ndjson") or not path.is_file():
        return False
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        line = file.readline(1 << 20)
    try:
        item = parse_json(line)
    except ValueError:
        return False
    if not isinstance(item, dict):
        return False
    name = next((n for n in _TAGS if n in item), "")
    tags, words = item.get(name), item.get(next((n for n in _WORDS if n in item), ""))
    if not isinstance(tags, list):
        return False
    # "labels" may be those of a whole text
    return name != "labels" or isinstance(words, list) or len(words or "") == len(tags)


def read_tagged(data: Any) -> tuple[list[Tagged], str]:
    """The sequences of a CoNLL file, of JSON lines or in memory ((words, tags) each), and where they are from."""
    if not isinstance(data, str | os.PathLike):
        sequences = [
            _sequence(item, number, f"the data, sample {number} (from 0)") for number, item in enumerate(data)
        ]
        where = "the data"
    else:
        path, where = Path(data), str(data)
        if not path.is_file():
            raise DataError(f"no file at '{path}'", _HINT)
        lines = read_text(path).removeprefix("\ufeff").splitlines()
        is_json = path.suffix.lower() in (".jsonl", ".ndjson", ".json")
        sequences = _read_json(lines, path) if is_json else _read_conll(lines, path)
    if not sequences:
        raise DataError(f"'{where}' has no tagged sequence", _HINT)
    return sequences, where


def _read_conll(lines: Sequence[str], path: Path) -> list[Tagged]:
    """The first column is the word, the last its tag; `-DOCSTART-` and lines with # are no words."""
    sequences: list[Tagged] = []
    words: list[str] = []
    tags: list[str] = []
    start = 1
    for number, line in enumerate([*lines, ""], start=1):
        cells = line.split("\t") if "\t" in line else line.split()
        if not line.strip() or cells[0] == "-DOCSTART-":
            if words:
                sequences.append(Tagged(words, tags, start))
            words, tags = [], []
            continue
        # CoNLL-U's comments stand before a sentence; inside one, # is a word
        if line.startswith("# ") and not words:
            continue
        if len(cells) < 2 or not cells[-1].strip():
            raise DataError(f"'{path}', line {number}: '{line.strip()[:60]}' has no tag", _HINT)
        if not words:
            start = number
        words.append(cells[0])
        tags.append(cells[-1].strip())
    return sequences


def _read_json(lines: Sequence[str], path: Path) -> list[Tagged]:
    sequences = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            item = parse_json(line)
        except ValueError as error:
            raise DataError(f"'{path}', line {number}: {error}", "each line is one JSON object") from error
        sequences.append(_sequence(item, number, f"'{path}', line {number}"))
    return sequences


def _sequence(item: Any, line: int, where: str) -> Tagged:
    if isinstance(item, Mapping):
        words = next((item[name] for name in _WORDS if name in item), None)
        tags = next((item[name] for name in _TAGS if name in item), None)
    elif isinstance(item, Sequence) and len(item) == 2:
        words, tags = item
    else:
        words = tags = None
    words = list(words) if isinstance(words, str) else words  # a text is its characters
    if not isinstance(words, list | tuple) or not isinstance(tags, list | tuple):
        raise DataError(f"{where}: there are no words with tags", _HINT)
    if len(words) != len(tags):
        raise DataError(f"{where}: {len(words)} words and {len(tags)} tags", "give each word one tag")
    if not words:
        raise DataError(f"{where}: it is empty", "remove it")
    return Tagged([str(word) for word in words], [str(tag) for tag in tags], line)
