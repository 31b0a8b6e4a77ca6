"""One training step and one evaluation, bound to the memory of training without needless copies."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import onnx
import onnxruntime as ort

from onward import contract
from onward.contract import BUFFER, OUT, SEED
from onward.errors import ModelError
from onward.graph.passes.batch_norm import expand_batch_norm
from onward.graph.passes.device_forms import prefer_device_forms
from onward.graph.passes.known_shapes import (
    has_processor_forms,
    leaves_images_open,
    resolve_symbols,
    specialize_shapes,
)
from onward.graph.passes.row_gradients import scatter_in_place
from onward.graph.passes.small_images import convolve_together, has_small_images
from onward.graph.passes.specialize import specialize_reset
from onward.graph.passes.static_masks import simplify_static_masks
from onward.runtime.bound import Bound, DeviceBound, RecordingError, bind, warn_unrecorded
from onward.runtime.mapped import constants_as_inputs, has_external_constants
from onward.runtime.memory import ModelMemory, Tensor, make_tensor
from onward.runtime.sessions import ModelBeside, ModelFile, make_session, read_model, session_beside
from onward.runtime.signature import Signature, read_signature, step_seed

if TYPE_CHECKING:
    from onward.runtime.devices import Device

__all__ = ["EvaluationStep", "Step", "TrainingStep", "with_outputs"]

# Puts the fastest forms into a training model for inputs of known shapes.
Tune = Callable[[onnx.ModelProto, Mapping[str, Sequence[int]], "ort.SessionOptions | None"], object]

# Sessions made for the shapes of a batch that are kept, and how often a shape must come to replace one of them.
_KEPT, _OFTEN = 4, 8


class Step(Protocol):
    """The interface between `Module` and what runs its training model."""

    signature: Signature

    def attach(self, memory: ModelMemory) -> None:
        """Set the step's memory; called again when its layout has changed."""
        ...

    def run(self, feeds: list[Any], *, reset: bool, seed: int, step: int) -> list[np.ndarray]:
        """The loss and the additional outputs; gradients land in their buffers."""
        ...

    def gradients_changed(self) -> None:
        """Say that something else than a step wrote into the memory of gradients."""
        ...


class TrainingStep:
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
        self._model = read_model(source, "training")
        self._path, self._folder = _describe(source), _folder(source)
        self.signature = read_signature(self._model, self._path, "training")
        self._device, self._options = device, options
        self._tune = tune if device.memory == "host" else None
        unfit = leaves_images_open if device.memory == "host" else has_processor_forms
        self._fits = unfit(self._model)
        small = device.memory == "host" and has_small_images(self._model)
        self._specializes = device.memory == "device" or self._tune is not None or self._fits or small
        self._bound: dict[bool, Bound] = {}
        self._by_shape: OrderedDict[tuple, Bound] = OrderedDict()
        self._seen: Counter[tuple] = Counter()
        self._unfit: set[tuple] = set()

    def attach(self, memory: ModelMemory) -> None:
        """Give the step its memory."""
        self._memory = memory
        self._seed: Tensor = make_tensor(self._device, np.zeros(1, np.int64))
        self._bound.clear()
        self._by_shape.clear()
        if not self._specializes:
            self._bound[True] = self._bind(reset=True)
        # rows of each gradient that are not zero, where that is known; memory is given full of zeros
        self._written: dict[str, list[np.ndarray]] = {
            name: [] for bound in self._bound.values() for name in bound.rows
        }

    def run(self, feeds: list[Any], *, reset: bool, seed: int, step: int) -> list[np.ndarray]:
        """The loss and the additional outputs; gradients land in their buffers."""
        bound = self._find(feeds, reset)
        if self.signature.random:
            self._seed.write(np.array([step_seed(seed, step)], np.int64))
        if not bound.rows:
            self._written = {}
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

    def _find(self, feeds: list[Any], reset: bool) -> Bound:
        """The session for these inputs."""
        if self._specializes:
            shapes = {name: _shape(value) for name, value in zip(self.signature.inputs, feeds)}
            key = (reset, *shapes.values())
            if key in self._by_shape:
                self._by_shape.move_to_end(key)
                return self._by_shape[key]
            self._seen[key] += 1
            if key not in self._unfit and (len(self._by_shape) < _KEPT or self._seen[key] > _OFTEN):
                try:
                    bound = self._bind(reset=reset, shapes=shapes)
                except (
                    ModelError
                ):  # shapes that the model does not take: the session for all says so when it runs
                    self._unfit.add(key)
                else:
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
                gradient[rows.reshape(-1)] = 0
        return []

    def prepared(
        self, *, reset: bool, shapes: dict[str, tuple[int, ...]] | None = None
    ) -> tuple[onnx.ModelProto, dict[str, str] | None]:
        """The training model as a session gets it, and the gradients of which it writes some rows only."""
        tune, fits = (self._tune, self._fits) if shapes is not None else (None, False)
        host = self._device.memory == "host"
        keep_shapes = fits or tune is not None or (host and shapes is not None)
        model, rows = specialize_reset(self._model, reset=reset, keep_shapes=keep_shapes), None
        if host:
            rows = scatter_in_place(model)
        if self._device.memory == "device":
            expand_batch_norm(model)
        if shapes is not None:
            known = {name: tuple(shape) for name, shape in shapes.items()}
            known |= {f"{n}{BUFFER}": known[n] for n in self.signature.input_gradients}
            if fits:
                # graph libraries: only where they are needed
                from onward.graph.passes.conv_forms import fit_forms, fit_gpu_forms

                (fit_forms if host else fit_gpu_forms)(model, known)
            if tune is not None:
                tune(model, known, self._options)
            if host:
                convolve_together(model, resolve_symbols(model.graph, known))
            specialize_shapes(model, known)
            simplify_static_masks(model)
        if self._device.memory == "device":
            prefer_device_forms(model)
        return model, rows

    def _bind(self, *, reset: bool, shapes: dict[str, tuple[int, ...]] | None = None) -> Bound:
        model, rows = self.prepared(reset=reset, shapes=shapes)
        capture = shapes is not None and self._device.captures
        bound = self._open(model, rows, capture=capture)
        if isinstance(bound, DeviceBound) and capture and not _can_capture(bound):
            bound = self._open(model, rows, capture=False)
        memory = self._memory
        for name, tensor in memory.tensors().items():
            bound.bind_input(name, tensor)
        for name, tensor in memory.gradients.tensors.items():
            bound.bind_input(f"{name}{BUFFER}", tensor)
            bound.bind_output(f"{name}{OUT}", tensor)
        for name, tensor in memory.following_tensors().items():
            bound.bind_output(f"{name}{contract.NEXT}", tensor)
        bound.bind_input(SEED, self._seed)
        loss = next(v for v in bound.session.get_outputs() if v.name == self.signature.outputs[0])
        if any(size != 1 for size in loss.shape):
            raise ModelError(
                f"the first output '{loss.name}' of the training model has the shape {loss.shape}: it is not a loss"
            )
        kind = {"tensor(double)": np.float64, "tensor(float16)": np.float16}.get(loss.type, np.float32)
        bound.bind_output(loss.name, make_tensor(self._device, np.zeros([int(d) for d in loss.shape], kind)))
        bound.finish(self.signature.outputs)
        return bound

    def _open(self, model: onnx.ModelProto, rows: dict[str, str] | None, *, capture: bool) -> Bound:
        """A session for the model; one that records runs where it can, else a plain one."""
        where = self._path, self._folder, "training model", self._device, self._options
        try:
            session, constants = _open(model, *where, capture=capture)
        except ModelError:
            if not capture:
                raise
            capture = False  # the runtime refuses to record what does not run on the device as a whole
            session, constants = _open(model, *where)
        bound = bind(session, self.signature, self._device, rows=rows, capture=capture)
        for name, tensor in constants.items():
            bound.bind_input(name, tensor)
        return bound


class EvaluationStep:
    """The evaluation model over the same parameters; `outputs` adds values of its graph to the results."""

    def __init__(
        self,
        source: ModelFile,
        *,
        device: Device,
        options: ort.SessionOptions | None = None,
        outputs: Sequence[str] = (),
    ) -> None:
        self._path, self._folder = _describe(source), _folder(source)
        self._model = read_model(source, "eval")
        if outputs:
            self._model = with_outputs(self._model, outputs)
        self.signature = read_signature(self._model, self._path, "eval")
        self._device, self._options = device, options
        self._bound: Bound | None = None

    def attach(self, memory: ModelMemory) -> None:
        """Give the evaluation its parameters; its session is made when first needed."""
        self._memory = memory
        self._bound = None

    def run(self, feeds: list[Any]) -> list[np.ndarray]:
        """The loss and the additional outputs."""
        if self._bound is None:
            session, constants = _open(
                self._model, self._path, self._folder, "eval model", self._device, self._options
            )
            self._bound = bind(session, self.signature, self._device)
            for name, tensor in {**constants, **self._memory.tensors()}.items():
                self._bound.bind_input(name, tensor)
            self._bound.finish(self.signature.outputs)
        return self._bound.run(feeds)


def with_outputs(model: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    """A copy of a model that also outputs these values of its graph."""
    wider = onnx.ModelProto()
    wider.CopyFrom(model)
    present = {value.name for value in wider.graph.output}
    wider.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in present)
    return wider


def _can_capture(bound: DeviceBound) -> bool:
    """Whether a run has nothing that changes from one to the next but numbers at fixed addresses."""
    if not bound.capture or bound.inputs_on_host:
        return False
    outputs = bound.session.get_outputs()
    return all(isinstance(dim, int) for value in outputs for dim in value.shape)


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(value.shape()) if isinstance(value, ort.OrtValue) else value.shape


def _describe(source: ModelFile) -> str:
    return os.fspath(source) if isinstance(source, str | os.PathLike) else "model in memory"


def _folder(source: ModelFile) -> Path | None:
    """Where a model's external data lies."""
    if isinstance(source, ModelBeside):
        return source.folder
    return Path(source).resolve().parent if isinstance(source, str | os.PathLike) else None


def _open(
    model: onnx.ModelProto,
    path: str,
    folder: Path | None,
    role: str,
    device: Device,
    options: ort.SessionOptions | None,
    *,
    capture: bool = False,
) -> tuple[ort.InferenceSession, dict[str, Tensor]]:
    """A session, and the constants to bind to inputs that it has for them."""
    constants: dict[str, Tensor] = {}
    if folder is not None and has_external_constants(model):
        if device.memory != "host":  # the runtime finds external data beside the file that it loads
            beside = os.fspath(folder / "model")
            return session_beside(model, beside, device=device, options=options, capture=capture), {}
        model, constants = constants_as_inputs(model, folder)
    what = f"{role} '{path}'"
    return make_session(model, device=device, options=options, what=what, capture=capture), constants
