"""Data for training from what people have on disk, as arrays by the names of the model's inputs.

Knows file formats by their endings and how to say what is wrong with a file. How arrays are matched to the
inputs of a model is `fitting`'s; tables and images have modules of their own.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from onward.cli.command import CommandError
from onward.cli.images import read_images
from onward.cli.match_inputs import InputSpec, fit
from onward.cli.tables import assemble, read_csv, read_parquet

__all__ = ["Data", "hold_out", "import_entry", "is_entry", "load_data", "parse_pairs", "read_arrays"]

_ENTRY = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
_FORMATS = ".npz, .npy, .csv, .parquet, .safetensors, a folder of images, or module:function"


@dataclass
class Data:
    """What was read: arrays in the order of the model's inputs, or whatever a function returned."""

    arrays: dict[str, np.ndarray] | None
    program: Any = None
    classes: list[str] | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def value(self) -> Any:
        """What `Trainer.fit` takes."""
        return self.program if self.arrays is None else self.arrays

    @property
    def samples(self) -> int | None:
        """How many samples there are, where known."""
        return None if self.arrays is None else len(next(iter(self.arrays.values())))


def load_data(
    sources: Sequence[str],
    inputs: Sequence[InputSpec],
    *,
    mapping: Mapping[str, str] | None = None,
    label: str | None = None,
    classes: Sequence[str] | None = None,
) -> Data:
    """Read `[NAME=]PATH` or `module:function` sources for a model with these inputs."""
    if not sources:
        raise CommandError("no data was given", f"name it with --data: {_FORMATS}")
    if len(sources) == 1 and is_entry(sources[0]):
        return Data(None, program=_call(sources[0]))
    arrays: dict[str, np.ndarray] = {}
    found = Data({})
    for source in sources:
        name, path = _named(source)
        if path.is_dir():
            images = read_images(path, inputs, name=name, classes=classes)
            arrays |= images.arrays
            found.classes = images.classes
        elif path.suffix.lower() in (".csv", ".tsv", ".parquet"):
            columns = read_parquet(path) if path.suffix.lower() == ".parquet" else read_csv(path)
            table = assemble(columns, inputs, label=label, classes=classes, where=str(path))
            arrays |= table.arrays
            found.classes = table.classes or found.classes
            found.notes += table.notes
        else:
            arrays |= read_arrays(path, name)
    found.arrays, notes = fit(arrays, inputs, mapping=mapping or {}, where=", ".join(sources))
    found.notes += notes
    return found


def is_entry(text: str) -> bool:
    """Whether a text is `module:function` and not a path."""
    return bool(_ENTRY.match(text)) and not Path(text).exists()


def import_entry(text: str) -> Any:
    """What `module:name` names; modules of the current folder count."""
    module_name, _, attribute = text.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise CommandError(
                f"'{text}': there is no module '{error.name}'",
                f"write it without .py: {module_name.removesuffix('.py')}:{attribute}"
                if module_name.endswith(".py")
                else "write module:function; the module may be a .py file of the current folder",
            ) from error
        raise
    if not hasattr(module, attribute):
        raise CommandError(f"'{text}': the module has no '{attribute}'", "write module:function")
    return getattr(module, attribute)


def parse_pairs(pairs: Sequence[str], option: str) -> dict[str, str]:
    """`NAME=VALUE` options as a dict."""
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name or not value:
            raise CommandError(f"{option} takes NAME=VALUE, got '{pair}'", f"for example {option} image=x")
        found[name] = value
    return found


def hold_out(data: Data, share: float, *, seed: int) -> tuple[Data, Data]:
    """Split data into a training and an evaluation part, the same way for the same seed."""
    if not 0 < share < 1:
        raise CommandError(
            f"--hold-out is {share}: it is a share of the samples", "for example --hold-out 0.1"
        )
    if data.arrays is None or data.samples is None:
        raise CommandError("--hold-out needs arrays, not a function", "give --eval-data instead")
    count = round(share * data.samples)
    if not 0 < count < data.samples:
        raise CommandError(
            f"--hold-out {share} of {data.samples} samples leaves nothing on one side", "choose another share"
        )
    order = np.random.default_rng(seed).permutation(data.samples)
    parts = []
    for chosen in (np.sort(order[count:]), np.sort(order[:count])):
        arrays = {name: array[chosen] for name, array in data.arrays.items()}
        parts.append(Data(arrays, classes=data.classes))
    return parts[0], parts[1]


def _named(source: str) -> tuple[str | None, Path]:
    name, equals, rest = source.partition("=")
    if equals and not Path(source).exists():
        path, given = Path(rest), name
    else:
        path, given = Path(source), None
    if not path.exists():
        raise CommandError(f"no data at '{path}'", f"data is {_FORMATS}")
    return given, path


def _call(entry: str) -> Any:
    made = import_entry(entry)
    return made() if callable(made) else made


def read_arrays(path: Path, name: str | None = None) -> dict[str, np.ndarray]:
    """The arrays of a .npz, .npy or .safetensors file by their names; `name` is that of the only one."""
    if not path.is_file():
        raise CommandError(f"no data at '{path}'", f"data is {_FORMATS}")
    kind = path.suffix.lower()
    try:
        if kind == ".npz":
            with np.load(path, allow_pickle=False) as file:
                arrays = {key: file[key] for key in file.files}
        elif kind == ".npy":
            arrays = {name or path.stem: np.load(path, allow_pickle=False)}
        elif kind == ".safetensors":
            from onward.checkpoint import from_safetensors

            arrays = {key: np.asarray(value) for key, value in from_safetensors(path).parameters().items()}
        else:
            raise CommandError(f"'{path}' has an unknown ending", f"data is {_FORMATS}")
    except (ValueError, OSError, EOFError) as error:
        if isinstance(error, CommandError):
            raise
        what = "holds Python objects, which are not loaded" if "pickle" in str(error) else str(error)
        raise CommandError(
            f"cannot read '{path}': {what}", "is the file whole, and of that format?"
        ) from error
    except Exception as error:  # a damaged zip raises errors of its own
        if type(error).__name__ != "BadZipFile":
            raise
        raise CommandError(f"cannot read '{path}': {error}", "is the file whole?") from error
    if name is not None and kind != ".npy":
        if len(arrays) != 1:
            raise CommandError(
                f"'{path}' has {len(arrays)} arrays, so it cannot be '{name}' alone",
                "leave the name away and rename arrays with --map INPUT=ARRAY",
            )
        arrays = {name: next(iter(arrays.values()))}
    return arrays
