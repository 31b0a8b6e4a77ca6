"""How near a training step is to the time of its matrix products alone, measured in the same rounds."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from suite.figures import milliseconds, paragraph, ratio_of_rounds, table
from suite.interleave import compare
from suite.section import Cases, Section

if TYPE_CHECKING:
    from suite.settings import Settings

__all__ = ["SECTION"]

MODELS = ("encoder-8x128", "encoder-2x32")
ENGINES = ("onward", "products", "torch-fused")
ROUNDS = 5


def measure(settings: Settings) -> Cases:
    """Rounds of our steps, of the products and of torch's steps."""
    from prepare import prepare
    from products import products_of

    cases: Cases = {}
    for model in MODELS:
        if model not in settings.models:
            continue
        folder = prepare(model, settings.cache)
        tracks = compare(
            folder,
            engines=ENGINES,
            phases=["step", "gradients"],
            rounds=2 * settings.rounds_or(ROUNDS) - 1,  # forward and backward have every second round
            settings=settings,
        )
        counted = products_of(folder)
        cases[model] = {
            "products": sum(counted.values()),
            "operations": sum(product.operations * count for product, count in counted.items()),
            "engines": {engine: track.as_json() for engine, track in tracks.items()},
        }
    return cases


def render(cases: Cases) -> list[str]:
    """Times and their ratio to the products'."""
    rows = []
    for model, case in cases.items():
        alone = case["engines"]["products"]["wall"]["step"]
        speed = case["operations"] / statistics.median(alone) / 1e6
        for engine in ("onward", "torch-fused"):
            wall = case["engines"][engine]["wall"]
            rows.append(
                [
                    f"{model}, {engine}",
                    f"{milliseconds(statistics.median(alone))} ({speed:.0f} GFLOP/s)",
                    milliseconds(statistics.median(wall["gradients"])),
                    str(ratio_of_rounds(wall["gradients"], alone[::2])),
                    milliseconds(statistics.median(wall["step"])),
                    str(ratio_of_rounds(wall["step"], alone)),
                ]
            )
    return [
        paragraph(
            "All matrix products of a step (forward, and two for the gradients of each) in a graph of nothing else, "
            "on the stock runtime with as many threads. No engine on this runtime can be below 1."
        ),
        "",
        *table(
            [
                "model, engine",
                "products alone, ms",
                "forward and backward, ms",
                "to products",
                "whole step, ms",
                "to products",
            ],
            rows,
        ),
    ]


SECTION = Section("limit", "The limit: matrix products alone", measure, render)
