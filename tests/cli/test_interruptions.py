"""Ctrl-C and SIGTERM at every command: exit code 130, nothing half-written, and runs that go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import contents
from cli.npm import write_packages
from onward import checkpoint

SIGNALS = [signal.SIGINT, signal.SIGTERM]
ORIGINAL = Path(__file__).parent / "fixtures" / "original"

# Where the signal arrives. Commands that write are hit at the moment at which a finished file takes its name:
# by then everything is written, aside. The others are hit inside their work.
COMMANDS = {
    "artifacts": ("os.replace", "artifacts model.onnx -l mse -o new/deep --train w1"),
    "deploy": ("os.replace", "deploy run new/deep/model.onnx"),
    "deploy --quantize": ("os.replace", "deploy run new/deep/model.onnx --quantize int8"),
    "infer --output": ("os.replace", "infer run -d data.npz -o new/deep/answers.npz"),
    "inspect --html": ("os.replace", "inspect run --html new/deep/page.html"),
    "convert to safetensors": ("os.replace", "convert run/best new/deep/w.safetensors"),
    "convert to a checkpoint": ("os.replace", "convert weights.safetensors new/deep/checkpoint"),
    "convert artifacts": ("os.replace", f"convert {ORIGINAL / 'adamw'} new/deep"),
    "lora inject": ("os.replace", "lora inject model.onnx new/deep/adapted.onnx"),
    "lora merge": ("os.replace", "lora merge adapted.onnx new/deep/merged.onnx"),
    "lora extract": ("os.replace", "lora extract adapting/checkpoint new/deep/a.safetensors"),
    "web": ("os.replace", "web artifacts new/deep --packages node_modules"),
    "train before its first update": ("onward.api.Module.__call__", "train artifacts -d data.npz -o new/deep"),
    "train while reading": ("onward.data.read.read_arrays", "train artifacts -d data.npz -o new/deep"),
    "train --overwrite while reading": ("onward.data.read.read_arrays", "train artifacts -d data.npz --overwrite"),
    "evaluate": ("onward.train.trainer.Trainer.evaluate", "evaluate run -d data.npz"),
    "infer": ("onward.data.read.read_arrays", "infer model.onnx -d data.npz"),
    "check": ("onward.artifacts.generate.build_artifacts", "check model.onnx -l mse"),
    "check while measuring": ("onward.api.Module.__call__", "check model.onnx -l mse --train w1"),
    "gradcheck": ("onward.autodiff.check.check_gradient", "gradcheck model.onnx"),
    "bench": ("onward.api.Module.__call__", "bench artifacts"),
    "inspect": ("onward.checkpoint.load", "inspect run/best"),
    "export": ("onward.cli.commands.export.import_entry", "export my_net:build -o new/deep/net.onnx"),
    "distributed before its start": ("onward.data.read.read_arrays", "distributed artifacts -d data.npz -o new/deep"),
}  # fmt: skip


@pytest.fixture
def packages(workshop: Path) -> None:
    write_packages(workshop / "node_modules")


@pytest.mark.parametrize("number", SIGNALS, ids=["ctrl-c", "terminate"])
@pytest.mark.parametrize("name", COMMANDS)
def test_an_interrupted_command_leaves_nothing(
    workshop: Path, packages: None, run: Any, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    where, line = COMMANDS[name]
    heard: list[str] = []

    def interrupted(*_: Any, **__: Any) -> None:
        heard.append(where)
        signal.raise_signal(number)
        raise AssertionError("the signal had no effect")

    before = contents()
    handlers = [signal.getsignal(number) for number in SIGNALS]
    with monkeypatch.context() as patch:
        patch.setattr(where, interrupted)
        if name == "train before its first update":  # where the trainer is patient: the second one counts
            patch.setattr(where, lambda *_: (signal.raise_signal(number), interrupted()))
        result = run(*line.split(), code=130)
    assert heard == [where]
    assert result.stderr == "interrupted\n"
    assert contents() == before
    assert [signal.getsignal(number) for number in SIGNALS] == handlers


def test_interruption_is_told_to_machines_too(workshop: Path, run: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("onward.checkpoint.load", lambda *_: signal.raise_signal(signal.SIGINT))
    assert run("inspect", "run/best", "--json", code=130).json["error"] == "interrupted"


# ---- real processes: what a person in a terminal, or a scheduler, sees -----------------------------------

POSIX = pytest.mark.skipif(
    os.name == "nt", reason="Windows has no SIGINT that one process can send another alone"
)


def start(line: str) -> subprocess.Popen[str]:
    program = "from onward.cli import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", program, *line.split()],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def wait_for_checkpoints(process: subprocess.Popen[str], folder: Path) -> None:
    for _ in range(1200):
        if process.poll() is not None:
            raise AssertionError(f"it ended by itself: {process.communicate()}")
        if any(folder.glob("checkpoint-*")):
            return
        time.sleep(0.05)
    process.kill()
    raise AssertionError("no checkpoint in a minute")


def latest(folder: Path) -> Path:
    return checkpoint.load_latest(folder).path


@POSIX
@pytest.mark.parametrize("number", SIGNALS, ids=["ctrl-c", "terminate"])
def test_train_in_a_process_of_its_own_stops_and_goes_on(workshop: Path, run: Any, number: int) -> None:
    Path("slow.py").write_text(
        "import time\nimport numpy as np\n"
        "def batches():\n"
        "    data = np.load('data.npz')\n"
        "    def epoch(number):\n"
        "        for start in range(0, 96, 32):\n"
        "            time.sleep(0.2 if number < 50 else 0)\n"
        "            yield data['x'][start:start + 32], data['labels'][start:start + 32]\n"
        "    return epoch\n",
        encoding="utf-8",
    )
    process = start("train artifacts -d slow:batches -o slow -e 100000 --save-every 1")
    wait_for_checkpoints(process, Path("slow"))
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "all saved; resume with: onward train slow --resume --data slow:batches\n" in said
    assert "Traceback" not in said
    steps = int(latest(Path("slow")).name.split("-")[1])
    assert f"stopped after {steps} updates" in said
    assert not [name for name in contents("slow") if Path(name).name.startswith(".")]
    Path("slow.py").write_text(Path("slow.py").read_text("utf-8").replace("0.2 if", "0 if"), "utf-8")
    epochs = steps // 3 + 2
    found = run("train", "slow", "--resume", "--data", "slow:batches", "--epochs", epochs, "--json").json
    assert found["steps"] == 3 * epochs


@POSIX
@pytest.mark.filterwarnings(
    "ignore:the checkpoint comes from another environment"
)  # two ranks, then one process
def test_distributed_stops_on_all_ranks_and_goes_on(workshop: Path, run: Any) -> None:
    line = "distributed artifacts -d data.npz -o many -p {} -e {} --save-every 1"
    process = start(line.format(2, 1000000))
    wait_for_checkpoints(process, Path("many"))
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=90)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    steps = int(latest(Path("many")).name.split("-")[1])
    assert said == f"stopped after {steps} updates, all saved; resume with: onward train many --resume\n"
    epochs = steps // 3 + 2
    found = run(*line.format(1, epochs).split(), "--resume", "--json").json
    assert found["steps"] == 3 * epochs and len(found["epochs"]) == epochs
    assert int(latest(Path("many")).name.split("-")[1]) == 3 * epochs


@POSIX
def test_a_served_site_answers_until_ctrl_c(workshop: Path, packages: None) -> None:
    process = start("web artifacts site --packages node_modules --title Digits --serve --port 0 --quiet")
    assert process.stdout is not None
    address = process.stdout.readline().split()[0]
    with urllib.request.urlopen(f"{address}site.json", timeout=30) as answer:
        assert '"Digits"' in answer.read().decode()
        assert answer.headers["Cross-Origin-Opener-Policy"] == "same-origin"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (0, "")
