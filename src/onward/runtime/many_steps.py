"""Runs many steps and their updates as one run of a session, for models so small that calls take most of the time.

It changes nothing unless every step was finite: the caller then takes the steps one by one, which handles that.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import onnxruntime as ort

from onward.contract import SEED
from onward.errors import ModelError
from onward.runtime.sessions import make_session
from onward.runtime.signature import step_seed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from onward.runtime.memory import ModelMemory
    from onward.runtime.optimizers.host import HostUpdater
    from onward.runtime.optimizers.updater import Updater
    from onward.runtime.step import Step, TrainingStep
    from onward.whole_step.scan import JoinedStep

__all__ = ["ManySteps", "Progress"]

# Numbers of all trainable parameters up to which copying them twice a step takes less time than a call.
_MOST = 1 << 18
# Multiplications of a step up to which a second thread takes more time than it saves.
_ONE_THREAD = 1 << 22
# Sessions made for the shapes of a batch that are kept.
_KEPT = 4


class Progress:
    """What the steps made: the stacks of results, and the norm of the last gradient."""

    def __init__(self, results: list[np.ndarray], gradient_norm: float) -> None:
        self.results, self.gradient_norm = results, gradient_norm


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
            memory.device.memory == "host"
            and memory.parameters.on_host
            and 0 < memory.parameters.vector.size <= _MOST
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
        if key in self._unfit:
            return None
        try:
            session = self._session(key, clip, shapes, options)
        except (ModelError, ValueError):  # steps one by one say what is wrong, if anything is
            self._unfit.add(key)
            return None
        joined = self._joined[clip]
        given: dict[str, np.ndarray] = {f"{n}.stack": array for n, array in zip(signature.inputs, feeds)}
        if signature.random:
            seeds = [[step_seed(seed, first + index)] for index in range(count)]
            given[f"{SEED}.stack"] = np.array(seeds, np.int64)
        given |= self._scalars(joined, rates)
        rows = self._rows()
        given |= {f"{name}.first": row for name, row in rows.items()}
        following = memory.following_tensors()
        given |= {f"{name}.first": memory[name].read() for name in following}
        given |= {
            name: memory[name].read()
            for name in signature.parameters
            if name not in following and name in memory
        }
        wanted = {value.name for value in session.get_inputs()}
        names = [value.name for value in session.get_outputs()]
        try:
            made: dict[str, Any] = dict(
                zip(names, session.run(names, {n: array for n, array in given.items() if n in wanted}))
            )
        except Exception:  # sizes that differ from step to step, for one
            self._unfit.add(key)
            return None
        results = [made[f"{name}.stack"] for name in signature.outputs]
        squares = made[f"{joined.gradient_squares}.stack"]
        watched = [results[0], squares]
        if joined.statistics_sum is not None:
            watched.append(made[f"{joined.statistics_sum}.stack"])
        if not all(np.isfinite(stack).all() for stack in watched):
            return None
        for name, row in rows.items():
            row[...] = made[f"{name}.last"]
        for name, tensor in following.items():
            tensor.write(made[f"{name}.last"])
        memory.commit()
        updater.take_over(count)
        self._step.gradients_changed()
        return Progress(results, math.sqrt(float(squares.reshape(-1)[-1])))

    def _session(
        self, key: tuple, clip: float | None, shapes: dict[str, tuple[int, ...]], options: Any
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
            options = ort.SessionOptions()
            options.log_severity_level, options.enable_mem_pattern = 4, False
            if self._memory.parameters.vector.size * rows <= _ONE_THREAD:
                options.intra_op_num_threads = 1
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
        made = self._updater.step
        settings = sorted({setting for setting, _ in joined.scalars})
        values = {
            setting: [self._updater.scalars(rate, made + 1 + i, setting) for i, rate in enumerate(rates)]
            for setting in settings
        }
        return {
            f"{name}.stack": np.array(
                [entry[own] for entry in values[setting]], np.int64 if own == "step" else np.float32
            ).reshape(-1, 1, 1)
            for (setting, own), name in joined.scalars.items()
        }
