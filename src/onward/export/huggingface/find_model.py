"""Finds and loads the model to export, its tokenizer or processor, and sentence-transformers settings.

Accepts model ids, folders, (model, tokenizer) tuples and timm models, and reads the files of a
sentence-transformers folder.
Imports transformers when called; independent of ONNX.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike, fspath
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from onward.errors import ExportError
from onward.export.huggingface.diffusion import as_part, is_diffusers, is_diffusers_folder, read_part
from onward.export.huggingface.tasks import TASKS, Task, detect, task_for, task_named
from onward.reading import read_json

POOLING_MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")

# Answers that are text, though what goes in is not.
_WRITERS = ("spell", "transcribe", "caption")

_TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "vocab.json", "merges.txt", "*.model", "*.tiktoken")


@dataclass(frozen=True)
class Dense:
    """A linear layer that a sentence-transformers folder puts after the pooling."""

    weight: Any
    bias: Any | None
    activation: str


@dataclass(frozen=True)
class Pooling:
    """How token vectors become one vector: modes (several are concatenated), dense layers, unit length."""

    modes: tuple[str, ...] = ("mean",)
    normalize: bool = False
    dense: tuple[Dense, ...] = ()

    def __post_init__(self) -> None:
        for mode in self.modes:
            if mode not in POOLING_MODES:
                raise ValueError(f"unknown pooling {mode!r}. Known: {', '.join(POOLING_MODES)}")


@dataclass(frozen=True)
class Source:
    """A loaded model and everything that belongs to it."""

    model: Any
    task: Task
    called: str
    """The task's name as asked for, which may be an alias."""
    origin: str
    tokenizer: Any | None = None
    processor: Any | None = None
    pooling: Pooling = field(default_factory=Pooling)
    max_length: int | None = None
    borrowed: bool = False
    """Whether the model belongs to the caller, and must be handed back as it was."""
    labels: tuple[str, ...] | None = None
    """Names of the classes, where the caller gave them; else the configuration's own count."""


def load_source(
    model: Any,
    task: str,
    *,
    pooling: str | None = None,
    normalize: bool | None = None,
    labels: Sequence[str] | None = None,
    max_length: int | None = None,
) -> Source:
    """Load a model id, a folder, or take a (model, tokenizer) tuple; `task` may be "auto".

    `labels` are the classes of a classifier: a head of another size is replaced by a new one.
    """
    if task != "auto":
        task_named(task)
    names = _label_names(labels)
    folder = fspath(model) if isinstance(model, (str, PathLike)) else None
    of_diffusers = is_diffusers(model) if folder is None else is_diffusers_folder(folder)
    if task in TASKS and TASKS[task].kind == "arrays" and not of_diffusers:
        raise ExportError(
            f"task {task!r} is for a network of diffusers or a folder of one, not for {model!s:.80}"
        )
    if isinstance(model, (tuple, list)):
        source = _from_tuple(model, task, names)
    elif of_diffusers:
        part = model if folder is None else read_part(folder, TASKS[task].name if task in TASKS else task)
        source = _from_diffusers(part, task, borrowed=folder is None)
    elif folder is not None:
        source = _from_folder(folder, task, names)
    elif hasattr(model, "tokenizer") and hasattr(model, "encode") and hasattr(model, "__getitem__"):
        source = _from_sentence_transformer(model, task)
    elif hasattr(model, "pretrained_cfg") and hasattr(model, "forward"):
        source = _from_timm(model, task)
    else:
        raise TypeError(
            "expected a model id, a folder, a (model, tokenizer) tuple, a SentenceTransformer, a timm or a "
            f"diffusers model, got {type(model).__name__}. "
            "A bare model has no tokenizer: pass (model, tokenizer)"
        )
    settings = source.pooling
    if pooling is not None:
        settings = replace(settings, modes=tuple(pooling.split("+")))
    if normalize is not None:
        settings = replace(settings, normalize=normalize)
    if names and not source.task.classifies:
        raise ValueError(f"labels are for classifiers, and the task is {source.task.name!r}")
    limit = _shorter(source, max_length)
    return replace(source, pooling=settings, labels=names, max_length=limit)


def _label_names(labels: Sequence[str] | None) -> tuple[str, ...] | None:
    if labels is None:
        return None
    names = tuple(labels)
    if isinstance(labels, str) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"labels must be a list of names, got {labels!r}")
    if not names or len(set(names)) != len(names):
        raise ValueError(f"labels must be different names, at least one: {list(names)}")
    return names


def _shorter(source: Source, max_length: int | None) -> int | None:
    if max_length is None:
        return source.max_length
    if max_length < 1:
        raise ValueError(f"max_length is {max_length}: it must be 1 or more")
    return min(max_length, source.max_length or max_length)


def _from_tuple(
    pair: tuple[Any, ...] | list[Any], task: str, labels: tuple[str, ...] | None = None
) -> Source:
    if len(pair) != 2:
        raise TypeError(f"expected a (model, tokenizer) tuple, got {len(pair)} items")
    model, companion = pair
    if isinstance(model, (str, PathLike)):
        return _from_folder(fspath(model), task, labels, tokenizer=companion)
    if not hasattr(model, "config") or not hasattr(model, "forward"):
        raise TypeError(f"the tuple's first item must be a transformers model, got {type(model).__name__}")
    name = detect(model.config) if task == "auto" else task
    spec = task_for(name, model.config.model_type)
    origin = getattr(model, "name_or_path", "") or type(model).__name__
    if labels and len(labels) != model.config.num_labels:
        raise ValueError(
            f"{len(labels)} labels for a model with {model.config.num_labels} classes: give a folder to get a "
            "new head, or load the model with num_labels"
        )
    if companion is None and _main_input(model) == "input_ids":
        raise ExportError(f"{origin}: the tokenizer is None; pass (model, tokenizer) with the model's own")
    textual = _main_input(model) == "input_ids"
    if textual and not callable(companion):
        raise TypeError(f"the tuple's second item must be a tokenizer, got {type(companion).__name__}")
    tokenizer, processor = _companions(companion, textual=textual, writes=spec.answer in _WRITERS)
    limit = _max_length(tokenizer, model.config)
    return Source(
        model, spec, name, origin, tokenizer=tokenizer, processor=processor, max_length=limit, borrowed=True
    )


def _companions(companion: Any, *, textual: bool, writes: bool) -> tuple[Any, Any]:
    """The tokenizer and the processor of pictures or sound, from either or from a processor that has both."""
    tokenizer = getattr(companion, "tokenizer", None)
    parts = (getattr(companion, name, None) for name in ("image_processor", "feature_extractor"))
    processor = next((part for part in parts if part is not None), None)
    if tokenizer is not None:
        return tokenizer if textual or writes else None, processor
    if textual:
        return companion, None
    # A tokenizer alone, for a model that reads sound or pictures and writes text.
    if writes and hasattr(companion, "convert_ids_to_tokens"):
        return companion, None
    return None, companion


def _from_sentence_transformer(model: Any, task: str) -> Source:
    """A SentenceTransformer object: its transformer, tokenizer, pooling, dense layers and normalization."""
    name = "pooling" if task == "auto" else task
    first = model[0]
    inner = getattr(first, "auto_model", None)
    if inner is None or not hasattr(inner, "config"):
        raise ExportError(
            f"{type(model).__name__}: its first module is no transformer, but {type(first).__name__}"
        )
    # sentence-transformers' own default, where there is no pooling module
    modes, normalize, dense = ("mean",), False, []
    for module in list(model)[1:]:
        kind = type(module).__name__
        if kind == "Pooling":
            modes = _pooling_modes(module.get_config_dict())
        elif kind == "Dense":
            linear = module.linear
            bias = None if linear.bias is None else linear.bias.detach()
            dense.append(Dense(linear.weight.detach(), bias, type(module.activation_function).__name__))
        elif kind == "Normalize":
            normalize = True
        elif kind != "Dropout":
            raise ExportError(f"{type(model).__name__}: its module {kind} has no export yet")
    return Source(
        model=inner,
        task=task_for(name, inner.config.model_type),
        called=name,
        origin=getattr(inner, "name_or_path", "") or type(model).__name__,
        tokenizer=model.tokenizer,
        pooling=Pooling(modes, normalize, tuple(dense)),
        max_length=getattr(model, "max_seq_length", None) or _max_length(model.tokenizer, inner.config),
        borrowed=True,
    )


def _from_folder(
    origin: str, task: str, labels: tuple[str, ...] | None = None, *, tokenizer: Any = None
) -> Source:
    import transformers

    folder = Path(origin)
    local = folder.is_dir()
    if not local and (folder.is_absolute() or origin.startswith((".", "~"))):
        raise ExportError(f"'{origin}': no such folder")
    modules = _modules(origin)
    # Older folders keep the transformer in a folder of its own, newer ones at the top.
    inner = next((m["path"] for m in modules if m["type"].endswith(".Transformer")), "")
    where = fspath(folder / inner) if local and inner else origin
    extra: dict[str, Any] = {"subfolder": inner} if inner and not local else {}
    try:
        config = transformers.AutoConfig.from_pretrained(where, **extra)
    except (OSError, ValueError) as error:
        raise ExportError(f"'{origin}': no usable model configuration ({_first_line(error)})") from error
    name = detect(config, pools=bool(modules)) if task == "auto" else task
    spec = task_for(name, config.model_type)
    if labels:
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: index for index, label in enumerate(labels)}
    model = _load_model(where, spec, config, {**extra, "ignore_mismatched_sizes": bool(labels)})
    textual = _main_input(model) == "input_ids"
    if (tokenizer is None and textual) or (tokenizer is None and spec.answer in _WRITERS):
        tokenizer = _load_tokenizer(where, local, extra)
    settings = _read_json(origin, "sentence_bert_config.json") if modules else {}
    limit = settings.get("max_seq_length") or _max_length(tokenizer, config)
    return Source(
        model,
        spec,
        name,
        origin,
        tokenizer=tokenizer,
        processor=None if spec.kind == "text" else _load_processor(where, extra),
        pooling=_pooling(origin, modules) if modules else Pooling(),
        max_length=limit,
    )


def _load_model(where: str, task: Task, config: Any, extra: Mapping[str, Any]) -> Any:
    import torch
    import transformers

    # A task may have several classes of models (speech to text by CTC or by a decoder): that which knows the type.
    loaders = [
        name
        for name in task.loaders
        if type(config) in getattr(getattr(transformers, name), "_model_mapping", ())
    ]
    name = (loaders or task.loaders)[0]
    loader = getattr(transformers, name)
    try:
        return loader.from_pretrained(
            where, config=config, attn_implementation="eager", dtype=torch.float32, **extra
        )
    except (OSError, ValueError) as error:
        raise ExportError(
            f"'{where}': cannot be loaded for task {task.name!r} with {name} ({_first_line(error)})"
        ) from error


def _load_tokenizer(where: str, local: bool, extra: Mapping[str, Any]) -> Any:
    import transformers

    missing = ExportError(
        f"'{where}': no tokenizer found; save one beside the model (tokenizer.save_pretrained), "
        "or pass (model, tokenizer)"
    )
    # transformers 5 makes an empty tokenizer for a folder that has none, so look for files first.
    if local and not any(next(Path(where).glob(pattern), None) for pattern in _TOKENIZER_FILES):
        raise missing
    try:
        return transformers.AutoTokenizer.from_pretrained(where, **extra)
    except (OSError, ValueError, TypeError) as error:
        raise missing from error


def _load_processor(where: str, extra: Mapping[str, Any]) -> Any:
    """The processor of pictures or sound, or its settings where its class needs a library that is not here."""
    import transformers

    for loader in (transformers.AutoImageProcessor, transformers.AutoFeatureExtractor):
        try:
            return loader.from_pretrained(where, **extra)
        except Exception:  # the other kind, none at all, or a library that it needs
            continue
    try:
        settings, _ = transformers.image_processing_base.ImageProcessingMixin.get_image_processor_dict(
            where, **extra
        )
    except (OSError, ValueError):
        return None
    return settings


def _main_input(model: Any) -> str:
    return getattr(model, "main_input_name", "input_ids")


def _max_length(tokenizer: Any, config: Any) -> int | None:
    # Tokenizers without a limit say 10^30.
    limits = [getattr(tokenizer, "model_max_length", None)]
    limits += [getattr(config, name, None) for name in ("max_position_embeddings", "n_positions")]
    usable = [limit for limit in limits if isinstance(limit, int) and 0 < limit < 1_000_000]
    if not usable:
        return None
    # RoBERTa's positions start after the padding id, so two of its 514 cannot be used.
    offset = 2 if getattr(config, "model_type", "") in {"roberta", "xlm-roberta", "camembert"} else 0
    return (
        min([usable[0], *(limit - offset for limit in usable[1:])]) if len(usable) > 1 else usable[0] - offset
    )


def _modules(origin: str) -> list[dict[str, Any]]:
    entries = _read_json(origin, "modules.json", list)
    return entries if isinstance(entries, list) else []


def _pooling(origin: str, modules: list[dict[str, Any]]) -> Pooling:
    modes: tuple[str, ...] = ("mean",)
    normalize = False
    dense: list[Dense] = []
    for module in modules:
        kind = module["type"].rsplit(".", 1)[-1]
        if kind == "Pooling":
            modes = _pooling_modes(_read_json(origin, f"{module['path']}/config.json"))
        elif kind == "Dense":
            dense.append(_dense(origin, module["path"]))
        elif kind == "Normalize":
            normalize = True
        elif kind not in ("Transformer", "Dropout"):
            raise ExportError(f"'{origin}': modules.json names {module['type']}, which has no export yet")
    return Pooling(modes, normalize, tuple(dense))


def _pooling_modes(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Newer folders name the modes; older ones have a flag for each, in this order of concatenation."""
    named = config.get("pooling_mode")
    if named:
        return (named,) if isinstance(named, str) else tuple(named)
    flags = {
        "pooling_mode_cls_token": "cls",
        "pooling_mode_max_tokens": "max",
        "pooling_mode_mean_tokens": "mean",
        "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
        "pooling_mode_weightedmean_tokens": "weightedmean",
        "pooling_mode_lasttoken": "lasttoken",
    }
    return tuple(mode for flag, mode in flags.items() if config.get(flag)) or ("mean",)


def _dense(origin: str, path: str) -> Dense:
    from safetensors.torch import load_file

    config = _read_json(origin, f"{path}/config.json")
    weights = _cached(origin, f"{path}/model.safetensors")
    if weights is None:
        raise ExportError(f"'{origin}': {path} has no model.safetensors (older .bin files are pickles)")
    tensors = load_file(weights)
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rsplit(".", 1)[-1]
    return Dense(tensors["linear.weight"], tensors.get("linear.bias"), activation)


def _read_json(origin: str, name: str, kind: type = dict) -> Any:
    path = _cached(origin, name)
    if path is None:
        return {}
    try:
        return read_json(path, kind)
    except (ValueError, OSError) as error:
        raise ExportError(f"'{path}': not valid JSON ({error})") from error


def _cached(origin: str, name: str) -> str | None:
    """A file of the model, from its folder or from the hub; None where there is none."""
    if Path(origin).is_dir():
        path = Path(origin) / name
        return fspath(path) if path.is_file() else None
    from transformers.utils.hub import cached_file

    try:
        return cached_file(origin, name, _raise_exceptions_for_missing_entries=False)
    except OSError:
        return None


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]


_FILTERS = {"lanczos": 1, "bilinear": 2, "bicubic": 3, "nearest": 0}


class _Classifier(nn.Module):
    """A timm model that is called as transformers' are; its parameters keep their names."""

    main_input_name = "pixel_values"

    def __init__(self, model: nn.Module, settings: Mapping[str, Any]) -> None:
        super().__init__()
        # Shared rather than wrapped: names in the file are those of the timm model.
        self._parameters, self._buffers = model._parameters, model._buffers
        self._modules = model._modules
        self._non_persistent_buffers_set = model._non_persistent_buffers_set
        self.training = model.training
        self._forward = model.forward
        channels, height, width = settings["input_size"]
        names = settings.get("label_names") or [f"LABEL_{i}" for i in range(int(settings["num_classes"]))]
        self.config = SimpleNamespace(
            model_type="timm",
            image_size=(height, width),
            num_channels=channels,
            num_labels=len(names),
            id2label=dict(enumerate(names)),
            is_encoder_decoder=False,
            problem_type=None,
        )

    def forward(self, pixel_values: Tensor, return_dict: bool = True) -> dict[str, Tensor]:
        return {"logits": self._forward(pixel_values)}


def _from_diffusers(model: Any, task: str, *, borrowed: bool = False) -> Source:
    """A network of diffusers, or half of an autoencoder."""
    part, name = as_part(model, TASKS[task].name if task in TASKS else task)
    spec = task_named(name)
    return Source(model=part, task=spec, called=name, origin=type(model).__name__, borrowed=borrowed)


def _from_timm(model: Any, task: str) -> Source:
    """A timm model as a source of the task image-classification."""
    name = "image-classification" if task in ("auto", "default") else task
    if name != "image-classification":
        raise ExportError(f"a timm model is exported for 'image-classification', not for {task!r}")
    timm_config = model.pretrained_cfg
    settings = dict(timm_config) if isinstance(timm_config, Mapping) else dict(timm_config.to_dict())
    classes = int(getattr(model, "num_classes", 0) or settings.get("num_classes") or 0)
    if not classes:
        raise ExportError("the timm model has no classifier: create it with num_classes=…")
    names = settings.get("label_names")
    settings |= {"num_classes": classes, "label_names": names if names and len(names) == classes else None}
    settings.setdefault("input_size", (3, 224, 224))
    wrapped = _Classifier(model, settings)
    return Source(
        model=wrapped,
        task=task_named(name),
        called=name,
        origin=str(settings.get("architecture") or type(model).__name__),
        processor=_processor(settings),
        borrowed=True,
    )


def _processor(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Resize the shorter side a little larger than the crop, crop the middle, normalize."""
    _, height, width = settings["input_size"]
    # as timm's own evaluation transform computes it
    edge = math.floor(min(height, width) / float(settings.get("crop_pct") or 0.875))
    return {
        "do_resize": True,
        "size": {"shortest_edge": edge},
        "resample": _FILTERS.get(str(settings.get("interpolation") or "bilinear"), 2),
        "do_center_crop": True,
        "crop_size": {"height": height, "width": width},
        "image_mean": list(settings.get("mean") or (0.485, 0.456, 0.406)),
        "image_std": list(settings.get("std") or (0.229, 0.224, 0.225)),
    }
