"""Files that leave the sizes of images open: each size has a session of its own, with the forms for that size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from onward.artifacts import LossType, OptimType, generate_artifacts
from onward.runtime import step as runtime_step
from onward.runtime.devices import Device
from small_models import start, with_weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cnn")
    shapes = {
        "k1": (16, 3, 3, 3),
        "k2": (16, 1, 3, 3),
        "k3": (16, 16, 3, 3),
        "k4": (16, 16, 1, 1),
        "o": (16, 3),
    }
    model = with_weights(
        """net (float[n, 3, h, w] x) => (float[n, 3] scores) {
            a = Conv <pads = [1, 1, 1, 1]> (x, k1)  b = Relu (a)
            c = Conv <pads = [1, 1, 1, 1], strides = [2, 2], group = 16> (b, k2)  d = Relu (c)
            e = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (d, k3)
            s = Conv <strides = [2, 2]> (d, k4)  f = Add (e, s)
            g = GlobalAveragePool (f)  y = Flatten (g)  scores = MatMul (y, o) }""",
        **shapes,
    )
    generate_artifacts(
        model,
        requires_grad=list(shapes),
        loss=LossType.CrossEntropyLoss,
        optimizer=OptimType.SGD,
        artifact_directory=folder,
    )
    return folder


def gradients(
    folder: Path, sizes: list[tuple[int, int]], device: Device | str = "cpu"
) -> tuple[list[np.ndarray], int]:
    """What each batch in turn gives, and how many sessions that took."""
    state, module, _ = start(folder, device=device)
    rng, found = np.random.default_rng(0), []
    for height, width in sizes:
        x = rng.standard_normal((2, 3, height, width), np.float32)
        module(x, np.array([0, 2]))
        module.lazy_reset_grad()
        found.append(np.concatenate([p.grad.ravel() for _, p in state.parameters]))
    return found, len(module.step.sessions())  # type: ignore[attr-defined]


def test_every_size_has_the_gradients_of_the_session_for_all(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [(12, 12), (9, 14), (12, 12), (8, 8), (15, 7), (10, 10), (11, 13)]
    fitted, sessions = gradients(folder, sizes)
    assert sessions == runtime_step._KEPT + 1  # the last sizes run in one session for all
    monkeypatch.setattr(runtime_step, "leaves_images_open", lambda model: False)
    plain, sessions = gradients(folder, sizes)
    assert sessions == 1
    for own, expected in zip(fitted, plain):
        assert np.abs(expected).max() > 0.01
        np.testing.assert_allclose(own, expected, rtol=1e-4, atol=1e-5)


def test_a_session_for_one_size_has_fewer_nodes(folder: Path) -> None:
    step = start(folder)[1].step
    general, _ = step.prepared(reset=True)  # type: ignore[attr-defined]
    fitted, _ = step.prepared(  # type: ignore[attr-defined]
        reset=True, shapes={"x": (2, 3, 12, 12), "labels": (2,)}
    )
    assert len(fitted.graph.node) < 0.85 * len(general.graph.node)
    kinds = {node.op_type for node in fitted.graph.node}
    assert "Gather" in kinds and "Shape" not in kinds


def test_on_a_device_weight_gradients_are_one_product_for_all_taps(folder: Path) -> None:
    emulated, shapes = Device("cpu", memory="device"), {"x": (2, 3, 12, 12), "labels": (2,)}
    step = start(folder, device=emulated)[1].step
    assert step._chooses_forms  # type: ignore[attr-defined]
    made, _ = step.prepared(reset=True, shapes=shapes)  # type: ignore[attr-defined]
    names = [node.name for node in made.graph.node]
    assert any("/channels_last/" in name for name in names)
    assert not any("gathered" in entry.value for node in made.graph.node for entry in node.metadata_props)
    there, here = (gradients(folder, [(12, 12), (9, 14)], device)[0] for device in (emulated, "cpu"))
    for own, expected in zip(there, here):
        np.testing.assert_allclose(own, expected, rtol=1e-4, atol=1e-5)


def test_accumulation_works_with_sizes_that_change(folder: Path) -> None:
    rng = np.random.default_rng(1)
    batches = [rng.standard_normal((2, 3, size, size), np.float32) for size in (12, 9)]
    state, module, _ = start(folder)
    for x in batches:
        module(x, np.array([1, 2]))
    together = {name: p.grad.copy() for name, p in state.parameters}
    apart = []
    for x in batches:
        module.lazy_reset_grad()
        module(x, np.array([1, 2]))
        apart.append({name: p.grad.copy() for name, p in state.parameters})
    for name, total in together.items():
        np.testing.assert_allclose(total, apart[0][name] + apart[1][name], rtol=1e-4, atol=1e-5)


def test_an_empty_batch_is_an_error(folder: Path) -> None:
    """The runtime's convolution over no images would not end."""
    _, module, _ = start(folder)
    with pytest.raises(ValueError, match="the batch is empty"):
        module(np.zeros((0, 3, 12, 12), np.float32), np.zeros(0, np.int64))
