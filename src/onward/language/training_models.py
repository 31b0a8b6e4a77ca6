"""The training models of LoRA beside a language model: the base without its cache, adapters, the loss in slices.

Also how a base is opened and written for inference, with adapters in it.

Knows the base's graph and folder; nothing of data. What takes long to make is kept for the next run.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from onward import contract
from onward.artifacts.generate import Artifacts, build_artifacts
from onward.autodiff.recompute.segments import POINTWISE
from onward.data.text import read_tokenizer
from onward.errors import ModelError
from onward.export.huggingface.folder import CARD
from onward.graph.builder import Builder
from onward.graph.cleanup import remove_unused
from onward.graph.dialect.normalize import normalize
from onward.graph.gate import read_proto
from onward.graph.gc_paused import gc_paused
from onward.graph.load import load_model
from onward.graph.passes.lora import LoRA, add_adapters, joined_projections
from onward.graph.passes.precision import (
    compute_in_float32,
    dequantize_per_product,
    has_halves,
    multiply_in_float,
    multiply_in_integers,
)
from onward.graph.passes.separate_examples import separate_examples
from onward.graph.passes.sizes import rename_sizes, settle_sizes
from onward.graph.save import initializer_bytes, write_model
from onward.hub.model_folder import open_language_model
from onward.language.kept_models import digest_of, find_models, keep_models
from onward.losses.next_token import IGNORED, next_token_loss, without_surrogate
from onward.losses.preferences import dpo_loss, orpo_loss
from onward.optim.update_rules import adamw
from onward.train.artifact_set import ArtifactFiles, find_artifacts

_PAST = "past_key_values."
# bytes of weights from which on they are written to a file of their own
_MAPPED = 128 * 2**20
# seconds of making the training models from which on they are kept for the next run
_WORTH_KEEPING = 2.0
# types whose queries, keys and values are one product in transformers too
_JOINED_TYPES = ("phi3", "phi3_v", "phi4mm", "phi4_multimodal")
_TARGETS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "c_attn", "query_key_value", "qkv_proj", "query", "value"),
    *("SelfAttention", "EncDecAttention"),  # T5's, whose projections have one letter
)


@dataclasses.dataclass(frozen=True)
class Base:
    """What is known of a base without its graph."""

    file: Path
    folder: Path
    card: Mapping[str, Any]
    tokenizer: Any
    vocabulary: int

    @property
    def pad(self) -> int:
        """The token that fills rows."""
        pad = self.card["tokenizer"]["pad_id"]
        if type(pad) is not int or not 0 <= pad < self.vocabulary:
            raise ModelError(
                f"'{self.folder}': the padding token {str(pad)[:40]!r} is outside the vocabulary of "
                f"{self.vocabulary}"
            )
        return pad


@dataclasses.dataclass(frozen=True)
class OpenBase(Base):
    """A base with its graph, which training changes."""

    model: ir.Model
    joined: Mapping[str, Sequence[int]]
    inputs: Sequence[str]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How the training models of a base are made: the loss, the parts of the vocabulary, and what saves memory."""

    loss: Literal["next-token", "dpo", "orpo"] = "next-token"
    beta: float = 0.1
    # scores of all words at once are the largest tensor of a small model: 256 tokens of 49,152 words take 50 MB
    slices: int = 8
    recompute: Any = None
    packing: bool = False


@gc_paused()
def prepare_training(path: Path, lora: LoRA, recipe: Recipe) -> tuple[LoRA, ArtifactFiles]:
    """The adapters' settings and the training models, which are kept for the next run."""
    folder, file, _ = open_language_model(path)
    key = digest_of(file, lora, recipe)
    if key is not None and (earlier := find_models(key, folder)) is not None:
        files, facts = earlier
        return dataclasses.replace(lora, targets=facts["targets"]), files
    started = time.monotonic()
    lora, artifacts = build_training(path, lora, recipe)
    files = find_artifacts(artifacts)
    if key is not None and time.monotonic() - started > _WORTH_KEEPING:
        keep_models(key, files, {"targets": lora.targets}, folder)
    return lora, files


def build_training(path: Path, lora: LoRA, recipe: Recipe) -> tuple[LoRA, Artifacts]:
    """The adapters' settings with their targets by name, and the training models."""
    base = open_base(path)
    if lora.targets == "attention":
        lora = dataclasses.replace(lora, targets=default_targets(base.model, base.joined))
    if recipe.packing:
        separate_examples(base.model)
    if recipe.recompute is None and any(node.op_type == "DequantizeLinear" for node in base.model.graph):
        recipe = dataclasses.replace(recipe, recompute=POINTWISE)  # whoever quantizes is short of memory
    return lora, build_language_artifacts(base, lora, recipe)


def read_base(path: Path) -> Base:
    """What the files of a base's folder say; its graph is not read, but for the size of the vocabulary."""
    folder, file, card = open_language_model(path)
    proto = read_proto(file, read_data=False, by_reference=True)
    dims = [list(value.type.tensor_type.shape.dim) for value in proto.graph.output if value.name == "logits"]
    words = dims[0][-1].dim_value if dims and dims[0] else 0
    if not words:
        raise ModelError(f"'{folder}': the model has no output 'logits' over a known vocabulary")
    return Base(file, folder, card, read_tokenizer(folder / "tokenizer.json"), words)


def open_base(path: Path) -> OpenBase:
    """A base with its graph, without its cache."""
    base = read_base(path)
    loaded = load_model(base.file, by_reference=True)
    joined = find_joined(loaded, base.card)
    multiply_in_float(loaded)
    if has_halves(loaded):
        compute_in_float32(loaded)
    # sizes of past tokens are symbols of their own: without a cache they are those of the tokens
    model = without_past(normalize(loaded, owned=True))
    rename_sizes(model, _same_sizes(model))
    settle_sizes(model)
    names = [value.name or "" for value in model.graph.inputs]
    known = ("input_ids", "attention_mask", "position_ids")
    strange = [name for name in names if name not in known]
    if strange or "input_ids" not in names:
        raise ModelError(
            f"'{base.folder}': the model also takes {', '.join(strange)}, which training cannot give it"
        )
    return OpenBase(**vars(base), model=model, joined=joined, inputs=names)


def without_past(model: ir.Model) -> ir.Model:
    """A decoder that begins with its first token, in place: no keys and values come in or go out."""
    graph = model.graph
    op = Builder(graph)
    first = next(iter(graph), None)
    op.before = first
    ids = next((v for v in graph.inputs if v.name in ("input_ids", "decoder_input_ids")), None)
    if ids is None:
        raise ModelError("the model takes no input_ids")
    batch = op.dim(ids, 0)
    for value in [value for value in graph.inputs if (value.name or "").startswith(_PAST)]:
        assert value.shape is not None
        heads, size = value.shape[1], value.shape[3]
        if not isinstance(heads, int) or not isinstance(size, int) or value.dtype is None:
            raise ModelError(f"the cache '{value.name}' has an unknown number or size of heads")
        # a Shape or Concat of the past stays valid with a past of no tokens; most fold away below
        nothing = op.constant(np.zeros((1, heads, 0, size), value.dtype.numpy()), name="no_past")
        shape = op.Concat(batch, np.asarray([heads, 0, size], np.int64), axis=0)
        ir.convenience.replace_all_uses_with(value, op.Expand(nothing, shape))
        graph.inputs.remove(value)
    kept = [value for value in graph.outputs if value.name == "logits"]
    graph.outputs.clear()
    graph.outputs.extend(kept)
    for node in list(graph):
        _drop_empty(node)
    return remove_unused(model)


def _same_sizes(model: ir.Model) -> dict[str, str]:
    """Symbols of the inputs that are the same number without a cache: all are as long as the tokens."""
    shapes = {value.name: value.shape for value in model.graph.inputs}
    ids, names = shapes.get("input_ids"), {}
    for shape in shapes.values():
        if ids is None or shape is None or len(shape) != len(ids):
            continue
        for mine, other in zip(ids, shape):
            if (
                isinstance(mine, ir.SymbolicDim)
                and isinstance(other, ir.SymbolicDim)
                and mine.value
                and other.value
            ):
                names[other.value] = mine.value
    return names


def _drop_empty(node: ir.Node) -> None:
    """Concatenation with the empty cache is what is left of it."""
    if node.op_type != "Concat" or len(node.inputs) != 2:
        return
    old, new = node.inputs
    if old is None or new is None or old.shape is None or old.shape.rank() != 4:
        return
    producer = old.producer()
    if producer is not None and producer.op_type == "Expand" and old.shape[2] == 0:
        ir.convenience.replace_all_uses_with(node.outputs[0], new)


def open_for_adapters(
    file: Path, card: Mapping[str, Any], *, as_published: bool = True
) -> tuple[ir.Model, Mapping[str, Sequence[int]], Callable[[], bool]]:
    """A base for inference in which adapters can stand, the parts of its joint projections, and how to finish it.

    A ready-made base keeps the runtime's own products with packed weights, which are the faster ones: call the last
    once the adapters are in, and it says whether there are such that nothing can be merged into.
    """
    # by reference: weights of gigabytes stay in their file until they are written or mapped
    model = load_model(file, by_reference=True)
    joined = find_joined(model, card)
    packed = any(node.op_type in ("MatMulNBits", "MatMulInteger") for node in model.graph)
    twins = multiply_in_float(model)
    if not (packed and as_published):
        return normalize(model, owned=True), joined, lambda: False

    def finish() -> bool:
        multiply_in_integers(twins)
        return bool(twins)

    return model, joined, finish


def set_adapter(value: ir.Value, array: np.ndarray, folder: Path) -> None:
    """Give an adapter of a model its trained values."""
    expected = () if value.shape is None else tuple(value.shape.numpy())
    if array.shape != expected:
        raise ModelError(
            f"the adapter '{value.name}' has shape {array.shape}, '{folder}' needs {expected}: is it another base's?"
        )
    value.const_value = ir.tensor(np.ascontiguousarray(array), name=value.name)


def companions(folder: Path) -> list[Path]:
    """The tokenizer's files and templates."""
    return [
        path
        for path in sorted(folder.iterdir())
        if path.is_file() and path.suffix in (".json", ".jinja", ".txt", ".model") and path.name != CARD
    ]


def write_part(model: ir.Model, path: Path, scheme: str | None) -> None:
    """Write a model to deploy, quantized where a scheme is named."""
    from onward.export.quantize.quantizer import quantize

    # weights outside of the model are mapped by those who load it
    outside = initializer_bytes(model) >= _MAPPED
    if scheme is None:
        write_model(model, path, external=outside)
        return
    written = write_model(model, path.with_name(f"float-{path.name}"), external=outside)
    quantize(written[0], scheme, path=path)
    for file in written:
        file.unlink()


def find_joined(model: ir.Model, card: Mapping[str, Any]) -> Mapping[str, Sequence[int]]:
    """Products of queries, keys and values together that are three layers in transformers."""
    return {} if card.get("model_type") in _JOINED_TYPES else joined_projections(model)


def default_targets(model: ir.Model, joined: Mapping[str, Sequence[int]]) -> list[str]:
    """Patterns for the projections of attention, or every product where none has their names."""
    names = [node.name or "" for node in model.graph] + list(model.graph.initializers)
    if joined:
        names = [name.replace("qkv_proj", "q_proj+k_proj+v_proj") for name in names]
    found = [f"*{target}*" for target in _TARGETS if any(target in name for name in names)]
    return found or ["*"]


def build_language_artifacts(base: OpenBase, lora: LoRA, recipe: Recipe) -> Artifacts:
    """The training models of a base with adapters; its graph becomes part of them."""
    adapters = add_adapters(base.model, lora, joined=base.joined)
    return artifacts_of(base.model, adapters, base.vocabulary, recipe)


def artifacts_of(model: ir.Model, adapters: Sequence[str], vocabulary: int, recipe: Recipe) -> Artifacts:
    """The training models of a graph that gives scores and has adapters; it becomes part of them."""
    logits = model.graph.outputs[0]
    dims = [None, None] if logits.shape is None else list(logits.shape)[:2]
    loss, outputs = _add_loss(model, logits, dims, recipe)
    model.graph.outputs.clear()
    model.graph.outputs.extend([loss, *outputs])
    remove_unused(model)
    # of transformers' trainer: gradients of adapters are small, and a larger epsilon would slow them down
    optimizer = adamw(eps=1e-8, weight_decay=0.0)
    artifacts = build_artifacts(
        model, requires_grad=list(adapters), optimizer=optimizer, recompute=recipe.recompute, normalized=True,
        additional_output_names=[value.name or "" for value in outputs],
    )  # fmt: skip
    without_surrogate(artifacts.evaluation)
    remove_unused(artifacts.evaluation)
    for part in (artifacts.training, artifacts.evaluation):
        dequantize_per_product(part)
        if not outputs:  # a mean over tokens: batches count by how many they have
            counted = {"labels": {"classes": vocabulary, "ignore_index": IGNORED}}
            part.metadata_props[contract.LABELS] = json.dumps(counted)
    return artifacts


def _add_loss(
    model: ir.Model, logits: ir.Value, dims: Sequence[Any], recipe: Recipe
) -> tuple[ir.Value, list[ir.Value]]:
    """The loss of a recipe, and what evaluation is to tell beside it."""
    op = Builder(model.graph)
    op.scope = "loss"

    def take(name: str, kind: ir.DataType, shape: Sequence[Any]) -> ir.Value:
        value = ir.Value(name=name, type=ir.TensorType(kind), shape=ir.Shape(shape))
        model.graph.inputs.append(value)
        return value

    labels = take("labels", ir.DataType.INT64, dims)
    if recipe.loss == "next-token":
        return next_token_loss(op, logits, labels, slices=recipe.slices), []
    settings: Any = {"beta": recipe.beta, "slices": recipe.slices}
    if recipe.loss == "dpo":
        reference = take("reference", ir.DataType.FLOAT, dims[:1])
        loss, rows = dpo_loss(op, logits, labels, reference, **settings)
    else:
        answers = take("answers", ir.DataType.INT64, dims)
        loss, rows = orpo_loss(op, logits, labels, answers, **settings)
    return loss, [rows]
