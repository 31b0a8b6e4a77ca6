"""`onward doctor`: reports on the environment, and how to install what is missing."""

from __future__ import annotations

import dataclasses

from onward.cli.choices import only_our_errors
from onward.cli.command import command
from onward.cli.output import Output

_MARKS = {"ok": "ok", "absent": "–", "wrong": "WRONG"}


@command("onward doctor", "onward doctor --json")
def doctor(output: Output) -> int:
    """Show versions, providers, the processor and optional packages; exit code 1 where something is wrong."""
    from onward.doctor import State, diagnose

    only_our_errors()
    with output.working("looking"):
        sections = diagnose()
    for section in sections:
        rows = [[_MARKS[finding.state], finding.name, finding.value] for finding in section.findings]
        output.table(section.title, ["", "", ""], rows)
        for finding in section.findings:
            if finding.fix:
                output.line(f"  {finding.name}: {finding.fix}")
        output.line("")
    wrong = [finding for section in sections for finding in section.findings if finding.state is State.WRONG]
    output.line(
        f"{len(wrong)} wrong: {', '.join(finding.name for finding in wrong)}" if wrong else "all is well"
    )
    output.result(
        {
            "ok": not wrong,
            **{
                section.title.replace(" ", "_"): [dataclasses.asdict(finding) for finding in section.findings]
                for section in sections
            },
        }
    )
    return 1 if wrong else 0
