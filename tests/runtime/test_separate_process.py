"""Models run in a process of their own: what crashes or fails there is an error here, and the next run works."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import numpy as np
import onnx
import onnx.parser
import pytest

from onward.errors import DeviceError
from onward.runtime import separate_process
from onward.runtime.separate_process import Run, run_separately

_TEXT = '<ir_version: 10, opset_import: ["": 21]> g (float[n] x) => (float[n] y) { y = %s (x) }'


def make_fragile(prefix: str) -> Run:
    """A runtime that dies of a Tanh, hangs at a Sin, refuses a Cos and prints at all others."""

    def run(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> Sequence[np.ndarray]:
        operator = model.graph.node[0].op_type
        if operator == "Tanh":
            os.kill(os.getpid(), signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)
        if operator == "Sin":
            time.sleep(60)
        if operator == "Cos":
            raise ValueError(f"{prefix} no kernel\nstack")
        print("the driver says something")
        return [-feeds["x"], np.array(True), np.zeros((0, 3), np.int64)]

    return run


def fragile() -> AbstractContextManager[Run]:
    return run_separately(f"{__name__}:make_fragile", "Cos:")


def model(operator: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(_TEXT % operator)


X = {"x": np.arange(3, dtype=np.float32)}


def test_results_come_back_with_their_types_and_shapes() -> None:
    with fragile() as run:
        negated, flag, empty = run(model("Neg"), X)
    assert negated.tolist() == [0, -1, -2] and negated.dtype == np.float32
    assert flag.shape == () and flag.dtype == np.bool_ and bool(flag)
    assert empty.shape == (0, 3) and empty.dtype == np.int64


def test_a_crash_or_an_error_is_an_error_and_the_next_model_runs() -> None:
    with fragile() as run:
        with pytest.raises(RuntimeError, match="it crashed the process"):
            run(model("Tanh"), X)
        with pytest.raises(RuntimeError, match=r"^Cos: no kernel$"):
            run(model("Cos"), X)
        assert run(model("Neg"), X)[0].tolist() == [0, -1, -2]


def test_a_process_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    with fragile() as run:
        run(model("Neg"), X)
        monkeypatch.setattr(separate_process, "_PATIENCE", 0.3)
        with pytest.raises(RuntimeError, match=r"no answer within 0\.3 seconds"):
            run(model("Sin"), X)
        monkeypatch.setattr(separate_process, "_PATIENCE", 60)
        assert run(model("Neg"), X)[0].tolist() == [0, -1, -2]


@pytest.mark.parametrize(
    ("maker", "words"),
    [
        (f"{__name__}:make_nothing", "does not start: no such driver"),
        (f"{__name__}:end_at_once", r"does not start: it crashed the process \(exit code 3\)"),
        ("onward.runtime.device_check:onnxruntime_on", "device='rocm' cannot be used"),
    ],
)
def test_a_runtime_that_does_not_start_is_an_error_of_the_device(maker: str, words: str) -> None:
    with run_separately(maker, "rocm") as run, pytest.raises(DeviceError, match=words):
        run(model("Neg"), X)


def make_nothing(_: str) -> Run:
    raise OSError("no such driver")


def end_at_once(_: str) -> Run:
    sys.stdout.flush()
    os._exit(3)
