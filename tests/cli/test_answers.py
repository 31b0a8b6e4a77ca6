"""What every command answers when all is well: words for people, one JSON document for machines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import contents
from cli.npm import write_packages

ORIGINAL = Path(__file__).parent / "fixtures" / "original"

# the line, what a person reads, what a program finds, and what is written
ANSWERS: dict[str, tuple[str, list[str], set[str], list[str]]] = {
    "artifacts": (
        "artifacts model.onnx -l mse -o new",
        ["training_model.onnx", "131 values of 4 parameters train", "next: onward train new"],
        {"directory", "files", "loss", "remark", "trainable", "frozen", "trainable_values"},
        ["new", "new/checkpoint", "new/eval_model.onnx", "new/optimizer_model.onnx", "new/training_model.onnx"],
    ),
    "check": (
        "check model.onnx -l mse --steps 1",
        ["yes: every operator", "131 values in 4", "time per step"],
        {"trainable", "trainable_values", "parameter_bytes", "optimizer_bytes", "total_bytes", "seconds_per_step"},
        [],
    ),
    "train": (
        "train artifacts -d data.npz -o new --hold-out 0.25",
        ["epoch", "eval loss", "best: epoch 1", "report: new", "next: onward deploy new"],
        {"directory", "report", "epochs", "best", "steps", "samples"},
        [
            "new", "new/best", "new/checkpoint-000000000003", "new/history.json", "new/log.txt", "new/report.html",
            "new/run.json",
        ],
    ),
    "evaluate": (
        "evaluate run -d data.npz -m accuracy", ["loss", "accuracy"], {"checkpoint", "samples", "loss", "accuracy"}, [],
    ),
    "infer": (
        "infer run -d data.npz", ["scores [96, 3]", "sample"], {"samples", "outputs", "file", "values"}, [],
    ),
    "infer --output": (
        "infer run -d data.npz -o new.csv",
        ["new.csv: scores [96, 3]"],
        {"samples", "outputs", "file"},
        ["new.csv"],
    ),
    "deploy": (
        "deploy run new.onnx --quantize int8",
        ["new.onnx: ", "parity with the eval model: within tolerance", "int8: "],
        {"path", "bytes", "outputs", "checkpoint", "parity", "quantization"},
        ["new.onnx"],
    ),
    "inspect a model": (
        "inspect model.onnx", ["inputs", "[batch, 4]", "Gemm"], {"kind", "inputs", "outputs", "operators"}, [],
    ),
    "inspect artifacts": (
        "inspect artifacts", ["training_model", "checksum verified"], {"kind", "models", "checkpoint"}, [],
    ),
    "inspect a run": ("inspect run", ["checkpoints", "epochs"], {"kind", "options", "checkpoints", "epochs"}, []),
    "inspect a checkpoint": (
        "inspect run/best", ["131 values in 4 parameters", "integrity"], {"kind", "integrity", "parameters"}, [],
    ),
    "inspect safetensors": (
        "inspect weights.safetensors", ["structure verified", "w1"], {"kind", "integrity", "parameters"}, [],
    ),
    "inspect --html": ("inspect run --html new.html", ["page: new.html"], {"kind"}, ["new.html"]),
    "bench": (
        "bench artifacts --steps 2 --warmup 0",
        ["milliseconds per batch of 32", "forward and backward", "samples per second"],
        {"batch_size", "samples_per_second", "step", "gradients", "update", "evaluation"},
        [],
    ),
    "bench a run": ("bench run --steps 1 --threads 1", ["step in all"], {"step"}, []),
    "gradcheck": (
        "gradcheck model.onnx", ["are right", "finite differences"], {"wrt", "finite_difference", "passed"}, [],
    ),
    "gradcheck at a point": (
        "gradcheck model.onnx -d point.npz --wrt w1 --wrt x", ["w1, x are right"], {"wrt", "passed"}, [],
    ),
    "convert to safetensors": (
        "convert run/best new.safetensors",
        ["4 trainable and 0 frozen"],
        {"source", "target", "trainable", "frozen", "bytes"},
        ["new.safetensors"],
    ),
    "convert from safetensors": (
        "convert weights.safetensors new --freeze w1", ["3 trainable and 1 frozen"], {"trainable", "frozen"}, ["new"],
    ),
    "convert artifacts": (
        f"convert {ORIGINAL / 'adamw'} new",
        ["artifacts of 3 trainable and 1 frozen"],
        {"source", "target", "trainable", "frozen"},
        ["new", "new/checkpoint", "new/eval_model.onnx", "new/optimizer_model.onnx", "new/training_model.onnx"],
    ),
    "doctor": (
        "doctor",
        ["onnxruntime", "CPUExecutionProvider", "instruction sets", "all is well"],
        {"ok", "versions", "providers", "processor", "threads", "optional_packages"},
        [],
    ),
    "conform": (
        "conform --only Tanh -o new.json -o new.html",
        ["Tanh", "backward", "2 of 2 right", "written: new.json"],
        {"runtime", "environment", "passed", "workarounds", "failures"},
        ["new.html", "new.json"],
    ),
    "conform with another runtime": (
        "conform --runtime reference --only Scan*", ["forward scans"], {"passed"}, [],
    ),
    "lora inject": (
        "lora inject model.onnx new.onnx", ["2 weights adapted", "next: onward artifacts"], {"path", "adapters"},
        ["new.onnx"],
    ),
    "lora merge": ("lora merge adapted.onnx new.onnx", ["new.onnx: "], {"path", "bytes", "separate"}, ["new.onnx"]),
    "lora extract": (
        "lora extract adapting/checkpoint new.safetensors", ["4 adapter matrices"], {"path", "adapters"},
        ["new.safetensors"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_people_and_machines_are_answered(workshop: Path, run: Any, name: str) -> None:
    import numpy as np

    np.savez("point.npz", x=np.ones((2, 4)))
    line, words, keys, files = ANSWERS[name]
    before = contents()
    shown = run(*line.split())
    for text in words:
        assert text in shown.stdout
    assert "error" not in shown.stderr
    assert sorted(set(contents()) - set(before)) == files
    replaces = bool(files) and not line.startswith(("artifacts", "convert " + str(ORIGINAL)))
    again = [*line.split(), "--json", *(["--overwrite"] if replaces else [])]
    found = run(*again)
    assert keys <= set(found.json)
    assert found.stderr == ""


@pytest.mark.parametrize("name", ANSWERS)
def test_quiet_says_nothing(workshop: Path, run: Any, name: str) -> None:
    import numpy as np

    np.savez("point.npz", x=np.ones((2, 4)))
    result = run(*ANSWERS[name][0].split(), "--quiet")
    assert (result.stdout, result.stderr) == ("", "")


def test_web_lists_what_it_wrote(workshop: Path, run: Any) -> None:
    write_packages(workshop / "node_modules")
    shown = run("web", "artifacts", "site").stdout
    assert "lib/onnxruntime-web  3" in shown and "the page" in shown
    assert "index.html" in run("web", "artifacts", "site", "--json").json["files"]


def test_a_config_file_serves_several_commands_and_arguments_too(workshop: Path, run: Any) -> None:
    Path("all.toml").write_text(
        '[bench]\nartifacts = "artifacts"\nsteps = 1\n'
        '[deploy]\nrun = "run"\nmodel = "from-file.onnx"\n'
        '[inject]\nmodel = "model.onnx"\ntarget = "from-file-adapted.onnx"\nrank = 3\n',
        encoding="utf-8",
    )
    assert run("bench", "--config", "all.toml", "--json").json["batch_size"] == 32
    run("deploy", "--config", "all.toml")
    run("lora", "inject", "--config", "all.toml")
    assert Path("from-file.onnx").is_file() and Path("from-file-adapted.onnx").is_file()


def test_a_model_that_cannot_be_trained_is_told_by_the_exit_code(workshop: Path, run: Any) -> None:
    import onnx.parser

    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 18, "custom": 1]>
        net (float[n, 2] x) => (float[n, 2] y) <float[2] w = {1, 1}> { a = Mul (x, w)  y = custom.Strange (a) }""")
    onnx.save(model, "strange.onnx")
    shown = run("check", "strange.onnx", "-l", "mse", code=2).stdout
    assert shown.startswith("no: ") and "custom.Strange" in shown and "--freeze" in shown
    refused = run("artifacts", "strange.onnx", "-l", "mse", "-o", "new", code=1).stderr.splitlines()
    assert "custom.Strange" in refused[0] and "--freeze" in refused[1] and len(refused) == 2
    assert not Path("new").exists()


def test_one_json_document_and_nothing_else(workshop: Path, run: Any) -> None:
    """Remarks on what was assumed are for people."""
    import numpy as np

    data = dict(np.load("data.npz"))
    np.savez("renamed.npz", features=data["x"], y=data["labels"])
    result = run("evaluate", "run", "-d", "renamed.npz", "--json")
    assert json.loads(result.stdout)["samples"] == 96 and result.stderr == ""
    assert "taking 'features'" in run("evaluate", "run", "-d", "renamed.npz").stderr


def test_bench_measures_what_there_is(workshop: Path, run: Any) -> None:
    Path("artifacts/eval_model.onnx").unlink()
    found = run("bench", "artifacts", "--steps", 1, "--json").json
    assert "step" in found and "evaluation" not in found
