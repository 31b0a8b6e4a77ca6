"""`replace_head`: gives a published model a new last layer for other classes."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir

from onward.graph.load import ModelSource, load_model
from onward.graph.passes.head import new_head, open_scores, scale_output

__all__ = ["replace_head"]

_log = logging.getLogger("onward")


def replace_head(
    model: ModelSource,
    *,
    classes: int | Sequence[str],
    names: Sequence[str] | None = None,
    head: str | None = None,
    output: str | None = None,
    scores: bool = True,
    seed: int = 0,
    mean: Sequence[float] | np.ndarray | None = None,
    deviation: Sequence[float] | np.ndarray | None = None,
) -> onnx.ModelProto:
    """A copy of a model whose last layer has new weights for other classes.

    The layer is found from `output` (the first output of floats by default) backwards, through softmax, reshapes
    and pooling. `head` names it where there are several: its node, weight or output. If `head` names any other
    value, a new layer is put on it (its mean over positions, where it has more than two dimensions), and becomes the
    output. `scores` removes a final softmax or sigmoid, since cross-entropy expects logits. The new parameters are
    `head.weight` and `head.bias`. `classes` is a number, or the names, which the model then knows. To predict numbers,
    their `mean` and `deviation` scale what the layer makes, so that it starts where they are.

    >>> import onnx.parser
    >>> model = onnx.parser.parse_model('''<ir_version: 10, opset_import: ["": 21]>
    ...     net (float[N, 2] x) => (float[N, 3] y) <float[2, 3] w = {1, 2, 3, 4, 5, 6}>
    ...     { scores = MatMul(x, w)  y = Softmax(scores) }''')
    >>> new = replace_head(model, classes=["cat", "dog"])
    >>> [(tensor.name, list(tensor.dims)) for tensor in new.graph.initializer]
    [('head.weight', [2, 2])]
    """
    if not isinstance(classes, int):
        if names is not None:
            raise ValueError("name the classes once: classes=[…], or classes=NUMBER with names=[…]")
        classes, names = len(classes), list(classes)
    loaded = load_model(model)
    new = new_head(loaded, classes=classes, names=names, head=head, output=output, scores=scores, seed=seed)
    if mean is not None and deviation is not None:
        scale_output(loaded.graph, new.output, np.asarray(mean), np.asarray(deviation))
    for note in new.notes:
        _log.info(note)
    ir.external_data.load_to_model(loaded)
    return ir.to_proto(loaded)


def keep_head(model: ModelSource, *, scores: bool = True) -> onnx.ModelProto:
    """A copy of a model to train on with the head that it has; `scores` removes a final softmax or sigmoid."""
    loaded = load_model(model)
    for note in open_scores(loaded) if scores else ():
        _log.info(note)
    ir.external_data.load_to_model(loaded)
    return ir.to_proto(loaded)
