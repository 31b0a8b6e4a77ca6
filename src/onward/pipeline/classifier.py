"""Inference with one model file that `onward deploy` wrote, which describes its own preprocessing.

Pictures, sounds, texts and rows of tables go in, labels with probabilities come out; numbers where there are
no classes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from onward import contract
from onward.data.images import PICTURES, open_picture
from onward.data.preprocess import image
from onward.data.preprocessing import KEY, Preprocessing
from onward.data.sound import fit_wave, read_wave
from onward.data.tables import Features, apply_table, encode
from onward.data.text import open_tokenizer, tokenize
from onward.errors import DataError, ModelError
from onward.pipeline.postprocess import labelled
from onward.reading import names_of

__all__ = ["Classifier", "answer_labels", "classes_of", "load_file"]


@dataclasses.dataclass(frozen=True)
class Classifier:
    """A loaded model file. Call it with one input or a list of inputs; the result has the same form.

    An input is what training had: a picture (a path, a Pillow image, or [height, width, channels] bytes), a sound (a
    path of a WAV file, or (samples, rate)), a text, a row of a table (a dict or a list of numbers); or an array as
    the model itself takes it. The answer is `{"label", "score"}`, best first with `top_k` above 1 or None for all, or
    the model's first output where it has no classes.
    """

    session: Any
    preprocessing: Preprocessing | None
    classes: list[str] | None
    tokenizer: Any = None

    def __call__(self, inputs: Any, *, top_k: int | None = 1, batch_size: int = 32) -> Any:
        """Run one input, or each of a list."""
        many = isinstance(inputs, list) and not self._is_row(inputs)
        items = inputs if many else [inputs]
        answers: list[Any] = []
        for start in range(0, len(items), batch_size):
            scores = self.run(self.prepare(items[start : start + batch_size]))
            answers += answer_labels(scores, self.classes, top_k=top_k)
        return answers if many else answers[0]

    def prepare(self, items: Sequence[Any]) -> dict[str, np.ndarray]:
        """Inputs as the arrays that the model takes."""
        done = self.preprocessing
        taken = [value.name for value in self.session.get_inputs()]
        if done is None:
            if len(taken) != 1:
                raise ModelError(f"the model takes {', '.join(taken)}: run it with onnxruntime")
            return {taken[0]: np.stack([np.asarray(item) for item in items])}
        if done.kind == "text":
            return tokenize(items, self.tokenizer, done.settings, taken)
        if done.kind == "table":
            return {done.input: apply_table(_rows(items, done), done.settings)}
        prepare = _picture if done.kind == "image" else _sound
        return {done.input: np.stack([prepare(item, done.settings) for item in items])}

    def run(self, feed: Mapping[str, np.ndarray]) -> np.ndarray:
        """The model's first output."""
        kinds = {value.name: _TYPES.get(value.type) for value in self.session.get_inputs()}
        typed = {
            name: array.astype(kinds[name]) if kinds.get(name) else array for name, array in feed.items()
        }
        return np.asarray(self.session.run([self.session.get_outputs()[0].name], typed)[0])

    def _is_row(self, inputs: list[Any]) -> bool:
        """Whether a list is one row of a table, not a list of rows."""
        is_table = self.preprocessing is not None and self.preprocessing.kind == "table"
        return is_table and all(
            item is None or isinstance(item, int | float | str | np.number) for item in inputs
        )


_TYPES = {
    "tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(float16)": np.float16,
    "tensor(int64)": np.int64, "tensor(int32)": np.int32, "tensor(uint8)": np.uint8,
}  # fmt: skip


def load_file(path: Path, *, providers: Sequence[str], session_options: Any = None) -> Classifier:
    """Load a model file with its classes, its preprocessing and the tokenizer beside it."""
    from onward.runtime.sessions import open_session

    session = open_session(path, providers=providers, options=session_options)
    about = session.get_modelmeta().custom_metadata_map
    done = Preprocessing.from_json(about[KEY], f"'{path}'") if KEY in about else None
    tokenizer = None
    if done is not None and done.kind == "text":
        tokenizer = open_tokenizer(find_tokenizer_of(path, done), done.settings)
    return Classifier(session, done, classes_of(about, str(path)), tokenizer)


def find_tokenizer_of(model: Path, done: Preprocessing) -> Path:
    """The tokenizer that a model's metadata names, beside the model; never one in another folder."""
    for name in (
        f"{model.stem}.tokenizer.json",
        Path(str(done.settings.get("tokenizer", ""))).name,
        "tokenizer.json",
    ):
        if name and (model.parent / name).is_file():
            return model.parent / name
    raise ModelError(
        f"'{model}' reads texts, and its tokenizer is not beside it: {model.stem}.tokenizer.json"
    )


def classes_of(about: Mapping[str, str], where: str) -> list[str] | None:
    """The names of classes in a model's metadata."""
    if contract.CLASSES not in about:
        return None
    try:
        return names_of(about[contract.CLASSES])
    except ValueError:
        raise ModelError(f"'{where}': its metadata onward.classes is not a list of names") from None


def answer_labels(scores: np.ndarray, classes: Sequence[str] | None, *, top_k: int | None) -> list[Any]:
    """Labels with probabilities for every row of scores; the rows themselves where classes do not fit them."""
    if classes is None or scores.ndim != 2 or scores.shape[1] != len(classes):
        return list(scores)
    found = [labelled(row, classes, "softmax", top_k=top_k) for row in scores]
    return [row[0] for row in found] if top_k == 1 else found


def _picture(item: Any, settings: Mapping[str, Any]) -> np.ndarray:
    if isinstance(item, str | PathLike):
        path = Path(item)
        if path.suffix.lower() not in PICTURES and not path.is_file():
            raise DataError(f"no image at '{path}'", "is the path right?")
        return open_picture(path, settings)
    array = np.asarray(item)
    if array.dtype.kind == "f" and array.ndim == 3:  # as the model takes it
        return array
    if array.dtype.kind not in "biuf" or array.ndim not in (2, 3):
        raise DataError(
            f"{type(item).__name__} is no image",
            "give a path, a Pillow image, or [height, width, channels] bytes",
        )
    return image(item, settings)


def _sound(item: Any, settings: Mapping[str, Any]) -> np.ndarray:
    if isinstance(item, str | PathLike):
        return fit_wave(*read_wave(item), settings)
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], int):
        return fit_wave(np.asarray(item[0], np.float32), item[1], settings)
    if np.asarray(item).dtype.kind not in "iuf" or np.size(item) < 2:
        raise DataError(
            f"{type(item).__name__} is no sound", "give the path of a WAV file, or (samples, rate)"
        )
    return fit_wave(np.asarray(item, np.float32).reshape(-1), settings.get("sampling_rate", 1), settings)


def _rows(items: Sequence[Any], done: Preprocessing) -> np.ndarray:
    """Rows of a table, each a dict or a list of cells, as numbers; empty cells are None."""
    names = list(done.settings["columns"])
    cells = []
    for item in items:
        if isinstance(item, Mapping):
            missing = [name for name in names if name not in item]
            if missing:
                raise DataError(f"the row has no '{missing[0]}'", f"the model takes {', '.join(names)}")
            item = [item[name] for name in names]
        if not isinstance(item, Sequence | np.ndarray) or isinstance(item, str):
            raise DataError(
                f"{type(item).__name__} is no row", f"give a dict or a list with {', '.join(names)}"
            )
        if len(item) != len(names):
            raise DataError(f"the row has {len(item)} cells", f"the model takes {', '.join(names)}")
        cells.append(list(item))
    features = Features(done.input, names, done.settings.get("categories", {}))
    columns = {
        name: [_filled(row[i], words=name in features.categories) for row in cells]
        for i, name in enumerate(names)
    }
    return encode(columns, features)


def _filled(cell: Any, *, words: bool) -> Any:
    if cell is None or (isinstance(cell, str) and not cell.strip()):
        return "" if words else np.nan
    return cell
