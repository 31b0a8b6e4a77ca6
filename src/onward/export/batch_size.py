"""`dynamic_batch` lets a model whose file fixes the batch size take any number of samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnx_ir as ir

from onward.errors import ModelError, ParityError
from onward.export.inference import sample_inputs
from onward.export.parity import Report, compare
from onward.graph.load import load_model
from onward.graph.passes.sizes import BATCH, batch_of, open_batch
from onward.runtime.sessions import open_session

if TYPE_CHECKING:
    from onward.graph.load import ModelSource

__all__ = ["dynamic_batch", "fixed_batch", "open_if_fixed"]


def fixed_batch(model: ModelSource) -> int | None:
    """The batch size that a model is fixed to: a number that begins its outputs and an input, or None."""
    return batch_of(load_model(model, by_reference=True))


def dynamic_batch(
    model: ModelSource,
    *,
    inputs: Mapping[str, np.ndarray] | None = None,
    rtol: float = 1e-4,
    atol: float = 1e-5,
) -> onnx.ModelProto:
    """A copy of a model that takes any number of samples, where its file fixes the number.

    Many published models are fixed to a batch of 1, and train one sample at a time. The copy is compared with the
    model: on each sample of a larger batch it must give what the model gives (`inputs`: one batch of the model's own
    size; random numbers by default). Raises `ModelError` where a node rules a larger batch out and `ParityError` where
    samples depend on each other. A model whose batch is open already comes back as it is.

    >>> import onnx.parser
    >>> model = onnx.parser.parse_model('''<ir_version: 10, opset_import: ["": 21]>
    ...     net (float[1, 2, 2] x) => (float[1, 4] y) <int64[2] sizes = {1, 4}> { y = Reshape(x, sizes) }''')
    >>> opened = dynamic_batch(model)
    >>> opened.graph.input[0].type.tensor_type.shape.dim[0].dim_param
    'batch'
    """
    original = load_model(model)
    ir.external_data.load_to_model(original)
    opened, size = load_model(original), batch_of(original)
    if size is None:
        return ir.to_proto(original)
    try:
        open_batch(opened, size)
    except ModelError as error:
        raise ModelError(
            f"the batch of the model is fixed to {size} and cannot be opened: {error}",
            hint=f"train it with batches of {size}",
        ) from error
    opened_proto = ir.to_proto(opened)
    # declared for the old batch, which the runtime would hold against the new one
    del opened_proto.graph.value_info[:]
    report = _compare(original, opened_proto, size, inputs, rtol=rtol, atol=atol)
    if not report.passed:
        raise ParityError(
            f"the model's samples depend on each other, so its batch stays {size}; on more samples:\n{report}"
        )
    return opened_proto


def open_if_fixed(model: ModelSource) -> tuple[ModelSource, str | None]:
    """The model with its batch opened where it is fixed and can be, and what there is to say of it."""
    size = fixed_batch(model)
    if size is None:
        return model, None
    try:
        return dynamic_batch(model), f"the model is fixed to batches of {size}; for training it takes any"
    except (ModelError, ParityError) as error:
        return model, str(error)


def _compare(
    original: ir.Model,
    opened_proto: onnx.ModelProto,
    size: int,
    inputs: Mapping[str, np.ndarray] | None,
    *,
    rtol: float,
    atol: float,
) -> Report:
    """Two batches one by one through the model, and both at once, then one sample alone, through the copy."""
    before, after = open_session(ir.to_proto(original)), open_session(opened_proto)
    reads = [value.name for value in before.get_inputs()]  # older files list weights among the inputs as well
    # two different batches: samples that look at one another show only beside others
    random = [sample_inputs(original, seed=seed) for seed in (0, 1)]
    feeds = [{name: batch[name] for name in reads} for batch in (inputs or random[0], random[1])]
    opened = {value.name for value in after.get_inputs() if value.shape[:1] == [BATCH]}
    for name in feeds[0].keys() - opened:
        feeds[1][name] = feeds[0][name]
    names = [value.name for value in opened_proto.graph.output]
    expected = [before.run(names, feed) for feed in feeds]
    joined = {
        name: np.concatenate([feed[name] for feed in feeds]) if name in opened else feeds[0][name]
        for name in feeds[0]
    }
    # One alone: a size that was folded into a constant may fit multiples of the old batch and nothing else.
    single = {name: array[:1] if name in opened else array for name, array in joined.items()}
    both = dict(zip(names, (np.concatenate(pair) for pair in zip(*expected))))
    try:
        got = dict(zip(names, map(np.asarray, after.run(names, joined))))
        alone = dict(zip(names, map(np.asarray, after.run(names, single))))
    except Exception as error:
        raise ModelError(
            f"the batch of the model is fixed to {size}, and with {2 * size} samples onnxruntime says: {error}",
            hint=f"train it with batches of {size}",
        ) from error
    reference = both | {f"{name} of one sample": array[:1] for name, array in both.items()}
    return compare(
        reference,
        got | {f"{name} of one sample": array for name, array in alone.items()},
        rtol=rtol,
        atol=atol,
    )
