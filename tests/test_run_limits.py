"""Runs of models that never end, or take ever more memory: a clear error instead."""

from __future__ import annotations

import os
import time

import numpy as np
import onnx
import onnx.parser
import pytest

import onward
from onward import limits
from onward.errors import LimitError, ModelError
from onward.run_limits import require_time, watched
from onward.runtime.sessions import open_session

X = np.ones(2, np.float32)


def loop(turn: str) -> onnx.ModelProto:
    """A loop without end that does this at each turn."""
    return onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[2] x) => (float[A] y) '
        "<int64 n = {4611686018427387904}, bool c = {1}> { y = Loop(n, c, x) "
        f"<body = b (int64 i, bool ci, float[K] a) => (bool co, float[L] o) {{ co = Identity(ci) o = {turn} }}> }}"
    )


def test_a_run_without_end_is_ended(capfd: pytest.CaptureFixture[str]) -> None:
    session = open_session(loop("Neg(a)"))
    started = time.monotonic()
    with limits.override(run_seconds=1), pytest.raises(LimitError, match="run_seconds") as raised:
        session.run(None, {"x": X})
    assert time.monotonic() - started < 10
    assert "--limit run_seconds=10" in raised.value.hint
    assert capfd.readouterr().err == ""


def test_a_run_that_takes_ever_more_memory_is_ended() -> None:
    session = open_session(loop("Concat<axis=0>(a, a)"))
    with limits.override(run_bytes=200_000_000), pytest.raises(LimitError, match="run_bytes"):
        session.run(None, {"x": X})


def test_a_gradient_check_without_end_is_ended() -> None:
    with limits.override(check_seconds=1), pytest.raises(LimitError, match="check_seconds"):
        onward.check_gradient(loop("Neg(a)"), {"x": X})


def test_runs_within_the_limits_are_as_they_were(capfd: pytest.CaptureFixture[str]) -> None:
    session = open_session(
        onnx.parser.parse_model(
            '<ir_version: 10, opset_import: ["": 21]> g (float[2] x) => (float[2] y) { y = Neg(x) }'
        )
    )
    np.testing.assert_array_equal(session.run(["y"], {"x": X})[0], -X)
    with pytest.raises(ModelError, match=r"cannot run the model.*rank"):
        session.run(None, {"x": X[None]})
    assert capfd.readouterr().err == ""


def test_nothing_is_watched_outside_of_a_block() -> None:
    with limits.override(check_seconds=1), watched("check", "this"):
        time.sleep(1.1)
        with pytest.raises(LimitError):
            require_time()
    require_time()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no forks")
def test_a_fork_watches_its_own_runs() -> None:
    session = open_session(loop("Neg(a)"))
    with limits.override(run_seconds=1):
        with pytest.raises(LimitError):
            session.run(None, {"x": X})
        child = os.fork()
        if child == 0:
            code = 1
            try:
                own = open_session(loop("Neg(a)"))
                own.run(None, {"x": X})
            except LimitError:
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
