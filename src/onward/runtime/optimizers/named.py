"""Optimizer models over whole parameters: by name, or custom ones over sequences."""

from __future__ import annotations

import numpy as np
import onnx

from onward import contract
from onward.errors import ModelError
from onward.runtime.bound import inputs_on_host, run_bound
from onward.runtime.memory import FlatBuffer, HostTensor, Tensor, make_tensor
from onward.runtime.optimizers.updater import Updater
from onward.runtime.sessions import make_session

__all__ = ["NamedUpdater", "SequenceUpdater"]


class NamedUpdater(Updater):
    """A rule that sees whole parameters: the optimizer model has inputs and outputs for each by name."""

    def __init__(
        self, model: onnx.ModelProto, options: dict, parameters: FlatBuffer, gradients: FlatBuffer
    ) -> None:
        super().__init__(options["clip_norm"])
        device = parameters.device
        self._session = make_session(
            model, device=device if device.memory == "device" else None, what="optimizer model"
        )
        shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.input}
        self._slots: dict[str, dict[str, Tensor]] = {
            name: {
                slot: make_tensor(device, np.zeros(shapes[f"{name}.{slot}"], np.float32))
                for slot in options["slots"]
            }
            for name in parameters.spans
        }
        # bindings hold addresses only: keep what they point to
        self._scalars: dict[str, tuple[Tensor, np.ndarray]] = {
            name: (make_tensor(device, array), array)
            for name, array in (
                ("learning_rate", self._rate),
                ("step", self._step),
                ("gradient_scale", self._scale),
                ("weight_decay", np.full(1, options["weight_decay"], np.float32)),
            )
        }
        state = {f"{n}.{slot}": tensor for n, slots in self._slots.items() for slot, tensor in slots.items()}
        tensors: dict[str, Tensor] = {name: tensor for name, (tensor, _) in self._scalars.items()}
        tensors |= {**parameters.tensors, **{f"{n}_grad": t for n, t in gradients.tensors.items()}, **state}
        self._tensors = tensors
        self._binding = self._session.io_binding()
        for value in self._session.get_inputs():
            tensors[value.name].bind_input(self._binding, value.name)
        for name, tensor in {**parameters.tensors, **state}.items():
            tensor.bind_output(self._binding, f"{name}{contract.NEXT}")
        self._on_host = inputs_on_host(self._session, device)

    def _apply(self) -> None:
        for tensor, array in self._scalars.values():
            tensor.write(array)
        for value in self._session.get_inputs() if self._on_host is None else ():
            self._tensors[value.name].bind_input(self._binding, value.name)
        for name in self._on_host or ():  # what the session reads on the host, it copies when it is bound
            self._binding.bind_cpu_input(name, self._tensors[name].read())
        run_bound(self._session, self._binding._iobinding)

    def slot_tensors(self) -> dict[str, dict[str, Tensor]]:
        return self._slots


class SequenceUpdater(Updater):
    """A custom optimizer block: lists of tensors in, lists of tensors out."""

    _MOMENTS = ("first_order_moments", "second_order_moments", "third_order_moments")

    def __init__(self, model: onnx.ModelProto, parameters: FlatBuffer, gradients: FlatBuffer) -> None:
        super().__init__()
        self._session = make_session(model, what="optimizer model")
        self._inputs = {value.name for value in self._session.get_inputs()}
        self._outputs = [value.name for value in self._session.get_outputs()]
        if "updated_params" not in self._outputs:
            raise ModelError(
                "the optimizer model gives no output 'updated_params': a standard graph cannot write its inputs, "
                f"so it must return what it updates (it has {', '.join(self._outputs)})"
            )
        self._parameters, self._gradients = parameters, gradients
        # lists of tensors are handed over, so they are kept on the host
        self._slots: dict[str, dict[str, np.ndarray]] = {
            moment: {name: np.zeros(shape, np.float32) for name, shape in parameters.shapes.items()}
            for moment in self._MOMENTS
            if moment in self._inputs
        }

    def _apply(self) -> None:
        feeds: dict = {
            "params": list(self._parameters.arrays().values()),
            "gradients": [array * self._scale for array in self._gradients.arrays().values()],
            "learning_rate": self._rate,
            "step": self._step,
            **{moment: list(arrays.values()) for moment, arrays in self._slots.items()},
        }
        feeds = {name: value for name, value in feeds.items() if name in self._inputs}
        results: dict = dict(zip(self._outputs, self._session.run(None, feeds)))
        targets: dict[str, dict[str, Tensor]] = {"updated_params": self._parameters.tensors}
        for moment, arrays in self._slots.items():
            targets[f"updated_{moment}"] = {name: HostTensor(array) for name, array in arrays.items()}
        for name, tensors in targets.items():
            for tensor, new in zip(tensors.values(), list(results[name])):
                tensor.write(new)

    def slot_tensors(self) -> dict[str, dict[str, Tensor]]:
        return {
            name: {
                f"momentum{index}": HostTensor(arrays[name])
                for index, arrays in enumerate(self._slots.values())
            }
            for name in self._parameters.spans
        }
