"""Cases of the loss operators and of what stands before them."""

import numpy as np
from cases import Case, normal, positive

_LABELS = np.array([1, 0, 3], np.int64)
_IGNORED = np.array([1, -1, 3], np.int64)
_IMAGE = np.array([[[1, 0], [2, -1]], [[0, 0], [1, 2]]], np.int64)

CASES = [
    Case("Softmax", shapes=[(3, 4)]),
    Case("Softmax", shapes=[(2, 3, 2)], attributes={"axis": 1}),
    Case("Softmax", shapes=[(2, 3)], attributes={"axis": 0}, symbolic=True),
    Case("Softmax", shapes=[(4,)], attributes={"axis": -1}),
    Case("Softmax", shapes=[(0, 4)], attributes={"axis": -1}),
    Case("LogSoftmax", shapes=[(3, 4)]),
    Case("LogSoftmax", shapes=[(2, 3, 2)], attributes={"axis": -2}, symbolic=True),
    Case("Dropout", shapes=[(3, 4)]),
    Case("Dropout", shapes=[(3, 4)], constants={1: np.float32(0.4)}, outputs=2),
    Case("Dropout", shapes=[(3, 4)], constants={1: np.float32(0), 2: np.array(True)}, symbolic=True),
    *[
        Case(
            op,
            shapes=[(3, 4), *more],
            constants={1: labels},
            attributes=attributes,
            symbolic=symbolic,
            sample=[normal, positive][: 1 + len(more)],
            label=label,
            # ONNX's evaluator divides by the number of all labels there, onnxruntime and torch by the valid
            reference="onnxruntime" if op.startswith("Neg") and label == "ignore-mean" else "onnx",
        )
        for op in ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
        for label, more, labels, attributes, symbolic in [
            ("mean", [], _LABELS, {}, False),
            ("mean-symbolic", [], _LABELS, {}, True),
            ("sum", [], _LABELS, {"reduction": "sum"}, False),
            ("none", [], _LABELS, {"reduction": "none"}, True),
            ("ignore-mean", [], _IGNORED, {"ignore_index": -1}, False),
            ("ignore-sum", [], _IGNORED, {"ignore_index": -1, "reduction": "sum"}, False),
            ("ignore-none", [], _IGNORED, {"ignore_index": -1, "reduction": "none"}, False),
            ("weights-mean", [(4,)], _LABELS, {}, False),
            ("weights-sum", [(4,)], _LABELS, {"reduction": "sum"}, True),
            ("weights-none", [(4,)], _LABELS, {"reduction": "none"}, False),
            ("weights-ignore-mean", [(4,)], _IGNORED, {"ignore_index": -1}, True),
            ("weights-ignore-sum", [(4,)], _IGNORED, {"ignore_index": -1, "reduction": "sum"}, False),
        ]
    ],
    *[
        Case(
            op,
            shapes=[(2, 3, 2, 2), (3,)],
            constants={1: _IMAGE},
            attributes=attributes,
            symbolic=symbolic,
            sample=[normal, positive],
            label=f"image-{symbolic}-{attributes}",
        )
        for op in ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
        for attributes, symbolic in [
            ({"ignore_index": -1}, True),
            ({"ignore_index": -1, "reduction": "none"}, False),
        ]
    ],
    Case("SoftmaxCrossEntropyLoss", shapes=[(3, 4)], constants={1: _LABELS}, outputs=2, label="log_prob"),
    Case(
        "SoftmaxCrossEntropyLoss",
        shapes=[(3, 4)],
        constants={1: _IGNORED},
        outputs=2,
        of=[1],
        label="log_prob-only",
        attributes={"ignore_index": -1},
    ),
]
