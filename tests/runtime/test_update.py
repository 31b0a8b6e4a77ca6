"""Optimizers over flat buffers: in place, in blocks and in threads, to the bit what one run of the graph gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from onward.artifacts import OptimType
from onward.contract import SCALARS
from onward.errors import ModelError
from onward.onnxblock import optim
from onward.optim import adamw as AdamW
from onward.optim.optimizer_model import ParameterGroup, optimizer_model
from onward.runtime.memory import FlatBuffer
from onward.runtime.optimizers import vector as host_update
from onward.runtime.optimizers.vector import make_updater
from small_models import batch, start, write_classifier

SHAPES = {"a": (7, 9), "b": (5,), "c": (40, 3), "d": (1,)}
BLOCKS = {kind.name: getattr(optim, kind.name) for kind in OptimType}


def make_buffers(seed: int) -> tuple[FlatBuffer, FlatBuffer]:
    rng = np.random.default_rng(seed)
    parameters, gradients = FlatBuffer(SHAPES), FlatBuffer(SHAPES)
    for name, shape in SHAPES.items():
        parameters.views[name][:] = rng.normal(size=shape)
        gradients.views[name][:] = rng.normal(size=shape)
    return parameters, gradients


def model_of(block: Any, **options: Any) -> onnx.ModelProto:
    rule = getattr(block, "rule", block)
    return ir.to_proto(optimizer_model(rule, SHAPES, **options))


def whole(model: onnx.ModelProto, name: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """One run of an elementwise optimizer model over one parameter, inputs and outputs apart."""
    session = ort.InferenceSession(model.SerializeToString())
    wanted = {value.name for value in session.get_inputs()}
    names = [value.name for value in session.get_outputs()]
    feeds = {key: array for key, array in arrays.items() if key in wanted}
    return dict(zip(names, (np.asarray(r) for r in session.run(names, feeds))))


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("block", [16, 1 << 16])
@pytest.mark.parametrize("name", BLOCKS)
def test_in_place_equals_apart(name: str, block: int, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(BLOCKS[name]())
    options = json.loads({e.key: e.value for e in model.metadata_props}["onward.optimizer"])
    for limit, value in (("_LEAST", block), ("_MOST", block), ("_PIECE", min(block, 8))):
        monkeypatch.setattr(host_update, limit, value)
    parameters, gradients = make_buffers(0)
    for rarely in ("b", "c"):  # what has had no gradient yet may be left alone, if that changes nothing
        gradients.views[rarely][:] = 0
    updater = make_updater(model, parameters, gradients, threads=workers)
    updater.learning_rate = 0.01
    apart = {key: view.copy() for key, view in parameters.views.items()}
    if options["elementwise"]:
        state = {
            key: {slot: np.zeros(view.size, np.float32) for slot in options["slots"]}
            for key, view in apart.items()
        }
    else:
        state = {
            key: {s: a.copy() for s, a in slots.items()}
            for key, slots in updater.slots_by_parameter().items()
        }
    for step in range(1, 6):
        scalars = {
            "learning_rate": np.full(1, 0.01, np.float32), "step": np.full(1, step, np.int64),
            "gradient_scale": np.full(1, 0.5, np.float32),
            "weight_decay": np.full(1, options["weight_decay"], np.float32),
        }  # fmt: skip
        if options["elementwise"]:
            for key in SHAPES:
                given = {
                    "parameter": apart[key].ravel(),
                    "gradient": gradients.views[key].ravel(),
                    **state[key],
                }
                made = whole(model, key, {**given, **scalars})
                apart[key] = made["parameter.next"].reshape(SHAPES[key])
                state[key] = {slot: made[f"{slot}.next"] for slot in options["slots"]}
        else:
            given = {**apart, **{f"{key}_grad": view for key, view in gradients.views.items()}}
            given |= {f"{key}.{slot}": a for key, slots in state.items() for slot, a in slots.items()}
            made = whole(model, "", {**given, **scalars})
            apart = {key: made[f"{key}.next"] for key in SHAPES}
            state = {key: {s: made[f"{key}.{s}.next"] for s in slots} for key, slots in state.items()}
        updater.run(0.5)
        rng = np.random.default_rng(step)
        for key in SHAPES:
            np.testing.assert_array_equal(parameters.views[key], apart[key], err_msg=f"{key} at step {step}")
            gradients.views[key][:] = rng.normal(size=SHAPES[key]) * (key not in ("b", "c") or step == 3)
        for key, slots in updater.slots_by_parameter().items():
            for slot, array in slots.items():
                np.testing.assert_array_equal(
                    array.ravel(), state[key][slot].ravel(), err_msg=f"{key}.{slot}"
                )
    assert updater.step == 5


def test_groups_have_their_own_rate_and_decay() -> None:
    groups = [ParameterGroup(parameters=("b", "d"), weight_decay=0.0, learning_rate_scale=0.1)]
    grouped, plain, slow = (
        model_of(AdamW(weight_decay=0.1), groups=groups),
        model_of(AdamW(weight_decay=0.1)),
        model_of(AdamW(weight_decay=0.0)),
    )
    results = []
    for model, rate in ((grouped, 0.01), (plain, 0.01), (slow, 0.001)):
        parameters, gradients = make_buffers(1)
        updater = make_updater(model, parameters, gradients)
        updater.learning_rate = rate
        for _ in range(3):
            updater.run(1.0)
        results.append(parameters)
    for name in SHAPES:
        other = results[2] if name in ("b", "d") else results[1]
        np.testing.assert_allclose(results[0].views[name], other.views[name], rtol=1e-6)


def test_the_space_between_parameters_stays_empty() -> None:
    parameters, gradients = make_buffers(2)
    updater = make_updater(model_of(AdamW(weight_decay=0.1)), parameters, gradients)
    for _ in range(3):
        updater.run(1.0)
    covered = np.zeros(parameters.vector.size, bool)
    for start_, stop in parameters.spans.values():
        covered[start_:stop] = True
    assert not covered.all() and not parameters.vector[~covered].any()


@pytest.mark.parametrize("norm", [0.01, 1e6])
def test_clipping_by_the_norm_of_all_gradients(norm: float, tmp_path: Path) -> None:
    folder = write_classifier(tmp_path, optimizer=optim.SGD(clip_grad=optim.ClipGradNorm(norm)))
    state, module, optimizer = start(folder)
    optimizer.set_learning_rate(1.0)
    before = {name: p.data for name, p in state.parameters}
    module(*batch())
    gradients = {name: p.grad for name, p in state.parameters}
    total = np.sqrt(sum(float(np.sum(np.square(g, dtype=np.float64))) for g in gradients.values()))
    optimizer.step()
    assert optimizer.gradient_norm == pytest.approx(total, rel=1e-6)
    scale = min(norm / (total + 1e-6), 1.0)
    for name, parameter in state.parameters:
        np.testing.assert_allclose(
            parameter.data, before[name] - scale * gradients[name], rtol=1e-5, atol=1e-7
        )


def test_an_update_that_fails_says_so_and_does_not_count() -> None:
    model = model_of(AdamW())
    for value in model.graph.input:
        if value.name not in SCALARS:
            value.type.tensor_type.shape.dim[0].dim_value = 3
    parameters, gradients = make_buffers(3)
    before = parameters.vector.copy()
    updater = make_updater(model, parameters, gradients)
    with pytest.raises(ModelError, match="the optimizer model failed in an update"):
        updater.run(1.0)
    assert updater.step == 0
    np.testing.assert_array_equal(parameters.vector, before)
