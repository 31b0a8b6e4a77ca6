"""Text recognition: what a picture of a line or a sound says, by connectionist temporal classification (CTC).

Trains recognisers as PaddleOCR and RapidOCR publish them, wav2vec 2.0 and its kin, and other networks with scores of
characters at each step: their softmax or arg-max is opened for the loss and stays in the deployed file. The alphabet is
the model's own, longer, or the data's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from onward import losses
from onward.data.collate import CollatedBatches
from onward.data.images import picture_input
from onward.data.lettering import Line, is_sound, measure_lines, read_batch, read_lines
from onward.data.match_inputs import InputSpec
from onward.data.read import Data
from onward.data.sound import RATE, sound_input
from onward.errors import DataError, ModelError
from onward.escape import first_of
from onward.graph.load import load_model
from onward.graph.passes.head.new_layer import open_reader, replace_rows
from onward.info.metadata import BLANK
from onward.info.preprocessing import Preprocessing, image_settings
from onward.losses import LossWithTargets
from onward.reading import read_text
from onward.runtime.sessions import open_session
from onward.tasks.figures import LARGEST_SIDE, WORST, encode_png
from onward.tasks.protocol import Adapted, Arrays, Predictor, Scores, Source
from onward.tasks.scores import joint_metrics, softmax
from onward.train.report import Figure

if TYPE_CHECKING:
    from onward.info.model_info import ModelInfo
    from onward.tasks.options import TextRecognition

COLUMNS = ()
_TARGETS = "characters_of_text"
_HEIGHT = 48  # what most recognisers take, where the model takes any


def read(data: Any, source: Source, options: TextRecognition, *, like: Data | None = None) -> Data:
    """Pictures or sounds with texts, and the alphabet: the model's own, and what the options do with it."""
    lines = read_lines(data, text_column=options.text_column)
    own = alphabet_of(source, options)
    speech = not any(spec.dims is not None and len(spec.dims) == 4 for spec in source.inputs)
    if speech and not any(label.islower() for label in own if len(label) == 1):
        # a model that has learned large letters only would learn the small ones beside them
        lines = [dataclasses.replace(line, text=line.text.upper()) for line in lines]
    if like is not None and like.classes:
        alphabet = list(like.classes)
    else:
        alphabet = _choose_alphabet(own, lines, options.alphabet)
    characters = set(alphabet)
    for line in lines:
        strange = next((sign for sign in line.text if sign not in characters), None)
        if strange is not None:
            raise DataError(
                f"{line.where}: the text '{line.text[:60]}' has {strange!r}, which is not in the alphabet",
                "correct the text, or let the alphabet grow with --alphabet extend",
            )
    if speech:
        preprocessing = _prepare_sound(source)
    else:
        spec = picture_input(source.inputs, None)
        preprocessing = _prepare(spec, source.info, normalize=options.normalize, height=options.height)
    others = [spec.name for spec in source.inputs if spec.name != preprocessing.input]
    if others:
        raise ModelError(f"a reader that is trained here has one input, and this one takes '{others[0]}' too")
    rows = np.fromiter(measure_lines(lines, preprocessing.settings), object)
    new = [character for character in alphabet if character not in set(own)]
    grown = f", {len(new)} new characters: {first_of(new, 40)}" if new else ""
    notes = [f"{len(lines)} lines of text, {len(alphabet) - 1} characters{grown}"]
    return Data({"lines": rows}, classes=alphabet, preprocessing=preprocessing, notes=notes)


def alphabet_of(source: Source, options: TextRecognition) -> list[str]:
    """What each class of the model is, the blank included: by the options' file, or by what the model says."""
    if options.characters is None:
        labels = source.info.labels
        if labels is None or BLANK not in labels:
            raise DataError(
                "the model does not say which character each of its classes is",
                "name its list, one character a line: --characters FILE",
            )
        return list(labels)
    path = Path(options.characters)
    if not path.is_file():
        raise DataError(f"no list of characters at '{path}'", "is the path right?")
    characters = [line.rstrip("\r") for line in read_text(path).removeprefix("\ufeff").split("\n")]
    while characters and not characters[-1]:
        characters.pop()
    if BLANK in characters:
        return characters
    first = options.blank != "last"
    return [BLANK, *characters] if first else [*characters, BLANK]


def _choose_alphabet(own: Sequence[str], lines: Sequence[Line], choice: str) -> list[str]:
    """The classes after training; what is last stays last (PaddleOCR's readers add the space themselves)."""
    # sorted: the same data gives the same rows
    used = dict.fromkeys(sorted({character for line in lines for character in line.text}))
    if choice == "keep":
        return list(own)
    if choice == "replace":
        ends = {BLANK, own[-1]} if own[-1] == " " else {BLANK}
        inner = [character for character in used if character not in ends]
        return [BLANK, *inner, *([" "] if " " in ends else [])] if own[0] == BLANK else [*inner, BLANK]
    fresh = [character for character in used if character not in set(own)]
    behind = 1 if fresh and own[-1] in (" ", BLANK) else 0
    return [*own[: len(own) - behind], *fresh, *own[len(own) - behind :]]


def _prepare(
    spec: InputSpec, info: ModelInfo, *, normalize: str | None = None, height: int | None = None
) -> Preprocessing:
    """How pictures become the model's input: its height, its width where it is fixed, pixels from -1 to 1."""
    own = info.input(spec.name)
    stated = {} if own is None or own.kind != "image" else dict(own.settings)
    _, channels, own_height, width = spec.dims or (None,) * 4
    if channels not in (1, 3, None):
        raise ModelError(f"'{spec.name}' takes {spec}: a reader takes [batch, 1 or 3, height, width]")
    if "size" not in stated or height is not None:
        tall = own_height or height or _HEIGHT
        if height not in (None, tall):
            raise DataError(f"--height {height}: the model takes pictures of {tall} pixels", "leave it away")
        stated["size"] = {"shortest_edge": tall} if width is None else {"height": tall, "width": width}
    half = {"image_mean": [0.5], "image_std": [0.5], "do_normalize": True}
    # PaddleOCR's pictures come from OpenCV, which has blue first
    paddle = {"do_flip_channel_order": True} if "ctc" in info.outputs.values() and channels == 3 else {}
    chosen = image_settings(normalize=normalize) if normalize else {}
    settings = {"channels": channels or 3, "layout": "NCHW", **half, **paddle, **stated, **chosen}
    # `read_batch` always divides: what is not to be normalized is divided by one
    if settings.get("do_normalize") is False:
        settings |= {"image_mean": [0.0], "image_std": [1.0]}
    return Preprocessing("image", spec.name, settings)


def _prepare_sound(source: Source) -> Preprocessing:
    """How sounds become the model's input: its rate, and its length where that is fixed."""
    spec, layout, length = sound_input(source.inputs, None)
    stated = source.info.input(spec.name)
    settings = {} if stated is None or stated.kind != "sound" else dict(stated.settings)
    settings = {"sampling_rate": RATE, **settings, "layout": layout}
    return Preprocessing("sound", spec.name, settings if length is None else {**settings, "length": length})


def adapt(source: Source, data: Data, options: TextRecognition) -> Adapted:
    """The model with its scores opened, and a row for each character of the alphabet."""
    model = load_model(source.model)
    ir.external_data.load_to_model(model)
    outputs = [value.name or "" for value in model.graph.outputs]
    reader = open_reader(model)
    own, alphabet = alphabet_of(source, options), data.classes or []
    # now, and not in the error rate: a list that is off by one would teach every character to its neighbour
    if reader.size != len(own):
        raise ModelError(
            f"the model has {reader.size} classes, and the list has {len(own)} with the blank",
            hint="is it the list of this model? A blank and a space that its programs add belong into it too",
        )
    if alphabet == own:
        note = "the alphabet stays as it is"
    else:
        index = {character: number for number, character in enumerate(own)}
        rows = [index.get(character) for character in alphabet]
        replace_rows(model, reader.scores, reader.size, rows, head=options.head, seed=options.seed)
        old = sum(row is not None for row in rows)
        note = f"the last layer keeps the rows of {old} characters and has {len(rows) - old} new ones"
    pictures = data.preprocessing is not None and data.preprocessing.kind == "image"
    if pictures and alphabet[0] == BLANK and alphabet[-1] == " ":
        # as PaddleOCR writes it: programs of that world add the blank and the space
        model.metadata_props["character"] = "\n".join(alphabet[1:-1])
    return Adapted(
        ir.to_proto(model), list(alphabet), note, loss_inputs=[reader.scores.name or ""], outputs=outputs,
        output_kinds={outputs[0]: "ctc"},
        details={"blank": alphabet.index(BLANK)},
    )  # fmt: skip


def loss(options: TextRecognition, data: Data, adapted: Adapted) -> LossWithTargets:
    """The CTC loss of scores [batch, steps, characters]; a text that is too long for its picture counts nothing."""
    blank = int(adapted.details["blank"])

    def compute(op: Any, scores: ir.Value, targets: ir.Value) -> ir.Value:
        # steps come first, as in torch's ctc_loss
        logs = op.Transpose(op.LogSoftmax(scores, axis=2), perm=[1, 0, 2])
        there = op.GreaterOrEqual(targets, np.int64(0))
        lengths = op.ReduceSum(op.Cast(there, to=ir.DataType.INT64), [1], keepdims=0)
        steps = op.Expand(op.Squeeze(op.dim(scores, 1), [0]), op.dim(scores, 0))
        # −1 is no class that could be looked up
        classes = op.Where(there, targets, np.int64(blank))
        return losses.ctc(op, logs, classes, steps, lengths, blank=blank, zero_infinity=True)

    return LossWithTargets(compute, [(_TARGETS, ir.DataType.INT64, [None, "longest_text"])])


def metrics(options: TextRecognition, adapted: Adapted) -> dict[str, Callable[[Arrays, Arrays], float]]:
    """Character and word error rate, and the share of texts without an error."""
    labels, blank = adapted.labels or [], int(adapted.details["blank"])

    def judge(outputs: Arrays, inputs: Arrays) -> dict[str, float]:
        texts = join_characters(next(iter(outputs.values())), labels, blank)
        return text_figures(_texts(inputs[_TARGETS], labels), texts)

    return joint_metrics(("cer", "wer", "exact_match"), judge)


def _texts(targets: np.ndarray, labels: Sequence[str]) -> list[str]:
    return ["".join(labels[int(number)] for number in row if number >= 0) for row in targets]


def join_characters(best: np.ndarray, labels: Sequence[str], blank: int) -> list[str]:
    """The text of each row of classes: of equal ones in a row one, and no blanks; −1 is padding.

    >>> join_characters(np.array([[1, 1, 0, 1, 2, -1]]), ["", "a", "b"], 0)
    ['aab']
    """
    texts = []
    for row in np.asarray(best):
        changed = np.concatenate([[True], row[1:] != row[:-1]]) if row.size else np.zeros(0, bool)
        texts.append("".join(labels[int(number)] for number in row[changed & (row != blank) & (row >= 0)]))
    return texts


def text_figures(true: Sequence[str], read_texts: Sequence[str]) -> dict[str, float]:
    """Edits for each character and for each word, over all texts, and the share of exact ones.

    >>> text_figures(["ab cd", "e"], ["ab cx", "e"])["wer"]
    0.3333333333333333
    """
    edits = sum(edit_distance(one, other) for one, other in zip(true, read_texts))
    words = sum(edit_distance(one.split(), other.split()) for one, other in zip(true, read_texts))
    return {
        "cer": edits / max(1, sum(map(len, true))),
        "wer": words / max(1, sum(len(text.split()) for text in true)),
        "exact_match": float(np.mean([one == other for one, other in zip(true, read_texts)])),
    }


def edit_distance(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many insertions, deletions and replacements make one sequence the other.

    >>> edit_distance("kitten", "sitting")
    3
    """
    row = list(range(len(other) + 1))
    for i, mine in enumerate(one, start=1):
        diagonal, row[0] = row[0], i
        for j, theirs in enumerate(other, start=1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (mine != theirs))
    return row[-1]


def batches(
    data: Data, specs: Sequence[InputSpec], options: TextRecognition, *, training: bool
) -> CollatedBatches:
    """Batches of pictures or sounds of like length, and the numbers of their characters, padded with −1."""
    lines, done = data.arrays["lines"], data.preprocessing
    assert done is not None
    index = {character: number for number, character in enumerate(data.classes or ())}

    def collate(rows: np.ndarray) -> list[Any]:
        inputs = {done.input: read_batch([line.file for line in lines[rows]], done.settings)}
        numbers = [[index[character] for character in line.text] for line in lines[rows]]
        targets = np.full((len(rows), max(map(len, numbers), default=1)), -1, np.int64)
        for row, own in enumerate(numbers):
            targets[row, : len(own)] = own
        inputs[_TARGETS] = targets
        return [inputs[spec.name] for spec in specs]

    return CollatedBatches(
        len(lines),
        collate,
        batch_size=options.batch_size,
        shuffle=training,
        seed=options.seed,
        lengths=[line.width for line in lines],
    )


def show(outputs: Arrays, inputs: Arrays, data: Data, adapted: Adapted) -> list[Figure]:
    """The pictures that are read worst, or what is heard worst."""
    labels, blank = adapted.labels or [], int(adapted.details["blank"])
    texts = join_characters(next(iter(outputs.values())), labels, blank)
    lines = data.arrays["lines"]
    done = data.preprocessing
    if len(texts) != len(lines) or done is None:
        return []
    shares = [edit_distance(line.text, text) / len(line.text) for line, text in zip(lines, texts)]
    figures = []
    for row in np.argsort(-np.asarray(shares), kind="stable")[:WORST]:
        if not shares[row]:
            break
        caption = f"{lines[row].file.name}: {lines[row].text}; the model reads {texts[row]}"
        if is_sound(done.settings):
            figures.append(Figure("What is heard worst", caption))
            continue
        # the picture's own pixels, and not what the model sees
        plain = {**done.settings, "image_mean": [0.0], "image_std": [1 / 255], "do_flip_channel_order": False}
        pixels = (
            read_batch([lines[row].file], plain)[0].transpose(1, 2, 0).astype(np.uint8)[:, : 3 * LARGEST_SIDE]
        )
        picture = encode_png(np.repeat(pixels, 3, axis=2) if pixels.shape[2] == 1 else pixels)
        figures.append(Figure("The lines that are read worst", caption, picture=picture))
    return figures


def evaluate(data: Any, source: Source, options: TextRecognition) -> tuple[dict[str, float], int]:
    """The figures of a deployed model on files with texts, a batch at a time."""
    loaded = read(data, source, dataclasses.replace(options, alphabet="keep"))
    assert loaded.preprocessing is not None
    labels = tuple(loaded.classes or ())
    info = source.info.replace(labels=labels, inputs=(loaded.preprocessing,), source="the data")
    reader = Reader(open_session(source.model), info)
    lines = loaded.arrays["lines"]
    # lines of like width together, so that little of a batch is padding
    order = np.argsort([line.width for line in lines], kind="stable")
    texts: list[str] = [""] * len(lines)
    for start in range(0, len(order), options.batch_size):
        rows = order[start : start + options.batch_size]
        for row, answer in zip(rows, reader.read_batch([line.file for line in lines[rows]])):
            texts[row] = answer["text"]
    return text_figures([line.text for line in lines], texts), len(lines)


def scores(outputs: Arrays, data: Data, info: ModelInfo) -> Scores:
    """The error rates of a model's outputs."""
    labels = list(info.labels or ())
    best = _best(next(iter(outputs.values())))[0]
    true = [line.text for line in data.arrays["lines"]]
    return text_figures(true, join_characters(best, labels, labels.index(BLANK))), []


def predictor(session: Any, info: ModelInfo, tokenizer: Any) -> Reader:
    """What reads pictures; one that somebody else published, too."""
    if info.preprocessing is None:
        value = session.get_inputs()[0]
        dims = tuple(dim if isinstance(dim, int) else None for dim in value.shape)
        done = _prepare(InputSpec(value.name, np.dtype(np.float32), dims), info)
        info = info.replace(inputs=(done,), source="PaddleOCR's habit")
    return Reader(session, info)


def _best(output: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The best class of each step and its probability, of probabilities, scores or the classes themselves."""
    if output.ndim == 2:
        return output.astype(np.int64), np.ones(output.shape, np.float32)
    # published files end in a softmax, in scores or in an arg-max, and none says in which
    sums = output.sum(axis=-1, keepdims=True)
    chances = output if np.allclose(sums, 1, atol=1e-3) and output.min() >= 0 else softmax(output)
    return chances.argmax(axis=-1), chances.max(axis=-1)


@dataclasses.dataclass(frozen=True)
class Reader(Predictor):
    """A loaded recogniser. Call it with a picture (a path, a Pillow image, bytes [height, width, 3]) or with a sound (a
    WAV file, (samples, rate), samples at the model's rate), or with a list of them.

    The answer is `{"text", "score"}`: the score is the mean probability of its characters.
    """

    def __call__(self, inputs: Any, *, batch_size: int = 8) -> Any:
        """What one picture or sound says, or each of a list."""
        items = inputs if isinstance(inputs, list) else [inputs]
        answers: list[Mapping[str, Any]] = []
        for start in range(0, len(items), batch_size):
            answers += self.read_batch(items[start : start + batch_size])
        return answers if isinstance(inputs, list) else answers[0]

    def read_batch(self, files: Sequence[Any]) -> list[dict[str, Any]]:
        """What some pictures or sounds say, in one run of the model."""
        labels, done = list(self.info.labels or ()), self.info.preprocessing
        if done is None or BLANK not in labels:
            raise ModelError("the model does not say how its input is prepared and what its classes are")
        best, chances = _best(self.run({done.input: read_batch(files, done.settings)}))
        blank = labels.index(BLANK)
        counted = best != blank
        sums = np.where(counted, chances, 0).sum(axis=1) / np.maximum(counted.sum(axis=1), 1)
        texts = join_characters(best, labels, blank)
        return [{"text": text, "score": float(score)} for text, score in zip(texts, sums)]
