"""The files of a sentence-transformers folder: how its vectors are made of a model's states.

Reads `modules.json` and `1_Pooling/config.json`, old and new, and writes them for a model that was trained here. Knows
nothing of torch; what it reads is untrusted JSON of a bounded size.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from onward.errors import ModelError
from onward.hub.folder_files import read_settings

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
        path = folder / str(kinds["Pooling"].get("path") or "1_Pooling") / "config.json"
        config = read_settings(path)
        named = config.get("pooling_mode") or [name for name, flag in _FLAGS.items() if config.get(flag)]
        names = [named] if isinstance(named, str) else list(named)
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
