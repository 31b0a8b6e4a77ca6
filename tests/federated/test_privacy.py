"""A private client: what one example can change is bounded, noise has the size that the accountant is told of."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from onward.api import CheckpointState, Module, Optimizer
from onward.artifacts import LossType, OptimType, generate_artifacts
from onward.errors import OnwardError
from onward.federated import Client, Privacy, PrivacyBudgetError, PrivateClient, Server
from small_models import CLASSIFIER, NORMALIZED, batch, classifier, normalized, one_thread

NO_NOISE = 1e-12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("private")
    generate_artifacts(
        classifier(), requires_grad=CLASSIFIER, loss=LossType.CrossEntropyLoss, optimizer=OptimType.SGD,
        artifact_directory=folder,
    )  # fmt: skip
    return folder


def load(folder: Path, rate: float) -> tuple[CheckpointState, Module, Optimizer]:
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, session_options=one_thread())
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(rate)
    return state, module, optimizer


def private(folder: Path, privacy: Privacy, *, rate: float = 1.0, seed: int = 0) -> PrivateClient:
    return PrivateClient(*load(folder, rate), privacy, generator=np.random.default_rng(seed))


class Counted(Privacy):
    """Settings whose epsilon is the number of steps: training does not need the library, counting does."""

    def _epsilon(self, ledger: dict[tuple[float, float], int]) -> float:
        return float(sum(ledger.values()))


def norm_of(arrays: dict[str, np.ndarray]) -> float:
    return math.sqrt(sum(float(np.sum(np.square(array))) for array in arrays.values()))


def test_without_noise_and_clipping_it_trains_as_a_client_does(folder: Path) -> None:
    examples = batch(0, 12)
    client = private(folder, Counted(NO_NOISE, sample_rate=1.0, max_grad_norm=1e3), rate=0.1)
    plain = Client(*load(folder, 0.1))
    start = plain.parameters()
    one = client.train(start, examples, steps=4)
    other = plain.train(start, [examples] * 4)
    assert one.examples == other.examples == 48 and one.layout == other.layout
    for name, array in other.difference.items():
        np.testing.assert_allclose(one.difference[name], array, rtol=1e-4, atol=1e-6)


def test_no_example_changes_the_sum_of_gradients_by_more_than_its_norm(folder: Path) -> None:
    x, labels = batch(0, 8)
    privacy = Counted(NO_NOISE, sample_rate=1.0, max_grad_norm=0.01)
    start = Client(*load(folder, 1.0)).parameters()
    whole = private(folder, privacy).train(start, (x, labels), steps=1)
    # each of eight is at most 0.01, and the sum is divided by eight
    assert norm_of(dict(whole.difference)) <= 0.01 * (1 + 1e-5)
    loud = x.copy()
    loud[3] *= 1e4
    other = private(folder, privacy).train(start, (loud, labels), steps=1)
    change = {name: whole.difference[name] - other.difference[name] for name in whole.difference}
    assert 0 < norm_of(change) <= 2 * 0.01 / 8 * (1 + 1e-5)


def test_noise_is_as_large_as_it_says(folder: Path) -> None:
    x, labels = batch(0, 10)
    privacy = Counted(noise_multiplier=3.0, sample_rate=0.5, max_grad_norm=1e-6)
    start = Client(*load(folder, 1.0)).parameters()
    numbers = [
        array.ravel() / (3.0 * 1e-6 / 5)
        for seed in range(20)
        for array in private(folder, privacy, seed=seed, rate=1.0)
        .train({name: np.zeros_like(a) for name, a in start.items()}, (x, labels), steps=1)
        .difference.values()
    ]
    noise = np.concatenate(numbers)
    assert len(noise) == 20 * 67
    assert abs(noise.mean()) < 0.1 and noise.std() == pytest.approx(1.0, abs=0.1)


def test_examples_are_drawn_one_by_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = private(folder, Counted(1.0, sample_rate=0.3))
    calls: list[int] = []
    call = Module.__call__
    monkeypatch.setattr(
        Module, "__call__", lambda self, *inputs: (calls.append(len(inputs[0])), call(self, *inputs))[1]
    )
    update = client.train(client.parameters(), batch(0, 40), steps=25)
    assert set(calls) == {1} and len(calls) != update.examples == 12 * 25
    assert abs(len(calls) - 300) < 5 * math.sqrt(40 * 25 * 0.3 * 0.7)


def test_an_example_that_is_not_finite_counts_as_none(folder: Path) -> None:
    x, labels = batch(0, 8)
    privacy = Counted(NO_NOISE, sample_rate=1.0, max_grad_norm=1e3)
    start = Client(*load(folder, 1.0)).parameters()
    rest = private(folder, privacy).train(start, (x[1:], labels[1:]), steps=1)
    x[0] = np.nan
    client = private(folder, privacy)
    update = client.train(start, (x, labels), steps=1)
    for name, array in update.difference.items():
        np.testing.assert_allclose(array * 8, rest.difference[name] * 7, rtol=1e-4, atol=1e-6)
    assert client.module.on_nonfinite == "raise"


def test_a_draw_of_no_example_is_noise_alone(folder: Path) -> None:
    client = private(folder, Counted(1.0, sample_rate=1e-9))
    update = client.train(client.parameters(), batch(0, 4), steps=2)
    assert update.examples == 2 and norm_of(dict(update.difference)) > 0


def test_steps_are_counted_in_the_state_and_end_with_the_budget(folder: Path, tmp_path: Path) -> None:
    privacy = Counted(1.0, sample_rate=0.5, max_epsilon=10)
    client = private(folder, privacy)
    start = client.parameters()
    for _ in range(2):
        client.train(start, batch(0, 4), steps=4)
    assert client.metrics() == {"epsilon": 8.0}
    CheckpointState.save_checkpoint(client.state, tmp_path / "checkpoint")
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(folder / "training_model.onnx", state)
    later = PrivateClient(state, module, Optimizer(folder / "optimizer_model.onnx", module), privacy)
    before = later.parameters()
    with pytest.raises(PrivacyBudgetError, match="after this round epsilon is 12: more than max_epsilon=10"):
        later.train(start, batch(0, 4), steps=4)
    for name, array in later.parameters().items():
        np.testing.assert_array_equal(array, before[name])
    later.train(start, batch(0, 4), steps=2)
    # other settings are counted beside, not instead
    other = PrivateClient(state, module, later.optimizer, Counted(2.0, sample_rate=0.5))
    other.train(start, batch(0, 4), steps=1)
    assert other.epsilon == 11


MISTAKES = {
    "batches": ([batch(0, 4)], {"steps": 1}, "as many examples each"),
    "arrays of two lengths": ((batch(0, 4)[0], batch(0, 5)[1]), {"steps": 1}, r"\(4, 4\), \(5,\)"),
    "nothing": ((), {"steps": 1}, "as many examples each"),
    "no number of steps": (batch(0, 4), {}, "steps is None"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_it_does_not_take_is_said(name: str, folder: Path) -> None:
    examples, options, message = MISTAKES[name]
    client = private(folder, Counted(1.0, sample_rate=0.5))
    with pytest.raises(ValueError, match=message):
        client.train(client.parameters(), examples, **options)
    assert "privacy_steps" not in client.state.properties


@pytest.mark.parametrize(
    "change",
    [{"noise_multiplier": 0.0}, {"sample_rate": 1.5}, {"max_grad_norm": math.inf}, {"delta": 1.0},
     {"max_epsilon": -1.0}],
    ids=str,
)  # fmt: skip
def test_settings_that_hide_nothing_are_errors(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        Privacy(**{"noise_multiplier": 1.0, "sample_rate": 0.1, **change})


def test_batch_norm_is_refused(tmp_path: Path) -> None:
    generate_artifacts(
        normalized(), requires_grad=NORMALIZED, loss=LossType.CrossEntropyLoss, optimizer=OptimType.SGD,
        artifact_directory=tmp_path,
    )  # fmt: skip
    with pytest.raises(ValueError, match="remembers examples without noise"):
        private(tmp_path, Counted(1.0, sample_rate=0.5))


def test_the_accountant_is_a_library_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "dp_accounting", None)
    with pytest.raises(OnwardError, match="dp-accounting") as error:
        Privacy(1.0, sample_rate=0.01).epsilon(100)
    assert error.value.hint == "pip install onward[privacy]"


def test_the_accountant_knows_the_published_numbers() -> None:
    pytest.importorskip("dp_accounting", reason="an extra: pip install onward[privacy]")
    # Abadi et al., 2016, section 3.2: 1.26 by the moments accountant, 9.34 by the strong composition theorem
    epsilon = Privacy(4.0, sample_rate=0.01, delta=1e-5).epsilon(10_000)
    assert 0.8 < epsilon < 1.26
    few, many = Privacy(1.0, sample_rate=0.01), Privacy(2.0, sample_rate=0.01)
    together = few._epsilon({(0.01, 1.0): 500, (0.01, 2.0): 500})
    assert many.epsilon(1000) < together < few.epsilon(1000)


def test_the_settings_of_the_example_learn_digits_within_their_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clients of the example in one process: its simulation, Flower's, is a test of its own."""
    pytest.importorskip("dp_accounting", reason="an extra: pip install onward[privacy]")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    monkeypatch.delitem(sys.modules, "federated_private", raising=False)
    example, digits = (importlib.import_module(name) for name in ("federated_private", "federated_digits"))
    example.write_artifacts(tmp_path)
    images, labels = example.read_digits()
    clients = {str(index): example.make_client(tmp_path, None) for index in range(2)}
    server = Server(clients["0"].parameters())
    for _ in range(6):
        server.average(
            {
                name: client.train(
                    server.parameters,
                    (images[600 * int(name) :][:600], labels[600 * int(name) :][:600]),
                    steps=example.STEPS,
                )
                for name, client in clients.items()
            }
        )
    # a guess is right for one digit of ten; the noise differs from run to run
    assert digits.accuracy(server, tmp_path, (images[1200:], labels[1200:])) > 0.5
    assert 1 < clients["0"].epsilon < 2
