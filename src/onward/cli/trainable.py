"""Which initializers of a model are parameters, where no one says: weights yes, statistics and settings no."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onward.cli.command import CommandError
from onward.cli.model_file import read_model

__all__ = ["Choice", "choose_parameters"]

# Inputs that set an operator up; a float initializer there is no weight.
_SETTINGS = {
    "BatchNormalization": (3, 4),
    "Clip": (1, 2),
    "Dropout": (1,),
    "Resize": (1, 2),
    "Pad": (2,),
    "Range": (0, 1, 2),
    "OneHot": (2,),
    "QuantizeLinear": (1, 2),
    "DequantizeLinear": (1, 2),
    "NonMaxSuppression": (3, 4),
}


@dataclass(frozen=True)
class Choice:
    """Names to train, names to keep as parameters that do not train, and whether the model itself said so."""

    trainable: list[str]
    frozen: list[str]
    recorded: bool


def choose_parameters(
    model: Path, *, train: Sequence[str] = (), freeze: Sequence[str] = (), adapted: bool = False
) -> Choice:
    """What to train: the patterns given, else what the model records, else every weight.

    A weight is a float32 initializer with more than one element that is read as data: running statistics,
    bounds, rates and other settings are not. `freeze` takes names out of the default. Of a model to be
    `adapted`, `train` may name what is not there yet.
    """
    import fnmatch
    import json

    import onnx

    proto = read_model(model)
    about = {entry.key: entry.value for entry in proto.metadata_props}
    names = {tensor.name for tensor in proto.graph.initializer}
    recorded = "onward.requires_grad" in about
    if recorded:
        trainable = [name for name in json.loads(about["onward.requires_grad"]) if name in names]
        frozen = [name for name in json.loads(about.get("onward.frozen_params", "[]")) if name in names]
    else:
        settings = {
            node.input[index]
            for node in proto.graph.node
            for index in _SETTINGS.get(node.op_type, ())
            if index < len(node.input)
        }
        statistics = [
            name
            for node in proto.graph.node
            if node.op_type == "BatchNormalization"
            for name in node.input[3:5]
        ]
        trainable = [
            tensor.name
            for tensor in [*proto.graph.initializer, *_constants(proto.graph)]
            if tensor.data_type == onnx.TensorProto.FLOAT
            and _size(tensor.dims) > 1
            and tensor.name not in settings
        ]
        frozen = [name for name in statistics if name in names]
    known = [
        *names,
        *(tensor.name for tensor in _constants(proto.graph)),
        *(v.name for v in proto.graph.input),
    ]
    hits: dict[str, list[str]] = {}
    for option, patterns in (("--train", () if adapted else train), ("--freeze", freeze)):
        for pattern in patterns:
            hits[pattern] = [name for name in known if name == pattern or fnmatch.fnmatchcase(name, pattern)]
            if not hits[pattern]:
                raise CommandError(f"{option} {pattern}: no parameter has that name", _near(pattern, names))
    if train:
        return Choice(list(train), list(freeze), recorded=True)
    for pattern in freeze:
        hit = hits[pattern]
        trainable = [name for name in trainable if name not in hit]
        frozen += [name for name in hit if name not in frozen]
    if not trainable:
        raise CommandError(f"'{model}' has no weight to train", "its parameters must be float32 initializers")
    return Choice(trainable, list(dict.fromkeys(frozen)), recorded)


def _near(name: str, names: Collection[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    some = ", ".join(sorted(names)[:8]) + (", …" if len(names) > 8 else "")
    return f"did you mean '{near[0]}'?" if near else f"there are {some}"


def _constants(graph: Any) -> list[Any]:
    """Weights that an exporter wrote as Constant nodes: matrices and more, under the names of their outputs."""
    found = []
    for node in graph.node:
        for attribute in node.attribute if node.op_type == "Constant" else ():
            if attribute.name == "value" and len(attribute.t.dims) > 1:
                tensor = type(attribute.t)()
                tensor.data_type, tensor.name = attribute.t.data_type, node.output[0]
                tensor.dims.extend(attribute.t.dims)
                found.append(tensor)
    return found


def _size(dims: Sequence[int]) -> int:
    total = 1
    for dim in dims:
        total *= dim
    return total
