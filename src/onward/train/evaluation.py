"""The loss and the metrics of an evaluation model over some batches."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime as ort

from onward.api.convert_inputs import convert
from onward.runtime.sessions import ModelFile, make_session
from onward.train.batches import Batches, make_batches
from onward.train.metrics import Arrays, Metric, compute, confusion

if TYPE_CHECKING:
    from onward.checkpoint.content import CheckpointData
    from onward.runtime.devices import Device
    from onward.runtime.signature import Signature
    from onward.train.engines import Engine, Table
    from onward.train.report import Figure


# what a report shows of all outputs and inputs of an evaluation
Show = Callable[[Arrays, Arrays], "Sequence[Figure]"]


@dataclasses.dataclass
class Details:
    """What an evaluation has besides figures, on rank 0; `show` makes what the report shows of it."""

    show: Show | None = None
    confusion: np.ndarray | None = None
    figures: Sequence[Figure] = ()


def evaluate(
    engine: Engine,
    source: Batches,
    metrics: Mapping[str, Metric],
    *,
    results: Sequence[str],
    details: Details | None = None,
) -> dict[str, float]:
    """The mean loss and the metrics over all ranks; `results` are the forward model's outputs, which metrics judge.

    `details` receives the confusion matrix, where the model takes one label for each sample, and the report's figures.
    """
    # ranks have batch-norm statistics of their own, which evaluation reads
    engine.reconcile()
    report = engine.evaluate(
        # always epoch 0: an evaluation has one order, so that its figures compare
        source.epoch(0, rank=engine.replica, world=engine.replicas),
        tables=bool(metrics) or (details is not None and details.show is not None),
    )
    loss, weight, failed = engine.sum([report.loss, report.weight, report.failure is not None])
    if failed:
        engine.raise_together(report.failure)
    if not weight:
        raise ValueError("the evaluation data has no batch, or none with a label that counts")
    figures = {"loss": loss / weight}
    if not metrics and (details is None or details.show is None):
        return figures
    shares = engine.collect(report.tables)
    scores = dict.fromkeys(metrics, 0.0)
    with engine.all_or_none():
        if shares is not None and report.signature is not None:
            scores = _judge(report.signature, shares, figures, metrics, results, details)
    # rank 0 alone has scores: their sum with the zeros of the others is how these hear of them
    return figures | dict(zip(metrics, engine.sum(list(scores.values()))))


def _judge(
    signature: Signature,
    shares: Sequence[Sequence[Table]],
    figures: Mapping[str, float],
    metrics: Mapping[str, Metric],
    results: Sequence[str],
    details: Details | None,
) -> dict[str, float]:
    """The metrics of all batches, in the order in which one process would have seen them."""
    names = [*signature.outputs[1:], *signature.inputs]
    # batch by batch and in it rank by rank, as one process would have read the data
    tables = [table for batch in zip_longest(*shares, fillvalue={}) for table in batch if table]
    arrays = {name: join([table[name] for table in tables]) for name in names}
    ordered = [*(n for n in results if n in arrays), *(n for n in signature.outputs[1:] if n not in results)]
    outputs = {name: arrays[name] for name in ordered} | {"loss": np.asarray(figures["loss"])}
    labels = [signature.inputs[index] for index, _, _ in signature.labels]
    inputs = {n: arrays[n] for n in [*(n for n in signature.inputs if n not in labels), *labels]}
    ignored = {signature.inputs[i]: label for i, _, label in signature.labels if label is not None}
    if details is not None and len(labels) == 1 and outputs:
        counted = {
            n: np.where(a == ignored[n], np.int64(-1), a) if n in ignored else a for n, a in inputs.items()
        }
        with contextlib.suppress(ValueError):  # scores and labels of other shapes have none
            details.confusion = confusion(outputs, counted)
    if details is not None and details.show is not None:
        details.figures = details.show(outputs, inputs)
    return compute(metrics, outputs, inputs, ignored=ignored)


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
        # what metrics leave out: no class is −1, and NaN is in no mean
        filler: Any = np.nan if kind.kind == "f" else -1 if kind.kind == "i" else 0
        padded = []
        for part in parts:
            whole = np.full((len(part), *sizes), filler, kind)
            whole[tuple(slice(size) for size in part.shape)] = part
            padded.append(whole)
        parts = padded
    return np.concatenate(parts)


def predict(
    eval_model: ModelFile,
    state: CheckpointData,
    names: Sequence[str],
    data: Any,
    *,
    batch_size: int,
    order: Sequence[str],
    device: Device | None = None,
    options: ort.SessionOptions | None,
) -> dict[str, np.ndarray]:
    """The named values of the eval model's graph; `order` is that of data that has labels as well."""
    import onnx_ir as ir

    from onward.runtime import inference_model

    model = inference_model.inference_model(eval_model, state, names)
    proto = ir.to_proto(model)
    session = make_session(proto, device=device, options=options)
    # labels are pruned with the loss: what is left are the inputs of the forward model
    kinds = {
        value.name: np.dtype(onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))
        for value in proto.graph.input
    }
    source = make_batches(data, list(kinds), batch_size=batch_size, order=order)
    parts: list[list[np.ndarray]] = []
    for batch in source.epoch(0):
        feeds = {name: convert(value, kinds[name], name) for name, value in zip(kinds, batch)}
        parts.append([np.asarray(result) for result in session.run(list(names), feeds)])
    if not parts:
        raise ValueError("the data has no batch")
    return {name: join([part[i] for part in parts]) for i, name in enumerate(names)}
