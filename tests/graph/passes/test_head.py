"""A new head: found through what comes after it, sized anew, and refused where no layer makes the scores alone."""

from __future__ import annotations

import json
import logging

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest

import onward
from onward import contract
from onward.artifacts import build_artifacts
from onward.errors import ModelError

HEADER = '<ir_version: 8, opset_import: ["": 17]>'


def parse(body: str, *, inputs: str = "float[N, 8] x", outputs: str = "float[N, 4] y") -> onnx.ModelProto:
    """A small model; initializers without values get random ones."""
    model = onnx.parser.parse_model(f"{HEADER} net ({inputs}) => ({outputs}) {body}")
    rng = np.random.default_rng(0)
    for tensor in list(model.graph.initializer):
        if tensor.name.startswith("w_"):
            made = rng.normal(size=list(tensor.dims)).astype(np.float32)
            tensor.CopyFrom(onnx.numpy_helper.from_array(made, tensor.name))
    return model


def weight(name: str, *dims: int) -> str:
    values = ", ".join("0.5" for _ in range(int(np.prod(dims))))
    return f"float[{', '.join(map(str, dims))}] {name} = {{{values}}}"


def run(model: onnx.ModelProto, **feeds: np.ndarray) -> list[np.ndarray]:
    return ort.InferenceSession(model.SerializeToString()).run(None, feeds)


W, B = weight("w_fc", 8, 4), weight("bias", 4)
ENDINGS = {
    "MatMul": f"<{W}> {{ y = MatMul(x, w_fc) }}",
    "MatMul, Add": f"<{W}, {B}> {{ s = MatMul(x, w_fc) y = Add(s, bias) }}",
    "Add, MatMul the other way": f"<{W}, {B}> {{ s = MatMul(x, w_fc) y = Add(bias, s) }}",
    "Gemm": f"<{W}, {B}> {{ y = Gemm(x, w_fc, bias) }}",
    "Gemm transposed": f"<{weight('w_fc', 4, 8)}, {B}> {{ y = Gemm<transB=1>(x, w_fc, bias) }}",
    "Softmax": f"<{W}, {B}> {{ s = Gemm(x, w_fc, bias) y = Softmax(s) }}",
    "LogSoftmax": f"<{W}> {{ s = MatMul(x, w_fc) y = LogSoftmax(s) }}",
    "Sigmoid": f"<{W}> {{ s = MatMul(x, w_fc) y = Sigmoid(s) }}",
    "decomposed softmax": f"<{W}> {{ s = MatMul(x, w_fc) m = ReduceMax<axes=[1]>(s) c = Sub(s, m) e = Exp(c)"
    " a = Constant<value_ints=[1]>() t = ReduceSum(e, a) y = Div(e, t) }",
    "decomposed softmax, spread": f"<{W}> {{ s = MatMul(x, w_fc) m = ReduceMax<axes=[1]>(s) k = Shape(s)"
    " f = Expand(m, k) c = Sub(s, f) e = Exp(c) a = Constant<value_ints=[1]>() t = ReduceSum(e, a)"
    " g = Expand(t, k) y = Div(e, g) }",
    "decomposed sigmoid": f"<{W}> {{ s = MatMul(x, w_fc) n = Neg(s) e = Exp(n) o = Constant<value_float=1.0>()"
    " p = Add(o, e) y = Div(o, p) }",
    "decomposed log-softmax": f"<{W}> {{ s = MatMul(x, w_fc) m = ReduceMax<axes=[1]>(s) c = Sub(s, m) e = Exp(c)"
    " a = Constant<value_ints=[1]>() t = ReduceSum(e, a) l = Log(t) y = Sub(c, l) }",
    "Reshape to the number of classes": f"<{W}> {{ s = MatMul(x, w_fc) k = Constant<value_ints=[-1, 4]>()"
    " r = Reshape(s, k) y = Softmax(r) }",
    "Softmax, Reshape": f"<{W}> {{ s = MatMul(x, w_fc) p = Softmax(s) k = Constant<value_ints=[-1, 4]>()"
    " y = Reshape(p, k) }",
    "Identity and Dropout": f"<{W}> {{ s = MatMul(x, w_fc) i = Identity(s) d = Dropout(i) y = Softmax(d) }}",
    "a transposed weight": f"<{weight('w_fc', 4, 8)}> {{ t = Transpose<perm=[1, 0]>(w_fc) s = MatMul(x, t)"
    " y = Softmax(s) }",
    "a weight in a Constant": "{ w = Constant<value = float[8, 4] {"
    + ", ".join("0.5" for _ in range(32))
    + "}>() s = MatMul(x, w) y = Softmax(s) }",
    "a size that is put together": f"<{W}> {{ s = MatMul(x, w_fc) k = Shape(x) z = Constant<value_ints=[0]>()"
    " g = Gather(k, z) f = Constant<value_ints=[4]>() c = Concat<axis=0>(g, f) y = Reshape(s, c) }",
    "a weight with three axes": f"<{weight('w_fc', 1, 8, 4)}> {{ z = Constant<value_ints=[1]>() u = Unsqueeze(x, z)"
    " s = MatMul(u, w_fc) y = Squeeze(s, z) }",
}
W1, B1 = weight("w_fc", 8, 1), weight("bias", 1)
# heads of one score, as regression and two-class models have them: with the shape of what they give
SINGLE = {
    "Gemm": (f"<{W1}, {B1}> {{ y = Gemm(x, w_fc, bias) }}", "float[N, 1] y"),
    "Squeeze, Sigmoid": (
        f"<{W1}, {B1}> {{ s = Gemm(x, w_fc, bias) a = Constant<value_ints=[1]>() q = Squeeze(s, a) y = Sigmoid(q) }}",
        "float[N] y",
    ),
    "Sigmoid, Squeeze": (
        f"<{W1}> {{ s = MatMul(x, w_fc) p = Sigmoid(s) a = Constant<value_ints=[-1]>() y = Squeeze(p, a) }}",
        "float[N] y",
    ),
    "Squeeze of every 1": (f"<{W1}> {{ s = MatMul(x, w_fc) y = Squeeze(s) }}", "float[N] y"),
    "Reshape to samples": (
        f"<{W1}> {{ s = MatMul(x, w_fc) a = Constant<value_ints=[-1]>() y = Reshape(s, a) }}", "float[N] y",
    ),
    "Reshape to samples and one": (
        f"<{W1}, {B1}> {{ s = MatMul(x, w_fc) t = Add(bias, s) a = Constant<value_ints=[-1, 1]>() y = Reshape(t, a) }}",
        "float[N, 1] y",
    ),
    "Flatten": (f"<{W1}> {{ s = MatMul(x, w_fc) f = Flatten(s) y = Sigmoid(f) }}", "float[N, 1] y"),
    "the first of one": (
        f"<{W1}> {{ s = MatMul(x, w_fc) z = Constant<value_int=0>() q = Gather<axis=1>(s, z) y = Sigmoid(q) }}",
        "float[N] y",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("body", "declared"), SINGLE.values(), ids=SINGLE.keys())
def test_a_head_of_one_score_becomes_one_of_several_or_stays(body: str, declared: str) -> None:
    x = np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)
    several = onward.replace_head(parse(body, outputs=declared), classes=3)
    onnx.checker.check_model(several, full_check=True)
    (scores,) = run(several, x=x)
    assert scores.shape == (5, 3) and (scores < 0).any()
    assert "head.weight" in build_artifacts(several, loss="cross-entropy").trainable
    single = onward.replace_head(parse(body, outputs=declared), classes=1)
    onnx.checker.check_model(single, full_check=True)
    (number,) = run(single, x=x)
    assert number.shape == ((5,) if declared == "float[N] y" else (5, 1))
    assert "head.weight" in build_artifacts(single, loss="mse").trainable


def test_several_outputs_of_one_head_all_follow_and_the_scores_come_first() -> None:
    body = f"<{W}, {B}> {{ s = Gemm(x, w_fc, bias) p = Softmax(s) l = ArgMax<axis=1, keepdims=0>(s) }}"
    model = parse(body, outputs="int64[N] l, float[N, 4] p, float[N, 4] s")
    new = onward.replace_head(model, classes=6)
    onnx.checker.check_model(new, full_check=True)
    assert [value.name for value in new.graph.output] == ["p", "l", "s"]
    scores, label, same = run(new, x=np.ones((5, 8), np.float32))
    assert scores.shape == same.shape == (5, 6) and label.shape == (5,)
    np.testing.assert_array_equal(scores, same)
    assert "head.weight" in build_artifacts(new, loss="cross-entropy").trainable


@pytest.mark.parametrize("after", ["Squeeze(g, a)", "Flatten(g)", "Reshape(g, b)"])
def test_a_convolution_of_one_by_one_after_pooling(after: str) -> None:
    body = f"<{weight('w_c', 4, 2, 1, 1)}> {{ p = GlobalAveragePool(x) g = Conv(p, w_c)"
    body += " a = Constant<value_ints=[2, 3]>()"
    body += f" b = Constant<value_ints=[0, 4]>() y = {after} }}"
    new = onward.replace_head(parse(body, inputs="float[N, 2, 5, 5] x"), classes=3)
    (scores,) = run(new, x=np.ones((2, 2, 5, 5), np.float32))
    assert scores.shape == (2, 3)


QUANTIZED = {
    "QDQ": "{ s = MatMul(x, w_fc) q = QuantizeLinear(s, scale, zero) y = DequantizeLinear(q, scale, zero) }",
    "integers": "{ q, a, b = DynamicQuantizeLinear(x) v, c, d = DynamicQuantizeLinear(w_fc)"
    " i = MatMulInteger(q, v, b, d) y = Cast<to=1>(i) }",
}


@pytest.mark.parametrize("body", QUANTIZED.values(), ids=QUANTIZED.keys())
def test_a_quantized_model_is_refused_with_the_way_out(body: str) -> None:
    model = parse(f"<{W}, float scale = {{0.1}}, int8 zero = {{0}}> {body}")
    with pytest.raises(ModelError, match=r"the model is quantized .* Fine-tune the float model"):
        onward.replace_head(model, classes=3)


@pytest.mark.parametrize("body", ENDINGS.values(), ids=ENDINGS.keys())
@pytest.mark.parametrize("classes", [3, 4, 6])
def test_the_head_is_found_through_what_comes_after(body: str, classes: int) -> None:
    new = onward.replace_head(parse(body), classes=classes)
    onnx.checker.check_model(new, full_check=True)
    (scores,) = run(new, x=np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32))
    assert scores.shape == (5, classes)
    assert np.abs(scores.sum(axis=1) - 1).max() > 1e-3  # scores, no longer probabilities
    names = [tensor.name for tensor in new.graph.initializer]
    assert "head.weight" in names and "w_fc" not in names and "bias" not in names
    dims = new.graph.output[0].type.tensor_type.shape.dim
    assert dims[1].dim_value == classes
    assert "head.weight" in build_artifacts(new, loss="cross-entropy").trainable


def test_a_convolution_with_pooling_after_it() -> None:
    body = (
        f"<{weight('w_c', 4, 2, 1, 1)}, {B}> {{ c = Conv(x, w_c, bias) r = Relu(c) g = GlobalAveragePool(r)"
    )
    body += " f = Flatten(g) y = Softmax(f) }"
    model = parse(body, inputs="float[N, 2, 5, 5] x")
    new = onward.replace_head(model, classes=["a", "b", "c"])
    (scores,) = run(new, x=np.ones((2, 2, 5, 5), np.float32))
    assert scores.shape == (2, 3)
    assert {t.name: list(t.dims) for t in new.graph.initializer} == {
        "head.weight": [3, 2, 1, 1],
        "head.bias": [3],
    }


def test_a_bias_of_one_class_grows_too() -> None:
    model = parse(
        f"<{weight('w_fc', 8, 1)}, {weight('bias', 1)}> {{ s = MatMul(x, w_fc) a = Add(s, bias) y = Sigmoid(a) }}",
        outputs="float[N, 1] y",
    )
    new = onward.replace_head(model, classes=3)
    assert {t.name: list(t.dims) for t in new.graph.initializer} == {"head.weight": [8, 3], "head.bias": [3]}


def test_scores_false_keeps_the_softmax() -> None:
    new = onward.replace_head(parse(ENDINGS["Softmax"]), classes=3, scores=False)
    (found,) = run(new, x=np.ones((2, 8), np.float32))
    np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-6)


def test_a_weight_that_others_read_stays_theirs() -> None:
    tied = (
        f"<{weight('w_e', 4, 8)}> {{ h = Gather(w_e, x) t = Transpose<perm=[1, 0]>(w_e) y = MatMul(h, t) }}"
    )
    model = parse(tied, inputs="int64[N] x")
    new = onward.replace_head(model, classes=2)
    assert {t.name: list(t.dims) for t in new.graph.initializer} == {"w_e": [4, 8], "head.weight": [8, 2]}


def test_names_are_recorded_and_old_ones_do_not_survive() -> None:
    model = parse(ENDINGS["Softmax"])
    for key, value in {
        "names": "{0: 'a', 1: 'b', 2: 'c', 3: 'd'}", "stuff": '["w", "x", "y", "z"]', "author": "me",
        "listing": "one\ntwo\nthree\nfour", "task": "classify",
    }.items():  # fmt: skip
        model.metadata_props.add(key=key, value=value)
    new = onward.replace_head(model, classes=2, names=["cat", "dog"])
    about = {entry.key: entry.value for entry in new.metadata_props}
    assert json.loads(about["onward.classes"]) == ["cat", "dog"]
    assert set(about) == {"onward.classes", "onward.head", "author", "task"}


def test_the_list_of_trained_parameters_follows() -> None:
    model = parse(
        f"<{weight('w_a', 8, 5)}, {weight('w_b', 5, 4)}> {{ h = MatMul(x, w_a) y = MatMul(h, w_b) }}"
    )
    model.metadata_props.add(key=contract.REQUIRES_GRAD, value='["w_a", "w_b"]')  # as an export has it
    new = onward.replace_head(model, classes=2)
    assert sorted(build_artifacts(new, loss="cross-entropy").trainable) == ["head.weight", "w_a"]


def test_it_says_what_it_did(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="onward"):
        onward.replace_head(parse(ENDINGS["Softmax"]), classes=3)
    assert "made 4 scores and makes 3 now: 'head.weight' [8, 3] replaces 'w_fc'" in caplog.text
    assert "the Softmax before 'y' is gone" in caplog.text


def test_a_new_layer_on_a_value() -> None:
    body = f"<{weight('w_c', 6, 2, 1, 1)}> {{ c = Conv(x, w_c) n = Relu(c) y = LRN<size=3>(n) }}"
    model = parse(body, inputs="float[N, 2, 5, 5] x", outputs="float[N, 6, 5, 5] y")
    new = onward.replace_head(model, classes=3, head="n")
    assert [value.name for value in new.graph.output] == ["scores"]
    (scores,) = run(new, x=np.ones((2, 2, 5, 5), np.float32))
    assert scores.shape == (2, 3)
    sequence = parse("{ y = Relu(x) }", inputs="float[N, T, 8] x", outputs="float[N, T, 8] y")
    (scores,) = run(onward.replace_head(sequence, classes=3, head="y"), x=np.ones((2, 7, 8), np.float32))
    assert scores.shape == (2, 3)


TWO = f"<{W}, {weight('w_b', 8, 4)}> {{ s = MatMul(x, w_fc) t = MatMul(x, w_b) y = Add(s, t) }}"
REFUSED = {
    "two layers together": (TWO, {}, "2 layers make 'y' together"),
    "an operator after the layer": (
        f"<{W}> {{ s = MatMul(x, w_fc) y = LpNormalization(s) }}", {}, "LpNormalization .* comes after",
    ),
    "no layer": ("{ y = Relu(x) }", {}, "goes into the output without a layer"),
    "a name that is nothing": (ENDINGS["Gemm"], {"head": "w_fd"}, "did you mean 'w_fc'"),
    "a layer in the middle": (
        f"<{weight('w_a', 8, 8)}, {W}> {{ h = MatMul(x, w_a) y = MatMul(h, w_fc) }}", {"head": "w_a"},
        "does not make the scores of 'y'",
    ),
    "an output that is not there": (ENDINGS["Gemm"], {"output": "z"}, "no output 'z'; it has y"),
}  # fmt: skip


@pytest.mark.parametrize(("body", "options", "text"), REFUSED.values(), ids=REFUSED.keys())
def test_where_there_is_no_single_head(body: str, options: dict[str, str], text: str) -> None:
    with pytest.raises(ModelError, match=text):
        onward.replace_head(parse(body), classes=3, **options)


def test_the_candidates_are_named() -> None:
    with pytest.raises(ModelError) as caught:
        onward.replace_head(parse(TWO), classes=3)
    for part in ("MatMul", "weight [8, 4]", "head='y'", "outputs are 'y'"):
        assert part in str(caught.value)


def test_a_reshape_that_mixes_classes_is_refused() -> None:
    body = f"<{weight('w_fc', 8, 6)}> {{ s = MatMul(x, w_fc) k = Constant<value_ints=[-1, 2, 3]>() y = Reshape(s, k) }}"
    with pytest.raises(ModelError, match="no axis for 4 classes"):
        onward.replace_head(parse(body, outputs="float[N, 2, 3] y"), classes=4)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"classes": 0}, "one class or more"),
        ({"classes": 3, "names": ["a"]}, "3 classes, but 1 names"),
        ({"classes": ["a", "a"]}, "two classes are called 'a'"),
        ({"classes": ["a", "b"], "names": ["c", "d"]}, "name the classes once"),
    ],
)
def test_wrong_classes(options: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        onward.replace_head(parse(ENDINGS["Gemm"]), **options)


def test_declared_shapes_that_contradict_the_weights_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    """Two initializers swapped by hand, and the file still declares the old sizes."""
    model = parse(f"<{W}, {B}> {{ s = MatMul(x, w_fc) t = Add(s, bias) y = Softmax(t) }}")
    model = onnx.shape_inference.infer_shapes(model)
    assert model.graph.value_info
    for tensor, dims in zip(model.graph.initializer, ((8, 5), (5,))):
        tensor.CopyFrom(onnx.numpy_helper.from_array(np.ones(dims, np.float32), tensor.name))
    made = build_artifacts(model, loss="cross-entropy", loss_input_names=["t"])
    assert made.checkpoint.trainable["w_fc"].shape == (8, 5)
    assert "contradict its weights; they are dropped" in caplog.text


def test_types_that_really_contradict_are_still_an_error() -> None:
    model = parse(f"<{weight('w_fc', 7, 4)}> {{ y = MatMul(x, w_fc) }}")
    with pytest.raises(ModelError, match=r"contradict|Incompatible"):
        build_artifacts(model, loss="cross-entropy")
