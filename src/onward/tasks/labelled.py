"""Samples that have one label or number each: how classification and regression read them and make batches.

A sample is an image, a sound, a text or a row of a table; `onward.data.read` knows these. What is here adds what is
known of the model (`Source`) and what the task's options say.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.data.augment import make_augmentation, make_noise
from onward.data.label_sets import number_label_sets, takes_label_sets
from onward.data.labels import number_labels
from onward.data.match_inputs import InputSpec, fit
from onward.data.read import Data, DataOptions, read_data
from onward.data.text import find_tokenizer, text_settings
from onward.errors import DataError
from onward.info.preprocessing import image_settings
from onward.train.batches import Rows, make_batches

if TYPE_CHECKING:
    from onward.tasks.protocol import Source

# tasks whose models describe their input: a new layer on their output classifies it
ENCODERS = ("default", "feature-extraction", "image-feature-extraction", "pooling", "sentence-similarity")


def read_labelled(
    data: Any,
    source: Source,
    options: Any,
    target: InputSpec,
    *,
    classes: list[str] | int | None,
    like: Data | None,
) -> Data:
    """Samples for a model's inputs, and their targets under the target's name.

    `classes` are those that the options name; with `like`, the classes and columns are those of other data.
    """
    inputs = [*source.inputs, target]
    reading = _data_options(source, options, classes)
    # columns too: a table to evaluate on may lack a class, or have its columns in another order
    if like is not None:
        reading = dataclasses.replace(reading, classes=like.classes, features=like.features, drop=())
    if isinstance(data, str | os.PathLike):
        if not Path(data).exists():
            raise DataError(f"no data at '{data}'", "is the path right?")
        return read_data([(None, Path(data))], inputs, reading)
    return _take_arrays(data, inputs, reading)


def _data_options(source: Source, options: Any, classes: list[str] | int | None) -> DataOptions:
    """How data is read: by the options that this kind of data has, and by what is known of the model."""
    values = vars(options)
    keeps_head = "classes" in values and values["classes"] is None
    names = classes if isinstance(classes, list) else source.info.labels if keeps_head else None
    return DataOptions(
        label=values.get("label"),
        classes=names,
        preprocessing=source.info.preprocessing,
        image=image_settings(
            normalize=values.get("normalize"), resize=values.get("resize"), crop=values.get("crop")
        ),
        text_column=values.get("text_column"),
        tokenizer=Path(values["tokenizer"]) if values.get("tokenizer") else source.info.tokenizer,
        max_length=values.get("max_length"),
        sampling_rate=values.get("sampling_rate"),
        near=[] if source.path is None else [source.path],
        class_count=classes if isinstance(classes, int) else None,
        drop=list(values.get("drop") or ()),
        skip_bad=bool(values.get("skip_bad")),
    )


def _take_arrays(data: Any, inputs: Sequence[InputSpec], options: DataOptions) -> Data:
    """Arrays that are in memory: (inputs…, labels), or a dict by name."""
    if isinstance(data, tuple | list):
        if len(data) != len(inputs):
            names = ", ".join(spec.name for spec in inputs)
            raise DataError(f"the data has {len(data)} arrays, and {len(inputs)} are needed: {names}")
        data = {spec.name: item for spec, item in zip(inputs, data)}
    if not isinstance(data, Mapping):
        raise TypeError(f"data is a path, a tuple of arrays or a dict of them, not {type(data).__name__}")
    arrays: dict[str, Any] = {
        name: array if isinstance(array, Rows) else np.asarray(array) for name, array in data.items()
    }
    classes, last = None, inputs[-1]
    texts = (name for name, array in arrays.items() if array.dtype.kind in "UO")
    label = last.name if last.name in arrays else next(texts, None)
    if label is not None and last.is_integer and arrays[label].ndim == 1:
        arrays[label], classes = number_labels(arrays[label], options.classes, options.class_count, label)
    if takes_label_sets(last):
        label = label or list(arrays)[-1]
        arrays[label], classes = number_label_sets(
            arrays[label], options.classes, lambda row: f"sample {row}"
        )
    fitted, notes = fit(arrays, inputs)
    return Data(fitted, classes=classes or (list(options.classes) if options.classes else None), notes=notes)


def find_text_settings(source: Source, options: Any) -> tuple[Path, dict[str, Any]]:
    """The tokenizer that the options name or the model has, and its settings: the model's own, where it states some."""
    # a model in memory has no folder to look into
    near = [] if source.path is None else [source.path]
    tokenizer = options.tokenizer or source.info.tokenizer or find_tokenizer(*near)
    if tokenizer is None:
        raise DataError(
            "the model reads tokens, and there is no tokenizer.json beside it",
            "name it: --tokenizer FILE, a tokenizer.json or a JSON table from each character to its number",
        )
    settings = text_settings(Path(tokenizer), max_length=options.max_length)
    own = source.info.preprocessing
    if own is not None and own.kind == "text":
        settings |= {key: own.settings[key] for key in ("pad_id", "max_length") if key in own.settings}
    if options.max_length:
        settings["max_length"] = options.max_length
    return Path(tokenizer), settings


def labelled_batches(
    data: Data, specs: Sequence[InputSpec], options: Any, *, target: str, training: bool
) -> Any:
    """Batches by the training model's names and shapes: what is no input of the model is the target."""
    arrays = data.arrays
    named = {spec.name: arrays[spec.name if spec.name in arrays else target] for spec in specs}
    augment = getattr(options, "augment", ()) if training else ()
    noise = getattr(options, "noise", None) if training else None
    transform: Any = make_augmentation(augment, specs, data) if augment else None
    if noise is not None:
        transform = make_noise(Path(noise), specs, data)
    return make_batches(
        fit(named, specs)[0],
        [spec.name for spec in specs],
        batch_size=options.batch_size,
        shuffle=training,
        seed=options.seed,
        transform=transform,
    )


def find_head(source: Source, options: Any) -> str | None:
    """The layer to replace that the options name; of an encoder, which has no scores, what to put a layer on."""
    return source.output if options.head is None and source.info.task in ENCODERS else options.head
