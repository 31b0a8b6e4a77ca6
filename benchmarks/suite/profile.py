"""Which operators take the time of forward and backward, by onnxruntime's own profiler."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from suite.figures import milliseconds, paragraph, table
from suite.section import Cases, Section

if TYPE_CHECKING:
    from suite.settings import Settings

__all__ = ["SECTION", "by_operator"]

ROUNDS = 15
SHOWN = 8
_END = "_kernel_time"
_GROUPS = {
    "matrix products": ("Gemm", "FusedGemm", "MatMul", "FusedMatMul"),
    "convolutions": ("Conv", "FusedConv", "ConvTranspose"),
}


def measure(settings: Settings) -> Cases:
    """Steps of each model in this process, with the profiler on."""
    from prepare import prepare

    rounds = settings.rounds_or(ROUNDS)
    return {
        model: _profile(prepare(model, settings.cache), threads=settings.threads, rounds=rounds)
        for model in settings.models
    }


def _profile(folder: Path, *, threads: int, rounds: int) -> dict[str, list[float]]:
    import numpy as np
    import onnxruntime as ort

    from onward.api import CheckpointState, Module

    with tempfile.TemporaryDirectory() as name, np.load(folder / "inputs.npz") as file:
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        options.enable_mem_pattern = False  # as Onward has it where it is given no options
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(name) / "profile")
        state = CheckpointState.load_checkpoint(folder / "onward" / "checkpoint")
        module = Module(folder / "onward" / "training_model.onnx", state, session_options=options)
        inputs = [file[key] for key in file.files]
        for _ in range(rounds):
            module(*inputs)
            module.lazy_reset_grad()
        module.step.sessions()[0].end_profiling()
        (profile,) = Path(name).glob("profile*.json")
        return by_operator(json.loads(profile.read_text(encoding="utf-8")), rounds)


def by_operator(events: list[dict], rounds: int) -> dict[str, list[float]]:
    """[milliseconds of a step, nodes] for each operator, the median of rounds for each node.

    What runs inside of a loop is counted by itself, and the loop without it.
    """
    runs = [e for e in events if e.get("cat") == "Node" and e["name"].endswith(_END)]
    durations: dict[tuple[str, str], list[float]] = defaultdict(list)
    around: list[tuple[float, tuple[str, str]]] = []
    for event in sorted(runs, key=lambda e: (e["ts"], -e["dur"])):
        while around and around[-1][0] <= event["ts"]:
            around.pop()
        key = (event["args"]["op_name"], event["name"])
        if around:
            durations[around[-1][1]][-1] -= event["dur"]
        durations[key].append(event["dur"])
        around.append((event["ts"] + event["dur"], key))
    found: dict[str, list[float]] = {}
    for (operator, _), times in durations.items():
        total = found.setdefault(operator, [0.0, 0])
        each = len(times) / rounds
        total[0] += statistics.median(times) * each / 1e3
        total[1] += each
    return {operator: [round(ms, 4), round(count)] for operator, (ms, count) in found.items()}


def render(cases: Cases) -> list[str]:
    """A row for each model: groups and single operators, the longest first."""
    rows = []
    for model, operators in cases.items():
        whole = sum(ms for ms, _ in operators.values())
        parts = dict(operators)
        grouped = {}
        for group, names in _GROUPS.items():
            members = [parts.pop(name) for name in names if name in parts]
            if members:
                grouped[group] = [sum(m[0] for m in members), sum(m[1] for m in members)]
        first = sorted({**grouped, **parts}.items(), key=lambda item: -item[1][0])
        shown = [f"{name} {ms / whole:.0%} ({count})" for name, (ms, count) in first[:SHOWN]]
        rest = sum(ms for _, (ms, _) in first[SHOWN:])
        shown += [f"others {rest / whole:.0%} ({sum(count for _, (_, count) in first[SHOWN:])})"]
        rows.append(
            [model, milliseconds(whole), str(sum(c for _, c in operators.values())), ", ".join(shown)]
        )
    return [
        paragraph(
            "Forward and backward with the runtime's profiler on, which adds some 4 µs to each node: small "
            "networks and loops look larger than they are. Shares of time, and in brackets how many nodes run in "
            "a step."
        ),
        "",
        *table(["model", "ms", "nodes", "operators"], rows),
    ]


SECTION = Section("profile", "Where the time of a step goes", measure, render)
