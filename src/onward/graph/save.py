"""Models to files: one file where protobuf can hold it, external data beside it where it cannot."""

from __future__ import annotations

import os
from pathlib import Path

import onnx_ir as ir

__all__ = ["EXTERNAL_THRESHOLD", "initializer_bytes", "write_model"]

# protobuf ends at 2 GiB for the whole message; the graph itself needs some of it
EXTERNAL_THRESHOLD = 1800 * 2**20


def initializer_bytes(model: ir.Model) -> int:
    """How many bytes the initializers of a model take."""
    return sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)


def write_model(
    model: ir.Model,
    path: str | os.PathLike[str],
    *,
    external: bool | None = None,
    data_name: str | None = None,
) -> list[Path]:
    """Write a model and return the files made; `external` forces (or forbids) a `.data` file beside it.

    Not atomic: callers write to a temporary place and move the result. `data_name` is the name of the data
    file as the model will refer to it.
    """
    target = Path(path)
    if external is None:
        external = initializer_bytes(model) > EXTERNAL_THRESHOLD
    if not external:
        ir.save(model, target)
        return [target]
    location = data_name or f"{target.name}.data"
    tensors = {name: value.const_value for name, value in model.graph.initializers.items()}
    ir.save(model, target, external_data=location, size_threshold_bytes=1024)
    # saving points the model's tensors at the new file, which the caller is about to move
    for name, tensor in tensors.items():
        model.graph.initializers[name].const_value = tensor
    return [target, target.with_name(location)]
