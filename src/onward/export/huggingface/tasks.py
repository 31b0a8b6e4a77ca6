"""What each Hugging Face task is: its outputs, its inputs, and how to recognise it in a configuration.

A table and two lookups. Knows names only; imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

__all__ = ["TASKS", "Task", "detect", "task_named"]

Axes = Mapping[int, str]

_ROW: Axes = {0: "batch"}
_TOKENS: Axes = {0: "batch", 1: "sequence"}


@dataclass(frozen=True)
class Task:
    """One kind of model: which class loads it, what goes in and exactly what comes out.

    `loaders` are tried in order. `suffixes` are endings of the class names in a configuration's
    `architectures` that mean this task. `kind` says what a user hands over.
    """

    name: str
    loaders: tuple[str, ...]
    outputs: Mapping[str, Axes]
    kind: str = "text"
    suffixes: tuple[str, ...] = ()
    aliases: tuple[str, ...] = field(default=())

    @property
    def classifies(self) -> bool:
        """Whether the model has classes of its own."""
        return self.name.endswith("classification") and not self.name.startswith("zero-shot")


_TABLE = (
    Task("default", ("AutoModel",), {"last_hidden_state": _TOKENS}),
    Task("feature-extraction", ("AutoModel",), {"last_hidden_state": _TOKENS}),
    Task("pooling", ("AutoModel",), {"embeddings": _ROW}),
    Task(
        "question-answering",
        ("AutoModelForQuestionAnswering",),
        {"start_logits": _TOKENS, "end_logits": _TOKENS},
        suffixes=("ForQuestionAnswering", "ForQuestionAnsweringSimple"),
    ),
    Task(
        "text-classification",
        ("AutoModelForSequenceClassification",),
        {"logits": _ROW},
        suffixes=("ForSequenceClassification",),
        aliases=("zero-shot-classification",),
    ),
    Task(
        "token-classification",
        ("AutoModelForTokenClassification",),
        {"logits": _TOKENS},
        suffixes=("ForTokenClassification",),
    ),
    Task(
        "fill-mask",
        ("AutoModelForMaskedLM",),
        {"logits": _TOKENS},
        suffixes=("ForMaskedLM", "ForPreTraining"),
    ),
    Task(
        "text-generation",
        ("AutoModelForCausalLM",),
        {"logits": _TOKENS},
        suffixes=("ForCausalLM", "LMHeadModel"),
    ),
    Task(
        "text2text",
        ("AutoModelForSeq2SeqLM",),
        {"logits": {0: "batch", 1: "decoder_sequence"}},
        suffixes=("ForConditionalGeneration",),
        aliases=("text2text-generation", "translation", "summarization"),
    ),
    Task(
        "image-classification",
        ("AutoModelForImageClassification",),
        {"logits": _ROW},
        kind="image",
        suffixes=("ForImageClassification", "ForImageClassificationWithTeacher"),
    ),
    Task(
        "audio-classification",
        ("AutoModelForAudioClassification",),
        {"logits": _ROW},
        kind="audio",
        suffixes=("ForAudioClassification",),
    ),
    Task(
        "zero-shot-image-classification",
        ("AutoModelForZeroShotImageClassification",),
        {
            "logits_per_image": {0: "image_batch", 1: "text_batch"},
            "text_embeds": {0: "text_batch"},
            "image_embeds": {0: "image_batch"},
        },
        kind="image and text",
        suffixes=("CLIPModel",),
    ),
)

TASKS: Mapping[str, Task] = {name: task for task in _TABLE for name in (task.name, *task.aliases)}

# Speech classifiers of these families are called …ForSequenceClassification, like text classifiers.
_SPEECH = frozenset(
    {
        "data2vec-audio",
        "hubert",
        "sew",
        "sew-d",
        "unispeech",
        "unispeech-sat",
        "wav2vec2",
        "wav2vec2-bert",
        "wav2vec2-conformer",
        "wavlm",
    }
)


def task_named(name: str) -> Task:
    """The task of that name or alias; an unknown one raises `ValueError` with the nearest and the list.

    >>> task_named("zero-shot-classification").name
    'text-classification'
    """
    if name in TASKS:
        return TASKS[name]
    near = get_close_matches(str(name), TASKS, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise ValueError(f"unknown task {name!r}{hint} Known: {', '.join([*TASKS, 'auto'])}")


def detect(config: Any, *, pools: bool = False) -> str:
    """The task that a model's configuration speaks of; a bare encoder is `default`, or `pooling` if it pools.

    >>> from types import SimpleNamespace
    >>> detect(SimpleNamespace(architectures=["BertForQuestionAnswering"], model_type="bert"))
    'question-answering'
    """
    if pools:
        return "pooling"
    architecture = next(iter(getattr(config, "architectures", None) or ()), "")
    for task in _TABLE:
        if architecture.endswith(task.suffixes or ("\0",)):
            speech = getattr(config, "model_type", "") in _SPEECH
            return "audio-classification" if speech and task.name == "text-classification" else task.name
    return "default"
