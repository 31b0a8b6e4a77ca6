"""Clients reach together what one process reaches with all data; what a client may send is checked."""

from __future__ import annotations

import dataclasses
import logging
import types
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from onward import checkpoint
from onward.api import CheckpointState, Module, Optimizer
from onward.artifacts import LossType, OptimType, generate_artifacts
from onward.errors import CheckpointError, NonFiniteError, OnwardError
from onward.federated import (
    Client,
    Server,
    Update,
    UpdateError,
    flower_client,
    flower_strategy,
    parameters_of,
)
from small_models import CLASSIFIER, NORMALIZED, batch, classifier, normalized, one_thread, with_weights

DIGITS = Path(__file__).parents[2] / "examples" / "data" / "digits.npz"


def make_client(folder: Path) -> Client:
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(
        folder / "training_model.onnx", state, folder / "eval_model.onnx", session_options=one_thread()
    )
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(5e-3)
    return Client(state, module, optimizer)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Artifacts of a network with batch norm."""
    folder = tmp_path_factory.mktemp("normalized")
    generate_artifacts(
        normalized(), requires_grad=NORMALIZED, loss=LossType.CrossEntropyLoss, optimizer=OptimType.AdamW,
        artifact_directory=folder, portable=True,
    )  # fmt: skip
    return folder


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Artifacts of a classifier of 8×8 digits."""
    folder = tmp_path_factory.mktemp("digits")
    model = with_weights(
        """net (float[n, 64] x) => (float[n, 10] scores) {
            a = Gemm <transB = 1> (x, w1, b1)  b = Relu (a)  scores = Gemm <transB = 1> (b, w2, b2) }""",
        w1=(48, 64), b1=(48,), w2=(10, 48), b2=(10,),
    )  # fmt: skip
    generate_artifacts(
        model, requires_grad=["w1", "b1", "w2", "b2"], loss=LossType.CrossEntropyLoss,
        optimizer=OptimType.AdamW, artifact_directory=folder,
    )  # fmt: skip
    return folder


def load_digits() -> tuple[np.ndarray, np.ndarray]:
    data = np.load(DIGITS)
    return data["x"].reshape(-1, 64).astype(np.float32) / 16, data["y"].astype(np.int64)


def in_batches(
    x: np.ndarray, y: np.ndarray, seed: int, size: int = 20
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    order = np.random.default_rng(seed).permutation(len(y))
    for first in range(0, len(y), size):
        chosen = order[first : first + size]
        yield x[chosen], y[chosen]


def accuracy(client: Client, x: np.ndarray, y: np.ndarray, folder: Path) -> float:
    client.module.export_model_for_inferencing(folder / "model.onnx", ["scores"])
    (scores,) = ort.InferenceSession(folder / "model.onnx", one_thread()).run(None, {"x": x})
    return float(np.mean(np.argmax(np.asarray(scores), axis=1) == y))


def test_two_clients_reach_the_accuracy_of_one_process_with_all_data(digits: Path, tmp_path: Path) -> None:
    x, y = load_digits()
    train, test = (x[:1200], y[:1200]), (x[1200:], y[1200:])
    # of unequal size, and one has mostly low digits
    first = (train[1] < 5) ^ (np.random.default_rng(0).random(1200) < 0.3)
    shares = [(train[0][chosen], train[1][chosen]) for chosen in (first, ~first)]
    clients = [make_client(digits) for _ in shares]
    server = Server(clients[0].parameters())
    for number in range(60):
        updates = {
            f"client{i}": client.train(server.parameters, in_batches(*share, seed=number), steps=10)
            for i, (client, share) in enumerate(zip(clients, shares))
        }
        report = server.average(updates)
        assert set(report.weights) == set(updates)
    clients[0].load(server.parameters)
    together = accuracy(clients[0], *test, tmp_path)

    alone = make_client(digits)
    for number in range(60):
        alone.train(alone.parameters(), in_batches(*train, seed=number), steps=10)
    whole = accuracy(alone, *test, tmp_path)
    assert whole > 0.88
    assert together >= whole - 0.01


def test_a_round_is_load_steps_and_the_difference(small: Path) -> None:
    client, plain = make_client(small), make_client(small)
    start = client.parameters()
    batches = [batch(seed, 4) for seed in range(5)]
    update = client.train(start, batches, steps=3)
    for inputs in batches[:3]:
        plain.module(*inputs)
        plain.optimizer.step()
        plain.module.lazy_reset_grad()
    after = plain.parameters()
    assert update.examples == 12
    assert update.difference.keys() == start.keys() >= set(client.module.signature.statistics)
    assert client.module.signature.statistics
    for name, array in after.items():
        np.testing.assert_array_equal(
            start[name] + update.difference[name], start[name] + (array - start[name])
        )


def test_one_round_of_equal_clients_is_one_client(small: Path) -> None:
    clients = [make_client(small) for _ in range(3)]
    server = Server(clients[0].parameters())
    updates = {str(i): c.train(server.parameters, [batch(0, 4)]) for i, c in enumerate(clients)}
    server.average(updates)
    for name, array in clients[0].parameters().items():
        np.testing.assert_allclose(server.parameters[name], array, rtol=1e-6, atol=1e-7)


def test_a_portable_state_is_an_update_too(small: Path, tmp_path: Path) -> None:
    client = make_client(small)
    statistics = client.module.signature.statistics
    start = parameters_of(small / "state.bin", statistics)
    update = client.train(start, [batch(0, 4)])
    CheckpointState.save_checkpoint(client.state, tmp_path / "after")
    layout = small / "state.bin"
    checkpoint.to_portable(checkpoint.load(tmp_path / "after"), tmp_path / "after.bin", layout=layout)
    again = Update.between(layout, tmp_path / "after.bin", examples=4, statistics=statistics)
    assert again.layout == update.layout
    for name, array in update.difference.items():
        np.testing.assert_array_equal(again.difference[name], array)
    server = Server(start, min_updates=1)
    server.average({"a": update})
    made = server.into(checkpoint.from_portable(layout))
    checkpoint.to_portable(made, tmp_path / "next.bin", layout=layout)
    found = parameters_of(tmp_path / "next.bin", statistics)
    for name, array in server.parameters.items():
        np.testing.assert_array_equal(found[name], array)


def test_updates_travel_as_bytes(small: Path) -> None:
    client = make_client(small)
    server = Server(client.parameters())
    update = client.train(server.parameters, [batch(0, 4)])
    again = server.receive(update.to_bytes(), sender="phone")
    assert (again.examples, again.layout) == (update.examples, update.layout)
    for name, array in update.difference.items():
        np.testing.assert_array_equal(again.difference[name], array)


# ---- what a server does not take ------------------------------------------------------------------------


def simple(*values: float, examples: int = 1) -> Update:
    return Update.between(
        {"w": np.zeros(2, np.float32)}, {"w": np.array(values, np.float32)}, examples=examples
    )


def simple_server(**options: object) -> Server:
    return Server({"w": np.zeros(2, np.float32)}, **options)  # type: ignore[arg-type]


BAD = {
    "nan": (simple(np.nan, 0), "not finite, in 'w'"),
    "infinite": (simple(np.inf, 0), "not finite, in 'w'"),
    "another shape": (Update.between({"w": np.zeros(3)}, {"w": np.ones(3)}, examples=1), "another model"),
    "another name": (
        Update.between({"v": np.zeros(2, np.float32)}, {"v": np.ones(2, np.float32)}, examples=1), "another model"
    ),
    "a false digest": (
        dataclasses.replace(simple(1, 1), difference={"w": np.ones(3, np.float32)}), "another model"
    ),
    "no examples": (simple(1, 1, examples=0), "trained on 0 examples"),
    "too many examples": (simple(1, 1, examples=10**9), "trained on 1000000000 examples"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_update_is_left_out_of_the_round(name: str) -> None:
    update, said = BAD[name]
    server = simple_server()
    report = server.average({"a": simple(1, 0), "b": simple(0, 1), "bad": update})
    assert said in report.refused["bad"]
    assert set(report.weights) == {"a", "b"}
    np.testing.assert_array_equal(server.parameters["w"], [0.5, 0.5])


def test_too_few_good_updates_change_nothing() -> None:
    server = simple_server()
    with pytest.raises(OnwardError, match=r"1 good updates and needs 2 .min_updates.; refused: 'bad' sent"):
        server.average({"a": simple(1, 0), "bad": BAD["nan"][0]})
    np.testing.assert_array_equal(server.parameters["w"], [0, 0])
    assert server.rounds == 0


def test_an_update_far_larger_than_others_is_scaled_down() -> None:
    server = simple_server()
    report = server.average({"a": simple(1, 0), "b": simple(0, 1), "loud": simple(3e6, 0)})
    assert report.clipped == ["loud"]
    np.testing.assert_allclose(server.parameters["w"], [4 / 3, 1 / 3], rtol=1e-6)
    server = simple_server(max_norm=0.5, clip_factor=None, learning_rate=2.0)
    assert server.average({"a": simple(1, 0), "b": simple(0, 1)}).clipped == ["a", "b"]
    np.testing.assert_allclose(server.parameters["w"], [0.5, 0.5], rtol=1e-6)


def test_a_mean_that_overflows_changes_nothing() -> None:
    server = simple_server(clip_factor=None)
    largest = float(np.finfo(np.float32).max)
    server.average({"a": simple(largest, 0), "b": simple(largest, 0)})
    with pytest.raises(OnwardError, match="overflows in 'w'; nothing was changed"):
        server.average({"a": simple(largest, 0), "b": simple(largest, 0)})
    assert server.parameters["w"][0] == largest


def test_bytes_that_are_no_update_are_refused() -> None:
    server, good = simple_server(), simple(1, 0).to_bytes()
    for size in range(0, len(good), 37):
        with pytest.raises(CheckpointError):
            server.receive(good[:size])
    for place in range(0, len(good), 41):
        with pytest.raises(CheckpointError):
            server.receive(good[:place] + bytes([good[place] ^ 0x40]) + good[place + 1 :])
    with pytest.raises(UpdateError, match="'flood' sent 1000000 bytes; an update of this model has at most"):
        server.receive(bytes(1_000_000), sender="flood")
    other = Update.between({"v": np.zeros(1)}, {"v": np.ones(1)}, examples=1)
    with pytest.raises(UpdateError, match="another model"):
        server.receive(other.to_bytes())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"min_updates": 0}, "min_updates is 0"),
        ({"clip_factor": -1.0}, "clip_factor is -1.0"),
        ({"max_norm": float("nan")}, "max_norm is nan"),
        ({"max_examples": 0}, "max_examples is 0"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0"),
    ],
)
def test_settings_are_checked(options: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        simple_server(**options)


def test_a_client_refuses_the_parameters_of_another_model(small: Path, tmp_path: Path) -> None:
    generate_artifacts(
        classifier(), requires_grad=CLASSIFIER, loss=LossType.CrossEntropyLoss, optimizer=OptimType.AdamW,
        artifact_directory=tmp_path,
    )  # fmt: skip
    client, other = make_client(small), make_client(tmp_path)
    before = client.parameters()
    with pytest.raises(
        ValueError, match=r"the server's parameters are not this model's: '.*' is on one side only"
    ):
        client.load(other.parameters())
    wrong = {**before, "w1": before["w1"].T.copy()}
    with pytest.raises(ValueError, match="'w1' is float32"):
        client.load(wrong)
    with pytest.raises(ValueError, match="parameter 'w1' is not finite"):
        client.load({**before, "w1": np.full_like(before["w1"], np.nan)})
    for name, array in client.parameters().items():
        np.testing.assert_array_equal(array, before[name])


def test_a_round_that_is_not_finite_or_empty_sends_nothing(small: Path) -> None:
    client = make_client(small)
    x, labels = batch(0, 4)
    with pytest.raises(NonFiniteError):
        client.train(client.parameters(), [(np.full_like(x, np.nan), labels)])
    with pytest.raises(ValueError, match="at least one batch"):
        client.train(client.parameters(), [])
    with pytest.raises(ValueError, match="steps is 0"):
        client.train(client.parameters(), [(x, labels)], steps=0)


# ---- Flower -----------------------------------------------------------------------------------------------


def test_flower_is_asked_for_by_name_where_it_is_missing(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "flwr", None)
    with pytest.raises(OnwardError, match=r"pip install onward\[federated\]"):
        flower_client(make_client(small), lambda number: [])


def test_flower_trains_as_client_and_server_do(small: Path, caplog: pytest.LogCaptureFixture) -> None:
    flwr = pytest.importorskip("flwr", reason="Flower is an extra: pip install onward[federated]")
    common = pytest.importorskip("flwr.common")
    assert flwr is not None
    data = [[batch(10 * i + j, 4) for j in range(2 + i)] for i in range(2)]

    def evaluate(client: Client) -> tuple[float, int, dict[str, float]]:
        client.module.eval()
        loss = float(client.module(*data[0][0]))
        client.module.train()
        return loss, 4, {}

    own = [make_client(small) for _ in data]
    flowers = [
        flower_client(client, lambda number, batches=batches: batches, evaluate=evaluate)
        for client, batches in zip(own, data)
    ]
    server, plain = Server(own[0].parameters()), Server(own[0].parameters())
    strategy = flower_strategy(server)
    twins = [make_client(small) for _ in data]
    sent = strategy.initialize_parameters(client_manager=None)
    for number in (1, 2):
        config = strategy.on_fit_config_fn(number)
        results, arrays, metrics = [], [], {}
        for index, flower in enumerate(flowers):
            arrays, examples, metrics = flower.fit(common.parameters_to_ndarrays(sent), config)
            result = common.FitRes(
                common.Status(common.Code.OK, ""), common.ndarrays_to_parameters(arrays), examples, metrics
            )
            results.append((types.SimpleNamespace(cid=str(index)), result))
        # and one who sends what is no number, which is left out
        spoiled = common.ndarrays_to_parameters([np.full_like(array, np.nan) for array in arrays])
        bad = common.FitRes(common.Status(common.Code.OK, ""), spoiled, 4, metrics)
        garbage = common.FitRes(
            common.Status(common.Code.OK, ""), common.Parameters([b"\x80\x04."], "numpy.ndarray"), 4, {}
        )
        results += [(types.SimpleNamespace(cid="bad"), bad), (types.SimpleNamespace(cid="garbage"), garbage)]
        with caplog.at_level(logging.WARNING):
            sent, metrics = strategy.aggregate_fit(number, results, [])
        assert metrics["refused"] == 2
        assert "'bad' sent numbers that are not finite" in caplog.text
        plain.average(
            {str(i): t.train(plain.parameters, batches) for i, (t, batches) in enumerate(zip(twins, data))}
        )
    for name, array in plain.parameters.items():
        np.testing.assert_array_equal(server.parameters[name], array)
    loss, count, _ = flowers[0].evaluate(common.parameters_to_ndarrays(sent), config)
    assert np.isfinite(loss) and count == 4
    with pytest.raises(OnwardError, match="the server trains another model"):
        flowers[0].fit(common.parameters_to_ndarrays(sent)[:-1], config)
    with pytest.raises(ValueError, match="initial_parameters is given by the server"):
        flower_strategy(server, initial_parameters=sent)


def test_the_optimizer_s_state_stays_in_flower_s_context_from_client_to_client(small: Path) -> None:
    """Flower makes a client for each message: three of them train as one that stays."""
    common = pytest.importorskip("flwr.common", reason="Flower is an extra: pip install onward[federated]")
    starts: list[bytes | None] = []

    def make(content: bytes | None) -> Client:
        starts.append(content)
        if content is None:
            return make_client(small)
        state = CheckpointState.load_checkpoint(content)
        module = Module(small / "training_model.onnx", state, session_options=one_thread())
        return Client(state, module, Optimizer(small / "optimizer_model.onnx", module))

    data = [batch(index, 4) for index in range(3)]
    context = types.SimpleNamespace(state=common.RecordDict())
    staying = make_client(small)
    parameters = staying.parameters()
    for _ in range(3):
        arrays, examples, _ = flower_client(make, lambda number: data, context=context).fit(
            list(parameters.values()), {}
        )
        update = staying.train(parameters, data)
        assert examples == 12
        for array, difference in zip(arrays, update.difference.values(), strict=True):
            np.testing.assert_array_equal(array, difference)
    assert starts[0] is None and all(isinstance(content, bytes) for content in starts[1:])
    with pytest.raises(ValueError, match="give a function that makes a Client"):
        flower_client(staying, lambda number: data, context=context)


def test_flower_is_told_which_clients_evaluate_and_asks_none_unless_told(small: Path) -> None:
    client_module = pytest.importorskip(
        "flwr.client", reason="Flower is an extra: pip install onward[federated]"
    )
    client = make_client(small)
    silent = flower_client(client, lambda number: [])
    able = flower_client(client, lambda number: [], evaluate=lambda client: (0.5, 3, {}))
    method = client_module.NumPyClient.evaluate
    assert type(silent).evaluate is method and type(able).evaluate is not method
    assert able.evaluate(list(client.parameters().values()), {}) == (0.5, 3, {})
    server = Server(client.parameters())
    assert flower_strategy(server).fraction_evaluate == 0.0
    assert flower_strategy(server, fraction_evaluate=0.5).fraction_evaluate == 0.5
