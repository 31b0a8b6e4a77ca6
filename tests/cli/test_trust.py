"""Files of a run, or of options, that someone else wrote: they are read, and run nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from typer.testing import CliRunner

from cli.newcomer import make_data
from cli.npm import write_packages
from cli.test_chat import SIZES, language_model, ready_made
from onward import limits
from onward.cli import run_folder
from onward.cli.app import COMMANDS, app
from onward.cli.commands.check import _bytes
from onward.cli.errors import CommandError

EVIL = "import pathlib\npathlib.Path('ran').write_text('')\ndef go():\n    return []\n"
ENTRIES = ["evil:go", "evil:go\n", "x=evil:go", "evil.go:go"]


@pytest.fixture
def evil(trained: Path) -> Path:
    """A module that leaves a trace when it is imported, beside a run."""
    Path("evil.py").write_text(EVIL, encoding="utf-8")
    return trained


def change(run: Path, **options: Any) -> None:
    path = run / "run.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    document["options"] |= options
    path.write_text(json.dumps(document), encoding="utf-8")


def test_a_run_folder_runs_no_code(evil: Path, run: Any) -> None:
    for option, entry in itertools.product(["data", "eval_data"], ENTRIES):
        change(evil, data=["data.npz"], eval_data=None, hold_out=None)
        change(evil, **{option: [entry]})
        result = run("train", "run", "--resume", "--epochs", 3, code=1)
        assert not Path("ran").exists()
        if entry == "evil:go":
            assert "a file never runs code here" in result.stderr
            assert f"--{option.replace('_', '-')} evil:go" in result.stderr


def test_code_runs_where_it_is_named_again(evil: Path, run: Any) -> None:
    Path("mine.py").write_text(
        "import numpy as np\ndef batches():\n    return dict(np.load('data.npz'))\n", encoding="utf-8"
    )
    change(evil, data=["mine:batches"], hold_out=None)
    assert "mine:batches" in run("train", "run", "--resume", "-e", 3, code=1).stderr
    run("train", "run", "--resume", "-e", 3, "--data", "mine:batches")


def test_no_command_runs_what_a_run_folder_names(evil: Path) -> None:
    change(evil, data=["evil:go"], eval_data=["evil:go"], mapping=["x=evil:go"], label="evil:go")
    for line in ("train --resume run", "evaluate run", "deploy run new.onnx", "infer run"):
        CliRunner().invoke(app, line.split())
        assert not Path("ran").exists()


def test_a_run_folder_has_nothing_written_elsewhere(trained: Path, run: Any, tmp_path_factory: Any) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "events"
    change(trained, tensorboard=str(elsewhere))
    assert "--tensorboard" in run("train", "run", "--resume", "-e", 3, code=1).stderr
    assert not elsewhere.exists()
    run("train", "run", "--resume", "-e", 3, "--tensorboard", elsewhere)
    assert elsewhere.is_dir()


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_a_run_folder_sends_nothing_away(trained: Path, run: Any, name: str) -> None:
    """Nor is a module of that name in the current folder imported."""
    Path(f"{name}.py").write_text(EVIL, encoding="utf-8")
    change(trained, **{name: "project"})
    assert f"--{name} project" in run("train", "run", "--resume", "-e", 3, code=1).stderr
    assert not Path("ran").exists()


def test_the_security_page_has_every_limit() -> None:
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text("utf-8")
    units = {"GiB": 2**30, "MiB": 2**20}
    for field in dataclasses.fields(limits.Limits):
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{field.name}` |")]
        number, *rest = row.split("|")[2].split()
        value = int(number.replace(",", "")) * units.get(rest[0] if rest else "", 1) - (rest[1:2] == ["−"])
        assert value == getattr(limits.Limits(), field.name), row


def test_every_command_takes_limits(place: Path, run: Any) -> None:
    for name in (*(name for name in COMMANDS if name != "lora"), "lora inject", "lora extract", "lora merge"):
        assert "--limit" in run(*name.split(), "--help").stdout, name
    limits_of_both = ("--limit", "nodes=1", "--limit", "text_bytes=9")
    assert "nodes" in run("check", "model.onnx", *limits_of_both, code=1).stderr


OPTIONS: list[dict[str, Any]] = [
    {"epochs": "many"}, {"epochs": -1}, {"epochs": 2**70}, {"data": "data.npz"}, {"data": [3]},
    {"mapping": {"x": "x"}}, {"prefix": "../"}, {"prefix": 3}, {"label": ["y"]}, {"learning_rate": "NaN"},
    {"no_shuffle": 1}, {"tensorboard": "\0"}, {"normalize": 0.5}, {"device": [["cpu"]]}, {"batch_size": 0},
    {"crop": "8"}, {"sample_rate": 0}, {"seed": -1}, {"tokenizer": {}}, {"standardize": "yes"},
]  # fmt: skip


def test_options_of_the_wrong_kind_in_a_run_folder(trained: Path, run: Any) -> None:
    before = (trained / "run.json").read_bytes()
    for options in OPTIONS:
        change(trained, **options)
        for line in ("train run --resume -e 3", "evaluate run -d data.npz"):
            result = run(*line.split(), code=1)
            assert "run.json' is damaged" in result.stderr or "prefix" in result.stderr, options
            assert len(result.stderr.strip().splitlines()) == 2
        (trained / "run.json").write_bytes(before)


def test_every_option_of_a_run_has_a_kind(trained: Path) -> None:
    before = (trained / "run.json").read_bytes()
    for name in json.loads(before)["options"]:
        change(trained, **{name: {"of": "another kind"}})
        with pytest.raises(CommandError, match=f"its option '{name}'"):
            run_folder.read_run(trained)
        (trained / "run.json").write_bytes(before)


DOCUMENTS = {
    "null": "null",
    "a list": "[1, 2]",
    "empty": "",
    "no options": '{"artifacts": "artifacts"}',
    "options are null": '{"artifacts": "artifacts", "options": null}',
    "artifacts are a number": '{"artifacts": 3, "options": {}}',
    "classes are numbers": '{"artifacts": "artifacts", "options": {}, "classes": [1, 2]}',
    "deep": '{"artifacts": "artifacts", "options": ' + '{"a": ' * 5000 + "1" + "}" * 5001,
    "deep lists": "[" * 200_000,
    "not UTF-8": "\udcff",
}


def test_documents_that_are_no_run(trained: Path, run: Any) -> None:
    for name, text in DOCUMENTS.items():
        (trained / "run.json").write_text(text, encoding="utf-8", errors="surrogateescape")
        for line in ("train run --resume", "evaluate run -d data.npz", "deploy run new.onnx"):
            result = run(*line.split(), code=1)
            assert "run.json' is damaged" in result.stderr, name
            # in our words, not in Python's
            assert not re.search("operand|object|class '|indices|subscript", result.stderr), result.stderr
            assert len(result.stderr.strip().splitlines()) == 2


def test_a_configuration_file_runs_no_code(place: Path, run: Any) -> None:
    Path("evil.py").write_text(EVIL, encoding="utf-8")
    for table, command in (
        ('[train]\ndata = "evil:go"', ("train", "artifacts")),
        ('[train]\ndata = ["evil:go"]', ("train", "artifacts")),
        ('[export]\nsource = "evil:go"\noutput = "new.onnx"', ("export",)),
        ('[evaluate]\ndata = "evil:go"', ("evaluate", "artifacts")),
    ):
        Path("onward.toml").write_text(table, encoding="utf-8")
        result = run(*command, "--config", "onward.toml", code=2)
        assert "a file never runs code here" in result.stderr
        assert not Path("ran").exists()


def test_nested_configuration_is_refused(place: Path, run: Any) -> None:
    for depth in (100, 5000, 100_000):
        Path("onward.toml").write_text("[train]\nepochs = " + "[" * depth + "]" * depth, encoding="utf-8")
        result = run("train", "artifacts", "--config", "onward.toml", code=2)
        assert "text_nesting" in result.stderr
        Path("onward.toml").write_text("[train]\n" + ".".join(["a"] * depth) + " = 1", encoding="utf-8")
        assert "onward.toml'" in run("train", "artifacts", "--config", "onward.toml", code=2).stderr


def test_artifacts_of_a_run_may_move_with_it(trained: Path, run: Any) -> None:
    Path("there").mkdir()
    shutil.move("run", "there/run")
    shutil.move("artifacts", "there/artifacts")
    assert "loss" in run("evaluate", "there/run", "-d", "data.npz").stdout


LOOP = """<ir_version: 10, opset_import: ["": 21]> g (float[2] x) => (float[2] y)
<int64 n = {4611686018427387904}, bool c = {1}, float[2] w = {1, 2}> {
    k = Mul(x, w)
    y = Loop(n, c, k) <body = b (int64 i, bool ci, float[2] a) => (bool co, float[2] o) {
        co = Identity(ci) o = Neg(a) }>
}"""


GROWING = """<ir_version: 10, opset_import: ["": 21]> g (float[2] x) => (float[n] y)
<int64 n = {60}, bool c = {1}, float[2] w = {1, 2}> {
    k = Mul(x, w)
    y = Loop(n, c, k) <body = b (int64 i, bool ci, float[k] a) => (bool co, float[l] o) {
        co = Identity(ci) o = Concat<axis = 0>(a, a) }>
}"""


@pytest.mark.parametrize(
    ("text", "limit", "told"),
    [
        (LOOP, "check_seconds=3", "check_seconds=30"),
        (GROWING, "check_bytes=300000000", "check_bytes=3000000000"),
    ],
    ids=["never ends", "never stops growing"],
)
def test_a_check_of_a_loop_ends(place: Path, text: str, limit: str, told: str) -> None:
    onnx.save(onnx.parser.parse_model(text), "loop.onnx")
    line = [sys.executable, "-m", "onward", "check", "loop.onnx", "--limit", limit]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert f"--limit {told}" in ended.stderr


def spread(source: Path, target: Path) -> None:
    """The same model with all of its data in a file beside it."""
    target.parent.mkdir(exist_ok=True)
    model = onnx.load(source)
    for tensor in model.graph.initializer:  # data in typed fields cannot go to a file
        tensor.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor), tensor.name))
    onnx.save(model, target, save_as_external_data=True, location=f"{target.name}.data", size_threshold=0)
    assert any(
        tensor.external_data for tensor in onnx.load(target, load_external_data=False).graph.initializer
    )


def test_models_with_external_data_are_checked_and_run(place: Path, run: Any) -> None:
    spread(Path("model.onnx"), Path("large/model.onnx"))
    for line in ("gradcheck large/model.onnx", "check large/model.onnx", "inspect large/model.onnx"):
        assert run(*line.split()).exit_code == 0
    near, far = (
        run("infer", model, "-d", "data.npz", "--map", "x=x", "--json").stdout
        for model in ("model.onnx", "large/model.onnx")
    )
    assert near == far
    Path("large/model.onnx.data").unlink()
    for command in ("gradcheck", "check", "infer"):
        data = ["-d", "data.npz"] if command == "infer" else []
        assert "model.onnx.data" in run(command, "large/model.onnx", *data, code=1).stderr


def test_artifacts_of_the_original_with_external_data_are_converted(place: Path, run: Any) -> None:
    original = Path(__file__).parent / "fixtures" / "original" / "sgd"
    shutil.copytree(original, "whole")
    model = onnx.load("whole/eval_model.onnx")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.full(4, 0.5, np.float32), "half"))
    model.graph.node.insert(0, onnx.helper.make_node("Mul", ["x", "half"], ["halved"]))
    model.graph.node[1].input[0] = "halved"
    onnx.save(model, "whole/eval_model.onnx")
    Path("parts").mkdir()
    for file in Path("whole").iterdir():
        parts = file.name in ("training_model.onnx", "eval_model.onnx")
        (spread if parts else shutil.copy)(file, Path("parts", file.name))
    run("convert", "whole", "near")
    run("convert", "parts", "far")
    assert any(tensor.name == "half" for tensor in onnx.load("near/eval_model.onnx").graph.initializer)
    losses = [
        [
            row["loss"]
            for row in run(
                "train", made, "-d", original.parent / "data.npz", "-o", f"{made}-run", "--json"
            ).json["epochs"]
        ]
        for made in ("near", "far")
    ]
    assert losses[0] == losses[1]


def test_a_table_without_an_end_of_line_is_not_read_whole(trained: Path, run: Any) -> None:
    for name in ("data.csv", "data.jsonl"):
        with open(name, "wb") as file:
            file.truncate(80 << 20)
        said = run("evaluate", "run", "-d", name, code=1).stderr
        assert "text_bytes" in said and name in said
        Path(name).unlink()


def test_ranks_import_nothing_from_the_current_folder(artifacts: Path, run: Any) -> None:
    for name in ("torch", "onnx", "sitecustomize"):
        Path(f"{name}.py").write_text(EVIL, encoding="utf-8")
    run("train", "artifacts", "-d", "data.npz", "-e", 1, "-p", 2, "-o", "two")
    assert not Path("ran").exists()


# Loaded by Python itself in every process of a command: writes down who unpickles and who listens.
WATCH = """
import os, pickle, sys, traceback

def tell(what):
    with open(os.environ["WATCHED"], "a") as file:
        file.write(f"{os.getpid()} {what}\\n" + "".join(traceback.format_stack()[:-2]))

def hook(event, arguments):
    if event == "pickle.find_class":
        tell(f"unpickles {arguments}")
    elif event == "socket.bind" and not is_loopback(arguments[1]):
        tell(f"binds {arguments[1]}")

def is_loopback(address):
    return not isinstance(address, tuple) or address[0] in ("127.0.0.1", "::1", "localhost")

def telling(name, function):
    def call(*arguments, **options):
        tell(f"calls pickle.{name}")
        return function(*arguments, **options)
    return call

for name in ("load", "loads"):
    setattr(pickle, name, telling(name, getattr(pickle, name)))
sys.addaudithook(hook)
with open(os.environ["WATCHED"] + ".processes", "a") as file:
    file.write(f"{os.getpid()}\\n")
"""


def listening(root: int) -> dict[tuple[str, int], str]:
    """Addresses, as the kernel writes them, where a process or one that descends from it listens."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    family = {root}
    while grown := {child for child, parent in parents.items() if parent in family} - family:
        family |= grown
    inodes = {}
    for process in family:
        with contextlib.suppress(OSError):
            for link in Path(f"/proc/{process}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes[os.readlink(link)] = process
    sockets = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in inodes:
                sockets[table, inodes[f"socket:[{inode}]"]] = local.partition(":")[0]
    return sockets


LOOPBACK = {"0100007F", "0" * 24 + "01000000"}


def watch(*command: str, **options: Any) -> subprocess.Popen[str]:
    """A process that is watched, it and those that it starts."""
    Path("watch").mkdir(exist_ok=True)
    Path("watch/sitecustomize.py").write_text(WATCH, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": "watch", "WATCHED": str(Path("watched").absolute())}
    return subprocess.Popen([sys.executable, *command], env=environment, text=True, **options)


COMMANDS_RUN = """
import json, sys
from typer.testing import CliRunner
from onward.cli.app import app
for line in json.loads(sys.argv[1]):
    result = CliRunner().invoke(app, line.split(), input="w1 w2\\n")
    assert result.exit_code == 0, f"{line}: {result.output} {result.stderr} {result.exception!r}"
"""
# each command once; `distributed` is in the test of ranks, `web --serve` in one of its own
EACH_COMMAND = [
    "export nets:build -o net.onnx", "artifacts model.onnx -l cross-entropy --portable -o new", "check model.onnx",
    "train new -d data.npz -e 1 -o again", "finetune model.onnx -d data.csv --label label -e 1 -o mine.onnx",
    "chat talker", "evaluate run -d data.npz", "infer model.onnx -d data.npz --map x=x", "deploy run out.onnx",
    "inspect run", "bench artifacts --steps 1 --warmup 0", "gradcheck model.onnx", "convert run/best w.safetensors",
    "lora inject model.onnx lora.onnx --rank 2", "lora merge lora.onnx merged.onnx", "mobile new -o app", "doctor",
    "lora extract adapting/checkpoint lora.safetensors", "web artifacts site --packages node_modules",
    "conform --only Relu",
]  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_command_listens_or_unpickles(workshop: Path) -> None:
    write_packages(Path("node_modules"))
    Path("nets.py").write_text(
        "import torch\ndef build():\n    return torch.nn.Linear(4, 3), (torch.ones(2, 4),)\n",
        encoding="utf-8",
    )
    rows = [",".join([*map(str, x), f"kind {label}"]) for x, label in zip(*make_data().values(), strict=True)]
    Path("data.csv").write_text("\n".join(["a,b,c,d,label", *rows, ""]), encoding="utf-8")
    ready_made.write_base(Path("talker"), SIZES, language_model.words(96))
    Path("talker/chat_template.jinja").write_text("{{ messages[-1].content }}", encoding="utf-8")
    assert {line.split()[0] for line in EACH_COMMAND} | {"distributed"} == set(COMMANDS)
    process = watch("-c", COMMANDS_RUN, json.dumps(EACH_COMMAND), stderr=subprocess.PIPE)
    sockets: dict[tuple[str, int], str] = {}
    while process.poll() is None:
        sockets |= listening(process.pid)
        time.sleep(0.1)
    assert process.returncode == 0, process.stderr and process.stderr.read()
    assert not sockets
    assert not Path("watched").exists(), Path("watched").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_site_is_served_on_loopback_only(workshop: Path) -> None:
    write_packages(Path("node_modules"))
    line = [
        "-m",
        "onward",
        "web",
        "artifacts",
        "site",
        "--packages",
        "node_modules",
        "--serve",
        "--port",
        "0",
    ]
    process = watch(*line, stdout=subprocess.DEVNULL)
    try:
        end, sockets = time.monotonic() + 60, {}
        while not sockets and time.monotonic() < end and process.poll() is None:
            sockets = listening(process.pid)
            time.sleep(0.05)
    finally:
        process.terminate()
        process.wait()
    assert set(sockets.values()) <= LOOPBACK and len(sockets) == 1
    assert not Path("watched").exists(), Path("watched").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_listen_on_loopback_only_and_unpickle_nothing(artifacts: Path) -> None:
    line = "-m onward distributed artifacts -d data.npz -e 20 -p 2 -o two --quiet"
    command = watch(*line.split(), stderr=subprocess.PIPE)
    sockets: dict[tuple[str, int], str] = {}
    while command.poll() is None:
        sockets |= listening(command.pid)
        time.sleep(0.02)
    assert command.returncode == 0, command.stderr and command.stderr.read()
    assert set(sockets.values()) <= LOOPBACK
    assert len({process for _, process in sockets}) == 2, "both ranks were seen as they listened"
    assert len(set(Path("watched.processes").read_text().split())) >= 3
    assert not Path("watched").exists(), Path("watched").read_text()


def test_a_table_with_a_nul_character(trained: Path, run: Any) -> None:
    Path("data.csv").write_text("a,b,c,d,label\n" + "1,2,3,4,x\n" * 9 + "1,2,3,\0,x\n", encoding="utf-8")
    assert "NUL character" in run("evaluate", "run", "-d", "data.csv", code=1).stderr


def test_random_numbers_for_a_huge_batch_are_not_made(trained: Path, run: Any) -> None:
    model = onnx.load("model.onnx")
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2**31
    onnx.save(model, "huge.onnx")
    assert "value_bytes" in run("gradcheck", "huge.onnx", code=1).stderr


def test_texts_in_a_model_have_no_known_size() -> None:
    words = ir.Value(name="words", shape=ir.Shape([3]), type=ir.TensorType(ir.DataType.STRING))
    assert _bytes(words, 2) is None
    assert (
        _bytes(ir.Value(name="x", shape=ir.Shape(["n", 3]), type=ir.TensorType(ir.DataType.FLOAT)), 2) == 24
    )


def test_npm_runs_no_script_of_a_package(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    from onward.errors import OnwardError
    from onward.web import site

    commands: list[list[str]] = []

    def npm(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 1, "", "no network")

    monkeypatch.setattr(site.shutil, "which", lambda name: name)
    monkeypatch.setattr(site.subprocess, "run", npm)
    monkeypatch.setattr(site, "library", lambda: place)
    Path("package.json").write_text('{"dependencies": {"nothing": "1.0.0"}}', encoding="utf-8")
    with pytest.raises(OnwardError, match="npm could not fetch"), site.node_modules():
        pass
    assert [command[:3] for command in commands] == [["npm", "install", "--ignore-scripts"]]


def test_the_command_imports_nothing_from_the_current_folder(place: Path) -> None:
    script = Path(sys.executable).with_name("onward")
    if not script.is_file():
        pytest.skip("Onward is not installed as a command here")
    for name in ("onnx", "typer", "numpy"):
        Path(f"{name}.py").write_text(EVIL, encoding="utf-8")
    subprocess.run([script, "inspect", "model.onnx"], check=True, capture_output=True)
    assert not Path("ran").exists()


def test_no_file_names_a_library_of_operators(trained: Path, run: Any) -> None:
    """No option does, so that no settings and no run can; what a model says of itself is not asked for one."""
    model = onnx.load("model.onnx")
    model.metadata_props.add(key="onward.custom_op_library", value="evil.so")
    model.metadata_props.add(key="custom_op_library", value="evil.so")
    onnx.save(model, "model.onnx")
    run("artifacts", "model.onnx", "-l", "cross-entropy", "-o", "again")
    change(trained, custom_op_library="evil.so")
    run("evaluate", "run", "-d", "data.npz")
    Path("onward.toml").write_text('[train]\ncustom-op-library = "evil.so"\n', encoding="utf-8")
    said = run("train", "artifacts", "--config", "onward.toml", code=2).stderr
    assert "unknown option 'custom-op-library'" in said


def test_the_security_page_names_tests_that_are_there() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs" / "security.md").read_text("utf-8")
    for file, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page):
        assert (root / file).is_file(), file
        assert f"def {name}(" in (root / file).read_text("utf-8") or not name, f"{file}::{name}"
    promises = page.partition("## What is promised")[2].partition("## Limits")[0]
    rows = [line for line in promises.splitlines() if line.startswith("|") and "---" not in line]
    assert [row for row in rows if not re.search(r"`tests/|test \|$", row)] == []
    assert len(rows) > 30
    # what these load is the user's own
    own = ("**Your own functions**", "**Torch and transformers**")
    runs = re.split(r"^- ", page.partition("## What runs code")[2].partition("\n## ")[0], flags=re.MULTILINE)[
        1:
    ]
    assert [text for text in runs if not text.startswith(own) and "`tests/" not in text] == []
    assert len(runs) > 6
    # sentences outside of tables: one that promises names a test, one that asks something of the reader need not
    for title in ("Limits", "How it is tested"):
        prose = page.partition(f"## {title}\n")[2].partition("\n## ")[0].partition("\n|")[0]
        sentences = re.split(r"(?<=[.])\s+(?=[A-Z`])", prose.strip())
        assert [text for text in sentences if not re.search(r"tests/|benchmarks/|make fuzz", text)] == []
