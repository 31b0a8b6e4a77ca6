"""Describes a folder that optimum or onnx-community published, as `onward.json` would: task, labels, tokenizer.

Reads `config.json` and the files of the tokenizer and the processor beside the model; `base_folder` has language
models. Imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from onward.data.text import read_tokenizer
from onward.errors import ModelError
from onward.export.huggingface.cards import processor_settings
from onward.export.huggingface.tasks import detect, task_for
from onward.graph.gate import read_proto
from onward.pipeline.base_folder import find_base, read_settings

__all__ = ["open_published"]

_PROCESSOR = "preprocessor_config.json"


def open_published(place: Path) -> tuple[Path, Path, dict[str, Any]] | None:
    """Folder, model file and card of a published model of one graph; None for language models."""
    folder, model = find_base(place)
    config = read_settings(folder / "config.json")
    architectures = config.get("architectures") or [""]
    if not isinstance(architectures, list) or not isinstance(architectures[0], str):
        raise ModelError(f"'{folder / 'config.json'}': architectures is not a list of names")
    name = detect(SimpleNamespace(architectures=architectures, model_type=str(config.get("model_type"))))
    if not config or name == "text-generation":
        return None
    task = task_for(name, str(config.get("model_type")))
    if task.wrapper == "encoder-decoder":
        raise ModelError(
            f"'{folder}': {architectures[0]} has an encoder and a decoder, which others export in ways that are not "
            "read here; export it with from_transformers(…, path=folder)"
        )
    proto = read_proto(model, read_data=False)
    given = {value.name for value in proto.graph.output}
    missing = sorted(set(task.outputs) - given)
    if missing:
        raise ModelError(
            f"'{model}': task {name!r} needs the outputs {', '.join(missing)}; it has {', '.join(sorted(given))}"
        )
    card: dict[str, Any] = {
        "format": 1,
        "task": name,
        "answer": task.answer,
        "architecture": architectures[0],
        "model_type": str(config.get("model_type")),
        "inputs": {value.name: {} for value in proto.graph.input},
        "outputs": {output: {} for output in task.outputs},
    }
    if task.classifies:
        card |= {"labels": _labels(config, folder), "problem_type": config.get("problem_type")}
    if task.answer == "spell":
        card["spelling"] = _spelling(config, folder)
    elif (folder / "tokenizer.json").is_file():
        card["tokenizer"] = _tokenizer(config, folder)
    processor = read_settings(folder / _PROCESSOR)
    if processor:
        card["processor"] = processor_settings(processor)
    return folder, model, card


def _labels(config: Mapping[str, Any], folder: Path) -> list[str]:
    known = config.get("id2label")
    if not isinstance(known, Mapping):  # as transformers: two, unless it says how many
        count = config.get("num_labels", 2)
        known = {index: f"LABEL_{index}" for index in range(count if isinstance(count, int) else 2)}
    try:
        return [str(known[key]) for key in sorted(known, key=int)]
    except (ValueError, TypeError):
        raise ModelError(f"'{folder / 'config.json'}': id2label has keys that are no numbers") from None


def _tokenizer(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    tokenizer = read_tokenizer(folder / "tokenizer.json")
    settings = read_settings(folder / "tokenizer_config.json")

    def token(name: str) -> str | None:
        value = settings.get(f"{name}_token")
        value = value.get("content") if isinstance(value, Mapping) else value
        return value if isinstance(value, str) else None

    def number(name: str) -> int | None:
        content = token(name)
        return None if content is None else tokenizer.token_to_id(content)

    # RoBERTa's positions begin after the padding id, so two of them cannot be used
    offset = 2 if config.get("model_type") in ("roberta", "xlm-roberta", "camembert") else 0
    limits = [settings.get("model_max_length"), config.get("max_position_embeddings")]
    lengths = [
        limit - offset * index
        for index, limit in enumerate(limits)
        if isinstance(limit, int) and 0 < limit < 1_000_000
    ]
    pad = number("pad")
    pad = config.get("pad_token_id") if pad is None else pad
    return {
        "pad_id": pad if isinstance(pad, int) else 0,
        "padding_side": "left" if settings.get("padding_side") == "left" else "right",
        "max_length": min(lengths, default=None),
        "cls_id": number("cls"),
        "unk_id": number("unk"),
        "mask_id": number("mask"),
        "mask_token": token("mask"),
        "clean_up": settings.get("clean_up_tokenization_spaces") is True
        and type(tokenizer.model).__name__ != "BPE",
    }


def _spelling(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    known = read_settings(folder / "vocab.json")
    settings = read_settings(folder / "tokenizer_config.json")
    if not known or not all(type(index) is int for index in known.values()):
        raise ModelError(f"'{folder}': no vocab.json with the letters of the recogniser")
    letters = {index: letter for letter, index in known.items()}
    blank = config.get("pad_token_id")
    return {
        "tokens": [letters.get(index, "<unk>") for index in range(max(letters) + 1)],
        "blank_id": blank if isinstance(blank, int) else 0,
        "word_delimiter": settings.get("word_delimiter_token", "|"),
        "lower": settings.get("do_lower_case") is True,
    }
