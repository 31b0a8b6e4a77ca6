"""What the files around a model say of it: Hugging Face's, sentence-transformers' and Onward's own.

Imports neither torch nor transformers. Everything is untrusted JSON of a bounded size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from onward.errors import DataError, ModelError
from onward.export.huggingface.folder import CARD, PIPELINE, read_card
from onward.export.huggingface.tasks import detect, task_for
from onward.info.metadata import info_from_card
from onward.info.model_info import PROBLEM_TYPES, ModelInfo, combine
from onward.info.preprocessing import Preprocessing, check_settings, known_image_settings, plain_settings
from onward.reading import read_json

_CONFIG, _PROCESSOR, _GENAI = "config.json", "preprocessor_config.json", "genai_config.json"


def info_beside(folder: Path, *, images: Sequence[str] = (), sounds: Sequence[str] = ()) -> ModelInfo:
    """What the files of a folder say of the model in it.

    `images` and `sounds` are the names of the model's inputs that a processor can be for.
    """
    infos = []
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
    pools = (folder / "modules.json").is_file() and any(folder.glob("*_Pooling/config.json"))
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise ModelError(f"'{folder / _CONFIG}': architectures is not a list of names")
    if not architectures and not pools:
        return ModelInfo()
    model_type = str(config.get("model_type"))
    name = detect(SimpleNamespace(architectures=architectures, model_type=model_type), pools=pools)
    where, problem = f"'{folder / (_CONFIG if config else 'modules.json')}'", config.get("problem_type")
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
        table = {index: f"LABEL_{index}" for index in range(count if isinstance(count, int) else 2)}
    try:
        numbers = {int(key): str(label) for key, label in table.items()}
    except (ValueError, TypeError):
        raise ModelError(f"{where}: id2label has keys that are no numbers") from None
    return tuple(numbers[number] for number in sorted(numbers))


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
    rate = read_settings(folder / _PROCESSOR).get("sampling_rate")
    if len(sounds) == 1 and type(rate) is int:
        table = {"kind": "sound", "input": sounds[0], "sampling_rate": rate}
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
