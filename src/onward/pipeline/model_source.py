"""A model of any origin, opened to train or to evaluate it."""

from __future__ import annotations

import os
from pathlib import Path

import onnx

from onward.data.match_inputs import specs_of
from onward.graph.gate import read_proto
from onward.hub.base_folder import find_base
from onward.hub.read_info import read_info
from onward.tasks.protocol import Source


def open_source(model: str | os.PathLike[str] | onnx.ModelProto) -> Source:
    """A model of any origin, with what is known of it; its weights are not read."""
    file: Path | onnx.ModelProto
    path: Path | None = None
    if isinstance(model, onnx.ModelProto):
        file = model
    else:
        path = Path(model)
        file = find_base(path)[1] if path.is_dir() else path
    proto = read_proto(file, read_data=False)  # weights are not needed yet
    info = read_info(file if path is None or not path.is_dir() else path)
    output = proto.graph.output[0]
    dims = output.type.tensor_type.shape.dim
    width = dims[-1].dim_value if len(dims) == 2 and dims[-1].HasField("dim_value") else None
    return Source(file, path, specs_of(proto.graph), width, output.name, info)
