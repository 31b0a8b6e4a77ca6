"""Many training steps in one call: as one run where that is possible and faster, else one by one."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import onnxruntime as ort

from onward.api.convert_inputs import check_labels, hand_out, prepare
from onward.contract import SEED
from onward.errors import ModelError, OnwardError
from onward.ort_session import array_of, quiet_options
from onward.runtime.sessions import make_session
from onward.runtime.signature import step_seed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from onward.api.module import Module
    from onward.api.optimizer import Optimizer
    from onward.runtime.memory import ModelMemory
    from onward.runtime.optimizers.updater import Updater
    from onward.runtime.optimizers.vector import HostUpdater
    from onward.runtime.step import Step, TrainingStep
    from onward.whole_step.scan import JoinedStep


def train_steps(
    module: Module, inputs: Sequence[Any], learning_rates: Sequence[float] | np.ndarray | None
) -> Any:
    """See `Module.train_steps`."""
    optimizer = module._optimizer
    if optimizer is None:
        raise OnwardError("train_steps needs an optimizer: make Optimizer(optimizer_uri, module) first")
    if not module.training:
        raise OnwardError("the module is in evaluation mode: call module.train() first")
    # OrtValues are read here: a stack is cut into steps, which OrtValues cannot be.
    ready, as_numpy = prepare(module.signature, inputs)
    feeds = [array_of(value) for value in ready]
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
    # A subclass may sum norms over ranks in between: its steps are its own.
    if not optimizer.is_plain or optimizer.gradient_scale != 1.0:
        return None
    if optimizer._many_steps is None:
        optimizer._many_steps = ManySteps.of(module.step, module.memory, optimizer._updater)
    if optimizer._many_steps is None:
        return None
    progress = optimizer._many_steps.run(
        feeds, rates, seed=run.seed, first=run.steps + 1, options=module._options
    )
    if progress is None:
        return None
    run.steps += len(rates)
    run.invalid, run.skipped_in_a_row = None, 0
    if optimizer.clip_norm is not None or module.on_nonfinite != "ignore":
        optimizer.gradient_norm = progress.gradient_norm
    return progress.results


def _one_by_one(
    module: Module, optimizer: Optimizer, feeds: Sequence[np.ndarray], rates: Sequence[float]
) -> list[np.ndarray]:
    stacks: list[list[np.ndarray]] = [[] for _ in module.signature.outputs]
    own = optimizer.get_learning_rate()
    try:
        for index, rate in enumerate(rates):
            optimizer.set_learning_rate(rate)
            # Each step handles non-finite values by itself, and stops where it must.
            results = module(*[array[index] for array in feeds])
            for stack, value in zip(stacks, results if isinstance(results, tuple) else (results,)):
                stack.append(np.asarray(value))
            optimizer.step()
            module.lazy_reset_grad()
    finally:
        # also after an error: the caller's rate is not ours to change
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


def _rates(
    learning_rates: Sequence[float] | np.ndarray | None, count: int, optimizer: Optimizer
) -> list[float]:
    if learning_rates is None:
        return [optimizer.get_learning_rate()] * count
    rates = [float(rate) for rate in np.asarray(learning_rates).reshape(-1)]
    if len(rates) != count:
        raise ValueError(f"there are {len(rates)} learning rates for {count} steps: give one for each step")
    for index, rate in enumerate(rates):
        if not math.isfinite(rate):
            raise ValueError(f"the learning rate of step {index} is {rate}: it must be a finite number")
    return rates


# --- Runs many steps and their updates as one run of a session, for models so small that calls take most of
# the time.
#
# It changes nothing unless every step was finite: the caller then takes the steps one by one, which handles
# that.


# Numbers of all trainable parameters up to which copying them twice a step takes less time than a call.
_MOST = 1 << 18
# Multiplications of a step up to which a second thread takes more time than it saves.
_ONE_THREAD = 1 << 22
# Sessions made for the shapes of a batch that are kept.
_KEPT = 4


class Progress(NamedTuple):
    """What the steps made: the stacks of results, and the norm of the last gradient."""

    results: list[np.ndarray]
    gradient_norm: float


class ManySteps:
    """The step and the updater of a module, joined."""

    def __init__(self, step: TrainingStep, memory: ModelMemory, updater: HostUpdater) -> None:
        self._step, self._memory, self._updater = step, memory, updater
        self._joined: dict[float | None, JoinedStep] = {}
        self._sessions: OrderedDict[tuple, ort.InferenceSession] = OrderedDict()
        self._unfit: set[tuple] = set()

    @classmethod
    def of(cls, step: Step, memory: ModelMemory, updater: Updater) -> ManySteps | None:
        """Join these, if they can be joined and are small enough to gain by it."""
        if not getattr(step, "is_whole", False) or not updater.is_host_vector:
            return None
        step, updater = cast("TrainingStep", step), cast("HostUpdater", updater)
        signature = step.signature
        fits = (
            # Results land in numpy memory without a copy only there.
            memory.device.memory == "host"
            and memory.parameters.on_host
            # the joined graph's scalars are float32
            and memory.parameters.whole.dtype == np.float32
            and 0 < memory.parameters.vector.size <= _MOST
            # its scale is adapted between steps, by what their gradients were
            and signature.loss_scale is None
            and not signature.input_gradients
            and bool(signature.inputs)
            and all(signature.dtypes[name] != np.object_ for name in signature.inputs)
        )
        return cls(step, memory, updater) if fits else None

    def run(
        self,
        feeds: Sequence[np.ndarray],
        rates: Sequence[float],
        *,
        seed: int,
        first: int,
        options: ort.SessionOptions | None,
    ) -> Progress | None:
        """Train on stacks of batches; None, and nothing changed, where a step is not finite or cannot be joined.

        `first` is the number of the first step.
        """
        count, signature, memory, updater = len(rates), self._step.signature, self._memory, self._updater
        clip = updater.clip_norm
        shapes = {name: array.shape[1:] for name, array in zip(signature.inputs, feeds)}
        key = (clip, *shapes.values())
        # Not tried again: making the session takes longer than the steps that it would save.
        if key in self._unfit:
            return None
        try:
            session = self._session(key, clip, shapes, options)
        except (ModelError, ValueError):  # steps one by one say what is wrong, if anything is
            self._unfit.add(key)
            return None
        joined = self._joined[clip]
        arrays: dict[str, np.ndarray] = {f"{n}.stack": array for n, array in zip(signature.inputs, feeds)}
        if signature.random:
            seeds = [[step_seed(seed, first + index)] for index in range(count)]
            arrays[f"{SEED}.stack"] = np.array(seeds, np.int64)
        arrays |= self._scalars(joined, rates)
        # Views of the memory of training, into which the last state is copied if all steps were good.
        rows = self._rows()
        arrays |= {f"{name}.first": row for name, row in rows.items()}
        following = memory.following_tensors()
        arrays |= {f"{name}.first": memory[name].read() for name in following}
        arrays |= {
            name: memory[name].read()
            for name in signature.parameters
            if name not in following and name in memory
        }
        input_names = {value.name for value in session.get_inputs()}
        names = [value.name for value in session.get_outputs()]
        try:
            outputs: dict[str, Any] = dict(
                zip(names, session.run(names, {n: array for n, array in arrays.items() if n in input_names}))
            )
        except Exception:  # sizes that differ from step to step, for one
            self._unfit.add(key)
            return None
        results = [outputs[f"{name}.stack"] for name in signature.outputs]
        squares = outputs[f"{joined.gradient_squares}.stack"]
        watched = [results[0], squares]
        if joined.statistics_sum is not None:
            watched.append(outputs[f"{joined.statistics_sum}.stack"])
        # All or nothing: taken one by one, the steps before the bad one count and the policy decides about it.
        if not all(np.isfinite(stack).all() for stack in watched):
            return None
        for name, row in rows.items():
            row[...] = outputs[f"{name}.last"]
        for name, tensor in following.items():
            tensor.write(outputs[f"{name}.last"])
        memory.commit()
        updater.take_over(count)
        self._step.gradients_changed()
        return Progress(results, math.sqrt(float(squares.reshape(-1)[-1])))

    def _session(
        self,
        key: tuple,
        clip: float | None,
        shapes: dict[str, tuple[int, ...]],
        options: ort.SessionOptions | None,
    ) -> ort.InferenceSession:
        if key in self._sessions:
            self._sessions.move_to_end(key)
            return self._sessions[key]
        # its graph libraries take longer to load than all the rest
        from onward.whole_step.scan import scan_steps

        if clip not in self._joined:
            self._joined[clip] = self._join(clip)
        joined = self._joined[clip]
        random = [SEED] if self._step.signature.random else []
        model = scan_steps(joined, [*self._step.signature.inputs, *random, *joined.scalars.values()], shapes)
        rows = max(math.prod(shape[:-1]) for shape in shapes.values())
        if options is None:
            small = self._memory.parameters.vector.size * rows <= _ONE_THREAD
            quiet = quiet_options(threads=1 if small else 0)
            quiet.enable_mem_pattern = False
            options = quiet
        session = make_session(model, options=options, what="training steps")
        self._sessions[key] = session
        if len(self._sessions) > _KEPT:
            self._sessions.popitem(last=False)
        return session

    def _join(self, clip: float | None) -> JoinedStep:
        import onnx_ir as ir

        from onward.whole_step.scan import join_step

        memory, updater = self._memory, self._updater
        if clip is not None and updater.scalars_need_scale:
            raise ModelError("the optimizer's scalars depend on the norm of the gradients")
        return join_step(
            ir.from_proto(self._step.model),
            ir.from_proto(updater.rows_model(scaled=clip is not None)),
            runs=[(setting, self._names(start, stop)) for start, stop, setting in updater.settings_runs()],
            slots=list(updater.slot_vectors()),
            shapes=memory.parameters.shapes,
            statistics=list(memory.following_tensors()),
            clip_norm=clip,
        )

    def _names(self, start: int, stop: int) -> list[str]:
        return [name for name, (first, _) in self._memory.parameters.spans.items() if start <= first < stop]

    def _rows(self) -> dict[str, np.ndarray]:
        """The memory of the state by the names of the joined step's inputs."""
        memory, updater, rows = self._memory, self._updater, {}
        vectors = {**updater.slot_vectors(), "gradient": memory.gradients.vector}
        for index, (start, stop, _) in enumerate(updater.settings_runs()):
            rows[f"packed{index}"] = memory.parameters.vector[np.newaxis, start:stop]
            rows |= {
                f"packed{index}.{name}": vector[np.newaxis, start:stop] for name, vector in vectors.items()
            }
        return rows

    def _scalars(self, joined: JoinedStep, rates: Sequence[float]) -> dict[str, np.ndarray]:
        """A stack for each scalar of the optimizer, as the updater computes it for each step."""
        done = self._updater.step
        settings = sorted({setting for setting, _ in joined.scalars})
        values = {
            setting: [self._updater.scalars(rate, done + 1 + i, setting) for i, rate in enumerate(rates)]
            for setting in settings
        }
        return {
            f"{name}.stack": np.array(
                [entry[own] for entry in values[setting]], np.int64 if own == "step" else np.float32
            ).reshape(-1, 1, 1)
            for (setting, own), name in joined.scalars.items()
        }
