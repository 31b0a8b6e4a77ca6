"""A device is checked before it trains: what it computes wrong is written otherwise, or refused.

The devices are doubles: onnxruntime's CPU provider behind a reader that takes some operators for others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onward.errors import DeviceError
from onward.graph.proto.conservative_forms import FASTER_FORMS
from onward.ort_session import create_session
from onward.runtime import device_check, devices, sessions, step
from onward.runtime.device_check import check_device, onnxruntime_on
from onward.runtime.devices import CPU, Device
from onward.runtime.operator_cases import OPERATOR_CASES, operators_of
from small_models import batch, snapshot, start, with_weights, write_classifier, write_normalized

DEVICE = Device("openvino")
# Changes a node as the double reads it, or raises.
Reading = Callable[[onnx.NodeProto], None]
Double = Callable[[Reading], list[int]]


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Double]:
    """Makes DEVICE a double that reads nodes in a way; returns a list that grows with each of its sessions."""
    monkeypatch.setitem(devices._PROVIDERS, "openvino", CPU)
    monkeypatch.setattr(devices, "_problem", lambda kind, number: None)
    monkeypatch.setenv("ONWARD_CACHE", str(tmp_path / "cache"))
    device_check._check.cache_clear()

    def make(reading: Reading) -> list[int]:
        opened: list[int] = []

        def create(model: Any, options: Any = None, *, providers: Any = (CPU,), **more: Any) -> Any:
            if isinstance(providers[0], str):  # the CPU itself
                return create_session(model, options, providers=providers, **more)
            source = onnx.load_from_string(model) if isinstance(model, bytes) else model
            read = onnx.ModelProto()
            read.CopyFrom(source)
            for node in operators_of(read.graph):
                reading(node)
            opened.append(len(read.graph.node))
            return create_session(read, options, providers=[CPU], **more)

        for module in (device_check, sessions):
            monkeypatch.setattr(module, "create_session", create)
        # another process would have the real device
        monkeypatch.setattr(device_check, "run_separately", lambda *_: nullcontext(onnxruntime_on(DEVICE)))
        return opened

    yield make  # type: ignore[misc]
    device_check._check.cache_clear()


def half_for_no_beta(node: onnx.NodeProto) -> None:
    """As OpenVINO reads a HardSigmoid: an explicit beta of 0 is the default of 0.5."""
    if node.op_type == "HardSigmoid":
        for attribute in node.attribute:
            if attribute.name == "beta" and attribute.f == 0:
                attribute.f = 0.5


def no_batch_statistics(node: onnx.NodeProto) -> None:
    """As WebGPU runs a BatchNormalization: for inference alone."""
    if node.op_type == "BatchNormalization" and len(node.output) > 1:
        raise RuntimeError("trainingMode is not supported yet")


def other_numbers(node: onnx.NodeProto) -> None:
    """As a device draws that keeps int64 in 32 bits: other bits of the hash."""
    if node.op_type == "Less" and ("limit" in node.input[1] or node.output[0] in ("y", "y/signed")):
        node.op_type = "Greater"


def train(folder: Path, device: Device | str, *, sizes: tuple[int, ...] = (6, 6, 5)) -> dict[str, np.ndarray]:
    """The parameters after a few steps and evaluations, with the losses."""
    state, module, optimizer = start(folder, device=device)
    losses = []
    for seed, size in enumerate(sizes):
        inputs = batch(seed, size)
        losses.append(module.train()(*inputs)[0] if len(module.signature.outputs) > 1 else module(*inputs))
        optimizer.step()
        module.lazy_reset_grad()
        module.eval()(*inputs)
        module.train()
    arrays = {name: parameter.data.copy() for name, parameter in state.parameters}
    return {**arrays, "losses": np.array(losses)}


def assert_same(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for name, array in expected.items():
        np.testing.assert_allclose(actual[name], array, rtol=2e-6, atol=2e-6, err_msg=name)


def write_relu(folder: Path, activation: str = "Relu") -> Path:
    from onward.artifacts import LossType, OptimType, generate_artifacts

    model = with_weights(
        "net (float[n, 4] x) => (float[n, 3] scores) "
        f"{{ a = MatMul (x, w1)  r = {activation} (a)  scores = MatMul (r, w2) }}",
        w1=(4, 8), w2=(8, 3),
    )  # fmt: skip
    generate_artifacts(
        model, requires_grad=["w1", "w2"], loss=LossType.CrossEntropyLoss, optimizer=OptimType.AdamW,
        artifact_directory=folder,
    )  # fmt: skip
    return folder


CASES = {
    "a ReLU's mask": (half_for_no_beta, write_relu, "masks"),
    "statistics of a batch": (no_batch_statistics, write_normalized, "batch statistics"),
    "dropout's masks": (other_numbers, lambda f: write_classifier(f, dropout=0.4), "host random numbers"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_device_reads_otherwise_is_written_in_another_form(
    name: str, double: Double, tmp_path: Path
) -> None:
    reading, write, form = CASES[name]
    folder = write(tmp_path / "artifacts")
    expected = train(folder, "cpu")
    double(reading)
    assert form in check_device(DEVICE).forms
    assert_same(train(folder, DEVICE), expected)


def test_the_first_step_is_compared_with_the_cpu_whatever_the_operators_are(
    double: Double, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_relu(tmp_path / "artifacts")
    expected = train(folder, "cpu")
    double(half_for_no_beta)
    monkeypatch.setattr(device_check, "check_device", lambda device: device_check.DeviceReport({}))
    state, module, _ = start(folder, device=DEVICE)
    before = snapshot(state)
    for _ in range(2):  # it stays refused
        with pytest.raises(
            DeviceError, match=r"training model .* wrong: its gradient of 'w1' is off by 0\.\d"
        ):
            module(*batch())
    assert snapshot(state) == before
    monkeypatch.setattr(step, "_require_same", lambda *_: None)
    assert np.abs(train(folder, DEVICE)["w1"] - expected["w1"]).max() > 1e-3  # without it, all would be lost


def test_an_operator_that_is_in_no_table_is_compared_too(double: Double, tmp_path: Path) -> None:
    """A wrong Softsign, which no case has: the first step and the first evaluation say so."""

    def wrong(node: onnx.NodeProto) -> None:
        node.op_type = "Tanh" if node.op_type == "Softsign" else node.op_type

    assert "Softsign" not in {case.operator for case in OPERATOR_CASES}
    folder = write_relu(tmp_path / "artifacts", "Softsign")
    double(wrong)
    state, module, _ = start(folder, device=DEVICE)
    before = snapshot(state)
    with pytest.raises(DeviceError, match=r"device='openvino' computes the training model .* wrong: its "):
        module(*batch())
    with pytest.raises(DeviceError, match=r"computes the eval model .* wrong: its output 'loss"):
        module.eval()(*batch())
    assert snapshot(state) == before


def test_a_family_that_no_form_makes_right_is_refused_before_the_first_step(
    double: Double, tmp_path: Path
) -> None:
    def wrong(node: onnx.NodeProto) -> None:
        node.op_type = "Sigmoid" if node.op_type == "Tanh" else node.op_type

    folder = write_classifier(tmp_path / "artifacts")
    double(wrong)
    state, module, _ = start(folder, device=DEVICE)
    before = snapshot(state)
    with pytest.raises(
        DeviceError, match=r"training model .*: Tanh wrong by .*`onward conform --device openvino`"
    ):
        module(*batch())
    with pytest.raises(DeviceError, match=r"eval model .*: Tanh wrong"):
        module.eval()(*batch())
    assert snapshot(state) == before


def test_a_family_that_the_model_has_not_does_not_matter(double: Double, tmp_path: Path) -> None:
    def failing(node: onnx.NodeProto) -> None:
        if node.op_type in ("Loop", "Erf"):
            raise RuntimeError("no kernel")

    folder = write_classifier(tmp_path / "artifacts")
    expected = train(folder, "cpu")
    double(failing)
    assert {str(case) for case, _ in check_device(DEVICE).unfit()} == {"Loop", "Erf"}
    assert_same(train(folder, DEVICE), expected)


def test_a_model_that_a_device_cannot_load_is_refused_with_the_operator(
    double: Double, tmp_path: Path
) -> None:
    def page(node: onnx.NodeProto) -> None:
        if node.op_type == "Gemm" and node.output[0] == "a":
            raise RuntimeError("FAIL\nWhile validating ONNX node '<Node(Gemm): first>':\nno such bias\nstack")

    folder = write_classifier(tmp_path / "artifacts")
    double(page)
    _, module, _ = start(folder, device=DEVICE)
    with pytest.raises(DeviceError, match=r"training model .*: Gemm 'first': no such bias"):
        module(*batch())


def test_a_device_is_checked_once(double: Double, tmp_path: Path) -> None:
    opened = double(half_for_no_beta)
    report = check_device(DEVICE)
    count = len(opened)
    assert count >= len(OPERATOR_CASES)
    device_check._check.cache_clear()  # as in another process
    assert check_device(DEVICE) == report and len(opened) == count
    (path,) = (tmp_path / "cache" / "devices").iterdir()
    path.write_bytes(b'{"verdicts": {"Tanh": 1}}')
    device_check._check.cache_clear()
    assert check_device(DEVICE) == report and len(opened) > count


def test_a_faster_form_is_used_where_the_device_computes_it_right(
    double: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FASTER_FORMS, "openvino", ("log softmax", "comparisons for one-hots"))

    def wrong_equal(node: onnx.NodeProto) -> None:
        if node.op_type == "Equal" and "places" in node.input[1]:
            node.op_type = "Less"

    double(wrong_equal)
    report = check_device(DEVICE)
    assert report.faster == ["log softmax"] and not report.unfit()
    device_check._check.cache_clear()  # as in another process
    assert check_device(DEVICE) == report


def test_each_size_of_a_batch_is_a_session_of_its_own(double: Double, tmp_path: Path) -> None:
    """Devices are checked with sizes known, and some take nothing else."""
    folder = write_classifier(tmp_path / "artifacts")
    opened = double(lambda node: None)
    check_device(DEVICE)
    count = len(opened)
    train(folder, DEVICE, sizes=(6, 5, 6, 5))
    assert len(opened) - count == 4  # a training and an eval model for each size


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_cpu_and_cuda_are_not_checked(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_check, "_check", lambda *identity: pytest.fail("checked"))
    assert check_device(Device(device)) == device_check.DeviceReport({})


def test_every_case_is_right_on_the_cpu_and_has_a_name_of_its_own() -> None:
    names = [str(case) for case in OPERATOR_CASES]
    assert len(names) == len(set(names))
    verdicts = device_check.judge_cases(
        OPERATOR_CASES, lambda model, feeds: device_check.run_on(Device("cpu"), model, feeds)
    )
    assert {name for name, verdict in verdicts.items() if verdict.state != "right"} == set()
