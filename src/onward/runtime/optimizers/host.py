"""An elementwise rule over all parameters as one vector of host memory: in place, in blocks that fit the cache.

A part of a block whose gradient and state are all zero, and always were, is skipped if the rule would not change
it: most of an embedding table, for a long time.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime as ort

from onward import contract
from onward.graph.passes.multiply_add import as_rows, fuse_multiply_add
from onward.graph.passes.scalars import ScalarProgram, split_scalars, to_single, without_scaling
from onward.runtime.bound import run_bound
from onward.runtime.optimizers.updater import SCALARS, ElementwiseUpdater, Slots, runs_of, settings_of
from onward.runtime.sessions import make_session

if TYPE_CHECKING:
    from onward.runtime.memory import FlatBuffer

__all__ = ["HostUpdater"]

# Elements of one run: few enough that temporaries stay in the cache, many enough that a run's overhead is small.
_LEAST, _MOST = 1 << 16, 1 << 18
# Elements that are left alone together.
_PIECE = 1 << 13


class _Setting:
    """The scalars of a group of parameters, in memory that bindings alias."""

    def __init__(self, rate_scale: float, decay: float, computed: Sequence[str]) -> None:
        self._rate_scale, self.decay = rate_scale, to_single(decay)
        self._rate, self._decay = np.zeros(1, np.float32), np.full(1, decay, np.float32)
        self._computed = {name: np.zeros(1, np.float32) for name in computed}

    def update(self, program: ScalarProgram, rate: float, step: int, scale: float) -> None:
        """Compute what follows from the learning rate and the step."""
        self._rate[0] = rate = to_single(rate * self._rate_scale)
        for array, value in zip(self._computed.values(), program.run(rate, step, scale, self.decay)):
            array[0] = value

    def arrays(self) -> dict[str, np.ndarray]:
        """The scalars by the names of the model's inputs."""
        return {"learning_rate": self._rate, "weight_decay": self._decay, **self._computed}


class _Block:
    """A stretch of the vector with its scalars, and which of its pieces have been moved."""

    def __init__(
        self, start: int, stop: int, setting: _Setting, gradient: np.ndarray, *, rests: bool
    ) -> None:
        self.start, self.stop, self.setting = start, stop, setting
        # a zero may be negative, which as bits is not zero: that piece is moved, to no effect
        self._bits = gradient.view(np.uint32).reshape(-1, min(_PIECE, stop - start)) if rests else None
        self._awake = np.zeros(0 if self._bits is None else len(self._bits), bool)

    @property
    def rests(self) -> bool:
        """Whether a part of it may never have been moved."""
        return self._bits is not None

    def wake(self) -> None:
        """Count all of it as moved."""
        self._bits = None

    def pieces(self) -> list[int] | None:
        """The pieces to update, or None for the whole block at once."""
        if self._bits is None:
            return None
        self._awake |= self._bits.max(axis=1) > 0
        if 2 * np.count_nonzero(self._awake) > len(self._awake):
            self._bits = None
            return None
        return np.flatnonzero(self._awake).tolist()

    def piece(self, index: int) -> slice:
        """Where a piece lies in the vector."""
        start = self.start + index * _PIECE
        return slice(start, min(start + _PIECE, self.stop))


class _Share:
    """What one thread does of an update."""

    def __init__(self, session: ort.InferenceSession, blocks: list[_Block], bind: Callable[..., Any]) -> None:
        self._session, self._bind = session, bind
        self._given = {value.name for value in session.get_inputs()}
        self._blocks = blocks
        # bindings are made when first needed: of whole blocks, and of pieces by where they begin
        self._whole: list[Any] = [None] * len(blocks)
        self._pieces: dict[int, Any] = {}

    def run(self) -> None:
        for index, block in enumerate(self._blocks):
            pieces = block.pieces() if block.rests else None
            if pieces is not None:
                for piece in pieces:
                    self._run_piece(block, block.piece(piece))
                continue
            binding = self._whole[index]
            if binding is None:
                part = slice(block.start, block.stop)
                binding = self._whole[index] = self._bind(self._session, self._given, part, block.setting)
            run_bound(self._session, binding)

    def _run_piece(self, block: _Block, part: slice) -> None:
        binding = self._pieces.get(part.start)
        if binding is None:
            binding = self._pieces[part.start] = self._bind(self._session, self._given, part, block.setting)
        run_bound(self._session, binding)


class HostUpdater(ElementwiseUpdater):
    """Applies an elementwise optimizer model to blocks of the parameters, on several threads of the CPU."""

    is_host_vector = True

    def __init__(
        self,
        model: onnx.ModelProto,
        options: dict,
        parameters: FlatBuffer,
        gradients: FlatBuffer,
        *,
        threads: int = 1,
    ) -> None:
        super().__init__(options, parameters, gradients)
        self._options = options
        self._program, plain = split_scalars(model, SCALARS)
        self._models = {True: as_rows(plain), False: as_rows(without_scaling(plain))}
        if platform.machine().lower() in ("x86_64", "amd64"):
            for scaled, variant in self._models.items():
                self._program, self._models[scaled] = fuse_multiply_add(variant, self._program, SCALARS)
        self._settings = [
            _Setting(scale, decay, self._program.results) for scale, decay in settings_of(options)
        ]
        rests = parameters.vector.size > _LEAST and _rests(model, options["slots"])
        self._blocks = list(self._cut(options, rests, threads))
        # a thread must have a few blocks to do before it is worth waking
        self._workers = max(1, min(threads, len(self._blocks) // 4))
        self._bound: dict[bool, list[_Share]] = {}
        self._pool: ThreadPoolExecutor | None = None
        if self._workers > 1:
            self._pool = ThreadPoolExecutor(self._workers - 1, thread_name_prefix="onward-optimizer")

    def _apply(self) -> None:
        scale = self._scale.item()
        for setting in self._settings:
            setting.update(self._program, self._learning_rate, self.step, scale)
        shares = self._bound.get(scale != 1.0) or self._shares(scaled=scale != 1.0)
        if self._pool is None:
            shares[0].run()
            return
        waiting = [self._pool.submit(share.run) for share in shares[1:]]
        shares[0].run()
        for future in waiting:
            future.result()

    def load(self, step: int, slots: Slots) -> None:
        super().load(step, slots)
        for block in self._blocks:
            if any(flat.vector[block.start : block.stop].any() for flat in self._slots.values()):
                block.wake()

    # ---- many updates in one graph -------------------------------------------------------------------

    def rows_model(self, *, scaled: bool) -> onnx.ModelProto:
        """The rule over rows, with its scalars as inputs; with `scaled`, it multiplies gradients by a scale."""
        return self._models[scaled]

    @property
    def scalars_need_scale(self) -> bool:
        """Whether a scalar depends on the gradients' scale, which then must be known before the run."""
        place = SCALARS.index("gradient_scale")
        return any(place in (first, second) for _, first, second, _ in self._program.steps)

    def settings_runs(self) -> list[tuple[int, int, int]]:
        """Stretches of the vector that share their settings: start, stop, and the place of the settings."""
        return runs_of(self._options, self._parameters)

    def scalars(self, rate: float, step: int, setting: int) -> dict[str, float]:
        """The scalars of an update, by the names of the model's inputs."""
        chosen = self._settings[setting]
        chosen.update(self._program, rate, step, 1.0)
        return {**{name: array.item() for name, array in chosen.arrays().items()}, "step": step}

    def take_over(self, updates: int) -> None:
        """Count updates that something else made to parameters and state."""
        self._step[0] += updates
        for block in self._blocks:
            block.wake()

    def _cut(self, options: dict, rests: bool, threads: int) -> Iterable[_Block]:
        """Runs of parameters that share their settings, in blocks; what may rest has no broken pieces."""
        size = min(max(self._parameters.vector.size // (8 * threads) // _PIECE * _PIECE, _LEAST), _MOST)
        for start, stop, index in runs_of(options, self._parameters):
            setting = self._settings[index]
            resting = rests and setting.decay == 0.0
            even = start + (stop - start) // _PIECE * _PIECE if resting else stop
            for first, last in [*_stretches(start, even, size), *_stretches(even, stop, size)]:
                gradient = self._gradients.vector[first:last]
                yield _Block(first, last, setting, gradient, rests=resting)

    def _shares(self, *, scaled: bool) -> list[_Share]:
        """Sessions and bindings of every thread; those without gradient scaling save a pass over memory."""
        if scaled not in self._bound:
            data = self._models[scaled].SerializeToString()
            self._bound[scaled] = [
                _Share(_single_threaded(data), self._blocks[worker :: self._workers], self._bind)
                for worker in range(self._workers)
            ]
        return self._bound[scaled]

    def _bind(
        self, session: ort.InferenceSession, given: Collection[str], part: slice, setting: _Setting
    ) -> Any:
        binding = session.io_binding()
        pairs = {"parameter": self._parameters.vector, **{n: flat.vector for n, flat in self._slots.items()}}
        inputs = {name: vector[part] for name, vector in pairs.items()} | setting.arrays()
        inputs |= {
            "gradient": self._gradients.vector[part],
            "step": self._step,
            "gradient_scale": self._scale,
        }
        for name, array in inputs.items():
            if name in given:
                binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array[np.newaxis]))
        for name, vector in pairs.items():
            target = vector[part]
            binding.bind_output(
                f"{name}{contract.NEXT}", "cpu", 0, np.float32, [1, target.size], target.ctypes.data
            )
        return binding._iobinding


def _stretches(start: int, stop: int, size: int) -> list[tuple[int, int]]:
    return [(first, min(first + size, stop)) for first in range(start, stop, size)]


def _rests(model: onnx.ModelProto, slots: Sequence[str]) -> bool:
    """Whether the rule leaves a parameter with zero gradient, state and weight decay exactly as it is."""
    session = _single_threaded(model.SerializeToString())
    given = {value.name for value in session.get_inputs()}
    parameter = np.linspace(-2, 2, 9, dtype=np.float32)
    zeros = np.zeros_like(parameter)
    feeds: dict[str, np.ndarray] = {"parameter": parameter, "gradient": zeros, **dict.fromkeys(slots, zeros)}
    feeds |= {"learning_rate": np.full(1, 0.1, np.float32), "gradient_scale": np.ones(1, np.float32)}
    feeds["weight_decay"] = np.zeros(1, np.float32)
    for step in (1, 2, 1000):
        feeds["step"] = np.full(1, step, np.int64)
        names = ["parameter.next", *(f"{slot}{contract.NEXT}" for slot in slots)]
        # the runtime may write into what it is fed
        results = session.run(names, {key: value.copy() for key, value in feeds.items() if key in given})
        wanted = [parameter, *[zeros] * len(slots)]
        if not all(np.array_equal(np.asarray(a), b) for a, b in zip(results, wanted)):
            return False
    return True


def _single_threaded(data: bytes) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.log_severity_level = 4
    return make_session(data, options=options, what="optimizer model")
