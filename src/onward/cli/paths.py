"""Paths that a command is given: models are read from them; outputs are checked early, and undone if it fails."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from onward.cli.errors import CommandError
from onward.files import new_directories, write_set

OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")]


def read_model(path: Path) -> Any:
    """The model of a file as a protobuf, without external data; an error in one line where it is none."""
    from onward.graph.gate import read_proto

    if path.is_dir():
        raise CommandError(f"no model at '{path}': it is a folder", "name an ONNX file")
    if not path.exists():
        raise CommandError(f"no model at '{path}'", "is the path right?")
    # without data: a command looks at names and shapes, and weights may be gigabytes
    return read_proto(path, read_data=False)


def read_metadata(path: Path) -> dict[str, str]:
    """What a model file says of itself."""
    return {entry.key: entry.value for entry in read_model(path).metadata_props}


@contextlib.contextmanager
def file_target(path: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A path at which a file can be written; folders made for it go again where the block fails.

    A file that is there already is someone's: it is replaced with `overwrite` only.
    """
    if path.is_dir():
        raise CommandError(f"'{path}' is a folder, and a file is to be written", "name a file in it")
    require_new(path, overwrite=overwrite)
    with _parents(path.parent, path):
        yield path


def require_new(path: Path, *, overwrite: bool) -> None:
    """Refuse a path at which there is something, which `overwrite` allows to be replaced."""
    if path.exists() and not overwrite:
        raise CommandError(f"'{path}' already exists", "replace it with --overwrite, or choose another name")


def require_folder_target(path: Path) -> None:
    """Refuse a path at which no folder can be; for a command that writes much later."""
    if path.exists() and not path.is_dir():
        raise CommandError(f"'{path}' is a file, and a folder is to be written", "choose another path")
    # now, not after an hour of training
    _require_possible(path.parent, path)


@contextlib.contextmanager
def folder_target(path: Path) -> Iterator[Path]:
    """A path at which a folder can be written; folders made above it go again where the block fails."""
    require_folder_target(path)
    with _parents(path.parent, path):
        yield path


def refuse_strangers(folder: Path, names: Sequence[str], *, ours: str, overwrite: bool) -> None:
    """Refuse to replace files that Onward did not make; `ours` is the one by which its folders are known."""
    if overwrite or not folder.is_dir() or is_ours(folder / ours):
        return
    # only what would be replaced: other files in the folder are no matter of ours
    there = [name for name in names if (folder / name).exists()]
    if there:
        raise CommandError(
            f"'{folder / there[0]}' already exists, and Onward did not make it",
            "replace it with --overwrite, or choose another folder",
        )


def is_ours(path: Path) -> bool:
    """Whether Onward made a file: a model that says so, or the card of an exported folder."""
    if not path.is_file():
        return False
    if path.suffix != ".onnx":  # the name of a card is Onward's own
        return True
    try:
        return any(key.startswith("onward.") for key in read_metadata(path))
    except CommandError:
        return False


@contextlib.contextmanager
def new_file(path: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A place to write a file aside, which takes its name when the block is done; an older one stays till then."""
    with file_target(path, overwrite=overwrite), write_set(path.parent) as folder:
        yield folder / path.name


def plain_prefix(prefix: str) -> str:
    """A prefix of file names, which must not lead into another folder."""
    if any(mark in prefix for mark in ("/", "\\", "\0")):
        raise CommandError(
            f"--prefix '{prefix}' would lead into another folder", "it is the beginning of file names only"
        )
    return prefix


@contextlib.contextmanager
def _parents(folder: Path, target: Path) -> Iterator[None]:
    _require_possible(folder, target)
    try:
        with new_directories(folder):
            yield
    except OSError as error:
        if error.errno and not error.filename:  # a write that failed half-way
            raise CommandError(
                f"'{target}' cannot be written: {error.strerror}", "free some space, or choose another disk"
            ) from error
        raise


def _require_possible(folder: Path, target: Path) -> None:
    """Refuse a folder in which a file stands where another folder would have to."""
    # up to what is there: folders in between will be made
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise CommandError(
            f"'{target}' cannot be written: '{folder}' is a file, not a folder", "choose another path"
        )
