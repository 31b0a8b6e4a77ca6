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
from onward.export.huggingface.cards import generation_settings, processor_settings
from onward.export.huggingface.folder import MODEL
from onward.export.huggingface.tasks import detect, task_for
from onward.graph.gate import read_proto
from onward.hub.base_folder import find_base, open_language_model
from onward.hub.folder_files import id2label, read_settings

_PROCESSOR = "preprocessor_config.json"
# files of an encoder and its decoder: with both branches in one graph, or of the first step and of those after it
_ENCODER, _MERGED = "encoder_model", "decoder_model_merged"
_FIRST, _LATER = "decoder_model", "decoder_with_past_model"


def open_published(location: Path) -> tuple[Path, Mapping[str, Path], Mapping[str, Any]]:
    """Folder, model files by name and card of a published model; an encoder's file comes before its decoder's."""
    folder = find_base(location)[0] if location.is_file() else location
    config = read_settings(folder / "config.json")
    architectures = config.get("architectures") or [""]
    if not isinstance(architectures, list) or not isinstance(architectures[0], str):
        raise ModelError(f"'{folder / 'config.json'}': architectures is not a list of names")
    name = detect(SimpleNamespace(architectures=architectures, model_type=str(config.get("model_type"))))
    if not config or name == "text-generation":
        folder, model, card_of_model = open_language_model(location)
        return folder, {MODEL: model}, card_of_model
    task = task_for(name, str(config.get("model_type")))
    writes = task.wrapper == "encoder-decoder"
    files = _parts(location, folder) if writes else {MODEL: find_base(location)[1]}
    model = next(iter(files.values()))
    proto = read_proto(model, read_data=False)
    outputs = {value.name for value in proto.graph.output}
    missing = sorted({"last_hidden_state"} - outputs if writes else set(task.outputs) - outputs)
    if missing:
        raise ModelError(
            f"'{model}': task {name!r} needs the outputs {', '.join(missing)}; it has {', '.join(sorted(outputs))}"
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
        labels = list(id2label(config, f"'{folder / 'config.json'}'"))
        card |= {"labels": labels, "problem_type": config.get("problem_type")}
    if task.answer == "spell":
        card["spelling"] = _spelling(config, folder)
    elif (folder / "tokenizer.json").is_file():
        card["tokenizer"] = _tokenizer(config, folder)
    if writes:
        card |= {"parts": list(files), "generation": _generation(config, folder)}
        _require_inputs(card["inputs"], task.kind, model)
    processor = read_settings(folder / _PROCESSOR)
    if processor:
        card["processor"] = processor_settings(processor)
    return folder, files, card


def _parts(location: Path, folder: Path) -> dict[str, Path]:
    """The files of an encoder and its decoder, all of one precision: `_quantized`, `_fp16` or none in their names."""
    if location.is_file():
        inside = location.parent
        stem = next(
            (part for part in (_ENCODER, _MERGED, _FIRST, _LATER) if location.stem.startswith(part)), None
        )
        endings = [] if stem is None else [location.stem.removeprefix(stem)]
    else:
        inside = next(
            (part for part in (folder, folder / "onnx") if [*part.glob(f"{_ENCODER}*.onnx")]), folder
        )
        endings = sorted(file.stem.removeprefix(_ENCODER) for file in inside.glob(f"{_ENCODER}*.onnx"))
    if len(endings) > 1 and "" not in endings:
        names = ", ".join(f"{_ENCODER}{ending}.onnx" for ending in endings)
        raise ModelError(
            f"'{inside}' has several encoders: {names}",
            hint=f"give one of them, such as {inside / names.split(', ')[0]}",
        )
    ending = "" if "" in endings else "".join(endings)
    files = {
        name: inside / f"{name}{ending}.onnx"
        for name in (_ENCODER, _MERGED, _FIRST, _LATER)
        if (inside / f"{name}{ending}.onnx").is_file()
    }
    if _ENCODER not in files or not files.keys() & {_MERGED, _FIRST}:
        raise ModelError(
            f"'{inside}': the model has an encoder and a decoder, so that {_ENCODER}{ending}.onnx and "
            f"{_MERGED}{ending}.onnx (or {_FIRST}{ending}.onnx and {_LATER}{ending}.onnx) are needed",
            hint="download every file of the model, or export it with from_transformers(…, path=folder)",
        )
    chosen = (_ENCODER, _MERGED) if _MERGED in files else (_ENCODER, _FIRST, _LATER)
    return {file.name: file for name, file in files.items() if name in chosen}


def _require_inputs(inputs: Mapping[str, Any], kind: str, model: Path) -> None:
    accepted = {"text": {"input_ids", "attention_mask"}, "image": {"pixel_values"}}.get(
        kind, {"input_features", "input_values"}
    )
    if not inputs or not set(inputs) <= accepted:
        raise ModelError(
            f"'{model}': the encoder takes {', '.join(inputs)}, and one for {kind} takes {', '.join(sorted(accepted))}"
        )


def _generation(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The settings of `generation_config.json`, then those of `config.json`, then those of the decoder in it."""
    inner = config.get("decoder")
    settings = read_settings(folder / "generation_config.json")
    stated = {name: value for name, value in config.items() if value is not None}
    merged = {**(inner if isinstance(inner, Mapping) else {}), **stated}
    for name in ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "forced_decoder_ids"):
        rows = settings.get(name, merged.get(name)) or []
        inner_type = int if name.endswith("_tokens") else list
        if not isinstance(rows, list) or not all(isinstance(row, inner_type) for row in rows):
            raise ModelError(f"'{folder}': the {name} of the settings for generation are {str(rows)[:40]}")
    generation = generation_settings(SimpleNamespace(**merged), SimpleNamespace(**settings))
    for name, values in (
        ("eos_token_id", generation["eos_ids"]),
        ("decoder_start_token_id", [generation["start_id"]]),
    ):
        if not all(type(number) is int for number in values):
            raise ModelError(f"'{folder}': config.json has the {name} {str(values)[:40]}, which is no number")
    return generation


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
    vocabulary = read_settings(folder / "vocab.json")
    settings = read_settings(folder / "tokenizer_config.json")
    if not vocabulary or not all(type(index) is int for index in vocabulary.values()):
        raise ModelError(f"'{folder}': no vocab.json with the letters of the recogniser")
    letters = {index: letter for letter, index in vocabulary.items()}
    blank = config.get("pad_token_id")
    return {
        "tokens": [letters.get(index, "<unk>") for index in range(max(letters) + 1)],
        "blank_id": blank if isinstance(blank, int) else 0,
        "word_delimiter": settings.get("word_delimiter_token", "|"),
        "lower": settings.get("do_lower_case") is True,
    }
