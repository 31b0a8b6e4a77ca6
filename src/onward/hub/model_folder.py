"""The folder of a model: which file is the model, and what is known of it, whoever exported it.

Reads what Onward writes (`onward.json`), what optimum and other Hugging Face repositories of ONNX models have
(`config.json`, models in `onnx/`, one file for each precision; the files of the tokenizer and the processor) and what
onnxruntime-genai reads (`genai_config.json`). A folder that others published is described as `onward.json` would.
Imports neither torch nor transformers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from onward.data.text import read_tokenizer
from onward.errors import ModelError
from onward.escape import first_of
from onward.export.huggingface.cards import generation_settings, processor_settings
from onward.export.huggingface.folder import CARD, MODEL, read_card
from onward.export.huggingface.tasks import detect, task_for
from onward.graph.external import external_tensors
from onward.graph.gate import read_proto
from onward.hub.folder_files import id2label, read_settings, read_spelling

_GENAI = "genai_config.json"
_MAKE = "make the folder with: onward export MODEL --task text-generation --output FOLDER"
_PROCESSOR = "preprocessor_config.json"
# files of an encoder and its decoder: with both branches in one graph, or of the first step and of those after it
_ENCODER, _MERGED = "encoder_model", "decoder_model_merged"
_FIRST, _LATER = "decoder_model", "decoder_with_past_model"


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
    # transformers.js reads from onnx/, optimum writes beside config.json; `model.onnx` is the float one in both
    # of an encoder and its decoder the encoder stands for both
    for name in (MODEL, f"onnx/{MODEL}", f"{_ENCODER}.onnx", f"onnx/{_ENCODER}.onnx"):
        if (path / name).is_file():
            return path, path / name
    named = _genai(path).get("decoder")
    name = named.get("filename") if isinstance(named, Mapping) else None
    if isinstance(name, str) and Path(name).name == name and (path / name).is_file():
        return path, path / name
    models = sorted(file for part in (path, path / "onnx") for file in part.glob("*.onnx"))
    if not models:
        of_torch = any(next(path.glob(pattern), None) for pattern in ("*.safetensors", "pytorch_model*.bin"))
        raise ModelError(
            f"'{path}': no {MODEL}" + (", but weights of PyTorch" if of_torch else ""),
            hint=f"make a folder with one: onward export {path if of_torch else 'MODEL'} --output FOLDER",
        )
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
    # as in transformers, what generation_config.json says of writing goes before config.json
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
    # config.json is what the model was trained with, genai_config.json a copy of parts of it
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
    proto = read_proto(model, read_data=False, by_reference=True)
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


# ---- what others published ----------------------------------------------------------------------------


def open_published(location: Path) -> tuple[Path, Mapping[str, Path], Mapping[str, Any]]:
    """Folder, model files by name and card of a published model; an encoder's file comes before its decoder's."""
    folder = find_base(location)[0] if location.is_file() else location
    config = read_settings(folder / "config.json")
    architectures = config.get("architectures") or [""]
    if not isinstance(architectures, list) or not isinstance(architectures[0], str):
        raise ModelError(f"'{folder / 'config.json'}': architectures is not a list of names")
    name = detect(SimpleNamespace(architectures=architectures, model_type=str(config.get("model_type"))))
    # onnxruntime-genai's folders may have no config.json at all, and are always decoders
    if not config or name == "text-generation":
        folder, model, card_of_model = open_language_model(location)
        return folder, {MODEL: model}, card_of_model
    task = task_for(name, str(config.get("model_type")))
    writes = task.wrapper == "encoder-decoder"
    files = _parts(location, folder) if writes else {MODEL: find_base(location)[1]}
    model = next(iter(files.values()))
    proto = read_proto(model, read_data=False, by_reference=True)
    # the answer reads outputs by name: what lacks one is refused here, not after a first run
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
        card["spelling"] = read_spelling(config, folder)
    elif (folder / "tokenizer.json").is_file():
        card["tokenizer"] = _tokenizer(config, folder)
    if writes:
        card |= {"parts": list(files), "generation": _generation(config, folder)}
        _require_inputs(card["inputs"], task.kind, model)
    processor = read_settings(folder / _PROCESSOR)
    if processor:
        card["processor"] = processor_settings(processor)
    return folder, files, card


def open_encoder_decoder(location: Path) -> tuple[Path, Mapping[str, Path], Mapping[str, Any]]:
    """Folder, model files by name (the encoder's, then the decoder's) and card of a model that has both."""
    folder = find_base(location)[0] if location.is_file() else location
    if (folder / CARD).is_file():
        card = read_card(folder)
        files: Mapping[str, Path] = {name: folder / name for name in card.get("parts") or ()}
    else:
        folder, files, card = open_published(location)
    # names in a card come from outside: one with a path in it would open another file
    wrong = [name for name, file in files.items() if Path(name).name != name or not file.is_file()]
    if wrong or len(files) < 2:
        missing = f"no {first_of(wrong)}" if wrong else "no encoder with a decoder"
        raise ModelError(f"'{folder}': {missing}; its task is {card['task']!r}, which trains from both files")
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
    # an encoder in int8 beside a decoder in float would run, and answer as nobody has measured
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
    # both branches in one graph share their weights: the pair of graphs has them twice
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
    # transformers writes null for what a configuration leaves to the decoder in it
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
    # tokenizers without a padding token of their own, as GPT-2's, leave it to the model
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
        # cleaning up would take spaces out of text that a byte-level tokenizer restores exactly: transformers leaves it
        and type(tokenizer.model).__name__ != "BPE",
    }
