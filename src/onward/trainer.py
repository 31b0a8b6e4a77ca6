"""Trainer: a whole training run in one call.

Batches, accumulation, schedule, evaluation, metrics, early stopping, checkpoints, resume and report over the
`api` classes, which remain there for people who write their own loop.
"""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime as ort

from onward import checkpoint, inference
from onward.api import CheckpointState, LRScheduler, Module, Optimizer
from onward.api.inputs import prepare
from onward.api.module import NonFinitePolicy
from onward.errors import ModelError, OnwardError
from onward.fit.batches import Batches, make_batches
from onward.fit.callbacks import Callback, Progress, improves
from onward.fit.history import History
from onward.fit.metrics import Metric, find_metrics
from onward.fit.report import render_report
from onward.fit.schedules import Schedule, make_schedule
from onward.fit.sources import ArtifactFiles, find_artifacts
from onward.runtime.step import EvaluationStep

if TYPE_CHECKING:
    from onward.artifacts import Artifacts

__all__ = ["Trainer"]


class Trainer:
    """Trains what `generate_artifacts` wrote (a directory) or `build_artifacts` made.

    With `output_directory`, checkpoints, history and a report are kept there, and `fit(resume=True)` goes on
    where an earlier run stopped, byte for byte as if it had not. `schedule` is "constant", "linear", "cosine",
    "step", "one-cycle", "polynomial", or a function of (optimizer, total steps) that returns a scheduler;
    `warmup` counts steps, or is a share of them when below 1. `metrics` are names or functions: see
    `onward.fit.metrics`.
    """

    def __init__(
        self,
        artifacts: str | os.PathLike[str] | Artifacts,
        *,
        output_directory: str | os.PathLike[str] | None = None,
        learning_rate: float = 1e-3,
        schedule: Schedule = "constant",
        warmup: float = 0,
        accumulation: int = 1,
        clip_norm: float | None = None,
        metrics: Sequence[str | Metric] | Mapping[str, str | Metric] = (),
        callbacks: Sequence[Callback] = (),
        seed: int = 0,
        device: str = "cpu",
        session_options: ort.SessionOptions | None = None,
        on_nonfinite: NonFinitePolicy = "raise",
        keep: int = 2,
        progress: bool = True,
        prefix: str = "",
    ) -> None:
        if accumulation < 1:
            raise ValueError(f"accumulation is {accumulation}: it must be 1 or more")
        self._files: ArtifactFiles = find_artifacts(artifacts, prefix)
        self.output_directory = None if output_directory is None else Path(output_directory)
        self.learning_rate, self._schedule, self._warmup = learning_rate, schedule, warmup
        self.accumulation, self._clip_norm, self._keep = accumulation, clip_norm, keep
        self._metrics = find_metrics(metrics)
        self._callbacks = [*callbacks, *([Progress()] if progress else [])]
        self._seed, self._device, self._options = seed, device, session_options
        self._on_nonfinite: NonFinitePolicy = on_nonfinite
        self.history = History()
        self.epoch = self.step = self._batch = 0
        self.total_steps: int | None = None
        self.best: dict[str, Any] | None = None
        self._build(CheckpointState(self._files.load_checkpoint()), seed=seed)

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
    ) -> History:
        """Train for some epochs in all and return the history.

        Data are arrays in the order of the model's inputs, a dict of them by name, an iterable of batches
        (a torch DataLoader, a list), or a function that returns one. `save_every` counts updates; at the end
        of each epoch a checkpoint is written in any case. The best epoch by `best_metric` (default: the
        evaluation loss, or the training loss without evaluation data) is kept as `best`.
        """
        if epochs < 1:
            raise ValueError(f"epochs is {epochs}: it must be 1 or more")
        names = self.module.input_names()
        batches = make_batches(train_data, names, batch_size=batch_size, shuffle=shuffle, seed=self._seed)
        evaluation = None if eval_data is None else make_batches(eval_data, names, batch_size=batch_size)
        self._start(resume, batches, epochs)
        settings = {
            "epochs": epochs, "batch size": batch_size, "accumulation": self.accumulation, "seed": self._seed,
            "learning rate": self.learning_rate, "schedule": self._schedule, "shuffle": shuffle,
        }  # fmt: skip
        for callback in self._callbacks:
            callback.on_start(self)
        try:
            stopped = False
            while self.epoch < epochs and not stopped:
                stopped = self._run_epoch(batches, save_every, log_every)
                stopped = self._end_epoch(evaluation, best_metric) or stopped
        except KeyboardInterrupt:
            self._save()
            raise
        finally:
            for callback in self._callbacks:
                callback.on_end(self)
        self._write_report(settings)
        return self.history

    def _start(self, resume: bool, batches: Batches, epochs: int) -> None:
        steps = None if batches.count is None else -(-batches.count // self.accumulation)
        self.total_steps = None if steps is None else steps * epochs
        if self.output_directory is not None:
            self.output_directory.mkdir(parents=True, exist_ok=True)
        if resume:
            self._resume()
        elif self.step or self.epoch:  # a second fit trains on, with a schedule of its own
            self.epoch = self._batch = 0
            self.step = 0
        self._scheduler: LRScheduler = make_schedule(
            self._schedule, self.optimizer, self.learning_rate, total=self.total_steps, warmup=self._warmup
        )

    def _run_epoch(self, batches: Batches, save_every: int | None, log_every: int) -> bool:
        self._losses: list[float] = getattr(self, "_losses", [])
        started, samples = time.perf_counter(), 0
        self._epoch_started, self._epoch_samples = started, 0
        window: list[float] = []
        self.module.train()
        stream = batches.epoch(self.epoch, skip=self._batch)
        pending = next(stream, None)
        if pending is None and self._batch == 0:
            raise ValueError("the training data has no batch")
        stopped = False
        while pending is not None and not stopped:
            batch, pending = pending, next(stream, None)
            results = self.module(*batch)
            loss = float(np.asarray(results[0] if isinstance(results, tuple) else results).reshape(-1)[0])
            window.append(loss)
            self._losses.append(loss)
            self._batch += 1
            samples += _samples(batch)
            self._epoch_samples = samples
            if len(window) < self.accumulation and pending is not None:
                continue
            row = self._update(window)
            row["samples_per_second"] = samples / max(time.perf_counter() - started, 1e-9)
            window = []
            if self.step % log_every == 0:
                self.history.steps.append({k: v for k, v in row.items() if k != "samples_per_second"})
            answers = [callback.on_step(self, row) for callback in self._callbacks]
            stopped = any(answers)
            if save_every and self.step % save_every == 0 and pending is not None:
                self._save()
        return stopped

    def _update(self, window: list[float]) -> dict[str, Any]:
        self.optimizer._gradient_scale = 1.0 / len(window)
        rate = self.optimizer.get_learning_rate()
        self.optimizer.step()
        self.module.lazy_reset_grad()
        self._scheduler.step()
        self.step += 1
        return {
            "step": self.step,
            "epoch": self.epoch + 1,
            "loss": sum(window) / len(window),
            "learning_rate": rate,
            "gradient_norm": self.optimizer.gradient_norm,
        }

    def _end_epoch(self, evaluation: Batches | None, best_metric: str | None) -> bool:
        seconds = time.perf_counter() - self._epoch_started
        losses, self._losses = self._losses, []
        row: dict[str, Any] = {
            "epoch": self.epoch + 1,
            "step": self.step,
            "loss": float(np.mean(losses)) if losses else math.nan,
            "learning_rate": self.optimizer.get_learning_rate(),
        }
        if evaluation is not None:
            row |= {f"eval_{k}" if k == "loss" else k: v for k, v in self.evaluate(evaluation).items()}
        row["seconds"] = round(seconds, 4)
        row["samples_per_second"] = round(self._epoch_samples / max(seconds, 1e-9), 1)
        self.history.epochs.append(row)
        self.epoch += 1
        self._batch = 0
        answers = [callback.on_epoch(self, row) for callback in self._callbacks]
        metric = best_metric or ("eval_loss" if evaluation is not None else "loss")
        if metric not in row:
            raise KeyError(f"best_metric is '{metric}', the epochs have {', '.join(row)}")
        score = improves(metric) * float(row[metric])
        is_best = self.best is None or score > improves(metric) * self.best["value"]
        if is_best:
            self.best = {"metric": metric, "value": float(row[metric]), "epoch": row["epoch"]}
        self._save(best=is_best)
        return any(answers)

    # ---- using -----------------------------------------------------------------------------------

    def evaluate(self, data: Any, *, batch_size: int = 32) -> dict[str, float]:
        """The loss and the metrics over some data, dropout off."""
        step = self._evaluator()
        names = step.plan.inputs
        source = make_batches(data, names, batch_size=batch_size)
        total, count = 0.0, 0
        kept: dict[str, list[np.ndarray]] = {name: [] for name in [*step.plan.outputs[1:], *names]}
        for batch in source.epoch(0):
            feeds, _ = prepare(step.plan, batch)
            results = step.run(feeds)
            size = _samples(batch)
            total += float(results[0].reshape(-1)[0]) * size
            count += size
            if self._metrics:
                for name, array in zip([*step.plan.outputs[1:], *names], [*results[1:], *feeds]):
                    kept[name].append(array)
        if count == 0:
            raise ValueError("the evaluation data has no batch")
        figures = {"loss": total / count}
        if self._metrics:
            arrays = {name: _join(parts) for name, parts in kept.items()}
            outputs = {name: arrays[name] for name in step.plan.outputs[1:]} | {
                "loss": np.asarray(figures["loss"])
            }
            inputs = {name: arrays[name] for name in names}
            figures |= {name: float(metric(outputs, inputs)) for name, metric in self._metrics.items()}
        return figures

    def predict(
        self, data: Any, *, outputs: Sequence[str] | None = None, batch_size: int = 256
    ) -> np.ndarray | dict[str, np.ndarray]:
        """The model's outputs (or other values of its graph, by name) for inputs without labels."""
        names = list(outputs or self._files.outputs)
        model = inference.inference_model(self._eval_model(), self.state.to_data(), names)
        session = ort.InferenceSession(inference.to_bytes(model), providers=["CPUExecutionProvider"])
        inputs = [value.name for value in session.get_inputs()]
        source = make_batches(data, inputs, batch_size=batch_size)
        parts = [session.run(None, dict(zip(inputs, batch))) for batch in source.epoch(0)]
        joined = {name: _join([np.asarray(part[i]) for part in parts]) for i, name in enumerate(names)}
        return joined[names[0]] if outputs is None and len(names) == 1 else joined

    def export(self, path: str | os.PathLike[str], outputs: Sequence[str] | None = None) -> None:
        """Write the trained model for inference; by default with the forward model's outputs."""
        self.module.export_model_for_inferencing(path, list(outputs or self._files.outputs))

    def save_report(self, path: str | os.PathLike[str], settings: Mapping[str, Any] | None = None) -> None:
        """Write the run as a self-contained HTML page."""
        environment = {
            "onnxruntime": ort.__version__,
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}",
            "processors": os.cpu_count(),
        }
        files = (
            [] if self.output_directory is None else sorted(p.name for p in self.output_directory.iterdir())
        )
        page = render_report(
            self.history,
            title=f"Training of {self._files.name}",
            settings=settings,
            environment=environment,
            files=[name for name in files if not name.startswith(".") and name != Path(path).name],
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
            raise ModelError("the artifacts have no optimizer model: generate them with optimizer=…")
        self.optimizer = Optimizer(self._files.optimizer, self.module)
        if self._clip_norm is not None:
            self.optimizer._updater.clip_norm = self._clip_norm
        self._evaluation: EvaluationStep | None = None

    def _eval_model(self) -> Any:
        if self._files.evaluation is None:
            raise ModelError("Eval model was not provided: the artifacts have no eval_model.onnx")
        return self._files.evaluation

    def _evaluator(self) -> EvaluationStep:
        if self._evaluation is None:
            step = EvaluationStep(
                self._eval_model(), device=self._device, options=self._options,
                outputs=self._files.outputs if self._metrics else (),
            )  # fmt: skip
            step.attach({**self.module._parameters.views, **self.module._frozen})
            self._evaluation = step
        return self._evaluation

    def _save(self, *, best: bool = False) -> None:
        if self.output_directory is None:
            return
        data = self.state.to_data(include_optimizer_state=True)
        data.extras["trainer"] = json.dumps(
            {
                "epoch": self.epoch,
                "batch": self._batch,
                "step": self.step,
                "best": self.best,
                "losses": self._losses,
            }
        )
        checkpoint.save_step(data, self.output_directory, step=self.step, keep=self._keep)
        if best:
            checkpoint.save(self.state.to_data(), self.output_directory / "best")
        self.history.save(self.output_directory / "history.json")

    def _resume(self) -> None:
        if self.output_directory is None:
            raise OnwardError("resume=True needs the output_directory of the earlier run")
        if not any(self.output_directory.glob("checkpoint-*")):
            return  # nothing was saved yet: start from the beginning
        latest = checkpoint.load_latest(self.output_directory)
        saved = latest.data.extras.get("trainer")
        if not isinstance(saved, str):
            raise OnwardError(f"'{latest.path}' was not saved by a Trainer: it cannot be resumed")
        self._build(CheckpointState(latest.data), seed=None)
        place = json.loads(saved)
        self.epoch, self._batch, self.step = place["epoch"], place["batch"], place["step"]
        self.best, self._losses = place["best"], place["losses"]
        self.history = History.load(self.output_directory / "history.json")
        self.history.cut(self.step)

    def _write_report(self, settings: Mapping[str, Any]) -> None:
        if self.output_directory is not None:
            self.save_report(self.output_directory / "report.html", settings)


def _samples(batch: Sequence[Any]) -> int:
    first = batch[0]
    shape: Sequence[int] = first.shape() if isinstance(first, ort.OrtValue) else np.shape(first)
    return int(shape[0]) if shape else 1


def _join(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts and parts[0].ndim else np.asarray(parts)
