"""Inference of the exported model on the stock runtime, against the same network in torch."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from suite.figures import MISSING, milliseconds, paragraph, ratio_of_rounds, table
from suite.interleave import compare
from suite.section import Cases, Section
from suite.steps import by_model

if TYPE_CHECKING:
    from suite.settings import Settings

__all__ = ["SECTION"]

ENGINES = ("onward", "torch", "torch-compile")
ROUNDS = 5


def measure(settings: Settings) -> Cases:
    """Rounds of forward passes, model by model."""
    from prepare import prepare

    cases: Cases = {}
    for model in settings.models:
        tracks = compare(
            prepare(model, settings.cache),
            engines=[engine for engine in ENGINES if engine in settings.engines],
            phases=["infer"],
            rounds=settings.rounds_or(ROUNDS),
            settings=settings,
            use="infer",
        )
        cases[model] = {engine: track.as_json() for engine, track in tracks.items()}
    return cases


def render(cases: Cases) -> list[str]:
    """Times, ratios and memory."""
    rows = []
    for model, tracks in by_model(cases).items():
        wall = {engine: tracks.get(engine, {}).get("wall", {}).get("infer", []) for engine in ENGINES}
        times = [milliseconds(statistics.median(found) if found else None) for found in wall.values()]
        ratios = [str(ratio_of_rounds(wall["onward"], wall[peer]) or MISSING) for peer in ENGINES[1:]]
        peaks = [tracks.get(engine, {}).get("peak_mb") for engine in ENGINES[:2]]
        rows.append([model, *times, *ratios, *(f"{peak:.0f}" if peak else MISSING for peak in peaks)])
    head = ["model", *(f"{e}, ms" for e in ENGINES), *(f"to {p}" for p in ENGINES[1:])]
    return [
        paragraph(
            "The forward pass on the batch that it was trained on: the file that `export_model_for_inferencing` "
            "writes, in a plain `onnxruntime.InferenceSession`, against the torch module in `eval` and "
            "`inference_mode`."
        ),
        "",
        *table([*head, *(f"{e}, MB" for e in ENGINES[:2])], rows),
    ]


SECTION = Section("inference", "Inference of the exported model", measure, render)
