"""Removes the softmax or sigmoid after the logits, also one that an exporter wrote in elementary operators."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.builder import Builder
from onward.graph.nodes import producer_of, required_input, single_number
from onward.graph.passes.head.layer_search import ACTIVATIONS
from onward.graph.shapes.model import infer_shapes

_SEE_THROUGH = {"Identity", "Cast", "Dropout"}
_SPREADING = ("Identity", "Cast", "Reshape", "Expand", "Unsqueeze", "Squeeze", "StopGradient")


def remove_activation(graph: ir.Graph, output: str, notes: list[str]) -> None:
    """Let an output be scores where it was a softmax or sigmoid of them; reshapes between the two stay."""
    index = next(i for i, value in enumerate(graph.outputs) if value.name == output)
    value = graph.outputs[index]
    last: ir.Node | None = None
    while True:
        activation = _activation(value)
        if activation is not None:
            break
        node = value.producer()
        if node is None or node.op_type not in _SEE_THROUGH | {"Reshape", "Squeeze", "Unsqueeze", "Flatten"}:
            return
        last, value = node, required_input(node)
    source, name = activation
    if last is None:
        removed = graph.outputs[index]
        removed.name = None
        identity = ir.Node("", "Identity", [source], num_outputs=1)
        graph.append(identity)
        identity.outputs[0].name = output
        identity.outputs[0].type = source.type or removed.type
        graph.outputs[index] = identity.outputs[0]
    else:
        last.replace_input_with(0, source)
    notes.append(f"the {name} before '{output}' is gone: '{output}' has scores now, as the loss wants them")


def scores_of(value: ir.Value) -> ir.Value:
    """The scores that a softmax or sigmoid at the end of a model is of; the value itself where there is none."""
    start = value
    while True:
        activation = _activation(value)
        if activation is not None:
            return activation[0]
        node = value.producer()
        if node is None or node.op_type not in _SEE_THROUGH:
            return start
        value = required_input(node)


def _activation(value: ir.Value) -> tuple[ir.Value, str] | None:
    """What goes into a softmax or sigmoid whose result this is, and its name."""
    node = value.producer()
    if node is None or node.domain not in ("", "ai.onnx"):
        return None
    if node.op_type in ACTIVATIONS:
        return required_input(node), node.op_type
    if node.op_type == "Div":
        top, bottom = _through(node.inputs[0]), _through(node.inputs[1])
        up, down = producer_of(top, "Exp"), producer_of(bottom, "ReduceSum")
        if up is not None and down is not None and _through(down.inputs[0]) is up.outputs[0]:
            return _shifted(required_input(up)), "softmax"
        # 1 / (1 + exp(−x))
        plus = producer_of(bottom, "Add")
        if plus is not None and single_number(top) == 1.0:
            for one, other in (plus.inputs, reversed(plus.inputs)):
                exp = producer_of(other, "Exp")
                neg = None if exp is None else producer_of(exp.inputs[0], "Neg")
                if single_number(one) == 1.0 and neg is not None:
                    return required_input(neg), "sigmoid"
    if node.op_type == "Sub":  # x − log Σ exp x
        log = producer_of(_through(node.inputs[1]), "Log")
        total = None if log is None else producer_of(_through(log.inputs[0]), "ReduceSum")
        exp = None if total is None else producer_of(_through(total.inputs[0]), "Exp")
        if exp is not None and exp.inputs[0] is node.inputs[0]:
            return _shifted(required_input(exp)), "log-softmax"
        if producer_of(_through(node.inputs[1]), "ReduceLogSumExp") is not None:
            return required_input(node), "log-softmax"
    return None


def _shifted(value: ir.Value) -> ir.Value:
    """x of x − max(x)."""
    node = producer_of(value, "Sub")
    if node is not None and producer_of(_through(node.inputs[1]), "ReduceMax") is not None:
        return required_input(node)
    return value


def _through(value: ir.Value | None) -> ir.Value | None:
    """Past what only spreads or reshapes a value."""
    while (node := producer_of(value, *_SPREADING)) is not None:
        value = node.inputs[0]
    return value


# --- Opens a segmentation network for training: scores of every pixel before softmax or sigmoid, at the
# input's size.


@dataclasses.dataclass(frozen=True)
class PixelScores:
    """Names of values: the scores of all pixels, [samples, classes, height, width], and the class of each."""

    scores: str
    classes: str


def expose_pixel_scores(
    model: ir.Model, output: str, *, channels_last: bool, enlarge: bool, classes: int
) -> PixelScores:
    """Add the scores of each pixel and its class to a model, in place; the class becomes an output of its own.

    `enlarge` brings scores of fewer pixels to the size of the input, as SegFormer's and DeepLab's authors train them.
    """
    graph = model.graph
    result = next(value for value in graph.outputs if value.name == output)
    scores = scores_of(result)
    op = Builder(graph)
    if op.rank(scores) != 4:
        raise ModelError(f"'{output}' has {op.rank(scores)} dimensions: scores of pixels have 4")
    if channels_last:
        scores = op.Transpose(scores, perm=[0, 3, 1, 2])
    if enlarge:
        picture = next(value for value in graph.inputs if value.shape is not None and len(value.shape) == 4)
        sides = op.sizes(picture, 1, 3) if channels_last else op.sizes(picture, 2, 4)
        shape = op.Concat(op.dim(scores, 0), op.dim(scores, 1), sides, axis=0)
        scores = op.Resize(scores, None, None, shape, mode="linear")
    scores.name = op.namer("pixel_scores")
    if classes == 1:
        best = op.Squeeze(op.Greater(scores, 0.0), [1])
    else:
        best = op.ArgMax(scores, axis=1, keepdims=0)
    best = op.Cast(best, to=ir.DataType.UINT8)
    best.name = op.namer("pixel_classes")
    graph.outputs.append(best)
    infer_shapes(model)
    return PixelScores(scores.name, best.name)
