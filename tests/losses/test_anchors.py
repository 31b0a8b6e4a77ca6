"""The loss of detectors: its assignment and its parts against plain loops, and its gradient."""

from __future__ import annotations

import math

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

import onward
from onward.graph.builder import Builder
from onward.losses.anchors import Anchors, assign, ciou, decoded_loss, raw_grid_loss

SIZE, STRIDES, CLASSES, BINS = (32, 48), (8, 16), 3, 6
ANCHORS = Anchors.of(SIZE, STRIDES)
COUNT = ANCHORS.strides.size
# class and corners; the second picture has one object less
TARGETS = np.asarray(
    [[[1, 2, 3, 21, 19], [0, 20, 10, 46, 30]], [[2, 10, 8, 40, 30], [-1, 0, 0, 0, 0]]], np.float32
)


def random_values(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    centres = np.broadcast_to(ANCHORS.centres, (2, 2, COUNT)) + rng.normal(0, 2, (2, 2, COUNT))
    boxes = np.concatenate([centres, rng.uniform(6, 30, (2, 2, COUNT))], axis=1)
    return {
        "logits": rng.normal(0, 1, (2, CLASSES, COUNT)).astype(np.float32),
        "boxes": boxes.astype(np.float32),
        "distances": rng.normal(0, 1, (2, 4 * BINS, COUNT)).astype(np.float32),
        "grid": rng.normal(0, 0.5, (2, 4, COUNT)).astype(np.float32),
        "objectness": rng.normal(0, 1, (2, 1, COUNT)).astype(np.float32),
        "targets": TARGETS,
    }


def build(names: list[str], make, values: dict[str, np.ndarray]) -> onnx.ModelProto:  # type: ignore[no-untyped-def]
    """A model whose inputs are these values and whose outputs `make` computes with a builder."""
    inputs = [
        ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(values[name].shape))
        for name in names
    ]
    graph = ir.Graph(inputs, [], nodes=[], opset_imports={"": 21}, name="loss")
    made = make(Builder(graph), *inputs)
    for index, value in enumerate(made if isinstance(made, tuple) else (made,)):
        value.name = f"out{index}"
        graph.outputs.append(value)
    return ir.to_proto(ir.Model(graph, ir_version=10))


def run(model: onnx.ModelProto, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    return ort.InferenceSession(model.SerializeToString()).run(None, feed)  # type: ignore[return-value]


def corners_of(boxes: np.ndarray) -> np.ndarray:
    return np.concatenate([boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2], axis=1)


def slow_iou(a: np.ndarray, b: np.ndarray) -> float:
    across = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
    down = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    areas = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1])
    return across * down / (areas - across * down + 1e-7)


def slow_assignment(scores: np.ndarray, corners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of one picture at a time: the object of each anchor (−1 for none), and how much it counts."""
    owners, weights = np.full((2, COUNT), -1), np.zeros((2, COUNT))
    for picture in range(2):
        quality, overlap, chosen = (np.zeros((2, COUNT)) for _ in range(3))
        alignment = np.zeros((2, COUNT))
        for index, (kind, *box) in enumerate(TARGETS[picture]):
            for anchor in range(COUNT):
                stride = ANCHORS.strides[anchor]
                away = max(
                    abs((box[0] + box[2]) / 2 - ANCHORS.centres[0, anchor])
                    / max((box[2] - box[0]) / 2, stride),
                    abs((box[1] + box[3]) / 2 - ANCHORS.centres[1, anchor])
                    / max((box[3] - box[1]) / 2, stride),
                )
                overlap[index, anchor] = slow_iou(corners[picture, :, anchor], np.asarray(box))
                quality[index, anchor] = overlap[index, anchor] + 0.01 * max(0.0, 1 - away)
                if away < 1 and kind >= 0:
                    score = scores[picture, int(kind), anchor] + 1e-3
                    alignment[index, anchor] = math.sqrt(score) * quality[index, anchor] ** 6
            best = np.argsort(-alignment[index])[:10]
            chosen[index, best] = alignment[index, best] > 0
        for anchor in range(COUNT):
            if chosen[:, anchor].any():
                owners[picture, anchor] = np.argmax(quality[:, anchor] * chosen[:, anchor])
        for index in range(2):
            own = owners[picture] == index
            if own.any():
                reach = max(overlap[index][own].max(), 0.1)
                weights[picture, own] = alignment[index][own] / alignment[index][own].max() * reach
    return owners, weights


@pytest.mark.parametrize("seed", range(3))
def test_anchors_answer_for_the_objects_they_are_aligned_with(seed: int) -> None:
    values = random_values(seed)
    scores, corners = 1 / (1 + np.exp(-values["logits"])), corners_of(values["boxes"])

    def make(op: Builder, *inputs: ir.Value) -> tuple[ir.Value, ...]:
        match = assign(op, *inputs, ANCHORS)
        return match.scores, match.classes, match.corners, match.weights, match.total

    feed = {"logits": scores, "boxes": corners, "targets": TARGETS}
    wanted, classes, boxes, weights, total = run(build(list(feed), make, feed), feed)
    owners, expected = slow_assignment(scores, corners)
    np.testing.assert_allclose(weights[:, 0], expected, rtol=1e-4, atol=1e-7)
    assert total == pytest.approx(max(expected.sum(), 1), rel=1e-5)
    for picture, anchor in np.ndindex(2, COUNT):
        owner = owners[picture, anchor]
        kind, *box = TARGETS[picture, owner] if owner >= 0 else (-1, 0, 0, 0, 0)
        np.testing.assert_array_equal(boxes[picture, :, anchor], box)
        np.testing.assert_array_equal(classes[picture, :, anchor], np.arange(CLASSES) == kind)
        np.testing.assert_allclose(
            wanted[picture, :, anchor].sum(), expected[picture, anchor], rtol=1e-4, atol=1e-7
        )
    assert (owners >= 0).sum() > 5


def test_ciou_is_its_definition() -> None:
    rng = np.random.default_rng(0)
    low = rng.uniform(0, 20, (2, 1, 2, 30))
    pairs = np.concatenate([low, low + rng.uniform(1, 20, low.shape)], axis=2).astype(np.float32)
    feed = {"one": pairs[0], "other": pairs[1]}
    (values,) = run(build(list(feed), ciou, feed), feed)
    for index in range(30):
        a, b = pairs[0, 0, :, index].astype(float), pairs[1, 0, :, index].astype(float)
        iou = slow_iou(a, b)
        centres = ((a[:2] + a[2:]) / 2 - (b[:2] + b[2:]) / 2) ** 2
        outer = (np.maximum(a[2:], b[2:]) - np.minimum(a[:2], b[:2])) ** 2
        turned = math.atan((b[2] - b[0]) / (b[3] - b[1])) - math.atan((a[2] - a[0]) / (a[3] - a[1]))
        shape = 4 / math.pi**2 * turned**2
        expected = iou - centres.sum() / outer.sum() - shape**2 / (1 - iou + shape)
        assert values[0, 0, index] == pytest.approx(expected, abs=2e-6)


FAMILIES = {
    "decoded": (["logits", "boxes", "distances"], decoded_loss),
    "decoded without distributions": (["logits", "boxes"], decoded_loss),
    "raw grid": (["logits", "grid", "objectness"], raw_grid_loss),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_is_that_of_the_loss_with_its_assignment_fixed(family: str) -> None:
    """Along −gradient the loss falls by step·|gradient|²: what the choice of anchors would add is not in it."""
    names, loss = FAMILIES[family]
    values = random_values()
    feed = {name: values[name] for name in [*names, "targets"]}
    model = build(list(feed), lambda op, *inputs: loss(op, *inputs, anchors=ANCHORS), feed)
    with_gradients = onward.gradient(model, of="out0", wrt=names)
    session = ort.InferenceSession(with_gradients.SerializeToString())
    outputs = dict(zip([value.name for value in session.get_outputs()], session.run(None, feed)))
    gradients = [array for name, array in outputs.items() if name != "out0"]
    assert len(gradients) == len(names)
    assert all(np.isfinite(array).all() and np.abs(array).max() > 0 for array in gradients)
    # the last layer's logits decide the assignment least: there the difference quotient is the gradient
    last = names[-1]
    if last == "distances":
        direction = gradients[-1] / np.linalg.norm(gradients[-1])
        step = 1e-2
        pair = [run(model, {**feed, last: feed[last] + sign * step * direction})[0] for sign in (1, -1)]
        assert (pair[0] - pair[1]) / (2 * step) == pytest.approx(
            float(np.linalg.norm(gradients[-1])), rel=1e-2
        )


def test_pictures_without_objects_teach_that_there_are_none() -> None:
    values = random_values()
    feed = {
        "logits": values["logits"],
        "boxes": values["boxes"],
        "targets": np.full((2, 1, 5), -1, np.float32),
    }
    model = build(list(feed), lambda op, *inputs: decoded_loss(op, *inputs, anchors=ANCHORS), feed)
    expected = 0.5 * np.logaddexp(0, feed["logits"].astype(float)).sum()
    assert run(model, feed)[0] == pytest.approx(expected, rel=1e-5)
