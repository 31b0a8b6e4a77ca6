"""What a model is for: how its data is read, how it is trained, and what it answers.

`TASKS` is the table of what can be trained: a new task is a module with the functions of `protocol.Functions` and a
line here. `options` has the options of all. `ANSWERS` is the table of what a loaded folder answers, which are more.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, cast

from onward.tasks import options
from onward.tasks.check_options import OptionError, make_options

if TYPE_CHECKING:
    from onward.tasks.protocol import Functions


@dataclasses.dataclass(frozen=True)
class Task:
    """One kind of training: its name, the class of its options, the kind of its data, and its module."""

    name: str
    Options: type
    kind: str
    module: str

    @property
    def functions(self) -> Functions:
        """The module, which is imported now and not with the table: the command line shows options without it."""
        return cast("Functions", importlib.import_module(f"onward.tasks.{self.module}"))

    def options(self, values: Mapping[str, Any]) -> Any:
        """The options of this task of the values that a user gave, checked."""
        return make_options(self.name, self.Options, values, OPTIONS)


# the words for samples in names of tasks, as Hugging Face has them, and those that `onward.data` uses
KINDS: Mapping[str, str] = {"image": "image", "audio": "sound", "text": "text", "tabular": "table"}
TASKS: Mapping[str, Task] = {
    task.name: task
    for task in (
        *(
            Task(f"{sample}-{target}", Options, KINDS[sample], target.replace("-", "_"))
            for (sample, target), Options in options.LABELLED.items()
        ),
        Task("embeddings", options.Embeddings, "pairs", "embeddings"),
        Task("object-detection", options.ObjectDetection, "scene", "object_detection"),
        Task("image-segmentation", options.ImageSegmentation, "scene", "image_segmentation"),
        Task("text-recognition", options.TextRecognition, "lettering", "text_recognition"),
        Task("token-classification", options.TokenClassification, "tagged", "token_classification"),
        Task("text-generation", options.TextGeneration, "lines", "text_generation"),
        Task("text2text", options.SequenceToSequence, "lines", "sequence_to_sequence"),
        Task("automatic-speech-recognition", options.SpeechToText, "lines", "sequence_to_sequence"),
    )
}
OPTIONS: Mapping[str, type] = {name: task.Options for name, task in TASKS.items()}


def find_task(name: str) -> Task:
    """The task of a name; an unknown one is an error with the nearest and the list.

    >>> find_task("image-classification").kind
    'image'
    """
    if name not in TASKS:
        near = get_close_matches(name, TASKS, n=1, cutoff=0.5)
        meant = f"did you mean '{near[0]}'? " if near else ""
        raise OptionError(
            f"no task '{name}' can be trained here", hint=f"{meant}There are {', '.join(TASKS)}"
        )
    return TASKS[name]


# the functions of this package that answer for an exported folder, by the words of Hugging Face's table of tasks
ANSWERS: Mapping[str, str] = {
    "hidden": "embeddings.hidden_states",
    "embed": "embeddings.embed",
    "similar": "embeddings.similarities",
    "speaker": "embeddings.embed_voice",
    "span": "question_answering.answer_question",
    "classify": "classifier.classify",
    "zero-shot": "classifier.classify_zero_shot",
    "zero-shot image": "classifier.classify_image_zero_shot",
    "choose": "classifier.choose",
    "frames": "classifier.classify_frames",
    "tag": "token_classification.tag",
    "fill": "fill_mask.fill_mask",
    "generate": "generator.continue_text",
    "rewrite": "generator.rewrite",
    "caption": "generator.caption",
    "transcribe": "speech.transcribe",
    "spell": "speech.spell",
    "speak": "speech.speak",
    "detect": "detector.detect",
    "zero-shot detect": "detector.detect_zero_shot",
    "segment": "segmenter.segment",
    "instances": "segmenter.segment_objects",
    "depth": "image_outputs.depth",
    "keypoints": "image_outputs.keypoints",
    "picture": "image_outputs.picture",
    "reconstruct": "image_outputs.reconstruct",
    "forecast": "arrays.forecast",
    "arrays": "arrays.run_arrays",
}


def answer_function(word: str) -> Callable[..., Any]:
    """The function of a word; its module is imported now, so that a folder loads the code of its own task alone."""
    module, _, name = ANSWERS[word].partition(".")
    return getattr(importlib.import_module(f"onward.tasks.{module}"), name)
