"""Every message that the code raises, by class of error: the page of errors lists them, so that a search finds them.

`…` stands for what is filled in. The site alone has the lists; they are made when it is built.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "onward"
_PLACE = re.compile(r"<!-- messages: (\w+) -->")


def messages() -> dict[str, list[str]]:
    """The messages of each class, in alphabetical order."""
    texts: dict[str, set[str]] = defaultdict(set)
    for module in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                for name, text in _message(node.exc):
                    texts[name].add(text)
    return {name: sorted(lines) for name, lines in texts.items()}


def _message(call: ast.Call) -> Iterator[tuple[str, str]]:
    """The class and text of a call that makes an error."""
    name = call.func.id if isinstance(call.func, ast.Name) else ""
    if name == "hinted" and call.args and isinstance(call.args[0], ast.Call):
        yield from _message(call.args[0])
        return
    # an error of a file has its path first
    arguments = call.args[1:2] if name == "CheckpointError" else call.args[:1]
    for argument in arguments:
        text = _text(argument)
        if len(text.replace("…", "").strip(" :;,.'")) > 8:
            yield name, " ".join(text.split())


def _text(argument: ast.expr) -> str:
    if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
        return argument.value
    if isinstance(argument, ast.JoinedStr):
        parts = (str(part.value) if isinstance(part, ast.Constant) else "…" for part in argument.values)
        return "".join(parts)
    return ""


def fill(markdown: str) -> str:
    """The page with the lists in their places, folded."""
    texts = messages()

    def block(match: re.Match[str]) -> str:
        lines = [f"    - `{text.replace('`', chr(39))}`" for text in texts[match[1]]]
        return "\n".join([f'??? note "{len(lines)} messages"', "", *lines])

    return _PLACE.sub(block, markdown)
