"""From a model's output arrays to what a person asked for: labels, spans, words, text.

Pure functions over numpy arrays and tokenizer encodings, and two greedy loops that call a pipeline's `run`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from onward.pipeline.load import Pipeline

__all__ = [
    "best_span",
    "continue_tokens",
    "entailed",
    "fill",
    "grouped",
    "labelled",
    "softmax",
    "tagged",
    "write_tokens",
]


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities over the last axis, in float64.

    >>> softmax(np.zeros(2)).tolist()
    [0.5, 0.5]
    """
    shifted = np.exp(np.asarray(logits, np.float64) - np.max(logits, axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


def labelled(
    logits: np.ndarray, labels: Sequence[str], problem_type: str | None, *, top_k: int | None
) -> Any:
    """Labels with scores, best first: one, `top_k` of them, or all for None."""
    if problem_type == "regression" or (problem_type is None and len(logits) == 1):
        scores = np.asarray(logits, np.float64)
    elif problem_type == "multi_label_classification":
        scores = 1.0 / (1.0 + np.exp(-np.asarray(logits, np.float64)))
    else:
        scores = softmax(logits)
    order = np.argsort(-scores, kind="stable")
    ranked = [{"label": labels[index], "score": float(scores[index])} for index in order]
    return ranked[0] if top_k == 1 else ranked[:top_k]


def entailed(
    logits: np.ndarray, candidates: Sequence[str], labels: Sequence[str], *, multi_label: bool
) -> list[dict[str, Any]]:
    """Candidates by how far the text entails them; `logits` has one row for each."""
    lowered = [label.lower() for label in labels]
    entailment = next((i for i, label in enumerate(lowered) if label.startswith("entail")), len(labels) - 1)
    if multi_label:
        contradiction = next((i for i, label in enumerate(lowered) if label.startswith("contra")), 0)
        scores = softmax(logits[:, [contradiction, entailment]])[:, 1]
    else:
        scores = softmax(logits[:, entailment])
    order = np.argsort(-scores, kind="stable")
    return [{"label": candidates[index], "score": float(scores[index])} for index in order]


def tagged(text: str, encoding: Any, logits: np.ndarray, labels: Sequence[str]) -> list[dict[str, Any]]:
    """The best label of every token of the text; special tokens are left out."""
    probabilities = softmax(logits)
    best = probabilities.argmax(axis=-1)
    tokens = []
    for index, (start, end) in enumerate(encoding.offsets):
        if encoding.special_tokens_mask[index]:
            continue
        tokens.append(
            {
                "label": labels[best[index]],
                "score": float(probabilities[index, best[index]]),
                "text": text[start:end],
                "start": start,
                "end": end,
            }
        )
    return tokens


def grouped(text: str, tokens: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Runs of one name as one entry: B- begins, I- goes on, O is nothing; the score is the mean."""
    groups: list[list[Mapping[str, Any]]] = []
    previous = ""
    for token in tokens:
        prefix, _, name = str(token["label"]).rpartition("-")
        if token["label"] == "O":
            previous = ""
            continue
        if groups and name == previous and prefix != "B":
            groups[-1].append(token)
        else:
            groups.append([token])
        previous = name
    return [
        {
            "label": str(group[0]["label"]).rpartition("-")[2],
            "score": float(np.mean([token["score"] for token in group])),
            "text": text[group[0]["start"] : group[-1]["end"]],
            "start": group[0]["start"],
            "end": group[-1]["end"],
        }
        for group in groups
    ]


def best_span(
    context: str,
    windows: Sequence[Any],
    starts: Sequence[np.ndarray],
    ends: Sequence[np.ndarray],
    longest: int,
) -> dict[str, Any]:
    """The likeliest answer over all windows of the context, at most `longest` tokens."""
    best: dict[str, Any] = {"answer": "", "score": 0.0, "start": 0, "end": 0}
    for window, start, end in zip(windows, starts, ends):
        inside = np.array([part == 1 for part in window.sequence_ids])
        if not inside.any():
            continue
        p_start = np.where(inside, softmax(start), 0.0)
        p_end = np.where(inside, softmax(end), 0.0)
        joint = np.triu(np.outer(p_start, p_end))
        joint = np.tril(joint, longest - 1)
        first, last = np.unravel_index(int(joint.argmax()), joint.shape)
        if joint[first, last] > best["score"]:
            left, right = window.offsets[first][0], window.offsets[last][1]
            best = {
                "answer": context[left:right],
                "score": float(joint[first, last]),
                "start": left,
                "end": right,
            }
    return best


def fill(
    tokenizer: Any, encoding: Any, logits: np.ndarray, mask: int, top_k: int
) -> list[list[dict[str, Any]]]:
    """For each mask in the text its likeliest tokens, each with the text that it makes."""
    results = []
    for position, token in enumerate(encoding.ids):
        if token != mask:
            continue
        probabilities = softmax(logits[position])
        candidates = []
        for index in np.argsort(-probabilities, kind="stable")[:top_k]:
            ids = [*encoding.ids[:position], int(index), *encoding.ids[position + 1 :]]
            candidates.append(
                {
                    "token": tokenizer.decode([int(index)]).strip(),
                    "score": float(probabilities[index]),
                    "text": tokenizer.decode(ids),
                }
            )
        results.append(candidates)
    return results


def continue_tokens(pipeline: Pipeline, feed: Mapping[str, np.ndarray], limit: int) -> list[list[int]]:
    """Greedy continuation of left-padded prompts; keys and values of what was read are kept.

    A model without inputs for them, as one that was trained, reads everything again for every token.
    """
    ends = set(pipeline.card["generation"]["eos_ids"])
    ids, mask = feed["input_ids"], feed["attention_mask"]
    rows = len(ids)
    past = {
        i.name: np.zeros(_empty(i.shape, rows), np.float32)
        for i in pipeline.session.get_inputs()
        if _is_past(i)
    }
    longest = pipeline.card["tokenizer"].get("max_length") or np.inf
    if not past:
        prompts = [row[kept == 1].tolist() for row, kept in zip(ids, mask)]
        return [_reread(pipeline, prompt, min(limit, longest - len(prompt) + 1), ends) for prompt in prompts]
    new: list[list[int]] = [[] for _ in range(rows)]
    done = np.zeros(rows, bool)
    for _ in range(limit):
        if mask.shape[1] > longest:
            break
        outputs = pipeline.run({"input_ids": ids, "attention_mask": mask, **past})
        following = outputs["logits"][:, -1].argmax(axis=-1)
        for row in np.flatnonzero(~done):
            if int(following[row]) in ends:
                done[row] = True
            else:
                new[row].append(int(following[row]))
        if done.all():
            break
        past = {name: outputs[f"present.{name.partition('.')[2]}"] for name in past}
        ids = following[:, None].astype(np.int64)
        mask = np.concatenate([mask, np.ones((rows, 1), np.int64)], axis=1)
    return new


def _reread(pipeline: Pipeline, prompt: list[int], limit: float, ends: set[int]) -> list[int]:
    """One prompt at a time: without padding a model needs no positions from us."""
    new: list[int] = []
    while len(new) < limit:
        ids = np.asarray([prompt + new], np.int64)
        feed = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        taken = {name: array for name, array in feed.items() if name in pipeline.card["inputs"]}
        following = int(pipeline.run(taken)["logits"][0, -1].argmax())
        if following in ends:
            break
        new.append(following)
    return new


def write_tokens(pipeline: Pipeline, feed: Mapping[str, np.ndarray], limit: int) -> list[list[int]]:
    """Greedy output of an encoder-decoder."""
    settings = pipeline.card["generation"]
    ends = set(settings["eos_ids"])
    rows = len(feed["input_ids"])
    written = np.full((rows, 1), settings["start_id"] or 0, np.int64)
    done = np.zeros(rows, bool)
    new: list[list[int]] = [[] for _ in range(rows)]
    for step in range(limit):
        logits = pipeline.run({**feed, "decoder_input_ids": written})["logits"][:, -1]
        following = logits.argmax(axis=-1).astype(np.int64)
        if step == 0 and settings.get("forced_bos_id") is not None:
            following[:] = settings["forced_bos_id"]
        for row in np.flatnonzero(~done):
            if int(following[row]) in ends:
                done[row] = True
            else:
                new[row].append(int(following[row]))
        if done.all():
            break
        written = np.concatenate([written, following[:, None]], axis=1)
    return new


def _is_past(value: Any) -> bool:
    return value.name.startswith("past_key_values.")


def _empty(shape: Sequence[int | str], rows: int) -> tuple[int, ...]:
    """A cache's shape before anything was read: [batch, heads, 0, size]."""
    return (rows, int(shape[1]), 0, int(shape[3]))
