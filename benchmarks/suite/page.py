"""The page and its picture, made of stored results only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from suite.figures import Spread, paragraph, ratio_of_rounds
from suite.plot import ratio_plot
from suite.settings import ENGINES, HERE
from suite.steps import by_model

if TYPE_CHECKING:
    from suite.section import Section

__all__ = ["PICTURE", "RESULTS", "page", "picture"]

PICTURE, RESULTS = "assets/benchmarks.svg", "benchmarks.json"
OTHERS = HERE / "other_results.md"
LEGEND = {
    "onward": "this library on the stock `onnxruntime`",
    "torch-fused": "PyTorch eager with its fused AdamW",
    "torch": "PyTorch eager with AdamW as it is by default",
    "torch-compile": "`torch.compile` with the fused AdamW",
    "ort-training": "`onnxruntime-training` 1.19.2, the last one, in an environment of its own",
}


def page(results: dict[str, Any], sections: list[Section]) -> str:
    """The whole page; a section without results is left out."""
    stored = [section for section in sections if results.get(section.name, {}).get("cases")]
    if not stored:
        return "# Results\n\nNone were run yet: `make bench`.\n"
    first = results[stored[0].name]["about"]
    lines = ["# Results", "", *_opening(first), ""]
    if "steps" in results:
        lines += [f"![Time of a whole training step, Onward divided by each peer]({PICTURE})", ""]
    for section in stored:
        found = results[section.name]
        lines += [f"## {section.title}", ""]
        if found["about"] != first:
            lines += [f"This section was run on {_machine(found['about'])}.", ""]
        lines += [*section.render(found["cases"]), ""]
    # what scripts print that run elsewhere (a GPU, a browser) or for long is kept by hand
    lines += [OTHERS.read_text(encoding="utf-8")]
    return "\n".join(lines).rstrip() + "\n"


def picture(results: dict[str, Any]) -> str:
    """The ratios of whole steps, drawn."""
    ratios: dict[str, dict[str, Spread]] = {}
    for model, tracks in by_model(results.get("steps", {}).get("cases", {})).items():
        ours = tracks.get("onward", {}).get("wall", {}).get("step", [])
        for peer in ENGINES[1:]:
            found = ratio_of_rounds(ours, tracks.get(peer, {}).get("wall", {}).get("step", []))
            if found:
                ratios.setdefault(model, {})[peer] = found
    return ratio_plot(ratios)


def _opening(about: dict[str, Any]) -> list[str]:
    return [
        paragraph(
            f"Written by `make bench`, on {_machine(about)}. Do not edit: `python benchmarks/bench.py steps --write` "
            f"and the like run a part again, and the page is made of [all figures]({RESULTS})."
        ),
        "",
        paragraph(
            "Every engine has a process of its own with the same number of threads. They take short turns, in an "
            "order that turns around with every round, with a pause before each turn in which the threads of the "
            "engine before stop spinning. Times of steps are medians of rounds in milliseconds. A "
            "ratio, below a peer's time, is the median of each round's own, "
            "ours divided by theirs, with the quartiles of the rounds behind it: below 1, Onward is faster, and "
            "quartiles on both sides of 1 mean that it can't be told."
        ),
        "",
        *(f"- **{engine}**: {what}" for engine, what in LEGEND.items()),
    ]


def _machine(about: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    return (
        f"{about['processor']}, {about['cores']} cores, {about['system']}, {about['threads']} threads for each engine "
        f"(Python {about['python']}, {versions})"
    )
