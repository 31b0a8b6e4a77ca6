"""A teacher: a model that runs in the same step, and whose answers the trained one learns (Hinton et al., 2015).

The teacher's graph is put beside the student's, reads the same inputs, and does not train. What the student loses
against it depends on what both answer: scores of classes, vectors, or numbers.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import TYPE_CHECKING, Literal

import numpy as np
import onnx_ir as ir

from onward import contract, losses
from onward.errors import ModelError
from onward.graph.builder import Builder
from onward.graph.dialect.normalize import normalize
from onward.graph.nodes import nodes_within
from onward.graph.passes.inference_mode import to_inference
from onward.graph.prune import find_value, prune
from onward.model_metadata import read_names

if TYPE_CHECKING:
    from onward.graph.load import ModelSource

Kind = Literal["scores", "tokens", "vectors", "numbers"]
_SCORES = frozenset({losses.cross_entropy, losses.nll})
# logits of labels that may hold together: each is compared by itself, as they do not add up to one distribution
_NUMBERS = frozenset({losses.mse, losses.l1, losses.huber, losses.smooth_l1, losses.bce_with_logits})
_PREFIX = "teacher/"


@dataclasses.dataclass(frozen=True)
class Distillation:
    """What to learn from a teacher: `weight` is its share of the loss, 1 for nothing but its answers.

    `model` is the teacher's file, or "self": the model as it is before it is quantized. `temperature` divides scores of
    classes: larger ones say more of the unlikely classes. `kind` is "scores" (of classes), "tokens" (scores of a
    vocabulary, on the last axis), "vectors" (their directions) or "numbers"; by default the loss says which. `output`
    names the teacher's output, its first by default.
    """

    model: ModelSource | Literal["self"]
    temperature: float = 2.0
    weight: float = 0.5
    kind: Kind | None = None
    output: str | None = None

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature is {self.temperature}: it must be above 0")
        if not 0 < self.weight <= 1:
            raise ValueError(f"the teacher's weight is {self.weight}: it must be above 0, and 1 at most")


def load_teacher(settings: Distillation, student: ir.Model) -> ir.Model:
    """The teacher, ready for inference; "self" is a copy of the student as it is."""
    if isinstance(settings.model, str) and settings.model == "self":
        teacher = student.clone()
    else:
        source = settings.model
        if isinstance(source, str | os.PathLike) and not os.path.isfile(source):
            raise ModelError(f"no teacher at '{os.fspath(source)}'", hint="name an ONNX file")
        teacher = normalize(source)
        _compare_classes(student, teacher)
    ir.external_data.load_to_model(teacher)
    return to_inference(teacher)


def _compare_classes(student: ir.Model, teacher: ir.Model) -> None:
    """Refuse a teacher of other classes, or of the same ones in another order."""
    own, others = (read_names(model.metadata_props, contract.CLASSES) for model in (student, teacher))
    if own and others and list(own) != list(others):
        difference = next((pair for pair in zip(own, others) if pair[0] != pair[1]), (len(own), len(others)))
        raise ModelError(
            f"the teacher has other classes: {difference[1]!r} where the model has {difference[0]!r}",
            hint="take a teacher of the same classes, in the same order",
        )


def add_distillation(
    model: ir.Model, teacher: ir.Model, settings: Distillation, *, answer: str, loss: str | None, kind: Kind
) -> str:
    """Put the teacher beside the student and its loss onto the graph; returns the name of the whole loss.

    `answer` is the student's value to teach, and `loss` its own loss, or None where the teacher's is all.
    """
    graph = model.graph
    student = find_value(graph, answer)
    taught = _embed(model, teacher, settings.output)
    _require_same_shape(student, taught)
    op = Builder(graph)
    op.scope = "teacher"
    total: ir.Value = _distance(op, settings.kind or kind, student, taught, settings.temperature)
    if loss is not None and settings.weight < 1:
        own = op.Mul(find_value(graph, loss), 1 - settings.weight)
        total = op.Add(op.Reshape(own, np.zeros(0, np.int64)), op.Mul(total, settings.weight))
    total.name = op.namer("distillation_loss")
    return total.name


def kind_of(loss: object, answer: ir.Value) -> Kind:
    """What a model answers, by its loss: scores for one of classes, numbers for one of those, else vectors.

    Without a loss, three axes that are named logits are scores of tokens, as Hugging Face's generators have them.
    """
    if loss is None and answer.name == "logits" and answer.shape is not None and len(answer.shape) == 3:
        return "tokens"
    function = loss.func if isinstance(loss, functools.partial) else loss
    # a task's own loss, which says its targets in lists: of vectors, or of what has no classes of a sample
    if isinstance(function, losses.LossWithTargets):
        return "vectors"
    if function in _SCORES:
        return "scores"
    return "numbers" if function in _NUMBERS else "vectors"


def _distance(op: Builder, kind: Kind, student: ir.Value, taught: ir.Value, temperature: float) -> ir.Value:
    """scores, tokens: T²·Σ p·(log p − log q) with p, q = softmax(·/T);  vectors: 1 − cos;  numbers: (s − t)²"""
    if kind == "numbers":
        return losses.mse(op, student, taught)
    if kind == "vectors":
        cosines = op.ReduceSum(op.Mul(_unit(op, student), _unit(op, taught)), [-1], keepdims=0)
        return op.Sub(1.0, op.ReduceMean(cosines, keepdims=0))
    # classes are on axis 1, as cross-entropy has them
    axis = op.rank(student) - 1 if kind == "tokens" else min(1, op.rank(student) - 1)
    logs, targets = (
        op.LogSoftmax(op.Div(value, np.float32(temperature)), axis=axis) for value in (student, taught)
    )
    each = op.Mul(op.Exp(targets), op.Sub(targets, logs))
    summed = op.ReduceSum(each, [axis], keepdims=0)
    return op.Mul(op.ReduceMean(summed, keepdims=0), np.float32(temperature**2))


def _unit(op: Builder, value: ir.Value) -> ir.Value:
    squares = op.ReduceSum(op.Mul(value, value), [-1], keepdims=1)
    return op.Div(value, op.Sqrt(op.Add(squares, np.float32(1e-12))))


def _embed(model: ir.Model, teacher: ir.Model, output: str | None) -> ir.Value:
    """Move the teacher's nodes and weights into the student's graph; returns its answer."""
    graph, other = model.graph, teacher.graph
    answer = output or other.outputs[0].name or ""
    prune(teacher, [answer])
    inputs = {value.name: value for value in graph.inputs}
    # named alike, or one each
    alone = len(other.inputs) == 1 and len(inputs) == 1
    for value in list(other.inputs):
        own = next(iter(inputs.values())) if alone else inputs.get(value.name)
        if own is None or own.dtype != value.dtype:
            names = ", ".join(str(name) for name in inputs)
            raise ModelError(
                f"the teacher reads '{value.name}' ({value.dtype}), and the model has {names}: both must read the same",
                hint="take a teacher with these inputs",
            )
        value.replace_all_uses_with(own, replace_graph_outputs=True)
    for name in list(other.initializers):
        value = other.initializers.pop(name)
        tensor = value.const_value
        value.const_value = None  # renaming a value renames its tensor, which the caller's model has too
        value.name = f"{_PREFIX}{name}"
        if tensor is not None:
            value.const_value = ir.tensor(tensor.numpy(), dtype=tensor.dtype, name=value.name)
        graph.register_initializer(value)
    taught = other.outputs[0]
    other.outputs.clear()
    nodes = list(other)
    other.remove(nodes)
    for node in nodes:
        node.name = f"{_PREFIX}{node.name}"
        graph.append(node)
    for node in nodes_within(graph):
        if (node.name or "").startswith(_PREFIX):
            for value in node.outputs:
                value.name = value.name and f"{_PREFIX}{value.name}"
    for domain, version in other.opset_imports.items():
        graph.opset_imports.setdefault(domain, version)
    return taught


def _require_same_shape(student: ir.Value, taught: ir.Value) -> None:
    dims = [None if value.shape is None else list(value.shape) for value in (student, taught)]
    if dims[0] is None or dims[1] is None:
        return
    same = len(dims[0]) == len(dims[1]) and all(
        a == b for a, b in zip(dims[0][1:], dims[1][1:]) if isinstance(a, int) and isinstance(b, int)
    )
    if not same:
        shown = [[str(dim) for dim in shape or ()] for shape in dims]
        raise ModelError(
            f"the teacher answers {shown[1]} and the model {shown[0]}: they have other classes, or other outputs",
            hint="take a teacher with the same outputs",
        )
