"""An elementwise rule over all parameters as one vector, on the host or on a device, in place.

On the host it runs in blocks that fit the cache. A part of a block whose gradient and state are all zero, and always
were, is skipped if the rule would not change it: most of an embedding table, for a long time.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnxruntime as ort

from onward import contract
from onward.contract import SCALARS
from onward.errors import MAKE_ARTIFACTS, ModelError
from onward.graph.proto.optimizer_models import as_rows, fuse_multiply_add, leaves_alone, number_type, repeat
from onward.model_metadata import read_table
from onward.ort_session import quiet_options
from onward.runtime.bound import RecordingError, inputs_on_host, make_recording, warn_unrecorded
from onward.runtime.environment import processors
from onward.runtime.memory import FlatBuffer, Tensor, make_tensor
from onward.runtime.optimizers.updater import (
    ElementwiseUpdater,
    NamedUpdater,
    ResidentUpdater,
    Rule,
    SequenceUpdater,
    Slots,
    Updater,
    group_of,
    runs_of,
)
from onward.runtime.sessions import ModelFile, make_session, read_model, require_one_set
from onward.runtime.tensors import run_bound

if TYPE_CHECKING:
    from onward.runtime.devices import Device
    from onward.runtime.memory import FlatBuffer

# Elements of one run: few enough that temporaries stay in the cache, many enough that a run's overhead is small.
_LEAST, _MOST = 1 << 16, 1 << 18
# Elements that are left alone together.
_PIECE = 1 << 13


class _Block:
    """A stretch of the vector with the number of its settings, and which of its pieces have been moved."""

    def __init__(self, start: int, stop: int, setting: int, gradient: np.ndarray, *, rests: bool) -> None:
        self.start, self.stop, self.setting = start, stop, setting
        # a zero may be negative, which as bits is not zero: that piece is moved, to no effect
        bits = gradient.view(np.uint32 if gradient.itemsize == 4 else np.uint64) if rests else None
        self._bits = None if bits is None else bits.reshape(-1, min(_PIECE, stop - start))
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

    def __init__(
        self,
        session: ort.InferenceSession,
        blocks: list[_Block],
        bind: Callable[[ort.InferenceSession, slice, int], ort.IOBinding],
    ) -> None:
        self._session, self._blocks, self._bind = session, blocks, bind
        # made when first needed: of whole blocks, and of pieces by where they begin
        self._whole: list[ort.IOBinding | None] = [None] * len(blocks)
        self._pieces: dict[int, ort.IOBinding] = {}

    def run(self) -> None:
        for index, block in enumerate(self._blocks):
            pieces = block.pieces() if block.rests else None
            if pieces is not None:
                self._run_pieces(block, pieces)
                continue
            binding = self._whole[index]
            if binding is None:
                whole = slice(block.start, block.stop)
                binding = self._whole[index] = self._bind(self._session, whole, block.setting)
            run_bound(self._session, binding)

    def _run_pieces(self, block: _Block, pieces: Sequence[int]) -> None:
        for part in map(block.piece, pieces):
            binding = self._pieces.get(part.start)
            if binding is None:
                binding = self._pieces[part.start] = self._bind(self._session, part, block.setting)
            run_bound(self._session, binding)


class HostUpdater(ElementwiseUpdater):
    """Applies an elementwise optimizer model to blocks of the parameters, on several threads of the CPU."""

    is_host_vector = True

    def __init__(
        self, rule: Rule, parameters: FlatBuffer, gradients: FlatBuffer, *, threads: int = 1
    ) -> None:
        super().__init__(rule, parameters, gradients)
        self._options = rule.options
        self._models = {scaled: as_rows(variant) for scaled, variant in self._models.items()}
        # Elsewhere Gemm may fuse multiply and add without rounding in between, which changes last digits.
        if platform.machine().lower() in ("x86_64", "amd64"):
            for scaled, variant in self._models.items():
                self._program, self._models[scaled] = fuse_multiply_add(variant, self._program, SCALARS)
        self._scalars = self._new_scalars()  # the fusion has scalars of its own
        rests = parameters.vector.size > _LEAST and _rests(rule)
        self._blocks = list(self._cut(rests, threads))
        # waking a thread takes some 20 µs: it must have a few blocks to do
        self._workers = max(1, min(threads, len(self._blocks) // 4))
        self._bound: dict[bool, list[_Share]] = {}
        self._pool: ThreadPoolExecutor | None = None
        if self._workers > 1:
            self._pool = ThreadPoolExecutor(self._workers - 1, thread_name_prefix="onward-optimizer")

    def _apply(self) -> None:
        scaled = self._set_scalars()
        shares = self._bound.get(scaled) or self._shares(scaled=scaled)
        if self._pool is None:
            shares[0].run()
            return
        # onnxruntime lets go of Python's lock while it runs, so these run at once
        waiting = [self._pool.submit(share.run) for share in shares[1:]]
        shares[0].run()
        for future in waiting:
            future.result()

    def load(self, step: int, slots: Slots) -> None:
        super().load(step, slots)
        for block in self._blocks:
            # State that is not zero moves a parameter even without a gradient: momentum.
            if any(flat.vector[block.start : block.stop].any() for flat in self._slots.values()):
                block.wake()

    # ---- many updates in one graph -------------------------------------------------------------------

    def rows_model(self, *, scaled: bool) -> onnx.ModelProto:
        """The rule over rows, with its scalars as inputs; with `scaled`, it multiplies gradients by a scale."""
        return self._models[scaled]

    @property
    def scalars_need_scale(self) -> bool:
        """Whether a scalar depends on the gradients' scale, which then must be known before the run."""
        position = SCALARS.index("gradient_scale")
        return any(position in (first, second) for _, first, second, _ in self._program.steps)

    def settings_runs(self) -> list[tuple[int, int, int]]:
        """Stretches of the vector that share their settings: start, stop, and the place of the settings."""
        return runs_of(self._options, self._parameters)

    def scalars(self, rate: float, step: int, setting: int) -> dict[str, float]:
        """The scalars of an update, by the names of the model's inputs."""
        values = self._scalar_values(setting, rate, step, 1.0)
        return {**dict(zip(self._scalar_names, values)), "step": step}

    def take_over(self, updates: int) -> None:
        """Count updates that something else made to parameters and state."""
        self._step[0] += updates
        for block in self._blocks:
            block.wake()

    def _cut(self, rests: bool, threads: int) -> Iterable[_Block]:
        """Runs of parameters that share their settings, in blocks; what may rest has no broken pieces."""
        size = min(max(self._parameters.vector.size // (8 * threads) // _PIECE * _PIECE, _LEAST), _MOST)
        for start, stop, setting in self.settings_runs():
            resting = rests and self._settings[setting][1] == 0.0
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

    def _bind(self, session: ort.InferenceSession, part: slice, setting: int) -> ort.IOBinding:
        binding: ort.IOBinding = session.io_binding()
        names = {value.name for value in session.get_inputs()}
        pairs = {"parameter": self._parameters.vector, **{n: flat.vector for n, flat in self._slots.items()}}
        inputs = {name: vector[part] for name, vector in pairs.items()} | self._scalar_views(setting)
        inputs |= {"gradient": self._gradients.vector[part], "step": self._step}
        for name, array in inputs.items():
            if name in names:
                binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array[np.newaxis]))
        for name, vector in pairs.items():
            target = vector[part]
            # The output is the input's own memory: elementwise, each number is read before it is written.
            binding.bind_output(
                f"{name}{contract.NEXT}", "cpu", 0, target.dtype, [1, target.size], target.ctypes.data
            )
        return binding


def _stretches(start: int, stop: int, size: int) -> list[tuple[int, int]]:
    return [(first, min(first + size, stop)) for first in range(start, stop, size)]


def _rests(rule: Rule) -> bool:
    """Whether the rule leaves a parameter with zero gradient, state and weight decay exactly as it is."""
    session = _single_threaded(rule.model.SerializeToString())
    state = ["parameter", *rule.options["slots"]]
    names = [f"{name}{contract.NEXT}" for name in state]
    inputs = {value.name for value in session.get_inputs()}
    kind = onnx.helper.tensor_dtype_to_np_dtype(number_type(rule.model))
    return leaves_alone(lambda feeds: session.run(names, feeds), inputs, state, (9,), kind)


def _single_threaded(data: bytes) -> ort.InferenceSession:
    options = quiet_options(threads=1)
    options.inter_op_num_threads = 1
    return make_session(data, options=options, what="optimizer model")


# --- The same on a device: one run for all of the vector. The rule is repeated for stretches of it, so that what is in
# between stays in the device's cache and takes little memory.

# Elements of a stretch, which begins at a multiple of so many.
_MOST_ON_DEVICE, _ALIGN = 1 << 21, 1 << 10


class DeviceUpdater(ElementwiseUpdater):
    """Applies an elementwise optimizer model in place, on the parameters' device.

    What a step's scalars come to is computed on the host and copied as one small vector.
    """

    def __init__(self, rule: Rule, parameters: FlatBuffer, gradients: FlatBuffer) -> None:
        super().__init__(rule, parameters, gradients)
        self._runs = [
            (first, last, setting)
            for start, stop, setting in runs_of(rule.options, parameters)
            for first, last in _cut_vector(start, stop)
        ]
        self._numbers: Tensor = make_tensor(parameters.device, np.concatenate(self._scalars))
        self._count: Tensor = make_tensor(parameters.device, self._step)
        self._bound: dict[bool, _BoundRule] = {}

    def _apply(self) -> None:
        scaled = self._set_scalars()
        self._numbers.write(np.concatenate(self._scalars))
        if scaled not in self._bound:
            self._bound[scaled] = self._bind(scaled, record=True)
        if self._bound[scaled].reads("step"):  # most rules read it by way of the program alone
            self._count.write(self._step)
        try:
            self._bound[scaled].run()
        except RecordingError as error:
            warn_unrecorded("update", error)
            self._bound[scaled] = self._bind(scaled, record=False)
            self._bound[scaled].run()

    def _bind(self, scaled: bool, *, record: bool) -> _BoundRule:
        """A session of the rule for every stretch, bound to the vectors."""
        names = self._scalar_names
        model = repeat(
            self._models[scaled],
            shared=[{name: f"{name}.{setting}" for name in names} for _, _, setting in self._runs],
            own=["parameter", "gradient", *self._slots],
            shapes=[[stop - start] for start, stop, _ in self._runs],
        )
        whole = {"parameter": self._parameters, **self._slots}
        inputs: dict[str, Tensor] = {"step": self._count}
        outputs: dict[str, Tensor] = {}
        for index, (start, stop, setting) in enumerate(self._runs):
            for name, flat in whole.items():
                part = flat.whole.view(start, [stop - start])
                inputs[f"{name}.{index}"] = outputs[f"{name}.next.{index}"] = part
            inputs[f"gradient.{index}"] = self._gradients.whole.view(start, [stop - start])
            for position, name in enumerate(names, setting * len(names)):
                inputs[f"{name}.{setting}"] = self._numbers.view(position, [1])
        changed = [flat.whole for flat in whole.values()]
        return _BoundRule(model, self._parameters.device, inputs, outputs, changed, record=record)


def _cut_vector(start: int, stop: int) -> list[tuple[int, int]]:
    """Cut a part of the vector into stretches of about the same length.

    >>> _cut_vector(0, 5_000_000)
    [(0, 1667072), (1667072, 3334144), (3334144, 5000000)]
    """
    count = max(1, -(-(stop - start) // _MOST_ON_DEVICE))
    size = -(-(stop - start) // (count * _ALIGN)) * _ALIGN
    return [(first, min(first + size, stop)) for first in range(start, stop, size)] if size else []


class _BoundRule:
    """A session with its binding; recorded where the device can. `changed` is what a run changes."""

    def __init__(
        self,
        model: onnx.ModelProto,
        device: Device,
        inputs: dict[str, Tensor],
        outputs: dict[str, Tensor],
        changed: Sequence[Tensor],
        *,
        record: bool,
    ) -> None:
        self._changed = changed
        self._recorded = not (device.captures and record)
        try:
            self._session = make_session(
                model, device=device, what="optimizer model", capture=not self._recorded
            )
            self._rebinds = bool(inputs_on_host(self._session, device))
        except ModelError:
            if self._recorded:
                raise
            self._rebinds = True
        # A replay reads addresses: what the host holds would be the first step's numbers for ever.
        if self._rebinds and not self._recorded:
            self._recorded = True
            self._session = make_session(model, device=device, what="optimizer model")
            self._rebinds = bool(inputs_on_host(self._session, device))
        self._inputs = {value.name: inputs[value.name] for value in self._session.get_inputs()}
        self._outputs = outputs  # a binding holds addresses only
        self._binding: ort.IOBinding = self._session.io_binding()
        for name, tensor in self._inputs.items():
            tensor.bind_input(self._binding, name)
        for name, tensor in outputs.items():
            tensor.bind_output(self._binding, name)

    def reads(self, name: str) -> bool:
        """Whether the session has an input of this name."""
        return name in self._inputs

    def run(self) -> None:
        """One update."""
        if not self._recorded:
            make_recording(self._run, self._changed)
            self._recorded = True
        self._run()

    def _run(self) -> None:
        if self._rebinds:  # what the session reads on the host, it copies when it is bound
            for name, tensor in self._inputs.items():
                tensor.bind_input(self._binding, name)
        run_bound(self._session, self._binding)


# --- Which updater a model of an optimizer gets.


def make_updater(
    source: ModelFile,
    parameters: FlatBuffer,
    gradients: FlatBuffer,
    *,
    threads: int | None = None,
    artifacts_id: str = "",
) -> Updater:
    """The updater that fits the model's form and the memory; as many threads as the machine has, up to eight.

    `artifacts_id` is that of the training model: an optimizer model of other artifacts is refused.
    """
    rule = _read(source)
    about = {entry.key: entry.value for entry in rule.model.metadata_props}
    require_one_set("optimizer", about.get(contract.ARTIFACTS, ""), artifacts_id)
    try:
        return _make_updater(rule, parameters, gradients, threads)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ModelError(
            f"the optimizer model does not fit what its metadata says ({type(error).__name__}: {error}); "
            "make the artifacts again",
            hint=MAKE_ARTIFACTS,
        ) from error


def _make_updater(rule: Rule, parameters: FlatBuffer, gradients: FlatBuffer, threads: int | None) -> Updater:
    if rule.options.get("sequences"):
        return SequenceUpdater(rule.model, parameters, gradients)
    report = None
    if parameters.device.memory == "resident":
        # graphs in ONNX's textual syntax: only where they are needed
        from onward.runtime.device_check import check_device

        report = check_device(parameters.device)
    if rule.options["elementwise"]:
        if report is not None:
            return ResidentUpdater(rule, parameters, gradients, report)
        if not parameters.on_host:
            return DeviceUpdater(rule, parameters, gradients)
        return HostUpdater(rule, parameters, gradients, threads=threads or min(processors(), 8))
    if report is not None:
        report.fit(rule.model, parameters.device, "optimizer model")
    return NamedUpdater(rule, parameters, gradients)


def group_order(source: ModelFile, parameters: FlatBuffer) -> list[str]:
    """An order of the parameters in which those of the same settings lie together."""
    options = _read(source).options
    groups = group_of(options) if options.get("elementwise") else {}
    return sorted(parameters.spans, key=lambda name: groups.get(name, 0))


def _read(source: ModelFile) -> Rule:
    model = read_model(source, "optimizer")
    about = {entry.key: entry.value for entry in model.metadata_props}
    if contract.OPTIMIZER not in about and {"params", "gradients"} <= {i.name for i in model.graph.input}:
        return Rule(model, {"name": model.graph.name, "sequences": True})  # as `onnxblock.optim` builds it
    if contract.OPTIMIZER not in about:
        raise ModelError(
            "this is not an optimizer model of Onward: make it with onward.artifacts", hint=MAKE_ARTIFACTS
        )
    return Rule(model, read_table(about, contract.OPTIMIZER))
