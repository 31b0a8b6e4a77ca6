"""Object detection from a published file to a deployed one: four families, drawn pictures, and wrong data."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import onward
from onward.errors import DataError, ModelError
from onward.graph.load import load_model
from onward.graph.passes.head.detector_head import detector_family

pytest.importorskip("PIL")
from PIL import Image

from tasks.detectors import SHAPES, SIDE, detr, drawn, picodet, yolov8, yolox

FAMILIES: dict[str, Callable[[], onnx.ModelProto]] = {
    "yolov8": yolov8,
    "yolox": yolox,
    "picodet": picodet,
    "detr": detr,
}
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
SETTINGS: dict[str, Any] = {"batch_size": 8, "warmup": 0, "learning_rate": 2e-2, "progress": False}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drawn(tmp_path_factory.mktemp("shapes") / "data", 32)


@pytest.fixture(scope="module", params=FAMILIES)
def trained(request: pytest.FixtureRequest, pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The family, what training gave, and the file that was exported."""
    folder = tmp_path_factory.mktemp(request.param)
    onnx.save(FAMILIES[request.param](), folder / "published.onnx")
    # queries learn who answers for what, and take longer
    epochs, data = (20, drawn(folder / "data", 96)) if request.param == "detr" else (14, pictures)
    result = onward.finetune(
        folder / "published.onnx", data, epochs=epochs, output_directory=folder / "run", **SETTINGS
    )
    result.export(folder / "shapes.onnx")
    return request.param, result, folder / "shapes.onnx"


def test_an_untrained_detector_learns_to_find_shapes(trained: Any) -> None:
    _, result, _ = trained
    assert result.task == "object-detection"
    assert result.metrics["mAP50"] > 0.5
    losses = [epoch["eval_loss"] for epoch in result.history.epochs]
    assert losses[-1] < losses[0] / 1.5


def test_the_deployed_file_has_the_original_signature_and_the_new_names(trained: Any) -> None:
    family, _, file = trained
    before, after = FAMILIES[family](), onnx.load(file)
    for old, new in ((before.graph.input, after.graph.input), (before.graph.output, after.graph.output)):
        assert [value.name for value in new] == [value.name for value in old]
        assert [len(value.type.tensor_type.shape.dim) for value in new] == [
            len(value.type.tensor_type.shape.dim) for value in old
        ]
    dims = [dim.dim_value for dim in after.graph.output[0].type.tensor_type.shape.dim[1:]]
    count = len(SHAPES)
    expected = {
        "yolov8": [4 + count, 80],
        "yolox": [80, 5 + count],
        "picodet": [64, count],
        "detr": [16, count + 1],
    }
    assert dims == expected[family]
    about = {entry.key: entry.value for entry in after.metadata_props}
    assert about["names"] == "{0: 'box', 1: 'ball'}"
    # where RapidLayout reads them from
    assert about.get("character") == ("box\nball" if family == "picodet" else None)
    assert json.loads(about["onward.classes"]) == list(SHAPES)


def test_load_gives_the_boxes_that_plain_onnxruntime_and_the_run_give(trained: Any, pictures: Path) -> None:
    family, result, file = trained
    picture = pictures / "images" / "1.png"
    answers = onward.load(file)(picture, threshold=0.02)
    assert answers and answers == result.predict(picture, threshold=0.02)
    pixels = np.asarray(Image.open(picture), np.float32).transpose(2, 0, 1)[None]
    session = ort.InferenceSession(file, providers=["CPUExecutionProvider"])
    mean, spread = (np.asarray(three, np.float32)[:, None, None] for three in IMAGENET)
    output, *others = session.run(
        None,
        {
            "images": {
                "yolov8": pixels / 255,
                "yolox": pixels[:, ::-1],
                "picodet": (pixels[:, ::-1] / 255 - mean) / spread,
                "detr": (pixels / 255 - mean) / spread,
            }[family]
        },
    )
    best = {
        "yolov8": lambda: output[0, 4:].max(),
        "yolox": lambda: (output[0, :, 5:] * output[0, :, 4:5]).max(),
        "picodet": lambda: max(output.max(), others[0].max()),
        "detr": lambda: (np.exp(output) / np.exp(output).sum(axis=2, keepdims=True))[..., :-1].max(),
    }[family]()
    assert answers[0]["score"] == pytest.approx(float(best), rel=1e-5)


def test_the_deployed_file_scores_as_the_run_did(trained: Any, pictures: Path) -> None:
    _, _, file = trained
    from onward.data.read import DataOptions

    evaluation = onward.evaluate_model(file, pictures, None, options=DataOptions(), batch_size=8)  # type: ignore[arg-type]
    assert evaluation.task == "object-detection"
    assert [row[0] for row in evaluation.classes] == list(SHAPES)
    assert evaluation.figures["mAP50"] > 0.5
    # every object of every class is counted
    lines = sum(len(file.read_text().splitlines()) for file in (pictures / "labels").iterdir())
    assert sum(row[3] for row in evaluation.classes) == lines


def test_data_that_numbers_the_classes_otherwise_scores_the_same(
    trained: Any, pictures: Path, tmp_path: Path
) -> None:
    import shutil

    from onward.data.read import DataOptions

    _, _, file = trained
    turned = tmp_path / "turned"
    shutil.copytree(pictures, turned)
    (turned / "classes.txt").write_text("ball\nbox")
    for labels in (turned / "labels").iterdir():
        lines = [line.split(" ", 1) for line in labels.read_text().splitlines()]
        labels.write_text("\n".join(f"{1 - int(kind)} {box}" for kind, box in lines))
    same, other = (
        onward.evaluate_model(file, data, None, options=DataOptions()).figures  # type: ignore[arg-type]
        for data in (pictures, turned)
    )
    assert other == same
    (turned / "classes.txt").write_text("ball\ncube")
    with pytest.raises(DataError, match="the data has the class 'cube', and the model's are box, ball"):
        onward.evaluate_model(file, turned, None, options=DataOptions())  # type: ignore[arg-type]


def test_the_report_shows_boxes_on_pictures(trained: Any) -> None:
    _, _, file = trained
    report = (file.parent / "run" / "report.html").read_text(encoding="utf-8")
    assert "<h1>Training of published.onnx</h1>" in report
    assert "The boxes of the data" in report and "data:image/png;base64" in report and "AP50-95" in report


def test_a_stopped_run_goes_on_with_the_same_numbers(tmp_path: Path, pictures: Path) -> None:
    onnx.save(yolov8(), tmp_path / "m.onnx")
    augmented: dict[str, Any] = {**SETTINGS, "augment": ["flip", "scale", "colour", "mosaic"]}

    def train(folder: str, epochs: int, *, resume: bool = False) -> list[float]:
        result = onward.finetune(
            tmp_path / "m.onnx",
            pictures,
            epochs=epochs,
            output_directory=tmp_path / folder,
            resume=resume,
            **augmented,
        )
        return [epoch["loss"] for epoch in result.history.epochs]

    whole = train("whole", 3)
    train("parts", 1)
    assert train("parts", 3, resume=True) == whole


def test_a_detector_for_int8_follows_its_float_self(trained: Any, pictures: Path, tmp_path: Path) -> None:
    _, _, file = trained
    # on all pictures: of the few that are held out each object counts a tenth
    settings: dict[str, Any] = {**SETTINGS, "epochs": 1, "learning_rate": 1e-4, "eval_data": pictures}
    before = onward.finetune(file, pictures, **{**settings, "learning_rate": 0.0}).metrics["mAP50"]
    result = onward.finetune(file, pictures, quantize="int8", **settings)
    assert abs(result.metrics["mAP50"] - before) < 0.05
    exported = result.export(tmp_path / "int8.onnx")
    assert exported.integers is not None and exported.size < file.stat().st_size
    picture = pictures / "images" / "1.png"
    assert onward.load(tmp_path / "int8.onnx")(picture) == result.predict(picture)


def test_a_detector_that_has_the_classes_keeps_its_layers(tmp_path: Path, pictures: Path) -> None:
    model = yolov8(classes=2)
    for entry in model.metadata_props:
        if entry.key == "names":
            entry.value = "{0: 'box', 1: 'ball'}"
    onnx.save(model, tmp_path / "m.onnx")
    result = onward.finetune(tmp_path / "m.onnx", pictures, epochs=1, **SETTINGS)
    assert any("own 2 classes go on" in note for note in result.notes)
    assert "class0_w" in result.state.trainable and "head.0.weight" not in result.state.trainable


def test_the_number_line_of_the_distributions_does_not_train(trained: Any) -> None:
    family, result, _ = trained
    if family == "yolov8":
        assert "line" not in result.state.trainable


def test_a_classifier_is_no_detector(tmp_path: Path, pictures: Path) -> None:
    import onnx.parser

    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]> net (float[n, 3, {SIDE}, {SIDE}] x) => (float[n, 4] y)
        <float[4, 3, 1, 1] w> {{ c = Conv(x, w)  g = GlobalAveragePool(c)  y = Flatten(g) }}"""
    )
    del model.graph.initializer[:]
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((4, 3, 1, 1), np.float32), "w"))
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(ModelError, match="ends like no detector"):
        onward.finetune(tmp_path / "m.onnx", pictures, progress=False)


@pytest.mark.parametrize(
    ("package", "path", "family"),
    [
        ("nudenet", "320n.onnx", "yolov8"),
        ("ddddocr", "common_det.onnx", "yolox"),
        ("rapid_layout", "models/layout_cdla.onnx", "picodet"),
    ],
)
def test_published_files_are_recognized(package: str, path: str, family: str) -> None:
    import importlib.util

    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    assert detector_family(load_model(Path(spec.origin).parent / path, by_reference=True)) == family


def _label(folder: Path, text: str, number: int = 3) -> None:
    (folder / "labels" / f"{number}.txt").write_text(text)


MISTAKES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a box outside its image": (lambda f: _label(f, "0 .5 .5 .2 .2\n1 .9 .5 .5 .2"), r"3\.txt', line 2: .*outside"),
    "a number over 1": (lambda f: _label(f, "0 150 60 20 20"), r"3\.txt', line 1: .*outside"),
    "a class that is not in the list": (lambda f: _label(f, "\n5 .5 .5 .2 .2"), r"3\.txt', line 2: the class is 5"),
    "a line that is no box": (lambda f: _label(f, "0 .5 .5"), r"3\.txt', line 1: '0 \.5 \.5' is no box"),
    "a polygon": (lambda f: _label(f, "0 .1 .1 .2 .2 .3 .3 .1 .3"), r"3\.txt', line 1: .* is no box.*polygon"),
    "a box without area": (lambda f: _label(f, "0 .5 .5 0 .2"), r"3\.txt', line 1: the box has no area"),
    "a picture that cannot be read": (lambda f: (f / "images" / "3.png").write_bytes(b"no"), r"3\.png"),
    "no box at all": (
        lambda f: [_label(f, "", n) for n in range(4)] and None,
        "none of the 4 images of .* has a box",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_labels_are_one_error_that_says_where(tmp_path: Path, mistake: str) -> None:
    folder = drawn(tmp_path / "data", 4)
    spoil, message = MISTAKES[mistake]
    spoil(folder)
    onnx.save(yolov8(), tmp_path / "m.onnx")
    with pytest.raises(DataError) as error:
        onward.finetune(tmp_path / "m.onnx", folder, progress=False, output_directory=tmp_path / "run")
    import re

    assert re.search(message, f"{error.value} {getattr(error.value, 'hint', '')}"), error.value
    assert not (tmp_path / "run").exists()


def test_the_command_line_trains_draws_and_evaluates(tmp_path: Path, pictures: Path) -> None:
    from cli.conftest import call

    onnx.save(yolov8(), tmp_path / "m.onnx")
    shapes, drawings = tmp_path / "shapes.onnx", tmp_path / "drawn"
    trained = call(
        "finetune", tmp_path / "m.onnx", "--data", pictures, "--output", shapes, "--epochs", 1, "--quantize", "int8",
        "--json",
    )  # fmt: skip
    assert trained.json["task"] == "object-detection" and "mAP50" in trained.json["metrics"]
    found = call("infer", shapes, "--data", pictures / "images", "--save", drawings, "--json").json
    assert found["samples"] == len(list(drawings.glob("*.png"))) == 32
    assert all(set(box) == {"score", "label", "box"} for answer in found["answers"] for box in answer)
    call("infer", shapes, "--data", pictures / "images", "--save", drawings, code=1)  # it is there already
    call("infer", shapes, "--data", pictures / "labels", code=1)
    scores = call("evaluate", shapes, "--data", pictures, "--json").json
    assert scores["task"] == "object-detection" and {"mAP50", "mAP50_95"} <= set(scores)


def test_options_of_classifiers_are_refused(tmp_path: Path, pictures: Path) -> None:
    from onward.tasks.check_options import OptionError

    onnx.save(yolov8(), tmp_path / "m.onnx")
    with pytest.raises(OptionError, match="label_smoothing is no option of object-detection"):
        onward.finetune(tmp_path / "m.onnx", pictures, label_smoothing=0.1)
    with pytest.raises(DataError, match="no augmentation is called 'mixup'"):
        onward.finetune(tmp_path / "m.onnx", pictures, augment=["mixup"], progress=False)


def test_boxes_lie_on_the_picture_that_was_given_however_long_it_is(tmp_path: Path) -> None:
    """What goes into the model's square and back again is where it was."""
    from onward.data.boxes import find_boxed_pictures
    from onward.data.preprocess import image, letterbox

    folder = drawn(tmp_path / "data", 3, size=(150, 70))
    for at in ("centre", "corner"):
        settings = {
            "size": {"height": SIDE, "width": SIDE},
            "letterbox": at,
            "do_rescale": False,
            "do_normalize": False,
        }
        for one in find_boxed_pictures(folder, None).pictures:
            down, across, top, left = letterbox(one.size, settings)
            pixels = image(Image.open(one.file), settings)
            for kind, *corners in one.boxes:
                x1, y1, x2, y2 = np.asarray(corners) * [across, down, across, down] + [left, top, left, top]
                middle = pixels[:, round((y1 + y2) / 2), round((x1 + x2) / 2)]
                assert middle.argmax() == (0 if kind == 0 else 2)  # boxes are red, balls are blue
