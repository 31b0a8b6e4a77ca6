"""Training models as they are run: each gradient is computed as soon as it can be."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest

from onward import artifacts
from onward.contract import BUFFER, OUT, RESET
from onward.graph.proto.accumulation import specialize_reset

DEEP = """<ir_version: 10, opset_import: ["": 21]> g (float[batch, 4, 3] x) => (float[batch, 4, 3] y)
<float[3, 3] w1 = {1,0,0,0,1,0,0,0,1}, float[3] b1 = {1,2,3},
 float[3, 3] w2 = {1,0,0,0,2,0,0,0,1}, float[3] b2 = {0,1,0},
 float[3, 3] w3 = {2,0,0,0,1,0,0,0,1}, float[3] b3 = {0,0,1}> {
    t1 = Transpose<perm=[1, 0]> (w1)  m1 = MatMul (x, t1)  a1 = Add (m1, b1)  r1 = Tanh (a1)
    t2 = Transpose<perm=[1, 0]> (w2)  m2 = MatMul (r1, t2) a2 = Add (m2, b2)  r2 = Tanh (a2)
    t3 = Transpose<perm=[1, 0]> (w3)  m3 = MatMul (r2, t3) y = Add (m3, b3)
}"""
WEIGHTS = ["w1", "b1", "w2", "b2", "w3", "b3"]


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> onnx.ModelProto:
    folder = tmp_path_factory.mktemp("deep")
    model = onnx.parser.parse_model(DEEP)
    artifacts.generate_artifacts(
        model, requires_grad=WEIGHTS, loss=artifacts.LossType.MSELoss, artifact_directory=folder
    )
    return onnx.load(folder / "training_model.onnx")


def run(model: onnx.ModelProto, *, profile: Path | None = None) -> tuple[dict[str, np.ndarray], list[str]]:
    """The outputs by name, and the outputs in the order in which their nodes ran."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(profile)
    session = ort.InferenceSession(model.SerializeToString(), options)
    random = np.random.default_rng(0)
    feeds = {}
    for value in session.get_inputs():
        shape = [2 if isinstance(dim, str) else dim for dim in value.shape]
        feeds[value.name] = (
            random.normal(size=shape).astype(np.float32) if value.name != RESET else np.array([True])
        )
    for name in [name for name in feeds if name.endswith(BUFFER)]:
        feeds[name][...] = 1
    names = [value.name for value in session.get_outputs()]
    results = dict(zip(names, session.run(names, feeds)))
    if profile is None:
        return results, []
    events = json.loads(Path(session.end_profiling()).read_text())
    ran = [event for event in events if event.get("cat") == "Node" and event["name"].endswith("_kernel_time")]
    made = {node.name: node.output[0] for node in model.graph.node}
    order = [
        event["name"].removesuffix("_kernel_time") for event in sorted(ran, key=lambda event: event["ts"])
    ]
    return results, [made[name] for name in order if made.get(name) in names]


@pytest.mark.parametrize("reset", [True, False, None])
def test_gradients_are_computed_from_the_last_layer_to_the_first(
    training: onnx.ModelProto, tmp_path: Path, *, reset: bool | None
) -> None:
    """Also in a plain session, which has the flag as an input."""
    model = training if reset is None else specialize_reset(training, reset=reset)
    _, order = run(model, profile=tmp_path / "profile")
    gradients = [name.removesuffix(OUT) for name in order if name.endswith(OUT)]
    assert sorted(gradients) == sorted(WEIGHTS)
    assert [name[1] for name in gradients] == ["3", "3", "2", "2", "1", "1"]


@pytest.mark.parametrize("reset", [True, False])
def test_the_gradients_are_those_of_the_file(training: onnx.ModelProto, *, reset: bool) -> None:
    whole, _ = run(training)
    special, _ = run(specialize_reset(training, reset=reset))
    assert special.keys() == whole.keys()
    for name, value in special.items():
        added = 0.0 if reset or not name.endswith(OUT) else 1.0
        np.testing.assert_allclose(value, whole[name] + added, rtol=1e-6, atol=1e-6, err_msg=name)


def test_products_with_transposed_weights_need_no_transposition(training: onnx.ModelProto) -> None:
    forward = {"w1", "w2", "w3"}
    transposed = {node.input[0] for node in training.graph.node if node.op_type == "Transpose"}
    assert transposed == forward


def test_no_rows_give_a_gradient_of_zeros(training: onnx.ModelProto) -> None:
    session = ort.InferenceSession(specialize_reset(training, reset=True).SerializeToString())
    feeds = {}
    for value in session.get_inputs():
        feeds[value.name] = np.ones([0 if isinstance(dim, str) else dim for dim in value.shape], np.float32)
    (bias,) = session.run([f"b1{OUT}"], feeds)
    np.testing.assert_array_equal(np.nan_to_num(bias), np.zeros(3, np.float32))
