"""Outputs of a model as scores: probabilities, labels with them, the figures of a search and of names in a text."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from onward.tasks.protocol import Arrays


_TOP = 10
# so many queries are compared with all answers at a time: 512 × 100,000 numbers are 200 MB
_BLOCK = 512


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities over the last axis, in float64.

    >>> softmax(np.zeros(2)).tolist()
    [0.5, 0.5]
    """
    # e to the power of a large logit overflows
    shifted = np.exp(np.asarray(logits, np.float64) - np.max(logits, axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """1 / (1 + e^−x), in float64."""
    return 1.0 / (1.0 + np.exp(-np.asarray(logits, np.float64)))


FUNCTIONS = {"softmax": softmax, "sigmoid": sigmoid, "none": lambda logits: np.asarray(logits, np.float64)}
"""What turns outputs into scores, under the names of `function_to_apply` in transformers."""


def joint_metrics(
    names: Sequence[str], judge: Callable[[Arrays, Arrays], Mapping[str, float]]
) -> dict[str, Callable[[Arrays, Arrays], float]]:
    """Metrics of these names that `judge` computes together: once for the outputs of an evaluation."""
    last: list[Any] = [None, {}]

    def figure(name: str, outputs: Arrays, inputs: Arrays) -> float:
        if last[0] is not outputs or name not in last[1]:
            figures = judge(outputs, inputs)
            last[:] = outputs, {one: figures[one] for one in names}
        value = float(last[1].pop(name))
        if not last[1]:
            last[0] = None  # outputs may be large, and those of the next evaluation come while these are held
        return value

    return {name: functools.partial(figure, name) for name in names}


def label_scores(
    logits: np.ndarray, labels: Sequence[str], function: str, *, top_k: int | None
) -> list[dict[str, Any]]:
    """The `top_k` likeliest labels with their scores (all for None), best first; `function` is one of `FUNCTIONS`."""
    scores = FUNCTIONS[function](logits)
    order = np.argsort(-scores, kind="stable")
    return [{"label": labels[index], "score": float(scores[index])} for index in order][:top_k]


def resized(planes: np.ndarray, size: tuple[int, int], *, cubic: bool = False) -> np.ndarray:
    """[…, height, width] at another size, between the centres of pixels, the edges repeated."""
    for axis, new in zip((-2, -1), size):
        old = planes.shape[axis]
        positions = (np.arange(new) + 0.5) * old / new - 0.5
        # as torch: linear interpolation clamps positions, cubic the indices of its neighbours
        positions = positions if cubic else np.clip(positions, 0, old - 1)
        low = np.floor(positions).astype(int)
        share = positions - low
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


# --- How good vectors are. Those of a batch are rows, the views of a sample one after the other.


def rank_pairs(
    vectors: np.ndarray, views: int, keys: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """For each anchor the ranks (from 0) of its right answers among all positives and negatives; and their number.

    `keys` has a row for each vector: those of equal rows are one answer, which may be right for several anchors.
    """
    groups = unit_rows(vectors).reshape(-1, views, vectors.shape[1])
    anchors, answers = groups[:, 0], groups[:, 1:].reshape(-1, vectors.shape[1])
    samples = len(anchors)
    own = np.arange(samples) * (views - 1)  # the row of each anchor's positive
    queries = np.arange(samples)
    # a text that answers several questions is one row to find, not a rival of itself
    if keys is not None:
        flat = keys.reshape(samples, views, -1)
        _, first, own_of = np.unique(
            flat[:, 1:].reshape(samples * (views - 1), -1), axis=0, return_index=True, return_inverse=True
        )
        answers, own = answers[first], own_of.reshape(samples, views - 1)[:, 0]
        _, queries = np.unique(flat[:, 0], axis=0, return_inverse=True)
        queries = queries.reshape(-1)
    right: dict[int, set[int]] = {}
    for query, answer in zip(queries.tolist(), own.tolist()):
        right.setdefault(query, set()).add(answer)
    most = max(map(len, right.values()))
    # behind every answer and every @k: an anchor with fewer right answers than another has no more to find
    ranks = np.full((samples, most), max(len(answers), _TOP))
    counts = np.asarray([len(right[query]) for query in queries.tolist()])
    for start in range(0, samples, _BLOCK):
        scores = anchors[start : start + _BLOCK] @ answers.T
        for row, line in enumerate(scores, start=start):
            members = sorted(right[int(queries[row])])
            # a tie counts against the model
            others = np.delete(line, members)
            places = np.asarray([np.count_nonzero(others >= line[member]) for member in members])
            order = np.argsort(-line[members], kind="stable")
            ranks[row, : len(members)] = places[order] + np.arange(len(members))
    return ranks, counts


def retrieval_figures(ranks: np.ndarray, counts: np.ndarray) -> dict[str, float]:
    """recall@1 and @10, the mean reciprocal rank and NDCG@10 of ranks that `rank_pairs` gave.

    >>> figures = retrieval_figures(np.array([[0], [3]]), np.array([1, 1]))
    >>> figures["recall@1"], figures["recall@10"], figures["mrr"]
    (0.5, 1.0, 0.625)
    """
    gains = np.where(ranks < _TOP, 1.0 / np.log2(ranks + 2.0), 0.0).sum(axis=1)
    # the gain of an order in which all right answers come first
    ideal = np.cumsum(1.0 / np.log2(np.arange(_TOP) + 2.0))[np.minimum(counts, _TOP) - 1]
    return {
        "recall@1": float(np.mean((ranks < 1).sum(axis=1) / counts)),
        f"recall@{_TOP}": float(np.mean((ranks < _TOP).sum(axis=1) / counts)),
        "mrr": float(np.mean(1.0 / (ranks[:, 0] + 1.0))),
        f"ndcg@{_TOP}": float(np.mean(gains / ideal)),
    }


def unit_rows(vectors: np.ndarray) -> np.ndarray:
    """Vectors of length 1."""
    # float32 would make ties of close answers, and a tie counts against the model
    exact = np.asarray(vectors, np.float64)
    return exact / np.maximum(np.linalg.norm(exact, axis=-1, keepdims=True), 1e-12)


def spearman(similarities: np.ndarray, scores: np.ndarray) -> float:
    """The correlation of the ranks; equal numbers share their mean rank. NaN where one side is constant.

    >>> spearman(np.array([0.1, 0.2, 0.9]), np.array([1, 2, 3]))
    1.0
    """
    one, other = _ranks(similarities), _ranks(scores)
    spread = float(np.std(one) * np.std(other))
    return float(np.mean((one - one.mean()) * (other - other.mean())) / spread) if spread else float("nan")


def _ranks(numbers: np.ndarray) -> np.ndarray:
    _, places, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[places]


def token_keys(inputs: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """What tells texts apart, whatever they are padded to: their tokens, with −1 for padding."""
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if ids is None:
        return None
    # batches of other lengths are joined with −1, in the mask as well
    return np.asarray(ids) if mask is None else np.where(np.asarray(mask) == 1, ids, -1)


# --- Names in tag sequences, and how many of them are right: as CoNLL and seqeval count them.

Entity = tuple[str, int, int]


def entities_of(tags: Sequence[str]) -> list[Entity]:
    """The names of a sequence as (kind, first, last), in IOB, IOB2, IOE and BILOU alike.

    >>> entities_of(["B-PER", "I-PER", "O", "I-LOC", "B-LOC"])
    [('PER', 0, 1), ('LOC', 3, 3), ('LOC', 4, 4)]
    """
    entities: list[Entity] = []
    start, previous, kind = 0, "O", ""
    # the O behind the end closes a name that reaches it
    for index, tag in enumerate([*tags, "O"]):
        mark, own = _parts(tag)
        if _ends(previous, mark, kind, own):
            entities.append((kind, start, index - 1))
        if _begins(previous, mark, kind, own):
            start = index
        previous, kind = mark, own
    return entities


def _parts(tag: str) -> tuple[str, str]:
    """Mark and kind; a tag without a mark is a name of its own, continued by the same tag."""
    if tag == "O":
        return "O", ""
    mark, dash, kind = tag.partition("-")
    return (mark, kind) if dash and mark in tuple("BIESLU") else ("I", tag)


def _ends(previous: str, mark: str, before: str, kind: str) -> bool:
    if previous == "O":
        return False
    return previous in "ESLU" or mark in "BSUO" or before != kind


def _begins(previous: str, mark: str, before: str, kind: str) -> bool:
    if mark == "O":
        return False
    return mark in "BSU" or previous in "ESLUO" or before != kind


def score_entities(
    true: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]
) -> tuple[dict[str, float], list[list]]:
    """Micro-averaged precision, recall and F1 over all names, and a row for each kind."""
    counts: dict[str, list[int]] = {}
    for one, other in zip(true, predicted):
        right, called = set(entities_of(one)), set(entities_of(other))
        for kind in {entity[0] for entity in right | called}:
            hits, of_called, of_right = counts.setdefault(kind, [0, 0, 0])
            mine, theirs = ({e for e in side if e[0] == kind} for side in (right, called))
            counts[kind] = [hits + len(mine & theirs), of_called + len(theirs), of_right + len(mine)]
    rows = [[kind, *_figures(*counts[kind]), counts[kind][2]] for kind in sorted(counts)]
    total = [sum(values) for values in zip(*counts.values())] if counts else [0, 0, 0]
    precision, recall, f1 = _figures(*total)
    return {"precision": precision, "recall": recall, "f1": f1}, rows


def _figures(hits: int, called: int, right: int) -> tuple[float, float, float]:
    """Precision, recall, F1; 0 where there is nothing to divide by, as seqeval has it."""
    precision = hits / called if called else 0.0
    recall = hits / right if right else 0.0
    return precision, recall, 2 * hits / (called + right) if called + right else 0.0
