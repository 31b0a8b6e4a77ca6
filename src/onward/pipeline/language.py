"""Fine-tune a language model with LoRA, from a folder that generates text to another that does.

The base is the inference model itself, with its key-value cache: trained without past tokens, and deployed with
them. It is never changed, and what is quantized stays so. Needs neither torch nor transformers.
"""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from onward.artifacts.generate import Artifacts, build_artifacts
from onward.artifacts.write import write_artifacts
from onward.autodiff.recompute.segments import POINTWISE
from onward.data.conversations import Batches, Example, encode_lines, pack, read_lines
from onward.data.text import read_tokenizer
from onward.errors import DataError, ModelError
from onward.export.huggingface.folder import CARD, MODEL, staged, write_card
from onward.graph.builder import Builder
from onward.graph.cleanup import remove_unused
from onward.graph.dialect.normalize import normalize
from onward.graph.gc_paused import gc_paused
from onward.graph.load import load_model
from onward.graph.passes.late_weights import dequantize_late
from onward.graph.passes.lora import LoRA, adaptable, add_adapters, joined_projections, merge_adapters
from onward.graph.passes.separate_examples import separate_examples
from onward.graph.passes.sizes import rename_sizes, settle_sizes
from onward.graph.passes.widen_halves import compute_in_float32, has_halves
from onward.graph.save import initializer_bytes, write_model
from onward.lora import load_peft, save_peft
from onward.losses.next_token import next_token_loss, without_surrogate
from onward.optim.update_rules import adamw
from onward.pipeline.base_folder import open_language_model
from onward.pipeline.chat import read_template
from onward.pipeline.kept_models import digest_of, find_models, keep_models
from onward.train.artifact_set import ArtifactFiles, find_artifacts
from onward.train.history import History
from onward.train.trainer import Trainer

if TYPE_CHECKING:
    from onward.runtime.devices import DeviceLike

__all__ = [
    "LanguageModel",
    "finetune_language_model",
    "load_adapters",
    "without_past",
    "write_language_artifacts",
]

_PAST = "past_key_values."
# bytes of weights from which on they are written to a file of their own
_MAPPED = 128 * 2**20
# seconds of making the training models from which on they are kept for the next run
_WORTH_KEEPING = 2.0
# how much the loss of examples in one row may differ from theirs alone: rounding
_SAME_LOSS = 1e-3
# types whose queries, keys and values are one product in transformers too
_JOINED_TYPES = ("phi3", "phi3_v", "phi4mm", "phi4_multimodal")
_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "c_attn", "query_key_value", "qkv_proj", "query", "value")


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

    def export(
        self, folder: str | os.PathLike[str], *, quantize: bool | str = False, merge: bool = True
    ) -> Path:
        """Write a folder for `onward.load`: the base with its adapters, added to the weights where these are float.

        >>> result.export("assistant", quantize="int4")  # doctest: +SKIP
        """
        from onward.export.quantize.quantizer import quantize as quantize_model
        from onward.export.quantize.quantizer import scheme_name

        scheme = scheme_name(quantize)
        target = Path(folder)
        if target.resolve() == self.folder.resolve():
            raise ModelError(
                f"'{target}' is the base's own folder: choose another, so that the base stays as it is"
            )
        model = load_model(self.model, apart=True)
        joined = _joined(model, self.card)
        # a ready-made base keeps the runtime's own products with packed weights, which are the faster ones
        if scheme is not None or not any(node.op_type == "MatMulNBits" for node in model.graph):
            model = normalize(model, owned=True)
        named = add_adapters(model, dataclasses.replace(self.lora, dropout=0.0), joined=joined)
        if set(named) != set(self.adapters):
            raise ModelError(f"'{self.folder}' is not the base that these adapters were trained beside")
        for name, value in self.adapters.items():
            _set(model.graph.initializers[name], value, self.folder)
        model = merge_adapters(model) if merge else remove_unused(model)
        with staged(target, single=False) as stage:
            # weights outside of the model are mapped by those who load it
            outside = initializer_bytes(model) >= _MAPPED
            if scheme is None:
                write_model(model, stage / MODEL, external=outside)
            else:
                written = write_model(model, stage / f"float-{MODEL}", external=outside)
                quantize_model(written[0], scheme, path=stage / MODEL)
                for path in written:
                    path.unlink()
            for path in _companions(self.folder):
                shutil.copyfile(path, stage / path.name)
            write_card({**self.card, "quantize": scheme or self.card.get("quantize"), "parity": None}, stage)
        return target

    def save_adapters(self, folder: str | os.PathLike[str]) -> Path:
        """Write the adapters alone, in peft's format: `adapter_config.json` and `adapter_model.safetensors`."""
        return save_peft(
            self.adapters, self.lora, folder, base=str(self.card.get("base") or self.folder.name)
        )


@dataclasses.dataclass(frozen=True)
class _Base:
    file: Path
    folder: Path
    card: Mapping[str, Any]
    inputs: list[str]
    tokenizer: Any
    vocabulary: int


@dataclasses.dataclass(frozen=True)
class _OpenBase(_Base):
    model: ir.Model
    joined: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)


def _companions(folder: Path) -> list[Path]:
    """The tokenizer's files and templates."""
    return [
        path
        for path in sorted(folder.iterdir())
        if path.is_file() and path.suffix in (".json", ".jinja", ".txt", ".model") and path.name != CARD
    ]


def finetune_language_model(
    folder: str | os.PathLike[str],
    data: str | os.PathLike[str] | Sequence[Mapping[str, Any]],
    *,
    lora: LoRA | None = None,
    eval_data: str | os.PathLike[str] | Sequence[Mapping[str, Any]] | None = None,
    hold_out: float = 0.0,
    epochs: int = 1,
    batch_size: int = 1,
    max_length: int = 512,
    packing: bool = False,
    gradient_accumulation_steps: int = 1,
    learning_rate: float = 2e-4,
    schedule: Any = "linear",
    warmup: float = 0.03,
    clip_norm: float = 1.0,
    slices: int = 8,
    recompute: Any = None,
    output_directory: str | os.PathLike[str] | None = None,
    device: DeviceLike = "cpu",
    seed: int = 0,
    progress: bool = True,
    callbacks: Sequence[Any] = (),
) -> LanguageModel:
    """Train LoRA adapters beside a language model's weights on conversations, prompts with answers, or texts.

    `folder` is what `from_transformers(…, "text-generation", folder)` wrote, or a ready-made export with
    `tokenizer.json` and `config.json` beside it; its weights may be float32, int8 or 4-bit, and stay so. `data` is
    a JSON lines file: `{"messages": […]}`, `{"prompt", "completion"}` or `{"text"}`. The loss counts what the model
    is to say: the assistant's turns and the completions. `packing` puts short examples behind
    one another in a row; each attends to itself alone.
    `slices` is in how many parts the vocabulary's scores are computed. Adapters are rank 8 beside the projections
    of attention, unless `lora` says otherwise; its `targets="attention"` means the same ones.

    >>> result = finetune_language_model("smollm", "chat.jsonl", epochs=2)  # doctest: +SKIP
    >>> result.export("assistant", quantize="int8")  # doctest: +SKIP
    """
    base, chosen, made = _prepare(
        Path(folder), lora or LoRA(rank=8, alpha=16.0, targets="attention"),
        slices=slices, recompute=recompute, packing=packing,
    )  # fmt: skip
    options = {"max_length": _longest(base, max_length)}
    examples = _examples(base, data, **options)
    held = _examples(base, eval_data, **options) if eval_data is not None else []
    if not held and hold_out:
        count = max(1, round(hold_out * len(examples)))
        order = np.random.default_rng(seed).permutation(len(examples))
        held = [examples[index] for index in order[:count]]
        examples = [examples[index] for index in order[count:]]
        if not examples:
            raise DataError(f"hold_out={hold_out} leaves nothing of {count} lines to train on")
    if packing:
        examples = pack(examples, options["max_length"])
    pad = base.card["tokenizer"]["pad_id"]
    if type(pad) is not int or not 0 <= pad < base.vocabulary:
        raise ModelError(
            f"'{base.folder}': the padding token {str(pad)[:40]!r} is outside the vocabulary of {base.vocabulary}"
        )
    trainer = Trainer(
        made, learning_rate=learning_rate, schedule=schedule, warmup=warmup,
        gradient_accumulation_steps=gradient_accumulation_steps, clip_norm=clip_norm, seed=seed, progress=progress,
        output_directory=output_directory, callbacks=callbacks,
        device=device,
    )  # fmt: skip
    batches = Batches(examples, batch_size, pad=pad, inputs=base.inputs, seed=seed)
    if packing:
        _require_apart(trainer, batches, examples)
    evaluation = Batches(held, batch_size, pad=pad, inputs=base.inputs, shuffle=False) if held else None
    history = trainer.fit(batches, evaluation, epochs=epochs)
    metrics = {}
    if evaluation is not None:
        loss = float(trainer.evaluate(evaluation)["loss"])
        metrics = {"loss": loss, "perplexity": math.exp(min(loss, 80.0))}
    data_now = trainer.state.to_data()
    adapters = {name: np.asarray(value) for name, value in data_now.trainable.items()}
    return LanguageModel(base.file, base.folder, base.card, chosen, adapters, history, metrics)


def _require_apart(trainer: Trainer, batches: Batches, examples: Sequence[Example]) -> None:
    """Compare the loss of one packed row with those of its examples alone: they must not have seen each other."""
    several = [example for example in examples if len(example.starts) > 1]
    if not several:
        return
    row = min(several, key=lambda example: len(example.ids))

    def loss(example: Example) -> float:
        return float(np.asarray(trainer.module(*batches.batch([example]).values())).reshape(()))

    trainer.module.eval()
    together = loss(row)
    alone = [(loss(part), part.counted()) for part in row.parts() if part.counted()]
    trainer.module.train()
    expected = sum(value * count for value, count in alone) / sum(count for _, count in alone)
    if not math.isclose(together, expected, rel_tol=_SAME_LOSS):
        raise ModelError(
            f"packing changes this model's loss from {expected:.5g} to {together:.5g}: its tokens meet in other ways "
            "than attention, or its positions cannot begin anew",
            hint="train without packing",
        )


@gc_paused()
def _prepare(
    place: Path, lora: LoRA, *, slices: int, recompute: Any, packing: bool
) -> tuple[_Base, LoRA, ArtifactFiles]:
    """The base, the adapters' settings and the training models, which are kept for the next run."""
    folder, file, card = open_language_model(place)
    key = digest_of(file, lora, slices, recompute, packing)
    kept = None if key is None else find_models(key, folder)
    if kept is not None:
        base = _Base(
            file,
            folder,
            card,
            kept.facts["inputs"],
            read_tokenizer(folder / "tokenizer.json"),
            kept.facts["words"],
        )
        return base, dataclasses.replace(lora, targets=kept.facts["targets"]), kept.files
    started = time.monotonic()
    opened, lora, made = _made(place, lora, slices=slices, recompute=recompute, packing=packing)
    files = find_artifacts(made)
    if key is not None and time.monotonic() - started > _WORTH_KEEPING:
        facts = {"inputs": opened.inputs, "words": opened.vocabulary, "targets": lora.targets}
        keep_models(key, files, facts, folder)
    return opened, lora, files


def _made(
    place: Path, lora: LoRA, *, slices: int, recompute: Any, packing: bool
) -> tuple[_OpenBase, LoRA, Artifacts]:
    opened = _open(place)
    if lora.targets == "attention":
        lora = dataclasses.replace(lora, targets=_default_targets(opened.model, opened.joined))
    if packing:
        separate_examples(opened.model)
        names = [value.name or "" for value in opened.model.graph.inputs]
        opened = dataclasses.replace(opened, inputs=names)
    if recompute is None and any(node.op_type == "DequantizeLinear" for node in opened.model.graph):
        recompute = POINTWISE  # whoever quantizes a base is short of memory
    return opened, lora, _artifacts(opened, lora, slices=slices, recompute=recompute)


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

    The files are those of `generate_artifacts`, with the base's weights once in `constants.data`; the arguments are
    those of `finetune_language_model`. A step takes `input_ids`, `attention_mask` and `labels`, and `position_ids`
    where the base does, all [batch, sequence]; labels are the ids again, and -100 where they do not count.

    >>> write_language_artifacts("smollm", "artifacts")  # doctest: +SKIP
    """
    chosen = lora or LoRA(rank=8, alpha=16.0, targets="attention")
    _, _, made = _made(Path(folder), chosen, slices=slices, recompute=recompute, packing=packing)
    assert made.optimizer is not None
    models = {
        "training_model": made.training,
        "eval_model": made.evaluation,
        "optimizer_model": made.optimizer,
    }
    return write_artifacts(Path(artifact_directory), models, {"checkpoint": made.checkpoint})


def _open(place: Path) -> _OpenBase:
    folder, file, card = open_language_model(place)
    tokenizer = read_tokenizer(folder / "tokenizer.json")
    loaded = load_model(file, apart=True)
    joined = _joined(loaded, card)
    if has_halves(loaded):
        compute_in_float32(loaded)
    model = without_past(normalize(loaded, owned=True))
    rename_sizes(model, _same_sizes(model))
    settle_sizes(model)
    names = [value.name or "" for value in model.graph.inputs]
    known = ("input_ids", "attention_mask", "position_ids")
    strange = [name for name in names if name not in known]
    if strange or "input_ids" not in names:
        raise ModelError(
            f"'{folder}': the model also takes {', '.join(strange)}, which training cannot give it"
        )
    logits = next((value for value in model.graph.outputs if value.name == "logits"), None)
    words = None if logits is None or logits.shape is None else logits.shape[-1]
    if not isinstance(words, int):
        raise ModelError(f"'{folder}': the model has no output 'logits' over a known vocabulary")
    return _OpenBase(file, folder, card, names, tokenizer, words, model, joined)


def without_past(model: ir.Model) -> ir.Model:
    """A decoder that begins with its first token, in place: no keys and values come in or go out."""
    graph = model.graph
    op = Builder(graph)
    first = next(iter(graph), None)
    op.before = first
    ids = next((value for value in graph.inputs if value.name == "input_ids"), None)
    if ids is None:
        raise ModelError("the model takes no input_ids")
    batch = op.dim(ids, 0)
    for value in [value for value in graph.inputs if (value.name or "").startswith(_PAST)]:
        assert value.shape is not None
        heads, size = value.shape[1], value.shape[3]
        if not isinstance(heads, int) or not isinstance(size, int) or value.dtype is None:
            raise ModelError(f"the cache '{value.name}' has an unknown number or size of heads")
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
    made = old.producer()
    if made is not None and made.op_type == "Expand" and old.shape[2] == 0:
        ir.convenience.replace_all_uses_with(node.outputs[0], new)


def _joined(model: ir.Model, card: Mapping[str, Any]) -> Mapping[str, Sequence[int]]:
    """Products of queries, keys and values together that are three layers in transformers."""
    return {} if card.get("model_type") in _JOINED_TYPES else joined_projections(model)


def _default_targets(model: ir.Model, joined: Mapping[str, Sequence[int]]) -> list[str]:
    """Patterns for the projections of attention, or every product where none has their names."""
    names = [node.name or "" for node in model.graph] + list(model.graph.initializers)
    if joined:
        names = [name.replace("qkv_proj", "q_proj+k_proj+v_proj") for name in names]
    found = [f"*{target}*" for target in _TARGETS if any(target in name for name in names)]
    return found or ["*"]


def _artifacts(base: _OpenBase, lora: LoRA, *, slices: int, recompute: Any) -> Artifacts:
    model = base.model
    adapters = add_adapters(model, lora, joined=base.joined)
    graph = model.graph
    logits = graph.outputs[0]
    dims = None if logits.shape is None else list(logits.shape)
    labels = ir.Value(
        name="labels",
        type=ir.TensorType(ir.DataType.INT64),
        shape=ir.Shape([None, None] if dims is None else dims[:2]),
    )
    graph.inputs.append(labels)
    op = Builder(graph)
    op.scope = "loss"
    loss = next_token_loss(op, logits, labels, slices=slices)
    graph.outputs.clear()
    graph.outputs.append(loss)
    remove_unused(model)
    # of transformers' trainer: gradients of adapters are small, and a larger epsilon would slow them down
    optimizer = adamw(eps=1e-8, weight_decay=0.0)
    made = build_artifacts(
        model, requires_grad=adapters, optimizer=optimizer, recompute=recompute, normalized=True
    )
    without_surrogate(made.evaluation)
    remove_unused(made.evaluation)
    for part in (made.training, made.evaluation):
        dequantize_late(part)
    return made


def _longest(base: _Base, asked: int) -> int:
    if asked < 2:
        raise ValueError(f"max_length is {asked}: it must be 2 or more")
    limit = base.card["tokenizer"].get("max_length")
    return min(asked, limit) if limit else asked


def _examples(base: _Base, data: Any, *, max_length: int) -> list[Example]:
    where = "data"
    if isinstance(data, (str, os.PathLike)):
        where = f"'{os.fspath(data)}'"
        lines = read_lines(Path(data))
    else:
        lines = list(data)
    render = None
    if any("messages" in line for line in lines):
        try:
            render = read_template(base.folder).render
        except ModelError as error:
            raise DataError(str(error)) from error
    ends = base.card["generation"].get("eos_ids") or [None]
    return encode_lines(
        lines,
        base.tokenizer,
        render,
        end=ends[0],
        max_length=max_length,
        vocabulary=base.vocabulary,
        where=where,
    )


def _set(value: ir.Value, array: np.ndarray, folder: Path) -> None:
    expected = () if value.shape is None else tuple(value.shape.numpy())
    if array.shape != expected:
        raise ModelError(
            f"the adapter '{value.name}' has shape {array.shape}, '{folder}' needs {expected}: is it another base's?"
        )
    value.const_value = ir.tensor(np.ascontiguousarray(array), name=value.name)


def load_adapters(folder: str | os.PathLike[str], adapters: str | os.PathLike[str]) -> LanguageModel:
    """Adapters in peft's format beside the base in `folder`; `export` then writes both as one.

    >>> load_adapters("smollm", "adapters").export("assistant")  # doctest: +SKIP
    """
    path, file, card = open_language_model(folder)
    loaded = load_model(file, apart=True)
    joined = _joined(loaded, card)
    model = normalize(loaded, owned=True)
    lora, values = load_peft(adapters, adaptable(model, joined=joined))
    named = add_adapters(model, lora, joined=joined)
    for name in named:
        _set(model.graph.initializers[name], values[name], path)
    return LanguageModel(file, path, card, lora, values, History(), {})
