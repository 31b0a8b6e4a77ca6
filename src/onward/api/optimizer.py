"""Optimizer: applies the optimizer model to a module's parameters."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING

import numpy as np

from onward.checkpoint.content import CheckpointData, OptimizerGroup
from onward.runtime.optimizers.vector import group_order, make_updater

if TYPE_CHECKING:
    from onward.api.module import Module
    from onward.api.schedulers import LRScheduler
    from onward.api.train_steps import ManySteps
    from onward.runtime.memory import Tensor
    from onward.runtime.optimizers.updater import Updater
    from onward.runtime.sessions import ModelFile

__all__ = ["Optimizer"]

# Updates after which the loss's scale is doubled, and where that ends.
_PATIENCE, _LARGEST_SCALE = 2000, 2.0**24


class Optimizer:
    """Updates the trainable parameters of a module from its gradients.

    `step()` does not change the gradients: call `module.lazy_reset_grad()` after it.
    `gradient_scale` multiplies the gradients of the following steps, `clip_norm` then limits their norm.
    """

    def __init__(self, optimizer_uri: ModelFile, module: Module) -> None:
        # not isinstance: distributed modules and tests stand in for Module
        if not hasattr(module, "run_state"):
            raise TypeError(f"Optimizer takes a Module, got {type(module).__name__}")
        self._module = module
        memory = module.memory
        if not memory.parameters.on_host and memory.arrange(group_order(optimizer_uri, memory.parameters)):
            module.attach()
        # The order matters on a device: parameters of one group lie together, so that one run updates all of
        # them.
        self._updater = self._make_updater(optimizer_uri)
        self._many_steps: ManySteps | None = None
        self._initial_rate = 1e-3
        self._scheduler: LRScheduler | None = None
        self.gradient_scale = 1.0
        self.gradient_norm: float | None = None
        self.set_learning_rate(1e-3)
        self._restore(module._state._data)
        module._optimizer = self

    def _make_updater(self, uri: ModelFile) -> Updater:
        """Runs the optimizer model; a rank may hold the state of its shard of the parameters only."""
        memory = self._module.memory
        return make_updater(
            uri,
            memory.parameters,
            memory.gradients,
            threads=self._module.threads,
            artifacts_id=self._module.signature.artifacts_id,
        )

    def follow(self, scheduler: LRScheduler, initial_rate: float) -> object:
        """Save the schedule with the optimizer from now on; returns what the checkpoint recorded of one, once.

        A second schedule over the same optimizer starts from the beginning.
        """
        self._scheduler, self._initial_rate = scheduler, initial_rate
        return self._module._state._data.extras.pop("scheduler", None)

    @property
    def is_plain(self) -> bool:
        """Whether nothing but the optimizer model decides what a step does: no subclass has a say."""
        return type(self) is Optimizer

    def step(self) -> bool:
        """Update the parameters; returns False if the update was skipped because of a non-finite gradient."""
        module = self._module
        module.require_values()
        # float16 gradients come multiplied by it, so that small ones do not vanish; the update divides it out.
        loss_scale = module.signature.loss_scale and module.memory[module.signature.loss_scale]
        scale = self.gradient_scale / (loss_scale.read().item() if loss_scale else 1.0)
        if self.clip_norm is not None or module.on_nonfinite != "ignore" or loss_scale:
            norm = self._norm() * scale
            self.gradient_norm = norm
            if (
                loss_scale
                and module.run_state.invalid is None
                and not self._adapt(loss_scale, math.isfinite(norm))
            ):
                return False
            if module.on_nonfinite != "ignore":
                invalid = module.run_state.invalid
                if invalid is None and not math.isfinite(norm):
                    module.refuse(self._blame())
                elif invalid is not None and module.on_nonfinite == "raise":
                    module.refuse(invalid)  # its error was caught and passed over
                if module.take_invalid() is not None:
                    return False
            if self.clip_norm is not None:
                # as torch's clip_grad_norm_, epsilon included
                scale *= min(self.clip_norm / (norm + 1e-6), 1.0)
        # The factor is applied inside the update: scaling the gradients themselves would be one more pass over
        # memory.
        self._updater.run(scale)
        return True

    @property
    def clip_norm(self) -> float | None:
        """The maximum norm of the gradients; None disables clipping."""
        return self._updater.clip_norm

    @clip_norm.setter
    def clip_norm(self, value: float | None) -> None:
        self._updater.clip_norm = value

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of the following steps."""
        rate = float(learning_rate)
        if not np.isfinite(rate):
            raise ValueError(f"the learning rate is {rate}: it must be a finite number")
        self._updater.learning_rate = rate

    def get_learning_rate(self) -> float:
        """The learning rate of the next step."""
        return self._updater.learning_rate

    def _adapt(self, loss_scale: Tensor, fits: bool) -> bool:
        """Lower the loss's scale where gradients ran out of float16; double it when none did for a long time.

        False where this update is to be skipped for it. At a scale of one, the gradients themselves are not finite.
        """
        run, scale = self._module.run_state, loss_scale.read().item()
        if not fits and scale > 1:
            # Halving finds a scale that fits within a few steps from any start; doubling tries a larger one
            # only rarely, as each try may cost an update.
            loss_scale.write(np.full(1, scale / 2, np.float32))
            run.scale_steps = 0
            self._module.lazy_reset_grad()
            return False
        run.scale_steps += 1
        if fits and run.scale_steps >= _PATIENCE:
            loss_scale.write(np.full(1, min(2 * scale, _LARGEST_SCALE), np.float32))
            run.scale_steps = 0
        return True

    def _norm(self) -> float:
        """‖g‖ over all gradients; ranks that share the work add up theirs."""
        return math.sqrt(self._module.memory.gradients.whole.squared_norm())

    def _blame(self) -> str:
        # Looked for only once the norm is not finite: the norm itself is one pass, this is one for each tensor.
        names = [
            n for n, array in self._module.memory.gradients.arrays().items() if not np.isfinite(array).all()
        ]
        more = f" (+{len(names) - 1} more)" if len(names) > 1 else ""
        which = f"of '{names[0]}'{more} " if names else ""
        return f"the gradient {which}is not finite at training step {self._module.run_state.steps}"

    def _restore(self, data: CheckpointData) -> None:
        for group in data.optimizer:
            if group.name == "group0":
                self._check_slots(group)
                self._updater.load(group.step, group.slots)
                self._initial_rate = group.initial_learning_rate
                self.set_learning_rate(data.number("learning_rate", group.initial_learning_rate))

    def _check_slots(self, group: OptimizerGroup) -> None:
        """Another optimizer's state is of no use; half of it would train on silently."""
        tensors = self._updater.slot_tensors()
        own_slots = {slot for slots in tensors.values() for slot in slots}
        saved_slots = {slot for name, slots in group.slots.items() if name in tensors for slot in slots}
        # A checkpoint that was never updated has empty state, which fits any optimizer.
        if group.step and own_slots != saved_slots:
            warnings.warn(
                f"the checkpoint's optimizer state is {sorted(saved_slots) or 'empty'}, this optimizer keeps "
                f"{sorted(own_slots) or 'none'}: was it saved with another optimizer? What is missing starts from zero",
                UserWarning,
                stacklevel=4,
            )

    def _describe_progress(self, data: CheckpointData) -> None:
        data.optimizer = [
            OptimizerGroup(
                "group0", self._updater.step, self._initial_rate, self._updater.slots_by_parameter()
            )
        ]
        data.extras["learning_rate"] = self.get_learning_rate()
        if self._scheduler is not None:
            data.extras["scheduler"] = self._scheduler.to_json()
