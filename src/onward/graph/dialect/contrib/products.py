"""Matrix products and convolutions with fused activations, scaling and transposes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.dialect.contrib.table import fused, needed
from onward.graph.nodes import attribute, given

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
    a = _turned(op, needed(node, 0), attribute(node, "transA", 0), attribute(node, "transBatchA", 0))
    b = _turned(op, needed(node, 1), attribute(node, "transB", 0), attribute(node, "transBatchB", 0))
    y = op.MatMul(a, b)
    alpha = attribute(node, "alpha", 1.0)
    return y if alpha == 1.0 else op.Mul(y, op.constant_like(alpha, y))


def _turned(op: Builder, x: ir.Value, last: int, batch: int) -> ir.Value:
    rank = op.rank(x)
    if rank < 2 or not (last or batch):
        return x
    order = list(range(rank))
    if batch:
        order = [*order[1:-1], order[0], order[-1]]
    if last:
        order[-1], order[-2] = order[-2], order[-1]
    return x if order == list(range(rank)) else op.Transpose(x, perm=order)


@fused("FusedGemm")
def _fused_gemm(op: Builder, node: ir.Node) -> ir.Value:
    """An activation of Gemm"""
    kept = {k: v for k, v in node.attributes.items() if k in ("alpha", "beta", "transA", "transB")}
    (y,) = op.node("Gemm", list(node.inputs), kept)
    parameters = [attribute(node, f"activation_{name}") for name in ("alpha", "beta", "gamma")]
    return _activate(op, y, attribute(node, "activation", ""), parameters)


@fused("FusedConv")
def _fused_conv(op: Builder, node: ir.Node) -> ir.Value:
    """An activation of Conv(x, w, b) + z"""
    kept = {k: v for k, v in node.attributes.items() if not k.startswith("activation")}
    (y,) = op.node("Conv", list(node.inputs[:3]), kept)
    extra = given(node, 3)
    y = y if extra is None else op.Add(y, extra)
    return _activate(op, y, attribute(node, "activation", ""), attribute(node, "activation_params", []))


def _activate(op: Builder, x: ir.Value, name: str, parameters: Sequence[float | None]) -> ir.Value:
    given_ones = [p for p in parameters if p is not None]
    match name:
        case "" | "Identity":
            return x
        case "Clip":
            low, high = given_ones
            return op.Clip(x, op.constant_like(low, x), op.constant_like(high, x))
        case "LeakyRelu" | "Elu" | "ThresholdedRelu":
            return op.node(name, [x], dict(zip(["alpha"], given_ones)))[0]
        case "HardSigmoid" | "Selu":
            second = "beta" if name == "HardSigmoid" else "gamma"
            return op.node(name, [x], dict(zip(["alpha", second], given_ones)))[0]
        case (
            "Relu"
            | "Tanh"
            | "Sigmoid"
            | "Softplus"
            | "Softsign"
            | "HardSwish"
            | "Gelu"
            | "Exp"
            | "Erf"
            | "Sqrt"
        ):
            return op.node(name, [x])[0]
        case _:
            raise ModelError(f"the fused activation {name!r} has no standard form here")
