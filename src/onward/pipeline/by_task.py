"""Runs a pipeline for each task of the table: preprocess the input, run the model, postprocess the outputs.

`ANSWERS` has a function for each name in the table's `answer` column.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.data import preprocess
from onward.data.images import read_picture
from onward.data.sound import fit_wave, read_wave
from onward.errors import ModelError
from onward.export.huggingface.tasks import task_named
from onward.pipeline import postprocess
from onward.pipeline.chat import is_chat, read_template
from onward.pipeline.text_generation import Decoder, EncoderDecoder, Options, Rereader, Writer, generate

if TYPE_CHECKING:
    from onward.pipeline.load import Pipeline

__all__ = ["ANSWERS", "answer", "stream"]

Text = str | tuple[str, str]
# samples a second of speech models that do not say
_RATE = 16000


def answer(pipeline: Pipeline, inputs: Any, *args: Any, **options: Any) -> Any:
    """The answer of the pipeline's task."""
    return ANSWERS[pipeline.card.get("answer") or task_named(pipeline.task).answer](
        pipeline, inputs, *args, **options
    )


def _each(inputs: Any, answer: Callable[[list[Any]], Sequence[Any]]) -> Any:
    """One input gives one result, a list gives a list."""
    return list(answer(inputs)) if isinstance(inputs, list) else answer([inputs])[0]


def _hidden(pipeline: Pipeline, inputs: Any) -> Any:
    if pipeline.tokenizer is None:
        return _each(
            inputs,
            lambda items: [pipeline.run(_signal(pipeline, item))["last_hidden_state"][0] for item in items],
        )

    def answer(texts: list[Text]) -> list[np.ndarray]:
        feed, encodings = pipeline.encode(texts)
        states = pipeline.run(feed)["last_hidden_state"]
        return [pipeline.trim(row, encoding) for row, encoding in zip(states, encodings)]

    return _each(inputs, answer)


def _embed(pipeline: Pipeline, inputs: Any, *, batch_size: int = 32) -> np.ndarray:
    texts = inputs if isinstance(inputs, list) else [inputs]
    # Texts of like length together: padding is what a mixed batch spends its time on.
    order = sorted(range(len(texts)), key=lambda index: -len(str(texts[index])))
    rows: dict[int, np.ndarray] = {}
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        vectors = pipeline.run(pipeline.encode([texts[index] for index in chosen])[0])["embeddings"]
        rows.update(zip(chosen, vectors))
    if not isinstance(inputs, list):
        return rows[0]
    return np.stack([rows[index] for index in range(len(texts))]) if texts else np.empty((0, 0), np.float32)


def _classify(
    pipeline: Pipeline, inputs: Any, *, top_k: int | None = 1, function_to_apply: str | None = None
) -> Any:
    function = function_to_apply or _scores_of(pipeline)
    if function not in postprocess.FUNCTIONS:
        raise ValueError(
            f"function_to_apply is {function!r}; choose one of {', '.join(postprocess.FUNCTIONS)}"
        )

    def scored(logits: np.ndarray) -> Any:
        found = postprocess.labelled(logits, pipeline.card["labels"], function, top_k=top_k)
        return found[0] if top_k == 1 else found

    if pipeline.tokenizer is None:
        run = lambda item: pipeline.run(_signal(pipeline, item))["logits"][0]  # noqa: E731
        return _each(inputs, lambda items: [scored(run(item)) for item in items])
    return _each(
        inputs, lambda texts: [scored(row) for row in pipeline.run(pipeline.encode(texts)[0])["logits"]]
    )


def _scores_of(pipeline: Pipeline) -> str:
    """What transformers makes scores of outputs with: sound is always one of its classes, text may be a number."""
    problem, kind = pipeline.card["problem_type"], task_named(pipeline.task).kind
    if kind == "audio":
        return "softmax"
    if problem == "regression" and kind == "text":
        return "none"
    alone = problem == "multi_label_classification" or len(pipeline.card["labels"]) == 1
    return "sigmoid" if alone else "softmax"


def _candidates(
    labels: str | Sequence[str] | None, template: str, example: str
) -> tuple[list[str], list[str]]:
    """The labels that a call names, as a list or with commas between them, and a sentence for each."""
    if isinstance(labels, str):
        labels = [part.strip() for part in labels.split(",") if part.strip()]
    if not labels:
        raise TypeError(f"zero-shot classification needs labels: {example}")
    texts = [template.format(label) for label in labels]
    if texts[0] == template:
        raise ValueError(f"hypothesis_template is {template!r}, and has no {{}} where the label goes")
    return list(labels), texts


def _zero_shot(
    pipeline: Pipeline,
    inputs: Any,
    candidate_labels: str | Sequence[str] | None = None,
    *,
    hypothesis_template: str = "This example is {}.",
    multi_label: bool = False,
) -> Any:
    labels, hypotheses = _candidates(
        candidate_labels, hypothesis_template, "pipeline(text, ['sport', 'politics'])"
    )

    def answer(text: str) -> list[dict[str, Any]]:
        pairs = [(text, hypothesis) for hypothesis in hypotheses]
        logits = pipeline.run(pipeline.encode(pairs)[0])["logits"]
        return postprocess.entailed(logits, labels, pipeline.card["labels"], multi_label=multi_label)

    return _each(inputs, lambda texts: [answer(text) for text in texts])


def _zero_shot_image(
    pipeline: Pipeline,
    inputs: Any,
    candidate_labels: str | Sequence[str] | None = None,
    *,
    hypothesis_template: str = "This is a photo of {}.",
) -> Any:
    labels, texts = _candidates(candidate_labels, hypothesis_template, "pipeline(image, ['a cat', 'a dog'])")
    alone = str(pipeline.card.get("architecture", "")).startswith("Siglip")  # each label is scored by itself
    feed, _ = pipeline.encode(texts)
    if alone:  # it was trained on texts of full length only, and reads the last token
        feed = {name: _to_length(pipeline, name, array) for name, array in feed.items()}

    def answer(picture: Any) -> list[dict[str, Any]]:
        pixels = _pixels(pipeline, picture)[None]
        logits = pipeline.run({**feed, "pixel_values": pixels})["logits_per_image"][0]
        return postprocess.labelled(logits, labels, "sigmoid" if alone else "softmax", top_k=None)

    return _each(inputs, lambda pictures: [answer(picture) for picture in pictures])


def _to_length(pipeline: Pipeline, name: str, ids: np.ndarray) -> np.ndarray:
    settings = pipeline.card["tokenizer"]
    missing = (settings.get("max_length") or ids.shape[1]) - ids.shape[1]
    filler = settings["pad_id"] if name == "input_ids" else 0
    return np.pad(ids, [(0, 0), (0, max(0, missing))], constant_values=filler)


def _tag(
    pipeline: Pipeline,
    inputs: Any,
    *,
    group: bool = False,
    aggregation_strategy: str | None = None,
    ignore_labels: Sequence[str] = ("O",),
) -> Any:
    strategy = aggregation_strategy or ("simple" if group else "none")
    if strategy not in postprocess.STRATEGIES:
        raise ValueError(
            f"aggregation_strategy is {strategy!r}; choose one of {', '.join(postprocess.STRATEGIES)}"
        )

    def answer(texts: list[str]) -> list[Any]:
        feed, encodings = pipeline.encode(texts)
        logits = pipeline.run(feed)["logits"]
        results = []
        for text, encoding, row in zip(texts, encodings, logits):
            found = postprocess.tagged(
                text,
                encoding,
                pipeline.trim(row, encoding),
                pipeline.card["labels"],
                words=strategy if strategy in ("first", "average", "max") else None,
                begins=lambda index, text=text, encoding=encoding: _begins_word(
                    pipeline, text, encoding, index
                ),
            )
            found = found if strategy == "none" else postprocess.grouped(text, found)
            results.append([entry for entry in found if entry["label"] not in ignore_labels])
        return results

    return _each(inputs, answer)


def _begins_word(pipeline: Pipeline, text: str, encoding: Any, index: int) -> bool:
    """Whether a token begins a word, as transformers decides: by the mark of later pieces, else by spaces alone."""
    start, end = encoding.offsets[index]
    if encoding.ids[index] == pipeline.card["tokenizer"].get("unk_id"):
        return True
    if getattr(pipeline.tokenizer.model, "continuing_subword_prefix", None):
        return len(encoding.tokens[index]) == end - start
    return start == 0 or " " in text[start - 1 : start + 1]


def _question(
    pipeline: Pipeline,
    inputs: Any,
    context: str | None = None,
    *,
    top_k: int = 1,
    doc_stride: int | None = None,
    max_answer_len: int = 15,
    max_seq_len: int = 384,
    handle_impossible_answer: bool = False,
    align_to_words: bool = True,
) -> Any:
    if context is not None:
        inputs = (inputs, context)
    elif isinstance(inputs, Mapping) and {"question", "context"} <= set(inputs):
        inputs = (inputs["question"], inputs["context"])
    pairs = inputs if isinstance(inputs, list) else [inputs]
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise TypeError("question answering takes a question and a context: pipeline(question, context)")
    for name, number in (("top_k", top_k), ("max_answer_len", max_answer_len)):
        if number < 1:
            raise ValueError(f"{name} is {number}: it must be 1 or more")
    settings = pipeline.card["tokenizer"]
    limit = min(settings.get("max_length") or max_seq_len, max_seq_len)

    def answer(question: str, context: str) -> Any:
        windows = _context_windows(pipeline, question, context, limit, doc_stride)
        outputs = pipeline.run(pipeline.batch(windows))
        starts, ends = (
            [pipeline.trim(row, window) for row, window in zip(outputs[name], windows)]
            for name in ("start_logits", "end_logits")
        )
        found = postprocess.best_spans(
            context,
            windows,
            starts,
            ends,
            top_k=top_k,
            longest=max_answer_len,
            cls_id=settings.get("cls_id"),
            whole_words=align_to_words,
            may_lack=handle_impossible_answer,
        )
        nothing = {"answer": "", "score": 0.0, "start": 0, "end": 0}
        return found if top_k > 1 else found[0] if found else nothing

    return _each(inputs, lambda items: [answer(*pair) for pair in items])


def _context_windows(
    pipeline: Pipeline, question: str, context: str, limit: int, stride: int | None
) -> list[Any]:
    """A long context in overlapping windows, each with the question; the overlap must leave room for it."""
    tokenizer, longest = pipeline.tokenizer, pipeline.card["tokenizer"].get("max_length")
    room = limit - len(tokenizer.encode(question).ids) - 3
    if room < 1:
        raise ValueError(f"the question alone fills the model's {limit} tokens")
    overlap = min(limit // 2, 128) if stride is None else stride
    tokenizer.enable_truncation(limit, stride=min(overlap, room - 1), strategy="only_second")
    try:
        first = tokenizer.encode(question, context)
    finally:
        if longest:
            tokenizer.enable_truncation(longest)
        else:
            tokenizer.no_truncation()
    return [first, *first.overflowing]


def _fill(
    pipeline: Pipeline, inputs: Any, *, top_k: int = 5, targets: str | Sequence[str] | None = None
) -> Any:
    mask = pipeline.card["tokenizer"]["mask_id"]
    if mask is None:
        raise ModelError("the tokenizer has no mask token, so there is nothing to fill")
    allowed = None if targets is None else _target_ids(pipeline, targets)

    def answer(texts: list[str]) -> list[Any]:
        feed, encodings = pipeline.encode(texts)
        logits = pipeline.run(feed)["logits"]
        filled = [
            postprocess.fill(pipeline.decode, encoding, pipeline.trim(row, encoding), mask, top_k, allowed)
            for encoding, row in zip(encodings, logits)
        ]
        for text, candidates in zip(texts, filled):
            if not candidates:
                token = pipeline.card["tokenizer"]["mask_token"]
                raise ValueError(f"no mask in {text!r}: put {token} where a word is missing")
        return [candidates[0] if len(candidates) == 1 else candidates for candidates in filled]

    return _each(inputs, answer)


def _target_ids(pipeline: Pipeline, targets: str | Sequence[str]) -> list[int]:
    """The token of each word, or the first of its tokens."""
    words = [targets] if isinstance(targets, str) else targets
    found: dict[int, None] = {}
    for word in words:
        known = pipeline.tokenizer.token_to_id(word)
        ids = [known] if known is not None else pipeline.tokenizer.encode(word, add_special_tokens=False).ids
        found |= dict.fromkeys(ids[:1])
    if not found:
        raise ValueError("targets names no word that the model knows")
    return list(found)


def _similar(
    pipeline: Pipeline, inputs: str, others: Sequence[str] | None = None, **options: Any
) -> list[float]:
    if others is None:
        raise TypeError("sentence similarity takes a sentence and others: pipeline(text, ['one', 'another'])")
    vectors = np.asarray(_embed(pipeline, [inputs, *others], **options), np.float64)
    lengths = np.maximum(np.linalg.norm(vectors, axis=1), 1e-12)
    return [float(score) for score in vectors[1:] @ vectors[0] / lengths[1:] / lengths[0]]


def _choose(pipeline: Pipeline, inputs: str, choices: Sequence[str] | None = None) -> list[dict[str, Any]]:
    if choices is None:
        raise TypeError("multiple choice takes a text and choices: pipeline(text, ['one', 'another'])")
    feed, _ = pipeline.encode([(inputs, choice) for choice in choices])
    scores = postprocess.softmax(
        pipeline.run({name: array[None] for name, array in feed.items()})["logits"][0]
    )
    order = np.argsort(-scores, kind="stable")
    return [{"choice": choices[index], "score": float(scores[index])} for index in order]


# ---- text --------------------------------------------------------------------------------------------------


def _generate(
    pipeline: Pipeline,
    inputs: Any,
    *,
    return_full_text: bool = False,
    stop: str | Sequence[str] = (),
    **options: Any,
) -> Any:
    if is_chat(inputs):
        return _generate(pipeline, [inputs], return_full_text=return_full_text, stop=stop, **options)[0]
    chosen = Options.read(options, pipeline.card["generation"], max_new_tokens=32)

    def written(prompts: list[Any]) -> list[Any]:
        encodings = [_prompt(pipeline, prompt) for prompt in prompts]
        results: list[str] = []
        for group in _groups(pipeline, encodings):
            new: list[list[int]] = [[] for _ in group]
            for new in generate(_writer(pipeline, group, chosen), _room(pipeline, group, chosen)):
                if stop and all(_stopped(pipeline.decode(ids), stop) for ids in new):
                    break
            results += [_cut(pipeline.decode(ids), stop) for ids in new]
        return (
            [_after(prompt, text) for prompt, text in zip(prompts, results)] if return_full_text else results
        )

    return _each(inputs, written)


def stream(
    pipeline: Pipeline, prompt: Any, *, stop: str | Sequence[str] = (), **options: Any
) -> Iterator[str]:
    """Yield a text as it is written."""
    if task_named(pipeline.task).answer != "generate":
        raise TypeError(f"only text generation can be streamed, and the task is {pipeline.task!r}")
    if options.get("num_beams", 1) > 1:
        raise ValueError("beams cannot be streamed: until the end any of them may win")
    chosen = Options.read(options, pipeline.card["generation"], max_new_tokens=32)
    encoding = _prompt(pipeline, prompt)
    sent, new = "", [[]]
    for new in generate(_writer(pipeline, [encoding], chosen), _room(pipeline, [encoding], chosen)):
        text = pipeline.decode(new[0])
        if stop and _stopped(text, stop):
            text = _cut(text, stop)
            yield text[len(sent) :]
            return
        # Half a character, or what may become a stop, waits for what follows.
        if text.endswith("\ufffd") or _may_stop(text, stop):
            continue
        if len(text) > len(sent):
            yield text[len(sent) :]
            sent = text
    rest = pipeline.decode(new[0])[len(sent) :]
    if rest:
        yield rest


def _prompt(pipeline: Pipeline, prompt: Any) -> Any:
    if is_chat(prompt):
        text = read_template(pipeline.folder).render_prompt(prompt)
        return pipeline.tokenizer.encode(text, add_special_tokens=False)
    if not isinstance(prompt, str):
        raise TypeError(f"a prompt is text or a list of messages, got {type(prompt).__name__}")
    return pipeline.tokenizer.encode(prompt)


def _has_cache(pipeline: Pipeline) -> bool:
    return any(value.name.startswith("past_key_values.") for value in pipeline.session.get_inputs())


def _groups(pipeline: Pipeline, encodings: list[Any]) -> list[list[Any]]:
    """Prompts that are read together: all with a cache, else one by one, as padding would shift positions."""
    together = _has_cache(pipeline) and not pipeline.card["generation"].get("alone")
    return [encodings] if together else [[encoding] for encoding in encodings]


def _writer(pipeline: Pipeline, encodings: list[Any], options: Options) -> Writer:
    for encoding in encodings:
        if not encoding.ids:
            raise ValueError("the prompt is empty: there is nothing to continue")
    if not _has_cache(pipeline):
        return Rereader(pipeline.session, np.asarray([encodings[0].ids], np.int64))
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
    *before, last = prompt
    if last["role"] == "assistant":
        return [*before, {**last, "content": last["content"] + text}]
    return [*prompt, {"role": "assistant", "content": text}]


def _stops(stop: str | Sequence[str]) -> Sequence[str]:
    return [stop] if isinstance(stop, str) else stop


def _stopped(text: str, stop: str | Sequence[str]) -> bool:
    return any(word in text for word in _stops(stop))


def _cut(text: str, stop: str | Sequence[str]) -> str:
    places = [text.index(word) for word in _stops(stop) if word in text]
    return text[: min(places)] if places else text


def _may_stop(text: str, stop: str | Sequence[str]) -> bool:
    return any(text.endswith(word[:size]) for word in _stops(stop) for size in range(1, len(word)))


def _rewrite(pipeline: Pipeline, inputs: Any, **options: Any) -> Any:
    chosen = Options.read(options, pipeline.card["generation"], max_new_tokens=64)

    def written(texts: list[str]) -> list[str]:
        feed, _ = pipeline.encode(texts)
        return [pipeline.decode(ids) for ids in _written(pipeline, feed, chosen)]

    return _each(inputs, written)


def _caption(pipeline: Pipeline, inputs: Any, **options: Any) -> Any:
    chosen = Options.read(options, pipeline.card["generation"], max_new_tokens=32)

    def written(item: Any) -> str:
        ids = _written(pipeline, _signal(pipeline, item), chosen)[0]
        return str(ids) if pipeline.tokenizer is None else pipeline.decode(ids)

    return _each(inputs, lambda items: [written(item) for item in items])


def _written(
    pipeline: Pipeline, feed: Mapping[str, np.ndarray], options: Options, start: Sequence[int] | None = None
) -> list[list[int]]:
    settings = pipeline.card["generation"]
    start = [settings["start_id"] or 0, *(settings.get("prefix") or ())] if start is None else start
    writer: Writer
    if pipeline.card.get("parts"):
        encoder, decoder = pipeline.sessions.values()
        writer = EncoderDecoder(encoder, decoder, feed, start)
    else:
        writer = _Whole(pipeline, feed, start)
    *_, new = generate(writer, options)
    return new


class _Whole:
    """An encoder-decoder in one graph, as one that was trained: it reads everything again for every token."""

    def __init__(self, pipeline: Pipeline, feed: Mapping[str, np.ndarray], start: Sequence[int]) -> None:
        self._pipeline, self._feed = pipeline, dict(feed)
        self.history = np.tile(np.asarray(start, np.int64), (len(next(iter(feed.values()))), 1))

    def step(self, tokens: np.ndarray | None, rows: np.ndarray | None) -> np.ndarray:
        if tokens is not None:
            if rows is not None:
                self._feed = {name: array[rows] for name, array in self._feed.items()}
                self.history = self.history[rows]
            self.history = np.concatenate([self.history, tokens[:, None]], axis=1)
        return self._pipeline.run({**self._feed, "decoder_input_ids": self.history})["logits"][:, -1]


# ---- sound -------------------------------------------------------------------------------------------------


def _spell(pipeline: Pipeline, inputs: Any) -> Any:
    spelling = pipeline.card["spelling"]

    def text(wave: Any) -> dict[str, str]:
        return {"text": postprocess.spelled(pipeline.run(_signal(pipeline, wave))["logits"][0], spelling)}

    return _each(inputs, lambda waves: [text(wave) for wave in waves])


def _transcribe(
    pipeline: Pipeline, inputs: Any, *, language: str | None = None, translate: bool = False, **options: Any
) -> Any:
    chosen = Options.read(options, pipeline.card["generation"], max_new_tokens=440)
    speech = pipeline.card["generation"].get("speech")

    def text(wave: Any) -> dict[str, str]:
        parts = []
        for feed in _windows(pipeline, wave):
            start = None if speech is None else _spoken_start(pipeline, speech, feed, language, translate)
            ids = _written(pipeline, feed, chosen, start)[0]
            parts.append(str(ids) if pipeline.tokenizer is None else pipeline.tokenizer.decode(ids))
        return {"text": "".join(parts)}

    return _each(inputs, lambda waves: [text(wave) for wave in waves])


def _windows(pipeline: Pipeline, wave: Any) -> list[dict[str, np.ndarray]]:
    """Sound longer than the model reads at once, in pieces."""
    samples = _heard(pipeline, wave)
    limit = (pipeline.card.get("processor") or {}).get("n_samples")
    if samples.ndim != 1 or not limit or len(samples) <= limit:
        return [_signal(pipeline, samples)]
    return [_signal(pipeline, samples[start : start + limit]) for start in range(0, len(samples), limit)]


def _spoken_start(
    pipeline: Pipeline,
    speech: Mapping[str, Any],
    feed: Mapping[str, np.ndarray],
    language: str | None,
    translate: bool,
) -> list[int]:
    """Whisper's first tokens: the start, the language (heard, where none is named), what to do, no timestamps."""
    start = [int(pipeline.card["generation"]["start_id"])]
    languages = speech.get("languages") or {}
    if languages:
        if language is None:
            encoder, decoder = pipeline.sessions.values()
            scores = EncoderDecoder(encoder, decoder, feed, start).step(None, None)[0]
            start.append(max(languages.values(), key=lambda token: scores[token]))
        elif f"<|{language}|>" in languages:
            start.append(languages[f"<|{language}|>"])
        else:
            known = ", ".join(name.strip("<|>") for name in languages)
            raise ValueError(f"unknown language {language!r}. Known: {known}")
        start.append(speech["tasks"]["translate" if translate else "transcribe"])
    return [*start, speech["no_timestamps_id"]] if speech.get("no_timestamps_id") is not None else start


def _frames(pipeline: Pipeline, inputs: Any) -> Any:
    labels = pipeline.card["labels"]

    def each(wave: Any) -> list[dict[str, float]]:
        scores = postprocess.sigmoid(pipeline.run(_signal(pipeline, wave))["logits"][0])
        return [dict(zip(labels, map(float, row))) for row in scores]

    return _each(inputs, lambda waves: [each(wave) for wave in waves])


def _speaker(pipeline: Pipeline, inputs: Any) -> Any:
    def each(wave: Any) -> np.ndarray:
        vector = pipeline.run(_signal(pipeline, wave))["embeddings"][0]
        return vector / max(float(np.linalg.norm(vector)), 1e-12)

    return _each(inputs, lambda waves: [each(wave) for wave in waves])


def _speak(pipeline: Pipeline, inputs: Any) -> Any:
    def each(text: str) -> dict[str, Any]:
        feed, _ = pipeline.encode([text])
        return {"audio": pipeline.run(feed)["waveform"][0], "sampling_rate": pipeline.card["sampling_rate"]}

    return _each(inputs, lambda texts: [each(text) for text in texts])


# ---- pictures and series -----------------------------------------------------------------------------------


def _picture_task(make: Callable[..., Any]) -> Callable[..., Any]:
    """An answer for each picture, from the model's outputs, the picture's size and the pipeline's card."""

    def answers(pipeline: Pipeline, inputs: Any, **options: Any) -> Any:
        def each(item: Any) -> Any:
            item = _seen(pipeline, item)
            outputs = {name: array[0] for name, array in pipeline.run(_signal(pipeline, item)).items()}
            return make(outputs, preprocess.picture_size(item), pipeline.card, **options)

        return _each(inputs, lambda items: [each(item) for item in items])

    return answers


def _detect(
    outputs: Mapping[str, np.ndarray], size: Any, card: Mapping[str, Any], *, threshold: float = 0.5
) -> Any:
    labels, logits = card["labels"], outputs["logits"]
    # A class more than there are labels means "nothing"; without it each class is scored by itself.
    if logits.shape[-1] > len(labels):
        scores = postprocess.softmax(logits)[:, :-1]
        return postprocess.boxes(scores, outputs["pred_boxes"], labels, size, threshold)
    queries = np.repeat(np.arange(len(logits)), len(labels))
    each = np.where(  # a row for each pair of a box and a class
        np.arange(len(labels)) == np.tile(np.arange(len(labels)), len(logits))[:, None],
        np.repeat(postprocess.sigmoid(logits), len(labels), axis=0),
        -1.0,
    )
    most = len(logits) if str(card.get("architecture")).startswith(("RTDetr", "DFine", "Deimv2")) else 100
    best = np.argsort(-each.max(axis=1), kind="stable")[:most]
    return postprocess.boxes(each[best], outputs["pred_boxes"][queries[best]], labels, size, threshold)


def _segment(outputs: Mapping[str, np.ndarray], size: Any, card: Mapping[str, Any]) -> Any:
    return postprocess.semantic(outputs["logits"], card["labels"], size)


def _instances(
    outputs: Mapping[str, np.ndarray],
    size: Any,
    card: Mapping[str, Any],
    *,
    subtask: str = "instance",
    threshold: float = 0.9,
    mask_threshold: float = 0.5,
    overlap_mask_area_threshold: float = 0.5,
) -> Any:
    classes, masks, labels = outputs["class_queries_logits"], outputs["masks_queries_logits"], card["labels"]
    if str(card.get("architecture")).startswith("Mask2Former"):  # its masks are a quarter of this size
        masks = postprocess.resized(masks, (384, 384))
    if subtask == "semantic":
        each = np.einsum("qc,qhw->chw", postprocess.softmax(classes)[:, :-1], postprocess.sigmoid(masks))
        return postprocess.semantic(each, labels, size)
    if subtask == "panoptic":
        return postprocess.panoptic(
            classes,
            masks,
            labels,
            size,
            threshold=threshold,
            mask_threshold=mask_threshold,
            overlap=overlap_mask_area_threshold,
        )
    if subtask != "instance":
        raise ValueError(f"subtask is {subtask!r}; choose one of instance, panoptic, semantic")
    return postprocess.instances(classes, masks, labels, size, threshold)


def _zero_shot_detect(
    pipeline: Pipeline,
    inputs: Any,
    candidate_labels: str | Sequence[str] | None = None,
    *,
    threshold: float = 0.1,
    top_k: int | None = None,
) -> Any:
    labels, texts = _candidates(candidate_labels, "{}", "pipeline(image, ['a cat', 'a dog'])")
    feed, _ = pipeline.encode(texts)

    def each(item: Any) -> list[dict[str, Any]]:
        item = _seen(pipeline, item)
        pixels = _pixels(pipeline, item)[None]
        outputs = pipeline.run({**feed, "pixel_values": pixels})
        scores = postprocess.sigmoid(outputs["logits"][0])
        size = preprocess.picture_size(item)
        found = [  # each label by itself: a box may have several
            box
            for index, label in enumerate(labels)
            for box in postprocess.boxes(
                scores[:, index : index + 1], outputs["pred_boxes"][0], [label], size, threshold
            )
        ]
        return sorted(found, key=lambda entry: -entry["score"])[:top_k]

    return _each(inputs, lambda items: [each(item) for item in items])


def _reconstruct(pipeline: Pipeline, inputs: Any, mask: Any = None) -> np.ndarray:
    if mask is None:
        raise TypeError("masked images need a mask, True for each hidden patch: pipeline(image, mask)")
    pixels = _pixels(pipeline, inputs)[None]
    feed = {"pixel_values": pixels, "bool_masked_pos": np.asarray(mask, bool).reshape(1, -1)}
    return pipeline.run(feed)["reconstruction"][0]


def _forecast(pipeline: Pipeline, inputs: Any) -> np.ndarray:
    past = np.asarray(inputs, np.float32)
    if past.ndim not in (2, 3):
        raise ValueError(
            f"a time series is [time, channels] or a batch of them, got shape {list(past.shape)}"
        )
    future = pipeline.run({"past_values": past if past.ndim == 3 else past[None]})["prediction_outputs"]
    return future if past.ndim == 3 else future[0]


def _arrays(pipeline: Pipeline, inputs: Any) -> np.ndarray:
    """The model's output for arrays by name, or for one array where it takes one; numbers become its own types."""
    names = [value.name for value in pipeline.session.get_inputs()]
    given = dict(inputs) if isinstance(inputs, Mapping) else {names[0]: inputs}
    if set(given) != set(names):
        raise TypeError(
            f"task {pipeline.task!r} takes the arrays {', '.join(names)}; given: {', '.join(given)}"
        )
    kinds = {value.name: value.type for value in pipeline.session.get_inputs()}
    feed = {
        name: np.asarray(array, np.int64 if kinds[name] == "tensor(int64)" else np.float32)
        for name, array in given.items()
    }
    return next(iter(pipeline.run(feed).values()))


def _signal(pipeline: Pipeline, item: Any) -> dict[str, np.ndarray]:
    name = next(iter(pipeline.card["inputs"]))
    settings = pipeline.card.get("processor")
    if name == "pixel_values":
        return {name: _pixels(pipeline, item)[None]}
    return {name: preprocess.sound(_heard(pipeline, item), settings)[None]}


def _pixels(pipeline: Pipeline, item: Any) -> np.ndarray:
    """A picture as the model takes it."""
    settings = pipeline.card.get("processor")
    item = _seen(pipeline, item)
    return preprocess.image(item, None if settings and settings.get("unknown") else settings)


def _seen(pipeline: Pipeline, item: Any) -> Any:
    """A picture upright and in colours, whatever its file or Pillow image has; an array as it is."""
    unknown = (pipeline.card.get("processor") or {}).get("unknown")
    if unknown and getattr(item, "dtype", None) != np.float32:
        raise ModelError(
            f"the model's {unknown} prepares pictures in a way that is not known here; give float32 arrays as the "
            "model takes them: [channels, height, width]"
        )
    if isinstance(item, str | os.PathLike) or hasattr(item, "convert"):
        return read_picture(item, channels=(pipeline.card.get("processor") or {}).get("channels"))
    return item


def _heard(pipeline: Pipeline, item: Any) -> np.ndarray:
    """A wave in the model's rate: a WAV file, an array, or `{"array" or "raw": wave, "sampling_rate": rate}`."""
    settings = pipeline.card.get("processor") or {}
    if isinstance(item, str | os.PathLike):
        return fit_wave(*read_wave(item), {"sampling_rate": settings.get("sampling_rate", _RATE)})
    if not isinstance(item, Mapping):
        return np.asarray(item, np.float32)
    wave = item.get("array", item.get("raw"))
    rate = item.get("sampling_rate")
    if wave is None or not isinstance(rate, int) or rate < 1:
        raise ValueError('a sound is an array, a WAV file or {"array": …, "sampling_rate": …}')
    samples = np.asarray(wave, np.float32)
    if samples.ndim == 2:  # channels first, as torchaudio has them
        samples = samples.mean(axis=0)
    return fit_wave(samples, rate, {"sampling_rate": settings.get("sampling_rate", _RATE)})


ANSWERS: Mapping[str, Callable[..., Any]] = {
    "hidden": _hidden,
    "embed": _embed,
    "similar": _similar,
    "span": _question,
    "classify": _classify,
    "zero-shot": _zero_shot,
    "tag": _tag,
    "choose": _choose,
    "fill": _fill,
    "generate": _generate,
    "rewrite": _rewrite,
    "caption": _caption,
    "detect": _picture_task(_detect),
    "segment": _picture_task(_segment),
    "instances": _picture_task(_instances),
    "depth": _picture_task(lambda outputs, size, card: postprocess.depth(outputs["predicted_depth"], size)),
    "keypoints": _picture_task(
        lambda outputs, size, card: postprocess.keypoints(outputs["heatmaps"], card.get("labels") or (), size)
    ),
    "picture": _picture_task(lambda outputs, size, card: postprocess.picture(outputs["reconstruction"])),
    "reconstruct": _reconstruct,
    "spell": _spell,
    "transcribe": _transcribe,
    "frames": _frames,
    "speaker": _speaker,
    "speak": _speak,
    "forecast": _forecast,
    "zero-shot image": _zero_shot_image,
    "zero-shot detect": _zero_shot_detect,
    "arrays": _arrays,
}
