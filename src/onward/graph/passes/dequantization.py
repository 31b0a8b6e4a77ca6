"""Dequantizes a weight just before each product that reads it, and again for the gradient.

Otherwise a session is free to dequantize all weights first, and keeps those that the gradient reads again from the
forward pass until then: a 4-bit model of 1.1 B parameters would need 4.4 GB for them. Each product gets a
`DequantizeLinear` of its own, whose scales wait for the product's other operand: their shape is computed from it. The
packed weight stays where it is, in one file; it goes by several names, so that the runtime does not merge the copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.graph.builder import Builder
from onward.graph.cleanup import remove_unused
from onward.graph.nodes import new_initializer, only_user, producer_of
from onward.graph.save import external_part

_PRODUCTS = frozenset({"MatMul", "Gemm"})


def dequantize_per_product(model: ir.Model) -> ir.Model:
    """Give each product of a stored weight its own dequantization, in place; results are the same to the bit."""
    op = Builder(model.graph)
    for node in list(model.graph):
        if node.op_type == "DequantizeLinear" and node.domain == "":
            weight, scale = node.inputs[0], node.inputs[1]
            if weight is not None and scale is not None and _is_stored(weight):
                _split(op, node, weight, scale)
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
        with op.inserting(product, f"{product.name or product.op_type}/weight"):
            stored = weight
            if count and external is not None:
                stored = _view(op, weight, external.shape.numpy(), "again")
            nothing = op.Mul(op.Shape(other, start=0, end=1), [0])
            waiting = op.Reshape(scale, op.Add(nothing, sizes))
            waiting.shape = ir.Shape(sizes)
            full = op.node("DequantizeLinear", [stored, waiting, *zeros], attributes)[0]
            full = full if whole is None else op.Reshape(full, whole)
            full.shape = node.outputs[0].shape
            product.replace_input_with(index, op.Transpose(full, perm=[1, 0]) if turned else full)


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
        view_tensor: ir.TensorProtocol = external_part(tensor, name, shape)
    elif tensor.dtype.bitwidth < 8:
        data = np.frombuffer(tensor.tobytes(), np.uint8)
        view_tensor = ir.PackedTensor(data, tensor.dtype, shape=ir.Shape(shape))
    else:
        view_tensor = ir.tensor(tensor.numpy().reshape(shape), dtype=tensor.dtype)
    return new_initializer(op.graph, name, view_tensor)


def _products(node: ir.Node) -> list[tuple[ir.Node, int, bool]]:
    """(product, place of the weight in it, whether transposed) of each product that reads a dequantized weight."""
    readers = []
    for user, index in node.outputs[0].uses():
        if user.op_type == "Transpose" and list(user.attributes.get_ints("perm", ())) == [1, 0]:
            readers += [(after, index, True) for after, index in user.outputs[0].uses()]
        else:
            readers.append((user, index, False))
    return [
        (user, index, turned)
        for user, index, turned in readers
        if user.op_type in _PRODUCTS and index in (0, 1)
    ]


# --- Products of integers whose input is rounded when they run, and the same products of floats.
#
# Dynamic quantization, as transformers.js publishes it, writes a product as DynamicQuantizeLinear,
# MatMulInteger, Cast and Mul. Training multiplies the dequantized weight with the input as it is; the
# deployed model keeps the integers.


def multiply_in_float(model: ir.Model) -> dict[ir.Value, ir.Value]:
    """Give each such product a twin of floats in its place; returns the twins' results with the integers' own.

    The integers stay in the graph, unused, until they are removed or `multiply_in_integers` puts them back.
    """
    results: dict[ir.Value, ir.Value] = {}
    for node in list(model.graph):
        if node.op_type != "MatMulInteger" or node.domain not in ("", "ai.onnx"):
            continue
        cast = only_user(node.outputs[0], "Cast")
        scaled = None if cast is None else only_user(cast.outputs[0], "Mul")
        source, weight = producer_of(node.inputs[0], "DynamicQuantizeLinear"), node.inputs[1]
        if scaled is None or source is None or weight is None or weight.const_value is None:
            continue
        scale = _weight_scale(scaled, source)
        if scale is None or scale.const_value is None:
            continue
        result = scaled.outputs[0]
        # one scale, or one for each column
        axis = [ir.AttrInt64("axis", 1)] if scale.const_value.shape.rank() else []
        inputs = [weight, scale, *node.inputs[3:]]
        dequantized = ir.Node("", "DequantizeLinear", inputs, axis, name=f"{node.name}/weight")
        weight_value, kind = dequantized.outputs[0], ir.TensorType(ir.DataType.FLOAT)
        weight_value.name, weight_value.type = f"{weight.name}.dequantized", kind
        weight_value.shape = ir.Shape(weight.const_value.shape.numpy())
        if source.inputs[0] is not None:  # of which the quantized file may say nothing
            source.inputs[0].type = source.inputs[0].type or kind
        product = ir.Node("", "MatMul", [source.inputs[0], weight_value], name=node.name)
        twin = product.outputs[0]
        twin.name, twin.type, twin.shape = f"{result.name}.float", result.type or kind, result.shape
        model.graph.insert_after(scaled, [dequantized, product])
        _exchange(result, twin)
        results[twin] = result
    return results


def multiply_in_integers(results: Mapping[ir.Value, ir.Value]) -> None:
    """Take the integer products again wherever their twins are read."""
    for twin, result in results.items():
        _exchange(twin, result)


def _exchange(old: ir.Value, new: ir.Value) -> None:
    """Have all read another value; what was an output of the model gives it its name."""
    if old.is_graph_output():
        old.name, new.name = new.name, old.name
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)


def _weight_scale(scaled: ir.Node, source: ir.Node) -> ir.Value | None:
    """What the integers' weight is scaled by: the factor beside that of the input."""
    for factor in scaled.inputs:
        both = producer_of(factor, "Mul")
        if both is not None and source.outputs[1] in both.inputs:
            return next((value for value in both.inputs if value is not source.outputs[1]), None)
    return None
