"""Fill-mask: the likeliest tokens where a text has a mask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.errors import ModelError
from onward.tasks.inputs import in_batch
from onward.tasks.scores import softmax

if TYPE_CHECKING:
    from onward.pipeline.load import Pipeline


def fill_mask(
    pipeline: Pipeline, inputs: Any, *, top_k: int = 5, targets: str | Sequence[str] | None = None
) -> Any:
    """The candidates for each mask of a text."""
    mask = pipeline.card["tokenizer"]["mask_id"]
    if mask is None:
        raise ModelError("the tokenizer has no mask token, so there is nothing to fill")
    allowed = None if targets is None else _target_ids(pipeline, targets)

    def answer(texts: list[str]) -> list[Any]:
        feed, encodings = pipeline.encode(texts)
        logits = pipeline.run(feed)["logits"]
        filled = [
            _candidates(pipeline.decode, encoding, pipeline.trim(row, encoding), mask, top_k, allowed)
            for encoding, row in zip(encodings, logits)
        ]
        for text, candidates in zip(texts, filled):
            if not candidates:
                token = pipeline.card["tokenizer"]["mask_token"]
                raise ValueError(f"no mask in {text!r}: put {token} where a word is missing")
        return [candidates[0] if len(candidates) == 1 else candidates for candidates in filled]

    return in_batch(inputs, answer)


def _target_ids(pipeline: Pipeline, targets: str | Sequence[str]) -> list[int]:
    """The token of each word, or the first of its tokens."""
    words = [targets] if isinstance(targets, str) else targets
    ids: dict[int, None] = {}
    for word in words:
        # a word that is in the vocabulary is one token, whatever the tokenizer would make of it alone
        whole = pipeline.tokenizer.token_to_id(word)
        tokens = (
            [whole] if whole is not None else pipeline.tokenizer.encode(word, add_special_tokens=False).ids
        )
        ids |= dict.fromkeys(tokens[:1])
    if not ids:
        raise ValueError("targets names no word that the model knows")
    return list(ids)


def _candidates(
    decode: Callable[..., str],
    encoding: Any,
    logits: np.ndarray,
    mask: int,
    top_k: int,
    targets: Sequence[int] | None = None,
) -> list[list[dict[str, Any]]]:
    """For each mask in the text its likeliest tokens, or `targets` by likelihood, each with the text that it makes."""
    masks = [position for position, token in enumerate(encoding.ids) if token == mask]
    results = []
    for position in masks:
        probabilities = softmax(logits[position])
        allowed = np.arange(len(probabilities)) if targets is None else np.asarray(targets)
        candidates = []
        for index in allowed[np.argsort(-probabilities[allowed], kind="stable")][:top_k]:
            ids = [*encoding.ids[:position], int(index), *encoding.ids[position + 1 :]]
            candidates.append(
                {
                    "token": decode([int(index)], skip_special_tokens=False).strip(),
                    "score": float(probabilities[index]),
                    # other masks are to be seen
                    "text": decode(ids, skip_special_tokens=len(masks) == 1),
                }
            )
        results.append(candidates)
    return results
