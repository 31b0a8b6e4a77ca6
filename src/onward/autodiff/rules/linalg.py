"""Gradients of matrix products."""

from __future__ import annotations

from onward.autodiff.registry import gradient


@gradient("Gemm", broadcasts=True)
def gemm(op, node, dy):
    """y = α·A'·B' + β·C   ⇒   dA' = α·dy·B'ᵀ,  dB' = α·A'ᵀ·dy,  dC = β·dy summed to C"""
    a, b, *rest = node.inputs
    alpha = node.attributes.get_float("alpha", 1.0)
    beta = node.attributes.get_float("beta", 1.0)
    trans_a = node.attributes.get_int("transA", 0)
    trans_b = node.attributes.get_int("transB", 0)
    da = (
        op.Gemm(b, dy, alpha=alpha, transA=trans_b, transB=1)
        if trans_a
        else op.Gemm(dy, b, alpha=alpha, transB=1 - trans_b)
    )
    db = (
        op.Gemm(dy, a, alpha=alpha, transA=1, transB=trans_a)
        if trans_b
        else op.Gemm(a, dy, alpha=alpha, transA=1 - trans_a)
    )
    dc = dy if beta == 1.0 else op.Mul(dy, beta)
    return da, db, dc if rest else None
