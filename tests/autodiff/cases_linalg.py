"""Cases of matrix products, contractions and determinants."""

from cases import Case


def _broadcast_batches(dims: str, label: str) -> Case:
    """Shape inference says nothing of a broadcast ellipsis, so the output's shape is written here."""
    shapes = [(2, 1, 3, 2), (3, 2, 2)]
    text = (
        '<ir_version: 10, opset_import: ["": 21]> g (float[%s] x0, float[%s] x1) => (float[%s] y) '
        '{ y = Einsum<equation="...ij,...jk->...ik">(x0, x1) }'
    )
    x0, x1, y = dims.split()
    return Case("Einsum", shapes=shapes, text=text % (x0, x1, y), label=label)


CASES = [
    _broadcast_batches("2,1,3,2 3,2,2 2,3,3,2", "ellipsis"),
    _broadcast_batches("A,B,M,K C,K,N A,D,M,N", "ellipsis-symbolic"),
    Case("MatMul", shapes=[(4,), (4,)]),
    Case("MatMul", shapes=[(4,), (4, 3)]),
    Case("MatMul", shapes=[(4,), (2, 4, 3)]),
    Case("MatMul", shapes=[(3, 4), (4,)]),
    Case("MatMul", shapes=[(2, 3, 4), (4,)]),
    Case("MatMul", shapes=[(3, 4), (4, 2)]),
    Case("MatMul", shapes=[(3, 4), (4, 2)], symbolic=True),
    Case("MatMul", shapes=[(2, 3, 4), (4, 2)]),
    Case("MatMul", shapes=[(2, 3, 4), (4, 2)], symbolic=True),
    Case("MatMul", shapes=[(2, 1, 3, 2), (2, 2)], symbolic=True),
    Case("MatMul", shapes=[(2, 3, 4), (2, 4, 2)]),
    Case("MatMul", shapes=[(2, 3, 2), (2, 2, 2)], symbolic=True),
    Case("MatMul", shapes=[(2, 1, 3, 2), (3, 2, 2)]),
    Case("MatMul", shapes=[(2, 1, 3, 2), (3, 2, 2)], symbolic=True),
    Case("MatMul", shapes=[(3, 2), (2, 2, 2)]),
    Case("MatMul", shapes=[(3, 2), (2, 2, 2)], symbolic=True),
    Case("MatMul", shapes=[(4,), (2, 4, 3)], symbolic=True),
    Case("MatMul", shapes=[(0, 3, 4), (4, 2)]),
    Case("Gemm", shapes=[(3, 4), (4, 5), (5,)], symbolic=True),
    Case("Gemm", shapes=[(4, 3), (4, 5), ()], attributes={"transA": 1}),
    Case("Gemm", shapes=[(3, 4), (5, 4), (1, 5)], attributes={"transB": 1, "beta": 0.5}),
    *[
        Case("Einsum", shapes=shapes, attributes={"equation": equation}, symbolic=symbolic)
        for equation, shapes, symbolic in [
            ("ij,jk->ik", [(2, 3), (3, 2)], False),
            ("ij,jk->ik", [(2, 3), (3, 2)], True),
            ("ij,jk", [(2, 3), (3, 2)], False),
            ("bij,bjk->bik", [(2, 3, 2), (2, 2, 3)], True),
            ("...ij,jk", [(2, 3, 2), (2, 3)], True),
            ("ij->ji", [(2, 3)], False),
            ("ij->", [(2, 3)], True),
            ("ij->i", [(2, 3)], False),
            ("ij,kj->i", [(2, 3), (2, 3)], True),
            ("i,i->", [(4,), (4,)], False),
            ("i,j->ij", [(3,), (4,)], False),
            ("ii->i", [(3, 3)], False),
            ("ii->i", [(3, 3)], True),
            ("ii", [(3, 3)], False),
            ("iji->j", [(2, 3, 2)], True),
            ("ij,jk,kl->il", [(2, 3), (3, 2), (2, 2)], False),
            ("...j->...", [(2, 2, 3)], False),
            ("b n h d , b m h d -> b h n m", [(2, 2, 2, 2), (2, 3, 2, 2)], True),
        ]
    ],
    Case("Det", shapes=[(3, 3)]),
    Case("Det", shapes=[(1, 1)]),
    Case("Det", shapes=[(2, 2, 2)]),
    Case("Det", shapes=[(2, 3, 3)], symbolic=True),
    Case("Det", shapes=[(2, 2)], symbolic=True),
    Case("Det", shapes=[(4, 4)]),
]
