"""Time of `generate_artifacts` against the number of nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from suite.figures import MISSING, paragraph, table
from suite.section import Cases, Section

if TYPE_CHECKING:
    from suite.settings import Settings

__all__ = ["SECTION"]

CHAINS, LAYERS = (500, 1_000, 2_000, 4_000), (8, 16, 32, 64, 128)
ROUNDS = 2


def measure(settings: Settings) -> Cases:
    """Each size in processes of their own, in turns."""
    from artifacts_size import chain, run, transformer

    models = {f"chain/{count}": chain(count) for count in CHAINS}
    models |= {f"transformer/{count}": transformer(count, width=32, words=100) for count in LAYERS}
    cases: Cases = {
        name: {"nodes": len(model.graph.node), "seconds": [], "processor": []}
        for name, model in models.items()
    }
    for _ in range(settings.rounds_or(ROUNDS)):
        for name, model in models.items():
            found = run(model)
            for clock in ("seconds", "processor"):
                cases[name][clock].append(found[clock])
            cases[name]["mb"] = (found["peak"] - found["before"]) / 2**20
    return cases


def render(cases: Cases) -> list[str]:
    """Time at each size, and of each further node."""
    rows, doubled = [], []
    for family, unit in (("chain", "nodes"), ("transformer", "layers")):
        points = []
        for name, case in cases.items():
            if not name.startswith(f"{family}/"):
                continue
            nodes, used = case["nodes"], min(case["processor"])
            further = f"{(used - points[-1][1]) / (nodes - points[-1][0]) * 1e3:.2f}" if points else MISSING
            points.append((nodes, used))
            rows.append(
                [
                    f"{family}, {name.partition('/')[2]} {unit}",
                    nodes,
                    f"{min(case['seconds']):.2f}",
                    f"{used:.2f}",
                    further,
                    f"{case['mb']:.0f}",
                ]
            )
        doubled.append(f"{points[-1][1] / points[-2][1]:.2f} ({family})")
    return [
        paragraph(
            "Seconds of `generate_artifacts` in a process that has its imports done, from the model's file to all "
            "files of the artifacts: a chain of products and Tanh, and transformers of many narrow layers. Linear "
            "means that a further node takes the same time at every size."
        ),
        "",
        *table(
            ["model", "nodes", "s", "processor, s", "ms for each further node", "memory, MB"],
            rows,
        ),
        "",
        f"The last doubling of nodes multiplies processor time by {' and '.join(doubled)}.",
    ]


SECTION = Section("generation", "Artifact generation", measure, render)
