"""`--data` of the command line: `[INPUT=]PATH`, or the user's `module:function`."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onward import contract
from onward.cli.errors import CommandError
from onward.cli.model_file import read_model
from onward.cli.python_entry import import_entry, is_entry
from onward.contract import SEED
from onward.data.match_inputs import InputSpec, specs_of
from onward.data.preprocessing import KEY, Preprocessing, image_settings
from onward.data.read import FORMATS, Data, DataOptions, check_labels, prepare, read_data, split
from onward.data.tables import numbered_classes
from onward.model_metadata import read_labels, read_names, read_table

__all__ = ["input_specs", "keep_tokenizer", "load_data", "load_training_data", "parse_pairs", "user_inputs"]


def load_data(
    sources: Sequence[str], inputs: Sequence[InputSpec], options: DataOptions | None = None
) -> Data:
    """Read `[NAME=]PATH` or `module:function` sources for a model with these inputs."""
    if len(sources) == 1 and is_entry(sources[0]):
        return Data(None, program=_call(sources[0]))
    return read_data([_named(source) for source in sources], inputs, options or DataOptions())


def load_training_data(
    artifacts: Path, directory: Path, options: Mapping[str, Any], inputs: Sequence[InputSpec]
) -> tuple[Data, Data, Data | None]:
    """The data of a run by its options: all of it, the part to train on and the part to evaluate on, prepared."""
    model = artifacts / f"{options.get('prefix', '')}training_model.onnx"
    about = {entry.key: entry.value for entry in read_model(model).metadata_props}
    given = _training_options(artifacts, directory, options, about, str(model))
    whole = load_data(options["data"] or (), inputs, given)
    check_labels(whole, read_table(about, contract.LABELS))
    if whole.arrays is not None and whole.classes is None and contract.HEAD in about:
        whole.classes = numbered_classes(given.class_count)
    train, evaluation = whole, None
    if options["eval_data"]:
        same = dataclasses.replace(given, classes=whole.classes, drop=())
        if whole.features is not None:  # the same columns in the same order, whatever else the file has
            same = dataclasses.replace(same, features=whole.features)
        evaluation = load_data(options["eval_data"], inputs, same)
        check_labels(evaluation, read_table(about, contract.LABELS))
    elif options.get("hold_out") is not None:
        train, evaluation = split(whole, options["hold_out"], seed=options["seed"])
        train.notes = whole.notes
    prepare(train, [] if evaluation is None else [evaluation], standardize=options["standardize"])
    return whole, train, evaluation


def _training_options(
    artifacts: Path, directory: Path, options: Mapping[str, Any], about: Mapping[str, str], model: str
) -> DataOptions:
    """How the data is read: by flags, or as the artifacts say that the model wants it."""
    return DataOptions(
        mapping=parse_pairs(options["mapping"] or (), "--map"),
        label=options["label"],
        classes=read_names(about, contract.CLASSES) if contract.CLASSES in about else None,
        preprocessing=Preprocessing.from_json(about[KEY], model) if KEY in about else None,
        image=image_settings(normalize=options["normalize"], resize=options["resize"], crop=options["crop"]),
        text_column=options["text_column"],
        tokenizer=None if options["tokenizer"] is None else Path(options["tokenizer"]),
        max_length=options["max_length"],
        sampling_rate=options["sample_rate"],
        near=[artifacts, directory],
        class_count=next((count for count, _ in read_labels(about).values()), None),
        drop=options["drop"] or (),
    )


def keep_tokenizer(data: Data, folder: Path) -> None:
    """The tokenizer that read a run's texts goes into its folder."""
    target = folder / "tokenizer.json"
    if data.tokenizer is not None and data.tokenizer.resolve() != target.resolve():
        shutil.copyfile(data.tokenizer, target)


def input_specs(model: str, names: Sequence[str] | None = None) -> list[InputSpec]:
    """The inputs of a model file, all or those of these names, in that order."""
    return specs_of(read_model(Path(model)).graph, names)


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


def parse_pairs(pairs: Sequence[str], option: str) -> dict[str, str]:
    """`NAME=VALUE` options as a dict."""
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name or not value:
            raise CommandError(f"{option} takes NAME=VALUE, got '{pair}'", f"for example {option} image=x")
        found[name] = value
    return found


def _named(source: str) -> tuple[str | None, Path]:
    name, equals, rest = source.partition("=")
    if equals and not Path(source).exists():
        path, given = Path(rest), name
    else:
        path, given = Path(source), None
    if not path.exists():
        raise CommandError(f"no data at '{path}'", f"data is {FORMATS}")
    return given, path


def _call(entry: str) -> Any:
    made = import_entry(entry)
    return made() if callable(made) else made
