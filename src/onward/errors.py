"""Every error that Onward raises for a failure of its own domain.

Bad values and types raise `ValueError` and `TypeError`. Where the API that Onward replaces raised a
`RuntimeError` or `TypeError`, ours is a subclass of it, so that existing handlers keep working.

An error's message says what and where, in words of the library. Its `hint` says what to do, in words of the
command line, which prints it; each kind of error has one, and a place that knows better gives its own.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

__all__ = [
    "CheckpointError",
    "DataError",
    "DeviceError",
    "DeviceMemoryError",
    "ExportError",
    "LimitError",
    "ModelError",
    "NonFiniteError",
    "OnwardError",
    "ParityError",
    "UnsupportedOps",
    "hinted",
]

Raised = TypeVar("Raised", bound=Exception)

# hints that several places give
MAKE_ARTIFACTS = "make artifacts with: onward artifacts model.onnx"
SEE_NAMES = "onward inspect shows the names"


class OnwardError(RuntimeError):
    """Base of every error that Onward defines; `hint` says what to do at the command line."""

    hint: str = ""

    def __init__(self, *args: object, hint: str | None = None) -> None:
        super().__init__(*args)
        if hint is not None:
            self.hint = hint


def did_you_mean(name: str, names: Iterable[str], *, most: int = 1) -> str:
    """The end of a message about an unknown name: those that are close to it, if any.

    >>> did_you_mean("cosin", ["linear", "cosine"])
    "; did you mean 'cosine'?"
    """
    near = difflib.get_close_matches(name, names, n=most)
    return f"; did you mean {', '.join(map(repr, near))}?" if near else ""


def hinted(error: Raised, hint: str) -> Raised:
    """Give an error of Python's own kinds a `hint`, as `OnwardError` has one.

    >>> hinted(ValueError("no batch"), "name data with --data").hint
    'name data with --data'
    """
    error.hint = hint  # type: ignore[attr-defined]
    return error


class ModelError(OnwardError):
    """A model that cannot be used: unreadable, invalid, malicious or incomplete."""


class LimitError(ModelError):
    """A file that asks for more than a limit of `onward.limits` allows; nothing was computed."""

    def __init__(self, what: str, limit: str, asked: int, allowed: int) -> None:
        self.what, self.limit, self.asked, self.allowed = what, limit, asked, allowed
        super().__init__(
            f"{what} asks for {asked:,}, and the limit {limit} is {allowed:,}; where you trust the file, raise "
            f"it: with onward.limits.override({limit}={asked})",
            hint=f"where you trust the file, raise it: --limit {limit}={asked}",
        )


class UnsupportedOps(ModelError):
    """Operators between the loss and a trainable value that have no gradient, all of them at once."""

    hint = "freeze those parameters with --freeze, or add a rule: docs/adding-a-gradient.md"


class ExportError(OnwardError):
    """A model that could not be exported; nothing was written."""


class ParityError(ExportError):
    """An exported model whose outputs differ from the original's by more than the tolerance."""

    hint = "loosen --rtol/--atol only if you know why the outputs differ"


class NonFiniteError(OnwardError):
    """A loss or gradient that is NaN or infinite; parameters are unchanged."""

    hint = "lower --learning-rate, clip gradients with --clip-norm, or look for NaN in the data"


class DeviceError(ModelError):
    """A device that this machine does not have, or that does not work as it is set up."""


class DeviceMemoryError(OnwardError):
    """A device that has too little memory for training or for a step; parameters are unchanged."""


class CheckpointError(OnwardError):
    """A checkpoint that cannot be read or written.

    `offset` is the byte at which reading failed and `field` what was being read, where known.
    """

    hint = "name a checkpoint that onward train or onward artifacts wrote; is it whole?"

    def __init__(self, path: str | Path, reason: str, *, field: str = "", offset: int | None = None) -> None:
        self.path = str(path)
        self.reason = reason
        self.field = field
        self.offset = offset
        where = f" ({field}" + (f" at byte {offset}" if offset is not None else "") + ")" if field else ""
        super().__init__(f"checkpoint '{self.path}': {reason}{where}")


class DataError(OnwardError, ValueError):
    """Data that the model cannot train on; `hint` says what to do."""

    def __init__(self, message: str, hint: str = "") -> None:
        self.hint = hint
        super().__init__(message)
