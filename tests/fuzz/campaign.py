"""Every command and every public entry that reads files, with hostile files in each place where it reads one.

    python tests/fuzz/campaign.py                     everything: some thousand cases
    python tests/fuzz/campaign.py --every 40          each fortieth
    python tests/fuzz/campaign.py --few               one for each place
    python tests/fuzz/campaign.py --once              each hostile tokenizer, template, picture, sound and table once
    python tests/fuzz/campaign.py --only infer:cycle  cases whose name holds this

A case is a copy of a small world (a model, artifacts, a run, data, settings, states), one file of it replaced, and
one call in a process of its own with limits on memory and time. What must hold: it ends by itself, with an error of
ours in one line or with none; no traceback, no error of another library as it is, no control characters; inputs are
as they were; nothing half-written is left; memory and time stay within bounds.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import functools
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    sys.path[:0] = [str(here), str(here.parent)]
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import hostile_files
import language_model
import numpy as np
import onnx
import onnx.parser
import pyarrow
import pyarrow.parquet
import ready_made
from hostile_models import MODELS, NotHere, Put

from cli.newcomer import make_data, make_model
from cli.test_finetune import draw, published

MEMORY = 6 << 30  # of addresses; a process with its libraries has 1 to 2 GB of them
RESIDENT = 1500 << 20
SECONDS = 20  # of processor time, which other work on the machine does not change
PATIENCE = 240
ORDINARY = {"ValueError", "TypeError", "KeyError"}  # of arguments, where Onward itself raises them, in words


# ---- entries -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Entry:
    """A call, as a command line or a function, and the names that it may leave in the current folder."""

    name: str
    call: list[str] | Callable[[], object]
    leaves: tuple[str, ...] = ()
    largest: int | None = None  # files cannot grow beyond this: a write in the middle of one fails


def command(line: str, *leaves: str) -> Entry:
    return Entry(line.replace(" ", "_"), line.split(), leaves)


def function(call: Callable[[], object], *leaves: str) -> Entry:
    return Entry(f"{call.__name__}()", call, leaves)


def load_model_file() -> object:
    import onward

    with onward.limits.override(run_seconds=8, run_bytes=1_000_000_000):
        return onward.load("model.onnx")(np.zeros(4, np.float32))


def gradient() -> object:
    import onward

    return onward.gradient("model.onnx", cotangent="seed")


def gradient_of_bytes() -> object:
    import onward

    path = Path("model.onnx")
    whole = path.is_file() and path.stat().st_size < 1 << 24
    return onward.gradient(path.read_bytes() if whole else b"", cotangent="seed")


def check_gradient() -> object:
    import onward

    with onward.limits.override(check_seconds=8, check_bytes=10**9, run_seconds=8, run_bytes=10**9):
        return onward.check_gradient("model.onnx", {"x": np.ones((2, 4), np.float32)})


def generate_artifacts() -> object:
    from onward import artifacts

    return artifacts.generate_artifacts(
        "model.onnx", requires_grad=["w1", "w2"], loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW, artifact_directory="out",
    )  # fmt: skip


def quantize() -> object:
    from onward.export.quantize import quantize

    return quantize("model.onnx", "int8")


def apply_lora() -> object:
    from onward import lora

    return lora.apply_lora("model.onnx", lora.LoRA(rank=2))


def merge_lora() -> object:
    from onward import lora

    return lora.merge_lora("model.onnx")


def replace_head() -> object:
    import onward

    return onward.replace_head("model.onnx", classes=["a", "b"])


def for_inference() -> object:
    from onward.export import for_inference

    return for_inference("artifacts/eval_model.onnx", "artifacts/checkpoint", ["scores"], "out.onnx")


def onnxblock_base() -> object:
    from onward import onnxblock

    with onnxblock.base(onnx.load("model.onnx")):
        return onnxblock.loss.MSELoss()("scores")


def module() -> object:
    from onward.api import CheckpointState, Module, Optimizer

    state = CheckpointState.load_checkpoint("artifacts/checkpoint")
    made = Module("artifacts/training_model.onnx", state, "artifacts/eval_model.onnx")
    optimizer = Optimizer("artifacts/optimizer_model.onnx", made)
    made.train()
    made(np.zeros((2, 4), np.float32), np.zeros(2, np.int64))
    optimizer.step()
    made.lazy_reset_grad()
    made.eval()
    made(np.zeros((2, 4), np.float32), np.zeros(2, np.int64))
    made.export_model_for_inferencing("out.onnx", ["scores"])
    CheckpointState.save_checkpoint(state, "out")
    return made


def trainer() -> object:
    import onward

    return onward.Trainer("artifacts", progress=False).fit(dict(np.load("data.npz")), epochs=1)


def load_checkpoint() -> object:
    from onward import checkpoint

    return checkpoint.load("run/best")


def load_latest() -> object:
    from onward import checkpoint

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return checkpoint.load_latest("run")


def from_portable() -> object:
    from onward import checkpoint

    return checkpoint.from_portable("portable/state.bin")


def from_safetensors() -> object:
    from onward import checkpoint

    return checkpoint.from_safetensors("weights.safetensors")


def federated_update() -> object:
    from onward.federated import Update

    if not os.path.isfile("update"):
        raise FileNotFoundError("update")
    with open("update", "rb") as file:
        return Update.from_bytes(file.read(2**24))


def load_peft() -> object:
    from onward import lora

    return lora.load_peft("peft", ["a.weight"])


def load_lora() -> object:
    from onward import checkpoint, lora

    return lora.load_lora(checkpoint.load("adapting/checkpoint"), "adapters.safetensors")


def load_folder() -> object:
    import onward

    return onward.load("folder")("some text")


def generate() -> object:
    import onward

    with onward.limits.override(run_seconds=8, run_bytes=1_000_000_000):
        return onward.load("language")("w1 w2", max_new_tokens=2)


def chat() -> object:
    import onward

    with onward.limits.override(run_seconds=8, run_bytes=1_000_000_000):
        return onward.load("language")([{"role": "user", "content": "w1 w2"}], max_new_tokens=2)


def write_site() -> object:
    from onward.web import write_site

    return write_site("artifacts", "out")


COMMANDS_OF_MODELS = [
    command("check model.onnx --steps 1 --limit check_seconds=8 --limit check_bytes=1000000000"),
    command("check model.onnx --loss cross-entropy --steps 0 --json"),
    command("inspect model.onnx"),
    command("inspect model.onnx --json --all"),
    command("inspect model.onnx --html out.html", "out.html"),
    command("artifacts model.onnx --loss mse --output out", "out"),
    command("artifacts model.onnx --loss cross-entropy --lora 2 --portable --output out", "out"),
    command("artifacts model.onnx --classes 2 --output out", "out"),
    command(
        "gradcheck model.onnx --limit check_seconds=8 --limit check_bytes=1000000000 --limit run_seconds=8"
    ),
    command("infer model.onnx -d data.npz --limit run_seconds=8 --limit run_bytes=1000000000"),
    command(
        "infer model.onnx -d data.csv --output out.csv --limit run_seconds=8 --limit run_bytes=1000000000",
        "out.csv",
    ),
    command("lora inject model.onnx out.onnx --rank 2", "out.onnx", "out.onnx.data"),
    command("lora merge model.onnx out.onnx", "out.onnx", "out.onnx.data"),
    command("finetune model.onnx -d data.csv -o out -e 1", "out"),
    command("convert model.onnx out.safetensors", "out.safetensors"),
    command("bench model.onnx --steps 1"),
    command("deploy model.onnx out.onnx", "out.onnx"),
    command("web model.onnx out", "out"),
]
FUNCTIONS_OF_MODELS = [
    function(load_model_file), function(gradient), function(gradient_of_bytes), function(check_gradient),
    function(generate_artifacts, "out"), function(quantize), function(apply_lora),
    function(merge_lora), function(replace_head),
]  # fmt: skip
OF_ARTIFACTS = [
    command("train artifacts -d data.npz -e 1 -o out", "out"),
    command("evaluate artifacts -d data.npz"),
    command("infer artifacts -d data.npz --limit run_seconds=8 --limit run_bytes=1000000000"),
    command("deploy artifacts out.onnx", "out.onnx"),
    command("inspect artifacts"),
    command("inspect artifacts --json"),
    command("bench artifacts --steps 1 --warmup 0"),
    command("convert artifacts out", "out"),
    function(module, "out", "out.onnx"),
    function(for_inference, "out.onnx"),
    function(trainer),
]
OF_RUNS = [
    command("train run --resume -e 2", "run"),
    command("evaluate run -d data.npz"),
    command("deploy run out.onnx --quantize int8", "out.onnx"),
    command("inspect run"),
    command("inspect run --html out.html", "out.html"),
    command("infer run -d data.npz --output out.npz", "out.npz"),
    command("web run out", "out"),
]
OF_DATA = "train artifacts -d {0} -e 1 -o out", "evaluate run -d {0}", "infer trained.onnx -d {0} -o out.csv"


def of_data(file: str) -> list[Entry]:
    lines = [*OF_DATA, "finetune model.onnx -d {0} -o out -e 1", "deploy run out.onnx -d {0}"]
    return [command(line.format(file), "out", "out.csv", "out.onnx") for line in lines]


def writers() -> Iterator[Entry]:
    """All that writes, where files cannot grow beyond so many bytes: as on a disk that is full."""
    lines = [
        "artifacts model.onnx --loss cross-entropy -o out", "artifacts model.onnx --loss mse --portable -o out",
        "train artifacts -d data.npz -e 1 -o out --tensorboard out/events", "train run --resume -e 3",
        "finetune model.onnx -d data.csv -o out -e 1", "deploy run out.onnx", "deploy run out.onnx --external-data",
        "deploy run out.onnx --quantize int8", "infer trained.onnx -d data.npz -o out.npz",
        "infer trained.onnx -d data.npz -o out.csv", "inspect model.onnx --html out.html",
        "convert run/best out.safetensors", "convert weights.safetensors out", "convert artifacts out",
        "convert run/best out.bin --into portable/state.bin", "lora inject model.onnx out.onnx",
        "lora extract adapting/checkpoint out.safetensors",
    ]  # fmt: skip
    for line in lines:
        for largest in (0, 100, 500, 1000, 2000, 4000, 8000):
            made = command(line, "out", "run")
            yield dataclasses.replace(made, name=f"{made.name}(files of {largest} bytes)", largest=largest)


# a job of several processes takes seconds to start
SLOW_MODELS = [
    "fifo",
    "cut-at-250",
    "cycle",
    "unknown-operator",
    "onward.trainable-is",
    "input-named-control",
]
SLOW_ARRAYS = ["objects", "labels-too-large", "not-finite", "fewer", "bomb"]


def _chosen(hostile: dict[str, Put], names: list[str]) -> dict[str, Put]:
    return {name: put for name, put in hostile.items() if name.startswith(tuple(names))}


def places() -> dict[str, tuple[dict[str, Put], list[Entry]]]:
    """Each place of the world that is read: what may lie there, and who reads it.

    What stands in brackets behind a path only tells two entries apart.
    """
    anything, documents = hostile_files.anything(), hostile_files.documents()
    artifact = {name: put for name, put in MODELS.items() if not name.startswith(("views", "conv-", "chain"))}
    cast = hostile_files
    of_checkpoints = [
        command("inspect run/best"), command("convert run/best out.safetensors", "out.safetensors"),
        command("lora extract run/best out.safetensors", "out.safetensors"), function(load_checkpoint),
        function(load_latest), *OF_RUNS,
    ]  # fmt: skip
    of_settings = [
        command(f"{line} --config onward.toml", "out", "run")
        for line in ("train artifacts -d data.npz -e 1 -o out", "check model.onnx --steps 0", "doctor --json",
                     "artifacts model.onnx -o out", "export x:y -o out", "infer model.onnx -d data.npz",
                     "distributed artifacts -o out")
    ]  # fmt: skip
    of_language = [
        command("finetune language --lora --data chat.jsonl --output out --rank 2", "out"),
        command("infer language -t w1 --limit run_seconds=8 --limit run_bytes=1000000000"),
        command("inspect language"), function(generate), function(chat),
    ]  # fmt: skip
    of_pictures = [
        command("finetune images.onnx -d pictures -o out -e 1", "out"),
        command("artifacts images.onnx --classes pictures -o out", "out"),
        command("train classes -d pictures -e 1 -o out", "out"), command("infer sorted.onnx -d pictures"),
        command("infer sorted.onnx -d pictures/red/1.png"),
    ]  # fmt: skip
    few_models = _chosen(MODELS, [*SLOW_MODELS, "external", "cut", "onward."])
    on_ranks = [command("distributed artifacts -d data.npz -p 2 -e 1 -o out", "out")]
    return {
        "model.onnx": (MODELS, [*COMMANDS_OF_MODELS, *FUNCTIONS_OF_MODELS]),
        "artifacts/training_model.onnx": (artifact, [e for e in OF_ARTIFACTS if e.name != "convert_artifacts_out"]),
        "artifacts/eval_model.onnx": (artifact, OF_ARTIFACTS[1:]),
        "artifacts/optimizer_model.onnx": (artifact, [OF_ARTIFACTS[0], OF_ARTIFACTS[6], OF_ARTIFACTS[8]]),
        "artifacts/checkpoint": (anything, OF_ARTIFACTS),
        "run/best": (anything, of_checkpoints),
        "run/run.json": (anything | documents, OF_RUNS),
        "run/history.json": (anything | documents, OF_RUNS),
        "weights.safetensors": (
            anything,
            [command("convert weights.safetensors out", "out"), command("inspect weights.safetensors"),
             command("convert weights.safetensors out --into run/best", "out"), function(from_safetensors),
             *of_data("weights.safetensors")],
        ),
        "portable/state.bin": (
            anything,
            [command("convert portable/state.bin out", "out"), command("inspect portable/state.bin"),
             command("convert run/best out.bin --into portable/state.bin", "out.bin"), function(from_portable)],
        ),
        "portable/train_step.onnx": (
            {name: put for name, put in artifact.items() if name.startswith(("onward.", "cut", "cycle"))},
            [command("inspect portable"), command("inspect portable/train_step.onnx")],
        ),
        "data.npz": (anything | cast.arrays(), of_data("data.npz")),
        "x.npy": (anything, of_data("x=x.npy")),
        "data.csv": (anything | cast.tables(), of_data("data.csv")),
        "data.jsonl": (anything | cast.json_lines(), of_data("data.jsonl")),
        "onward.toml": (anything | cast.settings(), of_settings),
        "update": (anything, [function(federated_update)]),
        "peft/adapter_config.json": (anything | documents, [function(load_peft)]),
        "peft/adapter_model.safetensors": (anything, [function(load_peft)]),
        "adapters.safetensors": (anything, [function(load_lora)]),
        "folder/onward.json": (anything | documents, [function(load_folder), command("inspect folder"),
                                                      command("infer folder -t text")]),
        "folder/model.onnx": (MODELS, [command("infer folder -t text"), command("inspect folder")]),
        "language/model.onnx": (few_models, of_language),
        "language/model.onnx_data": (anything, of_language),
        "language/config.json": (anything | documents, of_language),
        "language/tokenizer.json": (anything | documents | cast.tokenizers(), of_language),
        "language/tokenizer_config.json": (anything | documents, of_language),
        "language/generation_config.json": (anything | documents, of_language),
        "language/chat_template.jinja": (anything | cast.templates(), [of_language[0], of_language[4]]),
        "chat.jsonl": (anything | cast.conversations(), of_language[:1]),
        "pictures/red/1.png": (anything | cast.pictures(), of_pictures),
        "sound.wav": (anything | cast.sounds(), [command("infer heard.onnx -d sound.wav")]),
        "data.parquet": (anything, of_data("data.parquet")),
        "full-disk": ({"": lambda path: None}, list(writers())),
        "artifacts/training_model.onnx (ranks)": (_chosen(MODELS, SLOW_MODELS), on_ranks),
        "data.npz (ranks)": (_chosen(cast.arrays(), SLOW_ARRAYS), on_ranks),
        "folder/tokenizer.json": (anything | documents | cast.tokenizers(),
                                  [function(load_folder), command("infer folder -t text")]),
    }  # fmt: skip


# ---- the world ---------------------------------------------------------------------------------------------


def build_world(folder: Path) -> None:
    """A folder with a good file in every place."""
    from typer.testing import CliRunner

    from onward.cli.app import app
    from onward.federated import Update

    def run(line: str) -> None:
        result = CliRunner().invoke(app, line.split())
        assert result.exit_code == 0, f"{line}: {result.output} {result.exception}"

    with contextlib.chdir(folder):
        data = make_data()
        onnx.save(make_model(), "model.onnx")
        np.savez("data.npz", **data)
        np.save("x.npy", data["x"])
        rows = [dict(zip("abcd", map(float, x)), label="xyz"[y]) for x, y in zip(data["x"], data["labels"])]
        Path("data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        lines = [",".join(map(str, row.values())) for row in rows]
        Path("data.csv").write_text("\n".join(["a,b,c,d,label", *lines, ""]), "utf-8")
        Path("onward.toml").write_text("[train]\nepochs = 1\n", "utf-8")
        run("artifacts model.onnx --loss cross-entropy")
        run("artifacts model.onnx --loss cross-entropy --portable -o portable")
        run("train artifacts -d data.npz -e 1 --hold-out 0.25")
        run("convert run/best weights.safetensors")
        run("deploy run trained.onnx")
        run("artifacts model.onnx --loss cross-entropy --lora 2 -o adapting")
        run("lora extract adapting/checkpoint adapters.safetensors")
        sent = Update.between({"w": np.zeros(3, np.float32)}, {"w": np.ones(3, np.float32)}, examples=5)
        Path("update").write_bytes(sent.to_bytes())
        corpus = Path(__file__).resolve().parent / "corpus"
        shutil.copytree(corpus / "peft", "peft", ignore=lambda *_: ["good.json"])
        shutil.copy(corpus / "peft" / "good.json", "peft/adapter_config.json")
        write_encoder(Path("folder"))
        write_language_model(Path("language"))
        said = [{"role": "user", "content": "w4"}, {"role": "assistant", "content": "w5"}]
        lines = [{"prompt": "w1 w2", "completion": "w3"}, {"messages": said}]
        Path("chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines * 3), "utf-8")
        draw(Path("pictures"), 3)
        onnx.save(published(), "images.onnx")
        run("artifacts images.onnx --classes pictures -o classes")
        run("train classes -d pictures -e 1 -o seen")
        run("deploy seen sorted.onnx")
        write_sound(Path("sound.wav"), Path("heard.onnx"))
        columns = {name: [row[name] for row in rows] for name in ("a", "b", "c", "d", "label")}
        pyarrow.parquet.write_table(pyarrow.table(columns), "data.parquet")
        Path("evil.py").write_text(
            "import pathlib\npathlib.Path('ran').write_text('')\ndef go(): return []\n"
        )


def write_encoder(folder: Path) -> None:
    """A folder as `onward export` writes them: a model that turns words into a vector."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir()
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "some": 1, "text": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    encoder = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18]> net (int64[n, s] input_ids) => (float[n, 2] embeddings)'
        "<float[3, 2] table = {1, 2, 3, 4, 5, 6}, int64[1] axis = {1}>"
        "{ rows = Gather(table, input_ids) embeddings = ReduceMean<keepdims=0>(rows, axis) }"
    )
    onnx.save(encoder, folder / "model.onnx")
    settings = {"pad_id": 0, "pad_type_id": 0, "padding_side": "right", "max_length": 8}
    card = {
        "format": 1, "task": "pooling", "inputs": {"input_ids": ["n", "s"]}, "outputs": {"embeddings": ["n", 2]},
        "tokenizer": settings,
    }  # fmt: skip
    (folder / "onward.json").write_text(json.dumps(card), "utf-8")


def write_language_model(folder: Path) -> None:
    """A decoder as publishers write it, with every file that is read beside it."""
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
             "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}  # fmt: skip
    ready_made.write_base(folder, sizes, language_model.words(32))
    settings = {"eos_token": "</s>", "pad_token": "</s>", "model_max_length": 32}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": 0, "max_new_tokens": 2}), "utf-8"
    )
    template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    (folder / "chat_template.jinja").write_text(template, "utf-8")


def write_sound(sound: Path, model: Path) -> None:
    """A second of noise, and a model that takes it."""
    with wave.open(str(sound), "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes(np.random.default_rng(0).integers(-9999, 9999, 16000, dtype=np.int16).tobytes())
    text = (
        '<ir_version: 10, opset_import: ["": 18]> net (float[n, 16000] sound) => (float[n, 1] loudness)'
        "<int64[1] axis = {1}> { square = Mul(sound, sound) loudness = ReduceMean(square, axis) }"
    )
    onnx.save(onnx.parser.parse_model(text), model)


# ---- one case ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    place: str
    hostile: str
    put: Put
    entry: Entry

    @property
    def name(self) -> str:
        return f"{self.entry.name}:{self.hostile}:{self.place}"


def cases() -> Iterator[Case]:
    for place, (hostile, entries) in places().items():
        for name, put in hostile.items():
            for entry in entries:
                yield Case(place, name, put, entry)


def look(folder: Path) -> dict[str, str]:
    """Everything in a folder: digests of files, what else there is by kind."""
    found = {}
    for root, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            path = Path(root, name)
            status = path.lstat()
            digest = f"{status.st_mode:o}"
            if path.is_symlink():
                digest += os.readlink(path)
            elif path.is_file():
                digest += f" {status.st_size} "
                digest += hashlib.sha256(path.read_bytes()).hexdigest() if status.st_size < 1 << 24 else ""
            found[path.relative_to(folder).as_posix()] = digest
    return {name: digest for name, digest in found.items() if "__pycache__" not in name}


def run_case(case: Case, world: Path) -> list[str]:
    """What a case breaks of what must hold."""
    with tempfile.TemporaryDirectory(prefix="campaign-") as scratch:
        folder = Path(scratch, "world")
        shutil.copytree(world, folder)
        try:
            case.put(folder / case.place.partition(" (")[0])
        except NotHere:
            return []
        before = look(Path(scratch))
        ended = in_a_process(case.entry, folder)
        after = look(Path(scratch))
    return [*judge(case, ended), *judge_files(case, ended, before, after)]


@dataclasses.dataclass(frozen=True)
class Ended:
    code: int  # a negative one is a signal
    error: dict[str, Any]
    stdout: str
    stderr: str
    resident: int
    seconds: float
    late: bool


def in_a_process(entry: Entry, folder: Path) -> Ended:
    """Call an entry in a fork of this process, which has everything imported."""
    pipes = {name: os.pipe() for name in ("stdout", "stderr", "error")}
    child = os.fork()
    if child == 0:
        code = 70
        try:
            for number, name in ((1, "stdout"), (2, "stderr")):
                os.dup2(pipes[name][1], number)
            code = _child(entry, folder, pipes["error"][1])
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
    heard = dict.fromkeys(pipes, b"")
    for read, write in pipes.values():
        os.close(write)
        os.set_blocking(read, False)

    def listen() -> None:
        for name, (read, _) in pipes.items():
            with contextlib.suppress(BlockingIOError):
                while more := os.read(read, 1 << 16):
                    heard[name] += more

    late, waited, last = False, 0.0, time.monotonic()
    while True:
        done, status, usage = os.wait4(child, os.WNOHANG)
        listen()
        if done:
            break
        now = time.monotonic()
        waited, last = waited + min(now - last, 0.1), now  # this process may have been stopped itself
        if waited > PATIENCE:
            late = True
            os.kill(child, signal.SIGKILL)
        time.sleep(0.005)
    for read, _ in pipes.values():
        os.close(read)
    said = {name: data.decode("utf-8", "replace") for name, data in heard.items()}
    return Ended(
        os.waitstatus_to_exitcode(status),
        json.loads(said["error"] or "{}"),
        said["stdout"],
        said["stderr"],
        usage.ru_maxrss << 10,
        usage.ru_utime + usage.ru_stime,
        late,
    )


def _child(entry: Entry, folder: Path, errors: int) -> int:
    sys.stdout, sys.stderr = (os.fdopen(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 5))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if entry.largest is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as Python has it: the write fails
        resource.setrlimit(resource.RLIMIT_FSIZE, (entry.largest, entry.largest))

    def note(error: BaseException) -> None:
        frames = traceback.extract_tb(error.__traceback__)
        own = bool(frames) and f"{os.sep}onward{os.sep}" in frames[-1].filename
        where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        kinds = [kind.__name__ for kind in type(error).__mro__]
        hold = {"kinds": kinds, "own": own, "where": where, "text": str(error)[:400]}
        os.write(errors, json.dumps(hold).encode())

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _PROGRAMS:
            os.write(2, f"{_STARTED} {arguments[0]!r}\n".encode())

    sys.addaudithook(watch)
    if callable(entry.call):
        try:
            entry.call()
        except Exception as error:
            note(error)
            print(f"error: {_one_line(error)}", file=sys.stderr)
            return 1
        return 0
    from onward.cli import command as commands
    from onward.cli.app import app

    explain = commands.explain

    def noting(error: BaseException) -> tuple[str, str]:
        note(error)
        return explain(error)

    commands.explain = noting
    try:
        app(entry.call, standalone_mode=True)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    return 0


def _one_line(error: Exception) -> str:
    """Messages of functions may hold names as they are: whoever prints them escapes them."""
    from onward.escape import printable

    return printable(" ".join(str(error).split()))


# ---- verdicts ----------------------------------------------------------------------------------------------

# what Python says when another program is started
_PROGRAMS = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.startfile", "pty.spawn"}
_STARTED = "campaign: it starts"
OURS = {"OnwardError", "CommandError", "BadParameter"}
FILES = {"FileNotFoundError", "IsADirectoryError", "NotADirectoryError", "PermissionError", "FileExistsError"}
_CONTROL = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def judge(case: Case, ended: Ended) -> list[str]:
    found = []
    text = ended.stdout + ended.stderr
    error = ended.error
    if ended.late:
        found.append(f"LATE: it did not end within {PATIENCE} s")
    elif ended.code in (-signal.SIGXCPU, -signal.SIGKILL) or ended.seconds > SECONDS:
        found.append(f"SLOW: {ended.seconds:.0f} s of processor time")
    elif ended.code < 0:
        found.append(f"SIGNAL {signal.Signals(-ended.code).name}: {ended.stderr[-300:]}")
    elif ended.code not in (0, 1, 2):
        found.append(f"CODE {ended.code}: {ended.stderr[-600:]}")
    if _STARTED in text and not case.place.endswith("(ranks)"):
        found.append(f"STARTED: {text[text.index(_STARTED) :][:200]}")
    if "Traceback" in text:
        found.append(f"TRACEBACK: {text[-600:]}")
    if _CONTROL.search(text):
        found.append(f"CONTROL: {text[:300]!r}")
    if ended.resident > RESIDENT:
        found.append(f"MEMORY: {ended.resident >> 20} MB")
    if error and not OURS & set(error["kinds"]):
        usual = error["own"] and " " in error["text"] and ORDINARY & set(error["kinds"])
        usual = usual or (case.place == "full-disk" and error["text"].startswith(f"[Errno {errno.EFBIG}]"))
        if not usual and not FILES & set(error["kinds"]):
            found.append(f"RAW {error['kinds'][0]} at {error['where']}: {error['text']}")
    if (
        ended.code == 1
        and len(re.findall("^error: ", ended.stderr, re.MULTILINE)) != 1
        and "--json" not in case.entry.name
    ):
        found.append(f"ERRORS: {ended.stderr[-300:]}")
    if len(text) > 200_000 and "--json" not in case.entry.name:  # for programs: as long as the model
        found.append(f"LONG: {len(text)} characters")
    if ended.code == 0 and "--json" in case.entry.name:
        try:
            json.loads(ended.stdout)
        except ValueError:
            found.append(f"JSON: {ended.stdout[:200]}")
    return found


def judge_files(case: Case, ended: Ended, before: dict[str, str], after: dict[str, str]) -> list[str]:
    found = []
    # a run that failed stays, so that it can be resumed; everything else comes whole or not at all
    stays = ended.code == 0 or case.entry.name.startswith(("train", "distributed"))
    allowed = tuple(f"world/{name}" for name in case.entry.leaves if stays)
    unfinished = [name for name in after if name not in before and re.search(r"/\.|\.new$|\.tmp", name)]
    if unfinished:
        found.append(f"UNFINISHED: {unfinished[:5]}")
    new = [name for name in after if name not in before and not name.startswith(allowed or ("\0",))]
    if new:
        found.append(f"LEFT: {new[:5]}")
    touched = [n for n in before if after.get(n) != before[n] and not n.startswith(allowed or ("\0",))]
    if touched:
        found.append(f"TOUCHED: {touched[:5]}")
    if "world/ran" in after:
        found.append("RAN code of a file")
    return found


# ---- all of them -------------------------------------------------------------------------------------------


def import_everything() -> None:
    """So that a case is a fork and its call. Torch is left out: it takes long, and little here needs it."""
    import pkgutil

    import onward

    for found in pkgutil.walk_packages(onward.__path__, "onward."):
        if found.name.split(".")[1] in ("api", "artifacts", "autodiff", "checkpoint", "cli", "data", "graph", "losses",
                                        "optim", "pipeline", "runtime", "train", "lora", "head"):  # fmt: skip
            with contextlib.suppress(ImportError):
                __import__(found.name)
    import rich.console
    import rich.table  # noqa: F401


def few(listed: list[Case]) -> list[Case]:
    """One case for each place, with another entry each time."""
    by_place: dict[str, list[Case]] = {}
    for case in listed:
        by_place.setdefault(case.place, []).append(case)
    return [found[1009 * index % len(found)] for index, found in enumerate(by_place.values(), 1)]


def once(listed: list[Case]) -> list[Case]:
    """Each hostile tokenizer, template, picture, sound and table, read by one of those that read it."""
    kinds = (
        "language/tokenizer.json",
        "language/chat_template.jinja",
        "pictures/red/1.png",
        "sound.wav",
        "data.csv",
    )
    readers: dict[tuple[str, str], list[Case]] = {}
    for case in listed:
        if case.place in kinds:
            readers.setdefault((case.place, case.hostile), []).append(case)
    return [found[index % len(found)] for index, found in enumerate(readers.values())]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--every", type=int, default=1, help="take each so many-th case")
    parser.add_argument("--first", type=int, default=0, help="begin with this one")
    parser.add_argument("--few", action="store_true", help="one case for each place where a file is read")
    parser.add_argument("--once", action="store_true", help="each of five kinds of hostile files once")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--world", type=Path, help="keep the world here, or take the one that is there")
    chosen = parser.parse_args(arguments)
    import_everything()
    with tempfile.TemporaryDirectory(prefix="campaign-") as scratch:
        world = chosen.world or Path(scratch, "world")
        if not world.is_dir():
            world.mkdir(parents=True)
            child = os.fork()  # sessions that are made here would have threads, which forks do not
            if child == 0:
                build = functools.partial(build_world, world)
                code = 1
                try:
                    build()
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(code)
            if os.waitpid(child, 0)[1]:
                return 2
        count = broken = 0
        listed = [case for case in cases() if chosen.only in case.name]
        if chosen.few:
            listed = few(listed)
        if chosen.once:
            listed = once(listed)
        for case in listed[chosen.first :: chosen.every]:
            count += 1
            for problem in run_case(case, world):
                broken += 1
                print(f"{case.name}\n    {problem}", flush=True)
            if not count % 100:
                print(f"{count} cases, {broken} problems", flush=True)
    print(f"{count} cases, {broken} problems")
    return 1 if broken or not count else 0


if __name__ == "__main__":
    sys.exit(main())
