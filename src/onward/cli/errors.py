"""The error of a command that was used wrongly."""

from __future__ import annotations

__all__ = ["CommandError"]


class CommandError(Exception):
    """A mistake in how a command was used; `hint` says what to do."""

    def __init__(self, message: str, hint: str = "") -> None:
        self.hint = hint
        super().__init__(message)
