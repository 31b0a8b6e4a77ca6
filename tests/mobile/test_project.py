"""`onward mobile`: models in the runtime's own format train as the others do; the projects have all their files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from languages.matrix import DOCS, write_table
from languages.programs import LANGUAGES, MissingError, compile_with, fetched, find_swift
from onward.artifacts import LossType, OptimType, generate_artifacts
from onward.checkpoint.portable import read_layout
from onward.errors import ModelError, OnwardError
from onward.mobile import write_app
from small_models import CLASSIFIER, NORMALIZED, batch, classifier, normalized, one_thread


def artifacts(folder: Path, **options: Any) -> Path:
    chosen = {"requires_grad": CLASSIFIER, "loss": LossType.CrossEntropyLoss, "optimizer": OptimType.AdamW}
    generate_artifacts(
        options.pop("model", classifier(0.2)),
        artifact_directory=folder,
        portable=True,
        **{**chosen, **options},
    )
    return folder


def samples(folder: Path) -> Path:
    folder.mkdir()
    x, labels = batch(0, 48)
    x.tofile(folder / "x.bin")
    labels.tofile(folder / "labels.bin")
    return folder


def run(path: Path, *values: np.ndarray) -> list[Any]:
    session = ort.InferenceSession(path, one_thread())
    return session.run(None, dict(zip([value.name for value in session.get_inputs()], values, strict=True)))


@pytest.mark.parametrize("model", ["classifier", "normalized"])
def test_the_models_train_evaluate_and_answer_as_the_portable_ones(model: str, tmp_path: Path) -> None:
    options = {} if model == "classifier" else {"model": normalized(), "requires_grad": NORMALIZED}
    folder = artifacts(tmp_path / "artifacts", **options)
    sizes = write_app(folder, tmp_path / "app")
    models = tmp_path / "app" / "android" / "app" / "src" / "main" / "assets" / "models"
    assert sizes["train_step.ort"] == (models / "train_step.ort").stat().st_size
    about = json.loads((tmp_path / "app/ios/Digits.swiftpm/models/train_step.json").read_text())
    assert about["onward.portable"] == "2"
    assert about["onward.inputs"].startswith("batch 0 16 1 -1 4\nbatch 0 8 7 -1\nrate 0 4 1 1\nstate 64 ")
    file, state = (folder / "state.bin").read_bytes(), []
    for line in about["onward.state"].splitlines():
        kind, *fields = line.split("\t")
        if kind == "tensor":
            shape = [int(dim) for dim in fields[2].split(",")]
            state.append(np.frombuffer(file, fields[1], int(np.prod(shape)), int(fields[3])).reshape(shape))
    weights = [value for value in state if value.dtype == np.float32]
    rate, inputs = np.array([0.01], np.float32), batch(1)
    for one, other in zip(
        run(models / "train_step.ort", *inputs, rate, *state),
        run(folder / "train_step.onnx", *inputs, rate, *state),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    count = len(ort.InferenceSession(models / "eval_step.ort", one_thread()).get_inputs()) - 2
    one, other = (
        run(path, *inputs, *weights[:count])[0]
        for path in (models / "eval_step.ort", folder / "eval_step.onnx")
    )
    np.testing.assert_allclose(one, other, rtol=1e-5)
    (scores,) = run(models / "inference_model.ort", inputs[0], *weights[:count])
    np.testing.assert_allclose(
        scores, run(folder / "inference_model.onnx", inputs[0])[0], rtol=1e-5, atol=1e-6
    )


def test_the_class_of_the_android_project_trains_from_its_files_on_the_java_virtual_machine(
    tmp_path: Path,
) -> None:
    try:
        program = LANGUAGES["Kotlin"]()
    except MissingError as error:
        pytest.skip(f"the Kotlin class is not tested: {error}")
    folder, data = artifacts(tmp_path / "artifacts"), samples(tmp_path / "data")
    write_app(folder, tmp_path / "app", data=data)
    assets = tmp_path / "app" / "android" / "app" / "src" / "main" / "assets"
    before = (assets / "models" / "state.bin").read_bytes()
    phone = program.run(assets / "models", assets / "data", 20, 6, 0.01)
    desk = program.run(folder, data, 20, 6, 0.01)
    assert phone.returncode == 0 and not phone.stderr, phone.stderr
    numbers = [
        [float(word) for word in done.stdout.split() if word[0] in "-0123456789"] for done in (phone, desk)
    ]
    assert len(numbers[0]) == 20 + 1 + 3
    np.testing.assert_allclose(*numbers, rtol=1e-5, atol=1e-6)
    assert (assets / "models" / "state.bin").read_bytes() != before


def test_both_projects_are_whole_and_say_first_that_they_were_not_compiled(tmp_path: Path) -> None:
    sizes = write_app(artifacts(tmp_path / "artifacts"), tmp_path / "app", data=samples(tmp_path / "data"))
    app = tmp_path / "app"
    android, ios = app / "android", app / "ios" / "Digits.swiftpm"
    parts = {"not compiled": "Not compiled here", "compiled": "Compiled "}
    for path, first in {
        android / "settings.gradle.kts": parts["not compiled"],
        android / "app" / "build.gradle.kts": parts["not compiled"],
        android / "app" / "src" / "main" / "java" / "MainActivity.kt": parts["compiled"],
        ios / "TrainingApp.swift": parts["not compiled"],
        ios / "Training.swift": parts["compiled"],
    }.items():
        assert path.read_text().startswith(f"// {first}")
    assert {path.name for path in ios.iterdir()} == {
        "Package.swift",
        "Batches.swift",
        "Trainer.swift",
        "Training.swift",
        "TrainingApp.swift",
        "data",
        "models",
    }
    assert (android / "gradle" / "wrapper" / "gradle-wrapper.properties").is_file()
    steps = {"train_step.ort", "accumulate_step.ort", "eval_step.ort", "inference_model.ort", "state.bin"}
    assert {path.name for path in (android / "app/src/main/assets/models").iterdir()} == steps
    assert {path.name for path in (ios / "models").iterdir()} == steps | {
        "train_step.json",
        "accumulate_step.json",
    }
    assert {path.name for path in (ios / "data").iterdir()} == {"x.bin", "labels.bin"}
    readme = (app / "README.md").read_text()
    assert f"| `state.bin` | {(tmp_path / 'artifacts' / 'state.bin').stat().st_size:,} |" in readme
    operators = (app / "required_operators_and_types.config").read_text()
    # no path of the machine that wrote it, and the same file each time
    assert "ai.onnx;" in operators and "# - train_step.ort" in operators
    # of the models and the state: the metadata of the steps are texts of two kilobytes
    rows = [f"| `{name}` | {size:,} |\n" for name, size in sizes.items() if not name.endswith(".json")]
    heading = "| file, of a perceptron of 67 numbers | bytes |\n| --- | --- |\n"
    write_table(DOCS / "mobile.md", heading + "".join(rows))


def test_the_android_app_compiles_against_androids_classes(tmp_path: Path) -> None:
    try:
        kotlin = fetched("kotlin", "Kotlin compiler") / "bin" / "kotlinc"
        jars = [
            fetched("android.jar", "classes of Android"),
            fetched("onnxruntime-unity", "binding") / "classes.jar",
        ]
    except MissingError as error:
        pytest.skip(f"the Android app is not compiled: {error}")
    write_app(artifacts(tmp_path / "artifacts"), tmp_path / "app")
    sources = (tmp_path / "app" / "android" / "app" / "src" / "main" / "java").glob("*.kt")
    classes = ":".join(map(str, jars))
    compile_with("bash", kotlin, "-Werror", "-cp", classes, "-d", tmp_path / "app.jar", *sources)


def test_the_ios_app_compiles_but_for_its_window_which_parses(tmp_path: Path) -> None:
    try:
        swift = find_swift()
        swift.compile_bindings(tmp_path)
    except MissingError as error:
        pytest.skip(f"the iOS app is not compiled: {error}")
    write_app(artifacts(tmp_path / "artifacts"), tmp_path / "app")
    ios = tmp_path / "app" / "ios" / "Digits.swiftpm"
    resources = tmp_path / "Resources.swift"  # which Xcode makes
    resources.write_text("import Foundation\nextension Bundle { static let module = Bundle.main }\n")
    files = [resources, *(ios / f"{name}.swift" for name in ("Trainer", "Batches", "Training"))]
    swift.compile(tmp_path, "Training", files, "-typecheck")
    swift.compile(tmp_path, "Training", [ios / "TrainingApp.swift"], "-parse")


def change(path: Path, old: str, new: str) -> None:
    """Another text of the same length in a model, such as a name."""
    data = path.read_bytes()
    assert old.encode() in data
    path.write_bytes(data.replace(old.encode(), new.encode()))


def test_steps_of_another_set_and_names_that_lead_elsewhere_are_refused(tmp_path: Path) -> None:
    folder = artifacts(tmp_path / "artifacts")
    digest = read_layout(folder / "state.bin").digest.hex()
    change(folder / "eval_step.onnx", digest, digest[::-1])
    with pytest.raises(ModelError, match=r"eval_step\.onnx' belongs to another state"):
        write_app(folder, tmp_path / "app")
    folder = artifacts(tmp_path / "artifacts")
    change(folder / "train_step.onnx", "labels", "../lab")
    with pytest.raises(ModelError, match=r"the input '\.\./lab' has no name that a file can have"):
        write_app(folder, tmp_path / "app", data=samples(tmp_path / "data"))
    assert not (tmp_path / "app").exists()


def test_what_is_missing_is_said_and_nothing_is_written(tmp_path: Path) -> None:
    folder = artifacts(tmp_path / "artifacts")
    with pytest.raises(OnwardError, match=r"has no labels\.bin"):
        data = samples(tmp_path / "data")
        (data / "labels.bin").unlink()
        write_app(folder, tmp_path / "app", data=data)
    assert not (tmp_path / "app").exists()
    (folder / "eval_step.onnx").unlink()
    with pytest.raises(ModelError, match=r"has no eval_step\.onnx.*portable"):
        write_app(folder, tmp_path / "app")
    assert not (tmp_path / "app").exists()
    shutil.copytree(folder, tmp_path / "app")
    with pytest.raises(OnwardError):
        write_app(folder, tmp_path / "app")
