"""The loss of one-stage detectors: which anchor answers for which object, and how wrong its answer is.

Targets are assigned in the graph. An anchor is aligned with an object by √score · IoU⁶ (Feng et al., TOOD, 2021); the
ten best anchors near an object answer for it, and an anchor that several objects want answers for the one it overlaps
most. All is written with products and maxima over [samples, objects, anchors], so that any runtime trains it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from onward.losses.functions import bce_with_logits

if TYPE_CHECKING:
    from onward.graph.builder import Builder

_BEST = 10
_SMALL = 1e-7
# what an object that no box overlaps yet is worth: with nothing, nobody would ever learn to find it
_LEAST_OVERLAP = 0.1


@dataclasses.dataclass(frozen=True)
class Anchors:
    """The points of all levels: their centres in pixels, and the pixels between two neighbours.

    >>> anchors = Anchors.of((64, 64), (32,))
    >>> anchors.centres.tolist(), anchors.strides.tolist()
    ([[16.0, 48.0, 16.0, 48.0], [16.0, 16.0, 48.0, 48.0]], [32.0, 32.0, 32.0, 32.0])
    """

    centres: np.ndarray
    strides: np.ndarray

    @classmethod
    def of(cls, size: tuple[int, int], strides: Sequence[int]) -> Anchors:
        """Those of a picture of this height and width."""
        centres, sizes = [], []
        for stride in strides:
            rows, columns = (np.arange(-(-side // stride)) for side in size)
            y, x = np.meshgrid(rows, columns, indexing="ij")
            centres.append((np.stack([x.ravel(), y.ravel()]) + 0.5) * stride)
            sizes.append(np.full(x.size, stride))
        return cls(
            np.concatenate(centres, axis=1).astype(np.float32), np.concatenate(sizes).astype(np.float32)
        )


def decoded_loss(
    op: Builder,
    logits: ir.Value,
    boxes: ir.Value,
    *more: ir.Value,
    anchors: Anchors,
) -> ir.Value:
    """7.5·(1 − CIoU) + 0.5·BCE + 1.5·DFL, with boxes as centre and size in pixels: YOLOv8's loss

    `more` are the logits of the distances' distributions, where the model has some, and the targets: [samples, objects,
    5] with class and corners, class −1 where there is none.
    """
    targets, distances = more[-1], more[0] if len(more) > 1 else None
    corners = _corners(op, boxes)
    match = assign(op, op.Sigmoid(logits), corners, targets, anchors)
    total = match.total
    classes = op.Div(_sum(op, bce_with_logits(op, logits, match.scores, reduction="none")), total)
    missed = op.Mul(op.Sub(1.0, ciou(op, corners, match.corners)), match.weights)
    loss = op.Add(op.Mul(op.Div(_sum(op, missed), total), 7.5), op.Mul(classes, 0.5))
    if distances is None:
        return loss
    spread = op.Mul(_distribution_loss(op, distances, match.corners, anchors), match.weights)
    return op.Add(loss, op.Mul(op.Div(_sum(op, spread), total), 1.5))


def raw_grid_loss(
    op: Builder,
    logits: ir.Value,
    boxes: ir.Value,
    objectness: ir.Value,
    targets: ir.Value,
    *,
    anchors: Anchors,
) -> ir.Value:
    """5·(1 − CIoU) + BCE of objectness, and of the class where there is an object: YOLOX's loss

    Boxes are as the layers give them: the centre from the anchor's corner, and the logarithm of the size, in strides.
    """
    corners = _corners(op, decode_grid(op, boxes, anchors))
    scores = op.Mul(op.Sigmoid(logits), op.Sigmoid(objectness))
    match = assign(op, scores, corners, targets, anchors)
    total = match.total
    present = bce_with_logits(op, objectness, match.weights, reduction="none")
    classes = op.Mul(bce_with_logits(op, logits, match.classes, reduction="none"), match.weights)
    missed = op.Mul(op.Sub(1.0, ciou(op, corners, match.corners)), match.weights)
    parts = op.Add(op.Mul(_sum(op, missed), 5.0), op.Add(_sum(op, present), _sum(op, classes)))
    return op.Div(parts, total)


def distances_loss(
    op: Builder, logits: ir.Value, distances: ir.Value, targets: ir.Value, *, anchors: Anchors
) -> ir.Value:
    """`decoded_loss` of a model whose boxes are left as distributions: PicoDet and others of generalized focal loss"""
    boxes = decode_distances(op, distances, anchors)
    return decoded_loss(op, logits, boxes, distances, targets, anchors=anchors)


def decode_distances(op: Builder, distances: ir.Value, anchors: Anchors) -> ir.Value:
    """Σ_r r·softmax(d)_r strides from an anchor's centre to each side: [samples, 4, anchors] with centre and size"""
    width = op.static_dim(distances, 1)
    assert width is not None
    shares = op.Softmax(op.Reshape(distances, [0, 4, width // 4, -1]), axis=2)
    line = np.arange(width // 4, dtype=np.float32)[None, None, :, None]
    sides = op.Mul(op.ReduceSum(op.Mul(shares, line), [2], keepdims=0), anchors.strides[None, None])
    before, behind = _parts(op, sides, (2, 2))
    middle = op.Add(op.Mul(op.Sub(behind, before), 0.5), anchors.centres[None])
    return op.Concat(middle, op.Add(before, behind), axis=1)


def decode_grid(op: Builder, boxes: ir.Value, anchors: Anchors) -> ir.Value:
    """(xy + corner / stride)·stride and exp(wh)·stride: [samples, 4, anchors] with centre and size in pixels"""
    centre, size = _parts(op, boxes, (2, 2))
    strides = anchors.strides[None, None]
    corner = anchors.centres[None] - strides / 2
    # exp of what an untrained layer gives must stay finite
    sizes = op.Mul(op.Exp(op.Min(size, np.float32(10.0))), strides)
    return op.Concat(op.Add(op.Mul(centre, strides), corner), sizes, axis=1)


@dataclasses.dataclass(frozen=True)
class Assignment:
    """For every anchor: the wanted score of each class, its class, its box, how much it counts; and the sum of that."""

    scores: ir.Value
    classes: ir.Value
    corners: ir.Value
    weights: ir.Value
    total: ir.Value


def assign(
    op: Builder, scores: ir.Value, corners: ir.Value, targets: ir.Value, anchors: Anchors
) -> Assignment:
    """Which anchor answers for which object; no gradient flows through the choice."""
    scores, corners = op.stop_gradient(scores), op.stop_gradient(corners)
    numbers, of_object = _parts(op, targets, (1, 4), axis=2)
    classes = op.static_dim(scores, 1)
    assert classes is not None
    one_hot = op.Cast(
        op.Equal(numbers, np.arange(classes, dtype=np.float32)[None, None]), to=op.dtype(scores)
    )
    overlap, near = _overlap(op, of_object, corners), _closeness(op, of_object, anchors)
    # what is near and overlaps nothing yet comes after all that overlaps
    quality = op.Add(overlap, op.Mul(near, 0.01))
    exists = op.Cast(op.GreaterOrEqual(numbers, 0.0), to=op.dtype(scores))
    # a score of 0 would leave an object without any anchor, and √ has no slope there
    score = op.Add(op.MatMul(one_hot, scores), 1e-3)
    alignment = op.Mul(op.Mul(op.Sqrt(score), op.Pow(quality, 6.0)), op.Mul(op.Ceil(near), exists))
    count = min(_BEST, anchors.strides.size)
    best, _ = op.TopK(alignment, [count], axis=2, outputs=2)
    least = op.ReduceMin(best, [2], keepdims=1)
    chosen = op.And(op.GreaterOrEqual(alignment, least), op.Greater(alignment, 0.0))
    chosen = op.Cast(chosen, to=op.dtype(scores))
    # of several objects the one that the anchor's box overlaps most
    owner = op.Mul(op.Hardmax(op.Mul(quality, chosen), axis=1), chosen)
    aligned = op.Mul(alignment, owner)
    highest = op.ReduceMax(aligned, [2], keepdims=1)
    reach = op.Max(op.ReduceMax(op.Mul(overlap, owner), [2], keepdims=1), np.float32(_LEAST_OVERLAP))
    share = op.Mul(op.Div(aligned, op.Max(highest, np.float32(1e-30))), reach)
    by_class = op.Transpose(one_hot, perm=[0, 2, 1])
    weights = op.ReduceSum(share, [1], keepdims=1)
    return Assignment(
        op.MatMul(by_class, share),
        op.MatMul(by_class, owner),
        op.MatMul(op.Transpose(of_object, perm=[0, 2, 1]), owner),
        weights,
        op.Max(_sum(op, weights), np.float32(1.0)),
    )


def ciou(op: Builder, corners: ir.Value, target: ir.Value) -> ir.Value:
    """IoU − (distance of the centres / diagonal of both)² − α·v, v = (4/π²)·(atan(w'/h') − atan(w/h))²

    Zheng et al., 2020; α = v / (1 − IoU + v) is a constant of the step.
    """
    x1, y1, x2, y2 = _parts(op, corners, (1, 1, 1, 1))
    left, top, right, bottom = _parts(op, target, (1, 1, 1, 1))
    width, height = op.Sub(x2, x1), op.Sub(y2, y1)
    wanted_width, wanted_height = op.Sub(right, left), op.Sub(bottom, top)
    across = op.Relu(op.Sub(op.Min(x2, right), op.Max(x1, left)))
    down = op.Relu(op.Sub(op.Min(y2, bottom), op.Max(y1, top)))
    both = op.Mul(across, down)
    areas = op.Add(op.Mul(width, height), op.Mul(wanted_width, wanted_height))
    iou = op.Div(both, op.Add(op.Sub(areas, both), _SMALL))
    outer_width = op.Sub(op.Max(x2, right), op.Min(x1, left))
    outer_height = op.Sub(op.Max(y2, bottom), op.Min(y1, top))
    diagonal = op.Add(op.Add(op.Mul(outer_width, outer_width), op.Mul(outer_height, outer_height)), _SMALL)
    dx = op.Sub(op.Add(x1, x2), op.Add(left, right))
    dy = op.Sub(op.Add(y1, y2), op.Add(top, bottom))
    distance = op.Mul(op.Add(op.Mul(dx, dx), op.Mul(dy, dy)), 0.25)
    angle = op.Atan(op.Div(width, op.Add(height, _SMALL)))
    turned = op.Sub(op.Atan(op.Div(wanted_width, op.Add(wanted_height, _SMALL))), angle)
    shape = op.Mul(op.Mul(turned, turned), 4 / np.pi**2)
    trade = op.stop_gradient(op.Div(shape, op.Add(op.Add(op.Sub(shape, iou), 1.0), _SMALL)))
    return op.Sub(op.Sub(iou, op.Div(distance, diagonal)), op.Mul(trade, shape))


def _distribution_loss(op: Builder, distances: ir.Value, targets: ir.Value, anchors: Anchors) -> ir.Value:
    """−Σ_r max(0, 1 − |d − r|)·log p_r, the mean over the four sides: Li et al., Generalized Focal Loss, 2020"""
    width = op.static_dim(distances, 1)
    assert width is not None
    bins = width // 4
    corner, far = _parts(op, targets, (2, 2))
    centres, strides = anchors.centres[None], anchors.strides[None, None]
    to_sides = op.Concat(op.Sub(centres, corner), op.Sub(far, centres), axis=1)
    position = op.Div(to_sides, strides)
    # below the last bin, so that a bin above is there to share with; as in Ultralytics' DFL
    position = op.Max(op.Min(position, np.float32(bins - 1.01)), np.float32(0.0))
    line = np.arange(bins, dtype=np.float32)[None, None, :, None]
    shares = op.Relu(op.Sub(1.0, op.Abs(op.Sub(op.Unsqueeze(position, [2]), line))))
    logs = op.LogSoftmax(op.Reshape(distances, [0, 4, bins, -1]), axis=2)
    each = op.Neg(op.ReduceSum(op.Mul(shares, logs), [2], keepdims=0))
    return op.ReduceMean(each, [1], keepdims=1)


def _overlap(op: Builder, objects: ir.Value, corners: ir.Value) -> ir.Value:
    """IoU of every object with every anchor's box: [samples, objects, anchors]"""
    x1, y1, x2, y2 = _parts(op, corners, (1, 1, 1, 1))
    left, top, right, bottom = _parts(op, objects, (1, 1, 1, 1), axis=2)
    across = op.Relu(op.Sub(op.Min(x2, right), op.Max(x1, left)))
    down = op.Relu(op.Sub(op.Min(y2, bottom), op.Max(y1, top)))
    both = op.Mul(across, down)
    areas = op.Add(op.Mul(op.Sub(x2, x1), op.Sub(y2, y1)), op.Mul(op.Sub(right, left), op.Sub(bottom, top)))
    return op.Div(both, op.Add(op.Sub(areas, both), _SMALL))


def _closeness(op: Builder, objects: ir.Value, anchors: Anchors) -> ir.Value:
    """1 at an object's centre, falling to 0 at its sides, or one stride away where it is smaller than that"""
    left, top, right, bottom = _parts(op, objects, (1, 1, 1, 1), axis=2)
    strides = anchors.strides[None, None]
    away = []
    for low, high, centres in ((left, right, anchors.centres[0]), (top, bottom, anchors.centres[1])):
        distance = op.Abs(op.Sub(op.Mul(op.Add(low, high), 0.5), centres[None, None]))
        away.append(op.Div(distance, op.Max(op.Mul(op.Sub(high, low), 0.5), strides)))
    return op.Relu(op.Sub(1.0, op.Max(*away)))


def _corners(op: Builder, boxes: ir.Value) -> ir.Value:
    """Centre and size as two corners."""
    centre, size = _parts(op, boxes, (2, 2))
    half = op.Mul(size, 0.5)
    return op.Concat(op.Sub(centre, half), op.Add(centre, half), axis=1)


def _parts(op: Builder, value: ir.Value, sizes: Sequence[int], axis: int = 1) -> tuple[ir.Value, ...]:
    return op.Split(value, np.asarray(sizes, np.int64), axis=axis, outputs=len(sizes))


def _sum(op: Builder, value: ir.Value) -> ir.Value:
    return op.ReduceSum(value, keepdims=0)
