"""Inference with an exported folder: text, images or audio in, embeddings, labels or text out.

Knows the folder's card, its tokenizer and the runtime; `onward.tasks` has the answers. Needs neither torch nor
transformers: `tokenizers` only where text goes in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from onward import contract
from onward.data.text import open_tokenizer, read_tokenizer
from onward.errors import ModelError
from onward.export.huggingface.folder import CARD, MODEL, read_card
from onward.export.huggingface.tasks import TASKS, task_named
from onward.graph.gate import read_proto
from onward.hub.model_folder import is_published, open_published
from onward.hub.read_info import read_info
from onward.language.decoding import PublishedDecoder
from onward.language.swappable import SwappingSession, takes_adapters
from onward.tasks import TASKS as TRAINED
from onward.tasks import answer_function
from onward.tasks.classifier import Classifier, require_tokenizer
from onward.tasks.generator import stream

Text = str | tuple[str, str] | Mapping[str, str]


def load(
    folder: str | PathLike[str],
    *,
    providers: Sequence[str] = ("CPUExecutionProvider",),
    session_options: Any = None,
) -> Pipeline | Classifier:
    """Load a folder that `from_transformers` wrote, a model file that `onward deploy` wrote, or a published folder.

    Call the result with text, images, sound or rows of a table.

    >>> import onward
    >>> embed = onward.load("embedder")
    >>> embed("some text").shape
    (16,)
    """
    path = Path(folder)
    if path.name == MODEL and (path.parent / CARD).is_file() and not _describes_itself(path):
        path = path.parent  # the card beside a model says what it answers
    if _describes_itself(path / MODEL) and not (path / CARD).is_file():
        path = path / MODEL  # what `onward finetune` wrote into a folder
    # files of Hugging Face's world may lie beside a model that was trained here: its own word counts
    published = is_published(path) and not (path.is_file() and _describes_itself(path))
    if path.is_file() and not published:
        return _load_file(path, providers=providers, session_options=session_options)
    files: Mapping[str, Path]
    if published:
        path, files, card = open_published(path)
    else:
        card = read_card(path)
        files = {name: path / name for name in card.get("parts") or (MODEL,)}
    if card["task"] not in TASKS:
        raise ModelError(f"'{path / CARD}': no answers for task {card['task']!r}; known: {', '.join(TASKS)}")
    if card.get("training"):
        raise ModelError(f"'{path}' holds a model for training; export without training=True to load it")
    # a card comes from outside: a name with a path in it would open another file
    from onward.runtime.sessions import open_session

    for name, file in files.items():
        if Path(name).name != name or not file.is_file():
            raise ModelError(f"'{path}': no {name}")
    sessions = {
        name: open_session(file, providers=providers, options=session_options) for name, file in files.items()
    }
    first, *others = sessions.values()
    if takes_adapters(first):  # exported with merge=False: the base, with inputs for adapters
        first = SwappingSession(first, path)
        first.use(card.get("adapter"))
    # optimum's names and caches differ from ours; sessions under our names need no second reader
    if published and others:
        sessions = {"encoder": first, "decoder": PublishedDecoder(first, *others)}
    return Pipeline(
        session=first,
        card=card,
        tokenizer=_tokenizer(path, card),
        sessions=sessions,
        folder=path,
    )


@dataclass(frozen=True)
class Pipeline:
    """A loaded model. Call it with one input or a list of inputs; the result has the same form.

    The result depends on `task`:

    - pooling: an embedding; default and feature-extraction: one vector per token
    - text-, image- and audio-classification: `{"label", "score"}`, best first; `top_k=None` for all
    - zero-shot-classification and -image-classification: the same over the `candidate_labels` of the call
    - token-classification: `{"label", "score", "text", "start", "end"}` per token, or `group=True` per name; what is
      labelled `O` is left out (`ignore_labels`)
    - question-answering: `pipeline(question, context)` gives `{"answer", "score", "start", "end"}`
    - fill-mask: `{"token", "score", "text"}` for each candidate, a list per mask if there are several
    - text-generation, text2text and image-to-text: text; `max_new_tokens=…`, and the other options of
      `onward.language.decoding.Options`; a conversation `[{"role": "user", "content": …}]` is a prompt too
    - automatic-speech-recognition: `{"text"}`; text-to-audio: `{"audio", "sampling_rate"}`
    - object-detection: `{"score", "label", "box"}` over `threshold=0.5`; with labels in zero-shot-object-detection
    - semantic- and instance-segmentation: `{"score", "label", "mask"}`
    - depth-estimation: `{"predicted_depth", "depth"}`
    - keypoint-detection: `{"label", "score", "x", "y"}`; image-to-image: a picture
    - multiple-choice: `pipeline(text, choices)`; sentence-similarity: `pipeline(text, others)` gives scores
    - audio-frame-classification: labels per frame; audio-xvector: a speaker's embedding
    - time-series-forecasting: the forecast as an array
    - denoising, vae-encoder and -decoder: an array for arrays by name, `{"sample": …, "timestep": …}`
    """

    session: Any
    card: Mapping[str, Any]
    tokenizer: Any
    sessions: Mapping[str, Any] = field(default_factory=dict)
    folder: Path = field(default=Path())

    @property
    def task(self) -> str:
        """The task that the folder was exported for."""
        return self.card["task"]

    def __call__(self, inputs: Any, *args: Any, **options: Any) -> Any:
        """Run one input, or each of a list."""
        word = self.card.get("answer") or task_named(self.task).answer
        return answer_function(word)(self, inputs, *args, **options)

    def use(self, adapter: str | PathLike[str] | None) -> Pipeline:
        """Answer with another adapter from now on, without loading the base again; None is the base alone.

        The name of an `.onnx_adapter` file in the folder, or a path. The folder is one of
        `result.export(folder, merge=False)`, and further files are `result.save_adapters("poet.onnx_adapter")`.

        >>> pipeline.use("poet")("Once upon a time")  # doctest: +SKIP
        """
        if not isinstance(self.session, SwappingSession):
            raise ModelError(
                f"'{self.folder}' has no place for adapters",
                hint="export it with merge=False (onward finetune --no-merge)",
            )
        self.session.use(adapter)
        return self

    def stream(self, prompt: Any, **options: Any) -> Iterator[str]:
        """Yield a text as it is written, piece by piece; options as for a call.

        >>> for piece in pipeline.stream("Once upon a time"):  # doctest: +SKIP
        ...     print(piece, end="")
        """
        return stream(self, prompt, **options)

    def encode(self, texts: Sequence[Text]) -> tuple[dict[str, np.ndarray], list[Any]]:
        """Token arrays for the model, padded, and the tokenizer's encodings with their offsets.

        A pair of texts is a tuple, or `{"text": …, "text_pair": …}`.
        """
        pairs = [(t["text"], t["text_pair"]) if isinstance(t, Mapping) else t for t in texts]
        encodings = self.tokenizer.encode_batch(pairs)
        return self.batch(encodings), encodings

    def batch(self, encodings: Sequence[Any]) -> dict[str, np.ndarray]:
        """Encodings as padded arrays, one for each input that the model takes."""
        settings = self.card["tokenizer"]
        columns = {
            "input_ids": ([encoding.ids for encoding in encodings], settings["pad_id"]),
            "attention_mask": ([encoding.attention_mask for encoding in encodings], 0),
            "token_type_ids": ([encoding.type_ids for encoding in encodings], 0),
        }
        # a decoder goes on from its last column, so its padding is before the text
        left = settings["padding_side"] == "left"
        return {
            name: _pad(rows, filler, left=left)
            for name, (rows, filler) in columns.items()
            if name in self.card["inputs"]
        }

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Token ids as text, with the spaces before punctuation removed where the tokenizer does so."""
        text = self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return _without_spaces(text) if self.card["tokenizer"].get("clean_up") else text

    def trim(self, row: np.ndarray, encoding: Any) -> np.ndarray:
        """One row of an output without its padding."""
        size = len(encoding.ids)
        return row[len(row) - size :] if self.card["tokenizer"]["padding_side"] == "left" else row[:size]

    def run(self, feed: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The model's outputs by name."""
        names = list(self.card["outputs"])
        return dict(zip(names, self.session.run(names, dict(feed))))


def _load_file(path: Path, *, providers: Sequence[str], session_options: Any = None) -> Any:
    """Load a model file with its classes, its preprocessing and the tokenizer beside it."""
    from onward.runtime.sessions import open_session

    session = open_session(path, providers=providers, options=session_options)
    info = read_info(path)
    tokenizer = None
    if info.preprocessing is not None and info.preprocessing.kind == "text":
        file = require_tokenizer(path, info)
        tokenizer = open_tokenizer(file, info.preprocessing.settings)
    task = TRAINED.get(info.task or "")
    # a file that says nothing of its task, or one that is only answered as a folder, still has outputs
    return (
        Classifier(session, info, tokenizer)
        if task is None or task.kind == "lines"
        else task.functions.predictor(session, info, tokenizer)
    )


def _describes_itself(model: Path) -> bool:
    """Whether a model's file says how its input is prepared, so that it needs no card beside it."""
    if not model.is_file():
        return False
    return any(
        entry.key == contract.PREPROCESSING
        for entry in read_proto(model, read_data=False, by_reference=True).metadata_props
    )


def _tokenizer(folder: Path, card: Mapping[str, Any]) -> Any:
    if "tokenizer" not in card or "spelling" in card:
        return None
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"'{folder}': no tokenizer.json. The model's tokenizer has no fast form; "
            "run the model with onnxruntime and its own tokenizer"
        )
    settings = card["tokenizer"]
    for name in ("pad_id", "pad_type_id", "max_length"):
        number = 0 if settings.get(name) is None else settings[name]
        if not isinstance(number, int) or not 0 <= number < 2**31:
            raise ModelError(f"'{folder / CARD}': the tokenizer's {name} is {str(number)[:40]!r}")
    tokenizer = read_tokenizer(path)
    # a longer text would be an index beyond the table of positions, an error of the runtime's that names no text
    limit = settings.get("max_length")
    if limit:
        tokenizer.enable_truncation(limit)
    return tokenizer


def _without_spaces(text: str) -> str:
    """What `clean_up_tokenization_spaces` of transformers means."""
    for mark in (" .", " ?", " !", " ,"):
        text = text.replace(mark, mark[1:])
    text = text.replace(" ' ", "'")
    for end in (" n't", " 'm", " 's", " 've", " 're"):
        text = text.replace(end, end[1:])
    return text


def _pad(rows: Sequence[Sequence[int]], filler: int | None, *, left: bool) -> np.ndarray:
    width = max((len(row) for row in rows), default=0)
    batch = np.full((len(rows), width), filler or 0, np.int64)
    for index, row in enumerate(rows):
        batch[index, width - len(row) if left else 0 : width if left else len(row)] = row
    return batch
