"""Text that models write: a decoder continues a prompt or a conversation, an encoder-decoder rewrites or describes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.errors import DataError
from onward.export.huggingface.tasks import task_named
from onward.language.chat import is_chat, read_template
from onward.language.decoding import Decoder, EncoderDecoder, Options, generate
from onward.tasks.inputs import each, in_batch, signal

if TYPE_CHECKING:
    from onward.pipeline.load import Pipeline


def continue_text(
    pipeline: Pipeline,
    inputs: Any,
    *,
    return_full_text: bool = False,
    stop: str | Sequence[str] = (),
    **options: Any,
) -> Any:
    """What the model writes after each prompt."""
    if is_chat(inputs):
        return continue_text(pipeline, [inputs], return_full_text=return_full_text, stop=stop, **options)[0]
    stops = [stop] if isinstance(stop, str) else stop
    chosen = Options.read(options, pipeline.card["generation"], max_new_tokens=32)

    def written(prompts: list[Any]) -> list[Any]:
        encodings = [_prompt(pipeline, prompt) for prompt in prompts]
        results = [""] * len(prompts)
        for rows in _groups(pipeline, encodings):
            group = [encodings[row] for row in rows]
            new: list[list[int]] = [[] for _ in group]
            for new in generate(_writer(pipeline, group), _room(pipeline, group, chosen)):
                if stops and all(_cut(text, stops) != text for text in map(pipeline.decode, new)):
                    break
            for row, ids in zip(rows, new):
                results[row] = _cut(pipeline.decode(ids), stops)
        return (
            [_after(prompt, text) for prompt, text in zip(prompts, results)] if return_full_text else results
        )

    return in_batch(inputs, written)


def stream(
    pipeline: Pipeline, prompt: Any, *, stop: str | Sequence[str] = (), **options: Any
) -> Iterator[str]:
    """Yield a text as it is written."""
    if task_named(pipeline.task).answer != "generate":
        raise TypeError(f"only text generation can be streamed, and the task is {pipeline.task!r}")
    if options.get("num_beams", 1) > 1:
        raise ValueError("beams cannot be streamed: until the end any of them may win")
    chosen = Options.read(options, pipeline.card["generation"], max_new_tokens=32)
    stops = [stop] if isinstance(stop, str) else stop
    encoding = _prompt(pipeline, prompt)
    sent, new = "", [[]]
    for new in generate(_writer(pipeline, [encoding]), _room(pipeline, [encoding], chosen)):
        text = pipeline.decode(new[0])
        if (ended := _cut(text, stops)) != text:
            yield ended[len(sent) :]
            return
        # Half a character, or what may become a stop, waits for what follows.
        if text.endswith("\ufffd") or _may_stop(text, stops):
            continue
        if len(text) > len(sent):
            yield text[len(sent) :]
            sent = text
    ending = pipeline.decode(new[0])[len(sent) :]
    if ending:
        yield ending


def _prompt(pipeline: Pipeline, prompt: Any) -> Any:
    if is_chat(prompt):
        text = read_template(pipeline.folder).render_prompt(prompt)
        encoding = pipeline.tokenizer.encode(text, add_special_tokens=False)
    elif isinstance(prompt, str):
        encoding = pipeline.tokenizer.encode(prompt)
    else:
        raise TypeError(f"a prompt is text or a list of messages, got {type(prompt).__name__}")
    if not encoding.ids:
        raise ValueError("the prompt is empty: there is nothing to continue")
    if encoding.overflowing:
        longest = len(encoding.ids)
        raise DataError(f"the prompt is longer than the {longest} tokens that the model reads", "shorten it")
    return encoding


def _has_cache(pipeline: Pipeline) -> bool:
    return any(value.name.startswith("past_key_values.") for value in pipeline.session.get_inputs())


def _groups(pipeline: Pipeline, encodings: list[Any]) -> list[list[int]]:
    """Numbers of prompts that are read together: all with a cache, or those of one length where padding is read too."""
    rows = list(range(len(encodings)))
    if not _has_cache(pipeline):
        return [[row] for row in rows]
    if not pipeline.card["generation"].get("alone"):
        return [rows]
    by_length: dict[int, list[int]] = {}
    for row in rows:
        by_length.setdefault(len(encodings[row].ids), []).append(row)
    return list(by_length.values())


def _writer(pipeline: Pipeline, encodings: list[Any]) -> Decoder:
    width = max(len(encoding.ids) for encoding in encodings)
    filler = pipeline.card["tokenizer"]["pad_id"]
    ids = np.asarray([[filler] * (width - len(e.ids)) + list(e.ids) for e in encodings], np.int64)
    mask = np.asarray([[0] * (width - len(e.ids)) + [1] * len(e.ids) for e in encodings], np.int64)
    return Decoder(pipeline.session, ids, mask)


def _room(pipeline: Pipeline, encodings: list[Any], options: Options) -> Options:
    """The options, with no more new tokens than the model has positions for."""
    longest = pipeline.card["tokenizer"].get("max_length")
    if not longest:
        return options
    room = longest - max(len(encoding.ids) for encoding in encodings) + 1
    return dataclasses.replace(options, max_new_tokens=max(1, min(options.max_new_tokens, room)))


def _after(prompt: Any, text: str) -> Any:
    """The prompt with what was written: one text, or the conversation with the assistant's words."""
    if isinstance(prompt, str):
        return prompt + text
    # a conversation may end in the assistant's own words, which are continued
    *before, last = prompt
    if last["role"] == "assistant":
        return [*before, {**last, "content": last["content"] + text}]
    return [*prompt, {"role": "assistant", "content": text}]


def _cut(text: str, stops: Sequence[str]) -> str:
    """A text up to the first stop in it."""
    return text[: min([len(text), *(text.index(word) for word in stops if word in text)])]


def _may_stop(text: str, stops: Sequence[str]) -> bool:
    """Whether a stop may have begun at the end of a text."""
    return any(text.endswith(word[:size]) for word in stops for size in range(1, len(word)))


# --- An encoder reads a text, an image or speech, a decoder writes text.


def rewrite(pipeline: Pipeline, inputs: Any, **options: Any) -> Any:
    """The text that the decoder writes for a text."""
    chosen = Options.read(options, pipeline.card["generation"], max_new_tokens=64)

    def written(texts: list[str]) -> list[str]:
        feed, _ = pipeline.encode(texts)
        return [pipeline.decode(ids) for ids in generate_ids(pipeline, feed, chosen)]

    return in_batch(inputs, written)


def caption(pipeline: Pipeline, inputs: Any, **options: Any) -> Any:
    """The text that the decoder writes for an image."""
    chosen = Options.read(options, pipeline.card["generation"], max_new_tokens=32)

    def written(item: Any) -> str:
        ids = generate_ids(pipeline, signal(pipeline, item), chosen)[0]
        return str(ids) if pipeline.tokenizer is None else pipeline.decode(ids)

    return each(inputs, written)


def generate_ids(
    pipeline: Pipeline, feed: Mapping[str, np.ndarray], options: Options, start: Sequence[int] | None = None
) -> list[list[int]]:
    """What the decoder writes for each row of the encoder's inputs, after the tokens it starts with."""
    settings = pipeline.card["generation"]
    start = [settings["start_id"] or 0, *(settings.get("prefix") or ())] if start is None else start
    # an encoder-decoder in one graph is one that was trained
    encoder, decoder = pipeline.sessions.values() if pipeline.card.get("parts") else (None, pipeline.session)
    *_, new = generate(EncoderDecoder(encoder, decoder, feed, start), options)
    return new
