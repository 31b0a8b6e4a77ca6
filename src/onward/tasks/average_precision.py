"""COCO's average precision of boxes, as pycocotools computes it for objects of all sizes.

A class's boxes are taken by falling score; each is right if it overlaps an object that no better box has taken. Of the
curve of precision over recall the highest values from each of 101 recalls on are averaged, over ten overlaps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

OVERLAPS = np.linspace(0.5, 0.95, 10)
_RECALLS = np.linspace(0.0, 1.0, 101)
# boxes of a picture and class that count
_MOST = 100


def overlaps(boxes: np.ndarray, others: np.ndarray) -> np.ndarray:
    """IoU of every box with every other, each as two corners.

    >>> overlaps(np.array([[0.0, 0, 2, 2]]), np.array([[1.0, 0, 3, 2], [5, 5, 6, 6]]))
    array([[0.33333333, 0.        ]])
    """
    low = np.maximum(boxes[:, None, :2], others[None, :, :2])
    high = np.minimum(boxes[:, None, 2:], others[None, :, 2:])
    both = np.clip(high - low, 0, None).prod(axis=2)
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(axis=1)[:, None] + (others[:, 2:] - others[:, :2]).prod(axis=1)
    # two boxes without area overlap by nothing, not by 0/0
    return both / np.maximum(areas - both, 1e-12)


def average_precision(
    detections: Sequence[np.ndarray], objects: Sequence[np.ndarray], classes: int
) -> np.ndarray:
    """[classes, overlaps]: the average precision of each class at each of `OVERLAPS`; NaN for one without objects.

    Of each picture, `detections` has rows of score, class and corners, `objects` of class and corners.
    """
    table = np.full((classes, len(OVERLAPS)), np.nan)
    for number in range(classes):
        scores, hits, count = [], [], 0
        for boxes, truths in zip(detections, objects):
            own = boxes[boxes[:, 1] == number]
            own = own[np.argsort(-own[:, 0], kind="stable")[:_MOST]]
            truth = truths[truths[:, 0] == number][:, 1:]
            count += len(truth)
            scores.append(own[:, 0])
            hits.append(_matches(own[:, 2:], truth))
        if not count:
            continue
        order = np.argsort(-np.concatenate(scores), kind="stable")
        table[number] = _area(np.concatenate(hits)[order], count)
    return table


def _matches(boxes: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """[boxes, overlaps]: whether each box, best first, has an object of its own at each overlap."""
    hits = np.zeros((len(boxes), len(OVERLAPS)), bool)
    if not len(truth):
        return hits
    shared = overlaps(boxes, truth)
    taken = np.zeros((len(OVERLAPS), len(truth)), bool)
    for row, ious in enumerate(shared):
        free = np.where(taken, -1.0, ious[None])
        # of equal ones the last, as pycocotools has it
        best = len(truth) - 1 - free[:, ::-1].argmax(axis=1)
        # pycocotools' own slack: a box that covers its object exactly passes 1.0
        enough = free[np.arange(len(OVERLAPS)), best] >= np.minimum(OVERLAPS, 1 - 1e-10)
        hits[row] = enough
        taken[enough, best[enough]] = True
    return hits


def _area(hits: np.ndarray, count: int) -> np.ndarray:
    right = np.cumsum(hits, axis=0, dtype=np.float64)
    wrong = np.cumsum(~hits, axis=0, dtype=np.float64)
    recall = right / count
    # pycocotools' own guard against 0/0
    precision = right / np.maximum(right + wrong, np.spacing(1.0))
    # the highest precision at this recall or any later one
    precision = np.maximum.accumulate(precision[::-1], axis=0)[::-1]
    means = []
    for column in range(hits.shape[1]):
        places = np.searchsorted(recall[:, column], _RECALLS, side="left")
        reached = places < len(precision)
        means.append(float(np.where(reached, precision[np.minimum(places, len(precision) - 1), column], 0.0).mean())
                     if len(precision) else 0.0)  # fmt: skip
    return np.asarray(means)
