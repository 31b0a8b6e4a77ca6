"""Matrix products and convolutions with fused activations, scaling and transposes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.dialect.contrib.table import add_optional, fused
from onward.graph.nodes import attribute, optional_input, required_input

if TYPE_CHECKING:
    from onward.graph.builder import Builder


@fused("FusedMatMul", "TransposeMatMul")
def _fused_matmul(op: Builder, node: ir.Node) -> ir.Value:
    """α·A·B with A or B transposed"""
    return _product(op, node)


@fused("FusedMatMulActivation")
def _fused_matmul_activation(op: Builder, node: ir.Node) -> ir.Value:
    """An activation of α·A·B with A or B transposed"""
    parameters = [attribute(node, f"activation_{name}") for name in ("alpha", "beta", "gamma")]
    if attribute(node, "activation") == "Softmax":
        return op.Softmax(_product(op, node), axis=attribute(node, "activation_axis", -1))
    return _activate(op, _product(op, node), attribute(node, "activation"), parameters)


def _product(op: Builder, node: ir.Node) -> ir.Value:
    a = _turned(op, required_input(node), attribute(node, "transA", 0), attribute(node, "transBatchA", 0))
    b = _turned(op, required_input(node, 1), attribute(node, "transB", 0), attribute(node, "transBatchB", 0))
    y = op.MatMul(a, b)
    alpha = attribute(node, "alpha", 1.0)
    return y if alpha == 1.0 else op.Mul(y, op.constant_like(alpha, y))


def _turned(op: Builder, x: ir.Value, last: int, batch: int) -> ir.Value:
    rank = op.rank(x)
    if rank < 2 or not (last or batch):
        return x
    order = list(range(rank))
    # transBatchA moves the first axis behind the other batch axes: [b, …, m, k] to […, b, m, k].
    if batch:
        order = [*order[1:-1], order[0], order[-1]]
    if last:
        order[-1], order[-2] = order[-2], order[-1]
    return x if order == list(range(rank)) else op.Transpose(x, perm=order)


@fused("FusedGemm")
def _fused_gemm(op: Builder, node: ir.Node) -> ir.Value:
    """An activation of Gemm"""
    attributes = {k: v for k, v in node.attributes.items() if k in ("alpha", "beta", "transA", "transB")}
    (y,) = op.node("Gemm", list(node.inputs), attributes)
    parameters = [attribute(node, f"activation_{name}") for name in ("alpha", "beta", "gamma")]
    return _activate(op, y, attribute(node, "activation", ""), parameters)


@fused("FusedConv")
def _fused_conv(op: Builder, node: ir.Node) -> ir.Value:
    """An activation of Conv(x, w, b) + z"""
    attributes = {k: v for k, v in node.attributes.items() if not k.startswith("activation")}
    (y,) = op.node("Conv", list(node.inputs[:3]), attributes)
    y = add_optional(op, y, optional_input(node, 3))
    return _activate(op, y, attribute(node, "activation", ""), attribute(node, "activation_params", []))


_PLAIN = frozenset(
    {"Relu", "Tanh", "Sigmoid", "Softplus", "Softsign", "HardSwish", "Gelu", "Exp", "Erf", "Sqrt"}
)


def _activate(op: Builder, x: ir.Value, name: str, parameters: Sequence[float | None]) -> ir.Value:
    numbers = [p for p in parameters if p is not None]
    match name:
        case "" | "Identity":
            return x
        case "Clip":
            low, high = numbers
            return op.Clip(x, op.constant_like(low, x), op.constant_like(high, x))
        case "LeakyRelu" | "Elu" | "ThresholdedRelu":
            return op.node(name, [x], dict(zip(["alpha"], numbers)))[0]
        case "HardSigmoid" | "Selu":
            second = "beta" if name == "HardSigmoid" else "gamma"
            return op.node(name, [x], dict(zip(["alpha", second], numbers)))[0]
        case _ if name in _PLAIN:
            return op.node(name, [x])[0]
        case _:
            raise ModelError(f"the fused activation {name!r} has no standard form here")
