"""The folder of a language model: which file is the model, and what is known of it, whoever exported it.

Reads what Onward writes (`onward.json`), what Hugging Face repositories of ONNX models have (`config.json`, models in
`onnx/`, one file for each precision) and what onnxruntime-genai reads (`genai_config.json`). Imports neither torch nor
transformers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onward.errors import ModelError
from onward.escape import first_of
from onward.export.huggingface.folder import CARD, MODEL, read_card
from onward.graph.external import external_tensors
from onward.graph.gate import read_proto
from onward.hub.folder_files import read_settings

_GENAI = "genai_config.json"
_MAKE = "make the folder with: onward export MODEL --task text-generation --output FOLDER"


def find_base(location: str | os.PathLike[str]) -> tuple[Path, Path]:
    """A language model's folder and its model file, from either of the two.

    Of several models in a folder `model.onnx` is taken; where there is none, the caller has to say which.
    """
    path = Path(location)
    if path.is_file():
        folder = path.parent
        return (folder.parent if folder.name == "onnx" else folder), path
    if not path.is_dir():
        raise ModelError(f"'{path}': no such folder")
    for name in (MODEL, f"onnx/{MODEL}"):
        if (path / name).is_file():
            return path, path / name
    named = _genai(path).get("decoder")
    name = named.get("filename") if isinstance(named, Mapping) else None
    if isinstance(name, str) and Path(name).name == name and (path / name).is_file():
        return path, path / name
    models = sorted(file for part in (path, path / "onnx") for file in part.glob("*.onnx"))
    if not models:
        raise ModelError(f"'{path}': no {MODEL}", hint=_MAKE)
    if len(models) > 1:
        names = ", ".join(str(file.relative_to(path)) for file in models)
        raise ModelError(
            f"'{path}' has several models: {names}", hint=f"give one of them, such as {models[0]}"
        )
    return path, models[0]


def is_published(path: Path) -> bool:
    """Whether a folder or model file is one that others exported, with its tokenizer or processor beside it."""
    folder = find_base(path)[0] if path.is_file() else path
    settings = any((folder / name).is_file() for name in ("config.json", _GENAI))
    beside = any((folder / name).is_file() for name in ("tokenizer.json", "preprocessor_config.json"))
    return settings and beside and not (folder / CARD).is_file()


def open_language_model(location: str | os.PathLike[str]) -> tuple[Path, Path, Mapping[str, Any]]:
    """Folder, model file and card of a language model that can be fine-tuned, or an error that says what it lacks."""
    path, model = find_base(location)
    card = read_card(path) if (path / CARD).is_file() else _card_of_strangers(path, model)
    if card["task"] != "text-generation":
        raise ModelError(f"'{path}': its task is {card['task']!r}, and language models are 'text-generation'")
    if not (path / "tokenizer.json").is_file():
        raise ModelError(f"'{path}': no tokenizer.json beside the model")
    ends = card["generation"].get("eos_ids") or []
    if not isinstance(ends, list) or not all(type(number) is int for number in ends):
        raise ModelError(f"'{path / CARD}': the eos_ids are {str(ends)[:40]!r}, and must be numbers")
    return path, model, card


def _genai(folder: Path) -> Mapping[str, Any]:
    """What onnxruntime-genai's file says of the model."""
    settings = read_settings(folder / _GENAI).get("model")
    return settings if isinstance(settings, Mapping) else {}


def _card_of_strangers(folder: Path, model: Path) -> dict[str, Any]:
    """A card for a folder that others exported, from its `config.json` or what stands in its place."""
    settings = {**read_settings(folder / "config.json"), **read_settings(folder / "generation_config.json")}
    for_genai = _genai(folder)
    if not settings and not for_genai:
        raise ModelError(
            f"'{folder}': neither {CARD} nor config.json nor {_GENAI}; export with from_transformers(…, path=folder)",
            hint=_MAKE,
        )
    called = settings.get("architectures") or []
    if not for_genai and (
        not isinstance(called, list)
        or not any(str(name).endswith(("ForCausalLM", "LMHeadModel")) for name in called)
    ):
        raise ModelError(
            f"'{folder}': config.json names {settings.get('architectures')}, which is no language model"
        )
    settings = {**for_genai, **settings}
    end = settings.get("eos_token_id")
    ends = [end] if isinstance(end, int) else end or []
    names = ("max_position_embeddings", "n_positions", "context_length")
    longest = next((settings[name] for name in names if settings.get(name)), None)
    if not isinstance(ends, list) or not all(type(number) is int for number in ends):
        raise ModelError(
            f"'{folder}': config.json has the eos_token_id {str(end)[:40]!r}, which is no number"
        )
    if longest is not None and (type(longest) is not int or longest < 1):
        raise ModelError(f"'{folder}': config.json has the length {str(longest)[:40]!r}, which is no number")
    pad = settings.get("pad_token_id")
    proto = read_proto(model, read_data=False)
    _require_data(proto, model)
    return {
        "format": 1,
        "task": "text-generation",
        "model_type": str(settings.get("model_type") or settings.get("type") or ""),
        "answer": "generate",
        "inputs": {value.name: {} for value in proto.graph.input},
        "outputs": {value.name: {} for value in proto.graph.output},
        "tokenizer": {
            "pad_id": pad if isinstance(pad, int) else ends[0] if ends else 0,
            "padding_side": "left",
            "max_length": longest,
        },
        "generation": {
            "eos_ids": ends,
            # this attention counts a row's tokens from its first column on: padding before them would be read
            "alone": any(node.op_type == "GroupQueryAttention" for node in proto.graph.node),
        },
    }


def _require_data(proto: Any, model: Path) -> None:
    """Refuse a model of which a file of weights was not downloaded."""
    named = {
        entry.value
        for tensor in external_tensors(proto)
        for entry in tensor.external_data
        if entry.key == "location"
    }
    # what is no plain name of a file is refused when the weights are read
    plain = {name for name in named if name.isprintable() and len(name) < 200 and ".." not in name}
    missing = sorted(name for name in plain if not os.path.isfile(model.parent / name))
    if missing:
        raise ModelError(
            f"'{model}': its weights are in {first_of(missing)}, which {'is' if len(missing) == 1 else 'are'} missing",
            hint="download every file of the model, and put them beside it",
        )
