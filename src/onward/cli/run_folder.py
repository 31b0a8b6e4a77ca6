"""The folder of a run: what `onward train` writes besides the trainer's files, and how other commands read it.

`run.json` says where the artifacts are and with which options the run was started, so that `train --resume`,
`evaluate`, `infer` and `deploy` need the folder only. A run may come from someone else: what its `run.json` says
is checked, never imported as code, and leads to no file being written outside of the run.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onward import contract
from onward.cli.errors import CommandError
from onward.cli.model_file import read_model
from onward.cli.output_paths import folder_target, plain_prefix
from onward.cli.python_entry import names_code
from onward.files import write_text
from onward.reading import read_json

if TYPE_CHECKING:
    from onward.data.preprocessing import Preprocessing
    from onward.data.read import DataOptions

__all__ = [
    "Found", "begun_run", "find", "read_run", "refuse_earlier_run", "trusted_options",
    "write_run",
]  # fmt: skip

_RUN = "run.json"
# what run.json may hold, by option; each may be absent or null too
_TEXTS = frozenset({"data", "eval_data", "mapping", "metric", "augment", "drop"})
_TEXT = frozenset(
    {"label", "schedule", "best", "prefix", "tensorboard", "artifacts", "directory", "device", "normalize",
     "text_column", "tokenizer", "mlflow", "wandb"}
)  # fmt: skip
_FLAGS = frozenset({"no_shuffle", "shard_optimizer", "standardize"})
_COUNTS = frozenset(
    {"epochs", "batch_size", "accumulation", "patience", "save_every", "keep", "stages", "max_length", "resize",
     "crop", "sample_rate"}
)  # fmt: skip
_NUMBERS = frozenset({"hold_out", "learning_rate", "warmup", "clip_norm"})


@dataclass(frozen=True)
class Found:
    """Artifacts and the checkpoint of them that is meant."""

    artifacts: Path
    checkpoint: Path
    prefix: str
    classes: list[str] | None = None
    label: str | None = None
    mapping: list[str] | None = None
    preprocessing: dict[str, Any] | None = None
    data: list[str] | None = None

    def data_options(
        self, *, mapping: list[str] | None = None, label: str | None = None, place: Path
    ) -> DataOptions:
        """How data is read for what was trained: as it was then, unless a flag says else."""
        from onward.cli.data import parse_pairs
        from onward.data.preprocessing import Preprocessing
        from onward.data.read import DataOptions
        from onward.model_metadata import read_labels

        training = read_model(self.artifacts / f"{self.prefix}training_model.onnx")
        about = {entry.key: entry.value for entry in training.metadata_props}
        return DataOptions(
            mapping={**parse_pairs(self.mapping or (), "--map"), **parse_pairs(mapping or (), "--map")},
            label=label or self.label,
            classes=self.classes,
            preprocessing=Preprocessing.from_dict(self.preprocessing, str(place / _RUN))
            if self.preprocessing
            else None,
            near=[place, self.artifacts],
            class_count=next((count for count, _ in read_labels(about).values()), None),
        )

    def metadata(self) -> dict[str, str]:
        """What a deployed model says of itself: its classes, and how its input is prepared."""
        about = {}
        if self.classes:
            about[contract.CLASSES] = json.dumps(self.classes, ensure_ascii=False)
        if self.preprocessing:
            about[contract.PREPROCESSING] = json.dumps(self.preprocessing, sort_keys=True)
        return about


def write_run(
    folder: Path,
    artifacts: Path,
    options: Mapping[str, Any],
    classes: list[str] | None,
    preprocessing: Preprocessing | None = None,
) -> None:
    """Write `run.json`; the place of the artifacts is kept relative where both move together."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        place = os.path.relpath(artifacts.resolve(), folder.resolve())
    except ValueError:  # another drive on Windows
        place = str(artifacts.resolve())
    document = {"artifacts": Path(place).as_posix(), "options": dict(options), "classes": classes}
    if preprocessing is not None:
        document["preprocessing"] = json.loads(preprocessing.to_json())
    write_text(folder / _RUN, json.dumps(document, indent=2, default=str))


def read_run(folder: Path) -> dict[str, Any]:
    """What `write_run` wrote, `artifacts` as a path; empty where there is none."""
    path = folder / _RUN
    if not path.is_file():
        return {}
    try:
        document = read_json(path)
        document["artifacts"] = (folder / document["artifacts"]).resolve()
        if not isinstance(document["options"], dict):
            raise ValueError("its options are no table")
        for name, value in document["options"].items():
            _check_option(name, value)
        _check_option("classes", document.get("classes"))
    except (ValueError, KeyError, TypeError, OSError, RuntimeError) as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else error
        raise CommandError(f"'{path}' is damaged: {what}", "name the artifacts and options again") from error
    return document


def _check_option(name: str, value: Any) -> None:
    """Refuse a value of another kind than the option has; options that are not known here are not read."""
    if value is None:
        return
    if name in _TEXTS or name == "classes":
        right = isinstance(value, list) and all(isinstance(item, str) for item in value)
    elif name in _TEXT:
        right = isinstance(value, str) and "\0" not in value
    elif name in _FLAGS:
        right = isinstance(value, bool)
    elif name in _COUNTS or name == "seed":
        least = 0 if name == "seed" else 1
        right = isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**63
    elif name in _NUMBERS:
        right = isinstance(value, int | float) and not isinstance(value, bool)
        right = right or (name, value) == ("learning_rate", "auto")
    else:
        return
    if not right:
        raise ValueError(f"its option '{name}' is {str(value)[:40]!r}")
    if name == "prefix":
        plain_prefix(str(value))


def trusted_options(folder: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of an earlier run; an error where one could run code, write outside of the run or send it away.

    The person at the command line has to give these again.
    """
    kept = dict(options)
    for name in ("data", "eval_data"):
        entry = names_code(kept.get(name))
        if entry is not None:
            raise CommandError(
                f"'{folder / _RUN}' names Python code as its data, '{entry}', and a file never runs code here",
                f"if you trust that code, say so: --{name.replace('_', '-')} {entry}",
            )
    for name in ("mlflow", "wandb"):
        if kept.get(name) is not None:
            raise CommandError(
                f"'{folder / _RUN}' would have the run sent to {name}, project '{kept[name]}'",
                f"if that is right, say so: --{name} {kept[name]}",
            )
    events = kept.get("tensorboard")
    if events is not None and not any(
        Path(events).resolve().is_relative_to(place.resolve()) for place in (folder, Path.cwd())
    ):
        raise CommandError(
            f"'{folder / _RUN}' would have '{events}' written, outside of the run and of this folder",
            f"if that is right, say so: --tensorboard {events}",
        )
    return kept


def _clear_run(folder: Path) -> None:
    """Remove what an earlier run left in a folder, and nothing else."""
    for pattern in (
        "checkpoint-*",
        "best",
        "best.data",
        "history.json",
        "log.txt",
        "tokenizer.json",
        "distributed.json",
        "report.html",
        _RUN,
    ):
        for path in folder.glob(pattern):
            path.unlink()


def refuse_earlier_run(folder: Path, *, overwrite: bool) -> None:
    """Refuse a folder with checkpoints, unless they may be replaced."""
    if not overwrite and any(folder.glob("checkpoint-*")):
        raise CommandError(
            f"'{folder}' holds an earlier run",
            "resume it with --resume, replace it with --overwrite, or choose -o",
        )


@contextlib.contextmanager
def begun_run(
    folder: Path,
    artifacts: Path,
    options: Mapping[str, Any],
    classes: list[str] | None,
    preprocessing: Preprocessing | None = None,
    *,
    replace: bool = False,
    lock: bool = True,
) -> Iterator[None]:
    """Hold a run's folder and write its `run.json` for the block; `replace` removes an earlier run first.

    Where the block fails before anything was saved, the folder is as it was.
    """
    from onward.train.lock import run_lock

    with folder_target(folder):
        was_there = folder.is_dir()
        folder.mkdir(exist_ok=True)
        try:
            with run_lock(folder if lock else None):
                if replace:
                    _clear_run(folder)
                with _described(folder, artifacts, options, classes, preprocessing):
                    yield
        except BaseException:  # an interrupt too
            if not was_there:
                with contextlib.suppress(OSError):  # where checkpoints are in it
                    folder.rmdir()
            raise


@contextlib.contextmanager
def _described(folder: Path, *document: Any) -> Iterator[None]:
    earlier = (folder / _RUN).read_bytes() if (folder / _RUN).is_file() else None
    fresh = [name for name in ("log.txt", "tokenizer.json") if not (folder / name).exists()]
    try:
        write_run(folder, *document)
        yield
    except BaseException:
        if not any(folder.glob("checkpoint-*")):
            for name in fresh:
                (folder / name).unlink(missing_ok=True)
            if earlier is None:
                (folder / _RUN).unlink(missing_ok=True)
            else:
                (folder / _RUN).write_bytes(earlier)
        raise


def find(place: Path, checkpoint: str | None = None, *, prefix: str = "") -> Found:
    """The artifacts and checkpoint that a folder of a run, or of artifacts, means.

    `checkpoint` is "best", "latest" or a path; by default the best of a run, or the artifacts' own.
    """
    if not place.is_dir():
        what = f"'{place}' is a file, not a folder of artifacts" if place.exists() else f"no folder '{place}'"
        raise CommandError(what, "name a folder that onward train or onward artifacts wrote")
    run = read_run(place)
    options = run.get("options", {})
    artifacts = run.get("artifacts", place)
    prefix = prefix or options.get("prefix", "")
    if not (artifacts / f"{prefix}training_model.onnx").is_file():
        if run and not (artifacts / f"{options.get('prefix', '')}training_model.onnx").is_file():
            raise CommandError(f"the artifacts of '{place}' are no longer at '{artifacts}'", "move them back")
        if prefix:
            raise CommandError(f"no {prefix}training_model.onnx in '{artifacts}'", "is --prefix right?")
        raise CommandError(
            f"'{place}' holds neither a run nor artifacts", "make artifacts with: onward artifacts model.onnx"
        )
    return Found(
        artifacts=artifacts,
        checkpoint=_checkpoint(place, checkpoint, artifacts / f"{prefix}checkpoint", is_run=bool(run)),
        prefix=prefix,
        classes=run.get("classes"),
        label=options.get("label"),
        mapping=options.get("mapping"),
        preprocessing=run.get("preprocessing"),
        data=options.get("data"),
    )


def _checkpoint(place: Path, wanted: str | None, initial: Path, *, is_run: bool) -> Path:
    if wanted is not None and wanted not in ("best", "latest"):
        path = Path(wanted)
        if not path.is_file():
            raise CommandError(f"no checkpoint at '{path}'", "it is 'best', 'latest' or a file")
        return path
    if not is_run:
        if wanted is not None:
            raise CommandError(f"'{place}' is no run: it has no {wanted} checkpoint", "name a file")
        return initial
    if wanted != "latest" and (place / "best").is_file():
        return place / "best"
    steps = sorted(path for path in place.glob("checkpoint-*") if path.suffix != ".data")
    if wanted == "best" or not steps:
        raise CommandError(f"'{place}' has no {wanted or 'checkpoint'} yet", "train first: onward train")
    return steps[-1]
