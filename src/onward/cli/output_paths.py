"""Output paths of commands: checked early, and restored if the command fails."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from onward.cli.errors import CommandError
from onward.cli.model_file import read_model

__all__ = [
    "Overwrite",
    "file_target",
    "folder_target",
    "new_file",
    "plain_prefix",
    "refuse_strangers",
    "require_folder_target",
]


Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")]


@contextlib.contextmanager
def file_target(path: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A path at which a file can be written; folders made for it go again where the block fails.

    A file that is there already is someone's: it is replaced with `overwrite` only.
    """
    if path.is_dir():
        raise CommandError(f"'{path}' is a folder, and a file is to be written", "name a file in it")
    if path.exists() and not overwrite:
        raise CommandError(f"'{path}' already exists", "replace it with --overwrite, or choose another name")
    with _parents(path.parent, path):
        yield path


def require_folder_target(path: Path) -> None:
    """Refuse a path at which no folder can be; for a command that writes much later."""
    if path.exists() and not path.is_dir():
        raise CommandError(f"'{path}' is a file, and a folder is to be written", "choose another path")
    _missing_parents(path.parent, path)


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
    if path.suffix != ".onnx":
        return True
    try:
        return any(entry.key.startswith("onward.") for entry in read_model(path).metadata_props)
    except CommandError:
        return False


@contextlib.contextmanager
def new_file(path: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A place to write a file aside, which takes its name when the block is done; an older one stays till then."""
    from onward.files import staging_folder

    with file_target(path, overwrite=overwrite), staging_folder(path.parent) as folder:
        yield folder / path.name
        os.replace(folder / path.name, path)


def plain_prefix(prefix: str) -> str:
    """A prefix of file names, which must not lead into another folder."""
    if any(mark in prefix for mark in ("/", "\\", "\0")):
        raise CommandError(
            f"--prefix '{prefix}' would lead into another folder", "it is the beginning of file names only"
        )
    return prefix


@contextlib.contextmanager
def _parents(folder: Path, target: Path) -> Iterator[None]:
    missing = _missing_parents(folder, target)
    for made in reversed(missing):
        made.mkdir(exist_ok=True)
    try:
        yield
    except BaseException as error:  # an interrupt too
        for made in missing:
            with contextlib.suppress(OSError):  # someone put something in
                made.rmdir()
        if isinstance(error, OSError) and error.errno and not error.filename:  # a write that failed half-way
            raise CommandError(
                f"'{target}' cannot be written: {error.strerror}", "free some space, or choose another disk"
            ) from error
        raise


def _missing_parents(folder: Path, target: Path) -> list[Path]:
    """The folders that have to be made, the innermost first."""
    missing = []
    place = folder
    while not place.exists():
        missing.append(place)
        place = place.parent
    if not place.is_dir():
        raise CommandError(
            f"'{target}' cannot be written: '{place}' is a file, not a folder", "choose another path"
        )
    return missing
