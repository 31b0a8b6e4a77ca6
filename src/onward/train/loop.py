"""The training loop: epochs of updates over an engine, with evaluation, history, callbacks and checkpoints.

There is one, for one process and for every rank of several. Ranks stay in step because all that decides what
comes next (errors, stops, whether there are further batches) is summed over them once for each update.
"""

from __future__ import annotations

import dataclasses
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from onward.errors import NonFiniteError
from onward.train.callbacks import improves
from onward.train.evaluation import Details
from onward.train.window import ReadAhead, Window

if TYPE_CHECKING:
    from onward.api.schedulers import LRScheduler
    from onward.train.batches import Batches
    from onward.train.callbacks import Callback
    from onward.train.engines import Engine
    from onward.train.explain import Explainer
    from onward.train.history import History
    from onward.train.progress import Position
    from onward.train.run_files import RunFiles
    from onward.train.trainer import Trainer

# the figures of an evaluation, and what the report shows of it
Judge = Callable[[], tuple[dict[str, float], Details]]


@dataclasses.dataclass(frozen=True)
class Plan:
    """How long a run is, and what happens how often; counts are of updates."""

    epochs: int
    accumulation: int
    # what decides on the best epoch
    metric: str
    max_updates: int | None = None
    save_every: int | None = None
    log_every: int = 1
    evaluate_every: int | None = None


class Callbacks:
    """The callbacks of a run; they are called on rank 0, and all ranks hear whether one stops it."""

    def __init__(self, trainer: Trainer, engine: Engine, callbacks: Sequence[Callback]) -> None:
        self._trainer, self._engine = trainer, engine
        # files and trackers would be written once for each rank
        self._callbacks = list(callbacks) if engine.rank == 0 else []

    def on_start(self) -> bool:
        """Before the first batch; collective."""
        return self._ask("on_start")

    def on_epoch(self, row: dict[str, Any]) -> bool:
        """After an epoch; collective."""
        return self._ask("on_epoch", row)

    def on_step(self, row: dict[str, Any]) -> bool:
        """After an update: whether one of this rank's stops the run."""
        return any([callback.on_step(self._trainer, row) for callback in self._callbacks])  # noqa: C419 - each is called

    def on_end(self) -> None:
        """After the last batch."""
        for callback in self._callbacks:
            callback.on_end(self._trainer)

    def _ask(self, name: str, *row: dict[str, Any]) -> bool:
        answers: list[Any] = []
        with self._engine.all_or_none():
            answers = [getattr(callback, name)(self._trainer, *row) for callback in self._callbacks]
        return self._engine.sum([any(answers)])[0] > 0


class _Totals(NamedTuple):
    """What the ranks say of an update, summed."""

    failed: float
    batches: float
    samples: float
    loss: float
    weight: float
    invalid: float
    stops: float
    interrupts: float
    # floats, because they are summed over the ranks in one message
    has_next: float


class Loop:
    """Runs a plan from a position on; `run` returns whether a callback ended it."""

    def __init__(
        self,
        engine: Engine,
        plan: Plan,
        position: Position,
        history: History,
        *,
        batches: Batches,
        judge: Judge | None,
        scheduler: LRScheduler,
        callbacks: Callbacks,
        files: RunFiles,
        explainer: Explainer,
        write_report: Callable[[], None] = lambda: None,
    ) -> None:
        self.engine, self.plan, self.position, self.history = engine, plan, position, history
        self._batches, self._judge, self._scheduler = batches, judge, scheduler
        self._callbacks, self._files, self._explainer = callbacks, files, explainer
        self._write_report = write_report
        # a rank that leaves an update would leave the others waiting; launchers end ranks that take too long
        self._interrupt = DeferredInterrupt(patient=engine.world > 1)
        self._window: Window | None = None
        # whether what would be saved now is the state between two batches
        self._consistent = True
        self._stop = False
        self._started, self._samples = 0.0, 0.0

    def run(self) -> bool:
        """Train; True where a callback ended it. Ctrl-C saves between two batches (of all ranks) and is raised."""
        # a resumed run may have been stopped by one of them already
        if self._callbacks.on_start():
            return True
        with self._interrupt:
            try:
                return self._run_epochs()
            except KeyboardInterrupt:
                # one rank of several cannot save alone: all were saved before the loop raised it for all
                if self.engine.world == 1 and self._consistent:
                    self._save()
                raise

    def _run_epochs(self) -> bool:
        position, engine = self.position, self.engine
        while position.epoch - position.first_epoch < self.plan.epochs and not self._is_complete():
            self._started, self._samples = time.perf_counter(), 0.0
            stream = self._batches.epoch(
                position.epoch, skip=position.batch, rank=engine.replica, world=engine.replicas
            )
            stopped, has_next = self._run_epoch(ReadAhead(stream))
            if has_next:
                self._save()
                return stopped
            stopped = self._end_epoch() or stopped
            if engine.world == 1:
                self._interrupt.check()
            if stopped:
                return True
        return False

    def _run_epoch(self, stream: ReadAhead) -> tuple[bool, bool]:
        """What is left of an epoch; whether a callback ended training, and whether there are further batches."""
        plan, position = self.plan, self.position
        while not self._is_complete():
            totals, row = self._take_window(stream)
            has_next = totals.has_next > 0
            if row is not None:
                self._log(row)
                # One process stops here. Rank 0 of several says so with its next update, because the others do not
                # hear it now: a message more for each update would be the price.
                self._stop = self._callbacks.on_step(self._with_speed(row)) or self._stop
            if totals.interrupts and self.engine.world > 1:
                self._save()
                raise KeyboardInterrupt
            if totals.stops or (self._stop and self.engine.world == 1):
                return True, has_next
            if not has_next:
                return False, False
            if row is not None and plan.save_every and position.step % plan.save_every == 0:
                self._save()
        return False, True

    def _take_window(self, stream: ReadAhead) -> tuple[_Totals, dict[str, Any] | None]:
        """One update from the next batches of all ranks, and its row; no row where no sample counts."""
        engine, position = self.engine, self.position
        alone = engine.world == 1
        first = position.batch - position.window_batches
        window = Window(
            stream,
            position,
            size=self.plan.accumulation,
            # ranks finish the window that the others have begun
            check_interrupt=self._interrupt.check if alone else lambda: None,
        )
        self._consistent, self._window = False, window
        try:
            report = engine.backward(window)
        except BaseException:
            self._consistent = window.consistent
            raise
        # before the sum: the samples at fault are known to this rank alone
        failure = report.failure and self._explainer.of_batch(report.failure, window)
        totals = _Totals(
            # one message for all of it: between machines its latency counts, not its size
            *engine.sum(
                [
                    failure is not None,
                    window.batches,
                    window.samples,
                    position.window_loss,
                    position.window_weight,
                    report.invalid is not None,
                    self._stop,
                    self._interrupt.is_waiting,
                    failure is None and window.has_next,
                ]
            )
        )
        if totals.failed:
            engine.raise_together(failure)
        # at the first batch only: a resumed epoch may have nothing left
        if not totals.batches and not position.batch:
            raise ValueError("the training data has no batch")
        # all stages of a pipeline count the samples of its batches
        self._samples += totals.samples * engine.replicas / engine.world
        row = None
        if totals.weight:
            invalid = "the loss is not finite on another rank" if totals.invalid else None
            row = self._update(totals, report.invalid or invalid)
        position.close_window(totals.loss, totals.weight, updated=row is not None)
        if totals.has_next:  # the same on all ranks, of which some may have had fewer batches
            position.batch = first + self.plan.accumulation
        self._consistent = True
        return totals, row

    def _update(self, totals: _Totals, invalid: str | None) -> dict[str, Any]:
        engine, position = self.engine, self.position
        # read before the scheduler moves on: the rate of this update
        rate = engine.optimizer.get_learning_rate()
        try:
            applied = engine.update(weight=totals.weight, unit=position.unit, invalid=invalid)
        except NonFiniteError as error:
            assert self._window is not None
            raise self._explainer.of_update(error, self._window) from error
        self.history.skipped += not applied
        self._scheduler.step()
        return {
            "step": position.step + 1,
            "epoch": position.epoch + 1,
            # a mean over labels, not over batches: the last batch may be small, and labels may be ignored
            "loss": totals.loss if engine.sums_loss else totals.loss / totals.weight,
            "learning_rate": rate,
            "gradient_norm": engine.optimizer.gradient_norm,
        }

    def _log(self, row: dict[str, Any]) -> None:
        if row["step"] % self.plan.log_every == 0:
            self.history.log(row)
        every = self.plan.evaluate_every
        if self._judge is not None and every is not None and row["step"] % every == 0:
            self.history.evaluations.append(
                {"step": row["step"], "epoch": row["epoch"], **_named(self._judge()[0])}
            )

    def _with_speed(self, row: dict[str, Any]) -> dict[str, Any]:
        seconds = max(time.perf_counter() - self._started, 1e-9)
        return {**row, "samples_per_second": self._samples / seconds}

    def _end_epoch(self) -> bool:
        """Evaluate, log and save an epoch; True where a callback ended training."""
        position, history = self.position, self.history
        details = Details()
        seconds = time.perf_counter() - self._started
        row: dict[str, Any] = {
            "epoch": position.epoch + 1,
            "step": position.step,
            "loss": position.mean_loss(),
            "learning_rate": self.engine.optimizer.get_learning_rate(),
        }
        if self._judge is not None:
            figures, details = self._judge()
            row |= _named(figures)
        row["seconds"] = round(seconds, 4)
        row["samples_per_second"] = round(self._samples / max(seconds, 1e-9), 1)
        self._consistent = False
        history.epochs.append(row)
        position.begin_epoch()
        metric = self.plan.metric
        # before callbacks: one that stops the run must find the best epoch noted
        is_best = position.note_best(metric, float(row[metric]), sign=improves(metric))
        if is_best and details.confusion is not None:
            history.confusion = details.confusion.tolist()
        if is_best and details.figures:
            history.figures = list(details.figures)
        self._consistent = True
        stopped = self._callbacks.on_epoch(row)
        self._save(best=is_best)
        # a run is watched while it goes on
        self._write_report()
        return stopped

    def _is_complete(self) -> bool:
        most = self.plan.max_updates
        return most is not None and self.position.step >= most

    def _save(self, *, best: bool = False) -> None:
        self._files.save(self.engine, self.position, self.history, best=best)


def _named(figures: dict[str, float]) -> dict[str, float]:
    """The figures of an evaluation by their columns: its loss is not that of training."""
    return {"eval_loss" if name == "loss" else name: value for name, value in figures.items()}


# --- Defers Ctrl-C to the end of the current batch, so that the saved state is consistent.


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class DeferredInterrupt:
    """Defers the first interrupt signal until `check` is called; a second one takes effect immediately.

    That is Ctrl-C, and SIGTERM in a program that made it mean the same (its handler is Python's
    `signal.default_int_handler`, as in the command line). A program that handles a signal in a way of its own
    keeps that way; outside the main thread nothing happens. With `patient` the second one waits, too.

    >>> with DeferredInterrupt() as interrupt:
    ...     for batch in range(3):
    ...         interrupt.check()
    """

    def __init__(self, *, patient: bool = False) -> None:
        # whether a signal waits for `check`
        self.is_waiting, self._patient = False, patient
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> DeferredInterrupt:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) is signal.default_int_handler:
                    self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def check(self) -> None:
        """Raise the deferred KeyboardInterrupt."""
        if self.is_waiting:
            self.is_waiting = False
            raise KeyboardInterrupt

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.is_waiting and not self._patient:
            raise KeyboardInterrupt
        self.is_waiting = True
