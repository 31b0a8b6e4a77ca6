"""A model in training form, turned to inference."""

from __future__ import annotations

import io
import warnings

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from graph.running import assert_same, run
from onward.graph.dialect.normalize import normalize
from onward.graph.passes.inference_mode import to_inference

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((2, 3, 4, 4)).astype(np.float32)


def parse(text: str, **weights: np.ndarray) -> onnx.ModelProto:
    model = onnx.parser.parse_model('<ir_version: 8, opset_import: ["": 17]> ' + text)
    model.graph.initializer.extend(numpy_helper.from_array(w, name) for name, w in weights.items())
    return model


def answers(source: onnx.ModelProto) -> tuple[onnx.ModelProto, list[np.ndarray]]:
    proto = ir.to_proto(to_inference(normalize(source)))
    onnx.checker.check_model(proto, full_check=True)
    return proto, run(proto, {"x": X})


def test_dropout_is_gone_and_its_mask_is_true() -> None:
    source = parse(
        """g (float[N, 3, 4, 4] x) => (float[N, 3, 4, 4] y, bool[N, 3, 4, 4] m, float[N, 3, 4, 4] z) {
            y, m = Dropout(x, r, t)  a, k = Dropout(x, r, t)  z = Neg(a) }""",
        r=np.array(0.5, np.float32),
        t=np.array(True),
    )
    proto, found = answers(source)
    assert "Dropout" not in {node.op_type for node in proto.graph.node}
    assert_same([X, np.ones_like(X, bool), -X], found)


def test_batch_normalization_uses_running_statistics() -> None:
    mean, var = RANDOM.standard_normal(3).astype(np.float32), np.array([1, 2, 3], np.float32)
    source = parse(
        """g (float[N, 3, 4, 4] x) => (float[N, 3, 4, 4] y, float[3] rm) {
            y, rm, rv = BatchNormalization <training_mode = 1> (x, s, b, mean, var) }""",
        s=np.ones(3, np.float32),
        b=np.zeros(3, np.float32),
        mean=mean,
        var=var,
    )
    proto, found = answers(source)
    (node,) = [n for n in proto.graph.node if n.op_type == "BatchNormalization"]
    assert len(node.output) == 1
    shaped = [v.reshape(1, 3, 1, 1) for v in (mean, var)]
    assert_same([(X - shaped[0]) / np.sqrt(shaped[1] + 1e-5), mean], found)


def export(kind: str, keep: float) -> onnx.ModelProto:
    """Stochastic depth as model libraries write it, as the exporter leaves it."""
    torch = pytest.importorskip("torch")

    class Block(torch.nn.Module):
        def forward(self, x):
            shape = (x.shape[0],) + (1,) * (x.ndim - 1)
            branch = torch.tanh(x)
            if kind == "floor":
                mask = (keep + torch.rand(shape, dtype=x.dtype)).floor_()
                return x + branch.div(keep) * mask
            if kind == "bernoulli":
                return x + branch * x.new_empty(shape).bernoulli_(keep).div_(keep)
            return x + branch * x.new_empty(shape).bernoulli_(keep)

    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Block().train(),
            (torch.zeros(2, 3, 4, 4),),
            file,
            opset_version=17,
            dynamo=False,
            do_constant_folding=False,
            training=torch.onnx.TrainingMode.TRAINING,
            input_names=["x"],
            dynamic_axes={"x": {0: "N"}},
        )
    return onnx.load_from_string(file.getvalue())


@pytest.mark.parametrize(("kind", "factor"), [("floor", 1.0), ("bernoulli", 1.0), ("unscaled", 0.8)])
def test_stochastic_depth_becomes_its_mean(kind: str, factor: float) -> None:
    proto, found = answers(export(kind, 0.8))
    assert not {node.op_type for node in proto.graph.node} & {
        "RandomUniformLike",
        "Bernoulli",
        "Floor",
        "Less",
    }
    assert_same([X + np.float32(factor) * np.tanh(X)], found)


def test_randomness_that_is_no_mask_stays() -> None:
    source = parse(
        """g (float[N, 3, 4, 4] x) => (float[N, 3, 4, 4] y) {
            r = RandomUniformLike(x)  y = Mul(x, r) }"""
    )
    model = to_inference(normalize(source))
    assert [node.op_type for node in model.graph] == ["RandomUniformLike", "Mul"]
