"""Cases of pooling and MaxUnpool."""

import numpy as np
from cases import Case, distinct, positive


def _max(label: str, shape: tuple[int, ...] = (1, 2, 5, 6), *, symbolic: bool = False, **attributes) -> Case:
    return Case(
        "MaxPool", shapes=[shape], attributes=attributes, sample=distinct, symbolic=symbolic, label=label
    )


def _average(label: str, shape: tuple[int, ...] = (1, 2, 5, 6), *, symbolic: bool = False, **attributes):
    return Case("AveragePool", shapes=[shape], attributes=attributes, symbolic=symbolic, label=label)


def _lp(label: str, shape: tuple[int, ...] = (1, 2, 4, 5), *, symbolic: bool = False, **attributes) -> Case:
    return Case(
        "LpPool", shapes=[shape], attributes=attributes, symbolic=symbolic, sample=positive, label=label
    )


CASES = [
    _max("tiles", (2, 2, 4, 6), kernel_shape=[2, 3], strides=[2, 3]),
    _max("few-taps", (2, 2, 4, 6), kernel_shape=[2, 2], strides=[2, 2]),
    _max("few-taps-1d", (2, 2, 9), kernel_shape=[3], strides=[3]),
    _max("tiles-rest", kernel_shape=[2, 2], strides=[2, 2]),
    _max("tiles", (1, 2, 4, 6), kernel_shape=[2, 2], strides=[2, 2], symbolic=True),
    _max("overlapping", kernel_shape=[3, 2], strides=[1, 1]),
    _max("overlapping", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1], symbolic=True),
    _max("asymmetric-pads", kernel_shape=[2, 3], pads=[1, 0, 0, 2]),
    _max("ceil", kernel_shape=[2, 3], strides=[2, 2], ceil_mode=1),
    _max("dilated", kernel_shape=[2, 2], dilations=[2, 3]),
    _max("same-upper", kernel_shape=[3, 3], strides=[2, 2], auto_pad="SAME_UPPER"),
    _max("same-lower", kernel_shape=[2, 2], auto_pad="SAME_LOWER", symbolic=True),
    _max("1d", (2, 2, 7), kernel_shape=[3], strides=[2]),
    _max("3d", (1, 1, 3, 4, 3), kernel_shape=[2, 2, 2], strides=[1, 2, 1]),
    Case(
        "MaxPool",
        shapes=[(1, 2, 4, 4)],
        attributes={"kernel_shape": [2, 2], "storage_order": 1},
        sample=distinct,
        outputs=2,
        of=[0],
        label="column-major-indices",
    ),
    Case(
        "MaxPool",
        shapes=[(1, 2, 4, 4)],
        attributes={"kernel_shape": [2, 2]},
        sample=distinct,
        outputs=2,
        label="with-indices",
    ),
    _average("tiles", (2, 2, 4, 6), kernel_shape=[2, 3], strides=[2, 3]),
    _average("overlapping", kernel_shape=[3, 2]),
    _average("overlapping", kernel_shape=[3, 2], strides=[2, 1], pads=[1, 0, 1, 1], symbolic=True),
    _average("counting-pads", kernel_shape=[3, 2], pads=[1, 0, 1, 1], count_include_pad=1),
    _average("ceil", kernel_shape=[2, 3], strides=[2, 2], ceil_mode=1),
    _average("dilated", kernel_shape=[2, 2], dilations=[2, 3]),
    _average("same-upper", kernel_shape=[3, 3], strides=[2, 2], auto_pad="SAME_UPPER"),
    _average("same-lower", kernel_shape=[2, 2], auto_pad="SAME_LOWER"),
    _average("1d", (2, 2, 7), kernel_shape=[3], strides=[2]),
    _average("3d", (1, 2, 3, 4, 3), kernel_shape=[2, 2, 2], strides=[1, 2, 1]),
    _average("3d", (1, 2, 3, 4, 3), kernel_shape=[2, 1, 2], strides=[1, 1, 1], symbolic=True),
    _lp("plain", kernel_shape=[2, 2]),
    _lp("p1", kernel_shape=[2, 2], p=1, strides=[2, 2]),
    _lp("p3", kernel_shape=[2, 3], p=3, pads=[1, 0, 0, 1]),
    _lp("p4", kernel_shape=[2, 3], p=4, symbolic=True),
    _lp("same-upper", kernel_shape=[2, 2], auto_pad="SAME_UPPER"),
    _lp("1d", (1, 2, 6), kernel_shape=[3]),
    _lp("3d", (1, 1, 3, 3, 3), kernel_shape=[2, 2, 2]),
    Case("GlobalAveragePool", shapes=[(2, 3, 2, 3)]),
    Case("GlobalAveragePool", shapes=[(2, 3, 4)], symbolic=True),
    Case("GlobalMaxPool", shapes=[(2, 3, 2, 3)], sample=distinct),
    Case("GlobalMaxPool", shapes=[(2, 3, 4)], sample=distinct, symbolic=True),
    Case("GlobalLpPool", shapes=[(2, 3, 2, 3)]),
    Case("GlobalLpPool", shapes=[(2, 3, 4)], attributes={"p": 1}, symbolic=True),
    Case("GlobalLpPool", shapes=[(1, 3, 2, 2, 2)], attributes={"p": 3}),
    Case(
        "MaxUnpool",
        shapes=[(1, 1, 2, 2)],
        constants={1: np.array([[[[5, 7], [13, 15]]]])},
        attributes={"kernel_shape": [2, 2], "strides": [2, 2]},
        label="plain",
    ),
    Case(
        "MaxUnpool",
        shapes=[(1, 1, 2, 2)],
        constants={1: np.array([[[[5, 7], [13, 15]]]]), 2: np.array([1, 1, 4, 4])},
        attributes={"kernel_shape": [2, 2], "strides": [2, 2]},
        symbolic=True,
        label="output-shape",
    ),
]
