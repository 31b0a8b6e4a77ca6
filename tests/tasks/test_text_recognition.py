"""Lines of text are read: a reader of any ending learns new characters and keeps the old ones; wrong data is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

pytest.importorskip("PIL")
from PIL import Image
from typer.testing import CliRunner

import onward
from onward.cli.app import app
from onward.data.read import DataOptions
from onward.errors import DataError, ModelError
from onward.pipeline.evaluate import evaluate_model
from onward.tasks.text_recognition import edit_distance, join_characters, text_figures
from small_models import with_weights
from tasks.stopped_runs import same_weights_when_resumed

# each character is a block of eight columns: which of its four rows are dark
GLYPHS = {"a": 0b0001, "b": 0b0110, "c": 0b1010, "d": 0b1111, "e": 0b0100, " ": 0b0000}
ENDINGS = {
    "softmax": "(float[N, T, C] y) { ROWS y = Softmax<axis=2>(s) }",
    "scores": "(float[N, T, C] y) { ROWS y = Identity(s) }",
    "arg-max": "(int64[N, T] y) { ROWS p = Softmax<axis=2>(s) y = ArgMax<axis=2, keepdims=0>(p) }",
}


def reader(ending: str = "softmax", characters: str = "abc") -> onnx.ModelProto:
    """[N, 3, 8, W] → scores of blank, the characters and a space for every four columns."""
    rows = """c = Conv<strides=[8, 4], kernel_shape=[8, 8], pads=[0, 2, 0, 2]>(x, w, b) r = Relu(c) q = Squeeze(r, two)
        t = Transpose<perm=[0, 2, 1]>(q) m = MatMul(t, v) s = Add(m, z)"""
    size = len(characters) + 2
    text = ENDINGS[ending].replace("ROWS", rows).replace("C]", f"{size}]")
    model = with_weights(
        f"net (float[N, 3, 8, W] x) => {text}", w=(24, 3, 8, 8), b=(24,), v=(24, size), z=(size,)
    )
    for tensor in model.graph.initializer:
        if tensor.name == "w":
            tensor.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor) * 0.2, "w"))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([2]), "two"))
    entry = model.metadata_props.add()
    entry.key, entry.value = "character", "\n".join(characters)
    return model


def draw(text: str, scale: int = 1) -> Image.Image:
    pixels = np.full((8, 8 * len(text), 3), 255, np.uint8)
    for index, character in enumerate(text):
        for row in range(4):
            if GLYPHS[character] >> row & 1:
                pixels[2 * row : 2 * row + 2, 8 * index + 1 : 8 * index + 7] = 0
    return Image.fromarray(pixels).resize((8 * len(text) * scale, 8 * scale), 0)


def write_lines(folder: Path, characters: str, count: int = 60, seed: int = 0) -> Path:
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    lines = []
    for number in range(count):
        text = "".join(rng.choice(list(characters), int(rng.integers(2, 7))))
        text = text.strip() or characters[0]
        draw(text, scale=int(rng.integers(1, 3))).save(folder / f"{number}.png")
        lines.append(f"{number}.png\t{text}")
    (folder / "rec_gt.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder


def teach(model: Path, data: Any, **options: Any) -> Any:
    return onward.finetune(
        model, data, progress=False, **{"epochs": 10, "batch_size": 8, "learning_rate": 0.02, **options}
    )


def save(model: onnx.ModelProto, path: Path) -> Path:
    onnx.save(model, path)
    return path


def test_a_reader_learns_new_characters_and_its_file_says_them(tmp_path: Path) -> None:
    path = save(reader(), tmp_path / "reader.onnx")
    result = teach(path, write_lines(tmp_path / "lines", "abcde"))
    assert result.task == "text-recognition"
    assert result.classes == ["<blank>", "a", "b", "c", "d", "e", " "]
    assert result.metrics["cer"] < 0.02 and result.metrics["exact_match"] > 0.9
    result.export(tmp_path / "mine.onnx")
    proto = onnx.load(tmp_path / "mine.onnx")
    assert [value.name for value in proto.graph.output] == ["y"]
    about = {entry.key: entry.value for entry in proto.metadata_props}
    assert about["character"].split("\n") == ["a", "b", "c", "d", "e"]
    draw("decade", scale=3).save(tmp_path / "word.png")
    loaded = onward.load(tmp_path / "mine.onnx")
    assert loaded(str(tmp_path / "word.png"))["text"] == "decade" == result.predict(draw("decade"))["text"]
    session = ort.InferenceSession(tmp_path / "mine.onnx", providers=["CPUExecutionProvider"])
    picture = np.zeros((1, 3, 8, 64), np.float32)
    np.testing.assert_allclose(session.run(None, {"x": picture})[0].sum(axis=2), 1, atol=1e-5)
    said = CliRunner().invoke(
        app, ["infer", str(tmp_path / "mine.onnx"), "--data", str(tmp_path / "word.png")]
    )
    assert said.exit_code == 0 and "decade" in said.stdout
    fresh = write_lines(tmp_path / "fresh", "abcde", count=30, seed=4)
    evaluation = evaluate_model(tmp_path / "mine.onnx", fresh, None, options=DataOptions())  # type: ignore[arg-type]
    assert evaluation.figures["cer"] < 0.05 and evaluation.samples == 30


@pytest.mark.parametrize("ending", sorted(ENDINGS))
def test_every_ending_is_opened_and_stays_in_the_written_file(ending: str, tmp_path: Path) -> None:
    (tmp_path / "letters.txt").write_text("a\nb\nc\n \n", encoding="utf-8")
    model = reader(ending)
    del model.metadata_props[:]
    path = save(model, tmp_path / "reader.onnx")
    result = teach(
        path, write_lines(tmp_path / "lines", "abc"), characters=tmp_path / "letters.txt", epochs=25
    )
    assert result.metrics["cer"] < 0.05
    result.export(tmp_path / "mine.onnx")
    before, after = (onnx.load(file).graph.output[0] for file in (path, tmp_path / "mine.onnx"))
    assert before.type.tensor_type.elem_type == after.type.tensor_type.elem_type and after.name == "y"
    assert onward.load(tmp_path / "mine.onnx")(draw("cab"))["text"] == "cab"


def test_rows_of_characters_that_stay_are_kept(tmp_path: Path) -> None:
    from onward.pipeline.evaluate import open_source
    from onward.tasks import find_task

    path, task = save(reader(), tmp_path / "reader.onnx"), find_task("text-recognition")
    old = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in reader().graph.initializer}
    for alphabet, characters, rows in (
        ("extend", "ade", [0, 1, 2, 3, None, None, 4]),
        ("replace", "ce", [0, 3, None, 4]),
        ("keep", "ab", [0, 1, 2, 3, 4]),
    ):
        data = write_lines(tmp_path / alphabet, characters, count=20)
        options = task.options({"alphabet": alphabet})
        loaded = task.functions.read(data, open_source(path), options)
        adapted = task.functions.adapt(open_source(path), loaded, options)
        new = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in adapted.model.graph.initializer}
        weight = new.get("head.weight", new.get("v"))
        bias = new.get("head.bias", new.get("z"))
        assert weight.shape == (24, len(rows)) and bias.shape == (len(rows),)
        for column, row in enumerate(rows):
            if row is not None:
                assert np.array_equal(weight[:, column], old["v"][:, row]) and bias[column] == old["z"][row]
            else:
                assert bias[column] == old["z"].min()


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (
            "0.png\tab\n1.png\tadb\n",
            {"alphabet": "keep"},
            "line 2: the text 'adb' has 'd', which is not in the alphabet",
        ),
        ("0.png\tab\n1.png ab\n", {}, "line 2: there is no tab"),
        ("0.png\tab\n9.png\tab\n", {}, "line 2: no file"),
        ("0.png\tab\n1.png\t\n", {}, "line 2: '1.png' has no text"),
        ("\n\n", {}, "has no line"),
        ("0.png\tab\n1.png\tba\n", {"height": 32}, "takes pictures of 8 pixels"),
    ],
)
def test_a_wrong_list_is_one_error_that_names_the_line(
    text: str, options: Any, message: str, tmp_path: Path
) -> None:
    for number in range(2):
        draw("ab").save(tmp_path / f"{number}.png")
    (tmp_path / "rec_gt.txt").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        teach(
            save(reader(), tmp_path / "reader.onnx"),
            tmp_path / "rec_gt.txt",
            task="text-recognition",
            **options,
        )


def test_a_broken_picture_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "0.png").write_bytes(b"no picture")
    (tmp_path / "rec_gt.txt").write_text("0.png\tab\n")
    with pytest.raises(DataError, match="line 1: cannot read the image"):
        teach(save(reader(), tmp_path / "reader.onnx"), tmp_path)


def test_a_list_of_another_model_is_refused(tmp_path: Path) -> None:
    model = reader("scores")
    del model.metadata_props[:]
    (tmp_path / "letters.txt").write_text("a\nb\n")
    data = write_lines(tmp_path / "lines", "ab", count=10)
    with pytest.raises(ModelError, match="the model has 5 classes, and the list has 3 with the blank"):
        teach(save(model, tmp_path / "m.onnx"), data, characters=tmp_path / "letters.txt")
    with pytest.raises(DataError, match="does not say which character"):
        teach(tmp_path / "m.onnx", data)


def test_a_reader_that_takes_more_than_its_lines_is_one_error(tmp_path: Path) -> None:
    model = reader()
    model.graph.input.append(onnx.helper.make_tensor_value_info("lengths", onnx.TensorProto.INT64, ["N"]))
    data = write_lines(tmp_path / "lines", "ab", count=4)
    with pytest.raises(ModelError, match="has one input, and this one takes 'lengths' too"):
        teach(save(model, tmp_path / "m.onnx"), data)


def test_a_text_is_what_is_left_without_repetitions_and_blanks() -> None:
    assert join_characters(np.array([[1, 1, 0, 1, 2, 2, -1], [0, 0, 0, 0, 0, 0, 0]]), ["", "a", "b"], 0) == [
        "aab",
        "",
    ]


@pytest.mark.parametrize(
    ("one", "other", "edits"), [("abc", "abc", 0), ("", "ab", 2), ("kitten", "sitting", 3), ("ab", "ba", 2)]
)
def test_edits_are_levenshteins(one: str, other: str, edits: int) -> None:
    assert edit_distance(one, other) == edit_distance(other, one) == edits


def test_error_rates_count_over_all_texts() -> None:
    figures = text_figures(["abcd", "x y"], ["abcx", "x y"])
    assert figures == pytest.approx({"cer": 1 / 7, "wer": 1 / 3, "exact_match": 0.5})


def test_a_run_that_was_stopped_ends_in_the_same_weights(tmp_path: Path) -> None:
    path, lines = save(reader(), tmp_path / "reader.onnx"), write_lines(tmp_path / "lines", "abcd", count=20)
    same_weights_when_resumed(teach, path, lines, tmp_path)


def test_a_reader_for_int8_follows_its_float_self(tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "lines", "abcd")
    teach(save(reader(), tmp_path / "reader.onnx"), lines).export(tmp_path / "float.onnx")
    result = teach(tmp_path / "float.onnx", lines, epochs=2, quantize="int8")
    exported = result.export(tmp_path / "int8.onnx")
    assert exported.integers is not None and result.metrics["cer"] < 0.05
    assert onward.load(tmp_path / "int8.onnx")(draw("cab")) == result.predict(draw("cab"))
