"""The ratios of whole steps as one SVG: a bar for each peer of each model, to the left where Onward is faster.

Written by hand, so that the page needs nothing to draw it. It carries its own ground and both colour schemes,
because a picture on a page does not know which one the page has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from suite.figures import Spread

__all__ = ["ratio_plot"]

COLOURS = {
    "torch-fused": "#4a84d9",
    "torch": "#2ea39a",
    "torch-compile": "#9a6fd0",
    "ort-training": "#e08a3c",
}
WIDTH, LABELS, MARGIN = 800, 130, 50
TOP, BAR, GAP, GROUP_GAP, BOTTOM = 96, 11, 3, 14, 48
TICKS = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8, 16)
STYLE = """
  .ground { fill: #ffffff; stroke: #d8dce3 } .text { fill: #24292f } .faint { fill: #5b6470 }
  .grid { stroke: #e4e7ec } .one { stroke: #24292f } .whisker { stroke: #24292f }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #1e2129; stroke: #3a3f4b } .text { fill: #e6e9ef } .faint { fill: #a5adba }
    .grid { stroke: #333844 } .one { stroke: #e6e9ef } .whisker { stroke: #e6e9ef }
  }
  text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; font-size: 12px }
  .title { font-size: 15px; font-weight: 600 } .value { font-size: 10px } .model { font-weight: 600 }
"""


def ratio_plot(ratios: Mapping[str, Mapping[str, Spread]]) -> str:
    """The picture of ratios by model and peer: ours divided by theirs, on a logarithmic scale."""
    ends = [end for peers in ratios.values() for found in peers.values() for end in (found.low, found.high)]
    low = min([0.5, *ends])
    high = max([2.0, *ends])
    first = max(tick for tick in TICKS if tick <= low or tick == TICKS[0])
    last = min(tick for tick in TICKS if tick >= high or tick == TICKS[-1])
    left, right = LABELS, WIDTH - MARGIN

    def x(ratio: float) -> float:
        share = math.log(min(max(ratio, first), last) / first) / math.log(last / first)
        return left + share * (right - left)

    y: float = TOP
    bars: list[str] = []
    for model, peers in ratios.items():
        height = len(peers) * (BAR + GAP) - GAP
        bars.append(_text(LABELS - 12, y + height / 2 + 4, model, "text model", anchor="end"))
        for peer, found in peers.items():
            bars += _bar(x, y, peer, found)
            y += BAR + GAP
        y += GROUP_GAP - GAP
    bottom = y - GROUP_GAP + 8
    grid = [_grid(x(tick), bottom, tick) for tick in TICKS if first <= tick <= last]
    height = round(bottom + BOTTOM)
    shown = [peer for peer in COLOURS if any(peer in peers for peers in ratios.values())]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"'
            ' aria-label="Time of a training step, Onward divided by each peer">',
            f"<style>{STYLE}</style>",
            f'<rect class="ground" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
            _text(24, 30, "Time of a whole training step: Onward divided by …", "text title"),
            *_legend(shown),
            *grid,
            *bars,
            _text(x(1) - 10, bottom + 36, "← Onward is faster", "faint", anchor="end"),
            _text(x(1) + 10, bottom + 36, "Onward is slower →", "faint"),
            "</svg>",
            "",
        ]
    )


def _bar(x, y: float, peer: str, found: Spread) -> list[str]:
    start, end = sorted((x(1), x(found.median)))
    low, high, middle = x(found.low), x(found.high), y + BAR / 2
    faster = found.median < 1
    label = min(low, start) - 5 if faster else max(high, end) + 5
    return [
        f'<rect x="{start:.1f}" y="{y:.1f}" width="{max(end - start, 1):.1f}" height="{BAR}" rx="1.5"'
        f' fill="{COLOURS[peer]}"><title>{escape(peer)}: {found.median:.2f}</title></rect>',
        f'<line class="whisker" x1="{low:.1f}" x2="{high:.1f}" y1="{middle:.1f}" y2="{middle:.1f}"/>',
        _text(label, y + BAR - 2, f"{found.median:.2f}", "text value", anchor="end" if faster else "start"),
    ]


def _grid(at: float, bottom: float, tick: float) -> str:
    name = f"{tick:g}" if tick >= 1 else f"1/{round(1 / tick)}"
    kind = "one" if tick == 1 else "grid"
    line = f'<line class="{kind}" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP - 10}" y2="{bottom:.1f}"/>'
    return line + _text(at, bottom + 16, name, "faint", anchor="middle")


def _legend(peers: list[str]) -> list[str]:
    parts, at = [], 24
    for peer in peers:
        parts.append(f'<rect x="{at}" y="50" width="12" height="12" rx="2" fill="{COLOURS[peer]}"/>')
        parts.append(_text(at + 18, 60, peer, "text"))
        at += 40 + 8 * len(peer)
    return [*parts, _text(WIDTH - 24, 60, "lines: middle half of the rounds", "faint", anchor="end")]


def _text(x: float, y: float, text: str, kind: str, *, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
