"""The conservative dialect: other operators, the same numbers."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from onward.conformance import NETWORKS, Network
from onward.contract import SEED
from onward.graph.proto.conservative_forms import FORMS, apply_forms, in_portable_forms, split_random
from onward.runtime.device_check import run_on
from onward.runtime.devices import Device
from onward.runtime.operator_cases import OPERATOR_CASES, OperatorCase, operators_of

# All but what needs a batch's sizes, and what is for WebGPU alone.
PORTABLE = [form for form in FORMS if form not in ("known sizes", "float64 on the host", "groups apart", "log softmax",
            "comparisons for one-hots", "transposed convolutions")]  # fmt: skip
# Forms of what no case has forward: gradients do.
_MORE = (
    OperatorCase("OneHot", "a depth of rank 1", "(int64[5] i) => (float[] y) "
                 "<int64[1] d = {3}, float[2] v = {0.0, 1.0}> { y = OneHot (i, d, v) }"),
    OperatorCase("OneHot", "an axis in the midst, below zero", "(int64[5,2] i) => (float[] y) <int64 d = {3}, "
                 "float[2] v = {-1.0, 2.0}, int64 two = {2}> { j = Sub (i, two)  y = OneHot <axis=1> (j, d, v) }"),
    OperatorCase("LogSoftmax", "the first axis", "(float[5,7] x) => (float[] y) { y = LogSoftmax <axis=0> (x) }"),
    OperatorCase("Loop", "without a condition", """(float[2] s) => (float[2] last) <int64 trips = {3}> {
                 last = Loop <body = turn (int64 i, bool c, float[2] a) => (bool d, float[2] b)
                 { d = Identity (c)  b = Tanh (a) }> (trips, , s) }"""),
    OperatorCase("MatMul", "two vectors", "(float[4] x, float[4] w) => (float[] y) { y = MatMul (x, w) }"),
    OperatorCase("LayerNormalization", "without a shift", "(float[5,3,7] x, float[3,7] s) => (float[] z) "
                 "{ y, m, v = LayerNormalization <axis=1, epsilon=0.1> (x, s)  z = Mul (y, v) }"),
    OperatorCase("Scan", "inside of a branch", """(float[2] s, float[5,2] x) => (float[2] y) <bool yes = {1}> {
                 y = If <then_branch = yes () => (float[2] last) {
                     last, all = Scan <num_scan_inputs=1, scan_input_directions=[1],
                         body = step (float[2] a, float[2] b) => (float[2] c, float[2] d)
                         { c = Add (a, b)  e = Tanh (c)  d = Mul (e, c) }> (s, x) },
                     else_branch = no () => (float[2] o) { o = Identity (s) }> (yes) }"""),
)  # fmt: skip


def static(case: OperatorCase) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """The case with its sizes known, as a session for one batch has them."""
    model, feeds = onnx.ModelProto(), case.feeds()
    model.CopyFrom(case.model)
    for value in model.graph.input:
        for dim, size in zip(value.type.tensor_type.shape.dim, feeds[value.name].shape):
            dim.dim_value = size
    return onnx.shape_inference.infer_shapes(model), feeds


def changed(case: OperatorCase, form: str) -> onnx.ModelProto | None:
    """The case in a form, if that says something about it."""
    model, _ = static(case)
    before = model.SerializeToString()
    apply_forms(model, [form])
    return None if model.SerializeToString() == before else model


@pytest.mark.parametrize("form", FORMS)
def test_a_form_changes_no_number(form: str) -> None:
    cases = [case for case in (*OPERATOR_CASES, *_MORE) if changed(case, form) is not None]
    assert cases, "no case says what this form is for"
    for case in cases:
        model, feeds = static(case)
        written = changed(case, form)
        assert written is not None
        onnx.checker.check_model(written)
        expected, actual = run_on(Device("cpu"), model, feeds), run_on(Device("cpu"), written, feeds)
        for one, other in zip(expected, actual, strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-6, atol=2e-6, err_msg=str(case))


@pytest.mark.parametrize(
    ("form", "operator", "without"),
    [
        ("masks", "HardSigmoid", "HardSigmoid"),
        ("scattered elements", "ScatterND", "ScatterND"),
        ("layer statistics", "LayerNormalization", "LayerNormalization"),
        ("slices", "Split", "Split"),
        ("log softmax", "LogSoftmax", "LogSoftmax"),
        ("comparisons for one-hots", "OneHot", "OneHot"),
        ("transposed convolutions", "Col2Im", "Col2Im"),
    ],
)
def test_a_form_leaves_nothing_of_what_it_replaces(form: str, operator: str, without: str) -> None:
    cases = [case for case in OPERATOR_CASES if case.operator == operator]
    models = [model for model in (changed(case, form) for case in cases) if model is not None]
    assert models
    assert all(without not in {node.op_type for node in operators_of(model.graph)} for model in models)


def test_other_hardsigmoids_stay() -> None:
    (case,) = [case for case in OPERATOR_CASES if str(case) == "HardSigmoid"]
    assert changed(case, "masks") is None


def test_random_numbers_fall_into_a_model_of_their_own() -> None:
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]> net (float[3] x, int64[1] {SEED})
        => (float[3] y) <int64[3] places = {{11, 22, 33}}, int64[1] limit = {{40}}> {{
        a = Mul (places, {SEED})  b = Mul (a, a)  c = Less (b, limit)  d = Cast <to=1> (c)  y = Mul (x, d) }}""")
    feeds = {"x": np.ones(3, np.float32), SEED: np.full(1, 2**61 + 3, np.int64)}
    (expected,) = run_on(Device("cpu"), model, feeds)
    host = split_random(model)
    assert host is not None
    assert [value.name for value in host.graph.input] == [SEED]
    assert SEED not in [value.name for value in model.graph.input]
    drawn = run_on(Device("cpu"), host, {SEED: feeds[SEED]})
    handed_over = dict(zip([value.name for value in host.graph.output], drawn))
    (actual,) = run_on(Device("cpu"), model, {"x": feeds["x"], **handed_over})
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
def test_portable_files_are_in_the_forms_that_runtimes_read_alike(network: Network) -> None:
    """What the CPU alone reads stays as it is: its training model is faster than these."""
    portable = network.artifacts().portable
    assert set(portable) >= {"train_step", "accumulate_step", "eval_step", "gradient_step", "update_step"}
    for name, model in portable.items():
        for form in PORTABLE:
            proto = ir.to_proto(model)
            before = proto.SerializeToString()
            apply_forms(proto, [form])
            assert proto.SerializeToString() == before, f"{name} has something that '{form}' rewrites"
        unread = [value.name for value in model.graph.initializers.values() if not value.uses()]
        assert unread == [], name
    training = ir.to_proto(network.artifacts().training)
    before = training.SerializeToString()
    apply_forms(training, [form for form in FORMS if form != "known sizes"])
    assert training.SerializeToString() != before


def test_constants_of_a_portable_file_are_not_copied() -> None:
    model = ir.from_proto(onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        net (float[n, 300] x) => (float[n, 300] y) { y = MatMul (x, w) }"""))  # fmt: skip
    weights = np.random.default_rng(0).normal(size=(300, 300)).astype(np.float32)
    value = next(node.inputs[1] for node in model.graph)
    assert value is not None
    value.const_value = ir.tensor(weights, name="w")
    model.graph.initializers.add(value)
    written = in_portable_forms(model)
    kept = written.graph.initializers["w"].const_value
    assert kept is value.const_value and [v.name for v in written.graph.inputs] == ["x"]
    assert value.const_value is not None and list(model.graph.initializers) == ["w"]


def test_a_model_without_a_seed_is_left_whole() -> None:
    model = onnx.ModelProto()
    model.CopyFrom(OPERATOR_CASES[0].model)
    assert split_random(model) is None and model == OPERATOR_CASES[0].model
