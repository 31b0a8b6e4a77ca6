"""Onward beside PyTorch and the runtime that it replaces, on the same models and the same machine.

Prints tables in Markdown; `--write` puts the cases that were run into docs/benchmarks.json, and makes
docs/benchmarks.md and its picture from all that is stored there.

    python benchmarks/bench.py --write                    # everything: about twenty minutes
    python benchmarks/bench.py mlp resnet --rounds 3      # training steps of some models
    python benchmarks/bench.py checkpoint generation      # some sections
    python benchmarks/bench.py start mlp --engines onward torch-fused
    python benchmarks/bench.py --render                   # the page again, from what is stored
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from suite import (
    checkpoints,
    costs,
    generation,
    graphs,
    inference,
    limit,
    memory,
    profile,
    quiet,
    results,
    start,
    steps,
)
from suite.page import PICTURE, RESULTS, page, picture
from suite.settings import CACHE, ENGINES, HERE, MODELS, Settings

SECTIONS = [
    module.SECTION
    for module in (steps, limit, profile, start, memory, inference, generation, graphs, checkpoints, costs)
]


def arguments_of(line: list[str] | None = None) -> argparse.Namespace:
    """The command line; `sections` and `models` are what its names mean."""
    names = [section.name for section in SECTIONS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="*", metavar="section|model", help=", ".join([*names, *MODELS]))
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--rounds", type=int, help="instead of each section's own number")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="store the results and write the page")
    parser.add_argument(
        "--render", action="store_true", help="write the page from what is stored, run nothing"
    )
    parser.add_argument("--cache", type=Path, default=CACHE, help="where models are kept for the next run")
    parser.add_argument("--docs", type=Path, default=HERE.parent / "docs", help="where the page is")
    arguments = parser.parse_args(line)
    unknown = [name for name in arguments.what if name not in names and name not in MODELS]
    if unknown:
        parser.error(f"no section or model is called {', '.join(unknown)}: {', '.join([*names, *MODELS])}")
    arguments.models = [name for name in arguments.what if name in MODELS]
    arguments.sections = [name for name in arguments.what if name in names]
    if not arguments.sections:
        arguments.sections = ["steps"] if arguments.models else names
    return arguments


def write(stored: dict, docs: Path) -> None:
    """Write the results, the page and the picture."""
    (docs / PICTURE).parent.mkdir(parents=True, exist_ok=True)
    results.save(docs / RESULTS, stored)
    stored = results.load(docs / RESULTS)  # rounded: the page says what the file does
    (docs / PICTURE).write_text(picture(stored), encoding="utf-8")
    (docs / "benchmarks.md").write_text(page(stored, SECTIONS), encoding="utf-8")


def main(line: list[str] | None = None) -> None:
    arguments = arguments_of(line)
    stored = results.load(arguments.docs / RESULTS)
    if arguments.render:
        write(stored, arguments.docs)
        return
    sys.path.insert(0, str(HERE / "step"))
    settings = Settings(
        models=tuple(arguments.models or MODELS),
        engines=tuple(arguments.engines),
        cache=arguments.cache,
        threads=arguments.threads,
        rounds=arguments.rounds,
    )
    for section in SECTIONS:
        if section.name not in arguments.sections:
            continue
        print(f"{section.name} … {quiet.warning(quiet.busy_share())}", file=sys.stderr, flush=True)
        begun = time.perf_counter()
        cases = section.measure(settings)
        print(f"## {section.title}\n", *section.render(cases), "", sep="\n", flush=True)
        print(f"{section.name}: {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
        stored = results.merge(stored, section.name, cases=cases, about=results.about(settings))
        if arguments.write:  # after each: a run that is broken off leaves what it has done
            write(stored, arguments.docs)


if __name__ == "__main__":
    main()
