"""Replaces the head: the layer that computes a model's logits gets new weights for other classes.

`replace_head` searches from an output back to the one Gemm, MatMul or Conv that computes its logits. Between the two
may be operators that do not mix classes: softmax (also decomposed into elementary operators), reshapes, pooling, a
bias. Where there is no such layer, `head` names one, or a value that gets a new layer.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import json
import math
from collections.abc import Iterator, Sequence

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes

from onward import contract
from onward.errors import LimitError, ModelError
from onward.graph.builder import Builder
from onward.graph.cleanup import remove_unused
from onward.graph.nodes import captured_values, subgraphs_of
from onward.graph.prune import values_of
from onward.graph.shapes.model import infer_shapes
from onward.model_metadata import read_names
from onward.reading import require_shallow

__all__ = ["CLASSES", "HEAD", "NewHead", "new_head"]

# metadata: the names of the classes, and the names of the new parameters
CLASSES, HEAD = contract.CLASSES, contract.HEAD

_LINEAR = {"Gemm", "MatMul", "Conv"}
_ACTIVATIONS = {"Softmax", "LogSoftmax", "Sigmoid", "HardSigmoid"}
# between the head and the output: none of these mixes classes or depends on their number
_PASSING = _ACTIVATIONS | {
    *("Identity", "Cast", "Dropout", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose"),
    *("Relu", "LeakyRelu", "Clip", "Tanh", "Exp", "Log", "Neg", "Add", "Sub", "Mul", "Div", "Max", "Min"),
    *("GlobalAveragePool", "AveragePool", "GlobalMaxPool", "MaxPool", "Expand"),
    *("ReduceMean", "ReduceMax", "ReduceSum", "ReduceLogSumExp"),
}
_SEE_THROUGH = {"Identity", "Cast", "Dropout"}
# layers and activations in whole numbers: what is fine-tuned is the model that they were made of
_QUANTIZED = {
    *("QLinearMatMul", "QLinearConv", "MatMulInteger", "ConvInteger", "QuantizeLinear", "DequantizeLinear"),
    *("DynamicQuantizeLinear", "QGemm", "QLinearAdd", "QLinearMul", "QLinearSigmoid", "QLinearSoftmax"),
    *("QLinearGlobalAveragePool", "QLinearAveragePool", "DynamicQuantizeMatMul", "MatMulIntegerToFloat"),
    *("MatMulNBits", "MatMulBnb4"),
}
_LABEL_KEYS = {
    *("names", "classes", "labels", "id2label", "label2id", "class_names", "categories", "label_map"),
    *("character", "vocab", "vocabulary"),
}
# at most so many layers are named in an error
_MOST = 8


@dataclasses.dataclass(frozen=True)
class NewHead:
    """What was replaced: the layer, its output, the new parameters, and messages that describe the changes."""

    layer: str
    output: str
    parameters: list[str]
    old_classes: int | None
    notes: list[str]


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
    result = _output(graph, output)
    known = values_of(graph)
    if head is not None and _layer(graph, head) is None and head in known:
        made = _put_on(model, known[head], classes, seed, notes)
    else:
        node = _find(graph, result, head)
        made = _replace(model, node, result, classes, seed, notes)
    _scores_first(graph, made, notes)
    if scores:
        _open_activation(graph, made.output, notes)
    remove_unused(model)  # the old head's parameters too, which the metadata may name
    _correct_metadata(model, made, classes, names)
    _infer_again(model, made.parameters)
    _check_scores(graph, made, classes)
    return made


def _check_scores(graph: ir.Graph, made: NewHead, classes: int) -> None:
    """What comes after the layer must keep the classes apart: a Reshape or Squeeze of one score does not."""
    value = next(value for value in graph.outputs if value.name == made.output)
    dims = [] if value.shape is None else list(value.shape)
    squeezed = classes == 1 and made.old_classes == 1  # one score without an axis of its own
    if value.shape is not None and not squeezed and classes not in (dims[1:2] + dims[-1:]):
        node = next(
            (n for n in graph if made.parameters[0] in [i.name for i in n.inputs if i is not None]), None
        )
        before = made.output if node is None else _first(node.inputs).name
        raise ModelError(
            f"'{made.output}' has shape {[str(dim) for dim in dims]} and no axis for {classes} classes: what comes "
            f"after '{made.layer}' was made for {made.old_classes}. Put a new layer on a value: head='{before}'"
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


# ---- finding ------------------------------------------------------------------------------------------


def _find(graph: ir.Graph, result: ir.Value, wanted: str | None) -> ir.Node:
    """The layer that makes the scores; an error with the candidates where there is no single one."""
    reached, problem = _reach(result)
    if wanted is not None:
        node = _layer(graph, wanted)
        if node is None:
            near = difflib.get_close_matches(wanted, _layer_names(graph), n=3)
            hint = f"; did you mean {', '.join(repr(n) for n in near)}?" if near else ""
            raise ModelError(f"no layer, weight or value of the model is called '{wanted}'{hint}")
        if node not in reached or problem:
            after = f": {problem}" if problem else ""
            raise ModelError(
                f"'{wanted}' does not make the scores of '{result.name}'{after}. To cut the model there, name a "
                f"value instead: head='{_first(node.inputs).name}' puts a new layer on it"
            )
        return node
    if len(reached) == 1 and not problem:
        return next(iter(reached))
    if "is quantized" in problem:
        raise ModelError(
            f"no new head for '{result.name}': {problem}. Fine-tune the float model that this one was made of, and "
            "quantize the result (onward deploy --quantize int8)"
        )
    why = problem or (
        f"{len(reached)} layers make '{result.name}' together"
        if reached
        else "no layer with weights makes it"
    )
    raise ModelError(_candidates(graph, result, why))


def _reach(result: ir.Value) -> tuple[dict[ir.Node, None], str]:
    """The layers from which an output is made, and what stands in the way of any being the head."""
    reached: dict[ir.Node, None] = {}
    problem = ""
    seen: set[ir.Value] = set()
    todo = [result]
    while todo:
        value = todo.pop()
        if value in seen or _is_constant(value):
            continue
        seen.add(value)
        node = value.producer()
        if node is None:
            problem = problem or f"the input '{value.name}' goes into the output without a layer"
        elif _class_axis(node) is not None:
            reached[node] = None
        elif node.op_type == "Shape":
            continue  # sizes, not scores
        elif node.op_type in _QUANTIZED:
            problem = problem or f"the model is quantized ({node.op_type} '{node.name or value.name}')"
        elif _takes_only_score(node):
            todo.append(_first(node.inputs))
        elif node.op_type not in _PASSING or node.domain not in ("", "ai.onnx"):
            problem = problem or f"{node.op_type} '{node.name or value.name}' comes after the last layer"
        else:
            data = (
                node.inputs[:1]
                if node.op_type in ("Reshape", "Expand", "Squeeze", "Unsqueeze")
                else node.inputs
            )
            todo += [given for given in data if given is not None]
    return reached, problem


def _takes_only_score(node: ir.Node) -> bool:
    """Whether a Gather takes the one score that there is, which is a Squeeze: `logits[:, 0]`."""
    if node.op_type != "Gather" or len(node.inputs) != 2 or _number(node.inputs[1]) != 0.0:
        return False
    data, axis = _first(node.inputs), node.attributes.get_int("axis", 0)
    if data.shape is None:
        layer = data.producer()
        shape = None if layer is None or _class_axis(layer) is None else _constant_shape(layer.inputs[1])
        return shape is not None and layer is not None and shape[_class_axis(layer) or 0] == 1 and axis != 0
    return axis != 0 and data.shape[axis] == 1


def _class_axis(node: ir.Node) -> int | None:
    """Which axis of a layer's weight counts classes; None for what is no layer with constant weights."""
    if node.op_type not in _LINEAR or node.domain not in ("", "ai.onnx") or len(node.inputs) < 2:
        return None
    weight = node.inputs[1]
    shape = _constant_shape(weight)
    if node.op_type == "Conv":
        return 0 if shape is not None and node.attributes.get_int("group", 1) == 1 else None
    if node.op_type == "Gemm":
        return None if shape is None else 0 if node.attributes.get_int("transB", 0) else 1
    if shape is None or len(shape) < 2 or any(size != 1 for size in shape[:-2]):
        return None
    return len(shape) - 1


def _constant_shape(value: ir.Value | None) -> tuple[int, ...] | None:
    """The shape of a weight, also of one that is transposed, cast or dequantized on its way."""
    if value is None:
        return None
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is not None:
        return tuple(tensor.shape.numpy())
    node = value.producer()
    if node is None:
        return None
    if node.op_type in ("Identity", "Cast", "DequantizeLinear"):
        return _constant_shape(node.inputs[0])
    if node.op_type == "Transpose":
        inner = _constant_shape(node.inputs[0])
        if inner is not None:
            order = node.attributes.get_ints("perm", tuple(reversed(range(len(inner)))))
            return tuple(inner[axis] for axis in order)
    return None


def _is_constant(value: ir.Value) -> bool:
    return _constant_shape(value) is not None


def _layers(graph: ir.Graph) -> list[ir.Node]:
    return [node for node in graph if _class_axis(node) is not None]


def _layer(graph: ir.Graph, name: str) -> ir.Node | None:
    """The layer of a name: its node's, its output's or its weight's."""
    for node in _layers(graph):
        weight = node.inputs[1]
        source = weight.producer() if weight is not None else None
        inner = source.inputs[0] if source is not None and source.inputs else None
        names = [
            node.name,
            node.outputs[0].name,
            weight.name if weight else None,
            inner.name if inner else None,
        ]
        if name in names:
            return node
    return None


def _layer_names(graph: ir.Graph) -> list[str]:
    values = [value.name or "" for node in graph for value in node.outputs]
    return [*(node.name or "" for node in _layers(graph)), *values, *graph.initializers]


def _candidates(graph: ir.Graph, result: ir.Value, why: str) -> str:
    lines = []
    for node in list(reversed(_layers(graph)))[:_MOST]:
        shape = _constant_shape(node.inputs[1])
        lines.append(f"  {node.op_type:<7} '{node.name or node.outputs[0].name}'  weight {list(shape or ())}")
    listed = "\n".join(lines) or "  none"
    feature = next(
        (f"head='{_first(node.inputs).name}'" for node in reversed(_layers(graph))), "head='VALUE'"
    )
    outputs = ", ".join(f"'{value.name}'" for value in graph.outputs)
    return (
        f"no single layer makes the scores of '{result.name}': {why}. The last layers are:\n{listed}\n"
        f"Name one of them (head=…), another output (outputs are {outputs}), or a value that a new layer is put on, "
        f"such as head='{result.name}' or {feature}"
    )


# ---- replacing ----------------------------------------------------------------------------------------


def _replace(
    model: ir.Model, node: ir.Node, result: ir.Value, classes: int, seed: int, notes: list[str]
) -> NewHead:
    graph = model.graph
    axis = _class_axis(node)
    shape = list(_constant_shape(node.inputs[1]) or ())
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
    weight = _parameter(op, "head.weight", _uniform(shape, fan_in, seed).astype(kind))
    node.replace_input_with(1, weight)
    parameters = [weight.name or ""]
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if bias is not None:
        bias_shape = [classes if dim == old else dim for dim in _constant_shape(bias) or (classes,)]
        made = _parameter(op, "head.bias", np.zeros(bias_shape or [classes], kind))
        node.replace_input_with(2, made)
        parameters.append(made.name or "")
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
    data, result = _first(node.inputs), node.outputs[0]
    if data.shape is None or result.shape is None or data.shape.rank() == 0:
        return node
    rank = result.shape.rank()
    flattens = node.op_type == "Squeeze" or _takes_only_score(node)
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
            given = op.constant(np.asarray(axes, np.int64), name="axes")
            return _swap(op.graph, node, ir.Node("", "Squeeze", [data, given], num_outputs=1))
    return node


def _swap(graph: ir.Graph, old: ir.Node, new: ir.Node) -> ir.Node:
    new.outputs[0].type = old.outputs[0].type
    ir.convenience.replace_nodes_and_values(graph, old, [old], [new], old.outputs[:1], new.outputs)
    return new


def _scores_first(graph: ir.Graph, made: NewHead, notes: list[str]) -> None:
    """The output with the scores comes first: the loss and inference read the first output."""
    index = next(i for i, value in enumerate(graph.outputs) if value.name == made.output)
    if index == 0:
        return
    outputs = list(graph.outputs)
    graph.outputs.clear()
    graph.outputs.extend([outputs.pop(index), *outputs])
    notes.append(f"'{made.output}' is the first output now: it has the scores")


def _put_on(model: ir.Model, value: ir.Value, classes: int, seed: int, notes: list[str]) -> NewHead:
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
    features, axis = value, 1 if rank in (2, 4, 5) else 2
    size = value.shape[axis]
    if rank == 4 and not (isinstance(size, int) and size > 1) and isinstance(value.shape[3], int):
        axis, size = 3, value.shape[3]
    if not isinstance(size, int):
        raise ModelError(f"'{value.name}' has shape {value.shape}: the size of axis {axis} must be a number")
    others = [other for other in range(1, rank or 2) if other != axis]
    if others:
        mean = (
            op.ReduceMean(value, others, keepdims=0)
            if op.opset >= 18
            else op.ReduceMean(value, axes=others, keepdims=0)
        )
        features = mean
    kind = value.dtype.numpy()
    weight = _parameter(op, "head.weight", _uniform([classes, size], size, seed).astype(kind))
    bias = _parameter(op, "head.bias", np.zeros([classes], kind))
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


def _parameter(op: Builder, name: str, array: np.ndarray) -> ir.Value:
    value = ir.Value(name=op.namer(name))
    value.const_value = ir.tensor(np.ascontiguousarray(array), name=value.name)
    value.dtype, value.shape = value.const_value.dtype, ir.Shape(array.shape)
    op.graph.register_initializer(value)
    return value


def _uniform(shape: Sequence[int], fan_in: int, seed: int) -> np.ndarray:
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
    made = []
    if (
        node.op_type in ("Reshape", "Expand")
        and (sizes_from := _made_by(node.inputs[1], "Concat")) is not None
    ):
        parts = [i for i, part in enumerate(sizes_from.inputs) if _number(part) == old]
        if len(parts) == 1 and old not in (1, classes):
            sizes_from.replace_input_with(parts[0], op.constant(np.asarray([classes], np.int64), name="size"))
    for index, value in enumerate(node.inputs):
        tensor = None if value is None else ir.convenience.get_const_tensor(value)
        if tensor is None or value is None or old == classes:
            continue
        if node.op_type in ("Reshape", "Expand") and index == 1:
            sizes = tensor.numpy().astype(np.int64)
            if np.count_nonzero(sizes == old) == 1:
                node.replace_input_with(1, op.constant(np.where(sizes == old, classes, sizes), name="shape"))
        elif old > 1 and node.op_type in ("Add", "Sub", "Mul", "Div") and old in tuple(tensor.shape):
            shape = [classes if dim == old else dim for dim in tensor.shape.numpy()]
            fresh = np.zeros(shape, kind) if node.op_type in ("Add", "Sub") else np.ones(shape, kind)
            name = "head.bias" if node.op_type in ("Add", "Sub") else "head.scale"
            parameter = _parameter(op, name, fresh)
            node.replace_input_with(index, parameter)
            made.append(parameter.name or "")
    return made


def _resize_bias(op: Builder, node: ir.Node, old: int, classes: int, kind: np.dtype) -> list[str]:
    """The bias that is added right after a layer, where its size alone does not show that it is one."""
    for user in [user for output in node.outputs for user in output.consumers() if user.op_type == "Add"]:
        for index, value in enumerate(user.inputs):
            tensor = None if value is None else ir.convenience.get_const_tensor(value)
            if tensor is None or tensor.size != old or (value and (value.name or "").startswith("head.")):
                continue
            shape = [classes if dim == old else dim for dim in tensor.shape.numpy()] or [classes]
            parameter = _parameter(op, "head.bias", np.zeros(shape, kind))
            user.replace_input_with(index, parameter)
            return [parameter.name or ""]
    return []


# ---- what comes after ---------------------------------------------------------------------------------


def _open_activation(graph: ir.Graph, output: str, notes: list[str]) -> None:
    """Let an output be scores where it was a softmax or sigmoid of them; reshapes between the two stay."""
    index = next(i for i, value in enumerate(graph.outputs) if value.name == output)
    value = graph.outputs[index]
    last: ir.Node | None = None
    while True:
        found = _activation(value)
        if found is not None:
            break
        node = value.producer()
        if node is None or node.op_type not in _SEE_THROUGH | {"Reshape", "Squeeze", "Unsqueeze", "Flatten"}:
            return
        last, value = node, _first(node.inputs)
    source, name = found
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


def _activation(value: ir.Value) -> tuple[ir.Value, str] | None:
    """What goes into a softmax or sigmoid whose result this is, and its name."""
    node = value.producer()
    if node is None or node.domain not in ("", "ai.onnx"):
        return None
    if node.op_type in _ACTIVATIONS:
        return _first(node.inputs), node.op_type
    if node.op_type == "Div":
        top, bottom = _through(node.inputs[0]), _through(node.inputs[1])
        up, down = _made_by(top, "Exp"), _made_by(bottom, "ReduceSum")
        if up is not None and down is not None and _through(down.inputs[0]) is up.outputs[0]:
            return _shifted(_first(up.inputs)), "softmax"
        # 1 / (1 + exp(−x))
        plus = _made_by(bottom, "Add")
        if plus is not None and _number(top) == 1.0:
            for one, other in (plus.inputs, reversed(plus.inputs)):
                exp = _made_by(other, "Exp")
                neg = None if exp is None else _made_by(exp.inputs[0], "Neg")
                if _number(one) == 1.0 and neg is not None:
                    return _first(neg.inputs), "sigmoid"
    if node.op_type == "Sub":  # x − log Σ exp x
        log = _made_by(_through(node.inputs[1]), "Log")
        total = None if log is None else _made_by(_through(log.inputs[0]), "ReduceSum")
        exp = None if total is None else _made_by(_through(total.inputs[0]), "Exp")
        if exp is not None and exp.inputs[0] is node.inputs[0]:
            return _shifted(_first(exp.inputs)), "log-softmax"
        if _made_by(_through(node.inputs[1]), "ReduceLogSumExp") is not None:
            return _first(node.inputs), "log-softmax"
    return None


def _shifted(value: ir.Value) -> ir.Value:
    """x of x − max(x)."""
    node = _made_by(value, "Sub")
    if node is not None and _made_by(_through(node.inputs[1]), "ReduceMax") is not None:
        return _first(node.inputs)
    return value


def _through(value: ir.Value | None) -> ir.Value | None:
    """Past what only spreads or reshapes a value."""
    while value is not None and (node := value.producer()) is not None:
        if node.op_type not in (
            "Identity",
            "Cast",
            "Reshape",
            "Expand",
            "Unsqueeze",
            "Squeeze",
            "StopGradient",
        ):
            break
        value = node.inputs[0]
    return value


def _made_by(value: ir.Value | None, kind: str) -> ir.Node | None:
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == kind else None


def _number(value: ir.Value | None) -> float | None:
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return float(tensor.numpy().reshape(-1)[0]) if tensor is not None and tensor.size == 1 else None


def _first(values: Sequence[ir.Value | None]) -> ir.Value:
    value = values[0]
    assert value is not None
    return value


def _correct_metadata(model: ir.Model, made: NewHead, classes: int, names: Sequence[str] | None) -> None:
    """The old classes' names go; the new ones are recorded."""
    about = model.metadata_props
    for key in [key for key, value in about.items() if _holds_labels(key, value, made.old_classes)]:
        del about[key]
        made.notes.append(f"metadata '{key}' is gone: it had the old classes")
    about.pop(CLASSES, None)
    for key in (contract.REQUIRES_GRAD, contract.FROZEN_PARAMS):
        if key in about:
            kept = [name for name in read_names(about, key) if name in model.graph.initializers]
            fresh = made.parameters if key == contract.REQUIRES_GRAD else []
            about[key] = json.dumps([*kept, *(name for name in fresh if name not in kept)])
    about[HEAD] = json.dumps(made.parameters)
    if names is not None:
        about[CLASSES] = json.dumps(list(names), ensure_ascii=False)


_LONGEST = 2**20  # characters of metadata that may list classes


def _holds_labels(key: str, value: str, old: int | None) -> bool:
    if key.startswith("onward.") and key != contract.EXPORT:
        return False
    if key.lower() in _LABEL_KEYS:
        return True
    if old is None or old < 2:
        return key == contract.EXPORT
    if key == contract.EXPORT or len(value.splitlines()) == old:
        return True
    for parse in (json.loads, ast.literal_eval):
        try:
            require_shallow(value)
            found = parse(value) if len(value) < _LONGEST else None
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError, LimitError):
            continue
        return isinstance(found, dict | list | tuple) and len(found) == old
    return False


def _infer_again(model: ir.Model, parameters: Sequence[str]) -> None:
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
