"""Quantized products as dequantization and a float product: weights stay quantized in the file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.dialect.contrib.table import add_optional, fused, refuse
from onward.graph.nodes import attribute, new_initializer, optional_input, producer_of, required_input
from onward.graph.save import external_part

if TYPE_CHECKING:
    from onward.graph.builder import Builder


@fused("MatMulNBits")
def _matmul_nbits(op: Builder, node: ir.Node) -> ir.Value:
    """x·DequantizeLinear(w)ᵀ + bias, with w in blocks of 2, 4 or 8 bits"""
    refuse(node, 4)
    if attribute(node, "weight_prepacked", 0):
        raise ModelError("its weight is packed for one device; export the model without prepacking")
    x, packed, scales = (required_input(node, index) for index in range(3))
    rows, columns = attribute(node, "N"), attribute(node, "K")
    block, bits = attribute(node, "block_size"), attribute(node, "bits", 4)
    blocks = -(-columns // block)
    weight = _stored(op, packed, (rows, blocks * block), bits, f"{packed.name}_as_{max(bits, 4)}bit")
    scales = op.Reshape(scales, [rows, blocks])
    zeros = optional_input(node, 3)
    shift = None
    if zeros is None:
        zero = _constant_of(op, np.full((rows, blocks), 2 ** (bits - 1), np.uint8), bits, "zero_points")
    elif zeros.dtype == ir.DataType.UINT8:
        # Rows of zero points begin at a whole byte.
        width = -(-blocks * bits // 8) * 8 // bits
        data = op.const_value(zeros)
        if data is None:
            raise ModelError("its zero points are computed in the graph; give them as an initializer")
        unpacked = _unpack(data, bits).reshape(rows, width)[:, :blocks]
        zero = _constant_of(op, unpacked, bits, f"{zeros.name}_unpacked")
    else:
        zero = None
        shift = op.Mul(op.Reshape(zeros, [rows, blocks]), scales)
    full = op.DequantizeLinear(weight, scales, zero, axis=1, block_size=block)
    if shift is not None:
        in_blocks = op.Reshape(full, [rows, blocks, block])
        full = op.Reshape(op.Sub(in_blocks, op.Unsqueeze(shift, [2])), [rows, blocks * block])
    # What pads the last block is no part of the weight.
    if blocks * block != columns:
        full = op.Slice(full, [0], [columns], [1])
    y = op.MatMul(x, op.Transpose(full, perm=[1, 0]))
    return add_optional(op, y, optional_input(node, 5))


@fused("GatherBlockQuantized")
def _gather_block_quantized(op: Builder, node: ir.Node) -> ir.Value:
    """The rows that are looked up, dequantized: (q − zero point)·scale, with one scale for each block of a row"""
    data, indices, scales = (required_input(node, index) for index in range(3))
    zeros = optional_input(node, 3)
    bits, block = attribute(node, "bits", 4), attribute(node, "block_size", 128)
    kind, sizes = data.dtype, op.static_shape(data)
    if sizes is None or kind is None or bits not in (4, 8):
        raise ModelError(f"its table has no known shape, or numbers of {bits} bits; 4 and 8 are supported")
    axes = [
        attribute(node, name, default) % len(sizes)
        for name, default in (("gather_axis", 0), ("quantize_axis", 1))
    ]
    # What exporters write for tables of embeddings.
    if axes != [0, 1] or len(sizes) != 2:
        raise ModelError("it looks up rows of a matrix only where gather_axis is 0 and quantize_axis 1")
    small = kind in (ir.DataType.UINT4, ir.DataType.INT4)
    bits = 4 if small else bits
    rows, columns = sizes[0], sizes[1] if small else sizes[1] * 8 // bits
    blocks = -(-columns // block)
    # Rows first, numbers later: the whole table in float32 would take eight times the file.
    numbers = _looked_up(op, data, indices, columns, bits, signed=kind == ir.DataType.INT4)
    scales = op.Gather(op.Reshape(scales, [rows, blocks]), indices, axis=0)
    if zeros is not None:
        shift = _looked_up(op, zeros, indices, blocks, bits, signed=kind == ir.DataType.INT4)
    else:
        shift = None if small else op.constant(np.float32(2 ** (bits - 1)))
    if columns % block:
        index = np.arange(columns) // block
        scales = op.Gather(scales, index, axis=-1)
        shift = op.Gather(shift, index, axis=-1) if zeros is not None and shift is not None else shift
        return op.Mul(numbers if shift is None else op.Sub(numbers, shift), scales)
    ahead = [0] * (op.rank(indices) or 0)
    numbers = op.Reshape(numbers, [*ahead, blocks, block])
    if zeros is not None and shift is not None:
        shift = op.Unsqueeze(shift, [-1])
    full = op.Mul(numbers if shift is None else op.Sub(numbers, shift), op.Unsqueeze(scales, [-1]))
    return op.Reshape(full, [*ahead, columns])


def _looked_up(
    op: Builder, table: ir.Value, indices: ir.Value, columns: int, bits: int, *, signed: bool
) -> ir.Value:
    """Rows of a table of small numbers, as float: the bytes are looked up, and only those of the rows unpacked."""
    width = -(-columns * bits // 8)
    bytes_of = _bytes(op, table, width, columns)
    bytes_read = op.Cast(op.Gather(bytes_of, indices, axis=0), to=ir.DataType.FLOAT)
    if bits == 8:
        return bytes_read
    # In float: all numbers are small and exact, and integer shifts have few kernels.
    high = op.Floor(op.Mul(bytes_read, np.float32(1 / 16)))
    low = op.Sub(bytes_read, op.Mul(high, np.float32(16)))
    pairs = op.Concat(op.Unsqueeze(low, [-1]), op.Unsqueeze(high, [-1]), axis=-1)
    numbers = op.Reshape(pairs, [*[0] * (op.rank(indices) or 0), 2 * width])
    if signed:  # 8 to 15 are −8 to −1
        numbers = op.Sub(numbers, op.Mul(op.Floor(op.Mul(numbers, np.float32(1 / 8))), np.float32(16)))
    return numbers if 2 * width == columns else op.Slice(numbers, [0], [columns], [-1])


def _bytes(op: Builder, table: ir.Value, width: int, columns: int) -> ir.Value:
    """A stored matrix of small numbers as bytes [rows, width]: the same ones, where its rows are whole bytes."""
    # A table that the output layer shares comes through a Reshape to that layer's blocks.
    while (producer := producer_of(table, "Reshape", "Identity")) is not None:
        table = required_input(producer)
    tensor = table.const_value
    if tensor is None or table.is_graph_input():
        raise ModelError("its table is computed in the graph; give it as an initializer")
    name = f"{table.name}_bytes"
    if tensor.dtype.bitwidth < 8 and columns % 2:
        return op.constant(_padded(tensor, columns), name=name)
    rows = tensor.nbytes // width
    if isinstance(tensor, ir.ExternalTensor):
        return _register(op, external_part(tensor, name, (rows, width), dtype=ir.DataType.UINT8), name)
    return op.constant(np.frombuffer(tensor.tobytes(), np.uint8).reshape(rows, width), name=name)


def _padded(tensor: ir.TensorProtocol, columns: int) -> np.ndarray:
    """Numbers of 4 bits, two to a byte, each row begun with a byte of its own."""
    numbers = _unpack(np.frombuffer(tensor.tobytes(), np.uint8), 4)[: tensor.size].reshape(-1, columns)
    numbers = np.pad(numbers, [(0, 0), (0, 1)])
    return numbers[:, 0::2] | numbers[:, 1::2] << np.uint8(4)


def _stored(op: Builder, value: ir.Value, shape: tuple[int, int], bits: int, name: str) -> ir.Value:
    """The packed weight under its own type: the same bytes where ONNX has a type of that width."""
    tensor = value.const_value
    if tensor is None or value.is_graph_input():
        if bits == 8:
            return op.Reshape(value, np.asarray(shape, np.int64))
        raise ModelError("its weight is computed in the graph; give it as an initializer")
    if bits == 4 and isinstance(tensor, ir.ExternalTensor):  # the same bytes of the same file, unread
        return _register(op, external_part(tensor, name, shape, dtype=ir.DataType.UINT4), name)
    data = np.frombuffer(tensor.tobytes(), np.uint8)
    if bits == 8:
        return op.constant(data.reshape(shape), name=name)
    if bits == 4:
        return _register(op, ir.PackedTensor(data, ir.DataType.UINT4, shape=ir.Shape(shape)), name)
    return _constant_of(op, _unpack(data, bits).reshape(shape), bits, name)


def _unpack(data: np.ndarray, bits: int) -> np.ndarray:
    """Numbers of a few bits each, low bits first, as bytes."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return (data.reshape(-1, 1) >> shifts & np.uint8(2**bits - 1)).reshape(-1)


def _constant_of(op: Builder, data: np.ndarray, bits: int, name: str) -> ir.Value:
    if bits == 8:
        return op.constant(data, name=name)
    flat = data.reshape(-1)
    flat = np.append(flat, np.zeros(flat.size % 2, np.uint8))
    packed = flat[0::2] | flat[1::2] << 4
    return _register(op, ir.PackedTensor(packed, ir.DataType.UINT4, shape=ir.Shape(data.shape)), name)


def _register(op: Builder, tensor: ir.PackedTensor | ir.ExternalTensor, name: str) -> ir.Value:
    return new_initializer(op.root.graph, op.namer(name), tensor)


@fused("DynamicQuantizeMatMul")
def _dynamic_quantize_matmul(op: Builder, node: ir.Node) -> ir.Value:
    """Dequantize(Quantize(x))·DequantizeLinear(w) + bias, with a scale of x found at run time"""
    x, weight, scale = (required_input(node, index) for index in range(3))
    _, x_scale, x_zero = op.DynamicQuantizeLinear(x, outputs=3)
    # Rounded as the operator rounds x, so that training sees the error that deployment has.
    near = op.DequantizeLinear(op.QuantizeLinear(x, x_scale, x_zero), x_scale, x_zero)
    y = op.MatMul(near, _dequantized(op, weight, scale, optional_input(node, 3)))
    return add_optional(op, y, optional_input(node, 4))


@fused("MatMulIntegerToFloat")
def _matmul_integer_to_float(op: Builder, node: ir.Node) -> ir.Value:
    """DequantizeLinear(a)·DequantizeLinear(b) + bias"""
    a = _dequantized(op, required_input(node), required_input(node, 2), optional_input(node, 4))
    b = _dequantized(op, required_input(node, 1), required_input(node, 3), optional_input(node, 5))
    return add_optional(op, op.MatMul(a, b), optional_input(node, 6))


def _dequantized(op: Builder, x: ir.Value, scale: ir.Value, zero: ir.Value | None) -> ir.Value:
    """One scale for all, or one per column."""
    if op.rank(scale) == 0 or op.static_shape(scale) == (1,):
        scalar = np.asarray([], np.int64)
        zero = None if zero is None else op.Reshape(zero, scalar)
        return op.DequantizeLinear(x, op.Reshape(scale, scalar), zero)
    if zero is not None and op.static_shape(zero) in ((), (1,)):
        zero = op.Expand(zero, op.shape(scale))
    return op.DequantizeLinear(x, scale, zero, axis=-1)


@fused("QuantizeLinear", "DequantizeLinear")
def _quantize(op: Builder, node: ir.Node) -> ir.Value:
    """The standard operator of the same name"""
    scale = required_input(node, 1)
    axis = attribute(node, "axis", 1) if op.rank(scale) == 1 and op.static_dim(scale, 0) != 1 else None
    inputs = list(node.inputs)
    if axis is None:
        scalar = np.asarray([], np.int64)
        inputs = [inputs[0], *(None if value is None else op.Reshape(value, scalar) for value in inputs[1:])]
    return op.node(node.op_type, inputs, {"axis": axis})[0]


@fused("DynamicQuantizeLSTM")
def _dynamic_quantize_lstm(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    """LSTM with dequantized weights, which are stored transposed; its inputs are not quantized here"""
    weights = []
    for index, scale_index in ((1, 8), (2, 10)):
        stored, scale, zero = (
            required_input(node, index),
            required_input(node, scale_index),
            optional_input(node, scale_index + 1),
        )
        # one scale for each direction, or one for each of its columns
        shape = [0, 1, 1] if op.rank(scale) == 1 else [0, 1, -1]
        number = op.Cast(stored, to=op.dtype(scale))
        if zero is not None:
            number = op.Sub(number, op.Reshape(op.Cast(zero, to=op.dtype(scale)), shape))
        weights.append(op.Transpose(op.Mul(number, op.Reshape(scale, shape)), perm=[0, 2, 1]))
    optional = [optional_input(node, index) for index in range(3, 8)]
    return op.node(
        "LSTM", [required_input(node), *weights, *optional], dict(node.attributes), outputs=len(node.outputs)
    )
