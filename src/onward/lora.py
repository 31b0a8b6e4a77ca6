"""LoRA: train a few low-rank numbers beside a frozen model, quantized or not.

`apply_lora` adds the adapters to any model, `generate_artifacts(…, lora=LoRA(…))` trains them, `extract_lora`
and `load_lora` move them between states, `save_peft` and `load_peft` write and read peft's format, `merge_lora`
adds them to the weights of an exported model.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import onnx
import onnx_ir as ir

from onward.checkpoint.content import CheckpointData, NominalTensor
from onward.checkpoint.interchange import from_safetensors, to_safetensors
from onward.checkpoint.store import load, save
from onward.errors import OnwardError
from onward.files import write_set
from onward.graph.cleanup import remove_unused
from onward.graph.dialect.normalize import normalize
from onward.graph.load import ModelSource, load_model
from onward.graph.passes.lora import LoRA, add_adapters, merge_adapters
from onward.reading import read_json

__all__ = [
    "LoRA",
    "apply_lora",
    "extract_lora",
    "load_lora",
    "load_peft",
    "merge_lora",
    "save_lora",
    "save_peft",
]

_TRAIN_SOME = "train some with: onward artifacts model.onnx --lora 8"

_ADAPTER = (".lora_a", ".lora_b")
# peft names an adapter after its module, Onward after the weight that it stands beside
_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_MODULE = re.compile(r"(\.weight)?(\.transposed)?(_quantized|_Q\d+\w*|_as_\dbit)*$")
_PARTS = {"lora_A": ".lora_a", "lora_B": ".lora_b"}


class _State(Protocol):
    """What is needed of an `onward.api.CheckpointState`."""

    def to_data(self, *, include_optimizer_state: bool = False) -> CheckpointData: ...

    def _assign(self, name: str, value: np.ndarray) -> None: ...


def apply_lora(model: ModelSource, lora: LoRA) -> onnx.ModelProto:
    """A model with adapters beside the targeted weights, which computes what it did before.

    >>> import onnx.parser
    >>> model = onnx.parser.parse_model('''<ir_version: 10, opset_import: ["": 21]>
    ...     net (float[N, 2] x) => (float[N, 1] y) <float[2, 1] w = {1.0, 2.0}> { y = MatMul(x, w) }''')
    >>> [tensor.name for tensor in apply_lora(model, LoRA(rank=1)).graph.initializer][:3]
    ['w', 'w.lora_a', 'w.lora_b']
    """
    prepared = normalize(model)
    add_adapters(prepared, lora)
    return ir.to_proto(remove_unused(prepared))


def merge_lora(model: ModelSource, *, dequantize: bool = False) -> onnx.ModelProto:
    """A model whose adapters are added to its weights; take an exported one, with the parameters inside.

    Adapters of quantized weights stay separate, unless `dequantize` makes these weights float.
    """
    return ir.to_proto(merge_adapters(load_model(model), dequantize=dequantize))


def extract_lora(state: _State | CheckpointData) -> CheckpointData:
    """The adapters of a state alone, as trainable parameters."""
    data = state if isinstance(state, CheckpointData) else state.to_data()
    adapters = {name: v for name, v in {**data.trainable, **data.frozen}.items() if name.endswith(_ADAPTER)}
    if not adapters:
        raise OnwardError(
            "the state has no adapters: generate its artifacts with lora=LoRA(…)", hint=_TRAIN_SOME
        )
    data.require_values()
    return CheckpointData(trainable=adapters)


def _arrays(adapters: CheckpointData) -> dict[str, np.ndarray]:
    return {name: value for name, value in adapters.trainable.items() if isinstance(value, np.ndarray)}


def save_lora(state: _State | CheckpointData, path: str | os.PathLike[str]) -> None:
    """Write the adapters alone: `.safetensors` by that suffix, else a checkpoint."""
    adapters = extract_lora(state)
    if Path(path).suffix == ".safetensors":
        to_safetensors(adapters, path)
    else:
        save(adapters, path)


def load_lora(state: _State | CheckpointData, source: CheckpointData | str | os.PathLike[str]) -> list[str]:
    """Set a state's adapters to saved ones; returns their names. All are checked before any is set."""
    if isinstance(source, CheckpointData):
        adapters = extract_lora(source)
    elif Path(source).suffix == ".safetensors":
        adapters = extract_lora(from_safetensors(source))
    else:
        adapters = extract_lora(load(source))
    data = state if isinstance(state, CheckpointData) else state.to_data()
    parameters = {**data.trainable, **data.frozen}
    for name, value in _arrays(adapters).items():
        if name not in parameters:
            raise OnwardError(
                f"the state has no adapter '{name}': were its artifacts made with the same targets?"
            )
        current = parameters[name]
        # the first that differs: ranks differ everywhere at once
        if not isinstance(current, NominalTensor) and current.shape != value.shape:
            raise OnwardError(
                f"adapter '{name}' has shape {value.shape}, the state's {current.shape}: is the rank the same?"
            )
    for name, value in _arrays(adapters).items():
        if isinstance(state, CheckpointData):
            group = state.trainable if name in state.trainable else state.frozen
            group[name] = value
        else:
            state._assign(name, value)
    return list(adapters.trainable)


def _module(label: str) -> str:
    """The name of a weight's module in transformers."""
    module = _MODULE.sub("", label)
    if module.endswith(".MatMul"):  # model builders name a weight after its node, and attention shorter
        module = module.removesuffix(".MatMul").replace(".attn.", ".self_attn.")
    return module


def save_peft(
    adapters: Mapping[str, np.ndarray], lora: LoRA, folder: str | os.PathLike[str], *, base: str = ""
) -> Path:
    """Write adapters as peft's `PeftModel.from_pretrained` reads them; returns the folder."""
    from safetensors.numpy import save_file

    # safetensors is an extra; adapters in our own format need it not
    tensors, modules = {}, set()
    for name, value in adapters.items():
        label, _, part = name.rpartition(".")
        module = _module(label)
        modules.add(module)
        tensors[f"{_PREFIX}{module}.{'lora_A' if part == 'lora_a' else 'lora_B'}.weight"] = (
            np.ascontiguousarray(value)
        )
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted(modules),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    target = Path(folder)
    with write_set(target) as staging:
        save_file(tensors, staging / _TENSORS)
        (staging / _CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return target


def load_peft(folder: str | os.PathLike[str], weights: Sequence[str]) -> tuple[LoRA, dict[str, np.ndarray]]:
    """The settings and values of adapters that peft wrote, under the names of a model's `weights`.

    All modules must be among the weights: adapters of another base are an error that names the first missing.
    """
    path = Path(folder)
    for name in (_CONFIG, _TENSORS):
        if not (path / name).is_file():
            raise OnwardError(f"'{path}': no {name}; peft's save_pretrained writes both")
    try:
        settings = read_json(path / _CONFIG)
        # no dropout: it is a matter of training, and the file says nothing of that
        lora = LoRA(rank=int(settings["r"]), alpha=float(settings["lora_alpha"]), dropout=0.0)
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise OnwardError(f"'{path / _CONFIG}': no LoRA settings of peft ({error})") from error
    if settings.get("use_rslora"):  # scales by alpha / √rank, ours by alpha / rank
        lora = dataclasses.replace(lora, alpha=lora.alpha * lora.rank**0.5)
    unsupported = [
        name
        for name in ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save")
        if settings.get(name)
    ]
    if unsupported:
        raise OnwardError(f"'{path / _CONFIG}': {', '.join(unsupported)} has no form here; plain LoRA only")
    labels = {_module(label): label for label in weights}
    values: dict[str, np.ndarray] = {}
    for key, value in from_safetensors(path / _TENSORS).parameters().items():
        if key.endswith(".base_layer.weight"):  # peft adds the base's own output layer where it is adapted
            continue
        module, _, suffix = key.removeprefix(_PREFIX).partition(".lora_")
        part = _PARTS.get(f"lora_{suffix.partition('.')[0]}")
        if part is None:
            raise OnwardError(f"'{path}': '{key}' is no adapter of LoRA")
        if module not in labels:
            raise OnwardError(
                f"'{path}': adapters of '{module}', which this base does not have: is it another base's?"
            )
        # a weight that was quantized after the adapter was trained has another name, and is the same module
        label = re.sub(r"(_quantized|_as_\dbit|_(DQ_)?[Qq]\d+\w*)+$", "", labels[module])
        matrix = np.asarray(value, np.float32)
        if matrix.ndim != 2 or matrix.shape[0 if part == ".lora_a" else 1] != lora.rank:
            raise OnwardError(
                f"'{path}': '{key}' has shape {matrix.shape}, and {_CONFIG} says rank {lora.rank}: are both of one "
                "adapter?"
            )
        values[f"{label}{part}"] = matrix
    targets = sorted({name.rpartition(".")[0] for name in values})
    # half an adapter would load, and multiply by nothing
    for label in targets:
        for part in _ADAPTER:
            if f"{label}{part}" not in values:
                raise OnwardError(
                    f"'{path}': the adapter of '{_module(label)}' has only one of its two matrices"
                )
    if not targets:
        raise OnwardError(f"'{path / _TENSORS}' has no adapters")
    return dataclasses.replace(lora, targets=targets), values
