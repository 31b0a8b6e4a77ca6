"""Text from a column of a table, tokenized with the tokenizer beside the model."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.errors import DataError
from onward.info.preprocessing import Preprocessing
from onward.reading import read_json, read_text

if TYPE_CHECKING:
    from onward.data.match_inputs import InputSpec

TOKENS = ("input_ids", "attention_mask", "token_type_ids")
TEXT_COLUMNS = ("text", "sentence", "review", "content")
# enough for a paragraph; longer texts cost time squared
_LONGEST = 256


def takes_tokens(inputs: Sequence[InputSpec]) -> bool:
    """Whether a model reads tokens."""
    return any(spec.name == "input_ids" and spec.is_integer for spec in inputs)


def find_tokenizer(*places: Path) -> Path | None:
    """The first tokenizer.json in these folders or beside these files; a file that is one itself counts."""
    for folder in places:
        for path in (
            folder,
            folder / "tokenizer.json",
            folder.parent / "tokenizer.json",
            folder / "pipeline" / "tokenizer.json",
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
    text = read_text(path)
    try:
        document = read_json(path)
        _require_bounded(path, document)
        tokenizer = _of_characters(document) or Tokenizer.from_str(text)
    except DataError:
        raise
    except Exception as error:  # the package raises plain Exception
        raise DataError(
            f"'{path}' is not a tokenizer: {error}", "a tokenizer.json of Hugging Face is needed"
        ) from error
    # a file may pad every text to the length it was trained with: 512 tokens cost their square
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return GuardedTokenizer(tokenizer, path)


def _of_characters(document: Mapping[str, Any]) -> Any:
    """The tokenizer of a table from each character to its number, as models of characters have; None for another file.

    A character that is not in the table becomes the number of "", "[UNK]" or "<unk>", or else 0.
    """
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    numbers = [number for number in document.values() if type(number) is int]
    if not document or len(numbers) != len(document) or min(numbers) < 0:
        return None
    unknown = next((name for name in ("", "[UNK]", "<unk>") if name in document), None)
    table = dict(document)
    if unknown is None:
        unknown = next((name for name, number in document.items() if number == 0), "[UNK]")
        table.setdefault(unknown, 0)
    tokenizer = Tokenizer(models.WordLevel(table, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    return tokenizer


class GuardedTokenizer:
    """A tokenizer of the tokenizers package whose failures are errors of ours.

    A pattern that backtracks without end makes the package panic, and that passes every `except Exception`.
    """

    def __init__(self, tokenizer: Any, path: Path) -> None:
        self._tokenizer, self._path = tokenizer, path

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._tokenizer, name)
        return functools.partial(self._call, value) if name.startswith(("encode", "decode")) else value

    def _call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # pyo3's PanicException is no Exception
            raise DataError(
                f"'{self._path}' fails on a text: {error}",
                "its patterns do not suit this text; is the file right?",
            ) from error


# How many times longer a text may become; a normalizer that writes <0x0A> for a line break makes 6 of 1.
_LARGEST_GROWTH = 1024


def _require_bounded(path: Path, document: Any) -> None:
    """Refuse steps that together make a text much longer: thirty that write "aa" for "a" take any memory."""
    for stage in ("normalizer", "pre_tokenizer", "decoder"):
        growth = _growth(document.get(stage))
        if growth > _LARGEST_GROWTH:
            raise DataError(
                f"'{path}': its {stage} may make a text {growth:,.0f} times longer", "is the file right?"
            )


def _growth(step: Any) -> float:
    """How many times longer than its input the output of a step may be."""
    if not isinstance(step, Mapping):
        return 1.0
    parts = next((step[key] for key in ("normalizers", "pretokenizers", "decoders") if key in step), None)
    if isinstance(parts, list):
        return math.prod(map(_growth, parts))
    if step.get("type") != "Replace":
        return 1.0
    pattern, content = step.get("pattern"), len(str(step.get("content", "")))
    text = pattern.get("String") if isinstance(pattern, Mapping) else None
    # a regular expression may match nothing at all, before each character
    return max(1.0, content / len(text)) if isinstance(text, str) and text else 1.0 + content


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
        if longest < 1:
            raise ValueError(f"its longest text has {longest} tokens")
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
    arrays = {}
    for name in [name for name in TOKENS if name in names]:
        attribute, filler = columns[name]
        array = np.full((len(encodings), width), filler, np.int64)
        for row, encoding in enumerate(encodings):
            values = getattr(encoding, attribute)
            array[row, : len(values)] = values
        arrays[name] = array
    return arrays


def read_texts(
    columns: Mapping[str, np.ndarray],
    inputs: Sequence[InputSpec],
    tokenizer: Path | None,
    *,
    label: str | None,
    column: str | None = None,
    max_length: int | None = None,
    pad_id: int | None = None,
    where: str = "the table",
) -> tuple[dict[str, np.ndarray], list[str], Preprocessing]:
    """The token arrays of a table's text column, the other columns, and what was done."""
    words = [name for name, values in columns.items() if values.dtype.kind in "UO" and name != label]
    name = column or next((n for n in words if n.lower() in TEXT_COLUMNS), None)
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
    if pad_id is not None:
        settings["pad_id"] = pad_id
    names = [spec.name for spec in inputs]
    arrays = tokenize(list(columns[name]), open_tokenizer(tokenizer, settings), settings, names)
    left = [other for other in columns if other != name]
    return arrays, left, Preprocessing("text", "input_ids", settings)
