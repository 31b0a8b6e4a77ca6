"""Each block computes what its name says, in a model that blocks compose."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from onnxblock.networks import PARAMETERS, forward, two_layers, values
from onward import onnxblock
from onward.errors import OnwardError

FLOAT, INT64, STRING = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64, onnx.TensorProto.STRING
RNG = np.random.default_rng(3)
X = RNG.uniform(0.5, 2.0, size=(3, 4)).astype(np.float32)
Y = RNG.normal(size=(3, 4)).astype(np.float32)
blocks = onnxblock.blocks


@pytest.fixture(autouse=True)
def empty_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Nothing that blocks do leaves a file behind."""
    monkeypatch.chdir(tmp_path)
    yield
    assert not list(tmp_path.iterdir())


def run(model: onnx.ModelProto, feeds: dict[str, Any]) -> list[Any]:
    onnx.checker.check_model(model, full_check=True)
    return list(
        ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)
    )


def built(build: Callable[..., Any], **inputs: np.ndarray) -> onnx.ModelProto:
    """The forward model that `build(*names)` makes of inputs like these arrays."""

    class Composed(onnxblock.ForwardBlock):
        def build(self, *names: str) -> Any:
            return build(*names)

    block = Composed()
    with onnxblock.empty_base() as accessor:
        for name, array in inputs.items():
            kind = STRING if array.dtype.kind in "UO" else onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
            value = onnx.helper.make_tensor_value_info(name, kind, array.shape)
            accessor.model.graph.input.append(value)
        block(*inputs)
    return block.to_model_proto()


ARITHMETIC = [
    (blocks.Add(), lambda x, y: x + y),
    (blocks.Sub(), lambda x, y: x - y),
    (blocks.Mul(), lambda x, y: x * y),
    (blocks.Div(), lambda x, y: x / y),
    (blocks.Pow(3.0), lambda x: x**3),
    (blocks.Pow(0.5), lambda x: np.sqrt(x)),
    (blocks.ReduceMean(), lambda x: x.mean(keepdims=True)),
    (blocks.ReduceMean(keepdims=False), lambda x: x.mean()),
    (blocks.ReduceSum(), lambda x: x.sum(keepdims=True)),
    (blocks.ReduceSum(keepdims=False), lambda x: x.sum()),
    (blocks.Sigmoid(), lambda x: 1 / (1 + np.exp(-x))),
    (blocks.Log(), lambda x: np.log(x)),
    (blocks.Neg(), lambda x: -x),
    (blocks.Abs(), lambda x: np.abs(x)),
    (blocks.Constant(2.5), lambda: np.asarray([2.5], np.float32)),
    (blocks.ReduceAllL2(), lambda x, y: np.asarray([np.sqrt((x**2).sum() + (y**2).sum())])),
    (blocks.Clip(0.7, 1.1), lambda x: np.clip(x, 0.7, 1.1)),
    (blocks.Clip(clip_max=1.0), lambda x: np.minimum(x, 1.0)),
    (blocks.Clip(clip_min=1.0), lambda x: np.maximum(x, 1.0)),
    (blocks.PassThrough(), lambda x: x),
    (blocks.Cast(INT64), lambda x: x.astype(np.int64)),
]


@pytest.mark.parametrize(("block", "expected"), ARITHMETIC, ids=lambda v: type(v).__name__)
def test_arithmetic(block: onnxblock.Block, expected: Callable[..., np.ndarray]) -> None:
    count = expected.__code__.co_argcount
    feeds = dict(list({"x": X, "y": Y}.items())[:count])
    (found,) = run(built(block, **feeds), feeds)
    want = np.asarray(expected(*feeds.values()))
    assert found.shape == want.shape
    np.testing.assert_allclose(found, want, rtol=1e-6)


def test_sequence_construct_and_the_norm_of_a_sequence() -> None:
    sequence, norm = blocks.SequenceConstruct(), blocks.ReduceAllL2()
    model = built(lambda x, y: [made := sequence(x, y), norm(made)], x=X, y=Y)
    parts, length = run(model, {"x": X, "y": Y})
    np.testing.assert_array_equal(parts[1], Y)
    np.testing.assert_allclose(length, [np.sqrt((X**2).sum() + (Y**2).sum())], rtol=1e-6)


def test_linear_is_a_torch_layer_with_new_parameters() -> None:
    first, second = blocks.Linear(4, 6), blocks.Linear(6, 2, bias=False, alpha=2.0)
    model = built(lambda x: second(first(x)), x=X)
    w = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    assert {name: array.shape for name, array in w.items()} == {
        "linear.weight": (6, 4), "linear.bias": (6,), "linear_1.weight": (2, 6),
    }  # fmt: skip
    assert all(np.abs(array).max() <= 0.5 for array in w.values())
    (found,) = run(model, {"x": X})
    hidden = X @ w["linear.weight"].T + w["linear.bias"]
    np.testing.assert_allclose(found, 2.0 * hidden @ w["linear_1.weight"].T, rtol=1e-5)


def test_linear_parameters_are_the_same_in_every_run() -> None:
    models = [built(blocks.Linear(4, 2), x=X) for _ in range(2)]
    assert models[0].SerializeToString(deterministic=True) == models[1].SerializeToString(deterministic=True)


def test_input_like_adds_an_input_of_the_same_type_and_shape() -> None:
    model = built(lambda x: blocks.Sub()(x, blocks.InputLike("x")("other")), x=X)
    assert [value.name for value in model.graph.input] == ["x", "other"]
    assert model.graph.input[0].type == model.graph.input[1].type
    np.testing.assert_allclose(run(model, {"x": X, "other": Y})[0], X - Y)


def test_input_like_needs_something_to_be_like() -> None:
    with onnxblock.empty_base(), pytest.raises(ValueError, match="needs the name"):
        blocks.InputLike()("other")


LABELS = [
    ({"keys_int64s": [1, 2], "values_int64s": [10, 20], "default_int64": -5}, [1, 2, 9], [10, 20, -5]),
    ({"keys_strings": ["a", "b"], "values_int64s": [3, 4]}, ["b", "z", "a"], [4, -1, 3]),
    ({"keys_int64s": [7], "values_strings": ["seven"]}, [7, 8], ["seven", "_Unused"]),
    ({"keys_floats": [0.5], "values_floats": [2.5], "default_float": 9.0}, [0.5, 1.0], [2.5, 9.0]),
]


@pytest.mark.parametrize(("table", "given", "expected"), LABELS, ids=["ints", "names", "to names", "floats"])
def test_label_encoder(table: dict[str, Any], given: list, expected: list) -> None:
    array = np.asarray(given)
    if array.dtype == np.float64:
        array = array.astype(np.float32)
    model = built(blocks.LabelEncoder(**table), x=array)
    feeds = array.astype(object) if array.dtype.kind == "U" else array
    assert run(model, {"x": feeds})[0].tolist() == expected


def test_string_inputs_are_cast_and_used() -> None:
    model = built(
        lambda x: blocks.Linear(4, 2)(blocks.Cast(to=FLOAT)(x)), x=np.asarray([["1", "2", "3", "4"]])
    )
    (found,) = run(model, {"x": np.asarray([["1.0", "2.0", "3.0", "4.0"]], object)})
    w = [onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer]
    np.testing.assert_allclose(found, np.asarray([[1, 2, 3, 4]], np.float32) @ w[0].T + w[1], rtol=1e-5)


# ---- losses as blocks ------------------------------------------------------------------------------


class WithLoss(onnxblock.ForwardBlock):
    def __init__(self, loss: onnxblock.Block, *names: str) -> None:
        self._loss, self._names = loss, names

    def build(self, output: str) -> str:
        return self._loss(output, *self._names)


T = RNG.uniform(size=(5, 3)).astype(np.float32)
IN = RNG.normal(size=(5, 4)).astype(np.float32)
LOSSES = [
    (onnxblock.loss.MSELoss(), lambda y: ((y - T) ** 2).mean()),
    (onnxblock.loss.MSELoss("none"), lambda y: (y - T) ** 2),
    (onnxblock.loss.L1Loss(reduction="sum"), lambda y: np.abs(y - T).sum()),
    (onnxblock.loss.L1Loss("none"), lambda y: np.abs(y - T)),
    (onnxblock.loss.BCEWithLogitsLoss(), lambda y: (np.log1p(np.exp(-y)) + (1 - T) * y).mean()),
]


@pytest.mark.parametrize(("loss", "expected"), LOSSES, ids=lambda v: type(v).__name__)
@pytest.mark.parametrize("opset", [11, 14, 17, 21])
def test_a_loss_on_a_model_of_any_opset(loss: onnxblock.Block, expected: Callable, opset: int) -> None:
    model, block = two_layers(opset=opset), WithLoss(loss)
    with onnxblock.base(model):
        block(model.graph.output[0].name)
    proto = block.to_model_proto()
    assert [value.name for value in proto.graph.input] == ["input-0", "target"]
    (found,) = run(proto, {"input-0": IN, "target": T})
    np.testing.assert_allclose(found, expected(forward(IN)), rtol=2e-5, atol=1e-5)


def test_cross_entropy_takes_class_weights_and_names_its_labels() -> None:
    model = two_layers()
    weight = np.asarray([0.5, 1.0, 2.0], np.float32)
    block = WithLoss(onnxblock.loss.CrossEntropyLoss(weight=weight, ignore_index=-1), "classes")
    with onnxblock.base(model):
        block("output-0")
    proto = block.to_model_proto()
    labels = proto.graph.input[1]
    assert labels.name == "classes" and labels.type.tensor_type.elem_type == INT64
    assert [dim.dim_param for dim in labels.type.tensor_type.shape.dim] == ["batch"]
    classes = np.asarray([0, 1, 2, -1, 2])
    (found,) = run(proto, {"input-0": IN, "classes": classes})
    y = forward(IN).astype(np.float64)
    logs = y - np.log(np.exp(y).sum(axis=1, keepdims=True))
    kept = classes >= 0
    each = -logs[np.arange(5)[kept], classes[kept]] * weight[classes[kept]]
    np.testing.assert_allclose(found, each.sum() / weight[classes[kept]].sum(), rtol=1e-5)


def test_a_target_that_is_there_already_is_used() -> None:
    model = two_layers()
    model.graph.input.append(onnx.helper.make_tensor_value_info("wanted", FLOAT, ["batch", 3]))
    block = WithLoss(onnxblock.loss.MSELoss(), "wanted")
    with onnxblock.base(model):
        block("output-0")
    assert [value.name for value in block.to_model_proto().graph.input] == ["input-0", "wanted"]


def test_ctc_loss_adds_its_inputs() -> None:
    logs = np.log(np.full((6, 2, 5), 0.2, np.float32))
    model = built(onnxblock.loss.CTCLoss(), logs=logs)
    assert [value.name for value in model.graph.input] == [
        "logs",
        "targets",
        "input_lengths",
        "target_lengths",
    ]
    feeds = {"targets": np.asarray([[1], [2]]), "input_lengths": np.asarray([6, 1])}
    (found,) = run(model, {"logs": logs, **feeds, "target_lengths": np.asarray([1, 1])})
    # 21 alignments of one class in six frames, one in a single frame, each frame with probability 1/5
    expected = (-np.log(21 * 0.2**6) - np.log(0.2)) / 2
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("block", ["MSELoss", "L1Loss", "CrossEntropyLoss", "BCEWithLogitsLoss", "CTCLoss"])
def test_an_unknown_reduction_is_refused(block: str) -> None:
    with pytest.raises(ValueError, match="Reduction avg not supported"):
        getattr(onnxblock.loss, block)(reduction="avg")


# ---- training blocks -------------------------------------------------------------------------------


class Training(onnxblock.TrainingBlock):
    def __init__(self, loss: onnxblock.Block | None = None) -> None:  # without super().__init__()
        self._loss = loss or onnxblock.loss.MSELoss()

    def build(self, output: str) -> str:
        return self._loss(output)


def trained(**requires_grad: bool) -> Training:
    model, block = two_layers(), Training()
    for name, value in requires_grad.items():
        block.requires_grad(name, value)
    with onnxblock.base(model):
        block("output-0")
    return block


def test_the_training_model_runs_in_a_plain_session() -> None:
    block = trained(**dict.fromkeys(PARAMETERS, True))
    train, evaluate = block.to_model_proto()
    buffers = {
        f"{name}_grad.accumulation.buffer": np.full(s, 0.25, np.float32) for name, s in PARAMETERS.items()
    }
    feeds = {"input-0": IN, "target": T, **values(), **buffers}
    names = [value.name for value in train.graph.input]
    assert names == ["input-0", "target", *PARAMETERS, *buffers, "lazy_reset_grad"]
    outputs = [value.name for value in train.graph.output]
    assert outputs[1:] == [f"{name}_grad.accumulation.out" for name in PARAMETERS]
    fresh = run(train, {**feeds, "lazy_reset_grad": np.asarray([True])})
    added = run(train, {**feeds, "lazy_reset_grad": np.asarray([False])})
    for one, other in zip(fresh[1:], added[1:]):
        np.testing.assert_allclose(other, one + 0.25, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(fresh[0], ((forward(IN) - T) ** 2).mean(), rtol=1e-5)
    np.testing.assert_allclose(fresh[4], (2 * (forward(IN) - T) / T.size).sum(axis=0), rtol=1e-4, atol=1e-6)
    assert [value.name for value in evaluate.graph.input] == ["input-0", "target", *PARAMETERS]
    np.testing.assert_allclose(
        run(evaluate, {"input-0": IN, "target": T, **values()})[0], fresh[0], rtol=1e-6
    )


def test_parameters_are_in_the_order_of_the_model_whatever_the_order_of_asking() -> None:
    block = trained(**{"fc2.bias": True, "fc1.weight": True, "fc2.weight": False, "fc1.bias": False})
    trainable, frozen = block.parameters()
    assert [tensor.name for tensor in trainable] == ["fc1.weight", "fc2.bias"]
    assert [tensor.name for tensor in frozen] == ["fc1.bias", "fc2.weight"]
    first = np.frombuffer(trainable[0].raw_data, np.float32).reshape(6, 4)
    np.testing.assert_array_equal(first, values()["fc1.weight"])


def test_the_gradient_of_an_input() -> None:
    train, _ = trained(**{"input-0": True}).to_model_proto()
    assert "input-0_grad.accumulation.buffer" in [value.name for value in train.graph.input]
    buffer = np.zeros_like(IN)
    feeds = {"input-0": IN, "target": T, "input-0_grad.accumulation.buffer": buffer}
    _, gradient = run(train, {**feeds, "lazy_reset_grad": np.asarray([True])})
    w = values()
    hidden = IN @ w["fc1.weight"].T + w["fc1.bias"]
    expected = (2 * (forward(IN) - T) / T.size @ w["fc2.weight"] * (hidden > 0)) @ w["fc1.weight"]
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", [onnxblock.ForwardBlock, onnxblock.TrainingBlock])
def test_a_weighted_sum_of_losses_over_two_outputs(kind: type) -> None:
    class Weighted(kind):
        def __init__(self) -> None:
            super().__init__()
            self.losses = onnxblock.loss.CrossEntropyLoss(), onnxblock.loss.CrossEntropyLoss()
            self.weights = blocks.Constant(0.25), blocks.Constant(4.0)

        def build(self, first: str, second: str) -> str:
            one = blocks.Mul()(self.weights[0](), self.losses[0](first, labels_name="labels1"))
            two = blocks.Mul()(self.weights[1](), self.losses[1](second, labels_name="labels2"))
            return blocks.Add()(one, two)

    model = two_layers()
    hidden = onnx.helper.make_tensor_value_info("/relu", FLOAT, ["batch", 6])
    model.graph.output.append(hidden)
    block = Weighted()
    with onnxblock.base(model):
        block("output-0", "/relu")
    proto = block.to_model_proto()
    proto = proto if isinstance(proto, onnx.ModelProto) else proto[1]
    assert [value.name for value in proto.graph.input][:3] == ["input-0", "labels1", "labels2"]
    feeds = {"input-0": IN, "labels1": np.asarray([0, 1, 2, 0, 1]), "labels2": np.asarray([5, 4, 3, 2, 1])}
    (found,) = run(proto, feeds)

    def entropy(y: np.ndarray, labels: np.ndarray) -> float:
        logs = y - np.log(np.exp(y).sum(axis=1, keepdims=True))
        return -logs[np.arange(5), labels].mean()

    w = values()
    relu = np.maximum(IN @ w["fc1.weight"].T + w["fc1.bias"], 0)
    expected = 0.25 * entropy(forward(IN), feeds["labels1"]) + 4.0 * entropy(relu, feeds["labels2"])
    np.testing.assert_allclose(found, [expected], rtol=1e-5)


# ---- checkpoints -----------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


def test_a_checkpoint_goes_into_a_model_of_the_same_names(folder: Path) -> None:
    block = trained(**{"fc1.weight": True, "fc2.bias": True, "fc1.bias": False})
    onnxblock.save_checkpoint(block.parameters(), folder / "checkpoint")
    other = two_layers(seed=1)
    onnxblock.load_checkpoint_to_model(folder / "checkpoint", other)
    for tensor in other.graph.initializer:
        expected = values(1 if tensor.name == "fc2.weight" else 0)[tensor.name]
        np.testing.assert_array_equal(onnx.numpy_helper.to_array(tensor), expected)


def test_a_nominal_checkpoint_has_no_values_to_load(folder: Path) -> None:
    parameters = trained(**dict.fromkeys(PARAMETERS, True)).parameters()
    onnxblock.save_checkpoint(parameters, folder / "nominal", nominal_checkpoint=True)
    onnxblock.save_checkpoint(parameters, folder / "full")
    assert (folder / "nominal").stat().st_size < (folder / "full").stat().st_size
    with pytest.raises(OnwardError, match="nominal"):
        onnxblock.load_checkpoint_to_model(folder / "nominal", two_layers())


# ---- contexts, errors, threads ---------------------------------------------------------------------


def nested() -> None:
    with onnxblock.base(two_layers()), onnxblock.base(two_layers()):
        pass


def nested_empty() -> None:
    with onnxblock.empty_base(), onnxblock.empty_base():
        pass


def base_of(model: Any) -> None:
    with onnxblock.base(model):
        pass


def library(path: str) -> None:
    with onnxblock.custom_op_library(path):
        pass


def two_libraries() -> None:
    with onnxblock.custom_op_library(__file__), onnxblock.custom_op_library(__file__):
        pass


def building(result: Any) -> None:
    built(lambda x: result, x=X)


ERRORS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (nested, RuntimeError, "Base onnx model already exists"),
    (nested_empty, RuntimeError, "Base onnx model already exists"),
    (lambda: base_of(None), RuntimeError, "Base onnx model cannot be None"),
    (lambda: base_of("model.onnx"), TypeError, "must be an onnx.ModelProto, got str"),
    (lambda: library("nowhere.so"), RuntimeError, "nowhere.so does not exist"),
    (two_libraries, RuntimeError, "CustomOp library already set"),
    (lambda: blocks.Add()("a", "b"), RuntimeError, "no base model"),
    (lambda: WithLoss(onnxblock.loss.MSELoss()).to_model_proto(), RuntimeError, "build the forward models first"),
    (lambda: Training().to_model_proto(), RuntimeError, "Please build the training and eval models first"),
    (lambda: Training().parameters(), RuntimeError,
     "Please build the training model first before trying to retrieve the parameters."),
    (lambda: trained(nope=True), RuntimeError, "Node arg nope is not found in the graph"),
    (lambda: built(lambda x: blocks.Neg()("missing"), x=X), RuntimeError, "The provided name missing"),
    (lambda: built(lambda x: blocks.Neg()(X), x=X), TypeError, "take the names of values, got ndarray"),
    (lambda: building(None), TypeError, "must return the name of its output or a list of names, got None"),
    (lambda: building([]), TypeError, "must return the name"),
    (lambda: building("nothing"), RuntimeError, "returned 'nothing', which nothing in the model computes"),
]  # fmt: skip


@pytest.mark.parametrize(("action", "kind", "message"), ERRORS, ids=[row[2][:40] for row in ERRORS])
def test_errors_say_what_to_do(action: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        action()


def test_a_failed_build_leaves_the_base_free_for_the_next() -> None:
    with pytest.raises(RuntimeError):
        building("nothing")
    assert run(built(blocks.Neg(), x=X), {"x": X})[0].shape == X.shape


def test_threads_build_apart() -> None:
    barrier = threading.Barrier(4)
    found: dict[int, onnx.ModelProto] = {}

    def work(number: int) -> None:
        def build(x: str) -> str:
            barrier.wait(timeout=30)
            made = blocks.Mul()(x, blocks.Constant(float(number))())
            barrier.wait(timeout=30)
            return made

        found[number] = built(build, x=X)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, model in found.items():
        np.testing.assert_allclose(run(model, {"x": X})[0], X * number)


def test_artifacts_can_be_made_while_a_model_is_being_built() -> None:
    from onward import artifacts

    with onnxblock.empty_base() as accessor:
        made = artifacts.build_artifacts(
            two_layers(), requires_grad=["fc1.weight"], loss=artifacts.LossType.MSELoss
        )
        assert not accessor.model.graph.node
    assert made.trainable == ["fc1.weight"]


def test_nodes_that_a_block_appends_itself_are_part_of_the_model() -> None:
    class Doubled(onnxblock.ForwardBlock):
        def build(self, name: str) -> str:
            assert self.base is not None
            self.base.graph.node.append(onnx.helper.make_node("Add", [name, name], ["doubled"]))
            return blocks.Neg()("doubled")

    model, block = two_layers(), Doubled()
    with onnxblock.base(model):
        block("output-0")
    np.testing.assert_allclose(
        run(block.to_model_proto(), {"input-0": IN})[0], -2 * forward(IN), rtol=1e-5, atol=1e-5
    )


def test_a_model_that_is_put_together_inside_its_base() -> None:
    block = WithLoss(onnxblock.loss.MSELoss())
    model = onnx.ModelProto(ir_version=8)
    with onnxblock.base(model) as accessor:
        accessor.model.CopyFrom(two_layers(opset=12))
        block("output-0")
    np.testing.assert_allclose(
        run(block.to_model_proto(), {"input-0": IN, "target": T})[0],
        ((forward(IN) - T) ** 2).mean(),
        rtol=1e-5,
    )


def test_everything_of_the_original_is_there() -> None:
    names = {"Block", "ForwardBlock", "TrainingBlock", "base", "blocks", "custom_op_library", "empty_base"}
    names |= {"load_checkpoint_to_model", "loss", "optim", "save_checkpoint"}
    assert set(onnxblock.__all__) == names
