"""Models in older opsets: loaded by the stock runtime, and computing the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest

from graph.running import run
from onnxblock.networks import PARAMETERS, two_layers, values
from onward import onnxblock
from onward.api import CheckpointState, Module, Optimizer
from onward.artifacts import LossType, OptimType, build_artifacts, generate_artifacts
from onward.errors import ModelError
from onward.export import for_inference
from onward.graph.dialect.lower import lower
from onward.graph.dialect.normalize import normalize

RNG = np.random.default_rng(4)
X = RNG.normal(size=(3, 4, 6)).astype(np.float32)
INDEX = np.asarray([[[5], [0], [3], [3]]] * 3)


def dialect(body: str, outputs: str = "float[A, B, C] y") -> ir.Model:
    text = f'<ir_version: 10, opset_import: ["": 21]> g (float[N, 4, 6] x, int64[N, 4, 1] i) => ({outputs}) {body}'
    return normalize(onnx.parser.parse_model(text))


AXES = "<int64[1] axes = {1}>"
ROWS: list[tuple[str, str, str]] = [
    *((f"{kind} of an axis", f"{AXES} {{ y = {kind}<keepdims=1>(x, axes) }}", "float[A, B, C] y")
      for kind in ("ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceSum",
                   "ReduceSumSquare", "ReduceLogSumExp")),
    ("ReduceMean of all", "{ y = ReduceMean<keepdims=0>(x) }", "float y"),
    ("Shape of an axis", "{ y = Shape<start=1, end=2>(x) }", "int64[1] y"),
    ("Shape from the end", "{ y = Shape<start=-2>(x) }", "int64[2] y"),
    ("Shape", "{ y = Shape(x) }", "int64[3] y"),
    ("Split", "{ a, b = Split<axis=2, num_outputs=2>(x)  y = Sub(a, b) }", "float[A, B, C] y"),
    ("Split of sizes", "<int64[2] s = {2, 4}> { a, y = Split<axis=2>(x, s) }", "float[A, B, C] y"),
    ("Pad of axes", "<int64[4] p = {1, 0, 2, 3}, float v = {7.0}, int64[2] a = {-1, 0}> { y = Pad(x, p, v, a) }",
     "float[A, B, C] y"),
    ("Pad", "<int64[6] p = {0, 1, 0, 0, 2, 3}> { y = Pad<mode=\"edge\">(x, p) }", "float[A, B, C] y"),
    ("scatter of one a row", "{ u = Cast<to=1>(i)  y = ScatterElements<axis=2, reduction=\"add\">(x, i, u) }",
     "float[A, B, C] y"),
    ("scatter", "{ u = Cast<to=1>(i)  y = ScatterElements<axis=2>(x, i, u) }", "float[A, B, C] y"),
    ("CastLike", "{ y = CastLike(i, x) }", "float[A, B, C] y"),
    ("elementwise", "{ a = Add(x, x)  b = Pow(a, a)  c = Relu(x)  d = Equal(a, c)  y = Where(d, a, c) }",
     "float[A, B, C] y"),
    ("Reshape", "<int64[2] s = {0, -1}> { y = Reshape(x, s) }", "float[A, B] y"),
    ("AveragePool", "{ y = AveragePool<kernel_shape=[2], strides=[2]>(x) }", "float[A, B, C] y"),
    ("branches", """{ t = ReduceSum<keepdims=0>(x)  z = Constant<value = float {0.0}>()  c = Greater(t, z)
        y = If(c) <then_branch = a () => (float[A, B, C] p) { p = ReduceMax<keepdims=1>(x) },
                   else_branch = b () => (float[A, B, C] q) { q = ReduceMin<keepdims=1>(x) }> }""",
     "float[A, B, C] y"),
]  # fmt: skip


@pytest.mark.parametrize("opset", [13, 14, 15, 16, 17, 18, 19, 20])
@pytest.mark.parametrize(("body", "outputs"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_an_older_form_computes_the_same(body: str, outputs: str, opset: int) -> None:
    model = dialect(body, outputs)
    lowered = ir.to_proto(lower(model, opset))
    onnx.checker.check_model(lowered, full_check=True)
    assert [(entry.domain, entry.version) for entry in lowered.opset_import] == [("", opset)]
    feeds = {"x": X, "i": INDEX}
    before = [value.name for value in model.graph.outputs]
    assert [value.name for value in lowered.graph.output] == before
    np.testing.assert_allclose(
        run(lowered, feeds)[0], run(ir.to_proto(model), feeds)[0], rtol=1e-6, atol=1e-6
    )


# operator, the oldest opset in which it can be said, the graph
OLD_ROWS: list[tuple[str, int, str, str]] = [
    ("Gelu", 9, "{ y = Gelu(x) }", "float[A, B, C] y"),
    ("Gelu by tanh", 7, '{ y = Gelu<approximate="tanh">(x) }', "float[A, B, C] y"),
    ("HardSwish", 7, "{ y = HardSwish(x) }", "float[A, B, C] y"),
    ("Mish", 7, "{ y = Mish(x) }", "float[A, B, C] y"),
    ("Celu", 7, "{ y = Celu<alpha=0.7>(x) }", "float[A, B, C] y"),
    ("Softmax of the middle", 7, "{ y = Softmax<axis=1>(x) }", "float[A, B, C] y"),
    ("LogSoftmax of the last", 7, "{ y = LogSoftmax<axis=-1>(x) }", "float[A, B, C] y"),
    ("LayerNormalization", 7, """<float[6] s = {1, 2, 3, 4, 5, 6}, float[6] b = {0, 1, 0, 1, 0, 1}>
        { y = LayerNormalization(x, s, b) }""", "float[A, B, C] y"),
    ("GroupNormalization", 7, """<float[4] s = {1, 2, 3, 4}, float[4] b = {0, 1, 0, 1}>
        { y = GroupNormalization<num_groups=2>(x, s, b) }""", "float[A, B, C] y"),
    ("BatchNormalization that trains", 7, """<float[4] s = {1, 2, 3, 4}, float[4] m = {0, 1, 0, 1}>
        { a, b, y = BatchNormalization<training_mode=1, momentum=0.7>(x, s, m, m, s) }""", "float[C] y"),
    ("GreaterOrEqual", 7, "{ n = Neg(x)  c = GreaterOrEqual(x, n)  y = Cast<to=1>(c) }", "float[A, B, C] y"),
    ("Equal of NaN", 7, "{ z = Sub(x, x)  n = Div(z, z)  c = Equal(n, n)  y = Cast<to=1>(c) }", "float[A, B, C] y"),
    ("Max of integers", 9, "<int64[1] k = {3}> { m = Max(i, k)  y = Cast<to=1>(m) }", "float[A, B, C] y"),
    ("Clip", 7, "<float l = {-0.5}, float h = {0.5}> { y = Clip(x, l, h) }", "float[A, B, C] y"),
    ("Clip at run time", 8, "{ l = ReduceMin<keepdims=0>(x)  y = Clip(x, , l) }", "float[A, B, C] y"),
    ("Squeeze and Unsqueeze", 7, """<int64[1] a = {-1}, int64[1] o = {1}, int64[1] f = {0}, int64[1] t = {1}>
        { s = Slice(x, f, t, o)  q = Squeeze(s, o)  y = Unsqueeze(q, a) }""", "float[A, B, C] y"),
    ("Slice at run time", 9, """<int64[1] a = {2}, int64[1] f = {1}, int64[1] minus = {-1}>
        { n = Shape<start=2>(x)  e = Add(n, minus)  y = Slice(x, f, e, a) }""", "float[A, B, C] y"),
    ("Slice with steps", 7, """<int64[3] f = {1, 0, 5}, int64[3] t = {9, 4, -9}, int64[3] a = {0, 1, 2},
        int64[3] s = {1, 2, -2}> { y = Slice(x, f, t, a, s) }""", "float[A, B, C] y"),
    ("Slice backwards", 7, """<int64[1] f = {-1}, int64[1] t = {-9223372036854775807}, int64[1] a = {2},
        int64[1] s = {-1}> { y = Slice(x, f, t, a, s) }""", "float[A, B, C] y"),
    ("IsNaN", 7, "{ z = Sub(x, x)  n = Div(z, z)  m = Concat<axis=0>(x, n)  c = IsNaN(m)  y = Cast<to=1>(c) }",
     "float[A, B, C] y"),
    ("OneHot", 7, "<int64 d = {6}, float[2] v = {0.5, 2.0}> { j = Neg(i)  y = OneHot<axis=1>(j, d, v) }",
     "float[A, D, B, C] y"),
    ("Expand of a number", 7, "{ t = ReduceSum<keepdims=0>(x)  s = Shape(x)  y = Expand(t, s) }", "float[A, B, C] y"),
    ("Expand to known sizes", 7, """<int64[4] s = {2, 1, 4, 6}, int64[1] o = {0}> { t = ReduceSum<keepdims=1>(x, o)
        y = Expand(t, s) }""", "float[A, B, C, D] y"),
    ("Split of sizes", 7, "<int64[2] s = {2, 4}> { a, y = Split<axis=-1>(x, s) }", "float[A, B, C] y"),
    ("Pad of axes", 7, "<int64[2] p = {1, 2}, float v = {7.0}, int64[1] a = {-1}> { y = Pad(x, p, v, a) }",
     "float[A, B, C] y"),
    ("TopK of the smallest", 7, "<int64[1] k = {2}> { y, j = TopK<largest=0>(x, k) }", "float[A, B, C] y"),
    ("Range", 9, "<int64 t = {-2}, int64 d = {-3}> { s = Size(x)  r = Range(s, t, d)  y = Cast<to=1>(r) }",
     "float[A] y"),
    ("CumSum backwards", 9, "<int64 a = {1}> { y = CumSum<exclusive=1, reverse=1>(x, a) }", "float[A, B, C] y"),
    ("Trilu", 9, "<int64 k = {1}> { y = Trilu<upper=0>(x, k) }", "float[A, B, C] y"),
    ("Pow of an integer", 7, "<int64 two = {2}> { y = Pow(x, two) }", "float[A, B, C] y"),
    ("Sum of three", 7, "<float[1] o = {1.0}> { y = Sum(x, x, o) }", "float[A, B, C] y"),
    ("Gemm without C", 7, "{ f = Flatten(x)  y = Gemm<transB=1>(f, f) }", "float[A, B] y"),
    ("GatherElements", 9, "{ y = GatherElements<axis=2>(x, i) }", "float[A, B, C] y"),
    ("cross entropy", 9, """<int64[1] o = {2}> { j = Squeeze(i, o)  t = Transpose<perm=[0, 2, 1]>(x)
        y = SoftmaxCrossEntropyLoss<ignore_index=3>(t, j) }""", "float y"),
    ("cross entropy with weights", 9, """<int64[1] o = {2}, float[6] w = {1, 2, 3, 4, 5, 6}> { j = Squeeze(i, o)
        t = Transpose<perm=[0, 2, 1]>(x)  y = SoftmaxCrossEntropyLoss<reduction="none">(t, j, w) }""", "float[A, B] y"),
    ("scatter that adds up", 11, """{ j = Concat<axis=2>(i, i)  u = Cast<to=1>(j)
        y = ScatterElements<axis=2, reduction="add">(x, j, u) }""", "float[A, B, C] y"),
    ("scatter that adds up flat", 9, """<int64[1] m = {-1}> { j = Reshape(i, m)  f = Reshape(x, m)  u = Cast<to=1>(j)
        y = ScatterElements<axis=0, reduction="add">(f, j, u) }""", "float[A] y"),
    ("Resize of an axis", 11, """<float[1] s = {2.0}> { y = Resize<mode="linear", axes=[2]>(x, , s) }""",
     "float[A, B, C] y"),
    ("Resize from the corner", 7, """<float[3] s = {1.0, 1.0, 2.0}>
        { y = Resize<coordinate_transformation_mode="asymmetric", nearest_mode="floor">(x, , s) }""",
     "float[A, B, C] y"),
    ("a choice by one number", 7, """<float z = {0.0}> { n = Neg(x)  t = ReduceSum<keepdims=0>(x)  c = Greater(t, z)
        y = Where(c, x, n) }""", "float[A, B, C] y"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "oldest", "body", "outputs"), OLD_ROWS, ids=[row[0] for row in OLD_ROWS])
def test_the_form_of_an_old_opset_computes_the_same(name: str, oldest: int, body: str, outputs: str) -> None:
    model = dialect(body, outputs)
    feeds = {"x": X, "i": INDEX}
    expected = run(ir.to_proto(model), feeds)[0]
    for opset in range(oldest, 13):
        lowered = ir.to_proto(lower(model, opset))
        assert (lowered.opset_import[0].version, lowered.ir_version <= 7) == (opset, True)
        onnx.checker.check_model(lowered, full_check=True)
        np.testing.assert_allclose(run(lowered, feeds)[0], expected, rtol=2e-6, atol=2e-6, err_msg=str(opset))
    if oldest > 7:
        with pytest.raises(ModelError, match=f"cannot be written in opset {oldest - 1}"):
            lower(model, oldest - 1)


REFUSED = [
    ("<int64[6] p = {0, 0, 1, 0, 0, 1}> { y = Pad<mode=\"wrap\">(x, p) }", 18, "wraps around"),
    ("{ y = AveragePool<kernel_shape=[2], dilations=[2]>(x) }", 17, "dilations"),
    ("{ a, b, c, y = Split<axis=2, num_outputs=4>(x) }", 17, "may not be equal"),
    ("<int64[1] o = {1}> { a = Add(o, o)  y = ReduceMax<keepdims=1>(x, a) }", 17, "known at run time only"),
    ("{ j = Concat<axis=2>(i, i)  u = Cast<to=1>(j)  y = ScatterElements<axis=2, reduction=\"mul\">(x, j, u) }", 15,
     "reduces by mul"),
    ("{ y = Gelu(x) }", 8, "Erf .* is newer"),
    ("{ y = Resize<mode=\"linear\">(x, , s) }", 10, "Resize .* linear from half_pixel"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "opset", "message"), REFUSED, ids=[row[2] for row in REFUSED])
def test_what_means_something_else_is_refused(body: str, opset: int, message: str) -> None:
    model = dialect("<float[3] s = {1.0, 1.0, 2.0}> " + body if "Resize" in body else body)
    if "ReduceMax" in body:  # the dialect has folded the sum: let it be known at run time only
        (node,) = (node for node in model.graph if node.op_type == "ReduceMax")
        assert node.inputs[1] is not None
        if node.inputs[1].is_initializer():
            model.graph.inputs.append(node.inputs[1])
    with pytest.raises(ModelError, match=message):
        lower(model, opset)


@pytest.mark.parametrize("opset", [1, 6, 22, 99])
def test_opsets_out_of_range(opset: int) -> None:
    with pytest.raises(ModelError, match="choose one from 7 to 21"):
        lower(dialect("{ y = Neg(x) }"), opset)


# ---- artifacts -------------------------------------------------------------------------------------

IN = RNG.normal(size=(5, 4)).astype(np.float32)


def opsets(folder: Path) -> set[int]:
    return {onnx.load(file).opset_import[0].version for file in folder.glob("*.onnx")}


def trained(folder: Path, inputs: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Loss and parameters after a few steps, and the exported model's answer."""
    module = Module(
        folder / "training_model.onnx",
        CheckpointState.load_checkpoint(folder / "checkpoint"),
        folder / "eval_model.onnx",
    )
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    for _ in range(5):
        module(*inputs)
        optimizer.step()
        module.lazy_reset_grad()
    module.export_model_for_inferencing(folder / "inference.onnx", ["output-0"])
    session = ort.InferenceSession(folder / "inference.onnx", providers=["CPUExecutionProvider"])
    answer: Any = session.run(None, {"input-0": inputs[0]})[0]
    return module.get_contiguous_parameters().numpy(), answer


@pytest.mark.parametrize("loss", list(LossType), ids=lambda loss: loss.name)
@pytest.mark.parametrize("opset", [13, 18])
def test_artifacts_come_in_the_models_own_opset_and_train_the_same(
    loss: LossType, opset: int, tmp_path: Path
) -> None:
    classes = loss in (LossType.CrossEntropyLoss, LossType.NLLLoss)
    target = np.asarray([0, 1, 2, 1, 0]) if classes else np.abs(RNG.normal(size=(5, 3)).astype(np.float32))
    results = []
    for folder, asked in ((tmp_path / "own", None), (tmp_path / "newest", 21)):
        generate_artifacts(
            two_layers(opset=opset), requires_grad=list(PARAMETERS), loss=loss, optimizer=OptimType.AdamW,
            artifact_directory=folder, opset=asked,
        )  # fmt: skip
        assert opsets(folder) == {asked or opset}
        for file in folder.glob("*.onnx"):
            onnx.checker.check_model(onnx.load(file), full_check=True)
        results.append(trained(folder, [IN, target]))
    for own, newest in zip(*results):
        np.testing.assert_allclose(own, newest, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", list(OptimType), ids=lambda optimizer: optimizer.name)
def test_every_optimizer_has_a_form_in_opset_13(optimizer: OptimType, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "requires_grad": list(PARAMETERS),
        "loss": LossType.MSELoss,
        "optimizer": optimizer,
    }
    target = RNG.normal(size=(5, 3)).astype(np.float32)
    results = []
    for opset in (13, 21):
        generate_artifacts(two_layers(), artifact_directory=tmp_path / str(opset), opset=opset, **options)
        assert opsets(tmp_path / str(opset)) == {opset}
        results.append(trained(tmp_path / str(opset), [IN, target])[0])
    np.testing.assert_allclose(results[0], results[1], rtol=1e-5, atol=1e-6)
    assert not np.allclose(results[0], np.concatenate([array.ravel() for array in values().values()]))


def test_a_model_that_needs_more_comes_in_21() -> None:
    class Gelu(onnxblock.Block):
        def build(self, name: str) -> str:
            assert self.base is not None
            self.base.graph.node.append(onnx.helper.make_node("Gelu", [name], ["gelu"]))
            return onnxblock.loss.MSELoss()("gelu")

    made = build_artifacts(two_layers(opset=14), requires_grad=["fc1.weight"], loss=Gelu())
    assert {made.training.graph.opset_imports[""], made.evaluation.graph.opset_imports[""]} == {21}
    older = build_artifacts(two_layers(opset=14), requires_grad=["fc1.weight"], loss=Gelu(), opset=14)
    assert older.training.graph.opset_imports[""] == 14


def picture_network() -> onnx.ModelProto:
    """A convolution, batch norm, windows that overlap, dropout, normalization and two classes more."""
    draw = np.random.default_rng(1)

    def weight(name: str, *shape: int) -> onnx.TensorProto:
        return onnx.numpy_helper.from_array((draw.normal(size=shape) * 0.3).astype(np.float32), name)

    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        net (float[N, 2, H, W] x) => (float[N, 3] y) {
            c = Conv<pads=[1, 1, 1, 1]>(x, conv)
            b, rm, rv = BatchNormalization<training_mode=1>(c, scale, shift, mean, var)
            p = MaxPool<kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]>(b)
            h = HardSwish(p)
            g = GlobalAveragePool(h)
            f = Flatten(g)
            ratio = Constant<value = float {0.25}>()
            true = Constant<value = bool {1}>()
            d = Dropout(f, ratio, true)
            n = LayerNormalization(d, gain, offset)
            y = Gemm<transB=1>(n, last)
        }""")
    ones, zeros = np.ones(4, np.float32), np.zeros(4, np.float32)
    vectors = {"scale": ones, "shift": zeros, "mean": zeros, "var": ones, "gain": ones, "offset": zeros}
    model.graph.initializer.extend([weight("conv", 4, 2, 3, 3), weight("last", 3, 4)])
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in vectors.items())
    return model


def test_a_picture_network_trains_the_same_in_every_old_opset(tmp_path: Path) -> None:
    x, labels = RNG.normal(size=(4, 2, 6, 6)).astype(np.float32), np.asarray([0, 2, 1, 2])
    curves = {}
    for opset in (21, 9, 10, 11, 12):
        folder = tmp_path / str(opset)
        generate_artifacts(
            picture_network(),
            requires_grad=["conv", "scale", "shift", "gain", "offset", "last"],
            loss=LossType.CrossEntropyLoss, optimizer=OptimType.AdamW, artifact_directory=folder, opset=opset,
        )  # fmt: skip
        assert opsets(folder) == {opset}
        state = CheckpointState.load_checkpoint(folder / "checkpoint")
        module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
        optimizer = Optimizer(folder / "optimizer_model.onnx", module)
        losses = []
        for _ in range(4):
            losses.append(float(module(x, labels)))
            optimizer.step()
            module.lazy_reset_grad()
        module.eval()
        curves[opset] = [*losses, float(module(x, labels))]
        for_inference(folder / "eval_model.onnx", state, ["y"], folder / "model.onnx", opset=opset)
        assert opsets(folder) == {opset}
    for opset in (9, 10, 11, 12):
        np.testing.assert_allclose(curves[opset], curves[21], rtol=1e-5, atol=1e-5, err_msg=str(opset))


def test_operators_stay_whole_unless_an_older_opset_is_asked_for(tmp_path: Path) -> None:
    made = build_artifacts(picture_network(), requires_grad=["last"], loss=LossType.CrossEntropyLoss)
    assert made.evaluation.graph.opset_imports[""] == 17
    assert "LayerNormalization" in {node.op_type for node in made.evaluation.graph}
