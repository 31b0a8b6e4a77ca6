"""Vectors of texts, tokens, images and voices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.errors import ModelError
from onward.escape import first_of
from onward.tasks.classifier import Classifier
from onward.tasks.inputs import each, in_batch, signal
from onward.tasks.protocol import Arrays, Predictor

if TYPE_CHECKING:
    from onward.pipeline.load import Pipeline


VECTOR = "sentence_embedding"
# outputs that are vectors already, by the names that exporters give them
POOLED = (VECTOR, "embeddings", "pooled", "image_embeds", "text_embeds")


def find_vectors(outputs: Arrays) -> np.ndarray:
    """The output that has a vector for each row."""
    named = next((outputs[name] for name in POOLED if name in outputs), None)
    vectors = named if named is not None else next((a for a in outputs.values() if a.ndim == 2), None)
    if vectors is None:
        raise ModelError(
            f"none of the outputs {first_of(list(outputs))} is a vector for each text",
            hint="train it first: onward finetune --task embeddings puts one in",
        )
    return vectors


class Embedder(Predictor):
    """A loaded encoder. Call it with one input or a list; the result is a vector, or an array with a row for each."""

    def __call__(self, inputs: Any, *, batch_size: int = 32) -> np.ndarray:
        """The vectors of one input, or of each of a list."""
        items = inputs if isinstance(inputs, list) else [inputs]
        names = [value.name for value in self.session.get_outputs()]
        prepare = Classifier(self.session, self.info, self.tokenizer).prepare
        parts = []
        for start in range(0, len(items), batch_size):
            feed = prepare(items[start : start + batch_size])
            parts.append(find_vectors(dict(zip(names, self.session.run(names, feed)))))
        vectors = np.concatenate(parts) if parts else np.empty((0, 0), np.float32)
        return vectors if isinstance(inputs, list) else vectors[0]


def hidden_states(pipeline: Pipeline, inputs: Any) -> Any:
    """One vector for each token, patch or frame."""
    if pipeline.tokenizer is None:
        return each(inputs, lambda item: pipeline.run(signal(pipeline, item))["last_hidden_state"][0])

    def answer(texts: list[Any]) -> list[np.ndarray]:
        feed, encodings = pipeline.encode(texts)
        states = pipeline.run(feed)["last_hidden_state"]
        return [pipeline.trim(row, encoding) for row, encoding in zip(states, encodings)]

    return in_batch(inputs, answer)


def embed(pipeline: Pipeline, inputs: Any, *, batch_size: int = 32) -> np.ndarray:
    """One vector for each text."""
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


def similarities(
    pipeline: Pipeline, inputs: str, others: Sequence[str] | None = None, **options: Any
) -> list[float]:
    """The cosine of a text's vector with those of others."""
    if others is None:
        raise TypeError("sentence similarity takes a sentence and others: pipeline(text, ['one', 'another'])")
    vectors = np.asarray(embed(pipeline, [inputs, *others], **options), np.float64)
    lengths = np.maximum(np.linalg.norm(vectors, axis=1), 1e-12)
    return [float(score) for score in vectors[1:] @ vectors[0] / lengths[1:] / lengths[0]]


def embed_voice(pipeline: Pipeline, inputs: Any) -> Any:
    """A speaker's vector, of length 1."""

    def answer(wave: Any) -> np.ndarray:
        # speakers are compared by the product of their vectors
        vector = pipeline.run(signal(pipeline, wave))["embeddings"][0]
        return vector / max(float(np.linalg.norm(vector)), 1e-12)

    return each(inputs, answer)
