"""What `onward.load` answers: a function of this package for each name in the `answer` column of Hugging
Face's table of tasks.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from onward.export.huggingface.tasks import task_named

if TYPE_CHECKING:
    from onward.pipeline.load import Pipeline


def answer(pipeline: Pipeline, inputs: Any, *args: Any, **options: Any) -> Any:
    """The answer of the pipeline's task."""
    word = pipeline.card.get("answer") or task_named(pipeline.task).answer
    return answer_function(word)(pipeline, inputs, *args, **options)


def answer_function(word: str) -> Callable[..., Any]:
    """The function of a row; its module is imported now, so that a pipeline loads the code of its own task alone."""
    module, _, name = ANSWERS[word].partition(".")
    return getattr(importlib.import_module(f"onward.tasks.{module}"), name)


ANSWERS: Mapping[str, str] = {
    "hidden": "embedder.hidden_states",
    "embed": "embedder.embed",
    "similar": "embedder.similarities",
    "speaker": "embedder.embed_voice",
    "span": "question_answering.answer_question",
    "classify": "classifier.classify",
    "zero-shot": "classifier.classify_zero_shot",
    "zero-shot image": "classifier.classify_image_zero_shot",
    "choose": "classifier.choose",
    "frames": "classifier.classify_frames",
    "tag": "tagger.tag",
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
