"""The tables in docs/dialect.md say what the code does.

After a change, write them anew with `python tests/graph/test_docs.py`.
"""

from __future__ import annotations

import re
from pathlib import Path

from onward.graph.dialect.contrib import contrib_operators
from onward.graph.dialect.definitions import BY_DEFINITION
from onward.graph.dialect.opsets import expanded_operators

PAGE = Path(__file__).parents[2] / "docs" / "dialect.md"


def contrib_table() -> str:
    rows = [
        f"| {domain or 'ai.onnx'} | {op} | {meaning} |"
        for (domain, op), meaning in contrib_operators().items()
    ]
    return "\n".join(["| domain | operator | written as |", "|---|---|---|", *rows])


def newer_list() -> str:
    names = sorted({*expanded_operators(), *BY_DEFINITION})
    return ", ".join(f"`{name}`" for name in names) + "."


def filled(text: str) -> str:
    for name, content in (("contrib", contrib_table()), ("newer", newer_list())):
        pattern = rf"(<!-- {name}: [^\n]*-->\n).*?(<!-- end -->)"
        text = re.sub(
            pattern, lambda match, content=content: f"{match[1]}{content}\n{match[2]}", text, flags=re.S
        )
    return text


def test_the_page_is_current() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == filled(text), "run: python tests/graph/test_docs.py"
    assert "| com.microsoft | FusedMatMul |" in text


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8", newline="\n")
