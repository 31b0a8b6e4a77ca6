"""Module: runs the training and the evaluation model over one set of parameters.

Parameters and gradients are in flat buffers that the sessions read and write in place. The roles of inputs and
outputs are in the files' metadata.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import onnxruntime as ort

from onward.api.convert_inputs import check_labels, hand_out, owned_value, prepare
from onward.api.state import CheckpointState
from onward.checkpoint.content import CheckpointData, NominalTensor
from onward.contract import FIRST_SCALE
from onward.errors import MAKE_ARTIFACTS, DeviceMemoryError, ModelError, NonFiniteError, OnwardError
from onward.ort_session import array_of
from onward.runtime.autotune import is_enabled, tune
from onward.runtime.devices import DeviceLike, find_device
from onward.runtime.environment import environment, warn_if_changed
from onward.runtime.memory import ModelMemory
from onward.runtime.sessions import require_one_set
from onward.runtime.step import EvaluationStep, Step, TrainingStep
from onward.runtime.tensors import HostTensor, onnx_type

if TYPE_CHECKING:
    from onward.api.optimizer import Optimizer
    from onward.ort_session import Feed
    from onward.runtime.sessions import ModelFile
    from onward.runtime.signature import Signature

__all__ = ["Module", "NonFinitePolicy", "RunState"]

NonFinitePolicy = Literal["raise", "skip", "ignore"]
_PATIENCE = 10


@dataclasses.dataclass
class RunState:
    """The progress of a run: what determines the next step's seed, and what was wrong since the last update.

    `scale_steps` counts the updates since the loss's scale changed, in float16.
    """

    seed: int
    steps: int = 0
    skipped_in_a_row: int = 0
    invalid: str | None = None
    scale_steps: int = 0


class Module:
    """A trainable model.

    The models are paths, or models in memory (bytes or ModelProto). `device` is "cpu", "cuda", "cuda:1", "auto"
    or a `Device` with options; parameters, gradients and optimizer state live there. `on_nonfinite` says what
    to do with a non-finite loss or gradient: raise an error (parameters keep their values), skip the update, or
    ignore it.
    `seed` makes dropout reproducible; the default is the checkpoint's seed, or 0. `autotune` times formulations of
    convolutions' gradients for each shape of a batch, once on a machine, and takes the fastest (docs/speed.md).

    `module(x, labels)` runs a training step after `train()` (the default) and evaluates after `eval()`; it
    returns the loss, or a tuple of the loss and the additional outputs. Numpy in gives numpy out; OrtValues
    give OrtValues.

    For code built on `Module`: `memory` holds all tensors of training, `step` runs the training model (you can pass
    your own), `run_state` is the run's progress, `parts` makes the buffers divisible into equal shards.
    """

    def __init__(
        self,
        train_model_uri: ModelFile,
        state: CheckpointState,
        eval_model_uri: ModelFile | None = None,
        device: DeviceLike = "cpu",
        session_options: ort.SessionOptions | None = None,
        *,
        on_nonfinite: NonFinitePolicy = "raise",
        seed: int | None = None,
        step: Step | None = None,
        parts: int = 1,
        autotune: bool = False,
    ) -> None:
        if not isinstance(state, CheckpointState):
            raise TypeError(f"Module takes a CheckpointState, got {type(state).__name__}")
        if on_nonfinite not in ("raise", "skip", "ignore"):
            raise ValueError(f"on_nonfinite is '{on_nonfinite}': choose raise, skip or ignore")
        if state._module is not None:
            raise OnwardError(
                "this CheckpointState belongs to another Module; load the checkpoint once for each"
            )
        self.training = True
        self.on_nonfinite: NonFinitePolicy = on_nonfinite
        # Before any file is read: a device that this machine lacks is the most common mistake, and quick to find.
        self.device = find_device(device)
        self._state = state
        # 0 is the runtime's word for as many as there are
        self.threads = (session_options.intra_op_num_threads if session_options else 0) or None
        self.step: Step = step or TrainingStep(
            train_model_uri,
            device=self.device,
            options=session_options,
            tune=tune if is_enabled(autotune) else None,
        )
        self._evaluation = (
            None
            if eval_model_uri is None
            else EvaluationStep(eval_model_uri, device=self.device, options=session_options)
        )
        self._eval_uri = eval_model_uri
        # before memory is taken: what a model declares may be anything
        parameters = self._matching(state._data)
        # One set of buffers for training, evaluation and the optimizer: nothing is copied between them.
        self.memory = ModelMemory(self.signature, self.device, parts=parts)
        self._adopt(parameters)
        self._check_evaluation()
        if self._evaluation is not None:
            require_one_set("eval", self._evaluation.signature.artifacts_id, self.signature.artifacts_id)
        self._options = session_options
        self._environment: str | None = None
        self._reset = True
        data = state._data
        warn_if_changed(data.extras.get("environment"), session_options)
        self.run_state = RunState(
            seed=data.whole_number("seed") if seed is None else seed,
            steps=data.whole_number("train_step"),
            skipped_in_a_row=data.whole_number("skipped_in_a_row"),
            invalid=str(data.extras["invalid"]) if data.extras.get("invalid") else None,
            scale_steps=data.whole_number("scale_steps"),
        )
        self._optimizer: Optimizer | None = None
        self.attach()
        for name, array in state._data.accumulation.items():
            if name in self.memory.gradients.tensors:
                self.memory.gradients.tensors[name].write(array)
                self._reset = False
        if not self._reset:
            self.step.gradients_changed()
        state._module = self

    @property
    def signature(self) -> Signature:
        """The names, shapes and roles of the training model's inputs and outputs."""
        return self.step.signature

    @property
    def is_loaded(self) -> bool:
        """Whether the parameters have values: those of a nominal checkpoint must be loaded first."""
        return not self._state._data.nominal

    def require_values(self) -> None:
        """An error where the parameters have no values."""
        self._state._data.require_values()

    def attach(self) -> None:
        """Bind the sessions to the memory; call it again when the layout has changed."""
        self.step.attach(self.memory)
        if self._evaluation is not None:
            self._evaluation.attach(self.memory)

    # ---- running ---------------------------------------------------------------------------------

    def __call__(self, *inputs: Any) -> Any:
        """Run a training step, or an evaluation: see the class."""
        # not by a call of its own: a step of a small network takes 70 µs, and each of Python's calls a tenth of one
        if self._state._data.nominal:
            self.require_values()
        if not self.training:
            return self._evaluate(inputs)
        feeds, as_numpy = prepare(self.step.signature, inputs)
        check_labels(self.step.signature, feeds)
        return self._train(feeds, as_numpy)

    def train_steps(self, *inputs: Any, learning_rates: Sequence[float] | np.ndarray | None = None) -> Any:
        """Train on stacks of batches: each input has an axis before its own, with the batches of the steps.

        Each step computes gradients, updates the parameters and resets the gradients, as the loop
        `loss = module(x, y); optimizer.step(); module.lazy_reset_grad()` does, with the same results. Small models
        take all steps in one run, which saves most of the time of a call. `learning_rates` has one for each step
        (default: the optimizer's own, which stays as it is). Returns what a call returns, stacked: the losses, or a
        tuple of these and the additional outputs.
        """
        from onward.api.train_steps import train_steps

        self.require_values()
        return train_steps(self, inputs, learning_rates)

    def train(self, mode: bool = True) -> Module:
        """Set training mode: calls run training steps."""
        self.training = mode
        return self

    def eval(self) -> Module:
        """Set evaluation mode: no dropout, batch norm with its running statistics."""
        self.training = False
        return self

    def lazy_reset_grad(self) -> None:
        """Make the next training step overwrite the gradients instead of accumulating."""
        self._reset = True

    def _train(self, feeds: list[Feed], as_numpy: bool) -> Any:
        # Statistics are saved once for each accumulation: a bad step takes back those of the good ones before
        # it, too.
        guarded, run, memory = self.on_nonfinite != "ignore", self.run_state, self.memory
        if self._reset:
            run.invalid = None
            if guarded and memory.statistics:
                memory.keep()
        try:
            results = self.step.run(feeds, reset=self._reset, seed=run.seed, step=run.steps + 1)
        except DeviceMemoryError:
            self._discard()  # gradients may be half written
            raise
        # Counted after the run: a step that failed for want of memory is repeated with the same random numbers.
        run.steps += 1
        self._reset = False
        problem = self._find_problem(results[0]) if guarded else None
        if problem is not None:
            self.refuse(f"{problem} at training step {run.steps}")
        elif memory.statistics:
            memory.commit()
        return hand_out(results, as_numpy)

    def _find_problem(self, loss: np.ndarray) -> str | None:
        if not math.isfinite(loss.item()):
            return f"the loss is {loss.reshape(-1)[0]}"
        # a variance can overflow while the normalized values, and so the loss, stay finite
        name = self.memory.first_nonfinite_statistic() if self.memory.statistics else None
        return None if name is None else f"the batch-norm statistic '{name}' is not finite"

    def refuse(self, problem: str) -> None:
        """Record a non-finite value: neither this step nor those accumulated with it may update parameters."""
        self.run_state.invalid = problem
        if self.on_nonfinite == "raise":
            self._discard()
            raise NonFiniteError(
                f"{problem}; parameters are unchanged. Check the data and lower the learning rate, or choose "
                "on_nonfinite='skip'"
            )

    def take_invalid(self) -> str | None:
        """Return and clear the problem since the last update, if any; ten skipped updates in a row raise an error."""
        run = self.run_state
        problem, run.invalid = run.invalid, None
        if problem is None:
            run.skipped_in_a_row = 0
            return None
        run.skipped_in_a_row += 1
        self._discard()
        # Ten in a row are no accident of one batch: the run has diverged, and would skip for ever.
        if run.skipped_in_a_row >= _PATIENCE:
            run.invalid = problem
            raise NonFiniteError(f"{_PATIENCE} updates in a row were skipped; the last one because {problem}")
        return problem

    def _discard(self) -> None:
        """Discard the gradients, and the batch-norm updates of the steps that computed them."""
        self._reset = True
        # The gradients themselves need no clearing: the next step overwrites them.
        self.memory.restore()

    def _evaluate(self, inputs: Sequence[Any]) -> Any:
        if self._evaluation is None:
            raise ModelError(
                "Eval model was not provided. Cannot evaluate: give Module the eval model (eval_model_uri=…).",
                hint=MAKE_ARTIFACTS,
            )
        feeds, as_numpy = prepare(self._evaluation.signature, inputs)
        check_labels(self._evaluation.signature, feeds)
        return hand_out(self._evaluation.run(feeds), as_numpy)

    # ---- parameters ------------------------------------------------------------------------------

    def get_parameters_size(self, trainable_only: bool = True) -> int:
        """The number of elements of all parameters."""
        return sum(
            int(np.prod(self.signature.shapes[name], dtype=np.int64)) for name in self._order(trainable_only)
        )

    def get_contiguous_parameters(self, trainable_only: bool = False) -> ort.OrtValue:
        """All parameters in one vector, float32 or as they are trained, in the order of the training model's inputs."""
        self.require_values()
        arrays, kind = self.memory.arrays(), self.memory.parameters.whole.dtype
        parts = [np.ravel(arrays[name]).astype(kind, copy=False) for name in self._order(trainable_only)]
        whole = np.concatenate(parts) if parts else np.zeros(0, kind)
        return owned_value(whole)

    def copy_buffer_to_parameters(
        self, buffer: ort.OrtValue | np.ndarray, trainable_only: bool = True
    ) -> None:
        """Set the parameters from a vector like the one that `get_contiguous_parameters` returns."""
        if not self.is_loaded and trainable_only:
            raise OnwardError(
                "For nominal checkpoint state, all parameters need to be loaded: pass trainable_only=False."
            )
        vector = np.asarray(array_of(buffer))
        expected = self.get_parameters_size(trainable_only)
        if vector.size != expected:
            raise OnwardError(f"Parameters buffer size incorrect. Expected:{expected}, Actual:{vector.size}")
        kind = self.memory.parameters.whole.dtype
        if vector.dtype != kind:
            raise OnwardError(f"Parameters buffer must be {kind}, got {vector.dtype}")
        # Any shape of the right size is taken, as onnxruntime-training does.
        vector = vector.reshape(-1)
        start = 0
        for name in self._order(trainable_only):
            tensor = self.memory[name]
            size = math.prod(tensor.shape)
            tensor.write(vector[start : start + size].reshape(tensor.shape))
            start += size
        if not self.is_loaded:
            self._state._data.nominal = False
            self._publish()

    def export_model_for_inferencing(
        self, inference_model_uri: str | os.PathLike[str], graph_output_names: Sequence[str]
    ) -> None:
        """Export the trained model for inference: pruned to the chosen outputs, weights embedded."""
        self.require_values()
        if self._eval_uri is None:
            raise ModelError(
                "Eval model was not provided. Cannot export a model for inferencing.", hint=MAKE_ARTIFACTS
            )
        # its graph libraries take longer to load than all the rest, and many runs never need them
        from onward.runtime import inference_model

        inference_model.export(self._eval_uri, self._state.to_data(), graph_output_names, inference_model_uri)

    def input_names(self) -> list[str]:
        """The names of the inputs that a call takes, in order."""
        return list(self.active.signature.inputs)

    def output_names(self) -> list[str]:
        """The names of what a call returns, the loss first."""
        return list(self.active.signature.outputs)

    @property
    def active(self) -> Step | EvaluationStep:
        """What the next call runs."""
        return self.step if self.training or self._evaluation is None else self._evaluation

    def _order(self, trainable_only: bool) -> list[str]:
        trainable = self.memory.parameters.spans
        return [name for name in self.signature.parameters if not trainable_only or name in trainable]

    def _matching(self, data: CheckpointData) -> dict[str, np.ndarray | NominalTensor]:
        """The state's parameters, which must be those of the training model, in its shapes."""
        signature = self.signature
        parameters = {**data.trainable, **data.frozen}
        if signature.loss_scale is not None and isinstance(
            parameters.get(signature.loss_scale), NominalTensor | None
        ):
            # models in float32 have none
            parameters[signature.loss_scale] = np.full(1, FIRST_SCALE, np.float32)
        missing = [name for name in signature.parameters if name not in parameters]
        if missing:
            raise OnwardError(
                f"the checkpoint lacks {len(missing)} parameters of the training model, "
                f"for example '{missing[0]}': do they belong together?"
            )
        for name in signature.parameters:
            value = parameters[name]
            if not isinstance(value, NominalTensor) and tuple(value.shape) != tuple(signature.shapes[name]):
                raise OnwardError(
                    f"parameter '{name}' has shape {tuple(value.shape)} in the checkpoint and "
                    f"{tuple(signature.shapes[name])} in the training model: do they belong together?"
                )
        return parameters

    def _adopt(self, parameters: Mapping[str, np.ndarray | NominalTensor]) -> None:
        """Move the state's parameters into the buffers that the sessions read."""
        signature, memory = self.signature, self.memory
        trained: dict[str, np.ndarray] = {}
        for name in signature.parameters:
            value = parameters[name]
            if isinstance(value, NominalTensor):
                if name not in memory.parameters.spans:
                    memory.add_frozen(name, np.zeros(signature.shapes[name], signature.dtypes[name]))
            elif name in memory.parameters.spans:
                trained[name] = value
            else:
                memory.add_frozen(name, value)
        memory.parameters.write(trained)
        if self.is_loaded:
            self._publish()

    def _check_evaluation(self) -> None:
        """The eval model reads the same parameters, or some of them."""
        if self._evaluation is None:
            return
        shapes, signature = self.signature.shapes, self._evaluation.signature
        for name in signature.parameters:
            if shapes.get(name) != signature.shapes[name]:
                # which of the two is wrong, only the user knows
                other = f"has {shapes[name]}" if name in shapes else "does not know it"
                raise ModelError(
                    f"the eval model reads parameter '{name}' of shape {signature.shapes[name]}, the training model "
                    f"{other}: do they belong together?"
                )

    def _publish(self) -> None:
        """The state shows what the sessions train: the memory itself on the host, else nothing but its type."""
        for group in (self._state._data.trainable, self._state._data.frozen):
            for name in group:
                if name in self.memory:
                    tensor = self.memory[name]
                    on_host = isinstance(tensor, HostTensor)
                    group[name] = tensor.array if on_host else NominalTensor(onnx_type(tensor.dtype))

    def _describe_progress(self, data: CheckpointData) -> None:
        """Add to a checkpoint what a bit-exact resume needs."""
        run = self.run_state
        data.extras["seed"] = run.seed
        data.extras["train_step"] = run.steps
        if self._environment is None:  # reading versions takes a millisecond: once is enough
            self._environment = json.dumps(environment(self._options))
        data.extras["environment"] = self._environment
        if run.skipped_in_a_row:
            data.extras["skipped_in_a_row"] = run.skipped_in_a_row
        if run.invalid is not None:
            data.extras["invalid"] = run.invalid
        if run.scale_steps:
            data.extras["scale_steps"] = run.scale_steps
        if not self._reset:
            data.accumulation = self.memory.gradients.arrays()
        if self._optimizer is not None:
            self._optimizer._describe_progress(data)
        else:
            data.optimizer = self._state._data.optimizer
            other_extras = {k: v for k, v in self._state._data.extras.items() if k not in data.extras}
            data.extras.update(other_extras)
