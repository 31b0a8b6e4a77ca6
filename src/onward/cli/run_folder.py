"""The folder of a run: what `onward train` writes besides the trainer's files, and how other commands read it.

`run.json` says where the artifacts are and with which options the run was started, so that `train --resume`,
`evaluate`, `infer` and `deploy` need the folder only. A run may come from someone else: what its `run.json` says
is checked, never imported as code, and leads to no file being written outside of the run.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onward import contract
from onward.cli.errors import CommandError
from onward.cli.paths import folder_target, plain_prefix, read_metadata, read_model
from onward.cli.python_entry import names_code
from onward.cli.run_options import RunOptions, read_options
from onward.files import write_bytes
from onward.model_metadata import read_names
from onward.reading import read_json

if TYPE_CHECKING:
    from onward.data.read import DataOptions
    from onward.info.model_info import ModelInfo
    from onward.info.preprocessing import Preprocessing

_RUN = "run.json"


@dataclass(frozen=True)
class EarlierRun:
    """What `run.json` says of a run."""

    artifacts: Path
    options: RunOptions
    classes: list[str] | None


@dataclass(frozen=True)
class RunFiles:
    """What a folder of a run or of artifacts means: artifacts, a checkpoint of them, what the model is for.

    `options` are those of the run, or the defaults.
    """

    folder: Path
    artifacts: Path
    checkpoint: Path
    prefix: str
    info: ModelInfo
    options: RunOptions

    def data_options(self, *, mapping: list[str] | None = None, label: str | None = None) -> DataOptions:
        """How data is read for what was trained: as it was then, unless a flag says else."""
        from onward.cli.shared_options import parse_pairs
        from onward.data.read import DataOptions
        from onward.model_metadata import read_labels

        about = read_metadata(self.artifacts / f"{self.prefix}training_model.onnx")
        return DataOptions(
            mapping=parse_pairs([*(self.options.mapping or ()), *(mapping or ())], "--map"),
            label=label or self.options.label,
            classes=self.info.class_names,
            # which output is which class is settled by now: data that only alphabetical order could number is refused
            data_names_classes=False,
            preprocessing=self.info.preprocessing,
            near=[self.folder, self.artifacts],
            class_count=next((count for count, _ in read_labels(about).values()), None),
        )


def write_run(
    folder: Path,
    artifacts: Path,
    options: RunOptions,
    classes: list[str] | None,
    preprocessing: Preprocessing | None = None,
) -> None:
    """Write `run.json`; the place of the artifacts is relative, so that both can move together."""
    from onward.hub.origin import origin_of

    folder.mkdir(parents=True, exist_ok=True)
    try:
        relative = os.path.relpath(artifacts.resolve(), folder.resolve())
    except ValueError:  # another drive on Windows
        relative = str(artifacts.resolve())
    settings = options.to_json()
    document = {"artifacts": Path(relative).as_posix(), "options": settings, "classes": classes}
    if preprocessing is not None:
        document["preprocessing"] = json.loads(preprocessing.to_json())
    document["origin"] = vars(origin_of(None, options.data or (), settings))
    write_bytes(folder / _RUN, json.dumps(document, indent=2, default=str).encode())


def read_run(folder: Path) -> EarlierRun | None:
    """What `write_run` wrote; None where there is none."""
    path = folder / _RUN
    if not path.is_file():
        return None
    try:
        document = read_json(path)
        if not isinstance(document["options"], dict):
            raise ValueError("its options are no table")
        options = read_options(document["options"])
        # it becomes part of paths: "../" would lead out of the artifacts
        plain_prefix(options.prefix)
        if not isinstance(document["artifacts"], str):
            raise ValueError("the place of its artifacts is no text")
        artifacts = (folder / document["artifacts"]).resolve()
        classes = document.get("classes")
        if classes is not None and not (
            isinstance(classes, list) and all(isinstance(name, str) for name in classes)
        ):
            raise ValueError("its classes are no list of names")
        return EarlierRun(artifacts, options, classes)
    except (ValueError, KeyError, TypeError, OSError, RuntimeError) as error:
        problem = f"it has no {error}" if isinstance(error, KeyError) else error
        raise CommandError(
            f"'{path}' is damaged: {problem}", "name the artifacts and options again"
        ) from error


def resume_options(folder: Path, earlier: RunOptions, options: RunOptions, named: set[str]) -> RunOptions:
    """The options of an earlier run but those that were `named` again, which are taken from `options`.

    An error where one of the earlier could run code, write outside of the run or send it away: a run may come from
    someone else, so that the person at the command line has to name these again.
    """
    unchanged = {name: value for name, value in vars(earlier).items() if name not in named}
    for name in ("data", "eval_data"):
        entry = names_code(unchanged.get(name))
        if entry is not None:
            raise CommandError(
                f"'{folder / _RUN}' names Python code as its data, '{entry}', and a file never runs code here",
                f"if you trust that code, say so: --{name.replace('_', '-')} {entry}",
            )
    for name in ("mlflow", "wandb"):
        if unchanged.get(name) is not None:
            raise CommandError(
                f"'{folder / _RUN}' would have the run sent to {name}, project '{unchanged[name]}'",
                f"if that is right, say so: --{name} {unchanged[name]}",
            )
    events = unchanged.get("tensorboard")
    if events is not None and not any(
        events.resolve().is_relative_to(parent.resolve()) for parent in (folder, Path.cwd())
    ):
        raise CommandError(
            f"'{folder / _RUN}' would have '{events}' written, outside of the run and of this folder",
            f"if that is right, say so: --tensorboard {events}",
        )
    return replace(options, **unchanged)


def _clear_run(folder: Path) -> None:
    """Remove what an earlier run left in a folder, and nothing else."""
    # by name: somebody may keep files of his own in the folder
    for pattern in (
        "checkpoint-*", "best", "best.data", "history.json", "log.txt", "tokenizer.json", "report.html", _RUN,
    ):  # fmt: skip
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
    options: RunOptions,
    classes: list[str] | None,
    preprocessing: Preprocessing | None = None,
    *,
    overwrite: bool = False,
    lock: bool = True,
) -> Iterator[None]:
    """Hold a run's folder and write its `run.json` for the block; `overwrite` removes an earlier run first.

    Where the block fails before anything was saved, the folder is as it was.
    """
    from onward.train.lock import run_lock

    with folder_target(folder):
        was_there = folder.is_dir()
        folder.mkdir(exist_ok=True)
        try:
            # machines of one job share the folder: the first holds it for all
            with run_lock(folder if lock else None):
                if overwrite:
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
    # a run that fails before its first checkpoint must not take the description of the one before
    earlier = (folder / _RUN).read_bytes() if (folder / _RUN).is_file() else None
    # what this run writes before its first checkpoint
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
                write_bytes(folder / _RUN, earlier)
        raise


def find_run(folder: Path, checkpoint: str | None = None, *, prefix: str = "") -> RunFiles:
    """The artifacts and checkpoint that a folder of a run, or of artifacts, means.

    `checkpoint` is "best", "latest" or a path; by default the best of a run, or the artifacts' own.
    """
    from onward.hub.read_info import read_info

    if not folder.is_dir():
        raise CommandError(
            f"'{folder}' is a file, not a folder of artifacts"
            if folder.exists()
            else f"nothing at '{folder}'",
            "name a folder that onward train or onward artifacts wrote",
        )
    run = read_run(folder)
    options = RunOptions() if run is None else run.options
    artifacts = folder if run is None else run.artifacts
    prefix = prefix or options.prefix
    if not (artifacts / f"{prefix}training_model.onnx").is_file():
        if run is not None and not (artifacts / f"{options.prefix}training_model.onnx").is_file():
            raise CommandError(
                f"the artifacts of '{folder}' are no longer at '{artifacts}'", "move them back"
            )
        if prefix:
            raise CommandError(f"no {prefix}training_model.onnx in '{artifacts}'", "is --prefix right?")
        if (folder / "history.json").is_file():
            raise CommandError(
                f"'{folder}' has the checkpoints of onward finetune, which writes its result itself",
                f"repeat that command with --run {folder} --resume and an --output",
            )
        raise CommandError(
            f"'{folder}' holds neither a run nor artifacts",
            "make artifacts with: onward artifacts model.onnx",
        )
    return RunFiles(
        folder=folder,
        artifacts=artifacts,
        checkpoint=_find_checkpoint(
            folder, checkpoint, artifacts / f"{prefix}checkpoint", is_run=run is not None
        ),
        prefix=prefix,
        info=read_info(folder, prefix=prefix),
        options=options,
    )


def forward_outputs(eval_model: Path) -> list[str]:
    """The outputs of the forward model that an eval model was made of."""
    names = read_names(read_metadata(eval_model), contract.OUTPUTS)
    return names or [value.name for value in read_model(eval_model).graph.output[1:]]


def export_run(run: RunFiles, path: Path, outputs: list[str] | None = None) -> Path:
    """Write the model of a run for inference."""
    from onward.export import for_inference
    from onward.info.metadata import info_to_metadata

    eval_model = run.artifacts / f"{run.prefix}eval_model.onnx"
    names = outputs or forward_outputs(eval_model)
    for_inference(str(eval_model), run.checkpoint, names, path, metadata=info_to_metadata(run.info))
    return path


def _find_checkpoint(folder: Path, name: str | None, initial: Path, *, is_run: bool) -> Path:
    if name is not None and name not in ("best", "latest"):
        path = Path(name)
        if not path.is_file():
            raise CommandError(f"no checkpoint at '{path}'", "it is 'best', 'latest' or a file")
        return path
    if not is_run:
        if name is not None:
            raise CommandError(f"'{folder}' is no run: it has no {name} checkpoint", "name a file")
        return initial
    # the best by default: after early stopping the last is the worse one
    if name != "latest" and (folder / "best").is_file():
        return folder / "best"
    steps = sorted(path for path in folder.glob("checkpoint-*") if path.suffix != ".data")
    if name == "best" or not steps:
        raise CommandError(f"'{folder}' has no {name or 'checkpoint'} yet", "train first: onward train")
    return steps[-1]
