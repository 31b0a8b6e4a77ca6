"""Inference with one model file that `onward deploy` wrote, which describes its own preprocessing.

Pictures, sounds, texts and rows of tables go in, labels with probabilities come out; numbers where there are
no classes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.data.images import PICTURES, open_picture
from onward.data.preprocess import image
from onward.data.sound import open_wave
from onward.data.tables import Features, apply_table, encode
from onward.data.text import tokenize
from onward.errors import DataError, ModelError
from onward.export.huggingface.tasks import task_named
from onward.tasks.inputs import each, in_batch, pixels, signal
from onward.tasks.protocol import Predictor
from onward.tasks.scores import FUNCTIONS, label_scores, sigmoid, softmax

if TYPE_CHECKING:
    from onward.info.model_info import ModelInfo
    from onward.info.preprocessing import Preprocessing
    from onward.pipeline.load import Pipeline


# a label that may hold beside others does from this probability on
THRESHOLD = 0.5


@dataclasses.dataclass(frozen=True)
class Classifier(Predictor):
    """A loaded model file. Call it with one input, or a list or array of inputs; an answer, or a list of them.

    An input is what training had: a picture (a path, a Pillow image, or [height, width, channels] bytes), a sound (a
    path of a WAV file, or (samples, rate)), a text, a row of a table (a dict or a list of numbers); or an array as
    the model itself takes it. The answer is `{"label", "score"}`, best first with `top_k` above 1 or None for all, or
    the model's first output where it has no classes.
    """

    @property
    def classes(self) -> list[str] | None:
        """The labels, in the order of the model's outputs."""
        return None if self.info.labels is None else list(self.info.labels)

    def __call__(self, inputs: Any, *, top_k: int | None = 1, batch_size: int = 32) -> Any:
        """Run one input, or each of a list."""
        many = self._are_many(inputs)
        items = inputs if many else [inputs]
        answers: list[Any] = []
        for start in range(0, len(items), batch_size):
            scores = self.run(self.prepare(items[start : start + batch_size]))
            answers += answer_labels(scores, self.info, top_k=top_k)
        return answers if many else answers[0]

    def prepare(self, items: Sequence[Any]) -> dict[str, np.ndarray]:
        """Inputs as the arrays that the model takes."""
        done = self.preprocessing
        taken = [value.name for value in self.session.get_inputs()]
        if done is None:
            if len(taken) != 1:
                raise ModelError(f"the model takes {', '.join(taken)}: run it with onnxruntime")
            return {taken[0]: np.stack([np.asarray(item) for item in items])}
        if done.kind == "text":
            return tokenize(items, self.tokenizer, done.settings, taken)
        if done.kind == "table":
            return {done.input: apply_table(_rows(items, done), done.settings)}
        prepare = _picture if done.kind == "image" else open_wave
        return {done.input: np.stack([prepare(item, done.settings) for item in items])}

    def _are_many(self, inputs: Any) -> bool:
        """Whether this is a list of inputs, or an array with an axis for them."""
        if isinstance(inputs, np.ndarray):
            return inputs.ndim == len(self.session.get_inputs()[0].shape)
        if not isinstance(inputs, list):
            return False
        is_table = self.preprocessing is not None and self.preprocessing.kind == "table"
        # a list of numbers is one row of a table, and a list of rows is many
        return not is_table or any(
            item is not None and not isinstance(item, int | float | str | np.number) for item in inputs
        )


class MultiLabelClassifier(Classifier):
    """A loaded model file of labels that may hold together.

    The answer to an input is a list of `{"label", "score"}`, best first: the labels whose probability is `threshold` or
    more, at most `top_k`. It is empty where none is.
    """

    def __call__(
        self, inputs: Any, *, top_k: int | None = None, batch_size: int = 32, threshold: float = THRESHOLD
    ) -> Any:
        """Run one input, or each of a list."""
        if not 0 <= threshold <= 1:
            raise ValueError(f"threshold is {threshold}: it is a probability, from 0 to 1")
        many = self._are_many(inputs)
        answers = super().__call__(inputs if many else [inputs], top_k=None, batch_size=batch_size)
        answers = [choose_labels(answer, threshold)[:top_k] for answer in answers]
        return answers if many else answers[0]


def choose_labels(answer: list[dict[str, Any]], threshold: float = THRESHOLD) -> list[dict[str, Any]]:
    """The labels of an answer that hold."""
    return [one for one in answer if one["score"] >= threshold]


def find_tokenizer_of(model: Path, info: ModelInfo) -> Path | None:
    """The tokenizer beside a model that reads texts; never one in another folder."""
    settings = {} if info.preprocessing is None else info.preprocessing.settings
    named = model.parent / Path(str(settings.get("tokenizer") or "tokenizer.json")).name
    # the file that was written with this model, before others of the folder
    places = (model.with_name(f"{model.stem}.tokenizer.json"), named, info.tokenizer)
    beside = next((path for path in places if path is not None and path.is_file()), None)
    if (
        beside is None and "tokenizer" in settings
    ):  # it was trained on texts; another model may take tokens too
        raise _no_tokenizer(model)
    return beside


def require_tokenizer(model: Path, info: ModelInfo) -> Path:
    """The tokenizer beside a model; an error where it is missing."""
    beside = find_tokenizer_of(model, info)
    if beside is None:
        raise _no_tokenizer(model)
    return beside


def _no_tokenizer(model: Path) -> ModelError:
    return ModelError(
        f"'{model}' reads texts, and its tokenizer is not beside it: {model.stem}.tokenizer.json"
    )


def answer_labels(scores: np.ndarray, info: ModelInfo, *, top_k: int | None) -> list[Any]:
    """Labels with probabilities for every row of scores; the rows themselves where labels do not fit them."""
    labels = info.labels
    if labels is None or info.is_regression or scores.ndim != 2 or scores.shape[1] != len(labels):
        return list(scores)
    function = "sigmoid" if info.is_multi_label else "softmax"
    # a file with its softmax left on: a second one would flatten its answers
    if "probabilities" in info.outputs.values():
        function = "none"
    ranked = [label_scores(row, labels, function, top_k=top_k) for row in scores]
    return [row[0] for row in ranked] if top_k == 1 else ranked


def _picture(item: Any, settings: Mapping[str, Any]) -> np.ndarray:
    if isinstance(item, str | PathLike):
        path = Path(item)
        if path.suffix.lower() not in PICTURES and not path.is_file():
            raise DataError(f"no image at '{path}'", "is the path right?")
        return open_picture(path, settings)
    array = np.asarray(item)
    if array.dtype.kind == "f" and array.ndim == 3:  # as the model takes it
        return array
    if array.dtype.kind not in "biuf" or array.ndim not in (2, 3):
        raise DataError(
            f"{type(item).__name__} is no image",
            "give a path, a Pillow image, or [height, width, channels] bytes",
        )
    return image(item, settings)


def _rows(items: Sequence[Any], done: Preprocessing) -> np.ndarray:
    """Rows of a table, each a dict or a list of cells, as numbers; empty cells are None."""
    names = list(done.settings["columns"])
    cells = []
    for item in items:
        if isinstance(item, Mapping):
            missing = [name for name in names if name not in item]
            if missing:
                raise DataError(f"the row has no '{missing[0]}'", f"the model takes {', '.join(names)}")
            item = [item[name] for name in names]
        if not isinstance(item, Sequence | np.ndarray) or isinstance(item, str):
            raise DataError(
                f"{type(item).__name__} is no row", f"give a dict or a list with {', '.join(names)}"
            )
        if len(item) != len(names):
            raise DataError(f"the row has {len(item)} cells", f"the model takes {', '.join(names)}")
        cells.append(list(item))
    features = Features(done.input, names, done.settings.get("categories", {}))
    columns = {
        name: [_filled(row[i], words=name in features.categories) for row in cells]
        for i, name in enumerate(names)
    }
    return encode(columns, features)


def _filled(cell: Any, *, words: bool) -> Any:
    if cell is None or (isinstance(cell, str) and not cell.strip()):
        return "" if words else np.nan
    return cell


# --- What exported folders answer.


def classify(
    pipeline: Pipeline, inputs: Any, *, top_k: int | None = 1, function_to_apply: str | None = None
) -> Any:
    """The likeliest label, or the `top_k` likeliest (all for None), with scores."""
    function = function_to_apply or _score_function(pipeline)
    if function not in FUNCTIONS:
        raise ValueError(f"function_to_apply is {function!r}; choose one of {', '.join(FUNCTIONS)}")

    def scored(logits: np.ndarray) -> Any:
        ranked = label_scores(logits, pipeline.card["labels"], function, top_k=top_k)
        return ranked[0] if top_k == 1 else ranked

    if pipeline.tokenizer is None:
        return each(inputs, lambda item: scored(pipeline.run(signal(pipeline, item))["logits"][0]))
    return in_batch(
        inputs, lambda texts: [scored(row) for row in pipeline.run(pipeline.encode(texts)[0])["logits"]]
    )


def _score_function(pipeline: Pipeline) -> str:
    """What transformers makes scores of outputs with: sound is always one of its classes, text may be a number."""
    problem, kind = pipeline.card["problem_type"], task_named(pipeline.task).kind
    if kind == "audio":
        return "softmax"
    # only transformers' text pipeline leaves a regression's number as it is
    if problem == "regression" and kind == "text":
        return "none"
    alone = problem == "multi_label_classification" or len(pipeline.card["labels"]) == 1
    return "sigmoid" if alone else "softmax"


def candidate_texts(
    labels: str | Sequence[str] | None, template: str, example: str
) -> tuple[list[str], list[str]]:
    """The labels that a call names, as a list or with commas between them, and a sentence for each."""
    if isinstance(labels, str):
        labels = [part.strip() for part in labels.split(",") if part.strip()]
    if not labels:
        raise TypeError(f"zero-shot classification needs labels: {example}")
    texts = [template.format(label) for label in labels]
    if texts[0] == template:
        raise ValueError(f"hypothesis_template is {template!r}, and has no {{}} where the label goes")
    return list(labels), texts


def classify_zero_shot(
    pipeline: Pipeline,
    inputs: Any,
    candidate_labels: str | Sequence[str] | None = None,
    *,
    hypothesis_template: str = "This example is {}.",
    multi_label: bool = False,
) -> Any:
    """Labels that the call names, by how far the text entails a sentence with each."""
    labels, hypotheses = candidate_texts(
        candidate_labels, hypothesis_template, "pipeline(text, ['sport', 'politics'])"
    )

    def answer(text: str) -> list[dict[str, Any]]:
        pairs = [(text, hypothesis) for hypothesis in hypotheses]
        logits = pipeline.run(pipeline.encode(pairs)[0])["logits"]
        return _rank_by_entailment(logits, labels, pipeline.card["labels"], multi_label=multi_label)

    return each(inputs, answer)


def _rank_by_entailment(
    logits: np.ndarray, candidates: Sequence[str], labels: Sequence[str], *, multi_label: bool
) -> list[dict[str, Any]]:
    """Candidates by how far the text entails them; `logits` has one row for each."""
    lowered = [label.lower() for label in labels]
    # labels of such models are lowercase or not, and entailment is last where none says so
    entailment = next((i for i, label in enumerate(lowered) if label.startswith("entail")), len(labels) - 1)
    if multi_label or len(candidates) == 1:
        # as transformers: the neutral class takes no part where labels are independent
        contradiction = -1 if entailment == 0 else 0
        scores = softmax(logits[:, [contradiction, entailment]])[:, 1]
    else:
        scores = softmax(logits[:, entailment])
    order = np.argsort(-scores, kind="stable")
    return [{"label": candidates[index], "score": float(scores[index])} for index in order]


def classify_image_zero_shot(
    pipeline: Pipeline,
    inputs: Any,
    candidate_labels: str | Sequence[str] | None = None,
    *,
    hypothesis_template: str = "This is a photo of {}.",
) -> Any:
    """Labels that the call names, by how well a sentence with each fits the image."""
    labels, texts = candidate_texts(
        candidate_labels, hypothesis_template, "pipeline(image, ['a cat', 'a dog'])"
    )
    alone = str(pipeline.card.get("architecture", "")).startswith("Siglip")  # each label is scored by itself
    feed, _ = pipeline.encode(texts)
    if alone:  # it was trained on texts of full length only, and reads the last token
        feed = {name: _to_length(pipeline, name, array) for name, array in feed.items()}

    def answer(picture: Any) -> list[dict[str, Any]]:
        logits = pipeline.run({**feed, "pixel_values": pixels(pipeline, picture)[None]})["logits_per_image"][
            0
        ]
        return label_scores(logits, labels, "sigmoid" if alone else "softmax", top_k=None)

    return each(inputs, answer)


def _to_length(pipeline: Pipeline, name: str, ids: np.ndarray) -> np.ndarray:
    settings = pipeline.card["tokenizer"]
    missing = (settings.get("max_length") or ids.shape[1]) - ids.shape[1]
    filler = settings["pad_id"] if name == "input_ids" else 0
    return np.pad(ids, [(0, 0), (0, max(0, missing))], constant_values=filler)


def choose(pipeline: Pipeline, inputs: str, choices: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """The choices that may follow a text, likeliest first."""
    if choices is None:
        raise TypeError("multiple choice takes a text and choices: pipeline(text, ['one', 'another'])")
    feed, _ = pipeline.encode([(inputs, choice) for choice in choices])
    scores = softmax(pipeline.run({name: array[None] for name, array in feed.items()})["logits"][0])
    order = np.argsort(-scores, kind="stable")
    return [{"choice": choices[index], "score": float(scores[index])} for index in order]


def classify_frames(pipeline: Pipeline, inputs: Any) -> Any:
    """The score of each label in each frame of a sound."""
    labels = pipeline.card["labels"]

    def answer(wave: Any) -> list[dict[str, float]]:
        scores = sigmoid(pipeline.run(signal(pipeline, wave))["logits"][0])
        return [dict(zip(labels, map(float, row))) for row in scores]

    return each(inputs, answer)
