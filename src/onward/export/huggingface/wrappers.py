"""Wraps every Hugging Face model with one interface: named tensors in, the task's tensors out.

Looks up the wrapper in the table of tasks and prepares the model for it. Returns a torch module with example inputs
and names for their axes.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from onward.errors import ExportError
from onward.export.huggingface import image_audio
from onward.export.huggingface.diffusion import autoencoder, denoiser
from onward.export.huggingface.encoder_decoder import encoder_decoder
from onward.export.huggingface.generation import generation
from onward.export.huggingface.traceable import TEXTS, TOKENS, Adapter, Traceable, encode, output_of
from onward.export.torch.experts import traceable_experts
from onward.export.torch.replace import Replacement, replaced

if TYPE_CHECKING:
    from onward.export.huggingface.find_model import Pooling, Source
    from onward.export.huggingface.tasks import Axes

_TEXT_INPUTS = ("input_ids", "attention_mask", "token_type_ids")


@contextmanager
def adapt(source: Source, *, training: bool = False) -> Iterator[Traceable]:
    """Yield the traceable form of a loaded model; a borrowed model is handed back as it was."""
    with traceable_masks(), _prepared(source, training=training) as model:
        task = source.task
        if task.wrapper in ("input", "text") and task.loss is None and model.config.is_encoder_decoder:
            model = model.get_encoder()
        main = getattr(model, "main_input_name", "input_ids")
        if task.sizes == "any":
            with _sizes_traced(model):
                yield _WRAPPERS[task.wrapper](source, model)
        elif task.wrapper == "image and text":
            yield image_audio.image_and_text(source, model, training=training)
        elif main == "input_ids" and task.kind not in ("text", "image and text"):
            raise ExportError(f"{source.origin}: takes text, and task {task.name!r} is for {task.kind}s")
        elif task.wrapper == "generation" and training:
            yield _text(source, model)
        else:
            yield _WRAPPERS[task.wrapper](source, model)


@contextmanager
def _prepared(source: Source, *, training: bool) -> Iterator[Any]:
    """The model on the CPU, in float32, with traceable attention, in the right mode; undone afterwards."""
    model = source.model
    tensors = [*model.parameters(), *model.buffers()]
    strange = any(t.device.type != "cpu" or t.dtype in (torch.float16, torch.bfloat16) for t in tensors)
    if strange:
        # A borrowed model must not move or change precision; this costs memory only in that rare case.
        model = copy.deepcopy(model).to(device="cpu", dtype=torch.float32)
    modes = {module: module.training for module in model.modules()}
    # Fused attention is traced to operators that lose its dropout, and some of its forms have no export at all.
    attention = getattr(model.config, "_attn_implementation", None)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()} if training else {}
    try:
        if attention not in (None, "eager"):
            model.set_attn_implementation("eager")
        model.train(training)
        with traceable_experts(model), replaced(*_without_draws(model) if training else ()):
            yield model
    finally:
        if source.borrowed and not strange:
            if attention not in (None, "eager"):
                model.set_attn_implementation(attention)
            for module, mode in modes.items():
                module.training = mode
            # Tracing in training mode runs the model, which moves batch-norm statistics.
            for name, buffer in model.named_buffers():
                if name in buffers:
                    buffer.data.copy_(buffers[name])


class _Stacked(TorchFunctionMode):
    """Makes `torch.tensor` and `torch.as_tensor` of a list of sizes keep them: in a trace they would be constants."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        # torch builds it from Python numbers, which a traced size becomes there.
        if func in (torch.tensor, torch.as_tensor) and args and _has_tensor(args[0]):
            stacked = _stack(args[0])
            return stacked if options.get("dtype") is None else stacked.to(options["dtype"])
        return func(*args, **options)


def _has_tensor(data: Any) -> bool:
    """Whether a list, or a list in it, holds a tensor."""
    if isinstance(data, list | tuple):
        return any(isinstance(item, Tensor) or _has_tensor(item) for item in data)
    return False


def _stack(data: Any) -> Tensor:
    if isinstance(data, list | tuple):
        return torch.stack([_stack(item) for item in data])
    return data if isinstance(data, Tensor) else torch.tensor(data)


@contextmanager
def _sizes_traced(model: Any) -> Iterator[None]:
    """Let a model's `int(…)` of a size leave it a tensor while traced: a number would be the example's."""
    from transformers.utils.generic import torch_int

    # Only in the modules of the models: Python's own int elsewhere has to stay a number.
    names = {type(module).__module__ for module in model.modules()}
    sources = [sys.modules[name] for name in names if name.startswith("transformers.models.")]
    with replaced(*((source, "int", torch_int) for source in sources)), _Stacked():
        yield


def _without_draws(model: Any) -> list[Replacement]:
    """What turns off random numbers that are drawn outside the graph.

    A trace would freeze one draw of it: skipped layers would be missing, and masked frames always the same.
    """
    switches = [(owner, "layerdrop", 0.0) for owner in (model.config, *model.modules())]
    switches += [(model.config, "apply_spec_augment", False), (model.config, "encoder_layerdrop", 0.0)]
    switches += [(model.config, "decoder_layerdrop", 0.0)]
    return [(owner, name, value) for owner, name, value in switches if getattr(owner, name, None)]


def _text(source: Source, model: Any) -> Traceable:
    names = _text_inputs(source, model)
    adapter = Adapter(model, names, lambda batch: ())
    outputs = _outputs(source, adapter)
    # a cache among the outputs would be dead weight in a graph that reads whole texts
    fixed = {"use_cache": False} if "use_cache" in _parameters(model) else {}

    def run(batch: dict[str, Tensor]) -> Sequence[Tensor]:
        return outputs(model(**batch, return_dict=True, **fixed), batch.get("attention_mask"))

    adapter.function = run
    return Traceable(
        module=adapter,
        inputs=dict.fromkeys(names, TOKENS),
        outputs=source.task.outputs,
        example=encode(source, [TEXTS[0], TEXTS[3]], names),
        cases=[encode(source, texts, names) for texts in (TEXTS[:1], TEXTS)],
    )


def _outputs(source: Source, adapter: Adapter) -> Callable[[Any, Tensor | None], Sequence[Tensor]]:
    """From the model's output to the task's tensors."""
    if "embeddings" in source.task.outputs:
        head = pooling_head(source.pooling)
        # The head's own layers, if it has any, are parameters of the export like the model's.
        for name, child in head.named_children():
            adapter.add_module(name, child)
        return lambda answer, mask: (head(output_of(source, answer, "last_hidden_state"), mask),)
    names = tuple(source.task.outputs)
    return lambda answer, mask: tuple(output_of(source, answer, name) for name in names)


def _choices(source: Source, model: Any) -> Traceable:
    """Several texts a row, one score each."""
    names = _text_inputs(source, model)

    def run(batch: dict[str, Tensor]) -> Sequence[Tensor]:
        return (output_of(source, model(**batch, return_dict=True), "logits"),)

    def case(rows: int, choices: int) -> dict[str, Tensor]:
        texts = [TEXTS[index % len(TEXTS)] for index in range(rows * choices)]
        batch = encode(source, texts, names)
        return {name: value.reshape(rows, choices, -1) for name, value in batch.items()}

    axes: Axes = {0: "batch", 1: "choices", 2: "sequence"}
    return Traceable(
        module=Adapter(model, names, run),
        inputs=dict.fromkeys(names, axes),
        outputs=source.task.outputs,
        example=case(2, 3),
        cases=[case(1, 4), case(3, 2)],
    )


def _input(source: Source, model: Any) -> Traceable:
    """Whatever the model takes: text, pictures, sound or a series."""
    main = getattr(model, "main_input_name", "input_ids")
    wrap = {"input_ids": _text, "pixel_values": image_audio.image, "past_values": image_audio.series}.get(
        main, image_audio.audio
    )
    return wrap(source, model)


def _text_inputs(source: Source, model: Any) -> list[str]:
    offered = set(getattr(source.tokenizer, "model_input_names", _TEXT_INPUTS)) | {"attention_mask"}
    return [name for name in _TEXT_INPUTS if name in offered and name in _parameters(model)]


def _parameters(model: Any) -> set[str]:
    return set(inspect.signature(model.forward).parameters)


_WRAPPERS: Mapping[str, Callable[[Source, Any], Traceable]] = {
    "input": _input,
    "text": _input,
    "choices": _choices,
    "generation": generation,
    "encoder-decoder": encoder_decoder,
    "image": _input,
    "masked image": image_audio.masked_image,
    "audio": _input,
    "series": image_audio.series,
    "queries": image_audio.queries,
    "waveform": image_audio.text_to_audio,
    "denoiser": denoiser,
    "autoencoder": autoencoder,
}


_Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@contextmanager
def traceable_masks() -> Iterator[None]:
    """Swap the vmap of `transformers.masking_utils` for broadcasting; nothing to do on version 5."""
    import transformers
    from transformers import masking_utils

    if int(transformers.__version__.split(".")[0]) >= 5:
        yield
        return
    # The second makes plain indexing possible under vmap, with an operator that has no export.
    swaps = {"_vmap_for_bhqkv": _broadcast, "TransformGetItemToIndex": nullcontext}
    with replaced(*((masking_utils, n, swap) for n, swap in swaps.items() if hasattr(masking_utils, n))):
        yield


def _broadcast(mask: _Mask, bh_indices: bool = True) -> _Mask:
    """A mask over whole index vectors from one over single indices."""

    def over(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        queries, keys = query.reshape(-1, 1), key.reshape(1, -1)
        if not bh_indices:
            return mask(batch, head, queries, keys)
        allowed = mask(batch.reshape(-1, 1, 1, 1), head.reshape(1, -1, 1, 1), queries, keys)
        return allowed.expand(batch.shape[0], head.shape[0], query.shape[0], key.shape[0])

    return over


class PoolingHead(nn.Module):
    """Token vectors and their mask to one vector for each row."""

    def __init__(self, modes: tuple[str, ...], layers: list[nn.Module], *, normalize: bool) -> None:
        super().__init__()
        self.modes = modes
        self.normalize = normalize
        self.dense = nn.ModuleList(layers)

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        if mask is None:
            mask = torch.ones(hidden.shape[:2], dtype=torch.int64)
        vectors = [_pool(mode, hidden, mask) for mode in self.modes]
        vector = vectors[0] if len(vectors) == 1 else torch.cat(vectors, dim=1)
        for layer in self.dense:
            vector = layer(vector)
        if self.normalize:
            # Written out: the exporter keeps the size of the last axis through these, not through normalize().
            vector = vector / (vector * vector).sum(1, keepdim=True).sqrt().clamp(min=1e-12)
        return vector


def pooling_head(pooling: Pooling) -> PoolingHead:
    """The module for a folder's settings."""
    layers: list[nn.Module] = []
    for dense in pooling.dense:
        linear = nn.Linear(dense.weight.shape[1], dense.weight.shape[0], bias=dense.bias is not None)
        linear.weight = nn.Parameter(dense.weight.float())
        if dense.bias is not None:
            linear.bias = nn.Parameter(dense.bias.float())
        activation = getattr(nn, dense.activation, None)
        if activation is None:
            raise ExportError(f"unknown activation {dense.activation!r} after the pooling")
        layers += [linear, activation()]
    return PoolingHead(pooling.modes, layers, normalize=pooling.normalize)


def _pool(mode: str, hidden: Tensor, mask: Tensor) -> Tensor:
    weight = mask.unsqueeze(-1).to(hidden.dtype)
    if mode == "cls":
        # The first real token: with padding on the left it is not at 0.
        return _pick(hidden, mask.to(torch.int32).argmax(dim=1))
    if mode == "lasttoken":
        positions = torch.arange(1, 1 + mask.shape[1], dtype=torch.int32)
        return _pick(hidden, (mask.to(torch.int32) * positions).argmax(dim=1))
    if mode == "max":
        # Added rather than chosen: one operator less, and padding is lowest in any case.
        return (hidden + (1.0 - weight) * torch.finfo(hidden.dtype).min).max(dim=1).values
    if mode == "weightedmean":
        weight = weight * torch.cumsum(weight, dim=1)
    total = (hidden * weight).sum(1)
    # a row of padding alone gives zeros, as in sentence-transformers
    count = weight.sum(1).clamp(min=1e-9)
    return total / (count.sqrt() if mode == "mean_sqrt_len_tokens" else count)


def _pick(hidden: Tensor, position: Tensor) -> Tensor:
    index = position.reshape(-1, 1, 1).expand(-1, 1, hidden.shape[-1])
    return hidden.gather(1, index).squeeze(1)
