"""Updates of large parameters: in pieces that fit the caches, and of tables only where there is something to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from onward import contract
from onward.whole_step.row_rule import SCALARS
from onward.whole_step.update_units import Unit, graft

if TYPE_CHECKING:
    from onward.graph.builder import Builder

__all__ = ["rests", "update_blocks", "update_pieces"]

# A table is updated as a whole where more than this share of its blocks has to be: to collect blocks takes time, too.
_MANY = 4

Values = Mapping[str, ir.Value]


def rests(optimizer: ir.Model) -> bool:
    """Whether a rule leaves a parameter with zero gradient, state and weight decay exactly as it is."""
    evaluator = ReferenceEvaluator(ir.to_proto(optimizer))
    parameter = np.linspace(-2, 2, 9, dtype=np.float32)[np.newaxis]
    feeds: dict[str, np.ndarray] = {}
    for value in optimizer.graph.inputs:
        name = value.name or ""
        feeds[name] = np.zeros(1 if name in SCALARS else (1, 9), np.float32)
    feeds |= {"parameter": parameter, "learning_rate": np.full(1, 0.1, np.float32)}
    feeds["gradient_scale"] = np.ones(1, np.float32)
    known = {value.name for value in optimizer.graph.inputs}
    for step in (1, 2, 1000):
        feeds["step"] = np.full(1, step, np.int64)
        results = evaluator.run(None, {name: array for name, array in feeds.items() if name in known})
        for value, result in zip(optimizer.graph.outputs, results):
            if not np.array_equal(result, feeds[(value.name or "").removesuffix(contract.NEXT)]):
                return False
    return True


def update_pieces(
    root: Builder, op: Builder, rule: ir.Graph, tensors: Values, scalars: Values, shape: tuple[int, ...]
) -> list[ir.Value]:
    """Update a parameter piece by piece; a piece has this shape, which the rule sees as a row."""
    body = op.subgraph("piece")
    given = {name: body.input(name, ir.DataType.FLOAT, shape) for name in tensors}
    is_row = len(shape) == 2 and shape[0] == 1
    rows = given if is_row else {name: body.Reshape(value, [1, -1]) for name, value in given.items()}
    made = graft(root, body, rule, {**rows, **scalars})
    kept = [name for name in tensors if name != "gradient"]
    for name in kept:
        result = made[f"{name}{contract.NEXT}"]
        if not is_row:
            result = body.Reshape(result, np.asarray(shape, np.int64))
        result.dtype, result.shape = ir.DataType.FLOAT, ir.Shape(shape)
        body.graph.outputs.append(result)
    attributes = {"body": ir.AttrGraph("body", body.graph), "num_scan_inputs": len(tensors)}
    made_ = op.node("Scan", list(tensors.values()), attributes, outputs=len(kept))
    return list(made_)


def update_blocks(root: Builder, op: Builder, rule: ir.Graph, unit: Unit, scalars: Values) -> list[ir.Value]:
    """Update the blocks of a table that this batch or an earlier one has changed; the others stay as they are.

    The state has the shape [pieces, blocks of a piece, numbers of a block]. A block whose state is all zero and that
    no row of the batch lies in has nothing to do. A row lies in one or two blocks.
    """
    assert unit.table is not None
    pieces, each, size = unit.shape
    table, count = unit.table, pieces * each
    numbers = op.Reshape(op.Cast(table.numbers, to=ir.DataType.INT64), [-1, 1])
    numbers = op.Where(op.Less(numbers, np.int64(0)), op.Add(numbers, np.int64(table.height)), numbers)
    starts = op.Mul(numbers, np.int64(table.width))
    ends = op.Div(op.Add(starts, np.array([[0, table.width - 1]], np.int64)), np.int64(size))
    # by axis, the largest and the smallest take a tenth of the time of a norm
    far = [
        op.Abs(reduce(slot, np.array([2], np.int64), keepdims=0))
        for slot in unit.slots.values()
        for reduce in (op.ReduceMax, op.ReduceMin)
    ]
    used = op.Reshape(op.Sum(*far), [-1]) if far else op.Expand(np.float32(0), np.array([count], np.int64))
    ends = op.Reshape(ends, [-1])
    used = op.ScatterElements(used, ends, op.Expand(np.float32(1), op.Shape(ends)), axis=0)
    chosen = op.Reshape(op.NonZero(used), [-1])
    places = op.Reshape(op.Add(starts, np.arange(table.width, dtype=np.int64)[np.newaxis]), [-1])
    rows = op.Reshape(table.rows, [-1])
    tensors = {"parameter": unit.parameter, **unit.slots}

    few = op.subgraph("few")
    number = few.Size(chosen)
    rank = few.ScatterElements(
        few.Expand(np.int64(0), np.array([count], np.int64)),
        chosen,
        few.Range(np.int64(0), number, np.int64(1)),
        axis=0,
    )
    block = few.Div(places, np.int64(size))
    inside = few.Sub(places, few.Mul(block, np.int64(size)))
    target = few.Add(few.Mul(few.Gather(rank, block), np.int64(size)), inside)
    room = few.Expand(np.float32(0), few.Reshape(few.Mul(number, np.int64(size)), [1]))
    gradient = few.Reshape(few.ScatterElements(room, target, rows, axis=0, reduction="add"), [1, -1])
    column = few.Reshape(chosen, [-1, 1])
    where = few.Concat(few.Div(column, np.int64(each)), few.Mod(column, np.int64(each)), axis=1)
    given = {name: few.Reshape(few.GatherND(value, where), [1, -1]) for name, value in tensors.items()}
    made = graft(root, few, rule, {**given, "gradient": gradient, **scalars})
    for name, value in tensors.items():
        updated = few.Reshape(made[f"{name}{contract.NEXT}"], np.array([-1, size], np.int64))
        few.graph.outputs.append(few.ScatterND(value, where, updated))

    many = op.subgraph("many")
    room = many.Expand(np.float32(0), np.array([count * size], np.int64))
    gradient = many.ScatterElements(room, places, rows, axis=0, reduction="add")
    tensors["gradient"] = many.Reshape(gradient, np.asarray(unit.shape, np.int64))
    many.graph.outputs.extend(update_pieces(root, many, rule, tensors, scalars, (each, size)))

    for graph in (few.graph, many.graph):
        for value in graph.outputs:
            value.dtype, value.shape = ir.DataType.FLOAT, ir.Shape(unit.shape)
    is_few = op.Less(op.Mul(op.Size(chosen), np.int64(_MANY)), np.int64(count))
    branches = {
        "then_branch": ir.AttrGraph("then_branch", few.graph),
        "else_branch": ir.AttrGraph("else_branch", many.graph),
    }
    results = op.node("If", [is_few], branches, outputs=len(few.graph.outputs))
    for value in results:
        value.dtype, value.shape = ir.DataType.FLOAT, ir.Shape(unit.shape)
    return list(results)
