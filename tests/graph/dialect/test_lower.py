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


REFUSED = [
    ("<int64[6] p = {0, 0, 1, 0, 0, 1}> { y = Pad<mode=\"wrap\">(x, p) }", 18, "wraps around"),
    ("{ y = AveragePool<kernel_shape=[2], dilations=[2]>(x) }", 17, "dilations"),
    ("{ a, b, c, y = Split<axis=2, num_outputs=4>(x) }", 17, "may not be equal"),
    ("<int64[1] o = {1}> { a = Add(o, o)  y = ReduceMax<keepdims=1>(x, a) }", 17, "known at run time only"),
    ("{ j = Concat<axis=2>(i, i)  u = Cast<to=1>(j)  y = ScatterElements<axis=2, reduction=\"add\">(x, j, u) }", 15,
     "same place"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "opset", "message"), REFUSED, ids=[row[2] for row in REFUSED])
def test_what_means_something_else_is_refused(body: str, opset: int, message: str) -> None:
    if "GroupNorm" in body:
        body = "<float[4] s = {1, 1, 1, 1}, float[4] b = {0, 0, 0, 0}> " + body
        text = '<ir_version: 10, opset_import: ["": 21]> g (float[N, 4, 6] x) => (float[N, 4, 6] y) ' + body
        model = ir.from_proto(onnx.parser.parse_model(text))
    else:
        model = dialect(body)
        if "ReduceMax" in body:  # the dialect has folded the sum: let it be known at run time only
            (node,) = (node for node in model.graph if node.op_type == "ReduceMax")
            assert node.inputs[1] is not None
            if node.inputs[1].is_initializer():
                model.graph.inputs.append(node.inputs[1])
    with pytest.raises(ModelError, match=message):
        lower(model, opset)


@pytest.mark.parametrize("opset", [1, 12, 22, 99])
def test_opsets_out_of_range(opset: int) -> None:
    with pytest.raises(ModelError, match="choose one from 13 to 21"):
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
@pytest.mark.parametrize("opset", [13, 14, 17, 18])
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
    with pytest.raises(ModelError, match="cannot be written in opset 14"):
        build_artifacts(two_layers(opset=14), requires_grad=["fc1.weight"], loss=Gelu(), opset=14)
