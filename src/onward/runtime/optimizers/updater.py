"""What updaters share: the scalars of an update, the state, groups of parameters; and rules over whole parameters."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import onnx
import onnxruntime as ort

from onward import contract
from onward.contract import NEXT, SCALARS
from onward.errors import MAKE_ARTIFACTS, DeviceMemoryError, ModelError, OnwardError
from onward.graph.proto.optimizer_models import repeat, split_scalars, to_single, without_scaling
from onward.runtime.bound import inputs_on_host
from onward.runtime.device_tensor import is_out_of_memory
from onward.runtime.memory import FlatBuffer, HostTensor, Tensor, make_small_tensor, make_tensor
from onward.runtime.resident import run_resident
from onward.runtime.sessions import make_session
from onward.runtime.tensors import run_bound

if TYPE_CHECKING:
    from onward.runtime.device_check import DeviceReport

# The numbers of the state by parameter and slot.
Slots = dict[str, dict[str, np.ndarray]]


class Updater(abc.ABC):
    """Applies an optimizer model to the parameters; the scalars are in memory that bindings alias."""

    is_host_vector = False  # whether all it updates is one vector of host memory

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
        return self._step.item()

    def run(self, gradient_scale: float) -> None:
        """One update; one that fails does not count."""
        # before the run: rules count from 1, for the bias correction of Adam
        self._step[0] += 1
        self._scale[0] = gradient_scale
        try:
            self._apply()
        except Exception as error:
            self._step[0] -= 1
            if isinstance(error, OnwardError):
                raise
            if is_out_of_memory(error):
                raise DeviceMemoryError(
                    f"there is too little memory for an update of the parameters: {str(error).splitlines()[0]}"
                ) from error
            raise ModelError(
                f"the optimizer model failed in an update: {error}", hint=MAKE_ARTIFACTS
            ) from error

    def load(self, step: int, slots: Slots) -> None:
        """Load the state of an earlier run."""
        self._step[0] = step
        for parameter, state in self.slot_tensors().items():
            for name, tensor in state.items():
                # what a checkpoint lacks starts from zero, with a warning of `Optimizer`
                if parameter in slots and name in slots[parameter]:
                    _copy_state(tensor, slots[parameter][name], parameter, name)

    @abc.abstractmethod
    def _apply(self) -> None: ...

    @abc.abstractmethod
    def slot_tensors(self) -> dict[str, dict[str, Tensor]]:
        """The state's tensors, by parameter and slot."""

    def slots_by_parameter(self) -> Slots:
        """The state's numbers, by parameter and slot; on the host the memory itself."""
        return {
            parameter: {slot: tensor.read() for slot, tensor in state.items()}
            for parameter, state in self.slot_tensors().items()
        }


class Rule(NamedTuple):
    """An optimizer model, and what its metadata says of it."""

    model: onnx.ModelProto
    options: dict[str, Any]


class ElementwiseUpdater(Updater):
    """An elementwise rule over all parameters as one vector."""

    def __init__(self, rule: Rule, parameters: FlatBuffer, gradients: FlatBuffer) -> None:
        super().__init__(rule.options["clip_norm"])
        self._parameters, self._gradients = parameters, gradients
        self._program, plain = split_scalars(rule.model, SCALARS)
        # Mostly nothing is clipped: a product with 1 would be a pass over all gradients.
        self._models = {True: plain, False: without_scaling(plain)}
        # what a float32 model reads is a float32: the program must compute with the same number
        self._round = to_single if parameters.whole.dtype == np.float32 else float
        self._settings = [(factor, self._round(decay)) for factor, decay in settings_of(rule.options)]
        self._scalars = self._new_scalars()
        self._slots = {
            name: FlatBuffer(parameters.shapes, device=parameters.device, dtype=parameters.whole.dtype)
            for name in rule.options["slots"]
        }

    @property
    def _scalar_names(self) -> list[str]:
        return ["learning_rate", "gradient_scale", "weight_decay", *self._program.results]

    def _new_scalars(self) -> list[np.ndarray]:
        """Memory for the scalars of an update: a row for each group of parameters."""
        return [np.zeros(len(self._scalar_names), self._parameters.whole.dtype) for _ in self._settings]

    def _scalar_views(self, setting: int) -> dict[str, np.ndarray]:
        """The memory of a group's scalars, by the names of the model's inputs."""
        row = self._scalars[setting]
        return {name: row[index : index + 1] for index, name in enumerate(self._scalar_names)}

    def _scalar_values(self, setting: int, rate: float, step: int, scale: float) -> list[float]:
        """What a group's update reads: the rate, the scale, the decay, and what the program computes of them."""
        factor, decay = self._settings[setting]
        rate = self._round(rate * factor)
        return [rate, scale, decay, *self._program.run(rate, step, scale, decay)]

    def _set_scalars(self) -> bool:
        """Compute the scalars of this update; whether its gradients are to be scaled."""
        rate, step, scale = self._learning_rate, self.step, self._scale.item()
        for setting, row in enumerate(self._scalars):
            row[:] = self._scalar_values(setting, rate, step, scale)
        return scale != 1.0

    def slot_tensors(self) -> dict[str, dict[str, Tensor]]:
        return {
            parameter: {name: flat.tensors[parameter] for name, flat in self._slots.items()}
            for parameter in self._parameters.spans
        }

    def slots_by_parameter(self) -> Slots:
        arrays = {name: flat.arrays() for name, flat in self._slots.items()}
        return {
            parameter: {name: array[parameter] for name, array in arrays.items()}
            for parameter in self._parameters.spans
        }

    def slot_vectors(self) -> dict[str, np.ndarray]:
        """Each slot of all parameters as one vector."""
        return {name: flat.whole.read() for name, flat in self._slots.items()}


def settings_of(options: dict) -> list[tuple[float, float]]:
    """The learning rate's factor and the weight decay: of parameters in no group, then of each group."""
    settings = [(1.0, options["weight_decay"])]
    for group in options["groups"]:
        decay = group["weight_decay"]
        settings.append((group["learning_rate_scale"], options["weight_decay"] if decay is None else decay))
    return settings


def group_of(options: dict) -> dict[str, int]:
    """The place among the settings of each parameter that is in a group."""
    return {name: i + 1 for i, group in enumerate(options["groups"]) for name in group["parameters"]}


def runs_of(options: dict, parameters: FlatBuffer) -> list[tuple[int, int, int]]:
    """Stretches of the vector that share their settings: start, stop, and the place of the settings."""
    of_parameter = group_of(options)
    starts = [start for start, _ in parameters.spans.values()]
    runs: list[tuple[int, int, int]] = []
    for name, start, stop in zip(parameters.spans, starts, [*starts[1:], parameters.whole.shape[0]]):
        index = of_parameter.get(name, 0)
        if runs and runs[-1][2] == index:
            runs[-1] = (runs[-1][0], stop, index)
        else:
            runs.append((start, stop, index))
    return runs


def _copy_state(target: Tensor, saved: np.ndarray, parameter: str, slot: str) -> None:
    if saved.shape != target.shape:
        raise OnwardError(
            f"the checkpoint's {slot} of '{parameter}' has shape {saved.shape}, the optimizer keeps {target.shape}: "
            "was it saved with another optimizer?"
        )
    target.write(saved)


# --- Rules over whole parameters: by name, or custom ones over sequences.


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
