"""Observes the ranges of activations on samples of the data, and rounds a model with the ranges that fit best.

Three ways to take a range: the smallest and largest number (`minmax`), without the 0.01 % at both ends
(`percentile`), or where the squared error of rounding is smallest (`error`). None is best for all models, so all are
tried on samples, and the one whose model answers most like the float model is taken.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onward import contract
from onward.errors import ModelError
from onward.graph.passes.inference_mode import freeze_statistics, to_inference
from onward.ort_session import create_session
from onward.quantize.fake_quantization import activation_levels, insert_fake_quantization
from onward.quantize.planning import Plan, Quantization, Range, plan_quantization
from onward.quantize.preparation import balance_products, equalize_channels, find_balanced, fold_batch_norms

Samples = Mapping[str, np.ndarray]

METHODS = ("minmax", "percentile", "error")
# rows that are fed at once: values between layers are kept for this many only
_ROWS = 16
# numbers of a value that decide on its range, evenly taken from all batches
_NUMBERS = 1 << 16
_TAIL = 0.01  # per cent of the numbers that `percentile` leaves out at each end
# how much of the difference between channels goes from the inputs of products into their matrices: tried on samples
_BALANCES = (0.5, 0.65, 0.8)
# balancing has to lower the error to this share: it costs a product, and samples are few
_GAIN = 0.9
# shares of the whole range that `error` tries
_SHARES = np.linspace(0.2, 1.0, 33)


def round_model(
    model: ir.Model, settings: Quantization, samples: Samples | None = None, *, adapters: Collection[str] = ()
) -> list[str]:
    """Round a float model in place as the settings say; the names of the parameters that scale activations.

    `samples` are inputs like those to come, by name; names that are no inputs are left out. Batch norms are frozen
    and folded first.
    """
    graph = model.graph
    # statistics that still move would change the folded weights under their scales
    freeze_statistics(model)
    fold_batch_norms(model)
    feeds = None if samples is None else _feeds(model, samples)
    if settings.equalize is not False:
        _balance(model, settings, feeds, adapters)
    plan = plan_quantization(model, settings, adapters=adapters, calibrated=feeds is not None)
    ranges: dict[str, Range] = {}
    method = settings.calibration
    if plan.observed and feeds is not None:
        observed = _observe(model, plan.observed, feeds)
        if method == "auto":
            method = _choose_method(model, settings, observed, feeds, adapters)
        ranges = {name: find_range(numbers, method) for name, numbers in observed.items()}
    parameters = insert_fake_quantization(model, plan, settings, ranges)
    model.metadata_props[contract.QUANTIZATION] = json.dumps(
        {
            "scheme": settings.scheme,
            "calibration": method if plan.observed else None,
            "products": len(plan.products),
            "tables": [table.name for table in plan.tables],
            "ranges": parameters,
        }
    )
    graph.opset_imports.setdefault("", contract.OPSET)
    return parameters


def find_range(numbers: np.ndarray, method: str) -> Range:
    """The range of a value of which these numbers were observed.

    >>> find_range(np.array([-1.0, 0.0, 3.0]), "minmax")
    (-1.0, 3.0)
    """
    if method not in METHODS:
        raise ValueError(f"calibration is {method!r}: it is auto, {', '.join(METHODS)}")
    low, high = float(numbers.min()), float(numbers.max())
    if method == "percentile":
        low, high = (float(number) for number in np.percentile(numbers, [_TAIL, 100 - _TAIL]))
    if method == "error":
        # from the whole range down: of equal errors the widest range wins
        share = min(_SHARES[::-1], key=lambda part: _rounding_error(numbers, low * part, high * part))
        low, high = low * float(share), high * float(share)
    return low, high


def _rounding_error(numbers: np.ndarray, low: float, high: float) -> float:
    scale, zero = activation_levels(low, high)
    rounded = (np.clip(np.rint(numbers / scale) + zero, 0, 255) - zero) * scale
    return float(np.mean(np.square(rounded - numbers)))


def _feeds(model: ir.Model, samples: Samples) -> dict[str, np.ndarray]:
    """The samples of the model's inputs; an input without any, or samples that do not fit, are an error."""
    feeds = {}
    for value in model.graph.inputs:
        name = value.name or ""
        if name not in samples:
            raise ModelError(
                f"calibration has no samples of the input '{name}': it has {', '.join(samples) or 'none'}",
                hint="name the arrays as the model's inputs",
            )
        array = np.asarray(samples[name])
        feeds[name] = array.astype(value.dtype.numpy(), copy=False) if value.dtype is not None else array
    counts = {len(array) for array in feeds.values() if array.ndim}
    if not counts or min(counts) == 0 or len(counts) > 1:
        raise ModelError(
            f"calibration needs samples, as many of each input: there are {sorted(counts) or 'none'}",
            hint="name data with --data",
        )
    return feeds


def _batches(model: ir.Model, feeds: Mapping[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
    """The samples in parts: of the batch size that the model has, where it fixes one."""
    fixed = {value.shape[0] for value in model.graph.inputs if value.shape is not None and len(value.shape)}
    sizes = [size for size in fixed if isinstance(size, int)]
    rows, count = (sizes[0] if sizes else _ROWS), len(next(iter(feeds.values())))
    if count < rows and sizes:
        raise ModelError(f"calibration has {count} samples, and the model takes {rows} at once")
    open_sizes = all(
        value.shape is None or len(value.shape) < 2 or not isinstance(value.shape[1], int)
        for value in model.graph.inputs
    )
    for start in range(0, count - (rows - 1 if sizes else 0), rows):
        batch = {name: array[start : start + rows] for name, array in feeds.items()}
        yield _cut_padding(batch) if open_sizes else batch


def _cut_padding(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Texts are padded to the longest of all: here to the longest of the batch, as they will be."""
    mask = batch.get("attention_mask")
    if mask is None or mask.ndim != 2 or not mask.any():
        return batch
    length = int(np.flatnonzero(mask.any(axis=0)).max()) + 1
    return {name: a[:, :length] if a.shape == mask.shape else a for name, a in batch.items()}


def _session(model: ir.Model) -> Any:
    return create_session(ir.to_proto(model).SerializeToString())


def _inference_copy(model: ir.Model) -> ir.Model:
    """A copy that draws nothing at random: ranges are those of the deployed model."""
    copy = model.clone()
    ir.external_data.load_to_model(copy)
    return to_inference(copy)


def _observe(
    model: ir.Model, names: Collection[str], feeds: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Some numbers of each value, its smallest and largest of each batch among them."""
    copy = _inference_copy(model)
    inputs = {value.name for value in copy.graph.inputs}
    values = {output.name: output for node in copy.graph for output in node.outputs}
    computed = [name for name in names if name not in inputs and name in values]
    outputs = {value.name for value in copy.graph.outputs}
    copy.graph.outputs.extend(values[name] for name in computed if name not in outputs)
    parts: dict[str, list[np.ndarray]] = {name: [] for name in names}
    batches = list(_batches(copy, feeds))
    # the same share of every batch: memory is bounded however many there are
    most = max(_NUMBERS // len(batches), 256)
    session = _session(copy)
    for batch in batches:
        results = dict(zip(computed, session.run(computed, batch))) if computed else {}
        for name in names:
            numbers = np.asarray(results.get(name, batch.get(name)), np.float32).ravel()
            if not np.isfinite(numbers).all():
                raise ModelError(
                    f"calibration: '{name}' is not finite on the samples, so it has no range",
                    hint="look at the data, or exclude the layer",
                )
            # a stride may miss both ends, which minmax is made of
            chosen = numbers[:: max(1, numbers.size // most)]
            parts[name] += [chosen, numbers.min(initial=0.0)[None], numbers.max(initial=0.0)[None]]
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}


class _Trial:
    """A float model's answers on a few samples, and how far from them it is after it was changed and rounded."""

    def __init__(
        self,
        model: ir.Model,
        settings: Quantization,
        feeds: Mapping[str, np.ndarray],
        adapters: Collection[str],
    ) -> None:
        self.model, self.settings, self.adapters = _inference_copy(model), settings, adapters
        # a few rows rank candidates, and each candidate costs a run over them
        self.batches = list(_batches(self.model, feeds))[:8]
        rows = sum(len(next(iter(batch.values()))) for batch in self.batches)
        self.feeds = {name: array[:rows] for name, array in feeds.items()}
        session = _session(self.model)
        self.expected = [session.run(None, batch) for batch in self.batches]

    def plan(self, model: ir.Model) -> Plan:
        """What is quantized in a model like it."""
        return plan_quantization(model, self.settings, adapters=self.adapters)

    def error(
        self, candidate: ir.Model, method: str, observed: Mapping[str, np.ndarray] | None = None
    ) -> float:
        """Round a candidate, in place, with ranges by a method; the error of its answers."""
        plan = self.plan(candidate)
        if observed is None:
            observed = _observe(candidate, plan.observed, self.feeds)
        ranges = {name: find_range(numbers, method) for name, numbers in observed.items()}
        insert_fake_quantization(candidate, plan, self.settings, ranges)
        session = _session(candidate)
        errors = [answer_error(a, session.run(None, b)) for a, b in zip(self.expected, self.batches)]
        return float(np.mean(errors))


def _choose_method(
    model: ir.Model,
    settings: Quantization,
    observed: Mapping[str, np.ndarray],
    feeds: Mapping[str, np.ndarray],
    adapters: Collection[str],
) -> str:
    """The method whose rounded model answers most like the float model."""
    trial = _Trial(model, settings, feeds, adapters)
    errors = {method: trial.error(trial.model.clone(), method, observed) for method in METHODS}
    return min(errors, key=lambda name: errors[name])


def _balance(
    model: ir.Model,
    settings: Quantization,
    feeds: Mapping[str, np.ndarray] | None,
    adapters: Collection[str],
) -> None:
    """Balance channels in place, as far as the rounded model's answers on the samples are nearer to the float one's.

    With `equalize`, convolutions are balanced whatever the samples say.
    """
    if settings.scheme not in ("int8", "int8-static"):
        return
    forced = bool(settings.equalize)
    if forced:
        equalize_channels(model)
    if feeds is None:
        return
    trial = _Trial(model, settings, feeds, adapters)
    # the cheapest method that leaves outliers out: ranges are found again behind the choice
    method = "error" if settings.calibration == "auto" else settings.calibration
    best = trial.error(trial.model.clone(), method)
    candidate = trial.model.clone()
    if not forced and equalize_channels(candidate):
        error = trial.error(candidate, method)
        if error < _GAIN * best:
            best = error
            equalize_channels(trial.model)
            equalize_channels(model)
    inputs = find_balanced(trial.plan(trial.model))
    if not inputs:
        return
    # on all samples: a channel that is large in few of them would widen the range of a batch that has one
    sizes = _channel_sizes(trial.model, [value.name or "" for value in inputs], feeds)
    errors = {}
    for share in _BALANCES:
        candidate = trial.model.clone()
        balance_products(candidate, find_balanced(trial.plan(candidate)), sizes, share)
        errors[share] = trial.error(candidate, method)
    share = min(errors, key=lambda key: errors[key])
    if errors[share] < _GAIN * best:
        balance_products(model, find_balanced(trial.plan(model)), sizes, share)


def _channel_sizes(
    model: ir.Model, names: Sequence[str], feeds: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The largest |x| of each channel, the last axis, of some values."""
    copy = model.clone()
    inputs = {value.name for value in copy.graph.inputs}
    values = {output.name: output for node in copy.graph for output in node.outputs}
    computed = [name for name in names if name not in inputs]
    copy.graph.outputs.extend(values[name] for name in computed if not values[name].is_graph_output())
    sizes: dict[str, np.ndarray] = {}
    session = _session(copy)
    for batch in _batches(copy, feeds):
        results = dict(zip(computed, session.run(computed, batch))) if computed else {}
        for name in names:
            numbers = results[name] if name in results else batch[name]
            array: np.ndarray = np.abs(np.asarray(numbers, np.float32))
            peak = array.reshape(-1, array.shape[-1]).max(axis=0)
            sizes[name] = np.maximum(sizes[name], peak) if name in sizes else peak
    return sizes


def layer_errors(model: ir.Model, settings: Quantization, samples: Samples) -> dict[str, float]:
    """How much rounding each layer alone changes the model's answers, the most first; by the layers' names."""
    source = _inference_copy(model)
    fold_batch_norms(source)
    feeds = _feeds(source, samples)
    plan = plan_quantization(source, settings)
    labels = [product.label for product in plan.products]
    observed = _observe(source, plan.observed, feeds)
    # choosing anew for every layer would triple the runs, and errors are compared with one another only
    method = "error" if settings.calibration == "auto" else settings.calibration
    ranges = {name: find_range(numbers, method) for name, numbers in observed.items()}
    batch = next(_batches(source, feeds))
    expected = _session(source).run(None, batch)
    errors = {}
    for label in dict.fromkeys(labels):
        candidate = source.clone()
        others = tuple(name for name in labels if name != label)
        alone = dataclasses.replace(settings, exclude=(*settings.exclude, *others))
        part = plan_quantization(candidate, alone)
        if not set(part.observed) <= set(ranges):
            ranges |= {
                name: find_range(numbers, method)
                for name, numbers in _observe(
                    source, [n for n in part.observed if n not in ranges], feeds
                ).items()
            }
        insert_fake_quantization(candidate, part, alone, ranges)
        errors[label] = answer_error(expected, _session(candidate).run(None, batch))
    return dict(sorted(errors.items(), key=lambda item: -item[1]))


def answer_error(expected: Collection[Any], answers: Collection[Any]) -> float:
    """Σ(a − e)²/Σe² of floating outputs, their mean."""
    shares = []
    for right, answer in zip(expected, answers):
        if np.asarray(right).dtype.kind == "f":
            size = float(np.sum(np.square(right, dtype=np.float64)))
            difference = np.subtract(answer, right, dtype=np.float64)
            shares.append(float(np.sum(np.square(difference))) / max(size, 1e-30))
    return float(np.mean(shares)) if shares else 0.0
