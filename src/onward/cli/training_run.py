"""A training run of the command line, in this process or on several, of which each does the same."""

from __future__ import annotations

import dataclasses
import errno
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onward.cli.choices import ScheduleChoice
from onward.cli.errors import CommandError
from onward.cli.paths import require_folder_target
from onward.cli.python_entry import names_code
from onward.cli.run_folder import begun_run
from onward.cli.shared_options import refuse_unused
from onward.files import scratch_folder
from onward.limits import current

if TYPE_CHECKING:
    from onward.cli.output import Output
    from onward.cli.run_options import RunOptions
    from onward.data.match_inputs import InputSpec
    from onward.data.read import Data
    from onward.distributed.launch import Ended, World
    from onward.train.callbacks import Callback
    from onward.train.engines import EngineFactory
    from onward.train.trainer import Trainer


@dataclasses.dataclass(frozen=True)
class TrainingRun:
    """A run before it begins: where it is, its options and its data, which were read and fit the model."""

    artifacts: Path
    directory: Path
    options: RunOptions
    inputs: Sequence[InputSpec]
    whole: Data
    train: Data
    evaluation: Data | None

    def count_updates(self) -> int | None:
        """How many updates the run has, where its data tells."""
        if self.train.samples is None:
            return None
        batches = -(-self.train.samples // self.options.batch_size)
        return -(-batches // self.options.accumulation) * self.options.epochs

    def make_callbacks(self) -> list[Callback]:
        """What the options say should watch the run."""
        from onward.train.callbacks import Callback, EarlyStopping, LogFile

        options, callbacks = self.options, list[Callback]()
        if options.patience:
            watched = options.best or ("eval_loss" if self.evaluation is not None else "loss")
            callbacks.append(EarlyStopping(watched, patience=options.patience))
        if options.tensorboard:
            from onward.train.callbacks import EventFile

            require_folder_target(options.tensorboard)
            callbacks.append(EventFile(options.tensorboard))
        if options.mlflow:
            from onward.train.callbacks import MLflow

            callbacks.append(MLflow(options.mlflow))
        if options.wandb:
            from onward.train.callbacks import WeightsAndBiases

            callbacks.append(WeightsAndBiases(options.wandb))
        return [*callbacks, LogFile(self.directory / "log.txt")]

    def make_trainer(
        self,
        callbacks: Sequence[Callback],
        *,
        resume: bool,
        progress: bool,
        engines: EngineFactory | None = None,
    ) -> Trainer:
        """The trainer of this run."""
        from onward import Trainer

        options = self.options
        trainer = Trainer(
            self.artifacts,
            output_directory=self.directory,
            learning_rate=options.learning_rate,
            schedule=str(options.schedule),
            warmup=options.warmup,
            gradient_accumulation_steps=options.accumulation,
            clip_norm=options.clip_norm,
            metrics=[str(name) for name in options.metric or ()],
            callbacks=callbacks,
            seed=options.seed,
            keep=options.keep,
            progress=progress,
            prefix=options.prefix,
            device=options.device,
            resume=resume,
            engines=engines,
        )
        # the data's names where it has some: they were checked against the model's order
        trainer.classes = self.train.classes or trainer.classes
        trainer.details = {"data": ", ".join(options.data or ()), "model": str(self.artifacts)}
        if options.augment:
            trainer.details["augmentation"] = ", ".join(options.augment)
        return trainer

    def fit(self, trainer: Trainer) -> dict[str, Any]:
        """Train; what there is to say about it."""
        from onward.data.read import blame_data
        from onward.errors import NonFiniteError, OnwardError

        options = self.options
        try:
            trainer.fit(
                self.train.value,
                None if self.evaluation is None else self.evaluation.value,
                epochs=options.epochs,
                batch_size=options.batch_size,
                shuffle=not options.no_shuffle,
                save_every=options.save_every,
                best_metric=options.best,
                transform=self._augmentation(trainer.module.signature.inputs),
            )
        except NonFiniteError as error:
            raise blame_data(error, self.whole) from error
        # a full disk comes as either: checkpoints wrap it, logs do not
        except (OSError, OnwardError) as error:
            explained = self._explain_full_disk(error, trainer.step)
            if explained is None:
                raise
            raise explained from error
        except KeyboardInterrupt:
            if not any(self.directory.glob("checkpoint-*")):
                raise
            raise KeyboardInterrupt(
                f"stopped after {trainer.step} updates, all saved; resume with: {self._resume()}"
            ) from None
        return {
            "epochs": trainer.history.epochs,
            "best": trainer.best,
            "steps": trainer.step,
            "samples": self.train.samples,
        }

    def _augmentation(self, names: Sequence[str]) -> Any:
        if not self.options.augment:
            return None
        from onward.data.augment import make_augmentation

        # batches come in the model's order, which is not always that of the file
        inputs = sorted(self.inputs, key=lambda spec: names.index(spec.name))
        return make_augmentation(self.options.augment, inputs, self.train)

    def _resume(self) -> str:
        """The command that resumes a run; what a file may not decide has to be named again."""
        again = [
            f" --{name.replace('_', '-')} {entry}"
            for name in ("data", "eval_data")
            if (entry := names_code(getattr(self.options, name))) is not None
        ]
        again += [
            f" --{name} {project}"
            for name in ("mlflow", "wandb")
            if (project := getattr(self.options, name)) is not None
        ]
        return f"onward train {self.directory} --resume{''.join(again)}"

    def _explain_full_disk(self, error: Exception, step: int) -> CommandError | None:
        """What to say where the disk is full: what is safe, and how to go on; None for other errors."""
        cause: BaseException | None = error
        # through the causes: what was raised last is about a checkpoint, not about a disk
        while cause is not None and getattr(cause, "errno", None) != errno.ENOSPC:
            cause = cause.__cause__
        if cause is None:
            return None
        if any(self.directory.glob("checkpoint-*")):
            return CommandError(
                f"no space is left on the disk of '{self.directory}': stopped after {step} updates, "
                "the last save is whole",
                f"free some, then resume with: {self._resume()}",
            )
        return CommandError(
            f"no space is left on the disk of '{self.directory}', nothing was saved",
            "free some, or choose -o",
        )


def read_training_run(artifacts: Path, directory: Path, options: RunOptions) -> TrainingRun:
    """Read the data of a run; most mistakes are there, and a session for training takes seconds."""
    from onward.cli.data import load_training_data, user_inputs
    from onward.train.artifact_set import find_artifacts

    require_folder_target(directory)
    find_artifacts(artifacts, options.prefix)  # an error where one is missing, before the data is read
    inputs = user_inputs(artifacts / f"{options.prefix}training_model.onnx")
    whole, train, evaluation = load_training_data(artifacts, directory, options, inputs)
    if (options.metric or options.best) and evaluation is None:
        raise CommandError(
            "--metric and --best need data to evaluate on", "add --eval-data FILE or --hold-out 0.1"
        )
    # the label column that was found belongs to the run
    options = dataclasses.replace(options, label=options.label or train.label)
    return TrainingRun(artifacts, directory, options, inputs, whole, train, evaluation)


def run_training(
    output: Output,
    artifacts: Path,
    directory: Path,
    options: RunOptions,
    *,
    resume: bool,
    overwrite: bool,
    world: World | None = None,
) -> None:
    """Train in this process, or on those that the options or a world of several machines say, and report."""
    from onward.cli.data import keep_tokenizer
    from onward.train.history import History

    processes = options.processes if world is None else world.size
    refuse_unused(
        {
            "--shard-optimizer is for several processes": options.shard_optimizer and processes == 1,
            "--hold-out is for data without an evaluation part, and --eval-data is one": options.hold_out
            is not None
            and options.eval_data,
            "--warmup is for schedules without one of their own, and one-cycle has one": options.warmup
            and options.schedule is ScheduleChoice.ONE_CYCLE,
        }
    )
    # here, not in the ranks: each of them would say so
    if processes % options.stages:
        raise CommandError(
            f"{processes} processes cannot be divided into pipelines of {options.stages} stages",
            "change --processes",
        )
    run = read_training_run(artifacts, directory, options)
    for note in run.train.notes:
        output.note(note)
    done_before = len(History.load(directory / "history.json").epochs) if resume else -1
    # mistakes show before an earlier run goes
    fresh = None
    if processes == 1 and not resume:
        fresh = _make_trainer_here(output, run, resume=False)
    with begun_run(
        directory, artifacts, run.options, run.train.classes, run.train.preprocessing,
        overwrite=overwrite and not resume, lock=world is None or world.machine == 0,
    ):  # fmt: skip
        keep_tokenizer(run.train, directory)
        if processes == 1:
            # one that is resumed is read while nobody else writes it
            summary = run.fit(fresh or _make_trainer_here(output, run, resume=True))
        else:
            summary = train_on_ranks(output, run, world, resume=resume)
    if summary is None:
        output.line("rank 0, on machine 0, has the results")
        output.result({"directory": directory})
        return
    if len(summary["epochs"]) == done_before:
        output.note(
            f"nothing is left to do: the run has its {done_before} epochs; for more, say --epochs {done_before + 5}"
        )
    _report(output, directory, summary)


def _make_trainer_here(output: Output, run: TrainingRun, *, resume: bool) -> Trainer:
    return run.make_trainer(run.make_callbacks(), resume=resume, progress=not output.silent)


def _report(output: Output, directory: Path, summary: Mapping[str, Any]) -> None:
    rows = summary["epochs"]
    columns = [
        key for key in dict.fromkeys(key for row in rows for key in row) if key not in ("learning_rate",)
    ]
    output.table(
        "", [c.replace("_", " ") for c in columns], [[_cell(row.get(c, "")) for c in columns] for row in rows]
    )
    if summary["best"]:
        best = summary["best"]
        output.line(
            f"best: epoch {best['epoch']} with {best['metric'].replace('_', ' ')} {best['value']:.4g}"
        )
    output.line(f"report: {directory / 'report.html'}")
    output.line(f"next: onward deploy {directory} trained.onnx")
    output.result({"directory": directory, "report": directory / "report.html", **summary})


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:.4g}"


# --- Trains on several processes: each is a rank and runs `onward.cli.worker` with the options of the run.

# A rank that is killed again after that many restarts, each from the last checkpoint, will be killed again.
_MAX_RESTARTS = 3


def train_on_ranks(
    output: Output, run: TrainingRun, world: World | None, *, resume: bool
) -> dict[str, Any] | None:
    """Train on the ranks of a world, or of this machine, to their end; what rank 0 says of the run, if it is here."""
    from onward.distributed.launch import World

    if importlib.util.find_spec("torch") is None:
        raise CommandError("torch is not installed", "pip install 'onward[distributed]'")
    with scratch_folder() as scratch:
        return _launch_ranks(output, run, world or World(run.options.processes), scratch, resume=resume)


def _launch_ranks(
    output: Output, run: TrainingRun, world: World, scratch: Path, *, resume: bool
) -> dict[str, Any] | None:
    from onward.distributed.launch import run_ranks

    # files, not pipes: a rank that prints much would block on a pipe that nobody reads
    report, log = scratch / "report.json", scratch / "stderr.txt"
    job = {
        "artifacts": str(run.artifacts),
        "directory": str(run.directory),
        "options": run.options.to_json(),
        "resume": resume,
        "report": str(report),
        # those of --limit: a rank is a process of its own
        "limits": dataclasses.asdict(current()),
    }

    def before_restart() -> None:
        report.unlink(missing_ok=True)  # what the ranks of the attempt that is over said
        output.note("a rank was lost: all start again from the last checkpoint")

    with output.counting("training", run.count_updates()) as show, open(log, "ab") as stderr:
        ended = run_ranks(
            [sys.executable, "-m", "onward.cli.worker", json.dumps(job)],
            world,
            max_restarts=_MAX_RESTARTS,
            # modules of the current folder only where the user names one
            environment={**os.environ, "PYTHONSAFEPATH": "1"},
            stdout=subprocess.DEVNULL if output.silent else None,
            stderr=stderr,
            poll=lambda: show(_read_count(report.with_name("updates"))),
            before_restart=before_restart,
        )
    answer = json.loads(report.read_text(encoding="utf-8")) if report.is_file() else {}
    return _explain_end(output, run, ended, answer, log.read_text(encoding="utf-8", errors="replace"))


def _explain_end(
    output: Output, run: TrainingRun, ended: Ended, answer: dict[str, Any], log: str
) -> dict[str, Any] | None:
    """What rank 0 says of the run; an error where the ranks failed, were lost or interrupted."""
    if output.debug:
        print(log, file=sys.stderr)
    if "error" in answer:
        raise CommandError(answer["error"], answer["hint"])
    saved = any(run.directory.glob("checkpoint-*"))
    again = f"resume with: onward train {run.directory} --resume"
    if ended.interrupted or "stopped" in answer:
        raise KeyboardInterrupt(answer.get("stopped") or (f"interrupted; {again}" if saved else ""))
    if ended.lost:
        times = f", {ended.restarts + 1} times" if ended.restarts else ""
        raise CommandError(f"{ended.lost}{times}", again if saved else "--debug shows what the ranks said")
    if ended.code:
        last = [line for line in log.splitlines() if line.strip()][-1:] or [""]
        raise CommandError(
            f"a rank ended with code {ended.code}: {last[0].strip()[:200]}", "--debug shows all it said"
        )
    for line in log.splitlines():
        if "Warning:" in line:
            output.note(line.strip())
    return answer.get("summary")


def _read_count(path: Path) -> int:
    """How many updates rank 0 has made; 0 while it has not said so."""
    try:
        # text: a program may watch it as well
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # not there yet, or being written
        return 0
