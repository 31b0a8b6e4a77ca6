"""Runs an optimizer model in whichever of its forms: flat, by parameter, or a user's own over sequences."""

from __future__ import annotations

import json
import os

import numpy as np
import onnx
import onnxruntime as ort

from onward.errors import ModelError
from onward.runtime.flat import FlatBuffer
from onward.runtime.flat_update import FlatUpdater
from onward.runtime.sessions import ModelFile, make_session, read_model, run_bound
from onward.runtime.updater import Slots, Updater

__all__ = ["FlatUpdater", "Slots", "Updater", "make_updater"]


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


def _threads() -> int:
    count = getattr(os, "process_cpu_count", os.cpu_count)() or 1
    return min(count, 8)
