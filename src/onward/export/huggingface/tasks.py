"""The table of Hugging Face tasks: for each the class that loads it, its wrapper, outputs, loss and pipeline function.

`TASKS` has a row for each task, `TYPES` a row for each model type that departs from its task's row. A new task or
type is one row; `wrappers`, `task_losses` and `onward.pipeline` look their functions up by the names in it.
Imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

__all__ = ["TASKS", "TYPES", "Axes", "Task", "detect", "task_for", "task_named"]

Axes = Mapping[int, str]

_ROW: Axes = {0: "batch"}
_TOKENS: Axes = {0: "batch", 1: "sequence"}
_FRAMES: Axes = {0: "batch", 1: "frames"}
_PICTURE: Axes = {0: "batch", 2: "output_height", 3: "output_width"}


@dataclass(frozen=True)
class Task:
    """One kind of model: which classes load it, how it is called, what comes out, and what is made of that.

    `loaders` are classes of transformers; the first that knows the model's type is taken. `wrapper` is how the
    model is called, `loss` what it is trained with (None: no loss of its own), `answer` what `onward.load` makes
    of its outputs. `suffixes` are endings of the class names in a configuration's `architectures` that mean
    this task. `kind` says what a user hands over.
    """

    name: str
    loaders: tuple[str, ...]
    outputs: Mapping[str, Axes]
    wrapper: str
    answer: str
    loss: str | None = None
    kind: str = "text"
    suffixes: tuple[str, ...] = ()
    aliases: tuple[str, ...] = field(default=())
    sizes: str = "fixed"
    """Whether pictures may have any size ("any") or must have the model's own ("fixed")."""

    @property
    def classifies(self) -> bool:
        """Whether the model has classes of its own."""
        return self.answer in _WITH_CLASSES


_WITH_CLASSES = frozenset(
    {"classify", "zero-shot", "tag", "frames", "speaker", "segment", "detect", "instances", "keypoints"}
)

_TABLE = (
    Task("default", ("AutoModel",), {"last_hidden_state": _TOKENS}, "input", "hidden"),
    Task(
        "feature-extraction",
        ("AutoModel",),
        {"last_hidden_state": _TOKENS},
        "input",
        "hidden",
        aliases=("image-feature-extraction",),
    ),
    Task("pooling", ("AutoModel",), {"embeddings": _ROW}, "text", "embed"),
    Task("sentence-similarity", ("AutoModel",), {"embeddings": _ROW}, "text", "similar"),
    Task(
        "question-answering",
        ("AutoModelForQuestionAnswering",),
        {"start_logits": _TOKENS, "end_logits": _TOKENS},
        "text",
        "span",
        "span",
        suffixes=("ForQuestionAnswering", "ForQuestionAnsweringSimple"),
    ),
    Task(
        "text-classification",
        ("AutoModelForSequenceClassification",),
        {"logits": _ROW},
        "text",
        "classify",
        "classes",
        suffixes=("ForSequenceClassification",),
    ),
    Task(
        "zero-shot-classification",
        ("AutoModelForSequenceClassification",),
        {"logits": _ROW},
        "text",
        "zero-shot",
        "classes",
    ),
    Task(
        "token-classification",
        ("AutoModelForTokenClassification",),
        {"logits": _TOKENS},
        "text",
        "tag",
        "token classes",
        suffixes=("ForTokenClassification",),
    ),
    Task(
        "multiple-choice",
        ("AutoModelForMultipleChoice",),
        {"logits": {0: "batch", 1: "choices"}},
        "choices",
        "choose",
        "choice",
        suffixes=("ForMultipleChoice",),
    ),
    Task(
        "fill-mask",
        ("AutoModelForMaskedLM",),
        {"logits": _TOKENS},
        "text",
        "fill",
        "tokens",
        suffixes=("ForMaskedLM", "ForPreTraining"),
    ),
    Task(
        "text-generation",
        ("AutoModelForCausalLM",),
        {"logits": _TOKENS},
        "generation",
        "generate",
        "next token",
        suffixes=("ForCausalLM", "LMHeadModel"),
    ),
    Task(
        "text2text",
        ("AutoModelForSeq2SeqLM",),
        {"logits": {0: "batch", 1: "decoder_sequence"}},
        "encoder-decoder",
        "rewrite",
        "target tokens",
        suffixes=("ForConditionalGeneration", "MTModel", "T5WithLMHeadModel"),
        aliases=("text2text-generation", "translation", "summarization"),
    ),
    Task(
        "image-classification",
        ("AutoModelForImageClassification",),
        {"logits": _ROW},
        "image",
        "classify",
        "classes",
        kind="image",
        suffixes=("ForImageClassification", "ForImageClassificationWithTeacher"),
    ),
    Task(
        "object-detection",
        ("AutoModelForObjectDetection",),
        {"logits": _ROW, "pred_boxes": _ROW},
        "image",
        "detect",
        "boxes",
        kind="image",
        suffixes=("ForObjectDetection",),
        sizes="any",
    ),
    Task(
        "semantic-segmentation",
        ("AutoModelForSemanticSegmentation",),
        {"logits": _ROW},
        "image",
        "segment",
        "pixels",
        kind="image",
        suffixes=("ForSemanticSegmentation",),
        aliases=("image-segmentation",),
    ),
    Task(
        "instance-segmentation",
        ("AutoModelForUniversalSegmentation", "AutoModelForInstanceSegmentation"),
        {"class_queries_logits": _ROW, "masks_queries_logits": _ROW},
        "image",
        "instances",
        "masks",
        kind="image",
        suffixes=("ForUniversalSegmentation", "ForInstanceSegmentation"),
    ),
    Task(
        "depth-estimation",
        ("AutoModelForDepthEstimation",),
        {"predicted_depth": _ROW},
        "image",
        "depth",
        "depth",
        kind="image",
        suffixes=("ForDepthEstimation",),
    ),
    Task(
        "keypoint-detection",
        ("AutoModelForPoseEstimation",),
        {"heatmaps": _ROW},
        "image",
        "keypoints",
        kind="image",
        suffixes=("ForPoseEstimation",),
        aliases=("pose-estimation",),
    ),
    Task(
        "image-to-image",
        ("AutoModelForImageToImage",),
        {"reconstruction": _PICTURE},
        "image",
        "picture",
        "picture",
        kind="image",
        suffixes=("ForImageSuperResolution",),
        sizes="any",
    ),
    Task(
        "masked-image-modeling",
        ("AutoModelForMaskedImageModeling",),
        {"reconstruction": _ROW},
        "masked image",
        "reconstruct",
        "patches",
        kind="image",
        suffixes=("ForMaskedImageModeling",),
        aliases=("masked-im", "masked-image-modelling"),
    ),
    Task(
        "image-to-text",
        ("AutoModelForImageTextToText",),
        {"logits": {0: "batch", 1: "decoder_sequence"}},
        "encoder-decoder",
        "caption",
        "target tokens",
        kind="image",
        suffixes=("VisionEncoderDecoderModel",),
    ),
    Task(
        "audio-classification",
        ("AutoModelForAudioClassification",),
        {"logits": _ROW},
        "audio",
        "classify",
        "classes",
        kind="audio",
        suffixes=("ForAudioClassification",),
    ),
    Task(
        "automatic-speech-recognition",
        ("AutoModelForCTC", "AutoModelForSpeechSeq2Seq"),
        {"logits": _FRAMES},
        "audio",
        "spell",
        "ctc",
        kind="audio",
        suffixes=("ForCTC", "ForSpeechSeq2Seq"),
    ),
    Task(
        "audio-frame-classification",
        ("AutoModelForAudioFrameClassification",),
        {"logits": _FRAMES},
        "audio",
        "frames",
        "frames",
        kind="audio",
        suffixes=("ForAudioFrameClassification",),
    ),
    Task(
        "audio-xvector",
        ("AutoModelForAudioXVector",),
        {"logits": _ROW, "embeddings": _ROW},
        "audio",
        "speaker",
        "speaker",
        kind="audio",
        suffixes=("ForXVector",),
    ),
    Task(
        "text-to-audio",
        ("AutoModelForTextToWaveform",),
        {"waveform": {0: "batch", 1: "samples"}},
        "waveform",
        "speak",
        suffixes=("VitsModel", "WithHifiGan"),
        aliases=("text-to-speech",),
    ),
    Task(
        "time-series-forecasting",
        ("AutoModelForTimeSeriesPrediction",),
        {"prediction_outputs": _ROW},
        "series",
        "forecast",
        "values",
        kind="time series",
        suffixes=("ForPrediction", "ForTimeSeriesPrediction"),
    ),
    Task(
        "zero-shot-image-classification",
        ("AutoModelForZeroShotImageClassification",),
        {
            "logits_per_image": {0: "image_batch", 1: "text_batch"},
            "text_embeds": {0: "text_batch"},
            "image_embeds": {0: "image_batch"},
        },
        "image and text",
        "zero-shot image",
        "contrast",
        kind="image and text",
        suffixes=("CLIPModel", "SiglipModel"),
    ),
    Task(
        "zero-shot-object-detection",
        ("AutoModelForZeroShotObjectDetection",),
        {"logits": {0: "image_batch"}, "pred_boxes": {0: "image_batch"}},
        "queries",
        "zero-shot detect",
        kind="image and text",
        suffixes=("OwlViTForObjectDetection", "Owlv2ForObjectDetection"),
    ),
    Task(
        "denoising",
        (),
        {"out_sample": {0: "batch", 2: "height", 3: "width"}},
        "denoiser",
        "arrays",
        "noise",
        kind="arrays",
        aliases=("unet",),
    ),
    Task("vae-encoder", (), {"latent_parameters": _PICTURE}, "autoencoder", "arrays", kind="arrays"),
    Task("vae-decoder", (), {"sample": _PICTURE}, "autoencoder", "arrays", kind="arrays"),
)

TASKS: Mapping[str, Task] = {name: task for task in _TABLE for name in (task.name, *task.aliases)}

_SEQ2SEQ_SPEECH = {
    "wrapper": "encoder-decoder",
    "outputs": {"logits": {0: "batch", 1: "decoder_sequence"}},
    "answer": "transcribe",
    "loss": "target tokens",
}

TYPES: Mapping[tuple[str, str], Mapping[str, Any]] = {
    **{
        (kind, "automatic-speech-recognition"): _SEQ2SEQ_SPEECH
        for kind in ("whisper", "speech_to_text", "moonshine")
    },
    **{
        (kind, "object-detection"): {"loss": "focal boxes"}
        for kind in ("conditional_detr", "deformable_detr")
    },
    **{
        (kind, "object-detection"): {"loss": None, "sizes": "fixed"}
        for kind in ("rt_detr", "rt_detr_v2", "d_fine", "deimv2", "lw_detr")
    },
    ("dab-detr", "object-detection"): {"loss": None},
    **{(kind, "depth-estimation"): {"sizes": "any"} for kind in ("glpn", "depth_anything")},
    ("patchtst", "time-series-forecasting"): {"loaders": ("PatchTSTForPrediction",)},
    ("patchtsmixer", "time-series-forecasting"): {"loaders": ("PatchTSMixerForPrediction",)},
    ("siglip", "zero-shot-image-classification"): {"loss": "sigmoid contrast"},
    ("siglip2", "zero-shot-image-classification"): {"loss": "sigmoid contrast"},
}

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
# What the class names of these say of a task is not what they are for.
_KNOWN_TYPES = {
    "whisper": "automatic-speech-recognition",
    "speech_to_text": "automatic-speech-recognition",
    "moonshine": "automatic-speech-recognition",
}


def task_named(name: str) -> Task:
    """The task of that name or alias; an unknown one raises `ValueError` with the nearest and the list.

    >>> task_named("summarization").name
    'text2text'
    """
    if name in TASKS:
        return TASKS[name]
    near = get_close_matches(str(name), TASKS, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise ValueError(f"unknown task {name!r}{hint} Known: {', '.join([*TASKS, 'auto'])}")


def task_for(name: str, model_type: str) -> Task:
    """The row of a task with what a model type changes in it.

    >>> task_for("automatic-speech-recognition", "whisper").answer
    'transcribe'
    """
    task = task_named(name)
    return replace(task, **TYPES.get((model_type, task.name), {}))


def detect(config: Any, *, pools: bool = False) -> str:
    """The task that a model's configuration speaks of; a bare encoder is `default`, or `pooling` if it pools.

    >>> from types import SimpleNamespace
    >>> detect(SimpleNamespace(architectures=["BertForQuestionAnswering"], model_type="bert"))
    'question-answering'
    """
    if pools:
        return "pooling"
    architecture = next(iter(getattr(config, "architectures", None) or ()), "")
    kind = getattr(config, "model_type", "")
    matching = [task for task in _TABLE if architecture.endswith(task.suffixes or ("\0",))]
    if not matching:
        return "default"
    # The longest ending says most: OwlViTForObjectDetection is no plain object detector.
    task = max(matching, key=lambda task: max(len(s) for s in task.suffixes if architecture.endswith(s)))
    if task.name == "text2text" and kind in _KNOWN_TYPES:
        return _KNOWN_TYPES[kind]
    return "audio-classification" if kind in _SPEECH and task.name == "text-classification" else task.name
