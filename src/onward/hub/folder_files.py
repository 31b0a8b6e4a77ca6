"""What the files around a model say of it: Hugging Face's, sentence-transformers' and Onward's own.

Of sentence-transformers, it also writes them for a model that was trained here. Imports neither torch nor
transformers. Everything is untrusted JSON of a bounded size.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from onward.data.layouts import is_inside
from onward.errors import DataError, ModelError
from onward.export.huggingface.folder import CARD, PIPELINE, read_card
from onward.export.huggingface.tasks import detect, task_for
from onward.info.metadata import info_from_card, reader_labels
from onward.info.model_info import PROBLEM_TYPES, ModelInfo, combine
from onward.info.preprocessing import Preprocessing, check_settings, known_image_settings, plain_settings
from onward.reading import read_json

_MOST_NAMES = 1 << 20
_CONFIG, _PROCESSOR, _GENAI = "config.json", "preprocessor_config.json", "genai_config.json"


def info_beside(folder: Path, *, images: Sequence[str] = (), sounds: Sequence[str] = ()) -> ModelInfo:
    """What the files of a folder say of the model in it.

    `images` and `sounds` are the names of the model's inputs that a processor can be for.
    """
    infos = []
    # artifacts of a published model keep its card and tokenizer in a folder below
    for part in (folder, folder / PIPELINE):
        if (part / CARD).is_file():
            infos.append(info_from_card(read_card(part), f"'{part / CARD}'"))
    config = _config(folder)
    if infos and infos[0].task is not None:
        # the architecture's usual task: one network serves several, and the card says which
        config = ModelInfo.stated(
            config.source("labels"), labels=config.labels, problem_type=config.problem_type
        )
    genai = read_settings(folder / _GENAI).get("model")
    if config.task is None and not infos and isinstance(genai, Mapping) and "encoder" not in genai:
        infos.append(ModelInfo.stated(f"'{folder / _GENAI}'", task="text-generation"))
    infos += [config, _processor(folder, images, sounds), _tokenizer(folder)]
    return combine(*infos)


def _config(folder: Path) -> ModelInfo:
    config = read_settings(folder / _CONFIG)
    # a model of embeddings may name the architecture that it was pretrained as: the pooling says what it is for
    pools = (folder / "modules.json").is_file() and any(folder.glob("*_Pooling/config.json"))
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise ModelError(f"'{folder / _CONFIG}': architectures is not a list of names")
    if not architectures and not pools:
        return ModelInfo()
    model_type = str(config.get("model_type"))
    name = detect(SimpleNamespace(architectures=architectures, model_type=model_type), pools=pools)
    where, problem = f"'{folder / (_CONFIG if config else 'modules.json')}'", config.get("problem_type")
    if task_for(name, model_type).answer == "spell" and (folder / "vocab.json").is_file():
        return ModelInfo.stated(where, task=name, labels=reader_labels(read_spelling(config, folder)))
    if not task_for(name, model_type).classifies:
        # old configurations have LABEL_0 and LABEL_1 whatever the model is for
        return ModelInfo.stated(where, task="feature-extraction" if name == "default" else name)
    return ModelInfo.stated(
        where,
        task=name,
        labels=id2label(config, where),
        problem_type=problem if problem in PROBLEM_TYPES else None,
    )


def id2label(config: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """The labels of a `config.json` in the order of their numbers."""
    table = config.get("id2label")
    if not isinstance(table, Mapping):  # as transformers: two, unless it says how many
        count = config.get("num_labels", 2)
        _require_countable(count, f"{where}: num_labels")
        table = {index: f"LABEL_{index}" for index in range(count if isinstance(count, int) else 2)}
    try:
        numbers = {int(key): str(label) for key, label in table.items()}
    except (ValueError, TypeError):
        raise ModelError(f"{where}: id2label has keys that are no numbers") from None
    return tuple(numbers[number] for number in sorted(numbers))


def _require_countable(number: object, what: str) -> None:
    """Refuse a number that would make as many names as it says."""
    if isinstance(number, int) and number > _MOST_NAMES:
        raise ModelError(f"{what} is {str(number)[:20]}, and no model has so many")


def read_spelling(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """What turns the classes of a recogniser's frames into text: its tokens, and which of them are no letters."""
    vocabulary = read_settings(folder / "vocab.json")
    settings = read_settings(folder / "tokenizer_config.json")
    if not vocabulary or not all(type(index) is int for index in vocabulary.values()):
        raise ModelError(f"'{folder}': no vocab.json with the letters of the recogniser")
    letters = {index: letter for letter, index in vocabulary.items()}
    _require_countable(max(letters), f"'{folder / 'vocab.json'}': a letter's number")
    blank = config.get("pad_token_id")
    return {
        "tokens": [letters.get(index, "<unk>") for index in range(max(letters) + 1)],
        "blank_id": blank if isinstance(blank, int) else 0,
        "word_delimiter": settings.get("word_delimiter_token", "|"),
        "lower": settings.get("do_lower_case") is True,
    }


def read_processor(folder: Path) -> dict[str, Any]:
    """The settings of a folder's `preprocessor_config.json` that are known; empty where there is none."""
    path = folder / _PROCESSOR
    if not path.is_file():
        return {}
    try:
        settings = read_json(path)
    except (ValueError, OSError) as error:
        raise DataError(f"'{path}' cannot be read: {error}", "fix it, or remove it") from error
    try:
        image_keys = known_image_settings(plain_settings(settings))
    except (TypeError, ValueError, ArithmeticError) as error:
        raise DataError(
            f"'{path}' has settings that are not understood: {error}", "fix it, or remove it"
        ) from error
    check_settings(image_keys, f"'{path}'")
    return image_keys


def _processor(folder: Path, images: Sequence[str], sounds: Sequence[str]) -> ModelInfo:
    where = f"'{folder / _PROCESSOR}'"
    if len(images) == 1:
        settings = read_processor(folder)
        inputs = (Preprocessing("image", images[0], settings),) if settings else ()
        return ModelInfo.stated(where, inputs=inputs)
    settings = read_settings(folder / _PROCESSOR)
    rate, normalize = settings.get("sampling_rate"), settings.get("do_normalize")
    if len(sounds) == 1 and type(rate) is int:
        table = {"kind": "sound", "input": sounds[0], "sampling_rate": rate}
        table |= {"do_normalize": normalize} if type(normalize) is bool else {}
        return ModelInfo.stated(where, inputs=(Preprocessing.from_dict(table, where),))
    return ModelInfo()


def _tokenizer(folder: Path) -> ModelInfo:
    for part in (folder, folder / PIPELINE):
        path = part / "tokenizer.json"
        if path.is_file():
            return ModelInfo.stated(f"'{path}'", tokenizer=path)
    return ModelInfo()


def read_settings(path: Path, kind: type = dict) -> Any:
    """A JSON file of a folder, a table or a list; an empty one where there is no file."""
    if not path.is_file():
        return kind()
    try:
        return read_json(path, kind)
    except (ValueError, OSError) as error:
        raise ModelError(f"'{path}': not valid JSON ({error})") from error


# ---- folders of sentence-transformers ----------------------------------------------------------------

_FLAGS = {
    "mean": "pooling_mode_mean_tokens",
    "cls": "pooling_mode_cls_token",
    "last": "pooling_mode_lasttoken",
    "max": "pooling_mode_max_tokens",
}
# what a tokenizer and an encoder need besides the model, where the base's folder has them
_COPIED = ("config.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")
_MODEL_TYPES = {
    "BertModel": "bert",
    "RobertaModel": "roberta",
    "XLMRobertaModel": "xlm-roberta",
    "DistilBertModel": "distilbert",
    "MPNetModel": "mpnet",
    "AlbertModel": "albert",
    "ElectraModel": "electra",
    "ModernBertModel": "modernbert",
}
_TYPE = "sentence_transformers.models."


def read_pooling(folder: Path) -> tuple[str | None, bool] | None:
    """The pooling and whether vectors are brought to length 1; None where the folder does not say.

    >>> read_pooling(Path("nowhere")) is None
    True
    """
    modules = read_settings(folder / "modules.json", list)
    if not modules:
        return None
    kinds = {
        str(module.get("type")).rsplit(".", 1)[-1]: module for module in modules if isinstance(module, dict)
    }
    unknown = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize", "Dropout")]
    if unknown:
        raise ModelError(
            f"'{folder / 'modules.json'}': {unknown[0]} is no part of embeddings that is known here",
            hint="export the folder with --task pooling, which puts it into the model, and train that",
        )
    mode = None
    if "Pooling" in kinds:
        name = kinds["Pooling"].get("path") or "1_Pooling"
        # a file from elsewhere must not name files outside of its folder
        if not isinstance(name, str) or not is_inside(name):
            raise ModelError(
                f"'{folder / 'modules.json'}': the path {str(name)[:40]!r} is not in this folder"
            )
        path = folder / name / "config.json"
        config = read_settings(path)
        named = config.get("pooling_mode") or [name for name, flag in _FLAGS.items() if config.get(flag)]
        names = named if isinstance(named, list) else [named]
        # newer versions of sentence-transformers write a name, older ones a flag for each kind
        names = ["last" if name == "lasttoken" else name for name in names]
        if len(names) != 1 or names[0] not in _FLAGS:
            raise ModelError(
                f"'{path}': the pooling {', '.join(map(str, names)) or 'nothing'} is not known here",
                hint=f"name one of {', '.join(_FLAGS)} with --pooling",
            )
        mode = names[0]
    return mode, "Normalize" in kinds


def sentence_files(
    base: Path | None,
    *,
    size: int,
    pooling: str,
    normalize: bool,
    max_length: int | None,
    architecture: str | None,
) -> dict[str, bytes]:
    """The files beside `model.onnx` with which sentence-transformers and others load a folder, by their names."""
    kinds = [
        ("Transformer", ""),
        ("Pooling", "1_Pooling"),
        *([("Normalize", "2_Normalize")] if normalize else []),
    ]
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": _TYPE + kind}
        for index, (kind, path) in enumerate(kinds)
    ]
    pools = {"word_embedding_dimension": size} | {flag: mode == pooling for mode, flag in _FLAGS.items()}
    files = {
        "modules.json": _to_json(modules),
        "1_Pooling/config.json": _to_json(pools),
        "sentence_bert_config.json": _to_json({"max_seq_length": max_length, "do_lower_case": False}),
        "config_sentence_transformers.json": _to_json({"similarity_fn_name": "cosine"}),
    }
    for name in _COPIED:
        if base is not None and (base / name).is_file():
            files[name] = (base / name).read_bytes()
    if "config.json" not in files and architecture in _MODEL_TYPES:
        about = {
            "architectures": [architecture],
            "model_type": _MODEL_TYPES[architecture],
            "hidden_size": size,
        }
        files["config.json"] = _to_json(about)
    return files


def _to_json(value: Any) -> bytes:
    return json.dumps(value, indent=2).encode()
