"""The pass: rounds weights and activations to 8 or 4 bits inside the float graph, as the deployed file will.

Rounding is a QuantizeLinear and a DequantizeLinear, whose gradients pass straight through. The scale of a weight
follows the weight itself, channel by channel or block by block. The scale of an activation is observed by
`calibration` and then learned, as in LSQ (Esser et al., 2020): a parameter `{value}.range` multiplies it by
exp(range), so that it starts at 0, and weight decay pulls it back to what was observed. What is rounded, `planning`
has chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onward.graph.builder import Builder
from onward.graph.nodes import optional_input
from onward.quantize.planning import Mode, Plan, Product, Quantization, QuantizedOperand, Range, write_mark

_LEVELS = 255  # of an activation, which is unsigned
# Channels whose weights are smaller than this share of the largest one's are rounded with its scale: their own would
# make the 32-bit bias of an integer convolution overflow.
_SMALLEST_CHANNEL = 1e-4


def insert_fake_quantization(
    model: ir.Model, plan: Plan, settings: Quantization, ranges: Mapping[str, Range]
) -> list[str]:
    """Round everything in the plan, in place; returns the names of the parameters that scale activations."""
    op = Builder(model.graph)
    nodes = list(model.graph)
    following = dict(zip(nodes, [*nodes[1:], None]))
    scales: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}
    parameters: list[str] = []
    for value, entry in plan.activations.items():
        producer = value.producer()
        op.before = nodes[0] if producer is None else following[producer]
        op.scope = f"{value.name}/quantize"
        if entry.like is None:
            name = op.namer(f"{value.name}.range")
            scales[value] = _activation_scale(op, name, ranges[value.name or ""], _upper_bound(value))
            parameters.append(name)
        scale, zero = scales[entry.like or value]
        _replace(op, value, entry.readers, _round(op, value, scale, zero))
    rounded: dict[tuple[ir.Value, int, Mode], ir.Value] = {}
    for product in plan.products:
        first = _first_reader(product.weight, nodes)
        key = (product.weight, product.axis, product.mode)
        if key not in rounded:
            with op.inserting(first):
                op.scope = f"{product.weight.name}/quantize"
                rounded[key] = _round_weight(op, product, settings)
        _read_rounded(op, product, rounded[key])
        _mark_product(product, settings, _round_bias(op, product, rounded[key]))
    dynamic: dict[ir.Value, ir.Value] = {}
    for product in plan.products:
        x = product.node.inputs[0]
        if product.mode != "dynamic" or x is None:
            continue
        if x not in dynamic:
            producer = x.producer()
            # right behind its producer, so that every product of it comes later
            op.before = nodes[0] if producer is None else following.get(producer, product.node)
            op.scope = f"{x.name}/quantize"
            levels, scale, zero = op.DynamicQuantizeLinear(x, outputs=3)
            dynamic[x] = op.DequantizeLinear(levels, scale, zero)
            dynamic[x].shape = x.shape
        product.node.replace_input_with(0, dynamic[x])
    op.before, op.scope = None, ""
    for table in plan.tables:
        _snap_table(table)
        for user, index in table.uses():
            if user.op_type == "Gather" and index == 0:
                write_mark(user, QuantizedOperand(table.name or "", "table"))
    return parameters


def _round_bias(op: Builder, product: Product, rounded: ir.Value) -> str:
    """Round a bias to steps of both scales, as integer sums have it; its name, or "" where there is none.

    b + (round(b/s)·s − b), of which the second term is a constant to the differentiator.
    """
    bias, x = optional_input(product.node, 2), product.node.inputs[0]
    is_stored = bias is not None and bias.is_initializer() and not bias.is_graph_input()
    if product.mode != "static" or bias is None or x is None or not is_stored:
        return ""
    weight_quantizer, activation = rounded.producer(), x.producer()
    assert weight_quantizer is not None and activation is not None
    with op.inserting(product.node):
        op.scope = f"{bias.name}/quantize"
        step = op.Mul(weight_quantizer.inputs[1], activation.inputs[1])
        error = op.Sub(op.Mul(op.Round(op.Div(bias, step)), step), bias)
        product.node.replace_input_with(2, op.Add(bias, op.stop_gradient(error)))
    return bias.name or ""


def _mark_product(product: Product, settings: Quantization, bias: str) -> None:
    assert product.weight.const_value is not None
    shape = product.weight.const_value.shape.numpy()
    block = settings.block_size if product.mode == "weights" else 0
    write_mark(
        product.node,
        QuantizedOperand(
            product.weight.name or "", product.mode, product.axis, settings.bits, block,
            int(shape[product.axis]), int(shape[1 - product.axis]), bias,
        ),
    )  # fmt: skip


def activation_levels(low: float, high: float) -> tuple[float, int]:
    """The scale and zero point of a range; 0 is always in it, as padding needs it to be exact.

    >>> activation_levels(-255.0, 255.0)
    (2.0, 128)
    """
    low, high = min(low, 0.0), max(high, 0.0)
    scale = max((high - low) / _LEVELS, float(np.finfo(np.float32).tiny) * _LEVELS)
    return scale, int(np.clip(np.rint(-low / scale), 0, _LEVELS))


def _upper_bound(value: ir.Value) -> float | None:
    """The largest number that a Clip lets through."""
    producer = value.producer()
    if producer is None or producer.op_type != "Clip" or optional_input(producer, 2) is None:
        return None
    tensor = ir.convenience.get_const_tensor(producer.inputs[2])  # type: ignore[arg-type]
    return None if tensor is None else float(tensor.numpy())


def _activation_scale(
    op: Builder, name: str, observed: Range, bound: float | None = None
) -> tuple[ir.Value, ir.Value]:
    """observed scale · exp(range), and its zero point, which stays; no larger than the bound has a use for"""
    scale, zero = activation_levels(*observed)
    parameter = ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(()))
    parameter.const_value = ir.tensor(np.zeros((), np.float32), name=name)
    op.graph.register_initializer(parameter)
    # exp keeps the scale above 0, and one learning rate then moves small and large ranges by the same share
    learned = op.Mul(op.Exp(parameter), np.float32(scale))
    if bound is not None and zero == 0 and bound > 0:
        # a Clip whose bound is outside the range would stay between a convolution and its quantizer: no integer kernel
        learned = op.Min(learned, np.nextafter(np.float32(bound / _LEVELS), np.float32(0)))
    return learned, op.constant(np.uint8(zero), name="zero_point")


def _round(
    op: Builder, value: ir.Value, scale: ir.Value, zero: ir.Value, axis: int | None = None
) -> ir.Value:
    levels = op.QuantizeLinear(value, scale, zero, axis=axis)
    rounded = op.DequantizeLinear(levels, scale, zero, axis=axis)
    rounded.shape = value.shape
    return rounded


def _replace(
    op: Builder, value: ir.Value, readers: Sequence[tuple[ir.Node, int]] | None, rounded: ir.Value
) -> None:
    """Let the readers of a value (all, for None) read its rounded form."""
    quantize = rounded.producer()
    own = {
        quantize,
        None if quantize is None or quantize.inputs[0] is None else quantize.inputs[0].producer(),
    }
    for user, index in readers if readers is not None else list(value.uses()):
        if user not in own:
            user.replace_input_with(index, rounded)
    if readers is None and value.is_graph_output():
        name = value.name
        value.name = op.namer(f"{name}.float")
        rounded.name = name
        op.graph.outputs[list(op.graph.outputs).index(value)] = rounded


def _first_reader(weight: ir.Value, nodes: Sequence[ir.Node]) -> ir.Node:
    readers = set(weight.consumers())
    return next((node for node in nodes if node in readers), nodes[0])


def _round_weight(op: Builder, product: Product, settings: Quantization) -> ir.Value:
    weight = product.weight
    if product.mode == "weights":
        return _round_blocks(op, product, settings)
    # a scale that follows its weight has no slope of its own
    scale = op.stop_gradient(_weight_scale(op, product, reduce_range=settings.reduce_range))
    count = int(weight.const_value.shape.numpy()[product.axis])  # type: ignore[union-attr]
    zero = op.constant(np.zeros(count, np.int8), name="zero_points")
    return _round(op, weight, scale, zero, axis=product.axis)


def _weight_scale(op: Builder, product: Product, *, reduce_range: bool) -> ir.Value:
    """The largest weight of each channel over 127; with `reduce_range`, the largest two that a CPU adds in 16 bits.

    Those are neighbours in a column of a matrix, and any two of a convolution's channel: in which order its kernel
    reads them is the runtime's. See `graph.dialect.saturation`.
    """
    weight, axis = product.weight, product.axis
    assert weight.const_value is not None
    shape = tuple(int(size) for size in weight.const_value.shape.numpy())
    sizes = op.Abs(weight)
    others = [index for index in range(len(shape)) if index != axis]
    if not reduce_range or int(np.prod([shape[index] for index in others])) == 1:
        peak = op.ReduceMax(sizes, others, keepdims=0)
    elif product.node.op_type == "Conv":
        flat = op.Reshape(sizes, np.asarray([shape[0], -1], np.int64))
        # the kernel chooses the order, so any two of a channel may be added in 16 bits
        two, _ = op.TopK(flat, np.asarray([2], np.int64), axis=1, outputs=2)
        peak = op.ReduceSum(two, [1], keepdims=0)
    else:
        # pairs of an odd column: the last weight stands alone
        if shape[1 - axis] % 2:
            pads = np.zeros(4, np.int64)
            pads[2 + 1 - axis] = 1
            sizes = op.Pad(sizes, pads)
        columns = op.Transpose(sizes, perm=[1, 0]) if axis == 1 else sizes
        pairs = op.Reshape(columns, np.asarray([shape[axis], -1, 2], np.int64))
        peak = op.ReduceMax(op.ReduceSum(pairs, [2], keepdims=0), [1], keepdims=0)
    floor = float(np.abs(weight.const_value.numpy()).max()) * _SMALLEST_CHANNEL
    return op.Div(op.Max(peak, np.float32(max(floor, 1e-30))), np.float32(127))


def _round_blocks(op: Builder, product: Product, settings: Quantization) -> ir.Value:
    """Rows of the weight as [out, in], in blocks with a scale each: levels −8 … 7 (or −128 … 127), as MatMulNBits has.

    Blocks become rows of their own: the runtime's loop for one scale per row is ten times that for blocks.
    """
    weight, bits = product.weight, settings.bits
    assert weight.const_value is not None
    rows, columns = (int(weight.const_value.shape.numpy()[i]) for i in (product.axis, 1 - product.axis))
    block = settings.block_size
    turned = op.Transpose(weight, perm=[1, 0]) if product.axis == 1 else weight
    missing = -columns % block
    if missing:  # the last block is filled up, as the operator has it
        turned = op.Pad(turned, np.asarray([0, 0, 0, missing], np.int64))
    blocks = op.Reshape(turned, np.asarray([-1, block], np.int64))
    half = 2 ** (bits - 1)
    # The largest weight of a block gets the level −2ⁿ⁻¹, which has no counterpart: one level more than ±(2ⁿ⁻¹ − 1).
    high, low = op.ReduceMax(blocks, [1], keepdims=0), op.ReduceMin(blocks, [1], keepdims=0)
    peak = op.Where(op.Greater(high, op.Neg(low)), high, low)
    scale = op.Div(peak, np.float32(-half))
    scale = op.stop_gradient(op.Where(op.Equal(scale, 0.0), np.float32(1), scale))
    kind = ir.DataType.INT4 if bits == 4 else ir.DataType.INT8
    count = rows * ((columns + missing) // block)
    levels = op.node("QuantizeLinear", [blocks, scale, _zeros(op, count, kind)], {"axis": 0})[0]
    full = op.DequantizeLinear(levels, scale, axis=0)
    full = op.Reshape(full, np.asarray([rows, columns + missing], np.int64))
    if missing:
        full = op.Slice(full, [0], [columns], [1])
    return op.Transpose(full, perm=[1, 0]) if product.axis == 1 else full


def _zeros(op: Builder, count: int, kind: ir.DataType) -> ir.Value:
    if kind != ir.DataType.INT4:
        return op.constant(np.zeros(count, kind.numpy()), name="zero_points")
    name = op.namer("zero_points")
    # two numbers of 4 bits in a byte: numpy has no type of them
    tensor = ir.PackedTensor(np.zeros((count + 1) // 2, np.uint8), kind, shape=ir.Shape([count]), name=name)
    value = ir.Value(name=name, type=ir.TensorType(kind), shape=ir.Shape([count]), const_value=tensor)
    op.graph.register_initializer(value)
    return value


def _read_rounded(op: Builder, product: Product, rounded: ir.Value) -> None:
    operand = product.node.inputs[1]
    if operand is product.weight:
        product.node.replace_input_with(1, rounded)
        return
    transpose = None if operand is None else operand.producer()
    assert transpose is not None
    # a Transpose of its own: other readers of the weight may need it as it is
    with op.inserting(product.node):
        product.node.replace_input_with(1, op.Transpose(rounded, perm=[1, 0]))


def _snap_table(table: ir.Value) -> None:
    """Round a table's rows to 8 bits in place: looked up as integers in the file, they are then the same numbers."""
    assert table.const_value is not None
    levels, scales = quantize_rows(table.const_value.numpy())
    table.const_value = ir.tensor(levels.astype(np.float32) * scales, name=table.name)


def quantize_rows(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A table's rows in 8 bits, and the scale of each.

    >>> levels, scales = quantize_rows(np.array([[1.27, -0.5]], np.float32))
    >>> levels.tolist()
    [[127, -50]]
    """
    scales = np.maximum(np.abs(table).max(axis=1, keepdims=True), np.finfo(np.float32).tiny) / np.float32(127)
    return np.rint(table / scales).astype(np.int8), scales.astype(np.float32)
