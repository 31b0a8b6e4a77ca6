"""Replaces the head: the layer that computes a model's logits gets new weights for other classes.

`layer_search` finds it; where there is none, `head` names one, or a value that gets a new layer (`new_layer`). The
softmax behind it goes (`final_activation`), and what the metadata says of classes is corrected (`class_names`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes

from onward.errors import ModelError
from onward.graph.builder import Builder
from onward.graph.cleanup import remove_unused
from onward.graph.nodes import new_initializer, producer_of, required_input
from onward.graph.passes.head.final_activation import remove_activation
from onward.graph.passes.head.layer_search import find_layer, layer_named
from onward.graph.passes.head.new_layer import (
    NewHead,
    add_layer,
    correct_metadata,
    infer_shapes_behind,
    replace_layer,
)
from onward.graph.prune import values_of

# what scales the numbers that a head predicts: weights that never train
SCALE = ("head.deviation", "head.mean")


def new_head(
    model: ir.Model,
    *,
    classes: int,
    names: Sequence[str] | None = None,
    head: str | None = None,
    output: str | None = None,
    scores: bool = True,
    seed: int = 0,
) -> NewHead:
    """Give a model a head for `classes` classes, in place; `scores` removes a final softmax or sigmoid."""
    if names is not None and len(names) != classes:
        raise ValueError(f"{classes} classes, but {len(names)} names")
    if classes < 1:
        raise ValueError(f"classes is {classes}: a head has one class or more")
    if names is not None and len(set(names)) != len(names):
        twice = next(name for name in names if list(names).count(name) > 1)
        raise ValueError(f"two classes are called '{twice}'")
    if model.functions:
        passes.InlinePass()(model)
    graph = model.graph
    notes: list[str] = []
    _remove_scale(graph)
    result = _output(graph, output)
    values = values_of(graph)
    if head is not None and layer_named(graph, head) is None and head in values:
        replaced = add_layer(model, values[head], classes, seed, notes)
    else:
        node = find_layer(graph, result, head)
        replaced = replace_layer(model, node, result, classes, seed, notes)
    _move_logits_first(graph, replaced, notes)
    if scores:
        remove_activation(graph, replaced.output, notes)
    remove_unused(model)  # the old head's parameters too, which the metadata may name
    correct_metadata(model, replaced, classes, names)
    infer_shapes_behind(model, replaced.parameters)
    _check_scores(graph, replaced, classes)
    return replaced


def open_scores(model: ir.Model) -> list[str]:
    """Remove the softmax or sigmoid at the end of a model that keeps its head, in place; says what went."""
    if model.functions:
        passes.InlinePass()(model)
    notes: list[str] = []
    remove_activation(model.graph, _output(model.graph, None).name or "", notes)
    remove_unused(model)
    return notes


def scale_output(graph: ir.Graph, output: str, mean: np.ndarray, deviation: np.ndarray) -> None:
    """Let an output be numbers of this mean and deviation where its layer makes some around zero, in place."""
    index = next(i for i, value in enumerate(graph.outputs) if value.name == output)
    value = graph.outputs[index]
    op = Builder(graph)
    factor, offset = (
        new_initializer(graph, name, ir.tensor(stand_on(value, numbers)))
        for name, numbers in zip(SCALE, (deviation, mean))
    )
    value.name = op.namer("unscaled")
    scaled = op.Add(op.Mul(value, factor), offset)
    scaled.name, scaled.type, scaled.shape = output, value.type, value.shape
    graph.outputs[index] = scaled


def stand_on(value: ir.Value, numbers: np.ndarray) -> np.ndarray:
    """One number for each that a head predicts, of the type and along the axis that its output has for them."""
    behind = 0
    if len(numbers) > 1 and value.shape is not None and value.shape[-1] != len(numbers):
        behind = len(value.shape) - 2  # the second axis, as a convolution has it
    kind = np.dtype(np.float32) if value.dtype is None else value.dtype.numpy()
    return numbers.astype(kind).reshape([len(numbers), *[1] * behind] if len(numbers) > 1 else [])


def _remove_scale(graph: ir.Graph) -> None:
    """A head that is replaced takes the scale of the numbers that it predicted with it."""
    for index, value in enumerate(graph.outputs):
        add = producer_of(value, "Add")
        if add is None or add.inputs[1] is None or add.inputs[1].name != SCALE[1]:
            continue
        layer, name = required_input(add).producer(), value.name
        if layer is None or layer.op_type != "Mul":
            continue
        unscaled = required_input(layer)
        value.name = None
        unscaled.name = name
        graph.outputs[index] = unscaled


def _check_scores(graph: ir.Graph, head: NewHead, classes: int) -> None:
    """What comes after the layer must keep the classes apart: a Reshape or Squeeze of one score does not."""
    value = next(value for value in graph.outputs if value.name == head.output)
    dims = [] if value.shape is None else list(value.shape)
    squeezed = classes == 1 and head.old_classes == 1  # one score without an axis of its own
    if value.shape is not None and not squeezed and classes not in (dims[1:2] + dims[-1:]):
        layers = (use.node for use in graph.initializers[head.parameters[0]].uses())
        before = next((required_input(node).name for node in layers), head.output)
        raise ModelError(
            f"'{head.output}' has shape {[str(dim) for dim in dims]} and no axis for {classes} classes: what comes "
            f"after '{head.layer}' was made for {head.old_classes}. Put a new layer on a value: head='{before}'"
        )


def _output(graph: ir.Graph, name: str | None) -> ir.Value:
    """The output that has the scores: the one named, else the first of floats."""
    if name is not None:
        for value in graph.outputs:
            if value.name == name:
                return value
        raise ModelError(
            f"the model has no output '{name}'; it has {', '.join(v.name or '' for v in graph.outputs)}"
        )
    floats = [value for value in graph.outputs if value.dtype is None or value.dtype.is_floating_point()]
    return (floats or list(graph.outputs))[0]


def _move_logits_first(graph: ir.Graph, head: NewHead, notes: list[str]) -> None:
    """The output with the scores comes first: the loss and inference read the first output."""
    index = next(i for i, value in enumerate(graph.outputs) if value.name == head.output)
    if index == 0:
        return
    outputs = list(graph.outputs)
    graph.outputs.clear()
    graph.outputs.extend([outputs.pop(index), *outputs])
    notes.append(f"'{head.output}' is the first output now: it has the scores")
