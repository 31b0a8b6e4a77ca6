"""`ModelInfo`: what a model is for, said once, with the source of each fact.

Facts come from several places (a model's metadata, `onward.json`, Hugging Face's files). `combine` puts them together:
facts that agree are one, and two that do not are an error that names both sources. Nothing is guessed, and labels are
never sorted: their order is the order of the model's outputs.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onward.errors import DataError, ModelError
from onward.escape import first_of
from onward.info.preprocessing import Preprocessing

__all__ = ["PROBLEM_TYPES", "ModelInfo", "Origin", "combine"]

# Hugging Face's words, which its config.json has
PROBLEM_TYPES = ("single_label_classification", "multi_label_classification", "regression")
# transformers writes them into config.json where a model has no names
_PLACEHOLDER = re.compile(r"LABEL_(\d+)")


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a model came from: the model it was made of, digests of its data, the settings and the versions used."""

    base: str | None = None
    data: Mapping[str, str] = dataclasses.field(default_factory=dict)
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.base or self.data or self.settings or self.versions)


@dataclasses.dataclass(frozen=True)
class ModelInfo:
    """What a model is for. A fact that no source states is None, or empty.

    `labels` are in the order of the model's outputs. `inputs` says what each input is made of. `outputs` says what an
    output means ("logits", "probabilities", "ctc"). `tokenizer` is the file of the tokenizer. `sources` says for each
    fact which file it was read from.

    >>> info = ModelInfo(task="image-classification", labels=("good", "bad"))
    >>> info.labels, info.is_multi_label
    (('good', 'bad'), False)
    """

    task: str | None = None
    labels: tuple[str, ...] | None = None
    problem_type: str | None = None
    inputs: tuple[Preprocessing, ...] = ()
    tokenizer: Path | None = None
    outputs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    origin: Origin = Origin()
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        labels = self.labels
        if labels is not None and not all(isinstance(label, str) for label in labels):
            raise TypeError("labels are texts")
        if self.problem_type is not None and self.problem_type not in PROBLEM_TYPES:
            raise ModelError(
                f"no problem type '{self.problem_type}'{self._from('problem_type')}; it is {', '.join(PROBLEM_TYPES)}"
            )

    @classmethod
    def stated(cls, source: str, **facts: Any) -> ModelInfo:
        """The facts that one source states; those that are None or empty it does not.

        >>> ModelInfo.stated("config.json", task="fill-mask", labels=None).sources
        {'task': 'config.json'}
        """
        facts = {
            fact: value
            for fact, value in facts.items()
            if value is not None and value not in ({}, (), Origin())
        }
        inputs = facts.get("inputs", ())
        names = [fact for fact in facts if fact != "inputs"] + [f"input {one.input}" for one in inputs]
        return cls(**facts, sources=dict.fromkeys(names, source))

    @property
    def is_multi_label(self) -> bool:
        """Whether several labels may be right for one sample: each has a probability of its own."""
        return self.problem_type == "multi_label_classification"

    @property
    def is_regression(self) -> bool:
        """Whether the outputs are numbers, not scores of classes."""
        return self.problem_type == "regression"

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """The labels, unless they are the placeholders LABEL_0, LABEL_1 … that Hugging Face writes for none."""
        return None if self.labels is None or _are_placeholders(self.labels) else self.labels

    @property
    def preprocessing(self) -> Preprocessing | None:
        """How the first input is made that is not a plain tensor."""
        return next((one for one in self.inputs if one.kind != "tensor"), None)

    def input(self, name: str) -> Preprocessing | None:
        """How the input of this name is made; None where no source says so."""
        return next((one for one in self.inputs if one.input == name), None)

    def source(self, fact: str) -> str:
        """The file that states a fact, "nowhere" where none does."""
        return self.sources.get(fact, "nowhere")

    def replace(self, *, source: str = "", **facts: Any) -> ModelInfo:
        """A copy with other facts, which this source states from now on; None takes a fact away.

        >>> info = ModelInfo(labels=("a",)).replace(labels=("b", "a"), source="the data")
        >>> info.labels, info.sources
        (('b', 'a'), {'labels': 'the data'})
        """
        # a fact that is taken away must not keep its source: inspect would show it
        sources = {fact: file for fact, file in self.sources.items() if fact not in facts}
        sources |= {fact: source for fact, value in facts.items() if value is not None}
        return dataclasses.replace(self, **facts, sources=sources)

    def over(self, base: ModelInfo) -> ModelInfo:
        """These facts, and those of the model that this one was made of which they leave open.

        >>> ModelInfo(labels=("new",)).over(ModelInfo(task="fill-mask", labels=("old",))).labels
        ('new',)
        """
        # only what this one states hides the base's: a new head changes the labels and nothing about the
        # pixels
        left = {
            field: None
            for field in ("task", "labels", "problem_type", "tokenizer")
            if getattr(self, field) is not None
        }
        inputs = tuple(one for one in base.inputs if self.input(one.input) is None)
        outputs = {name: meaning for name, meaning in base.outputs.items() if name not in self.outputs}
        return combine(self, dataclasses.replace(base, **left, inputs=inputs, outputs=outputs))

    def number(self, names: Sequence[str], where: str) -> list[int]:
        """Class names as numbers, in the order of the labels; an error for a name that the labels lack.

        >>> ModelInfo(labels=("good", "bad")).number(["bad", "good"], "train.csv")
        [1, 0]
        """
        if self.labels is None:
            raise DataError(
                f"'{where}' has class names, and nothing says which output of the model is which class",
                "make the artifacts with the names in the order of the outputs, or give class numbers",
            )
        # ImageNet has two cranes: names may repeat as long as no data has to be told apart by them
        twice = next((name for name in dict.fromkeys(names) if self.labels.count(name) > 1), None)
        if twice is not None:
            raise DataError(
                f"two classes are called '{twice}' ({self.source('labels')}), so '{where}' does not say which is meant",
                "give class numbers, or names of which each is there once",
            )
        index = {label: number for number, label in enumerate(self.labels)}
        unknown = sorted(set(names) - index.keys())
        if unknown:
            raise DataError(
                f"'{where}' has the class '{unknown[0]}', which the model has not",
                f"it has {first_of(self.labels, 12)} ({self.source('labels')}); a model for other classes begins with: "
                "onward artifacts MODEL --classes …",
            )
        return [index[name] for name in names]

    def facts(self) -> list[tuple[str, str, str]]:
        """Every fact in words, with its source, for people to read.

        >>> ModelInfo.stated("config.json", labels=("good", "bad")).facts()
        [('labels', '2: good, bad', 'config.json')]
        """
        shown: dict[str, str] = {}
        if self.labels is not None:
            shown["labels"] = f"{len(self.labels)}: {first_of(self.labels, 40)}"
        for fact in ("task", "problem_type", "tokenizer"):
            if getattr(self, fact) is not None:
                shown[fact] = str(getattr(self, fact))
        for one in self.inputs:
            settings = ", ".join(f"{key} {value}" for key, value in sorted(one.settings.items()))
            shown[f"input {one.input}"] = f"{one.kind}: {settings}" if settings else one.kind
        if self.outputs:
            shown["outputs"] = ", ".join(f"{name}: {meaning}" for name, meaning in self.outputs.items())
        for part, value in vars(self.origin).items():
            if value:
                text = value if isinstance(value, str) else ", ".join(f"{k} {v}" for k, v in value.items())
                shown[f"origin: {part}"] = text
        return [(fact, text, self.source(fact.partition(":")[0])) for fact, text in shown.items()]

    def _from(self, fact: str) -> str:
        return f" in {self.sources[fact]}" if fact in self.sources else ""


def combine(*infos: ModelInfo) -> ModelInfo:
    """All facts of several sources as one; a `ModelError` where two of them disagree.

    >>> combine(ModelInfo(task="fill-mask"), ModelInfo(labels=("a", "b"))).labels
    ('a', 'b')
    >>> file, folder = (
    ...     ModelInfo(labels=("good", "bad"), sources={"labels": "model.onnx"}),
    ...     ModelInfo(labels=("bad", "good"), sources={"labels": "config.json"}),
    ... )
    >>> combine(file, folder)
    Traceback (most recent call last):
    onward.errors.ModelError: two sources disagree on the labels: model.onnx has good, bad; config.json has bad, good
    """
    facts: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for info in infos:
        for field in ("task", "labels", "problem_type", "tokenizer"):
            value, earlier = getattr(info, field), facts.get(field)
            if value is None or (field == "labels" and earlier is not None and _yields(value, earlier)):
                continue
            # names over placeholders, whichever source is read first
            overrides = field == "labels" and earlier is not None and _yields(earlier, value)
            # the nearest tokenizer counts: copies of one tokenizer lie in several folders
            if earlier is not None and not overrides and field == "tokenizer":
                continue
            if earlier is not None and not overrides and value != earlier:
                raise _conflict(
                    field.replace("_", " "), earlier, sources.get(field), value, info.sources.get(field)
                )
            if earlier is None or overrides:
                facts[field], sources[field] = value, info.source(field)
    inputs = _combine_inputs(infos, sources)
    outputs: dict[str, str] = {}
    for info in infos:
        for name, meaning in info.outputs.items():
            if outputs.setdefault(name, meaning) != meaning:
                raise _conflict(
                    f"output '{name}'", outputs[name], sources["outputs"], meaning, info.source("outputs")
                )
            sources.setdefault("outputs", info.source("outputs"))
    # not merged: half of one history and half of another would be none
    described = next((info for info in infos if info.origin), ModelInfo())
    if described.origin:
        sources["origin"] = described.source("origin")
    return ModelInfo(**facts, inputs=inputs, outputs=outputs, origin=described.origin, sources=sources)


def _combine_inputs(infos: Sequence[ModelInfo], sources: dict[str, str]) -> tuple[Preprocessing, ...]:
    """Inputs by name: what one source leaves open, another may say; "tensor" is no statement."""
    inputs: dict[str, Preprocessing] = {}
    for info in infos:
        for one in info.inputs:
            fact, source = f"input {one.input}", info.source(f"input {one.input}")
            earlier = inputs.get(one.input)
            if earlier is None or earlier.kind == "tensor":
                inputs[one.input], sources[fact] = one, source
                continue
            if one.kind == "tensor":
                continue
            if earlier.kind != one.kind:
                raise _conflict(
                    f"kind of the input '{one.input}'", earlier.kind, sources[fact], one.kind, source
                )
            for key in earlier.settings.keys() & one.settings.keys():
                if not _same(earlier.settings[key], one.settings[key]):
                    raise _conflict(
                        f"{key} of the input '{one.input}'",
                        *(earlier.settings[key], sources[fact]),
                        *(one.settings[key], source),
                    )
            # they agree where both speak: the order decides nothing
            settings = {**one.settings, **earlier.settings}
            if settings != earlier.settings:
                sources[fact] = f"{sources[fact]} and {source}"
            inputs[one.input] = Preprocessing(one.kind, one.input, settings)
    return tuple(inputs.values())


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, int | float) and isinstance(other, int | float):
        # one file has 0.485, another the float32 nearest to it: they mean the same
        return abs(one - other) <= 1e-6 * max(abs(one), abs(other))
    if isinstance(one, Sequence) and isinstance(other, Sequence) and not isinstance(one, str):
        return len(one) == len(other) and all(map(_same, one, other))
    return one == other


def _are_placeholders(labels: Sequence[str]) -> bool:
    return all(
        # LABEL_3 as the first name is a name that somebody chose
        (match := _PLACEHOLDER.fullmatch(label)) is not None and int(match[1]) == number
        for number, label in enumerate(labels)
    )


def _yields(labels: Sequence[str], others: Sequence[str]) -> bool:
    """Whether labels are placeholders for these others."""
    return len(labels) == len(others) and _are_placeholders(labels)


def _conflict(what: str, one: Any, source: str | None, other: Any, other_source: str | None) -> ModelError:
    return ModelError(
        f"two sources disagree on the {what}: {source or 'one'} has {_show(one)}; {other_source or 'another'} has "
        f"{_show(other)}",
        hint="correct the one that is wrong, or move the model to a folder of its own",
    )


def _show(value: Any) -> str:
    return first_of(value) if isinstance(value, tuple) else str(value)
