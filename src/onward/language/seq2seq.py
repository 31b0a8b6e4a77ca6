"""LoRA for an encoder and its decoder: one training graph of both, and adapters merged back into the files of each.

Knows the layouts of folders: Onward's own, where the encoder's file makes the keys and values that the decoder looks
at, and optimum's, where the decoder makes them of the encoder's hidden states, in a file of one or two branches or in
one for the first step and another for those after it. Needs neither torch nor transformers.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from onward.data.text import read_tokenizer
from onward.errors import ModelError
from onward.escape import first_of
from onward.export.huggingface.folder import CARD, staged, write_card
from onward.graph.cleanup import remove_unused
from onward.graph.dialect.normalize import normalize
from onward.graph.gate import read_proto
from onward.graph.gc_paused import gc_paused
from onward.graph.load import load_model
from onward.graph.passes.lora import LoRA, adaptable, add_adapters, merge_adapters
from onward.graph.passes.precision import compute_in_float32, has_halves, multiply_in_float
from onward.graph.passes.sizes import rename_sizes, settle_sizes
from onward.hub.model_folder import open_encoder_decoder
from onward.language.decoding import EncoderDecoder, Options, PublishedDecoder, generate
from onward.language.swappable import FixedInputs, add_adapter_inputs, scaled_values
from onward.language.training_models import (
    Base,
    Recipe,
    artifacts_of,
    companions,
    default_targets,
    open_for_adapters,
    set_adapter,
    without_past,
    write_part,
)
from onward.runtime.devices import Device
from onward.runtime.sessions import session_beside

if TYPE_CHECKING:
    from onward.artifacts.generate import Artifacts
    from onward.train.history import History

ENCODER, DECODER = "encoder", "decoder"
_BRANCH = "use_cache_branch"
# names of what optimum's decoders read, and what gives it
_SOURCES = {"encoder_hidden_states": "last_hidden_state", "encoder_attention_mask": "attention_mask"}
_IDS = ("input_ids", "decoder_input_ids")


@dataclasses.dataclass(frozen=True)
class EncoderDecoderBase(Base):
    """An encoder and its decoder in a folder; `file` is the encoder's, `files` are all by name, the encoder's first."""

    files: Mapping[str, Path]

    @property
    def decoders(self) -> list[Path]:
        """The decoder's files, that of the first step first."""
        return list(self.files.values())[1:]

    def part_of(self, file: Path) -> str:
        """Which of the two parts a file belongs to."""
        return ENCODER if file == self.file else DECODER


def read_encoder_decoder(path: Path) -> EncoderDecoderBase:
    """What the files of a folder say; its graphs are not read, but for the size of the vocabulary."""
    folder, files, card = open_encoder_decoder(path)
    encoder, decoder, *_ = files.values()
    proto = read_proto(decoder, read_data=False, by_reference=True)
    dims = [list(value.type.tensor_type.shape.dim) for value in proto.graph.output if value.name == "logits"]
    words = dims[0][-1].dim_value if dims and dims[0] else 0
    if not (folder / "tokenizer.json").is_file():
        raise ModelError(f"'{folder}': no tokenizer.json beside the model")
    tokenizer = read_tokenizer(folder / "tokenizer.json")
    # some exporters leave the last size open; then ids are checked by the tokenizer's own count alone
    return EncoderDecoderBase(
        encoder, folder, card, tokenizer, words or tokenizer.get_vocab_size(), files=files
    )


# ---- one training graph ------------------------------------------------------------------------------


@gc_paused()
def build_encoder_decoder(path: Path, lora: LoRA, recipe: Recipe) -> tuple[LoRA, Artifacts]:
    """The adapters' settings with their targets by name, and the training models of both parts as one graph."""
    base = read_encoder_decoder(path)
    models = {ENCODER: _open(base.file), DECODER: _open(base.decoders[0])}
    patterns = [lora.targets] if isinstance(lora.targets, str) else list(lora.targets)
    if patterns == ["attention"]:
        patterns = sorted({name for model in models.values() for name in default_targets(model, {})})
    labels = {part: _matching(model, patterns) for part, model in models.items()}
    for pattern in patterns:
        if not any(_fits(name, pattern) for names in labels.values() for name in names):
            known = [name for model in models.values() for name in adaptable(model)]
            raise ModelError(
                f"LoRA: '{pattern}' matches no weight of a product; the model has {first_of(known)}",
                hint="name weights or patterns, such as '*q_proj*'",
            )
    adapters = []
    for part, model in models.items():
        if labels[part]:
            names = add_adapters(model, dataclasses.replace(lora, targets=labels[part]))
            adapters += [f"{part}/{name}" for name in names]
        _name_after(model, part)
    joined = _join(models[ENCODER], models[DECODER])
    return dataclasses.replace(lora, targets=patterns), artifacts_of(
        joined, adapters, base.vocabulary, recipe
    )


def _open(file: Path) -> ir.Model:
    """A part in the dialect, computing in float32, as it is in the first step."""
    model = load_model(file, by_reference=True)
    for value in list(model.graph.inputs):
        if value.name == _BRANCH:
            # normalization takes the branch of a known condition: the one that reads everything at once
            model.graph.inputs.remove(value)
            value.const_value = ir.tensor(np.array([False]), name=_BRANCH)
            model.graph.register_initializer(value)
    multiply_in_float(model)
    if has_halves(model):
        compute_in_float32(model)
    model = normalize(model, owned=True)
    return without_past(model) if any(value.name == "logits" for value in model.graph.outputs) else model


def _fits(name: str, pattern: str) -> bool:
    return name == pattern or fnmatch.fnmatchcase(name, pattern)


def _matching(model: ir.Model, patterns: Sequence[str]) -> list[str]:
    return [name for name in adaptable(model) if any(_fits(name, pattern) for pattern in patterns)]


def _name_after(model: ir.Model, part: str) -> None:
    """Put the part before every name, so that those of both never meet; inputs keep theirs."""
    fixed = {*model.graph.inputs, *model.graph.outputs}
    for graph in model.graphs():
        for value in list(graph.initializers.values()):
            value.name = f"{part}/{value.name}"
        for node in graph:
            for value in node.outputs:
                if value not in fixed:
                    value.name = f"{part}/{value.name}"
    for node in model.graph.all_nodes():
        node.name = f"{part}/{node.name}"


def _join(encoder: ir.Model, decoder: ir.Model) -> ir.Model:
    """One graph that reads what the encoder reads and the decoder's tokens, and gives the scores, in place."""
    graph = encoder.graph
    known = {value.name: value for value in (*graph.inputs, *graph.outputs)}
    tokens = next(value for value in decoder.graph.inputs if value.name in _IDS)
    _share_sizes(graph, decoder.graph, tokens)
    graph.outputs.clear()
    for value in list(decoder.graph.inputs):
        decoder.graph.inputs.remove(value)
        source = known.get(_SOURCES.get(value.name or "", value.name)) if value is not tokens else None
        if source is not None:
            ir.convenience.replace_all_uses_with(value, source)
        elif value is tokens or value.uses():
            if value is not tokens:
                raise ModelError(
                    f"the decoder reads '{value.name}', which the encoder does not give: training cannot feed it"
                )
            graph.inputs.append(value)
    tokens.name = "decoder_input_ids"
    scores = decoder.graph.outputs[0]
    decoder.graph.outputs.clear()
    for value in list(decoder.graph.initializers.values()):
        decoder.graph.initializers.pop(value.name or "")
        graph.register_initializer(value)
    nodes = list(decoder.graph)
    decoder.graph.remove(nodes)
    graph.extend(nodes)
    graph.outputs.append(scores)
    remove_unused(encoder)
    rename_sizes(encoder, {})
    return settle_sizes(encoder)


def _share_sizes(encoder: ir.Graph, decoder: ir.Graph, tokens: ir.Value) -> None:
    """Name the sizes of the inputs alike: exporters name those of each file by themselves."""
    for value in (*encoder.inputs, tokens):
        if value.shape is None:
            continue
        names = ["batch", "target" if value is tokens else "source"]
        # features of sound have sizes of their own after the batch
        names = names if value.shape.rank() == 2 else names[:1]
        for axis, name in enumerate(names):
            if not isinstance(value.shape[axis], int):
                value.shape = ir.Shape([*value.shape[:axis], name, *value.shape[axis + 1 :]])


# ---- what was trained --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class SequenceModel:
    """An encoder and its decoder, and the adapters that were trained beside both."""

    base: EncoderDecoderBase
    lora: LoRA
    adapters: Mapping[str, np.ndarray]
    history: History
    metrics: Mapping[str, float]
    notes: list[str] = dataclasses.field(default_factory=list)

    def export(self, folder: str | os.PathLike[str], *, quantize: bool | str = False) -> Path:
        """Write the folder again, with the adapters added to the weights of each file; `onward.load` reads it.

        >>> result.export("translator")  # doctest: +SKIP
        """
        from onward.export.quantize.quantizer import scheme_name

        scheme, base, target = scheme_name(quantize), self.base, Path(folder)
        if target.resolve() == base.folder.resolve():
            raise ModelError(
                f"'{target}' is the base's own folder: choose another, so that the base stays as it is"
            )
        with staged(target, single=False) as stage:
            for path in companions(base.folder):
                shutil.copyfile(path, stage / path.name)
            for file in base.files.values():
                model = self._merged(file)
                path = stage / file.relative_to(base.folder)
                path.parent.mkdir(exist_ok=True)
                write_part(model, path, scheme)
            if (base.folder / CARD).is_file():
                write_card(
                    {**base.card, "quantize": scheme or base.card.get("quantize"), "parity": None}, stage
                )
        return target

    def _merged(self, file: Path) -> ir.Model:
        model, _, finish = open_for_adapters(file, self.base.card)
        values = own_adapters(model, self.base.part_of(file), self.adapters)
        if not values:
            return model
        labels = sorted({name.rpartition(".")[0] for name in values})
        for name in add_adapters(model, dataclasses.replace(self.lora, targets=labels, dropout=0.0)):
            set_adapter(model.graph.initializers[name], values[name], self.base.folder)
        return remove_unused(model) if finish() else merge_adapters(model)


def own_adapters(model: ir.Model, part: str, adapters: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The adapters of a part that a file of it has weights for: keys and values of the encoder's output are made once,
    in the first step, so that the file of later steps has no weights for them.
    """
    labels = set(adaptable(model))
    own = {
        name.removeprefix(f"{part}/"): value
        for name, value in adapters.items()
        if name.startswith(f"{part}/")
    }
    return {name: value for name, value in own.items() if name.rpartition(".")[0] in labels}


class AdaptedWriter:
    """A base whose adapters are given with each text; its weights are mapped from its own files."""

    def __init__(self, base: EncoderDecoderBase, lora: LoRA, adapters: Mapping[str, np.ndarray]) -> None:
        self._base, self._lora = base, lora
        self._parts = [self._open(file, adapters) for file in base.files.values()]
        self._published = not (base.folder / CARD).is_file()

    @gc_paused()
    def _open(self, file: Path, adapters: Mapping[str, np.ndarray]) -> tuple[Any, dict[str, str]]:
        """A session, and the trained adapters by the names of its inputs."""
        model, _, finish = open_for_adapters(file, self._base.card)
        part = self._base.part_of(file)
        names = own_adapters(model, part, adapters)
        if names:
            labels = sorted({name.rpartition(".")[0] for name in names})
            add_adapter_inputs(model, dataclasses.replace(self._lora, targets=labels))
        finish()
        session = session_beside(ir.to_proto(model), str(file), device=Device("cpu"), options=None)
        return session, {name: f"{part}/{name}" for name in names}

    def write(
        self,
        feeds: Sequence[tuple[Mapping[str, np.ndarray], Sequence[int]]],
        adapters: Mapping[str, np.ndarray],
        *,
        max_new_tokens: int,
    ) -> list[list[int]]:
        """The likeliest text after each encoder's input and the tokens that its decoder begins with."""
        values = scaled_values(adapters, self._lora)
        encoder, *decoders = [
            FixedInputs(session, {own: values[name] for own, name in names.items()})
            for session, names in self._parts
        ]
        decoder = PublishedDecoder(encoder, *decoders) if self._published else decoders[0]
        options = Options.read({}, self._base.card["generation"], max_new_tokens=max_new_tokens)
        texts = []
        for feed, start in feeds:
            *_, new = generate(EncoderDecoder(encoder, decoder, feed, start), options)
            texts.append(new[0])
        return texts
