"""Parameters of a training block to a checkpoint file, and back into a model."""

from __future__ import annotations

import os
from collections.abc import Sequence

import onnx

from onward.checkpoint.content import CheckpointData, NominalTensor
from onward.checkpoint.store import load, save
from onward.errors import CheckpointError


def save_checkpoint(
    parameters: tuple[Sequence[onnx.TensorProto], Sequence[onnx.TensorProto]],
    path_to_checkpoint: str | os.PathLike[str],
    nominal_checkpoint: bool = False,
) -> None:
    """Save trainable and frozen parameters; with `nominal_checkpoint` only their names and types."""
    trainable, frozen = parameters

    def convert(tensors: Sequence[onnx.TensorProto]) -> dict:
        if nominal_checkpoint:
            return {tensor.name: NominalTensor(tensor.data_type) for tensor in tensors}
        return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in tensors}

    save(
        CheckpointData(trainable=convert(trainable), frozen=convert(frozen), nominal=nominal_checkpoint),
        path_to_checkpoint,
    )


def load_checkpoint_to_model(path_to_checkpoint: str | os.PathLike[str], model: onnx.ModelProto) -> None:
    """Overwrite the initializers of a model with the checkpoint's parameters of the same names."""
    data = load(path_to_checkpoint)
    parameters = {**data.trainable, **data.frozen}
    for tensor in model.graph.initializer:
        # What the checkpoint does not have stays: a model has constants that are no parameters.
        value = parameters.get(tensor.name)
        if isinstance(value, NominalTensor):
            reason = "it is nominal: it holds names and types, no values"
            raise CheckpointError(os.fspath(path_to_checkpoint), reason, field=tensor.name)
        if value is not None:
            tensor.CopyFrom(onnx.numpy_helper.from_array(value, tensor.name))
