"""`onward inspect --html`: the same tables as a page that needs no network."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["render_page"]

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --bar: #2563eb; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.4rem; overflow-wrap: anywhere; } h2 { font-size: 1.05rem; margin: 1.6rem 0 .4rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; }
td, th { padding: .25rem .8rem .25rem 0; text-align: left; border-bottom: 1px solid var(--line);
  overflow-wrap: anywhere; vertical-align: top; }
.bar { height: .55rem; background: var(--bar); border-radius: 3px; min-width: 1px; }
.bars td:last-child { width: 45%; } code { font-size: .95em; }
details { margin: 1rem 0; } summary { cursor: pointer; font-weight: 600; }
"""


def render_page(found: Mapping[str, Any], sections: Iterable[Sequence[Any]]) -> str:
    """The page of what was found in a file, in sections: title, columns and rows."""
    title = html.escape(f"{found['kind']}: {found['path']}")
    body = "".join(_section(*section) for section in sections)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{_STYLE}</style></head><body>
<h1>{title}</h1>
{body}
</body></html>
"""


def _section(title: str, columns: list[str], rows: list[list[Any]]) -> str:
    if not rows:
        return ""
    counts = [row[1] for row in rows] if title == "operators" else []
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    lines = []
    for index, row in enumerate(rows):
        cells = "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row)
        if counts:
            cells += (
                f'<td><div class="bar" style="width:{100 * counts[index] / max(counts):.1f}%"></div></td>'
            )
        lines.append(f"<tr>{cells}</tr>")
    more = "<th></th>" if counts else ""
    shown = f"<thead><tr>{head}{more}</tr></thead>" if any(columns) else ""
    table = f'<table class="{"bars" if counts else ""}">{shown}<tbody>{"".join(lines)}</tbody></table>'
    if len(rows) > 12:
        return f"<details open><summary>{html.escape(title)} ({len(rows)})</summary>{table}</details>"
    return f"<h2>{html.escape(title)}</h2>{table}"
