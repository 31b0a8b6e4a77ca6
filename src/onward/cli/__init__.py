"""The `onward` command line: the public API for people who would rather not write Python."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """The entry point of the `onward` command."""
    from onward.cli.app import app

    app(prog_name="onward")
