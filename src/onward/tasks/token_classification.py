"""Token classification: a label for every token, every word, every character or every name of a text.

The first half trains, the second has the answers of exported folders. A word's label stands at its first token; the
loss does not count the others.
"""

from __future__ import annotations

import dataclasses
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
from onward.tasks.inputs import in_batch
from onward.tasks.labelled import ENCODERS, find_text_settings
from onward.tasks.protocol import Adapted, Arrays, Predictor, Scores, Source
from onward.tasks.scores import joint_metrics, score_entities, softmax

if TYPE_CHECKING:
    from onward.data.match_inputs import InputSpec
    from onward.info.model_info import ModelInfo
    from onward.pipeline.load import Pipeline
    from onward.tasks.options import TokenClassification
    from onward.train.report import Figure

COLUMNS = ("name", "precision", "recall", "F1", "in the data")
# what stands where no word begins; torch and transformers use it, too
_NONE = -100
_LABELS = "labels"


def read(data: Any, source: Source, options: TokenClassification, *, like: Data | None = None) -> Data:
    """Sequences of words, and the names of their tags in the order of the model's, or of other data's."""
    sequences, where = read_tagged(data)
    # sorted: the same data gives the same rows of the head
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
    # shorter batches are padded with NaN where all are joined
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


@dataclasses.dataclass(frozen=True)
class Tagger(Predictor):
    """A loaded tagger. Call it with a text or a list of texts.

    The answer is `{"label", "score", "text", "start", "end"}` for each name; `group=False` gives a label for each word
    (or character), those called O too.
    """

    def __call__(self, inputs: Any, *, group: bool = True) -> Any:
        """The names in one text, or in each of a list."""
        done, labels = self.info.preprocessing, self.info.labels
        assert done is not None and labels is not None
        answers = []
        for text in inputs if isinstance(inputs, list) else [inputs]:
            encoding = self.tokenizer.encode(text)
            columns = {"attention_mask": encoding.attention_mask, "token_type_ids": encoding.type_ids}
            feed = {
                value.name: np.asarray([columns.get(value.name, encoding.ids)], np.int64)
                for value in self.session.get_inputs()
            }
            logits = self.run(feed)[0]
            words = encoding.word_ids
            # training put a word's label at its first token, so that the others have learned nothing
            entries = _label_tokens(
                text, encoding, logits, labels, words="first",
                begins=lambda position, words=words: words[position] != words[position - 1],
            )  # fmt: skip
            names = [one for one in _join_names(text, entries) if one["label"] != "O"] if group else entries
            answers.append(names)
        return answers if isinstance(inputs, list) else answers[0]


predictor = Tagger


# --- The answers of exported folders.

STRATEGIES = ("none", "simple", "first", "average", "max")
"""How labels of tokens become names: each token alone, runs of tokens, or runs of words."""


def tag(
    pipeline: Pipeline,
    inputs: Any,
    *,
    group: bool = False,
    aggregation_strategy: str | None = None,
    ignore_labels: Sequence[str] = ("O",),
) -> Any:
    """The labels of tokens, or of names where a strategy joins tokens."""
    strategy = aggregation_strategy or ("simple" if group else "none")
    if strategy not in STRATEGIES:
        raise ValueError(f"aggregation_strategy is {strategy!r}; choose one of {', '.join(STRATEGIES)}")

    def answer(texts: list[str]) -> list[Any]:
        feed, encodings = pipeline.encode(texts)
        logits = pipeline.run(feed)["logits"]
        results = []
        for text, encoding, row in zip(texts, encodings, logits):
            entries = _label_tokens(
                text,
                encoding,
                pipeline.trim(row, encoding),
                pipeline.card["labels"],
                words=strategy if strategy in ("first", "average", "max") else None,
                begins=lambda index, text=text, encoding=encoding: _begins_word(
                    pipeline, text, encoding, index
                ),
            )
            entries = entries if strategy == "none" else _join_names(text, entries)
            results.append([entry for entry in entries if entry["label"] not in ignore_labels])
        return results

    return in_batch(inputs, answer)


def _begins_word(pipeline: Pipeline, text: str, encoding: Any, index: int) -> bool:
    """Whether a token begins a word, as transformers decides: by the mark of later pieces, else by spaces alone."""
    start, end = encoding.offsets[index]
    if encoding.ids[index] == pipeline.card["tokenizer"].get("unk_id"):
        return True
    # WordPiece marks the later pieces of a word; other tokenizers mark nothing, or the space
    if getattr(pipeline.tokenizer.model, "continuing_subword_prefix", None):
        return len(encoding.tokens[index]) == end - start
    return start == 0 or " " in text[start - 1 : start + 1]


def _label_tokens(
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
    entries = []
    for group in groups:
        rows = probabilities[group]
        row = rows.mean(axis=0) if words == "average" else rows[0]
        if words == "max":
            row = rows[int(rows.max(axis=1).argmax())]
        start, end = encoding.offsets[group[0]][0], encoding.offsets[group[-1]][1]
        best = int(row.argmax())
        entries.append(
            {
                "label": labels[best],
                "score": float(row[best]),
                "text": text[start:end],
                "start": start,
                "end": end,
            }
        )
    return entries


def _join_names(text: str, tokens: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
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
