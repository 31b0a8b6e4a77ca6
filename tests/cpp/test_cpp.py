"""The C++ library trains as Python does, goes on where Python stopped, and refuses what Python refuses."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from onward import checkpoint, optim
from onward.api import CheckpointState, LinearLRScheduler
from onward.artifacts import LossType, OptimType, generate_artifacts
from onward.checkpoint import from_portable, to_portable
from onward.onnxblock import optim as blocks
from onward.optim import ParameterGroup
from small_models import (
    CLASSIFIER,
    NORMALIZED,
    batch,
    classifier,
    normalized,
    one_thread,
    start,
    with_weights,
)
from state_files import FORGED, forge, make_data, make_layout

ROOT = Path(__file__).resolve().parents[2]
Arrays = Sequence[np.ndarray]
ASAN = {"ASAN_OPTIONS": "exitcode=99:detect_leaks=1"}


def run(driver: Path, *words: Any, code: int = 0, **options: Any) -> str:
    done = subprocess.run(
        [str(word) for word in (driver, *words)],
        capture_output=True,
        text=True,
        env={**os.environ, **ASAN},
        **options,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


def numbers(text: str) -> list[float]:
    return [float(line) for line in text.split()]


def write_batches(path: Path, batches: Iterable[Arrays]) -> Path:
    with open(path, "wb") as file:
        for array in itertools.chain.from_iterable(batches):
            kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
            file.write(struct.pack(f"<{2 + array.ndim}q", kind, array.ndim, *array.shape))
            file.write(np.ascontiguousarray(array).tobytes())
    return path


def artifacts(folder: Path, model: onnx.ModelProto, trainable: list[str], **options: Any) -> Path:
    generate_artifacts(
        model,
        requires_grad=trainable,
        loss=LossType.CrossEntropyLoss,
        **{"optimizer": OptimType.AdamW, **options},
        artifact_directory=folder,
        portable=True,
    )
    return folder


def convolutional() -> onnx.ModelProto:
    """Two convolutions with batch norm, over 8×8 images."""
    model = with_weights(
        """net (float[n, 1, 8, 8] x) => (float[n, 3] scores) <int64[1] axes = {1}> {
            a = Conv <pads = [1, 1, 1, 1]> (x, c1)
            b, m1, v1 = BatchNormalization <training_mode = 1> (a, s1, o1, mean1, var1)
            c = Relu (b)
            d = Conv <strides = [2, 2]> (c, c2)
            e, m2, v2 = BatchNormalization <training_mode = 1> (d, s2, o2, mean2, var2)
            f = Relu (e)
            g = GlobalAveragePool (f)
            h = Flatten (g)
            scores = Gemm (h, w, bias) }""",
        c1=(4, 1, 3, 3), c2=(6, 4, 3, 3), w=(6, 3), bias=(3,),
    )  # fmt: skip
    for index, width in ((1, 4), (2, 6)):
        for name, value in (("s", 1.0), ("o", 0.0), ("mean", 0.0), ("var", 1.0)):
            array = np.full(width, value, np.float32)
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, f"{name}{index}"))
    return model


def encoder() -> onnx.ModelProto:
    """One layer of attention over token numbers, with dropout in both of its places."""
    model = with_weights(
        """net (int64[n, t] ids) => (float[n, 3] scores)
        <float rate = {0.2}, bool training = {1}, float root = {0.25}, int64[1] one = {1}> {
            x = Gather (table, ids)
            q = MatMul (x, wq)  k = MatMul (x, wk)  v = MatMul (x, wv)
            kt = Transpose <perm = [0, 2, 1]> (k)
            s = MatMul (q, kt)  ss = Mul (s, root)  p = Softmax <axis = -1> (ss)
            pd = Dropout (p, rate, training)
            a = MatMul (pd, v)
            r = Add (x, a)
            l = LayerNormalization (r, ls, lb)
            f1 = MatMul (l, w1)  f2 = Relu (f1)  f3 = Dropout (f2, rate, training)  f4 = MatMul (f3, w2)
            y = Add (l, f4)
            pooled = ReduceMean <keepdims = 0> (y, one)
            scores = MatMul (pooled, wo) }""",
        table=(50, 16), wq=(16, 16), wk=(16, 16), wv=(16, 16), w1=(16, 32), w2=(32, 16), wo=(16, 3), lb=(16,),
    )  # fmt: skip
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(16, np.float32), "ls"))
    return model


def images(count: int) -> Iterable[Arrays]:
    rng = np.random.default_rng(1)
    return [(rng.normal(size=(5, 1, 8, 8)).astype(np.float32), rng.integers(0, 3, 5)) for _ in range(count)]


def sentences(count: int) -> Iterable[Arrays]:
    rng = np.random.default_rng(2)
    return [(rng.integers(0, 50, (4, 6 + i % 3)), rng.integers(0, 3, 4)) for i in range(count)]


def samples(count: int) -> Iterable[Arrays]:
    return [batch(seed, 3 + seed % 4) for seed in range(count)]


MODELS: dict[str, tuple[Callable[[], onnx.ModelProto], list[str], Callable[[int], Iterable[Arrays]]]] = {
    "MLP": (lambda: classifier(), CLASSIFIER, samples),
    "CNN with batch norm": (convolutional, ["c1", "c2", "w", "bias", "s1", "o1", "s2", "o2"], images),
    "encoder with dropout": (
        encoder, ["table", "wq", "wk", "wv", "w1", "w2", "wo", "ls", "lb"], sentences
    ),
}  # fmt: skip


def python_losses(
    folder: Path, batches: Iterable[Arrays], rate: float, state: str = "checkpoint"
) -> list[float]:
    _, module, optimizer = start(folder, state)
    optimizer.set_learning_rate(rate)
    losses = []
    for inputs in batches:
        losses.append(float(module(*inputs)))
        optimizer.step()
        module.lazy_reset_grad()
    return losses


@pytest.mark.parametrize("name", MODELS)
def test_a_hundred_steps_give_the_losses_of_python(name: str, driver: Path, tmp_path: Path) -> None:
    make, trainable, data = MODELS[name]
    artifacts(tmp_path, make(), trainable)
    batches = list(data(100))
    file = write_batches(tmp_path / "batches", batches)
    found = numbers(run(driver, "train", tmp_path, tmp_path / "state.bin", file, 100, 0.01))
    wanted = python_losses(tmp_path, batches, 0.01)
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)
    assert len(found) == 100 and np.mean(found[-20:]) < 0.97 * np.mean(found[:20])


def table() -> onnx.ModelProto:
    """A table of which a step reads few rows, large enough that its gradient is written in place."""
    return with_weights(
        """net (int64[n, t] ids) => (float[n, 3] scores) <int64[1] one = {1}> {
            x = Gather (table, ids)  p = ReduceMean <keepdims = 0> (x, one)  scores = MatMul (p, w) }""",
        table=(2000, 64), w=(64, 3),
    )  # fmt: skip


def words(count: int) -> Iterable[Arrays]:
    rng = np.random.default_rng(3)
    return [(rng.integers(0, 2000, (3, 5)), rng.integers(0, 3, 3)) for _ in range(count)]


GROUPS = [
    ParameterGroup(("b1", "b2"), weight_decay=0.0),
    ParameterGroup(("w2",), weight_decay=0.5, learning_rate_scale=0.1),
]
UPDATES: dict[str, dict[str, Any]] = {
    "SGD, clipped": {"optimizer": blocks.SGD(clip_grad=blocks.ClipGradNorm(0.1))},
    "Lion": {"optimizer": optim.lion(weight_decay=0.1)},
    "LAMB, clipped": {"optimizer": blocks.Lamb(clip_grad=blocks.ClipGradNorm(0.1))},
    "Adafactor": {"optimizer": optim.adafactor()},
    "groups": {"optimizer": optim.adamw(weight_decay=0.1), "parameter_groups": GROUPS},
}


def assert_trains_as_python(driver: Path, folder: Path, batches: list[Arrays], accumulate: int = 1) -> None:
    """The same losses, and the same state at the end."""
    file = write_batches(folder / "batches", batches)
    order = ["train", folder, folder / "state.bin", file, len(batches), 0.01]
    found = numbers(run(driver, *order, f"accumulate={accumulate}", f"save={folder / 'after.bin'}"))
    state, module, optimizer = start(folder)
    optimizer.set_learning_rate(0.01)
    for index, (inputs, loss) in enumerate(zip(batches, found, strict=True)):
        np.testing.assert_allclose(loss, float(module(*inputs)), rtol=1e-6, atol=1e-6)
        if (index + 1) % accumulate == 0:
            optimizer.step()
            module.lazy_reset_grad()
    wanted, made = state.to_data(include_optimizer_state=True), from_portable(folder / "after.bin")
    for name, array in wanted.parameters().items():
        np.testing.assert_allclose(made.parameters()[name], array, rtol=1e-5, atol=1e-6, err_msg=name)
    for name, slots in wanted.optimizer[0].slots.items():
        for slot, array in slots.items():
            np.testing.assert_allclose(
                made.optimizer[0].slots[name][slot], array, rtol=1e-5, atol=1e-6, err_msg=f"{slot} of {name}"
            )
    assert made.optimizer[0].step == wanted.optimizer[0].step
    assert made.extras["train_step"] == wanted.extras["train_step"]


@pytest.mark.parametrize("name", UPDATES)
def test_every_kind_of_update(name: str, driver: Path, tmp_path: Path) -> None:
    artifacts(tmp_path, classifier(), CLASSIFIER, **UPDATES[name])
    assert_trains_as_python(driver, tmp_path, list(samples(10)))


@pytest.mark.parametrize("accumulate", [1, 3])
def test_gradients_of_several_batches_are_added_up(accumulate: int, driver: Path, tmp_path: Path) -> None:
    artifacts(tmp_path / "net", normalized(), NORMALIZED)
    assert_trains_as_python(driver, tmp_path / "net", list(samples(9)), accumulate)
    artifacts(tmp_path / "table", table(), ["table", "w"])
    assert_trains_as_python(driver, tmp_path / "table", list(words(9)), accumulate)


def test_training_goes_on_in_the_other_language(driver: Path, tmp_path: Path) -> None:
    make, trainable, data = MODELS["encoder with dropout"]
    artifacts(tmp_path, make(), trainable)
    batches = list(data(15))
    whole = python_losses(tmp_path, batches, 0.01)
    first, middle, last = (write_batches(tmp_path / str(i), batches[i : i + 5]) for i in (0, 5, 10))
    assert middle.is_file()
    found = numbers(
        run(driver, "train", tmp_path, tmp_path / "state.bin", first, 5, 0.01, f"save={tmp_path / 'five.bin'}",
            "property=note")
    )  # fmt: skip
    data = from_portable(tmp_path / "five.bin")
    assert data.properties == {"note": "from\tC++\n"} and data.extras["learning_rate"] == 0.01
    checkpoint.save(data, tmp_path / "five")
    state, module, optimizer = start(tmp_path, "five")
    assert optimizer.get_learning_rate() == 0.01
    for inputs in batches[5:10]:
        found.append(float(module(*inputs)))
        optimizer.step()
        module.lazy_reset_grad()
    CheckpointState.save_checkpoint(state, tmp_path / "ten", include_optimizer_state=True)
    to_portable(checkpoint.load(tmp_path / "ten"), tmp_path / "ten.bin", layout=tmp_path / "state.bin")
    # a rate of 0 asks the driver to take the one of the state
    found += numbers(run(driver, "train", tmp_path, tmp_path / "ten.bin", last, 5, 0))
    np.testing.assert_allclose(found, whole, rtol=1e-6, atol=1e-6)


def test_a_state_goes_on_in_a_second_module(driver: Path, tmp_path: Path) -> None:
    artifacts(tmp_path, classifier(dropout=0.3), CLASSIFIER)
    file = write_batches(tmp_path / "batches", samples(9))
    words = ["train", tmp_path, tmp_path / "state.bin", file]
    whole = numbers(run(driver, *words, 9, 0.01, "seed=7"))
    assert numbers(run(driver, *words, 3, 0.01, "seed=7", "modules=3")) == whole
    assert numbers(run(driver, *words, 9, 0.01, "seed=8")) != whole


def test_a_link_is_followed_when_saving(driver: Path, tmp_path: Path) -> None:
    artifacts(tmp_path, classifier(), CLASSIFIER)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link.bin").symlink_to(tmp_path / "elsewhere" / "real.bin")
    file = write_batches(tmp_path / "batches", samples(1))
    run(driver, "train", tmp_path, tmp_path / "state.bin", file, 1, 0.01, f"save={tmp_path / 'link.bin'}")
    assert (tmp_path / "link.bin").is_symlink()
    assert from_portable(tmp_path / "elsewhere" / "real.bin").optimizer[0].step == 1


def test_the_schedule_is_python_s_and_goes_on(driver: Path, tmp_path: Path) -> None:
    artifacts(tmp_path, classifier(), CLASSIFIER)
    batches = list(samples(10))
    file = write_batches(tmp_path / "batches", batches)
    _, module, optimizer = start(tmp_path)
    scheduler = LinearLRScheduler(optimizer, 2, 10, 0.05)
    wanted = []
    for inputs in batches:
        wanted.append(float(module(*inputs)))
        optimizer.step()
        module.lazy_reset_grad()
        scheduler.step()
    words = [0.05, "linear=2,10"]
    found = numbers(
        run(driver, "train", tmp_path, tmp_path / "state.bin", file, 4, *words, f"save={tmp_path / '4'}")
    )
    rest = write_batches(tmp_path / "rest", batches[4:])
    found += numbers(run(driver, "train", tmp_path, tmp_path / "4", rest, 6, *words))
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


def test_the_names_of_the_predecessor(driver: Path, tmp_path: Path) -> None:
    artifacts(tmp_path, classifier(), CLASSIFIER)
    batches = list(samples(6))
    file = write_batches(tmp_path / "batches", batches)
    saved = tmp_path / "saved.bin"
    *found, at_zero, same, rate, right = numbers(
        run(driver, "session", tmp_path, tmp_path / "state.bin", file, 6, 0.5, saved)
    )
    _, module, optimizer = start(tmp_path)
    scheduler = LinearLRScheduler(optimizer, 0, 12, 0.5)
    for loss, inputs in zip(found, batches, strict=True):
        np.testing.assert_allclose(loss, float(module(*inputs)), rtol=1e-6)
        optimizer.step()
        scheduler.step()
        module.lazy_reset_grad()
    np.testing.assert_allclose(at_zero, np.log(3), rtol=1e-6)  # all parameters zero: every class alike
    assert (same, rate, right) == (1, 0.25, 1)
    data = from_portable(saved)  # without the optimizer's state, as asked
    assert data.optimizer[0].step == 0 and not data.optimizer[0].slots["w1"]["momentum0"].any()
    assert data.properties == {"share": 0.25, "count": -3}


def test_evaluation_and_export(driver: Path, tmp_path: Path) -> None:
    artifacts(tmp_path, normalized(), NORMALIZED)
    batches = list(samples(8))
    file = write_batches(tmp_path / "batches", batches)
    exported, weights = tmp_path / "exported.onnx", tmp_path / "weights.bin"
    *_, found = numbers(
        run(driver, "train", tmp_path, tmp_path / "state.bin", file, 8, 0.01, "eval", "output=scores",
            f"export={exported}", f"weights={weights}")
    )  # fmt: skip
    _, module, optimizer = start(tmp_path)
    optimizer.set_learning_rate(0.01)
    for inputs in batches:
        module(*inputs)
        optimizer.step()
        module.lazy_reset_grad()
    module.eval()
    np.testing.assert_allclose(found, float(module(*batches[0])), rtol=1e-6)
    module.export_model_for_inferencing(tmp_path / "python.onnx", ["scores"])
    weights.replace(tmp_path / "state.bin")  # where the inference model reads them
    x = batches[0][0]
    one, two, three = (
        ort.InferenceSession(tmp_path / name, one_thread()).run(["scores"], {"x": x})[0]
        for name in ("python.onnx", "exported.onnx", "inference_model.onnx")
    )
    np.testing.assert_allclose(two, one, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(two, three)
    onnx.checker.check_model(str(exported), full_check=True)


# ---- bad input ------------------------------------------------------------------------------------------


MISTAKES = {
    "no inputs": "the model takes 2 inputs (x, labels), got 0",
    "a wrong width": "input 'x' has shape [2, 5], the model takes [",
    "a wrong rank": "input 'x' has shape [4], the model takes [",
    "a wrong type": "input 'x' is int64, the model takes float32",
    "an empty value": "input 'x' is not a tensor",
    "fewer labels": "belong together: axis 0 of the one and axis 0 of the other must have the same size",
    "a label too large": "'labels' has label 3 at position 1: the model has 3 classes, so labels are 0 to 2",
    "a negative label": "'labels' has label -1 at position 1",
    "an update of nothing": "call TrainStep before Optimizer::Step",
    "a rate that is not finite": "not a finite number",
    "no such parameter": "Parameter w9 not found.",
    "a parameter's shape": "Parameter data shape mismatch. Expected: [4, 8], Got: [2, 4]",
    "a parameter's type": "Parameter data type mismatch. Expected: float32, Got: int64",
    "a buffer's size": "Parameters buffer size incorrect. Expected:67, Actual:2",
    "no such property": "Property nothing not found.",
    "no eval model": "Eval model was not provided. Cannot evaluate",
    "an export without an eval model": "Eval model was not provided. Cannot export a model for inferencing",
    "a status": "Eval model was not provided. Cannot export a model for inferencing",
    "no outputs": "Expected a non empty vector of graph output names",
    "no such output": "graph nothing could not be found",
    "the model itself": "is what exports are made from: choose another name",
    "another inference model": "is the inference model of another state",
    "no such folder": "not committed, the old one is kept: No such file or directory",
    "a folder": "not committed, the old one is kept: it is a folder",
    "a second module": "belongs to another Module",
    "another file": "is no gradient_step of Onward: make it with onward artifacts --portable",
    "another update": "is no update_step of Onward",
    "no update": "no optimizer model at",
    "no file": "no training model at",
    "a schedule": "warmup_step_count is -1",
}


def test_mistakes_are_explained_and_leave_the_state_as_it_was(driver: Path, tmp_path: Path) -> None:
    artifacts(tmp_path, classifier(), CLASSIFIER)
    file = write_batches(tmp_path / "batches", samples(1))
    said = dict(line.split(": ", 1) for line in run(
        driver, "mistakes", tmp_path, tmp_path / "state.bin", file
    ).splitlines())  # fmt: skip
    assert said.keys() == MISTAKES.keys()
    for name, part in MISTAKES.items():
        assert part in said[name], name
    end = struct.unpack_from("<Q", (tmp_path / "state.bin").read_bytes(), 16)[0]
    assert (tmp_path / "after.bin").read_bytes()[64:end] == (tmp_path / "state.bin").read_bytes()[64:end]


def test_a_nominal_state_trains_once_it_has_the_values_of_another(driver: Path, tmp_path: Path) -> None:
    artifacts(tmp_path, convolutional(), MODELS["CNN with batch norm"][1], nominal_checkpoint=True)
    nominal, state = tmp_path / "nominal_state.bin", tmp_path / "state.bin"
    assert nominal.stat().st_size < state.stat().st_size - 1000
    batches = list(images(20))
    file = write_batches(tmp_path / "batches", batches)
    said = dict(line.split(": ", 1) for line in run(driver, "nominal", tmp_path, nominal, file).splitlines())
    assert len(said) == 9
    for name, message in said.items():
        part = (
            "pass trainable_only=false"
            if name == "trainable ones alone"
            else "Please load the model parameters first"
        )
        assert "nominal" in message and part in message, name
    found = numbers(
        run(driver, "train", tmp_path, nominal, file, 20, 0.01, f"values={state}", f"save={tmp_path / 'new'}")
    )
    np.testing.assert_allclose(found, python_losses(tmp_path, batches, 0.01), rtol=1e-6, atol=1e-6)
    trained = checkpoint.from_portable(tmp_path / "new")
    assert not trained.nominal and trained.optimizer[0].step == 20


def test_a_state_of_another_model_is_refused(driver: Path, tmp_path: Path) -> None:
    one = artifacts(tmp_path / "one", classifier(), CLASSIFIER)
    other = artifacts(tmp_path / "other", normalized(), NORMALIZED)
    file = write_batches(tmp_path / "batches", samples(1))
    said = run(driver, "train", one, other / "state.bin", file, 1, 0.1, code=1)
    assert "the state of another model" in said and "belong together" in said


def test_a_step_that_is_not_finite(driver: Path, tmp_path: Path) -> None:
    artifacts(tmp_path, classifier(), CLASSIFIER)
    batches = list(samples(3))
    batches[1][0][0, 0] = np.nan
    file = write_batches(tmp_path / "batches", batches)
    words = ["train", tmp_path, tmp_path / "state.bin", file, 3, 0.01]
    assert "the loss is nan at training step 2; parameters are unchanged" in run(driver, *words, code=1)
    found = numbers(run(driver, *words, "skip"))
    wanted = python_losses(tmp_path, [batches[0], batches[2]], 0.01)
    np.testing.assert_allclose([found[0], found[2]], wanted, rtol=1e-6)


def test_damaged_and_hostile_state_files_are_refused(driver: Path, tmp_path: Path) -> None:
    to_portable(make_data(), tmp_path / "good", layout=make_layout())
    whole = (tmp_path / "good").read_bytes()
    bad = {f"cut{size}": whole[:size] for size in range(0, len(whole), 7)}
    bad |= {
        f"changed{place}": whole[:place] + bytes([whole[place] ^ 0x40]) + whole[place + 1 :]
        for place in range(0, len(whole), 5)
    }
    bad |= {f"forged {name}": forge(whole, change) for name, change in FORGED.items()}
    bad["longer"] = whole + b"\0"
    sizes = bytearray(whole)
    for start_, value in ((16, 2**64 - 64), (16, 2**63), (24, 2**64 - 1), (24, 2**40)):
        sizes[16:32] = whole[16:32]
        sizes[start_ : start_ + 8] = struct.pack("<Q", value)
        bad[f"size {start_} {value}"] = bytes(sizes)
    for name, content in bad.items():
        (tmp_path / name).write_bytes(content)
    said = run(driver, "load", *(tmp_path / name for name in ["good", *bad]), tmp_path / "missing", tmp_path)
    results = dict(line.split(": ", 1) for line in said.splitlines())
    assert results.pop(str(tmp_path / "good")) == "no error"
    assert len(results) == len(bad) + 2
    for name, text in results.items():
        assert text.startswith("checkpoint '"), (name, text)


def test_a_full_disk_leaves_the_old_state(driver: Path, tmp_path: Path) -> None:
    artifacts(tmp_path, classifier(), CLASSIFIER)
    file = write_batches(tmp_path / "batches", samples(1))
    before = (tmp_path / "state.bin").read_bytes()

    resource = pytest.importorskip("resource")

    def little_room() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))

    words = ["train", tmp_path, tmp_path / "state.bin", file, 1, 0.1, f"save={tmp_path / 'state.bin'}"]
    said = run(driver, *words, code=1, preexec_fn=little_room)
    assert "not committed, the old one is kept: File too large" in said
    assert (tmp_path / "state.bin").read_bytes() == before
    assert not [name for name in os.listdir(tmp_path) if "onward-tmp" in name]


# ---- the package and the example --------------------------------------------------------------------------


def test_the_example_builds_with_the_installed_package_and_learns(toolchain: Any, tmp_path: Path) -> None:
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("there is no cmake")
    runtime = [f"-DONNXRUNTIME_INCLUDE_DIR={toolchain.headers}", f"-DONNXRUNTIME_LIBRARY={toolchain.library}"]
    prefix, package, build = tmp_path / "prefix", tmp_path / "package", tmp_path / "build"

    def do(*words: Any) -> str:
        done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    do(cmake, "-S", ROOT / "cpp", "-B", package, f"-DCMAKE_INSTALL_PREFIX={prefix}", *runtime)
    do(cmake, "--install", package)
    do(cmake, "-S", ROOT / "examples" / "cpp", "-B", build, f"-DCMAKE_PREFIX_PATH={prefix}", *runtime)
    do(cmake, "--build", build)
    do(sys.executable, ROOT / "examples" / "cpp" / "prepare.py", tmp_path / "digits")
    said = do(build / "digits", tmp_path / "digits")
    assert "resumed after epoch 3" in said
    assert float(said.rsplit("accuracy ", 1)[1]) > 0.85
