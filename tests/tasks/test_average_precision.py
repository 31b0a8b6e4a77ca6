"""COCO's average precision: against pycocotools where it is installed, and against a slow reading of its definition."""

from __future__ import annotations

import contextlib
import io

import numpy as np
import pytest

from onward.tasks.average_precision import OVERLAPS, average_precision, overlaps

CLASSES = 3


def random_boxes(seed: int, pictures: int = 12) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Objects, and detections that hit some, miss some, hit some twice, and make some up."""
    rng = np.random.default_rng(seed)
    detections, objects = [], []
    for _ in range(pictures):
        corner = rng.uniform(0, 60, (rng.integers(0, 6), 2))
        truth = np.concatenate([corner, corner + rng.uniform(8, 40, corner.shape)], axis=1)
        kinds = rng.integers(0, CLASSES, len(truth))
        objects.append(np.concatenate([kinds[:, None], truth], axis=1))
        near = np.repeat(truth, 2, axis=0) + rng.normal(0, 3, (2 * len(truth), 4))
        stray = rng.uniform(0, 60, (3, 2))
        near = np.concatenate([near, np.concatenate([stray, stray + rng.uniform(5, 30, (3, 2))], axis=1)])
        called = np.concatenate([np.repeat(kinds, 2), rng.integers(0, CLASSES, 3)])
        # no two scores are equal: their order would be a matter of taste
        scores = rng.permutation(len(near)) / 100 + rng.uniform(0, 0.009, len(near))
        detections.append(np.concatenate([scores[:, None], called[:, None], near], axis=1))
    return detections, objects


@pytest.mark.parametrize("seed", range(3))
def test_it_is_what_pycocotools_computes(seed: int) -> None:
    coco = pytest.importorskip("pycocotools.coco")
    evaluation = pytest.importorskip("pycocotools.cocoeval")
    detections, objects = random_boxes(seed)
    annotations = [
        {"id": 100 * image + index + 1, "image_id": image, "category_id": int(kind), "iscrowd": 0,
         "bbox": [x1, y1, x2 - x1, y2 - y1], "area": (x2 - x1) * (y2 - y1)}
        for image, rows in enumerate(objects) for index, (kind, x1, y1, x2, y2) in enumerate(rows.tolist())
    ]  # fmt: skip
    answers = [
        {"image_id": image, "category_id": int(kind), "score": score, "bbox": [x1, y1, x2 - x1, y2 - y1]}
        for image, rows in enumerate(detections)
        for score, kind, x1, y1, x2, y2 in rows.tolist()
    ]
    truth = coco.COCO()
    truth.dataset = {
        "images": [{"id": image} for image in range(len(objects))],
        "annotations": annotations,
        "categories": [{"id": kind} for kind in range(CLASSES)],
        "info": {},
    }
    with contextlib.redirect_stdout(io.StringIO()):
        truth.createIndex()
        judged = evaluation.COCOeval(truth, truth.loadRes(answers), "bbox")
        judged.evaluate()
        judged.accumulate()
    # [overlaps, recalls, classes, sizes, most]: all sizes, a hundred boxes
    expected = judged.eval["precision"][:, :, :, 0, 2].mean(axis=1).T
    np.testing.assert_allclose(average_precision(detections, objects, CLASSES), expected, atol=1e-9)


def slow_average_precision(detections: list, objects: list, kind: int, overlap: float) -> float:
    """The definition, box by box."""
    boxes = sorted(
        ((row[0], image, row[2:]) for image, rows in enumerate(detections) for row in rows if row[1] == kind),
        key=lambda box: -box[0],
    )
    truth = [[row[1:] for row in rows if row[0] == kind] for rows in objects]
    free = [[True] * len(rows) for rows in truth]
    curve, right = [], 0
    for rank, (_, image, corners) in enumerate(boxes, 1):
        shared = [
            float(overlaps(corners[None], other[None])[0, 0]) if free[image][index] else -1.0
            for index, other in enumerate(truth[image])
        ]
        if shared and max(shared) >= overlap:
            free[image][int(np.argmax(shared))] = False
            right += 1
        curve.append((right / sum(map(len, truth)), right / rank))
    recalls = np.linspace(0, 1, 101)
    return float(np.mean([max([p for r, p in curve if r >= recall], default=0.0) for recall in recalls]))


@pytest.mark.parametrize("seed", range(3, 6))
def test_it_is_the_definition(seed: int) -> None:
    detections, objects = random_boxes(seed)
    table = average_precision(detections, objects, CLASSES)
    for kind in range(CLASSES):
        for column in (0, 4, 9):
            expected = slow_average_precision(detections, objects, kind, float(OVERLAPS[column]))
            assert table[kind, column] == pytest.approx(expected, abs=1e-12)


def test_perfect_boxes_score_one_and_a_class_without_objects_has_no_score() -> None:
    objects = [np.asarray([[0, 1.0, 1, 9, 9], [0, 20, 20, 30, 40]])]
    detections = [np.concatenate([np.asarray([[0.9], [0.8]]), objects[0]], axis=1)]
    table = average_precision(detections, objects, 2)
    np.testing.assert_array_equal(table[0], 1.0)
    assert np.isnan(table[1]).all()
