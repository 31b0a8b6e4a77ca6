"""Cases of convolutions and Col2Im."""

import numpy as np
from cases import Case, unit

CASES = [
    Case("Conv", shapes=[(2, 3, 5), (4, 3, 3)], label="1d"),
    Case("Conv", shapes=[(2, 3, 5), (4, 3, 3), (4,)], symbolic=True, label="1d-bias"),
    Case(
        "Conv",
        shapes=[(1, 2, 4, 5), (3, 2, 3, 2), (3,)],
        attributes={"pads": [1, 0, 0, 2]},
        label="2d-asymmetric",
    ),
    Case("Conv", shapes=[(2, 2, 4, 5), (3, 2, 1, 1)], label="1x1"),
    Case("Conv", shapes=[(2, 2, 5, 4), (3, 2, 1, 1)], attributes={"strides": [2, 2]}, label="1x1-stride"),
    Case("Conv", shapes=[(2, 2, 3, 3), (3, 2, 1, 1)], attributes={"pads": [1, 1, 1, 1]}, label="1x1-pads"),
    Case("Conv", shapes=[(1, 17, 4, 3), (2, 17, 2, 2)], label="channels-last"),
    Case("Conv", shapes=[(1, 16, 1000), (1, 16, 2)], label="channels-first"),
    Case(
        "Conv",
        shapes=[(1, 2, 6, 7), (2, 2, 3, 3)],
        attributes={"strides": [2, 3], "pads": [1, 1, 1, 1]},
        label="stride",
    ),
    Case(
        "Conv",
        shapes=[(1, 2, 6, 7), (2, 2, 3, 3)],
        attributes={"strides": [2, 3], "pads": [1, 1, 1, 1]},
        symbolic=True,
        label="stride",
    ),
    Case(
        "Conv",
        shapes=[(1, 2, 6, 7), (2, 2, 3, 3)],
        attributes={"strides": [2, 3], "kernel_shape": [3, 3]},
        symbolic=True,
        label="stride-kernel",
    ),
    Case(
        "Conv",
        shapes=[(1, 1, 7, 6), (2, 1, 3, 2)],
        attributes={"dilations": [2, 3], "pads": [1, 2, 2, 0]},
        label="dilated",
    ),
    Case(
        "Conv",
        shapes=[(1, 1, 7, 6), (2, 1, 3, 2)],
        attributes={"dilations": [2, 3], "strides": [1, 2], "kernel_shape": [3, 2]},
        symbolic=True,
        label="dilated",
    ),
    Case(
        "Conv",
        shapes=[(1, 2, 5, 6), (2, 2, 3, 2)],
        attributes={"auto_pad": "SAME_UPPER", "strides": [2, 2]},
        label="same-upper",
    ),
    Case(
        "Conv",
        shapes=[(1, 2, 5, 6), (2, 2, 3, 2)],
        attributes={"auto_pad": "SAME_UPPER", "strides": [2, 2]},
        symbolic=True,
        label="same-upper",
    ),
    Case(
        "Conv", shapes=[(1, 2, 5, 6), (2, 2, 3, 2)], attributes={"auto_pad": "SAME_LOWER"}, label="same-lower"
    ),
    Case("Conv", shapes=[(1, 2, 5, 6), (2, 2, 3, 2)], attributes={"auto_pad": "VALID"}, label="valid"),
    Case("Conv", shapes=[(2, 4, 4, 4), (6, 2, 2, 2), (6,)], attributes={"group": 2}, label="grouped"),
    Case(
        "Conv", shapes=[(2, 4, 4, 4), (6, 2, 2, 2)], attributes={"group": 2}, symbolic=True, label="grouped"
    ),
    Case(
        "Conv",
        shapes=[(2, 3, 4, 4), (3, 1, 3, 3)],
        attributes={"group": 3, "pads": [1, 1, 1, 1]},
        label="depthwise",
    ),
    Case("Conv", shapes=[(2, 2, 4, 4), (4, 1, 3, 3)], attributes={"group": 2}, label="depthwise-multiplied"),
    Case(
        "Conv",
        shapes=[(1, 2, 3, 4, 3), (2, 2, 2, 3, 2), (2,)],
        attributes={"pads": [1, 0, 0, 0, 1, 1]},
        label="3d",
    ),
    Case(
        "Conv",
        shapes=[(1, 1, 3, 4, 3), (2, 1, 2, 2, 2)],
        attributes={"strides": [2, 1, 2]},
        symbolic=True,
        label="3d",
    ),
    Case("ConvTranspose", shapes=[(2, 2, 4), (2, 3, 3), (3,)], label="1d"),
    Case(
        "ConvTranspose",
        shapes=[(1, 2, 3, 2), (2, 2, 2, 3)],
        attributes={"strides": [2, 3], "pads": [1, 0, 0, 2]},
        label="stride-pads",
    ),
    Case(
        "ConvTranspose",
        shapes=[(1, 2, 3, 2), (2, 2, 2, 3)],
        attributes={"strides": [2, 3], "pads": [1, 0, 0, 2]},
        symbolic=True,
        label="stride-pads",
    ),
    Case(
        "ConvTranspose",
        shapes=[(1, 1, 3, 2), (1, 2, 2, 3)],
        attributes={"strides": [3, 2], "output_padding": [2, 1]},
        label="output-padding",
    ),
    Case(
        "ConvTranspose",
        shapes=[(1, 1, 3, 3), (1, 2, 3, 3)],
        attributes={"strides": [2, 2], "auto_pad": "SAME_UPPER"},
        label="same-upper",
    ),
    Case(
        "ConvTranspose",
        shapes=[(1, 1, 3, 3), (1, 2, 3, 3)],
        attributes={"strides": [2, 2], "auto_pad": "SAME_LOWER"},
        symbolic=True,
        label="same-lower",
    ),
    Case(
        "ConvTranspose",
        shapes=[(1, 1, 2, 2, 2), (1, 2, 2, 1, 2)],
        attributes={"strides": [1, 2, 1]},
        label="3d",
    ),
    Case(
        "ConvTranspose",
        shapes=[(1, 4, 2, 3), (4, 1, 2, 2), (2,)],
        attributes={"group": 2, "strides": [2, 1]},
        label="grouped",
    ),
    Case(
        "ConvTranspose",
        shapes=[(1, 1, 3, 3), (1, 2, 3, 3)],
        attributes={"strides": [3, 2], "output_shape": [10, 8]},
        label="output-shape",
    ),
    Case(
        "ConvTranspose",
        shapes=[(1, 1, 3, 3), (1, 2, 3, 3)],
        attributes={"strides": [3, 2], "output_shape": [7, 6]},
        symbolic=True,
        label="output-shape",
    ),
    Case(
        "ConvTranspose",
        shapes=[(1, 1, 3, 3), (1, 2, 3, 3)],
        attributes={"strides": [3, 2], "output_shape": [7, 6], "auto_pad": "SAME_UPPER"},
        label="output-shape-upper",
    ),
    Case(
        "Conv",
        shapes=[(2, 4, 5, 4), (4, 2, 3, 2)],
        attributes={"group": 2, "strides": [2, 1], "pads": [1, 0, 1, 0]},
        label="grouped-stride",
    ),
    Case("Col2Im", shapes=[(1, 5, 5)], constants={1: np.array([5, 5]), 2: np.array([1, 5])}, label="rows"),
    Case(
        "Col2Im",
        shapes=[(2, 8, 6)],
        constants={1: np.array([4, 5]), 2: np.array([2, 2])},
        attributes={"strides": [1, 2], "pads": [0, 0, 0, 0]},
        label="stride",
    ),
    Case(
        "Col2Im",
        shapes=[(1, 4, 15)],
        constants={1: np.array([4, 5]), 2: np.array([2, 2])},
        attributes={"dilations": [2, 2], "pads": [1, 0, 0, 2]},
        symbolic=True,
        label="dilations-pads",
    ),
    Case("Col2Im", shapes=[(1, 2, 4)], constants={1: np.array([5]), 2: np.array([2])}, label="1d"),
    Case(
        "Col2Im", shapes=[(1, 8, 4)], constants={1: np.array([2, 3, 3]), 2: np.array([2, 2, 2])}, label="3d"
    ),
]

_DEFORM = {"reference": "onnxruntime", "sample": unit}
CASES += [
    Case("DeformConv", shapes=[(1, 2, 4, 4), (3, 2, 2, 2), (1, 8, 3, 3)], **_DEFORM, label="plain"),
    Case(
        "DeformConv",
        shapes=[(2, 2, 4, 4), (2, 1, 2, 2), (2, 16, 3, 3), (2,), (2, 8, 3, 3)],
        attributes={"group": 2, "offset_group": 2},
        **_DEFORM,
        label="groups-bias-mask",
    ),
    Case(
        "DeformConv",
        shapes=[(1, 2, 5, 4), (2, 2, 3, 2), (1, 12, 3, 2), (1, 6, 3, 2)],
        constants={3: None},
        attributes={"strides": [2, 2], "dilations": [1, 2], "pads": [1, 1, 1, 1]},
        **_DEFORM,
        label="stride-dilation-mask",
    ),
    Case(
        "DeformConv",
        shapes=[(1, 2, 4, 4), (3, 2, 2, 2), (1, 8, 3, 3)],
        symbolic=True,
        **_DEFORM,
        label="plain",
    ),
]
