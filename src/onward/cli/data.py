"""`--data` of the command line: `[INPUT=]PATH`, or the user's `module:function`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onward import contract
from onward.cli.errors import CommandError
from onward.cli.paths import read_metadata, read_model
from onward.cli.python_entry import import_entry, is_entry
from onward.cli.shared_options import parse_pairs, refuse_unused
from onward.contract import SEED
from onward.data.labels import numbered_classes
from onward.data.match_inputs import InputSpec, specs_of
from onward.data.read import FORMATS, Data, DataOptions, check_labels, prepare, read_data
from onward.data.splits import own_split, split
from onward.files import write_bytes
from onward.hub.read_info import read_info
from onward.info.preprocessing import image_settings
from onward.limits import require
from onward.model_metadata import read_labels, read_names, read_table

if TYPE_CHECKING:
    from onward.cli.run_options import RunOptions
    from onward.info.model_info import ModelInfo


def load_data(
    sources: Sequence[str], inputs: Sequence[InputSpec], options: DataOptions | None = None
) -> Data:
    """Read `[NAME=]PATH` or `module:function` sources for a model with these inputs."""
    # one function gives whole batches: it cannot be one input among others
    if len(sources) == 1 and is_entry(sources[0]):
        return Data({}, program=_call(sources[0]))
    return read_data([_named(source) for source in sources], inputs, options or DataOptions())


def load_samples(
    sources: Sequence[str], inputs: Sequence[InputSpec], options: DataOptions, most: int
) -> dict[str, np.ndarray]:
    """The first samples of files, by input."""
    loaded = load_data(sources, inputs, options)
    if not loaded.arrays:
        raise CommandError("--data takes files here, not a function", "save some samples as .npz")
    return {name: np.asarray(array[:most]) for name, array in loaded.arrays.items()}


def load_training_data(
    artifacts: Path, directory: Path, options: RunOptions, inputs: Sequence[InputSpec]
) -> tuple[Data, Data, Data | None]:
    """The data of a run by its options: all of it, the part to train on and the part to evaluate on, prepared."""
    about = read_metadata(artifacts / f"{options.prefix}training_model.onnx")
    info = read_info(artifacts, prefix=options.prefix)
    reading = _training_options(artifacts, directory, options, about, info)
    whole = load_data(options.data or (), inputs, reading)
    refuse_unused(
        {
            "--tokenizer is for texts, and the data has none that the model takes": options.tokenizer
            and whole.tokenizer is None,
            "--label is for tables and folders, and the data is arrays": options.label
            and all(Path(source).suffix in (".npz", ".npy", ".safetensors") for source in options.data or ()),
        }
    )
    check_labels(whole, read_table(about, contract.LABELS))
    # a head that was made for a number of classes has no names: the report numbers them
    if whole.arrays and whole.classes is None and contract.HEAD in about:
        whole.classes = numbered_classes(reading.class_count)
    train, evaluation = whole, None
    if options.eval_data:
        # numbered as the training data was; columns that it dropped are left out by the features below
        same = dataclasses.replace(reading, classes=whole.classes, drop=())
        if whole.features is not None:  # the same columns in the same order, whatever else the file has
            same = dataclasses.replace(same, features=whole.features)
        evaluation = load_data(options.eval_data, inputs, same)
        check_labels(evaluation, read_table(about, contract.LABELS))
    # a split that the data has is never mixed: scores on it compare with others'
    elif (parts := own_split(whole)) is not None:
        if options.hold_out is not None:
            raise CommandError(
                "--hold-out: the data has a part for evaluation already",
                "leave it away, or give --data DATA/train",
            )
        train, evaluation = parts
    elif options.hold_out is not None:
        train, evaluation = split(whole, options.hold_out, seed=options.seed)
        train.notes = whole.notes
    # means and deviations of the training part alone: the other is to be unseen
    prepare(train, [] if evaluation is None else [evaluation], standardize=options.standardize)
    return whole, train, evaluation


def _training_options(
    artifacts: Path, directory: Path, options: RunOptions, about: Mapping[str, str], info: ModelInfo
) -> DataOptions:
    """How the data is read: by flags, or as the artifacts say that the model wants it."""
    return DataOptions(
        mapping=parse_pairs(options.mapping or (), "--map"),
        label=options.label,
        classes=info.class_names,
        preprocessing=info.preprocessing,
        image=image_settings(normalize=options.normalize, resize=options.resize, crop=options.crop),
        text_column=options.text_column,
        tokenizer=options.tokenizer,
        max_length=options.max_length,
        sampling_rate=options.sample_rate,
        near=[artifacts, directory],
        class_count=next((count for count, _ in read_labels(about).values()), None),
        drop=options.drop or (),
        skip_bad=options.skip_bad,
    )


def keep_tokenizer(data: Data, folder: Path) -> None:
    """The tokenizer that read a run's texts goes into its folder."""
    # the run goes on where its artifacts are gone, and deploy looks here first
    target = folder / "tokenizer.json"
    if data.tokenizer is not None and data.tokenizer.resolve() != target.resolve():
        write_bytes(target, data.tokenizer.read_bytes())


def input_specs(model: Path, names: Sequence[str] | None = None) -> list[InputSpec]:
    """The inputs of a model file, all or those of these names, in that order."""
    return specs_of(read_model(model).graph, names)


def user_inputs(model: Path) -> list[InputSpec]:
    """The inputs of a training model that data is for."""
    proto = read_model(model)
    about = {entry.key: entry.value for entry in proto.metadata_props}
    parameters = {*read_names(about, contract.TRAINABLE), *read_names(about, contract.FROZEN)}
    return [
        spec
        for spec in specs_of(proto.graph)
        if spec.name not in {*parameters, contract.RESET, SEED} and not spec.name.endswith(contract.BUFFER)
    ]


def _named(source: str) -> tuple[str | None, Path]:
    name, equals, file = source.partition("=")
    if equals and not Path(source).exists():  # the name of a file may hold a '='
        path, input_name = Path(file), name
    else:
        path, input_name = Path(source), None
    if not path.exists():
        raise CommandError(f"no data at '{path}'", f"data is {FORMATS}")
    return input_name, path


def _call(entry: str) -> Any:
    entry_value = import_entry(entry)
    # a module may hold the data itself
    return entry_value() if callable(entry_value) else entry_value


def random_inputs(
    inputs: Sequence[InputSpec], *, size: int = 2, seed: int = 0, classes: Mapping[str, int] | None = None
) -> dict[str, np.ndarray]:
    """Random arrays: dimensions that may vary become `size`, whole numbers stay below the number of classes."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for spec in inputs:
        # an input of unknown rank is mostly one number for each sample
        dims = [size if dim is None else dim for dim in ((size,) if spec.dims is None else spec.dims)]
        require(
            "value_bytes", 8 * math.prod(dims), f"random numbers for '{spec.name}' of shape {dims}, in bytes,"
        )
        if spec.dtype.kind == "f":
            arrays[spec.name] = rng.standard_normal(dims).astype(spec.dtype)
        else:
            arrays[spec.name] = rng.integers(0, (classes or {}).get(spec.name, 2), dims).astype(spec.dtype)
    return arrays
