"""Give every Hugging Face model the same face: named tensors in, the task's tensors out, nothing else.

Knows how transformers models are called, how vectors are pooled and how a key-value cache is passed. Knows
nothing of ONNX: what it returns is a torch module with example inputs and names for their axes.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from onward.errors import ExportError
from onward.export.huggingface.find_model import Source
from onward.export.huggingface.image_text import image_and_text
from onward.export.huggingface.masks import traceable_masks
from onward.export.huggingface.pooling import pooling_head
from onward.export.huggingface.tasks import Axes
from onward.export.huggingface.traceable import TEXTS, TOKENS, Adapter, Traceable, encode, image_size, setting

__all__ = ["adapt"]

_TEXT_INPUTS = ("input_ids", "attention_mask", "token_type_ids")


@contextmanager
def adapt(source: Source, *, training: bool = False) -> Iterator[Traceable]:
    """Yield the traceable form of a loaded model; a borrowed model is handed back as it was."""
    with traceable_masks(), _prepared(source, training=training) as model:
        task = source.task.name
        if task in ("default", "feature-extraction", "pooling") and model.config.is_encoder_decoder:
            model = model.get_encoder()
        main = getattr(model, "main_input_name", "input_ids")
        if source.task.kind == "image and text":
            yield image_and_text(source, model, training=training)
        elif main == "pixel_values":
            yield _image(source, model)
        elif main != "input_ids":
            yield _audio(source, model, main)
        elif source.task.kind != "text":
            raise ExportError(f"{source.origin}: takes text, and task {task!r} is for {source.task.kind}s")
        elif task == "text-generation" and not training:
            yield _generation(source, model)
        elif task == "text2text":
            yield _text2text(source, model)
        else:
            yield _text(source, model)


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
    attention = getattr(model.config, "_attn_implementation", None)
    frozen = _still(model) if training else []
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()} if training else {}
    try:
        if attention not in (None, "eager"):
            model.set_attn_implementation("eager")
        model.train(training)
        yield model
    finally:
        for owner, name, value in frozen:
            setattr(owner, name, value)
        if source.borrowed and not strange:
            if attention not in (None, "eager"):
                model.set_attn_implementation(attention)
            for module, mode in modes.items():
                module.training = mode
            # Tracing in training mode runs the model, which moves batch-norm statistics.
            for name, buffer in model.named_buffers():
                if name in buffers:
                    buffer.data.copy_(buffers[name])


def _still(model: Any) -> list[tuple[Any, str, Any]]:
    """Turn off what draws random numbers outside the graph; what was set, to set it again.

    A trace would freeze one draw of it: skipped layers would be missing, and masked frames always the same.
    """
    found = [(owner, "layerdrop", 0.0) for owner in (model.config, *model.modules())]
    found += [(model.config, "apply_spec_augment", False), (model.config, "encoder_layerdrop", 0.0)]
    found += [(model.config, "decoder_layerdrop", 0.0)]
    present = [(owner, name, value) for owner, name, value in found if getattr(owner, name, None)]
    undo = [(owner, name, getattr(owner, name)) for owner, name, _ in present]
    for owner, name, value in present:
        setattr(owner, name, value)
    return undo


def _text(source: Source, model: Any) -> Traceable:
    offered = set(getattr(source.tokenizer, "model_input_names", _TEXT_INPUTS)) | {"attention_mask"}
    names = [name for name in _TEXT_INPUTS if name in offered and name in _parameters(model)]
    adapter = Adapter(model, names, lambda batch: ())
    outputs = _outputs(source, adapter)
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
    """From the model's answer to the task's tensors."""
    if source.task.name == "pooling":
        head = pooling_head(source.pooling)
        # The head's own layers, if it has any, are parameters of the export like the model's.
        for name, child in head.named_children():
            adapter.add_module(name, child)
        return lambda answer, mask: (head(_get(source, answer, "last_hidden_state"), mask),)
    names = tuple(source.task.outputs)
    return lambda answer, mask: tuple(_get(source, answer, name) for name in names)


def _get(source: Source, answer: Any, name: str) -> Tensor:
    aliases = {"logits": ("logits", "prediction_logits")}
    for key in aliases.get(name, (name,)):
        if key in answer:
            return answer[key]
    raise ExportError(
        f"{source.origin}: {type(source.model).__name__} gives no {name!r}, which task {source.task.name!r} "
        f"needs; it gives {', '.join(answer.keys())}"
    )


def _generation(source: Source, model: Any) -> Traceable:
    from transformers import DynamicCache

    parameters = _parameters(model)
    probe = encode(source, ["Hello there, friend"], ("input_ids", "attention_mask"))
    with torch.no_grad():
        cache = model(**probe, use_cache=True, return_dict=True).get("past_key_values")
    layers = getattr(cache, "layers", None)
    if not layers or not all(isinstance(getattr(layer, "keys", None), Tensor) for layer in layers):
        raise ExportError(
            f"{source.origin}: {type(model).__name__} keeps no key-value cache that can be exported"
        )
    shapes = [tuple(part.shape) for layer in layers for part in (layer.keys, layer.values)]
    slots = [f"{index}.{part}" for index in range(len(layers)) for part in ("key", "value")]
    past = [f"past_key_values.{slot}" for slot in slots]

    def run(batch: dict[str, Tensor]) -> Sequence[Tensor]:
        filled = DynamicCache()
        for index in range(len(layers)):
            filled.update(batch[past[2 * index]], batch[past[2 * index + 1]], index)
        ids, mask = batch["input_ids"], batch["attention_mask"]
        extra: dict[str, Any] = {}
        if "position_ids" in parameters:
            # From the mask and not from the cache's length, which tracing would freeze; right with padding.
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            extra["position_ids"] = positions[:, -ids.shape[1] :]
        answer = model(
            input_ids=ids,
            attention_mask=mask,
            past_key_values=filled,
            use_cache=True,
            return_dict=True,
            **extra,
        )
        present = answer["past_key_values"].layers
        return (answer["logits"], *(part for layer in present for part in (layer.keys, layer.values)))

    random = torch.Generator().manual_seed(0)

    def case(texts: Sequence[str | tuple[str, str]], width: int, seen: int) -> dict[str, Tensor]:
        batch = encode(source, texts, ("input_ids", "attention_mask"), side="left")
        batch = {name: value[:, -width:] for name, value in batch.items()}
        rows = len(texts)
        mask = torch.ones(rows, seen, dtype=torch.int64)
        # Padding is on the left of everything seen so far: hide the first column of the first row.
        if seen:
            mask[0, 0] = 0
            batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
        batch["attention_mask"] = torch.cat([mask, batch["attention_mask"]], dim=1)
        for name, shape in zip(past, shapes):
            batch[name] = torch.randn(rows, shape[1], seen, shape[3], generator=random)
        return batch

    everything: Axes = {0: "batch", 1: "total_sequence"}
    texts = [text for text in TEXTS if isinstance(text, str)]
    return Traceable(
        module=Adapter(model, ["input_ids", "attention_mask", *past], run),
        inputs={
            "input_ids": TOKENS,
            "attention_mask": everything,
            **{name: {0: "batch", 2: "past_sequence"} for name in past},
        },
        outputs={
            "logits": TOKENS,
            **{f"present.{slot}": {0: "batch", 2: "total_sequence"} for slot in slots},
        },
        example=case(texts[:2], 6, 5),
        cases=[case(texts[:3], 9, 0), case(texts[:2], 1, 7), case(texts[:1], 4, 3)],
    )


def _text2text(source: Source, model: Any) -> Traceable:
    names = ["input_ids", "attention_mask", "decoder_input_ids"]

    def run(batch: dict[str, Tensor]) -> Sequence[Tensor]:
        return (model(**batch, use_cache=False, return_dict=True)["logits"],)

    start = model.config.decoder_start_token_id

    def case(texts: Sequence[str | tuple[str, str]], width: int) -> dict[str, Tensor]:
        batch = encode(source, texts, names[:2])
        ids = batch["input_ids"].repeat(1, width)[:, : width - 1]
        first = torch.full((len(texts), 1), start if start is not None else 0, dtype=torch.int64)
        batch["decoder_input_ids"] = torch.cat([first, ids], dim=1)
        return batch

    return Traceable(
        module=Adapter(model, names, run),
        inputs={
            "input_ids": TOKENS,
            "attention_mask": TOKENS,
            "decoder_input_ids": {0: "batch", 1: "decoder_sequence"},
        },
        outputs=source.task.outputs,
        example=case(TEXTS[:2], 4),
        cases=[case(TEXTS, 7), case(TEXTS[:1], 1), case(TEXTS[2:4], 3)],
    )


def _image(source: Source, model: Any) -> Traceable:
    size = image_size(source, model)
    shape = (int(setting(model, "num_channels", 3)), *size)
    # Vision models have no sequence axis to vary: only the batch is dynamic.
    return _continuous(source, model, "pixel_values", {0: "batch"}, [(2, *shape), (1, *shape), (3, *shape)])


def _audio(source: Source, model: Any, main: str) -> Traceable:
    config = model.config
    if main == "input_features":
        # Whisper's encoder takes exactly this many frames.
        frames = 2 * int(getattr(config, "max_source_positions", 1500))
        shape = (int(getattr(config, "num_mel_bins", 80)), frames)
        shapes, axes = [(rows, *shape) for rows in (2, 1, 3)], {0: "batch"}
    elif hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):
        shape = (int(config.max_length), int(config.num_mel_bins))
        shapes, axes = [(rows, *shape) for rows in (2, 1, 3)], {0: "batch"}
    else:
        shapes, axes = [(2, 4800), (1, 6400), (3, 3600)], {0: "batch", 1: "samples"}
    return _continuous(source, model, main, axes, shapes)


def _continuous(
    source: Source, model: Any, name: str, axes: Axes, shapes: Sequence[tuple[int, ...]]
) -> Traceable:
    random = torch.Generator().manual_seed(0)
    batches = [{name: torch.randn(*shape, generator=random)} for shape in shapes]
    wanted = tuple(source.task.outputs)
    if "embeddings" in wanted:
        raise ExportError(f"{source.origin}: task 'pooling' is for text models; use 'default'")
    # A sequence axis of hidden states follows only where the input has one.
    outputs = {
        output: {0: "batch"} if 1 not in axes else {**named, **({1: "frames"} if 1 in named else {})}
        for output, named in source.task.outputs.items()
    }

    def run(batch: dict[str, Tensor]) -> Sequence[Tensor]:
        answer = model(batch[name], return_dict=True)
        return tuple(_get(source, answer, key) for key in wanted)

    return Traceable(
        module=Adapter(model, [name], run),
        inputs={name: axes},
        outputs=outputs,
        example=batches[0],
        cases=batches[1:],
    )


def _parameters(model: Any) -> set[str]:
    return set(inspect.signature(model.forward).parameters)
