"""A page about a training run: curves, figures and settings, in one HTML file that needs no network."""

from __future__ import annotations

import base64
import dataclasses
import math
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onward.escape import html_text

if TYPE_CHECKING:
    from onward.train.history import History

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 420, 230, 58, 40
_NOISY = 60  # more points than this are drawn faint, with their mean around each
_COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2")
_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; --mark: #2563eb; }
@media (prefers-color-scheme: dark) { :root { --mark: #60a5fa; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1400px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.05rem; margin: 1.6rem 0 .4rem; }
.sub { opacity: .7; margin-top: .2rem; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 330px), 1fr)); gap: 1rem; }
.grid > * { min-width: 0; }
.card { border: 1px solid var(--line); border-radius: 10px; padding: .7rem .8rem; }
.card h2 { margin-top: 0; }
.tiles { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1rem 0; }
.tile { border: 1px solid var(--line); border-radius: 10px; padding: .5rem .9rem; flex: 1 0 7rem; max-width: 14rem; }
.tile b { display: block; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
svg { width: 100%; height: auto; display: block; } svg text { fill: currentColor; font-size: 12px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { padding: .2rem .8rem .2rem 0; text-align: left; border-bottom: 1px solid var(--soft); vertical-align: top; }
.pairs td, .pairs th, li { overflow-wrap: anywhere; } .pairs th { font-weight: 400; opacity: .7; min-width: 7rem; }
tr.best td { font-weight: 600; color: var(--mark); }
.matrix td, .matrix th { padding: .25rem .45rem; text-align: right; border: 1px solid var(--soft); }
.matrix th { font-weight: 400; max-width: 8rem; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.legend span { margin-right: 1rem; } .legend i { display: inline-block; width: .9rem; height: .25rem;
  margin-right: .35rem; vertical-align: middle; }
.scroll { overflow-x: auto; }
.figures { display: flex; flex-wrap: wrap; gap: .8rem; } .figure { max-width: 18rem; overflow-wrap: anywhere; }
.figure img { max-width: 100%; image-rendering: pixelated; border-radius: 6px; }
"""


@dataclasses.dataclass(frozen=True)
class Figure:
    """Something that a report shows of an evaluation: a picture (PNG), a text or a table (its first row the header).

    Figures of one title are shown together.
    """

    title: str
    caption: str
    picture: bytes | None = None
    text: str | None = None
    table: Sequence[Sequence[Any]] = ()


def render_report(
    history: History,
    *,
    title: str = "Training run",
    settings: Mapping[str, Any] | None = None,
    best: Mapping[str, Any] | None = None,
    environment: Mapping[str, Any] | None = None,
    files: Sequence[str] = (),
    figures: Sequence[Figure] = (),
) -> str:
    """The page as a string.

    >>> from onward.train.history import History
    >>> "<svg" in render_report(History(steps=[{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}]))
    True
    """
    epochs = history.epochs
    last = epochs[-1] if epochs else {}
    chosen = next((row for row in epochs if best is not None and row.get("epoch") == best["epoch"]), last)
    shown = {
        key: value
        for key, value in chosen.items()
        if isinstance(value, int | float) and key not in ("step", "epoch", "seconds", "samples_per_second")
    }
    tiles = "".join(
        f"<div class=tile>{html_text(_label(key))}<b>{html_text(_number(value))}</b></div>"
        for key, value in {"best epoch" if best else "epoch": chosen.get("epoch", 0), **shown}.items()
    )
    mark = None if best is None or len(epochs) < 2 else chosen.get("step")
    seconds = sum(float(row.get("seconds", 0)) for row in epochs)
    metrics = [
        key
        for key in dict.fromkeys(key for row in epochs for key in row)
        if key not in ("epoch", "step", "seconds", "samples_per_second", "learning_rate", "gradient_norm")
        and not key.endswith("loss")
    ]
    charts = [
        _chart(
            "Loss",
            {"training": _points(history.steps, "loss"), "evaluation": _points(epochs, "eval_loss")},
            mark=mark,
        ),
        *(_chart(_label(key), {_label(key): _points(epochs, key)}, mark=mark) for key in metrics),
        _chart("Learning rate", {"learning rate": _points(history.steps, "learning_rate")}),
        _chart("Gradient norm", {"gradient norm": _points(history.steps, "gradient_norm")}, logarithmic=True),
        _chart(
            "Throughput (samples per second)",
            {"throughput": _points(epochs, "samples_per_second")},
            from_zero=True,
        ),
        _chart(
            "Learning rate trial: loss by rate",
            {"loss": _points(history.range_test, "loss", across="learning_rate")},
            logarithmic_x=True,
            unit="learning rate",
        ),
        _matrix(history.confusion, history.classes),
    ]
    # `./`: a name may begin like an address with a scheme
    links = "".join(
        f'<li><a href="./{html_text(urllib.parse.quote(name))}">{html_text(name)}</a></li>' for name in files
    )
    # The policy: names in it come from data, and whatever they hold, nothing is loaded and no script runs.
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{html_text(title)}</title><style>{_STYLE}</style></head><body>
<h1>{html_text(title)}</h1><p class=sub>{html_text(_summary(len(epochs), last.get("step", 0), seconds))}</p>
<div class=tiles>{tiles}</div>
<div class=grid>{"".join(f"<div class=card>{chart}</div>" for chart in charts if chart)}</div>
{_figures(figures)}
<h2>Epochs</h2><div class=scroll>{_epochs(epochs, chosen if best else None)}</div>
<div class=grid><div><h2>Settings</h2>{_pairs(settings or {})}</div>
<div><h2>Environment</h2>{_pairs(environment or {})}</div></div>
{f"<h2>Files</h2><ul>{links}</ul>" if links else ""}
</body></html>
"""


def _figures(figures: Sequence[Figure]) -> str:
    """Figures by their titles; texts come from data, and are escaped."""
    sections = []
    for title in dict.fromkeys(figure.title for figure in figures):
        cards = []
        for figure in figures:
            if figure.title != title:
                continue
            parts = []
            if figure.picture is not None:
                source = base64.b64encode(figure.picture).decode()
                parts.append(f'<img alt="" src="data:image/png;base64,{source}">')
            if figure.text is not None:
                parts.append(f"<p>{html_text(figure.text)}</p>")
            if figure.table:
                parts.append(_table(figure.table[0], figure.table[1:]))
            caption = f"<p class=sub>{html_text(figure.caption)}</p>" if figure.caption else ""
            cards.append(
                f"<div class={'figure' if not figure.table else 'scroll'}>{''.join(parts)}{caption}</div>"
            )
        sections.append(f"<h2>{html_text(title)}</h2><div class=figures>{''.join(cards)}</div>")
    return "".join(sections)


def list_files(directory: Path | None, *, without: str) -> list[str]:
    """The names of a run's files that a report links to: all that are not hidden but the report itself."""
    files = () if directory is None else directory.iterdir()
    names = sorted(file.name for file in files if file.is_file() and not file.is_symlink())
    return [name for name in names if not name.startswith(".") and name != without]


Points = list[tuple[float, float]]


def _summary(epochs: int, updates: int, seconds: float) -> str:
    minutes, remainder = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    time = (
        f"{hours} h {minutes} min"
        if hours
        else f"{minutes} min {remainder} s"
        if minutes
        else f"{seconds:.1f} s"
    )
    return f"{epochs} {'epoch' if epochs == 1 else 'epochs'}, {updates} updates, {time} of training"


def _matrix(counts: Sequence[Sequence[int]], classes: Sequence[str]) -> str:
    """How often each class was taken for which, the share of its samples as the cell's depth."""
    # wider than a page
    if not counts or len(counts) > 30:
        return ""
    names = list(classes) if len(classes) == len(counts) else [str(index) for index in range(len(counts))]
    head = "".join(f"<th title='{html_text(name)}'>{html_text(name)}</th>" for name in names)
    rows = []
    for name, row in zip(names, counts):
        whole = max(sum(row), 1)
        cells = "".join(
            f'<td style="background:color-mix(in srgb, var(--mark) {round(70 * count / whole)}%, transparent)">'
            f"{count}</td>"
            for count in row
        )
        rows.append(f"<tr><th title='{html_text(name)}'>{html_text(name)}</th>{cells}</tr>")
    return (
        "<h2>Confusion matrix</h2><p class=sub>rows: what it is; columns: what the model says, at the best epoch</p>"
        f"<div class=scroll><table class=matrix><thead><tr><th></th>{head}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _points(rows: Sequence[Mapping[str, Any]], key: str, across: str = "step") -> Points:
    return [
        (float(row[across]), float(row[key]))
        for row in rows
        if isinstance(row.get(key), int | float) and math.isfinite(row[key])
    ]


def _chart(
    title: str,
    series: Mapping[str, Points],
    *,
    logarithmic: bool = False,
    logarithmic_x: bool = False,
    from_zero: bool = False,
    mark: float | None = None,
    unit: str = "updates",
) -> str:
    series = {name: points for name, points in series.items() if points}
    if not series:
        return ""
    # a logarithmic axis has no zero, as of a gradient that vanished
    logarithmic = logarithmic and all(y > 0 for points in series.values() for _, y in points)
    scaled = {
        name: [
            (math.log10(x) if logarithmic_x else x, math.log10(y) if logarithmic else y) for x, y in points
        ]
        for name, points in series.items()
    }
    xs = [x for points in scaled.values() for x, _ in points]
    ys = [y for points in scaled.values() for _, y in points]
    left, right, low, high = min(xs), max(xs), min(ys), max(ys)
    if right == left:
        left, right = left - 1, right + 1
    if from_zero:
        low = min(low, 0.0)
    # a flat line still needs an axis
    if high - low < 1e-12:
        low, high = low - 0.5, high + 0.5
    margin = 0.05 * (high - low)
    low, high = low - (0 if from_zero else margin), high + margin

    def locate(x: float, y: float) -> tuple[float, float]:
        across = _LEFT + (x - left) / (right - left) * (_WIDTH - _LEFT - 12)
        return across, (high - y) / (high - low) * (_HEIGHT - _BOTTOM - 8) + 8

    parts = []
    for tick in _log_ticks(low, high) if logarithmic else _ticks(low, high):
        _, y = locate(left, tick)
        text = _number(10**tick if logarithmic else tick)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - 8}" y1="{y:.1f}" y2="{y:.1f}" stroke="#8883"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    for tick in _log_ticks(left, right) if logarithmic_x else _ticks(left, right):
        x, _ = locate(tick, low)
        text = _number(10**tick if logarithmic_x else tick)
        anchor = "end" if x > _WIDTH - 12 - 4 * len(text) else "start" if x < 4 * len(text) else "middle"
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - 22}" text-anchor="{anchor}">{text}</text>')
    parts.append(f'<text x="{_WIDTH - 12}" y="{_HEIGHT - 5}" text-anchor="end" opacity=".6">{unit}</text>')
    places = [(4, 12)] * logarithmic + [(_LEFT, _HEIGHT - 5)] * logarithmic_x
    parts += [f'<text x="{x}" y="{y}" opacity=".6">log</text>' for x, y in places]
    if mark is not None and left <= mark <= right:
        x, _ = locate(mark, low)
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="8" y2="{_HEIGHT - _BOTTOM}" stroke="var(--mark)" '
            'stroke-dasharray="4 4"><title>best epoch</title></line>'
        )
    for index, (name, points) in enumerate(scaled.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        noisy = len(points) > _NOISY
        for drawn, opacity in ((points, 0.35), (_smooth(points), 1)) if noisy else ((points, 1),):
            line = " ".join("{:.1f},{:.1f}".format(*locate(x, y)) for x, y in _thin(drawn))
            parts.append(
                f'<polyline fill="none" stroke="{colour}" stroke-width="1.8" stroke-opacity="{opacity}" '
                f'stroke-linejoin="round" points="{line}"><title>{html_text(name)}</title></polyline>'
            )
        for x, y in _smooth(points)[-1:] if noisy else points:
            across, down = locate(x, y)
            value, at = _number(10**y if logarithmic else y), _number(10**x if logarithmic_x else x)
            parts.append(
                f'<circle cx="{across:.1f}" cy="{down:.1f}" r="3" fill="{colour}">'
                f"<title>{html_text(name)} {value} at {at} {unit}</title></circle>"
            )
    legend = "".join(
        f'<span><i style="background:{_COLOURS[i % len(_COLOURS)]}"></i>{html_text(name)}</span>'
        for i, name in enumerate(series)
    )
    shown = f"<div class=legend>{legend}</div>" if len(series) > 1 else ""
    label = f'role="img" aria-label="{html_text(title)} over {unit}"'
    return f'<h2>{html_text(title)}</h2>{shown}<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" {label}>{"".join(parts)}</svg>'


def _smooth(points: Points) -> Points:
    """Moving average over a window around each point; at the ends, the part of it that there is."""
    reach = max(1, len(points) // 40)
    sums = [0.0]
    for _, y in points:
        sums.append(sums[-1] + y)
    smoothed = []
    for index, (x, _) in enumerate(points):
        first, last = max(0, index - reach), min(len(points), index + reach + 1)
        smoothed.append((x, (sums[last] - sums[first]) / (last - first)))
    return smoothed


def _thin(points: Points, limit: int = 600) -> Points:
    """At most `limit` points, the last one kept: more than a screen can show help no one."""
    if len(points) <= limit:
        return points
    stride = -(-len(points) // limit)
    return [*points[::stride], points[-1]]


def _ticks(low: float, high: float) -> list[float]:
    raw = (high - low) / 5
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw)
    first = math.ceil(low / step)
    return [index * step for index in range(first, math.floor(high / step) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 of each decade between two powers of ten; only the decades where there are many."""
    factors = (1, 2, 5) if high - low < 3 else (1,)
    decades = range(math.floor(low), math.ceil(high) + 1)
    ticks = [decade + math.log10(factor) for decade in decades for factor in factors]
    stride = max(1, len(decades) // 8)
    ticks = ticks if len(factors) > 1 else ticks[::stride]
    return [tick for tick in ticks if low <= tick <= high] or [low, high]


def _number(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or (float(value).is_integer() and abs(value) < 1e6):
        return f"{int(value)}"
    return f"{value:.4g}"


def _label(key: str) -> str:
    return key.replace("_", " ")


def _epochs(rows: Sequence[Mapping[str, Any]], best: Mapping[str, Any] | None) -> str:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    number = next((index for index, row in enumerate(rows) if row is best), None)
    return _table(map(_label, columns), [[row.get(key, "") for key in columns] for row in rows], best=number)


def _table(header: Iterable[Any], rows: Iterable[Sequence[Any]], *, best: int | None = None) -> str:
    """A table whose cells come from data, and are escaped; `best` is the number of a row that stands out."""
    head = "".join(f"<th>{_cell(name)}</th>" for name in header)
    lines = []
    for index, row in enumerate(rows):
        mark = ' class="best" title="the best epoch"' if index == best else ""
        lines.append(f"<tr{mark}>{''.join(f'<td>{_cell(value)}</td>' for value in row)}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _cell(value: Any) -> str:
    return html_text(_number(value))


def _pairs(values: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><th>{html_text(key)}</th><td>{html_text(value)}</td></tr>" for key, value in values.items()
    )
    return f"<table class=pairs>{rows}</table>"
