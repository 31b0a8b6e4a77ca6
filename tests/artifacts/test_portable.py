"""The portable step: run with nothing but onnxruntime, it trains as `Module` and `Optimizer` do."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest

from onward import checkpoint, onnxblock, optim
from onward.api import CheckpointState
from onward.artifacts import LossType, OptimType, generate_artifacts
from onward.checkpoint import from_portable, to_portable
from onward.errors import ModelError, NonFiniteError
from onward.lora import LoRA
from onward.onnxblock import optim as blocks
from onward.optim import ParameterGroup
from small_models import (
    CLASSIFIER,
    NORMALIZED,
    batch,
    classifier,
    normalized,
    one_thread,
    start,
    with_weights,
)

STEPS = 12
RATES = itertools.repeat(1e-2)


class Loop:
    """The loop of docs/portable.md: it knows the specification and nothing of Onward."""

    def __init__(self, folder: Path, state: str | Path = "state.bin") -> None:
        self.session = ort.InferenceSession(folder / "train_step.onnx", one_thread())
        self.about = self.session.get_modelmeta().custom_metadata_map
        self.names = [value.name for value in self.session.get_inputs()]
        self.outputs = [value.name for value in self.session.get_outputs()]
        self.results = int(self.about["onward.results"])
        self.problem = ""
        file = (folder / state).read_bytes()
        assert hashlib.sha256(file[:-32]).digest() == file[-32:]
        assert file[32:64].hex() == self.about["onward.state_digest"]
        lines = [line.split("\t") for line in self.about["onward.state"].splitlines()]
        self.state = [array(file, *fields[1:]) for kind, *fields in lines if kind == "tensor"]
        self.parts = {
            (kind, *fields[:1], *fields[3:]): (fields[1], int(fields[2]))
            for kind, *fields in lines
            if kind != "tensor"
        }

    def __call__(self, *inputs: np.ndarray, rate: float = 1e-3) -> list[Any]:
        given = [*inputs, np.array([rate], np.float32), *self.state]
        made = list(self.session.run(self.outputs, dict(zip(self.names, given, strict=True))))
        changed = made[self.results :]
        self.state[len(self.state) - len(changed) :] = changed
        return self.check(made[: self.results])

    def check(self, results: list[Any]) -> list[Any]:
        """Results without the last one, the problem, which is kept as a sentence."""
        *results, (line, number) = results
        self.problem = line and f"{self.about['onward.problems'].splitlines()[line - 1]}{number}"
        return results

    def bytes(self) -> bytes:
        """The tensors as they lie in a file, from byte 64."""
        return b"".join(tensor.tobytes().ljust(-(-tensor.nbytes // 64) * 64, b"\0") for tensor in self.state)

    def part(self, kind: str, name: str, *slot: str) -> np.ndarray:
        dims, offset = self.parts[(kind, name, *slot)]
        dtype = "int64" if kind in ("optimizer_step", "train_step", "random_seed") else "float32"
        return array(bytes(64) + self.bytes(), dtype, dims, offset)


class Accumulating(Loop):
    """The loop over the step that adds up gradients: a number after the rate, and sums of gradients after the state."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.session = ort.InferenceSession(folder / "accumulate_step.onnx", one_thread())
        about = self.session.get_modelmeta().custom_metadata_map
        assert about["onward.state"] == self.about["onward.state"]
        self.names = [value.name for value in self.session.get_inputs()]
        self.outputs = [value.name for value in self.session.get_outputs()]
        lines = [line.split() for line in about["onward.inputs"].splitlines()]
        shapes = [[int(dim) for dim in dims] for role, _, _, _, *dims in lines if role == "gradient"]
        self.sums = [np.zeros(shape, np.float32) for shape in shapes]

    def __call__(self, *inputs: np.ndarray, rate: float = 1e-3, update: float = 1.0) -> list[Any]:
        given = [*inputs, np.array([rate, update], np.float32), *self.state, *self.sums]
        made = list(self.session.run(self.outputs, dict(zip(self.names, given, strict=True))))
        changed = made[self.results : len(made) - len(self.sums)]
        self.state[len(self.state) - len(changed) :] = changed
        self.sums = made[len(made) - len(self.sums) :]
        return self.check(made[: self.results])


class InPlace(Loop):
    """The loop whose next state lies in the memory of the state."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.state = [tensor.copy() for tensor in self.state]

    def __call__(self, *inputs: np.ndarray, rate: float = 1e-3) -> list[Any]:
        binding = self.session.io_binding()
        given = [*inputs, np.array([rate], np.float32), *self.state]
        for name, value in zip(self.names, given, strict=True):
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(value)))
        for name in self.outputs[: self.results]:
            binding.bind_output(name, "cpu")
        following = self.outputs[self.results :]
        for name, tensor in zip(following, self.state[-len(following) :], strict=True):
            binding.bind_output(name, "cpu", 0, tensor.dtype.type, list(tensor.shape), tensor.ctypes.data)
        self.session.run_with_iobinding(binding)
        return self.check([value.numpy() for value in binding.get_outputs()[: self.results]])


class Halves(Loop):
    """The loop over the two halves of the step, in place: of the specification, too."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.gradient, self.update = (
            ort.InferenceSession(folder / f"{name}_step.onnx", one_thread())
            for name in ("gradient", "update")
        )
        for session in (self.gradient, self.update):
            about = session.get_modelmeta().custom_metadata_map
            assert about["onward.state_digest"] == self.about["onward.state_digest"]
        self.file = np.frombuffer(bytearray((folder / "state.bin").read_bytes()), np.uint8)
        text = self.gradient.get_modelmeta().custom_metadata_map["onward.rows"]
        self.rows = dict(line.split("\t") for line in text.splitlines())
        self.sums: dict[str, np.ndarray] = {}

    def view(self, key: tuple[str, ...]) -> np.ndarray:
        dims, offset = self.parts[key]
        shape = [int(dim) for dim in dims.split(",") if dim]
        dtype = "int64" if key[0] in ("optimizer_step", "train_step", "random_seed") else "float32"
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        return self.file[offset : offset + size].view(dtype).reshape(shape)

    def bytes(self) -> bytes:
        return self.file[64:].tobytes()

    def __call__(self, *inputs: np.ndarray, rate: float = 1e-3, update: bool = True) -> list[Any]:
        named = {
            key[1]: self.view(key) for key in self.parts if key[0] in ("frozen", "statistic", "trainable")
        }
        step, given, feeds = self.view(("train_step", "train_step")), iter(inputs), {}
        for value in self.gradient.get_inputs():
            name = value.name.removesuffix("_grad.accumulation.buffer")
            if value.name in named:
                feeds[value.name] = named[value.name]
            elif value.name == "random_seed":
                seed = int(self.view(("random_seed", "random_seed"))[0])
                mixed = seed * 0x9E3779B97F4A7C15 + (int(step[0]) + 1) * 0xD1B54A32D192ED03
                feeds[value.name] = np.array([mixed % 2**64], np.uint64).view(np.int64)
            elif name in self.rows:  # what is added to: nothing, or the sum of the batches before
                feeds[value.name] = self.sums.pop(name, np.zeros_like(named[name]))
            else:
                feeds[value.name] = next(given)
        shapes = {value.name: value.shape for value in self.gradient.get_inputs()}
        feeds |= {
            name: feeds[name].reshape(shapes[name]) for name in named if name in feeds
        }  # a scalar is [1]
        made = dict(zip([v.name for v in self.gradient.get_outputs()], self.gradient.run(None, feeds)))
        results = []
        for name, value in made.items():
            parameter, statistic = name.removesuffix("_grad.accumulation.out"), name.removesuffix(".next")
            if name != parameter and parameter in named:
                self.sums[parameter] = np.asarray(self.sums.get(parameter, 0) + value)
            elif name != statistic and ("statistic", statistic) in self.parts:
                self.view(("statistic", statistic))[...] = value
            elif name not in self.rows.values():
                results.append(value)
        step += 1
        if update:
            self.step_with(rate)
        return results

    def step_with(self, rate: float) -> None:
        number = self.view(("optimizer_step", "optimizer_step"))
        number += 1
        settings = self.update.get_modelmeta().custom_metadata_map["onward.update"].splitlines()
        lines = [line.split("\t") for line in settings]
        about = {line[0]: line[1] for line in lines}
        scale = 1.0
        if "clip_norm" in about:
            norm = np.sqrt(sum(float(np.sum(np.square(g, dtype=np.float64))) for g in self.sums.values()))
            scale = min(float(about["clip_norm"]) / (norm + 1e-6), 1.0)
        scalars = {"step": number, "gradient_scale": np.array([scale], np.float32)}
        inputs = [value.name for value in self.update.get_inputs()]
        if about["form"] == "elementwise":
            for kind, *fields in lines:
                if kind == "parameter":
                    self.update_one(inputs, scalars, fields[0], rate * float(fields[1]), float(fields[2]))
        else:
            trainable = [key for key in self.parts if key[0] == "trainable"]
            changing = [*trainable, *(key for key in self.parts if key[0] == "slot")]
            feeds = [
                np.array([rate], np.float32),
                number,
                *([scalars["gradient_scale"]] * ("clip_norm" in about)),
            ]
            feeds += [self.sums[key[1]] for key in trainable] + [self.view(key) for key in changing]
            feeds = [np.atleast_1d(value) for value in feeds]
            made = self.update.run(None, dict(zip(inputs, feeds, strict=True)))
            for key, value in zip(changing, made, strict=True):
                self.view(key)[...] = value.reshape(self.view(key).shape)
        self.sums.clear()

    def update_one(self, inputs: list[str], scalars: dict, name: str, rate: float, decay: float) -> None:
        slots = {key[2]: self.view(key).reshape(1, -1) for key in self.parts if key[:2] == ("slot", name)}
        tensors = {"parameter": self.view(("trainable", name)).reshape(1, -1), **slots}
        feeds = {**tensors, **scalars, "gradient": self.sums[name].reshape(1, -1)}
        feeds |= {
            "learning_rate": np.array([rate], np.float32),
            "weight_decay": np.array([decay], np.float32),
        }
        outputs = [f"{key}.next" for key in tensors]
        made = self.update.run(outputs, {key: feeds[key].copy() for key in inputs})
        for target, value in zip(tensors.values(), made, strict=True):
            target[...] = value


def array(file: bytes, dtype: str, dims: str, offset: str | int) -> np.ndarray:
    shape = [int(dim) for dim in dims.split(",") if dim]
    return np.frombuffer(file, dtype, int(np.prod(shape, dtype=np.int64)), int(offset)).reshape(shape)


def artifacts(folder: Path, model: onnx.ModelProto | None = None, **options: Any) -> Path:
    chosen: dict[str, Any] = {
        "requires_grad": CLASSIFIER,
        "loss": LossType.CrossEntropyLoss,
        "optimizer": OptimType.AdamW,
    }
    generate_artifacts(
        model or classifier(), artifact_directory=folder, portable=True, **{**chosen, **options}
    )
    return folder


def assert_trains_as_python(folder: Path, batches: Any, *, rates: Any = RATES, steps: int = STEPS) -> Loop:
    """Train in five ways; losses, parameters, statistics and optimizer state agree within 1e-6."""
    state, module, optimizer = start(folder)
    loop, halves, accumulating = Loop(folder), Halves(folder), Accumulating(folder)
    assert all(value.shape != [] for way in (loop, accumulating) for value in way.session.get_inputs())
    assert all(value.shape != [] for way in (loop, accumulating) for value in way.session.get_outputs())
    in_place = InPlace(folder) if loop.about["onward.in_place"] == "1" else Loop(folder)
    inputs: Any = ()
    for _, inputs, rate in zip(range(steps), batches, rates):
        optimizer.set_learning_rate(rate)
        wanted = module(*inputs)
        optimizer.step()
        module.lazy_reset_grad()
        wanted = list(wanted) if isinstance(wanted, tuple) else [wanted]
        for way in (loop, halves, in_place, accumulating):
            found = way(*inputs, rate=rate)
            for one, other in zip(found, wanted, strict=True):
                np.testing.assert_allclose(one, np.atleast_1d(other), rtol=1e-6, atol=1e-6)
    for way in (loop, halves, accumulating):
        same_state(way, state.to_data(include_optimizer_state=True))
    evaluated = module.eval()(*inputs)
    evaluated = list(evaluated) if isinstance(evaluated, tuple) else [evaluated]
    for one, other in zip(evaluate(folder, loop, *inputs), evaluated, strict=True):
        np.testing.assert_allclose(one, np.atleast_1d(other), rtol=1e-5, atol=1e-6)
    assert in_place.bytes() == loop.bytes()
    return loop


def evaluate(folder: Path, loop: Loop, *inputs: np.ndarray) -> list[Any]:
    """The evaluation step over the first tensors of the state, as many as it takes."""
    session = ort.InferenceSession(folder / "eval_step.onnx", one_thread())
    assert (
        session.get_modelmeta().custom_metadata_map["onward.state_digest"]
        == loop.about["onward.state_digest"]
    )
    names = [value.name for value in session.get_inputs()]
    assert all(value.shape != [] for value in [*session.get_inputs(), *session.get_outputs()])
    return loop.check(list(session.run(None, dict(zip(names, [*inputs, *loop.state])))))


def same_state(loop: Loop, data: checkpoint.CheckpointData) -> None:
    (group,) = data.optimizer
    for (kind, name, *slot), _ in loop.parts.items():
        if kind == "slot":
            wanted = group.slots[name][slot[0]]
        elif kind in ("trainable", "frozen", "statistic"):
            wanted = data.parameters()[name]
        else:
            counters = {"optimizer_step": group.step, "train_step": data.extras["train_step"]}
            wanted = np.array([counters.get(kind, data.extras["seed"])])
        np.testing.assert_allclose(
            loop.part(kind, name, *slot), wanted, rtol=1e-6, atol=1e-6, err_msg=f"{kind} {name} {slot}"
        )


def batches(size: int = 6) -> Any:
    return (batch(seed, size) for seed in itertools.count())


class Wrapped(onnxblock.Block):
    """A user's own optimizer block: Onward knows nothing of its rule."""

    def __init__(self, inner: onnxblock.Block) -> None:
        super().__init__()
        self.inner = inner

    def build(self, parameters: Any) -> Any:
        return self.inner(parameters)


OPTIMIZERS = {
    "SGD": blocks.SGD(),
    "SGD with momentum": optim.sgd(momentum=0.9, weight_decay=0.1),
    "SGD, Nesterov": optim.sgd(momentum=0.9, nesterov=True),
    "SGD with dampening": optim.sgd(momentum=0.9, dampening=0.5),
    "Adam": optim.adam(weight_decay=0.1),
    "AdamW": optim.adamw(),
    "AdamW without bias correction": optim.adamw(bias_correction=False),
    "Adagrad": optim.adagrad(lr_decay=0.1),
    "RMSprop": optim.rmsprop(momentum=0.9, centered=True),
    "Lion": optim.lion(weight_decay=0.1),
    "LAMB": optim.lamb(weight_decay=0.1),
    "Adafactor": optim.adafactor(weight_decay=0.1),
    "clipped by norm": blocks.AdamW(clip_grad=blocks.ClipGradNorm(0.1)),
    "clipped by value": blocks.SGD(clip_grad=blocks.ClipGradValue(0.01)),
    "LAMB, clipped": blocks.Lamb(clip_grad=blocks.ClipGradNorm(0.1)),
    "a block of the user's": Wrapped(blocks.AdamW()),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_trains_as_in_python(name: str, tmp_path: Path) -> None:
    assert_trains_as_python(artifacts(tmp_path, optimizer=OPTIMIZERS[name]), batches())


def test_every_kind_of_optimizer_is_tried() -> None:
    rules = {
        getattr(rule, "rule", rule).name for rule in OPTIMIZERS.values() if not isinstance(rule, Wrapped)
    }
    assert {kind.name.lower() for kind in OptimType} <= {name.lower() for name in rules}


def test_dropout_draws_the_same_numbers(tmp_path: Path) -> None:
    loop = assert_trains_as_python(artifacts(tmp_path, classifier(dropout=0.5)), batches())
    assert loop.part("train_step", "train_step") == STEPS


def test_batch_norm_statistics_are_state(tmp_path: Path) -> None:
    artifacts(tmp_path, normalized(), requires_grad=NORMALIZED)
    loop = assert_trains_as_python(tmp_path, batches())
    assert np.abs(loop.part("statistic", "mean")).max() > 0


def test_frozen_parameters_are_fed_again(tmp_path: Path) -> None:
    artifacts(tmp_path, requires_grad=["w2", "b2"], frozen_params=["w1", "b1"])
    loop = assert_trains_as_python(tmp_path, batches())
    assert loop.names[3:5] == ["w1", "b1"] and "w1.next" not in loop.outputs


def test_any_batch_size(tmp_path: Path) -> None:
    assert_trains_as_python(artifacts(tmp_path), (batch(seed, 1 + seed % 5) for seed in itertools.count()))


def test_additional_outputs(tmp_path: Path) -> None:
    artifacts(tmp_path, additional_output_names=["scores"])
    assert assert_trains_as_python(tmp_path, batches()).results == 3


def test_lora(tmp_path: Path) -> None:
    artifacts(tmp_path, requires_grad=None, lora=LoRA(rank=2))
    assert_trains_as_python(tmp_path, batches())


def test_parameter_groups(tmp_path: Path) -> None:
    groups = [
        ParameterGroup(("b1", "b2"), weight_decay=0.0),
        ParameterGroup(("w2",), weight_decay=0.5, learning_rate_scale=0.1),
    ]
    artifacts(tmp_path, optimizer=optim.adamw(weight_decay=0.1), parameter_groups=groups)
    assert_trains_as_python(tmp_path, batches())


@pytest.mark.parametrize("rule", [optim.adamw(), optim.lamb()], ids=["elementwise", "by parameter"])
def test_the_halves_add_up_gradients(rule: Any, tmp_path: Path) -> None:
    artifacts(tmp_path, embedding(), requires_grad=["table", "w", "factor"], optimizer=rule)
    state, module, optimizer = start(tmp_path)
    halves, rng = Halves(tmp_path), np.random.default_rng(0)
    assert halves.rows  # the table's gradient is added to where it lies
    for number in range(6):
        inputs = rng.integers(0, 8200, 9), rng.integers(0, 3, 9)
        (found,) = halves(*inputs, rate=1e-2, update=number % 3 == 2)
        np.testing.assert_allclose(found, module(*inputs), rtol=1e-6)
        if number % 3 == 2:
            optimizer.set_learning_rate(1e-2)
            optimizer.step()
            module.lazy_reset_grad()
    same_state(halves, state.to_data(include_optimizer_state=True))


@pytest.mark.parametrize("rule", ["elementwise", "by parameter", "clipped"])
def test_the_accumulating_step_adds_up_gradients(rule: str, tmp_path: Path) -> None:
    optimizers = {
        "elementwise": optim.adamw(),
        "by parameter": optim.lamb(),
        "clipped": OPTIMIZERS["clipped by norm"],
    }
    artifacts(tmp_path, embedding(), requires_grad=["table", "w", "factor"], optimizer=optimizers[rule])
    state, module, optimizer = start(tmp_path)
    optimizer.set_learning_rate(1e-2)
    loop, mean, rng = Accumulating(tmp_path), Accumulating(tmp_path), np.random.default_rng(0)
    for number in range(6):
        inputs = rng.integers(0, 8200, 9), rng.integers(0, 3, 9)
        updates = number % 3 == 2
        (found,) = loop(*inputs, rate=1e-2, update=float(updates))
        mean(*inputs, rate=1e-2, update=updates / 3)
        np.testing.assert_allclose(found, np.atleast_1d(module(*inputs)), rtol=1e-6)
        if updates:
            optimizer.step()
            module.lazy_reset_grad()
            assert not any(total.any() for total in loop.sums)
    same_state(loop, state.to_data(include_optimizer_state=True))
    # a third of the sum has a third of the momentum (and clipping has taken the factor out again)
    one, other = (way.part("slot", "w", "momentum0") for way in (loop, mean))
    if rule != "clipped":
        np.testing.assert_allclose(one / 3, other, rtol=0.05, atol=1e-6)


def test_a_bad_batch_changes_neither_the_state_nor_the_sums(tmp_path: Path) -> None:
    artifacts(tmp_path, normalized(), requires_grad=NORMALIZED)
    loop = Accumulating(tmp_path)
    loop(*batch(0), update=0.0)
    before = loop.bytes(), [total.tobytes() for total in loop.sums]
    x, labels = batch(1)
    outside = [np.where(np.arange(len(labels)) == 1, number, labels) for number in (7, -1, 2**40, -(2**63))]
    for bad_x, bad_labels in ((np.full_like(x, np.nan), labels), *((x, numbers) for numbers in outside)):
        for update in (0.0, 1.0):
            (loss,) = loop(bad_x, bad_labels, update=update)
            assert not np.isfinite(loss[0])
            if bad_x is x:
                assert loop.problem == f"'labels' has classes from 0 to 2, and not {bad_labels[1]}"
            else:
                assert loop.problem.endswith(
                    "is not finite, and nothing was changed; batches before this one: 1"
                )
            assert (loop.bytes(), [total.tobytes() for total in loop.sums]) == before
    loop(x, labels)
    assert loop.part("optimizer_step", "optimizer_step") == 1 and loop.part("train_step", "train_step") == 2


def test_the_evaluation_step_guards_labels(tmp_path: Path) -> None:
    artifacts(tmp_path)
    x, labels = batch(1)
    loop = Loop(tmp_path)
    assert np.isnan(evaluate(tmp_path, loop, x, np.full_like(labels, 5))[0])
    assert loop.problem == "'labels' has classes from 0 to 2, and not 5"


def test_a_scalar_input_of_the_model_is_a_vector_of_one(tmp_path: Path) -> None:
    model = with_weights(
        """net (float[n, 4] x, float temperature) => (float[n, 3] scores) {
            a = MatMul (x, w)  scores = Div (a, temperature) }""",
        w=(4, 3),
    )
    artifacts(tmp_path, model, requires_grad=["w"])
    x, labels = batch(0)
    loop, (_, module, _) = Loop(tmp_path), start(tmp_path)
    warm = np.array(0.5, np.float32)
    (loss,) = loop(x, warm.reshape(1), labels)
    np.testing.assert_allclose(loss, [module(x, warm, labels)], rtol=1e-6)


def test_the_learning_rate_is_an_input(tmp_path: Path) -> None:
    assert_trains_as_python(artifacts(tmp_path), batches(), rates=np.linspace(0.1, 0.0, STEPS).tolist())


def embedding() -> onnx.ModelProto:
    """Integer inputs, a table that is large enough to be updated in pieces, and a scalar parameter."""
    model = with_weights(
        """net (int64[n] ids) => (float[n, 3] scores) {
            row = Gather (table, ids)  scaled = Mul (row, factor)  scores = MatMul (scaled, w) }""",
        table=(8200, 64), w=(64, 3),
    )  # fmt: skip
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(0.5, np.float32), "factor"))
    return model


@pytest.mark.parametrize("rule", [optim.adamw(), optim.lamb()], ids=["elementwise", "by parameter"])
def test_integer_inputs_large_tables_and_scalars(rule: Any, tmp_path: Path) -> None:
    artifacts(tmp_path, embedding(), requires_grad=["table", "w", "factor"], optimizer=rule)
    rng = np.random.default_rng(0)
    assert_trains_as_python(
        tmp_path, ((rng.integers(0, 8200, 9), rng.integers(0, 3, 9)) for _ in itertools.count()), steps=4
    )


def test_of_a_table_only_what_was_ever_used_is_updated(tmp_path: Path) -> None:
    """Few rows at first, then most of the table: both ways of updating give what `Optimizer` gives."""
    artifacts(tmp_path, embedding(), requires_grad=["table", "w", "factor"])
    (shape,) = {tuple(t.shape) for t in Loop(tmp_path).state if t.size == 8200 * 64}
    assert len(shape) == 3  # pieces of blocks
    rng = np.random.default_rng(0)
    used = [rng.integers(-8200, 0, 3), np.array([0, 8199, 0]), rng.integers(0, 8200, 4000), np.array([5])]
    loop = assert_trains_as_python(tmp_path, ((ids, rng.integers(0, 3, len(ids))) for ids in used), steps=4)
    moved = np.abs(loop.part("slot", "table", "momentum1")).max(axis=1) > 0
    assert sorted(np.flatnonzero(moved)) == sorted({int(i) % 8200 for ids in used for i in ids})


def test_outputs_that_the_loss_does_not_need_are_of_the_state_before(tmp_path: Path) -> None:
    model = with_weights(
        """net (float[n, 4] x) => (float[n, 3] scores, float[n, 2] other) {
            scores = MatMul (x, w)  a = MatMul (x, v)  other = Neg (a) }""",
        w=(4, 3), v=(4, 2),
    )  # fmt: skip
    artifacts(
        tmp_path, model, requires_grad=["w", "v"], optimizer=optim.adamw(weight_decay=0.1),
        additional_output_names=["other"], loss=LossType.MSELoss,
    )  # fmt: skip
    data = ((batch(seed)[0], np.zeros((6, 3), np.float32)) for seed in itertools.count())
    loop = assert_trains_as_python(tmp_path, data, steps=3)
    assert loop.part("trainable", "v").any()


def test_the_gradient_of_a_table_is_looked_at_too(tmp_path: Path) -> None:
    model = with_weights(
        """net (int64[n] ids, float[n, 64] x) => (float[n, 64] y) {
            row = Gather (table, ids)  y = Mul (row, x) }""",
        table=(8200, 64),
    )
    artifacts(tmp_path, model, requires_grad=["table"], loss=LossType.MSELoss)
    loop = InPlace(tmp_path)
    ids, x, target = np.arange(3), np.ones((3, 64), np.float32), np.zeros((3, 64), np.float32)
    before = loop.bytes()
    x[1, 2] = 1e19  # the loss is finite; a gradient beyond 1e30 counts as an overflow
    assert np.isfinite(loop(ids, x, target)[0]) and loop.bytes() == before
    x[1, 2] = np.inf
    assert not np.isfinite(loop(ids, x, target)[0]) and loop.bytes() == before
    x[1, 2] = 1.0
    loop(ids, x, target)
    assert loop.bytes() != before


def test_a_large_parameter_of_any_size(tmp_path: Path) -> None:
    """A prime number of elements has no even pieces."""
    model = with_weights("net (float[n, 1] x) => (float[n, 524309] y) { y = MatMul (x, w) }", w=(1, 524309))
    artifacts(tmp_path, model, requires_grad=["w"], loss=LossType.MSELoss)
    rng = np.random.default_rng(0)
    given = rng.normal(size=(1, 1)).astype(np.float32), rng.normal(size=(1, 524309)).astype(np.float32)
    assert_trains_as_python(tmp_path, itertools.repeat(given), steps=2)


@pytest.mark.parametrize("opset", [13, 14, 15, 17, 18, 20, 21])
def test_opsets(opset: int, tmp_path: Path) -> None:
    rule = blocks.AdamW(clip_grad=blocks.ClipGradNorm(0.1))
    if opset < 15:  # batch norm has another meaning there
        artifacts(tmp_path, classifier(0.1), optimizer=rule, opset=opset)
    else:
        artifacts(tmp_path, normalized(), requires_grad=NORMALIZED, optimizer=rule, opset=opset)
    assert_trains_as_python(tmp_path, batches(), steps=3)
    for name in ("train_step", "inference_model"):
        model = onnx.load(tmp_path / f"{name}.onnx", load_external_data=False)
        assert [entry.version for entry in model.opset_import if not entry.domain] == [opset]
        assert {entry.domain for entry in model.opset_import} == {""}


def test_gradients_of_inputs_are_left_out(tmp_path: Path) -> None:
    artifacts(tmp_path, requires_grad=[*CLASSIFIER, "x"])
    assert_trains_as_python(tmp_path, batches())


def test_recomputed_activations(tmp_path: Path) -> None:
    assert_trains_as_python(artifacts(tmp_path, classifier(dropout=0.5), recompute=True), batches())


def test_a_parameter_that_the_loss_does_not_read(tmp_path: Path) -> None:
    model = classifier()
    model.graph.node.append(onnx.helper.make_node("MatMul", ["x", "other"], ["unread"]))
    model.graph.output.append(onnx.helper.make_tensor_value_info("unread", 1, ["n", 2]))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((4, 2), np.float32), "other"))
    artifacts(tmp_path, model, requires_grad=[*CLASSIFIER, "other"], optimizer=optim.adamw(weight_decay=0.1))
    loop = assert_trains_as_python(tmp_path, batches())
    assert (loop.part("trainable", "other") < 1).all()  # weight decay alone
    session = ort.InferenceSession(tmp_path / "inference_model.onnx", one_thread())
    assert [value.name for value in session.get_outputs()] == ["scores", "unread"]


def test_parameters_whose_gradients_are_the_same_value(tmp_path: Path) -> None:
    model = with_weights(
        "net (float[n, 3] x) => (float[n, 3] y) { a = Add (x, b1)  y = Add (a, b2) }", b1=(3,), b2=(3,)
    )
    artifacts(tmp_path, model, requires_grad=["b1", "b2"], loss=LossType.MSELoss)
    rng = np.random.default_rng(0)
    given = [rng.normal(size=(4, 3)).astype(np.float32) for _ in range(2)]
    assert_trains_as_python(tmp_path, itertools.repeat(given))


def test_a_loss_in_double(tmp_path: Path) -> None:
    model = with_weights(
        """net (float[n, 2] x) => (double loss) {
            y = MatMul (x, w)  d = Cast <to = 11> (y)  q = Mul (d, d)  loss = ReduceMean <keepdims = 0> (q) }""",
        w=(2, 2),
    )
    artifacts(tmp_path, model, requires_grad=["w"], loss=None)
    assert_trains_as_python(tmp_path, itertools.repeat([np.ones((3, 2), np.float32)]))


def test_names_that_the_model_has_itself(tmp_path: Path) -> None:
    """A parameter called like another's slot, an input called learning_rate, a value called like an output."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
        net (float[n, 2] learning_rate) => (float[n, 2] packed0) {
            train_step = MatMul (learning_rate, w)  packed0 = MatMul (train_step, other) }""")
    model.graph.node[1].input[1] = "w.momentum0"
    for name in ("w", "w.momentum0"):
        value = np.random.default_rng(0).normal(size=(2, 2)).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    artifacts(tmp_path, model, requires_grad=["w", "w.momentum0"], loss=LossType.MSELoss)
    rng = np.random.default_rng(0)
    given = [rng.normal(size=(3, 2)).astype(np.float32) for _ in range(2)]
    assert_trains_as_python(tmp_path, itertools.repeat(given))


# ---- numbers that are not finite -----------------------------------------------------------------------


@pytest.mark.parametrize("clip", [None, blocks.ClipGradNorm(1.0)], ids=["plain", "clipped"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_step_that_is_not_finite_leaves_the_state_as_it_was(bad: float, clip: Any, tmp_path: Path) -> None:
    artifacts(tmp_path, normalized(), requires_grad=NORMALIZED, optimizer=blocks.AdamW(clip_grad=clip))
    loop = Loop(tmp_path)
    loop(*batch(0))
    before = loop.bytes()
    x, labels = batch(1)
    x[2, 1] = bad
    (loss,) = loop(x, labels)
    assert not np.isfinite(loss) and loop.bytes() == before
    loop(*batch(2))
    assert loop.bytes() != before and loop.part("train_step", "train_step") == 2


@pytest.mark.parametrize("number", [3, 7, -1, 2**40])
def test_a_label_out_of_range_leaves_the_state_as_it_was(number: int, tmp_path: Path) -> None:
    loop = Loop(artifacts(tmp_path))
    loop(*batch(0))
    before = loop.bytes()
    x, labels = batch(1)
    labels[2] = number
    (loss,) = loop(x, labels)
    assert np.isnan(loss) and loop.bytes() == before
    assert loop.problem == f"'labels' has classes from 0 to 2, and not {number}"
    (loss,) = loop(*batch(2))
    assert np.isfinite(loss) and loop.bytes() != before and not loop.problem


def test_a_label_that_is_ignored_is_no_label_out_of_range(tmp_path: Path) -> None:
    loop = Loop(artifacts(tmp_path, loss=onnxblock.loss.CrossEntropyLoss(ignore_index=-100)))
    before = loop.bytes()
    x, labels = batch(1)
    labels[2] = -100
    (loss,) = loop(x, labels)
    assert np.isfinite(loss) and loop.bytes() != before and not loop.problem
    labels[2] = -1
    loop(x, labels)
    assert loop.problem == "'labels' has classes from 0 to 2 or -100, and not -1"


def test_parameters_of_another_type_are_refused(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> net (double[n, 2] x) => (double[n, 1] y)
        <double[2, 1] w = {1.0, 2.0}> { y = MatMul(x, w) }"""
    )
    with pytest.raises(ModelError, match="'w' is float64: portable steps train float32"):
        artifacts(tmp_path, model, requires_grad=["w"], loss=LossType.MSELoss)
    assert not list(tmp_path.iterdir())


def test_the_table_of_inputs_is_all_that_a_program_needs_to_make_them(tmp_path: Path) -> None:
    """A program without names or types: a line of `onward.inputs` has role, offset, bytes, type and shape of each."""
    model = normalized()
    artifacts(tmp_path, model, requires_grad=NORMALIZED)
    file = (tmp_path / "state.bin").read_bytes()
    for name in ("train_step", "accumulate_step"):
        loop = Loop(tmp_path) if name == "train_step" else Accumulating(tmp_path)
        session = ort.InferenceSession(tmp_path / f"{name}.onnx", one_thread())
        about = session.get_modelmeta().custom_metadata_map
        tensors, roles = [], []
        for line, value in zip(about["onward.inputs"].splitlines(), session.get_inputs(), strict=True):
            role, *numbers = line.split()
            offset, size, kind, *dims = map(int, numbers)
            dtype = onnx.helper.tensor_dtype_to_np_dtype(kind)
            shape = [dim if isinstance(dim, int) else -1 for dim in value.shape]
            assert dims == shape and size == np.prod(np.abs(shape)) * dtype.itemsize
            content = file[offset : offset + size] if offset else bytes(size)
            tensors.append(np.frombuffer(content, dtype).reshape(np.abs(dims)))
            roles.append(role)
        x, labels = batch(0)
        sums = loop.sums if isinstance(loop, Accumulating) else []
        state = ["state"] * (len(loop.state) - 2) + ["steps", "state"]
        assert roles == ["batch"] * 2 + ["rate"] + state + ["gradient"] * len(sums)
        tensors[:3] = [x, labels, np.array([0.01, 1.0], np.float32)[: tensors[2].size]]
        results = session.run(None, dict(zip([value.name for value in session.get_inputs()], tensors)))
        np.testing.assert_array_equal(results[0], loop(x, labels, rate=0.01)[0])


def overflowing() -> onnx.ModelProto:
    """Scores so small that the loss is finite, through a factor that makes the gradient infinite."""
    return with_weights(
        """net (float[n, 2] x) => (float[n, 2] y) {
            a = MatMul (x, w)  b = Sqrt (a)  y = Identity (b) }""",
        w=(2, 2),
    )  # fmt: skip


def test_a_gradient_that_is_not_finite_leaves_the_state_as_it_was(tmp_path: Path) -> None:
    artifacts(tmp_path, overflowing(), requires_grad=["w"], loss=LossType.MSELoss)
    x = np.zeros((1, 2), np.float32)  # √0 has an infinite slope
    target = np.ones((1, 2), np.float32)
    loop, (_, module, optimizer) = Loop(tmp_path), start(tmp_path)
    before = loop.bytes()
    (loss,) = loop(x, target)
    assert np.isfinite(loss) and loop.bytes() == before
    module(x, target)
    with pytest.raises(NonFiniteError):
        optimizer.step()


def test_clipping_takes_gradients_whose_square_overflows(tmp_path: Path) -> None:
    model = with_weights("net (float[n, 2] x) => (float[n, 1] y) { y = MatMul (x, w) }", w=(2, 1))
    rule = blocks.SGD(clip_grad=blocks.ClipGradNorm(1.0))
    artifacts(tmp_path, model, requires_grad=["w"], loss=LossType.L1Loss, optimizer=rule)
    given = np.full((1, 2), 1e22, np.float32), np.zeros((1, 1), np.float32)
    loop = assert_trains_as_python(tmp_path, itertools.repeat(given), steps=1)
    assert loop.part("optimizer_step", "optimizer_step") == 1


# ---- files --------------------------------------------------------------------------------------------


def test_the_inference_model_reads_the_state_file_of_which_the_first_bytes_are_enough(tmp_path: Path) -> None:
    artifacts(tmp_path, normalized(), requires_grad=NORMALIZED)
    loop = Loop(tmp_path)
    _, module, optimizer = start(tmp_path)
    for inputs in itertools.islice(batches(), 5):
        loop(*inputs)
        module(*inputs)
        optimizer.step()
        module.lazy_reset_grad()
    header = (tmp_path / "state.bin").read_bytes()[:64]
    size = int(loop.about["onward.weights_size"])
    (tmp_path / "state.bin").write_bytes((header + loop.bytes())[:size])
    module.export_model_for_inferencing(tmp_path / "python.onnx", ["scores"])
    x = batch(9)[0]
    one, other = (
        ort.InferenceSession(tmp_path / name, one_thread()).run(["scores"], {"x": x})[0]
        for name in ("inference_model.onnx", "python.onnx")
    )
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_the_inference_model_runs_as_written(tmp_path: Path) -> None:
    artifacts(tmp_path, prefix="my_")
    session = ort.InferenceSession(tmp_path / "my_inference_model.onnx", one_thread())
    assert [value.name for value in session.get_inputs()] == ["x"]
    assert [value.name for value in session.get_outputs()] == ["scores"]
    model = onnx.load(tmp_path / "my_inference_model.onnx", load_external_data=False)
    files = {
        entry.value
        for tensor in model.graph.initializer
        for entry in tensor.external_data
        if entry.key == "location"
    }
    assert files == {"my_state.bin"}


def test_two_runs_write_the_same_bytes(tmp_path: Path) -> None:
    one, other = (artifacts(tmp_path / name, classifier(0.1)) for name in ("one", "other"))
    for name in ("train_step.onnx", "state.bin", "inference_model.onnx"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def test_training_goes_on_in_python_and_back(tmp_path: Path) -> None:
    artifacts(tmp_path, classifier(dropout=0.3))
    given = list(itertools.islice(batches(), 9))
    whole = Loop(tmp_path)
    for inputs in given:
        whole(*inputs)
    first = Loop(tmp_path)
    for inputs in given[:3]:
        first(*inputs)
    text = (tmp_path / "state.bin").read_bytes()[64 + len(first.bytes()) : -32]
    content = (tmp_path / "state.bin").read_bytes()[:64] + first.bytes() + text
    (tmp_path / "three.bin").write_bytes(content + hashlib.sha256(content).digest())
    data = from_portable(tmp_path / "three.bin")
    assert data.optimizer[0].step == 3 and data.extras["train_step"] == 3
    checkpoint.save(data, tmp_path / "three")
    state, module, optimizer = start(tmp_path, "three")
    for inputs in given[3:6]:
        module(*inputs)
        optimizer.step()
        module.lazy_reset_grad()
    CheckpointState.save_checkpoint(state, tmp_path / "six", include_optimizer_state=True)
    to_portable(checkpoint.load(tmp_path / "six"), tmp_path / "six.bin", layout=tmp_path / "state.bin")
    last = Loop(tmp_path, "six.bin")
    for inputs in given[6:]:
        last(*inputs)
    for (kind, *name), _ in whole.parts.items():
        np.testing.assert_allclose(last.part(kind, *name), whole.part(kind, *name), rtol=1e-6, atol=1e-6)


def test_without_an_optimizer_there_is_no_step(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="portable=True needs an optimizer"):
        artifacts(tmp_path / "out", optimizer=None)
    assert not (tmp_path / "out").exists()


def test_the_runtime_s_own_format(tmp_path: Path) -> None:
    artifacts(tmp_path, ort_format=True)
    assert (tmp_path / "train_step.ort").is_file()
