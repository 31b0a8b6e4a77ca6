"""A language model's base with adapters: written as one folder, as files of adapters, as models that train.

The base is the inference model itself, with its key-value cache: trained without past tokens, and deployed with
them. It is never changed, and what is quantized stays so. Needs neither torch nor transformers.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.artifacts.write import write_artifacts
from onward.errors import ModelError
from onward.export.huggingface.folder import MODEL, staged, write_card
from onward.graph.cleanup import remove_unused
from onward.graph.dialect.normalize import normalize
from onward.graph.gc_paused import gc_paused
from onward.graph.load import load_model
from onward.graph.passes.lora import LoRA, adaptable, add_adapters, merge_adapters
from onward.hub.model_folder import open_language_model
from onward.language.swappable import (
    BASE_DIGEST,
    SUFFIX,
    add_adapter_inputs,
    base_digest,
    scaled_values,
    write_adapter,
)
from onward.language.training_models import (
    Recipe,
    build_training,
    companions,
    find_joined,
    open_for_adapters,
    set_adapter,
    write_part,
)
from onward.lora import load_peft, save_peft
from onward.train.history import History

__all__ = [
    "LanguageModel",
    "load_adapters",
    "write_language_artifacts",
]

# the adapter of a folder in which adapters are apart
ADAPTER = "adapter"


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """A base and what was trained beside it."""

    model: Path
    folder: Path
    card: Mapping[str, Any]
    lora: LoRA
    adapters: Mapping[str, np.ndarray]
    history: History
    metrics: Mapping[str, float]
    notes: list[str] = dataclasses.field(default_factory=list)

    def export(
        self, folder: str | os.PathLike[str], *, quantize: bool | str = False, merge: bool = True
    ) -> Path:
        """Write a folder for `onward.load`: the base with its adapters, added to the weights where these are float.

        With `merge=False` the adapters are a file of their own, and the model takes others in their place.

        >>> result.export("assistant", quantize="int4")  # doctest: +SKIP
        """
        from onward.export.quantize.quantizer import scheme_name

        scheme = scheme_name(quantize)
        target = Path(folder)
        # files of the base that are mapped for training would change under it
        if target.resolve() == self.folder.resolve():
            raise ModelError(
                f"'{target}' is the base's own folder: choose another, so that the base stays as it is"
            )
        model = self._merged(scheme) if merge else self._open(scheme)
        with staged(target, single=False) as stage:
            write_part(model, stage / MODEL, scheme)
            for path in companions(self.folder):
                shutil.copyfile(path, stage / path.name)
            if not merge:
                self.save_adapters(stage / f"{ADAPTER}{SUFFIX}")
            own = {} if merge else {"adapter": ADAPTER}
            card = {**self.card, "quantize": scheme or self.card.get("quantize"), "parity": None, **own}
            write_card(card, stage)
        return target

    def _merged(self, scheme: str | None) -> ir.Model:
        model, joined, finish = open_for_adapters(self.model, self.card, as_published=scheme is None)
        self._require_own(add_adapters(model, dataclasses.replace(self.lora, dropout=0.0), joined=joined))
        for name, value in self.adapters.items():
            set_adapter(model.graph.initializers[name], value, self.folder)
        # integers stay what they are, with the adapters beside them
        return remove_unused(model) if finish() else merge_adapters(model)

    def _open(self, scheme: str | None) -> ir.Model:
        """The base with its adapters as inputs."""
        model, joined, finish = open_for_adapters(self.model, self.card, as_published=scheme is None)
        self._require_own(add_adapter_inputs(model, self.lora, joined=joined))
        finish()
        model.metadata_props[BASE_DIGEST] = str(base_digest(self.model))
        return remove_unused(model)

    def _require_own(self, names: list[str]) -> None:
        if set(names) != set(self.adapters):
            raise ModelError(f"'{self.folder}' is not the base that these adapters were trained beside")

    def save_adapters(self, path: str | os.PathLike[str]) -> Path:
        """Write the adapters alone: a folder in peft's format, or a file for onnxruntime's `LoraAdapter`.

        A path that ends in `.onnx_adapter` is such a file, for models that `export(…, merge=False)` wrote.
        """
        if Path(path).suffix == SUFFIX:
            return write_adapter(path, scaled_values(self.adapters, self.lora), base=base_digest(self.model))
        return save_peft(self.adapters, self.lora, path, base=str(self.card.get("base") or self.folder.name))


@gc_paused()
def write_language_artifacts(
    folder: str | os.PathLike[str],
    artifact_directory: str | os.PathLike[str],
    *,
    lora: LoRA | None = None,
    slices: int = 8,
    recompute: Any = None,
    packing: bool = False,
) -> list[Path]:
    """Write the training models of LoRA beside a language model, to train elsewhere: in a browser, in Node.js.

    The files are those of `generate_artifacts`, with the base's weights once in a file beside them; the arguments are
    those of `onward.finetune`. A step takes `input_ids`, `attention_mask` and `labels`, and `position_ids` where the
    base does, all [batch, sequence]; labels are the ids again, and -100 where they do not count.

    >>> write_language_artifacts("smollm", "artifacts")  # doctest: +SKIP
    """
    chosen = lora or LoRA(rank=8, alpha=16.0, targets="attention")
    recipe = Recipe(slices=slices, recompute=recompute, packing=packing)
    _, artifacts = build_training(Path(folder), chosen, recipe)
    assert artifacts.optimizer is not None
    models = {
        "training_model": artifacts.training,
        "eval_model": artifacts.evaluation,
        "optimizer_model": artifacts.optimizer,
    }
    return write_artifacts(Path(artifact_directory), models, {"checkpoint": artifacts.checkpoint})


def load_adapters(folder: str | os.PathLike[str], adapters: str | os.PathLike[str]) -> LanguageModel:
    """Adapters in peft's format beside the base in `folder`; `export` then writes both as one.

    >>> load_adapters("smollm", "adapters").export("assistant")  # doctest: +SKIP
    """
    path, file, card = open_language_model(folder)
    loaded = load_model(file, by_reference=True)
    joined = find_joined(loaded, card)
    model = normalize(loaded, owned=True)
    lora, values = load_peft(adapters, adaptable(model, joined=joined))
    named = add_adapters(model, lora, joined=joined)
    for name in named:
        set_adapter(model.graph.initializers[name], values[name], path)
    return LanguageModel(file, path, card, lora, values, History(), {})
