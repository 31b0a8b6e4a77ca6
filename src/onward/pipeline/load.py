"""Answer from an exported folder: text, images or sound in, embeddings, labels or text out.

Knows the folder's card, its tokenizer and the runtime; `postprocess` turns outputs into results and `preprocess`
prepares images and sound. Needs neither torch nor transformers: `tokenizers` only where text goes in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from onward.data import preprocess
from onward.errors import ModelError
from onward.export.huggingface.folder import CARD, MODEL, read_card
from onward.pipeline import postprocess
from onward.pipeline.classifier import Classifier, load_file

__all__ = ["Pipeline", "load"]

Text = str | tuple[str, str]


def load(
    folder: str | PathLike[str],
    *,
    providers: Sequence[str] = ("CPUExecutionProvider",),
    session_options: Any = None,
) -> Pipeline | Classifier:
    """Load a folder that `from_transformers` wrote, or a model file that `onward deploy` wrote.

    Call the result with text, images, sound or rows of a table.

    >>> import onward
    >>> embed = onward.load("embedder")
    >>> embed("some text").shape
    (16,)
    """
    path = Path(folder)
    if path.is_file():
        return load_file(path, providers=providers, session_options=session_options)
    card = read_card(path)
    if card["task"] not in _ANSWERS:
        raise ModelError(
            f"'{path / CARD}': no answers for task {card['task']!r}; known: {', '.join(_ANSWERS)}"
        )
    if card.get("training"):
        raise ModelError(f"'{path}' holds a model for training; export without training=True to load it")
    import onnxruntime

    from onward.runtime.sessions import unwanted_fusions

    options = session_options
    if options is None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
    if not (path / MODEL).is_file():
        raise ModelError(f"'{path}': no {MODEL}")
    session = onnxruntime.InferenceSession(
        str(path / MODEL),
        options,
        providers=list(providers),
        disabled_optimizers=unwanted_fusions(providers),
    )
    return Pipeline(session=session, card=card, tokenizer=_tokenizer(path, card))


@dataclass(frozen=True)
class Pipeline:
    """A loaded model. Call it with one input or a list of them; the answer has the same form.

    What comes back depends on `task`:

    - pooling: an embedding; default and feature-extraction: one vector per token
    - text-, image- and audio-classification: `{"label", "score"}`, best first; `top_k=None` for all
    - zero-shot-classification and -image-classification: the same over `labels=[…]` that the call names
    - token-classification: `{"label", "score", "text", "start", "end"}` per token, or `group=True` per name
    - question-answering: `pipeline(question, context)` gives `{"answer", "score", "start", "end"}`
    - fill-mask: `{"token", "score", "text"}` for each candidate, a list per mask if there are several
    - text-generation and text2text: text; `max_new_tokens=…`
    """

    session: Any
    card: Mapping[str, Any]
    tokenizer: Any

    @property
    def task(self) -> str:
        """The task that the folder was exported for."""
        return self.card["task"]

    def __call__(self, inputs: Any, *args: Any, **options: Any) -> Any:
        """Answer one input, or each of a list."""
        return _ANSWERS[self.task](self, inputs, *args, **options)

    def encode(self, texts: Sequence[Text]) -> tuple[dict[str, np.ndarray], list[Any]]:
        """Token arrays for the model, padded, and the tokenizer's encodings with their offsets."""
        encodings = self.tokenizer.encode_batch(list(texts))
        return self.batch(encodings), encodings

    def batch(self, encodings: Sequence[Any]) -> dict[str, np.ndarray]:
        """Encodings as padded arrays, one for each input that the model takes."""
        settings = self.card["tokenizer"]
        columns = {
            "input_ids": ([encoding.ids for encoding in encodings], settings["pad_id"]),
            "attention_mask": ([encoding.attention_mask for encoding in encodings], 0),
            "token_type_ids": ([encoding.type_ids for encoding in encodings], 0),
        }
        left = settings["padding_side"] == "left"
        return {
            name: _pad(rows, filler, left=left)
            for name, (rows, filler) in columns.items()
            if name in self.card["inputs"]
        }

    def trim(self, row: np.ndarray, encoding: Any) -> np.ndarray:
        """One row of an output without its padding."""
        size = len(encoding.ids)
        return row[len(row) - size :] if self.card["tokenizer"]["padding_side"] == "left" else row[:size]

    def run(self, feed: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The model's outputs by name."""
        names = list(self.card["outputs"])
        return dict(zip(names, self.session.run(names, dict(feed))))


def _tokenizer(folder: Path, card: Mapping[str, Any]) -> Any:
    if "tokenizer" not in card:
        return None
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"'{folder}': no tokenizer.json. The model's tokenizer has no fast form; "
            "run the model with onnxruntime and its own tokenizer"
        )
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ModelError("text needs the tokenizers package: pip install 'onward[text]'") from error
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_padding()
    limit = card["tokenizer"].get("max_length")
    if limit:
        tokenizer.enable_truncation(limit)
    else:
        tokenizer.no_truncation()
    return tokenizer


def _pad(rows: Sequence[Sequence[int]], filler: int, *, left: bool) -> np.ndarray:
    width = max((len(row) for row in rows), default=0)
    batch = np.full((len(rows), width), filler, np.int64)
    for index, row in enumerate(rows):
        batch[index, width - len(row) if left else 0 : width if left else len(row)] = row
    return batch


def _each(inputs: Any, answer: Callable[[list[Any]], Sequence[Any]]) -> Any:
    """One input gives one answer, a list gives a list."""
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


def _classify(pipeline: Pipeline, inputs: Any, *, top_k: int | None = 1) -> Any:
    def scored(logits: np.ndarray) -> Any:
        return postprocess.labelled(
            logits, pipeline.card["labels"], pipeline.card["problem_type"], top_k=top_k
        )

    if pipeline.tokenizer is None:
        run = lambda item: pipeline.run(_signal(pipeline, item))["logits"][0]  # noqa: E731
        return _each(inputs, lambda items: [scored(run(item)) for item in items])
    return _each(
        inputs, lambda texts: [scored(row) for row in pipeline.run(pipeline.encode(texts)[0])["logits"]]
    )


def _zero_shot(
    pipeline: Pipeline,
    inputs: Any,
    labels: Sequence[str] | None = None,
    *,
    template: str = "This example is {}.",
    multi_label: bool = False,
) -> Any:
    if labels is None:
        raise TypeError("zero-shot classification needs labels: pipeline(text, ['sport', 'politics'])")

    def answer(text: str) -> list[dict[str, Any]]:
        pairs = [(text, template.format(label)) for label in labels]
        logits = pipeline.run(pipeline.encode(pairs)[0])["logits"]
        return postprocess.entailed(logits, list(labels), pipeline.card["labels"], multi_label=multi_label)

    return _each(inputs, lambda texts: [answer(text) for text in texts])


def _zero_shot_image(
    pipeline: Pipeline, inputs: Any, labels: Sequence[str] | None = None, *, template: str = "a photo of {}."
) -> Any:
    if labels is None:
        raise TypeError("zero-shot classification needs labels: pipeline(image, ['a cat', 'a dog'])")
    feed, _ = pipeline.encode([template.format(label) for label in labels])

    def answer(picture: Any) -> list[dict[str, Any]]:
        pixels = preprocess.image(picture, pipeline.card.get("processor"))[None]
        logits = pipeline.run({**feed, "pixel_values": pixels})["logits_per_image"][0]
        return postprocess.labelled(logits, list(labels), "single_label_classification", top_k=None)

    return _each(inputs, lambda pictures: [answer(picture) for picture in pictures])


def _tag(pipeline: Pipeline, inputs: Any, *, group: bool = False) -> Any:
    def answer(texts: list[str]) -> list[Any]:
        feed, encodings = pipeline.encode(texts)
        logits = pipeline.run(feed)["logits"]
        results = []
        for text, encoding, row in zip(texts, encodings, logits):
            row = pipeline.trim(row, encoding)
            tokens = postprocess.tagged(text, encoding, row, pipeline.card["labels"])
            results.append(postprocess.grouped(text, tokens) if group else tokens)
        return results

    return _each(inputs, answer)


def _question(
    pipeline: Pipeline,
    inputs: Any,
    context: str | None = None,
    *,
    max_answer_tokens: int = 30,
    stride: int = 64,
) -> Any:
    if context is not None:
        return _span(pipeline, inputs, context, max_answer_tokens, stride)
    pairs = inputs if isinstance(inputs, list) else [inputs]
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise TypeError("question answering takes a question and a context: pipeline(question, context)")
    return _each(inputs, lambda items: [_span(pipeline, a, b, max_answer_tokens, stride) for a, b in items])


def _span(pipeline: Pipeline, question: str, context: str, longest: int, stride: int) -> dict[str, Any]:
    tokenizer = pipeline.tokenizer
    limit = pipeline.card["tokenizer"].get("max_length")
    if limit:
        # A long context is read in overlapping windows; the overlap must leave room for the question.
        room = limit - len(tokenizer.encode(question).ids) - 3
        if room < 1:
            raise ValueError(f"the question alone fills the model's {limit} tokens")
        tokenizer.enable_truncation(limit, stride=min(stride, room // 2), strategy="only_second")
    try:
        first = tokenizer.encode(question, context)
    finally:
        if limit:
            tokenizer.enable_truncation(limit)
    windows = [first, *first.overflowing]
    outputs = pipeline.run(pipeline.batch(windows))
    starts, ends = (
        [pipeline.trim(row, window) for row, window in zip(outputs[name], windows)]
        for name in ("start_logits", "end_logits")
    )
    return postprocess.best_span(context, windows, starts, ends, longest)


def _fill(pipeline: Pipeline, inputs: Any, *, top_k: int = 5) -> Any:
    mask = pipeline.card["tokenizer"]["mask_id"]
    if mask is None:
        raise ModelError("the tokenizer has no mask token, so there is nothing to fill")

    def answer(texts: list[str]) -> list[Any]:
        feed, encodings = pipeline.encode(texts)
        logits = pipeline.run(feed)["logits"]
        filled = [
            postprocess.fill(pipeline.tokenizer, encoding, pipeline.trim(row, encoding), mask, top_k)
            for encoding, row in zip(encodings, logits)
        ]
        for text, candidates in zip(texts, filled):
            if not candidates:
                token = pipeline.card["tokenizer"]["mask_token"]
                raise ValueError(f"no mask in {text!r}: put {token} where a word is missing")
        return [candidates[0] if len(candidates) == 1 else candidates for candidates in filled]

    return _each(inputs, answer)


def _generate(pipeline: Pipeline, inputs: Any, *, max_new_tokens: int = 32, full_text: bool = False) -> Any:
    def answer(texts: list[str]) -> list[str]:
        feed, encodings = pipeline.encode(texts)
        new = postprocess.continue_tokens(pipeline, feed, max_new_tokens)
        decode = pipeline.tokenizer.decode
        results = []
        for encoding, ids in zip(encodings, new):
            # Decoded together and cut: some tokenizers lose the space before a first token.
            prompt, whole = decode(encoding.ids), decode([*encoding.ids, *ids])
            rest = whole[len(prompt) :] if whole.startswith(prompt) else decode(ids)
            results.append(whole if full_text else rest)
        return results

    return _each(inputs, answer)


def _translate(pipeline: Pipeline, inputs: Any, *, max_new_tokens: int = 64) -> Any:
    def answer(texts: list[str]) -> list[str]:
        feed, _ = pipeline.encode(texts)
        return [
            pipeline.tokenizer.decode(ids) for ids in postprocess.write_tokens(pipeline, feed, max_new_tokens)
        ]

    return _each(inputs, answer)


def _signal(pipeline: Pipeline, item: Any) -> dict[str, np.ndarray]:
    (name,) = pipeline.card["inputs"]
    settings = pipeline.card.get("processor")
    prepare = preprocess.image if name == "pixel_values" else preprocess.sound
    return {name: prepare(item, settings)[None]}


_ANSWERS: Mapping[str, Callable[..., Any]] = {
    "default": _hidden,
    "feature-extraction": _hidden,
    "pooling": _embed,
    "question-answering": _question,
    "text-classification": _classify,
    "zero-shot-classification": _zero_shot,
    "token-classification": _tag,
    "fill-mask": _fill,
    "text-generation": _generate,
    "text2text": _translate,
    "text2text-generation": _translate,
    "translation": _translate,
    "summarization": _translate,
    "image-classification": _classify,
    "audio-classification": _classify,
    "zero-shot-image-classification": _zero_shot_image,
}
