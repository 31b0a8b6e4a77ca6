"""`--data` of the command line: `[INPUT=]PATH`, or the user's `module:function`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onward import contract
from onward.cli.errors import CommandError
from onward.cli.model_file import read_model
from onward.cli.python_entry import import_entry, is_entry
from onward.contract import SEED
from onward.data.match_inputs import InputSpec, specs_of
from onward.data.read import FORMATS, Data, DataOptions, read_data
from onward.model_metadata import read_names

__all__ = ["input_specs", "load_data", "parse_pairs", "user_inputs"]


def load_data(
    sources: Sequence[str], inputs: Sequence[InputSpec], options: DataOptions | None = None
) -> Data:
    """Read `[NAME=]PATH` or `module:function` sources for a model with these inputs."""
    if len(sources) == 1 and is_entry(sources[0]):
        return Data(None, program=_call(sources[0]))
    return read_data([_named(source) for source in sources], inputs, options or DataOptions())


def input_specs(model: str, names: Sequence[str] | None = None) -> list[InputSpec]:
    """The inputs of a model file, all or those of these names, in that order."""
    return specs_of(read_model(Path(model)).graph, names)


def user_inputs(model: Path) -> list[InputSpec]:
    """The inputs of a training model that data is for."""
    proto = read_model(model)
    about = {entry.key: entry.value for entry in proto.metadata_props}
    parameters = {
        *read_names(about, contract.TRAINABLE),
        *read_names(about, contract.FROZEN),
    }
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
