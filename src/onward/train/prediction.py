"""Outputs of a trained model over some data, without labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime as ort

from onward.api.convert_inputs import convert
from onward.runtime.sessions import ModelFile, make_session
from onward.train.batches import make_batches
from onward.train.evaluation import join

if TYPE_CHECKING:
    from onward.checkpoint.content import CheckpointData
    from onward.runtime.devices import Device

__all__ = ["predict"]


def predict(
    eval_model: ModelFile,
    state: CheckpointData,
    names: Sequence[str],
    data: Any,
    *,
    batch_size: int,
    given: Sequence[str],
    device: Device | None = None,
    options: ort.SessionOptions | None,
) -> dict[str, np.ndarray]:
    """The named values of the eval model's graph; `given` is the order of data that has labels as well."""
    import onnx_ir as ir

    from onward.runtime import inference_model

    model = inference_model.inference_model(eval_model, state, names)
    proto = ir.to_proto(model)
    session = make_session(proto, device=device, options=options)
    kinds = {
        value.name: np.dtype(onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))
        for value in proto.graph.input
    }
    source = make_batches(data, list(kinds), batch_size=batch_size, given=given)
    parts: list[list[np.ndarray]] = []
    for batch in source.epoch(0):
        feeds = {name: convert(value, kinds[name], name) for name, value in zip(kinds, batch)}
        parts.append([np.asarray(result) for result in session.run(list(names), feeds)])
    if not parts:
        raise ValueError("the data has no batch")
    return {name: join([part[i] for part in parts]) for i, name in enumerate(names)}
