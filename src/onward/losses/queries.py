"""The loss of detectors whose boxes are queries: which query answers for which object, and how wrong its answer is.

Each object has one query of its own, so that nothing has to be suppressed later: the assignment with the least cost
(Carion et al., DETR, 2020). It is decided in the graph, in Loops, so that any runtime trains it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

if TYPE_CHECKING:
    from onward.graph.builder import Builder

# DETR's weights: of the boxes beside the class, and of "nothing", which most queries say
_DISTANCE, _OVERLAP, _NOTHING = 5.0, 2.0, 0.1
# further than any cost, and finite: 0 times infinity is no number
_FAR = 1e30
_SMALL = 1e-7


def set_loss(
    op: Builder, logits: ir.Value, boxes: ir.Value, targets: ir.Value, *, size: tuple[int, int]
) -> ir.Value:
    """CE + 5·‖b − b*‖₁ + 2·(1 − GIoU), boxes as centre and size in shares of the picture: DETR's loss

    `logits` are [samples, queries, classes + 1], the last one for nothing, which weighs a tenth. `targets` are
    [samples, objects, 5] with class and corners in pixels of a picture of this size, class −1 where there is none.
    """
    kind, count = op.dtype(logits), op.static_dim(logits, 2)
    assert count is not None
    numbers, corners = op.Split(targets, np.asarray([1, 4]), axis=2, outputs=2)
    exists = op.Cast(op.GreaterOrEqual(numbers, 0.0), to=kind)
    one_hot = op.Cast(op.Equal(numbers, np.arange(count, dtype=np.float32)[None, None]), to=kind)
    height, width = size
    relative = op.Div(corners, np.asarray([width, height, width, height], np.float32))
    low, high = op.Split(relative, np.asarray([2, 2]), axis=2, outputs=2)
    true = op.Concat(op.Mul(op.Add(low, high), 0.5), op.Sub(high, low), axis=2)

    owner = _assign(op, op.stop_gradient(logits), op.stop_gradient(boxes), one_hot, true, exists)
    by_query = op.Transpose(owner, perm=[0, 2, 1])
    nothing = np.eye(count, dtype=np.float32)[-1]
    busy = op.ReduceSum(by_query, [2], keepdims=1)
    labels = op.Add(op.MatMul(by_query, one_hot), op.Mul(op.Sub(1.0, busy), nothing))
    weighted = op.Mul(labels, np.where(nothing > 0, _NOTHING, 1.0).astype(np.float32))
    missed = op.Neg(_sum(op, op.Mul(weighted, op.LogSoftmax(logits, axis=2))))
    classes = op.Div(missed, _sum(op, weighted))

    answered = op.ReduceSum(owner, [2], keepdims=1)
    answers = op.MatMul(owner, boxes)
    # an object that nobody answers for has a box of its own size, which costs nothing
    answers = op.Add(answers, op.Mul(true, op.Sub(1.0, answered)))
    distance = _sum(op, op.Mul(op.Abs(op.Sub(answers, true)), answered))
    apart = _sum(op, op.Mul(op.Sub(1.0, _giou(op, _edges(op, answers), _edges(op, true))), answered))
    total = op.Max(_sum(op, answered), 1.0)
    return op.Add(classes, op.Div(op.Add(op.Mul(distance, _DISTANCE), op.Mul(apart, _OVERLAP)), total))


def _assign(
    op: Builder, logits: ir.Value, boxes: ir.Value, one_hot: ir.Value, true: ir.Value, exists: ir.Value
) -> ir.Value:
    """[samples, objects, queries]: 1 where a query answers for an object; by 5·L1 − 2·GIoU − p(class)."""
    chances = op.MatMul(one_hot, op.Transpose(op.Softmax(logits, axis=2), perm=[0, 2, 1]))
    pairs = op.Abs(op.Sub(op.Unsqueeze(true, [2]), op.Unsqueeze(boxes, [1])))
    distance = op.ReduceSum(pairs, [3], keepdims=0)
    of_queries = [op.Transpose(edge, perm=[0, 2, 1]) for edge in _edges(op, boxes)]
    overlap = _giou(op, _edges(op, true), of_queries)
    cost = op.Sub(op.Sub(op.Mul(distance, _DISTANCE), chances), op.Mul(overlap, _OVERLAP))
    return match(op, cost, exists)


def match(op: Builder, cost: ir.Value, exists: ir.Value) -> ir.Value:
    """The one query for each object that is there, with the least sum of costs [samples, objects, queries].

    One object after the other gets a query by the cheapest chain of exchanges, as scipy's linear_sum_assignment finds
    it (Crouse, 2016), in all samples at once. Where there are more objects than queries, the last get none.
    """
    kind = op.dtype(cost)
    objects, queries = op.Squeeze(exists, [2]), op.ReduceMin(op.Mul(cost, 0.0), [1], keepdims=0)
    count = op.Squeeze(op.dim(cost, 1), [0])
    rows = op.Unsqueeze(op.Cast(op.Range(np.int64(0), count, np.int64(1)), to=kind), [0])
    body = op.subgraph("match")
    number = body.input("object", ir.DataType.INT64, [])
    going = body.input("going", ir.DataType.BOOL, [])
    of_rows, of_queries = (body.input(name, kind, [None, None]) for name in ("row_price", "query_price"))
    owner = body.input("owner", kind, [None, None, None])
    own = body.Mul(objects, body.Cast(body.Equal(rows, body.Cast(number, to=kind)), to=kind))
    answered = body.ReduceSum(owner, [1, 2], keepdims=0)
    free = body.Less(answered, body.Cast(body.Squeeze(body.dim(cost, 2), [0]), to=kind))
    own = body.Mul(own, body.Unsqueeze(body.Cast(free, to=kind), [1]))
    path = _find_path(body, cost, own, (of_rows, of_queries, owner), rows, queries)
    last, visited, lengths, sources, length = path
    slack = body.Mul(visited, body.Sub(length, lengths))
    paid = body.Squeeze(body.MatMul(owner, body.Unsqueeze(slack, [2])), [2])
    body.graph.outputs.extend([
        body.Identity(going), body.Add(of_rows, body.Add(body.Mul(own, length), paid)), body.Sub(of_queries, slack),
        _exchange(body, last, owner, sources, rows),
    ])  # fmt: skip
    start = op.Mul(cost, 0.0)
    *_, result = op.Loop(
        count, np.asarray(True), op.Mul(objects, 0.0), queries, start, body=body.graph, outputs=3
    )
    result.type, result.shape = ir.TensorType(kind), cost.shape
    return result


def _find_path(
    op: Builder,
    cost: ir.Value,
    own: ir.Value,
    prices: Sequence[ir.Value],
    rows: ir.Value,
    queries: ir.Value,
) -> list[ir.Value]:
    """Dijkstra's search from an object to a query that is free, through queries that others would have to give up.

    The query at its end, 1 for each query it passed, the way to each, the object before each, and its length.
    """
    of_rows, of_queries, owner = prices
    kind = op.dtype(cost)
    body = op.subgraph("path")
    body.input("step", ir.DataType.INT64, [])
    body.input("going", ir.DataType.BOOL, [])
    names = ("last", "visited", "lengths", "sources", "length", "row")
    last, visited, lengths, sources, length, row = (body.input(name, kind, [None, None]) for name in names)
    # a sample whose search is over has no row any more, and nothing of it changes
    searching = body.Greater(body.ReduceSum(row, [1], keepdims=1), 0.5)
    ways = body.Squeeze(body.MatMul(body.Unsqueeze(row, [1]), cost), [1])
    paid = body.Add(of_queries, body.ReduceSum(body.Mul(row, of_rows), [1], keepdims=1))
    ways = body.Sub(body.Add(ways, length), paid)
    passed = body.Greater(visited, 0.5)
    shorter = body.And(body.And(body.Less(ways, lengths), body.Not(passed)), searching)
    nearer = body.Where(shorter, ways, lengths)
    number = body.ReduceSum(body.Mul(row, rows), [1], keepdims=1)
    nearest = body.Hardmax(body.Neg(body.Where(passed, _FAR, nearer)), axis=1)
    end = body.Where(searching, nearest, last)
    reached = body.ReduceSum(body.Mul(end, nearer), [1], keepdims=1)
    owners = body.MatMul(body.Unsqueeze(end, [1]), body.Transpose(owner, perm=[0, 2, 1]))
    following = body.Mul(body.Squeeze(owners, [1]), body.Cast(searching, to=kind))
    body.graph.outputs.extend([
        body.Greater(_sum(body, following), 0.5), end, body.Max(visited, end), nearer,
        body.Where(shorter, number, sources), body.Where(searching, reached, length), following,
    ])  # fmt: skip
    begin = op.Greater(_sum(op, own), 0.5)
    none = op.ReduceSum(queries, [1], keepdims=1)
    start = (queries, queries, op.Add(queries, _FAR), queries, none, own)
    results = op.Loop(None, begin, *start, body=body.graph, outputs=6)
    return [_described(value, like) for value, like in zip(results[:5], start)]


def _exchange(op: Builder, last: ir.Value, owner: ir.Value, sources: ir.Value, rows: ir.Value) -> ir.Value:
    """The owners after a path: each object on it takes the query behind it, and gives up the one before."""
    kind = op.dtype(owner)
    body = op.subgraph("exchange")
    body.input("step", ir.DataType.INT64, [])
    body.input("going", ir.DataType.BOOL, [])
    query, owned = body.input("query", kind, [None, None]), body.input("owned", kind, [None, None, None])
    there = body.ReduceSum(query, [1], keepdims=1)
    number = body.ReduceSum(body.Mul(query, sources), [1], keepdims=1)
    row = body.Mul(body.Cast(body.Equal(rows, number), to=kind), there)
    old = body.Squeeze(body.MatMul(body.Unsqueeze(row, [1]), owned), [1])
    change = body.Mul(body.Unsqueeze(row, [2]), body.Unsqueeze(body.Sub(query, old), [1]))
    body.graph.outputs.extend([body.Greater(_sum(body, old), 0.5), old, body.Add(owned, change)])
    begin = op.Greater(_sum(op, last), 0.5)
    return _described(op.Loop(None, begin, last, owner, body=body.graph, outputs=2)[1], owner)


def _described(value: ir.Value, like: ir.Value) -> ir.Value:
    value.type, value.shape = like.type, like.shape
    return value


def _edges(op: Builder, boxes: ir.Value) -> list[ir.Value]:
    """Left, top, right and bottom of [samples, boxes, centre and size], each [samples, boxes, 1]."""
    x, y, width, height = op.Split(boxes, np.ones(4, np.int64), axis=2, outputs=4)
    across, down = op.Mul(width, 0.5), op.Mul(height, 0.5)
    return [op.Sub(x, across), op.Sub(y, down), op.Add(x, across), op.Add(y, down)]


def _giou(op: Builder, one: Sequence[ir.Value], other: Sequence[ir.Value]) -> ir.Value:
    """IoU − (hull − union) / hull: Rezatofighi et al., 2019"""
    left, top, right, bottom = one
    x1, y1, x2, y2 = other
    across = op.Relu(op.Sub(op.Min(right, x2), op.Max(left, x1)))
    down = op.Relu(op.Sub(op.Min(bottom, y2), op.Max(top, y1)))
    both = op.Mul(across, down)
    areas = op.Add(op.Mul(op.Sub(right, left), op.Sub(bottom, top)), op.Mul(op.Sub(x2, x1), op.Sub(y2, y1)))
    union = op.Add(op.Sub(areas, both), _SMALL)
    hull_across = op.Sub(op.Max(right, x2), op.Min(left, x1))
    hull_down = op.Sub(op.Max(bottom, y2), op.Min(top, y1))
    hull = op.Add(op.Mul(hull_across, hull_down), _SMALL)
    return op.Sub(op.Div(both, union), op.Div(op.Sub(hull, union), hull))


def _sum(op: Builder, value: ir.Value) -> ir.Value:
    return op.ReduceSum(value, keepdims=0)
