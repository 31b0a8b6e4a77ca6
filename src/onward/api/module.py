"""Module: runs the training and the evaluation model over one set of parameters.

Parameters and gradients live in flat buffers that the sessions read and write in place. Knows graphs only
by their inputs and outputs; what each is for is in the files' metadata.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import onnxruntime as ort

from onward.api.inputs import check_labels, prepare
from onward.api.state import CheckpointState
from onward.checkpoint import CheckpointData, NominalTensor
from onward.errors import ModelError, NonFiniteError, OnwardError
from onward.runtime.environment import environment, warn_if_changed
from onward.runtime.flat import FlatBuffer
from onward.runtime.sessions import ModelFile
from onward.runtime.step import EvaluationStep, TrainingStep

__all__ = ["Module", "NonFinitePolicy"]

NonFinitePolicy = Literal["raise", "skip", "ignore"]
_LOAD_FIRST = "The state is nominal: it has no parameter values. Please load the model parameters first."
_PATIENCE = 10


class Module:
    """A model that trains.

    The models are paths, or models in memory (bytes or ModelProto). `on_nonfinite` says what to do about a
    loss or gradient that is not finite: raise (parameters keep their values), skip that update, or ignore it.
    `seed` makes dropout reproducible; without it the one in the checkpoint continues, or 0.

    `module(x, labels)` runs a training step after `train()` (the default) and evaluates after `eval()`; it
    returns the loss, or a tuple of the loss and the additional outputs. Numpy in gives numpy out; OrtValues
    give OrtValues.
    """

    def __init__(
        self,
        train_model_uri: ModelFile,
        state: CheckpointState,
        eval_model_uri: ModelFile | None = None,
        device: str = "cpu",
        session_options: ort.SessionOptions | None = None,
        *,
        on_nonfinite: NonFinitePolicy = "raise",
        seed: int | None = None,
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
        self._state = state
        # 0 is the runtime's word for as many as there are
        self._threads = (session_options.intra_op_num_threads if session_options else 0) or None
        self._step = self._make_step(train_model_uri, device, session_options)
        self._evaluation = (
            None
            if eval_model_uri is None
            else EvaluationStep(eval_model_uri, device=device, options=session_options)
        )
        self._eval_uri = eval_model_uri
        plan = self._step.plan
        self._parameters = self._make_buffer({name: plan.shapes[name] for name in plan.trainable})
        self._gradients = self._make_buffer({name: plan.shapes[name] for name in plan.trainable})
        self._frozen: dict[str, np.ndarray] = {}
        self._loaded = not state._data.nominal
        self._adopt(state._data)
        self._check_evaluation()
        self._step.attach(self._parameters.views, self._frozen, self._gradients.views)
        if self._evaluation is not None:
            self._evaluation.attach({**self._parameters.views, **self._frozen})
        self._options = session_options
        self._environment: str | None = None
        self._reset = True
        self._statistics_before: dict[str, np.ndarray] = {}
        extras = state._data.extras
        warn_if_changed(extras.get("environment"), session_options)
        self._bad_in_a_row = int(extras.get("skipped_in_a_row", 0))
        self._invalid: str | None = str(extras["invalid"]) if extras.get("invalid") else None
        self._seed = int(extras.get("seed", 0)) if seed is None else seed
        self._steps = int(extras.get("train_step", 0))
        self._optimizer: Any = None
        for name, array in state._data.accumulation.items():
            if name in self._gradients.views:
                np.copyto(self._gradients.views[name], array)
                self._reset = False
        if not self._reset:
            self._step.gradients_changed()
        state._module = self

    def _make_step(self, uri: ModelFile, device: str, options: ort.SessionOptions | None) -> TrainingStep:
        """What runs the training model; a pipeline stage has its own."""
        return TrainingStep(uri, device=device, options=options)

    def _make_buffer(self, shapes: dict[str, tuple[int, ...]]) -> FlatBuffer:
        """The memory of parameters or gradients; ranks that share the work need it in equal parts."""
        return FlatBuffer(shapes)

    # ---- running ---------------------------------------------------------------------------------

    def __call__(self, *inputs: Any) -> Any:
        """A training step, or an evaluation: see the class."""
        if not self._loaded:
            raise OnwardError(_LOAD_FIRST)
        if not self.training:
            return self._evaluate(inputs)
        feeds, as_numpy = prepare(self._step.plan, inputs)
        check_labels(self._step.plan, feeds)
        return self._train(feeds, as_numpy)

    def train(self, mode: bool = True) -> Module:
        """Make calls training steps."""
        self.training = mode
        return self

    def eval(self) -> Module:
        """Make calls evaluations: dropout off, batch norm by its running statistics."""
        self.training = False
        return self

    def lazy_reset_grad(self) -> None:
        """Let the next training step replace the gradients instead of adding to them."""
        self._reset = True

    def _train(self, feeds: list, as_numpy: bool) -> Any:
        guarded = self.on_nonfinite != "ignore"
        if self._reset:
            self._invalid = None
            if guarded and self._step.following:
                self._statistics_before = {n: self._frozen[n].copy() for n in self._step.following}
        results = self._step.run(feeds, reset=self._reset, seed=self._seed, step=self._steps + 1)
        self._steps += 1
        self._reset = False
        problem = self._find_problem(results[0]) if guarded else None
        if problem is None:
            self._step.commit_statistics()
        else:
            self._refuse(f"{problem} at training step {self._steps}")
        return _hand_out(results, as_numpy)

    def _find_problem(self, loss: np.ndarray) -> str | None:
        if not math.isfinite(loss.item()):
            return f"the loss is {loss.reshape(-1)[0]}"
        for name, array in self._step.following.items():
            # a variance can overflow while the normalized values, and so the loss, stay finite
            if not np.isfinite(array).all():
                return f"the batch-norm statistic '{name}' is not finite"
        return None

    def _refuse(self, problem: str) -> None:
        """Something is not finite: nothing may be updated from this step, nor from those it was added to."""
        self._invalid = problem
        if self.on_nonfinite == "raise":
            self._discard()
            raise NonFiniteError(
                f"{problem}; parameters are unchanged. Check the data and lower the learning rate, or choose "
                "on_nonfinite='skip'"
            )

    def _take_invalid(self) -> str | None:
        """What was wrong since the last update, if anything; ten bad updates in a row are an error."""
        problem, self._invalid = self._invalid, None
        if problem is None:
            self._bad_in_a_row = 0
            return None
        self._bad_in_a_row += 1
        self._discard()
        if self._bad_in_a_row >= _PATIENCE:
            self._invalid = problem
            raise NonFiniteError(f"{_PATIENCE} updates in a row were skipped; the last one because {problem}")
        return problem

    def _discard(self) -> None:
        """Forget the gradients, and what the steps that made them did to batch-norm statistics."""
        self._reset = True
        for name, array in self._statistics_before.items():
            np.copyto(self._frozen[name], array)

    def _evaluate(self, inputs: Sequence[Any]) -> Any:
        if self._evaluation is None:
            raise ModelError(
                "Eval model was not provided. Cannot evaluate: give Module the eval model (eval_model_uri=…)."
            )
        feeds, as_numpy = prepare(self._evaluation.plan, inputs)
        check_labels(self._evaluation.plan, feeds)
        return _hand_out(self._evaluation.run(feeds), as_numpy)

    # ---- parameters ------------------------------------------------------------------------------

    def get_parameters_size(self, trainable_only: bool = True) -> int:
        """How many numbers the parameters have."""
        return sum(
            int(np.prod(self._step.plan.shapes[name], dtype=np.int64)) for name in self._order(trainable_only)
        )

    def get_contiguous_parameters(self, trainable_only: bool = False) -> ort.OrtValue:
        """All parameters in one float32 vector, in the order of the training model's inputs."""
        if not self._loaded:
            raise OnwardError(_LOAD_FIRST)
        parts = [
            np.ravel(self._view(name)).astype(np.float32, copy=False) for name in self._order(trainable_only)
        ]
        whole = np.concatenate(parts) if parts else np.zeros(0, np.float32)
        return _owned(whole)

    def copy_buffer_to_parameters(
        self, buffer: ort.OrtValue | np.ndarray, trainable_only: bool = True
    ) -> None:
        """Set the parameters from a vector like the one that `get_contiguous_parameters` gives."""
        if not self._loaded and trainable_only:
            raise OnwardError(
                "For nominal checkpoint state, all parameters need to be loaded: pass trainable_only=False."
            )
        vector = buffer.numpy() if isinstance(buffer, ort.OrtValue) else np.asarray(buffer)
        expected = self.get_parameters_size(trainable_only)
        if vector.size != expected:
            raise OnwardError(f"Parameters buffer size incorrect. Expected:{expected}, Actual:{vector.size}")
        if vector.dtype != np.float32:
            raise OnwardError(f"Parameters buffer must be float32, got {vector.dtype}")
        vector = vector.reshape(-1)
        start = 0
        for name in self._order(trainable_only):
            view = self._view(name)
            np.copyto(view, vector[start : start + view.size].reshape(view.shape), casting="unsafe")
            start += view.size
        if not self._loaded:
            self._loaded = True
            self._state._data.nominal = False
            self._publish()

    def export_model_for_inferencing(
        self, inference_model_uri: str | os.PathLike[str], graph_output_names: Sequence[str]
    ) -> None:
        """Write the trained model for inference: chosen outputs, weights inside, nothing of training."""
        if not self._loaded:
            raise OnwardError(_LOAD_FIRST)
        if self._eval_uri is None:
            raise ModelError("Eval model was not provided. Cannot export a model for inferencing.")
        # its graph libraries take longer to load than all the rest, and many runs never need them
        from onward.runtime import inference_model

        inference_model.export(self._eval_uri, self._state.to_data(), graph_output_names, inference_model_uri)

    def input_names(self) -> list[str]:
        """The names of the inputs that a call takes, in order."""
        return list(self._active().plan.inputs)

    def output_names(self) -> list[str]:
        """The names of what a call returns, the loss first."""
        return list(self._active().plan.outputs)

    def _active(self) -> TrainingStep | EvaluationStep:
        return self._step if self.training or self._evaluation is None else self._evaluation

    def _order(self, trainable_only: bool) -> list[str]:
        plan = self._step.plan
        return [name for name in plan.parameters if not trainable_only or name in self._parameters.views]

    def _view(self, name: str) -> np.ndarray:
        found = self._parameters.views.get(name)
        return self._frozen[name] if found is None else found

    def _adopt(self, data: CheckpointData) -> None:
        """Move the state's parameters into the buffers that the sessions read."""
        plan = self._step.plan
        given = {**data.trainable, **data.frozen}
        missing = [name for name in plan.parameters if name not in given]
        if missing:
            raise OnwardError(
                f"the checkpoint lacks {len(missing)} parameters of the training model, "
                f"for example '{missing[0]}': do they belong together?"
            )
        for name in plan.parameters:
            value = given[name]
            if isinstance(value, NominalTensor):
                if name not in self._parameters.views:
                    self._frozen[name] = np.zeros(plan.shapes[name], plan.dtypes[name])
                continue
            if tuple(value.shape) != tuple(plan.shapes[name]):
                raise OnwardError(
                    f"parameter '{name}' has shape {tuple(value.shape)} in the checkpoint and "
                    f"{tuple(plan.shapes[name])} in the training model: do they belong together?"
                )
            if name in self._parameters.views:
                np.copyto(self._parameters.views[name], value)
            else:
                self._frozen[name] = np.array(value, order="C", copy=True)
        if self._loaded:
            self._publish()

    def _check_evaluation(self) -> None:
        """The eval model reads the same parameters, or some of them."""
        if self._evaluation is None:
            return
        known, plan = self._step.plan.shapes, self._evaluation.plan
        for name in plan.parameters:
            if known.get(name) != plan.shapes[name]:
                other = f"has {known[name]}" if name in known else "does not know it"
                raise ModelError(
                    f"the eval model reads parameter '{name}' of shape {plan.shapes[name]}, the training model "
                    f"{other}: do they belong together?"
                )

    def _publish(self) -> None:
        """The state shows what the sessions train."""
        for group in (self._state._data.trainable, self._state._data.frozen):
            for name in group:
                if name in self._parameters.views or name in self._frozen:
                    group[name] = self._view(name)

    def _describe_progress(self, data: CheckpointData) -> None:
        """Add to a checkpoint what a resumed run needs to go on as if it had not stopped."""
        data.extras["seed"] = self._seed
        data.extras["train_step"] = self._steps
        if self._environment is None:  # reading versions takes a millisecond: once is enough
            self._environment = json.dumps(environment(self._options))
        data.extras["environment"] = self._environment
        if self._bad_in_a_row:
            data.extras["skipped_in_a_row"] = self._bad_in_a_row
        if self._invalid is not None:
            data.extras["invalid"] = self._invalid
        if not self._reset:
            data.accumulation = dict(self._gradients.views)
        if self._optimizer is not None:
            self._optimizer._describe_progress(data)
        else:
            data.optimizer = self._state._data.optimizer
            kept = {k: v for k, v in self._state._data.extras.items() if k not in data.extras}
            data.extras.update(kept)


def _hand_out(results: list[np.ndarray], as_numpy: bool) -> Any:
    values = results if as_numpy else [_owned(r) for r in results]
    return values[0] if len(values) == 1 else tuple(values)


def _owned(array: np.ndarray) -> ort.OrtValue:
    """A value with memory of its own: one made from an array dies with it, even while `.numpy()` shows it."""
    value = ort.OrtValue.ortvalue_from_shape_and_type(list(array.shape), array.dtype.type)
    value.update_inplace(np.ascontiguousarray(array))
    return value
