"""Turns a model's output arrays into results: labels, spans, tokens, text.

Pure functions over numpy arrays and tokenizer encodings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

__all__ = [
    "FUNCTIONS",
    "STRATEGIES",
    "best_spans",
    "boxes",
    "depth",
    "entailed",
    "fill",
    "grouped",
    "instances",
    "keypoints",
    "labelled",
    "panoptic",
    "picture",
    "resized",
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


FUNCTIONS = {"softmax": softmax, "sigmoid": sigmoid, "none": lambda logits: np.asarray(logits, np.float64)}
"""What turns outputs into scores, under the names of `function_to_apply` in transformers."""


def labelled(
    logits: np.ndarray, labels: Sequence[str], function: str, *, top_k: int | None
) -> list[dict[str, Any]]:
    """The `top_k` likeliest labels with their scores (all for None), best first; `function` is one of `FUNCTIONS`."""
    scores = FUNCTIONS[function](logits)
    order = np.argsort(-scores, kind="stable")
    return [{"label": labels[index], "score": float(scores[index])} for index in order][:top_k]


def entailed(
    logits: np.ndarray, candidates: Sequence[str], labels: Sequence[str], *, multi_label: bool
) -> list[dict[str, Any]]:
    """Candidates by how far the text entails them; `logits` has one row for each."""
    lowered = [label.lower() for label in labels]
    entailment = next((i for i, label in enumerate(lowered) if label.startswith("entail")), len(labels) - 1)
    if multi_label or len(candidates) == 1:
        contradiction = -1 if entailment == 0 else 0
        scores = softmax(logits[:, [contradiction, entailment]])[:, 1]
    else:
        scores = softmax(logits[:, entailment])
    order = np.argsort(-scores, kind="stable")
    return [{"label": candidates[index], "score": float(scores[index])} for index in order]


def tagged(
    text: str,
    encoding: Any,
    logits: np.ndarray,
    labels: Sequence[str],
    *,
    words: str | None = None,
    begins: Any = None,
) -> list[dict[str, Any]]:
    """The best label of every token of the text, or of every word; special tokens are left out.

    A word's scores are those of its first token, the mean of all, or those of its surest token (`words`);
    `begins(index)` says which tokens begin one.
    """
    probabilities = softmax(logits)
    groups: list[list[int]] = []
    for index, special in enumerate(encoding.special_tokens_mask):
        if special:
            continue
        if words is None or not groups or begins(index):
            groups.append([])
        groups[-1].append(index)
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
    """Runs of one name as one entry: B- begins one, anything else goes on; the score is the mean."""
    groups: list[list[Mapping[str, Any]]] = []
    for token in tokens:
        label = str(token["label"])
        if groups and not label.startswith("B-") and _name(label) == _name(groups[-1][-1]["label"]):
            groups[-1].append(token)
        else:
            groups.append([token])
    return [
        {
            "label": str(group[0]["label"]).split("-", 1)[-1],
            "score": float(np.mean([token["score"] for token in group])),
            "text": text[group[0]["start"] : group[-1]["end"]],
            "start": group[0]["start"],
            "end": group[-1]["end"],
        }
        for group in groups
    ]


def _name(label: str) -> str:
    return label[2:] if label.startswith(("B-", "I-")) else label


def best_spans(
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
) -> list[dict[str, Any]]:
    """The likeliest answers over all windows of the context, best first; one in two windows has the sum of its scores.

    With `may_lack` one answer is none: empty, and as likely as the first token in the window where that is least so.
    """
    answers: dict[str, dict[str, Any]] = {}
    none = np.inf
    for window, start, end in zip(windows, starts, ends):
        inside = np.array([part == 1 for part in window.sequence_ids])
        weighed = inside | (np.asarray(window.ids) == cls_id)
        if not inside.any():
            continue
        first, last = (softmax(np.where(weighed, scores, -10000.0)) for scores in (start, end))
        none = min(none, float(first[0] * last[0]))
        joint = np.tril(np.triu(np.outer(first * inside, last * inside)), longest - 1)
        # more than asked for: several may be the same words
        count = 2 * top_k + 10 if whole_words else top_k
        for place in np.argsort(-joint, axis=None, kind="stable")[:count]:
            left, right = (int(index) for index in np.unravel_index(place, joint.shape))
            if not joint[left, right]:
                break
            begin, stop = _characters(window, left, right, whole_words=whole_words)
            known = answers.setdefault(
                context[begin:stop].lower(),
                {"answer": context[begin:stop], "score": 0.0, "start": begin, "end": stop},
            )
            known["score"] += float(joint[left, right])
    found = list(answers.values())
    if may_lack:
        found.append({"answer": "", "score": none, "start": 0, "end": 0})
    return sorted(found, key=lambda answer: -answer["score"])[:top_k]


def _characters(window: Any, first: int, last: int, *, whole_words: bool) -> tuple[int, int]:
    """Where tokens stand in the context, with the rest of their words if wanted."""
    words = window.token_to_word(first), window.token_to_word(last)
    if not whole_words or None in words:
        return window.offsets[first][0], window.offsets[last][1]
    return window.word_to_chars(words[0], 1)[0], window.word_to_chars(words[1], 1)[1]


def fill(
    decode: Callable[..., str],
    encoding: Any,
    logits: np.ndarray,
    mask: int,
    top_k: int,
    targets: Sequence[int] | None = None,
) -> list[list[dict[str, Any]]]:
    """For each mask in the text its likeliest tokens, or `targets` by likelihood, each with the text that it makes."""
    places = [position for position, token in enumerate(encoding.ids) if token == mask]
    results = []
    for position in places:
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
                    "text": decode(ids, skip_special_tokens=len(places) == 1),
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


def panoptic(
    classes: np.ndarray,
    masks: np.ndarray,
    labels: Sequence[str],
    size: tuple[int, int],
    *,
    threshold: float,
    mask_threshold: float,
    overlap: float,
) -> list[dict[str, Any]]:
    """A mask (255 inside) for every object over the threshold: each pixel goes to the surest of all.

    An object of which less than `overlap` is left, of the pixels over `mask_threshold`, is dropped.
    """
    scores = softmax(classes)
    best = scores.argmax(axis=1)
    sure = scores.max(axis=1)
    kept = np.flatnonzero((best != classes.shape[1] - 1) & (sure > threshold))
    if not len(kept):
        return []
    weighed = resized(sigmoid(masks[kept]).astype(np.float32), size) * sure[kept, None, None].astype(
        np.float32
    )
    owner = weighed.argmax(axis=0)
    found = []
    for place, query in enumerate(kept):
        mask, whole = owner == place, int((weighed[place] >= mask_threshold).sum())
        if mask.any() and whole and mask.sum() / whole > overlap:
            label = labels[int(best[query])]
            found.append({"score": float(sure[query]), "label": label, "mask": (mask * 255).astype(np.uint8)})
    return found


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
