"""The files beside the portable step: its state, the inference model, and that model's weights."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import onnx_ir as ir

from onward import contract
from onward.checkpoint.portable import StateLayout, to_portable, weights_of
from onward.graph.cleanup import simplify
from onward.graph.passes.inference_mode import to_inference
from onward.graph.prune import prune, values_of
from onward.graph.save import EXTERNAL_THRESHOLD, initializer_bytes
from onward.model_metadata import read_names

if TYPE_CHECKING:
    from onward.checkpoint.content import CheckpointData

__all__ = ["write_portable"]


def write_portable(
    folder: Path, prefix: str, evaluation: ir.Model, layout: StateLayout, checkpoint: CheckpointData
) -> None:
    """Write the state file, the inference model and its weights into a folder."""
    to_portable(checkpoint, folder / f"{prefix}state.bin", layout=layout)
    data = folder / f"{prefix}inference_model.bin"
    with open(data, "wb") as file:
        for piece in weights_of(checkpoint, layout):
            file.write(piece)
    model = _inference_model(evaluation, layout, data)
    path = folder / f"{prefix}inference_model.onnx"
    if initializer_bytes(model) - layout.weights_size > EXTERNAL_THRESHOLD:
        large = [
            v for v in model.graph.initializers.values() if not isinstance(v.const_value, ir.ExternalTensor)
        ]
        tensors = [value.const_value for value in large if value.const_value is not None]
        moved = ir.external_data.convert_tensors_to_external(tensors, folder, f"{path.name}.data")
        for value, tensor in zip(large, moved):
            value.const_value = tensor
    ir.save(model, path)


def _inference_model(evaluation: ir.Model, layout: StateLayout, data: Path) -> ir.Model:
    """The evaluation model's own outputs, with weights that lie in a file at the offsets of the state's."""
    model = evaluation.clone()
    about = model.metadata_props
    known = values_of(model.graph)
    outputs = [name for name in read_names(about, contract.OUTPUTS) if name in known]
    prune(model, outputs or [about[contract.LOSS]])
    to_inference(model)
    names = [part.name for part, _, _ in layout.parts() if part.role != "slot"]
    simplify(model, parameters=names)
    inputs = {value.name: value for value in model.graph.inputs}
    for part, dtype, offset in layout.parts():
        value = inputs.get(part.name) if part.role in ("frozen", "statistic", "trainable") else None
        if value is None:
            continue
        model.graph.inputs.remove(value)
        value.const_value = ir.ExternalTensor(
            data.name,
            offset,
            prod(part.shape) * dtype.itemsize,
            ir.DataType.from_numpy(dtype),
            shape=ir.Shape(part.shape),
            name=part.name,
            base_dir=data.parent,
        )
        model.graph.register_initializer(value)
    for key in (contract.TRAINABLE, contract.FROZEN, contract.LABELS, contract.LOSS):
        about.pop(key, None)
    about.update({contract.ROLE: "inference", contract.STATE_DIGEST: layout.digest.hex()})
    return model
