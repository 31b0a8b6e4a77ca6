"""Text generation: greedy, sampling or beam search, with decoders that have a key-value cache.

`Decoder` and `EncoderDecoder` run the sessions; `generate` chooses tokens and yields them. Independent of tokenizers
and folders. Greedy and beam search choose the same tokens as `transformers`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np

from onward.errors import ModelError

# a beam that does not exist yet, as in transformers: far below any text, and still ordered by what follows
_NEVER = -1e9
_PAST = "past_key_values."
# the runtime takes a cache in the type of the model alone
_TYPES = {"tensor(float16)": np.float16, "tensor(double)": np.float64}


@dataclass(frozen=True)
class Timestamps:
    """Whisper's rules for the tokens that say when something was heard: the first of them, and the end of a text.

    They come in pairs and never go back; `latest` is the last one that a text may begin with.
    """

    first: int
    end: int
    latest: int | None

    def restrict(self, scores: np.ndarray, written: np.ndarray) -> None:
        """Take out of the scores [rows, vocabulary] what must not follow what was written [rows, length]."""
        scores[:, self.first - 1] = -np.inf  # which says that there are none
        for row, tokens in zip(scores, written):
            are_times = tokens >= self.first
            if not len(tokens):
                row[: self.first] = -np.inf
                if self.latest is not None:
                    row[self.latest + 1 :] = -np.inf
            elif are_times[-1] and (len(tokens) < 2 or are_times[-2]):
                row[self.first :] = -np.inf
            elif are_times[-1]:
                row[: self.end] = -np.inf
            if are_times.any():
                last = int(tokens[are_times][-1])
                # the time that ends a piece may be the time that begins the next
                opens = are_times[-1] and not (len(tokens) < 2 or are_times[-2])
                row[self.first : last if opens else last + 1] = -np.inf
            # all times together may be likelier than the likeliest word, though no single one is
            logs = _log_softmax(row)
            with np.errstate(divide="ignore"):
                if np.log(np.exp(logs[self.first :]).sum()) > logs[: self.first].max():
                    row[: self.first] = -np.inf


@dataclass(frozen=True)
class Options:
    """How to choose tokens, under the names of `transformers`' generation settings.

    Sampling (`do_sample=True`) draws from `seed`; without one every call draws anew. `suppress` are ids that are
    never written, `first` what the first token has to be.
    """

    max_new_tokens: int = 32
    min_new_tokens: int = 0
    do_sample: bool = False
    temperature: float = 1.0
    # transformers' own default, which draws from the 50 likeliest
    top_k: int | None = 50
    top_p: float | None = None
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool = False
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    seed: int | None = None
    ends: frozenset[int] = frozenset()
    suppress: tuple[int, ...] = ()
    suppress_first: tuple[int, ...] = ()
    first: int | None = None
    last: int | None = None
    timestamps: Timestamps | None = None

    def __post_init__(self) -> None:
        for name, least in (("max_new_tokens", 1), ("num_beams", 1), ("min_new_tokens", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be {least} or more")
        for name in ("temperature", "repetition_penalty"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be more than 0")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}: it must be more than 0, and at most 1")
        if self.do_sample and self.num_beams > 1:
            raise ValueError("beams and sampling exclude each other: choose num_beams=1 or do_sample=False")

    @classmethod
    def read(cls, values: Mapping[str, Any], defaults: Mapping[str, Any], *, max_new_tokens: int) -> Options:
        """The caller's options over the model's own; an unknown name is an error that lists the known ones."""
        public = [f.name for f in fields(cls) if f.name not in _INTERNAL]
        unknown = sorted(set(values) - set(public))
        if unknown:
            raise TypeError(f"unknown option {', '.join(unknown)}. Known: {', '.join([*public, 'stop'])}")
        own = {
            name: defaults[name]
            for name in ("repetition_penalty", "no_repeat_ngram_size")
            if name in defaults
        }
        return cls(
            **{
                "max_new_tokens": max_new_tokens,
                **own,
                "ends": frozenset(defaults.get("eos_ids") or ()),
                "suppress": (*(defaults.get("suppress_tokens") or ()), *_bad_words(defaults)),
                "suppress_first": tuple(defaults.get("begin_suppress_tokens") or ()),
                "first": defaults.get("forced_bos_id"),
                "last": defaults.get("forced_eos_token_id")
                if isinstance(defaults.get("forced_eos_token_id"), int)
                else None,
                **values,
            }
        )


_INTERNAL = ("ends", "suppress", "suppress_first", "first", "last", "timestamps")


def _bad_words(defaults: Mapping[str, Any]) -> list[int]:
    """Single tokens that the model must not write, as Marian's padding; one that ends texts may be written."""
    words = [word[0] for word in defaults.get("bad_words_ids") or () if len(word) == 1]
    return [word for word in words if word not in (defaults.get("eos_ids") or ())]


class Writer(Protocol):
    """A model that has read a batch of prompts."""

    history: np.ndarray
    """Tokens so far, [rows, length]; what a repetition penalty looks at."""

    def step(self, tokens: np.ndarray | None, rows: np.ndarray | None) -> np.ndarray:
        """Scores of the next token, [rows, vocabulary]: after the prompts for None, else after one more token each.

        `rows` says which of the old rows each new one continues.
        """
        ...


class CachedWriter:
    """What goes on from step to step: the tokens so far, and arrays with a row for each text.

    A session without a cache reads everything again for every token.
    """

    def __init__(self, session: Any, history: np.ndarray, arrays: dict[str, np.ndarray]) -> None:
        self.session, self.history = session, history
        inputs = {value.name: value for value in session.get_inputs()}
        self._names = list(inputs)
        self._arrays = arrays
        self._past = _empty_cache(inputs, len(history))
        self._outputs = ["logits", *map(_present, self._past)]

    def _append(self, tokens: np.ndarray | None, rows: np.ndarray | None) -> np.ndarray:
        """Add a token to each text, which goes on the old one of `rows`; and the tokens that are to be read now."""
        if tokens is None:
            return self.history
        if rows is not None and not np.array_equal(rows, np.arange(len(self.history))):
            self.history = self.history[rows]
            self._past = {name: value[rows] for name, value in self._past.items()}
            self._arrays = {name: value[rows] for name, value in self._arrays.items()}
        self.history = np.concatenate([self.history, tokens[:, None]], axis=1)
        return tokens[:, None] if self._past else self.history

    def _run(self, feed: Mapping[str, np.ndarray]) -> np.ndarray:
        """The scores of the next token; the cache grows."""
        feed = {name: array for name, array in {**feed, **self._past}.items() if name in self._names}
        logits, *present = self.session.run(self._outputs, feed)
        self._past = dict(zip(self._past, present))
        # in half precision many words of a large vocabulary would have the same score
        return np.asarray(logits[:, -1], np.float32)


class Decoder(CachedWriter):
    """Prompts, padded on the left, in a decoder."""

    def __init__(self, session: Any, ids: np.ndarray, mask: np.ndarray) -> None:
        super().__init__(session, ids, {"mask": mask})

    def step(self, tokens: np.ndarray | None, rows: np.ndarray | None) -> np.ndarray:
        ids = self._append(tokens, rows)
        mask = self._arrays["mask"]
        mask = np.pad(mask, [(0, 0), (0, self.history.shape[1] - mask.shape[1])], constant_values=1)
        self._arrays["mask"] = mask
        # padding is on the left, so a row's first token has position 0 wherever it stands
        positions = np.maximum(mask.cumsum(axis=1) - 1, 0)[:, -ids.shape[1] :]
        return self._run(
            {
                "input_ids": ids,
                "attention_mask": mask,
                "position_ids": np.ascontiguousarray(positions),
                "token_type_ids": np.zeros_like(ids),
            }
        )


class EncoderDecoder(CachedWriter):
    """What an encoder has read, and a decoder that looks at it while it writes; one graph without an encoder."""

    def __init__(
        self, encoder: Any, decoder: Any, feed: Mapping[str, np.ndarray], start: Sequence[int]
    ) -> None:
        arrays = dict(feed)
        if encoder is not None:
            names = [value.name for value in encoder.get_outputs()]
            taken = {value.name for value in encoder.get_inputs()}
            outputs = encoder.run(names, {name: array for name, array in feed.items() if name in taken})
            arrays |= zip(names, map(np.asarray, outputs))
        history = np.tile(np.asarray(start, np.int64), (len(next(iter(feed.values()))), 1))
        seen = {value.name for value in decoder.get_inputs()}
        super().__init__(decoder, history, {name: arrays[name] for name in arrays if name in seen})

    def step(self, tokens: np.ndarray | None, rows: np.ndarray | None) -> np.ndarray:
        ids = self._append(tokens, rows)
        return self._run({"decoder_input_ids": ids, **self._arrays})


_BRANCH = "use_cache_branch"
# names of optimum's decoders, and what they are here
_OURS = {
    "input_ids": "decoder_input_ids",
    "encoder_attention_mask": "attention_mask",
    "encoder_hidden_states": "last_hidden_state",
}


@dataclass(frozen=True)
class _Input:
    name: str
    shape: Sequence[Any]
    type: str


class PublishedDecoder:
    """A decoder as optimum exports it, under the names that `EncoderDecoder` gives: run like a session.

    It is one graph with two branches (`use_cache_branch`), or one for the first step and another for those after it,
    or, without a cache, the first alone. The keys and values of the encoder's output are made in the first step.
    """

    def __init__(self, encoder: Any, first: Any, later: Any = None) -> None:
        self._first, self._later = first, later or first
        fed = {"decoder_input_ids", *(v.name for v in (*encoder.get_inputs(), *encoder.get_outputs()))}
        self._inputs = {
            value.name: _Input(_OURS.get(value.name) or str(value.name), value.shape, value.type)
            for value in (*first.get_inputs(), *self._later.get_inputs())
            if value.name != _BRANCH
        }
        for name, value in self._inputs.items():
            if not name.startswith(_PAST) and value.name not in fed:
                raise ModelError(
                    f"the decoder has an input {name!r}, and it is not known what to feed to it; "
                    "export the model with from_transformers(…, path=folder)"
                )
            if name.startswith(_PAST) and not all(type(size) is int for size in list(value.shape)[1::2]):
                raise ModelError(
                    f"the decoder's input {name!r} has the shape {list(value.shape)}: the number of heads and "
                    "their size must be fixed"
                )
        outputs = {value.name for value in first.get_outputs()}
        missing = {"logits", *(_present(name) for name in self._inputs if name.startswith(_PAST))} - outputs
        if missing:
            raise ModelError(f"the decoder of the first step has no output {', '.join(sorted(missing))}")

    def get_inputs(self) -> list[_Input]:
        return list(self._inputs.values())

    def get_outputs(self) -> list[Any]:
        return self._first.get_outputs()

    def run(self, names: Sequence[str], feed: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        past = {name: array for name, array in feed.items() if name.startswith(_PAST)}
        begun = any(array.shape[2] for array in past.values())
        session = self._later if begun else self._first
        inputs = {name: feed[value.name] for name, value in self._inputs.items()}
        inputs[_BRANCH] = np.array([begun])
        taken = [value.name for value in session.get_inputs()]
        # after the first step the encoder's keys and values do not come back, or come back empty
        unchanged = {_present(name): past[name] for name in past if ".encoder." in name and begun}
        computed = [name for name in names if name not in unchanged]
        outputs = dict(zip(computed, session.run(computed, {name: inputs[name] for name in taken})))
        return [unchanged[name] if name in unchanged else outputs[name] for name in names]


def _present(name: str) -> str:
    """The output that grows a cache's input."""
    return f"present.{name.removeprefix(_PAST)}"


def generate(writer: Writer, options: Options) -> Iterator[list[list[int]]]:
    """Yield every row's new tokens after each step; the last that is yielded is the result.

    Tokens that end a text are not among them. With beams only the result is yielded: until the end any may win.
    """
    if options.num_beams > 1:
        yield _beams(writer, options)
        return
    rows = len(writer.history)
    random = np.random.default_rng(options.seed)
    new: list[list[int]] = [[] for _ in range(rows)]
    done = np.zeros(rows, bool)
    tokens: np.ndarray | None = None
    for step in range(options.max_new_tokens):
        scores = _processed(writer.step(tokens, None), writer.history, step, options)
        chosen = _sampled(scores, options, random) if options.do_sample else scores.argmax(axis=-1)
        for row in np.flatnonzero(~done):
            # a row that has ended is still fed: taking it out would change the batch, and with it the cache
            if int(chosen[row]) in options.ends:
                done[row] = True
            else:
                new[row].append(int(chosen[row]))
        tokens = chosen.astype(np.int64)
        yield new
        if done.all():
            return


def _processed(scores: np.ndarray, history: np.ndarray, step: int, options: Options) -> np.ndarray:
    """Scores with what must not be written at minus infinity."""
    scores = scores.copy()
    if options.timestamps is not None:
        options.timestamps.restrict(scores, history[:, history.shape[1] - step :])
    if options.repetition_penalty != 1.0:
        said = np.take_along_axis(scores, history, axis=1)
        # a penalty makes both unlikelier: a negative score is multiplied, a positive one divided
        said = np.where(said < 0, said * options.repetition_penalty, said / options.repetition_penalty)
        np.put_along_axis(scores, history, said.astype(scores.dtype), axis=1)
    size = options.no_repeat_ngram_size
    if size and history.shape[1] >= size:
        for row, tokens in enumerate(history.tolist()):
            tail = tokens[len(tokens) - size + 1 :]
            for start in range(len(tokens) - size + 1):
                if tokens[start : start + size - 1] == tail:
                    scores[row, tokens[start + size - 1]] = -np.inf
    if options.ends and step < options.min_new_tokens:
        scores[:, list(options.ends)] = -np.inf
    never = [*options.suppress, *(options.suppress_first if step == 0 else ())]
    scores[:, [token for token in never if token < scores.shape[1]]] = -np.inf
    forced = options.first if step == 0 else None
    if options.last is not None and step == options.max_new_tokens - 1:
        forced = options.last
    if forced is not None:
        scores[:] = -np.inf
        scores[:, forced] = 0.0
    return scores


def _sampled(scores: np.ndarray, options: Options, random: np.random.Generator) -> np.ndarray:
    # sums over a whole vocabulary are compared with top_p and the number drawn: float32 loses the tail
    scores = scores.astype(np.float64) / options.temperature
    if options.top_k and options.top_k < scores.shape[1]:
        least = np.partition(scores, -options.top_k, axis=1)[:, -options.top_k, None]
        scores = np.where(scores < least, -np.inf, scores)
    probabilities = np.exp(_log_softmax(scores))
    if options.top_p is not None and options.top_p < 1:
        order = np.argsort(probabilities, axis=1, kind="stable")
        below = np.take_along_axis(probabilities, order, axis=1).cumsum(axis=1) <= 1 - options.top_p
        below[:, -1] = False  # the likeliest is always kept
        dropped = np.zeros_like(below)
        np.put_along_axis(dropped, order, below, axis=1)
        probabilities = np.where(dropped, 0.0, probabilities)
        probabilities /= probabilities.sum(axis=1, keepdims=True)
    drawn = random.random((len(probabilities), 1))
    # the sum of all may be rounded to a little less than 1
    return np.minimum((probabilities.cumsum(axis=1) < drawn).sum(axis=1), probabilities.shape[1] - 1)


def _log_softmax(scores: np.ndarray) -> np.ndarray:
    shifted = scores - scores.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def _beams(writer: Writer, options: Options) -> list[list[int]]:
    """The best of `num_beams` texts for each row, by log probability over length ** `length_penalty`."""
    rows, beams = len(writer.history), options.num_beams
    first = writer.step(None, None)
    start = writer.history.shape[1]
    scores = np.full((rows, beams), _NEVER, np.float32)
    scores[:, 0] = 0.0
    logits = np.repeat(first, beams, axis=0)
    history = np.repeat(writer.history, beams, axis=0)
    finished: list[list[tuple[float, list[int]]]] = [[] for _ in range(rows)]
    settled = np.zeros(rows, bool)
    vocabulary = logits.shape[1]
    # as transformers: enough that all beams go on even where every end is among the likeliest
    candidates = max(2, 1 + len(options.ends)) * beams
    for step in range(options.max_new_tokens):
        logs = _processed(_log_softmax(logits), history, step, options)
        total = (logs.reshape(rows, beams, vocabulary) + scores[:, :, None]).reshape(rows, -1)
        order = np.argsort(-total, axis=1, kind="stable")[:, :candidates]
        chosen = np.take_along_axis(total, order, axis=1)
        last = step == options.max_new_tokens - 1
        parents = np.zeros((rows, beams), np.int64)
        tokens = np.zeros((rows, beams), np.int64)
        following = np.full((rows, beams), _NEVER, np.float32)
        for row in range(rows):
            running = 0
            for rank, (cell, score) in enumerate(zip(order[row], chosen[row])):
                parent, token = divmod(int(cell), vocabulary)
                ends = token in options.ends
                if (ends or last) and rank < beams and not settled[row]:
                    text = [*history[row * beams + parent, start:].tolist(), *([] if ends else [token])]
                    finished[row].append((float(score) / (step + 1) ** options.length_penalty, text))
                elif not ends and running < beams:
                    parents[row, running], tokens[row, running] = row * beams + parent, token
                    following[row, running] = score
                    running += 1
            finished[row] = sorted(finished[row], key=lambda entry: -entry[0])[:beams]
            if len(finished[row]) == beams:
                possible = float(following[row, 0]) / (step + 1) ** options.length_penalty
                settled[row] |= options.early_stopping or finished[row][-1][0] >= possible
        if settled.all() or last:
            break
        scores = following
        if step == 0:
            # The cache has one row for each prompt so far: from here on one for each beam.
            logits = writer.step(tokens.reshape(-1), parents.reshape(-1) // beams)
        else:
            logits = writer.step(tokens.reshape(-1), parents.reshape(-1))
        history = writer.history
    return [max(texts, key=lambda entry: entry[0])[1] if texts else [] for texts in finished]


def _empty_cache(inputs: Mapping[str, Any], rows: int) -> dict[str, np.ndarray]:
    """Keys and values of no token yet, by the names of a session's inputs."""
    return {
        name: np.zeros(
            (rows, int(value.shape[1]), 0, int(value.shape[3])), _TYPES.get(value.type, np.float32)
        )
        for name, value in inputs.items()
        if name.startswith(_PAST)
    }
