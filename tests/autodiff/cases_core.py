"""Cases of the rules that everything else leans on."""

import numpy as np
from cases import Case

CASES = [
    Case("Add", shapes=[(3, 4), (4,)]),
    Case("Add", shapes=[(3, 4), (1, 4)], symbolic=True),
    Case("Sub", shapes=[(3, 1), (2, 1, 4)]),
    Case("Mul", shapes=[(3, 4), (4,)]),
    Case("Mul", shapes=[(3, 4), ()]),
    Case("Relu", shapes=[(3, 4)]),
    Case("Gemm", shapes=[(3, 4), (4, 5)]),
    Case(
        "Gemm",
        shapes=[(4, 3), (5, 4), (3, 1)],
        attributes={"transA": 1, "transB": 1, "alpha": 0.5, "beta": 2.0},
    ),
    Case("ReduceSum", shapes=[(3, 4)]),
    Case("ReduceSum", shapes=[(2, 3, 4)], constants={1: np.array([-1, 0])}, attributes={"keepdims": 0}),
]
