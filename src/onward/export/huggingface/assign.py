"""Bipartite matching of a detector's boxes (or masks) to objects: the labels of its training step.

Runs on the host between the evaluation model, which proposes boxes, and the training step, which takes one label
for each. The cost of a pair is the model's own; the assignment of least total cost is exact. numpy only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def assign_detections(
    logits: np.ndarray,
    boxes: np.ndarray,
    objects: Sequence[Mapping[str, Any]],
    *,
    classes: int,
    class_cost: float = 1.0,
    box_cost: float = 5.0,
    overlap_cost: float = 2.0,
) -> dict[str, np.ndarray]:
    """Labels for a detector's training step, from what its evaluation model says of the same pictures.

    `objects` has for each picture `class_labels` [n] and `boxes` [n, 4] as centre and size, 0 to 1. Boxes that are
    to find nothing get the class `classes`. The defaults are DETR's.

    >>> found = assign_detections(np.zeros((1, 2, 3)), np.array([[[.5, .5, .2, .2], [.1, .1, .2, .2]]]),
    ...     [{"class_labels": [1], "boxes": [[.1, .1, .2, .2]]}], classes=2)
    >>> found["class_labels"].tolist()
    [[2, 1]]
    """
    labels = np.full(boxes.shape[:2], classes, np.int64)
    # a box in the middle where there is none: its terms are multiplied by zero, and must be finite for that
    targets = np.full(boxes.shape, 0.5, np.float32)
    for row, entry in enumerate(objects):
        ids = np.asarray(entry["class_labels"], np.int64).reshape(-1)
        # a picture without objects may come as an empty list
        places = np.asarray(entry["boxes"], np.float64).reshape(-1, 4)
        if len(ids) != len(places):
            raise ValueError(f"picture {row}: {len(ids)} classes for {len(places)} boxes")
        if len(ids) > boxes.shape[1]:
            raise ValueError(f"picture {row}: {len(ids)} objects, and the model has {boxes.shape[1]} boxes")
        if len(ids) == 0:
            continue
        if ids.min() < 0 or ids.max() >= classes:
            raise ValueError(f"picture {row}: class {int(ids.max())} is outside 0 to {classes - 1}")
        # The costs of DETR's matcher: the loss without logarithms, so that classes weigh no more than boxes.
        cost = class_cost * _class_costs(logits[row].astype(np.float64), classes)[:, ids]
        predicted = boxes[row].astype(np.float64)
        cost += box_cost * np.abs(predicted[:, None] - places[None]).sum(-1)
        cost -= overlap_cost * _generalized_iou(_corners(predicted)[:, None], _corners(places)[None])
        for query, target in cheapest_pairs(cost):
            labels[row, query], targets[row, query] = ids[target], places[target]
    return {"class_labels": labels, "boxes": targets}


def _class_costs(logits: np.ndarray, classes: int) -> np.ndarray:
    """−p where one of the scores stands for "nothing"; else what focal loss would gain by saying yes."""
    if logits.shape[-1] > classes:
        shifted = np.exp(logits - logits.max(-1, keepdims=True))
        return -shifted / shifted.sum(-1, keepdims=True)
    p = 1.0 / (1.0 + np.exp(-logits))
    yes = 0.25 * (1 - p) ** 2 * -np.log(p + 1e-8)
    return yes - 0.75 * p**2 * -np.log(1 - p + 1e-8)


def _corners(boxes: np.ndarray) -> np.ndarray:
    x, y, w, h = np.moveaxis(boxes, -1, 0)
    return np.stack([x - w / 2, y - h / 2, x + w / 2, y + h / 2], axis=-1)


def _generalized_iou(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    def area(box: np.ndarray) -> np.ndarray:
        return (box[..., 2] - box[..., 0]) * (box[..., 3] - box[..., 1])

    low, high = np.maximum(a[..., :2], b[..., :2]), np.minimum(a[..., 2:], b[..., 2:])
    shared = np.clip(high - low, 0, None).prod(-1)
    union = area(a) + area(b) - shared
    hull = np.clip(np.maximum(a[..., 2:], b[..., 2:]) - np.minimum(a[..., :2], b[..., :2]), 0, None).prod(-1)
    return shared / union - (hull - union) / hull


def cheapest_pairs(cost: np.ndarray) -> list[tuple[int, int]]:
    """Pairs (row, column) that use every column once, every row at most once, at the least total cost.

    The Hungarian method with shortest augmenting paths: columns are added one by one.

    >>> cheapest_pairs(np.array([[4.0, 1.0], [2.0, 0.0], [3.0, 2.0]]))
    [(0, 1), (1, 0)]
    """
    cost = np.asarray(cost, np.float64).T  # now every row is to be assigned
    rows, columns = cost.shape
    if rows > columns:
        raise ValueError(f"{rows} objects cannot be shared out among {columns} boxes")
    row_price, column_price = np.zeros(rows + 1), np.zeros(columns + 1)
    # Prices make the reduced costs of all pairs zero or more, so that each augmenting path is a shortest path.
    owner = np.zeros(columns + 1, int)  # the row that has each column, counted from 1; column 0 is a start
    for row in range(1, rows + 1):
        owner[0], current = row, 0
        least, before = np.full(columns + 1, np.inf), np.zeros(columns + 1, int)
        used = np.zeros(columns + 1, bool)
        while owner[current]:
            used[current] = True
            step = cost[owner[current] - 1] - row_price[owner[current]] - column_price[1:]
            better = ~used[1:] & (step < least[1:])
            least[1:][better], before[1:][better] = step[better], current
            following = 1 + int(np.where(used[1:], np.inf, least[1:]).argmin())
            delta = least[following]
            row_price[owner[used]] += delta
            column_price[used] -= delta
            least[~used] -= delta
            current = following
        while current:
            owner[current] = owner[before[current]]
            current = before[current]
    return [(column - 1, int(owner[column]) - 1) for column in range(1, columns + 1) if owner[column]]
