"""Cases of Fourier transforms."""

import numpy as np
from cases import Case


def _dft(shape, attributes, *, length=None, axis=None, **more) -> Case:
    constants = {1: None if length is None else np.int64(length)}
    if axis is not None:
        constants[2] = np.int64(axis)
    label = f"{shape}-{attributes}-length={length}-axis={axis}"
    return Case("DFT", shapes=[shape], attributes=attributes, constants=constants, label=label, **more)


_ONE, _INVERSE = {"onesided": 1}, {"inverse": 1}

CASES = [
    _dft((2, 4, 1), {}),
    _dft((2, 5, 2), {}, symbolic=True),
    _dft((4, 2, 2), {}, axis=0),
    _dft((2, 3, 2, 2), {}, axis=-3, symbolic=True),
    _dft((2, 5, 1), _ONE),
    _dft((2, 4, 1), _ONE, symbolic=True),
    _dft((2, 4, 1), {}, length=6),
    _dft((2, 6, 2), {}, length=4, axis=1),
    _dft((2, 4, 1), _ONE, length=7),
    _dft((2, 6, 1), _ONE, length=4),
    _dft((2, 5, 2), _INVERSE),
    _dft((2, 4, 2), _INVERSE, length=6),
    _dft((2, 3, 2), _INVERSE, length=2, axis=1, symbolic=True),
    _dft((2, 3, 2), _ONE | _INVERSE),
    _dft((2, 3, 2), _ONE | _INVERSE, length=5),
    Case(
        "STFT",
        shapes=[(1, 8, 1), (4,)],
        text='<ir_version: 10, opset_import: ["": 21]> g (float[B,L,1] x0, float[N] x1) => (float[B,F,K,2] y) '
        "<int64 step = {2}> { y = STFT<onesided=1>(x0, step, x1) }",
        label="symbolic",
    ),
    *[
        Case(
            "STFT", shapes=shapes, constants=constants, attributes=attributes, symbolic=symbolic, label=label
        )
        for label, shapes, constants, attributes, symbolic in [
            ("window", [(2, 8, 1), (4,)], {1: np.int64(2)}, _ONE, False),
            ("two-sided", [(1, 8, 1), (4,)], {1: np.int64(3)}, {"onesided": 0}, False),
            ("complex", [(1, 8, 2), (4,)], {1: np.int64(2)}, {"onesided": 0}, False),
            ("length", [(2, 8, 1)], {1: np.int64(2), 2: None, 3: np.int64(4)}, _ONE, False),
        ]
    ],
]
