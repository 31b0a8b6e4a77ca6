"""Question answering: the span of a context that answers a question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.tasks.inputs import each
from onward.tasks.scores import softmax

if TYPE_CHECKING:
    from onward.pipeline.load import Pipeline


def answer_question(
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
    """The answer to a question in a context, or the `top_k` best."""
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
        spans = _best_spans(
            context,
            windows,
            starts,
            ends,
            top_k=top_k,
            longest=max_answer_len,
            cls_id=settings.get("cls_id"),
            whole_words=align_to_words,
            may_lack=handle_impossible_answer,
            part=int(_context_is_last(pipeline)),
        )
        nothing = {"answer": "", "score": 0.0, "start": 0, "end": 0}
        return spans if top_k > 1 else spans[0] if spans else nothing

    return each(inputs, lambda pair: answer(*pair))


def _context_windows(
    pipeline: Pipeline, question: str, context: str, limit: int, stride: int | None
) -> list[Any]:
    """A long context in overlapping windows, each with the question; the overlap must leave room for it."""
    tokenizer, longest = pipeline.tokenizer, pipeline.card["tokenizer"].get("max_length")
    # models that are padded on the left, as XLNet, were trained with the context first, and so transformers does
    last = _context_is_last(pipeline)
    room = limit - len(tokenizer.encode(question).ids) - 3
    if room < 1:
        raise ValueError(f"the question alone fills the model's {limit} tokens")
    overlap = min(limit // 2, 128) if stride is None else stride
    tokenizer.enable_truncation(
        limit, stride=min(overlap, room - 1), strategy="only_second" if last else "only_first"
    )
    try:
        first = tokenizer.encode(question, context) if last else tokenizer.encode(context, question)
    finally:
        if longest:
            tokenizer.enable_truncation(longest)
        else:
            tokenizer.no_truncation()
    return [first, *first.overflowing]


def _best_spans(
    context: str,
    windows: Sequence[Any],
    starts: Sequence[np.ndarray],
    ends: Sequence[np.ndarray],
    *,
    top_k: int,
    longest: int,
    cls_id: int | None,
    whole_words: bool,
    may_lack: bool,
    part: int = 1,
) -> list[dict[str, Any]]:
    """The likeliest answers over all windows of the context, best first; one in two windows has the sum of its scores.

    With `may_lack` one answer is none: empty, and as likely as the first token in the window where that is least so.
    The context is text number `part` of a window.
    """
    answers: dict[str, dict[str, Any]] = {}
    none = np.inf
    for window, start, end in zip(windows, starts, ends):
        inside = np.array([number == part for number in window.sequence_ids])
        weighed = inside | (np.asarray(window.ids) == cls_id)
        if not inside.any():
            continue
        # As transformers: the question is out of the race. The token that begins a text stays in: in front of all for
        # "no answer", and where a pair has it inside, as Llama's, spans may begin or end with it.
        first, last = (softmax(np.where(weighed, scores, -10000.0)) for scores in (start, end))
        none = min(none, float(first[0] * last[0]))
        weighed[0] = inside[0]
        joint = np.tril(np.triu(np.outer(first * weighed, last * weighed)), longest - 1)
        # more than asked for: several may be the same words
        count = 2 * top_k + 10 if whole_words else top_k
        for cell in np.argsort(-joint, axis=None, kind="stable")[:count]:
            left, right = (int(index) for index in np.unravel_index(cell, joint.shape))
            if not joint[left, right]:
                break
            begin, stop = _characters(window, left, right, part, whole_words=whole_words)
            span = answers.setdefault(
                context[begin:stop].lower(),
                {"answer": context[begin:stop], "score": 0.0, "start": begin, "end": stop},
            )
            span["score"] += float(joint[left, right])
    spans = list(answers.values())
    if may_lack:
        spans.append({"answer": "", "score": none, "start": 0, "end": 0})
    return sorted(spans, key=lambda answer: -answer["score"])[:top_k]


def _context_is_last(pipeline: Pipeline) -> bool:
    return pipeline.card["tokenizer"]["padding_side"] != "left"


def _characters(window: Any, first: int, last: int, part: int, *, whole_words: bool) -> tuple[int, int]:
    """Where tokens stand in the context, with the rest of their words if wanted."""
    words = window.token_to_word(first), window.token_to_word(last)
    if not whole_words or None in words:
        return window.offsets[first][0], window.offsets[last][1]
    return window.word_to_chars(words[0], part)[0], window.word_to_chars(words[1], part)[1]
