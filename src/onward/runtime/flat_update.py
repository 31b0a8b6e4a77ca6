"""An elementwise rule over all parameters as one vector: in place, in blocks that fit the cache.

A block whose gradient and state are all zero, and always were, is left alone where the rule would not move
it: most of an embedding table, for a long time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from onward.runtime.flat import FlatBuffer
from onward.runtime.sessions import make_session, run_bound
from onward.runtime.updater import Slots, Updater

__all__ = ["FlatUpdater"]

# Elements of one run: small enough that parameter, gradient, state and temporaries stay in the cache.
_BLOCK = 1 << 16


@dataclasses.dataclass(slots=True)
class _Block:
    """A stretch of the vector, its binding, its gradient as bits, and whether it has never been moved."""

    start: int
    stop: int
    binding: Any
    gradient_bits: np.ndarray
    resting: bool


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
        rests = len(blocks) > 1 and _rests(self._sessions[0], options["slots"])
        self._shares: list[list[_Block]] = [
            [self._bind(self._sessions[w], block, gradients, rests=rests) for block in blocks[w::workers]]
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

    def load(self, step: int, slots: Slots) -> None:
        super().load(step, slots)
        for share in self._shares:
            for block in share:
                block.resting = block.resting and not any(
                    flat.vector[block.start : block.stop].any() for flat in self._slots.values()
                )

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

    def _bind(
        self, session: ort.InferenceSession, block: tuple, gradients: FlatBuffer, *, rests: bool
    ) -> _Block:
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
        bits = gradients.vector[start:stop].view(np.uint32)
        return _Block(start, stop, binding._iobinding, bits, resting=rests and float(decay[0]) == 0.0)


def _rests(session: ort.InferenceSession, slots: Sequence[str]) -> bool:
    """Whether the rule leaves a parameter with zero gradient, state and weight decay exactly as it is."""
    given = {value.name for value in session.get_inputs()}
    parameter = np.linspace(-2, 2, 9, dtype=np.float32)
    zeros = np.zeros_like(parameter)
    feeds: dict[str, np.ndarray] = {"parameter": parameter, "gradient": zeros, **dict.fromkeys(slots, zeros)}
    feeds |= {"learning_rate": np.full(1, 0.1, np.float32), "gradient_scale": np.ones(1, np.float32)}
    feeds["weight_decay"] = np.zeros(1, np.float32)
    for step in (1, 2, 1000):
        feeds["step"] = np.full(1, step, np.int64)
        names = ["parameter.next", *(f"{slot}.next" for slot in slots)]
        # the runtime may write into what it is fed
        results = session.run(names, {key: value.copy() for key, value in feeds.items() if key in given})
        wanted = [parameter, *[zeros] * len(slots)]
        if not all(np.array_equal(np.asarray(a), b) for a, b in zip(results, wanted)):
            return False
    return True


def _run_all(session: ort.InferenceSession, blocks: list[_Block]) -> None:
    for block in blocks:
        if block.resting:
            if not block.gradient_bits.max():
                continue
            block.resting = False
        run_bound(session, block.binding)


def _single_threaded(data: bytes) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return make_session(data, providers=["CPUExecutionProvider"], options=options, what="optimizer model")
