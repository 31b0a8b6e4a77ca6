"""Each optimizer is torch's (or its paper's) over a hundred steps, wherever and in whatever form it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

from onward import onnxblock, optim
from onward.graph.save import write_model
from onward.optim.optimizer_model import Clipping, ParameterGroup, optimizer_model
from onward.runtime.memory import FlatBuffer
from onward.runtime.optimizers.vector import make_updater

if TYPE_CHECKING:
    from onward.optim.update_rules import Optimizer

STEPS = 100
SHAPES = {"layer.weight": (7, 5), "layer.bias": (7,), "conv.weight": (3, 2, 3, 3), "scale": (1,)}
Arrays = dict[str, np.ndarray]


def start() -> Arrays:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def gradients(step: int) -> Arrays:
    """Another gradient at every step, of sizes from 10⁻³ to 10."""
    rng = np.random.default_rng(step + 1)
    scale = 10.0 ** rng.uniform(-3, 1)
    return {name: (rng.normal(size=shape) * scale).astype(np.float32) for name, shape in SHAPES.items()}


def rate(step: int, peak: float) -> float:
    """A learning rate that changes, as a schedule's does."""
    return peak * (1.0 - step / (2 * STEPS))


# ---- the references --------------------------------------------------------------------------------

Reference = Callable[[float], Arrays]


def of_torch(make: Callable[..., torch.optim.Optimizer], **options: Any) -> Reference:
    def run(peak: float) -> Arrays:
        tensors = {name: torch.nn.Parameter(torch.from_numpy(array)) for name, array in start().items()}
        optimizer = make(list(tensors.values()), lr=peak, **options)
        for step in range(STEPS):
            for group in optimizer.param_groups:
                group["lr"] = rate(step, peak)
            for name, gradient in gradients(step).items():
                tensors[name].grad = torch.from_numpy(gradient)
            optimizer.step()
        return {name: tensor.detach().numpy() for name, tensor in tensors.items()}

    return run


def lion_of_the_paper(*, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0) -> Reference:
    def run(peak: float) -> Arrays:
        parameters = {name: array.astype(np.float64) for name, array in start().items()}
        moments = {name: np.zeros(shape) for name, shape in SHAPES.items()}
        for step in range(STEPS):
            for name, g in gradients(step).items():
                p, m = parameters[name], moments[name]
                update = np.sign(betas[0] * m + (1 - betas[0]) * g) + weight_decay * p
                parameters[name] = p - rate(step, peak) * update
                moments[name] = betas[1] * m + (1 - betas[1]) * g
        return parameters

    return run


def lamb_of_the_paper(
    *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6, weight_decay: float = 0.0
) -> Reference:
    def run(peak: float) -> Arrays:
        parameters = {name: array.astype(np.float64) for name, array in start().items()}
        moments = {name: (np.zeros(shape), np.zeros(shape)) for name, shape in SHAPES.items()}
        for step in range(STEPS):
            for name, g in gradients(step).items():
                p, (m, v) = parameters[name], moments[name]
                m, v = (
                    betas[0] * m + (1 - betas[0]) * g,
                    betas[1] * v + (1 - betas[1]) * np.square(g, dtype=float),
                )
                moments[name] = m, v
                first, second = m / (1 - betas[0] ** (step + 1)), v / (1 - betas[1] ** (step + 1))
                ratio = first / (np.sqrt(second) + eps)
                update = ratio + weight_decay * p
                trust = np.linalg.norm(p) / np.linalg.norm(update)
                parameters[name] = p - rate(step, peak) * trust * update
        return parameters

    return run


@dataclasses.dataclass
class Case:
    name: str
    rule: Optimizer
    reference: Reference
    peak: float = 0.01


def torch_case(name: str, **options: Any) -> Case:
    """The same options for ours and torch's."""
    ours = getattr(optim, name.lower())(**options)
    text = ", ".join(f"{key}={value}" for key, value in options.items())
    return Case(f"{name}({text})", ours, of_torch(getattr(torch.optim, name), **options))


CASES = [
    torch_case("SGD"),
    torch_case("SGD", weight_decay=0.1),
    torch_case("SGD", momentum=0.9),
    torch_case("SGD", momentum=0.9, nesterov=True, weight_decay=0.01),
    torch_case("SGD", momentum=0.8, dampening=0.5),
    torch_case("Adam"),
    torch_case("Adam", betas=(0.8, 0.95), eps=1e-4, weight_decay=0.1),
    torch_case("AdamW"),
    torch_case("AdamW", weight_decay=0.0),
    torch_case("AdamW", betas=(0.5, 0.9), eps=1e-3, weight_decay=0.3),
    torch_case("Adagrad"),
    torch_case("Adagrad", lr_decay=0.05, weight_decay=0.1, eps=1e-5),
    torch_case("RMSprop"),
    torch_case("RMSprop", alpha=0.9, eps=1e-4, weight_decay=0.1),
    torch_case("RMSprop", momentum=0.9),
    torch_case("RMSprop", centered=True, eps=1e-3),
    torch_case("RMSprop", momentum=0.5, centered=True, eps=1e-3),
    torch_case("Adafactor"),
    torch_case("Adafactor", weight_decay=0.1, d=2.0, beta2_decay=-0.5, eps=(1e-6, 1e-2)),
    Case("Lion", optim.lion(), lion_of_the_paper()),
    Case(
        "Lion with decay", optim.lion(betas=(0.8, 0.9), weight_decay=0.1),
        lion_of_the_paper(betas=(0.8, 0.9), weight_decay=0.1),
    ),
    Case("LAMB", optim.lamb(), lamb_of_the_paper()),
    Case("LAMB with decay", optim.lamb(weight_decay=0.1), lamb_of_the_paper(weight_decay=0.1)),
]  # fmt: skip
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


# ---- the ways to run -------------------------------------------------------------------------------


def in_place(
    rule: Optimizer,
    peak: float,
    folder: Path,
    *,
    clipping: Clipping | None = None,
    groups: Sequence[ParameterGroup] = (),
) -> Arrays:
    """Through the runtime: every tensor is overwritten where it lies."""
    file = folder / "optimizer_model.onnx"
    write_model(optimizer_model(rule, SHAPES, clipping=clipping, groups=groups), file)
    parameters, buffers = FlatBuffer(SHAPES), FlatBuffer(SHAPES)
    for name, array in start().items():
        parameters.views[name][:] = array
    updater = make_updater(file, parameters, buffers)
    for step in range(STEPS):
        for name, array in gradients(step).items():
            buffers.views[name][:] = array
        updater.learning_rate = rate(step, peak)
        norm = float(np.sqrt(sum(np.square(g, dtype=np.float64).sum() for g in gradients(step).values())))
        scale = 1.0 if updater.clip_norm is None else min(updater.clip_norm / (norm + 1e-6), 1.0)
        updater.run(scale)
    return parameters.views


def out_of_place(rule: Optimizer, peak: float) -> Arrays:
    """In a plain session: every step returns new tensors."""
    model = optimizer_model(rule, SHAPES)
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    shapes = {value.name: value.shape for value in model.graph.inputs}
    scalars = {"gradient_scale": np.ones(1, np.float32)}
    scalars["weight_decay"] = np.full(1, rule.weight_decay, np.float32)
    sets = [[name] for name in SHAPES] if rule.elementwise else [list(SHAPES)]
    result = start()
    for names in sets:
        own = {"parameter": result[names[0]].reshape(-1)} if rule.elementwise else dict(result)
        size = own["parameter"].size if rule.elementwise else 0
        slots = {
            output.name.removesuffix(".next"): np.zeros(
                [d if isinstance(d, int) else size for d in shapes[output.name.removesuffix(".next")] or ()],
                np.float32,
            )
            for output in model.graph.outputs
            if output.name is not None and output.name.removesuffix(".next") not in own
        }
        values = {**own, **slots}
        for step in range(STEPS):
            feeds = {**values, **scalars, "step": np.full(1, step + 1, np.int64)}
            feeds["learning_rate"] = np.full(1, rate(step, peak), np.float32)
            for name in names:
                key = "gradient" if rule.elementwise else f"{name}_grad"
                flat = gradients(step)[name]
                feeds[key] = flat.reshape(-1) if rule.elementwise else flat
            outputs = [value.name for value in session.get_outputs()]
            following = dict(zip(outputs, session.run(None, feeds)))
            values = {key.removesuffix(".next"): np.asarray(array) for key, array in following.items()}
        for name in names:
            result[name] = values["parameter" if rule.elementwise else name].reshape(SHAPES[name])
    return result


def assert_same(found: Arrays, expected: Arrays, *, rtol: float = 2e-5, atol: float = 2e-6) -> None:
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=rtol, atol=atol, err_msg=name)


@every_case
def test_equals_its_reference_over_100_steps(case: Case, tmp_path: Path) -> None:
    assert_same(in_place(case.rule, case.peak, tmp_path), case.reference(case.peak))


@every_case
def test_in_place_is_out_of_place_to_the_bit(case: Case, tmp_path: Path) -> None:
    overwritten, returned = in_place(case.rule, case.peak, tmp_path), out_of_place(case.rule, case.peak)
    for name in SHAPES:
        np.testing.assert_array_equal(overwritten[name], returned[name], err_msg=name)


@every_case
def test_the_model_is_valid_and_standard(case: Case) -> None:
    model = ir.to_proto(optimizer_model(case.rule, SHAPES))
    onnx.checker.check_model(model, full_check=True)
    assert {node.domain for node in model.graph.node} <= {""}


# ---- clipping and groups ---------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0.5, 1e4], ids=["bites", "does not bite"])
@pytest.mark.parametrize("kind", ["norm", "value"])
def test_clipping_is_torchs(kind: str, limit: float, tmp_path: Path) -> None:
    def clipped(parameters: list[torch.nn.Parameter], **options: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, **options)
        clip = getattr(torch.nn.utils, f"clip_grad_{kind}_")
        optimizer.register_step_pre_hook(lambda *_: clip(parameters, limit) and None)
        return optimizer

    options = {kind: limit}
    found = in_place(optim.sgd(), 0.01, tmp_path, clipping=Clipping(**options))
    assert_same(found, of_torch(clipped)(0.01))


GROUPED = ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adafactor"]


@pytest.mark.parametrize("base_decay", [0.0, 0.1], ids=["decay of a group only", "no decay in a group"])
@pytest.mark.parametrize("name", GROUPED)
def test_parameter_groups_have_their_own_decay_and_rate(name: str, base_decay: float, tmp_path: Path) -> None:
    own = 0.2 if base_decay == 0.0 else 0.0
    grouped = ("layer.bias", "scale")

    def of_groups(parameters: list[torch.nn.Parameter], lr: float, **options: Any) -> torch.optim.Optimizer:
        named = dict(zip(SHAPES, parameters))
        rest = [tensor for key, tensor in named.items() if key not in grouped]
        groups = [{"params": rest}, {"params": [named[key] for key in grouped], "weight_decay": own}]
        optimizer = getattr(torch.optim, name)(groups, lr=lr, weight_decay=base_decay)
        halve = lambda *_: optimizer.param_groups[1].update(lr=optimizer.param_groups[0]["lr"] / 2)  # noqa: E731
        optimizer.register_step_pre_hook(halve)
        return optimizer

    rule = getattr(optim, name.lower())(weight_decay=base_decay)
    groups = [ParameterGroup(grouped, weight_decay=own, learning_rate_scale=0.5)]
    assert_same(in_place(rule, 0.01, tmp_path, groups=groups), of_torch(of_groups)(0.01))


# ---- blocks ----------------------------------------------------------------------------------------

BLOCKS = [
    (onnxblock.optim.SGD(), optim.sgd()),
    (onnxblock.optim.SGD(momentum=0.9, nesterov=True), optim.sgd(momentum=0.9, nesterov=True)),
    (onnxblock.optim.AdamW(), optim.adamw(eps=1e-6, weight_decay=0.0)),
    (onnxblock.optim.AdamW(weight_decay=0.2, betas=(0.8, 0.9), eps=1e-3),
     optim.adamw(weight_decay=0.2, betas=(0.8, 0.9), eps=1e-3)),
    (onnxblock.optim.Adam(weight_decay=0.1), optim.adam(weight_decay=0.1)),
    (onnxblock.optim.Adagrad(), optim.adagrad()),
    (onnxblock.optim.RMSprop(centered=True, momentum=0.5, eps=1e-3),
     optim.rmsprop(centered=True, momentum=0.5, eps=1e-3)),
    (onnxblock.optim.Lion(), optim.lion()),
    (onnxblock.optim.Lamb(weight_decay=0.1), optim.lamb(weight_decay=0.1)),
]  # fmt: skip


def tensors(arrays: Arrays) -> list[onnx.TensorProto]:
    return [onnx.numpy_helper.from_array(array, name) for name, array in arrays.items()]


@pytest.mark.parametrize(("block", "rule"), BLOCKS, ids=lambda value: getattr(value, "name", ""))
def test_blocks_build_the_sequence_form_for_plain_sessions(
    block: onnxblock.optim.OptimizerBlock, rule: Optimizer, tmp_path: Path
) -> None:
    with onnxblock.empty_base() as accessor:
        flag = block((tensors(start()), []))
    onnx.checker.check_model(accessor.model, full_check=True)
    session = ort.InferenceSession(accessor.model.SerializeToString(), providers=["CPUExecutionProvider"])
    outputs = [value.name for value in session.get_outputs()]
    assert outputs[0] == flag
    moments = [v.name for v in session.get_inputs() if v.name.endswith("_order_moments")]
    state: dict[str, Any] = {"params": list(start().values())}
    state |= {name: [np.zeros(shape, np.float32) for shape in SHAPES.values()] for name in moments}
    for step in range(STEPS):
        feeds = {**state, "gradients": list(gradients(step).values())}
        feeds["learning_rate"] = np.full(1, rate(step, 0.01), np.float32)
        feeds["step"] = np.full(1, step + 1, np.int64)
        results: dict[str, Any] = dict(zip(outputs, session.run(None, feeds)))
        assert results[flag].tolist() == [True]
        state = {name: results[f"updated_{name}"] for name in state}
    assert_same(dict(zip(SHAPES, state["params"])), in_place(rule, 0.01, tmp_path))


def test_adafactor_has_no_sequence_form() -> None:
    with onnxblock.empty_base(), pytest.raises(ValueError, match="Adafactor keeps state of other shapes"):
        onnxblock.optim.Adafactor()((tensors(start()), []))


@pytest.mark.parametrize(
    ("block", "clip"),
    [
        (onnxblock.optim.ClipGradNorm(0.5), torch.nn.utils.clip_grad_norm_),
        (onnxblock.optim.ClipGradValue(0.5), torch.nn.utils.clip_grad_value_),
    ],
    ids=["norm", "value"],
)
@pytest.mark.parametrize("form", ["sequence", "tensors"])
def test_clipping_blocks_are_torchs(block: onnxblock.Block, clip: Callable[..., Any], form: str) -> None:
    given = gradients(3)
    parameters = [torch.nn.Parameter(torch.zeros(array.shape)) for array in given.values()]
    for parameter, array in zip(parameters, given.values()):
        parameter.grad = torch.from_numpy(array.copy())
    clip(parameters, 0.5)

    class Clip(onnxblock.ForwardBlock):
        def build(self, *names: str) -> str | list[str]:
            return block(*names)

    clipper = Clip()
    with onnxblock.empty_base() as accessor:
        make = onnx.helper
        if form == "sequence":
            names = ["gradients"]
            value = make.make_tensor_sequence_value_info("gradients", onnx.TensorProto.FLOAT, None)
            accessor.model.graph.input.append(value)
        else:
            names = list(given)
            for name, array in given.items():
                value = make.make_tensor_value_info(name, onnx.TensorProto.FLOAT, array.shape)
                accessor.model.graph.input.append(value)
        clipper(*names)
    model = clipper.to_model_proto().SerializeToString()
    feeds: dict[str, Any] = {"gradients": list(given.values())} if form == "sequence" else given
    found: list[Any] = list(ort.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, feeds))
    for array, parameter in zip(found[0] if form == "sequence" else found, parameters, strict=True):
        assert parameter.grad is not None
        np.testing.assert_allclose(array, parameter.grad.numpy(), rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.sgd(nesterov=True), "Nesterov momentum requires"),
        (lambda: optim.sgd(momentum=0.9, dampening=0.1, nesterov=True), "Nesterov momentum requires"),
        (lambda: onnxblock.optim.ClipGradNorm(0.0), "max_norm is 0.0"),
        (lambda: onnxblock.optim.ClipGradValue(-1.0), "max_value is -1.0"),
    ],
    ids=["nesterov without momentum", "nesterov with dampening", "norm of 0", "negative value"],
)
def test_bad_options_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_adamw_in_the_order_of_the_original() -> None:
    """w −= lr·√(1−β₂ᵗ)/(1−β₁ᵗ) · m/(√v + ε), and only then w −= lr·wd·w."""
    rng = np.random.default_rng(0)
    rule = optim.adamw(eps=1e-3, weight_decay=0.3, decay_last=True)
    session = ort.InferenceSession(ir.to_proto(optimizer_model(rule, {"w": (5,)})).SerializeToString())
    w, m, v = rng.normal(size=5).astype(np.float32), np.zeros(5, np.float32), np.zeros(5, np.float32)
    expected = [a.astype(np.float64) for a in (w, m, v)]
    for step in range(1, 4):
        g = rng.normal(size=5).astype(np.float32)
        feeds = {"parameter": w, "gradient": g, "momentum0": m, "momentum1": v}
        scalars = {"learning_rate": 0.1, "gradient_scale": 1.0, "weight_decay": 0.3}
        feeds |= {name: np.asarray([value], np.float32) for name, value in scalars.items()}
        w, m, v = session.run(None, feeds | {"step": np.asarray([step])})
        p, first, second = expected
        first, second = 0.9 * first + 0.1 * g, 0.999 * second + 0.001 * g.astype(np.float64) ** 2
        rate = 0.1 * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
        p = p - rate * first / (np.sqrt(second) + 1e-3)
        expected = [p - 0.1 * 0.3 * p, first, second]
        for got, exact in zip((w, m, v), expected):
            np.testing.assert_allclose(got, exact, rtol=2e-5)
