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
from onward.escape import first_of
from onward.graph.load import load_model
from onward.graph.passes.pooling import Pooling, add_pooling
from onward.hub.folder_files import read_pooling, sentence_files
from onward.info.preprocessing import Preprocessing
from onward.losses import LossWithTargets, functions
from onward.model_metadata import read_table
from onward.tasks.check_options import OptionError
from onward.tasks.classifier import Classifier
from onward.tasks.figures import WORST, class_table
from onward.tasks.inputs import each, in_batch, signal
from onward.tasks.labelled import find_text_settings
from onward.tasks.protocol import Adapted, Arrays, Predictor, Scores, Source
from onward.tasks.scores import joint_metrics, rank_pairs, retrieval_figures, spearman, token_keys, unit_rows

if TYPE_CHECKING:
    from onward.data.match_inputs import InputSpec
    from onward.info.model_info import ModelInfo
    from onward.pipeline.load import Pipeline
    from onward.tasks.options import Embeddings
    from onward.train.report import Figure

COLUMNS = ()
VECTOR = "sentence_embedding"
# outputs that are vectors already, by the names that exporters give them
POOLED = (VECTOR, "embeddings", "pooled", "image_embeds", "text_embeds")
SCORE = "score"


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
    # a published file may have states and vectors: by default the vectors are what it was trained for
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
        # hard negatives stand behind all positives, so that the right answer keeps its row
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
        # tokenized together: one width for all views, and one run of the encoder
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


predictor = Embedder


# --- The answers of exported folders.


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
