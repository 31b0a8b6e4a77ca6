"""`onward.finetune`: fine-tunes a published model on your own classes and data in one call."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import onnx
import onnx_ir as ir

from onward import contract
from onward.artifacts.generate import Artifacts, build_artifacts
from onward.artifacts.names import loss_type, optimizer_type
from onward.checkpoint import store
from onward.data.augment import make_augmentation
from onward.data.match_inputs import InputSpec, fit, specs_of
from onward.data.preprocessing import KEY, Preprocessing, beside, image_settings
from onward.data.read import Data, DataOptions, blame_data, check_labels, prepare, read_data, split
from onward.data.tables import number_labels, numbered_classes
from onward.errors import DataError, NonFiniteError, OnwardError
from onward.export.batch_size import open_if_fixed
from onward.export.inference import InferenceExport, for_inference
from onward.graph.gate import read_proto
from onward.head import replace_head
from onward.pipeline.base_folder import is_published
from onward.pipeline.classifier import Classifier
from onward.pipeline.language import finetune_language_model
from onward.runtime.inference_model import inference_model, to_bytes
from onward.runtime.sessions import open_session
from onward.train.batches import Rows
from onward.train.schedules import Schedule, require_schedule
from onward.train.trainer import Trainer

if TYPE_CHECKING:
    from onward.checkpoint.content import CheckpointData
    from onward.lora import LoRA
    from onward.runtime.devices import DeviceLike
    from onward.train.callbacks import Callback
    from onward.train.history import History
    from onward.train.metrics import Metric

__all__ = ["FineTuned", "finetune"]

_LABEL = InputSpec("labels", np.dtype(np.int64), (None,))
_CLASSIFYING = ("cross-entropy", "nll")
# options of language models alone
_LANGUAGE_OPTIONS = ("packing", "gradient_accumulation_steps", "recompute", "warmup", "clip_norm", "slices")


@dataclasses.dataclass(frozen=True)
class FineTuned:
    """A trained model: its figures, its answers, and the file to deploy."""

    metrics: dict[str, float]
    history: History
    classes: list[str] | None
    preprocessing: Preprocessing | None
    state: CheckpointData
    notes: list[str]
    _artifacts: Artifacts
    _outputs: list[str]
    _tokenizer: Path | None
    _samples: dict[str, np.ndarray]

    def __repr__(self) -> str:
        figures = ", ".join(f"{name} {value:.4g}" for name, value in self.metrics.items())
        known = "" if self.classes is None else f", {len(self.classes)} classes"
        return f"FineTuned({figures}{known})"

    def predict(self, inputs: Any, *, top_k: int | None = 1) -> Any:
        """Labels with probabilities for pictures, texts, sounds or rows, as `onward.load` gives them."""
        return self._classifier()(inputs, top_k=top_k)

    def export(self, path: str | os.PathLike[str], *, quantize: str | None = None) -> InferenceExport:
        """Write the model for inference, with its classes and preprocessing in it; `onward.load` reads it.

        The tokenizer of a model that reads texts goes beside it, as NAME.tokenizer.json.
        """
        exported = for_inference(
            ir.to_proto(self._artifacts.evaluation), self.state, self._outputs, path,
            quantize=quantize, metadata=self._metadata(), inputs=self._samples,
        )  # fmt: skip
        if self._tokenizer is not None:
            target = Path(path)
            beside = target.with_name(f"{target.stem}.tokenizer.json")
            beside.write_bytes(self._tokenizer.read_bytes())
        return exported

    def _metadata(self) -> dict[str, str]:
        about = {}
        if self.classes is not None:
            about[contract.CLASSES] = json.dumps(self.classes, ensure_ascii=False)
        if self.preprocessing is not None:
            about[KEY] = self.preprocessing.to_json()
        return about

    def _classifier(self) -> Classifier:
        found = self.__dict__.get("_loaded")
        if found is None:
            model = inference_model(ir.to_proto(self._artifacts.evaluation), self.state, self._outputs)
            session = open_session(to_bytes(model))
            tokenizer = None
            if self._tokenizer is not None and self.preprocessing is not None:
                from onward.data.text import open_tokenizer

                tokenizer = open_tokenizer(self._tokenizer, self.preprocessing.settings)
            found = Classifier(session, self.preprocessing, self.classes, tokenizer)
            self.__dict__["_loaded"] = found
        return found


def finetune(
    model: str | os.PathLike[str] | onnx.ModelProto,
    data: Any,
    *,
    eval_data: Any = None,
    hold_out: float = 0.2,
    classes: int | Sequence[str] | Literal["data"] | None = "data",
    head: str | None = None,
    loss: str = "cross-entropy",
    optimizer: str = "adamw",
    epochs: int = 5,
    batch_size: int | None = None,
    learning_rate: float | Literal["auto"] | None = None,
    schedule: Schedule = "constant",
    batch_norm: Literal["train", "frozen"] | None = None,
    requires_grad: Sequence[str] | None = None,
    frozen_params: Sequence[str] | None = None,
    lora: LoRA | None = None,
    metrics: Sequence[str | Metric] | None = None,
    best_metric: str | None = None,
    label: str | None = None,
    normalize: str | None = None,
    resize: int | None = None,
    crop: int | None = None,
    augment: Sequence[str] = (),
    standardize: bool = False,
    drop: Sequence[str] = (),
    text_column: str | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    max_length: int | None = None,
    sampling_rate: int | None = None,
    callbacks: Sequence[Callback] = (),
    output_directory: str | os.PathLike[str] | None = None,
    device: DeviceLike = "cpu",
    seed: int = 0,
    progress: bool = True,
    **language: Any,
) -> FineTuned:
    """Fine-tune a pretrained model on your own classes and data.

    `data` is a path (a folder with one folder of pictures or WAV files for each class, a CSV, JSON lines or Parquet
    table, .npz) or arrays: (inputs…, labels), or a dict by name. A share of it, `hold_out`, is kept for
    evaluation unless `eval_data` is given. The model gets a new head for the classes of the data (`classes="data"`),
    for others, or keeps its own (`classes=None`); see `onward.replace_head`. With a loss for numbers, such as
    `loss="mse"`, it predicts as many numbers as the target has. Rates, warm-up and clipping are those
    for fine-tuning; the best epoch is the result. With `output_directory`, checkpoints and a report stay there.
    `device` is where it trains: "cpu", "cuda", "auto".

    >>> import onward
    >>> result = onward.finetune("model.onnx", "pictures", epochs=3)  # doctest: +SKIP
    >>> result.metrics["accuracy"], result.predict("cat.jpg")  # doctest: +SKIP
    (0.97, {'label': 'cat', 'score': 0.99})
    >>> result.export("mine.onnx")  # doctest: +SKIP

    The folder of a language model is trained with LoRA on JSON lines of conversations, prompts or texts instead, and
    the result is a `LanguageModel`: see `onward.pipeline.language.finetune_language_model`, whose other options
    (`packing`, `gradient_accumulation_steps`, `recompute` …) are taken here too.
    """
    if isinstance(model, str | os.PathLike) and (Path(model).is_dir() or is_published(Path(model))):
        if learning_rate == "auto":
            raise ValueError(
                "learning_rate='auto' is for classifiers; give a language model a number, such as 2e-4"
            )
        rate = 2e-4 if learning_rate is None else float(learning_rate)
        unknown = sorted(set(language) - set(_LANGUAGE_OPTIONS))
        if unknown:
            raise TypeError(f"unknown option {', '.join(unknown)}. Known: {', '.join(_LANGUAGE_OPTIONS)}")
        trained: Any = finetune_language_model(
            model, data, eval_data=eval_data, hold_out=0.0 if eval_data is not None else hold_out, lora=lora,
            epochs=epochs, batch_size=batch_size or 1, max_length=max_length or 512, schedule=schedule,
            callbacks=callbacks, output_directory=output_directory, seed=seed, progress=progress,
            learning_rate=rate, device=device, **language,
        )  # fmt: skip
        return trained
    if language:
        raise TypeError(f"{', '.join(sorted(language))}: an option of language models, or of nothing")
    if output_directory is not None and any(Path(output_directory).glob("checkpoint-*")):
        raise OnwardError(
            f"'{output_directory}' has an earlier run: choose another output_directory, or remove it"
        )
    kind = loss_type(loss)
    optimizer_type(optimizer)
    require_schedule(schedule)
    classifies = loss in _CLASSIFYING
    proto = _proto(model)
    near = [Path(model)] if isinstance(model, str | os.PathLike) else []
    inputs = specs_of(proto.graph)
    target = _LABEL if classifies else InputSpec("target", np.dtype(np.float32), None)
    options = DataOptions(
        label=label,
        classes=None if isinstance(classes, str | int | None) else list(classes),
        preprocessing=_wanted_preprocessing(proto, near),
        image=image_settings(normalize=normalize, resize=resize, crop=crop),
        text_column=text_column,
        tokenizer=None if tokenizer is None else Path(tokenizer),
        max_length=max_length,
        sampling_rate=sampling_rate,
        near=near,
        class_count=classes if isinstance(classes, int) else None,
        drop=list(drop),
    )
    train = _read(data, [*inputs, target], options)
    whole, evaluation = train, None
    if eval_data is not None:
        same = dataclasses.replace(options, classes=train.classes, features=train.features, drop=())
        evaluation = _read(eval_data, [*inputs, target], same)
    elif hold_out:
        train, evaluation = split(train, hold_out, seed=seed)
        train.notes = whole.notes
    prepare(train, [] if evaluation is None else [evaluation], standardize=standardize)
    if classes == "data" and not classifies:
        classes = int(np.prod(np.shape((whole.arrays or {})[target.name])[1:], initial=1))
    made, names = _artifacts(
        proto if near == [] else near[0], whole, classes, head,
        loss=kind, optimizer=optimizer, batch_norm=batch_norm, requires_grad=requires_grad,
        frozen_params=frozen_params, lora=lora, seed=seed,
    )  # fmt: skip
    if classifies and made.training.metadata_props.get(contract.LABELS):
        check_labels(
            dataclasses.replace(whole, classes=names, arrays=_renamed(whole, made, inputs)),
            json.loads(made.training.metadata_props[contract.LABELS]),
        )
    known = {spec.name for spec in inputs}
    with _folder(output_directory) as folder:
        trainer = Trainer(
            made, output_directory=folder, learning_rate=learning_rate, schedule=schedule, seed=seed,
            metrics=(("accuracy",) if classifies else ("mae",)) if metrics is None and evaluation else metrics or (),
            callbacks=callbacks, progress=progress, device=device,
        )  # fmt: skip
        order = trainer.module.input_names()
        specs = specs_of(ir.to_proto(made.training).graph, order)
        arrays = _in_order(train, specs, target.name)
        transform = make_augmentation(augment, specs, train) if augment else None
        try:
            trainer.fit(
                arrays, None if evaluation is None else _in_order(evaluation, specs, target.name),
                epochs=epochs, batch_size=batch_size or 32, best_metric=best_metric, transform=transform,
            )  # fmt: skip
        except NonFiniteError as error:
            raise blame_data(error, whole) from error
        best = store.load(folder / "best")
    row = (
        trainer.history.epochs[int(trainer.best["epoch"]) - 1] if trainer.best else trainer.history.epochs[-1]
    )
    figures = {
        k: v for k, v in row.items() if isinstance(v, float) and "second" not in k and k != "learning_rate"
    }
    return FineTuned(
        metrics=figures,
        history=trainer.history,
        classes=names,
        preprocessing=train.preprocessing,
        state=best,
        notes=train.notes,
        _artifacts=made,
        _outputs=json.loads(made.evaluation.metadata_props[contract.OUTPUTS]),
        _tokenizer=train.tokenizer,
        _samples={spec.name: np.asarray(arrays[spec.name][:16]) for spec in specs if spec.name in known},
    )


def _proto(model: str | os.PathLike[str] | onnx.ModelProto) -> onnx.ModelProto:
    """The model's inputs and metadata; its weights are not needed yet."""
    return read_proto(model, read_data=False)


def _wanted_preprocessing(proto: onnx.ModelProto, near: Sequence[Path]) -> Preprocessing | None:
    about = {entry.key: entry.value for entry in proto.metadata_props}
    if KEY in about:
        return Preprocessing.from_json(about[KEY])
    settings = beside(near[0]) if near else {}
    pictures = [spec for spec in specs_of(proto.graph) if spec.dims is not None and len(spec.dims) == 4]
    return Preprocessing("image", pictures[0].name, settings) if settings and len(pictures) == 1 else None


def _read(data: Any, inputs: Sequence[InputSpec], options: DataOptions) -> Data:
    if isinstance(data, str | os.PathLike):
        if not Path(data).exists():
            raise DataError(f"no data at '{data}'", "is the path right?")
        return read_data([(None, Path(data))], inputs, options)
    if isinstance(data, tuple | list):
        if len(data) != len(inputs):
            names = ", ".join(spec.name for spec in inputs)
            raise DataError(f"the data has {len(data)} arrays, and {len(inputs)} are needed: {names}")
        data = {spec.name: item for spec, item in zip(inputs, data)}
    if not isinstance(data, Mapping):
        raise TypeError(f"data is a path, a tuple of arrays or a dict of them, not {type(data).__name__}")
    arrays: dict[str, Any] = {
        name: array if isinstance(array, Rows) else np.asarray(array) for name, array in data.items()
    }
    classes, last = None, inputs[-1]
    label = (
        last.name
        if last.name in arrays
        else next((n for n, a in arrays.items() if a.dtype.kind in "UO"), None)
    )
    if label is not None and last.is_integer and arrays[label].ndim == 1:
        arrays[label], classes = number_labels(arrays[label], options.classes, options.class_count, label)
    fitted, notes = fit(arrays, inputs)
    return Data(fitted, classes=classes or (list(options.classes) if options.classes else None), notes=notes)


def _artifacts(
    model: Any, data: Data, classes: Any, head: str | None, *, loss: Any, seed: int, **options: Any
) -> tuple[Artifacts, list[str] | None]:
    """Artifacts of the model, with a new head where one is wanted, and the names of its classes."""
    names = data.classes
    if classes == "data":
        if names is None and data.arrays is not None:
            labels = np.asarray(data.arrays[_LABEL.name])
            classes = int(labels.max()) + 1 if labels.size else 1
        else:
            classes = names
    elif classes is not None and not isinstance(classes, int):
        names = list(classes)
    if names is None and isinstance(classes, int) and loss.name in ("CrossEntropyLoss", "NLLLoss"):
        names = numbered_classes(classes)
    if classes is not None:
        scores = loss.name not in ("NLLLoss", "KLDivLoss")
        model = replace_head(model, classes=classes, head=head, scores=scores, seed=seed)
    elif head is not None:
        raise ValueError("head needs classes: it is the layer to replace")
    model, said = open_if_fixed(model)
    if said:
        data.notes.append(said)
    return build_artifacts(model, loss=loss, **options), names


def _renamed(data: Data, made: Artifacts, inputs: Sequence[InputSpec]) -> dict[str, Any]:
    known = {spec.name for spec in inputs}
    labels = list(json.loads(made.training.metadata_props[contract.LABELS]))
    arrays = data.arrays or {}
    return {(labels[0] if name not in known and labels else name): array for name, array in arrays.items()}


def _in_order(data: Data, specs: Sequence[InputSpec], target: str) -> dict[str, Any]:
    """The arrays by the training model's names and shapes: what is no input of the model is the target."""
    arrays = data.arrays or {}
    named = {spec.name: arrays[spec.name if spec.name in arrays else target] for spec in specs}
    return fit(named, specs)[0]


@contextlib.contextmanager
def _folder(given: str | os.PathLike[str] | None) -> Iterator[Path]:
    if given is not None:
        yield Path(given)
        return
    with tempfile.TemporaryDirectory(prefix="onward-") as folder:
        yield Path(folder)
