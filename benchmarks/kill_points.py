"""Every command that writes, killed at every event of the file system: the old result or the new one, whole.

    python benchmarks/kill_points.py                      all commands, all events
    python benchmarks/kill_points.py --only deploy        commands whose name holds this pattern
    python benchmarks/kill_points.py --every 1            disks that fail at each event, not at each tenth
    python benchmarks/kill_points.py --halfway            states in the middle of a commit alone, and no failing disks
    python benchmarks/kill_points.py --few                a state of each quick command, as the tests do

A command replaces the result of an earlier one. An event is a file created, emptied, copied, flushed, renamed or
removed inside of the folder. A process that is killed there leaves what is on the disk before it: one run looks at
the folder before every event, and each state that it has not seen is judged. States that differ in nothing but what is
half written aside, before anything is committed, are one. Forks that end at an event show that a look and a kill leave
the same; other forks find the disk full, or read-only, from an event on.

Judged is: what stock onnxruntime reads, and what `onward inspect` reads, is the old result or the new one; the same
command then succeeds, gives the new one, and leaves no other file. `tests/cli/test_kill_points.py` runs a few cases.
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
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(path) for path in (_TESTS,) if str(path) not in sys.path]

import language_model  # noqa: E402
import numpy as np  # noqa: E402
import onnx  # noqa: E402
import onnxruntime  # noqa: E402
import pytest  # noqa: E402
import ready_made  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

import onward  # noqa: E402
from cli.newcomer import make_data, make_model  # noqa: E402  # pyright: ignore[reportMissingImports]
from cli.npm import write_packages  # noqa: E402  # pyright: ignore[reportMissingImports]
from cli.test_finetune import published  # noqa: E402  # pyright: ignore[reportMissingImports]
from file_events import Events  # noqa: E402  # pyright: ignore[reportMissingImports]

FAILURES = ["full disk", "read-only"]
# Files whose bytes tell when they were written, or how long it took.
_RANDOM = re.compile(rb"(?<=\.onward-)[0-9a-f]{16}|(?<=\.)[0-9a-f]{16}(?=\.onward-tmp)")
_CHANGING = ("run.json", "log.txt", "history.json", "report.html", ".holder")


@dataclasses.dataclass(frozen=True)
class Case:
    """A command, or a call of `CALLS`, with {n} where its two versions differ; it writes into `out`."""

    line: str
    # what `onward inspect` reads, or a call that reads; None where it reads nothing of the kind
    read: str | None = None
    # a model that stock onnxruntime opens, before anything of ours has
    model: str | None = None
    # whether the short campaign takes it too
    is_quick: bool = False
    # where the old result is of another command
    before: str | None = None
    # it replaces nothing: there is no old result
    is_new: bool = False


CASES = {
    "artifacts": Case("artifacts model{n}.onnx -l cross-entropy -o out/set --overwrite", "out/set", is_quick=True),
    "portable": Case("artifacts model{n}.onnx -l cross-entropy --portable -o out/set --overwrite", "out/set"),
    "deploy": Case(
        "deploy run{n} out/m.onnx --external-data --overwrite", "out/m.onnx", "out/m.onnx", is_quick=True
    ),
    "quantize": Case(
        "deploy run{n} out/m.onnx --quantize int8 --force --external-data --overwrite", "out/m.onnx", "out/m.onnx"
    ),
    "quantize, measured": Case(
        "deploy run{n} out/m.onnx --quantize int8 --keep-accuracy 50 --external-data --overwrite",
        "out/m.onnx", "out/m.onnx",
    ),
    "deploy, texts": Case("deploy reads{n} out/m.onnx --external-data --overwrite", "out/m.onnx", is_quick=True),
    "artifacts, texts": Case("artifacts words{n}/model.onnx --classes a,b -o out/set --overwrite", "out/set"),
    "artifacts with constants": Case(
        "artifacts outside{n}.onnx -l cross-entropy --lora 2 -o out/set --overwrite", "out/set", is_quick=True
    ),
    "artifacts over portable ones": Case(
        "artifacts model{n}.onnx -l cross-entropy -o out/set --overwrite", "out/set",
        before="artifacts model1.onnx -l cross-entropy --portable --nominal --ort-format -o out/set",
    ),
    "lora inject": Case("lora inject model{n}.onnx out/m.onnx --rank 2 --overwrite", "out/m.onnx", "out/m.onnx"),
    "lora merge": Case("lora merge adapted{n}.onnx out/m.onnx --overwrite", "out/m.onnx", "out/m.onnx"),
    "lora extract": Case("lora extract adapting{n}/checkpoint out/a.safetensors --overwrite"),
    "convert": Case("convert run{n}/best out/w.safetensors --overwrite", is_quick=True),
    "convert to a checkpoint": Case("convert weights{n}.safetensors out/c --overwrite", "out/c"),
    "convert to a state": Case("convert run{n}/best out/s.bin --into portable{n}/state.bin --overwrite", "out/s.bin"),
    "web": Case("web artifacts{n} out/site --packages node_modules", is_quick=True),
    "answers": Case("infer model{n}.onnx -d data.npz --map x=x -o out/answers.csv --overwrite"),
    "report": Case("inspect model{n}.onnx --html out/page.html --overwrite"),
    "mobile": Case("mobile portable{n} -o out/app", is_new=True),
    "adapters": Case("save_peft {n}", "load_peft 0"),
    "from_torch": Case("from_torch {n}", "out/m.onnx", "out/m.onnx"),
    "export": Case("export nets:build{n} -o out/m.onnx --overwrite", "out/m.onnx", "out/m.onnx"),
    "finetune": Case(
        "finetune model{n}.onnx -d data.csv --label label -e 1 --seed {n} -o out/m.onnx --overwrite",
        "out/m.onnx", "out/m.onnx",
    ),
    "finetune a folder": Case(
        "finetune words{n} -d texts.csv --label label -e 1 --seed {n} -o out/m --overwrite",
        "out/m",
    ),
    "finetune a language model": Case(
        "finetune talks{n} --lora --data chat.jsonl --rank 2 -e 1 --no-merge -o out/m --overwrite", "out/m"
    ),
    "train, texts": Case("train reading{n} -d texts.csv --label label -e 1 -o out/run --overwrite"),
    "train": Case("train artifacts{n} -d data.npz -e 2 --hold-out 0.25 -o out/run --overwrite"),
}  # fmt: skip


def write_peft(number: int) -> None:
    """Adapters as peft reads them: settings and tensors belong together."""
    from onward.lora import LoRA, save_peft

    rng, name = np.random.default_rng(number), "base.layer.weight"
    values = {f"{name}.lora_a": rng.normal(size=(number, 4)), f"{name}.lora_b": rng.normal(size=(3, number))}
    save_peft(values, LoRA(rank=number), "out/peft")


def write_torch(number: int) -> None:
    """A module of torch with its weights beside the model."""
    from onward.export import from_torch

    sys.path.insert(0, os.getcwd())
    module, inputs = getattr(importlib.import_module("nets"), f"build{number}")()
    from_torch(module, inputs, path="out/m.onnx", external_data=True)


def read_peft(number: int) -> None:
    """The adapters again: it is an error if their rank is not that of the settings."""
    from onward.lora import load_peft

    load_peft("out/peft", ["base.layer.weight"])


CALLS: dict[str, Callable[[int], object]] = {
    "save_peft": write_peft, "load_peft": read_peft, "from_torch": write_torch,
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


def call(
    line: str,
    number: int = 10**9,
    failure: str = "exit",
    folder: Path | None = None,
    look: Callable[[int, str], object] | None = None,
) -> Ended:
    """Run a command of which one event inside of a folder fails; without a folder none does."""

    def work() -> dict[str, Any]:
        from onward.cli.app import app

        with pytest.MonkeyPatch.context() as patch:
            watched = Events(patch, number, failure, inside=folder, look=look) if folder else None
            words = line.split()
            if words[0] in CALLS:
                code, said = 0, ""
                try:
                    CALLS[words[0]](int(words[1]))
                except (onward.OnwardError, OSError) as error:
                    code, said = 1, str(error)
            else:
                result = CliRunner().invoke(app, words)
                code, said = result.exit_code, result.stderr
                if code not in (0, 1, 2) or "Traceback" in said:
                    said = f"Traceback of {result.exception!r}: {said}"
        return {"exit_code": code, "stderr": said, "events": watched.names if watched else []}

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
        texts = [f"w{n % 30} w{n * 7 % 30},{'ab'[n % 2]}" for n in range(24)]
        Path("texts.csv").write_text("\n".join(["text,label", *texts, ""]), "utf-8")
        write_packages(Path("node_modules"))
        said = [{"role": "user", "content": "w4"}, {"role": "assistant", "content": "w5"}]
        Path("chat.jsonl").write_text((json.dumps({"messages": said}) + "\n") * 6, "utf-8")
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
            must(f"artifacts model{n}.onnx -l cross-entropy --portable -o portable{n}")
            onnx.save(model, f"outside{n}.onnx", save_as_external_data=True, location=f"outside{n}.data")
            must(f"convert run{n}/best weights{n}.safetensors")
            write_reader(Path(f"words{n}"), n)
            must(f"artifacts words{n}/model.onnx --classes a,b -o reading{n}")
            write_language_model(Path(f"talks{n}"), n)
            must(f"train reading{n} -d texts.csv --label label -e 1 -o reads{n}")


def write_language_model(folder: Path, number: int) -> None:
    """A decoder of another vocabulary for each number, with a template and settings beside it."""
    sizes = {"vocab_size": 30 + 2 * number, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
             "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}  # fmt: skip
    ready_made.write_base(folder, sizes, language_model.words(sizes["vocab_size"]), seed=number)
    template = "{% for message in messages %}{{ message.content }} " + "w9 " * number + "{% endfor %}"
    (folder / "chat_template.jinja").write_text(template, "utf-8")
    if number == 1:  # what the next base has not
        (folder / "generation_config.json").write_text('{"max_new_tokens": 3}', "utf-8")


def write_reader(folder: Path, number: int) -> None:
    """A classifier of texts with its tokenizer; of another number both are others, and belong together."""
    folder.mkdir()
    model, rng = published("text"), np.random.default_rng(number)
    for weight in model.graph.initializer:
        if weight.name == "w":
            array = rng.normal(0, 0.1, tuple(weight.dims)).astype(np.float32)
            weight.CopyFrom(onnx.numpy_helper.from_array(array, weight.name))
    onnx.save(model, folder / "model.onnx")
    words = ["[UNK]", "[PAD]", *(f"w{(word + number) % 30}" for word in range(30))]
    reader = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    reader.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    reader.save(str(folder / "tokenizer.json"))


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


def key_of(folder: Path) -> tuple[object, ...]:
    """What tells one state of a folder from another, whatever random names writers have in it."""
    hidden, is_committed = [], False
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not name.startswith(".") and "/." not in name:
            continue
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        if path.name == ".onward-commit":
            is_committed |= bool(content)
            content = _RANDOM.sub(b"#", re.sub(rb"^[0-9a-f]{64} ", b"", content, flags=re.MULTILINE))
        hidden.append((_RANDOM.sub(b"#", name.encode()).decode(), path.is_dir(), content))
    if not is_committed:
        # what is aside is swept as a whole: which of its folders are there is all that matters
        hidden = [(name, is_folder, b"") for name, is_folder, _ in hidden if "/files/" not in name]
    listed = [(name, is_folder, hashlib.sha256(content).hexdigest()) for name, is_folder, content in hidden]
    return tuple(sorted(visible(digests(folder)).items())), tuple(sorted(listed))


class Witness:
    """Keeps a copy of a folder before each event that finds it in a state which was not seen before."""

    def __init__(self, folder: Path, states: Path) -> None:
        self._folder, self._states = folder, states
        self._seen: set[tuple[object, ...]] = set()

    def __call__(self, number: int, name: str) -> None:
        key = key_of(self._folder)
        if key not in self._seen:
            self._seen.add(key)
            shutil.copytree(self._folder, self._states / f"{number} ({name})", symlinks=True)


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

    def run(self, name: str, *, few: bool, every: int, halfway_only: bool = False) -> Iterator[str]:
        """Problems of one command; yields "" for each case without one."""
        case, out = CASES[name], self.world / "out"
        lines = [case.before or case.line.format(n=1), case.line.format(n=2)]
        with contextlib.chdir(self.world):
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir()
            must(lines[1])
            fresh = set(visible(digests(out)))
            shutil.rmtree(out)
            out.mkdir()
            if not case.is_new:
                must(lines[0])
            old = visible(digests(out))
            answers = {infer(Path(case.model))} if case.model else set()
            for folder in ("old", "states"):
                shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(out, "old", symlinks=True)
            whole = call(lines[1], folder=out, look=Witness(out, self.world / "states"))
            assert whole.exit_code == 0, whole.stderr
            new = digests(out)
            answers |= {infer(Path(case.model))} if case.model else set()
            assert old != visible(new) or name == "train", f"{name}: both versions are equal"

            if older := set(visible(new)) - fresh:
                yield f"{name}: files of the old result stay beside the new one: {sorted(older)}"

            def judge(label: str, ended: Ended, failure: str) -> str:
                problems = self._judge(case, lines[1], ended, failure, old, new, answers)
                return f"{name}, {label}: {'; '.join(problems)}" if problems else ""

            states = sorted(Path("states").iterdir(), key=lambda path: int(path.name.partition(" ")[0]))
            halfway = [state for state in states if visible(digests(state)) not in (old, visible(new))]
            for state in [*halfway, states[-1]][:1] if few else halfway if halfway_only else states:
                self._put_back(state)
                yield judge(f"killed before event {state.name} of {len(whole.events)}", Ended(9), "exit")
            if halfway_only:
                return
            # the states that were judged are those that a kill leaves
            events = after_first_commit(whole.events)
            keys = {key_of(state) for state in states}
            for number in [] if few else [*events, len(whole.events)]:
                self._put_back(Path("old"))
                ended = call(lines[1], number, "exit", out)
                is_known = ended.exit_code == 9 and key_of(out) in keys
                yield "" if is_known else f"{name}: a kill at event {number} leaves a state that was not seen"
            for failure in FAILURES:
                self._put_back(Path("old"))
                events = call(lines[1], 10**9, failure, out).events
                for number in after_first_commit(events) if few else range(1, len(events) + 1, every):
                    self._put_back(Path("old"))
                    ended = call(lines[1], number, failure, out)
                    yield judge(f"{failure} from event {number} of {len(events)} on", ended, failure)
                if few:
                    return

    def _put_back(self, state: Path) -> None:
        shutil.rmtree(self.world / "out")
        shutil.copytree(state, self.world / "out", symlinks=True)

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
        reader = case.read and (case.read if case.read.split()[0] in CALLS else f"inspect {case.read}")
        if reader and (result := call(reader)).exit_code:
            problems.append(f"{reader}: {result.stderr.strip()[:200]}")
        result = visible(digests(Path("out")))
        # a run is written bit by bit: what counts is that it goes on
        if line.startswith("train "):
            problems += self._go_on(line)
        elif result not in (old, visible(new)):
            changed = sorted(set(result.items()) ^ set(old.items()))
            problems.append(f"neither the old files nor the new: {[name for name, _ in changed]}")
        again = call(line)
        if case.is_new and result == visible(new):
            if again.exit_code != 1:
                problems.append(f"again: it replaced what was there, code {again.exit_code}")
        elif again.exit_code:
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


def after_first_commit(events: Sequence[str]) -> list[int]:
    """The event after the first that changed the result: there sets that are not written as one are mixed."""
    commits = ("replace", "rename", "exchange", "ftruncate")
    first = next(number for number, name in enumerate(events, 1) if name in commits)
    return [min(first + 1, len(events))]


def main(arguments: list[str] | None = None) -> int:
    """Run the chosen cases; print problems and how many cases there were."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--halfway", action="store_true", help="states in the middle of a commit alone")
    parser.add_argument("--few", action="store_true", help="of quick commands the last state")
    options = parser.parse_args(arguments)
    problems = count = 0
    names = [
        name for name in CASES if re.search(options.only, name) and (CASES[name].is_quick or not options.few)
    ]
    with tempfile.TemporaryDirectory() as folder:
        import_everything()
        build_world(Path(folder))
        campaign = Campaign(Path(folder).resolve())
        for name in names:
            before = count, problems
            for problem in campaign.run(
                name, few=options.few, every=options.every, halfway_only=options.halfway
            ):
                count += 1
                problems += bool(problem)
                if problem:
                    print(problem, flush=True)
            print(f"{name}: {count - before[0]} cases, {problems - before[1]} problems", flush=True)
    print(f"{count} cases, {problems} problems")
    return int(problems > 0)


if __name__ == "__main__":
    sys.exit(main())
