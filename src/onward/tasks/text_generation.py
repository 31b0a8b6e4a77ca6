"""Training language models to generate text: adapters beside a base, on texts, conversations or preferences.

`text_generation` has the answers of what comes out. The base stays in its folder as it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from onward.data.conversations import (
    IGNORED,
    Batches,
    Encoder,
    Example,
    Lines,
    Pair,
    lines_of,
    needs_template,
    pack,
    place_of,
)
from onward.data.read import Data
from onward.errors import DataError, ModelError
from onward.files import write_bytes
from onward.graph.gc_paused import gc_paused
from onward.language.chat import read_template
from onward.language.decoding import Decoder, Options, generate
from onward.language.finetune import LanguageModel
from onward.language.kept_models import digest_of
from onward.language.swappable import FixedInputs, add_adapter_inputs, scaled_values
from onward.language.training_models import Base, Recipe, open_for_adapters, prepare_training, read_base
from onward.lora import LoRA
from onward.losses.preferences import LOG_PROBABILITIES
from onward.runtime.cache import cache_folder
from onward.runtime.devices import Device
from onward.runtime.sessions import session_beside
from onward.tasks.check_options import OptionError
from onward.tasks.protocol import Adapted, Arrays, OwnTraining, Source
from onward.train.callbacks import Callback
from onward.train.report import Figure
from onward.train.trainer import Trainer

if TYPE_CHECKING:
    from onward.data.match_inputs import InputSpec
    from onward.tasks.options import TextGeneration
    from onward.tasks.protocol import Fitted
    from onward.train.artifact_set import ArtifactFiles

COLUMNS: Sequence[str] = ()
SAMPLES = "samples"
# how much the loss of examples in one row may differ from theirs alone: rounding
_SAME_LOSS = 1e-3
_UNTRAINED = LoRA(rank=8, alpha=16.0, targets="attention")
# files of reference scores that are kept; each has eight bytes for a pair
_MOST = 32
# tokens of an answer that the report shows
_SHOWN = 64


@dataclasses.dataclass
class Conversations(Data):
    """Encoded examples or pairs, and the base whose tokens they are."""

    base: Base | None = None


def read(data: Any, source: Source, options: TextGeneration, *, like: Data | None = None) -> Conversations:
    """Lines as token ids, with labels where the model is to speak; pairs of answers for a loss of preferences."""
    if source.path is None:
        raise DataError(
            "a language model is trained from its folder, which has the tokenizer", "give the folder"
        )
    base = read_base(source.path)
    lines, where = lines_of(data)
    encoder = _encoder(base, lines, where, options.max_length)
    samples = encoder.pairs(lines) if options.loss in ("dpo", "orpo") else encoder.examples(lines)
    longest = encoder.longest
    cut = sum(len(row.ids) == longest for sample in samples for row in _rows(sample))
    notes = [f"{cut} of {len(samples)} lines are as long as {longest} tokens, or cut there"] if cut else []
    return Conversations({SAMPLES: np.fromiter(samples, object)}, notes=notes, base=base)


def _encoder(base: Base, lines: Lines, where: str, max_length: int) -> Encoder:
    render = None
    if any(map(needs_template, lines.values())):
        try:
            render = read_template(base.folder).render
        except ModelError as error:
            raise DataError(str(error)) from error
    limit = base.card["tokenizer"].get("max_length")
    return Encoder(
        base.tokenizer, render, (base.card["generation"].get("eos_ids") or [None])[0],
        min(max_length, limit) if limit else max_length, base.vocabulary, where, limit,
    )  # fmt: skip


def _rows(sample: Example | Pair) -> tuple[Example, ...]:
    return (sample.chosen, sample.rejected) if isinstance(sample, Pair) else (sample,)


def adapt(source: Source, data: Data, options: TextGeneration) -> Adapted:
    """Adapters beside the base, and the models that train them."""
    lora = options.make_lora("attention", options.seed)
    if lora is None:
        raise OptionError("lora=False: text-generation trains adapters", hint="leave it away")
    if options.packing and options.loss != "next-token":
        raise OptionError(f"packing is not for {options.loss}, which compares rows", hint="leave it away")
    base = _base_of(data)
    recipe = Recipe(options.loss, options.beta, options.slices, options.recompute, options.packing)
    lora, files = prepare_training(base.file, lora, recipe)
    own = OwnTraining(
        files,
        prepare=lambda part: _add_reference(part, files, options),
        callbacks=lambda train, evaluation: _callbacks(base, lora, train, evaluation, options),
        result=lambda fitted, notes: _result(base, lora, fitted, notes),
    )
    return Adapted(None, None, f"adapters of rank {lora.rank} beside {base.file.name}", own=own)


def _base_of(data: Data) -> Base:
    assert isinstance(data, Conversations) and data.base is not None
    return data.base


def _add_reference(data: Data, files: ArtifactFiles, options: TextGeneration) -> None:
    """Give each pair what the base thinks of its answers: DPO measures from there."""
    if options.loss != "dpo":
        return
    pairs = data.arrays[SAMPLES]
    scores = _reference_scores(
        files, _base_of(data), pairs, batch_size=options.batch_size, device=options.device
    )
    for index, (chosen, rejected) in enumerate(scores.tolist()):
        pairs[index] = dataclasses.replace(pairs[index], reference=(chosen, rejected))


def _result(base: Base, lora: LoRA, fitted: Fitted, notes: list[str]) -> LanguageModel:
    adapters = {name: np.asarray(value) for name, value in fitted.state.trainable.items()}
    return LanguageModel(
        base.file, base.folder, base.card, lora, adapters, fitted.history, fitted.figures, notes
    )


def loss(options: TextGeneration, data: Data, adapted: Adapted) -> Any:
    """None: `adapt` has made the training models, with the loss in slices of the vocabulary."""
    return None


def metrics(options: TextGeneration, adapted: Adapted) -> dict[str, Any]:
    """Perplexity, or how often and how far chosen answers are above rejected ones."""
    if options.loss == "next-token":
        return {"perplexity": lambda outputs, inputs: _perplexity(float(outputs["loss"]))}

    def margins(outputs: Arrays, inputs: Arrays) -> np.ndarray:
        return -np.diff(_rewards(outputs, inputs, options.beta))

    return {
        "reward_accuracy": lambda outputs, inputs: float(np.mean(margins(outputs, inputs) > 0)),
        "reward_margin": lambda outputs, inputs: float(np.mean(margins(outputs, inputs))),
    }


def batches(data: Data, specs: Sequence[InputSpec], options: TextGeneration, *, training: bool) -> Batches:
    """Batches of like length; in training shuffled, and packed where that is asked for."""
    base, samples = _base_of(data), list(data.arrays[SAMPLES])
    if training and options.packing:
        samples = pack(samples, max(options.max_length, *(len(sample.ids) for sample in samples)))
    return Batches(
        samples, options.batch_size, pad=base.pad, names=[spec.name for spec in specs],
        seed=options.seed, shuffle=training,
    )  # fmt: skip


def show(outputs: Arrays, inputs: Arrays, data: Data, adapted: Adapted) -> list[Figure]:
    """Nothing of the evaluation's arrays: answers need the weights, and `ShowAnswers` writes them."""
    return []


def evaluate(data: Any, source: Source, options: TextGeneration) -> tuple[dict[str, float], int]:
    """The loss of the tokens that count and their perplexity, or the accuracy of a model in multiple choice."""
    assert source.path is not None
    lines, where = lines_of(data)
    if all("choices" in line for line in lines.values()):
        return _answer_choices(lines, where, source.path, options), len(lines)
    samples = read(data, source, options)
    _, files = prepare_training(source.path, _UNTRAINED, Recipe())  # untrained adapters add nothing
    trainer = Trainer(files, progress=False, device=options.device)
    names = list(trainer.module.signature.inputs)
    examples = list(samples.arrays[SAMPLES])
    figures = trainer.evaluate(
        Batches(examples, options.batch_size, pad=_base_of(samples).pad, names=names, shuffle=False)
    )
    mean = float(figures["loss"])
    return {"loss": mean, "perplexity": _perplexity(mean)}, len(examples)


def _answer_choices(lines: Lines, where: str, folder: Path, options: TextGeneration) -> dict[str, float]:
    """How often the right choice is the likeliest text after its prompt, and the likeliest by its mean token."""
    base = read_base(folder)
    # the end of the text is no part of a choice
    encoder = dataclasses.replace(_encoder(base, lines, where, options.max_length), end=None)
    examples: list[Example] = []
    numbers = []
    for number, line in lines.items():
        numbers.append((len(line["choices"]), _right_choice(line, place_of(where, number))))
        for choice in line["choices"]:
            examples += encoder.examples({number: {"prompt": line["prompt"], "completion": choice}})
    # the models score rows in pairs, the last with itself where it is alone
    pairs = [
        Pair(examples[row], examples[min(row + 1, len(examples) - 1)]) for row in range(0, len(examples), 2)
    ]
    _, files = prepare_training(folder, _UNTRAINED, Recipe(loss="dpo"))
    scores = _score_pairs(
        files, base, pairs, batch_size=max(1, options.batch_size // 2), device=options.device
    ).reshape(-1)[: len(examples)]
    means = scores / [example.counted() for example in examples]
    hits = np.zeros(2)
    start = 0
    for count, right in numbers:
        own = slice(start, start + count)
        hits += [scores[own].argmax() == right, means[own].argmax() == right]
        start += count
    return {"accuracy": float(hits[0] / len(lines)), "accuracy by mean": float(hits[1] / len(lines))}


def _right_choice(line: Mapping[str, Any], where: str) -> int:
    choices, answer = line["choices"], line.get("answer")
    if not isinstance(line.get("prompt"), str):
        raise DataError(f"{where}: has no prompt; multiple choice is prompt, choices and answer")
    if (
        not isinstance(choices, list)
        or len(choices) < 2
        or not all(isinstance(c, str) and c for c in choices)
    ):
        raise DataError(f"{where}: the choices are {str(choices)[:40]!r}, and must be two texts or more")
    if isinstance(answer, str) and answer in choices:
        return choices.index(answer)
    if type(answer) is int and 0 <= answer < len(choices):
        return answer
    raise DataError(
        f"{where}: the answer is {str(answer)[:40]!r}, and must be one of the choices or its number from 0"
    )


def _callbacks(
    base: Base, lora: LoRA, train: Data, evaluation: Data | None, options: TextGeneration
) -> list[Callback]:
    chosen: list[Callback] = []
    if options.packing:
        chosen.append(_RequireApart(list(train.arrays[SAMPLES]), options))
    if evaluation is not None and options.samples:
        rows = [_rows(sample)[0] for sample in evaluation.arrays[SAMPLES][: options.samples]]
        chosen.append(_ShowAnswers(base, lora, rows))
    return chosen


class _RequireApart(Callback):
    """Compares the loss of one packed row with those of its examples alone: they must not have seen each other."""

    def __init__(self, examples: Sequence[Example], options: TextGeneration) -> None:
        packed = pack(examples, max(options.max_length, *(len(example.ids) for example in examples)))
        self._rows = [row for row in packed if len(row.starts) > 1]

    def on_start(self, trainer: Trainer) -> None:
        """Before the first batch."""
        if not self._rows:
            return
        row = min(self._rows, key=lambda example: len(example.ids))
        names = list(trainer.module.signature.inputs)
        batches = Batches([row], 1, pad=0, names=names)

        def loss(example: Example) -> float:
            results = trainer.module(*batches.batch([example]).values())
            return float(np.asarray(results).reshape(()))

        trainer.module.eval()
        together = loss(row)
        alone = [(loss(part), part.counted()) for part in row.parts() if part.counted()]
        trainer.module.train()
        expected = sum(value * count for value, count in alone) / sum(count for _, count in alone)
        if not math.isclose(together, expected, rel_tol=_SAME_LOSS):
            raise ModelError(
                f"packing changes this model's loss from {expected:.5g} to {together:.5g}: its tokens meet in other "
                "ways than attention, or its positions cannot begin anew",
                hint="train without packing",
            )


class _ShowAnswers(Callback):
    """Writes what the model answers to some held-out prompts into the report, beside what it should."""

    def __init__(self, base: Base, lora: LoRA, examples: Sequence[Example]) -> None:
        self._base, self._lora, self._examples = base, lora, examples
        self._writer: _AdapterWriter | None = None

    def on_epoch(self, trainer: Trainer, row: dict[str, Any]) -> None:
        """After each epoch; without a report nobody would read them."""
        if trainer.output_directory is None:
            return
        adapters = {name: np.asarray(value) for name, value in trainer.state.to_data().trainable.items()}
        writer = self._writer = self._writer or _AdapterWriter(self._base, self._lora)
        decode = self._base.tokenizer.decode
        prompts, expected = [], []
        for example in self._examples:
            first = next(index for index, label in enumerate(example.labels) if index and label != IGNORED)
            prompts.append(example.ids[:first])
            expected.append(decode([label for label in example.labels[first:] if label != IGNORED]))
        answers = writer.write(prompts, adapters, max_new_tokens=_SHOWN)
        rows = [
            (decode(prompt)[-300:], decode(answer), text)
            for prompt, answer, text in zip(prompts, answers, expected)
        ]
        table = (("prompt", "answer", "expected"), *rows)
        title = "Answers to held-out prompts"
        own = [figure for figure in trainer.history.figures if figure.title != title]
        trainer.history.figures = [*own, Figure(title, f"after epoch {row['epoch']}", table=table)]


# ---- how likely a model holds answers to be, and what it answers ---------------------------------------


def _score_pairs(
    files: ArtifactFiles, base: Base, pairs: Sequence[Pair], *, batch_size: int, device: Any
) -> np.ndarray:
    """log p of both answers of each pair, [pairs, 2], by the model as the files have it; `files` are those of dpo."""
    engine = Trainer(files, progress=False, device=device).engine
    names = list(engine.module.signature.inputs)
    batches = Batches(pairs, batch_size, pad=base.pad, names=names, shuffle=False)
    report = engine.evaluate(batches.epoch(0), tables=True)
    if report.failure is not None:
        raise report.failure
    scores = np.empty((len(pairs), 2), np.float32)
    for index, table in enumerate(report.tables):
        scores[batches.rows(0, index)] = table[LOG_PROBABILITIES].reshape(-1, 2)
    return scores


def _reference_scores(
    files: ArtifactFiles, base: Base, pairs: Sequence[Pair], *, batch_size: int, device: Any
) -> np.ndarray:
    """The scores of a base beside which nothing was trained yet; they are kept for the next run."""
    content = hashlib.sha256()
    for pair in pairs:
        for example in (pair.chosen, pair.rejected):
            content.update(np.asarray([len(example.ids), *example.ids, *example.labels]).tobytes())
    key, root = digest_of(base.file, content.hexdigest(), program=False), cache_folder()
    path = None if root is None or key is None else root / "references" / f"{key}.npy"
    if path is not None and path.is_file():
        with contextlib.suppress(OSError, ValueError):
            scores = np.load(path, allow_pickle=False)
            if scores.shape == (len(pairs), 2) and np.isfinite(scores).all():
                return scores
    scores = _score_pairs(files, base, pairs, batch_size=batch_size, device=device)
    if path is not None:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            np.save(buffer := io.BytesIO(), scores)
            write_bytes(path, buffer.getvalue())
            oldest = sorted(path.parent.glob("*.npy"), key=lambda file: -file.stat().st_mtime)[_MOST:]
            for file in oldest:
                file.unlink(missing_ok=True)
    return scores


def _rewards(outputs: Mapping[str, np.ndarray], inputs: Mapping[str, np.ndarray], beta: float) -> np.ndarray:
    """β·(log p − log p of the reference) of chosen and rejected answers, [pairs, 2]; ORPO has no reference."""
    scores = outputs[LOG_PROBABILITIES] - inputs.get("reference", np.float32(0.0))
    return beta * scores.reshape(-1, 2)


def _perplexity(loss: float) -> float:
    """e^loss, and a large number where that is none."""
    return math.exp(min(loss, 80.0))


class _AdapterWriter:
    """A base whose adapters are given with each text; its weights are mapped from its own file."""

    def __init__(self, base: Base, lora: LoRA) -> None:
        self._base, self._lora = base, lora
        with gc_paused():
            model, joined, finish = open_for_adapters(base.file, base.card)
            add_adapter_inputs(model, lora, joined=joined)
            finish()
            self._session = session_beside(
                ir.to_proto(model), str(base.file), device=Device("cpu"), options=None
            )

    def write(
        self, prompts: Sequence[Sequence[int]], adapters: Mapping[str, np.ndarray], *, max_new_tokens: int
    ) -> list[list[int]]:
        """The likeliest continuation of each prompt; one by one, which suits every model."""
        session: Any = FixedInputs(self._session, scaled_values(adapters, self._lora))
        ends = frozenset(self._base.card["generation"].get("eos_ids") or ())
        longest = self._base.card["tokenizer"].get("max_length")
        texts = []
        for prompt in prompts:
            # the last new token is not read again
            room = max_new_tokens if not longest else longest - len(prompt) + 1
            options = Options(max_new_tokens=max(1, min(max_new_tokens, room)), ends=ends)
            ids = np.asarray([list(prompt)], np.int64)
            *_, new = generate(Decoder(session, ids, np.ones_like(ids)), options)
            texts.append(new[0])
        return texts
