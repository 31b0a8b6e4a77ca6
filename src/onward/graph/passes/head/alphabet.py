"""Opens a recogniser for training by connectionist temporal classification, and gives it another alphabet.

The loss wants scores: those that a softmax or an arg-max at the end is made of. A row of the last layer belongs to each
character; rows of characters that stay are kept, and new ones begin where no trained character is disturbed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.builder import Builder
from onward.graph.cleanup import remove_identities, remove_unused
from onward.graph.nodes import producer_of, required_input
from onward.graph.passes.head import infer_shapes_behind
from onward.graph.passes.head.final_activation import scores_of
from onward.graph.passes.head.layer_search import class_axis, find_layer
from onward.graph.passes.head.new_layer import correct_metadata, replace_layer
from onward.graph.shapes.model import infer_shapes

_PASSED = ("Identity", "Cast", "Squeeze", "Unsqueeze", "Reshape")


@dataclasses.dataclass(frozen=True)
class Reader:
    """The scores of a recogniser at each step, and the number of the best class there."""

    scores: ir.Value
    best: ir.Value
    size: int


def open_reader(model: ir.Model) -> Reader:
    """Find the scores [batch, steps, classes] of the first output and give the model one output: the best classes."""
    graph = model.graph
    remove_identities(model)  # while the output is one: its name goes to the value that stays
    output = graph.outputs[0]
    arg_max = _arg_max(output)
    probabilities = output if arg_max is None else required_input(arg_max)
    scores = scores_of(probabilities)
    if scores.shape is None or not isinstance(scores.shape[-1], int):
        infer_shapes(model)
    size = None if scores.shape is None or scores.shape.rank() != 3 else scores.shape[-1]
    if not isinstance(size, int):
        raise ModelError(
            f"'{output.name}' is made of '{scores.name}' {scores.shape}: a reader has scores of [batch, steps, classes]"
        )
    best = output
    if arg_max is None:
        op = Builder(graph)
        op.scope = "reading"
        # of the last value, so that what the deployed file answers stays a part of the model
        best = op.ArgMax(output, axis=2, keepdims=0)
        best.name = op.namer("characters")
    graph.outputs.clear()
    graph.outputs.append(best)
    return Reader(scores, best, size)


def _arg_max(output: ir.Value) -> ir.Node | None:
    """The arg-max at the end of a model that gives numbers of characters."""
    node = producer_of(output, "ArgMax", *_PASSED)
    while node is not None and node.op_type != "ArgMax":
        node = producer_of(node.inputs[0], "ArgMax", *_PASSED)
    return node


def replace_alphabet(
    model: ir.Model, reader: Reader, rows: Sequence[int | None], *, head: str | None, seed: int
) -> list[str]:
    """Give the last layer a row for each character: an old one by its number, or a new one for None; in place.

    New rows are the mean of the old ones with a little noise, and begin with the lowest bias.
    """
    node = find_layer(model.graph, reader.scores, head)
    axis = class_axis(node)
    assert axis is not None
    consumers = [node, *_users(node)]
    before = {
        (user, index): ir.convenience.get_const_tensor(value)
        for user in consumers
        for index, value in enumerate(user.inputs)
        if value is not None
    }
    notes: list[str] = []
    layer = replace_layer(model, node, reader.scores, len(rows), seed, notes)
    rng = np.random.default_rng(seed)
    numbers = np.asarray([-1 if row is None else row for row in rows])
    for user in consumers:
        for index, value in enumerate(user.inputs):
            tensor = before.get((user, index))
            if value is None or tensor is None or value.name not in layer.parameters:
                continue
            old = tensor.numpy()
            along = (
                axis
                if user is node and index == 1
                else next(i for i, d in enumerate(old.shape) if d == reader.size)
            )
            fresh = np.take(old, np.maximum(numbers, 0), axis=along)
            shape = [*old.shape[:along], int((numbers < 0).sum()), *old.shape[along + 1 :]]
            if user is node and index == 1:
                mean = np.broadcast_to(old.mean(axis=along, keepdims=True), shape)
                new = mean + rng.normal(0, old.std(), shape)
            else:
                new = np.full(shape, old.min())
            chosen = [slice(None)] * old.ndim
            chosen[along] = numbers < 0  # type: ignore[call-overload]
            fresh[tuple(chosen)] = new.astype(old.dtype)
            value.const_value = ir.tensor(np.ascontiguousarray(fresh), name=value.name)
    remove_unused(model)
    correct_metadata(model, layer, len(rows), None)
    infer_shapes_behind(model, layer.parameters)
    return notes


def _users(node: ir.Node) -> list[ir.Node]:
    """The nodes right behind a layer, of which one may add its bias."""
    return [user for output in node.outputs for user in output.consumers()]
