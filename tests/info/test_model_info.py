"""`ModelInfo`: each source is read, what agrees is one, what disagrees is one error, and nothing is sorted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

from onward.errors import DataError, LimitError, ModelError
from onward.hub.folder_files import info_beside, read_pooling
from onward.hub.read_info import read_info
from onward.info.metadata import info_from_metadata, info_to_metadata
from onward.info.model_info import ModelInfo, Origin, combine
from onward.info.preprocessing import Preprocessing

LABELS = ("zebra", "ant", "mole")


def model(path: Path, *, outputs: int = 3, **metadata: str) -> Path:
    proto = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]> net (float[N, 3, 8, 8] pixel_values) => (float[N, {outputs}] y)
        <float[192, {outputs}] w>{{ flat = Flatten(pixel_values) y = MatMul(flat, w) }}"""
    )
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros((192, outputs), np.float32), "w"))
    onnx.helper.set_model_props(proto, metadata)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(proto, path)
    return path


def write(path: Path, document: object) -> None:
    path.write_text(json.dumps(document), encoding="utf-8")


CLASSIFIER = {"architectures": ["ViTForImageClassification"], "model_type": "vit"}


@pytest.mark.parametrize(
    ("metadata", "labels"),
    [
        ({"onward.classes": '["zebra", "ant", "mole"]'}, LABELS),
        ({"names": "{0: 'zebra', 1: 'ant', 2: 'mole'}", "task": "classify"}, LABELS),
        ({"names": "{2: 'mole', 0: 'zebra', 1: 'ant'}", "task": "detect"}, LABELS),
        ({"names": '["zebra", "ant", "mole"]', "imgsz": "[8, 8]"}, LABELS),
        ({"character": "zebra\nant\nmole"}, LABELS),
        ({"character": "0\n90\n180"}, ("0", "90", "180")),
        ({"onward.export": json.dumps({"task": "image-classification", "labels": LABELS})}, LABELS),
        ({"names": "free text"}, None),
    ],
)
def test_labels_of_metadata_stay_in_their_order(
    tmp_path: Path, metadata: dict[str, str], labels: tuple[str, ...] | None
) -> None:
    assert read_info(model(tmp_path / "m.onnx", **metadata)).labels == labels


def test_a_recogniser_has_a_blank_before_and_a_space_after_its_characters(tmp_path: Path) -> None:
    info = read_info(model(tmp_path / "m.onnx", outputs=5, character="z\na\nm"))
    assert info.labels == ("<blank>", "z", "a", "m", " ")
    assert info.outputs == {"y": "ctc"}


def test_ultralytics_metadata_says_task_and_size(tmp_path: Path) -> None:
    path = model(tmp_path / "m.onnx", names="{0: 'b', 1: 'a', 2: 'c'}", task="classify", imgsz="[8, 8]")
    info = read_info(path)
    assert info.task == "image-classification"
    assert info.preprocessing is not None
    assert info.preprocessing.settings["crop_size"] == {"height": 8, "width": 8}
    assert info.preprocessing.settings["do_normalize"] is False


@pytest.mark.parametrize(
    "names", ["{0: 'a', 2: 'b'}", "{'a': 0}", "__import__('os').system('true')", "[" * 100_000]
)
def test_names_that_are_no_table_are_one_error_and_never_run(tmp_path: Path, names: str) -> None:
    with pytest.raises((ModelError, LimitError), match="class names"):
        read_info(model(tmp_path / "m.onnx", names=names, task="detect"))


def test_hugging_face_files_are_read_with_labels_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    path = model(tmp_path / "model.onnx")
    table = {"2": "mole", "0": "zebra", "1": "ant"}
    write(tmp_path / "config.json", {**CLASSIFIER, "id2label": table})
    write(
        tmp_path / "preprocessor_config.json",
        {"image_mean": [0.5] * 3, "image_std": [0.25] * 3, "resample": 2},
    )
    for info in (read_info(path), read_info(tmp_path)):
        assert (info.task, info.labels) == ("image-classification", LABELS)
        assert info.preprocessing is not None
        assert info.preprocessing.settings["image_mean"] == [0.5] * 3
        assert info.source("labels").endswith("config.json'")


def test_ten_labels_and_more_are_ordered_as_numbers_not_as_words(tmp_path: Path) -> None:
    path = model(tmp_path / "model.onnx", outputs=12)
    table = {str(number): f"class {number}" for number in reversed(range(12))}
    write(tmp_path / "config.json", {**CLASSIFIER, "id2label": table})
    assert read_info(path).labels == tuple(f"class {number}" for number in range(12))


def test_a_language_model_has_no_labels_though_its_configuration_has(tmp_path: Path) -> None:
    table = {"0": "LABEL_0", "1": "LABEL_1"}
    write(
        tmp_path / "config.json",
        {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "id2label": table},
    )
    info = read_info(tmp_path)
    assert (info.task, info.labels) == ("text-generation", None)


def test_a_sentence_transformer_is_known_by_its_pooling(tmp_path: Path) -> None:
    write(tmp_path / "config.json", {"architectures": ["BertModel"], "model_type": "bert"})
    write(tmp_path / "modules.json", [])
    (tmp_path / "1_Pooling").mkdir()
    write(tmp_path / "1_Pooling" / "config.json", {"pooling_mode_mean_tokens": True})
    assert read_info(tmp_path).task == "pooling"


def test_two_sources_that_disagree_are_one_error_that_names_both(tmp_path: Path) -> None:
    path = model(tmp_path / "model.onnx", names="{0: 'ant', 1: 'mole', 2: 'zebra'}", task="classify")
    write(tmp_path / "config.json", {**CLASSIFIER, "id2label": dict(enumerate(LABELS))})
    with pytest.raises(
        ModelError, match=r"disagree on the labels: .*model.onnx' \(names\) has ant, .*config.json"
    ):
        read_info(path)


def test_preprocessing_that_disagrees_names_the_setting() -> None:
    one = ModelInfo(inputs=(Preprocessing("image", "x", {"image_mean": [0.5], "resample": 2}),))
    other = ModelInfo(inputs=(Preprocessing("image", "x", {"image_mean": [0.4]}),))
    with pytest.raises(ModelError, match="image_mean of the input 'x'"):
        combine(one, other)


def test_placeholders_yield_to_names_and_are_no_class_names() -> None:
    placeholders = ModelInfo(labels=("LABEL_0", "LABEL_1"))
    assert placeholders.class_names is None
    names = ModelInfo(labels=("good", "bad"))
    assert combine(placeholders, names).labels == combine(names, placeholders).labels == ("good", "bad")


def test_a_trained_model_speaks_for_itself_beside_the_files_of_its_base(tmp_path: Path) -> None:
    write(tmp_path / "config.json", {**CLASSIFIER, "id2label": {"0": "a", "1": "b"}})
    trained = model(tmp_path / "m.onnx", **{"onward.classes": '["z", "y", "x"]', "onward.trained": "{}"})
    assert read_info(trained).labels == ("z", "y", "x")
    headed = model(tmp_path / "h.onnx", **{"onward.head": "[]"})
    assert read_info(headed).labels is None


def test_metadata_says_what_the_info_says() -> None:
    info = ModelInfo(
        task="image-classification",
        labels=("ß", "good", "bad"),
        problem_type="multi_label_classification",
        inputs=(
            Preprocessing("image", "x", {"image_mean": [0.5], "image_std": [0.25]}),
            Preprocessing("sound", "y", {"length": 3}),
        ),
        outputs={"y": "logits"},
        origin=Origin(base="net.onnx", data={"d": "00"}, settings={"epochs": 3}, versions={"onward": "1"}),
    )
    assert info_from_metadata(info_to_metadata(info)) == info


def test_a_class_that_the_labels_lack_is_an_error() -> None:
    info = ModelInfo.stated("m.onnx", labels=("good", "bad"))
    assert info.number(["bad", "good", "bad"], "d.csv") == [1, 0, 1]
    with pytest.raises(DataError, match="'ugly', which the model has not"):
        info.number(["ugly"], "d.csv")
    with pytest.raises(DataError, match="nothing says which output"):
        ModelInfo().number(["ugly"], "d.csv")
    with pytest.raises(DataError, match="two classes are called 'crane'"):
        ModelInfo(labels=("crane", "owl", "crane")).number(["owl", "crane"], "d.csv")


def test_a_problem_type_that_is_none_is_refused() -> None:
    with pytest.raises(ModelError, match="no problem type 'guess'"):
        ModelInfo(problem_type="guess")


@pytest.mark.parametrize(
    ("read", "files", "message"),
    [
        (info_beside, {"config.json": {"architectures": ["BertForSequenceClassification"], "model_type": "bert",
                                       "num_labels": 10**12}}, "num_labels is 1000000000000"),
        (info_beside, {"config.json": {"architectures": ["Wav2Vec2ForCTC"], "model_type": "wav2vec2"},
                       "vocab.json": {"a": 10**12}}, "a letter's number is 1000000000000"),
        (read_pooling, {"modules.json": [{"type": "a.Pooling", "path": "../other"}]},
         "'../other' is not in this folder"),
        (read_pooling, {"modules.json": [{"type": "a.Pooling", "path": "/dev"}]}, "'/dev' is not in this folder"),
        (read_pooling, {"modules.json": [{"type": "a.Pooling"}], "1_Pooling/config.json": {"pooling_mode": 5}},
         "the pooling 5 is not known"),
    ],
)  # fmt: skip
def test_files_beside_a_model_that_ask_for_much_or_name_others_are_refused(
    tmp_path: Path, read: Any, files: dict[str, Any], message: str
) -> None:
    for name, document in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(document))
    with pytest.raises(ModelError, match=message):
        read(tmp_path)
