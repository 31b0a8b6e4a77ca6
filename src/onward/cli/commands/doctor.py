"""`onward doctor`: reports on the environment, and how to install what is missing."""

from __future__ import annotations

import dataclasses

import typer

from onward.cli.choices import only_our_errors
from onward.cli.command import Output, command, examples

__all__ = ["register"]

_MARKS = {"ok": "ok", "absent": "–", "wrong": "WRONG"}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("doctor", epilog=examples("onward doctor", "onward doctor --json"))(doctor)


@command
def doctor(output: Output) -> int:
    """Show versions, providers, the processor and optional packages; exit code 1 where something is wrong."""
    from onward.doctor import State, diagnose

    only_our_errors()
    with output.working("looking"):
        sections = diagnose()
    for section in sections:
        rows = [[_MARKS[found.state], found.name, found.value] for found in section.findings]
        output.table(section.title, ["", "", ""], rows)
        for found in section.findings:
            if found.fix:
                output.line(f"  {found.name}: {found.fix}")
        output.line("")
    wrong = [found for section in sections for found in section.findings if found.state is State.WRONG]
    output.line(f"{len(wrong)} wrong: {', '.join(found.name for found in wrong)}" if wrong else "all is well")
    output.result(
        {
            "ok": not wrong,
            **{
                section.title.replace(" ", "_"): [dataclasses.asdict(found) for found in section.findings]
                for section in sections
            },
        }
    )
    return 1 if wrong else 0
