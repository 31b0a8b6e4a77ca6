"""Every loss equals torch's function of its name: values and gradients, options and reductions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F

import onward
from onward import losses
from onward.graph.builder import Builder

RNG = np.random.default_rng(7)
REDUCTIONS = ("mean", "sum", "none")


def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
    return np.asarray(RNG.normal(size=shape) * scale, np.float32)


def unit(*shape: int) -> np.ndarray:
    return RNG.uniform(0.05, 0.95, size=shape).astype(np.float32)


def labels(classes: int, *shape: int) -> np.ndarray:
    return RNG.integers(0, classes, size=shape).astype(np.int64)


def distribution(*shape: int) -> np.ndarray:
    weights = RNG.uniform(0.1, 1.0, size=shape)
    return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)


def log_distribution(*shape: int) -> np.ndarray:
    return np.log(distribution(*shape))


@dataclasses.dataclass
class Case:
    """One loss on one set of inputs; the first `differentiable` inputs get gradients."""

    name: str
    loss: Callable[..., ir.Value]
    reference: Callable[..., torch.Tensor]
    inputs: list[np.ndarray]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    reference_options: dict[str, Any] | None = None
    differentiable: int = 1
    reductions: tuple[str, ...] = REDUCTIONS
    dynamic: bool = True
    time_first: bool = False


def weighted(array: np.ndarray) -> dict[str, Any]:
    return {"weight": array}


def label_case(name: str, shape: tuple[int, ...], *, ignored: int | None = None, **options: Any) -> Case:
    """Cross entropy, with every third label replaced by the one that is ignored."""
    target = labels(shape[1], shape[0], *shape[2:])
    if ignored is not None:
        target.reshape(-1)[::3] = ignored
        options["ignore_index"] = ignored
    return Case(name, losses.cross_entropy, F.cross_entropy, [normal(*shape), target], options)


def nearly_equal_pair() -> list[np.ndarray]:
    """Differences on both sides of 1, and exactly 0."""
    x = normal(6, 5, scale=2.0)
    t = x + normal(6, 5, scale=2.0)
    t[0] = x[0]
    return [x, t]


def ctc_of_logits(op: Builder, logits: ir.Value, *rest: ir.Value, **options: Any) -> ir.Value:
    return losses.ctc(op, op.LogSoftmax(logits, axis=2), *rest, **options)


def torch_ctc_of_logits(logits: torch.Tensor, *rest: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.ctc_loss(F.log_softmax(logits, dim=2), *rest, **options)


def ctc_case(name: str, inputs: list[np.ndarray], **options: Any) -> Case:
    return Case(name, ctc_of_logits, torch_ctc_of_logits, inputs, options, time_first=True)


def ctc_inputs(targets: list[list[int]], frames: list[int], *, longest: int = 12) -> list[np.ndarray]:
    """Logits of 5 classes, targets padded with a number that is no class, and the lengths of both."""
    width = max(map(len, targets))
    padded = np.asarray([row + [-7] * (width - len(row)) for row in targets], np.int64).reshape(-1, width)
    lengths = np.asarray([len(row) for row in targets])
    return [normal(longest, len(targets), 5), padded, np.asarray(frames), lengths]


CLASS_WEIGHTS = np.asarray([0.2, 1.0, 3.0, 0.5, 0.0], np.float32)
EXTREME = np.asarray([[1e4, -1e4, 1e4, -1e4, 0.0, 88.0, -88.0, 700.0]], np.float32)
EXTREME_TARGET = np.asarray([[1.0, 0.0, 0.0, 1.0, 0.5, 0.0, 1.0, 0.25]], np.float32)

CASES = [
    Case("mse", losses.mse, F.mse_loss, nearly_equal_pair(), differentiable=2),
    Case("l1", losses.l1, F.l1_loss, nearly_equal_pair(), differentiable=2),
    Case("huber", losses.huber, F.huber_loss, nearly_equal_pair(), differentiable=2),
    Case("huber of another delta", losses.huber, F.huber_loss, nearly_equal_pair(), {"delta": 0.3}),
    Case("smooth l1", losses.smooth_l1, F.smooth_l1_loss, nearly_equal_pair(), differentiable=2),
    Case("smooth l1 of another beta", losses.smooth_l1, F.smooth_l1_loss, nearly_equal_pair(), {"beta": 0.4}),
    Case("smooth l1 without beta", losses.smooth_l1, F.smooth_l1_loss, nearly_equal_pair(), {"beta": 0.0}),
    label_case("cross entropy", (6, 5)),
    label_case("cross entropy of one sample in a batch", (1, 5)),
    label_case("cross entropy in 3 dimensions", (3, 5, 4)),
    label_case("cross entropy in 4 dimensions", (2, 5, 3, 4)),
    label_case("cross entropy with class weights", (6, 5), **weighted(CLASS_WEIGHTS)),
    label_case("cross entropy with an ignored label", (6, 5), ignored=2),
    label_case("cross entropy with an ignored label that is no class", (6, 5), ignored=-100),
    label_case("cross entropy with weights and an ignored label", (7, 5), ignored=-1, **weighted(CLASS_WEIGHTS)),
    label_case("cross entropy smoothed", (6, 5), label_smoothing=0.1),
    label_case("cross entropy smoothed wholly", (6, 5), label_smoothing=1.0),
    label_case("cross entropy smoothed and weighted", (6, 5), label_smoothing=0.2, **weighted(CLASS_WEIGHTS)),
    label_case("cross entropy smoothed, ignoring", (6, 5), ignored=-100, label_smoothing=0.2),
    label_case(
        "cross entropy smoothed, weighted, ignoring, 4 dimensions",
        (2, 5, 3, 4), ignored=-100, label_smoothing=0.3, **weighted(CLASS_WEIGHTS),
    ),
    Case(
        "cross entropy of a single sample",
        losses.cross_entropy, F.cross_entropy, [normal(5), np.asarray(3, np.int64)], dynamic=False,
    ),
    Case(
        "cross entropy of large scores",
        losses.cross_entropy, F.cross_entropy, [normal(4, 5, scale=1e4), labels(5, 4)],
    ),
    Case(
        "cross entropy against probabilities",
        losses.cross_entropy, F.cross_entropy, [normal(6, 5), distribution(6, 5)], differentiable=2,
    ),
    Case(
        "cross entropy against probabilities, smoothed, weighted, 3 dimensions",
        losses.cross_entropy, F.cross_entropy, [normal(4, 5, 3), distribution(4, 5, 3)],
        {"label_smoothing": 0.1, **weighted(CLASS_WEIGHTS)},
    ),
    Case("nll", losses.nll, F.nll_loss, [log_distribution(6, 5), labels(5, 6)]),
    Case("nll in 4 dimensions", losses.nll, F.nll_loss, [log_distribution(2, 5, 3, 4), labels(5, 2, 3, 4)]),
    Case(
        "nll with weights and an ignored label",
        losses.nll, F.nll_loss, [log_distribution(6, 5), np.asarray([0, 1, 2, 4, 2, 1])],
        {"ignore_index": 2, **weighted(CLASS_WEIGHTS)},
    ),
    Case(
        "bce with logits", losses.bce_with_logits, F.binary_cross_entropy_with_logits,
        [normal(6, 5, scale=3.0), unit(6, 5)], differentiable=2,
    ),
    Case(
        "bce with logits, weighted", losses.bce_with_logits, F.binary_cross_entropy_with_logits,
        [normal(6, 5), unit(6, 5)], weighted(unit(5)),
    ),
    Case(
        "bce with logits, positives weighted", losses.bce_with_logits, F.binary_cross_entropy_with_logits,
        [normal(6, 5), unit(6, 5)], {"pos_weight": np.asarray([1.0, 2.0, 0.5, 7.0, 0.0], np.float32)},
    ),
    Case(
        "bce with extreme logits", losses.bce_with_logits, F.binary_cross_entropy_with_logits,
        [EXTREME, EXTREME_TARGET],
    ),
    Case(
        "bce with extreme logits, positives weighted",
        losses.bce_with_logits, F.binary_cross_entropy_with_logits,
        [EXTREME, EXTREME_TARGET], {"pos_weight": np.asarray(3.0, np.float32)},
    ),
    Case(
        "kl div", losses.kl_div, F.kl_div, [log_distribution(6, 5), distribution(6, 5)],
        reductions=(*REDUCTIONS, "batchmean"),
    ),
    Case(
        "kl div with zeros in the target", losses.kl_div, F.kl_div,
        [log_distribution(2, 3), np.asarray([[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]], np.float32)],
    ),
    Case(
        "kl div of a log target", losses.kl_div, F.kl_div, [log_distribution(6, 5), log_distribution(6, 5)],
        {"log_target": True}, differentiable=2, reductions=(*REDUCTIONS, "batchmean"),
    ),
    Case(
        "gaussian nll", losses.gaussian_nll, F.gaussian_nll_loss,
        [normal(6, 5), normal(6, 5), unit(6, 5)], {"full": True}, differentiable=1,
    ),
    Case(
        "cosine embedding", losses.cosine_embedding, F.cosine_embedding_loss,
        [normal(6, 5), normal(6, 5), np.asarray([1, -1, 1, -1, -1, 1])], differentiable=2,
    ),
    Case(
        "cosine embedding with a margin", losses.cosine_embedding, F.cosine_embedding_loss,
        [normal(6, 5), normal(6, 5), np.asarray([1, -1, 1, -1, -1, -1])], {"margin": 0.3}, differentiable=2,
    ),
    Case(
        "triplet margin", losses.triplet_margin, F.triplet_margin_loss,
        [normal(6, 5), normal(6, 5), normal(6, 5)], differentiable=3,
    ),
    Case(
        "triplet margin with p = 1, swapped", losses.triplet_margin, F.triplet_margin_loss,
        [normal(6, 5), normal(6, 5), normal(6, 5)], {"p": 1.0, "swap": True, "margin": 2.0}, differentiable=3,
    ),
    Case(
        "triplet margin with p = 3", losses.triplet_margin, F.triplet_margin_loss,
        [normal(6, 5), normal(6, 5), normal(6, 5)], {"p": 3.0}, differentiable=3,
    ),
    ctc_case("ctc", ctc_inputs([[1, 2, 3], [4, 2, 1]], [12, 12])),
    ctc_case("ctc with repeated classes", ctc_inputs([[1, 1, 2, 2], [3, 3, 3, 3]], [12, 9])),
    ctc_case("ctc of several lengths", ctc_inputs([[1], [1, 2, 3, 4, 1], [], [2, 2]], [12, 10, 5, 3])),
    ctc_case("ctc with another blank", ctc_inputs([[0, 1], [3, 0, 0]], [12, 11]), blank=4),
    ctc_case("ctc of the shortest input", ctc_inputs([[1, 2, 3], [1, 1]], [3, 3], longest=3)),
    ctc_case("ctc of one sequence", ctc_inputs([[3, 1]], [4])),
    ctc_case("ctc of an impossible target", ctc_inputs([[1, 2, 3], [1, 1]], [2, 9]), zero_infinity=True),
]  # fmt: skip

ROWS = [pytest.param(case, r, id=f"{case.name}-{r}") for case in CASES for r in case.reductions]


def model_of(case: Case, reduction: str) -> tuple[Any, list[str]]:
    """A model of nothing but the loss, its inputs named x0, x1, …; and the names to differentiate."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="loss")
    op = Builder(graph)
    values = []
    for index, array in enumerate(case.inputs):
        dims: list[int | str] = list(array.shape)
        if case.time_first and index == 0:
            dims[:2] = ["time", "batch"]
        elif case.dynamic and dims:
            dims[0] = "batch"
        values.append(op.input(f"x{index}", ir.DataType.from_numpy(array.dtype), dims))
    loss = op.Identity(case.loss(op, *values, reduction=reduction, **case.options))
    loss.name = "loss"
    graph.outputs.append(loss)
    return ir.to_proto(ir.Model(graph, ir_version=10)), [f"x{i}" for i in range(case.differentiable)]


def run(model: Any, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return list(session.run(None, feeds))  # type: ignore[arg-type]


# torch advises against a mean over all elements of kl_div, which is what the loss offers too
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize(("case", "reduction"), ROWS)
def test_equals_torch_in_value_and_gradient(case: Case, reduction: str) -> None:
    assert_equals_torch(case, reduction)


def assert_equals_torch(case: Case, reduction: str) -> None:
    model, names = model_of(case, reduction)
    tensors = [torch.from_numpy(array.copy()) for array in case.inputs]
    for tensor in tensors[: case.differentiable]:
        tensor.requires_grad_()
    options = {
        key: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        for key, value in (case.reference_options or case.options).items()
    }
    expected = case.reference(*tensors, reduction=reduction, **options)
    cotangent = normal(*expected.shape) if reduction == "none" else np.ones((), np.float32)
    expected.backward(torch.from_numpy(np.asarray(cotangent)))

    feeds = {f"x{index}": array for index, array in enumerate(case.inputs)}
    differentiated = onward.gradient(model, of="loss", wrt=names, cotangent="weight_of_loss")
    value, *gradients = run(differentiated, {**feeds, "weight_of_loss": cotangent})

    np.testing.assert_allclose(value, expected.detach().numpy(), rtol=3e-6, atol=2e-6)
    for gradient, tensor in zip(gradients, tensors, strict=False):
        assert tensor.grad is not None
        np.testing.assert_allclose(gradient, tensor.grad.numpy(), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_a_batch_of_ignored_labels_costs_nothing(reduction: str, smoothing: float) -> None:
    case = Case(
        "", losses.cross_entropy, F.cross_entropy,
        [normal(4, 5), np.full(4, -100)], {"ignore_index": -100, "label_smoothing": smoothing},
    )  # fmt: skip
    model, names = model_of(case, reduction)
    differentiated = onward.gradient(model, of="loss", wrt=names, cotangent="weight_of_loss")
    weights = np.ones(4 if reduction == "none" else (), np.float32)
    feeds = {"x0": case.inputs[0], "x1": case.inputs[1], "weight_of_loss": weights}
    value, gradient = run(differentiated, feeds)
    assert not value.any() and not gradient.any()


def test_the_mean_over_a_batch_of_ignored_labels_is_nan_as_in_torch() -> None:
    scores, ignored = normal(4, 5), np.full(4, -100)
    case = Case("", losses.cross_entropy, F.cross_entropy, [scores, ignored], {"ignore_index": -100})
    (value,) = run(model_of(case, "mean")[0], {"x0": scores, "x1": ignored})
    assert torch.isnan(F.cross_entropy(torch.from_numpy(scores), torch.from_numpy(ignored)))
    assert np.isnan(value)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_multiple_negatives_is_cross_entropy_of_scaled_cosines(reduction: str) -> None:
    def reference(a: torch.Tensor, b: torch.Tensor, reduction: str) -> torch.Tensor:
        scores = 20.0 * F.normalize(a) @ F.normalize(b).T
        return F.cross_entropy(scores, torch.arange(len(a)), reduction=reduction)

    pairs = [normal(6, 5), normal(6, 5)]
    case = Case("", losses.multiple_negatives, reference, pairs, differentiable=2)
    assert_equals_torch(case, reduction)


def test_ctc_of_an_impossible_target_costs_infinity() -> None:
    case = ctc_case("", ctc_inputs([[1, 2, 3], [1, 1]], [2, 9]))
    (value,) = run(model_of(case, "none")[0], {f"x{i}": array for i, array in enumerate(case.inputs)})
    assert np.isinf(value[0]) and np.isfinite(value[1])


BAD_OPTIONS = [
    (losses.mse, {"reduction": "avg"}, "reduction is 'avg'"),
    (losses.cross_entropy, {"reduction": "avg"}, "reduction is 'avg'"),
    (losses.nll, {"reduction": "avg"}, "reduction is 'avg'"),
    (losses.huber, {"delta": 0.0}, "delta is 0.0"),
    (losses.smooth_l1, {"beta": -1.0}, "beta is -1.0"),
    (losses.cross_entropy, {"label_smoothing": 1.5}, "label_smoothing is 1.5"),
]


@pytest.mark.parametrize(
    ("loss", "options", "message"), BAD_OPTIONS, ids=lambda v: getattr(v, "__name__", None)
)
def test_bad_options_are_refused(loss: Callable[..., ir.Value], options: dict, message: str) -> None:
    op = Builder(ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="loss"))
    x = op.input("x", ir.DataType.FLOAT, [4, 5])
    t = op.input("t", ir.DataType.FLOAT if loss is not losses.nll else ir.DataType.INT64, [4, 5])
    with pytest.raises(ValueError, match=message):
        loss(op, x, t, **options)
