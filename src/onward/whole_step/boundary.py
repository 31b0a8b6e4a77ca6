"""What programs in other languages see of a portable graph: no tensor without axes, and labels that are checked.

docs/portable-format.md specifies both. The graph does what nine bindings would each have to do, or cannot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import zip_longest
from math import prod

import numpy as np
import onnx_ir as ir

from onward.checkpoint.portable import StateLayout, table_line
from onward.graph.builder import Builder
from onward.model_metadata import read_labels

Values = Mapping[str, ir.Value]


def lift_scalars(model: ir.Model) -> ir.Model:
    """Give every input and output of rank 0 the shape [1]: some bindings (Go's) cannot create a tensor without axes."""
    graph = model.graph
    op = Builder(graph)
    for value in graph.inputs:
        if not _is_scalar(value):
            continue
        users = list(value.uses())
        if users:
            with op.inserting(next(iter(graph))):
                scalar = op.Reshape(value, np.zeros(0, np.int64))
            for node, index in users:
                node.replace_input_with(index, scalar)
        value.shape = ir.Shape([1])
    for index, value in enumerate(graph.outputs):
        if not _is_scalar(value):
            continue
        name = value.name
        vector = op.Reshape(value, [1])
        value.name = op.namer(f"{name}.scalar")
        vector.name, vector.type, vector.shape = name, value.type, ir.Shape([1])
        graph.outputs[index] = vector
    return model


def _is_scalar(value: ir.Value) -> bool:
    return value.shape is not None and value.shape.rank() == 0


def reject_labels(
    op: Builder, loss: ir.Value, inputs: Values, metadata: Mapping[str, str]
) -> tuple[ir.Value, dict[str, ir.Value]]:
    """The loss, or NaN where a class number is out of range; and such a number of each label, 0 where all are in range.

    A step that is not finite leaves the state as it was. Programs in other languages cannot be relied on to check
    labels, and the gradient of a class that does not exist is finite: the state would change without a sign.
    """
    name = loss.name
    wrong: dict[str, ir.Value] = {}
    for label, (classes, ignored) in read_labels(metadata).items():
        if label not in inputs:
            continue
        value = inputs[label]
        users = list(value.uses())
        with op.inserting(next(iter(op.graph))):
            # int64 also where labels are int32: comparisons of int64 have kernels in every runtime that was tried
            number = op.Cast(value, to=ir.DataType.INT64)
            outside = op.Or(op.Less(number, np.int64(0)), op.GreaterOrEqual(number, np.int64(classes)))
            if ignored is not None:
                outside = op.And(outside, op.Not(op.Equal(number, np.int64(ignored))))
            # Some forms of the loss gather by label, which fails with the runtime's words for an index out of range.
            inside = op.Where(outside, np.zeros((), op.dtype(value).numpy()), value)
            inside.type, inside.shape = value.type, value.shape
        for node, index in users:
            node.replace_input_with(index, inside)
        # floats: not every runtime has a maximum of int64; a zero more: an empty batch has no maximum
        numbers = op.Where(outside, op.Cast(number, to=ir.DataType.FLOAT), np.float32(0))
        padded = op.Concat(op.Reshape(numbers, [-1]), np.zeros(1, np.float32), axis=0)
        most, least = op.ReduceMax(padded, keepdims=0), op.ReduceMin(padded, keepdims=0)
        wrong[label] = op.Where(op.Greater(most, np.float32(0)), most, least)
    if not wrong:
        return loss, wrong
    not_a_number = np.asarray(np.nan, op.dtype(loss).numpy())
    guarded = loss
    for value in wrong.values():
        guarded = op.Where(op.Equal(value, np.float32(0)), guarded, not_a_number)
    guarded.type, guarded.shape = loss.type, loss.shape
    loss.name, guarded.name = f"{name}.unchecked", name
    return guarded, wrong


def add_problem(
    op: Builder,
    wrong: Mapping[str, ir.Value],
    *,
    good: ir.Value | None = None,
    batches: ir.Value | None = None,
) -> None:
    """Add the output `problem`: a line of `onward.problems`, 0 where there is none, and the number that ends it.

    A program in any language has one clear error for what it is fed, without a check of its own.
    """
    line = number = op.constant(np.zeros(1, np.int64), name="no_problem")
    if good is not None:
        line, number = op.Where(good, line, np.ones(1, np.int64)), op.Where(good, number, batches)
    for index, value in enumerate(wrong.values(), start=2):
        right = op.Equal(value, np.float32(0))
        line = op.Where(right, line, np.array([index], np.int64))
        number = op.Where(right, number, op.Reshape(op.Cast(value, to=ir.DataType.INT64), [1]))
    problem = op.Concat(line, number, axis=0)
    problem.name, problem.dtype, problem.shape = op.namer("problem"), ir.DataType.INT64, ir.Shape([2])
    op.graph.outputs.append(problem)


def problems(metadata: Mapping[str, str], wrong: Iterable[str]) -> str:
    """The table of `onward.problems`: a sentence a line, to which a program adds the number."""
    labels = read_labels(metadata)
    lines = [
        "the loss, a gradient or a statistic is not finite, and nothing was changed; batches before this one: "
    ]
    for name in wrong:
        classes, ignored = labels[name]
        but = "" if ignored is None else f" or {ignored}"
        lines.append(f"'{name}' has classes from 0 to {classes - 1}{but}, and not ")
    return "".join(map(table_line, lines))


def input_table(graph: ir.Graph, layout: StateLayout, batch: int) -> str:
    """The table of `onward.inputs`: a line for each input, from which a program in any language makes it.

    Its role, where it begins in a state file (or 0), its bytes, its type as ONNX numbers it, its shape. A free axis is
    -1, and counts as 1 among the bytes. The first inputs are the `batch`; after the state come sums of gradients.
    """
    # A role for the count of steps: a program goes on with the batch after it, and should not have to count tensors.
    roles = ["steps" if tensor.parts[0].role == "train_step" else "state" for tensor in layout.tensors]
    before = [("batch", 0)] * batch + [("rate", 0), *zip(roles, layout.offsets)]
    lines = []
    for value, (role, offset) in zip_longest(graph.inputs, before, fillvalue=("gradient", 0)):
        assert isinstance(value, ir.Value) and value.dtype is not None
        dims = [dim if isinstance(dim, int) else -1 for dim in value.shape or ()]
        # a text has no size
        bits = 0 if value.dtype == ir.DataType.STRING else value.dtype.bitwidth
        size = -(-prod(map(abs, dims)) * bits // 8)
        lines.append(" ".join(map(str, (role, offset, size, value.dtype.value, *dims))) + "\n")
    return "".join(lines)


def label_ranges(metadata: Mapping[str, str]) -> str:
    """The table of `onward.label_ranges`: a line for each input of class numbers."""
    lines = [
        (name, str(count), "" if ignored is None else str(ignored))
        for name, (count, ignored) in read_labels(metadata).items()
    ]
    return "".join("\t".join(fields) + "\n" for fields in lines)
