"""Dequantizes a weight just before each product that reads it, and again for the gradient.

Otherwise a session is free to dequantize all weights first, and keeps those that the gradient reads again from the
forward pass until then: a 4-bit model of 1.1 B parameters would need 4.4 GB for them. Each product gets a
`DequantizeLinear` of its own, whose scales wait for the product's other operand: their shape is computed from it. The
packed weight stays where it is, in one file; it goes by several names, so that the runtime does not merge the copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.graph.builder import Builder
from onward.graph.cleanup import remove_unused
from onward.graph.save import external_part

__all__ = ["dequantize_late"]

_PRODUCTS = frozenset({"MatMul", "Gemm"})


def dequantize_late(model: ir.Model) -> ir.Model:
    """Give each product of a stored weight its own dequantization, in place; results are the same to the bit."""
    op = Builder(model.graph)
    for node in list(model.graph):
        if node.op_type == "DequantizeLinear" and node.domain == "":
            weight, scale = node.inputs[0], node.inputs[1]
            if weight is not None and scale is not None and _is_stored(weight):
                _split(op, node, weight, scale)
    op.before = None
    return remove_unused(model)


def _is_stored(value: ir.Value | None) -> bool:
    return value is not None and value.const_value is not None and not value.is_graph_input()


def _split(op: Builder, node: ir.Node, weight: ir.Value, scale: ir.Value) -> None:
    sizes = op.static_shape(scale)
    if not sizes:
        return
    weight, zeros, sizes, attributes, whole = _by_block(op, node, weight, sizes)
    external = weight.const_value if isinstance(weight.const_value, ir.ExternalTensor) else None
    for count, (product, index, turned) in enumerate(_products(node)):
        other = product.inputs[1 - index]
        if other is None or other.const_value is not None:
            continue
        op.before, op.scope = product, f"{product.name or product.op_type}/weight"
        stored = weight
        if count and external is not None:
            stored = _view(op, weight, external.shape.numpy(), "again")
        nothing = op.Mul(op.node("Shape", [other], {"start": 0, "end": 1})[0], np.asarray([0], np.int64))
        waiting = op.Reshape(scale, op.Add(nothing, np.asarray(sizes, np.int64)))
        waiting.shape = ir.Shape(sizes)
        full = op.node("DequantizeLinear", [stored, waiting, *zeros], attributes)[0]
        if whole is not None:
            full = op.Reshape(full, np.asarray(whole, np.int64))
        full.shape = node.outputs[0].shape
        product.replace_input_with(index, op.Transpose(full, perm=[1, 0]) if turned else full)
    op.scope = ""


def _by_block(
    op: Builder, node: ir.Node, weight: ir.Value, sizes: tuple[int, ...]
) -> tuple[ir.Value, list[ir.Value | None], tuple[int, ...], dict[str, Any], tuple[int, ...] | None]:
    """Weight, zero points, sizes of the scales, attributes and final shape: blocks of a row as rows of their own.

    The same numbers, but the runtime's loop for one scale per row takes a tenth of the time of the one for blocks.
    """
    zeros, attributes = list(node.inputs[2:]), dict(node.attributes)
    block, axis = node.attributes.get_int("block_size", 0), node.attributes.get_int("axis", 1)
    shape = op.static_shape(weight)
    plain = shape is not None and len(shape) == 2 and axis in (1, -1) and block > 0
    if not plain or shape is None or shape[1] % block or not all(_is_stored(value) for value in zeros):
        return weight, zeros, sizes, attributes, None
    rows = shape[0] * (shape[1] // block)
    if sizes != (shape[0], shape[1] // block):
        return weight, zeros, sizes, attributes, None
    by_row = {**attributes, "axis": ir.AttrInt64("axis", 0)}
    del by_row["block_size"]
    zeros = [value and _view(op, value, [rows], "by_block") for value in zeros]
    return _view(op, weight, [rows, block], "by_block"), zeros, (rows,), by_row, shape


def _view(op: Builder, value: ir.Value, shape: Sequence[int], suffix: str) -> ir.Value:
    """The same bytes in another shape, under another name."""
    name = op.namer(f"{value.name}.{suffix}")
    tensor = value.const_value
    assert tensor is not None
    if isinstance(tensor, ir.ExternalTensor):
        made: ir.TensorProtocol = external_part(tensor, name, shape)
    elif tensor.dtype.bitwidth < 8:
        data = np.frombuffer(tensor.tobytes(), np.uint8)
        made = ir.PackedTensor(data, tensor.dtype, shape=ir.Shape(shape), name=name)
    else:
        made = ir.tensor(tensor.numpy().reshape(shape), dtype=tensor.dtype, name=name)
    view = ir.Value(name=name, type=value.type, shape=ir.Shape(shape), const_value=made)
    op.graph.register_initializer(view)
    return view


def _products(node: ir.Node) -> list[tuple[ir.Node, int, bool]]:
    """(product, place of the weight in it, whether transposed) of each product that reads a dequantized weight."""
    found = []
    for user, index in node.outputs[0].uses():
        if user.op_type == "Transpose" and list(user.attributes.get_ints("perm", ())) == [1, 0]:
            found += [(after, place, True) for after, place in user.outputs[0].uses()]
        else:
            found.append((user, index, False))
    return [
        (user, place, turned)
        for user, place, turned in found
        if user.op_type in _PRODUCTS and place in (0, 1)
    ]
