"""Text from a column of a table, tokenized with the tokenizer beside the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.data.preprocessing import Preprocessing
from onward.errors import DataError
from onward.reading import read_json, read_text

if TYPE_CHECKING:
    from onward.data.match_inputs import InputSpec

__all__ = [
    "TOKENS",
    "find_tokenizer",
    "open_tokenizer",
    "read_texts",
    "read_tokenizer",
    "text_settings",
    "tokenize",
]

TOKENS = ("input_ids", "attention_mask", "token_type_ids")
# enough for a paragraph; longer texts cost time squared
_LONGEST = 256


def takes_tokens(inputs: Sequence[InputSpec]) -> bool:
    """Whether a model reads tokens."""
    return any(spec.name == "input_ids" and spec.is_integer for spec in inputs)


def find_tokenizer(*places: Path) -> Path | None:
    """The first tokenizer.json in these folders or beside these files; a file that is one itself counts."""
    for place in places:
        for path in (
            place,
            place / "tokenizer.json",
            place.parent / "tokenizer.json",
            place / "pipeline" / "tokenizer.json",
        ):
            if path.suffix == ".json" and path.is_file():
                return path
    return None


def read_tokenizer(path: Path) -> Any:
    """The tokenizer of a tokenizer.json; it pads and cuts nothing by itself."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise DataError("text needs the package tokenizers", "pip install 'onward[text]'") from error
    try:
        tokenizer = Tokenizer.from_str(read_text(path))
    except Exception as error:  # the package raises plain Exception
        raise DataError(
            f"'{path}' is not a tokenizer: {error}", "a tokenizer.json of Hugging Face is needed"
        ) from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def open_tokenizer(path: Path, settings: Mapping[str, Any]) -> Any:
    """A tokenizer that cuts texts at the longest length and pads nothing by itself."""
    tokenizer = read_tokenizer(path)
    tokenizer.enable_truncation(settings.get("max_length", _LONGEST))
    return tokenizer


def text_settings(path: Path, *, max_length: int | None = None) -> dict[str, Any]:
    """The length and padding of a tokenizer: its file's own, or those of the files beside it."""
    limit, pad = max_length, 0
    try:
        document = read_json(path)
        padding, cut = document.get("padding") or {}, document.get("truncation") or {}
        pad = int(padding.get("pad_id", 0))
        if not padding:
            added = {token.get("content"): token.get("id") for token in document.get("added_tokens") or []}
            pad = int(next((added[t] for t in ("[PAD]", "<pad>", "<|endoftext|>") if t in added), 0))
        limit = limit or cut.get("max_length")
        beside = path.parent / "tokenizer_config.json"
        if limit is None and beside.is_file():
            limit = read_json(beside).get("model_max_length")
        longest = int(min(limit or _LONGEST, max_length or _LONGEST))
    except (ValueError, OSError, AttributeError, TypeError, OverflowError) as error:
        raise DataError(
            f"'{path}' is not a tokenizer: {error}", "a tokenizer.json of Hugging Face is needed"
        ) from error
    return {"tokenizer": path.name, "max_length": longest, "pad_id": pad}


def tokenize(
    texts: Sequence[Any], tokenizer: Any, settings: Mapping[str, Any], names: Sequence[str]
) -> dict[str, np.ndarray]:
    """Token arrays for the inputs of these names, padded to the longest of the texts."""
    encodings = tokenizer.encode_batch([text if isinstance(text, tuple) else str(text) for text in texts])
    width = max((len(encoding.ids) for encoding in encodings), default=1) or 1
    columns = {
        "input_ids": ("ids", settings.get("pad_id", 0)),
        "attention_mask": ("attention_mask", 0),
        "token_type_ids": ("type_ids", 0),
    }
    made = {}
    for name in [name for name in TOKENS if name in names]:
        attribute, filler = columns[name]
        array = np.full((len(encodings), width), filler, np.int64)
        for row, encoding in enumerate(encodings):
            values = getattr(encoding, attribute)
            array[row, : len(values)] = values
        made[name] = array
    return made


def read_texts(
    columns: Mapping[str, np.ndarray],
    inputs: Sequence[InputSpec],
    tokenizer: Path | None,
    *,
    label: str | None,
    column: str | None = None,
    max_length: int | None = None,
    where: str = "the table",
) -> tuple[dict[str, np.ndarray], list[str], Preprocessing]:
    """The token arrays of a table's text column, the other columns, and what was done."""
    words = [name for name, values in columns.items() if values.dtype.kind in "UO" and name != label]
    name = column or next((n for n in words if n.lower() in ("text", "sentence", "review", "content")), None)
    if name is None and label is None and len(words) > 1:
        name = max(words, key=lambda word: sum(len(str(cell)) for cell in columns[word][:256]))
    name = name or next(iter(words), None)
    if name is None or name not in columns:
        raise DataError(
            f"'{where}' has no column of text" if name is None else f"'{where}' has no column '{name}'",
            f"it has {', '.join(columns)}",
        )
    if tokenizer is None:
        raise DataError(
            "the model reads tokens, and there is no tokenizer.json beside it",
            "put the model's tokenizer.json beside the model or the artifacts, or name it: --tokenizer FILE",
        )
    hole = next((row for row, text in enumerate(columns[name]) if not str(text).strip()), None)
    if hole is not None:
        raise DataError(f"'{where}', sample {hole} (from 0): '{name}' is empty", "fill it, or drop the row")
    settings = {**text_settings(tokenizer, max_length=max_length), "column": name}
    names = [spec.name for spec in inputs]
    arrays = tokenize(list(columns[name]), open_tokenizer(tokenizer, settings), settings, names)
    left = [other for other in columns if other != name]
    return arrays, left, Preprocessing("text", "input_ids", settings)
