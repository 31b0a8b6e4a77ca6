"""Runs the optimizer model over flat buffers, in place and in blocks that fit the cache."""

from __future__ import annotations

import abc
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx
import onnxruntime as ort

from onward.errors import ModelError, OnwardError
from onward.runtime.flat import FlatBuffer
from onward.runtime.sessions import ModelFile, make_session, read_model, run_bound

__all__ = ["FlatUpdater", "Slots", "Updater", "make_updater"]

# Elements of one run: small enough that parameter, gradient, state and temporaries stay in the cache.
_BLOCK = 1 << 16
Slots = dict[str, dict[str, np.ndarray]]


class Updater(abc.ABC):
    """What an optimizer model does to the parameters; the scalars are in memory that bindings alias."""

    def __init__(self, clip_norm: float | None = None) -> None:
        self.clip_norm = clip_norm
        self._learning_rate = 1e-3
        self._rate = np.full(1, 1e-3, np.float32)
        self._step = np.zeros(1, np.int64)
        self._scale = np.ones(1, np.float32)

    @property
    def learning_rate(self) -> float:
        """The rate of the next update."""
        return self._learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self._learning_rate = value
        self._rate[0] = value

    @property
    def step(self) -> int:
        """How many updates were made."""
        return int(self._step[0])

    def run(self, gradient_scale: float) -> None:
        """One update."""
        self._step[0] += 1
        self._scale[0] = gradient_scale
        self._apply()

    def load(self, step: int, slots: Slots) -> None:
        """Take over the state of an earlier run."""
        self._step[0] = step
        for parameter, state in self.slots_by_parameter().items():
            for name, array in state.items():
                if parameter in slots and name in slots[parameter]:
                    _copy_state(array, slots[parameter][name], parameter, name)

    @abc.abstractmethod
    def _apply(self) -> None: ...

    @abc.abstractmethod
    def slots_by_parameter(self) -> Slots:
        """The state tensors themselves, by parameter and slot."""


def make_updater(
    source: ModelFile, parameters: FlatBuffer, gradients: FlatBuffer, *, threads: int | None = None
) -> Updater:
    """The updater that fits an optimizer model's form; as many threads as the machine has, up to eight."""
    model = read_model(source, "optimizer")
    about = {entry.key: entry.value for entry in model.metadata_props}
    if "onward.optimizer" not in about:
        raise ModelError("this is not an optimizer model of Onward: make it with onward.artifacts")
    options = json.loads(about["onward.optimizer"])
    if options.get("sequences"):
        return SequenceUpdater(model, parameters, gradients)
    if options["elementwise"]:
        return FlatUpdater(model, options, parameters, gradients, threads=threads or _threads())
    return NamedUpdater(model, options, parameters, gradients)


class FlatUpdater(Updater):
    """An elementwise rule over all parameters as one vector."""

    def __init__(
        self,
        model: onnx.ModelProto,
        options: dict,
        parameters: FlatBuffer,
        gradients: FlatBuffer,
        *,
        threads: int = 1,
    ) -> None:
        super().__init__(options["clip_norm"])
        self._parameters = parameters
        self._slots = {
            name: FlatBuffer({key: view.shape for key, view in parameters.views.items()})
            for name in options["slots"]
        }
        self._groups: list[tuple[float, np.ndarray]] = []
        data = model.SerializeToString()
        blocks = list(self._blocks(options))
        self._pool: ThreadPoolExecutor | None = None
        workers = min(threads, len(blocks)) or 1
        self._sessions = [_single_threaded(data) for _ in range(workers)]
        self._shares: list[list] = [
            [self._bind(self._sessions[w], block, gradients) for block in blocks[w::workers]]
            for w in range(workers)
        ]
        if workers > 1:
            self._pool = ThreadPoolExecutor(workers - 1, thread_name_prefix="onward-optimizer")

    def _apply(self) -> None:
        for factor, rate in self._groups:
            rate[0] = self._rate[0] * factor
        if self._pool is None:
            _run_all(self._sessions[0], self._shares[0])
            return
        waiting = [
            self._pool.submit(_run_all, s, share) for s, share in zip(self._sessions[1:], self._shares[1:])
        ]
        _run_all(self._sessions[0], self._shares[0])
        for future in waiting:
            future.result()

    def slots_by_parameter(self) -> Slots:
        return {
            parameter: {name: flat.views[parameter] for name, flat in self._slots.items()}
            for parameter in self._parameters.views
        }

    def slot_vectors(self) -> dict[str, np.ndarray]:
        """Each slot of all parameters as one vector."""
        return {name: flat.vector for name, flat in self._slots.items()}

    def _blocks(self, options: dict) -> Iterable[tuple[int, int, np.ndarray, np.ndarray]]:
        """(start, stop, learning rate, weight decay) of runs of parameters that share their settings."""
        of_parameter = {name: i for i, group in enumerate(options["groups"]) for name in group["parameters"]}
        decay = np.full(1, options["weight_decay"], np.float32)
        settings: dict[int | None, tuple[np.ndarray, np.ndarray]] = {None: (self._rate, decay)}
        self._settings = settings  # bindings hold addresses only: keep what they point to
        for index, group in enumerate(options["groups"]):
            rate = self._rate
            if group["learning_rate_scale"] != 1.0:
                rate = np.zeros(1, np.float32)
                self._groups.append((group["learning_rate_scale"], rate))
            own = group["weight_decay"]
            settings[index] = rate, decay if own is None else np.full(1, own, np.float32)
        runs: list[list] = []
        names = list(self._parameters.spans)
        for position, name in enumerate(names):
            start = self._parameters.spans[name][0]
            stop = (
                self._parameters.spans[names[position + 1]][0]
                if position + 1 < len(names)
                else self._parameters.vector.size
            )
            group = of_parameter.get(name)
            if runs and runs[-1][2] == group:
                runs[-1][1] = stop
            else:
                runs.append([start, stop, group])
        for start, stop, group in runs:
            for first in range(start, stop, _BLOCK):
                yield first, min(first + _BLOCK, stop), *settings[group]

    def _bind(self, session: ort.InferenceSession, block: tuple, gradients: FlatBuffer):
        start, stop, rate, decay = block
        binding = session.io_binding()
        given = {value.name for value in session.get_inputs()}
        pairs = {"parameter": self._parameters.vector, **{n: flat.vector for n, flat in self._slots.items()}}
        inputs = {name: vector[start:stop] for name, vector in pairs.items()}
        inputs |= {"gradient": gradients.vector[start:stop], "learning_rate": rate, "weight_decay": decay}
        inputs |= {"step": self._step, "gradient_scale": self._scale}
        for name, array in inputs.items():
            if name in given:
                binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
        for name, vector in pairs.items():
            part = vector[start:stop]
            binding.bind_output(f"{name}.next", "cpu", 0, np.float32, [part.size], part.ctypes.data)
        return binding._iobinding


class NamedUpdater(Updater):
    """A rule that sees whole parameters: the optimizer model has inputs and outputs for each by name."""

    def __init__(
        self, model: onnx.ModelProto, options: dict, parameters: FlatBuffer, gradients: FlatBuffer
    ) -> None:
        super().__init__(options["clip_norm"])
        self._session = make_session(model, providers=["CPUExecutionProvider"], what="optimizer model")
        shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.input}
        self._slots: Slots = {
            name: {slot: np.zeros(shapes[f"{name}.{slot}"], np.float32) for slot in options["slots"]}
            for name in parameters.views
        }
        decay = np.full(1, options["weight_decay"], np.float32)
        arrays = {"learning_rate": self._rate, "step": self._step}
        arrays |= {"gradient_scale": self._scale, "weight_decay": decay}
        self._decay = decay  # bindings hold addresses only: keep what they point to
        state = {f"{n}.{slot}": array for n, slots in self._slots.items() for slot, array in slots.items()}
        arrays |= {**parameters.views, **{f"{n}_grad": view for n, view in gradients.views.items()}, **state}
        self._binding = self._session.io_binding()
        for value in self._session.get_inputs():
            self._binding.bind_ortvalue_input(
                value.name, ort.OrtValue.ortvalue_from_numpy(arrays[value.name])
            )
        for name, array in {**parameters.views, **state}.items():
            self._binding.bind_output(
                f"{name}.next", "cpu", 0, np.float32, list(array.shape), array.ctypes.data
            )

    def _apply(self) -> None:
        run_bound(self._session, self._binding._iobinding)

    def slots_by_parameter(self) -> Slots:
        return self._slots


class SequenceUpdater(Updater):
    """A user's own optimizer block: lists of tensors in, lists of tensors out."""

    _MOMENTS = ("first_order_moments", "second_order_moments", "third_order_moments")

    def __init__(self, model: onnx.ModelProto, parameters: FlatBuffer, gradients: FlatBuffer) -> None:
        super().__init__()
        self._session = make_session(model, providers=["CPUExecutionProvider"], what="optimizer model")
        self._inputs = {value.name for value in self._session.get_inputs()}
        self._outputs = [value.name for value in self._session.get_outputs()]
        if "updated_params" not in self._outputs:
            raise ModelError(
                "the optimizer model gives no output 'updated_params': a standard graph cannot write its inputs, "
                f"so it must return what it updates (it has {', '.join(self._outputs)})"
            )
        self._parameters, self._gradients = parameters, gradients
        self._slots: dict[str, dict[str, np.ndarray]] = {
            moment: {name: np.zeros_like(view) for name, view in parameters.views.items()}
            for moment in self._MOMENTS
            if moment in self._inputs
        }

    def _apply(self) -> None:
        feeds: dict = {
            "params": list(self._parameters.views.values()),
            "gradients": [view * self._scale for view in self._gradients.views.values()],
            "learning_rate": self._rate,
            "step": self._step,
            **{moment: list(arrays.values()) for moment, arrays in self._slots.items()},
        }
        feeds = {name: value for name, value in feeds.items() if name in self._inputs}
        results: dict = dict(zip(self._outputs, self._session.run(None, feeds)))
        targets = {"updated_params": self._parameters.views}
        targets |= {f"updated_{moment}": arrays for moment, arrays in self._slots.items()}
        for name, arrays in targets.items():
            for array, new in zip(arrays.values(), list(results[name])):
                np.copyto(array, new)

    def slots_by_parameter(self) -> Slots:
        return {
            name: {f"momentum{index}": arrays[name] for index, arrays in enumerate(self._slots.values())}
            for name in self._parameters.views
        }


def _copy_state(target: np.ndarray, saved: np.ndarray, parameter: str, slot: str) -> None:
    if saved.shape != target.shape:
        raise OnwardError(
            f"the checkpoint's {slot} of '{parameter}' has shape {saved.shape}, the optimizer keeps {target.shape}: "
            "was it saved with another optimizer?"
        )
    np.copyto(target, saved)


def _run_all(session: ort.InferenceSession, bindings: list) -> None:
    for binding in bindings:
        run_bound(session, binding)


def _single_threaded(data: bytes) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return make_session(data, providers=["CPUExecutionProvider"], options=options, what="optimizer model")


def _threads() -> int:
    count = getattr(os, "process_cpu_count", os.cpu_count)() or 1
    return min(count, 8)
