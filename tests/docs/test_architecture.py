"""The walks that docs/architecture.md draws, against the calls that really happen; its table against the packages."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import onnx.parser

import onward
from onward.artifacts import generate_artifacts
from onward.train.trainer import Trainer

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
MODEL = """<ir_version: 10, opset_import: ["": 21]>
    net (float[N, 2] x) => (float[N, 1] y) <float[2, 1] w = {1.0, 2.0}> { y = MatMul(x, w) }"""


def _package(frame: FrameType | None) -> str | None:
    name = "" if frame is None else frame.f_globals.get("__name__", "")
    return name.split(".")[1] if name.startswith("onward.") else None


def _calls(function: Callable[[], Any]) -> list[tuple[str, str, str]]:
    """Every call from one package of Onward into another: caller, callee, function."""
    calls: list[tuple[str, str, str]] = []

    def look(frame: FrameType, event: str, argument: Any) -> None:
        package = _package(frame) if event == "call" else None
        if package is None:
            return
        caller = frame.f_back
        while caller is not None and _package(caller) is None:
            caller = caller.f_back
        source = _package(caller)
        if source is not None and source != package:
            calls.append((source, package, frame.f_code.co_name))

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        function()
    finally:
        sys.setprofile(before)
    return calls


def _drawing(title: str) -> str:
    return PAGE.split(f"## {title}")[1].split("```")[1]


def test_generate_artifacts_passes_each_package_once(tmp_path: Path) -> None:
    drawn = re.findall(r"^   [├└]─ (\w+)", _drawing("From a model to artifacts"), re.MULTILINE)

    def generate() -> None:
        model = onnx.parser.parse_model(MODEL)
        generate_artifacts(model, loss="mse", optimizer="adamw", artifact_directory=tmp_path / "artifacts")

    calls = _calls(generate)
    # Packages do not call each other here, only what builds graphs, and a checkpoint its writer: artifacts hands the
    # result of one to the next.
    assert drawn[0] == "graph"
    pairs = {(a, b) for a, b, _ in calls if a in drawn and b in drawn and b != "graph"}
    assert pairs == {("checkpoint", "files")}
    # `make` looks the optimizer's name up, so that a wrong one is an error at once.
    walk = [
        (b, name)
        for a, b, name in calls
        if a == "artifacts" and b in drawn and b != "graph" and name != "make"
    ]
    begun = walk.index(("files", "write_set"))
    built = [name for name, _ in walk[: begun + 1]]
    assert [name for i, name in enumerate(built) if built[i - 1 : i] != [name]] == drawn[1:]
    assert {name for name, _ in walk[begun:]} == {"files", "checkpoint"}


def test_a_step_takes_the_drawn_way(tmp_path: Path) -> None:
    generate_artifacts(
        onnx.parser.parse_model(MODEL),
        loss="mse",
        optimizer="adamw",
        artifact_directory=tmp_path / "artifacts",
    )
    trainer = Trainer(tmp_path / "artifacts", output_directory=tmp_path / "run", progress=False)
    data = np.ones((8, 2), np.float32), np.ones((8, 1), np.float32)
    trainer.fit(data, batch_size=4, epochs=1)  # the models are loaded and specialized
    calls = _calls(lambda: trainer.fit(data, batch_size=4, epochs=2))
    drawn = re.findall(r"(\w+)\([^)]*\) +(api|runtime|checkpoint) ", _drawing("One training step"))
    assert drawn == [
        ("module", "api"), ("run", "runtime"), ("step", "api"), ("run", "runtime"), ("lazy_reset_grad", "api"),
        ("save_checkpoint", "checkpoint"),
    ]  # fmt: skip
    into_api = [name for a, b, name in calls if (a, b) == ("train", "api")]
    steps = [name for name in into_api if name in ("__call__", "step", "lazy_reset_grad")]
    # a fit begins without gradients; the schedule's own step ends each step
    assert steps == ["lazy_reset_grad", *["__call__", "step", "lazy_reset_grad", "step"] * 4]
    assert [name for a, b, name in calls if (a, b) == ("api", "runtime") and name == "run"] == ["run"] * 8
    building = {"autodiff", "losses", "optim", "onnxblock", "artifacts"}
    assert not [call for call in calls if call[1] in building]
    # graph.proto.optimizer_models computes the scalars of the update (bias corrections): nothing is built
    assert {name for _, b, name in calls if b == "graph"} <= {"to_single", "run"}


def _is_in_order(drawn: list[tuple[str, str]], calls: list[tuple[str, str]]) -> bool:
    """Whether the drawn calls come for the first time in the order in which they are drawn."""
    first = [calls.index(call) for call in drawn if call in calls]
    return len(first) == len(drawn) and first == sorted(first)


def test_fine_tuning_takes_the_drawn_way(tmp_path: Path) -> None:
    drawn = re.findall(r"^   [├└]─ (\w+) +(\w+)", _drawing("Fine-tuning"), re.MULTILINE)
    onnx.save(onnx.parser.parse_model(MODEL), tmp_path / "model.onnx")
    rng = np.random.default_rng(0)
    data = rng.normal(size=(16, 2)).astype(np.float32), rng.normal(size=(16, 1)).astype(np.float32)

    def finetune() -> None:
        result = onward.finetune(tmp_path / "model.onnx", data, epochs=1, progress=False)
        result.export(tmp_path / "mine.onnx")

    onward.finetune(tmp_path / "model.onnx", data, epochs=1, progress=False)  # modules are imported
    calls = [(b, name) for a, b, name in _calls(finetune) if a == "pipeline"]
    assert len(drawn) == 10
    assert _is_in_order(drawn, calls), [call for call in drawn if call not in calls]


def test_a_run_of_ranks_takes_the_drawn_way(tmp_path: Path) -> None:
    from onward.distributed import RunnerSettings, ShardedArrays, TrainingRunner

    generate_artifacts(
        onnx.parser.parse_model(MODEL),
        loss="mse",
        optimizer="adamw",
        artifact_directory=tmp_path / "artifacts",
    )
    loader = ShardedArrays(np.ones((8, 2), np.float32), np.ones((8, 1), np.float32), batch_size=4)
    settings = RunnerSettings(
        artifacts=tmp_path / "artifacts", checkpoint_directory=tmp_path / "run", epochs=1
    )
    drawn = re.findall(r"[├└]─ (\w+) +(\w+)", _drawing("Training on several ranks"))

    def run() -> None:
        with TrainingRunner(settings) as runner:
            runner.run(loader)

    calls = [(name, b) for _, b, name in _calls(run)]
    entered = [("join_ranks", "distributed"), *calls]  # the runner's own package calls it
    assert len(drawn) == 6
    assert _is_in_order(drawn, entered), [call for call in drawn if call not in entered]


def test_the_table_has_every_package_in_the_order_of_the_layers() -> None:
    table = PAGE.split("## Packages")[1].split("\n## ")[0]
    rows = [re.findall(r"`(\w+)`", row.split("|")[1]) for row in table.splitlines() if row.startswith("| `")]
    listed = [name for row in rows for name in row]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    layers = next(c["layers"] for c in contracts if c["name"] == "Arrows point down only")
    rank = {name: number for number, layer in enumerate(layers) for name in layer.split(" | ")}
    assert set(listed) == set(rank)
    assert [rank[name] for name in listed] == sorted(rank[name] for name in listed)
