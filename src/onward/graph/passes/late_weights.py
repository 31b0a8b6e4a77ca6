"""Dequantizes a weight just before each product that reads it, and again for the gradient.

Otherwise a session is free to dequantize all weights first, and keeps those that the gradient reads again from the
forward pass until then: a 4-bit model of 1.1 B parameters would need 4.4 GB for them. Each product gets a
`DequantizeLinear` of its own, whose scales wait for the product's other operand: their shape is computed from it. The
packed weight stays where it is, in one file; it goes by several names, so that the runtime does not merge the copies.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onward.graph.builder import Builder
from onward.graph.cleanup import remove_unused
from onward.graph.save import external_part

__all__ = ["dequantize_late"]

_PRODUCTS = frozenset({"MatMul", "Gemm"})


def dequantize_late(model: ir.Model) -> ir.Model:
    """Give each product of a weight in a file its own dequantization, in place; results are the same to the bit."""
    op = Builder(model.graph)
    for node in list(model.graph):
        if node.op_type == "DequantizeLinear" and node.domain == "":
            weight, scale = node.inputs[0], node.inputs[1]
            if weight is not None and isinstance(weight.const_value, ir.ExternalTensor) and scale is not None:
                _split(op, node, weight, weight.const_value, scale)
    op.before = None
    return remove_unused(model)


def _split(op: Builder, node: ir.Node, weight: ir.Value, tensor: ir.ExternalTensor, scale: ir.Value) -> None:
    sizes = op.static_shape(scale)
    if sizes is None or not sizes or weight.is_graph_input():
        return
    shape = tensor.shape.numpy()
    for count, (product, index, turned) in enumerate(_products(node)):
        other = product.inputs[1 - index]
        if other is None or other.const_value is not None:
            continue
        op.before, op.scope = product, f"{product.name or product.op_type}/weight"
        stored = weight
        if count:
            name = op.namer(f"{weight.name}.again")
            stored = ir.Value(
                name=name,
                type=weight.type,
                shape=weight.shape,
                const_value=external_part(tensor, name, shape),
            )
            op.graph.register_initializer(stored)
        nothing = op.Mul(op.node("Shape", [other], {"start": 0, "end": 1})[0], np.asarray([0], np.int64))
        waiting = op.Reshape(scale, op.Add(nothing, np.asarray(sizes, np.int64)))
        waiting.shape = scale.shape
        full = op.node("DequantizeLinear", [stored, waiting, *node.inputs[2:]], dict(node.attributes))[0]
        full.shape = node.outputs[0].shape
        product.replace_input_with(index, op.Transpose(full, perm=[1, 0]) if turned else full)
    op.scope = ""


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
