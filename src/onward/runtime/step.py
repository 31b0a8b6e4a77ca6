"""One training step and one evaluation, bound to the memory of training without needless copies."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import onnx
import onnxruntime as ort

from onward import contract
from onward.contract import BUFFER, OUT, SEED
from onward.errors import DeviceError, ModelError
from onward.graph.proto.accumulation import scatter_in_place, specialize_reset
from onward.graph.proto.device_forms import expand_batch_norm, prefer_device_forms
from onward.graph.proto.known_shapes import (
    has_processor_forms,
    leaves_images_open,
    resolve_symbols,
    specialize_shapes,
)
from onward.graph.proto.small_images import batch_convolutions, has_small_images
from onward.graph.proto.static_masks import simplify_static_masks
from onward.ort_session import array_of, shape_of
from onward.runtime.bound import Bound, DeviceBound, RecordingError, bind, warn_unrecorded
from onward.runtime.devices import Device, is_checked
from onward.runtime.memory import HostTensor, ModelMemory, Tensor, make_small_tensor
from onward.runtime.sessions import (
    ModelBeside,
    ModelFile,
    constants_as_inputs,
    has_external_constants,
    make_session,
    read_model,
    session_beside,
)
from onward.runtime.signature import Signature, read_signature, step_seed

if TYPE_CHECKING:
    from onward.ort_session import Feed
    from onward.runtime.device_check import DeviceReport

# Puts the fastest forms into a training model for inputs of known shapes.
Tune = Callable[[onnx.ModelProto, Mapping[str, Sequence[int]], "ort.SessionOptions | None"], object]

# Sessions made for the shapes of a batch that are kept, and how often a shape must come to replace one of them.
# A session takes as much memory as a run's activations: with padding to many lengths, not one for each.
_KEPT, _OFTEN = 4, 8
# Part of the largest number by which an output may differ: rounding adds up from layer to layer, and what is computed
# wrong is off by far more.
_LARGEST_GAP = 1e-3


class Step(Protocol):
    """The interface between `Module` and what runs its training model."""

    signature: Signature

    def attach(self, memory: ModelMemory) -> None:
        """Set the step's memory; called again when its layout has changed."""
        ...

    def run(self, feeds: list[Feed], *, reset: bool, seed: int, step: int) -> list[np.ndarray]:
        """The loss and the additional outputs; gradients land in their buffers."""
        ...

    def gradients_changed(self) -> None:
        """Say that something else than a step wrote into the memory of gradients."""
        ...


class _ModelStep:
    """A model of the artifacts in its role, and how its sessions are made."""

    def __init__(
        self,
        source: ModelFile,
        role: Literal["training", "eval"],
        *,
        device: Device,
        options: ort.SessionOptions | None,
        outputs: Sequence[str] = (),
    ) -> None:
        self._model = with_outputs(read_model(source, role), outputs)
        path = "model in memory"
        self._folder: Path | None = None  # where its external data lies
        if isinstance(source, str | os.PathLike):
            path, self._folder = os.fspath(source), Path(source).resolve().parent
        elif isinstance(source, ModelBeside):
            self._folder = source.folder
        self._what = f"{role} model '{path}'"
        self.signature = read_signature(self._model, path, role)
        self._device, self._options = device, options
        self._report = _report_of(device)

    def _load(
        self, model: onnx.ModelProto, device: Device, *, capture: bool = False
    ) -> tuple[ort.InferenceSession, dict[str, Tensor]]:
        """A session of the model or of what was made of it, and what to bind to inputs that it has for constants."""
        constants: dict[str, Tensor] = {}
        how: dict[str, Any] = {"device": device, "options": self._options, "capture": capture}
        if self._folder is not None and has_external_constants(model):
            if device.memory != "host":  # the runtime finds external data beside the file that it loads
                return session_beside(model, os.fspath(self._folder / "model"), **how), constants
            model, constants = constants_as_inputs(model, self._folder)
        return make_session(model, what=self._what, **how), constants

    def _open(
        self, model: onnx.ModelProto, rows: dict[str, str] | None = None, *, capture: bool = False
    ) -> Bound:
        session, constants = self._load(model, self._device, capture=capture)
        bound = bind(session, self.signature, self._device, rows=rows, capture=capture)
        for name, tensor in constants.items():
            bound.bind_input(name, tensor)
        return bound

    def _run_on_cpu(
        self, model: onnx.ModelProto, tensors: Mapping[str, Tensor], feeds: list[Feed]
    ) -> dict[str, np.ndarray]:
        """Every output of a batch by name, to compare a device's with."""
        session, constants = self._load(model, Device("cpu"))
        return _run_reference(session, {**constants, **tensors}, dict(zip(self.signature.inputs, feeds)))


class TrainingStep(_ModelStep):
    """The training model, specialized for overwriting and (when first needed) for accumulating gradients.

    On a device, with `tune` (see `autotune`), and where the file leaves the sizes of images open or has small images,
    also for the shapes of the batch: the sessions of the last few shapes are cached, other shapes run in one session
    for all shapes.
    """

    is_whole = True  # runs all of the training model: its update may join it in one graph

    def __init__(
        self,
        source: ModelFile,
        *,
        device: Device,
        options: ort.SessionOptions | None = None,
        tune: Tune | None = None,
    ) -> None:
        super().__init__(source, "training", device=device, options=options)
        on_host = device.memory == "host"
        # on a GPU the provider times its own kernels
        self._tune = tune if on_host else None
        # whether its forms are chosen anew for the sizes of a batch
        self._chooses_forms = (leaves_images_open if on_host else has_processor_forms)(self._model)
        # a checked device was checked with sizes known
        self._always_specializes = self._report is not None
        self._is_compared = self._report is None
        self._specializes = (
            device.memory == "device"
            or self._always_specializes
            or self._tune is not None
            or self._chooses_forms
            or (on_host and has_small_images(self._model))
        )
        self._bound: dict[bool, Bound] = {}
        self._by_shape: OrderedDict[tuple, Bound] = OrderedDict()
        self._seen: Counter[tuple] = Counter()
        self._unfit: set[tuple] = set()

    def attach(self, memory: ModelMemory) -> None:
        """Give the step its memory."""
        self._memory = memory
        # in bound memory: writing it costs less than binding a new array in each step
        self._seed: Tensor = make_small_tensor(self._device, np.zeros(1, np.int64))
        self._bound.clear()
        self._by_shape.clear()
        if not self._specializes:
            self._bound[True] = self._bind(reset=True)
        # rows of each gradient that are not zero, where that is known; memory is given full of zeros
        self._written: dict[str, list[np.ndarray]] = {
            name: [] for bound in self._bound.values() for name in bound.rows
        }

    def run(self, feeds: list[Feed], *, reset: bool, seed: int, step: int) -> list[np.ndarray]:
        """The loss and the additional outputs; gradients land in their buffers."""
        bound = self._find(feeds, reset)
        if self.signature.random:
            self._seed.write(np.array([step_seed(seed, step)], np.int64))
            if bound.draw is not None:
                bound.draw(self._seed.read())
        if not bound.rows:
            self._written = {}
            if not self._is_compared:
                results = self._run_compared(bound, feeds, reset)
                self._is_compared = True
                return results
            try:
                return bound.run(feeds)
            except RecordingError as error:
                warn_unrecorded("training step", error)
                self._device = dataclasses.replace(self._device, graphs=False)
                self._by_shape.clear()
                return self._find(feeds, reset).run(feeds)
        before, self._written = self._written, {}
        if reset:
            before = {name: self._clear(name, before.get(name)) for name in bound.rows}
        results = bound.run(feeds)
        self._written = {n: [*before[n], rows] for n, rows in bound.written.items() if n in before}
        return results

    def _run_compared(self, bound: Bound, feeds: list[Feed], reset: bool) -> list[np.ndarray]:
        """Run a batch on a device, and refuse the device where the CPU computes something else."""
        memory, gradients = self._memory, self._memory.gradients.tensors
        buffers = {f"{name}{BUFFER}": tensor for name, tensor in gradients.items()}
        model = specialize_reset(self._model, reset=reset)
        expected = self._run_on_cpu(model, {**memory.tensors(), **buffers, SEED: self._seed}, feeds)
        results = bound.run(feeds)
        actual = {f"{n}{OUT}": tensor.read() for n, tensor in gradients.items()}
        actual |= {f"{n}{contract.NEXT}": tensor.read() for n, tensor in memory.following_tensors().items()}
        actual |= dict(zip(self.signature.outputs, results))
        _require_same(actual, expected, self._device, self._what)
        return results

    def gradients_changed(self) -> None:
        """Say that something else than a step wrote into the memory of gradients."""
        self._written = {}

    @property
    def model(self) -> onnx.ModelProto:
        """The training model as it was read."""
        return self._model

    def sessions(self) -> list[ort.InferenceSession]:
        """The sessions that have been made so far."""
        return [bound.session for bound in [*self._bound.values(), *self._by_shape.values()]]

    def _find(self, feeds: list[Feed], reset: bool) -> Bound:
        """The session for these inputs."""
        if self._specializes:
            shapes = {name: shape_of(value) for name, value in zip(self.signature.inputs, feeds)}
            key = (reset, *shapes.values())
            if key in self._by_shape:
                self._by_shape.move_to_end(key)
                return self._by_shape[key]
            self._seen[key] += 1
            often = self._always_specializes or self._seen[key] > _OFTEN
            if key not in self._unfit and (len(self._by_shape) < _KEPT or often):
                try:
                    # With sizes known the runtime folds shapes away and plans memory once.
                    bound = self._bind(reset=reset, shapes=shapes)
                except ModelError:
                    if self._always_specializes:
                        raise
                    # shapes that the model does not take: the session for all says so when it runs
                    self._unfit.add(key)
                else:
                    # the one that was used longest ago
                    if len(self._by_shape) >= _KEPT:
                        self._by_shape.popitem(last=False)
                    self._by_shape[key] = bound
                    return bound
        if reset not in self._bound:
            self._bound[reset] = self._bind(reset=reset)
        return self._bound[reset]

    def _clear(self, name: str, written: list[np.ndarray] | None) -> list[np.ndarray]:
        gradient = self._memory.gradients.views[name]
        if written is None:
            gradient[...] = 0
        else:
            for rows in written:
                # of an embedding table, some hundred rows instead of all of it
                gradient[rows.reshape(-1)] = 0
        return []

    def prepared(
        self, *, reset: bool, shapes: dict[str, tuple[int, ...]] | None = None
    ) -> tuple[onnx.ModelProto, dict[str, str] | None]:
        """The training model as a session gets it, and the gradients of which it writes some rows only.

        What a checked device computes wrong is written in another form after this (`DeviceReport.fit`).
        """
        tune, chooses = (self._tune, self._chooses_forms) if shapes is not None else (None, False)
        host = self._device.memory == "host"
        keep_shapes = chooses or tune is not None or (host and shapes is not None)
        model, rows = specialize_reset(self._model, reset=reset, keep_shapes=keep_shapes), None
        if host:
            rows = scatter_in_place(model)
        if self._device.memory == "device":
            expand_batch_norm(model)
        if shapes is not None:
            sizes = {name: tuple(shape) for name, shape in shapes.items()}
            sizes |= {f"{n}{BUFFER}": sizes[n] for n in self.signature.input_gradients}
            if chooses:
                # graph libraries: only where they are needed
                from onward.graph.proto.conv_forms import fit_forms, fit_gpu_forms

                (fit_forms if host else fit_gpu_forms)(model, sizes)
            if tune is not None:
                tune(model, sizes, self._options)
            if host:
                batch_convolutions(model, resolve_symbols(model.graph, sizes))
            specialize_shapes(model, sizes)
            simplify_static_masks(model)
        if self._device.memory == "device":
            prefer_device_forms(model)
        return model, rows

    def _bind(self, *, reset: bool, shapes: dict[str, tuple[int, ...]] | None = None) -> Bound:
        model, rows = self.prepared(reset=reset, shapes=shapes)
        host = None
        if self._report is not None:
            host = self._report.fit(model, self._device, self._what)
        bound = None
        if shapes is not None and self._device.captures:
            # the runtime refuses to record what does not run on the device as a whole
            with contextlib.suppress(ModelError):
                bound = self._open(model, rows, capture=True)
        if bound is None or not _can_capture(bound):
            bound = self._open(model, rows)
        memory = self._memory
        for name, tensor in memory.tensors().items():
            bound.bind_input(name, tensor)
        for name, tensor in memory.gradients.tensors.items():
            bound.bind_input(f"{name}{BUFFER}", tensor)
            bound.bind_output(f"{name}{OUT}", tensor)
        for name, tensor in memory.following_tensors().items():
            bound.bind_output(f"{name}{contract.NEXT}", tensor)
        bound.bind_input(SEED, self._seed)
        if host is not None:
            bound.draw = _drawing(host, bound)
        loss = next(v for v in bound.session.get_outputs() if v.name == self.signature.outputs[0])
        if any(size != 1 for size in loss.shape):
            raise ModelError(
                f"the first output '{loss.name}' of the training model has the shape {loss.shape}: it is not a loss"
            )
        kind = {"tensor(double)": np.float64, "tensor(float16)": np.float16}.get(loss.type, np.float32)
        zeros = np.zeros([int(d) for d in loss.shape], kind)
        bound.bind_output(loss.name, make_small_tensor(self._device, zeros))
        bound.finish(self.signature.outputs)
        return bound


class EvaluationStep(_ModelStep):
    """The evaluation model over the same parameters; `outputs` adds values of its graph to the results."""

    def __init__(
        self,
        source: ModelFile,
        *,
        device: Device,
        options: ort.SessionOptions | None = None,
        outputs: Sequence[str] = (),
    ) -> None:
        super().__init__(source, "eval", device=device, options=options, outputs=outputs)
        # by the shapes of the inputs on a checked device, else one for all
        self._bound: OrderedDict[tuple, Bound] = OrderedDict()
        self._is_compared = self._report is None

    def attach(self, memory: ModelMemory) -> None:
        """Give the evaluation its parameters; its session is made when first needed."""
        self._memory = memory
        self._bound.clear()

    def run(self, feeds: list[Feed]) -> list[np.ndarray]:
        """The loss and the additional outputs."""
        shapes = {name: shape_of(value) for name, value in zip(self.signature.inputs, feeds)}
        key = () if self._report is None else tuple(shapes.values())
        if key not in self._bound:
            self._bound[key] = self._bind(shapes)
            if len(self._bound) > _KEPT:
                self._bound.popitem(last=False)
        results = self._bound[key].run(feeds)
        if not self._is_compared:
            expected = self._run_on_cpu(self._model, self._memory.tensors(), feeds)
            actual = dict(zip(self.signature.outputs, results))
            _require_same(actual, expected, self._device, self._what)
            self._is_compared = True
        return results

    def _bind(self, shapes: Mapping[str, Sequence[int]]) -> Bound:
        model = self._model
        if self._report is not None:
            model = copy.deepcopy(model)
            specialize_shapes(model, shapes)
            self._report.fit(model, self._device, self._what)
        bound = self._open(model)
        for name, tensor in self._memory.tensors().items():
            bound.bind_input(name, tensor)
        bound.finish(self.signature.outputs)
        return bound


def _report_of(device: Device) -> DeviceReport | None:
    """What a device computes right; None for those that need no check."""
    if not is_checked(device):
        return None
    # graphs in ONNX's textual syntax: only where they are needed
    from onward.runtime.device_check import check_device

    return check_device(device)


def _drawing(host: onnx.ModelProto, bound: Bound) -> Callable[[np.ndarray], None]:
    """Draws a step's random numbers on the CPU, from its seed, and binds them."""
    session = make_session(host, what="random numbers of the training model")
    names = [value.name for value in session.get_outputs()]

    def draw(seed: np.ndarray) -> None:
        for name, array in zip(names, session.run(names, {SEED: seed})):
            bound.bind_input(name, HostTensor(np.ascontiguousarray(array)))

    return draw


def with_outputs(model: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    """A copy of a model that also outputs these values of its graph; the model itself where there are none."""
    if not names:
        return model
    wider = copy.deepcopy(model)
    present = {value.name for value in wider.graph.output}
    wider.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in present)
    return wider


def _can_capture(bound: Bound) -> bool:
    """Whether a run has nothing that changes from one to the next but numbers at fixed addresses."""
    # What the host reads is copied when it is bound, which a replay does not do again.
    if not isinstance(bound, DeviceBound) or bound.inputs_on_host:
        return False
    outputs = bound.session.get_outputs()
    return all(isinstance(dim, int) for value in outputs for dim in value.shape)


# --- The first run of a model on a device beside the CPU's: the operators that `device_check` knows are not all that a
# model may have, nor in every form, and nothing is to train silently wrong.


def _run_reference(
    session: ort.InferenceSession, tensors: Mapping[str, Tensor], feeds: Mapping[str, Feed]
) -> dict[str, np.ndarray]:
    """Every output of a session on the CPU by name, from what is in the memory of training and a batch."""
    arrays = {name: array_of(value) for name, value in feeds.items()}
    inputs: dict[str, np.ndarray] = {}
    for name in (value.name for value in session.get_inputs()):
        if name in tensors:
            inputs[name] = tensors[name].read()
        elif name in arrays:
            inputs[name] = arrays[name]
        else:  # the sum of gradients of the user's own inputs is not kept
            inputs[name] = np.zeros_like(arrays[name.removesuffix(BUFFER)])
    names = [value.name for value in session.get_outputs()]
    results: list[Any] = list(session.run(None, inputs))
    return dict(zip(names, results))


def _require_same(
    actual: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], device: Device, what: str
) -> None:
    """Refuse a device that computes other numbers than the CPU for outputs that both have."""
    floats = [name for name, array in expected.items() if array.dtype.kind == "f" and name in actual]
    largest = {name: float(np.abs(expected[name]).max(initial=0.0)) for name in floats}
    # A gradient that is zero in theory is nothing but rounding, so all of them are measured beside the largest.
    gradients = max((size for name, size in largest.items() if name.endswith(OUT)), default=0.0)
    for name in sorted(floats, key=lambda name: name.endswith(OUT)):
        if not np.isfinite(largest[name]):
            continue
        gap = float(np.abs(actual[name].astype(np.float64) - expected[name]).max(initial=0.0))
        unit = gradients if name.endswith(OUT) else 1.0
        if gap <= _LARGEST_GAP * (largest[name] + 0.01 * unit):
            continue
        subject = f"gradient of '{name.removesuffix(OUT)}'" if name.endswith(OUT) else f"output '{name}'"
        raise DeviceError(
            f"device='{device}' computes the {what} wrong: its {subject} is off by {gap:.1g}, of numbers up to "
            f"{largest[name]:.1g}, beside the CPU; parameters are unchanged. `onward conform --device {device}` "
            "shows every operator; use device='cpu'"
        )
