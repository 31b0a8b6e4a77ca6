"""What a section of the benchmark is: it measures cases, and makes a part of the page from stored ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from suite.settings import Settings

__all__ = ["Cases", "Section"]

Cases = dict[str, Any]
"""Results by the name of a case, as JSON has them. A case that is run again replaces the stored one."""


@dataclasses.dataclass(frozen=True)
class Section:
    """`measure` returns the cases that it ran; `render` makes Markdown of all cases that are stored."""

    name: str
    title: str
    measure: Callable[[Settings], Cases]
    render: Callable[[Cases], list[str]]
