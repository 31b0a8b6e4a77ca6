"""Training steps side by side: Onward, PyTorch and the runtime that Onward replaces, on the same models.

Every engine runs in a process of its own; rounds are interleaved, so that a busy moment of the machine hits
all of them. Prints a table of medians and ratios, and writes it to docs/benchmarks.md with `--write`.

    python benchmarks/bench.py                      # everything
    python benchmarks/bench.py mlp resnet --rounds 3
    python benchmarks/bench.py --engines onward torch-fused
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import venv
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "step"))
CACHE = HERE / ".cache"
PEER = HERE / ".envs" / "ort-training"
PEER_PACKAGES = ["onnxruntime-training-cpu==1.19.2", "numpy<2", "onnx==1.16.2", "torch==2.13.0"]
MODELS = ("mlp", "encoder-8x128", "encoder-2x32", "decoder", "resnet", "mobilenet", "lstm")
ENGINES = ("onward", "torch-fused", "torch", "ort-training")
PHASES = ("step", "gradients", "optimizer", "eval")


@dataclasses.dataclass
class Result:
    """What one engine did on one model; no times where it could not run it."""

    times: dict[str, list[float]]
    peak_mb: float = 0.0
    cold_seconds: float = 0.0
    problem: str = ""

    def median(self, phase: str) -> float | None:
        return statistics.median(self.times[phase]) if self.times.get(phase) else None


class Worker:
    """An engine in its own process, waiting for commands."""

    def __init__(self, engine: str, folder: Path, threads: int) -> None:
        python = peer_python() if engine == "ort-training" else Path(sys.executable)
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
        started = time.perf_counter()
        self._process = subprocess.Popen(
            [str(python), str(HERE / "step" / "worker.py"), engine, str(folder), "--threads", str(threads)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        self.ready = self._read() is not None
        self.cold_seconds = time.perf_counter() - started
        self.problem = ""
        if not self.ready:
            assert self._process.stderr is not None
            lines = self._process.stderr.read().strip().splitlines()
            self.problem = lines[-1][:160] if lines else "it ended without a word"

    def run(self, phase: str, rounds: int) -> dict:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{phase} {rounds}\n")
        self._process.stdin.flush()
        answer = self._read()
        if answer is None:
            raise RuntimeError(f"the worker ended while running {phase}")
        return answer

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> dict | None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        return None


def peer_python() -> Path:
    """The interpreter of the peer's own environment, which is made when first needed."""
    python = PEER / ("Scripts" if os.name == "nt" else "bin") / "python"
    if not (PEER / "ready").exists():
        print(f"setting up {PEER.name} …", file=sys.stderr)
        venv.create(PEER, with_pip=True, clear=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *PEER_PACKAGES], check=True)
        (PEER / "ready").touch()
    return python


def compare(
    model: str, engines: list[str], phases: list[str], rounds: int, threads: int
) -> dict[str, Result]:
    """Interleaved rounds of every engine on one model."""
    from prepare import prepare

    folder = prepare(model, CACHE)
    workers = {engine: Worker(engine, folder, threads) for engine in engines}
    results = {
        engine: Result(
            {phase: [] for phase in phases}, cold_seconds=worker.cold_seconds, problem=worker.problem
        )
        for engine, worker in workers.items()
    }
    count = 200 if model == "mlp" else 4
    alive = {engine: worker for engine, worker in workers.items() if worker.ready}
    for phase in phases:
        for worker in alive.values():
            worker.run(phase, 3)
    for _ in range(rounds):
        for phase in phases:
            for engine, worker in alive.items():
                answer = worker.run(phase, count)
                results[engine].times[phase] += answer["times"]
                results[engine].peak_mb = answer["peak_mb"]
    for worker in alive.values():
        worker.stop()
    return results


def render(table: dict[str, dict[str, Result]], engines: list[str], phases: list[str], threads: int) -> str:
    """The results in Markdown."""
    lines = [
        "# Benchmarks",
        "",
        f"Written by `python benchmarks/bench.py --write` on {platform.machine()} with {threads} threads. Times are",
        "medians in milliseconds of interleaved rounds, each engine in a process of its own; a ratio below 1 means",
        "that Onward is faster. `step` is forward, backward and AdamW.",
        "",
    ]
    for phase in phases:
        peers = [engine for engine in engines if engine != "onward"]
        head = ["model", "onward", *(cell for peer in peers for cell in (peer, "ratio"))]
        lines += [f"## {phase}", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        for model, results in table.items():
            ours = results["onward"].median(phase)
            cells = [model, _figure(ours)]
            for peer in peers:
                theirs = results[peer].median(phase)
                cells += [_figure(theirs), f"**{ours / theirs:.2f}**" if ours and theirs else "–"]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    lines += ["## Peak memory (MB) and cold start (seconds to the first step done)", ""]
    head = ["model", *(f"{engine} {what}" for engine in engines for what in ("MB", "s"))]
    lines += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for model, results in table.items():
        cells = [model]
        for engine in engines:
            found = results[engine]
            cells += ["–", "–"] if found.problem else [f"{found.peak_mb:.0f}", f"{found.cold_seconds:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    problems = [
        f"- {engine} could not run {model}: `{result.problem}`"
        for model, results in table.items()
        for engine, result in results.items()
        if result.problem
    ]
    return "\n".join([*lines, "", *problems]).rstrip() + "\n"


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}" if value < 1 else f"{value:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--engines", nargs="+", default=list(ENGINES))
    parser.add_argument("--phases", nargs="+", default=list(PHASES))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    arguments = parser.parse_args()
    table: dict[str, dict[str, Result]] = {}
    for model in arguments.models:
        results = compare(model, arguments.engines, arguments.phases, arguments.rounds, arguments.threads)
        table[model] = results
        shown = {e: _figure(r.median("step")) if not r.problem else "failed" for e, r in results.items()}
        print(model, shown, flush=True)
    page = render(table, arguments.engines, arguments.phases, arguments.threads)
    print(page)
    if arguments.write:
        (HERE.parent / "docs" / "benchmarks.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
