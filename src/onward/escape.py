"""Names from files where people see them: without control characters, few at a time, no formula in a spreadsheet."""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Sequence

_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


def printable(text: str, *, keep: str = "\n\t") -> str:
    r"""A text in which no character can steer a terminal or turn the direction of writing.

    >>> printable("safe \x1b[2J name")
    'safe \\x1b[2J name'
    """
    if text.isprintable():
        return text
    return "".join(
        mark
        if mark in keep or unicodedata.category(mark) not in ("Cc", "Cf", "Cs", "Zl", "Zp")
        else _spell(mark)
        for mark in text
    )


def _spell(mark: str) -> str:
    return mark.encode("unicode_escape").decode("ascii")


def html_text(value: object) -> str:
    r"""A value as text of a page or of an attribute, which it cannot leave.

    >>> html_text("<b>'a'\x1b")
    '&lt;b&gt;&#x27;a&#x27;\\x1b'
    """
    return html.escape(printable(str(value)))


def first_of(names: Sequence[object], most: int = 8) -> str:
    """The first of many names, to be shown in a line.

    >>> first_of("abcdef", 3)
    'a, b, c, …'
    """
    return ", ".join(map(str, names[:most])) + (", …" if len(names) > most else "")


def csv_cell(value: object) -> object:
    """A cell that a spreadsheet shows and does not compute: text that begins like a formula gets a quote.

    >>> csv_cell("=HYPERLINK(1)"), csv_cell(-1.5), csv_cell("loss")
    ("'=HYPERLINK(1)", -1.5, 'loss')
    """
    if not isinstance(value, str):
        return value
    text = printable(value, keep="")
    return f"'{text}" if value.startswith(_FORMULA) else text
