"""Training encoders with their decoders to answer texts or to write down speech: adapters beside both.

`generator` and `speech` have the answers of what comes out. The base stays in its folder as it is.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.data.conversations import IGNORED, Batches, Example, lines_of, padded_width, place_of
from onward.data.read import Data
from onward.data.sound import why_unreadable_sound
from onward.errors import DataError
from onward.language.seq2seq import (
    AdaptedWriter,
    EncoderDecoderBase,
    SequenceModel,
    build_encoder_decoder,
    read_encoder_decoder,
)
from onward.language.training_models import Recipe
from onward.lora import LoRA
from onward.tasks.check_options import OptionError
from onward.tasks.inputs import open_sound, signal
from onward.tasks.protocol import Adapted, Arrays, OwnTraining, Source
from onward.tasks.text_recognition import text_figures
from onward.train.artifact_set import find_artifacts
from onward.train.callbacks import Callback
from onward.train.report import Figure
from onward.train.trainer import Trainer

if TYPE_CHECKING:
    from onward.data.match_inputs import InputSpec
    from onward.tasks.options import SequenceToSequence
    from onward.tasks.protocol import Fitted

COLUMNS: Sequence[str] = ()
SAMPLES = "samples"
_SPEECH = "automatic-speech-recognition"
# held-out samples that are answered after each epoch: enough for a rate, and soon done
_JUDGED = 64
_TARGETS = ("completion", "answer", "target", "output", "text")
_UNTRAINED = LoRA(rank=1, alpha=1.0, targets="attention")


@dataclasses.dataclass(frozen=True)
class Sample:
    """What the encoder reads, token ids or a sound; what the decoder is to write; and both for people."""

    source: Any
    target: Example
    shown: str
    text: str

    @property
    def start(self) -> list[int]:
        """What the decoder begins with: tokens before the first that counts."""
        count = next(at for at, label in enumerate(self.target.labels) if label != IGNORED)
        return self.target.ids[:count]


@dataclasses.dataclass
class Rewritings(Data):
    """Encoded samples, and the base whose tokens they are."""

    base: EncoderDecoderBase | None = None


def read(data: Any, source: Source, options: SequenceToSequence, *, like: Data | None = None) -> Rewritings:
    """Lines as what the encoder reads and the tokens that the decoder is to write."""
    if source.path is None:
        raise DataError("an encoder and its decoder are trained from their folder", "give the folder")
    base = read_encoder_decoder(source.path)
    lines, where = lines_of(data)
    folder = Path(data).parent if isinstance(data, str | os.PathLike) else Path()
    reader = _Reader(base, options, folder)
    samples = [reader.sample(line, place_of(where, number)) for number, line in lines.items()]
    notes = [f"{reader.cut} texts are as long as {reader.longest} tokens, or cut there"] if reader.cut else []
    return Rewritings({SAMPLES: np.fromiter(samples, object)}, notes=notes, base=base)


class _Reader:
    """Lines as samples of a base."""

    def __init__(self, base: EncoderDecoderBase, options: SequenceToSequence, folder: Path) -> None:
        self._base, self._folder = base, folder
        self._language = getattr(options, "language", None)
        self._settings = base.card["generation"]
        self._ends = list(self._settings.get("eos_ids") or ())[:1]
        limit = base.card["tokenizer"].get("max_length")
        self.longest = min(options.max_length, limit) if limit else options.max_length
        self._sources = ("audio", "path") if base.card["task"] == _SPEECH else ("prompt", "input")
        self.cut = 0

    def sample(self, line: Mapping[str, Any], where: str) -> Sample:
        """One line, or an error that says where it is and what it lacks."""
        given = self._one_of(line, self._sources, where)
        text = self._one_of(line, _TARGETS, where)
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"{where}: the text to write is {str(text)[:40]!r}", "leave the line out")
        if self._is_speech:
            return Sample(self._sound(given, where), self._target(text, line, where), str(given)[-300:], text)
        if not isinstance(given, str) or not given.strip():
            raise DataError(f"{where}: the text to read is {str(given)[:40]!r}", "leave the line out")
        return Sample(self._tokens(given, where), self._target(text, line, where), given[-300:], text)

    def _one_of(self, line: Mapping[str, Any], names: Sequence[str], where: str) -> Any:
        present = [name for name in names if name in line]
        if len(present) != 1:
            state = f"has both {present[0]} and {present[1]}" if present else f"has no {names[0]}"
            target = "text" if self._is_speech else "completion"
            raise DataError(f'{where}: {state}; a line is {{"{self._sources[0]}": …, "{target}": …}}')
        return line[present[0]]

    @property
    def _is_speech(self) -> bool:
        return self._base.card["task"] == _SPEECH

    def _sound(self, given: Any, where: str) -> Any:
        """A file or a wave that the model can read whole; the file is read again for each batch."""
        if isinstance(given, str):
            given = self._folder / given
            if (why := why_unreadable_sound(given)) is not None:
                raise DataError(f"{where}: cannot read the sound '{given}': {why}")
        try:
            count = len(open_sound(self._base, given))
        except (ValueError, TypeError) as error:
            raise DataError(f"{where}: {error}") from error
        settings = self._base.card.get("processor") or {}
        limit, rate = settings.get("n_samples"), settings.get("sampling_rate") or 16000
        if limit and count > limit:
            raise DataError(
                f"{where}: the sound lasts {count / rate:.3g} seconds, and the model reads {limit / rate:g} at once",
                "cut it into pieces with their texts",
            )
        return given

    def _tokens(self, text: str, where: str) -> list[int]:
        tokenizer = self._base.tokenizer
        ids = tokenizer.encode(text).ids
        if len(ids) > self.longest:
            self.cut += 1
            tokenizer.enable_truncation(self.longest)  # which leaves the tokens that end a text
            ids = tokenizer.encode(text).ids
            tokenizer.no_truncation()
        return self._checked(ids, where)

    def _target(self, text: str, line: Mapping[str, Any], where: str) -> Example:
        """The decoder's first tokens, which do not count, and the text with its end."""
        tokenizer = self._base.tokenizer
        plain = tokenizer.encode(text, add_special_tokens=False).ids
        if self._is_speech and self._settings.get("speech") is not None:
            start, first = self._spoken_start(line, where), []
        else:
            start = [self._settings["start_id"] or 0, *(self._settings.get("prefix") or ())]
            first = self._first_tokens(tokenizer.encode(text).ids, plain)
        ids = self._checked([*start, *first, *plain, *self._ends], where)
        self.cut += len(ids) > self.longest
        labels = [IGNORED] * len(start) + ids[len(start) :]
        return Example(ids[: self.longest], labels[: self.longest])

    def _first_tokens(self, whole: list[int], plain: list[int]) -> list[int]:
        """Special tokens before a text, as BART's: those of the tokenizer, or what the model must begin with."""
        forced = self._settings.get("forced_bos_id")
        if forced is not None:
            return [forced]
        count = next((at for at in range(len(whole)) if whole[at : at + len(plain)] == plain), 0)
        return whole[:count]

    def _spoken_start(self, line: Mapping[str, Any], where: str) -> list[int]:
        """Whisper's first tokens: the start, the language, what to do, no timestamps."""
        speech, start = self._settings["speech"], [int(self._settings["start_id"])]
        languages = speech.get("languages") or {}
        if languages:
            language = line.get("language", self._language)
            if f"<|{language}|>" not in languages:
                state = (
                    "has no language"
                    if language is None
                    else f"has an unknown language {str(language)[:20]!r}"
                )
                names = ", ".join(name.strip("<|>") for name in list(languages)[:8])
                raise DataError(
                    f"{where}: {state}; the model knows {names}, …",
                    'name it for all lines with --language, or in the line, "language": "en"',
                )
            start += [languages[f"<|{language}|>"], speech["tasks"]["transcribe"]]
        quiet = speech.get("no_timestamps_id")
        return start if quiet is None else [*start, quiet]

    def _checked(self, ids: list[int], where: str) -> list[int]:
        if ids and max(ids) >= self._base.vocabulary:
            raise DataError(
                f"{where}: token {max(ids)} is outside the model's vocabulary of {self._base.vocabulary}; is the "
                "tokenizer the model's own?"
            )
        return ids


def adapt(source: Source, data: Data, options: SequenceToSequence) -> Adapted:
    """Adapters beside both parts, and the models that train them."""
    lora = options.make_lora("attention", options.seed)
    if lora is None:
        raise OptionError("lora=False: encoders with decoders train adapters", hint="leave it away")
    base = _base_of(data)
    lora, artifacts = build_encoder_decoder(
        base.file, lora, Recipe(slices=options.slices, recompute=options.recompute)
    )
    own = OwnTraining(
        find_artifacts(artifacts),
        prepare=lambda part: None,
        callbacks=lambda train, evaluation: _callbacks(base, lora, evaluation, options),
        result=lambda fitted, notes: _result(base, lora, fitted, notes),
    )
    return Adapted(None, None, f"adapters of rank {lora.rank} beside {', '.join(base.files)}", own=own)


def _base_of(data: Data) -> EncoderDecoderBase:
    assert isinstance(data, Rewritings) and data.base is not None
    return data.base


def _result(base: EncoderDecoderBase, lora: LoRA, fitted: Fitted, notes: list[str]) -> SequenceModel:
    adapters = {name: np.asarray(value) for name, value in fitted.state.trainable.items()}
    return SequenceModel(base, lora, adapters, fitted.history, fitted.figures, notes)


def loss(options: SequenceToSequence, data: Data, adapted: Adapted) -> Any:
    """None: `adapt` has made the training models, with the loss in slices of the vocabulary."""
    return None


def metrics(options: SequenceToSequence, adapted: Adapted) -> dict[str, Any]:
    """The perplexity of the decoder's tokens."""
    return {"perplexity": lambda outputs, inputs: math.exp(min(float(outputs["loss"]), 80.0))}


def batches(
    data: Data, specs: Sequence[InputSpec], options: SequenceToSequence, *, training: bool
) -> Batches:
    """Batches of like length, in training shuffled."""
    return SourceBatches(
        _base_of(data), list(data.arrays[SAMPLES]), options.batch_size, names=[spec.name for spec in specs],
        seed=options.seed, shuffle=training,
    )  # fmt: skip


class SourceBatches(Batches):
    """Batches of what an encoder reads and a decoder writes."""

    def __init__(
        self, base: EncoderDecoderBase, samples: Sequence[Sample], batch_size: int, **settings: Any
    ) -> None:
        self._base = base
        super().__init__(samples, batch_size, pad=base.pad, **settings)  # type: ignore[arg-type]

    def _length(self, sample: Sample) -> int:
        """Of the longer one; sounds are all of one length."""
        source = len(sample.source) if isinstance(sample.source, list) else 0
        return max(source, len(sample.target.ids))

    def batch(self, samples: Sequence[Any]) -> dict[str, np.ndarray]:
        """Some samples as the model takes them."""
        columns = self._columns([sample.target for sample in samples])
        arrays = {"decoder_input_ids": columns["input_ids"], "labels": columns["labels"]}
        arrays |= encoder_inputs(self._base, samples)
        return {name: arrays[name] for name in self._names}


def encoder_inputs(base: EncoderDecoderBase, samples: Sequence[Sample]) -> dict[str, np.ndarray]:
    """What the encoder reads of some samples."""
    if not isinstance(samples[0].source, list):
        features = [signal(base, sample.source) for sample in samples]
        return {name: np.concatenate([part[name] for part in features]) for name in features[0]}
    ids = np.full((len(samples), padded_width(len(sample.source) for sample in samples)), base.pad, np.int64)
    mask = np.zeros_like(ids)
    for row, sample in enumerate(samples):
        ids[row, : len(sample.source)], mask[row, : len(sample.source)] = sample.source, 1
    return {"input_ids": ids, "attention_mask": mask}


def show(outputs: Arrays, inputs: Arrays, data: Data, adapted: Adapted) -> list[Figure]:
    """Nothing of the evaluation's arrays: answers need the weights, and `_JudgeAnswers` writes them."""
    return []


def evaluate(data: Any, source: Source, options: SequenceToSequence) -> tuple[dict[str, float], int]:
    """The loss of the decoder's tokens and their perplexity, and how far its own texts are from the right ones."""
    rewritings = read(data, source, options)
    base, samples = _base_of(rewritings), list(rewritings.arrays[SAMPLES])
    _, artifacts = build_encoder_decoder(base.file, _UNTRAINED, Recipe())  # untrained adapters add nothing
    trainer = Trainer(find_artifacts(artifacts), progress=False, device=options.device)
    names = list(trainer.module.signature.inputs)
    mean = trainer.evaluate(SourceBatches(base, samples, options.batch_size, names=names, shuffle=False))[
        "loss"
    ]
    answers = _answers(AdaptedWriter(base, _UNTRAINED, {}), base, samples, {})
    figures = _judge(base, samples, answers)
    return {"loss": mean, "perplexity": math.exp(min(mean, 80.0)), **figures}, len(samples)


# ---- what the model answers -----------------------------------------------------------------------------


def _answers(
    writer: AdaptedWriter,
    base: EncoderDecoderBase,
    samples: Sequence[Sample],
    adapters: Mapping[str, np.ndarray],
) -> list[str]:
    feeds = [(encoder_inputs(base, [sample]), sample.start) for sample in samples]
    # texts may be longer than the right ones, and one that never ends must
    most = max(2 * len(sample.target.ids) for sample in samples)
    limit = base.card["tokenizer"].get("max_length")
    room = most if not limit else min(most, limit - max(len(sample.start) for sample in samples))
    ids = writer.write(feeds, adapters, max_new_tokens=max(1, room))
    return [base.tokenizer.decode(row).strip() for row in ids]


def _judge(base: EncoderDecoderBase, samples: Sequence[Sample], answers: Sequence[str]) -> dict[str, float]:
    """Error rates for speech, the share of exact answers for texts."""
    figures = text_figures([sample.text.strip() for sample in samples], answers)
    names = ("wer", "cer") if base.card["task"] == _SPEECH else ("exact_match",)
    return {name: figures[name] for name in names}


def _callbacks(
    base: EncoderDecoderBase, lora: LoRA, evaluation: Data | None, options: SequenceToSequence
) -> list[Callback]:
    if evaluation is None or not options.samples:
        return []
    return [_JudgeAnswers(base, lora, list(evaluation.arrays[SAMPLES][:_JUDGED]), options.samples)]


class _JudgeAnswers(Callback):
    """Writes what the model answers to held-out samples: error rates into the epoch's row, some into the report."""

    def __init__(self, base: EncoderDecoderBase, lora: LoRA, samples: Sequence[Sample], shown: int) -> None:
        self._base, self._lora, self._samples, self._shown = base, lora, samples, shown
        self._writer: AdaptedWriter | None = None

    def on_epoch(self, trainer: Trainer, row: dict[str, Any]) -> None:
        """After each epoch."""
        adapters = {name: np.asarray(value) for name, value in trainer.state.to_data().trainable.items()}
        writer = self._writer = self._writer or AdaptedWriter(self._base, self._lora, adapters)
        answers = _answers(writer, self._base, self._samples, adapters)
        row |= _judge(self._base, self._samples, answers)
        pairs = list(zip(self._samples, answers))[: self._shown]
        head = "sound" if self._base.card["task"] == _SPEECH else "text"
        table = ((head, "answer", "expected"), *((one.shown, answer, one.text) for one, answer in pairs))
        title = "Answers to held-out samples"
        others = [figure for figure in trainer.history.figures if figure.title != title]
        trainer.history.figures = [*others, Figure(title, f"after epoch {row['epoch']}", table=table)]
