"""Training on a device: the same numbers, states and errors as on the CPU.

Everything runs in each device's way over the CPU provider's memory, and on CUDA where there is one.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from onward.api import CheckpointState
from onward.artifacts import LossType, OptimType, generate_artifacts
from onward.errors import DeviceError, DeviceMemoryError, NonFiniteError
from onward.graph.proto.device_forms import expand_batch_norm
from onward.onnxblock import optim
from onward.optim.optimizer_model import ParameterGroup
from onward.runtime import bound, cuda_driver, device_check, device_tensor, devices, kernels, step
from onward.runtime.devices import Device, find_device
from onward.runtime.memory import DeviceTensor, FlatBuffer, Tensor, make_tensor
from onward.train.trainer import Trainer
from small_models import (
    batch,
    load,
    one_thread,
    snapshot,
    start,
    with_weights,
    write_classifier,
    write_normalized,
)  # fmt: skip

EMULATED = Device("cpu", memory="device")
COPIED = Device("cpu", memory="copied")
RESIDENT = Device("cpu", memory="resident")
HAS_CUDA = "CUDAExecutionProvider" in ort.get_available_providers() and devices._problem("cuda", 0) is None
CUDA = pytest.param(
    Device("cuda"),
    marks=[
        pytest.mark.cuda,
        pytest.mark.skipif(not HAS_CUDA, reason="needs onnxruntime-gpu and a GPU that it can use"),
    ],
    id="cuda",
)
WITHOUT_ADDRESSES = pytest.param(RESIDENT, id="resident")
ALL = [pytest.param(EMULATED, id="device memory"), pytest.param(COPIED, id="copied"), WITHOUT_ADDRESSES, CUDA]
MEMORY = [pytest.param(EMULATED, id="device memory"), CUDA]


def tolerance(device: Device) -> dict[str, float]:
    """Other kernels round otherwise; a session for one shape may add in another order; else to the bit."""
    if device.kind == "cuda":
        return {"rtol": 2e-5, "atol": 2e-6}
    return {"rtol": 1e-6, "atol": 1e-7} if device.memory != "copied" else {"rtol": 0, "atol": 0}


def train(
    folder: Path, device: Device, steps: int = 6, *, accumulate: int = 1, **options: Any
) -> tuple[list[float], CheckpointState]:
    """The losses of some updates, each of `accumulate` batches, and the state after them."""
    state, module, optimizer = start(folder, device=device, **options)
    optimizer.set_learning_rate(0.05)
    losses = []
    for index in range(steps):
        for part in range(accumulate):
            results = module(*batch(10 * index + part, size=4 + index % 3))
            losses.append(float(np.ravel(results[0] if isinstance(results, tuple) else results)[0]))
        optimizer.gradient_scale = 1 / accumulate
        assert optimizer.step()
        module.lazy_reset_grad()
    return losses, state


def same(found: CheckpointState, expected: CheckpointState, device: Device) -> None:
    for name, parameter in expected.parameters:
        np.testing.assert_allclose(
            found.parameters[name].data, parameter.data, err_msg=name, **tolerance(device)
        )


OPTIMIZERS: dict[str, Any] = {
    "AdamW": optim.AdamW(weight_decay=0.1),
    "SGD": optim.SGD(momentum=0.9),
    "clipped": optim.AdamW(clip_grad=optim.ClipGradNorm(0.1)),
    "Lamb": OptimType.Lamb,
    "Adafactor": OptimType.Adafactor,
}


@pytest.mark.parametrize("device", ALL)
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_equals_the_cpus(name: str, accumulate: int, device: Device, tmp_path: Path) -> None:
    folder = write_classifier(tmp_path, dropout=0.25, optimizer=OPTIMIZERS[name])
    losses, state = train(folder, device, accumulate=accumulate)
    expected, other = train(folder, Device("cpu"), accumulate=accumulate)
    np.testing.assert_allclose(losses, expected, **tolerance(device))
    same(state, other, device)
    assert len(set(losses)) == len(losses)  # training moves


@pytest.mark.parametrize("device", ALL)
def test_batch_norm_and_its_statistics(device: Device, tmp_path: Path) -> None:
    folder = write_normalized(tmp_path)
    losses, state = train(folder, device)
    expected, other = train(folder, Device("cpu"))
    # on a device batch norm is written in other operators, so the sums may be in another order
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for name, parameter in other.parameters:
        np.testing.assert_allclose(
            state.parameters[name].data, parameter.data, rtol=1e-4, atol=1e-6, err_msg=name
        )
    assert not np.array_equal(state.parameters["mean"].data, np.zeros(8))


@pytest.mark.parametrize("device", MEMORY)
def test_a_smooth_cnn_over_200_steps(device: Device, tmp_path: Path) -> None:
    """No ReLU, no max pooling: at a kink rounding decides, and curves part for that alone."""
    model = with_weights(
        """net (float[n, 3, 8, 8] x) => (float[n, 3] scores) {
            a = Conv <pads = [1, 1, 1, 1]> (x, w1)
            b, m1, v1 = BatchNormalization <training_mode = 1> (a, scale1, bias1, mean1, var1)
            c = Tanh (b)
            d = AveragePool <kernel_shape = [2, 2], strides = [2, 2]> (c)
            e = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (d, w2)
            f, m2, v2 = BatchNormalization <training_mode = 1> (e, scale2, bias2, mean2, var2)
            g = Tanh (f)
            h = GlobalAveragePool (g)
            i = Flatten (h)
            scores = Gemm (i, w3, b3) }""",
        w1=(8, 3, 3, 3), w2=(16, 8, 3, 3), w3=(16, 3), b3=(3,),
    )  # fmt: skip
    for layer, size in ((1, 8), (2, 16)):
        for name, value in (("scale", 1.0), ("bias", 0.0), ("mean", 0.0), ("var", 1.0)):
            array = np.full(size, value, np.float32)
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, f"{name}{layer}"))
    statistics = ["mean1", "var1", "mean2", "var2"]
    generate_artifacts(
        model,
        requires_grad=[w.name for w in model.graph.initializer if w.name not in statistics],
        frozen_params=statistics,
        loss=LossType.CrossEntropyLoss,
        optimizer=optim.AdamW(eps=1e-4, weight_decay=0.01),
        artifact_directory=tmp_path,
    )
    rng = np.random.default_rng(1)
    batches = [(rng.normal(size=(8, 3, 8, 8)).astype(np.float32), rng.integers(0, 3, 8)) for _ in range(10)]

    def run(where: Device) -> tuple[list[float], CheckpointState]:
        state, module, optimizer = start(tmp_path, device=where)
        optimizer.set_learning_rate(2e-3)
        losses = []
        for index in range(200):
            losses.append(float(np.ravel(module(*batches[index % 10]))[0]))
            optimizer.step()
            module.lazy_reset_grad()
        return losses, state

    losses, state = run(device)
    expected, other = run(Device("cpu"))
    assert np.mean(expected[-10:]) < np.mean(expected[:10])
    np.testing.assert_allclose(losses, expected, rtol=0, atol=5e-6)
    for name, parameter in other.parameters:
        atol = 2e-5 * float(np.abs(parameter.data).max())
        np.testing.assert_allclose(
            state.parameters[name].data, parameter.data, rtol=0, atol=atol, err_msg=name
        )


@pytest.mark.parametrize("device", ALL)
def test_groups_of_parameters(device: Device, tmp_path: Path) -> None:
    groups = [
        ParameterGroup(("b1", "b2"), weight_decay=0.0),
        ParameterGroup(("w2",), learning_rate_scale=0.1),
    ]
    folder = write_classifier(tmp_path, parameter_groups=groups)
    losses, state = train(folder, device)
    expected, other = train(folder, Device("cpu"))
    np.testing.assert_allclose(losses, expected, **tolerance(device))
    same(state, other, device)


@pytest.mark.parametrize("device", MEMORY)
def test_an_update_in_stretches(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from onward.runtime.optimizers import vector as device_updates

    groups = [ParameterGroup(("b1", "b2"), weight_decay=0.0)]
    folder = write_classifier(tmp_path, parameter_groups=groups)
    _, other = train(folder, device)
    monkeypatch.setattr(device_updates, "_MOST_ON_DEVICE", 16)
    monkeypatch.setattr(device_updates, "_ALIGN", 16)
    _, state = train(folder, device)
    assert snapshot(state) == snapshot(other)


@pytest.mark.parametrize("device", ALL)
def test_parameters_are_read_and_written_where_they_lie(device: Device, tmp_path: Path) -> None:
    state, module, optimizer = start(write_normalized(tmp_path), device=device)
    x, labels = batch()
    module(x, labels)
    gradient = state.parameters["w1"].grad
    assert gradient is not None and np.abs(gradient).max() > 0
    before = state.parameters["w2"].data
    optimizer.step()
    assert not np.array_equal(state.parameters["w2"].data, before)
    state.parameters["w2"] = np.zeros_like(before)
    state.parameters["mean"] = np.full(8, 2.5, np.float32)
    np.testing.assert_array_equal(state.parameters["w2"].data, 0)
    module.eval()
    np.testing.assert_allclose(module(x, labels), np.log(3), rtol=1e-6)
    vector = module.get_contiguous_parameters().numpy()
    assert (vector == 2.5).sum() == 8
    module.copy_buffer_to_parameters(vector * 2, trainable_only=False)
    np.testing.assert_array_equal(state.parameters["mean"].data, np.full(8, 5.0))


@pytest.mark.parametrize("device", ALL)
@pytest.mark.parametrize("first_on_cpu", [True, False])
def test_a_checkpoint_goes_on_on_another_device(device: Device, first_on_cpu: bool, tmp_path: Path) -> None:
    folder = write_classifier(tmp_path, dropout=0.25)
    chain = [Device("cpu"), device] if first_on_cpu else [device, Device("cpu")]

    def run(devices: list[Device]) -> CheckpointState:
        checkpoint: str | Path = "checkpoint"
        for part, where in enumerate(devices):
            state, module, optimizer = start(folder, checkpoint, device=where)
            for index in range(3):
                module(*batch(3 * part + index))
                optimizer.step()
                module.lazy_reset_grad()
            module(*batch(99))  # a gradient that waits for its update
            checkpoint = tmp_path / f"saved-{part}"
            CheckpointState.save_checkpoint(state, checkpoint, include_optimizer_state=True)
        return CheckpointState.load_checkpoint(checkpoint)

    found, expected = run(chain), run([Device("cpu"), Device("cpu")])
    same(found, expected, device)
    for name, slots in expected._data.optimizer[0].slots.items():
        for slot, array in slots.items():
            np.testing.assert_allclose(
                found._data.optimizer[0].slots[name][slot], array, **tolerance(device), err_msg=name
            )
        np.testing.assert_allclose(
            found._data.accumulation[name], expected._data.accumulation[name], **tolerance(device)
        )


@pytest.mark.parametrize("device", ALL)
@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_what_is_not_finite_changes_nothing(policy: Any, device: Device, tmp_path: Path) -> None:
    state, module, optimizer = start(write_normalized(tmp_path), device=device, on_nonfinite=policy)
    module(*batch())
    optimizer.step()
    module.lazy_reset_grad()
    before = snapshot(state)
    x, labels = batch(1)
    x[0, 0] = np.inf
    if policy == "raise":
        with pytest.raises(NonFiniteError, match="is nan at training step 2"):
            module(x, labels)
    else:
        module(x, labels)
        assert not optimizer.step()
    assert snapshot(state) == before
    module(*batch(2))
    assert optimizer.step() and snapshot(state) != before


@pytest.mark.parametrize("device", ALL)
def test_a_gradient_that_is_not_finite_is_blamed_by_name(device: Device, tmp_path: Path) -> None:
    state, module, optimizer = start(write_classifier(tmp_path), device=device)
    module(*batch())
    gradients = module.memory.gradients
    broken = gradients.tensors["b1"].read().copy()
    broken[0] = np.nan
    gradients.tensors["b1"].write(broken)
    before = snapshot(state)
    with pytest.raises(NonFiniteError, match="gradient of 'b1' is not finite"):
        optimizer.step()
    assert snapshot(state) == before


@pytest.mark.parametrize("device", ALL)
def test_a_trainer_evaluates_exports_and_resumes(device: Device, tmp_path: Path) -> None:
    folder = write_classifier(tmp_path / "artifacts")
    x, labels = batch(size=24)
    options: dict[str, Any] = {"session_options": one_thread(), "progress": False, "metrics": ["accuracy"]}
    trainer = Trainer(folder, device=device, output_directory=tmp_path / "run", **options)
    trainer.fit((x, labels), (x, labels), epochs=2, batch_size=5)
    again = Trainer(folder, device=device, output_directory=tmp_path / "run", **options)
    again.fit((x, labels), (x, labels), epochs=3, batch_size=5, resume=True)
    straight = Trainer(folder, **options)
    straight.fit((x, labels), (x, labels), epochs=3, batch_size=5)
    same(again.state, straight.state, device)
    assert again.history.epochs[-1]["eval_loss"] == pytest.approx(
        straight.history.epochs[-1]["eval_loss"], rel=1e-5
    )
    np.testing.assert_allclose(again.predict(x), straight.predict(x), rtol=1e-4, atol=1e-5)
    again.export(tmp_path / "model.onnx")
    answer = ort.InferenceSession(tmp_path / "model.onnx").run(["scores"], {"x": x})[0]
    np.testing.assert_allclose(answer, straight.predict(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", MEMORY)
def test_sessions_for_shapes_are_few_and_the_last_ones(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "_KEPT", 2)
    monkeypatch.setattr(step, "_OFTEN", 3)
    folder = write_classifier(tmp_path)
    _, module = load(folder, device=device)
    _, reference = load(folder)
    sizes = [3, 4, 5, 3, 5, 6, 5, 5, 5, 4]
    for index, size in enumerate(sizes):
        for one in (module, reference):
            one.lazy_reset_grad()
        loss, expected = module(*batch(index, size))[0], reference(*batch(index, size))[0]
        np.testing.assert_allclose(loss, expected, **tolerance(device))
    kept = [key[1][0] for key in module.step._by_shape]
    assert kept == [5, 4] or set(kept) == {5, 3}  # 5 came often enough to replace what was used longest ago
    assert len(module.step.sessions()) == 3  # and one for all other shapes


@pytest.mark.parametrize("device", MEMORY)
def test_small_inputs_are_copied_together_and_others_alone(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was in a session's block before: other sizes, one input that is large, values of the user's own."""
    monkeypatch.setattr(step, "_KEPT", 0)  # one session for all shapes
    monkeypatch.setattr(bound, "_SMALL", 200)
    folder = write_classifier(tmp_path)
    _, module = load(folder, device=device)
    _, reference = load(folder)
    packed: list[set[str]] = []
    real = bound._Packed.write
    monkeypatch.setattr(bound._Packed, "write", lambda self, a: (packed.append(set(a)), real(self, a))[1])
    for index, size in enumerate([3, 3, 40, 3, 4, 20, 4, 3]):
        for one in (module, reference):
            one.lazy_reset_grad()
        x, labels = batch(index, size)
        given: list[Any] = [x, labels]
        if index == 4:
            given = [ort.OrtValue.ortvalue_from_numpy(a, device.kind, device.number) for a in given]
        elif index == 7:
            given = [np.repeat(x, 2, axis=1)[:, ::2], labels]  # rows that do not lie together
        loss = module(*given)[0]
        loss = loss.numpy() if isinstance(loss, ort.OrtValue) else loss
        np.testing.assert_allclose(loss, reference(x, labels)[0], **tolerance(device))
    assert packed == [{"x", "labels"}] * 5  # of sizes 3 and 4, from the host


@pytest.mark.parametrize("device", MEMORY)
def test_ortvalues_and_additional_outputs(device: Device, tmp_path: Path) -> None:
    folder = write_classifier(tmp_path)
    _, module = load(folder, device=device)
    _, reference = load(folder)
    x, labels = batch()
    for _ in range(3):
        given = [ort.OrtValue.ortvalue_from_numpy(a, device.kind, device.number) for a in (x, labels)]
        loss, scores = module(*given)
        expected = reference(x, labels)
        assert isinstance(loss, ort.OrtValue)
        np.testing.assert_allclose(loss.numpy(), expected[0], **tolerance(device))
        np.testing.assert_allclose(scores.numpy(), expected[1], **tolerance(device))


@pytest.mark.parametrize("device", MEMORY)
def test_strings_need_the_cpu(device: Device, tmp_path: Path) -> None:
    text = """net (string[n] word, float[n, 2] x) => (float loss) {
        i = Identity (word)  y = Mul (x, w)  loss = ReduceMean <keepdims = 0> (y) }"""
    model = onnx.parser.parse_model('<ir_version: 10, opset_import: ["": 18]>' + text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(2, np.float32), "w"))
    model.graph.output.append(onnx.helper.make_tensor_value_info("i", onnx.TensorProto.STRING, ["n"]))
    generate_artifacts(
        model, requires_grad=["w"], optimizer=OptimType.SGD, artifact_directory=tmp_path,
        additional_output_names=["i"],
    )  # fmt: skip
    _, module = load(tmp_path, device=device)
    with pytest.raises(ValueError, match="has strings, which only the CPU reads"):
        module(np.array(["a", "b"], object), np.ones((2, 2), np.float32))


@pytest.mark.parametrize("device", MEMORY)
def test_too_little_memory_names_what_to_lower(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, module, optimizer = start(write_normalized(tmp_path), device=device)
    module(*batch())
    optimizer.step()
    module.lazy_reset_grad()
    before = snapshot(state)

    def fail(*_: Any) -> None:
        raise RuntimeError("Failed to allocate memory for requested buffer of size 1099511627776")

    with monkeypatch.context() as patched:
        patched.setattr(bound, "run_bound", fail)
        with pytest.raises(DeviceMemoryError, match=r"size 1099511627776.*lower the batch size"):
            module(*batch())
    assert snapshot(state) == before
    module(*batch())
    assert optimizer.step()


def test_too_little_memory_for_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, module, optimizer = start(write_normalized(tmp_path), device=EMULATED)
    module(*batch(size=4))
    optimizer.step()
    module.lazy_reset_grad()
    before, real = snapshot(state), DeviceTensor.allocate.__func__  # type: ignore[attr-defined]
    for there_is_room in range(2):
        left = [there_is_room]

        def allocate(device: Device, shape: Any, dtype: Any, left: list[int] = left) -> DeviceTensor:
            left[0] -= 1
            if left[0] < 0:
                raise RuntimeError(f"Failed to allocate memory for requested buffer of size {np.prod(shape)}")
            return real(DeviceTensor, device, shape, dtype)

        with monkeypatch.context() as patched:
            patched.setattr(DeviceTensor, "allocate", allocate)
            with pytest.raises(DeviceMemoryError, match=r"buffer of size \d+"):
                module(*batch(size=64))
        assert snapshot(state) == before
    module(*batch(size=4))
    assert optimizer.step()


@pytest.mark.parametrize("room", range(4))
def test_too_little_memory_for_the_training_state(
    room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_classifier(tmp_path)
    before, real = (tmp_path / "checkpoint").read_bytes(), DeviceTensor.allocate.__func__  # type: ignore[attr-defined]
    left = [room]

    def allocate(device: Device, shape: Any, dtype: Any) -> DeviceTensor:
        if np.prod(shape) > 16:  # numbers of their own always fit
            left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("CUDA failure 2: out of memory ; GPU=0 ; hostname=here")
        return real(DeviceTensor, device, shape, dtype)

    with monkeypatch.context() as patched:
        patched.setattr(DeviceTensor, "allocate", allocate)
        with pytest.raises(
            DeviceMemoryError, match=r"for [\d,]+ bytes of .*CUDA failure 2.*fewer parameters"
        ):
            start(tmp_path, device=EMULATED)
    assert (tmp_path / "checkpoint").read_bytes() == before
    _, module, optimizer = start(tmp_path, device=EMULATED)
    module(*batch())
    assert optimizer.step()


# ---- recording -----------------------------------------------------------------------------------


@pytest.mark.parametrize("device", MEMORY)
def test_recorded_runs_equal_plain_ones(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recording executes a run more than once; over the CPU provider that is made to happen here."""
    monkeypatch.setattr(step, "_KEPT", 8)  # every session is for one shape, and recorded
    folder = write_classifier(tmp_path, dropout=0.25)
    plain, one = train(folder, Device(device.kind, memory=device.memory, graphs=False), accumulate=2)
    if device.kind == "cpu":
        monkeypatch.setattr(Device, "captures", property(lambda self: self.memory == "device"))
        real = bound.run_bound
        recorded_ones = weakref.WeakSet[ort.InferenceSession]()

        def twice_at_first(session: ort.InferenceSession, binding: Any) -> None:
            real(session, binding)
            if session not in recorded_ones:
                recorded_ones.add(session)
                real(session, binding)

        monkeypatch.setattr(bound, "run_bound", twice_at_first)
    recorded, other = train(folder, device, accumulate=2)
    assert recorded == plain
    assert snapshot(one) == snapshot(other)


def test_an_update_is_recorded_without_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from onward.runtime.optimizers import vector as device_updates

    folder = write_classifier(tmp_path)
    _, plain = train(folder, EMULATED)
    monkeypatch.setattr(Device, "captures", property(lambda self: self.memory == "device"))
    recorded: list[Any] = []
    real = device_updates._BoundRule._run

    def run(self: Any) -> None:
        if not self._recorded:
            recorded.append(self)
            real(self)
        real(self)

    monkeypatch.setattr(device_updates._BoundRule, "_run", run)
    _, other = train(folder, EMULATED)
    assert recorded and snapshot(plain) == snapshot(other)


def test_what_cannot_be_recorded_runs_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from onward.runtime.optimizers import vector as device_updates

    folder = write_classifier(tmp_path)
    losses, plain = train(folder, EMULATED, accumulate=2)
    monkeypatch.setattr(Device, "captures", property(lambda self: self.memory == "device" and self.graphs))
    real = bound.make_recording

    def half_done(run: Callable[[], None], changed: Iterable[Tensor]) -> None:
        def fail() -> None:
            run()
            raise RuntimeError("operation not permitted when stream is capturing")

        real(fail, changed)

    monkeypatch.setattr(bound, "make_recording", half_done)
    monkeypatch.setattr(device_updates, "make_recording", half_done)
    with pytest.warns(RuntimeWarning, match="could not be recorded as a CUDA graph"):
        found, other = train(folder, EMULATED, accumulate=2)
    assert found == losses and snapshot(plain) == snapshot(other)


# ---- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", MEMORY)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64, np.int8, np.bool_, "bfloat16"])
def test_tensors_of_every_type(dtype: Any, device: Device) -> None:
    import ml_dtypes

    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    array = (np.arange(15).reshape(3, 5) % 2).astype(kind)
    tensor = make_tensor(device, array)
    np.testing.assert_array_equal(tensor.read(), array)
    tensor.write(array[::-1])
    np.testing.assert_array_equal(tensor.read(), array[::-1])
    assert tensor.read().dtype == kind


@pytest.mark.parametrize("device", MEMORY)
def test_what_is_done_to_vectors(device: Device) -> None:
    flat = FlatBuffer({"a": (3, 4), "b": (5,), "none": (0,)}, device=device)
    assert isinstance(flat.whole, DeviceTensor) and not flat.on_host
    assert not flat.whole.read().any()
    flat.tensors["a"].write(np.full((3, 4), 2.0))
    flat.tensors["b"].write(np.arange(5))
    flat.whole.scale(0.5)
    np.testing.assert_array_equal(flat.arrays()["b"], np.arange(5) / 2)
    assert flat.whole.squared_norm() == pytest.approx(12 + 7.5)
    assert flat.tensors["none"].squared_norm() == 0 and flat.tensors["none"].read().size == 0
    part = flat.part(16, 32)
    assert part.shapes == {"b": (5,)}
    part.whole.add(part.whole)
    np.testing.assert_array_equal(flat.tensors["b"].read(), np.arange(5))
    np.testing.assert_array_equal(flat.tensors["a"].read(), 1)
    flat.write({"b": np.full(5, 3.0)})
    np.testing.assert_array_equal(flat.tensors["b"].read(), 3)
    np.testing.assert_array_equal(flat.tensors["a"].read(), 1)
    assert flat.whole.is_finite()
    flat.tensors["b"].write(np.array([1, np.nan, 0, 0, 0]))
    assert not flat.whole.is_finite() and not np.isfinite(flat.whole.squared_norm())
    flat.whole.clear()
    assert flat.whole.squared_norm() == 0
    flat.tensors["b"].write(np.full(5, 1e25))  # whose square is too large for float32
    assert flat.whole.squared_norm() == pytest.approx(5e50)


def test_a_norm_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_tensor, "_SUMMED", 7)
    flat = FlatBuffer({"a": (30,)}, device=Device("cpu", memory="device"))
    flat.tensors["a"].write(np.arange(30))
    assert flat.whole.squared_norm() == sum(i * i for i in range(30)) and flat.whole.is_finite()
    flat.tensors["a"].write(np.array([0.0] * 29 + [np.inf]))
    assert not flat.whole.is_finite() and not np.isfinite(flat.whole.squared_norm())


@pytest.mark.parametrize("device", MEMORY)
@pytest.mark.parametrize("possible", [True, False])
def test_a_norm_is_recorded_where_it_can_be(
    possible: bool, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, recorded = kernels.reduction, []

    def make(on: Device, name: str, parts: Any, *, capture: bool = False) -> ort.InferenceSession:
        if capture and not possible:
            raise RuntimeError("operation not permitted when stream is capturing")
        if capture:
            recorded.append(name)
        return real(on, name, parts, capture=capture)

    monkeypatch.setattr(kernels, "reduction", make)
    monkeypatch.setattr(device_tensor, "_SUMMED", 32)
    monkeypatch.setattr(Device, "captures", property(lambda self: self.graphs))
    flat = FlatBuffer({"a": (30,), "b": (50,)}, device=device)
    for value in (1.0, 3.0):  # what the vector is now, not what it was when the run was recorded
        flat.tensors["b"].write(np.full(50, value))
        assert flat.whole.squared_norm() == pytest.approx(50 * value**2) and flat.whole.is_finite()
        assert flat.tensors["b"].squared_norm() == pytest.approx(50 * value**2)
    flat.tensors["a"].write(np.full(30, np.inf))
    assert not flat.whole.is_finite()
    # once for each number of the whole; tensors in it share a session that is not recorded
    assert recorded == (["norm", "zero"] if possible else [])


def test_a_vector_is_shared_with_numpy_and_written_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_tensor, "_PIECE", 8)
    flat = FlatBuffer({"a": (3,), "b": (2, 5)}, device=EMULATED)
    flat.tensors["b"].write(np.arange(10).reshape(2, 5))
    same_memory = np.asarray(flat.whole)
    np.testing.assert_array_equal(same_memory[16:26], np.arange(10))
    same_memory[:3] = 7
    np.testing.assert_array_equal(flat.tensors["a"].read(), 7)
    assert not hasattr(flat.whole, "__cuda_array_interface__")


@pytest.mark.parametrize("room", range(2))
def test_too_little_memory_for_another_layout_leaves_the_old_one(
    room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters and gradients must lie in one order: an update takes them as two vectors."""
    state, module, optimizer = start(write_classifier(tmp_path), device=EMULATED)
    before, order, real = (
        snapshot(state),
        list(module.memory.parameters.spans),
        DeviceTensor.allocate.__func__,
    )  # type: ignore[attr-defined]
    left = [room]

    def allocate(device: Device, shape: Any, dtype: Any) -> DeviceTensor:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("CUDA failure 2: out of memory")
        return real(DeviceTensor, device, shape, dtype)

    with monkeypatch.context() as patched:
        patched.setattr(DeviceTensor, "allocate", allocate)
        with pytest.raises(DeviceMemoryError, match="out of memory"):
            module.memory.arrange(reversed(order))
    assert list(module.memory.parameters.spans) == list(module.memory.gradients.spans) == order
    assert snapshot(state) == before
    module(*batch())
    assert optimizer.step()


def test_copied_memory_is_bound_at_every_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A provider may copy what it is given when that is bound: a stand-in binds copies."""
    from onward.runtime.memory import HostTensor

    real = HostTensor.bind_input
    kept = []

    def bind_a_copy(self: HostTensor, binding: Any, name: str) -> None:
        kept.append(HostTensor(self.array.copy()))
        real(kept[-1], binding, name)

    folder = write_normalized(tmp_path)
    expected, _ = train(folder, Device("cpu"))
    monkeypatch.setattr(HostTensor, "bind_input", bind_a_copy)
    losses, _ = train(folder, COPIED)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)


# ---- choosing ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("gpu", ValueError, "choose one of auto, cpu, cuda"),
        ("cuda:x", ValueError, "choose one of"),
        ("cuda:-1", ValueError, "choose one of"),
        ("openvino", DeviceError, "OpenVINOExecutionProvider.*does not have"),
        ("cuda:77", DeviceError, "cannot be used"),
    ],
)
def test_a_device_that_is_not_there(name: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        find_device(name)


def test_a_provider_of_one_device_has_no_second(monkeypatch: pytest.MonkeyPatch) -> None:
    devices._problem.cache_clear()
    available = [*ort.get_available_providers(), "WebGpuExecutionProvider"]
    monkeypatch.setattr(ort, "get_available_providers", lambda: available)
    with pytest.raises(
        DeviceError, match=r"device='webgpu:3' cannot be used: .* offers 1 of them, counted from 0"
    ):
        find_device("webgpu:3")


def test_auto_takes_what_works() -> None:
    assert find_device("auto") == Device("cuda" if HAS_CUDA else "cpu")


def test_a_session_that_falls_back_to_the_cpu_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As onnxruntime does where a library of CUDA is missing: it prints that, and goes on without."""
    folder = write_classifier(tmp_path)
    monkeypatch.setattr(devices, "_problem", lambda kind, number: None)
    monkeypatch.setattr(Device, "providers", lambda self, capture=False: [devices.CPU])
    monkeypatch.setattr(device_check, "check_device", lambda device: device_check.DeviceReport({}))
    _, module = load(folder, device=Device("coreml"))
    with pytest.raises(DeviceError, match="on CPUExecutionProvider and not on device='coreml'"):
        module(*batch())


def test_a_provider_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fallen:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def get_providers(self) -> list[str]:
            return [devices.CPU]

    monkeypatch.setattr(
        devices.ort, "get_available_providers", lambda: ["CUDAExecutionProvider", devices.CPU]
    )
    monkeypatch.setattr(devices.ort, "InferenceSession", Fallen)
    monkeypatch.setattr(devices, "why_cuda_fails", lambda number, built: "what the driver says")
    devices._problem.cache_clear()
    try:
        with pytest.raises(
            DeviceError, match=r"could not start its CUDAExecutionProvider.*; what the driver says"
        ):
            find_device("cuda:3")
        with pytest.warns(RuntimeWarning, match="takes the CPU, because"):
            assert find_device("auto") == Device("cpu")
    finally:
        devices._problem.cache_clear()


@pytest.mark.parametrize(
    ("version", "gpus", "missing", "number", "words"),
    [
        (None, 0, (), 0, "there is no NVIDIA driver .*install one that supports CUDA 13.0"),
        (12040, 1, (), 0, "driver supports CUDA 12.4 at most.*built for CUDA 13.0: update the driver"),
        (13000, 0, (), 0, r"sees no GPU \(CUDA_VISIBLE_DEVICES is '-1'\)"),
        (13000, 1, (), 7, "sees 1 GPU, cuda:0 .*choose one of those"),
        (13010, 4, (), 4, "sees cuda:0 to cuda:3"),
        (13000, 1, ("cudnn",), 0, r"cudnn\S* is not found: pip install 'onnxruntime-gpu\[cuda,cudnn\]'"),
        (13000, 1, ("cudnn", "cublas"), 0, r"cublas\S* and \S*cudnn\S* are not found"),
        (13000, 1, (), 0, "are all libraries of CUDA 13.0 and cuDNN 9 installed"),
    ],
)  # fmt: skip
def test_why_cuda_does_not_start(
    version: int | None, gpus: int, missing: tuple[str, ...], number: int, words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    class Driver:
        def cuDriverGetVersion(self, found: Any) -> int:
            found._obj.value = version
            return 0

        def cuInit(self, flags: int) -> int:
            return 0 if gpus else 100

        def cuDeviceGetCount(self, found: Any) -> int:
            found._obj.value = gpus
            return 0

    def load(name: str) -> Any:
        if any(part in name for part in missing):
            return None
        return None if version is None and "cuda." in name else Driver()

    monkeypatch.setattr(cuda_driver, "_load", load)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert re.search(words, cuda_driver.why_cuda_fails(number, "13.0"))


# ---- models for CUDA -----------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("opset", [15, 17, 18])
@pytest.mark.parametrize("shape", [(6, 4), (3, 4, 5), (2, 4, 3, 5)])
def test_batch_norm_in_other_operators(shape: tuple[int, ...], opset: int, momentum: float) -> None:
    dims = ", ".join(["n", *map(str, shape[1:])])
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": {opset}]>
        net (float[{dims}] x, float[4] s, float[4] b, float[4] mean, float[4] var)
          => (float[{dims}] y, float[4] m, float[4] v) {{
            y, m, v = BatchNormalization <training_mode = 1, momentum = {momentum}> (x, s, b, mean, var) }}"""
    )
    other = onnx.ModelProto()
    other.CopyFrom(model)
    expand_batch_norm(other)
    assert not any(a.name == "training_mode" and a.i for node in other.graph.node for a in node.attribute)
    onnx.checker.check_model(other, full_check=True)
    rng = np.random.default_rng(0)
    feeds = {"x": rng.normal(3, 2, shape), **{n: rng.uniform(0.5, 2, 4) for n in ("s", "b", "mean", "var")}}
    feeds = {name: array.astype(np.float32) for name, array in feeds.items()}

    def run(model: onnx.ModelProto) -> Any:
        return ort.InferenceSession(model.SerializeToString()).run(None, feeds)

    for found, expected in zip(run(other), run(model)):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_deterministic_kernels_are_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (_, usual), (_, exact) = (Device("cuda", deterministic=asked).providers()[0] for asked in (False, True))
    assert "cudnn_conv_algo_search" not in usual and exact["cudnn_conv_algo_search"] == "DEFAULT"
    folder, asked, session = write_classifier(tmp_path), [], ort.InferenceSession
    monkeypatch.setattr(
        ort,
        "InferenceSession",
        lambda model, options, **rest: (
            asked.append(options.use_deterministic_compute) or session(model, options, **rest)
        ),
    )
    load(folder, device=Device("cpu", deterministic=True))
    assert asked and all(asked)


@pytest.mark.cuda
@pytest.mark.skipif(not HAS_CUDA, reason="needs onnxruntime-gpu and a GPU that it can use")
@pytest.mark.parametrize("make", [write_classifier, write_normalized])
def test_every_node_runs_on_the_gpu_and_is_recorded(make: Any, tmp_path: Path) -> None:
    folder = make(tmp_path)
    options = one_thread()
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    _, module = load(folder, device="cuda", session_options=options)
    module(*batch())
    (made,) = module.step._by_shape.values()
    assignments = made.session.get_provider_graph_assignment_info()
    on_cpu = [n.op_type for part in assignments if part.ep_name == devices.CPU for n in part.get_nodes()]
    assert not on_cpu and made.capture
