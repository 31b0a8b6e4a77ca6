"""What a training or evaluation model is made of, read from its inputs, outputs and metadata."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx

from onward import contract
from onward.contract import BUFFER, OUT, RESET, SEED
from onward.errors import MAKE_ARTIFACTS, ModelError
from onward.model_metadata import read_labels, read_names


@dataclasses.dataclass(frozen=True)
class Signature:
    """Names by role, with shapes and types.

    `labels` are (index of the input, number of classes, label that is ignored or None). `same` are pairs of
    axes that must agree, each (input, axis, labels, axis): too few labels would be evaluated silently.
    `loss_scale` is the parameter by which gradients come multiplied, where the model is in float16.
    `artifacts_id` is the same in all models of one set of artifacts; empty in models made otherwise.
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
    artifacts_id: str = ""


def read_signature(model: onnx.ModelProto, path: str, role: str) -> Signature:
    """The signature of an artifact in its role; an error where the file is not one of Onward's, or has another role."""
    about = {entry.key: entry.value for entry in model.metadata_props}
    if contract.TRAINABLE not in about:
        raise ModelError(
            f"'{path}' is not an artifact of Onward: make it with onward.artifacts.generate_artifacts",
            hint=MAKE_ARTIFACTS,
        )
    if about.get(contract.ROLE, role) != role:
        raise ModelError(f"'{path}' is the {about['onward.role']} model, and the {role} model is needed here")
    trainable = read_names(about, contract.TRAINABLE)
    frozen = read_names(about, contract.FROZEN)
    names = [value.name for value in model.graph.input]
    scale = about.get(contract.SCALE)
    if role == "training":
        _require_parameters(model, path, trainable, frozen)
        if scale is not None and scale not in frozen:
            raise ModelError(
                f"'{path}' names the loss scale {scale[:40]!r}, which is not one of its parameters"
            )
    parameters = {*trainable, *frozen}
    # what is left is the user's: batches and labels
    internal = {name for name in names if name.endswith(BUFFER)} | {RESET, SEED}
    inputs = [name for name in names if name not in parameters and name not in internal]
    outputs = [v.name for v in model.graph.output if not v.name.endswith((OUT, contract.NEXT))]
    if not outputs:
        raise ModelError(
            f"'{path}' has no output that is a loss: make it with generate_artifacts", hint=MAKE_ARTIFACTS
        )
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, np.dtype] = {}
    for value in model.graph.input:
        tensor = value.type.tensor_type
        if tensor.elem_type in onnx.TensorProto.DataType.values()[1:]:
            dtypes[value.name] = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type))
        if value.name in parameters:
            shapes[value.name] = tuple(dim.dim_value for dim in tensor.shape.dim)
    labels = [
        (inputs.index(name), classes, ignored)
        for name, (classes, ignored) in read_labels(about).items()
        if name in inputs
    ]
    return Signature(
        inputs=inputs,
        outputs=outputs,
        parameters=[name for name in names if name in parameters],
        trainable=[name for name in names if name in set(trainable)],
        statistics=read_names(about, contract.STATISTICS),
        input_gradients=[name for name in inputs if f"{name}{BUFFER}" in internal],
        random=SEED in names,
        shapes=shapes,
        dtypes=dtypes,
        labels=labels,
        same=_shared_axes(model, inputs, [index for index, _, _ in labels]),
        loss_scale=scale,
        artifacts_id=about.get(contract.ARTIFACTS, ""),
    )


def _require_parameters(model: onnx.ModelProto, path: str, trainable: list[str], frozen: list[str]) -> None:
    """Each parameter that the metadata names must be an input, of a known shape where it trains."""
    inputs = {value.name: value.type.tensor_type for value in model.graph.input}
    outputs = {value.name for value in model.graph.output}
    for name in [*trainable, *frozen]:
        if name not in inputs:
            raise ModelError(f"'{path}' names the parameter '{name}', which is not one of its inputs")
    for name in trainable:
        dims = list(inputs[name].shape.dim)
        # The file may be anyone's: what it claims decides how much memory is taken.
        kinds = {inputs[trained].elem_type for trained in trainable if trained in inputs}
        if not (kinds == {onnx.TensorProto.FLOAT} or kinds == {onnx.TensorProto.DOUBLE}) or any(
            dim.dim_value < 0 for dim in dims
        ):
            raise ModelError(f"'{path}': the parameter '{name}' is not a float tensor of a known shape")
        if f"{name}{BUFFER}" not in inputs or f"{name}{OUT}" not in outputs:
            raise ModelError(
                f"'{path}' has no gradient of its parameter '{name}': make it with generate_artifacts",
                hint=MAKE_ARTIFACTS,
            )


def _shared_axes(
    model: onnx.ModelProto, inputs: list[str], labels: list[int]
) -> list[tuple[int, int, int, int]]:
    """Where a symbolic size of the labels is also one of another input."""
    first: dict[str, tuple[int, int]] = {}
    shared = []
    axes = {v.name: [dim.dim_param for dim in v.type.tensor_type.shape.dim] for v in model.graph.input}
    # labels last: a symbol belongs to the input that has it first
    for index in [i for i in range(len(inputs)) if i not in labels] + labels:
        for axis, symbol in enumerate(axes[inputs[index]]):
            if symbol and index in labels and symbol in first:
                shared.append((*first[symbol], index, axis))
            elif symbol:
                first.setdefault(symbol, (index, axis))
    return shared


def step_seed(seed: int, step: int) -> int:
    """The seed of a step's random numbers, as int64."""
    mixed = (seed * contract.SEED_FACTOR + step * contract.STEP_FACTOR) & 0xFFFFFFFFFFFFFFFF
    return mixed - (1 << 64) if mixed >= 1 << 63 else mixed
