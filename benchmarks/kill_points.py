"""Every command that writes, killed at every event of the file system: the old result or the new one, whole.

    python benchmarks/kill_points.py                      all commands, all events, three failures
    python benchmarks/kill_points.py --only deploy        commands whose name holds this
    python benchmarks/kill_points.py --every 5            each fifth event
    python benchmarks/kill_points.py --few                one event of each quick command, as the tests do

A command replaces the result of an earlier one. Each case is a fork of this process that ends at one event (a file
created, flushed, renamed or removed inside of the folder), or to which the disk is full, or read-only, from that
event on. Then: what stock onnxruntime reads, and what `onward inspect` reads, is the old result or the new one;
the same command then succeeds, gives the new one, and leaves no other file. `tests/cli/test_kill_points.py` runs a
few of the cases.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import importlib
import json
import os
import pkgutil
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(path) for path in (_TESTS,) if str(path) not in sys.path]

import numpy as np  # noqa: E402
import onnx  # noqa: E402
import onnxruntime  # noqa: E402
import pytest  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

import onward  # noqa: E402
from cli.newcomer import make_data, make_model  # noqa: E402  # pyright: ignore[reportMissingImports]
from cli.npm import write_packages  # noqa: E402  # pyright: ignore[reportMissingImports]
from file_events import Events  # noqa: E402  # pyright: ignore[reportMissingImports]

FAILURES = ["exit", "full disk", "read-only"]
# Files whose bytes tell when they were written, or how long it took.
_CHANGING = ("run.json", "log.txt", "history.json", "report.html", ".holder")


@dataclasses.dataclass(frozen=True)
class Case:
    """A command with {n} where its two versions differ; it writes into `out`."""

    line: str
    # what `onward inspect` reads; None where it reads nothing of the kind
    read: str | None = None
    # a model that stock onnxruntime opens, before anything of ours has
    model: str | None = None
    # some seconds a case: the short campaign takes fewer
    is_slow: bool = False


CASES = {
    "artifacts": Case("artifacts model{n}.onnx -l cross-entropy -o out/set --overwrite", "out/set"),
    "portable": Case("artifacts model{n}.onnx -l cross-entropy --portable -o out/set --overwrite", "out/set"),
    "deploy": Case(
        "deploy run{n} out/m.onnx --external-data --overwrite", "out/m.onnx", "out/m.onnx"
    ),
    "quantize": Case(
        "deploy run{n} out/m.onnx --quantize int8 --force --external-data --overwrite", "out/m.onnx", "out/m.onnx"
    ),
    "lora merge": Case("lora merge adapted{n}.onnx out/m.onnx --overwrite", "out/m.onnx", "out/m.onnx"),
    "lora extract": Case("lora extract adapting{n}/checkpoint out/a.safetensors --overwrite"),
    "convert": Case("convert run{n}/best out/w.safetensors --overwrite"),
    "web": Case("web artifacts{n} out/site --packages node_modules"),
    "report": Case("inspect model{n}.onnx --html out/page.html --overwrite"),
    "export": Case("export nets:build{n} -o out/m.onnx --overwrite", "out/m.onnx", "out/m.onnx", is_slow=True),
    "finetune": Case(
        "finetune model{n}.onnx -d data.csv --label label -e 1 --seed {n} -o out/m.onnx --overwrite",
        "out/m.onnx", "out/m.onnx", is_slow=True,
    ),
    "train": Case("train artifacts{n} -d data.npz -e 2 --hold-out 0.25 -o out/run --overwrite", is_slow=True),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a fork ended; 9 for one that ended at an event."""

    exit_code: int
    stderr: str = ""
    events: Sequence[str] = ()
    answer: str | None = None


def fork(work: Callable[[], dict[str, Any]]) -> Ended:
    """Work in a fork: this process opens no session, whose threads forks would wait for without end."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 70
        try:
            os.close(read)
            result = work()
            with open(write, "wb") as pipe:
                pipe.write(json.dumps(result).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    with open(read, "rb") as pipe:
        content = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return Ended(**json.loads(content)) if content else Ended(code)


def call(line: str, number: int = 10**9, failure: str = "exit", folder: Path | None = None) -> Ended:
    """Run a command of which one event inside of a folder fails; without a folder none does."""

    def work() -> dict[str, Any]:
        from onward.cli.app import app

        with pytest.MonkeyPatch.context() as patch:
            watched = Events(patch, number, failure, inside=folder) if folder else None
            result = CliRunner().invoke(app, line.split())
        is_clear = result.exit_code in (0, 1, 2) and "Traceback" not in result.stderr
        said = result.stderr if is_clear else f"Traceback of {result.exception!r}: {result.stderr}"
        return {"exit_code": result.exit_code, "stderr": said, "events": watched.names if watched else []}

    return fork(work)


def must(line: str) -> None:
    """Run a command that succeeds."""
    result = call(line)
    assert result.exit_code == 0, f"{line}: {result.stderr}"


def import_everything() -> None:
    """So that a fork is a command and no more. What imports torch is left to those that need it."""
    for module in pkgutil.walk_packages(onward.__path__, "onward."):
        if module.name.split(".")[1] not in ("__main__", "distributed", "export", "federated"):
            with contextlib.suppress(ImportError):
                importlib.import_module(module.name)


def build_world(folder: Path) -> None:
    """Two versions of everything that the commands read."""
    with contextlib.chdir(folder):
        data = make_data()
        np.savez("data.npz", **data)
        rows = [
            ",".join([*map(str, x), f"kind {label}"])
            for x, label in zip(data["x"], data["labels"], strict=True)
        ]
        Path("data.csv").write_text("\n".join(["a,b,c,d,label", *rows, ""]), "utf-8")
        write_packages(Path("node_modules"))
        text = (
            "import torch\ndef build{n}():\n    torch.manual_seed({n})\n"
            "    return torch.nn.Linear(4, 3), (torch.ones(2, 4),)\n"
        )
        Path("nets.py").write_text("".join(text.format(n=n) for n in (1, 2)), "utf-8")
        for n in (1, 2):
            model, rng = make_model(), np.random.default_rng(n)
            # wide enough that int8 is smaller
            shapes = {"w1": (512, 4), "b1": (512,), "w2": (3, 512), "b2": (3,)}
            for weight in model.graph.initializer:
                array = rng.normal(0, 0.1, shapes[weight.name]).astype(np.float32)
                weight.CopyFrom(onnx.numpy_helper.from_array(array, weight.name))
            onnx.save(model, f"model{n}.onnx")
            must(f"artifacts model{n}.onnx -l cross-entropy -o artifacts{n}")
            must(f"train artifacts{n} -d data.npz -e 1 --hold-out 0.25 -o run{n}")
            must(f"lora inject model{n}.onnx adapted{n}.onnx --rank 2")
            must(f"artifacts model{n}.onnx -l cross-entropy --lora {n + 1} -o adapting{n}")


def digests(folder: Path) -> dict[str, str]:
    """The files of a result and what is in them, where that is the same each time; other names alone."""
    return {
        path.relative_to(folder).as_posix(): ""
        if path.name in _CHANGING
        else hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def visible(listed: dict[str, str]) -> dict[str, str]:
    """Without what begins with a dot: what a writer holds aside, and what the next one removes."""
    return {name: digest for name, digest in listed.items() if not name.startswith(".") and "/." not in name}


def infer(path: Path) -> str | None:
    """What stock onnxruntime answers, or why it does not; None where there is no model."""
    if not path.is_file():
        return None

    def work() -> dict[str, Any]:
        try:
            session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
            feeds = {value.name: np.full((2, 4), 0.5, np.float32) for value in session.get_inputs()}
            answer = b"".join(np.asarray(output).tobytes() for output in session.run(None, feeds)).hex()
        except Exception as error:
            answer = f"stock onnxruntime cannot read it: {str(error)[:200]}"
        return {"exit_code": 0, "answer": answer}

    return fork(work).answer


@dataclasses.dataclass
class Campaign:
    """The world, and for each case its old and new result."""

    world: Path

    def run(self, name: str, failures: list[str], choose: Callable[[list[str]], list[int]]) -> Iterator[str]:
        """Problems of one command; yields "" for each case without one."""
        case = CASES[name]
        lines = [case.line.format(n=n) for n in (1, 2)]
        with contextlib.chdir(self.world):
            shutil.rmtree("out", ignore_errors=True)
            Path("out").mkdir()
            must(lines[0])
            old = visible(digests(Path("out")))
            answers = {infer(Path(case.model))} if case.model else set()
            shutil.rmtree("old", ignore_errors=True)
            shutil.copytree("out", "old", symlinks=True)
            whole = call(lines[1], folder=self.world / "out")
            assert whole.exit_code == 0, whole.stderr
            events = list(whole.events)
            new = digests(Path("out"))
            answers |= {infer(Path(case.model))} if case.model else set()
            assert old != visible(new) or name == "train", f"{name}: both versions are equal"
            for failure in failures:
                for number in choose(events):
                    shutil.rmtree("out")
                    shutil.copytree("old", "out", symlinks=True)
                    ended = call(lines[1], number, failure, self.world / "out")
                    label = f"{name}, {failure} at event {number} of {len(events)} ({events[number - 1]})"
                    problems = self._judge(case, lines[1], ended, failure, old, new, answers)
                    yield f"{label}: {'; '.join(problems)}" if problems else ""

    def _judge(
        self,
        case: Case,
        line: str,
        ended: Ended,
        failure: str,
        old: dict[str, str],
        new: dict[str, str],
        answers: set[str | None],
    ) -> list[str]:
        code, said = ended.exit_code, ended.stderr
        problems = []
        if failure == "exit" and code != 9:
            problems.append(f"it ended with {code}: {said}")
        if failure != "exit" and (code not in (0, 1) or "Traceback" in said):
            problems.append(f"no clear error, code {code}: {said[-300:]}")
        if case.model and (answer := infer(Path(case.model))) not in answers:
            problems.append(f"neither the old model nor the new: {answer}")
        if case.read and (result := call(f"inspect {case.read}")).exit_code:
            problems.append(f"inspect: {result.stderr.strip()[:200]}")
        result = visible(digests(Path("out")))
        # a run is written bit by bit: what counts is that it goes on
        if line.startswith("train "):
            problems += self._go_on(line)
        elif result not in (old, visible(new)):
            changed = sorted(set(result.items()) ^ set(old.items()))
            problems.append(f"neither the old files nor the new: {[name for name, _ in changed]}")
        again = call(line)
        if again.exit_code:
            problems.append(f"again: {again.stderr.strip()[:200]}")
        elif (after := digests(Path("out"))) != new:
            changed = sorted(set(after.items()) ^ set(new.items()))
            problems.append(f"after the same command again: {[name for name, _ in changed]}")
        return problems

    def _go_on(self, line: str) -> list[str]:
        folder = Path("out/run")
        if not any(folder.glob("checkpoint-*")):
            return []
        result = call(f"train {folder} --resume -e 3")
        return [f"resume: {result.stderr.strip()[:200]}"] if result.exit_code else []


def after_first_commit(events: list[str]) -> list[int]:
    """The event after the first that changed the result: there sets that are not written as one are mixed."""
    commits = ("replace", "rename", "exchange", "ftruncate")
    first = next(number for number, name in enumerate(events, 1) if name in commits)
    return [min(first + 1, len(events))]


def main(arguments: list[str] | None = None) -> int:
    """Run the chosen cases; print problems and how many cases there were."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument(
        "--few", action="store_true", help="of quick commands the event after the first commit"
    )
    options = parser.parse_args(arguments)
    problems = count = 0
    names = [name for name in CASES if options.only in name and not (options.few and CASES[name].is_slow)]
    choose = (
        after_first_commit if options.few else lambda events: list(range(1, len(events) + 1, options.every))
    )
    with tempfile.TemporaryDirectory() as folder:
        import_everything()
        build_world(Path(folder))
        campaign = Campaign(Path(folder).resolve())
        for index, name in enumerate(names):
            before = count, problems
            failures = [FAILURES[index % 3], "exit"][: 1 + (index % 3 > 0)] if options.few else FAILURES
            for problem in campaign.run(name, failures, choose):
                count += 1
                problems += bool(problem)
                if problem:
                    print(problem, flush=True)
            print(f"{name}: {count - before[0]} cases, {problems - before[1]} problems", flush=True)
    print(f"{count} cases, {problems} problems")
    return int(problems > 0)


if __name__ == "__main__":
    sys.exit(main())
