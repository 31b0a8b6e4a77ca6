"""Training steps of every model on every engine: time on the wall clock, processor time and peak memory."""

from __future__ import annotations

import statistics
import sys

from suite.figures import MISSING, milliseconds, paragraph, ratio_of_rounds, table
from suite.interleave import compare
from suite.section import Cases, Section
from suite.settings import ENGINES, MODELS, Settings

__all__ = ["SECTION", "by_model"]

PHASES = {
    "step": "Whole step: forward, backward and AdamW",
    "gradients": "Forward and backward",
    "optimizer": "Optimizer alone",
    "eval": "Evaluation",
}
ROUNDS = 8


def measure(settings: Settings) -> Cases:
    """Rounds of all phases, model by model."""
    from prepare import prepare

    cases: Cases = {}
    for model in settings.models:
        tracks = compare(
            prepare(model, settings.cache),
            engines=settings.engines,
            phases=list(PHASES),
            rounds=settings.rounds_or(ROUNDS),
            settings=settings,
        )
        cases[model] = {engine: track.as_json() for engine, track in tracks.items()}
        shown = {engine: _median(cases[model], engine, "wall", "step") for engine in tracks}
        print(f"{model}: {shown}", file=sys.stderr, flush=True)
    return cases


def render(cases: Cases) -> list[str]:
    """A table for each phase, one of processor time and one of memory."""
    lines: list[str] = []
    for phase, title in PHASES.items():
        lines += [f"### {title}", "", *_times(cases, "wall", phase), ""]
    lines += [
        "### Processor time of a whole step",
        "",
        paragraph(
            "Milliseconds that all threads of the engine's process used, threads that spin while they wait "
            "included. It depends less than the wall clock on what else the machine does."
        ),
        "",
        *_times(cases, "processor", "step"),
        "",
        "### Peak memory of training (MB)",
        "",
        "The largest resident size of the process after the first steps, with all libraries that the engine loads.",
        "",
        *_memory(cases),
    ]
    problems = [
        f"- {engine} could not run {model}: `{track['problem']}`"
        for model, tracks in by_model(cases).items()
        for engine, track in tracks.items()
        if track.get("problem")
    ]
    return [*lines, "", *problems] if problems else lines


def by_model(cases: Cases) -> Cases:
    """The cases in the usual order of models."""
    return {model: cases[model] for model in sorted(cases, key=_place)}


def _place(model: str) -> int:
    return MODELS.index(model) if model in MODELS else len(MODELS)


def _engines(cases: Cases, phase: str) -> list[str]:
    found = {engine for tracks in cases.values() for engine, track in tracks.items() if _has(track, phase)}
    return [engine for engine in ENGINES if engine in found]


def _has(track: dict, phase: str) -> bool:
    return bool(track.get("wall", {}).get(phase))


def _median(tracks: dict, engine: str, clock: str, phase: str) -> str:
    figures = tracks.get(engine, {}).get(clock, {}).get(phase)
    return milliseconds(statistics.median(figures)) if figures else MISSING


def _times(cases: Cases, clock: str, phase: str) -> list[str]:
    """Milliseconds of each engine, and below a peer's the ratio of ours to it."""
    engines = _engines(cases, phase)
    rows = []
    for model, tracks in by_model(cases).items():
        ours = tracks.get("onward", {}).get(clock, {}).get(phase, [])
        cells = [model]
        for engine in engines:
            cell = _median(tracks, engine, clock, phase)
            theirs = tracks.get(engine, {}).get(clock, {}).get(phase, [])
            ratio = ratio_of_rounds(ours, theirs) if engine != "onward" else None
            cells.append(f"{cell}<br>{ratio}" if ratio else cell)
        rows.append(cells)
    return table(["model", *engines], rows)


def _memory(cases: Cases) -> list[str]:
    engines = _engines(cases, "step")
    rows = []
    for model, tracks in by_model(cases).items():
        peaks = [tracks.get(engine, {}).get("peak_mb") for engine in engines]
        rows.append([model, *(f"{peak:.0f}" if peak else MISSING for peak in peaks)])
    return table(["model", *engines], rows)


SECTION = Section("steps", "Training steps", measure, render)
