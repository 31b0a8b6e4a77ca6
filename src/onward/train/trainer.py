"""Trainer: a whole training run in one call.

Batches, accumulation, schedule, evaluation, metrics, early stopping, checkpoints, resume and report over the
`api` classes, which you can also use in your own loop.
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import onnxruntime as ort

from onward.api.module import Module
from onward.api.optimizer import Optimizer
from onward.api.state import CheckpointState
from onward.checkpoint import store
from onward.errors import MAKE_ARTIFACTS, ModelError, NonFiniteError, OnwardError
from onward.renamed import renamed_arguments
from onward.runtime.environment import environment
from onward.runtime.sessions import read_model
from onward.runtime.step import EvaluationStep
from onward.train.artifact_set import ArtifactFiles, find_artifacts
from onward.train.batches import (
    ArrayBatches,
    Batch,
    Batches,
    Transform,
    batch_weight,
    make_batches,
    sample_count,
)
from onward.train.callbacks import Callback, Progress, improves
from onward.train.evaluation import evaluate, predict
from onward.train.history import History
from onward.train.infinite_slope import infinite_slope
from onward.train.interrupt import DeferredInterrupt
from onward.train.lock import run_lock
from onward.train.metrics import Metric, find_metrics
from onward.train.progress import Place
from onward.train.range_test import range_test
from onward.train.report import list_files, render_report
from onward.train.schedules import Schedule, make_schedule, require_schedule, schedule_name

if TYPE_CHECKING:
    from onward.api.module import NonFinitePolicy
    from onward.api.schedulers import LRScheduler
    from onward.artifacts.generate import Artifacts
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
    `learning_rate="auto"` finds one by a short trial on a copy of the model: see `onward.train.range_test`.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> x, labels = rng.normal(size=(64, 4)).astype("float32"), rng.integers(0, 3, 64)
    >>> trainer = Trainer("out", learning_rate=1e-2)
    >>> history = trainer.fit((x, labels), epochs=2, batch_size=16)
    >>> trainer.step
    8
    """

    @renamed_arguments(accumulation="gradient_accumulation_steps")
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
        self._files: ArtifactFiles = find_artifacts(artifacts, prefix)
        self._lenient_warmup = warmup is None
        rate, warmup, clip_norm = self._files.settings(
            learning_rate=learning_rate, warmup=warmup, clip_norm=clip_norm
        )
        # found by trial when training begins
        self._find_rate, learning_rate = rate == "auto", 1e-3 if isinstance(rate, str) else float(rate)
        self.output_directory = None if output_directory is None else Path(output_directory)
        self.learning_rate, self._schedule, self._warmup = learning_rate, schedule, warmup
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self._clip_norm, self._keep = clip_norm, keep
        self._metrics = find_metrics(metrics)
        self._callbacks = [*callbacks, *([Progress()] if progress else [])]
        self._seed, self._device, self._options = seed, device, session_options
        self._on_nonfinite: NonFinitePolicy = on_nonfinite
        self.history = History()
        # names of classes, and what else a report should say: the data, say
        self.classes: Sequence[str] | None = self._files.classes
        self.details: dict[str, Any] = {}
        self.settings: dict[str, Any] = {}
        self.columns: list[str] = []  # what each epoch's row has
        self.total_steps: int | None = None
        self._place = Place()
        # is the output directory our own, is no batch half done, has the epoch further batches
        self._owned, self._whole, self._remains = False, True, False
        self._last_batch: Batch | None = None
        self._build(CheckpointState(self._files.load_checkpoint()), seed=seed)

    @property
    def epoch(self) -> int:
        """How many epochs are done."""
        return self._place.epoch

    @property
    def step(self) -> int:
        """How many updates were made."""
        return self._place.step

    @property
    def first_epoch(self) -> int:
        """How many epochs were done when this call of `fit` (or the one that it resumes) began."""
        return self._place.first_epoch

    @property
    def best(self) -> dict[str, Any] | None:
        """The metric, value and epoch of the best epoch so far."""
        return self._place.best

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
    ) -> History:
        """Train for a number of epochs and return the history; a resumed run counts the epochs already done.

        Data are arrays in the order of the model's inputs, a dict of them by name, an iterable of batches
        (a torch DataLoader, a list), or a function that returns one (of the epoch, if it takes an argument).
        `save_every` counts updates; at the end of each epoch a checkpoint is written in any case. The best
        epoch by `best_metric` (default: the evaluation loss, or the training loss without evaluation data) is
        kept as `best`. `transform` changes each training batch (`onward.data.augment`). Ctrl-C stops between two
        batches and saves; a second `fit` continues training.
        """
        for name, count in (("epochs", epochs), ("log_every", log_every), ("save_every", save_every or 1)):
            if count < 1:
                raise ValueError(f"{name} is {count}: it must be 1 or more")
        metric = best_metric or ("eval_loss" if eval_data is not None else "loss")
        self.columns = ["epoch", "step", "loss", "learning_rate", "seconds", "samples_per_second"]
        if eval_data is not None:
            self.columns += ["eval_loss", *self._metrics]
        if metric not in self.columns:
            raise KeyError(f"best_metric is '{metric}', the epochs have {', '.join(self.columns)}")
        if self.output_directory is not None:
            with self._writing():
                self.output_directory.mkdir(parents=True, exist_ok=True)
        with run_lock(self.output_directory):
            return self._fit(
                train_data, eval_data, epochs=epochs, batch_size=batch_size, shuffle=shuffle, resume=resume,
                save_every=save_every, log_every=log_every, metric=metric, transform=transform,
            )  # fmt: skip

    def _fit(
        self,
        train_data: Any,
        eval_data: Any,
        *,
        epochs: int,
        batch_size: int,
        shuffle: bool,
        resume: bool,
        save_every: int | None,
        log_every: int,
        metric: str,
        transform: Transform | None,
    ) -> History:
        names = self.module.input_names()
        resumed = self._begin(resume)
        batches = make_batches(
            train_data, names, batch_size=batch_size, shuffle=shuffle, seed=self._seed, transform=transform
        )
        evaluation = None if eval_data is None else make_batches(eval_data, names, batch_size=batch_size)
        for source in (batches, evaluation):
            if source is not None:
                source.require(epochs)
        if self._find_rate:
            self._choose_rate(batches, resumed=resumed)
        settings = {
            "epochs": epochs, "batch size": batch_size, "accumulation": self.gradient_accumulation_steps,
            "seed": self._seed, "learning rate": self.learning_rate, "schedule": schedule_name(self._schedule),
            "warmup": self._warmup, "shuffle": shuffle, "batches": batches.count,
        }  # fmt: skip
        self._place.change_settings(settings, resumed=resumed)
        self.settings = {
            **self.details,
            **self._files.about,
            **settings,
            "clip norm": self._clip_norm or "none",
        }
        if isinstance(batches, ArrayBatches):
            self.settings["training samples"] = batches.samples
        if isinstance(evaluation, ArrayBatches):
            self.settings["evaluation samples"] = evaluation.samples
        self._save_every, self._log_every, self._interrupt = save_every, log_every, DeferredInterrupt()
        self._batches = batches
        self._make_schedule(batches, epochs)
        try:
            if not any([callback.on_start(self) for callback in self._callbacks]):  # noqa: C419 - each is called
                with self._interrupt:
                    self._run(batches, evaluation, epochs, metric)
        except KeyboardInterrupt:
            if self._whole:
                self._save()
            raise
        finally:
            for callback in self._callbacks:
                callback.on_end(self)
        if self.output_directory is not None:
            with self._writing():
                self.save_report(self.output_directory / "report.html", self.settings)
        return self.history

    def _begin(self, resume: bool) -> bool:
        """Find the place to start from; whether it is that of an earlier run."""
        directory = self.output_directory
        if resume:
            if directory is None:
                raise OnwardError("resume=True needs the output_directory of the earlier run")
            self._owned = True
            if self._resume(directory):
                return True
        if directory is not None:
            with self._writing():
                directory.mkdir(parents=True, exist_ok=True)
            if not self._owned and any(directory.glob("checkpoint-*")):
                raise OnwardError(
                    f"'{directory}' has the checkpoints of an earlier run: resume it (resume=True), "
                    "or choose another output_directory"
                )
        self._owned = self._whole = True
        self._place.begin_fit()  # a second fit trains on, with a schedule of its own
        self.module.lazy_reset_grad()
        return False

    def _make_schedule(self, batches: Batches, epochs: int) -> None:
        steps = (
            None if batches.count is None else -(-batches.count // self.gradient_accumulation_steps) * epochs
        )
        self.total_steps = None if steps is None else self._place.first_step + steps
        warmup = 0.0 if steps is None and self._lenient_warmup else self._warmup
        self._scheduler: LRScheduler = make_schedule(
            self._schedule, self.optimizer, self.learning_rate, total=steps, warmup=warmup
        )

    def _choose_rate(self, batches: Batches, *, resumed: bool) -> None:
        """The learning rate of "auto": that of the run that is resumed, or one found by trial on a copy."""
        known = self._place.settings.get("learning rate")
        if resumed and isinstance(known, float):
            self.learning_rate = known
            return
        if batches.once:
            raise ValueError(
                "learning_rate='auto' reads the data once before training: pass arrays or a list"
            )
        state, module, optimizer = self.state, self.module, self.optimizer
        self._build(CheckpointState(self._files.load_checkpoint()), seed=self._seed)

        def learn(batch: Batch, rate: float) -> float:
            self.optimizer.set_learning_rate(rate)
            results = self.module(*batch)
            self.optimizer.step()
            self.module.lazy_reset_grad()
            return float(np.asarray(results[0] if isinstance(results, tuple) else results).reshape(-1)[0])

        try:
            found, rows = range_test(learn, batches)
        finally:
            self.state, self.module, self.optimizer, self._evaluation = state, module, optimizer, None
        self.learning_rate = found or self._files.defaults.get("learning_rate", 1e-3)
        self.history.range_test = rows
        if found is None:
            warnings.warn(
                f"no learning rate between 1e-6 and 1 made the loss fall in a short trial: {self.learning_rate:g} is "
                "taken. Are the labels right, and the data as the model expects it?",
                UserWarning,
                stacklevel=5,
            )

    def _run(self, batches: Batches, evaluation: Batches | None, epochs: int, metric: str) -> None:
        place = self._place
        while place.epoch - place.first_epoch < epochs:
            self._epoch_started, self._epoch_samples = time.perf_counter(), 0
            self.module.train()
            stream = batches.epoch(place.epoch, skip=place.batch)
            stopped = self._run_epoch(stream)
            if stopped and self._remains:
                self._save()
                return
            stopped = self._end_epoch(evaluation, metric) or stopped
            self._interrupt.check()
            if stopped:
                return

    def _run_epoch(self, stream: Iterator[Batch]) -> bool:
        """The rest of an epoch; True where a callback ended training."""
        place = self._place
        pending = next(stream, None)
        if pending is None and place.batch == 0:
            raise ValueError("the training data has no batch")
        while pending is not None:
            self._interrupt.check()
            batch, pending = pending, next(stream, None)
            self._remains = pending is not None
            self._whole = False
            self._learn(batch)
            full = len(place.weights) >= self.gradient_accumulation_steps or (
                pending is None and place.weights
            )
            row = self._update() if full else None
            self._whole = True
            if row is None:
                continue
            if place.step % self._log_every == 0:
                self.history.log(row)
            seconds = max(time.perf_counter() - self._epoch_started, 1e-9)
            shown = {**row, "samples_per_second": self._epoch_samples / seconds}
            answers = [callback.on_step(self, shown) for callback in self._callbacks]
            if any(answers):
                return True
            if self._save_every and place.step % self._save_every == 0 and pending is not None:
                self._save()
        return False

    def _learn(self, batch: Batch) -> None:
        """The gradients of a batch, added to those of its window so that each sample counts the same."""
        place, module = self._place, self.module
        place.batch += 1
        self._epoch_samples += sample_count(batch)
        weight = batch_weight(module.signature, batch)
        if weight == 0:  # no label that counts: no loss and no gradient
            return
        if place.weights and place.weights[-1] != weight:
            # what is there counts in units of the next batch
            module.memory.gradients.whole.scale(place.weights[-1] / weight)
        self._last_batch = batch
        try:
            results = module(*batch)
        except (ValueError, NonFiniteError) as error:
            raise self._with_row(error, batch) from error
        loss = float(np.asarray(results[0] if isinstance(results, tuple) else results).reshape(-1)[0])
        place.add(loss, weight)

    def _with_row(self, error: Exception, batch: Batch) -> Exception:
        """The same error, with the row of the data instead of the place in a shuffled batch."""
        rows = self._batches.rows(self._place.epoch, self._place.batch - 1)
        signature = self.module.signature
        if rows is None:
            return error
        if isinstance(error, NonFiniteError):
            for name, value in zip(signature.inputs, batch):
                array = np.asarray(value)
                if array.dtype.kind == "f" and not np.isfinite(array).all():
                    row = rows[int(np.argwhere(~np.isfinite(array))[0][0])]
                    return NonFiniteError(
                        f"{error}; '{name}' itself is not finite in row {row} of the training data (from 0)"
                    )
            return error
        for index, classes, ignored in signature.labels:
            labels = np.asarray(batch[index])
            bad = (labels < 0) | (labels >= classes)
            bad &= labels != ignored if ignored is not None else True
            if bad.any():
                where = np.argwhere(bad)[0]
                return ValueError(
                    f"'{signature.inputs[index]}' has label {labels[tuple(where)]} in row {rows[int(where[0])]} of the "
                    f"training data (from 0): the model has {classes} classes, so labels are 0 to {classes - 1}"
                )
        return error

    def _with_slope(self, error: NonFiniteError) -> NonFiniteError:
        """The same error, with the operator whose gradient is infinite, where there is one."""
        if self._files.evaluation is None or self._last_batch is None:
            return error
        model = read_model(self._files.evaluation, "eval")
        feeds = dict(zip(self.module.signature.inputs, map(np.asarray, self._last_batch)))
        feeds |= {name: np.asarray(parameter.data) for name, parameter in self.state.parameters}
        try:
            found = infinite_slope(model, feeds)
        except Exception:  # an explanation only: what went wrong is the error itself
            return error
        if found is None:
            return error
        words, sample = found
        rows = self._batches.rows(self._place.epoch, self._place.batch - 1)
        row = f", in row {rows[sample]} of the training data (from 0)" if rows is not None else ""
        return NonFiniteError(
            f"{str(error).split('.')[0]}. {words}{row}: its gradient is infinite there. Freeze the weights before it "
            "(frozen_params, --freeze), or add a small number to that input in the model"
        )

    def _update(self) -> dict[str, Any]:
        place, optimizer = self._place, self.optimizer
        optimizer.gradient_scale = place.weights[-1] / sum(place.weights)
        rate = optimizer.get_learning_rate()
        try:
            optimizer.step()
        except NonFiniteError as error:
            raise self._with_slope(error) from error
        self.module.lazy_reset_grad()
        self._scheduler.step()
        loss = place.close_window()
        return {
            "step": place.step,
            "epoch": place.epoch + 1,
            "loss": loss,
            "learning_rate": rate,
            "gradient_norm": optimizer.gradient_norm,
        }

    def _end_epoch(self, evaluation: Batches | None, metric: str) -> bool:
        place = self._place
        matrix: list[np.ndarray] = []
        seconds = time.perf_counter() - self._epoch_started
        row: dict[str, Any] = {
            "epoch": place.epoch + 1,
            "step": place.step,
            "loss": place.mean_loss(),
            "learning_rate": self.optimizer.get_learning_rate(),
        }
        if evaluation is not None:
            figures = evaluate(
                self._evaluator(), evaluation, self._metrics, results=self._files.outputs, matrix=matrix
            )
            row |= {f"eval_{k}" if k == "loss" else k: v for k, v in figures.items()}
        row["seconds"] = round(seconds, 4)
        row["samples_per_second"] = round(self._epoch_samples / max(seconds, 1e-9), 1)
        self._whole = False
        self.history.epochs.append(row)
        place.begin_epoch()
        is_best = place.note_best(metric, float(row[metric]), sign=improves(metric))
        if is_best and evaluation is not None and matrix:
            self.history.confusion = matrix[0].tolist()
            self.history.classes = list(self.classes or ())
        self._whole = True
        answers = [callback.on_epoch(self, row) for callback in self._callbacks]
        self._save(best=is_best)
        return any(answers)

    # ---- using -----------------------------------------------------------------------------------

    def evaluate(self, data: Any, *, batch_size: int = 32) -> dict[str, float]:
        """The loss and the metrics over some data, in evaluation mode."""
        step = self._evaluator()
        source = make_batches(data, step.signature.inputs, batch_size=batch_size)
        return evaluate(step, source, self._metrics, results=self._files.outputs)

    def predict(
        self, data: Any, *, outputs: Sequence[str] | None = None, batch_size: int = 256
    ) -> np.ndarray | dict[str, np.ndarray]:
        """The model's outputs (or other values of its graph, by name) for inputs; labels may be left out."""
        names = list(dict.fromkeys(outputs or self._files.outputs))
        found = predict(
            self._eval_model(), self.state.to_data(), names, data,
            batch_size=batch_size, given=self.module.input_names(), device=self.module.device, options=self._options,
        )  # fmt: skip
        return found[names[0]] if outputs is None and len(names) == 1 else found

    def export(self, path: str | os.PathLike[str], outputs: Sequence[str] | None = None) -> None:
        """Write the trained model for inference; by default with the forward model's outputs."""
        self.module.export_model_for_inferencing(path, list(outputs or self._files.outputs))

    def save_report(self, path: str | os.PathLike[str], settings: Mapping[str, Any] | None = None) -> None:
        """Write the run as a self-contained HTML page."""
        page = render_report(
            self.history,
            title=f"Training of {self._files.name}",
            settings=settings,
            best=self.best,
            environment=environment(self._options),
            files=list_files(self.output_directory, without=Path(path).name),
        )
        Path(path).write_text(page, encoding="utf-8")

    # ---- inside ----------------------------------------------------------------------------------

    def _build(self, state: CheckpointState, *, seed: int | None) -> None:
        self.state = state
        self.module = Module(
            self._files.training,
            state,
            self._files.evaluation,
            device=self._device,
            session_options=self._options,
            on_nonfinite=self._on_nonfinite,
            seed=seed,
        )
        if self._files.optimizer is None:
            raise ModelError(
                "the artifacts have no optimizer model: generate them with optimizer=…", hint=MAKE_ARTIFACTS
            )
        self.optimizer = Optimizer(self._files.optimizer, self.module)
        if self._clip_norm is not None:
            self.optimizer.clip_norm = self._clip_norm
        self._evaluation: EvaluationStep | None = None

    def _eval_model(self) -> Any:
        if self._files.evaluation is None:
            raise ModelError(
                "Eval model was not provided: the artifacts have no eval_model.onnx", hint=MAKE_ARTIFACTS
            )
        return self._files.evaluation

    def _evaluator(self) -> EvaluationStep:
        if self._evaluation is None:
            step = EvaluationStep(
                self._eval_model(), device=self.module.device, options=self._options,
                outputs=self._files.outputs if self._metrics else (),
            )  # fmt: skip
            step.attach(self.module.memory)
            self._evaluation = step
        return self._evaluation

    def _save(self, *, best: bool = False) -> None:
        if self.output_directory is None:
            return
        data = self.state.to_data(include_optimizer_state=True)
        data.extras["trainer"] = self._place.to_json()
        # the checkpoint last: a run that is killed before it does the epoch again, and writes the same
        with self._writing():
            if best:
                store.save(self.state.to_data(), self.output_directory / "best")
            self.history.save(self.output_directory / "history.json")
            store.save_step(data, self.output_directory, step=self.step, keep=self._keep)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Say of a full or read-only disk what it means for the run."""
        try:
            yield
        except OSError as error:
            raise OnwardError(
                f"cannot write the run to '{self.output_directory}': {error.strerror or error}. Checkpoints that "
                "are there are whole: free space or choose another output_directory, and resume with resume=True",
                hint="free some space, or choose another folder with -o; resume with --resume",
            ) from error

    def _resume(self, directory: Path) -> bool:
        if not any(directory.glob("checkpoint-*")):
            return False  # nothing was saved yet
        latest = store.load_latest(directory)
        try:
            self._place = Place.from_json(str(latest.data.extras["trainer"]))
        except (KeyError, ValueError, TypeError):
            raise OnwardError(f"'{latest.path}' was not saved by a Trainer: it cannot be resumed") from None
        self._build(CheckpointState(latest.data), seed=None)
        self._seed = int(self._place.settings.get("seed", self._seed))
        self.history = History.load(directory / "history.json")
        self.history.cut(self.step, self.epoch)
        store.rotate(directory, keep=self._keep)  # a run that died after saving may not have got to it
        self._whole = True
        return True
