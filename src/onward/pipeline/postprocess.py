"""Turns a model's output arrays into results: labels, spans, tokens, text.

Pure functions over numpy arrays and tokenizer encodings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

__all__ = [
    "STRATEGIES",
    "best_span",
    "boxes",
    "depth",
    "entailed",
    "fill",
    "grouped",
    "instances",
    "keypoints",
    "labelled",
    "picture",
    "semantic",
    "sigmoid",
    "softmax",
    "spelled",
    "tagged",
]


STRATEGIES = ("none", "simple", "first", "average", "max")
"""How labels of tokens become names: each token alone, runs of tokens, or runs of words."""


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities over the last axis, in float64.

    >>> softmax(np.zeros(2)).tolist()
    [0.5, 0.5]
    """
    shifted = np.exp(np.asarray(logits, np.float64) - np.max(logits, axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """1 / (1 + e^−x), in float64."""
    return 1.0 / (1.0 + np.exp(-np.asarray(logits, np.float64)))


def labelled(
    logits: np.ndarray, labels: Sequence[str], problem_type: str | None, *, top_k: int | None
) -> Any:
    """Labels with scores, best first: one, `top_k` of them, or all for None."""
    if problem_type == "regression":
        scores = np.asarray(logits, np.float64)
    elif problem_type == "multi_label_classification" or len(labels) == 1:
        scores = sigmoid(logits)
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
    if multi_label or len(candidates) == 1:
        contradiction = next((i for i, label in enumerate(lowered) if label.startswith("contra")), 0)
        scores = softmax(logits[:, [contradiction, entailment]])[:, 1]
    else:
        scores = softmax(logits[:, entailment])
    order = np.argsort(-scores, kind="stable")
    return [{"label": candidates[index], "score": float(scores[index])} for index in order]


def tagged(
    text: str, encoding: Any, logits: np.ndarray, labels: Sequence[str], *, words: str | None = None
) -> list[dict[str, Any]]:
    """The best label of every token of the text, or of every word; special tokens are left out.

    A word's scores are those of its first token, the mean of all, or those of its surest token (`words`).
    """
    probabilities = softmax(logits)
    places = [index for index, special in enumerate(encoding.special_tokens_mask) if not special]
    groups = [[index] for index in places]
    if words is not None:
        ids = encoding.word_ids
        edges = [index for index in places if index == places[0] or ids[index] != ids[index - 1]]
        groups = [
            [index for index in places if start <= index < end]
            for start, end in zip(edges, [*edges[1:], len(ids)])
        ]
    found = []
    for group in groups:
        rows = probabilities[group]
        row = rows.mean(axis=0) if words == "average" else rows[0]
        if words == "max":
            row = rows[int(rows.max(axis=1).argmax())]
        start, end = encoding.offsets[group[0]][0], encoding.offsets[group[-1]][1]
        best = int(row.argmax())
        found.append(
            {
                "label": labels[best],
                "score": float(row[best]),
                "text": text[start:end],
                "start": start,
                "end": end,
            }
        )
    return found


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
                    "token": tokenizer.decode([int(index)], skip_special_tokens=False).strip(),
                    "score": float(probabilities[index]),
                    "text": tokenizer.decode(ids),
                }
            )
        results.append(candidates)
    return results


def spelled(logits: np.ndarray, spelling: Mapping[str, Any]) -> str:
    """The text of a recogniser's frames: the best class of each, repetitions and blanks left out."""
    best = np.asarray(logits).argmax(axis=-1)
    changed = np.concatenate([[True], best[1:] != best[:-1]])
    ids = best[changed & (best != spelling["blank_id"])].tolist()
    tokens = spelling["tokens"]
    if tokens is None:
        return " ".join(map(str, ids))
    delimiter = spelling.get("word_delimiter")
    words = [tokens[index] if index < len(tokens) else "<unk>" for index in ids]
    text = "".join(" " if word == delimiter else word for word in words).strip()
    return text.lower() if spelling.get("lower") else text


def boxes(
    scores: np.ndarray, found: np.ndarray, labels: Sequence[str], size: tuple[int, int], threshold: float
) -> list[dict[str, Any]]:
    """Boxes over the threshold, in the model's order; `scores` [boxes, labels], `found` as centre and size, 0 to 1."""
    height, width = size
    best = scores.argmax(axis=-1)
    x, y, w, h = np.asarray(found, np.float64).T
    corners = np.stack([x - w / 2, y - h / 2, x + w / 2, y + h / 2], axis=1) * [width, height, width, height]
    return [
        {
            "score": float(scores[index, best[index]]),
            "label": labels[best[index]],
            "box": dict(zip(("xmin", "ymin", "xmax", "ymax"), (int(edge) for edge in corners[index]))),
        }
        for index in range(len(scores))
        if scores[index, best[index]] > threshold
    ]


def resized(planes: np.ndarray, size: tuple[int, int], *, cubic: bool = False) -> np.ndarray:
    """[…, height, width] at another size, between the centres of pixels, the edges repeated."""
    for axis, new in zip((-2, -1), size):
        old = planes.shape[axis]
        places = (np.arange(new) + 0.5) * old / new - 0.5
        places = places if cubic else np.clip(places, 0, old - 1)
        low = np.floor(places).astype(int)
        share = places - low
        total = np.zeros(())
        for offset, weight in _cubic(share) if cubic else ((0, 1 - share), (1, share)):
            weight = weight.astype(planes.dtype)
            part = np.take(planes, np.clip(low + offset, 0, old - 1), axis)
            total = total + part * (weight[:, None] if axis == -2 else weight)
        planes = total
    return planes


def _cubic(share: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """The weights of the four neighbours, as torch's interpolation has them."""
    a = -0.75

    def near(x: np.ndarray) -> np.ndarray:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: np.ndarray) -> np.ndarray:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return [(-1, far(share + 1)), (0, near(share)), (1, near(1 - share)), (2, far(2 - share))]


def semantic(logits: np.ndarray, labels: Sequence[str], size: tuple[int, int]) -> list[dict[str, Any]]:
    """A mask (255 inside) of the picture's size for every class that is the best one somewhere."""
    classes = resized(np.asarray(logits, np.float32), size).argmax(axis=0)
    return [
        {"score": None, "label": labels[index], "mask": ((classes == index) * 255).astype(np.uint8)}
        for index in np.unique(classes)
    ]


def instances(
    classes: np.ndarray, masks: np.ndarray, labels: Sequence[str], size: tuple[int, int], threshold: float
) -> list[dict[str, Any]]:
    """A mask (255 inside) for every object as sure as the threshold; where two overlap, the later one has it."""
    queries, count = classes.shape[0], classes.shape[1] - 1
    scores = softmax(classes)[:, :-1].reshape(-1)
    best = np.argsort(-scores, kind="stable")[:queries]
    rows = (np.arange(size[0]) * masks.shape[1] / size[0]).astype(int)
    columns = (np.arange(size[1]) * masks.shape[2] / size[1]).astype(int)
    owner = np.full(size, -1)
    found: list[tuple[float, str]] = []
    for place in best:
        query, label = divmod(int(place), count)
        inside = masks[query] > 0
        sure = float(scores[place]) * float(sigmoid(masks[query])[inside].sum() / (inside.sum() + 1e-6))
        mask = inside[rows][:, columns]
        if mask.any() and sure >= threshold:
            owner[mask] = len(found)
            found.append((sure, labels[label]))
    return [
        {"score": score, "label": label, "mask": ((owner == index) * 255).astype(np.uint8)}
        for index, (score, label) in enumerate(found)
    ]


def depth(predicted: np.ndarray, size: tuple[int, int]) -> dict[str, np.ndarray]:
    """Depth at the picture's size, and the same as a picture from 0 to 255."""
    full = resized(np.asarray(predicted, np.float32), size, cubic=True)
    spread = full.max() - full.min()
    scaled = (full - full.min()) / (spread if spread > 0 else 1.0) * 255
    return {"predicted_depth": full, "depth": scaled.astype(np.uint8)}


def keypoints(heatmaps: np.ndarray, labels: Sequence[str], size: tuple[int, int]) -> list[dict[str, Any]]:
    """The hottest place of each map, in pixels of the picture."""
    height, width = heatmaps.shape[-2:]
    results = []
    for index, heat in enumerate(heatmaps):
        row, column = np.unravel_index(int(heat.argmax()), heat.shape)
        results.append(
            {
                "label": labels[index] if index < len(labels) else str(index),
                "score": float(heat[row, column]),
                "x": (float(column) + 0.5) * size[1] / width,
                "y": (float(row) + 0.5) * size[0] / height,
            }
        )
    return results


def picture(planes: np.ndarray) -> np.ndarray:
    """[channels, height, width] from 0 to 1 as [height, width, channels] bytes."""
    return (np.clip(planes, 0, 1).transpose(1, 2, 0) * 255).round().astype(np.uint8)
