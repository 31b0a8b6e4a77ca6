"""WebGPU by choice: the same losses with the state on the GPU, WebAssembly for what it cannot run or runs wrong.

In software, which is slow: a short part is always run where there is a browser, the rest with ONWARD_WEBGPU=1.
"""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from onward.api import CheckpointState, Module, Optimizer
from web import decoder
from web.conftest import for_webgpu
from web.models import make_data
from web.test_training import RATE, python_curve

if TYPE_CHECKING:
    from web.browser import Browser

COUNT = 20
# numbers of a sample that dropout draws
DROPOUT = {"mlp": 32, "lora": 32, "wide": 4400}


@pytest.fixture(autouse=True)
def has_webgpu(harness: Browser) -> None:
    if not harness.evaluate("async () => Boolean(await navigator.gpu?.requestAdapter())"):
        pytest.skip("this browser has no WebGPU, not even in software")


long = pytest.mark.skipif(
    not os.environ.get("ONWARD_WEBGPU"), reason="WebGPU in software takes minutes: set ONWARD_WEBGPU=1"
)


def trained(content: str, folder: Path) -> CheckpointState:
    (folder / "from_page").write_bytes(base64.b64decode(content))
    return CheckpointState.load_checkpoint(folder / "from_page")


def python_weights(folder: Path, name: str, *, count: int, **options: Any) -> dict[str, np.ndarray]:
    """What Python's parameters are after the same steps."""
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, seed=7)
    optimizer = Optimizer(folder / options.get("optimizer", "optimizer_model.onnx"), module)
    optimizer.set_learning_rate(RATE)
    data = make_data(name)
    for i in range(count):
        part = slice(16 * i, 16 * (i + 1))
        module(data.x[part], data.labels[part])
        if (i + 1) % options.get("accumulate", 1) == 0:
            optimizer.step()
            module.lazy_reset_grad()
    return {name: parameter.data.copy() for name, parameter in state.parameters}


CASES: list[Any] = [
    {"name": "mlp"},
    *(pytest.param({"name": name}, marks=long) for name in ("cnn", "encoder", "lstm", "lora", "wide")),
    pytest.param({"name": "cnn", "accumulate": 2}, marks=long),
    pytest.param({"name": "mlp", "optimizer": "lamb_optimizer_model.onnx"}, marks=long),
    pytest.param({"name": "mlp", "optimizer": "sgd_optimizer_model.onnx"}, marks=long),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_follows_python_with_its_state_on_the_gpu(
    harness: Browser, models: dict[str, Path], case: dict[str, Any], tmp_path: Path
) -> None:
    folder, name = models[case["name"]], case["name"]
    answer = harness.evaluate("harness.webgpu", {**case, "name": f"{name}-gpu", "count": COUNT, "rate": RATE})
    assert (answer["provider"], answer["fallback"]) == ("webgpu", None)
    losses, evaluation = python_curve(folder, count=COUNT, **case)
    np.testing.assert_allclose(answer["losses"], losses, rtol=0, atol=1e-4)
    np.testing.assert_allclose(answer["evaluation"], evaluation, rtol=0, atol=1e-4)
    state = trained(answer["checkpoint"], tmp_path)
    for parameter, array in python_weights(folder, count=COUNT, **case).items():
        np.testing.assert_allclose(state.parameters[parameter].data, array, atol=1e-4, err_msg=parameter)
    # The batch, dropout's mask and some scalars go up, the loss and the norm of the gradients come down: nothing grows
    # with the parameters.
    data = make_data(name)
    batch = data.x[:16].nbytes + data.labels[:16].nbytes + 4 * 16 * DROPOUT.get(name, 0)
    up, down = answer["perStep"]
    if name != "lstm":  # its loops run on WebAssembly, which reads their weights there
        assert up <= batch + 4096 and down <= 1024, answer["perStep"]
    assert answer["stale"][0] == "OnwardError" and "await state.sync() first" in answer["stale"][1]
    assert answer["fresh"] > 0


def test_adapters_of_a_4_bit_decoder_train(harness: Browser, tmp_path: Path) -> None:
    """LoRA beside a language model, with the base and the adapters on the GPU."""
    folder = tmp_path / "artifacts"
    names = [path.name for path in decoder.write_decoder(tmp_path / "base", folder)]
    files = {
        name: base64.b64encode(
            for_webgpu(folder / name) if name.endswith(".onnx") else (folder / name).read_bytes()
        ).decode()
        for name in names
    }
    given = {"files": files, "rows": decoder.ROWS.tolist(), "rate": decoder.RATE, "provider": "webgpu"}
    answer = harness.evaluate("harness.language", given)
    assert (answer["provider"], answer["fallback"]) == ("webgpu", None)
    np.testing.assert_allclose(answer["losses"], decoder.decoder_losses(folder), rtol=1e-4)
    up, down = answer["perStep"]
    (constants,) = folder.glob("constants.*.data")
    assert up + down < constants.stat().st_size / 2, answer


def test_what_webgpu_cannot_run_runs_on_webassembly_with_a_note(
    harness: Browser, models: dict[str, Path]
) -> None:
    """Batch norm in training mode, as in artifacts that were not written for WebGPU: the rest stays on the GPU."""
    answer = harness.evaluate("harness.webgpu", {"name": "cnn", "count": 4})
    assert (answer["provider"], answer["fallback"]) == ("webgpu", None)
    (note,) = answer["notes"]
    assert note.startswith("BatchNormalization 'node_1' of the training model runs on WebAssembly: BatchNorm")
    losses, _ = python_curve(models["cnn"], "cnn", count=4)
    np.testing.assert_allclose(answer["losses"], losses, rtol=0, atol=1e-4)


def test_without_webgpu_it_trains_on_webassembly(harness: Browser, models: dict[str, Path]) -> None:
    answer = harness.evaluate("harness.webgpu", {"name": "mlp", "count": 4, "hidden": True})
    assert (answer["provider"], answer["fallback"]) == ("wasm", "this browser offers no WebGPU")
    losses, _ = python_curve(models["mlp"], "mlp", count=4)
    np.testing.assert_allclose(answer["losses"], losses, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (
            "w1_grad.accumulation.out",
            "computes the training model wrong: w1_grad.accumulation.out is off by 0.1",
        ),
        pytest.param(
            "parameter.next", "computes the optimizer model wrong: parameter.next is off by", marks=long
        ),
    ],
)
def test_a_gpu_that_computes_wrong_trains_nothing(
    harness: Browser, models: dict[str, Path], output: str, words: str
) -> None:
    given = {"name": "mlp-gpu", "count": 6, "wrong": {"output": output, "by": 0.1}}
    answer = harness.evaluate("harness.webgpu", given)
    assert answer["provider"] == "wasm" and f"WebGPU {words}" in answer["fallback"]
    losses, evaluation = python_curve(models["mlp"], "mlp", count=6)
    np.testing.assert_allclose(answer["losses"], losses, rtol=0, atol=1e-4)
    np.testing.assert_allclose(answer["evaluation"], evaluation, rtol=0, atol=1e-4)


@pytest.mark.parametrize("provider", ["wasm", pytest.param("webgpu", marks=long)])
def test_a_worker_trains_while_the_page_does_other_things(
    harness: Browser, models: dict[str, Path], provider: str, tmp_path: Path
) -> None:
    options = {"runtime": {"provider": provider}, "learningRate": RATE, "seed": 7}
    given = {"name": "encoder-gpu", "samples": 128, "epochs": 2, "batchSize": 16, "options": options}
    answer = harness.evaluate("harness.worker", given)
    here = harness.evaluate("harness.fit", {**given, "options": {"learningRate": RATE, "seed": 7}})
    steps = [row["loss"] for row in answer["history"]["steps"]]
    np.testing.assert_allclose(steps, [row["loss"] for row in here["steps"]], rtol=0, atol=1e-4)
    assert answer["heard"] == ["start", *range(1, 17), "end"]
    assert answer["loss"] == pytest.approx(answer["history"]["epochs"][-1]["evalLoss"], abs=1e-5)
    assert answer["runtime"]["provider"] == provider
    assert answer["described"]["labels"] == [{"name": "labels", "classes": 4}]
    assert answer["wrong"][0] == "RangeError" and "the model has 4 classes" in answer["wrong"][1]
    assert answer["after"] == ["OnwardError", "this trainer was released"]
    state = trained(answer["checkpoint"], tmp_path)
    assert not np.array_equal(
        state.parameters["wq"].data,
        CheckpointState.load_checkpoint(models["encoder"] / "checkpoint").parameters["wq"].data,
    )


def test_a_long_step_in_a_worker_leaves_the_page_free(harness: Browser) -> None:
    """A timer of the page goes off all the time; while the page itself trains, only between two steps."""
    given = {"name": "wide", "samples": 1600, "epochs": 2, "batchSize": 1600}
    answer = harness.evaluate("harness.worker", given)
    here = harness.evaluate("harness.fit", given)
    assert len(answer["history"]["steps"]) == len(here["steps"]) == 2
    assert answer["ticks"] > 3 * here["ticks"], (answer["ticks"], here["ticks"])
