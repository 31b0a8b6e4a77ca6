"""The step's random numbers: distributed as they should be, independent, and a function of the seed alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest

from onward.contract import SEED
from onward.errors import ModelError
from onward.graph.dialect.normalize import normalize
from onward.graph.passes.explicit_state import make_random_explicit

COUNT = 40_000
# of the mean of COUNT independent numbers: five standard deviations
FIVE_SIGMA = 5.0 / np.sqrt(COUNT)


def explicit(text: str, opset: int = 21) -> onnx.ModelProto:
    model = normalize(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]> g {text}'))
    make_random_explicit(model)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    left = {node.op_type for node in proto.graph.node}
    assert not left & {"Dropout", "Bernoulli", "Multinomial"} and not any("Random" in kind for kind in left)
    return proto


def draw(model: onnx.ModelProto, seed: int = 1, **feeds: np.ndarray) -> list[Any]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return list(session.run(None, {**feeds, SEED: np.asarray([seed])}))


UNIFORM = f"() => (float[{COUNT}] y) {{ y = RandomUniform<shape=[{COUNT}]>() }}"
NORMAL = f"() => (float[{COUNT}] y) {{ y = RandomNormal<shape=[{COUNT}]>() }}"
KEPT = """(float[N] x) => (float[N] y) <float ratio = {0.3}, bool training = {1}> {
    y = Dropout(x, ratio, training) }"""


def test_uniform_numbers_fill_their_interval() -> None:
    (y,) = draw(explicit(UNIFORM))
    assert y.min() >= 0.0 and y.max() < 1.0
    counts, _ = np.histogram(y, bins=100, range=(0, 1))
    expected = COUNT / 100
    # chi-squared with 99 degrees of freedom: mean 99, standard deviation 14
    assert abs(((counts - expected) ** 2 / expected).sum() - 99) < 5 * 14.1


def test_normal_numbers_have_their_moments() -> None:
    (y,) = draw(explicit(NORMAL))
    assert np.isfinite(y).all()
    for power, moment, spread in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((y.astype(np.float64) ** power).mean() - moment) < FIVE_SIGMA * np.sqrt(spread)
    assert abs((np.abs(y) > 3).mean() - 0.0027) < 0.0015


@pytest.mark.parametrize("text", [UNIFORM, NORMAL], ids=["uniform", "normal"])
@pytest.mark.parametrize("seed", [0, 1, -(2**63), 2**63 - 1, 123456789])
def test_neighbours_are_independent(text: str, seed: int) -> None:
    (y,) = draw(explicit(text), seed)
    z = (y - y.mean()) / y.std()
    for lag in (1, 2, 3, 7, 16, 64, 256, 1000):
        assert abs((z[lag:] * z[:-lag]).mean()) < FIVE_SIGMA


def correlation(one: np.ndarray, other: np.ndarray) -> float:
    return abs(float(np.corrcoef(one, other)[0, 1]))


def test_seeds_give_independent_numbers() -> None:
    model = explicit(UNIFORM)
    drawn = [draw(model, seed)[0] for seed in (*range(6), -1, 2**32, 2**62)]
    for index, one in enumerate(drawn):
        for other in drawn[:index]:
            assert correlation(one, other) < FIVE_SIGMA


def test_nodes_of_a_graph_are_independent() -> None:
    names = [f"y{i}" for i in range(6)]
    nodes = " ".join(f"{name} = RandomUniform<shape=[{COUNT}]>()" for name in names)
    outputs = ", ".join(f"float[{COUNT}] {name}" for name in names)
    drawn = draw(explicit(f"() => ({outputs}) {{ {nodes} }}"))
    for index, one in enumerate(drawn):
        for other in drawn[:index]:
            assert correlation(one, other) < FIVE_SIGMA


def test_the_same_seed_gives_the_same_numbers() -> None:
    model = explicit(NORMAL)
    np.testing.assert_array_equal(draw(model, 5)[0], draw(model, 5)[0])


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("given", ["constant", "input"])
def test_dropout_keeps_the_mean(ratio: float, given: str) -> None:
    x = np.linspace(1, 2, COUNT).astype(np.float32)
    feeds = {"x": x}
    if given == "constant":
        text = KEPT.replace("0.3", str(ratio))
    else:
        text = "(float[N] x, float ratio) => (float[N] y) <bool training = {1}> { y = Dropout(x, ratio, training) }"
        feeds["ratio"] = np.asarray(ratio, np.float32)
    (y,) = draw(explicit(text), **feeds)
    dropped = y == 0
    assert abs(dropped.mean() - ratio) < FIVE_SIGMA * np.sqrt(ratio * (1 - ratio))
    np.testing.assert_allclose(y[~dropped], x[~dropped] / (1 - ratio), rtol=1e-6)


@pytest.mark.parametrize(("ratio", "expected"), [(0.0, 1.0), (1.0, 0.0)])
def test_dropout_of_nothing_and_of_everything(ratio: float, expected: float) -> None:
    text = (
        "(float[N] x, float ratio) => (float[N] y) <bool training = {1}> { y = Dropout(x, ratio, training) }"
    )
    x = np.ones(1000, np.float32)
    (y,) = draw(explicit(text), x=x, ratio=np.asarray(ratio, np.float32))
    np.testing.assert_array_equal(y, x * expected)


def test_dropout_gives_its_mask_and_can_be_switched_off_by_an_input() -> None:
    text = """(float[N, 4] x, bool training) => (float[N, 4] y, bool[N, 4] m) <float ratio = {0.5}> {
        y, m = Dropout(x, ratio, training) }"""
    x = np.ones((250, 4), np.float32)
    y, mask = draw(explicit(text), x=x, training=np.asarray(True))
    np.testing.assert_array_equal(y, mask * 2.0)
    assert 0.4 < mask.mean() < 0.6
    y, mask = draw(explicit(text), x=x, training=np.asarray(False))
    np.testing.assert_array_equal(y, x)
    assert mask.all()


def test_bernoulli_draws_each_with_its_own_probability() -> None:
    text = "(float[K, N] p) => (float[K, N] y) { y = Bernoulli(p) }"
    p = np.repeat([[0.0], [0.2], [0.7], [1.0]], COUNT, axis=1).astype(np.float32)
    (y,) = draw(explicit(text), p=p)
    assert set(np.unique(y)) == {0.0, 1.0}
    np.testing.assert_allclose(y.mean(axis=1), [0, 0.2, 0.7, 1], atol=FIVE_SIGMA / 2)
    assert not y[0].any() and y[3].all()


def test_multinomial_draws_classes_by_their_log_probability() -> None:
    text = f"(float[N, 3] x) => (int64[N, {COUNT}] y) {{ y = Multinomial<sample_size={COUNT}, dtype=7>(x) }}"
    p = np.asarray([[0.2, 0.5, 0.3], [0.9, 0.0, 0.1]])
    with np.errstate(divide="ignore"):
        (y,) = draw(explicit(text), x=np.log(p).astype(np.float32))
    for row, expected in zip(y, p):
        shares = np.bincount(row, minlength=3) / COUNT
        np.testing.assert_allclose(shares, expected, atol=FIVE_SIGMA / 2)


LIKE = [
    ("y = RandomUniformLike<low=-1.0, high=3.0>(x)", 1.0, 4 / np.sqrt(12)),
    ("y = RandomNormalLike<mean=2.0, scale=0.5>(x)", 2.0, 0.5),
    (f"y = RandomUniform<shape=[{COUNT}, 2], low=-1.0, high=3.0>()", 1.0, 4 / np.sqrt(12)),
    (f"y = RandomNormal<shape=[{COUNT}, 2], mean=2.0, scale=0.5>()", 2.0, 0.5),
]


@pytest.mark.parametrize(("body", "mean", "spread"), LIKE, ids=[row[0][4:20] for row in LIKE])
def test_ranges_and_scales(body: str, mean: float, spread: float) -> None:
    (y,) = draw(
        explicit(f"(float[N, 2] x) => (float[N, 2] y) {{ {body} }}"), x=np.zeros((COUNT, 2), np.float32)
    )
    assert abs(y.mean() - mean) < FIVE_SIGMA * spread
    assert abs(y.std() / spread - 1) < 0.02


@pytest.mark.parametrize("code", [10, 11], ids=["float16", "double"])
def test_other_precisions(code: int) -> None:
    kind = {10: "float16", 11: "double"}[code]
    text = f"() => ({kind}[{COUNT}] y) {{ y = RandomNormal<dtype={code}, shape=[{COUNT}]>() }}"
    (y,) = draw(explicit(text))
    assert y.dtype == {10: np.float16, 11: np.float64}[code]
    assert abs(y.astype(np.float64).mean()) < FIVE_SIGMA


def test_a_model_without_randomness_gets_no_seed() -> None:
    model = normalize(
        onnx.parser.parse_model(
            '<ir_version: 10, opset_import: ["": 21]> g (float[N] x) => (float[N] y) { y = Neg(x) }'
        )
    )
    assert make_random_explicit(model) is None
    assert [value.name for value in model.graph.inputs] == ["x"]


def test_a_dtype_that_onnx_does_not_have_is_a_model_error() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[2] x) => (float[2] y)'
        "{ r = RandomNormal<shape = [2], dtype = 99>() y = Add(x, r) }"
    )
    with pytest.raises(ModelError, match="has the dtype 99"):
        make_random_explicit(ir.from_proto(model))
