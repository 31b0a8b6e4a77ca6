"""LoRA: train a few low-rank numbers beside a frozen model, quantized or not.

`apply_lora` adds the adapters to any model, `generate_artifacts(…, lora=LoRA(…))` trains them, `extract_lora`
and `load_lora` move them between states, `merge_lora` adds them to the weights of an exported model.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

import numpy as np
import onnx
import onnx_ir as ir

from onward.checkpoint import CheckpointData, NominalTensor, from_safetensors, load, save, to_safetensors
from onward.errors import OnwardError
from onward.graph.cleanup import remove_unused
from onward.graph.dialect.normalize import normalize
from onward.graph.load import ModelSource, load_model
from onward.graph.passes.lora import LoRA, add_adapters, merge_adapters

__all__ = ["LoRA", "apply_lora", "extract_lora", "load_lora", "merge_lora", "save_lora"]

_ADAPTER = (".lora_a", ".lora_b")


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
    found = {name: v for name, v in {**data.trainable, **data.frozen}.items() if name.endswith(_ADAPTER)}
    if not found:
        raise OnwardError("the state has no adapters: generate its artifacts with lora=LoRA(…)")
    if data.nominal:
        raise OnwardError(
            "The state is nominal: it has no parameter values. Please load the model parameters first."
        )
    return CheckpointData(trainable=found)


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
    known = {**data.trainable, **data.frozen}
    for name, value in _arrays(adapters).items():
        if name not in known:
            raise OnwardError(
                f"the state has no adapter '{name}': were its artifacts made with the same targets?"
            )
        current = known[name]
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
