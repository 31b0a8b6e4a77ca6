"""Detectors whose boxes are queries: the assignment is the best one, the loss is DETR's, and an export trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

import onward
from onward.errors import ModelError
from onward.graph.builder import Builder
from onward.losses.queries import match, set_loss
from tasks.detectors import SIDE, detr, drawn


def _session(inputs: dict[str, list[Any]], build: Any) -> ort.InferenceSession:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="g")
    op = Builder(graph)
    op.add_output(build(op, *(op.input(name, ir.DataType.FLOAT, dims) for name, dims in inputs.items())))
    proto = ir.to_proto(ir.Model(graph, ir_version=10))
    return ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])


RIVALRIES: dict[str, Any] = {
    "costs of no order": lambda rng, shape: rng.normal(size=shape),
    "queries alike": lambda rng, shape: rng.normal(size=shape) * 1e-4,
    "objects alike": lambda rng, shape: rng.normal(size=(shape[0], 1, shape[2])) + rng.normal(size=shape) * 0.01,
    "one good query less than objects": lambda rng, shape: (
        (np.arange(shape[2]) < shape[1] - 1) * -3.0 + rng.normal(size=shape) * 1e-3
    ),
    "all the same": lambda rng, shape: np.zeros(shape),
}  # fmt: skip


@pytest.mark.parametrize("rivalry", RIVALRIES)
def test_the_assignment_costs_as_little_as_scipys(rivalry: str) -> None:
    optimize = pytest.importorskip("scipy.optimize")
    rng = np.random.default_rng(0)
    cost = RIVALRIES[rivalry](rng, (6, 9, 20)).astype(np.float32)
    counts = np.array([9, 0, 1, 5, 9, 2])
    exists = (np.arange(9)[None, :, None] < counts[:, None, None]).astype(np.float32)
    session = _session({"cost": ["n", "m", "q"], "exists": ["n", "m", 1]}, match)
    owner = session.run(None, {"cost": cost, "exists": exists})[0]
    assert np.array_equal(owner.sum(axis=2), exists[..., 0]) and owner.sum(axis=1).max() <= 1
    for one, taken, count in zip(cost, owner, counts):
        rows, columns = optimize.linear_sum_assignment(one[:count])
        assert (one * taken).sum() == pytest.approx(one[rows, columns].sum(), abs=1e-4)


def test_the_loss_is_that_of_transformers() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("scipy")
    from transformers.loss.loss_for_object_detection import ForObjectDetectionLoss

    rng = np.random.default_rng(0)
    logits = rng.normal(size=(4, 12, 4)).astype(np.float32)
    boxes = rng.uniform(0.1, 0.9, (4, 12, 4)).astype(np.float32)
    targets, labels = np.full((4, 5, 5), -1, np.float32), []
    for row, count in enumerate((5, 0, 1, 3)):
        own = rng.uniform(0.1, 0.9, (count, 4)).astype(np.float32)
        kinds = rng.integers(0, 3, count)
        corners = np.concatenate([own[:, :2] - own[:, 2:] / 2, own[:, :2] + own[:, 2:] / 2], axis=1)
        targets[row, :count] = np.concatenate([kinds[:, None], corners * [100, 50, 100, 50]], axis=1)
        labels.append({"class_labels": torch.tensor(kinds), "boxes": torch.tensor(own)})
    config = transformers.DetrConfig(num_labels=3, num_queries=12, auxiliary_loss=False)
    parts = [torch.tensor(array, requires_grad=True) for array in (logits, boxes)]
    reference = ForObjectDetectionLoss(parts[0], labels, torch.device("cpu"), parts[1], config)[0]
    session = _session(
        {"logits": ["n", 12, 4], "boxes": ["n", 12, 4], "targets": ["n", "m", 5]},
        lambda op, *values: set_loss(op, *values, size=(50, 100)),
    )
    loss = session.run(None, {"logits": logits, "boxes": boxes, "targets": targets})[0]
    assert float(loss) == pytest.approx(reference.item(), rel=1e-5)


def test_an_export_of_hugging_face_trains_and_goes_where_the_old_one_was(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    from onward.export import from_transformers

    names = {0: "cat", 1: "dog", 2: "cow"}
    config = transformers.YolosConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, image_size=[SIDE, SIDE],
        patch_size=16, num_detection_tokens=6, id2label=names, label2id={name: i for i, name in names.items()},
    )  # fmt: skip
    model = transformers.YolosForObjectDetection(config).eval()
    model.save_pretrained(tmp_path / "yolos")
    transformers.YolosImageProcessorPil(size={"height": SIDE, "width": SIDE}).save_pretrained(
        tmp_path / "yolos"
    )
    from_transformers(tmp_path / "yolos", "object-detection", tmp_path / "published")
    data = drawn(tmp_path / "data", 16)
    result = onward.finetune(
        tmp_path / "published", data, epochs=6, batch_size=8, learning_rate=5e-3, warmup=0, progress=False
    )
    losses = [epoch["loss"] for epoch in result.history.epochs]
    assert result.task == "object-detection" and losses[-1] < losses[0]
    result.export(tmp_path / "mine.onnx")
    outputs = {
        value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim[1:]]
        for value in onnx.load(tmp_path / "mine.onnx").graph.output
    }
    assert outputs == {"logits": [6, 3], "pred_boxes": [6, 4]}
    picture = data / "images" / "0.png"
    boxes = onward.load(tmp_path / "mine.onnx")(picture, threshold=0.1)
    assert boxes and boxes == result.predict(picture, threshold=0.1)
    assert {box["label"] for box in boxes} <= {"box", "ball"}


def test_the_row_for_nothing_stays(tmp_path: Path) -> None:
    onnx.save(detr(), tmp_path / "m.onnx")
    result = onward.finetune(
        tmp_path / "m.onnx", drawn(tmp_path / "data", 8), epochs=1, learning_rate=0.0, progress=False
    )
    old = next(one for one in detr().graph.initializer if one.name == "class_w")
    new = result.state.trainable["head.weight"]
    assert np.array_equal(np.asarray(new)[:, -1], onnx.numpy_helper.to_array(old)[:, -1])


def test_a_detector_without_a_class_for_nothing_is_one_error(tmp_path: Path) -> None:
    model = detr(classes=2)
    for key, value in (("task", "detect"), ("names", "{0: 'a', 1: 'b', 2: 'c'}")):
        model.metadata_props.add(key=key, value=value)
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(ModelError, match="3 classes are scored each by itself"):
        onward.finetune(tmp_path / "m.onnx", drawn(tmp_path / "data", 4), progress=False)


def test_a_detector_that_takes_more_than_pictures_is_one_error(tmp_path: Path) -> None:
    model = detr()
    model.graph.input.append(
        onnx.helper.make_tensor_value_info("pixel_mask", onnx.TensorProto.INT64, ["n", 4, 4])
    )
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(ModelError, match="takes pictures alone, and this one 'pixel_mask' too"):
        onward.finetune(tmp_path / "m.onnx", drawn(tmp_path / "data", 4), progress=False)


def test_of_more_objects_than_queries_the_last_get_none() -> None:
    session = _session({"cost": ["n", "m", "q"], "exists": ["n", "m", 1]}, match)
    cost = np.random.default_rng(0).normal(size=(2, 5, 3)).astype(np.float32)
    exists = np.ones((2, 5, 1), np.float32)
    exists[0, 1] = 0
    owner = session.run(None, {"cost": cost, "exists": exists})[0]
    assert owner.sum(axis=2).tolist() == [[1, 0, 1, 1, 0], [1, 1, 1, 0, 0]] and owner.sum(axis=1).max() == 1
