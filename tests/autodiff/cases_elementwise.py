"""Cases of arithmetic, mathematical functions and activations."""

import numpy as np
from cases import Case, between, beyond, distinct, normal, positive, unit

F32 = np.float32


def above_one(rng, shape):
    return rng.uniform(1.2, 3.0, shape).astype(np.float32)


def wide(rng, shape):
    """Reaches both sides of the usual kinks (±3, ±1, 0), and keeps off them."""
    return (rng.choice([-4.0, -2.0, -0.7, 0.0, 0.7, 2.0, 4.0], shape) + rng.uniform(0.1, 0.25, shape)).astype(
        np.float32
    )


SAMPLES = {
    "Acos": unit,
    "Acosh": above_one,
    "Asin": unit,
    "Atanh": unit,
    "Log": positive,
    "Sqrt": positive,
}
FUNCTIONS = [
    "Abs",
    "Acos",
    "Acosh",
    "Asin",
    "Asinh",
    "Atan",
    "Atanh",
    "Cos",
    "Cosh",
    "Erf",
    "Exp",
    "Identity",
    "Log",
    "Neg",
    "Reciprocal",
    "Sin",
    "Sinh",
    "Sqrt",
    "Tan",
]
ACTIVATIONS = [
    ("Celu", {}),
    ("Celu", {"alpha": 2.0}),
    ("Elu", {}),
    ("Elu", {"alpha": 0.5}),
    ("Gelu", {}),
    ("Gelu", {"approximate": "tanh"}),
    ("HardSigmoid", {}),
    ("HardSigmoid", {"alpha": 0.6, "beta": 0.3}),
    ("HardSwish", {}),
    ("LeakyRelu", {}),
    ("LeakyRelu", {"alpha": 0.3}),
    ("LeakyRelu", {"alpha": -1.5}),
    ("Mish", {}),
    ("Relu", {}),
    ("Selu", {}),
    ("Selu", {"alpha": 1.2, "gamma": 0.8}),
    ("Shrink", {}),
    ("Shrink", {"lambd": 1.5, "bias": 0.4}),
    ("Sigmoid", {}),
    ("Softplus", {}),
    ("Softsign", {}),
    ("Tanh", {}),
    ("ThresholdedRelu", {}),
    ("ThresholdedRelu", {"alpha": 0.3}),
]


CASES = [
    *(Case(op, shapes=[(3, 4)], sample=SAMPLES.get(op, normal)) for op in FUNCTIONS),
    *(Case(op, shapes=[(4, 5)], attributes=attributes, sample=wide) for op, attributes in ACTIVATIONS),
    Case("Exp", shapes=[()], label="scalar"),
    Case("Relu", shapes=[(0, 3)], label="empty"),
    Case("Gelu", shapes=[(2, 3)], symbolic=True),
    *(
        Case(op, shapes=shapes, symbolic=symbolic)
        for op in ("Add", "Sub", "Mul", "Div")
        for shapes, symbolic in [
            ([(3, 4), (4,)], False),
            ([(3, 1), (2, 1, 4)], False),
            ([(3, 4), ()], False),
            ([(3, 4), (1, 4)], True),
            ([(2,), (3, 2)], True),
            ([(0, 3), (3,)], False),
        ]
    ),
    Case("Div", shapes=[(3, 4)], constants={1: np.array([2.0, -3.0, 0.5, 4.0], F32)}, label="constant"),
    Case("Mod", shapes=[(3, 4), (4,)], attributes={"fmod": 1}, sample=[wide, positive]),
    Case("Mod", shapes=[(3, 4), ()], attributes={"fmod": 1}, sample=[wide, positive], symbolic=True),
    # powers: tensor exponents, and the constants that have forms of their own
    Case("Pow", shapes=[(3, 4), (4,)], sample=[positive, normal]),
    Case("Pow", shapes=[(3, 1), (2, 1, 4)], sample=[positive, normal], symbolic=True),
    *(
        Case("Pow", shapes=[(5,)], constants={1: np.array(p, F32)}, sample=s, label=f"p={p}")
        for p, s in [(0, normal), (1, normal), (2, normal), (3, normal), (4, normal), (-1, normal)]
        + [(-2, normal), (0.5, positive), (1.5, positive), (-0.5, positive), (2.7, positive)]
    ),
    Case("Pow", shapes=[(4,)], constants={1: np.array(3, np.int64)}, label="integer-exponent"),
    Case("Pow", shapes=[(4,)], constants={1: np.array([0, 1, 2, -1])}, label="integer-exponents"),
    Case("Pow", shapes=[(4,)], constants={1: np.array([[2.0], [3.0]], F32)}, label="broadcast-exponent"),
    *(
        Case(
            "Pow",
            constants={1: np.array(p, F32)},
            shapes=[(3,)],
            feeds={"x0": np.array([0, 0.5, -1], F32)},
            label=f"zero-base-p={p}",
        )
        for p in (0, 1, 2, 3, 4)
    ),
    Case(
        "Pow",
        shapes=[(1,), (1,)],
        feeds={"x0": np.array([0.0], F32), "x1": np.array([3.0], F32)},
        wrt=["x1"],
        label="zero-base-exponent",
    ),
    *(
        Case(op, shapes=shapes, sample=[distinct, between, beyond][: len(shapes)], symbolic=symbolic)
        for op in ("Max", "Min")
        for shapes, symbolic in [
            ([(3, 4)], False),
            ([(2, 3), (2, 3)], False),
            ([(3, 4), (4,), (3, 1)], False),
            ([(3, 4), ()], True),
        ]
    ),
    Case("Max", shapes=[(3, 4)], constants={1: np.array(0.0, F32)}, label="constant"),
    *(
        Case(op, shapes=shapes, symbolic=symbolic)
        for op in ("Sum", "Mean")
        for shapes, symbolic in [([(3, 4)], False), ([(3, 4), (4,), ()], False), ([(2, 3), (1, 3)], True)]
    ),
    Case("Where", shapes=[(3, 2), (2,)], constants={0: np.array([[True], [False], [True]])}),
    Case("Where", shapes=[(3, 2), ()], constants={0: np.array([[True], [False], [True]])}, symbolic=True),
    Case(
        "Where", shapes=[(2,)], constants={0: np.array([[True], [False]]), 2: np.array(1.0, F32)}, label="x"
    ),
    Case(
        "Where", shapes=[(2,)], constants={0: np.array([[True], [False]]), 1: np.array(1.0, F32)}, label="y"
    ),
    # bounds of Clip: absent, constant, differentiated
    Case("Clip", shapes=[(3, 4)], label="unbounded"),
    Case("Clip", shapes=[(3, 4)], constants={1: np.array(-0.1, F32), 2: np.array(0.8, F32)}, label="both"),
    Case("Clip", shapes=[(3, 4)], constants={1: np.array(-0.1, F32)}, label="low"),
    Case("Clip", shapes=[(3, 4)], constants={1: None, 2: np.array(0.1, F32)}, label="high"),
    *(
        Case(
            "Clip",
            shapes=[(6,), (), ()],
            feeds={
                "x0": np.linspace(-2, 2, 6, dtype=F32),
                "x1": np.array(low, F32),
                "x2": np.array(high, F32),
            },
            label=label,
        )
        for low, high, label in [(-1, 1, "bounds"), (1, -1, "crossed-bounds")]
    ),
    Case("Clip", shapes=[(3, 4), ()], label="low-bound"),
    Case("Clip", shapes=[(3, 4), ()], constants={1: None}, label="high-bound"),
    Case("PRelu", shapes=[(3, 4), (4,)]),
    Case("PRelu", shapes=[(2, 3, 2), (3, 1)]),
    Case("PRelu", shapes=[(3, 4), (1,)], symbolic=True),
    Case("PRelu", shapes=[(3, 4), (3, 4)]),
    Case("Cast", shapes=[(3, 2)], attributes={"to": 11}, label="to-double"),
    Case("CastLike", shapes=[(3, 2)], constants={1: np.zeros(1, np.float64)}, label="like-double"),
]
