"""Untrusted files, read within limits: regular files only, no more bytes than allowed, JSON that is not deep.

A path may name a device, a pipe or a file of many gigabytes, and a file may change while it is read. What is
returned is at most as long as the limit says. Knows nothing of what the bytes mean, JSON apart.
"""

from __future__ import annotations

import json
import os
import re
import stat
from typing import TypeVar

from onward.errors import DataError
from onward.files import finish_interrupted
from onward.limits import current, require

Kind = TypeVar("Kind")
_OPEN = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)


def read_bytes(path: str | os.PathLike[str], *, limit: str) -> bytes:
    """The bytes of a regular file, no more than the limit of this name allows.

    What is not a regular file raises an `OSError` at once: opening a pipe would wait for ever.
    """
    name = os.fspath(path)
    if "\0" in name:
        raise OSError("the path holds a NUL character")
    finish_interrupted(os.path.dirname(name) or ".")
    handle = os.open(name, os.O_RDONLY | _OPEN)
    with open(handle, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is not a regular file")
        require(limit, status.st_size, f"'{name}'")
        allowed = getattr(current(), limit)
        data = file.read(status.st_size + 1)
        while len(data) <= allowed and (more := file.read(2**20)):  # it grows, or its size was not told
            data += more
        require(limit, len(data), f"'{name}'")
        return data


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a UTF-8 file of a bounded size."""
    try:
        return read_bytes(path, limit="text_bytes").decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"'{os.fspath(path)}' is no UTF-8 text: {error.reason} at byte {error.start}", "save it as UTF-8"
        ) from None


def read_json(path: str | os.PathLike[str], kind: type[Kind] = dict) -> Kind:
    """The JSON document of a file; a `ValueError` where it is none, too deep, or of another kind."""
    return parse_json(read_text(path), kind)


# what a file has is called by JSON's words, which its writer knows, not by Python's
_KINDS = {
    dict: "table",
    list: "list",
    str: "text",
    int: "number",
    float: "number",
    bool: "truth value",
    type(None): "null",
}


def parse_json(text: str, kind: type[Kind] = dict) -> Kind:
    """An untrusted JSON document; a `ValueError` where it is none, too deep, or of another kind.

    >>> parse_json('{"epochs": 3}')
    {'epochs': 3}
    >>> parse_json("[1, 2]")
    Traceback (most recent call last):
    ValueError: this is JSON, but a list, where a table is needed
    """
    require_shallow(text)
    try:
        document = json.loads(text)
    except RecursionError:
        raise ValueError("this JSON is nested too deep") from None
    if not isinstance(document, kind):
        wrong, right = (_KINDS.get(one, one.__name__) for one in (type(document), kind))
        raise ValueError(f"this is JSON, but a {wrong}, where a {right} is needed")
    return document


def names_of(text: str) -> list[str]:
    """A JSON list of names, as the metadata of models holds them; a `ValueError` for anything else."""
    names = parse_json(text, list)
    if not all(isinstance(name, str) for name in names):
        raise ValueError("this is a list, but not one of names")
    return names


# A string that does not end runs to the end of the text, so that the search is linear in hostile text too.
_MARKS = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)|[\[{\]}]', re.DOTALL)


def require_shallow(text: str) -> None:
    """Refuse JSON or TOML whose brackets are nested deeper than `text_nesting`: parsers recurse."""
    depth = 0
    for match in _MARKS.finditer(text):
        mark = match.group()
        if mark in "[{":
            depth += 1
            require("text_nesting", depth, "a list or table of this text")
        elif mark in "]}":
            depth -= 1
