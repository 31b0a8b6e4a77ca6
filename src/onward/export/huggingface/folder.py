"""Writes an exported model atomically, with `onward.json` that describes it.

Imports neither torch nor transformers.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from onward import contract
from onward.errors import ExportError
from onward.files import write_set
from onward.graph.save import name_data_by_content
from onward.reading import read_json

CARD = contract.CARD
MAKE_FOLDER = "make such a folder with: onward export SOURCE --output FOLDER"
# what is read beside a model by its name
_COMPANIONS = re.compile(
    r"((tokenizer_|generation_|genai_|preprocessor_|processor_)?config|config_sentence_transformers"
    r"|sentence_bert_config|tokenizer|special_tokens_map|added_tokens|chat_template|vocab|modules)\.json"
    r"|chat_template\.jinja|(vocab|merges)\.txt|(tokenizer|spiece|sentencepiece(\.bpe)?)\.model"
)
# what those who read a card take for granted
_KINDS: dict[str, type] = {
    **dict.fromkeys(("inputs", "outputs", "tokenizer", "generation", "pooling", "parts", "processor"), dict),
    "labels": list,
}
MODEL = "model.onnx"
PIPELINE = contract.PIPELINE
"""The folder among training artifacts that has the tokenizer and the card of the model to be."""
METADATA_KEY = contract.EXPORT


@contextmanager
def staged(target: Path, *, single: bool | None = None, older: Sequence[str] = ()) -> Iterator[Path]:
    """Yield an empty folder beside `target`; on success what it holds moves there, else it vanishes.

    A target that ends in `.onnx` is one file (and its `.data`, where there is one), anything else a folder,
    unless `single` says which. Of what was there go the files that are read beside a model, and those named in `older`.
    """
    if single is None:
        single = target.suffix == ".onnx"
    if single and target.is_dir():
        raise ExportError(f"'{target}' is a folder; give the path of a file, or a folder without .onnx")
    if not single and target.exists() and not target.is_dir():
        raise ExportError(f"'{target}' is a file; give a path that ends in .onnx, or a folder")
    try:
        # In the target's folder and not in the system's temporary one, so that moving is one rename.
        # an older template or tokenizer beside a new model would be read with it
        companions = [] if single or not (target / CARD).is_file() else os.listdir(target)
        older = [*older, *(name for name in companions if _COMPANIONS.fullmatch(name))]
        with write_set(target.absolute().parent if single else target, older=older) as stage:
            yield stage
            for model in stage.rglob("*.onnx"):
                name_data_by_content(model)
    except OSError as error:
        raise ExportError(f"'{target}' cannot be written: {error.strerror or error}") from error


def read_card(folder: Path) -> dict[str, Any]:
    """The card of an exported folder, or `ExportError` that says what is wrong with it."""
    path = folder / CARD
    if not path.is_file():
        raise ExportError(
            f"'{folder}': no {CARD}; export with from_transformers(…, path=folder)", hint=MAKE_FOLDER
        )
    try:
        card = read_json(path)
    except (ValueError, OSError) as error:
        raise ExportError(f"'{path}': not a readable card ({error})", hint=MAKE_FOLDER) from error
    if card.get("format") != 1 or not isinstance(card.get("task"), str):
        raise ExportError(
            f"'{path}': not a card of this version of Onward (expected format 1 and a task)", hint=MAKE_FOLDER
        )
    for key, kind in _KINDS.items():
        if card.get(key) is not None and not isinstance(card[key], kind):
            raise ExportError(f"'{path}': '{key}' is not a {kind.__name__}", hint=MAKE_FOLDER)
    return _Card(card, str(path))


class _Card(dict[str, Any]):
    """A table of a card, which says so where something is looked up that the card lacks."""

    def __init__(self, entries: Mapping[str, Any], where: str) -> None:
        tables = {key: _Card(value, where) for key, value in entries.items() if isinstance(value, dict)}
        # Tables inside answer alike, however deep.
        super().__init__({**entries, **tables})
        self._where = where

    def __missing__(self, key: str) -> Any:
        raise ExportError(f"'{self._where}' has no '{key}', which its task needs", hint=MAKE_FOLDER)


def write_card(card: Mapping[str, Any], folder: Path) -> None:
    """Write the card into a folder, for people to read too."""
    (folder / CARD).write_text(json.dumps(card, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def version(package: str = "onward") -> str:
    """A package's version, or "unknown" of a source tree, or of another build of the runtime."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"
