"""For the site: examples in docstrings (`>>>`) become blocks of code."""

from __future__ import annotations

from typing import Any

import griffe


class DoctestBlocks(griffe.Extension):
    """Puts a fence around each example of a docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """A docstring whose examples are blocks; an example ends with the paragraph that it is in."""
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        if not inside and line.lstrip().startswith(">>>"):
            lines += ["", "```pycon"]
            inside = True
        elif inside and not line.strip():
            lines.append("```")
            inside = False
        lines.append(line.lstrip() if inside and line.lstrip().startswith((">>>", "...")) else line)
    return "\n".join([*lines, "```"] if inside else lines)
