"""Formulations of convolutions' weight gradients, chosen by time: the same gradients, a cache that cannot do harm."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onward.artifacts import LossType, OptimType, generate_artifacts
from onward.contract import CONV_WEIGHT
from onward.graph.proto.conv_forms import Convolution, form_model, noted_convolutions
from onward.runtime import autotune
from onward.runtime.sessions import make_session
from small_models import one_thread, start, with_weights

SHAPES: dict[str, Convolution] = {
    "3×3": Convolution((2, 17, 6, 7), (2, 4, 6, 7), (4, 17, 3, 3), (1, 1), (1, 1), (1, 1, 1, 1), 1, "channels_last"),
    "3×3, margins": Convolution((1, 4, 5, 4), (1, 3, 4, 5), (3, 4, 3, 3), (1, 1), (1, 1), (1, 1, 0, 2), 1, "gathered"),
    "1×1, strides": Convolution((3, 5, 6, 6), (3, 4, 3, 3), (4, 5, 1, 1), (2, 2), (1, 1), (0,) * 4, 1, "columns"),
    "uneven, dilated": Convolution(
        (2, 3, 9, 8), (2, 4, 4, 8), (4, 3, 3, 2), (2, 1), (2, 1), (2, 0, 1, 1), 1, "columns"
    ),
    "depthwise": Convolution((2, 4, 6, 6), (2, 4, 3, 3), (4, 1, 3, 3), (2, 2), (1, 1), (1,) * 4, 4, "depthwise_last"),
    "two each": Convolution((2, 3, 5, 5), (2, 6, 5, 5), (6, 1, 3, 3), (1, 1), (1, 1), (1,) * 4, 3, "depthwise"),
    "groups": Convolution((2, 6, 5, 5), (2, 4, 5, 5), (4, 3, 3, 3), (1, 1), (1, 1), (1,) * 4, 2, "channels_first"),
    "1-d": Convolution((2, 3, 9), (2, 4, 7), (4, 3, 3), (1,), (1,), (0, 0), 1, "columns"),
    "3-d": Convolution(
        (1, 2, 4, 5, 5), (1, 3, 4, 5, 5), (3, 2, 3, 3, 3), (1,) * 3, (1,) * 3, (1,) * 6, 1, "channels_last"
    ),
}  # fmt: skip


@pytest.mark.parametrize("opset", [13, 21])
@pytest.mark.parametrize("convolution", SHAPES.values(), ids=SHAPES)
def test_every_form_gives_the_same_gradient(convolution: Convolution, opset: int) -> None:
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal(convolution.x, np.float32)}
    feeds["dy"] = rng.standard_normal(convolution.dy, np.float32)
    model, forms = form_model(convolution, None, opset)
    expected = np.asarray(make_session(model, options=one_thread()).run(None, feeds)[0])
    assert expected.shape == convolution.weight and np.abs(expected).max() > 0.1
    assert len(forms) > 1
    whole = convolution.weight[2:] == (3, 3) and {
        *convolution.strides,
        *convolution.dilations,
        convolution.group,
    } == {1}
    assert ("winograd" in forms) == whole
    for form in forms:
        (found,) = make_session(form_model(convolution, form, opset)[0], options=one_thread()).run(
            None, feeds
        )
        np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-4, atol=1e-4, err_msg=form)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cnn")
    model = with_weights(
        """net (float[n, 3, 8, 8] x) => (float[n, 3] scores) {
            a = Conv <pads = [1, 1, 1, 1]> (x, k1)  b = Relu (a)
            c = Conv <pads = [1, 1, 1, 1], strides = [2, 2], group = 6> (b, k2)  d = Relu (c)
            e = Conv (d, k3)  g = GlobalAveragePool (e)  f = Flatten (g)  scores = MatMul (f, o) }""",
        k1=(6, 3, 3, 3), k2=(6, 1, 3, 3), k3=(5, 6, 1, 1), o=(5, 3),
    )  # fmt: skip
    generate_artifacts(
        model, requires_grad=["k1", "k2", "k3", "o"], loss=LossType.CrossEntropyLoss, optimizer=OptimType.SGD,
        artifact_directory=folder,
    )  # fmt: skip
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ONWARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ONWARD_AUTOTUNE", raising=False)
    monkeypatch.setattr(autotune, "_KNOWN", {})
    return tmp_path / "cache"


def batch(size: int = 4) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(size)
    return rng.standard_normal((size, 3, 8, 8), np.float32), rng.integers(0, 3, size)


def gradients(folder: Path, **options: Any) -> dict[str, Any]:
    state, module, _ = start(folder, **options)
    for size in (4, 2):
        module.lazy_reset_grad()
        module(*batch(size))
    return {name: parameter.grad for name, parameter in state.parameters}


def choosing(form: Callable[[Convolution], str]) -> Callable[..., str]:
    return lambda convolution, opset, options: form(convolution)


def other(convolution: Convolution) -> str:
    """A form that no rule chooses for this shape."""
    return "correlate" if convolution.weight[2:] != (1, 1) else "channels_first"


def test_a_tuned_module_has_the_gradients_of_the_plain_one(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = gradients(folder)
    timed = gradients(folder, autotune=True)
    monkeypatch.setattr(autotune, "_fastest", choosing(other))
    monkeypatch.setattr(autotune, "_KNOWN", {})
    (file,) = cache.glob("conv-forms-*.json")
    assert len(json.loads(file.read_text())["forms"]) == 6  # three convolutions, two sizes of the batch
    file.unlink()
    exchanged = gradients(folder, autotune=True)
    for name in plain:
        np.testing.assert_allclose(timed[name], plain[name], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(exchanged[name], plain[name], rtol=1e-4, atol=1e-6)
    assert set(json.loads(file.read_text())["forms"].values()) == {"correlate", "channels_first"}


def test_forms_are_exchanged_in_the_session(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "_fastest", choosing(other))
    _, module, _ = start(folder, autotune=True)
    shapes = {"x": (4, 3, 8, 8), "labels": (4,)}
    plain, _ = start(folder)[1].step.prepared(reset=True, shapes=shapes)  # type: ignore[attr-defined]
    tuned, _ = module.step.prepared(reset=True, shapes=shapes)  # type: ignore[attr-defined]
    count = [sum(node.op_type == "Conv" for node in model.graph.node) for model in (plain, tuned)]
    assert count[1] == count[0] + 2  # k1 and k2 are correlations now
    onnx.checker.check_model(tuned)


def test_a_shape_is_timed_once_on_a_machine(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gradients(folder, autotune=True)
    monkeypatch.setattr(autotune, "_KNOWN", {})  # as a new process

    def again(*_: Any) -> str:
        raise AssertionError("timed again")

    monkeypatch.setattr(autotune, "_fastest", again)
    gradients(folder, autotune=True)
    (file,) = cache.glob("*.json")
    data = json.loads(file.read_text())
    assert data["machine"]["threads"] == 1 and data["machine"]["processor"]
    # other threads are another machine
    options = one_thread()
    options.intra_op_num_threads = 2
    with pytest.raises(AssertionError, match="timed again"):
        gradients(folder, autotune=True, session_options=options)


def _overwritten(text: str) -> Callable[[Path], Any]:
    return lambda file: file.write_text(text)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "empty": _overwritten(""),
    "no JSON": _overwritten("{"),
    "a list": _overwritten("[1, 2]"),
    "deep": _overwritten("[" * 100_000),
    "forms of no kind": _overwritten('{"machine": {}, "forms": 3}'),
    "bytes": lambda file: file.write_bytes(b"\xff\xfe\x00"),
    "unknown forms": lambda file: file.write_text(
        file.read_text()
        .replace('"columns"', '"sideways"')
        .replace('"taps"', '"no"')
        .replace("depthwise", "x")
    ),
    "another machine": lambda file: file.write_text(file.read_text().replace("Linux", "Minix")),
    "a folder": lambda file: (file.unlink(), file.mkdir())[1],
    "huge": lambda file: os.truncate(file, 1 << 23),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_cache_is_measured_again(
    damage: Callable[[Path], Any], folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autotune, "_fastest", choosing(lambda convolution: convolution.form))
    expected = gradients(folder, autotune=True)
    (file,) = cache.glob("*.json")
    damage(file)
    monkeypatch.setattr(autotune, "_KNOWN", {})
    found = gradients(folder, autotune=True)
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name])
    assert not [path for path in cache.iterdir() if path.name.startswith(".")]
    if file.is_file():
        assert len(json.loads(file.read_text())["forms"]) == 6


def test_a_folder_that_cannot_be_written_is_no_error(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ONWARD_CACHE", str(tmp_path / "file" / "cache"))
    assert gradients(folder, autotune=True)


def test_writers_at_the_same_time_leave_a_whole_file(cache: Path) -> None:
    machine = {"processor": "one"}
    shapes = list(SHAPES.values())

    def write(index: int) -> None:
        for _ in range(20):
            table = autotune._Table(machine)  # type: ignore[arg-type]
            table.add(shapes[index], "columns")
            table.save()

    threads = [threading.Thread(target=write, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (file,) = cache.iterdir()
    forms = json.loads(file.read_text())["forms"]
    assert forms and set(forms) <= {shape.key for shape in shapes}


def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for value in ("", "0", "1"):
        monkeypatch.setenv("ONWARD_AUTOTUNE", value)
        found.append((autotune.is_enabled(False), autotune.is_enabled(True)))
    assert found == [(False, True), (False, False), (True, True)]


def test_untuned_modules_write_nothing(folder: Path, cache: Path) -> None:
    gradients(folder)
    assert not cache.exists()


def test_notes_that_do_not_fit_are_passed_over(folder: Path) -> None:
    model = onnx.load(folder / "training_model.onnx")
    shapes = {"x": (4, 3, 8, 8), "labels": (4,)}
    noted = [entry for node in model.graph.node for entry in node.metadata_props if entry.key == CONV_WEIGHT]
    assert len(noted) == 3
    whole = json.loads(noted[0].value)
    noted[0].value = json.dumps({**whole, "weight": [10**9, 3, 3, 3]})
    noted[1].value = "not JSON"
    noted[2].value = json.dumps({**json.loads(noted[2].value), "dy": "gone"})
    assert noted_convolutions(model, shapes) == {}
