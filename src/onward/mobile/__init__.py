"""Writes what a phone trains from: models in the runtime's own format, the state, and two complete sample projects.

The programs in them are those of examples/languages. A model for inference takes the state's weights as inputs here:
an `.ort` file holds its weights inside, where training could not change them.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import shutil
import tempfile
from pathlib import Path, PurePosixPath, PureWindowsPath

import onnx_ir as ir

from onward import contract
from onward.artifacts.write import write_artifacts
from onward.checkpoint.portable import WEIGHTS, StateLayout, read_layout
from onward.errors import ModelError, OnwardError
from onward.files import new_directories, replace_folder
from onward.graph.load import load_model
from onward.graph.passes.finish import finish
from onward.whole_step.boundary import lift_scalars
from onward.whole_step.state_inputs import copy_state_metadata, read_weights

__all__ = ["write_app"]

STEPS = ("train_step", "accumulate_step", "eval_step")
_METADATA = ("train_step.json", "accumulate_step.json")
_OPERATORS = "required_operators_and_types.config"


def write_app(artifacts: Path, target: Path, *, prefix: str = "", data: Path | None = None) -> dict[str, int]:
    """Write the projects and return the size of every file of `models/` in them.

    `data` has a file for each input of the batch, `NAME.bin`: its samples one after another, little-endian.
    """
    files = [f"{name}.onnx" for name in (*STEPS, "inference_model")] + [*_METADATA, "state.bin"]
    missing = [f"{prefix}{name}" for name in files if not (artifacts / f"{prefix}{name}").is_file()]
    if missing:
        raise ModelError(
            f"'{artifacts}' has no {missing[0]}: a phone trains portable steps",
            hint="make the artifacts with --portable",
        )
    state = artifacts / f"{prefix}state.bin"
    if target.exists() and any(target.iterdir()):
        raise OnwardError(f"'{target}' is not empty: projects go into a new folder")
    # Everything is made aside first: an error of the converter leaves no half of a project behind.
    with tempfile.TemporaryDirectory(prefix="onward-mobile-") as name:
        models = Path(name) / "models"
        models.mkdir()
        step = _convert(artifacts, prefix, models, read_layout(state))
        shutil.copyfile(state, models / "state.bin")
        for name in _METADATA:
            shutil.copyfile(artifacts / f"{prefix}{name}", models / name)
        inputs = _batch(step)
        if data is not None:
            _check_data(data, inputs)
        operators = models / _OPERATORS
        with new_directories(target.absolute().parent), replace_folder(target) as projects:
            # its comment names the files by a path of this machine, another one each time
            text = operators.read_text("utf-8").replace(f"{models}{os.sep}", "")
            (projects / _OPERATORS).write_text(text, encoding="utf-8")
            operators.unlink()
            sizes = {path.name: path.stat().st_size for path in sorted(models.iterdir())}
            _write_projects(models, projects, data, [name for name, *_ in inputs])
            text = _readme(sizes, inputs, with_data=data is not None)
            (projects / "README.md").write_text(text, encoding="utf-8")
    return sizes


def _convert(artifacts: Path, prefix: str, models: Path, layout: StateLayout) -> ir.Model:
    """Write the `.ort` files and the operators that they need; return the step."""
    from onnxruntime.tools.convert_onnx_models_to_ort import OptimizationStyle, convert_onnx_models_to_ort

    # The converter says what it does, by a log and by prints.
    logging.getLogger("ort_format_model.utils").setLevel(logging.WARNING)
    graphs = {name: load_model(artifacts / f"{prefix}{name}.onnx") for name in STEPS}
    step = graphs["train_step"]
    inference = load_model(artifacts / f"{prefix}inference_model.onnx")
    for name, model in (*graphs.items(), ("inference_model", inference)):
        if model.metadata_props.get(contract.STATE_DIGEST) != layout.digest.hex():
            raise ModelError(
                f"'{artifacts / f'{prefix}{name}.onnx'}' belongs to another state than '{prefix}state.bin'",
                hint="make the artifacts again, all at once: with --portable",
            )
    graphs["inference_model"] = _with_weights_as_inputs(inference, step, layout)
    # A folder of its own, since the converter takes every model that it finds and artifacts have others beside these.
    with tempfile.TemporaryDirectory(prefix="onward-ort-") as name:
        folder = Path(name)
        write_artifacts(folder, graphs, {})
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            # "Fixed" optimizes here, once: a minimal build has no optimizer that could do it on the phone. And "arm"
            # leaves out the NCHWc layouts, which only x64 processors have kernels for.
            convert_onnx_models_to_ort(
                folder, output_dir=models, optimization_styles=[OptimizationStyle.Fixed],
                target_platform="arm", enable_type_reduction=True,
            )  # fmt: skip
    return step


def _with_weights_as_inputs(model: ir.Model, step: ir.Model, layout: StateLayout) -> ir.Model:
    graph = model.graph
    parts = {part.name for part, _, _ in layout.parts() if part.role in WEIGHTS}
    for name in [name for name in graph.initializers if name in parts]:
        weight = graph.initializers.pop(name)
        weight.const_value = None
        graph.inputs.append(weight)
    read_weights(model, layout)
    copy_state_metadata(model, step, "inference_step")
    return lift_scalars(finish(model))


def _batch(step: ir.Model) -> list[tuple[str, str, str]]:
    """Name, type and the shape of one sample of each input of the batch."""
    inputs, count = [], step.metadata_props.get(contract.BATCH_INPUTS, "")
    if not count.isdecimal() or int(count) > len(step.graph.inputs):
        raise ModelError(f"the train step says that '{count[:20]}' of its inputs are the batch")
    for value in step.graph.inputs[: int(count)]:
        dims = list(value.shape or ())[1:]
        if value.dtype is None or not all(isinstance(dim, int) for dim in dims):
            # an app has bytes and no shapes: only the number of samples can follow from a file's size
            raise ModelError(
                f"the samples of '{value.name}' have no fixed shape ({value.shape}), and files hold samples of one",
                hint="export the model with fixed sizes but for the batch",
            )
        inputs.append((value.name or "", str(value.dtype.numpy()), ",".join(map(str, dims))))
    return inputs


def _check_data(data: Path, inputs: list[tuple[str, str, str]]) -> None:
    for name, *_ in inputs:
        # it comes from a file, and would be the name of one that is written
        if PurePosixPath(name).name != name or PureWindowsPath(name).name != name:
            raise ModelError(f"the input '{name}' has no name that a file can have: rename it in the model")
        if not (data / f"{name}.bin").is_file():
            raise OnwardError(
                f"'{data}' has no {name}.bin: each input of the batch has a file, its samples one after another"
            )


def _write_projects(models: Path, target: Path, data: Path | None, inputs: list[str]) -> None:
    projects, programs = _sources()
    shutil.copytree(projects / "android", target / "android")
    shutil.copytree(projects / "ios", target / "ios")
    android, ios = target / "android" / "app" / "src" / "main", target / "ios" / "Digits.swiftpm"
    # The classes of the programs that the tests run, not versions of their own for phones.
    for name in ("Trainer", "Batches"):
        kotlin, swift = f"{name}.kt", f"{name}.swift"
        shutil.copyfile(programs / "kotlin" / "src" / "main" / "kotlin" / kotlin, android / "java" / kotlin)
        shutil.copyfile(programs / "swift" / "Sources" / "train" / swift, ios / swift)
    for folder in (android / "assets", ios):
        shutil.copytree(models, folder / "models")
        (folder / "data").mkdir()
        for name in inputs if data is not None else []:
            assert data is not None
            shutil.copyfile(data / f"{name}.bin", folder / "data" / f"{name}.bin")
    for name in _METADATA:
        (android / "assets" / "models" / name).unlink()  # Java reads it from the model


def _sources() -> tuple[Path, Path]:
    """The folders of the sample projects and of the programs in other languages."""
    here = Path(__file__).resolve()
    for folder in (here.parent, here.parents[3] / "examples"):
        if (folder / "mobile").is_dir() and (folder / "languages").is_dir():
            return folder / "mobile", folder / "languages"
    raise OnwardError("this installation lacks the sample projects: install Onward again")


def _readme(sizes: dict[str, int], inputs: list[tuple[str, str, str]], *, with_data: bool) -> str:
    rows = "".join(f"| `{name}` | {size:,} |\n" for name, size in sizes.items())
    files = ", ".join(f"`{name}.bin` ({kind}, a sample is [{shape}])" for name, kind, shape in inputs)
    data = (
        "The data that you gave is in both projects."
        if with_data
        else "**Before the first run** put these files into `android/app/src/main/assets/data` and "
        f"`ios/Digits.swiftpm/data`: {files}."
    )
    return _README.format(rows=rows, data=data, operators=_OPERATORS)


_README = """# Training on a phone

Two projects over the stock onnxruntime. Their sources were compiled where they were written, but not by Gradle or
Xcode, and never ran on a device; the class that trains in the Android one is tested on the Java virtual machine.

{data}

- **Android**: open `android` in Android Studio and press run (Android 8 or newer).
- **iOS**: open `ios/Digits.swiftpm` in Xcode 15 or newer, choose a device and press run (iOS 16 or newer).

Each press of the button trains 100 updates, evaluates, saves and answers. The next press, or the next start of the
app, goes on from there. The state is `state.bin` in the app's own folder: `onward convert state.bin checkpoint`
reads it.

| file | bytes |
| --- | --- |
{rows}
`{operators}` names the operators and types that these models need. A build of onnxruntime with them alone is smaller:
`./build.sh --android --config MinSizeRel --minimal_build extended --include_ops_by_config {operators}
--enable_reduced_operator_type_support …` ([its documentation](https://onnxruntime.ai/docs/build/custom.html)).
"""
