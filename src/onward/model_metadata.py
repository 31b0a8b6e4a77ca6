"""What artifacts say about themselves: who made them, and a model's metadata, JSON that anyone may have written."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from typing import Any

from onward import contract
from onward.errors import MAKE_ARTIFACTS, LimitError, ModelError
from onward.reading import names_of, parse_json


def producer() -> tuple[str, str]:
    """The name and version that Onward writes into what it makes."""
    try:
        return "onward", metadata.version("onward")
    except metadata.PackageNotFoundError:  # running from a source tree that is not installed
        return "onward", "0"


def read_names(about: Mapping[str, str], key: str) -> list[str]:
    """A list of names; empty where the model has none.

    >>> read_names({"onward.trainable": '["w"]'}, "onward.trainable")
    ['w']
    """
    try:
        return names_of(about.get(key, "[]"))
    except (ValueError, LimitError) as error:
        raise _damaged(key, error) from None


def read_table(about: Mapping[str, str], key: str) -> dict[str, Any]:
    """A table; empty where the model has none."""
    try:
        return parse_json(about.get(key, "{}"))
    except (ValueError, LimitError) as error:
        raise _damaged(key, error) from None


def read_labels(about: Mapping[str, str]) -> dict[str, tuple[int, int | None]]:
    """By input that holds class numbers: how many classes there are, and the number that is ignored."""
    labels = {}
    for name, entry in read_table(about, contract.LABELS).items():
        classes = entry.get("classes") if isinstance(entry, dict) else None
        ignored = entry.get("ignore_index") if isinstance(entry, dict) else None
        if type(classes) is not int or not (ignored is None or type(ignored) is int):
            raise _damaged(contract.LABELS, f"'{name}' has no number of classes")
        labels[name] = (classes, ignored)
    return labels


def _damaged(key: str, reason: object) -> ModelError:
    return ModelError(
        f"the model's metadata '{key}' is damaged: {reason}; make the artifacts again", hint=MAKE_ARTIFACTS
    )
