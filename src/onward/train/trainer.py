"""Trainer: a whole training run in one call.

Batches, accumulation, schedule, evaluation, metrics, early stopping, checkpoints, resume and report over the
`api` classes, which you can also use in your own loop.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import onnxruntime as ort

from onward.errors import NonFiniteError, OnwardError
from onward.files import write_bytes
from onward.runtime.environment import environment
from onward.train.artifact_set import ArtifactFiles, find_artifacts
from onward.train.batches import ArrayBatches, Batch, Batches, Transform, make_batches
from onward.train.callbacks import Callback, EarlyStopping, Progress
from onward.train.engines import Engine, EngineFactory, EngineSettings
from onward.train.evaluation import Details, Show, evaluate, predict
from onward.train.explain import Explainer
from onward.train.history import History
from onward.train.lock import run_lock
from onward.train.loop import Callbacks, Loop, Plan
from onward.train.metrics import Metric, find_metrics
from onward.train.progress import Position
from onward.train.report import list_files, render_report
from onward.train.run_files import REPORT, RunFiles
from onward.train.schedules import Schedule, make_schedule, require_schedule, schedule_name
from onward.train.window import ReadAhead, Window

if TYPE_CHECKING:
    from onward.api.module import Module, NonFinitePolicy
    from onward.api.optimizer import Optimizer
    from onward.api.schedulers import LRScheduler
    from onward.api.state import CheckpointState
    from onward.artifacts.generate import Artifacts
    from onward.checkpoint.content import CheckpointData
    from onward.runtime.devices import DeviceLike

__all__ = ["Trainer"]


class Trainer:
    """Trains what `generate_artifacts` wrote (a directory) or `build_artifacts` made.

    With `output_directory`, checkpoints, history and a report are kept there, and `fit(resume=True)` resumes
    an earlier run where it stopped, bit-exactly if the data gives the same batches again
    (a loader that shuffles by itself does not). `schedule` is "constant", "linear", "cosine",
    "step", "one-cycle", "polynomial", or a function of (optimizer, total steps) that returns a scheduler;
    `warmup` is a number of steps, or a fraction of them if below 1. `gradient_accumulation_steps` is the number of
    batches whose gradients are accumulated for one update. `metrics` are names or
    functions: see `onward.train.metrics`.

    Artifacts of a pretrained model record defaults for fine-tuning: a low `learning_rate`, `warmup` and `clip_norm`.
    Arguments override them (0 turns warmup and clipping off); otherwise the learning rate is 1e-3.
    `learning_rate="auto"` finds one by a short trial on a copy of the model: see `range_test`.

    `resume=True` begins with the latest checkpoint in `output_directory`, where there is one, and `fit` goes on from
    there. `engines` makes what does the updates: this process, or a rank of several (`onward.distributed`); every rank
    then makes the same calls. `show` makes what the report shows of an evaluation (`onward.train.report.Figure`s), of
    all its outputs and inputs; `judged` are the outputs that it and the metrics read, where not all.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> x, labels = rng.normal(size=(64, 4)).astype("float32"), rng.integers(0, 3, 64)
    >>> trainer = Trainer("out", learning_rate=1e-2)
    >>> history = trainer.fit((x, labels), epochs=2, batch_size=16)
    >>> trainer.step
    8
    """

    def __init__(
        self,
        artifacts: str | os.PathLike[str] | Artifacts | ArtifactFiles,
        *,
        output_directory: str | os.PathLike[str] | None = None,
        learning_rate: float | Literal["auto"] | None = None,
        schedule: Schedule = "constant",
        warmup: float | None = None,
        gradient_accumulation_steps: int = 1,
        clip_norm: float | None = None,
        metrics: Sequence[str | Metric] | Mapping[str, str | Metric] = (),
        callbacks: Sequence[Callback] = (),
        seed: int = 0,
        device: DeviceLike = "cpu",
        session_options: ort.SessionOptions | None = None,
        on_nonfinite: NonFinitePolicy = "raise",
        keep: int = 2,
        progress: bool = True,
        prefix: str = "",
        resume: bool = False,
        engines: EngineFactory | None = None,
        show: Show | None = None,
        judged: Sequence[str] | None = None,
    ) -> None:
        counts = {"gradient_accumulation_steps": gradient_accumulation_steps, "keep": keep}
        for name, value in counts.items():
            if value < 1:
                raise ValueError(f"{name} is {value}: it must be 1 or more")
        if clip_norm is not None and not clip_norm >= 0:
            raise ValueError(f"clip_norm is {clip_norm}: it must be positive, or 0 for none")
        if isinstance(learning_rate, str) and learning_rate != "auto":
            raise ValueError(f"learning_rate is '{learning_rate}': it is a number or 'auto'")
        require_schedule(schedule)
        self._artifacts: ArtifactFiles = find_artifacts(artifacts, prefix)
        rate, first_updates, clip_norm = self._artifacts.settings(
            learning_rate=learning_rate, warmup=warmup, clip_norm=clip_norm
        )
        self._rates = _Rates(schedule, first_updates, is_default=warmup is None, find=rate == "auto")
        self.learning_rate = 1e-3 if isinstance(rate, str) else float(rate)
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self._metrics = find_metrics(metrics)
        self._callbacks = [*callbacks, *([Progress()] if progress else [])]
        stops_early = any(isinstance(callback, EarlyStopping) for callback in callbacks)
        self._files = RunFiles(
            None if output_directory is None else Path(output_directory), keep, remember_best=stops_early
        )
        self._engines = engines or EngineFactory()
        self._engine_settings = EngineSettings(
            seed=seed,
            device=device,
            session_options=session_options,
            on_nonfinite=on_nonfinite,
            clip_norm=clip_norm,
            outputs=(self._artifacts.outputs if judged is None else judged)
            if self._metrics or show is not None
            else (),
        )
        # names of classes, and what else a report should say: the data, say
        self.classes: Sequence[str] | None = self._artifacts.classes
        self.details: dict[str, Any] = {}
        self._show = show
        self.settings: dict[str, Any] = {}
        self.columns: list[str] = []  # what each epoch's row has
        self.total_steps: int | None = None
        self.history = History()
        self._position = Position()
        self._continues, self._stopped_early = resume, False
        if not resume or not self._load_latest():
            self.engine = self._make_engine()

    @property
    def output_directory(self) -> Path | None:
        """Where the run is kept."""
        return self._files.directory

    @property
    def module(self) -> Module:
        """The model in training."""
        return self.engine.module

    @property
    def optimizer(self) -> Optimizer:
        """Its optimizer."""
        return self.engine.optimizer

    @property
    def state(self) -> CheckpointState:
        """Its parameters and properties."""
        return self.engine.state

    @property
    def epoch(self) -> int:
        """How many epochs are done."""
        return self._position.epoch

    @property
    def step(self) -> int:
        """How many updates were made."""
        return self._position.step

    @property
    def first_epoch(self) -> int:
        """How many epochs were done when this call of `fit` (or the one that it resumes) began."""
        return self._position.first_epoch

    @property
    def best(self) -> dict[str, Any] | None:
        """The metric, value and epoch of the best epoch so far."""
        return self._position.best

    # ---- training --------------------------------------------------------------------------------

    def fit(
        self,
        train_data: Any,
        eval_data: Any = None,
        *,
        epochs: int = 1,
        batch_size: int = 32,
        shuffle: bool = True,
        resume: bool = False,
        save_every: int | None = None,
        log_every: int = 1,
        best_metric: str | None = None,
        transform: Transform | None = None,
        max_updates: int | None = None,
        evaluate_every: int | None = None,
    ) -> History:
        """Train for a number of epochs and return the history; a resumed run counts the epochs already done.

        Data are arrays in the order of the model's inputs, a dict of them by name, an iterable of batches
        (a torch DataLoader, a list), or a function that returns one (of the epoch, if it takes an argument).
        `save_every`, `max_updates` and `evaluate_every` count updates; at the end of each epoch the model is
        evaluated and a checkpoint written in any case. The best epoch by `best_metric` (default: the evaluation
        loss, or the training loss without evaluation data) is kept as `best`. `transform` changes each training
        batch (`onward.data.augment`). Ctrl-C stops between two batches, saves and writes the report; a second `fit`
        continues training.
        """
        counts = {"epochs": epochs, "log_every": log_every, "save_every": save_every}
        for name, count in {**counts, "max_updates": max_updates, "evaluate_every": evaluate_every}.items():
            if count is not None and count < 1:
                raise ValueError(f"{name} is {count}: it must be 1 or more")
        metric = best_metric or ("eval_loss" if eval_data is not None else "loss")
        self.columns = ["epoch", "step", "loss", "learning_rate", "seconds", "samples_per_second"]
        if eval_data is not None:
            self.columns += ["eval_loss", *self._metrics]
        if metric not in self.columns:
            raise KeyError(f"best_metric is '{metric}', the epochs have {', '.join(self.columns)}")
        plan = Plan(
            epochs, self.gradient_accumulation_steps, metric,
            max_updates=max_updates, save_every=save_every, log_every=log_every, evaluate_every=evaluate_every,
        )  # fmt: skip
        with self.engine.all_or_none():
            if self.engine.rank == 0:
                self._files.make_directory()
        with run_lock(self.output_directory if self._engines.holds_lock else None):
            resumed = self._begin(resume)
            names, seed = list(self.module.signature.inputs), self._seed
            batches = make_batches(
                train_data, names, batch_size=batch_size, shuffle=shuffle, seed=seed, transform=transform
            )
            evaluation = None if eval_data is None else make_batches(eval_data, names, batch_size=batch_size)
            for source in (batches, evaluation):
                if source is not None:
                    source.require(epochs)
            if self._rates.find:
                self._choose_rate(batches, resumed=resumed)
            about = {"batch size": batch_size, "shuffle": shuffle, **batches.description()}
            self._note_settings(batches, evaluation, about, epochs, resumed)
            self._run(plan, batches, evaluation)
        return self.history

    def _run(self, plan: Plan, batches: Batches, evaluation: Batches | None) -> None:
        """Run the loop, and write the report however it ends: as planned, by a callback or by Ctrl-C."""

        def judge() -> tuple[dict[str, float], Details]:
            assert evaluation is not None
            details, results = Details(self._show), self._artifacts.outputs
            return evaluate(self.engine, evaluation, self._metrics, results=results, details=details), details

        self.history.classes = list(self.classes or ())
        callbacks = Callbacks(self, self.engine, self._callbacks)
        loop = Loop(
            self.engine,
            plan,
            self._position,
            self.history,
            batches=batches,
            judge=None if evaluation is None else judge,
            scheduler=self._make_scheduler(batches, plan),
            callbacks=callbacks,
            files=self._files,
            explainer=Explainer(self.engine, self._artifacts, batches, self._position),
            write_report=self._write_report,
        )
        try:
            self._stopped_early = loop.run()
        except KeyboardInterrupt:
            if self._files.has_checkpoints():
                self._write_report()
            raise
        finally:
            callbacks.on_end()
        with self.engine.all_or_none():
            self._write_report()

    def _begin(self, resume: bool) -> bool:
        """Find where to start from; whether that is inside an earlier run."""
        if self._continues:
            return self._position.step > 0
        if resume:
            if self.output_directory is None:
                raise OnwardError("resume=True needs the output_directory of the earlier run")
            if self._load_latest():
                return True
        is_own = resume or bool(self._position.settings)  # a second fit goes on in its folder
        with self.engine.all_or_none():
            if self.engine.rank == 0 and not is_own and self._files.has_checkpoints():
                raise OnwardError(
                    f"'{self.output_directory}' has the checkpoints of an earlier run: resume it (resume=True), "
                    "or choose another output_directory"
                )
        self._position.begin_fit()  # a second fit trains on, with a schedule of its own
        self.module.lazy_reset_grad()
        return False

    def _load_latest(self) -> bool:
        """Go on where the latest checkpoint is; False where there is none. Collective."""
        data = self._engines.share(self._files.load)
        if data is None:
            return False
        # the position is that of the checkpoint: a history may be newer, if a run was killed between the two
        self._position = Position.from_json(str(data.extras["trainer"]))
        self.engine = self._make_engine(data)
        self.history = self._files.load_history(self._position) if self._engines.rank == 0 else History()
        return True

    def _make_engine(self, data: CheckpointData | None = None) -> Engine:
        """An engine with the initial state, or with that of a checkpoint and its seed."""
        settings = self._engine_settings
        if data is not None:
            return self._engines.make(self._artifacts, data, dataclasses.replace(settings, seed=None))
        initial = self._engines.share(self._artifacts.load_checkpoint)
        assert initial is not None
        return self._engines.make(self._artifacts, initial, settings)

    @property
    def _seed(self) -> int:
        """The seed of the run: a resumed one keeps its own."""
        return int(self._position.settings.get("seed", self._engine_settings.seed))

    def _note_settings(
        self,
        batches: Batches,
        evaluation: Batches | None,
        fit: Mapping[str, Any],
        epochs: int,
        resumed: bool,
    ) -> None:
        """What the run is described by: in its checkpoints, its report and to its callbacks."""
        settings = {
            "epochs": epochs, "batch size": fit["batch size"], "accumulation": self.gradient_accumulation_steps,
            "seed": self._seed, "learning rate": self.learning_rate,
            "schedule": schedule_name(self._rates.schedule), "warmup": self._rates.warmup,
            "shuffle": fit["shuffle"], "batches": batches.count,
        }  # fmt: skip
        self._position.change_settings(settings, resumed=resumed)
        clip_norm = self._engine_settings.clip_norm or "none"
        self.settings = {**self.details, **self._artifacts.about, **settings, "clip norm": clip_norm}
        if isinstance(batches, ArrayBatches):
            self.settings["training samples"] = batches.samples
        if isinstance(evaluation, ArrayBatches):
            self.settings["evaluation samples"] = evaluation.samples

    def _make_scheduler(self, batches: Batches, plan: Plan) -> LRScheduler:
        rates, steps = self._rates, None
        if batches.count is not None:
            steps = -(-batches.count // self.gradient_accumulation_steps) * plan.epochs
            if plan.max_updates is not None:
                steps = min(steps, plan.max_updates - self._position.first_step)
        self.total_steps = None if steps is None else self._position.first_step + steps
        # only a recorded default asks for a share of updates whose number is not known
        warmup = 0.0 if steps is None and rates.is_default else rates.warmup
        return make_schedule(rates.schedule, self.optimizer, self.learning_rate, total=steps, warmup=warmup)

    def _choose_rate(self, batches: Batches, *, resumed: bool) -> None:
        """The learning rate of "auto": that of the run that is resumed, or one found by trial on a copy."""
        recorded = self._position.settings.get("learning rate")
        if resumed and isinstance(recorded, float):
            self.learning_rate = recorded
            return
        if batches.once:
            raise ValueError(
                "learning_rate='auto' reads the data once before training: pass arrays or a list"
            )
        # a copy: the trial's updates must leave no trace in the run
        engine = self._make_engine()

        def learn(batch: Batch, rate: float) -> float:
            engine.optimizer.set_learning_rate(rate)
            position = Position()
            window = Window(ReadAhead(iter([batch])), position, size=1, check_interrupt=lambda: None)
            report = engine.backward(window)
            sums = [report.failure is not None, position.window_loss, position.window_weight]
            failed, loss, weight = engine.sum(sums)
            if failed:
                engine.raise_together(report.failure)
            if not weight:
                return float("nan")
            engine.update(weight=weight, unit=position.unit, invalid=report.invalid)
            return loss / weight

        rate, rows = range_test(learn, _Share(batches, engine))
        self.learning_rate = rate or self._artifacts.defaults.get("learning_rate", 1e-3)
        self.history.range_test = rows
        if rate is None:
            warnings.warn(
                f"no learning rate between 1e-6 and 1 made the loss fall in a short trial: {self.learning_rate:g} is "
                "taken. Are the labels right, and the data as the model expects it?",
                UserWarning,
                stacklevel=4,
            )

    # ---- using -----------------------------------------------------------------------------------

    def evaluate(self, data: Any, *, batch_size: int = 32) -> dict[str, float]:
        """The loss and the metrics over some data, in evaluation mode."""
        names = list(self.module.signature.inputs)
        source = make_batches(data, names, batch_size=batch_size)
        return evaluate(self.engine, source, self._metrics, results=self._artifacts.outputs)

    def predict(
        self, data: Any, *, outputs: Sequence[str] | None = None, batch_size: int = 256
    ) -> np.ndarray | dict[str, np.ndarray]:
        """The model's outputs (or other values of its graph, by name) for inputs; labels may be left out."""
        names = list(dict.fromkeys(outputs or self._artifacts.outputs))
        arrays = predict(
            self._artifacts.require_evaluation(), self.state.to_data(), names, data,
            batch_size=batch_size, order=self.module.input_names(), device=self.module.device,
            options=self._engine_settings.session_options,
        )  # fmt: skip
        return arrays[names[0]] if outputs is None and len(names) == 1 else arrays

    def export(
        self,
        path: str | os.PathLike[str],
        outputs: Sequence[str] | None = None,
        *,
        epoch: Literal["best", "last"] | None = None,
    ) -> None:
        """Write the trained model for inference; by default with the forward model's outputs.

        After early stopping that is the best epoch's model, otherwise the last one's; `epoch` says which.
        """
        # its graph libraries take longer to load than all the rest, and many runs never need them
        from onward.runtime import inference_model

        best = None
        if epoch == "best" or (epoch is None and self._stopped_early):
            best = self._files.load_best() if self.engine.rank == 0 else None
            if best is None and epoch == "best" and self.engine.rank == 0:
                raise OnwardError(
                    "no best epoch was kept: give the Trainer an output_directory or early stopping"
                )
        self.engine.reconcile()
        last = self.engine.gather(include_optimizer_state=False)
        with self.engine.all_or_none():
            self.module.require_values()
            evaluation = self._artifacts.require_evaluation()
            if last is not None:
                names = list(self._artifacts.outputs if outputs is None else outputs)
                inference_model.export(evaluation, best or last, names, path)

    def save_checkpoint(self) -> Path | None:
        """Save the run as it is now in its `output_directory`; returns the path, on rank 0."""
        return self._files.save(self.engine, self._position, self.history, best=False)

    def save_report(self, path: str | os.PathLike[str], settings: Mapping[str, Any] | None = None) -> None:
        """Write the run as a self-contained HTML page."""
        page = render_report(
            self.history,
            title=f"Training of {self._artifacts.name}",
            settings=settings,
            best=self.best,
            environment=environment(self._engine_settings.session_options),
            files=list_files(self.output_directory, without=Path(path).name),
            figures=self.history.figures,
        )
        write_bytes(path, page.encode())

    def _write_report(self) -> None:
        if self.output_directory is not None and self.engine.rank == 0:
            with self._files.writing():
                self.save_report(self.output_directory / REPORT, self.settings)


@dataclasses.dataclass(frozen=True)
class _Rates:
    """How the learning rate changes; `is_default`: nobody asked for this warmup; `find`: the rate by a trial."""

    schedule: Schedule
    warmup: float
    is_default: bool
    find: bool


class _Share(Batches):
    """One rank's share of batches, for what reads them without an engine."""

    def __init__(self, batches: Batches, engine: Engine) -> None:
        self._batches, self._engine, self.once = batches, engine, batches.once

    def epoch(self, number: int, *, skip: int = 0, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        return self._batches.epoch(number, skip=skip, rank=self._engine.replica, world=self._engine.replicas)


# --- Learning-rate range test: a short run on a copy of the model, with a rate that grows at every step.
#
# The loss falls while the rate is useful and rises when it is too high. The rate suggested is a tenth of the one at
# which the loss was lowest, where training is still fast and safe.

_LOW, _HIGH, _STEPS = 1e-6, 1.0, 100


def range_test(
    learn: Callable[[Batch, float], float], batches: Batches, *, steps: int = _STEPS
) -> tuple[float | None, list[dict[str, Any]]]:
    """The rate found (None where the loss never fell) and the curve; `learn` updates by a batch at a rate."""
    rows: list[dict[str, Any]] = []
    mean, best = 0.0, math.inf
    for step, batch in enumerate(_endless(batches, steps)):
        rate = _LOW * (_HIGH / _LOW) ** (step / (steps - 1))
        try:
            loss = learn(batch, rate)
        except NonFiniteError:
            break
        # single batches are noisy; the division makes up for a mean that begins at zero, as in Adam
        mean = 0.9 * mean + 0.1 * loss
        smooth = mean / (1 - 0.9 ** (step + 1))
        rows.append({"step": step + 1, "learning_rate": rate, "loss": smooth})
        best = min(best, smooth)
        # it has diverged: at higher rates nothing can be learned
        if not math.isfinite(loss) or smooth > best + 3 * abs(best) + 1e-6:
            break
    # too few to tell a fall from noise
    if len(rows) < 5:
        return None, rows
    lowest = int(np.argmin([row["loss"] for row in rows]))
    fell = rows[0]["loss"] - rows[lowest]["loss"]
    if lowest < 3 or fell <= 1e-3 * abs(rows[0]["loss"]):
        return None, rows
    rate = rows[lowest]["learning_rate"] / 10
    return float(f"{rate:.1e}"), rows


def _endless(batches: Batches, count: int) -> Iterator[Batch]:
    """So many batches, of as many epochs as that takes; fewer where an epoch has none, or there is only one."""
    epoch = taken = 0
    while taken < count:
        before = taken
        for batch in itertools.islice(batches.epoch(epoch), count - taken):
            yield batch
            taken += 1
        epoch += 1
        if taken == before or batches.once:
            return
