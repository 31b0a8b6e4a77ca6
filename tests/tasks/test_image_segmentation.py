"""Segmentation from an exported network to a deployed file: drawn shapes with masks, and wrong masks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest

import onward
from onward.data.masks import IGNORED
from onward.data.read import DataOptions
from onward.errors import DataError, ModelError
from onward.tasks.scores import resized
from onward.tasks.segmenter import best_classes

pytest.importorskip("PIL")
from PIL import Image, ImageDraw

SIDE = 32
CLASSES = ("ground", "box", "ball")
SETTINGS: dict[str, Any] = {"batch_size": 4, "warmup": 0, "learning_rate": 2e-2, "progress": False}


def network(classes: int = 5, end: str = "Softmax<axis=1>", *, half: bool = True) -> onnx.ModelProto:
    """Convolutions whose scores have half the picture's side, or are enlarged to it; softmax or sigmoid at the end."""
    enlarge = "" if half else ' k = Resize<mode="linear">(s, , scales)'
    side = SIDE // 2 if half else SIDE
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]>
        net (float[n, 3, {SIDE}, {SIDE}] pixels) => (float[n, {classes}, {side}, {side}] probabilities)
        <float[4] scales = {{1, 1, 2, 2}}> {{
        a = Conv<strides=[2, 2], pads=[1, 1, 1, 1]>(pixels, a_w, a_b)  b = Relu(a)
        c = Conv<pads=[1, 1, 1, 1]>(b, c_w, c_b)  d = Relu(c)
        e = Conv<pads=[2, 2, 2, 2], dilations=[2, 2]>(d, e_w, e_b)  f = Relu(e)
        s = Conv(f, s_w, s_b) {enlarge} probabilities = {end}({"s" if half else "k"}) }}"""
    )
    rng = np.random.default_rng(0)
    shapes = {"a": (12, 3, 3, 3), "c": (12, 12, 3, 3), "e": (12, 12, 3, 3), "s": (classes, 12, 1, 1)}
    for name, shape in shapes.items():
        weight = rng.normal(0, (2 / np.prod(shape[1:])) ** 0.5, shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(weight, f"{name}_w"))
        model.graph.initializer.append(
            onnx.numpy_helper.from_array(np.zeros(shape[0], np.float32), f"{name}_b")
        )
    onnx.checker.check_model(model)
    return model


def drawn(folder: Path, pictures: int, *, classes: int = 3, ignored: bool = False) -> Path:
    """Boxes and balls on dark noise, and masks of their class numbers."""
    rng = np.random.default_rng(0)
    for part in ("images", "masks"):
        (folder / part).mkdir(parents=True)
    for number in range(pictures):
        picture = Image.fromarray(rng.integers(0, 80, (SIDE, SIDE, 3), np.uint8))
        mask = Image.new("L", (SIDE, SIDE))
        for kind in (1, 2)[: classes - 1]:
            x, y, w, h = (int(n) for n in (*rng.integers(0, 16, 2), *rng.integers(8, 16, 2)))
            for canvas, fill in ((picture, (240, 60, 60) if kind == 1 else (60, 60, 240)), (mask, kind)):
                shape = "rectangle" if kind == 1 else "ellipse"
                getattr(ImageDraw.Draw(canvas), shape)((x, y, x + w, y + h), fill=fill)
        if ignored:
            ImageDraw.Draw(mask).rectangle((0, 0, SIDE, 2), fill=IGNORED)
        picture.save(folder / "images" / f"{number}.png")
        mask.save(folder / "masks" / f"{number}.png")
    (folder / "classes.txt").write_text("\n".join(CLASSES[:classes]))
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The data, what training gave, and the file that was exported."""
    folder = tmp_path_factory.mktemp("segmentation")
    data = drawn(folder / "data", 32, ignored=True)
    onnx.save(network(), folder / "published.onnx")
    result = onward.finetune(
        folder / "published.onnx", data, epochs=14, output_directory=folder / "run", **SETTINGS
    )
    result.export(folder / "shapes.onnx")
    return data, result, folder / "shapes.onnx"


def test_a_network_learns_the_classes_of_pixels(trained: Any) -> None:
    _, result, _ = trained
    assert result.task == "image-segmentation"
    assert result.classes == list(CLASSES)
    assert result.metrics["miou"] > 0.8


def test_the_deployed_file_has_the_original_signature(trained: Any) -> None:
    _, _, file = trained
    model = onnx.load(file)
    assert [value.name for value in model.graph.input] == ["pixels"]
    assert [value.name for value in model.graph.output] == ["probabilities"]
    dims = [dim.dim_value for dim in model.graph.output[0].type.tensor_type.shape.dim]
    assert dims[1:] == [3, SIDE // 2, SIDE // 2]
    probabilities = ort.InferenceSession(file).run(
        None, {"pixels": np.zeros((2, 3, SIDE, SIDE), np.float32)}
    )[0]
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, atol=1e-5)  # the softmax is still there


def test_load_gives_masks_of_the_pictures_own_size(trained: Any, tmp_path: Path) -> None:
    data, result, file = trained
    Image.open(data / "images" / "1.png").resize((50, 70)).save(tmp_path / "large.png")
    segment = onward.load(file)
    answers = segment(tmp_path / "large.png")
    assert {answer["label"] for answer in answers} <= set(CLASSES)
    assert all(answer["mask"].shape == (70, 50) for answer in answers)
    covered = np.sum([answer["mask"] == 255 for answer in answers], axis=0)
    np.testing.assert_array_equal(covered, 1)  # every pixel has one class
    again = result.predict(tmp_path / "large.png")
    for one, other in zip(answers, again, strict=True):
        np.testing.assert_array_equal(one["mask"], other["mask"])
    assert segment.draw(tmp_path / "large.png").shape == (70, 50, 3)


def test_the_deployed_file_scores_each_class(trained: Any) -> None:
    data, _, file = trained
    evaluation = onward.evaluate_model(file, data, None, options=DataOptions(), batch_size=8)  # type: ignore[arg-type]
    assert evaluation.task == "image-segmentation"
    assert [row[0] for row in evaluation.classes] == list(CLASSES)
    assert evaluation.figures["miou"] > 0.8
    assert evaluation.figures["miou"] == pytest.approx(np.mean([row[1] for row in evaluation.classes]))
    # pixels without a class are not counted
    assert sum(row[3] for row in evaluation.classes) == 32 * SIDE * (SIDE - 3)


def test_the_report_lays_masks_over_pictures(trained: Any) -> None:
    _, _, file = trained
    report = (file.parent / "run" / "report.html").read_text(encoding="utf-8")
    assert "The mask (left)" in report and "data:image/png;base64" in report and "IoU" in report


@pytest.mark.parametrize("half", [True, False])
def test_one_channel_of_probabilities_stays_one_channel(tmp_path: Path, half: bool) -> None:
    data = drawn(tmp_path / "data", 16, classes=2)
    onnx.save(network(1, "Sigmoid", half=half), tmp_path / "m.onnx")
    result = onward.finetune(tmp_path / "m.onnx", data, epochs=10, **SETTINGS)
    assert result.metrics["miou"] > 0.7
    result.export(tmp_path / "out.onnx")
    output = onnx.load(tmp_path / "out.onnx").graph.output[0]
    assert output.type.tensor_type.shape.dim[1].dim_value == 1
    answers = onward.load(tmp_path / "out.onnx")(data / "images" / "0.png")
    assert [answer["label"] for answer in answers] == ["ground", "box"]


def test_masks_of_0_and_255_are_two_classes(tmp_path: Path) -> None:
    data = drawn(tmp_path / "data", 8, classes=2)
    for file in (data / "masks").iterdir():
        Image.fromarray(np.asarray(Image.open(file)) * np.uint8(255)).save(file)
    onnx.save(network(2), tmp_path / "m.onnx")
    result = onward.finetune(tmp_path / "m.onnx", data, epochs=1, **SETTINGS)
    assert result.classes == ["ground", "box"]
    assert any("255 is class 1" in note for note in result.notes)


def test_a_stopped_run_goes_on_with_the_same_numbers(tmp_path: Path) -> None:
    data = drawn(tmp_path / "data", 12)
    onnx.save(network(), tmp_path / "m.onnx")
    augmented: dict[str, Any] = {**SETTINGS, "augment": ["flip", "crop", "scale", "colour"]}

    def train(folder: str, epochs: int, *, resume: bool = False) -> list[float]:
        result = onward.finetune(
            tmp_path / "m.onnx",
            data,
            epochs=epochs,
            output_directory=tmp_path / folder,
            resume=resume,
            **augmented,
        )
        return [epoch["loss"] for epoch in result.history.epochs]

    whole = train("whole", 3)
    train("parts", 1)
    assert train("parts", 3, resume=True) == whole


def _mask(folder: Path, array: np.ndarray) -> None:
    Image.fromarray(array).save(folder / "masks" / "3.png")


MISTAKES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "another size": (
        lambda f: _mask(f, np.zeros((10, 12), np.uint8)),
        r"3\.png' has 10 × 12 pixels, and its image .*3\.png' 32 × 32",
    ),
    "a class out of range": (
        lambda f: _mask(f, np.pad(np.full((1, 1), 9, np.uint8), ((4, 27), (7, 24)))),
        r"3\.png' has class 9 \(row 4, column 7\), and .*classes\.txt' has 3: ground, box, ball",
    ),
    "colours": (lambda f: _mask(f, np.zeros((SIDE, SIDE, 3), np.uint8)), r"3\.png' has colours"),
    "a missing mask": (lambda f: (f / "masks" / "3.png").unlink(), r"1 of 4 images of .* have no mask: .*3\.png"),
    "no PNG": (lambda f: (f / "masks" / "3.png").write_bytes(b"no"), r"cannot read the mask .*3\.png"),
    "no picture": (
        lambda f: [file.unlink() for file in (f / "images").iterdir()],
        r"no image with a mask in",
    ),
    "one class only": (
        lambda f: [(f / "classes.txt").unlink(), *(
            Image.new("L", (SIDE, SIDE)).save(file) for file in (f / "masks").iterdir()
        )],
        "have one class only",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_masks_are_one_error_that_says_where(tmp_path: Path, mistake: str) -> None:
    data = drawn(tmp_path / "data", 4)
    spoil, message = MISTAKES[mistake]
    spoil(data)
    onnx.save(network(), tmp_path / "m.onnx")
    with pytest.raises(DataError, match=message):
        onward.finetune(
            tmp_path / "m.onnx",
            data,
            task="image-segmentation",
            progress=False,
            output_directory=tmp_path / "run",
        )
    assert not (tmp_path / "run").exists()


def test_class_numbers_as_the_output_cannot_be_trained(tmp_path: Path) -> None:
    model = network()
    model.graph.node.append(onnx.helper.make_node("ArgMax", ["probabilities"], ["classes"], axis=1))
    del model.graph.output[:]
    model.graph.output.append(
        onnx.helper.make_tensor_value_info("classes", onnx.TensorProto.INT64, ["n", 1, 16, 16])
    )
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(ModelError, match="the classes of pixels, not their scores") as error:
        onward.finetune(tmp_path / "m.onnx", drawn(tmp_path / "data", 4), progress=False)
    assert "argmax" in str(error.value.hint)


def test_the_deployed_metadata_names_the_classes(trained: Any) -> None:
    _, _, file = trained
    about = {entry.key: entry.value for entry in onnx.load(file).metadata_props}
    assert json.loads(about["onward.classes"]) == list(CLASSES)
    assert json.loads(about["onward.task"])["task"] == "image-segmentation"


@pytest.mark.parametrize(("mean", "fresh"), [(0.0, True), (0.25, False)])
def test_statistics_that_have_seen_no_data_follow_the_batches(mean: float, fresh: bool) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]>
        net (float[n, 3, 8, 8] pixels) => (float[n, 2, 8, 8] scores) {
        a = BatchNormalization(pixels, scale, bias, mean, spread)  scores = Conv(a, w) }"""
    )
    arrays = {"scale": np.ones(3), "bias": np.zeros(3), "mean": np.full(3, mean), "spread": np.ones(3)}
    arrays["w"] = np.random.default_rng(0).normal(size=(2, 3, 1, 1))
    for name, array in arrays.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    pictures = np.random.default_rng(0).normal(3, 1, (8, 3, 8, 8)).astype(np.float32)
    masks = (pictures[:, 0] > 3).astype(np.uint8)
    result = onward.finetune(model, (pictures, masks), task="image-segmentation", epochs=1, progress=False)
    assert any("batch norms have seen no data" in note for note in result.notes) is fresh
    assert bool(np.abs(np.asarray(result.state.frozen["mean"]) - mean).max() > 0.1) is fresh


def test_probabilities_of_fewer_pixels_have_the_classes_of_their_scores() -> None:
    scores = np.random.default_rng(0).normal(0, 4, (3, 9, 7)).astype(np.float32)
    softmax = np.exp(scores) / np.exp(scores).sum(axis=0)
    assert np.array_equal(best_classes(softmax, (40, 30)), best_classes(scores, (40, 30)))
    single = scores[:1]
    sigmoid = 1 / (1 + np.exp(-single))
    assert np.array_equal(best_classes(sigmoid, (40, 30)), best_classes(single, (40, 30)))
    # between pixels the two differ
    assert not np.array_equal(resized(softmax, (40, 30)).argmax(axis=0), best_classes(scores, (40, 30)))
