"""New weights for other classes or characters: in the layer that makes the logits, or in one on top of a value."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence

import numpy as np
import onnx_ir as ir

from onward import contract
from onward.errors import ModelError
from onward.graph.builder import Builder
from onward.graph.cleanup import remove_identities, remove_unused
from onward.graph.nodes import (
    captured_values,
    new_initializer,
    optional_input,
    producer_of,
    required_input,
    single_number,
    subgraphs_of,
)
from onward.graph.passes.head.final_activation import scores_of
from onward.graph.passes.head.layer_search import class_axis, constant_shape, find_layer, takes_only_score
from onward.graph.passes.pooling import reduce_over
from onward.graph.prune import find_value
from onward.graph.shapes.model import infer_shapes
from onward.info.metadata import info_to_metadata, parse_literal
from onward.info.model_info import ModelInfo
from onward.model_metadata import read_names, read_table


@dataclasses.dataclass(frozen=True)
class NewHead:
    """What was replaced: the layer, its output, the new parameters, and messages that describe the changes."""

    layer: str
    output: str
    parameters: list[str]
    old_classes: int | None
    notes: list[str]


def replace_layer(
    model: ir.Model, node: ir.Node, result: ir.Value, classes: int, seed: int, notes: list[str]
) -> NewHead:
    graph = model.graph
    axis = class_axis(node)
    shape = list(constant_shape(node.inputs[1]) or ())
    assert axis is not None and shape
    old = shape[axis]
    shape[axis] = classes
    fan_in = math.prod(shape) // classes
    kind = _float_type(node)
    op = Builder(graph)
    after = list(_downstream(node))
    if any(user.op_type in ("Squeeze", "Gather", "Reshape") for user in after):
        infer_shapes(model)
        after = [_keep_class_axis(op, user, old, classes) for user in after]
    weight_name = node.inputs[1].name if node.inputs[1] is not None else ""
    weight = parameter(op, "head.weight", uniform(shape, fan_in, seed).astype(kind))
    node.replace_input_with(1, weight)
    parameters = [weight.name or ""]
    bias = optional_input(node, 2)
    if bias is not None:
        bias_shape = [classes if dim == old else dim for dim in constant_shape(bias) or (classes,)]
        new_bias = parameter(op, "head.bias", np.zeros(bias_shape or [classes], kind))
        node.replace_input_with(2, new_bias)
        parameters.append(new_bias.name or "")
    notes.append(
        f"{node.op_type} '{node.name or node.outputs[0].name}' made {old} scores and makes {classes} now: "
        f"'{weight.name}' {shape} replaces '{weight_name}'"
    )
    for user in after:
        parameters += _resize_constants(op, user, old, classes, kind)
    parameters += _resize_bias(op, node, old, classes, kind)
    return NewHead(
        node.name or node.outputs[0].name or "",
        result.name or "",
        list(dict.fromkeys(parameters)),
        old,
        notes,
    )


def _keep_class_axis(op: Builder, node: ir.Node, old: int, classes: int) -> ir.Node:
    """What removed the axis of one score keeps it for several; a Squeeze of every 1 says which, before one is new."""
    data, result = required_input(node), node.outputs[0]
    if data.shape is None or result.shape is None or data.shape.rank() == 0:
        return node
    rank = result.shape.rank()
    flattens = node.op_type == "Squeeze" or takes_only_score(node)
    if node.op_type == "Reshape":  # to [samples], of a value that has one score for each sample
        flattens = rank == 1 and 1 in list(data.shape)[1:]
    if old == 1 and classes > 1 and flattens and not (rank > 1 and 1 in list(result.shape)[1:]):
        shape = op.constant(np.asarray([0] * rank + [classes], np.int64), name="shape")
        return _swap(op.graph, node, ir.Node("", "Reshape", [data, shape], num_outputs=1))
    if node.op_type == "Squeeze" and classes == 1 and len(node.inputs) < 2:
        axes = [i for i, size in enumerate(data.shape) if size == 1 and i]
        if "axes" not in node.attributes and op.opset < 13:
            node.attributes["axes"] = ir.AttrInt64s("axes", axes)
        elif "axes" not in node.attributes:
            axes_input = op.constant(np.asarray(axes, np.int64), name="axes")
            return _swap(op.graph, node, ir.Node("", "Squeeze", [data, axes_input], num_outputs=1))
    return node


def _swap(graph: ir.Graph, old: ir.Node, new: ir.Node) -> ir.Node:
    new.outputs[0].type = old.outputs[0].type
    ir.convenience.replace_nodes_and_values(graph, old, [old], [new], old.outputs[:1], new.outputs)
    return new


def add_layer(model: ir.Model, value: ir.Value, classes: int, seed: int, notes: list[str]) -> NewHead:
    """A new layer on a value: [N, C], or [N, C, …] and [N, T, C], of which the mean is taken."""
    graph = model.graph
    if value.shape is None:
        infer_shapes(model)
    rank = None if value.shape is None else value.shape.rank()
    if value.shape is None or rank not in (2, 3, 4, 5):
        raise ModelError(
            f"'{value.name}' has {rank or 'an unknown number of'} dimensions: a head needs 2 to 5"
        )
    if value.dtype is None or not value.dtype.is_floating_point():
        raise ModelError(f"'{value.name}' is {value.dtype}: a head needs floats")
    op = Builder(graph)
    axis = 2 if rank == 3 else 1
    size = value.shape[axis]
    if rank == 4 and not (isinstance(size, int) and size > 1) and isinstance(value.shape[3], int):
        axis, size = 3, value.shape[3]
    if not isinstance(size, int):
        raise ModelError(f"'{value.name}' has shape {value.shape}: the size of axis {axis} must be a number")
    others = [other for other in range(1, rank or 2) if other != axis]
    features = reduce_over(op, "ReduceMean", value, others) if others else value
    kind = value.dtype.numpy()
    weight = parameter(op, "head.weight", uniform([classes, size], size, seed).astype(kind))
    bias = parameter(op, "head.bias", np.zeros([classes], kind))
    scores = op.Gemm(features, weight, bias, transB=1)
    scores.name = op.namer("scores")
    old = [other.name for other in graph.outputs]
    graph.outputs.clear()
    graph.outputs.append(scores)
    pooled = f", averaged over {'axes' if len(others) > 1 else 'axis'} {others}" if others else ""
    notes.append(
        f"a new layer makes {classes} scores of '{value.name}' {value.shape}{pooled}; the output is "
        f"'{scores.name}', in place of {', '.join(map(repr, old))}"
    )
    return NewHead("head", scores.name, [weight.name or "", bias.name or ""], None, notes)


def parameter(op: Builder, name: str, array: np.ndarray) -> ir.Value:
    """A new initializer that trains."""
    return new_initializer(op.graph, op.namer(name), ir.tensor(np.ascontiguousarray(array)))


def uniform(shape: Sequence[int], fan_in: int, seed: int) -> np.ndarray:
    """As torch starts its linear layers: ±1/√(inputs of a class)."""
    bound = 1.0 / math.sqrt(max(fan_in, 1))
    return np.random.default_rng(seed).uniform(-bound, bound, shape)


def _float_type(node: ir.Node) -> np.dtype:
    """The type of a layer's numbers: its weight may be stored in another one."""
    for value in (node.outputs[0], node.inputs[0], node.inputs[1]):
        if value is not None and value.dtype is not None and value.dtype.is_floating_point():
            return value.dtype.numpy()
    return np.dtype(np.float32)


def _downstream(node: ir.Node) -> Iterator[ir.Node]:
    seen: set[ir.Node] = set()
    todo = [node]
    while todo:
        for output in todo.pop().outputs:
            for user in output.consumers():
                if user not in seen:
                    seen.add(user)
                    todo.append(user)
                    yield user


def _resize_constants(op: Builder, node: ir.Node, old: int, classes: int, kind: np.dtype) -> list[str]:
    """Constants after the layer that have one number for each class: a bias, a scale, the size in a Reshape."""
    parameters = []
    sizes_from = producer_of(node.inputs[1], "Concat") if node.op_type in ("Reshape", "Expand") else None
    if sizes_from is not None:
        parts = [i for i, part in enumerate(sizes_from.inputs) if single_number(part) == old]
        if len(parts) == 1 and old not in (1, classes):
            sizes_from.replace_input_with(parts[0], op.constant(np.asarray([classes], np.int64), name="size"))
    for index, value in enumerate(node.inputs):
        tensor = None if value is None else ir.convenience.get_const_tensor(value)
        if tensor is None or value is None or old == classes:
            continue
        if (node.op_type, index) in (("Reshape", 1), ("Expand", 1), ("Resize", 3)):
            sizes = tensor.numpy().astype(np.int64)
            if np.count_nonzero(sizes == old) == 1:
                shape = op.constant(np.where(sizes == old, classes, sizes), name="shape")
                node.replace_input_with(index, shape)
        elif old > 1 and node.op_type in ("Add", "Sub", "Mul", "Div") and old in tuple(tensor.shape):
            shape = [classes if dim == old else dim for dim in tensor.shape.numpy()]
            adds = node.op_type in ("Add", "Sub")
            added = parameter(op, "head.bias" if adds else "head.scale", np.full(shape, not adds, kind))
            node.replace_input_with(index, added)
            parameters.append(added.name or "")
    return parameters


def _resize_bias(op: Builder, node: ir.Node, old: int, classes: int, kind: np.dtype) -> list[str]:
    """The bias that is added right after a layer, where its size alone does not show that it is one."""
    for user in [user for output in node.outputs for user in output.consumers() if user.op_type == "Add"]:
        for index, value in enumerate(user.inputs):
            tensor = None if value is None else ir.convenience.get_const_tensor(value)
            if tensor is None or tensor.size != old or (value and (value.name or "").startswith("head.")):
                continue
            shape = [classes if dim == old else dim for dim in tensor.shape.numpy()] or [classes]
            bias = parameter(op, "head.bias", np.zeros(shape, kind))
            user.replace_input_with(index, bias)
            return [bias.name or ""]
    return []


def infer_shapes_behind(model: ir.Model, parameters: Sequence[str]) -> None:
    """Shapes that follow from the head are forgotten and found anew; what the file declared was the old ones."""
    graph = model.graph
    changed: set[ir.Value] = {graph.initializers[name] for name in parameters if name in graph.initializers}
    for node in graph:
        reads = [*node.inputs, *(captured_values(node) if subgraphs_of(node) else ())]
        if any(value in changed for value in reads):
            for output in node.outputs:
                output.shape = None
                changed.add(output)
    infer_shapes(model)


# --- Another alphabet for a recogniser that is trained by connectionist temporal classification. The loss wants scores:
# those that a softmax or an arg-max at the end is made of. A row of the last layer belongs to each character; rows of
# characters that stay are kept, and new ones begin where no trained character is disturbed.

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


def replace_rows(
    model: ir.Model,
    scores: ir.Value,
    size: int,
    rows: Sequence[int | None],
    *,
    head: str | None,
    seed: int,
) -> NewHead:
    """Give the layer of these scores a row for each class: an old one by its number, or a new one for None; in place.

    `size` is how many there were. New rows are the mean of the old ones with a little noise, and begin with the lowest
    bias.
    """
    node = find_layer(model.graph, scores, head)
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
    layer = replace_layer(model, node, scores, len(rows), seed, notes)
    rng = np.random.default_rng(seed)
    numbers = np.asarray([-1 if row is None else row for row in rows])
    for user in consumers:
        for index, value in enumerate(user.inputs):
            tensor = before.get((user, index))
            if value is None or tensor is None or value.name not in layer.parameters:
                continue
            old = tensor.numpy()
            along = (
                axis if user is node and index == 1 else next(i for i, d in enumerate(old.shape) if d == size)
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
    return layer


def _users(node: ir.Node) -> list[ir.Node]:
    """The nodes right behind a layer, of which one may add its bias."""
    return [user for output in node.outputs for user in output.consumers()]


# --- A new layer on the states of a sequence: scores of classes at every position.


def add_position_layer(model: ir.Model, states: str, names: Sequence[str], *, seed: int) -> None:
    """Replace the outputs of a model by scores [batch, positions, classes] of these states; in place."""
    value = find_value(model.graph, states)
    if value.shape is None:
        infer_shapes(model)
    size = None if value.shape is None or value.shape.rank() != 3 else value.shape[2]
    if not isinstance(size, int) or value.dtype is None:
        raise ModelError(
            f"'{states}' has shape {value.shape}: a tagger's layer needs [batch, positions, size]"
        )
    op, kind, classes = Builder(model.graph), value.dtype.numpy(), len(names)
    weight = parameter(op, "head.weight", uniform([size, classes], size, seed).astype(kind))
    bias = parameter(op, "head.bias", np.zeros([classes], kind))
    scores = op.Add(op.MatMul(value, weight), bias)
    scores.name = op.namer("scores")
    model.graph.outputs.clear()
    model.graph.outputs.append(scores)
    layer = NewHead("head", scores.name, [weight.name or "", bias.name or ""], None, [])
    correct_metadata(model, layer, classes, names)


# --- Metadata after a new head: the names of the old classes go, those of the new ones come.


_LABEL_KEYS = {
    *("names", "classes", "labels", "id2label", "label2id", "class_names", "categories", "label_map"),
    *("character", "vocab", "vocabulary"),
}


def correct_metadata(model: ir.Model, head: NewHead, classes: int, names: Sequence[str] | None) -> None:
    """The old classes' names go; the new ones are recorded."""
    about = model.metadata_props
    for key in [key for key, value in about.items() if _holds_labels(key, value, head.old_classes)]:
        del about[key]
        head.notes.append(f"metadata '{key}' is gone: it had the old classes")
    about.pop(contract.CLASSES, None)
    for key in (contract.REQUIRES_GRAD, contract.FROZEN_PARAMS):
        if key in about:
            remaining = [name for name in read_names(about, key) if name in model.graph.initializers]
            fresh = head.parameters if key == contract.REQUIRES_GRAD else []
            about[key] = json.dumps([*remaining, *(name for name in fresh if name not in remaining)])
    about[contract.HEAD] = json.dumps(head.parameters)
    about.pop(contract.TRAINED, None)  # the old head was: this one has learned nothing
    # whether one label is right or several, and what the outputs mean, was the old head's
    task = read_table(about, contract.TASK).get("task")
    about.pop(contract.TASK, None)
    labels = None if names is None else tuple(names)
    about.update(info_to_metadata(ModelInfo(task=task if isinstance(task, str) else None, labels=labels)))


def _holds_labels(key: str, value: str, old: int | None) -> bool:
    if key.startswith("onward.") and key != contract.EXPORT:
        return False
    if key.lower() in _LABEL_KEYS:
        return True
    if old is None or old < 2:
        return key == contract.EXPORT
    if key == contract.EXPORT or len(value.splitlines()) == old:
        return True
    table = parse_literal(value)
    return isinstance(table, dict | list | tuple) and len(table) == old
