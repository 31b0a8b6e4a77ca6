"""Cases of the operators of newer opsets, which the dialect writes out in those of opset 21."""

import numpy as np
from cases import Case, normal, positive

_QKV = [(1, 2, 3, 2), (1, 2, 3, 2), (1, 2, 3, 2)]
_FLAT = [(1, 2, 4), (1, 3, 4), (1, 3, 4)]
_HEADS = {"q_num_heads": 2, "kv_num_heads": 2}
_MASK = np.array([[True, False, True], [True, True, False], [True, True, True]])

CASES = [
    Case("Attention", shapes=_QKV, opset=23),
    Case("Attention", shapes=_QKV, opset=23, attributes={"is_causal": 1, "scale": 0.7}),
    Case("Attention", shapes=[*_QKV, (3, 3)], opset=23, label="float-mask"),
    Case("Attention", shapes=_QKV, opset=23, constants={3: _MASK}, label="bool-mask"),
    Case("Attention", shapes=_QKV, opset=23, attributes={"softcap": 1.5}),
    Case("Attention", shapes=_FLAT, opset=23, attributes=_HEADS, label="three-dimensional"),
    Case(
        "Attention",
        shapes=[(1, 4, 2, 2), (1, 2, 3, 2), (1, 2, 3, 2)],
        opset=23,
        label="grouped-queries",
    ),
    Case(
        "Attention",
        shapes=[(1, 1, 2, 2), (1, 1, 2, 2), (1, 1, 2, 2), (1, 1, 1, 2), (1, 1, 1, 2)],
        constants={3: None},
        opset=23,
        outputs=3,
        label="past",
    ),
    Case("RMSNormalization", shapes=[(3, 4), (4,)], opset=23),
    Case("RMSNormalization", shapes=[(2, 2, 3), (2, 3)], opset=23, attributes={"axis": 1, "epsilon": 0.1}),
    Case(
        "RotaryEmbedding",
        shapes=[(1, 2, 3, 4), (1, 3, 2), (1, 3, 2)],
        sample=[normal, positive, positive],
        opset=23,
    ),
    Case(
        "RotaryEmbedding",
        shapes=[(1, 2, 3, 4), (1, 3, 2), (1, 3, 2)],
        opset=23,
        attributes={"interleaved": 1},
    ),
    Case("Swish", shapes=[(3, 4)], opset=24, attributes={"alpha": 1.5}),
]
