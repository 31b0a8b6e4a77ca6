"""The loss and the metrics of an evaluation model over some batches."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime as ort

from onward.api.convert_inputs import check_labels, convert, prepare
from onward.runtime.sessions import ModelFile, make_session
from onward.train.batches import Batches, batch_weight, make_batches
from onward.train.metrics import Metric, compute, confusion

if TYPE_CHECKING:
    from onward.checkpoint.content import CheckpointData
    from onward.runtime.devices import Device
    from onward.runtime.step import EvaluationStep

__all__ = ["evaluate", "join", "predict"]


def evaluate(
    step: EvaluationStep,
    source: Batches,
    metrics: Mapping[str, Metric],
    *,
    results: Sequence[str],
    matrix: list[np.ndarray] | None = None,
) -> dict[str, float]:
    """The mean loss and the metrics; `results` are the forward model's outputs, which metrics judge.

    `matrix` receives the confusion matrix, where the model takes one label for each sample.
    """
    signature = step.signature
    total, weight = 0.0, 0.0
    kept: dict[str, list[np.ndarray]] = {name: [] for name in [*signature.outputs[1:], *signature.inputs]}
    for batch in source.epoch(0):
        feeds, _ = prepare(signature, batch)
        check_labels(signature, feeds)
        found = step.run(feeds)
        size = batch_weight(signature, feeds)
        if size:  # a batch without a label that counts has no loss
            total += float(found[0].reshape(-1)[0]) * size
            weight += size
        if metrics:
            for name, value in zip([*signature.outputs[1:], *signature.inputs], [*found[1:], *feeds]):
                kept[name].append(_array(value))
    if not weight:
        raise ValueError("the evaluation data has no batch, or none with a label that counts")
    figures = {"loss": total / weight}
    if not metrics:
        return figures
    arrays = {name: join(parts) for name, parts in kept.items()}
    ordered = [*(n for n in results if n in arrays), *(n for n in signature.outputs[1:] if n not in results)]
    outputs = {name: arrays[name] for name in ordered} | {"loss": np.asarray(figures["loss"])}
    labels = [signature.inputs[index] for index, _, _ in signature.labels]
    inputs = {n: arrays[n] for n in [*(n for n in signature.inputs if n not in labels), *labels]}
    ignored = {signature.inputs[i]: label for i, _, label in signature.labels if label is not None}
    if matrix is not None and len(labels) == 1 and outputs:
        seen = {n: np.where(a == ignored[n], -1, a) if n in ignored else a for n, a in inputs.items()}
        with contextlib.suppress(ValueError):  # scores and labels of other shapes have none
            found = confusion(outputs, seen)
            matrix += [] if found is None else [found]
    return figures | compute(metrics, outputs, inputs, ignored=ignored)


def join(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Batches as one array; those of other lengths are padded, integers with −1 and other numbers with NaN.

    >>> join([np.array([[1, 2]]), np.array([[3]])])
    array([[ 1,  2],
           [ 3, -1]])
    """
    if not parts or not parts[0].ndim:
        return np.asarray(parts)
    if len({part.shape[1:] for part in parts}) > 1 and parts[0].dtype != np.object_:
        sizes = np.max([part.shape[1:] for part in parts], axis=0)
        kind = parts[0].dtype
        filler: Any = np.nan if kind.kind == "f" else -1 if kind.kind == "i" else 0
        padded = []
        for part in parts:
            whole = np.full((len(part), *sizes), filler, kind)
            whole[tuple(slice(size) for size in part.shape)] = part
            padded.append(whole)
        parts = padded
    return np.concatenate(parts)


def _array(value: Any) -> np.ndarray:
    return value.numpy() if isinstance(value, ort.OrtValue) else value


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
