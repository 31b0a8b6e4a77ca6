"""recompute=…: the same step with fewer values kept, by scope or by memory, and what is refused."""

from __future__ import annotations

import collections
import json
import logging
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import nn

from onward.api import CheckpointState, Module
from onward.artifacts import ActivationBudget, Artifacts, LossType, build_artifacts, generate_artifacts
from onward.errors import ModelError
from onward.export import from_torch
from small_models import one_thread

torch.set_num_threads(1)
VIEWS = ("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity")
WIDTHS = {"float": 4, "int64": 8, "bool": 1, "int32": 4, "double": 8}


class Stack(nn.Module):
    """Blocks in a row under the scopes `blocks.0`, `blocks.1` …"""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Residual(nn.Module):
    """Two convolutions with batch norms beside a path of its own."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(x + self.norms[1](self.second(inner)))


class Encoder(nn.Module):
    """Attention and a wide layer, both with dropout, as in every encoder."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.mix(x).chunk(3, dim=-1)
        x = x + self.drop(torch.softmax(q @ k.transpose(1, 2), dim=-1)) @ v
        return self.norm(x + self.drop(self.down(nn.functional.gelu(self.up(x)))))


class Counted(nn.Module):
    """Reads integers that depend on its input: the position of the largest number of each row."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.layer(x))
        return torch.sigmoid(hidden * self.table(hidden.argmax(dim=-1)))


class Recurrent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell, self.layer = nn.LSTM(width, width, batch_first=True), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(self.cell(torch.sigmoid(x))[0]))


def dense(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width), nn.Sigmoid())


def tied() -> nn.Module:
    block = dense(40)
    return Stack(block, block, block)


# what is trained, its input, and an operator that runs again in each block
NETWORKS: dict[str, tuple[Any, tuple[int, ...], str]] = {
    "dense": (lambda: Stack(*(dense(40) for _ in range(4))), (10, 40), "Gemm"),
    "one block three times": (tied, (10, 40), "Gemm"),
    "batch norm": (lambda: Stack(*(Residual(4) for _ in range(3))), (3, 4, 12, 12), "Conv"),
    "dropout": (lambda: Stack(*(Encoder(16) for _ in range(3))), (2, 24, 16), "Softmax"),
    "integers": (lambda: Stack(*(Counted(24) for _ in range(3))), (20, 24), "ArgMax"),
    "recurrent": (lambda: Stack(*(Recurrent(12) for _ in range(2))), (3, 30, 12), "Sigmoid"),
}


def exported(network: nn.Module, x: torch.Tensor) -> onnx.ModelProto:
    """A model for training with symbolic batch."""
    made = from_torch(
        network.train(), (x,), input_names=["x"], output_names=["y"],
        dynamic_axes={"x": {0: "batch"}, "y": {0: "batch"}}, check=False,
    )  # fmt: skip
    return onnx.load_from_string(made) if isinstance(made, bytes) else made


@pytest.fixture(scope="module")
def models() -> dict[str, onnx.ModelProto]:
    torch.manual_seed(0)
    return {name: exported(make(), torch.randn(shape)) for name, (make, shape, _) in NETWORKS.items()}


def step_bytes(made: Artifacts) -> bytes:
    return ir.to_proto(made.training).SerializeToString()


def write(model: onnx.ModelProto, folder: Path, **options: Any) -> Path:
    chosen: dict[str, Any] = {"loss": LossType.MSELoss, "additional_output_names": ["y"]}
    generate_artifacts(model, artifact_directory=folder, **{**chosen, **options})
    return folder


def load(folder: Path, options: ort.SessionOptions | None = None) -> tuple[CheckpointState, Module]:
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    chosen: dict[str, Any] = {"session_options": options or one_thread(), "seed": 3, "on_nonfinite": "ignore"}
    return state, Module(folder / "training_model.onnx", state, **chosen)


def two_steps(folder: Path, x: np.ndarray) -> dict[str, np.ndarray]:
    """Loss, output, gradients and statistics of a step, and the gradients after another is added."""
    state, module = load(folder)
    loss, y = module(x, np.ones_like(x))
    found = {"loss": loss, "y": y}
    found |= {name: p.grad.copy() if p.requires_grad else p.data.copy() for name, p in state.parameters}
    module(x[:2], np.ones_like(x[:2]))
    found |= {f"{name} twice": p.grad.copy() for name, p in state.parameters if p.requires_grad}
    return found


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Equal but for what another way of fusing the same operators may round differently."""
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        scale = float(np.abs(array).max(initial=0.0))
        np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-6 * scale, err_msg=name)


def optimized(folder: Path, x: np.ndarray) -> tuple[onnx.ModelProto, list[dict[str, Any]]]:
    """The step as the runtime runs it, and its profile."""
    options = one_thread()
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "profile")
    _, module = load(folder, options)
    module(x, np.ones_like(x))
    (session,) = module.step.sessions()
    session.end_profiling()
    events = json.loads(next(folder.glob("profile*.json")).read_text())
    return onnx.load(folder / "optimized.onnx"), events


def peak_bytes(model: onnx.ModelProto, events: list[dict[str, Any]]) -> int:
    """The most that intermediate values take at once, in the order and with the sizes of a real run."""
    nodes = {node.name: node for node in model.graph.node if node.name}
    run = []
    for event in events:
        name = event["name"].removesuffix("_kernel_time")
        if event.get("cat") == "Node" and name != event["name"] and name in nodes:
            run.append((nodes[name], event["args"]["output_type_shape"]))
    assert len(run) > 0.9 * len(model.graph.node)
    results = {value.name for value in model.graph.output}
    root: dict[str, str] = {}
    size: dict[str, int] = {}
    last: dict[str, int] = {}
    for index, (node, shapes) in enumerate(run):
        for name in node.input:
            last[root.get(name, name)] = index
        if node.op_type in VIEWS:
            root[node.output[0]] = root.get(node.input[0], node.input[0])
            continue
        for name, described in zip([name for name in node.output if name], shapes):
            ((kind, shape),) = described.items()
            if name not in results:
                size[name] = math.prod(shape) * WIDTHS[kind]
                last[name] = index
    changes: collections.Counter[int] = collections.Counter()
    for index, (node, _) in enumerate(run):
        for name in node.output:
            if name in size:
                changes[2 * index] += size[name]
                changes[2 * last[name] + 1] -= size[name]
    live = most = 0
    for _, change in sorted(changes.items()):
        live += change
        most = max(most, live)
    return most


def input_of(name: str) -> np.ndarray:
    return np.random.default_rng(0).normal(size=NETWORKS[name][1]).astype(np.float32)


# ---- the same step ---------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", ["blocks.*", True, 0.9], ids=str)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_is_the_same(
    models: dict[str, onnx.ModelProto], tmp_path: Path, name: str, wanted: Any
) -> None:
    x = input_of(name)
    expected = two_steps(write(models[name], tmp_path / "all"), x)
    made = write(models[name], tmp_path / "some", recompute=wanted)
    assert "/recomputed" in onnx.printer.to_text(onnx.load(made / "training_model.onnx"))
    assert_same(two_steps(made, x), expected)


class Gated(nn.Module):
    """Blocks of a decoder's kind: an activation function times another projection."""

    def __init__(self, function: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.layers = nn.ModuleList(nn.Linear(32, size) for size in (96, 96, 32, 96, 96, 32))
        for index in (2, 5):
            self.layers[index] = nn.Linear(96, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for gate, up, down in (self.layers[:3], self.layers[3:]):
            x = x + down(self.function(gate(x)) * up(x))
        return x


@pytest.mark.parametrize(
    ("function", "kinds"),
    [(nn.SiLU(), {"Sigmoid": 2, "Mul": 2}), (nn.GELU(), {"Gelu": 2}), (nn.ReLU(), {})],
    ids=["silu", "gelu", "relu"],
)
def test_activation_functions_alone_are_recomputed(
    tmp_path: Path, function: nn.Module, kinds: dict[str, int]
) -> None:
    x = np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32)
    model = exported(Gated(function), torch.from_numpy(x))
    expected = two_steps(write(model, tmp_path / "all"), x)
    folder = write(model, tmp_path / "some", recompute="pointwise")
    nodes = onnx.load(folder / "training_model.onnx").graph.node
    again = collections.Counter(node.op_type for node in nodes if "/recomputed" in node.name)
    assert again == kinds
    assert_same(two_steps(folder, x), expected)
    kept, found = (peak_bytes(*optimized(tmp_path / name, x)) for name in ("all", "some"))
    assert found < kept if kinds else found == kept


@pytest.mark.parametrize("name", NETWORKS)
def test_the_runtime_keeps_what_is_repeated(
    models: dict[str, onnx.ModelProto], tmp_path: Path, name: str
) -> None:
    """Its optimizer looks for common subexpressions, which would undo all of it."""
    kind, blocks = NETWORKS[name][2], len(NETWORKS[name][0]().blocks)
    model, _ = optimized(write(models[name], tmp_path, recompute="blocks.*"), input_of(name))
    again = [n for n in model.graph.node if kind in n.op_type and any("/recomputed" in o for o in n.output)]
    once = 1 if name == "one block three times" else blocks  # one scope is one segment
    assert len(again) >= once


@pytest.mark.parametrize("opset", [13, 17])
def test_older_opsets_have_it_too(models: dict[str, onnx.ModelProto], tmp_path: Path, opset: int) -> None:
    made = write(models["dense"], tmp_path / "some", recompute="blocks.*", opset=opset)
    assert onnx.load(made / "training_model.onnx").opset_import[0].version == opset
    x = input_of("dense")
    assert_same(two_steps(made, x), two_steps(write(models["dense"], tmp_path / "all"), x))


def test_an_output_inside_of_a_segment_is_kept(models: dict[str, onnx.ModelProto], tmp_path: Path) -> None:
    inside = next(node.output[0] for node in models["dense"].graph.node if node.op_type == "Tanh")
    found = []
    for folder, wanted in ((tmp_path / "all", None), (tmp_path / "some", "blocks.*")):
        write(models["dense"], folder, recompute=wanted, additional_output_names=["y", inside])
        x = input_of("dense")
        found.append(load(folder)[1](x, np.ones_like(x)))
    for with_it, without in zip(*found, strict=True):
        np.testing.assert_array_equal(with_it, without)
    names = {
        output for node in onnx.load(folder / "training_model.onnx").graph.node for output in node.output
    }
    assert f"{inside}/recomputed" not in names


def test_an_empty_batch_passes_the_gates(models: dict[str, onnx.ModelProto], tmp_path: Path) -> None:
    x = np.zeros((0, 40), np.float32)
    expected = two_steps(write(models["dense"], tmp_path / "all"), x)
    assert_same(two_steps(write(models["dense"], tmp_path / "some", recompute="blocks.*"), x), expected)


def test_non_finite_gradients_pass_the_gates(models: dict[str, onnx.ModelProto], tmp_path: Path) -> None:
    x = input_of("dense")
    x[0, 0] = np.nan
    results = []
    for folder, wanted in ((tmp_path / "all", None), (tmp_path / "some", "blocks.*")):
        state, module = load(write(models["dense"], folder, recompute=wanted))
        module(x, np.ones_like(x))
        results.append({name: p.grad.copy() for name, p in state.parameters})
    for name, expected in results[0].items():
        np.testing.assert_array_equal(np.isnan(results[1][name]), np.isnan(expected))


def test_two_runs_give_the_same_bytes(models: dict[str, onnx.ModelProto]) -> None:
    first, second = (
        step_bytes(build_artifacts(models["dropout"], loss=LossType.MSELoss, recompute=True))
        for _ in range(2)
    )
    assert first == second


# ---- less memory -----------------------------------------------------------------------------------


def deep() -> onnx.ModelProto:
    torch.manual_seed(0)
    return exported(Stack(*(dense(16) for _ in range(16))), torch.randn(4, 16))


def test_what_is_kept_falls_as_asked_for(tmp_path: Path) -> None:
    """64 layers: least memory is about the square root of it, and a share is what it says.

    What a gradient takes while it is computed comes on top: a few of the 64 values of 32 kB.
    """
    model, x = deep(), np.ones((512, 16), np.float32)
    peaks = {
        wanted: peak_bytes(*optimized(write(model, tmp_path / str(i), recompute=wanted), x))
        for i, wanted in enumerate([None, 0.75, 0.5, True])
    }
    whole = peaks[None]
    assert whole <= (64 + 4) * 32_768  # gradients are used up as they are made
    assert peaks[0.75] <= 0.75 * whole + 4 * 32_768
    assert peaks[0.5] <= 0.5 * whole + 4 * 32_768
    assert peaks[True] <= 0.35 * whole


@pytest.mark.parametrize("limit", [600_000, "900kB"])
def test_a_number_of_bytes_is_kept_to(tmp_path: Path, limit: int | str) -> None:
    """Of 16 times 96 kB; what a gradient takes while it is computed comes on top."""
    budget = ActivationBudget(limit, sizes={"batch": 512})
    made = write(deep(), tmp_path, recompute=budget)
    allowed = limit if isinstance(limit, int) else 900_000
    assert peak_bytes(*optimized(made, np.ones((512, 16), np.float32))) <= allowed + 4 * 65_536


def test_a_budget_that_is_large_enough_changes_nothing(models: dict[str, onnx.ModelProto]) -> None:
    chosen: dict[str, Any] = {"loss": LossType.MSELoss}
    plain = step_bytes(build_artifacts(models["dense"], **chosen))
    budget = ActivationBudget("1GB", sizes={"batch": 10})
    assert step_bytes(build_artifacts(models["dense"], recompute=budget, **chosen)) == plain
    assert step_bytes(build_artifacts(models["dense"], recompute=1.0, **chosen)) == plain


def test_batch_norms_do_not_hold_what_they_normalize(tmp_path: Path) -> None:
    """Neither for the backward pass nor for their statistics, which may be computed at the end of the step."""
    torch.manual_seed(0)
    model = exported(Stack(*(Residual(4) for _ in range(12))), torch.randn(2, 4, 8, 8))
    x = np.ones((4, 4, 8, 8), np.float32)
    peaks = [
        peak_bytes(*optimized(write(model, tmp_path / str(wanted), recompute=wanted), x))
        for wanted in (None, True)
    ]
    # four values of a block are kept, or one; the gradient of a convolution takes another twenty at once
    assert peaks[0] - peaks[1] >= 0.6 * 12 * 3 * x.nbytes


MEASURE = """
import sys
import numpy as np
from onward.api import CheckpointState, Module
def resident(key):
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith(key)) / 1024
state = CheckpointState.load_checkpoint(sys.argv[1] + "/checkpoint")
module = Module(sys.argv[1] + "/training_model.onnx", state)
x = np.ones((16384, 16), np.float32)
before = resident("VmRSS")
module(x, x)
print(resident("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell a process's own peak")
def test_the_process_takes_less(tmp_path: Path) -> None:
    """48 values of 1 to 2 MB are kept, or a few."""
    model = deep()
    taken = {}
    for wanted in (None, True):
        folder = write(model, tmp_path / str(wanted), recompute=wanted, additional_output_names=None)
        told = subprocess.run(
            [sys.executable, "-c", MEASURE, folder], capture_output=True, text=True, check=True
        )
        taken[wanted] = float(told.stdout)
    assert taken[True] < 0.6 * taken[None]


# ---- what is refused -------------------------------------------------------------------------------

LOOP = """<ir_version: 10, opset_import: ["": 21]>
net (float[N, 2] x) => (float[N, 2] y) <float[2, 2] w = {1.0, 2.0, 3.0, 4.0}, int64 times = {3}, bool go = {1}> {
    y = Loop (times, go, x) <body = step (int64 i, bool c, float[N, 2] h) => (bool d, float[N, 2] g) {
        d = Identity (c)  m = MatMul (h, w)  g = Tanh (m) }> }"""


def looping() -> onnx.ModelProto:
    model = onnx.parser.parse_model(LOOP)
    model.graph.node[0].name = "/steps/Loop"
    for index, node in enumerate(model.graph.node[0].attribute[0].g.node):
        node.name = f"/inside/block/{node.op_type}_{index}"
    return model


def nameless() -> onnx.ModelProto:
    text = """<ir_version: 10, opset_import: ["": 21]>
    net (float[N, 2] x) => (float[N, 2] y) <float[2, 2] w = {1.0, 2.0, 3.0, 4.0}> { y = MatMul (x, w) }"""
    return onnx.parser.parse_model(text)


REFUSED: list[tuple[Any, type[Exception], str]] = [
    ("block.*", ModelError, r"'block\.\*' matches no scope; did you mean 'blocks\.0'"),
    (["blocks.*", "decoder"], ModelError, "'decoder' matches no scope"),
    (0.01, ModelError, r"cannot be kept in 0\.01 .*the least that was found is 0\.\d\d"),
    ("1kB", ModelError, "a budget in bytes needs the sizes of 'batch'"),
    (ActivationBudget("1kB", sizes={"batch": 8}), ModelError, "cannot be kept in"),
    (
        ActivationBudget(0.5, sizes={"bacth": 8}),
        ModelError,
        "no activation has a dimension 'bacth'; there are batch",
    ),
    (ActivationBudget("much"), ValueError, "'much' is no number of bytes"),
    (1.5, ValueError, "neither a share between 0 and 1 nor a whole number of bytes"),
    (0, ValueError, "neither a share"),
    ([], TypeError, "pass True, a share"),
    ([1], TypeError, "pass True, a share"),
]


@pytest.mark.parametrize(("wanted", "kind", "message"), REFUSED, ids=[str(case[0]) for case in REFUSED])
def test_what_cannot_be_done_is_one_clear_error(
    models: dict[str, onnx.ModelProto], tmp_path: Path, wanted: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        write(models["dense"], tmp_path / "out", recompute=wanted)
    assert not (tmp_path / "out").exists()


def test_bodies_of_loops_are_not_recomputed() -> None:
    chosen: dict[str, Any] = {"requires_grad": ["w"], "loss": LossType.MSELoss}
    with pytest.raises(ModelError, match=r"only nodes in the body of '/steps/Loop'"):
        build_artifacts(looping(), recompute="inside.block", **chosen)
    plain = step_bytes(build_artifacts(looping(), **chosen))
    assert step_bytes(build_artifacts(looping(), recompute="steps", **chosen)) == plain


def test_a_model_without_scopes_says_so() -> None:
    with pytest.raises(
        ModelError, match=r"there are loss; recompute=True or a share such as 0\.5 needs none"
    ):
        build_artifacts(nameless(), requires_grad=["w"], loss=LossType.MSELoss, recompute="layer.*")


def test_a_scope_with_nothing_to_drop_is_told(
    models: dict[str, onnx.ModelProto], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "onward"):
        build_artifacts(models["dense"], loss=LossType.MSELoss, recompute="blocks.0.1")
    assert "needs nothing from inside of blocks.0.1" in caplog.text
