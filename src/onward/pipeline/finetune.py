"""`onward.finetune`: fine-tunes a model, of any origin, on your own data in one call.

Finds what the model is for (`onward.hub`), the task (`onward.tasks`), checks the options against it, and trains.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir

from onward import contract
from onward.artifacts.generate import Artifacts, build_artifacts
from onward.artifacts.names import optimizer_type
from onward.artifacts.teacher import Distillation
from onward.checkpoint import store
from onward.data.match_inputs import calibration_rows, specs_of
from onward.data.read import Data, blame_data, check_labels, prepare
from onward.data.splits import own_split, split
from onward.errors import NonFiniteError, OnwardError
from onward.export.batch_size import open_if_fixed
from onward.export.inference import InferenceExport, for_inference
from onward.export.quantize.quantizer import run_seconds, stored_size
from onward.files import scratch_folder, write_set
from onward.graph.load import load_model
from onward.hub.origin import origin_of
from onward.hub.read_info import read_info
from onward.info.metadata import info_to_metadata
from onward.model_metadata import read_names
from onward.pipeline.evaluate import open_source
from onward.runtime.inference_model import inference_model
from onward.runtime.sessions import open_session, read_model
from onward.tasks import Task, find_task
from onward.tasks.check_options import OptionError
from onward.tasks.choose_task import choose_task
from onward.tasks.protocol import Fitted
from onward.train.artifact_set import find_artifacts
from onward.train.callbacks import Callback, EarlyStopping
from onward.train.schedules import require_schedule
from onward.train.trainer import Trainer

if TYPE_CHECKING:
    from onward.checkpoint.content import CheckpointData
    from onward.info.model_info import ModelInfo
    from onward.info.preprocessing import Preprocessing
    from onward.tasks.protocol import Adapted, Functions, Source
    from onward.train.artifact_set import ArtifactFiles
    from onward.train.history import History

__all__ = ["FineTuned", "finetune"]

_log = logging.getLogger("onward")


@dataclasses.dataclass(frozen=True)
class _Whole:
    """A float model, and its figures on the data to evaluate on; none where its head is new."""

    model: onnx.ModelProto
    figures: dict[str, float]


@dataclasses.dataclass(frozen=True)
class FineTuned:
    """A trained model: its figures, its answers, and the file to deploy."""

    task: str
    metrics: dict[str, float]
    history: History
    info: ModelInfo
    state: CheckpointData
    notes: list[str]
    _artifacts: Artifacts
    _outputs: list[str]
    _tokenizer: Path | None
    _samples: dict[str, np.ndarray]
    # what else belongs into a folder with the model, by its path there
    _files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    # the float model that was trained for fewer bits
    _whole: _Whole | None = None

    @property
    def classes(self) -> list[str] | None:
        """The names of the classes, in the order of the model's outputs."""
        return None if self.info.labels is None else list(self.info.labels)

    @property
    def preprocessing(self) -> Preprocessing | None:
        """How an input is prepared."""
        return self.info.preprocessing

    def __repr__(self) -> str:
        figures = ", ".join(f"{name} {value:.4g}" for name, value in self.metrics.items())
        classes = "" if self.classes is None else f", {len(self.classes)} classes"
        return f"FineTuned({figures}{classes})"

    def predict(self, inputs: Any, **options: Any) -> Any:
        """The answers for pictures, texts, sounds or rows, as `onward.load` gives them; with its options."""
        return self._predictor(inputs, **options)

    def export(self, path: str | os.PathLike[str], *, quantize: str | None = None) -> InferenceExport:
        """Write the model for inference, with its classes and preprocessing in it; `onward.load` reads it.

        A path that does not end in .onnx is a folder, which gets a model.onnx. The tokenizer of a model that reads
        texts goes beside it, as NAME.tokenizer.json.
        """
        target, files = Path(path), {}
        if target.suffix != ".onnx":  # a folder, as the models of the Hugging Face world are
            target, files = target / "model.onnx", dict(self._files)
        if self._tokenizer is not None:
            files[f"{target.stem}.tokenizer.json"] = self._tokenizer.read_bytes()
        # one set: a model beside the tokenizer or the settings of an older one answers wrongly without a word
        with write_set(target.parent) as aside:
            exported = for_inference(
                ir.to_proto(self._artifacts.evaluation), self.state, self._outputs, aside / target.name,
                quantize=quantize, metadata=info_to_metadata(self.info), inputs=self._samples,
            )  # fmt: skip
            for name, content in files.items():
                (aside / name).parent.mkdir(parents=True, exist_ok=True)
                (aside / name).write_bytes(content)
        return dataclasses.replace(exported, path=target)

    def compare_with_float(self, path: str | os.PathLike[str]) -> dict[str, tuple[float, float]]:
        """What training for fewer bits changed in a file that `export` wrote, by name: float before it, and now.

        Bytes and the milliseconds of a batch in plain onnxruntime, and figures where the float model had this head and
        there is data to evaluate on. Empty where the model was not trained for fewer bits.
        """
        whole = self._whole
        if whole is None:
            return {}
        target = Path(path)
        target = target if target.suffix == ".onnx" else target / "model.onnx"
        sessions = open_session(whole.model.SerializeToString()), open_session(str(target))
        # in turns, and the fastest: what else the machine does makes single runs longer, never shorter
        reads = [{value.name for value in session.get_inputs()} for session in sessions]
        feeds = [{name: self._samples[name] for name in self._samples if name in names} for names in reads]
        turns = [[run_seconds(*pair) for pair in zip(sessions, feeds)] for _ in range(9)]
        milliseconds = [1e3 * min(times) for times in zip(*turns)]
        sizes = whole.model.ByteSize(), stored_size(target)
        return {
            "bytes": (float(sizes[0]), float(sizes[1])),
            "milliseconds": (milliseconds[0], milliseconds[1]),
            # not the loss: what trains for fewer bits has the teacher's in it
            **{
                name: (before, self.metrics[name])
                for name, before in whole.figures.items()
                if name in self.metrics and "loss" not in name
            },
        }

    @functools.cached_property
    def _predictor(self) -> Any:
        model = ir.to_proto(
            inference_model(ir.to_proto(self._artifacts.evaluation), self.state, self._outputs)
        )
        tokenizer = None
        if self._tokenizer is not None and self.preprocessing is not None:
            from onward.data.text import open_tokenizer  # tokenizers is an extra

            tokenizer = open_tokenizer(self._tokenizer, self.preprocessing.settings)
        info = self.info.over(read_info(model))
        session = open_session(model.SerializeToString())
        return find_task(self.task).functions.predictor(session, info, tokenizer)


def finetune(
    model: str | os.PathLike[str] | onnx.ModelProto,
    data: Any,
    *,
    task: str | None = None,
    output_directory: str | os.PathLike[str] | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
    resume: bool = False,
    **options: Any,
) -> Any:
    """Fine-tune a pretrained model on your own data.

    `model` is an ONNX file, or a folder that `onward export` wrote or that was downloaded from Hugging Face. `data` is
    a path (a folder with one folder of pictures or WAV files for each class, a CSV, JSON lines or Parquet table,
    .npz) or arrays: (inputs…, labels), or a dict by name; for a language model JSON lines of conversations, prompts
    or texts. What the model is for and what the data holds decide on the task, unless `task` names it. `options` are
    those of the task, with the names and defaults of `onward finetune`: `onward finetune --task TASK --help` lists
    them. One that the task does not have is an error.

    A head that has the data's classes is trained on; another is replaced. A share of the data, `hold_out`, is kept
    for evaluation unless `eval_data` is given; the best epoch is the result. With `output_directory`, checkpoints
    and a report stay there, and `resume=True` goes on with a run that was stopped. The result is a `FineTuned`, of a
    language model a `LanguageModel`.

    >>> import onward
    >>> result = onward.finetune("model.onnx", "pictures", epochs=3)  # doctest: +SKIP
    >>> result.metrics["accuracy"], result.predict("cat.jpg")  # doctest: +SKIP
    (0.97, {'label': 'cat', 'score': 0.99})
    >>> result.export("mine.onnx")  # doctest: +SKIP
    """
    plan = plan_finetuning(model, data, task=task, options=options)
    return plan.train(
        data, output_directory=output_directory, callbacks=callbacks, progress=progress, resume=resume
    )


@dataclasses.dataclass(frozen=True)
class Plan:
    """A model, the task it is trained for and the options of that task, checked."""

    source: Source
    task: Task
    options: Any
    reason: str

    def train(
        self,
        data: Any,
        *,
        output_directory: str | os.PathLike[str] | None = None,
        callbacks: Sequence[Callback] = (),
        progress: bool = True,
        resume: bool = False,
    ) -> Any:
        """Train on the data, or go on with the run in `output_directory`; a `FineTuned`, or a `LanguageModel`."""
        if resume and output_directory is None:
            raise OptionError(
                "resume needs the folder of the earlier run", hint="name it: output_directory=, --run"
            )
        said = f"task: {self.task.name}, because {self.reason}"
        run = _Run(output_directory, callbacks, progress, said, resume)
        return _train(self.source, self.task, data, self.options, run)


def plan_finetuning(
    model: str | os.PathLike[str] | onnx.ModelProto,
    data: Any,
    *,
    task: str | None,
    options: Mapping[str, Any],
) -> Plan:
    """Find the task and check the options; nothing is trained or written."""
    source, reason = open_source(model), "it was named"
    if task is not None:
        chosen = find_task(task)
    else:
        chosen, reason = choose_task(source.info, source.inputs, data, options)
    return Plan(source, chosen, chosen.options(options), reason)


@dataclasses.dataclass(frozen=True)
class _Run:
    """Where a run is kept and who watches it."""

    output_directory: str | os.PathLike[str] | None
    callbacks: Sequence[Callback]
    progress: bool
    announcement: str
    resume: bool

    @contextlib.contextmanager
    def folder(self) -> Iterator[Path]:
        if self.output_directory is not None:
            yield Path(self.output_directory)
            return
        with scratch_folder() as folder:
            yield folder


def _train(source: Source, task: Task, data: Any, options: Any, run: _Run) -> Any:
    """Read the data, adapt the model, fit, and take the best epoch."""
    # two runs in one folder would be taken for one by whoever resumes it
    has_run = run.output_directory is not None and any(Path(run.output_directory).glob("checkpoint-*"))
    if has_run and not run.resume:
        raise OnwardError(
            f"'{run.output_directory}' has an earlier run: resume it (resume=True, --resume), choose another "
            "output_directory, or remove it"
        )
    optimizer_type(getattr(options, "optimizer", "adamw"))
    require_schedule(options.schedule)
    functions = task.functions
    whole = functions.read(data, source, options)
    _log.info(run.announcement)  # not before: most mistakes are in the data, and an error is one line
    adapted = functions.adapt(source, whole, options)
    whole.notes.append(adapted.note)
    train, evaluation = _parts(functions, whole, source, options, adapted)
    if adapted.own is not None:
        for part in (train, evaluation):
            if part is not None:
                adapted.own.prepare(part)
        with run.folder() as folder:
            parts = (train, evaluation, whole)
            files = _named_after(source, adapted.own.artifacts)
            fitted = _fit(files, functions, parts, options, run, folder, adapted)
        return adapted.own.result(fitted, train.notes)
    # only now: ranges of activations and the classes of a new head come from the data
    artifacts = _build(functions, adapted, train, source, options)
    _check_label_ranges(artifacts, whole, adapted)
    before = _measure_float(functions, adapted, (train, evaluation), source, options)
    with run.folder() as folder:
        files = _named_after(source, find_artifacts(artifacts))
        fitted = _fit(files, functions, (train, evaluation, whole), options, run, folder, adapted)
    folder_files = getattr(functions, "folder_files", None)
    outputs = adapted.outputs or json.loads(artifacts.evaluation.metadata_props[contract.OUTPUTS])
    return FineTuned(
        task=task.name,
        metrics=fitted.figures,
        history=fitted.history,
        info=adapted.describe(source.info, train, task.name).replace(
            origin=origin_of(source.path.name if source.path else None, [data], vars(options)),
            source="the data",
        ),
        state=fitted.state,
        notes=train.notes,
        _artifacts=artifacts,
        _outputs=list(outputs),
        _tokenizer=train.tokenizer,
        _samples={
            spec.name: fitted.samples[spec.name] for spec in source.inputs if spec.name in fitted.samples
        },
        _files={} if folder_files is None else folder_files(source, train, adapted),
        _whole=before,
    )


def _measure_float(
    functions: Functions, adapted: Adapted, parts: tuple[Data, Data | None], source: Source, options: Any
) -> _Whole | None:
    """The float model that is to be trained for fewer bits; None where training does not round it."""
    if options.quantize is None:
        return None
    opened: Any = open_if_fixed(adapted.model)[0]
    model = read_model(opened, "forward")
    train, evaluation = parts
    if evaluation is None or _has_new_head(model):
        return _Whole(model, {})
    plain = dataclasses.replace(options, quantize=None, teacher=None)
    files = find_artifacts(_build(functions, adapted, train, source, plain))
    with scratch_folder() as folder:
        trainer = Trainer(
            files, output_directory=folder, metrics=_metrics(functions, options, adapted), seed=options.seed,
            device=options.device, judged=adapted.judged, progress=False,
        )  # fmt: skip
        specs = specs_of(read_model(files.training, "training").graph, trainer.module.input_names())
        judged = functions.batches(evaluation, specs, options, training=False)
        return _Whole(model, trainer.evaluate(judged, batch_size=options.batch_size))


def _has_new_head(model: Any) -> bool:
    """Whether a model's head was replaced, and has learned nothing yet."""
    about = {entry.key: entry.value for entry in read_model(model, "forward").metadata_props}
    return bool(read_names(about, contract.HEAD)) and contract.TRAINED not in about


def _metrics(functions: Functions, options: Any, adapted: Adapted) -> Any:
    return functions.metrics(options, adapted) if options.metrics is None else options.metrics


def _named_after(source: Source, files: ArtifactFiles) -> ArtifactFiles:
    """The training models under the name of what they were made of, which is the report's title."""
    return files if source.path is None else dataclasses.replace(files, name=source.path.name)


def _build(functions: Functions, adapted: Adapted, train: Data, source: Source, options: Any) -> Artifacts:
    """The training models of a file with a head."""
    model, note = open_if_fixed(adapted.model)
    train.notes += [note] if note else []
    # ranges of weights are known without data; those of activations have to be seen
    weight_only = options.quantize in ("int8-weights", "int4")
    needs_samples = options.quantize is not None and not weight_only
    return build_artifacts(
        model, loss=functions.loss(options, train, adapted), optimizer=options.optimizer,
        batch_norm=_choose_batch_norm(model, train, options), requires_grad=_trained(model, options),
        loss_input_names=None if adapted.loss_inputs is None else list(adapted.loss_inputs),
        frozen_params=[*(options.frozen_params or ()), *adapted.frozen] or None,
        lora=options.make_lora("*", options.seed),
        quantize=options.quantize,
        calibration=_calibration_samples(functions, train, source, options) if needs_samples else None,
        teacher=_teacher(model, options),
    )  # fmt: skip


def _choose_batch_norm(model: Any, train: Data, options: Any) -> Any:
    """What the options say; of a model that has seen no data yet, its statistics follow the batches."""
    if options.batch_norm is not None or options.quantize is not None or options.lora:
        return options.batch_norm
    graph = load_model(model, by_reference=True).graph
    norms = [node.inputs[3:5] for node in graph if node.op_type == "BatchNormalization"]
    # exporters write those of an untrained module as it begins: nothing would be normalized by them
    fresh = all(
        value is not None
        and value.const_value is not None
        and bool((value.const_value.numpy() == start).all())
        for statistics in norms
        for value, start in zip(statistics, (0, 1))
    )
    if not norms or not fresh:
        return None
    train.notes.append(f"{len(norms)} batch norms have seen no data: their statistics follow the batches")
    return "train"


def _calibration_samples(
    functions: Functions, train: Data, source: Source, options: Any
) -> dict[str, np.ndarray]:
    """Samples to train on, as the model reads them and without augmentation."""
    parts: list[Sequence[Any]] = []
    rows = 0
    most = calibration_rows(source.inputs)
    for batch in functions.batches(train, source.inputs, options, training=False).epoch(0):
        parts.append(batch)
        rows += len(batch[0])
        if rows >= most:
            break
    columns = {
        spec.name: [np.asarray(batch[index]) for batch in parts] for index, spec in enumerate(source.inputs)
    }
    if all(array.ndim == 2 and array.dtype.kind in "iu" for arrays in columns.values() for array in arrays):
        # texts of one batch are as long as its longest: padded as their masks are, they fit beside others
        longest = max(array.shape[1] for arrays in columns.values() for array in arrays)
        columns = {
            name: [np.pad(array, ((0, 0), (0, longest - array.shape[1]))) for array in arrays]
            for name, arrays in columns.items()
        }
    alike = all(len({array.shape[1:] for array in arrays}) == 1 for arrays in columns.values())
    return {name: np.concatenate(arrays if alike else arrays[:1]) for name, arrays in columns.items()}


def _teacher(model: Any, options: Any) -> Distillation | None:
    """The teacher that is named; else the float model, where it is quantized and its head knows the classes."""
    named = options.teacher
    if named is None:
        if options.quantize is None or options.lora or _has_new_head(model):
            return None
        named = "self"
    return Distillation(named, temperature=options.temperature, weight=options.teacher_weight)


def _check_label_ranges(artifacts: Artifacts, data: Data, adapted: Adapted) -> None:
    """Refuse labels that the model has no output for before training begins, with their rows."""
    ranges = json.loads(artifacts.training.metadata_props.get(contract.LABELS) or "{}")
    arrays = data.arrays
    if adapted.labels is not None and len(ranges) == 1 and arrays:
        name = next(iter(ranges))
        labels = arrays.get(name, list(arrays.values())[-1])
        if labels.dtype != object:  # those of sequences are numbered in a batch, by their names
            check_labels(dataclasses.replace(data, classes=adapted.labels, arrays={name: labels}), ranges)


def _trained(model: Any, options: Any) -> Sequence[str] | None:
    """The weights to train; beside adapters a new head, which has learned nothing yet."""
    if not options.lora:
        return options.requires_grad
    about = {entry.key: entry.value for entry in getattr(model, "metadata_props", ())}
    return [*(options.requires_grad or ()), *read_names(about, contract.HEAD)]


def _parts(
    functions: Functions, whole: Data, source: Source, options: Any, adapted: Adapted
) -> tuple[Data, Data | None]:
    """The samples to train on and those to evaluate on, prepared alike."""
    train, evaluation = whole, None
    if options.eval_data is not None:
        like = dataclasses.replace(whole, classes=adapted.labels or whole.classes)
        evaluation = functions.read(options.eval_data, source, options, like=like)
    elif (own_parts := own_split(whole)) is not None:
        train, evaluation = own_parts
    elif options.hold_out:
        train, evaluation = split(whole, options.hold_out, seed=options.seed)
        train.notes = whole.notes
    # held-out samples get the mean and deviation of the training part, which they must not have shaped
    others = [] if evaluation is None else [evaluation]
    prepare(train, others, standardize=bool(getattr(options, "standardize", False)))
    return train, evaluation


def _fit(
    artifacts: ArtifactFiles,
    functions: Functions,
    parts: tuple[Data, Data | None, Data],
    options: Any,
    run: _Run,
    folder: Path,
    adapted: Adapted,
) -> Fitted:
    train, evaluation, whole = parts
    callbacks = [*run.callbacks, *([] if adapted.own is None else adapted.own.callbacks(train, evaluation))]
    metrics = _metrics(functions, options, adapted) if evaluation or options.metrics is not None else ()
    average = None if options.ema is None else WeightAverage(options.ema)
    # the training loss falls when a model overfits: the held-out one counts where there is one
    watched = options.best_metric or ("eval_loss" if evaluation else "loss")
    stops = [EarlyStopping(watched, patience=options.patience)] if options.patience else []
    trainer = Trainer(
        artifacts, output_directory=folder, learning_rate=options.learning_rate, schedule=options.schedule,
        warmup=options.warmup, clip_norm=options.clip_norm, metrics=metrics, seed=options.seed,
        gradient_accumulation_steps=options.gradient_accumulation_steps, device=options.device,
        callbacks=[*callbacks, *stops, *([] if average is None else [average])], progress=run.progress,
        resume=run.resume, judged=adapted.judged,
        show=None if evaluation is None
        else lambda outputs, inputs: functions.show(outputs, inputs, evaluation, adapted),
    )  # fmt: skip
    trainer.classes = adapted.labels or trainer.classes
    trainer.details = {
        "task": run.announcement.removeprefix("task: "),
        "what was read": "; ".join(train.notes),
    }
    specs = specs_of(read_model(artifacts.training, "training").graph, trainer.module.input_names())
    batches = functions.batches(train, specs, options, training=True)
    judged = None if evaluation is None else functions.batches(evaluation, specs, options, training=False)
    try:
        trainer.fit(
            batches,
            judged,
            epochs=options.epochs,
            batch_size=options.batch_size,
            best_metric=options.best_metric,
        )
    except NonFiniteError as error:
        raise blame_data(error, whole) from error
    first = next(functions.batches(train, specs, options, training=False).epoch(0))
    samples = {spec.name: np.asarray(array) for spec, array in zip(specs, first)}
    if average is not None:
        average.move_to(trainer)
        figures = trainer.evaluate(judged or batches, batch_size=options.batch_size)
        return Fitted(figures, trainer.history, trainer.state.to_data(), samples)
    # the figures are those of the weights that are returned, not of the last epoch
    epochs = trainer.history.epochs
    row = epochs[int(trainer.best["epoch"]) - 1] if trainer.best else epochs[-1]
    figures = {
        name: value
        for name, value in row.items()
        if isinstance(value, float) and "second" not in name and name != "learning_rate"
    }
    return Fitted(figures, trainer.history, store.load(folder / "best"), samples)


# --- An exponential moving average of the weights over the updates of a training run.


class WeightAverage(Callback):
    """Averages the trainable weights: average ← decay · average + (1 − decay) · weight after each update.

    The first updates count more than the decay says, by (1 + n) / (10 + n): otherwise a short run's average would
    still be where it began.
    """

    def __init__(self, decay: float) -> None:
        self.decay, self._updates = decay, 0
        self._average: dict[str, np.ndarray] = {}

    def on_step(self, trainer: Trainer, row: dict[str, Any]) -> None:
        self._updates += 1
        decay = min(self.decay, (1 + self._updates) / (10 + self._updates))
        for name, parameter in trainer.state.parameters:
            if parameter.requires_grad:
                weight = np.asarray(parameter.data)
                average = self._average.setdefault(name, weight.copy())
                average += (1 - decay) * (weight - average)

    def move_to(self, trainer: Trainer) -> None:
        """Put the averages into the trainer's state."""
        for name, average in self._average.items():
            trainer.state.parameters[name].data = average
