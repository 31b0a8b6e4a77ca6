"""Reads files into arrays for a model's inputs, with class names and preprocessing.

Chooses the file format by suffix. `read_data` reads, `split` holds out samples for evaluation, `prepare` fits
preprocessing on the training samples only and applies it to both.
"""

from __future__ import annotations

import dataclasses
import math
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from onward.data.images import PICTURES, read_images
from onward.data.match_inputs import InputSpec, fit
from onward.data.sound import SOUNDS, read_sounds
from onward.data.tables import (
    TABLES,
    Features,
    apply_table,
    assemble,
    fit_table,
    read_table,
    require_unpacked,
)
from onward.data.text import find_tokenizer, read_texts, takes_tokens
from onward.errors import DataError, NonFiniteError, OnwardError
from onward.escape import first_of
from onward.train.batches import Rows

if TYPE_CHECKING:
    from onward.data.preprocessing import Preprocessing

__all__ = [
    "FORMATS",
    "Data",
    "DataOptions",
    "blame_data",
    "check_labels",
    "prepare",
    "read_arrays",
    "read_data",
    "split",
]

FORMATS = (
    ".npz, .npy, .csv, .jsonl, .parquet, .safetensors, a folder of images or WAV files, or module:function"
)


@dataclasses.dataclass
class Data:
    """Data that was read: arrays in the order of the model's inputs, or the return value of a function."""

    arrays: dict[str, Any] | None
    program: Any = None
    classes: list[str] | None = None
    preprocessing: Preprocessing | None = None
    features: Features | None = None
    # the features before they are rounded to the input's type: what is fitted on them needs all digits
    exact: np.ndarray | None = None
    tokenizer: Path | None = None
    label: str | None = None  # the column of a table that has the labels
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def value(self) -> Any:
        """What `Trainer.fit` takes."""
        return self.program if self.arrays is None else self.arrays

    @property
    def samples(self) -> int | None:
        """How many samples there are, where known."""
        return None if self.arrays is None else len(next(iter(self.arrays.values())))


@dataclasses.dataclass(frozen=True)
class DataOptions:
    """What a user, an earlier run or a deployed model says about data."""

    mapping: Mapping[str, str] = dataclasses.field(default_factory=dict)
    label: str | None = None
    classes: Sequence[str] | None = None
    # what training did, where this is not training
    preprocessing: Preprocessing | None = None
    image: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    text_column: str | None = None
    tokenizer: Path | None = None
    max_length: int | None = None
    sampling_rate: int | None = None
    # folders in which a tokenizer may lie
    near: Sequence[Path] = ()
    # how many classes the model has, where that is known before the data is read
    class_count: int | None = None
    # columns of tables that are not read; or those that are, where other data has said so
    drop: Sequence[str] = ()
    features: Features | None = None


def read_data(
    sources: Sequence[tuple[str | None, Path]], inputs: Sequence[InputSpec], options: DataOptions
) -> Data:
    """Read (name of the input or None, path) sources for a model with these inputs."""
    if not sources:
        raise DataError("no data was given", f"name it with --data: {FORMATS}")
    arrays: dict[str, Any] = {}
    found = Data({})
    for name, path in sources:
        if path.is_dir() or path.suffix.lower() in PICTURES | SOUNDS:
            _read_folder(path, name, inputs, options, arrays, found)
        elif path.suffix.lower() in TABLES:
            _read_table(path, inputs, options, arrays, found)
        else:
            arrays |= read_arrays(path, name)
    found.arrays, notes = fit(
        arrays, inputs, mapping=options.mapping, where=", ".join(str(path) for _, path in sources)
    )
    found.notes += notes
    if found.classes is None and options.classes is not None:
        found.classes = list(options.classes)
    return found


def _read_folder(
    path: Path, name: str | None, inputs: Sequence[InputSpec], options: DataOptions, arrays: dict, found: Data
) -> None:
    sounds = path.suffix.lower() in SOUNDS or (
        path.is_dir()
        and any(path.rglob("*.wav"))
        and not any(p.suffix.lower() in PICTURES for p in path.rglob("*"))
    )
    if path.is_dir() and not sounds and not any(p.suffix.lower() in PICTURES for p in path.rglob("*")):
        kinds = sorted({p.suffix for p in path.rglob("*") if p.is_file() and p.suffix})
        others = f" (it has {', '.join(kinds[:4])})" if kinds else ""
        raise DataError(
            f"no image and no WAV file in '{path}'{others}",
            "they lie in one folder for each class: folder/cat/1.png; convert other formats first",
        )
    earlier = options.preprocessing
    if sounds:
        given: dict[str, Any] = dict(earlier.settings) if earlier and earlier.kind == "sound" else {}
        if options.sampling_rate:
            given["sampling_rate"] = options.sampling_rate
        made = read_sounds(path, inputs, name=name, classes=options.classes, settings=given)
    else:
        given = dict(earlier.settings) if earlier and earlier.kind == "image" else {}
        made = read_images(
            path, inputs, name=name, classes=options.classes, settings={**given, **options.image}
        )
        if not (given or options.image) and made.preprocessing.settings["do_rescale"]:
            found.notes.append("pixels go from 0 to 1; --normalize imagenet if the model wants it so")
        size = made.preprocessing.settings.get("size")
        spec = next(spec for spec in inputs if spec.name == made.preprocessing.input)
        if not (given or options.image) and isinstance(size, dict) and None in (spec.dims or ())[1:]:
            found.notes.append(
                f"the model takes images of any size: they are resized to {size['width']} × {size['height']}; "
                "--resize sets another"
            )
    arrays |= made.arrays
    found.classes, found.preprocessing = made.classes, made.preprocessing


def _read_table(
    path: Path, inputs: Sequence[InputSpec], options: DataOptions, arrays: dict, found: Data
) -> None:
    columns = read_table(path)
    for name in options.drop:
        if name not in columns:
            raise DataError(f"--drop {name}: '{path}' has no such column", f"it has {', '.join(columns)}")
        del columns[name]
    earlier = options.preprocessing
    target = inputs[-1].name if len(inputs) > 1 else None
    if takes_tokens(inputs) and "input_ids" not in columns:
        settings = earlier.settings if earlier and earlier.kind == "text" else {}
        tokenizer = options.tokenizer or find_tokenizer(*options.near)
        tokens, left, made = read_texts(
            columns, inputs, tokenizer, label=options.label, where=str(path),
            column=options.text_column or settings.get("column"),
            max_length=options.max_length or settings.get("max_length"),
        )  # fmt: skip
        arrays |= tokens
        found.preprocessing, found.tokenizer = made, tokenizer
        found.notes.append(f"texts are in column '{made.settings['column']}'")
        columns = {name: columns[name] for name in left}
        inputs = [spec for spec in inputs if spec.name not in tokens]
        if not inputs:
            return
        # text and label are what there is: other columns are not features
        label = options.label or (list(columns)[-1] if columns else None)
        columns = {name: columns[name] for name in columns if name == label}
        inputs = inputs[-1:]
        if columns and label is not None:
            column = columns.pop(label)
            columns[inputs[0].name] = column
            found.label = label
    known = options.features
    if earlier is not None and earlier.kind == "table":
        settings = earlier.settings
        known = Features(earlier.input, list(settings["columns"]), settings.get("categories", {}))
    table = assemble(
        columns, inputs, label=options.label, classes=options.classes, class_count=options.class_count,
        where=str(path), earlier=known, target=target,
    )  # fmt: skip
    arrays |= table.arrays
    found.classes = table.classes or found.classes
    found.features = table.features
    found.label = found.label or table.label
    found.notes += table.notes
    if earlier is not None and earlier.kind == "table" and earlier.input in arrays:
        arrays[earlier.input] = apply_table(arrays[earlier.input], earlier.settings)
        found.preprocessing, found.features = earlier, None
    elif table.features is not None:
        found.exact = exact = table.arrays[table.features.input]
        if np.isnan(exact).any():  # until they are filled
            arrays[table.features.input] = np.nan_to_num(exact)


def split(data: Data, share: float, *, seed: int) -> tuple[Data, Data]:
    """A training and an evaluation part, the same for the same seed; every class is in both where it can be."""
    if not 0 < share < 1:
        raise DataError(f"--hold-out is {share}: it is a share of the samples", "for example --hold-out 0.1")
    if data.arrays is None or data.samples is None:
        raise DataError("--hold-out needs arrays, not a function", "give --eval-data instead")
    count = round(share * data.samples)
    if not 0 < count < data.samples:
        raise DataError(
            f"--hold-out {share} of {data.samples} samples leaves nothing on one side", "choose another share"
        )
    held_out = _held_out(data.arrays, count, np.random.default_rng(seed))
    parts = []
    for chosen in (np.flatnonzero(~held_out), np.flatnonzero(held_out)):
        arrays = {
            name: array.part(chosen) if isinstance(array, Rows) else array[chosen]
            for name, array in data.arrays.items()
        }
        exact = None if data.exact is None else data.exact[chosen]
        parts.append(dataclasses.replace(data, arrays=arrays, exact=exact, notes=[]))
    return parts[0], parts[1]


def _held_out(arrays: Mapping[str, Any], count: int, rng: np.random.Generator) -> np.ndarray:
    """Which samples to hold out: as many of each class as its share, where the last array has classes."""
    labels = list(arrays.values())[-1]
    samples = len(labels)
    order = rng.permutation(samples)
    chosen = np.zeros(samples, bool)
    if isinstance(labels, Rows) or labels.ndim != 1 or labels.dtype.kind not in "iub" or len(arrays) < 2:
        chosen[order[:count]] = True
        return chosen
    _, classes, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    if len(sizes) * 2 > samples:
        chosen[order[:count]] = True
        return chosen
    # the place of each sample among those of its class, from 0 to 1: the first of all classes are taken
    place = np.empty(samples)
    for kind in range(len(sizes)):
        members = order[classes[order] == kind]
        place[members] = (np.arange(len(members)) + rng.random()) / len(members)
    chosen[np.argsort(place, kind="stable")[:count]] = True
    for kind, size in enumerate(sizes):  # a class that is on one side only, though it need not be
        members = order[classes[order] == kind]
        if size > 1 and chosen[members].all():
            chosen[members[0]] = False
        elif size > 1 and not chosen[members].any() and count >= len(sizes):
            chosen[members[0]] = True
    return chosen


def prepare(train: Data, others: Sequence[Data], *, standardize: bool = False) -> None:
    """Fit on the training samples what has to be learned, and do it to all; changes them in place."""
    train.notes += _balance(train)
    if train.arrays is None or train.features is None or train.exact is None:
        if standardize:
            raise DataError("--standardize is for tables", "leave it away")
        return
    name = train.features.input
    made, notes = fit_table(train.exact, train.features, standardize=standardize)
    train.notes += notes
    for data in (train, *others):
        if data.arrays is None or data.exact is None:
            continue
        kind, shape = data.arrays[name].dtype, data.arrays[name].shape
        array = apply_table(data.exact, made.settings)
        if kind.kind in "iu":
            if standardize:
                raise DataError(f"--standardize makes fractions, and '{name}' takes {kind}", "leave it away")
            array = np.round(array)
        data.arrays[name], data.preprocessing = array.astype(kind).reshape(shape), made


def _balance(data: Data) -> list[str]:
    """A remark where one class has far fewer samples than another: the accuracy says little then."""
    labels = list((data.arrays or {0: np.zeros(0)}).values())[-1]
    if data.classes is None or isinstance(labels, Rows) or labels.dtype.kind not in "iu" or labels.ndim != 1:
        return []
    sizes = np.bincount(labels[labels >= 0], minlength=len(data.classes))[: len(data.classes)]
    least, most = int(sizes.argmin()), int(sizes.argmax())
    if sizes[least] * 10 > sizes[most]:
        return []
    return [
        f"the classes are unbalanced: '{data.classes[least]}' has {sizes[least]} training samples, "
        f"'{data.classes[most]}' {sizes[most]}; --metric f1 counts every class alike"
    ]


def read_arrays(path: Path, name: str | None = None) -> dict[str, np.ndarray]:
    """The arrays of a .npz, .npy or .safetensors file by their names; `name` is that of the only one."""
    if not path.is_file():
        raise DataError(f"no data at '{path}'", f"data is {FORMATS}")
    kind = path.suffix.lower()
    try:
        if kind == ".npz":
            arrays = _read_npz(path)
        elif kind == ".npy":
            with open(path, "rb") as file:
                arrays = {name or path.stem: _read_npy(file, path.stat().st_size)}
        elif kind == ".safetensors":
            from onward.checkpoint.interchange import from_safetensors

            arrays = {key: np.asarray(value) for key, value in from_safetensors(path).parameters().items()}
        else:
            raise DataError(f"'{path}' has an unknown ending", f"data is {FORMATS}")
    except OnwardError:
        raise
    except Exception as error:  # numpy parses headers as Python, zip files have errors of their own
        raise DataError(f"cannot read '{path}': {error}", "is the file whole, and of that format?") from error
    if name is not None and kind != ".npy":
        if len(arrays) != 1:
            raise DataError(
                f"'{path}' has {len(arrays)} arrays, so it cannot be '{name}' alone",
                "leave the name away and rename arrays with --map INPUT=ARRAY",
            )
        arrays = {name: next(iter(arrays.values()))}
    return arrays


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    arrays = {}
    with zipfile.ZipFile(path) as archive:
        unpacked = sum(info.file_size for info in archive.infolist())
        require_unpacked(unpacked, path)
        for info in archive.infolist():
            with archive.open(info) as member:
                arrays[info.filename.removesuffix(".npy")] = _read_npy(member, info.file_size)
    return arrays


def _read_npy(file: IO[bytes], size: int) -> np.ndarray:
    """An array of a file that has `size` bytes, which are compared with its shape before memory is taken."""
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(
            f"arrays of version {version[0]}.{version[1]} are not read; save it as plain numbers"
        )
    first = version == (1, 0)
    read_header = np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
    shape, _, dtype = read_header(file)
    if dtype.hasobject:
        raise ValueError("holds Python objects, which are not loaded")
    needed, there = math.prod(shape) * dtype.itemsize, size - file.tell()
    if min(shape, default=0) < 0 or needed > there:
        raise ValueError(
            f"an array of shape {shape} and type {dtype} needs {needed} bytes, and {there} are there"
        )
    file.seek(0)
    return np.lib.format.read_array(file, allow_pickle=False)


def check_labels(data: Data, ranges: Mapping[str, Mapping[str, Any]]) -> None:
    """Reject labels out of range, with their row; and more class names than the model has classes."""
    if data.arrays is None:
        return
    for name, entry in ranges.items():
        labels, count, ignored = data.arrays.get(name), int(entry["classes"]), entry.get("ignore_index")
        if data.classes is not None and len(data.classes) == 1:
            raise DataError(
                f"the data has one class only, '{data.classes[0]}': there is nothing to tell apart",
                "give samples of two classes or more, each with its own label or folder",
            )
        if data.classes is not None and len(data.classes) != count:
            raise DataError(
                f"the data has {len(data.classes)} classes ({first_of(data.classes)}), the model {count}",
                f"make artifacts with a head for them: onward artifacts MODEL --classes {len(data.classes)}",
            )
        if labels is None:
            continue
        bad = (np.asarray(labels) < 0) | (np.asarray(labels) >= count)
        if ignored is not None:
            bad &= np.asarray(labels) != ignored
        if bad.any():
            where, known = np.argwhere(bad)[0], np.unique(labels)
            column = "" if data.label is None else f" in column '{data.label}' (--label names another one)"
            shown = first_of(known.tolist())
            raise DataError(
                f"row {int(where[0])} of the data (from 0): '{name}' has label {labels[tuple(where)]}, and the model "
                f"has {count} classes, so labels are 0 to {count - 1}",
                f"the data has {len(known)} different labels{column}: {shown}; fix them, or make a head for them: "
                f"onward artifacts MODEL --classes {len(known)}",
            )


def blame_data(error: NonFiniteError, data: Data) -> Exception:
    """A loss or gradient that is not finite: the row of the data that is to blame, where one is."""
    for name, array in (data.arrays or {}).items():
        if isinstance(array, Rows) or array.dtype.kind != "f" or np.isfinite(array).all():
            continue
        row = int(np.argwhere(~np.isfinite(array))[0][0])
        rows = len(np.unique(np.argwhere(~np.isfinite(array))[:, 0]))
        more = f" (and {rows - 1} more)" if rows > 1 else ""
        text = str(error).split("; '")[0]
        return DataError(
            f"{text}: row {row}{more} of '{name}' in the data is not finite", "fix these rows, or drop them"
        )
    return error
