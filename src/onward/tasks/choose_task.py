"""Finds the task of a model and its data, and says why."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.data.boxes import has_boxes
from onward.data.columns import TABLES, read_table
from onward.data.images import PICTURES
from onward.data.label_sets import has_label_sets, join_label_columns, join_lists
from onward.data.lettering import is_lettering
from onward.data.masks import has_masks
from onward.data.pairs import pair_columns
from onward.data.read import read_arrays
from onward.data.sound import SOUNDS
from onward.data.tagged import is_tagged
from onward.data.text import TEXT_COLUMNS, takes_tokens
from onward.errors import DataError, ModelError
from onward.info.metadata import BLANK
from onward.tasks import KINDS, TASKS, Task
from onward.tasks.check_options import fields_of
from onward.tasks.labelled import ENCODERS
from onward.tasks.options import Numbers

if TYPE_CHECKING:
    from onward.data.match_inputs import InputSpec
    from onward.info.model_info import ModelInfo

_OTHER_NAMES = {"semantic-segmentation": "image-segmentation"}
_REGRESSION_LOSSES = fields_of(Numbers)["loss"][1].__args__
_METADATA = ("metadata.csv", "metadata.jsonl", "*/metadata.csv", "*/metadata.jsonl")
# so many files of a folder are looked at for one that says what the folder holds
_FILES = 10_000


def choose_task(
    info: ModelInfo, inputs: Sequence[InputSpec], data: Any, values: Mapping[str, Any]
) -> tuple[Task, str]:
    """The task of a model with this info and these inputs, for this data and these options; and the reason."""
    if "ctc" in info.outputs.values() or BLANK in (info.labels or ()):
        return TASKS["text-recognition"], "the model's metadata has an alphabet"
    name = _OTHER_NAMES.get(info.task or "", info.task or "")
    # these read data of their own kind, so that data could not say otherwise
    if name in TASKS and TASKS[name].kind in ("lines", "scene", "pairs", "tagged", "lettering"):
        return TASKS[name], f"{info.source('task')} says so"
    # now: the data of such a model may look like that of another task
    if info.task is not None and name not in (*TASKS, *ENCODERS):
        raise ModelError(
            f"the model's task is {info.task} ({info.source('task')}), which cannot be trained from here",
            hint=f"export it with from_transformers(…, training=True), or name another: --task {' or '.join(TASKS)}",
        )
    if isinstance(data, str | os.PathLike) and is_lettering(Path(data)):
        return TASKS["text-recognition"], f"'{data}' has files with texts"
    if isinstance(data, str | os.PathLike) and is_tagged(Path(data)):
        return TASKS["token-classification"], f"'{data}' has tagged words"
    # a classifier's table may have two columns of text as well
    if info.task in (None, *ENCODERS) and (why := _are_pairs(info, data, values)):
        return TASKS["embeddings"], why
    if isinstance(data, str | os.PathLike) and has_masks(Path(data)):
        return TASKS["image-segmentation"], f"'{data}' has images with masks"
    if isinstance(data, str | os.PathLike) and has_boxes(Path(data)):
        return TASKS["object-detection"], f"'{data}' has images with boxes"
    kind, reason = data_kind(data, inputs, info)
    sample = next(name for name, own in KINDS.items() if own == kind)
    if sets := _are_label_sets(info, kind, data, values):
        return TASKS[f"{sample}-multi-label"], f"{reason}, {sets}"
    if numbers := _are_numbers(info, data, values):
        return TASKS[f"{sample}-regression"], f"{reason}, {numbers}"
    return TASKS[f"{sample}-classification"], reason


def _are_pairs(info: ModelInfo, data: Any, values: Mapping[str, Any]) -> str:
    """Why the data are pairs for an encoder; empty where they are not."""
    if not isinstance(data, str | os.PathLike) or "label" in values or values.get("classes") is not None:
        return ""
    path = Path(data)
    if path.suffix.lower() not in TABLES or not path.is_file() or info.labels is not None:
        return ""
    table = read_table(path)
    names = pair_columns(table)
    if any(table[name].dtype.kind in "UO" for name in ("label", "labels") if name in table):
        return ""  # texts, and the names of classes
    return f"'{path}' has {' and '.join(names)}" if names else ""


def data_kind(data: Any, inputs: Sequence[InputSpec], info: ModelInfo) -> tuple[str, str]:
    """What data holds: image, sound, text or table; and how that is known."""
    if isinstance(data, str | os.PathLike):
        path = Path(data)
        if not path.exists():
            raise DataError(f"no data at '{path}'", "is the path right?")
        files = itertools.islice(path.rglob("*"), _FILES) if path.is_dir() else [path]
        for suffix in (file.suffix.lower() for file in files):
            if suffix in PICTURES:
                return "image", f"'{path}' has images"
            if suffix in SOUNDS:
                return "sound", f"'{path}' has sounds"
        if path.suffix.lower() in TABLES:
            text = takes_tokens(inputs)
            return ("text" if text else "table"), f"'{path}' is a table" + (
                ", the model reads tokens" if text else ""
            )
    if info.preprocessing is not None:
        source = info.source(f"input {info.preprocessing.input}")
        return info.preprocessing.kind, f"the model takes {info.preprocessing.kind}s ({source})"
    if takes_tokens(inputs):
        return "text", "the model reads tokens"
    if any(spec.dims is not None and len(spec.dims) == 4 for spec in inputs):
        return "image", "the model's input has the dimensions of images"
    return "table", "the data are arrays"


def _are_numbers(info: ModelInfo, data: Any, values: Mapping[str, Any]) -> str:
    """Why the targets are numbers and not classes; empty where they are classes."""
    if values.get("loss") in _REGRESSION_LOSSES:
        return f"loss {values['loss']} compares numbers"
    if "loss" in values or values.get("classes") is not None:
        return ""
    if info.is_regression:
        return f"{info.source('problem_type')} says regression"
    target = _target_of(data, values.get("label"))
    if target is not None and target.dtype.kind == "f" and not np.array_equal(target, np.round(target)):
        return "the targets are numbers with fractions"
    return ""


def _are_label_sets(info: ModelInfo, kind: str, data: Any, values: Mapping[str, Any]) -> str:
    """Why several labels may hold for a sample; empty where each has one."""
    if "loss" in values:  # theirs is no option
        return ""
    if info.is_multi_label:
        return f"{info.source('problem_type')} says multi_label_classification"
    table = _label_table(data)
    if table is not None:
        columns, label = read_table(table), values.get("label")
        if label not in columns:  # one that is named has one label, whatever others have
            others = kind != "table" and "label" not in columns
            columns, label = join_label_columns(columns, label, info.class_names, str(table), others=others)
        names = [name for name in columns if kind == "table" or name.lower() not in TEXT_COLUMNS]
        label = label or ("label" if "label" in columns else names[-1] if names else None)
        target = None if label is None else columns[label]
    elif isinstance(data, tuple | list) and data and not isinstance(join_lists(data[-1]), list):
        target = np.asarray(join_lists(data[-1]))
    else:
        target = _target_of(data, None)
    return "samples have several labels" if target is not None and has_label_sets(target) else ""


def _label_table(data: Any) -> Path | None:
    """The table of the labels: the data itself, or what lies beside files."""
    path = Path(data) if isinstance(data, str | os.PathLike) else None
    if path is None or not path.is_dir():
        return path if path is not None and path.suffix.lower() in TABLES and path.is_file() else None
    return next((file for pattern in _METADATA for file in sorted(path.glob(pattern))), None)


def _target_of(data: Any, label: str | None) -> np.ndarray | None:
    """The targets of the data, where they are easily seen: the label column, or the last array."""
    if isinstance(data, str | os.PathLike):
        path = Path(data)
        if path.suffix.lower() in TABLES and path.is_file():
            columns = read_table(path)
            return columns.get(label or list(columns)[-1]) if columns else None
        if path.suffix.lower() != ".npz" or not path.is_file():
            return None
        data = read_arrays(path)
        data = data if {"labels", "target"} & set(data) else {}
    if isinstance(data, Mapping):
        values = [data[name] for name in ("labels", "target") if name in data] or list(data.values())[-1:]
    else:
        values = list(data)[-1:] if isinstance(data, tuple | list) else []
    return np.asarray(values[0]) if values and len(np.shape(values[0])) in (1, 2) else None
