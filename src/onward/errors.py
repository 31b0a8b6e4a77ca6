"""Every error that Onward raises for a failure of its own domain.

Bad values and types raise `ValueError` and `TypeError`. Where the API that Onward replaces raised a
`RuntimeError` or `TypeError`, ours is a subclass of it, so that existing handlers keep working.
"""

from __future__ import annotations

from pathlib import Path

__all__ = [
    "CheckpointError",
    "DataError",
    "DeviceError",
    "DeviceMemoryError",
    "ExportError",
    "ModelError",
    "NonFiniteError",
    "OnwardError",
    "ParityError",
    "UnsupportedOps",
]


class OnwardError(RuntimeError):
    """Base of every error that Onward defines."""


class ModelError(OnwardError):
    """A model that cannot be used as given: unreadable, invalid, hostile or missing something."""


class UnsupportedOps(ModelError):
    """Operators between the loss and a trainable value that have no gradient, all of them at once."""


class ExportError(OnwardError):
    """A model that could not be exported; nothing was written."""


class ParityError(ExportError):
    """An exported model whose outputs differ from the original's by more than the tolerance."""


class NonFiniteError(OnwardError):
    """A loss or gradient that is NaN or infinite; parameters were left as they were."""


class DeviceError(ModelError):
    """A device that this machine does not have, or that does not work as it is set up."""


class DeviceMemoryError(OnwardError):
    """A device that has too little memory for a step; parameters were left as they were."""


class CheckpointError(OnwardError):
    """A checkpoint that cannot be read or written.

    `offset` is the byte at which reading failed and `field` what was being read, where known.
    """

    def __init__(self, path: str | Path, reason: str, *, field: str = "", offset: int | None = None) -> None:
        self.path = str(path)
        self.reason = reason
        self.field = field
        self.offset = offset
        where = f" ({field}" + (f" at byte {offset}" if offset is not None else "") + ")" if field else ""
        super().__init__(f"checkpoint '{self.path}': {reason}{where}")


class DataError(OnwardError, ValueError):
    """Data that a model cannot be trained on as given; `hint` says what to do."""

    def __init__(self, message: str, hint: str = "") -> None:
        self.hint = hint
        super().__init__(message)
