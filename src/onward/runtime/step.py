"""One training step and one evaluation, bound to buffers: nothing is copied that need not be."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from onward.graph.passes.row_gradients import scatter_in_place
from onward.graph.passes.specialize import BUFFER, OUT, RESET, specialize_reset
from onward.runtime.external import session_beside
from onward.runtime.plan import SEED, Plan, read_plan
from onward.runtime.sessions import ModelFile, make_session, providers_for, read_model, run_bound

__all__ = ["EvaluationStep", "TrainingStep", "with_outputs"]


# Bytes of an input up to which copying it takes less time than binding it.
_SMALL = 1 << 14


class _Bound:
    """A session with its binding: fixed tensors bound once, the user's inputs at every run."""

    def __init__(
        self, session: ort.InferenceSession, plan: Plan, rows: Mapping[str, str] | None = None
    ) -> None:
        self.session = session
        # parameters of whose gradients a run writes some rows only, by the output that says which
        self.rows = rows or {}
        self.written: dict[str, np.ndarray] = {}
        self.binding = session.io_binding()
        self._native = self.binding._iobinding
        self._names = [value.name for value in session.get_outputs()]
        self._inputs = {value.name for value in session.get_inputs()}
        self._own = [(i, name) for i, name in enumerate(plan.inputs) if name in self._inputs]
        self._landings: list[np.ndarray | None] = [None] * len(plan.inputs)
        self._fresh: list[str] = []
        self._fixed: dict[str, np.ndarray] = {}
        self._given: dict[str, np.ndarray] = {}
        self._plan = plan
        self._positions: list[int] = []
        # gradients of the user's own inputs are not kept, so they are never added up either
        self._empty = {n: f"{n}{BUFFER}" for n in plan.input_gradients if f"{n}{BUFFER}" in self._inputs}

    def bind_input(self, name: str, array: np.ndarray) -> None:
        if name in self._inputs:
            self._given[name] = array
            self.binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(_contiguous(array)))

    def bind_output(self, name: str, array: np.ndarray) -> None:
        self._fixed[name] = array
        kind = array.dtype.type
        self.binding.bind_output(name, "cpu", 0, kind, list(array.shape), _contiguous(array).ctypes.data)

    def finish(self, returned: list[str]) -> None:
        """Outputs that are not bound to memory get new memory at every run."""
        self._fresh = [name for name in self._names if name not in self._fixed]
        for name in self._fresh:
            self.binding.bind_output(name, "cpu")
        bound = [*self._fixed, *self._fresh]  # results come in the order of binding
        self._positions = [bound.index(name) if name in self._fresh else -1 for name in returned]
        self._returned = returned

    def run(self, feeds: list[Any]) -> list[np.ndarray]:
        for index, name in self._own:
            value, landing = feeds[index], self._landings[index]
            if (
                landing is not None
                and type(value) is np.ndarray
                and value.shape == landing.shape
                and value.dtype == landing.dtype
            ):
                landing[...] = value
            elif type(value) is np.ndarray and value.dtype == np.object_:
                return self._run_copying(feeds)
            else:
                self._bind_own(index, name, value)
        if self._empty:
            for name, value in self._zeros(feeds).items():
                self.binding.bind_cpu_input(name, value)
        for name in self._fresh:
            self.binding.bind_output(name, "cpu")
        try:
            run_bound(self.session, self._native)
        except Exception as error:
            raise _explain(error, self._plan, feeds) from error
        made = self.binding.get_outputs() if self._fresh else []
        if self.rows:
            start = len(self._fixed)
            self.written = {
                parameter: made[start + self._fresh.index(output)].numpy()
                for parameter, output in self.rows.items()
            }
        return [
            self._fixed[name].copy() if position < 0 else made[position].numpy()
            for name, position in zip(self._returned, self._positions)
        ]

    def _bind_own(self, index: int, name: str, value: Any) -> None:
        """Bind a user's input; a small one by way of memory that stays bound, as copying is the faster then."""
        if isinstance(value, ort.OrtValue):
            self._landings[index] = None
            self.binding.bind_ortvalue_input(name, value)
            return
        landing = value.copy() if value.nbytes <= _SMALL else None
        self._landings[index] = landing
        self.binding.bind_cpu_input(name, value if landing is None else landing)

    def _zeros(self, feeds: list[Any]) -> dict[str, np.ndarray]:
        shapes = {
            name: value.shape() if isinstance(value, ort.OrtValue) else value.shape
            for name, value in zip(self._plan.inputs, feeds)
        }
        return {buffer: np.zeros(shapes[name], np.float32) for name, buffer in self._empty.items()}

    def _run_copying(self, feeds: list[Any]) -> list[np.ndarray]:
        """The same without a binding, which cannot hold strings."""
        own = {
            name: v.numpy() if isinstance(v, ort.OrtValue) else v for name, v in zip(self._plan.inputs, feeds)
        }
        given = {
            **self._given,
            **self._zeros(feeds),
            **{name: value for name, value in own.items() if name in self._inputs},
        }
        try:
            made: dict[str, Any] = dict(zip(self._names, self.session.run(self._names, given)))
        except Exception as error:
            raise _explain(error, self._plan, feeds) from error
        for name, array in self._fixed.items():
            np.copyto(array, made[name])
        self.written = {parameter: made[output] for parameter, output in self.rows.items()}
        return [made[name] for name in self._returned]


class TrainingStep:
    """The training model, specialised for replacing and (when first needed) for adding up gradients."""

    def __init__(
        self, source: ModelFile, *, device: str = "cpu", options: ort.SessionOptions | None = None
    ) -> None:
        self._model = read_model(source, "training")
        self._path = _describe(source)
        self.plan = read_plan(self._model, self._path)
        self._providers = providers_for(device)
        self._options = options
        self._bound: dict[bool, _Bound] = {}
        self._seed = np.zeros(1, np.int64)

    def attach(
        self,
        parameters: Mapping[str, np.ndarray],
        frozen: Mapping[str, np.ndarray],
        gradients: Mapping[str, np.ndarray],
    ) -> None:
        """Give the step its memory."""
        self._parameters, self._frozen, self._gradients = parameters, frozen, gradients
        self._following = {
            name: np.empty_like(frozen[name]) for name in self.plan.statistics if name in frozen
        }
        self._bound[True] = self._bind(reset=True)
        # rows of each gradient that are not zero, where that is known; memory is given full of zeros
        self._written: dict[str, list[np.ndarray]] = {name: [] for name in self._bound[True].rows}

    def run(self, feeds: list[Any], *, reset: bool, seed: int, step: int) -> list[np.ndarray]:
        """The loss and the additional outputs; gradients land in their buffers."""
        if reset not in self._bound:
            self._bound[reset] = self._bind(reset=reset)
        if self.plan.random:
            # an odd multiplier spreads neighbouring seeds and steps over all 64 bits
            mixed = (seed * 0x9E3779B97F4A7C15 + step * 0xD1B54A32D192ED03) & 0xFFFFFFFFFFFFFFFF
            self._seed[0] = mixed - (1 << 64) if mixed >= 1 << 63 else mixed
        bound = self._bound[reset]
        if not bound.rows:
            self._written = {}
            return bound.run(feeds)
        before, self._written = self._written, {}
        if reset:
            before = {name: self._clear(name, before.get(name)) for name in bound.rows}
        results = bound.run(feeds)
        self._written = {n: [*before[n], rows] for n, rows in bound.written.items() if n in before}
        return results

    def gradients_changed(self) -> None:
        """Say that something else than a step wrote into the memory of gradients."""
        self._written = {}

    def _clear(self, name: str, written: list[np.ndarray] | None) -> list[np.ndarray]:
        if written is None:
            self._gradients[name][...] = 0
        else:
            for rows in written:
                self._gradients[name][rows.reshape(-1)] = 0
        return []

    @property
    def following(self) -> dict[str, np.ndarray]:
        """What the last run computed for each batch-norm statistic, to be taken over or not."""
        return self._following

    def commit_statistics(self) -> None:
        """Take over the batch-norm statistics that the last run computed."""
        for name, following in self._following.items():
            np.copyto(self._frozen[name], following)

    def _bind(self, *, reset: bool) -> _Bound:
        special = specialize_reset(self._model, reset=reset)
        rows = scatter_in_place(special)
        session = _open(special, self._path, "training model", self._providers, self._options)
        bound = _Bound(session, self.plan, rows)
        for name, array in {**self._parameters, **self._frozen}.items():
            bound.bind_input(name, array)
        for name, array in self._gradients.items():
            bound.bind_input(f"{name}{BUFFER}", array)
            bound.bind_output(f"{name}{OUT}", array)
        for name, array in self._following.items():
            bound.bind_output(f"{name}.next", array)
        bound.bind_input(SEED, self._seed)
        bound.bind_input(RESET, np.array([reset]))
        loss = next(v for v in session.get_outputs() if v.name == self.plan.outputs[0])
        kind = {"tensor(double)": np.float64, "tensor(float16)": np.float16}.get(loss.type, np.float32)
        bound.bind_output(loss.name, np.zeros([int(d) for d in loss.shape], kind))
        bound.finish(self.plan.outputs)
        return bound


class EvaluationStep:
    """The evaluation model over the same parameters; `outputs` adds values of its graph to what it returns."""

    def __init__(
        self,
        source: ModelFile,
        *,
        device: str = "cpu",
        options: ort.SessionOptions | None = None,
        outputs: Sequence[str] = (),
    ) -> None:
        self._path = _describe(source)
        self._model = read_model(source, "eval")
        if outputs:
            self._model = with_outputs(self._model, outputs)
        self.plan = read_plan(self._model, self._path)
        self._providers = providers_for(device)
        self._options = options
        self._bound: _Bound | None = None

    def attach(self, parameters: Mapping[str, np.ndarray]) -> None:
        """Give the evaluation its parameters; its session is made when first needed."""
        self._parameters = parameters

    def run(self, feeds: list[Any]) -> list[np.ndarray]:
        """The loss and the additional outputs."""
        if self._bound is None:
            session = _open(self._model, self._path, "eval model", self._providers, self._options)
            self._bound = _Bound(session, self.plan)
            for name, array in self._parameters.items():
                self._bound.bind_input(name, array)
            self._bound.finish(self.plan.outputs)
        return self._bound.run(feeds)


def with_outputs(model: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    """A copy of a model that also outputs these values of its graph."""
    wider = onnx.ModelProto()
    wider.CopyFrom(model)
    present = {value.name for value in wider.graph.output}
    wider.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in present)
    return wider


def _describe(source: ModelFile) -> str:
    return os.fspath(source) if isinstance(source, str | os.PathLike) else "model in memory"


def _open(
    model: onnx.ModelProto, path: str, role: str, providers: list[Any], options: ort.SessionOptions | None
) -> ort.InferenceSession:
    if any(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in model.graph.initializer):
        # the runtime finds external data beside the file that it loads
        return session_beside(model, path, providers=providers, options=options)
    return make_session(model, providers=providers, options=options, what=f"{role} '{path}'")


def _contiguous(array: np.ndarray) -> np.ndarray:
    """The runtime silently copies an array that is not contiguous, and then trains the copy: refuse."""
    if not array.flags.c_contiguous:
        raise AssertionError("a tensor bound to a session must be contiguous")
    return array


def _explain(error: Exception, plan: Plan, feeds: list[Any]) -> Exception:
    given = []
    for name, value in zip(plan.inputs, feeds):
        shape = value.shape() if isinstance(value, ort.OrtValue) else value.shape
        given.append(f"{name} {list(shape)}")
    return ValueError(f"the step failed on inputs {', '.join(given)}: {error}")
