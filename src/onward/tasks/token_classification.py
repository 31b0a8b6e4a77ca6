"""Token classification: a label for every token, every word, every character or every name of a text.

The first half trains, the second has the answers of exported folders. A word's label stands at its first token; the
loss does not count the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from onward import losses
from onward.data.collate import CollatedBatches
from onward.data.read import Data
from onward.data.tagged import Tagged, read_tagged
from onward.data.text import TOKENS, open_tokenizer
from onward.errors import DataError, ModelError
from onward.escape import first_of
from onward.graph.load import load_model
from onward.graph.passes.head.new_layer import add_position_layer
from onward.head import keep_head, replace_head
from onward.info.preprocessing import Preprocessing
from onward.losses import LossWithTargets
from onward.tasks.figures import WORST, class_table
from onward.tasks.labelled import ENCODERS, find_text_settings
from onward.tasks.protocol import Adapted, Arrays, Scores, Source
from onward.tasks.scores import joint_metrics
from onward.tasks.tagger import Tagger

if TYPE_CHECKING:
    from onward.data.match_inputs import InputSpec
    from onward.info.model_info import ModelInfo
    from onward.tasks.options import TokenClassification
    from onward.train.report import Figure

predictor = Tagger
COLUMNS = ("name", "precision", "recall", "F1", "in the data")
# what stands where no word begins; torch and transformers use it, too
_NONE = -100
_LABELS = "labels"


def read(data: Any, source: Source, options: TokenClassification, *, like: Data | None = None) -> Data:
    """Sequences of words, and the names of their tags in the order of the model's, or of other data's."""
    sequences, where = read_tagged(data)
    tags = sorted({tag for sequence in sequences for tag in sequence.tags})
    own = list(source.info.class_names or ())
    labels = (
        list(like.classes) if like is not None and like.classes else own if set(tags) <= set(own) else tags
    )
    unknown = next((tag for tag in tags if tag not in labels), None)
    if unknown is not None:
        line = next(one.line for one in sequences if unknown in one.tags)
        raise DataError(
            f"'{where}', line {line}: the tag '{unknown}' is none of {first_of(labels, 12)}",
            "correct it, or have it in the training data too",
        )
    if len(labels) < 2:
        raise DataError(f"'{where}' has the tag '{labels[0]}' alone", "there is nothing to tell apart")
    tokenizer, settings = find_text_settings(source, options)
    preprocessing = Preprocessing("text", _ids_input(source.inputs), settings)
    words = sum(len(one.words) for one in sequences)
    return Data(
        {"sequences": np.fromiter(sequences, object)}, classes=labels, preprocessing=preprocessing, tokenizer=tokenizer,
        notes=[f"{words} tagged words in {len(sequences)} sequences"],
    )  # fmt: skip


def _ids_input(inputs: Sequence[InputSpec]) -> str:
    """The input of token or character numbers."""
    numbers = [spec for spec in inputs if spec.is_integer and spec.name not in TOKENS[1:]]
    named = next((spec for spec in numbers if spec.name == "input_ids"), None)
    if named is None and len(numbers) != 1:
        raise ModelError(
            f"no input of token numbers among {first_of([spec.name for spec in inputs])}",
            hint="a tagger takes whole numbers [batch, positions]",
        )
    return (named or numbers[0]).name


def adapt(source: Source, data: Data, options: TokenClassification) -> Adapted:
    """The model with scores of the tags at every position."""
    labels = list(data.classes or ())
    own = list(source.info.class_names or ())
    if own == labels and options.head is None:
        return Adapted(
            keep_head(source.model), labels, f"the model's own head goes on: it has {first_of(own)}"
        )
    if source.info.task in ENCODERS or options.head == source.output:
        model = load_model(source.model)
        ir.external_data.load_to_model(model)
        add_position_layer(model, options.head or source.output, labels, seed=options.seed)
        new = ir.to_proto(model)
    else:
        new = replace_head(source.model, classes=labels, head=options.head, seed=options.seed)
    why = f"its own are {first_of(own)}" if own else "the model names no tags"
    return Adapted(new, labels, f"a new head for {first_of(labels)}: {why}")


def loss(options: TokenClassification, data: Data, adapted: Adapted) -> LossWithTargets:
    """Cross-entropy over the positions at which words begin."""

    def compute(op: Any, scores: ir.Value, labels: ir.Value) -> ir.Value:
        flat = op.Reshape(scores, op.Concat([-1], op.dim(scores, 2), axis=0))
        return losses.cross_entropy(op, flat, op.Reshape(labels, [-1]), ignore_index=_NONE)

    return LossWithTargets(compute, [(_LABELS, ir.DataType.INT64, [None, "positions"])])


def metrics(options: TokenClassification, adapted: Adapted) -> dict[str, Callable[[Arrays, Arrays], float]]:
    """F1 of whole names as seqeval counts them, and the share of words with the right tag."""

    def judge(outputs: Arrays, inputs: Arrays) -> dict[str, float]:
        return _judge(next(iter(outputs.values())), inputs[_LABELS], adapted.labels or [])[0]

    return joint_metrics(("f1", "accuracy"), judge)


def _judge(logits: np.ndarray, numbers: np.ndarray, labels: Sequence[str]) -> Scores:
    """The figures of scores [sequences, positions, tags] against numbers, which are negative where no word begins."""
    counted = numbers >= 0
    best = np.where(counted, np.nan_to_num(logits, nan=-np.inf).argmax(axis=-1), 0)
    true, called = (
        [[labels[int(number)] for number in row[mask]] for row, mask in zip(side, counted)]
        for side in (numbers, best)
    )
    figures, rows = score_entities(true, called)
    return {**figures, "accuracy": float(np.mean(best[counted] == numbers[counted]))}, rows


def batches(
    data: Data, specs: Sequence[InputSpec], options: TokenClassification, *, training: bool
) -> CollatedBatches:
    """Batches of tokens, padded to the longest, and the numbers of their tags."""
    sequences = data.arrays["sequences"]
    done, index = data.preprocessing, {name: number for number, name in enumerate(data.classes or ())}
    assert done is not None and data.tokenizer is not None
    tokenizer = open_tokenizer(data.tokenizer, done.settings)

    def collate(rows: np.ndarray) -> list[Any]:
        inputs = _encode(sequences[rows], tokenizer, done, index)
        return [inputs[spec.name if spec.name in (*TOKENS, _LABELS) else "input_ids"] for spec in specs]

    lengths = [len(one.words) for one in sequences]
    return CollatedBatches(
        len(sequences),
        collate,
        batch_size=options.batch_size,
        shuffle=training,
        seed=options.seed,
        lengths=lengths,
    )


def _encode(
    sequences: Sequence[Tagged], tokenizer: Any, done: Preprocessing, index: Mapping[str, int]
) -> dict[str, np.ndarray]:
    """Token arrays and labels: a word's own at its first token, none elsewhere."""
    encodings = tokenizer.encode_batch([one.words for one in sequences], is_pretokenized=True)
    width = max(1, *(len(encoding.ids) for encoding in encodings))
    fillers = {
        "input_ids": done.settings.get("pad_id", 0),
        "attention_mask": 0,
        "token_type_ids": 0,
        _LABELS: _NONE,
    }
    arrays = {name: np.full((len(encodings), width), filler, np.int64) for name, filler in fillers.items()}
    for row, (one, encoding) in enumerate(zip(sequences, encodings)):
        size = len(encoding.ids)
        arrays["input_ids"][row, :size] = encoding.ids
        arrays["attention_mask"][row, :size] = 1
        arrays["token_type_ids"][row, :size] = encoding.type_ids
        for position, word in _first_tokens(encoding):
            arrays[_LABELS][row, position] = index[one.tags[word]]
    return arrays


def _first_tokens(encoding: Any) -> list[tuple[int, int]]:
    """The position of the first token of each word, and the word's number."""
    words = encoding.word_ids
    return [
        (position, word)
        for position, word in enumerate(words)
        if word is not None and (position == 0 or words[position - 1] != word)
    ]


def show(outputs: Arrays, inputs: Arrays, data: Data, adapted: Adapted) -> list[Figure]:
    """The scores of each kind of name, and the sequences with most wrong tags."""
    logits, numbers, labels = next(iter(outputs.values())), inputs[_LABELS], adapted.labels or []
    sequences = data.arrays["sequences"]
    if len(numbers) != len(sequences):
        return []
    _, rows = _judge(logits, numbers, labels)
    best = np.nan_to_num(logits, nan=-np.inf).argmax(axis=-1)
    wrong = ((best != numbers) & (numbers >= 0)).sum(axis=1)
    lines = []
    for row in np.argsort(-wrong, kind="stable")[:WORST]:
        positions = np.flatnonzero(numbers[row] >= 0)
        pairs = [
            f"{word} [{labels[numbers[row, position]]}; the model says {labels[best[row, position]]}]"
            if numbers[row, position] != best[row, position]
            else word
            for word, position in zip(sequences[row].words, positions)
        ]
        lines.append([sequences[row].line, int(wrong[row]), " ".join(pairs)[:500]])
    return [
        *class_table("Names", COLUMNS, rows),
        *class_table("The sequences with most wrong tags", ("line", "wrong", "words"), lines),
    ]


def scores(outputs: Arrays, data: Data, info: ModelInfo) -> Scores:
    """Precision, recall and F1 of names, and the share of words with the right tag."""
    if info.labels is None or list(info.labels) != list(data.classes or ()):
        unknown = sorted(set(data.classes or ()) - set(info.labels or ()))
        raise DataError(
            f"the data has the tag '{first_of(unknown, 1)}', and the model {first_of(info.labels or ('none',), 12)}",
            "is it another model's data?",
        )
    assert data.preprocessing is not None and data.tokenizer is not None
    tokenizer = open_tokenizer(data.tokenizer, data.preprocessing.settings)
    index = {name: number for number, name in enumerate(info.labels)}
    sequences = data.arrays["sequences"]
    return _judge(
        next(iter(outputs.values())),
        _encode(sequences, tokenizer, data.preprocessing, index)[_LABELS],
        info.labels,
    )


# --- Names in tag sequences, and how many of them are right: as CoNLL and seqeval count them.

Entity = tuple[str, int, int]


def entities_of(tags: Sequence[str]) -> list[Entity]:
    """The names of a sequence as (kind, first, last), in IOB, IOB2, IOE and BILOU alike.

    >>> entities_of(["B-PER", "I-PER", "O", "I-LOC", "B-LOC"])
    [('PER', 0, 1), ('LOC', 3, 3), ('LOC', 4, 4)]
    """
    entities: list[Entity] = []
    start, previous, kind = 0, "O", ""
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
