"""Reads files into arrays for a model's inputs, with class names and preprocessing.

Chooses the file format by suffix. `read_data` reads, `prepare` fits preprocessing on the training samples only and
applies it to those that `splits` has held out, too.
"""

from __future__ import annotations

import dataclasses
import math
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from onward.data.columns import TABLES, read_table, require_unpacked
from onward.data.images import PICTURES, read_images, why_unreadable_image
from onward.data.label_sets import join_label_columns, number_label_sets, takes_label_sets
from onward.data.labels import number_labels
from onward.data.layouts import (
    YAML,
    Dataset,
    Samples,
    check_files,
    dataset_files,
    find_samples,
    read_dataset,
    read_yaml,
)
from onward.data.match_inputs import InputSpec, fit
from onward.data.sound import SOUNDS, read_sounds, why_unreadable_sound
from onward.data.tables import Features, apply_table, assemble, fit_table
from onward.data.text import find_tokenizer, read_texts, takes_tokens
from onward.errors import DataError, NonFiniteError, OnwardError
from onward.escape import first_of
from onward.info.model_info import ModelInfo
from onward.train.batches import Rows

if TYPE_CHECKING:
    from onward.info.preprocessing import Preprocessing

FORMATS = (
    ".npz, .npy, .csv, .jsonl, .parquet, .safetensors, a folder of images or WAV files, or module:function"
)


@dataclasses.dataclass
class Data:
    """Data that was read: arrays in the order of the model's inputs, or the return value of a function (`program`)."""

    arrays: dict[str, Any]
    program: Any = None
    classes: list[str] | None = None
    preprocessing: Preprocessing | None = None
    features: Features | None = None
    # the features before they are rounded to the input's type: what is fitted on them needs all digits
    exact: np.ndarray | None = None
    tokenizer: Path | None = None
    label: str | None = None  # the column of a table that has the labels
    # the part that each sample is in ("train", "validation", "test"), where the data is split already
    splits: np.ndarray | None = None
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def value(self) -> Any:
        """What `Trainer.fit` takes."""
        return self.arrays or self.program

    @property
    def samples(self) -> int | None:
        """How many samples there are, where known."""
        return len(next(iter(self.arrays.values()))) if self.arrays else None

    @property
    def settings(self) -> Mapping[str, Any]:
        """What is done to pictures, sounds, texts or rows; empty where they are taken as they are."""
        return {} if self.preprocessing is None else self.preprocessing.settings


@dataclasses.dataclass(frozen=True)
class DataOptions:
    """What a user, an earlier run or a deployed model says about data."""

    mapping: Mapping[str, str] = dataclasses.field(default_factory=dict)
    label: str | None = None
    classes: Sequence[str] | None = None
    # whether data may name the classes where no source does, in alphabetical order: when they are learned
    data_names_classes: bool = True
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
    # whether files that cannot be read are left out
    skip_bad: bool = False


@dataclasses.dataclass
class _Reading:
    """What is being read: for which inputs, how, and what there is of it so far."""

    inputs: Sequence[InputSpec]
    options: DataOptions
    arrays: dict[str, Any]
    data: Data


def read_data(
    sources: Sequence[tuple[str | None, Path]], inputs: Sequence[InputSpec], options: DataOptions
) -> Data:
    """Read (name of the input or None, path) sources for a model with these inputs."""
    if not sources:
        raise DataError("no data was given", f"name it with --data: {FORMATS}")
    data = Data({})
    _refuse_unused(options, sources, inputs)
    reading = _Reading(inputs, options, {}, data)
    for name, path in sources:
        if path.is_dir() or path.suffix.lower() in PICTURES | SOUNDS | YAML:
            _read_folder(path, name, reading)
        elif path.suffix.lower() in TABLES:
            _use_columns(read_table(path), str(path), reading)
        else:
            reading.arrays |= read_arrays(path, name)
    data.arrays, notes = fit(
        reading.arrays, inputs, mapping=options.mapping, where=", ".join(str(path) for _, path in sources)
    )
    data.notes += notes
    # a deployed model's classes have an order, and the alphabet's would be a guess
    if data.classes is not None and options.classes is None and not options.data_names_classes:
        ModelInfo().number(data.classes, ", ".join(str(path) for _, path in sources))
    if data.classes is None and options.classes is not None:
        data.classes = list(options.classes)
    return data


def _refuse_unused(
    options: DataOptions, sources: Sequence[tuple[str | None, Path]], inputs: Sequence[InputSpec]
) -> None:
    """Refuse options of another kind of data: one that does nothing would look as if it had been followed."""
    kinds = set().union(*(_kinds_of(path) for _, path in sources))
    texts = "table" in kinds and takes_tokens(inputs)
    unused = {
        "--normalize, --resize and --crop are for images": options.image and "image" not in kinds,
        "--sampling-rate is for sounds": options.sampling_rate and "sound" not in kinds,
        "--skip-bad is for images and sounds": options.skip_bad and not kinds & {"image", "sound"},
        "--drop is for tables": options.drop and "table" not in kinds,
        "--text-column is for texts": options.text_column and not texts,
        "--max-length is for texts": options.max_length and not texts,
    }
    for message, refused in unused.items():
        if refused:
            paths = ", ".join(f"'{path}'" for _, path in sources)
            raise DataError(f"{message}, and {paths} has none that the model takes", "leave it away")


def _kinds_of(path: Path) -> set[str]:
    """What a source holds: images, sounds, a table, or arrays."""
    suffixes = _suffixes_of(path)
    # as a folder is read: files that lie beside pictures, such as a table of their labels, are no data of their own
    for kind, endings in (("image", PICTURES), ("sound", SOUNDS)):
        if suffixes & endings:
            return {kind}
    if path.is_dir():  # of a published dataset, whose files may hold any of them
        return {"image", "sound", "table"}
    return {"table"} if suffixes & TABLES else {"array"}


def _suffixes_of(path: Path) -> set[str]:
    folders = [path]
    if path.suffix.lower() in YAML and path.is_file():
        folders = list(read_yaml(path)[0].values()) or [path.parent]
    files = [file for folder in folders for file in (folder.rglob("*") if folder.is_dir() else (folder,))]
    return {file.suffix.lower() for file in files if not file.is_dir()}


def _read_folder(path: Path, name: str | None, reading: _Reading) -> None:
    suffixes = _suffixes_of(path)
    pictures = bool(suffixes & PICTURES)
    parts = {} if pictures or suffixes & SOUNDS else dataset_files(path)
    if parts:
        _read_dataset(path, parts, name, reading)
        return
    if not pictures and not suffixes & SOUNDS:
        others = f" (it has {', '.join(sorted(suffixes - {''})[:4])})" if suffixes - {""} else ""
        raise DataError(
            f"no image and no WAV file in '{path}'{others}",
            "they lie in one folder for each class: folder/cat/1.png; convert other formats first",
        )
    endings, what = (PICTURES, "image") if pictures else (SOUNDS, "sound")
    labelled = target_input(reading.inputs) is not None
    together = takes_label_sets(target_input(reading.inputs))
    label = reading.options.label
    samples = find_samples(path, endings, what, labelled=labelled, label=label, together=together)
    _use_files(samples, str(path), what, name, reading)


def _use_files(samples: Samples, where: str, what: str, name: str | None, reading: _Reading) -> None:
    """Pictures or sounds as arrays: prepared as training did, or as the model says."""
    options, inputs, data = reading.options, reading.inputs, reading.data
    earlier = options.preprocessing
    settings: dict[str, Any] = dict(earlier.settings) if earlier and earlier.kind == what else {}
    unknown = settings.pop("unknown", None)
    if unknown is not None and not options.image:
        raise DataError(
            f"the model's {unknown} prepares pictures in a way that is not known here",
            "prepare them with it and give arrays (.npz), or say what to do: --normalize, --resize, --crop",
        )
    if what == "image":
        settings |= options.image
        read, why_unreadable = read_images, why_unreadable_image
    else:
        settings |= {"sampling_rate": options.sampling_rate} if options.sampling_rate else {}
        read, why_unreadable = read_sounds, why_unreadable_sound
    # before training: a broken file would end the run in the middle of an epoch
    samples, notes = check_files(samples, why_unreadable, what, skip_bad=options.skip_bad)
    arrays, data.preprocessing = read(samples.files, inputs, name, settings)
    reading.arrays |= arrays
    data.splits = samples.splits
    data.notes += notes
    if what == "image" and not settings:
        data.notes += _assumed_pixels(data.preprocessing, inputs)
    target = target_input(inputs)
    if target is not None and samples.labels is not None:
        classes = options.classes or samples.classes
        if takes_label_sets(target):
            files = samples.files
            numbers, data.classes = number_label_sets(samples.labels, classes, lambda row: f"'{files[row]}'")
        else:
            numbers, data.classes = number_labels(samples.labels, classes, options.class_count, where)
        reading.arrays[target.name] = numbers


def target_input(inputs: Sequence[InputSpec]) -> InputSpec | None:
    """The input that takes labels; None where the model takes none."""
    if len(inputs) > 1 and takes_label_sets(inputs[-1]):
        return inputs[-1]
    return next((spec for spec in inputs if spec.is_integer), None)


def _assumed_pixels(preprocessing: Preprocessing, inputs: Sequence[InputSpec]) -> list[str]:
    """What nobody said about the pictures, and is done to them."""
    settings, notes = preprocessing.settings, []
    if settings["do_rescale"]:
        notes.append("pixels go from 0 to 1; --normalize imagenet if the model wants it so")
    size = settings.get("size")
    spec = next(spec for spec in inputs if spec.name == preprocessing.input)
    if isinstance(size, dict) and None in (spec.dims or ())[1:]:
        notes.append(
            f"the model takes images of any size: they are resized to {size['width']} × {size['height']}; "
            "--resize sets another"
        )
    return notes


def _read_dataset(folder: Path, parts: Mapping[str, list[Path]], name: str | None, reading: _Reading) -> None:
    """A folder of Hugging Face's `datasets`: pictures or sounds with a label, or a table."""
    dataset = read_dataset(folder, parts)
    options = reading.options
    reading.data.splits = dataset.splits
    label = options.label or next(iter(dataset.classes), None)
    classes = options.classes if options.classes is not None else dataset.classes.get(label or "")
    if not dataset.files:
        options = dataclasses.replace(options, label=label, classes=classes)
        _use_columns(dataset.columns, str(folder), dataclasses.replace(reading, options=options))
        return
    if len(dataset.files) > 1:
        raise DataError(f"'{folder}' has files in {', '.join(dataset.files)}", "keep one of these columns")
    # the table does not say what its bytes are
    what = "sound" if any(content[:4] == b"RIFF" for content in _first_bytes(dataset)) else "image"
    label = label or ("label" if "label" in dataset.columns else None)
    samples = Samples(
        next(iter(dataset.files.values())),
        dataset.columns.get(label or ""),
        dataset.splits,
        dataset.classes.get(label or ""),
    )
    if target_input(reading.inputs) is not None and samples.labels is None:
        raise DataError(
            f"'{folder}': which column is the label?",
            f"it has {', '.join(dataset.columns)}; --label names it",
        )
    _use_files(samples, str(folder), what, name, reading)


def _first_bytes(dataset: Dataset) -> list[bytes]:
    return [files[0].content[:4] for files in dataset.files.values() if files]


def _use_columns(columns: dict[str, np.ndarray], where: str, reading: _Reading) -> None:
    """The columns of a table as arrays: texts as tokens, the label as numbers, the others as features."""
    inputs, options, arrays, data = reading.inputs, reading.options, reading.arrays, reading.data
    for name in options.drop:
        if name not in columns:
            raise DataError(f"--drop {name}: '{where}' has no such column", f"it has {', '.join(columns)}")
        del columns[name]
    earlier = options.preprocessing
    target = inputs[-1].name if len(inputs) > 1 else None
    if len(inputs) > 1 and takes_label_sets(inputs[-1]):
        # a text's columns of 0 and 1 are labels; a table's may be features
        others = takes_tokens(inputs) and "label" not in columns
        columns, label = join_label_columns(columns, options.label, options.classes, where, others=others)
        options = dataclasses.replace(options, label=label)
    if takes_tokens(inputs) and "input_ids" not in columns:
        settings = earlier.settings if earlier and earlier.kind == "text" else {}
        tokenizer = options.tokenizer or find_tokenizer(*options.near)
        tokens, left, preprocessing = read_texts(
            columns, inputs, tokenizer, label=options.label, where=where,
            column=options.text_column or settings.get("column"),
            max_length=options.max_length or settings.get("max_length"), pad_id=settings.get("pad_id"),
        )  # fmt: skip
        arrays |= tokens
        data.preprocessing, data.tokenizer = preprocessing, tokenizer
        data.notes.append(f"texts are in column '{preprocessing.settings['column']}'")
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
            data.label = label
    features = options.features
    if earlier is not None and earlier.kind == "table":
        settings = earlier.settings
        features = Features(earlier.input, list(settings["columns"]), settings.get("categories", {}))
    table = assemble(
        columns, inputs, label=options.label, classes=options.classes, class_count=options.class_count,
        where=where, earlier=features, target=target,
    )  # fmt: skip
    arrays |= table.arrays
    data.classes = table.classes or data.classes
    data.features = table.features
    data.label = data.label or table.label
    data.notes += table.notes
    if earlier is not None and earlier.kind == "table" and earlier.input in arrays:
        arrays[earlier.input] = apply_table(arrays[earlier.input], earlier.settings)
        data.preprocessing, data.features = earlier, None
    elif table.features is not None:
        data.exact = exact = table.arrays[table.features.input]
        if np.isnan(exact).any():  # until they are filled
            arrays[table.features.input] = np.nan_to_num(exact)


def prepare(train: Data, others: Sequence[Data], *, standardize: bool = False) -> None:
    """Fit on the training samples what has to be learned, and do it to all; changes them in place."""
    train.notes += _balance(train)
    if train.features is None or train.exact is None:
        if standardize:
            raise DataError("--standardize is for tables", "leave it away")
        return
    name = train.features.input
    preprocessing, notes = fit_table(train.exact, train.features, standardize=standardize)
    train.notes += notes
    for data in (train, *others):
        if data.exact is None:
            continue
        kind, shape = data.arrays[name].dtype, data.arrays[name].shape
        array = apply_table(data.exact, preprocessing.settings)
        if kind.kind in "iu":
            if standardize:
                raise DataError(f"--standardize makes fractions, and '{name}' takes {kind}", "leave it away")
            array = np.round(array)
        data.arrays[name], data.preprocessing = array.astype(kind).reshape(shape), preprocessing


def _balance(data: Data) -> list[str]:
    """A remark where one class has far fewer samples than another: the accuracy says little then."""
    labels = next(reversed(data.arrays.values()), None)
    if (
        data.classes is None
        or labels is None
        or isinstance(labels, Rows)
        or labels.dtype.kind not in "iu"
        or labels.ndim != 1
    ):
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
    # numpy would unpickle them, which runs what the file says
    if dtype.hasobject:
        raise ValueError("holds Python objects, which are not loaded")
    # a header of a few bytes may claim more memory than there is
    needed, there = math.prod(shape) * dtype.itemsize, size - file.tell()
    if min(shape, default=0) < 0 or needed > there:
        raise ValueError(
            f"an array of shape {shape} and type {dtype} needs {needed} bytes, and {there} are there"
        )
    file.seek(0)
    return np.lib.format.read_array(file, allow_pickle=False)


def check_labels(data: Data, ranges: Mapping[str, Mapping[str, Any]]) -> None:
    """Reject labels out of range, with their row; and more class names than the model has classes."""
    if not data.arrays:
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
            where, values = np.argwhere(bad)[0], np.unique(labels)
            column = "" if data.label is None else f" in column '{data.label}' (--label names another one)"
            shown = first_of(values.tolist())
            raise DataError(
                f"row {int(where[0])} of the data (from 0): '{name}' has label {labels[tuple(where)]}, and the model "
                f"has {count} classes, so labels are 0 to {count - 1}",
                f"the data has {len(values)} different labels{column}: {shown}; fix them, or make a head for them: "
                f"onward artifacts MODEL --classes {len(values)}",
            )


def blame_data(error: NonFiniteError, data: Data) -> Exception:
    """A loss or gradient that is not finite: the row of the data that is to blame, where one is."""
    for name, array in data.arrays.items():
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
