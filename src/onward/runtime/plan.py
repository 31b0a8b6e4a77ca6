"""What a training or evaluation model is made of, read from its inputs, outputs and metadata."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import onnx

from onward.errors import ModelError
from onward.graph.passes.specialize import BUFFER, OUT, RESET

__all__ = ["SEED", "Plan", "read_plan"]

SEED = "random_seed"


@dataclasses.dataclass(frozen=True)
class Plan:
    """Names by role, with shapes and types.

    `labels` are (index of the input, number of classes, label that is ignored or None). `same` are pairs of
    axes that must agree, each (input, axis, labels, axis): too few labels would be evaluated silently.
    `loss_scale` is the parameter by which gradients come multiplied, where the model is in float16.
    """

    inputs: list[str]
    outputs: list[str]
    parameters: list[str]
    trainable: list[str]
    statistics: list[str]
    input_gradients: list[str]
    random: bool
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, np.dtype]
    labels: list[tuple[int, int, int | None]]
    same: list[tuple[int, int, int, int]] = dataclasses.field(default_factory=list)
    loss_scale: str | None = None


def read_plan(model: onnx.ModelProto, path: str) -> Plan:
    """The plan of an artifact; an error where the file is not one of Onward's."""
    about = {entry.key: entry.value for entry in model.metadata_props}
    if "onward.trainable" not in about:
        raise ModelError(
            f"'{path}' is not an artifact of Onward: make it with onward.artifacts.generate_artifacts"
        )
    trainable: list[str] = json.loads(about["onward.trainable"])
    frozen: list[str] = json.loads(about["onward.frozen"])
    names = [value.name for value in model.graph.input]
    known = {*trainable, *frozen}
    internal = {name for name in names if name.endswith(BUFFER)} | {RESET, SEED}
    inputs = [name for name in names if name not in known and name not in internal]
    outputs = [v.name for v in model.graph.output if not v.name.endswith((OUT, ".next"))]
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, np.dtype] = {}
    for value in model.graph.input:
        tensor = value.type.tensor_type
        if tensor.elem_type:
            dtypes[value.name] = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type))
        if value.name in known:
            shapes[value.name] = tuple(dim.dim_value for dim in tensor.shape.dim)
    labels = [
        (inputs.index(name), int(entry["classes"]), entry.get("ignore_index"))
        for name, entry in json.loads(about.get("onward.labels", "{}")).items()
        if name in inputs
    ]
    return Plan(
        inputs=inputs,
        outputs=outputs,
        parameters=[name for name in names if name in known],
        trainable=[name for name in names if name in set(trainable)],
        statistics=json.loads(about.get("onward.statistics", "[]")),
        input_gradients=[name for name in inputs if f"{name}{BUFFER}" in internal],
        random=SEED in names,
        shapes=shapes,
        dtypes=dtypes,
        labels=labels,
        same=_shared_axes(model, inputs, [index for index, _, _ in labels]),
        loss_scale=about.get("onward.loss_scale"),
    )


def _shared_axes(
    model: onnx.ModelProto, inputs: list[str], labels: list[int]
) -> list[tuple[int, int, int, int]]:
    """Where a symbolic size of the labels is also one of another input."""
    first: dict[str, tuple[int, int]] = {}
    found = []
    axes = {v.name: [dim.dim_param for dim in v.type.tensor_type.shape.dim] for v in model.graph.input}
    for index in [i for i in range(len(inputs)) if i not in labels] + labels:
        for axis, symbol in enumerate(axes[inputs[index]]):
            if symbol and index in labels and symbol in first:
                found.append((*first[symbol], index, axis))
            elif symbol:
                first.setdefault(symbol, (index, axis))
    return found
