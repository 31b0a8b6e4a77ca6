"""What the nodes of training models are for: a table by origin, for forward models that train all of their weights.

    python benchmarks/nodes_by_origin.py forward.onnx … [--shape x=2,3,64,64]

Counts the file, and with --shape also the session for inputs of these shapes, where sizes are known and gradients
replace their buffers.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from pathlib import Path

import onnx

from onward.artifacts import LossType, generate_artifacts
from onward.contract import CONV_WEIGHT
from onward.graph.proto.accumulation import specialize_reset
from onward.graph.proto.conv_forms import fit_forms
from onward.graph.proto.known_shapes import specialize_shapes

ORIGINS = (
    "forward", "loss", "convolution to weights", "convolution to input", "batch norm backward",
    "activations backward", "other gradients", "sums of gradients", "sizes", "batch norm statistics",
    "accumulation and results",
)  # fmt: skip
ACTIVATIONS = {"Relu", "Clip", "HardSigmoid", "HardSwish", "Sigmoid", "Tanh", "LeakyRelu", "Gelu", "Mish"}
SIZES = {"Shape", "Size", "Range", "ReduceProd"}


def origins(training: onnx.ModelProto, forward: onnx.ModelProto) -> Counter[str]:
    """How many nodes of a training model are for what."""
    kinds = {node.name: node.op_type for node in forward.graph.node if node.op_type != "Constant"}
    nodes = list(training.graph.node)
    makers = {name: node for node in nodes for name in node.output}
    dtypes = _whole_numbers(nodes)
    weights: set[int] = set()
    for node in nodes:
        if any(entry.key == CONV_WEIGHT for entry in node.metadata_props):
            _add_ancestors(node, _layer(node), makers, weights)
    found: Counter[str] = Counter()
    for node in nodes:
        layer, inside, _ = node.name.partition("/grad/")
        kind = kinds.get(layer, "")
        if node.name in kinds:
            origin = "forward"
        elif node.name.startswith("loss/"):
            origin = "loss"
        elif dtypes.issuperset(node.output):
            origin = "sizes"
        elif id(node) in weights:
            origin = "convolution to weights"
        elif not inside:
            statistic = kind == "BatchNormalization" or "BatchNormalization/" in node.name
            origin = "batch norm statistics" if statistic else "accumulation and results"
        elif node.op_type in ("Add", "Sum") and kind in (
            "Add",
            "Conv",
            "Relu",
            "BatchNormalization",
            "MaxPool",
        ):
            origin = "sums of gradients"
        elif kind in ("Conv", "ConvTranspose"):
            origin = "convolution to input"
        elif kind == "BatchNormalization":
            origin = "batch norm backward"
        else:
            origin = "activations backward" if kind in ACTIVATIONS else "other gradients"
        found[origin] += 1
    return found


def _layer(node: onnx.NodeProto) -> str:
    return node.name.partition("/grad/")[0]


def _add_ancestors(
    node: onnx.NodeProto, layer: str, makers: dict[str, onnx.NodeProto], found: set[int]
) -> None:
    """A node and all of the same layer that it needs."""
    if id(node) in found or _layer(node) != layer or "/grad/" not in node.name:
        return
    found.add(id(node))
    for name in node.input:
        if name in makers:
            _add_ancestors(makers[name], layer, makers, found)


def _whole_numbers(nodes: list[onnx.NodeProto]) -> set[str]:
    """Values that are computed of sizes alone."""
    found: set[str] = set()
    moved = {"Squeeze", "Unsqueeze", "Concat", "Add", "Sub", "Mul", "Div", "Max", "Cast", "Reshape", "Gather"}
    made = {name for node in nodes for name in node.output}
    for node in nodes:
        of_sizes = [name for name in node.input if name in found]
        others = [name for name in node.input if name in made and name not in found]
        if node.op_type in SIZES or (node.op_type in moved and of_sizes and not others):
            found.update(node.output)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--shape", action="append", default=[], metavar="INPUT=SIZES")
    arguments = parser.parse_args()
    shapes = {
        name: tuple(map(int, sizes.split(",")))
        for name, _, sizes in (text.partition("=") for text in arguments.shape)
    }
    columns: dict[str, Counter[str]] = {}
    for path in arguments.models:
        forward = onnx.load(path)
        with tempfile.TemporaryDirectory() as folder:
            generate_artifacts(forward, loss=LossType.CrossEntropyLoss, artifact_directory=folder)
            training = onnx.load(Path(folder) / "training_model.onnx")
        columns[str(path)] = origins(training, forward)
        if shapes:
            batch = next(iter(shapes.values()))[0]
            known = {"labels": (batch,), **shapes}
            special = specialize_reset(training, reset=True, keep_shapes=True)
            fit_forms(special, known)
            specialize_shapes(special, known)
            columns[f"{path}, known shapes"] = origins(special, forward)
    print("| origin |", " | ".join(columns), "|")
    print("|---|", "---:|" * len(columns), sep="")
    for origin in ORIGINS:
        print(f"| {origin} |", " | ".join(str(found[origin]) for found in columns.values()), "|")
    print("| all |", " | ".join(str(found.total()) for found in columns.values()), "|")


if __name__ == "__main__":
    main()
