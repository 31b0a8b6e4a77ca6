"""Makes state that the runtime hides explicit: a batch norm's statistics, and the state of random operators.

The runtime's training-mode BatchNormalization writes its running statistics into the memory of its own
inputs, and is replaced by inference mode where those are constants. Here it is given scratch memory and
a momentum of 0, so that it yields the batch's own mean and variance: what the gradient needs, too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from onward.contract import SEED
from onward.errors import ModelError
from onward.graph.builder import Builder
from onward.graph.nodes import optional_input, producer_of, required_input, single_number
from onward.graph.shapes.dims import dims_of


@dataclasses.dataclass(frozen=True)
class _Move:
    """A running statistic, the batch's own, and the momentum of the update.

    A variance of `count` numbers is made unbiased.
    """

    running: ir.Value
    batch: ir.Value
    momentum: float
    count: ir.Value | None = None


@dataclasses.dataclass(frozen=True)
class Statistic:
    """A running mean or variance, and its value after the step."""

    current: ir.Value
    following: ir.Value


def make_statistics_explicit(op: Builder) -> list[Statistic]:
    """Make each training-mode BatchNormalization output its batch's statistics; returns the next running ones.

    ONNX moves the running variance towards the batch's population variance, torch towards the unbiased one:
    here the part that comes from the batch is scaled by n/(n−1), so that trained models agree with torch's.
    A layer that is applied twice in a step moves its statistics once, by its last application.
    """
    nodes = list(op.graph)
    norms = [
        (node, after)
        for node, after in zip(nodes, [*nodes[1:], None])
        if node.op_type == "BatchNormalization" and node.attributes.get_int("training_mode", 0)
    ]
    moves: dict[ir.Value, _Move] = {}
    scratch = _scratch(op, [node for node, _ in norms])
    for node, after in norms:
        x, mean, variance = (required_input(node, index) for index in (0, 3, 4))
        momentum = node.attributes.get_float("momentum", 0.9)
        op.scope = node.name or "BatchNormalization"
        for index, memory in zip((3, 4), scratch[node]):
            node.replace_input_with(index, memory)
        node.attributes["momentum"] = ir.AttrFloat32("momentum", 0.0)
        # Behind the norm: what moves the statistics reads the batch's own, which it gives.
        op.before = after
        batch_mean, batch_variance = _batch_outputs(op, node, mean, variance, momentum)
        op.before = None
        count = op.Cast(count_per_channel(op, x), to=op.dtype(variance))
        # Statistics that the graph computes itself are nobody's state.
        if _is_state(mean) and _is_state(variance):
            moves[mean] = _Move(mean, batch_mean, momentum)
            moves[variance] = _Move(variance, batch_variance, momentum, count)
    op.scope = ""
    return _update_statistics(op, list(moves.values()))


def _scratch(op: Builder, norms: Sequence[ir.Node]) -> dict[ir.Node, Sequence[ir.Value]]:
    """For each batch norm, memory for its two statistics: finite numbers that nothing else reads.

    One Split makes that of all norms of one type and known width.
    """
    groups: dict[object, list[ir.Node]] = {}
    for node in norms:
        mean = required_input(node, 3)
        # A Split needs its lengths when the graph is written.
        together = op.static_dim(mean, 0) is not None
        groups.setdefault(op.dtype(mean) if together else node, []).append(node)
    memory: dict[ir.Node, Sequence[ir.Value]] = {}
    for group in groups.values():
        with op.inserting(group[0]):
            pieces = _pieces(op, group)
        memory.update((node, pieces[2 * index : 2 * index + 2]) for index, node in enumerate(group))
    return memory


def _pieces(op: Builder, norms: Sequence[ir.Node]) -> Sequence[ir.Value]:
    x, likes = required_input(norms[0]), [v for node in norms for v in node.inputs[3:5] if v is not None]
    op.scope = norms[0].name or "BatchNormalization"
    axes, lengths = list(range(op.rank(x))), _lengths(op, likes)
    # no optimizer may fold it into a constant: it depends on x
    sample = op.IsNaN(op.Slice(x, [0] * len(axes), [1] * len(axes), axes))
    constant = op.const_value(lengths)
    total = op.ReduceSum(lengths, keepdims=1) if constant is None else constant.sum(keepdims=True)
    zeros = op.Expand(op.Reshape(op.Cast(sample, to=op.dtype(likes[0])), [1]), total)
    return op.Split(zeros, lengths, outputs=len(likes))


def _lengths(op: Builder, vectors: Sequence[ir.Value]) -> ir.Value:
    """How long each of some vectors is, as one vector."""
    static = [op.static_dim(vector, 0) for vector in vectors]
    if all(length is not None for length in static):
        return op.constant(np.asarray(static, np.int64), name="lengths")
    return op.Concat(*(op.dim(vector, 0) for vector in vectors), axis=0)


def count_per_channel(op: Builder, x: ir.Value) -> ir.Value:
    """How many numbers of x each channel (axis 1) has, as an int64 scalar.

    By the names of sizes where they have some: layers of the same size share it, and the runtime, which may come to
    this at the end of the step, keeps no x until then.
    """
    dims = [] if x.shape is None else [dim for axis, dim in enumerate(dims_of(x.shape)) if axis != 1]
    # Size(x)/channels: right whatever the rank is.
    if x.shape is None or None in dims:
        return op.Div(op.Size(x), op.Squeeze(op.dim(x, 1), [0]))
    names = [name for dim in dims for name in str(dim).split("*")]
    inputs = [_input_axis(op, name) for name in names if not name.isdigit()]
    count = op.constant(np.int64(math.prod(int(name) for name in names if name.isdigit())))
    # A name that no input has comes from inside the graph: then the sizes of x itself.
    if None in inputs:
        space = op.ReduceProd(op.sizes(x, 2), keepdims=0)
        return op.Mul(op.Squeeze(op.dim(x, 0), [0]), space)
    for value, axis in filter(None, inputs):
        count = op.Mul(op.Squeeze(op.dim(value, axis), [0]), count)
    return count


def concat_counts(op: Builder, counts: Sequence[ir.Value]) -> ir.Value:
    """Scalars as one vector; in one product where all are multiples of one size: 14 nodes less of a ResNet-18's."""
    factors = []
    for count in counts:
        cast = producer_of(count, "Cast")
        product = None if cast is None else producer_of(cast.inputs[0], "Mul")
        if product is None:
            break
        size, times = product.inputs
        number = None if times is None else op.const_value(times)
        if size is None or number is None or number.ndim or op.rank(size):
            break
        factors.append((size, int(number)))
    if len(factors) == len(counts) > 1 and len({id(size) for size, _ in factors}) == 1:
        numbers = op.constant(np.asarray([number for _, number in factors], np.int64))
        return op.Cast(op.Mul(factors[0][0], numbers), to=op.dtype(counts[0]))
    return op.Concat(*(op.Reshape(count, [1]) for count in counts), axis=0)


def _input_axis(op: Builder, symbol: str) -> tuple[ir.Value, int] | None:
    """An input of the graph and the axis of it that has the size of this name."""
    for value in op.graph.inputs:
        for axis, dim in enumerate(value.shape or ()):
            if isinstance(dim, ir.SymbolicDim) and dim.value == symbol:
                return value, axis
    return None


def _batch_outputs(
    op: Builder, node: ir.Node, mean: ir.Value, variance: ir.Value, momentum: float
) -> tuple[ir.Value, ir.Value]:
    """Outputs 1 and 2 are the batch's now; whoever read the running ones gets those computed."""
    if len(node.outputs) < 3:
        node.resize_outputs(3)
    outputs = []
    for output, like in zip(node.outputs[1:], (mean, variance)):
        output.name = output.name or op.namer(f"{like.name}.batch")
        output.type, output.shape = like.type, like.shape
        uses, is_result = list(output.uses()), output.is_graph_output()
        if uses or is_result:
            running = _move(op, like, output, momentum)
            if is_result:
                running.name, output.name = output.name, op.namer(f"{output.name}.batch")
                graph = op.graph
                graph.outputs[graph.outputs.index(output)] = running
            for user, index in uses:
                user.replace_input_with(index, running)
        outputs.append(output)
    return outputs[0], outputs[1]


def _move(op: Builder, running: ir.Value, batch: ir.Value, momentum: float) -> ir.Value:
    """momentum·running + (1 − momentum)·batch"""
    return op.Add(op.Mul(running, momentum), op.Mul(batch, 1.0 - momentum))


def _update_statistics(op: Builder, moves: Sequence[_Move]) -> list[Statistic]:
    """momentum·running + (1 − momentum)·batch, variances times n/(n − 1), for all statistics at once.

    They are one vector for that, cut up afterwards: as many nodes for a hundred layers as for one.
    """
    following: dict[ir.Value, ir.Value] = {}
    for kind, momentum in dict.fromkeys((op.dtype(move.running), move.momentum) for move in moves):
        group = [m for m in moves if (op.dtype(m.running), m.momentum) == (kind, momentum)]
        lengths = _lengths(op, [move.running for move in group])
        counts = list(dict.fromkeys(move.count for move in group if move.count is not None))
        share: ir.Value = op.constant(np.asarray([1.0 - momentum], kind.numpy()))
        if counts:
            n = concat_counts(op, counts)
            unbiased = op.Div(n, op.Max(op.Sub(n, 1.0), 1.0))
            shares = op.Concat(share, op.Mul(unbiased, 1.0 - momentum), axis=0)
            indices = [0 if move.count is None else 1 + counts.index(move.count) for move in group]
            share = op.Gather(shares, _repeat(op, indices, lengths))
        running = op.Concat(*(move.running for move in group), axis=0)
        batch = op.Concat(*(move.batch for move in group), axis=0)
        moved = op.Add(op.Mul(running, momentum), op.Mul(batch, share))
        pieces = op.Split(moved, lengths, axis=0, outputs=len(group))
        following.update((move.running, piece) for move, piece in zip(group, pieces))
    return [Statistic(move.running, following[move.running]) for move in moves]


def _repeat(op: Builder, numbers: Sequence[int], lengths: ir.Value) -> ir.Value:
    """Each number as often as its length says, as an int32 vector."""
    constant = op.const_value(lengths)
    if constant is not None:
        return op.constant(np.repeat(np.asarray(numbers, np.int32), constant), name="places")
    pieces = [
        op.Expand(np.asarray([number], np.int32), op.Slice(lengths, [index], [index + 1], [0]))
        for index, number in enumerate(numbers)
    ]
    return op.Concat(*pieces, axis=0)


def _is_state(value: ir.Value) -> bool:
    return value.is_initializer() or value.is_graph_input()


_ELEMENTWISE = frozenset({"Add", "Sub", "Mul", "Div", "Max"})


def separate_statistics(model: ir.Model, names: Sequence[str]) -> None:
    """Compute each of these outputs by itself, where a Split cuts it out of the vector of all statistics.

    A pipeline stage can then move the statistics of its own layers without those of other stages.
    """
    op = Builder(model.graph)
    for output in [value for value in model.graph.outputs if value.name in set(names)]:
        source = output
        while (copy := producer_of(source, "Identity")) is not None:
            source = required_input(copy)
        node = producer_of(source, "Split")
        if node is None or len(node.inputs) < 2:
            continue
        lengths, whole = op.const_value(node.inputs[1]), node.inputs[0]
        if lengths is None or whole is None:
            continue
        index = list(node.outputs).index(source)
        start = int(lengths[:index].sum())
        alone = _part(op, whole, start, start + int(lengths[index]))
        if output is source:
            output.name, name = op.namer(f"{output.name}.cut"), output.name
            model.graph.outputs[list(model.graph.outputs).index(output)] = alone
            alone.name = name
        else:
            holder = output.producer()
            assert holder is not None
            model.graph.remove(holder)
            holder.replace_input_with(0, alone)
            model.graph.append(holder)


def _part(op: Builder, vector: ir.Value, start: int, end: int) -> ir.Value:
    """Elements `start` to `end` of a vector, computed from the parts of what it is made of."""
    if op.static_shape(vector) in ((), (1,)):
        return vector  # broadcast to any length
    constant = op.const_value(vector)
    if constant is not None:
        return op.constant(constant[start:end], name="part")
    node = vector.producer()
    inputs = [] if node is None else [value for value in node.inputs if value is not None]
    if node is not None and node.op_type in _ELEMENTWISE:
        return op.node(node.op_type, [_part(op, value, start, end) for value in inputs])[0]
    if node is not None and node.op_type == "Cast":
        return op.Cast(_part(op, inputs[0], start, end), to=op.dtype(vector))
    if node is not None and node.op_type == "Concat":
        at = 0
        for value in inputs:
            length = op.static_dim(value, 0)
            if length is None:
                break
            if at == start and length == end - start:
                return value
            if at <= start and end <= at + length:
                return _part(op, value, start - at, end - at)
            at += length
    if node is not None and node.op_type == "Gather" and (indices := op.const_value(inputs[1])) is not None:
        chosen = np.unique(indices[start:end])
        if chosen.size == 1:
            return _part(op, inputs[0], int(chosen[0]), int(chosen[0]) + 1)
    return op.Slice(vector, [start], [end], [0])


# --- Makes randomness explicit: the training step becomes a pure function of its inputs and a seed.
#
# The runtime's own random operators keep hidden state, so a resumed run could not continue their sequence.
# Here each random number is a hash of its position, the operator's index in the graph and the step's seed:
# the same on every machine, provider and thread count. It is also faster than the runtime's Dropout.


# Odd 64-bit constants with irregular bits (from the golden ratio, √2 and √3), as signed numbers.
_SEED_KEY = np.int64(-7046029254386353131)
_NODE_KEY = np.int64(7640891576956012809)
_POSITION_KEY = np.int64(-4942790177534073029)
_ROUND_KEY = np.int64(2685821657736338717)
_SPAN = 2.0**64


def make_random_explicit(model: ir.Model) -> ir.Value | None:
    """Replace random operators by a hash of an int64[1] input `random_seed`, which is returned.

    None where the model has no random operator. Those inside loops and branches are left as they are.
    """
    nodes = [node for node in model.graph if _is_random(node)]
    if not nodes:
        return None
    op = Builder(model.graph)
    # An input, not a constant: each step feeds another number, and resuming feeds the one that comes next.
    seed = op.input(SEED, ir.DataType.INT64, [1])
    op.before = nodes[0]
    # products carry bits upwards only: what a seed has in its upper half is brought down first
    spread = op.Mul(seed, _SEED_KEY)
    spread = op.Mul(op.Add(spread, op.Div(spread, np.int64(2**32))), _ROUND_KEY)
    for index, node in enumerate(nodes):
        op.before = node
        op.scope = node.name or node.op_type
        # Each operator draws its own numbers, also where two have tensors of one size.
        key = op.Add(spread, np.int64((index + 1) * int(_NODE_KEY) % 2**63))
        replacements = _REWRITES[node.op_type](op, node, key)
        for old, new in zip(node.outputs, replacements):
            if old.is_graph_output():
                new.name, old.name = old.name, op.namer(f"{old.name}.random")
                new.type, new.shape = old.type, old.shape
            ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        model.graph.remove(node, safe=True)
    return seed


def _is_random(node: ir.Node) -> bool:
    if node.op_type == "Dropout" and node.domain in ("", "ai.onnx"):
        training, ratio = optional_input(node, 2), optional_input(node, 1)
        if training is None or single_number(ratio) == 0.0:
            return False
        return training.const_value is None or bool(training.const_value.numpy())
    return node.op_type in _REWRITES and node.domain in ("", "ai.onnx")


def _hash(op: Builder, key: ir.Value, count: ir.Value) -> ir.Value:
    """`count` int64 numbers, uniform over their whole range: a quartic polynomial of the position mod 2⁶⁴.

    Only high bits are used by what follows; they depend on every bit of position and key.
    """
    position = op.Range(np.int64(0), count, np.int64(1))
    x = op.Add(op.Mul(position, _POSITION_KEY), key)
    # Squares: a linear function of the position would give neighbours related numbers.
    y = op.Add(op.Mul(x, x), _ROUND_KEY)
    return op.Add(op.Mul(y, y), x)


def _uniform(op: Builder, key: ir.Value, shape: ir.Value, dtype: ir.DataType) -> ir.Value:
    """Numbers in [0, 1)."""
    bits = _hash(op, key, op.ReduceProd(shape, keepdims=0))
    # Signed 64-bit numbers over 2⁶⁴ lie in [−½, ½).
    unit = op.Add(op.Mul(op.Cast(bits, to=ir.DataType.FLOAT), 1.0 / _SPAN), 0.5)
    # the largest integers round up to 1 in float32
    numbers = op.Min(unit, float(np.nextafter(np.float32(1), np.float32(0))))
    numbers = op.Reshape(numbers, shape)
    return numbers if dtype == ir.DataType.FLOAT else op.Cast(numbers, to=dtype)


def _normal(op: Builder, key: ir.Value, shape: ir.Value, dtype: ir.DataType) -> ir.Value:
    """√(−2 ln u₁)·cos(2π u₂)"""
    # 1 − u is above 0, where the logarithm is finite.
    first = op.Sub(1.0, _uniform(op, key, shape, ir.DataType.FLOAT))
    second = _uniform(op, op.Add(key, _ROUND_KEY), shape, ir.DataType.FLOAT)
    numbers = op.Mul(op.Sqrt(op.Mul(op.Log(first), -2.0)), op.Cos(op.Mul(second, 2.0 * np.pi)))
    return numbers if dtype == ir.DataType.FLOAT else op.Cast(numbers, to=dtype)


def _dropout(op: Builder, node: ir.Node, key: ir.Value) -> list[ir.Value]:
    x = required_input(node)
    ratio = optional_input(node, 1)
    # ONNX's default rate.
    constant = np.float32(0.5) if ratio is None else op.const_value(ratio)
    dtype = op.dtype(x)
    if constant is not None:
        rate = float(constant)
        limit = op.constant(np.int64(max(-(2**63), min(2**63 - 1, int(rate * 2**64) - 2**63))), name="limit")
        scale = op.constant(np.asarray(1.0 / (1.0 - rate) if rate < 1 else 0.0, dtype.numpy()), name="scale")
    else:
        wide = op.Cast(ratio, to=ir.DataType.DOUBLE)
        # the largest double below 2⁶³: a ratio of 1 must not run over
        bound = op.Min(op.Sub(op.Mul(wide, _SPAN), _SPAN / 2), 2.0**63 - 1024)
        limit = op.Cast(bound, to=ir.DataType.INT64)
        scale = op.Reciprocal(op.Sub(1.0, op.Cast(ratio, to=dtype)))
    # Compared as integers: no cast and no product for each element.
    dropped = op.Less(_hash(op, key, op.ReduceProd(op.shape(x), keepdims=0)), limit)
    training = node.inputs[2]
    # Whether it trains is decided in each run, so that one graph serves both.
    if op.const_value(training) is None:
        dropped = op.And(dropped, training)
        scale = op.Where(training, scale, 1.0)
    factors = op.Reshape(op.Where(dropped, 0.0, scale), op.shape(x))
    outputs = [op.Mul(x, factors)]
    if len(node.outputs) > 1:
        outputs.append(op.Reshape(op.Not(dropped), op.shape(x)))
    return outputs


def _random_dtype(node: ir.Node, default: ir.DataType | None) -> ir.DataType:
    code = node.attributes.get_int("dtype", None)
    if code is None:
        return default or ir.DataType.FLOAT
    try:
        return ir.DataType(code)
    except ValueError:
        raise ModelError(
            f"{node.op_type} '{node.name}' has the dtype {code}, which ONNX does not have"
        ) from None


def _random_uniform(op: Builder, node: ir.Node, key: ir.Value) -> list[ir.Value]:
    low, high = node.attributes.get_float("low", 0.0), node.attributes.get_float("high", 1.0)
    shape, dtype = _target(op, node)
    unit = _uniform(op, key, shape, dtype)
    return [unit if (low, high) == (0.0, 1.0) else op.Add(op.Mul(unit, high - low), low)]


def _random_normal(op: Builder, node: ir.Node, key: ir.Value) -> list[ir.Value]:
    mean, scale = node.attributes.get_float("mean", 0.0), node.attributes.get_float("scale", 1.0)
    shape, dtype = _target(op, node)
    return [op.Add(op.Mul(_normal(op, key, shape, dtype), scale), mean)]


def _bernoulli(op: Builder, node: ir.Node, key: ir.Value) -> list[ir.Value]:
    x = required_input(node)
    drawn = op.Less(_uniform(op, key, op.shape(x), op.dtype(x)), x)
    return [op.Cast(drawn, to=_random_dtype(node, op.dtype(x)))]


def _multinomial(op: Builder, node: ir.Node, key: ir.Value) -> list[ir.Value]:
    """How many steps of the cumulated distribution lie below a uniform number, for each sample."""
    x = required_input(node)
    samples = np.asarray([node.attributes.get_int("sample_size", 1)], np.int64)
    # ONNX's Multinomial takes unnormalized log-probabilities.
    steps = op.CumSum(op.Softmax(x, axis=1), np.int64(1))
    drawn = _uniform(op, key, op.Concat(op.dim(x, 0), samples, axis=0), op.dtype(x))
    passed = op.LessOrEqual(op.Unsqueeze(steps, [1]), op.Unsqueeze(drawn, [2]))
    count = op.ReduceSum(op.Cast(passed, to=ir.DataType.INT64), [2], keepdims=0)
    # the steps may end below 1 by rounding
    chosen = op.Min(count, op.Sub(op.Squeeze(op.dim(x, 1), [0]), np.int64(1)))
    return [op.Cast(chosen, to=_random_dtype(node, ir.DataType.INT32))]


def _target(op: Builder, node: ir.Node) -> tuple[ir.Value, ir.DataType]:
    if node.op_type.endswith("Like"):
        like = required_input(node)
        return op.shape(like), _random_dtype(node, like.dtype)
    shape = np.asarray(node.attributes.get_ints("shape", ()), np.int64)
    return op.constant(shape, name="shape"), _random_dtype(node, None)


_REWRITES: dict[str, Callable[[Builder, ir.Node, ir.Value], list[ir.Value]]] = {
    "Dropout": _dropout,
    "RandomUniform": _random_uniform,
    "RandomUniformLike": _random_uniform,
    "RandomNormal": _random_normal,
    "RandomNormalLike": _random_normal,
    "Bernoulli": _bernoulli,
    "Multinomial": _multinomial,
}
