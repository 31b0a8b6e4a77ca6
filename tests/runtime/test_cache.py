"""Graphs that the runtime optimized are kept for the next session, and a damaged file is made again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest

from onward.runtime import sessions
from onward.runtime.cache import cache_folder


def model() -> onnx.ModelProto:
    text = (
        '<ir_version: 10, opset_import: ["": 21]> g (float[N, 4] x) => (float[N, 4] y)'
        "{ a = Identity(x) b = Add(a, x) c = Sigmoid(b) y = Mul(b, c) }"
    )
    return onnx.parser.parse_model(text)


def test_a_large_graph_is_optimized_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONWARD_CACHE", str(tmp_path))
    monkeypatch.setattr(sessions, "_MANY", 2)
    x = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    levels = []
    real = ort.InferenceSession

    def opened(source, options, **rest):
        levels.append(options.graph_optimization_level)
        return real(source, options, **rest)

    monkeypatch.setattr(sessions.ort, "InferenceSession", opened)

    def run() -> np.ndarray:
        return np.asarray(sessions.make_session(model()).run(None, {"x": x})[0])

    first = run()
    (kept,) = (tmp_path / "graphs").iterdir()
    np.testing.assert_array_equal(run(), first)
    whole = kept.read_bytes()
    kept.write_bytes(whole[:-3] + b"abc")
    np.testing.assert_array_equal(run(), first)
    assert kept.read_bytes() == whole  # made again
    plain, ready = ort.GraphOptimizationLevel.ORT_ENABLE_ALL, ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    assert levels == [plain, ready, plain]
    assert [path.suffix for path in (tmp_path / "graphs").iterdir()] == [".onnx"]


def test_without_a_folder_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ONWARD_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(sessions, "_MANY", 2)
    assert sessions.make_session(model()).get_inputs()[0].name == "x"
    assert cache_folder() == tmp_path / "file" / "cache"
