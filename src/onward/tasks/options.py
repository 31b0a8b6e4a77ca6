"""The options of every task: one dataclass each, with defaults, help texts and ranges.

The command line, the config file, the keywords of `onward.finetune` and the tables of the docs are made of these
classes. What a kind of data takes (images, sounds, texts, tables) is a class of its own, as is what a target takes:
`LABELLED` is the product of both. Imports nothing heavy: the command line reads it before it knows the command.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from onward.tasks.check_options import Option

if TYPE_CHECKING:
    from onward.lora import LoRA

SCHEDULES = ("constant", "linear", "cosine", "step", "one-cycle", "polynomial")
OPTIMIZERS = ("adamw", "sgd", "adam", "adagrad", "rmsprop", "lion", "lamb", "adafactor")
# Options that several classes have, with defaults of their own.
Epochs = Annotated[int, Option("Passes over the data.", ("-e",), least=1)]
BatchSize = Annotated[int, Option("Samples per step.", ("-b",), least=1)]
Schedule = Annotated[str, Option("The learning-rate schedule.", metavar="|".join(SCHEDULES))]
Normalization = Annotated[
    str | None,
    Option("Images: bring pixels to this mean and deviation.", metavar="imagenet|half|none|MEAN,STD"),
]
TextColumn = Annotated[str | None, Option("The column of a table that has texts.", metavar="COLUMN")]
# a new head has learned nothing, and the other weights a lot
Rate = Annotated[
    float | Literal["auto"] | None,
    Option(
        "The highest learning rate; 'auto' finds one by a short trial. Default: 0.001 for a new head and a tenth of "
        "it for the other weights, 0.0001 without one.",
        ("--lr",),
        "RATE|auto",
        least=0,
    ),
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """Options of every training run."""

    epochs: Epochs = 5
    batch_size: BatchSize = 32
    learning_rate: Rate = None
    schedule: Schedule = "constant"
    warmup: Annotated[
        float | None,
        Option("Warm-up: updates, or a fraction of all if below 1. Default: a tenth of all.", least=0),
    ] = None
    clip_norm: Annotated[
        float | None, Option("Clip gradients to this norm, 0 for none. Default: 1.", least=0)
    ] = None
    gradient_accumulation_steps: Annotated[
        int, Option("Batches whose gradients make one update.", ("--accumulation",), least=1)
    ] = 1
    eval_data: Annotated[Any, Option("Data to evaluate on.", metavar="PATH")] = None
    hold_out: Annotated[
        float,
        Option("The share of the data to evaluate on, where --eval-data is not given.", least=0, most=0.9),
    ] = 0.2
    seed: Annotated[int, Option("Of shuffling, new weights, dropout and hold-out.", least=0)] = 0
    device: Annotated[Any, Option("Where to train: cpu, cuda, cuda:1, or auto.", metavar="NAME")] = "cpu"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapters:
    """Low-rank adapters beside the model's weights."""

    lora: Annotated[Any, Option("Train low-rank adapters; the model's own weights stay as they are.")] = False
    rank: Annotated[int, Option("The rank of the adapters.", least=1)] = 8
    alpha: Annotated[float, Option("The adapters' scale is alpha / rank.", least=0)] = 16.0
    targets: Annotated[
        Sequence[str] | None,
        Option(
            "Weights to adapt; patterns count, and 'attention' means its projections.",
            ("--target", "-t"),
            "NAME",
        ),
    ] = None

    def make_lora(self, targets: str, seed: int) -> LoRA | None:
        """The adapters' settings, or None where none train; `targets` are the default ones."""
        from onward.lora import LoRA

        # Python passes settings of its own, the command line a flag
        if not self.lora or isinstance(self.lora, LoRA):
            return self.lora or None
        return LoRA(rank=self.rank, alpha=self.alpha, targets=self.targets or targets, seed=seed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
    """How the best weights are chosen."""

    ema: Annotated[
        float | None,
        Option("Average the weights over the updates by this factor, such as 0.999, and export the average.",
               least=0, most=1),
    ] = None  # fmt: skip
    metrics: Annotated[
        Sequence[Any] | None,
        Option("Computed on the evaluation data after each epoch.", ("--metric", "-m"), "NAME"),
    ] = None
    best_metric: Annotated[
        str | None,
        Option("What decides on the best epoch. Default: the evaluation loss.", ("--best",), "METRIC"),
    ] = None
    patience: Annotated[int | None, Option("Stop after so many epochs without progress.", least=1)] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compression:
    """What the model learns so that it may be smaller."""

    quantize: Annotated[
        str | None,
        Option("Train for weights in fewer bits.", metavar="int8|int8-static|int8-weights|int4", python=True),
    ] = None
    teacher: Annotated[
        Any,
        Option("Learn the answers of this model too. Default with --quantize: the model before, if it keeps its head.",
               metavar="FILE"),
    ] = None  # fmt: skip
    temperature: Annotated[
        float, Option("Divides the teacher's scores of classes; more say more of unlikely ones.", least=0.01)
    ] = 2.0
    teacher_weight: Annotated[
        float, Option("The teacher's share of the loss; 1 leaves labels out.", least=0.01, most=1)
    ] = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights(Compression, Selection, Adapters):
    """Which weights train."""

    head: Annotated[
        str | None, Option("The layer to replace, or the value to put a new one on.", metavar="NAME")
    ] = None
    optimizer: Annotated[str, Option("The optimizer.", metavar="|".join(OPTIMIZERS))] = "adamw"
    batch_norm: Annotated[
        Literal["train", "frozen"] | None,
        Option(
            "Whether batch norm updates its statistics. Default: as the model; where it has seen no data, train."
        ),
    ] = None
    requires_grad: Annotated[
        Sequence[str] | None, Option("Weights to train; patterns count.", ("--train",), "NAME")
    ] = None
    frozen_params: Annotated[
        Sequence[str] | None, Option("Weights that stay as they are; patterns count.", ("--freeze",), "NAME")
    ] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Labelled:
    """Tables that have a column of labels."""

    label: Annotated[
        str | None,
        Option(
            "The label column of a table; of several labels, their columns of 0 and 1.",
            metavar="COLUMN[,COLUMN…]",
        ),
    ] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Files(Labelled):
    """Samples that are files of their own."""

    skip_bad: Annotated[bool, Option("Images, WAV files: leave out those that cannot be read.")] = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Images(Files):
    """How images are read."""

    normalize: Normalization = None
    resize: Annotated[int | None, Option("Images: the shorter side, before --crop.", least=1)] = None
    crop: Annotated[int | None, Option("Images: cut this square from the middle.", least=1)] = None
    augment: Annotated[
        Sequence[str], Option("Images: flip, crop, colour, mixup; also flip,crop=0.2.", metavar="NAME[=HOW]")
    ] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scenes:
    """How pictures are read whose targets lie on them."""

    normalize: Normalization = None
    size: Annotated[
        int | None, Option("Images: the side that a model gets which takes any.", least=32, most=4096)
    ] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sounds(Files):
    """How sounds are read."""

    sampling_rate: Annotated[
        int | None, Option("WAV files: the rate that the model takes.", ("--sample-rate",), least=1)
    ] = None
    noise: Annotated[
        Path | None,
        Option(
            "WAV files: mix those of this folder into training waves, at random loudness.", metavar="FOLDER"
        ),
    ] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokens:
    """How texts become tokens."""

    tokenizer: Annotated[
        Path | None, Option("A tokenizer.json, where none is beside the model.", metavar="FILE")
    ] = None
    max_length: Annotated[int | None, Option("Texts: cut them after so many tokens.", least=2)] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Texts(Tokens, Labelled):
    """How texts are read."""

    text_column: TextColumn = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tables(Labelled):
    """How tables are read."""

    standardize: Annotated[bool, Option("Tables: bring columns to mean 0 and deviation 1.")] = False
    drop: Annotated[Sequence[str], Option("Tables: leave this column out.", metavar="COLUMN")] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Classes:
    """Targets that are classes."""

    classes: Annotated[
        int | Sequence[str] | str | None,
        Option(
            "A new head for so many classes, or for classes of these names. Default: the data's, and the model's own "
            "head where it has them.",
            metavar="NUMBER|NAME,NAME…",
        ),
    ] = "data"
    loss: Annotated[Literal["cross-entropy", "nll"], Option("The loss.")] = "cross-entropy"
    class_weights: Annotated[
        Any,
        Option(
            "'balanced' weighs each class by the inverse of its share of the samples.", metavar="balanced"
        ),
    ] = None
    label_smoothing: Annotated[
        float, Option("Share of each target that goes to all classes alike.", least=0, most=0.9)
    ] = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabelSets:
    """Targets that are labels of which several may hold."""

    classes: Annotated[
        Sequence[str] | str,
        Option(
            "The labels by name, for a new head. Default: the data's, and the model's own head where it has them.",
            metavar="NAME,NAME…",
        ),
    ] = "data"
    class_weights: Annotated[
        Any,
        Option("'balanced' weighs samples with a label as much as those without it.", metavar="balanced"),
    ] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numbers:
    """Targets that are numbers."""

    loss: Annotated[Literal["mse", "l1", "huber", "smooth-l1"], Option("The loss.")] = "mse"


SAMPLES: Mapping[str, type] = {"image": Images, "audio": Sounds, "text": Texts, "tabular": Tables}
TARGETS: Mapping[str, type] = {"classification": Classes, "multi-label": LabelSets, "regression": Numbers}
# image-classification to tabular-regression
LABELLED: Mapping[tuple[str, str], type] = {
    (sample, target): dataclasses.make_dataclass(
        f"{sample}-{target}", (), bases=(SAMPLES[sample], TARGETS[target], Weights, Training),
        frozen=True, kw_only=True,
    )
    for target, sample in itertools.product(TARGETS, SAMPLES)
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectDetection(Scenes, Weights, Training):
    """Options of object-detection."""

    epochs: Epochs = 20
    batch_size: BatchSize = 8
    augment: Annotated[
        Sequence[str],
        Option("Images: flip, crop, scale, colour, mosaic; also flip,scale=0.3.", metavar="NAME[=HOW]"),
    ] = ()
    classes: Annotated[
        int | Sequence[str] | str | None,
        Option("The classes by name, in the order of their numbers. Default: the data's.",
               metavar="NUMBER|NAME,NAME…"),
    ] = "data"  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageSegmentation(Scenes, Weights, Training):
    """Options of image-segmentation."""

    epochs: Epochs = 20
    batch_size: BatchSize = 8
    augment: Annotated[
        Sequence[str], Option("Images: flip, crop, scale, colour; also flip,crop=0.2.", metavar="NAME[=HOW]")
    ] = ()
    classes: Annotated[
        int | Sequence[str] | str | None,
        Option("The classes by name, that of 0 first, or their number. Default: the data's.",
               metavar="NUMBER|NAME,NAME…"),
    ] = "data"  # fmt: skip
    dice: Annotated[float, Option("How much Dice weighs beside cross-entropy.", least=0)] = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Embeddings(Tokens, Weights, Training):
    """Options of embeddings."""

    epochs: Epochs = 3
    columns: Annotated[
        Sequence[str] | None,
        Option("Pairs: their columns, what is searched with first, negatives last.", ("--column",), "NAME"),
    ] = None
    score: Annotated[str | None, Option("Pairs: the column with their scores.", metavar="COLUMN")] = None
    pooling: Annotated[
        Literal["mean", "cls", "last", "max"] | None,
        Option("Which states make the vector. Default: as the model's files say, else mean."),
    ] = None
    unit_length: Annotated[
        Literal["yes", "no"] | None,
        Option("Whether vectors are brought to length 1. Default: as the model's files say, else yes."),
    ] = None
    loss: Annotated[
        Literal["multiple-negatives", "cosent", "cosine", "triplet"] | None,
        Option("The loss. Default: cosent for pairs with a score, multiple-negatives for others."),
    ] = None
    scale: Annotated[float, Option("What cosines are multiplied by in the loss.", least=0)] = 20.0
    margin: Annotated[
        float, Option("Loss triplet: how much further away the negative is to be.", least=0)
    ] = 1.0
    matryoshka: Annotated[
        str | Sequence[int] | None,
        Option("Train the first numbers of each vector to do alone.", metavar="SIZE,SIZE…"),
    ] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextRecognition(Weights, Training):
    """Options of text-recognition."""

    text_column: TextColumn = None
    alphabet: Annotated[
        Literal["extend", "keep", "replace"],
        Option(
            "What becomes of the model's alphabet: the data's new characters join it, are an error, or are all."
        ),
    ] = "extend"
    characters: Annotated[
        Path | None,
        Option("The model's characters, one a line, where its metadata has none.", metavar="FILE"),
    ] = None
    blank: Annotated[
        Literal["first", "last"], Option("Where the blank stands, which the list of characters leaves out.")
    ] = "first"
    height: Annotated[
        int | None, Option("The height of pictures, where the model takes any. Default: 48.", least=8)
    ] = None
    normalize: Normalization = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenClassification(Tokens, Weights, Training):
    """Options of token-classification."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Writing(Selection, Adapters, Training):
    """Options of models that write text: adapters always train here, and these defaults are those of their authors."""

    samples: Annotated[
        int, Option("Answers to so many held-out examples in the report, each epoch.", least=0)
    ] = 3
    lora: Annotated[Any, Option("Train low-rank adapters: the only way here, and the default.")] = True
    epochs: Epochs = 1
    batch_size: Annotated[int, Option("Examples per step.", ("-b",), least=1)] = 1
    learning_rate: Annotated[float, Option("The highest learning rate.", ("--lr",), least=0)] = 2e-4
    schedule: Schedule = "linear"
    warmup: Annotated[float, Option("Warm-up: updates, or a fraction of all if below 1.", least=0)] = 0.03
    clip_norm: Annotated[float, Option("Clip gradients to this norm, 0 for none.", least=0)] = 1.0
    hold_out: Annotated[float, Option("The share of the examples to evaluate on.", least=0, most=0.9)] = 0.0
    max_length: Annotated[int, Option("Tokens of an example that are read.", least=2)] = 512
    slices: Annotated[int, Option("Compute the vocabulary's scores in so many parts.", least=1)] = 8
    recompute: Annotated[Any, Option("Recompute activations to save memory.", python=True)] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextGeneration(Writing):
    """Options of text-generation."""

    loss: Annotated[
        Literal["next-token", "dpo", "orpo"],
        Option("The loss; dpo and orpo learn from answers that were preferred to others."),
    ] = "next-token"
    beta: Annotated[float, Option("dpo, orpo: how much preferences weigh.", least=0)] = 0.1
    packing: Annotated[bool, Option("Put short examples into one row; they do not see each other.")] = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceToSequence(Writing):
    """Options of text2text: an encoder reads, a decoder writes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeechToText(SequenceToSequence):
    """Options of automatic-speech-recognition."""

    language: Annotated[
        str | None, Option("The language of lines that name none, such as en.", metavar="CODE")
    ] = None
    batch_size: Annotated[int, Option("Examples per step.", ("-b",), least=1)] = 4
