"""Many training steps in one call: as one run where that is possible and faster, else one by one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.api.convert_inputs import check_labels, hand_out, prepare
from onward.errors import OnwardError
from onward.runtime.many_steps import ManySteps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from onward.api.module import Module
    from onward.api.optimizer import Optimizer

__all__ = ["train_steps"]


def train_steps(
    module: Module, inputs: Sequence[Any], learning_rates: Sequence[float] | np.ndarray | None
) -> Any:
    """See `Module.train_steps`."""
    optimizer: Optimizer | None = module._optimizer
    if optimizer is None:
        raise OnwardError("train_steps needs an optimizer: make Optimizer(optimizer_uri, module) first")
    if not module.training:
        raise OnwardError("the module is in evaluation mode: call module.train() first")
    ready, as_numpy = prepare(module.signature, inputs)
    feeds = [value if isinstance(value, np.ndarray) else value.numpy() for value in ready]
    count = _count(module, feeds)
    check_labels(module.signature, feeds, stacked=True)
    rates = _rates(learning_rates, count, optimizer)
    module.lazy_reset_grad()
    results = _joined(module, optimizer, feeds, rates) or _one_by_one(module, optimizer, feeds, rates)
    return hand_out(results, as_numpy)


def _joined(
    module: Module, optimizer: Optimizer, feeds: Sequence[np.ndarray], rates: Sequence[float]
) -> list[np.ndarray] | None:
    """All steps as one run; None, and nothing changed, where they have to be taken one by one."""
    run = module.run_state
    if not optimizer.is_plain or optimizer.gradient_scale != 1.0:
        return None
    if optimizer._many_steps is None:
        optimizer._many_steps = ManySteps.of(module.step, module.memory, optimizer._updater)
    if optimizer._many_steps is None:
        return None
    made = optimizer._many_steps.run(
        feeds, rates, seed=run.seed, first=run.steps + 1, options=module._options
    )
    if made is None:
        return None
    run.steps += len(rates)
    run.invalid, run.skipped_in_a_row = None, 0
    if optimizer.clip_norm is not None or module.on_nonfinite != "ignore":
        optimizer.gradient_norm = made.gradient_norm
    return made.results


def _one_by_one(
    module: Module, optimizer: Optimizer, feeds: Sequence[np.ndarray], rates: Sequence[float]
) -> list[np.ndarray]:
    stacks: list[list[np.ndarray]] = [[] for _ in module.signature.outputs]
    own = optimizer.get_learning_rate()
    try:
        for index, rate in enumerate(rates):
            optimizer.set_learning_rate(rate)
            made = module(*[array[index] for array in feeds])
            for stack, value in zip(stacks, made if isinstance(made, tuple) else (made,)):
                stack.append(np.asarray(value))
            optimizer.step()
            module.lazy_reset_grad()
    finally:
        optimizer.set_learning_rate(own)
    return [np.stack(stack) for stack in stacks]


def _count(module: Module, feeds: Sequence[np.ndarray]) -> int:
    """The number of steps, which all inputs agree on."""
    names = module.signature.inputs
    if not feeds:
        raise OnwardError("the model has no inputs to stack: call it step by step")
    for name, array in zip(names, feeds):
        if array.ndim == 0 or len(array) != len(feeds[0]) or len(array) == 0:
            shapes = ", ".join(f"{n} {list(a.shape)}" for n, a in zip(names, feeds))
            raise ValueError(
                f"train_steps takes stacks of batches, as many for '{name}' as for '{names[0]}' and at least one: "
                f"got {shapes}. The first axis counts the steps, the second the samples of a batch"
            )
    return len(feeds[0])


def _rates(given: Sequence[float] | np.ndarray | None, count: int, optimizer: Optimizer) -> list[float]:
    if given is None:
        return [optimizer.get_learning_rate()] * count
    rates = [float(rate) for rate in np.asarray(given).reshape(-1)]
    if len(rates) != count:
        raise ValueError(f"there are {len(rates)} learning rates for {count} steps: give one for each step")
    for index, rate in enumerate(rates):
        if not math.isfinite(rate):
            raise ValueError(f"the learning rate of step {index} is {rate}: it must be a finite number")
    return rates
