"""`ModelInfo` in the metadata of an ONNX file: read whoever wrote it, written in one way.

Reads Onward's own keys, the card of `onward export`, and what Ultralytics and PaddleOCR write. Metadata is text that
anyone may have written: it is bounded and parsed as data.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any

from onward import contract
from onward.errors import LimitError, ModelError
from onward.info.model_info import ModelInfo, Origin, combine
from onward.info.preprocessing import Preprocessing, known_image_settings
from onward.model_metadata import read_names, read_table
from onward.reading import require_shallow

_LONG_TEXT = 256  # tokens that training reads by default
_LONGEST = 2**20  # characters of metadata that may list classes
_ULTRALYTICS_TASKS = {
    "detect": "object-detection",
    "classify": "image-classification",
    "segment": "instance-segmentation",
    "pose": "keypoint-detection",
}
# what the class that is no character is called in the labels of a reader
BLANK = "<blank>"
_KINDS = {"pixel_values": "image", "input_values": "sound", "input_features": "sound", "input_ids": "text"}


def info_from_metadata(
    about: Mapping[str, str],
    where: str = "the model",
    *,
    inputs: Sequence[str] = (),
    outputs: Mapping[str, int | None] | None = None,
) -> ModelInfo:
    """What a model's metadata says, whoever wrote it.

    `inputs` are the names of the model's inputs, `outputs` its outputs with the size of their last axis, where known.

    >>> info_from_metadata({"names": "{0: 'cat', 1: 'dog'}", "task": "classify"}, "yolo.onnx").labels
    ('cat', 'dog')
    """
    own = _own(about, where)
    # strangers must agree among themselves: two of them that differ are an error here
    others = combine(*_foreign(about, where, inputs, outputs or {}))
    # of a model that was trained on, or that has a new head, other keys describe the one that it was made of
    return own.over(others) if is_changed(about) else combine(own, others)


def is_changed(about: Mapping[str, str]) -> bool:
    """Whether training or a new head has changed a model since others described it."""
    return contract.TRAINED in about or contract.HEAD in about


def info_to_metadata(info: ModelInfo) -> dict[str, str]:
    """The metadata that says the same as a `ModelInfo`.

    >>> info_to_metadata(ModelInfo(labels=("good", "bad")))
    {'onward.classes': '["good", "bad"]'}
    """
    about: dict[str, str] = {}
    if info.labels is not None:
        # names of classes are in all languages, and other readers show this text as it is
        about[contract.CLASSES] = json.dumps(list(info.labels), ensure_ascii=False)
    # a tensor needs no preparation: the graph's own types say all
    described = [one for one in info.inputs if one.kind != "tensor"]
    if described:
        tables = [json.loads(one.to_json()) for one in described]
        # keys in order, so that equal models are equal files
        about[contract.PREPROCESSING] = json.dumps(tables[0] if len(tables) == 1 else tables, sort_keys=True)
    # a new head may end without the softmax of the old one: the graph says it where there is one
    outputs = {name: meaning for name, meaning in info.outputs.items() if meaning != "probabilities"}
    task = {"task": info.task, "problem_type": info.problem_type, "outputs": outputs or None}
    task = {key: value for key, value in task.items() if value is not None}
    if task:
        about[contract.TASK] = json.dumps(task, sort_keys=True)
    if info.origin:
        origin = {key: value for key, value in vars(info.origin).items() if value}
        about[contract.ORIGIN] = json.dumps(origin, sort_keys=True, default=str)
    return about


def _own(about: Mapping[str, str], where: str) -> ModelInfo:
    """Onward's own keys."""
    labels = tuple(read_names(about, contract.CLASSES)) if contract.CLASSES in about else None
    inputs = (
        Preprocessing.list_from_json(about[contract.PREPROCESSING], where)
        if contract.PREPROCESSING in about
        else []
    )
    task, origin = read_table(about, contract.TASK), read_table(about, contract.ORIGIN)
    return ModelInfo.stated(
        where,
        task=_text(task.get("task")),
        labels=labels,
        problem_type=_text(task.get("problem_type")),
        inputs=tuple(inputs),
        outputs=_texts(task.get("outputs")),
        origin=origin_from_table(origin),
    )


def origin_from_table(table: Mapping[str, Any]) -> Origin:
    """The origin that a table of metadata, or of `run.json`, describes."""
    settings = table.get("settings")
    return Origin(
        base=_text(table.get("base")),
        data=_texts(table.get("data")),
        settings=settings if isinstance(settings, dict) else {},
        versions=_texts(table.get("versions")),
    )


def _foreign(
    about: Mapping[str, str], where: str, inputs: Sequence[str], outputs: Mapping[str, int | None]
) -> list[ModelInfo]:
    """What others wrote, and the card of `onward export`."""
    infos = []
    card = read_table(about, contract.EXPORT)
    if card:
        infos.append(info_from_card(card, f"{where} ({contract.EXPORT})"))
    # "names" alone is a common word: the others show that Ultralytics wrote it
    if "names" in about and ("task" in about or "stride" in about or "imgsz" in about):
        infos.append(_ultralytics(about, f"{where} (names)", inputs))
    if "character" in about:
        infos.append(_paddle(about["character"], f"{where} (character)", outputs))
    return infos


def info_from_card(card: Mapping[str, Any], where: str) -> ModelInfo:
    """What the card of `onward export` says: in `onward.json`, or in the model's metadata."""
    labels, names = card.get("labels"), card.get("inputs")
    processor, tokenizer = card.get("processor"), card.get("tokenizer")
    inputs = []
    for name in names if isinstance(names, Mapping) else ():
        kind = _KINDS.get(str(name), "tensor")
        settings: dict[str, Any] = {}
        if kind == "text" and isinstance(tokenizer, Mapping):
            settings = _text_settings(tokenizer)
        elif kind == "image" and isinstance(processor, Mapping):
            settings = known_image_settings(processor)
        elif kind == "sound" and isinstance(processor, Mapping):
            settings = {
                key: processor[key]
                for key, type_ in (("sampling_rate", int), ("do_normalize", bool))
                # exactly: True is an int, too
                if type(processor.get(key)) is type_
            }
        # a processor that is not described is no statement about the pixels
        stated = kind == "text" or (kind in ("image", "sound") and settings)
        if stated:
            inputs.append(Preprocessing.from_dict({"kind": kind, "input": name, **settings}, where))
    if labels is not None and not (
        isinstance(labels, list) and all(isinstance(name, str) for name in labels)
    ):
        raise ModelError(f"{where}: its labels are not a list of names")
    letters, outputs = reader_labels(card.get("spelling")), card.get("outputs")
    read = outputs if letters is not None and isinstance(outputs, Mapping) else {}
    return ModelInfo.stated(
        where,
        task=_text(card.get("task")),
        labels=tuple(labels) if labels else letters,
        problem_type=_text(card.get("problem_type")),
        inputs=tuple(inputs),
        outputs={str(name): "ctc" for name in read},
    )


def reader_labels(spelling: Any) -> tuple[str, ...] | None:
    """The characters of a recogniser's classes, in whose place Hugging Face has tokens: a blank and the spaces.

    >>> reader_labels({"tokens": ["<pad>", "|", "a"], "blank_id": 0, "word_delimiter": "|"})
    ('<blank>', ' ', 'a')
    """
    tokens = spelling.get("tokens") if isinstance(spelling, Mapping) else None
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        return None
    labels = [token.lower() for token in tokens] if spelling.get("lower") is True else list(tokens)
    blank, delimiter = spelling.get("blank_id"), spelling.get("word_delimiter")
    if type(blank) is not int or not 0 <= blank < len(labels):
        return None
    labels[blank] = BLANK
    if isinstance(delimiter, str) and " " not in labels:
        labels = [" " if label == delimiter else label for label in labels]
    return tuple(labels)


def _text_settings(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """Padding and length of a card's tokenizer; a long limit is the model's, and training cuts earlier by itself."""
    limit, pad = tokenizer.get("max_length"), tokenizer.get("pad_id")
    settings = {"pad_id": pad} if type(pad) is int else {}
    return {**settings, "max_length": limit} if type(limit) is int and 0 < limit <= _LONG_TEXT else settings


def _ultralytics(about: Mapping[str, str], where: str, inputs: Sequence[str]) -> ModelInfo:
    labels = parse_names(about["names"])
    if labels is None:
        raise ModelError(f"{where}: its class names are neither a table from number to name nor a list")
    task = _ULTRALYTICS_TASKS.get(about.get("task", ""))
    sides = parse_literal(about.get("imgsz", ""))
    has_sides = (
        isinstance(sides, list | tuple) and len(sides) == 2 and all(type(side) is int for side in sides)
    )
    # 2 is Pillow's bilinear; Ultralytics divides by 255 and subtracts nothing
    settings: dict[str, Any] = {"do_rescale": True, "do_normalize": False, "resample": 2}
    if has_sides:
        size = {"height": sides[0], "width": sides[1]}
        settings |= {"do_resize": True, "size": size}
        if task == "image-classification":  # its own transform: the shorter side, then the middle
            settings |= {"size": {"shortest_edge": max(sides)}, "do_center_crop": True, "crop_size": size}
    pictures = [
        Preprocessing.from_dict({"kind": "image", "input": name, **settings}, where) for name in inputs[:1]
    ]
    return ModelInfo.stated(where, task=task, labels=labels, inputs=tuple(pictures))


def _paddle(text: str, where: str, outputs: Mapping[str, int | None]) -> ModelInfo:
    """PaddleOCR's `character`: one label a line; a recogniser's blank before and space after them are implied."""
    labels = tuple(text[:_LONGEST].splitlines())
    for name, size in outputs.items():
        # the count proves it: the file does not say whether blank and space are in it
        if size is not None and size == len(labels) + 2:
            reader = (BLANK, *labels, " ")
            return ModelInfo.stated(where, task="text-recognition", labels=reader, outputs={name: "ctc"})
    return ModelInfo.stated(where, labels=labels)


def parse_names(text: str) -> tuple[str, ...] | None:
    """Class names in the order of their numbers, from the text of a Python or JSON dict or list; None if it is none.

    >>> parse_names("{1: 'dog', 0: 'cat'}")
    ('cat', 'dog')
    """
    value = parse_literal(text)
    if isinstance(value, Mapping):
        try:
            numbered = {int(key): name for key, name in value.items()}
        except (TypeError, ValueError):
            return None
        # a gap would shift every name after it
        if sorted(numbered) != list(range(len(value))):
            return None
        value = [numbered[number] for number in range(len(numbered))]
    if not isinstance(value, list | tuple) or not all(isinstance(name, str | int | float) for name in value):
        return None
    return tuple(str(name) for name in value)


def parse_literal(text: str) -> Any:
    """A Python or JSON literal of a bounded length and depth; None where it is none."""
    if len(text) > _LONGEST:
        return None
    # Ultralytics writes Python's repr of a dict, others JSON; neither parser runs code
    for parse in (json.loads, ast.literal_eval):
        try:
            require_shallow(text)
            return parse(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError, LimitError):
            continue
    return None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _texts(value: Any) -> dict[str, str]:
    return {str(k): str(v) for k, v in value.items()} if isinstance(value, Mapping) else {}
