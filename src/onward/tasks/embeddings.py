"""Embeddings: a vector for a text, a token, an image or a voice.

The first half trains an encoder on pairs, the second has the answers of exported folders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import onnx_ir as ir

from onward import contract, losses
from onward.data.collate import CollatedBatches
from onward.data.images import read_images
from onward.data.pairs import read_pairs
from onward.data.read import Data
from onward.data.sound import read_sounds
from onward.data.splits import take_rows
from onward.data.text import open_tokenizer, takes_tokens, tokenize
from onward.errors import DataError, ModelError
from onward.graph.load import load_model
from onward.graph.passes.pooling import Pooling, add_pooling
from onward.hub.folder_files import read_pooling, sentence_files
from onward.info.preprocessing import Preprocessing
from onward.losses import LossWithTargets, functions
from onward.model_metadata import read_table
from onward.tasks.embedder import POOLED, VECTOR, Embedder, find_vectors
from onward.tasks.figures import WORST, class_table
from onward.tasks.labelled import find_text_settings
from onward.tasks.options import OptionError
from onward.tasks.protocol import Adapted, Arrays, Scores, Source
from onward.tasks.scores import joint_metrics

if TYPE_CHECKING:
    from onward.data.match_inputs import InputSpec
    from onward.info.model_info import ModelInfo
    from onward.tasks.options import Embeddings
    from onward.train.report import Figure

predictor = Embedder
COLUMNS = ()
SCORE = "score"
_TOP = 10
# so many queries are compared with all answers at a time: 512 × 100,000 numbers are 200 MB
_BLOCK = 512


def read(data: Any, source: Source, options: Embeddings, *, like: Data | None = None) -> Data:
    """Pairs, triplets or pairs with a score: one array for each view, named by its column, and the scores last."""
    columns = list(like.arrays) if like is not None and like.arrays else options.columns
    columns = [name for name in columns if name != SCORE] if columns else None
    views, scores, where = read_pairs(data, columns=columns, score=options.score)
    notes = [f"pairs are in {', '.join(map(repr, views))}"]
    loss = options.loss
    if scores is not None and loss in ("multiple-negatives", "triplet"):
        scores = None
    if scores is None and loss in ("cosent", "cosine"):
        raise DataError(
            f"the loss {loss} needs scores, and '{where}' has none",
            "name the column with --score, or another --loss",
        )
    if loss == "triplet" and len(views) != 3:
        raise DataError(
            f"the loss triplet needs an anchor, a positive and a negative: '{where}' has {len(views)} columns",
            "add a column negative, or leave --loss away",
        )
    if loss == "cosine" and scores is not None and (scores.min() < -1 or scores.max() > 1):
        raise DataError(
            f"'{where}': scores go from {scores.min():g} to {scores.max():g}, and a cosine from -1 to 1",
            "divide them, or take --loss cosent, which needs their order alone",
        )
    arrays, preprocessing, tokenizer = _read_views(views, source, options, where)
    if scores is not None:
        arrays[SCORE] = scores
    # the loss compares samples of one batch: tables that are sorted by score or subject would say nothing
    order = np.random.default_rng(0).permutation(len(next(iter(arrays.values()))))
    arrays = {name: take_rows(array, order) for name, array in arrays.items()}
    return Data(arrays, preprocessing=preprocessing, tokenizer=tokenizer, notes=notes)


def _read_views(
    views: Mapping[str, Sequence[str]], source: Source, options: Embeddings, where: str
) -> tuple[dict[str, Any], Preprocessing, Path | None]:
    """The views as texts, or as the pictures or sounds of these files."""
    own = source.info.preprocessing
    if takes_tokens(source.inputs):
        tokenizer, settings = find_text_settings(source, options)
        texts = {name: np.asarray(column, object) for name, column in views.items()}
        return texts, Preprocessing("text", "input_ids", settings), tokenizer
    base = Path(where).parent
    arrays: dict[str, Any] = {}
    done: Preprocessing | None = None
    for name, files in views.items():
        paths = [base / file for file in files]
        missing = next((row for row, path in enumerate(paths) if not path.is_file()), None)
        if missing is not None:
            raise DataError(
                f"'{where}', sample {missing} (from 0): no file '{paths[missing]}'", "correct the path"
            )
        settings = {} if own is None else dict(own.settings)
        reader = read_images if any(len(spec.dims or ()) == 4 for spec in source.inputs) else read_sounds
        rows, done = reader(paths, source.inputs, None, settings if done is None else done.settings)
        arrays[name] = next(iter(rows.values()))
    assert done is not None
    return arrays, done, None


def adapt(source: Source, data: Data, options: Embeddings) -> Adapted:
    """The model with a vector for each row: its states pooled as its files or the options say."""
    stated = None if source.path is None else read_pooling(_folder(source.path))
    model = load_model(source.model)
    ir.external_data.load_to_model(model)
    graph = model.graph
    outputs = [value.name or "" for value in graph.outputs]
    states, mode = _states(model, options.pooling, stated[0] if stated else None)
    own = states.name == VECTOR and mode is None
    normalize = not own if stated is None else stated[1]
    if options.unit_length is not None:
        normalize = options.unit_length == "yes"
    mask = next((value for value in graph.inputs if value.name == "attention_mask"), None)
    vectors = add_pooling(model, states, mask, mode, normalize=normalize)
    if vectors is not states:
        for value in graph.outputs:  # trained before, and pooled in another way now
            if value.name == VECTOR:
                value.name = f"{VECTOR}_before"
        vectors.name = VECTOR
    size = vectors.shape[-1] if vectors.shape is not None else None
    for part in _sizes(options):
        if isinstance(size, int) and not 0 < part <= size:
            raise OptionError(f"matryoshka has {part}, and vectors have {size} numbers")
    # the loss and the metrics read the vectors alone: the states of all evaluation texts would fill the memory
    graph.outputs.clear()
    graph.outputs.append(vectors)
    names = [name for name in data.arrays if name != SCORE]
    name = vectors.name or VECTOR
    said = "the model gives vectors already" if mode is None else f"vectors are the {mode} over positions"
    return Adapted(
        ir.to_proto(model), None, f"{said}{', of length 1' if normalize else ''}", loss_inputs=[name],
        # the base's own outputs stay where they were: programs that pool by themselves read the first
        outputs=[*(output for output in outputs if output != name), name],
        details={
            "views": len(names),
            "scored": SCORE in data.arrays,
            "pooling": mode,
            "normalize": normalize,
            "size": size if isinstance(size, int) else None,
            "architecture": read_table(model.metadata_props, contract.EXPORT).get("architecture"),
        },
    )  # fmt: skip


def _states(model: ir.Model, pooling: Pooling | None, stated: str | None) -> tuple[ir.Value, Pooling | None]:
    """The value to pool and how; the vectors and None where the model has them already."""
    values = [
        value for value in model.graph.outputs if value.dtype is None or value.dtype.is_floating_point()
    ]
    ranks = {value: 0 if value.shape is None else value.shape.rank() for value in values}
    named = next((value for value in values if value.name in POOLED and ranks[value] != 3), None)
    pooled = named or next((value for value in values if ranks[value] == 2 and len(values) == 1), None)
    if pooled is not None and pooling is None:
        return pooled, None
    states = next((value for value in values if ranks[value] == 3), None)
    if states is None:
        raise ModelError(
            f"none of the outputs {', '.join(str(value.name) for value in values)} has states to pool",
            hint="embeddings need [batch, size] or [batch, positions, size]; leave --pooling away for the first",
        )
    return states, cast("Pooling", pooling or stated or "mean")


def _folder(path: Path) -> Path:
    folder = path if path.is_dir() else path.parent
    return folder.parent if folder.name == "onnx" else folder


def _sizes(options: Embeddings) -> list[int]:
    """The sizes of Matryoshka's vectors; none where it is not asked for."""
    text = options.matryoshka
    if text is None:
        return []
    try:
        return [int(size) for size in (text.split(",") if isinstance(text, str) else text)]
    except (ValueError, TypeError):
        raise OptionError(f"matryoshka is '{text}': it is sizes, such as 384,128,64") from None


def loss(options: Embeddings, data: Data, adapted: Adapted) -> LossWithTargets:
    """The loss over a batch's vectors, whose rows are the views of each sample one after the other."""
    views, scored = int(adapted.details["views"]), SCORE in data.arrays
    name = options.loss or ("cosent" if scored else "multiple-negatives")

    def compute(op: Any, vectors: ir.Value, *targets: ir.Value) -> ir.Value:
        first, second, *others = losses.split_rows(op, vectors, views)
        if name == "cosent":
            return functions.cosent(op, first, second, *targets, scale=options.scale)
        if name == "cosine":
            return functions.cosine_mse(op, first, second, *targets)
        if name == "triplet":
            return losses.triplet_margin(op, first, second, *others, margin=options.margin)
        candidates = op.Concat(second, *others, axis=0) if others else second
        return losses.multiple_negatives(op, first, candidates, scale=options.scale)

    sizes = _sizes(options)
    targets = [(SCORE, ir.DataType.FLOAT, ["pairs"])] if name in ("cosent", "cosine") else []
    return LossWithTargets(functions.matryoshka(compute, sizes) if sizes else compute, targets)


def metrics(options: Embeddings, adapted: Adapted) -> dict[str, Callable[[Arrays, Arrays], float]]:
    """Spearman's correlation for pairs with a score, figures of a search for others."""
    views = int(adapted.details["views"])

    def judge(outputs: Arrays, inputs: Arrays) -> dict[str, float]:
        return _figures(next(iter(outputs.values())), views, inputs.get(SCORE), token_keys(inputs))

    names = ("spearman",) if adapted.details["scored"] else ("recall@1", "recall@10", "mrr", "ndcg@10")
    return joint_metrics(names, judge)


def _figures(
    vectors: np.ndarray, views: int, scores: np.ndarray | None, keys: np.ndarray | None
) -> dict[str, float]:
    if scores is not None:
        groups = unit_rows(vectors).reshape(len(scores), views, -1)
        return {"spearman": spearman((groups[:, 0] * groups[:, 1]).sum(axis=1), scores)}
    return retrieval_figures(*rank_pairs(vectors, views, keys))


def batches(
    data: Data, specs: Sequence[InputSpec], options: Embeddings, *, training: bool
) -> CollatedBatches:
    """Batches of all views of some samples, those of a sample one after the other."""
    arrays = dict(data.arrays)
    scores = arrays.pop(SCORE, None)
    names = [spec.name for spec in specs if spec.name != SCORE]
    done = data.preprocessing
    tokenizer = (
        None if data.tokenizer is None or done is None else open_tokenizer(data.tokenizer, done.settings)
    )

    def collate(rows: np.ndarray) -> list[Any]:
        views = [array[rows] for array in arrays.values()]
        mixed = np.stack(views, axis=1).reshape(-1, *views[0].shape[1:])
        if tokenizer is None or done is None:
            inputs = {names[0]: mixed}
        else:
            inputs = tokenize(mixed.tolist(), tokenizer, done.settings, names)
        return [inputs[spec.name] if spec.name != SCORE else np.asarray(scores)[rows] for spec in specs]

    return CollatedBatches(
        data.samples or 0, collate, batch_size=options.batch_size, shuffle=training, seed=options.seed
    )


def folder_files(source: Source, data: Data, adapted: Adapted) -> dict[str, bytes]:
    """The files with which sentence-transformers loads the folder; none where vectors are not pooled from states."""
    pooling, size, done = adapted.details["pooling"], adapted.details["size"], data.preprocessing
    if pooling is None or size is None or data.tokenizer is None or done is None:
        return {}
    files = sentence_files(
        None if source.path is None else _folder(source.path), size=size, pooling=pooling,
        normalize=adapted.details["normalize"], max_length=done.settings.get("max_length"),
        architecture=adapted.details["architecture"],
    )  # fmt: skip
    return {**files, "tokenizer.json": data.tokenizer.read_bytes()}


def show(outputs: Arrays, inputs: Arrays, data: Data, adapted: Adapted) -> list[Figure]:
    """The pairs that a search finds last, or whose scores are furthest from their order."""
    views, arrays = int(adapted.details["views"]), data.arrays
    vectors = next(iter(outputs.values()))
    texts = [getattr(array, "files", array) for array in list(arrays.values())[:views]]
    if len(vectors) != views * (data.samples or 0):
        return []
    if SCORE in arrays:
        groups = unit_rows(vectors).reshape(-1, views, vectors.shape[1])
        cosines = (groups[:, 0] * groups[:, 1]).sum(axis=1)
        places = [np.argsort(np.argsort(numbers)) for numbers in (cosines, np.asarray(arrays[SCORE]))]
        worst = np.argsort(-np.abs(places[0] - places[1]), kind="stable")[:WORST]
        rows = [
            [
                str(texts[0][row])[:200],
                str(texts[1][row])[:200],
                float(arrays[SCORE][row]),
                round(float(cosines[row]), 4),
            ]
            for row in worst
        ]
        return class_table(
            "Pairs that are furthest from their place", ("first", "second", "score", "cosine"), rows
        )
    ranks, _ = rank_pairs(vectors, views, token_keys(inputs))
    worst = np.argsort(-ranks[:, 0], kind="stable")[:WORST]
    rows = [[str(texts[0][row])[:200], str(texts[1][row])[:200], int(ranks[row, 0]) + 1] for row in worst]
    return class_table("Pairs that a search finds last", ("text", "right answer", "place"), rows)


def scores(outputs: Arrays, data: Data, info: ModelInfo) -> Scores:
    """Spearman's correlation, or the figures of a search."""
    arrays = dict(data.arrays)
    numbers = arrays.pop(SCORE, None)
    texts = [getattr(array, "files", array) for array in arrays.values()]
    _, keys = np.unique(np.asarray(texts, str).T.reshape(-1), return_inverse=True)
    return _figures(find_vectors(outputs), len(texts), numbers, keys.reshape(-1, 1)), []


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
    ranks = np.full((samples, most), len(answers))
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
    ideal = np.cumsum(1.0 / np.log2(np.arange(_TOP) + 2.0))[np.minimum(counts, _TOP) - 1]
    return {
        "recall@1": float(np.mean((ranks < 1).sum(axis=1) / counts)),
        f"recall@{_TOP}": float(np.mean((ranks < _TOP).sum(axis=1) / counts)),
        "mrr": float(np.mean(1.0 / (ranks[:, 0] + 1.0))),
        f"ndcg@{_TOP}": float(np.mean(gains / ideal)),
    }


def unit_rows(vectors: np.ndarray) -> np.ndarray:
    """Vectors of length 1."""
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
