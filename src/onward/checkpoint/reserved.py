"""Names that Onward keeps for itself inside a checkpoint, and how exact scalars are spelled in them.

The schema has no room for a learning rate or a random state, so they are string properties below `onward.`;
readers of the original format see them as ordinary properties.
"""

from __future__ import annotations

import numpy as np

from onward.checkpoint.state import PropertyValue

__all__ = [
    "ACCUMULATION_GROUP",
    "ACCUMULATION_SLOT",
    "EXTRA_PREFIX",
    "PREFIX",
    "parse_extra",
    "spell_extra",
]

PREFIX = "onward."
EXTRA_PREFIX = "onward.extra."
ACCUMULATION_GROUP = "onward.accumulation"
ACCUMULATION_SLOT = "gradient"


def spell_extra(value: PropertyValue) -> str:
    """Return a scalar as text with its type, so that 64-bit floats and long integers survive exactly.

    >>> spell_extra(0.1), spell_extra(3), spell_extra("cosine")
    ('f:0.1', 'i:3', 's:cosine')
    """
    if isinstance(value, str):
        return "s:" + value
    if isinstance(value, (int, np.integer, np.bool_)):
        return f"i:{int(value)}"
    return f"f:{float(value)!r}"


def parse_extra(text: str) -> PropertyValue:
    """Return the scalar that `spell_extra` spelled; `ValueError` for anything else.

    >>> parse_extra("f:0.1")
    0.1
    """
    kind, colon, body = text.partition(":")
    if not colon or kind not in ("s", "i", "f"):
        raise ValueError("expected 's:', 'i:' or 'f:' and a value")
    if kind == "s":
        return body
    return int(body) if kind == "i" else float(body)
