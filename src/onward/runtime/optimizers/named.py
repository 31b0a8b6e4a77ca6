"""Optimizer models over whole parameters: by name, or custom ones over sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnxruntime as ort

from onward import contract
from onward.contract import NEXT
from onward.errors import ModelError
from onward.graph.proto.optimizer_models import repeat
from onward.runtime.bound import inputs_on_host
from onward.runtime.memory import FlatBuffer, HostTensor, Tensor, make_small_tensor, make_tensor
from onward.runtime.optimizers.updater import ElementwiseUpdater, Rule, Updater, group_of
from onward.runtime.resident import run_resident
from onward.runtime.sessions import make_session
from onward.runtime.tensors import run_bound

if TYPE_CHECKING:
    from onward.runtime.device_check import DeviceReport


class NamedUpdater(Updater):
    """A rule that sees whole parameters: the optimizer model has inputs and outputs for each by name."""

    def __init__(self, rule: Rule, parameters: FlatBuffer, gradients: FlatBuffer) -> None:
        super().__init__(rule.options["clip_norm"])
        device = parameters.device
        self._is_resident = device.memory == "resident"
        on_device = device.memory in ("device", "resident")
        self._session = make_session(rule.model, device=device if on_device else None, what="optimizer model")
        shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in rule.model.graph.input}
        self._slots: dict[str, dict[str, Tensor]] = {
            name: {
                slot: make_tensor(device, np.zeros(shapes[f"{name}.{slot}"], np.float32))
                for slot in rule.options["slots"]
            }
            for name in parameters.spans
        }
        # bindings hold addresses only: keep what they point to
        self._scalars: dict[str, tuple[Tensor, np.ndarray]] = {
            name: (make_small_tensor(device, array), array)
            for name, array in (
                ("learning_rate", self._rate),
                ("step", self._step),
                ("gradient_scale", self._scale),
                ("weight_decay", np.full(1, rule.options["weight_decay"], np.float32)),
            )
        }
        state = {f"{n}.{slot}": tensor for n, slots in self._slots.items() for slot, tensor in slots.items()}
        tensors: dict[str, Tensor] = {name: tensor for name, (tensor, _) in self._scalars.items()}
        tensors |= {**parameters.tensors, **{f"{n}_grad": t for n, t in gradients.tensors.items()}, **state}
        self._tensors = tensors
        self._binding = self._session.io_binding()
        self._outputs = {f"{name}{contract.NEXT}": t for name, t in {**parameters.tensors, **state}.items()}
        if self._is_resident:  # bound at each run, as its values are others then
            return
        for value in self._session.get_inputs():
            tensors[value.name].bind_input(self._binding, value.name)
        for name, tensor in self._outputs.items():
            tensor.bind_output(self._binding, name)
        self._on_host = inputs_on_host(self._session, device)

    def _apply(self) -> None:
        # written at each update: on a device they are copies
        for tensor, array in self._scalars.values():
            tensor.write(array)
        if self._is_resident:
            inputs = {value.name: self._tensors[value.name] for value in self._session.get_inputs()}
            run_resident(self._session, self._binding, inputs, self._outputs)
            return
        for name in self._on_host:  # what the session reads on the host, it copies when it is bound
            self._binding.bind_cpu_input(name, self._tensors[name].read())
        run_bound(self._session, self._binding)

    def slot_tensors(self) -> dict[str, dict[str, Tensor]]:
        return self._slots


class SequenceUpdater(Updater):
    """A custom optimizer block: lists of tensors in, lists of tensors out."""

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
            for moment in contract.MOMENTS
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
        # a custom block may leave out what it does not need
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


# --- An elementwise rule over parameters that have no address: one run for all of them, what it writes stays
# there.


class ResidentUpdater(ElementwiseUpdater):
    """Applies an elementwise optimizer model to each parameter; a few scalars cross to the device for an update."""

    def __init__(
        self, rule: Rule, parameters: FlatBuffer, gradients: FlatBuffer, report: DeviceReport
    ) -> None:
        super().__init__(rule, parameters, gradients)
        self._report = report
        groups = group_of(rule.options)
        self._setting_of = [groups.get(name, 0) for name in parameters.spans]
        self._bound: dict[bool, tuple[ort.InferenceSession, ort.IOBinding, dict[str, Tensor]]] = {}

    def _apply(self) -> None:
        if not self._setting_of:
            return
        scaled = self._set_scalars()
        if scaled not in self._bound:
            self._bound[scaled] = self._bind(scaled)
        session, binding, inputs = self._bound[scaled]
        outputs: dict[str, Tensor] = {}
        for name, flat in {"parameter": self._parameters, **self._slots}.items():
            outputs |= {f"{name}{NEXT}.{i}": tensor for i, tensor in enumerate(flat.tensors.values())}
        run_resident(session, binding, inputs, outputs)

    def _bind(self, scaled: bool) -> tuple[ort.InferenceSession, ort.IOBinding, dict[str, Tensor]]:
        """A session of the rule for every parameter, and what it reads."""
        shapes = [tensor.shape for tensor in self._parameters.tensors.values()]
        model = repeat(
            self._models[scaled],
            shared=[{name: f"{name}.{i}" for name in self._scalar_names} for i in self._setting_of],
            own=["parameter", "gradient", *self._slots],
            shapes=shapes,
        )
        _squeeze_numbers(model, [index for index, shape in enumerate(shapes) if not shape])
        device = self._parameters.device
        self._report.fit(model, device, "optimizer model")
        session = make_session(model, device=device, what="optimizer model")
        tensors: dict[str, Tensor] = {"step": HostTensor(self._step)}
        for name, flat in {"parameter": self._parameters, "gradient": self._gradients, **self._slots}.items():
            tensors |= {f"{name}.{index}": tensor for index, tensor in enumerate(flat.tensors.values())}
        for setting in range(len(self._settings)):
            views = self._scalar_views(setting)
            tensors |= {f"{name}.{setting}": HostTensor(array) for name, array in views.items()}
        inputs = {value.name: tensors[value.name] for value in session.get_inputs()}
        return session, session.io_binding(), inputs


def _squeeze_numbers(model: onnx.ModelProto, indices: list[int]) -> None:
    """Let the copies with these indices write numbers of rank 0: scalars of one number make vectors of them."""
    outputs = [v.name for v in model.graph.output if int(v.name.rpartition(".")[2]) in indices]
    vectors = {name: f"{name}/vector" for name in outputs}
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [vectors.get(name, name) for name in names]
    for name, vector in vectors.items():
        model.graph.node.append(onnx.helper.make_node("Squeeze", [vector], [name], name=name))
