"""Observes the ranges of activations on samples of the data, and rounds a model with the ranges that fit best.

Three ways to take a range: the smallest and largest number (`minmax`), without the 0.01 % at both ends
(`percentile`), or where the squared error of rounding is smallest (`error`). None is best for all models, so all are
tried on samples, and the one whose model answers most like the float model is taken.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from onward import contract
from onward.errors import ModelError
from onward.graph.builder import Builder
from onward.graph.cleanup import remove_unused
from onward.graph.nodes import attribute, optional_input
from onward.graph.passes.inference_mode import freeze_statistics, to_inference
from onward.ort_session import create_session
from onward.quantize.fake_quantization import activation_levels, insert_fake_quantization
from onward.quantize.planning import Plan, Quantization, Range, plan_quantization

Samples = Mapping[str, np.ndarray]

METHODS = ("minmax", "percentile", "error")
# rows that are fed at once: values between layers are kept for this many only
_ROWS = 16
# numbers of a value that decide on its range, evenly taken from all batches
_NUMBERS = 1 << 16
_TAIL = 0.01  # per cent of the numbers that `percentile` leaves out at each end
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
    if settings.equalize:
        equalize_channels(model)
    feeds = None if samples is None else _feeds(model, samples)
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
    for start in range(0, count - (rows - 1 if sizes else 0), rows):
        yield {name: array[start : start + rows] for name, array in feeds.items()}


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


def _choose_method(
    model: ir.Model,
    settings: Quantization,
    observed: Mapping[str, np.ndarray],
    feeds: Mapping[str, np.ndarray],
    adapters: Collection[str],
) -> str:
    """The method whose rounded model answers most like the float model."""
    source = _inference_copy(model)
    # a few rows rank three methods, and each method costs a run over them
    batches = list(_batches(source, feeds))[:8]
    float_session = _session(source)
    expected = [float_session.run(None, batch) for batch in batches]
    errors = {}
    for method in METHODS:
        candidate = source.clone()
        plan: Plan = plan_quantization(candidate, settings, adapters=adapters)
        ranges = {name: find_range(numbers, method) for name, numbers in observed.items()}
        insert_fake_quantization(candidate, plan, settings, ranges)
        session = _session(candidate)
        errors[method] = float(
            np.mean([answer_error(a, session.run(None, b)) for a, b in zip(expected, batches)])
        )
    return min(errors, key=lambda name: errors[name])


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


# --- The float model before it is quantized: batch norms go into convolutions, channels are balanced. Neither changes
# what the model computes. A convolution has one integer kernel, and a batch norm behind it has none: its factors belong
# into the weights before these are rounded. Balancing (Nagel et al., 2019) moves a factor for each channel from one
# convolution into the next, where a few large channels would leave the others few levels.

# Behind these a positive factor may be moved: f(s·x) = s·f(x).
_HOMOGENEOUS = frozenset({"Relu", "LeakyRelu"})


def fold_batch_norms(model: ir.Model) -> int:
    """Fold batch norms that use their running statistics into the convolutions before them; returns how many.

    γ·(W·x + b − μ)/√(σ² + ε) + β = (W·γ/√…)·x + (b − μ)·γ/√… + β, under the names of the weight and of b, or of β.
    """
    op, count = Builder(model.graph), 0
    for node in list(model.graph):
        if node.op_type != "BatchNormalization" or attribute(node, "training_mode", 0) or node.domain != "":
            continue
        conv = None if node.inputs[0] is None else node.inputs[0].producer()
        # whoever else reads the convolution would see the folded numbers
        if conv is None or conv.op_type != "Conv" or not _is_own(conv.outputs[0]):
            continue
        weight, bias = _array(conv.inputs[1]), _array(optional_input(conv, 2))
        numbers = [_array(value) for value in node.inputs[1:5]]
        if weight is None or any(array is None for array in numbers):
            continue
        if optional_input(conv, 2) is not None and bias is None:
            continue
        # in float64: rounding here would be in every weight
        gamma, beta, mean, variance = (array.astype(np.float64) for array in numbers if array is not None)
        factor = gamma / np.sqrt(variance + attribute(node, "epsilon", 1e-5))
        shifted = ((0 if bias is None else bias) - mean) * factor + beta
        _set(conv.inputs[1], weight * factor.reshape(-1, *[1] * (weight.ndim - 1)))
        target = optional_input(conv, 2) if bias is not None else node.inputs[2]
        if target is None or len(target.uses()) > 1:  # another layer reads it as it is
            target = op.constant(shifted.astype(np.float32), name=f"{conv.name or 'conv'}.bias")
        _set(target, shifted)
        conv.resize_inputs(3)
        conv.replace_input_with(2, target)
        result, source = node.outputs[0], conv.outputs[0]
        name, shape = result.name, result.shape
        ir.convenience.replace_all_uses_with(result, source, replace_graph_outputs=True)
        model.graph.remove(node, safe=True)
        source.name, source.shape = name, shape
        count += 1
    if count:
        remove_unused(model)
    return count


def equalize_channels(model: ir.Model) -> int:
    """Balance the channels of convolutions that follow one another; returns how many pairs changed.

    A channel with ranges r₁ in the first weight and r₂ in the second is divided by √(r₁/r₂) in the first and
    multiplied by it in the second, so that both have √(r₁·r₂).
    """
    count = 0
    for node in model.graph:
        following = _next_convolution(node)
        if following is None:
            continue
        first, second, bias = (
            _array(node.inputs[1]), _array(following.inputs[1]), _array(optional_input(node, 2)),
        )  # fmt: skip
        if first is None or second is None or (bias is None and optional_input(node, 2) is not None):
            continue
        depthwise = attribute(following, "group", 1) == len(first) and second.shape[1] == 1
        if not depthwise and (attribute(following, "group", 1) != 1 or second.shape[1] != len(first)):
            continue
        axis = 0 if depthwise else 1
        if depthwise and len(second) != len(first):
            continue
        ranges = _channel_ranges(first, 0), _channel_ranges(second, axis)
        dead = (ranges[0] == 0) | (ranges[1] == 0)
        factor = np.sqrt(np.where(dead, 1, ranges[0]) / np.where(dead, 1, ranges[1]))
        _set(node.inputs[1], first / factor.reshape(-1, *[1] * (first.ndim - 1)))
        if bias is not None:
            _set(node.inputs[2], bias / factor)
        shape = [1] * second.ndim
        shape[axis] = -1
        _set(following.inputs[1], second * factor.reshape(shape))
        count += 1
    return count


def _next_convolution(node: ir.Node) -> ir.Node | None:
    """The convolution that alone reads a convolution's result, directly or behind a Relu."""
    if node.op_type != "Conv" or node.domain != "" or not _is_own(node.outputs[0]):
        return None
    reader = next(iter(node.outputs[0].consumers()))
    if reader.op_type in _HOMOGENEOUS and _is_own(reader.outputs[0]):
        reader = next(iter(reader.outputs[0].consumers()))
    return reader if reader.op_type == "Conv" and reader is not node else None


def _channel_ranges(weight: np.ndarray, axis: int) -> np.ndarray:
    return np.abs(weight).max(axis=tuple(index for index in range(weight.ndim) if index != axis))


def _is_own(value: ir.Value) -> bool:
    """Whether one node reads a value, once, and nothing else does."""
    return len(value.uses()) == 1 and not value.is_graph_output()


def _array(value: ir.Value | None) -> np.ndarray | None:
    """The numbers of an initializer that one node alone reads; a shared one would change for the others too."""
    if value is None or not value.is_initializer() or value.is_graph_input() or value.const_value is None:
        return None
    if len(value.consumers()) > 1 and value.const_value.shape.rank() > 1:
        return None
    return value.const_value.numpy()


def _set(value: ir.Value | None, array: np.ndarray) -> None:
    assert value is not None
    value.const_value = ir.tensor(array.astype(np.float32), name=value.name)
