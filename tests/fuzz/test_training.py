"""Training as a state machine: whatever is done in whatever order, it stays what a plain model of it says.

The plain model is the network, its gradients and AdamW in numpy, in float64. Hypothesis chooses what happens:
batches, updates, saves, loads, other devices and numbers of ranks, exports, wrong batches, and kills while a
checkpoint is written. A fixed few in CI, many more by `make fuzz`.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import os
import queue
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from onward import checkpoint
from onward.api import CheckpointState, Module, Optimizer
from onward.distributed import RunnerSettings
from onward.distributed.data_parallel import DataParallel
from onward.errors import NonFiniteError
from onward.onnxblock import optim
from onward.runtime.devices import Device
from onward.train.artifact_set import find_artifacts
from onward.train.engines import EngineSettings
from onward.train.progress import Position
from onward.train.window import ReadAhead, Window
from small_models import batch, one_thread, write_classifier

LONG = "ONWARD_FUZZ" in os.environ
RATE, EPSILON, DECAY = 0.05, 1e-3, 0.01
DEVICES = [Device("cpu"), Device("cpu", memory="device"), Device("cpu", memory="copied")]


@pytest.fixture(scope="module", autouse=True)
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> None:
    rule = optim.AdamW(eps=EPSILON, weight_decay=DECAY)
    Training.artifacts = write_classifier(tmp_path_factory.mktemp("artifacts"), optimizer=rule)


@dataclasses.dataclass
class Plain:
    """The classifier and AdamW as the books have them."""

    weights: dict[str, np.ndarray]
    gradients: dict[str, np.ndarray] | None = None
    moments: dict[str, list[np.ndarray]] = dataclasses.field(default_factory=dict)
    updates: int = 0
    epoch: int = 0

    def scores(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        hidden = np.tanh(x @ self.weights["w1"] + self.weights["b1"])
        return hidden, hidden @ self.weights["w2"] + self.weights["b2"]

    def loss(self, x: np.ndarray, labels: np.ndarray) -> float:
        scores = self.scores(x)[1]
        highest = scores.max(axis=1, keepdims=True)
        logs = scores - highest - np.log(np.exp(scores - highest).sum(axis=1, keepdims=True))
        return float(-logs[np.arange(len(labels)), labels].mean())

    def gradient(self, x: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
        x = x.astype(np.float64)
        hidden, scores = self.scores(x)
        raised = np.exp(scores - scores.max(axis=1, keepdims=True))
        dscores = (raised / raised.sum(axis=1, keepdims=True) - np.eye(3)[labels]) / len(labels)
        dhidden = dscores @ self.weights["w2"].T * (1 - hidden**2)
        return {"w1": x.T @ dhidden, "b1": dhidden.sum(0), "w2": hidden.T @ dscores, "b2": dscores.sum(0)}

    def accumulate(self, x: np.ndarray, labels: np.ndarray) -> None:
        new = self.gradient(x, labels)
        self.gradients = {k: new[k] + (self.gradients[k] if self.gradients else 0) for k in new}

    def update(self) -> None:
        assert self.gradients is not None
        self.updates += 1
        for name, weight in self.weights.items():
            first, second = self.moments.setdefault(name, [np.zeros_like(weight), np.zeros_like(weight)])
            gradient = self.gradients[name]
            first += 0.1 * (gradient - first)
            second += 0.001 * (gradient**2 - second)
            spread = np.sqrt(second / (1 - 0.999**self.updates)) + EPSILON
            self.weights[name] = weight * (1 - RATE * DECAY) - RATE * first / (1 - 0.9**self.updates) / spread
        self.gradients = None


class Ranks:
    """Ranks that are threads of one process, and what they send each other."""

    def __init__(self, world: int) -> None:
        self.world, self._barrier = world, threading.Barrier(world, timeout=60)
        self._held: list[np.ndarray] = [np.zeros(0)] * world
        self.sent = {(a, b): queue.Queue[np.ndarray]() for a in range(world) for b in range(world)}

    def run(self, job: Callable[[Rank], Any]) -> list[Any]:
        found: list[Any] = [None] * self.world

        def work(rank: int) -> None:
            try:
                found[rank] = job(Rank(self, rank))
            except BaseException as error:
                found[rank] = error
                self._barrier.abort()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in found:
            if isinstance(result, BaseException):
                raise result
        return found

    def exchange(self, rank: int, array: np.ndarray) -> list[np.ndarray]:
        """What every rank gave."""
        self._held[rank] = array.copy()
        self._barrier.wait()
        given = list(self._held)
        self._barrier.wait()
        return given


def _read(buffer: Any) -> np.ndarray:
    return buffer if isinstance(buffer, np.ndarray) else buffer.read()


def _write(buffer: Any, array: np.ndarray) -> None:
    if isinstance(buffer, np.ndarray):
        buffer[...] = array
    else:
        buffer.write(array)


class Rank:
    """A `Communicator` of a thread."""

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self._ranks, self.rank, self.world = ranks, rank, ranks.world

    def all_reduce(self, array: Any, *, compress: bool = False) -> None:
        _write(array, np.sum(self._ranks.exchange(self.rank, _read(array)), axis=0))

    def reduce_scatter(self, array: Any, bounds: Sequence[int], *, compress: bool = False) -> None:
        own, made = slice(bounds[self.rank], bounds[self.rank + 1]), _read(array).copy()
        made[own] = sum(given[own] for given in self._ranks.exchange(self.rank, made))
        _write(array, made)

    def all_gather(self, array: Any, bounds: Sequence[int]) -> None:
        given = self._ranks.exchange(self.rank, _read(array))
        parts = [given[rank][bounds[rank] : bounds[rank + 1]] for rank in range(self.world)]
        _write(array, np.concatenate(parts))

    def broadcast(self, array: Any, *, root: int = 0) -> None:
        _write(array, self._ranks.exchange(self.rank, _read(array))[root])

    def send(self, array: Any, *, to: int) -> None:
        self._ranks.sent[self.rank, to].put(_read(array).copy())

    def receive(self, array: Any, *, source: int) -> None:
        _write(array, self._ranks.sent[source, self.rank].get(timeout=60))

    def close(self) -> None:
        pass


def killed_at(event: int, work: Callable[[], object]) -> bool:
    """Do something in a process that kills itself at its so many-th call of the system; whether it got to the end."""
    child = os.fork()
    if child == 0:
        gc.disable()  # sessions that nobody holds any more would wait for threads, which a fork does not have
        seen = 0

        def count(name: str, arguments: tuple) -> None:
            nonlocal seen
            seen += name.startswith(("open", "os.", "fcntl"))
            if seen == event:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.addaudithook(count)
            work()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status == 0 or os.WIFSIGNALED(status)
    return status == 0


class Training(RuleBasedStateMachine):
    """What people do to a training run, in any order."""

    artifacts: Path
    saved = Bundle("saved")

    @initialize(device=st.sampled_from(DEVICES))
    def begin(self, device: Device) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.counter = 0
        self.open(self.artifacts / "checkpoint", device)
        self.optimizer.set_learning_rate(RATE)
        weights = {name: np.float64(parameter.data) for name, parameter in self.state.parameters}
        self.plain = Plain(weights)

    def open(self, path: Path, device: Device) -> None:
        """What a new process does."""
        self.device = device
        self.state = CheckpointState.load_checkpoint(path)
        self.module = Module(
            self.artifacts / "training_model.onnx", self.state, self.artifacts / "eval_model.onnx",
            device=device, session_options=one_thread(),
        )  # fmt: skip
        self.optimizer = Optimizer(self.artifacts / "optimizer_model.onnx", self.module)

    @rule(seed=st.integers(0, 99), size=st.integers(1, 7))
    def learn(self, seed: int, size: int) -> None:
        x, labels = batch(seed, size)
        self.module.train()
        loss = self.module(x, labels)[0]
        np.testing.assert_allclose(np.ravel(loss)[0], self.plain.loss(x, labels), rtol=2e-4, atol=1e-5)
        self.plain.accumulate(x, labels)

    @precondition(lambda self: self.plain.gradients is not None)
    @rule()
    def update(self) -> None:
        assert self.optimizer.step()
        self.module.lazy_reset_grad()
        self.plain.update()

    @rule()
    def forget_gradients(self) -> None:
        self.module.lazy_reset_grad()
        self.plain.gradients = None

    @rule(seed=st.integers(0, 99))
    def a_wrong_batch_changes_nothing(self, seed: int) -> None:
        x, labels = batch(seed)
        self.module.train()
        with pytest.raises(ValueError):
            self.module(x, labels + 7)
        x[0, 0] = np.nan
        if self.plain.gradients is None:  # what is accumulated is spoiled by a batch that is not finite
            with pytest.raises(NonFiniteError):
                self.module(x, labels)
                self.optimizer.step()
            self.module.lazy_reset_grad()

    @rule(epoch=st.integers(0, 2**40))
    def note_the_epoch(self, epoch: int) -> None:
        self.state.properties["epoch"] = epoch
        self.plain.epoch = epoch

    @rule(seed=st.integers(0, 99))
    def evaluate(self, seed: int) -> None:
        x, labels = batch(seed)
        self.module.eval()
        loss = self.module(x, labels)[0]
        np.testing.assert_allclose(np.ravel(loss)[0], self.plain.loss(x, labels), rtol=2e-4, atol=1e-5)

    @rule(target=saved)
    def save(self) -> tuple[Path, Plain]:
        self.counter += 1
        path = self.folder / f"checkpoint-{self.counter}"
        CheckpointState.save_checkpoint(self.state, path, include_optimizer_state=True)
        return path, copy.deepcopy(self.plain)

    @rule(entry=saved, device=st.sampled_from(DEVICES))
    def load(self, entry: tuple[Path, Plain], device: Device) -> None:
        """Resume, maybe elsewhere."""
        path, plain = entry
        self.open(path, device)
        self.plain = copy.deepcopy(plain)

    @rule(entry=saved)
    def save_again_and_load(self, entry: tuple[Path, Plain]) -> None:
        """What was loaded and saved at once is the same file."""
        path, _ = entry
        again = self.folder / "again"
        checkpoint.save(checkpoint.load(path), again)
        assert again.read_bytes() == path.read_bytes()

    @precondition(lambda self: hasattr(os, "fork"))
    @rule(event=st.integers(1, 60))
    def kill_a_save(self, event: int) -> None:
        path = self.folder / "latest"
        shutil.copy(self.artifacts / "checkpoint", path)
        before = path.read_bytes()
        self.state.to_data(include_optimizer_state=True)  # brings what a device has to the host
        data = self.state.to_data(include_optimizer_state=True)
        done = killed_at(event, lambda: checkpoint.save(data, path))
        if not done and path.read_bytes() == before:
            checkpoint.load(path)
            return
        self.open(path, self.device)  # the new one, whole

    @rule(world=st.integers(1, 3), seed=st.integers(0, 99), size=st.integers(3, 7), sharded=st.booleans())
    def update_on_ranks(self, world: int, seed: int, size: int, sharded: bool) -> None:
        """One update by so many ranks, from the state as it is; gradients so far are forgotten."""
        self.forget_gradients()
        path = self.folder / "ranks"
        CheckpointState.save_checkpoint(self.state, path, include_optimizer_state=True)
        x, labels = batch(seed, size)
        chosen = RunnerSettings(artifacts=self.artifacts, learning_rate=RATE, shard_optimizer=sharded)

        def rank(comm: Rank) -> None:
            files, options = find_artifacts(self.artifacts), EngineSettings(seed=None)
            engine = DataParallel(files, checkpoint.load(path), options, chosen, comm)
            engine.optimizer.set_learning_rate(RATE)
            share = ReadAhead(iter([(x[comm.rank :: world], labels[comm.rank :: world])]))
            position = Position()
            report = engine.backward(Window(share, position, size=1, check_interrupt=lambda: None))
            assert report.failure is None, report.failure
            assert engine.update(weight=size, unit=position.unit, invalid=None)
            data = engine.gather(include_optimizer_state=True)
            if data is not None:
                checkpoint.save(data, path)

        Ranks(world).run(rank)
        self.plain.accumulate(x, labels)
        self.plain.update()
        self.open(path, self.device)
        self.optimizer.set_learning_rate(RATE)

    @rule(seed=st.integers(0, 99))
    def export(self, seed: int) -> None:
        path = self.folder / "model.onnx"
        self.module.export_model_for_inferencing(path, ["scores"])
        x, _ = batch(seed)
        (scores,) = ort.InferenceSession(path, one_thread()).run(None, {"x": x})
        np.testing.assert_allclose(scores, self.plain.scores(x)[1], rtol=1e-3, atol=1e-4)

    @invariant()
    def the_state_is_what_it_should_be(self) -> None:
        if not hasattr(self, "plain"):
            return
        for name, parameter in self.state.parameters:
            np.testing.assert_allclose(parameter.data, self.plain.weights[name], rtol=1e-3, atol=1e-4)
        assert dict(self.state.properties).get("epoch", 0) == self.plain.epoch
        assert self.optimizer.get_learning_rate() == pytest.approx(RATE)

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)


# runs move between one process and two on purpose
TestTraining = pytest.mark.filterwarnings("ignore::onward.runtime.environment.EnvironmentWarning")(
    Training.TestCase
)
TestTraining.settings = settings(
    max_examples=400 if LONG else 10,
    stateful_step_count=25 if LONG else 10, derandomize=not LONG,
    database=None, deadline=None, suppress_health_check=list(HealthCheck),
)  # fmt: skip
