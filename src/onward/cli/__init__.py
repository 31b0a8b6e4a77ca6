"""The `onward` command line, over the public API."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """The entry point of the `onward` command."""
    from onward.cli.app import app

    app(prog_name="onward")
