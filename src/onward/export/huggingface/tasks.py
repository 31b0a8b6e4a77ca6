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

Axes = Mapping[int, str]

_ROW: Axes = {0: "batch"}
_TOKENS: Axes = {0: "batch", 1: "sequence"}
_FRAMES: Axes = {0: "batch", 1: "frames"}
_DECODED: Axes = {0: "batch", 1: "decoder_sequence"}
_PICTURE: Axes = {0: "batch", 2: "output_height", 3: "output_width"}


@dataclass(frozen=True)
class Task:
    """One kind of model: which classes load it, how it is called, what comes out, and what is made of that.

    `heads`, one word or several, are endings of transformers' classes `AutoModelFor…`; the first class that knows the
    model's type is taken, or the `loader` that a model type names. `wrapper` is how the model is called, `loss` what
    it is trained with (None: no loss of its own), `answer` what `onward.load` makes of its outputs. `suffixes` are
    endings of the class names in a configuration's `architectures` that mean this task, beside those of its heads.
    `kind` says what a user hands over.
    """

    name: str
    heads: str
    outputs: Mapping[str, Axes]
    wrapper: str
    answer: str
    loss: str | None = None
    kind: str = "text"
    suffixes: tuple[str, ...] = ()
    aliases: tuple[str, ...] = field(default=())
    sizes: str = "fixed"
    """Whether pictures may have any size ("any") or must have the model's own ("fixed")."""
    loader: str | None = None

    @property
    def loaders(self) -> tuple[str, ...]:
        """The classes of transformers that load the model."""
        if self.loader is not None:
            return (self.loader,)
        return tuple(f"AutoModelFor{head}" for head in self.heads.split()) or ("AutoModel",)

    @property
    def endings(self) -> tuple[str, ...]:
        """All endings of class names that mean this task: `BertForMaskedLM` is what `AutoModelForMaskedLM` loads."""
        return (*(f"For{head}" for head in self.heads.split()), *self.suffixes)

    @property
    def classifies(self) -> bool:
        """Whether the model has classes of its own."""
        return self.answer in _WITH_CLASSES


_WITH_CLASSES = frozenset(
    {"classify", "zero-shot", "tag", "frames", "speaker", "segment", "detect", "instances", "keypoints"}
)

# A row for each task.
# fmt: off
_OF_TEXT = (
    Task("default", "", {"last_hidden_state": _TOKENS}, "input", "hidden"),
    Task("feature-extraction", "", {"last_hidden_state": _TOKENS}, "input", "hidden",
         aliases=("image-feature-extraction",)),
    Task("pooling", "", {"embeddings": _ROW}, "text", "embed"),
    Task("sentence-similarity", "", {"embeddings": _ROW}, "text", "similar"),
    Task("question-answering", "QuestionAnswering", {"start_logits": _TOKENS, "end_logits": _TOKENS}, "text",
         "span", "span", suffixes=("ForQuestionAnsweringSimple",)),
    Task("text-classification", "SequenceClassification", {"logits": _ROW}, "text", "classify", "classes"),
    Task("zero-shot-classification", "SequenceClassification", {"logits": _ROW}, "text", "zero-shot",
         "classes"),
    Task("token-classification", "TokenClassification", {"logits": _TOKENS}, "text", "tag", "token classes"),
    Task("multiple-choice", "MultipleChoice", {"logits": {0: "batch", 1: "choices"}}, "choices", "choose",
         "choice"),
    Task("fill-mask", "MaskedLM", {"logits": _TOKENS}, "text", "fill", "tokens",
         suffixes=("ForPreTraining",)),
    Task("text-generation", "CausalLM", {"logits": _TOKENS}, "generation", "generate", "next token",
         suffixes=("LMHeadModel",)),
    Task("text2text", "Seq2SeqLM", {"logits": _DECODED}, "encoder-decoder", "rewrite", "target tokens",
         suffixes=("ForConditionalGeneration", "MTModel", "T5WithLMHeadModel"),
         aliases=("text2text-generation", "translation", "summarization")),
    Task("text-to-audio", "TextToWaveform", {"waveform": {0: "batch", 1: "samples"}}, "waveform", "speak",
         suffixes=("VitsModel", "WithHifiGan"), aliases=("text-to-speech",)),
)
_OF_IMAGES = (
    Task("image-classification", "ImageClassification", {"logits": _ROW}, "image", "classify", "classes",
         suffixes=("ForImageClassificationWithTeacher",)),
    Task("object-detection", "ObjectDetection", {"logits": _ROW, "pred_boxes": _ROW}, "image", "detect",
         "boxes", sizes="any"),
    Task("semantic-segmentation", "SemanticSegmentation", {"logits": _ROW}, "image", "segment", "pixels",
         aliases=("image-segmentation",)),
    Task("instance-segmentation", "UniversalSegmentation InstanceSegmentation",
         {"class_queries_logits": _ROW, "masks_queries_logits": _ROW}, "image", "instances", "masks"),
    Task("depth-estimation", "DepthEstimation", {"predicted_depth": _ROW}, "image", "depth", "depth"),
    Task("keypoint-detection", "PoseEstimation", {"heatmaps": _ROW}, "image", "keypoints",
         aliases=("pose-estimation",)),
    Task("image-to-image", "ImageToImage", {"reconstruction": _PICTURE}, "image", "picture", "picture",
         suffixes=("ForImageSuperResolution",), sizes="any"),
    Task("masked-image-modeling", "MaskedImageModeling", {"reconstruction": _ROW}, "masked image",
         "reconstruct", "patches", aliases=("masked-im", "masked-image-modelling")),
    Task("image-to-text", "ImageTextToText", {"logits": _DECODED}, "encoder-decoder", "caption",
         "target tokens", suffixes=("VisionEncoderDecoderModel",)),
)
_OF_SOUND = (
    Task("audio-classification", "AudioClassification", {"logits": _ROW}, "audio", "classify", "classes"),
    Task("automatic-speech-recognition", "CTC SpeechSeq2Seq", {"logits": _FRAMES}, "audio", "spell", "ctc"),
    Task("audio-frame-classification", "AudioFrameClassification", {"logits": _FRAMES}, "audio", "frames",
         "frames"),
    Task("audio-xvector", "AudioXVector", {"logits": _ROW, "embeddings": _ROW}, "audio", "speaker", "speaker",
         suffixes=("ForXVector",)),
)
_OF_SERIES = (
    Task("time-series-forecasting", "TimeSeriesPrediction", {"prediction_outputs": _ROW}, "series",
         "forecast", "values", suffixes=("ForPrediction",)),
)
_OF_IMAGES_AND_TEXT = (
    Task("zero-shot-image-classification", "ZeroShotImageClassification",
         {"logits_per_image": {0: "image_batch", 1: "text_batch"}, "text_embeds": {0: "text_batch"},
          "image_embeds": {0: "image_batch"}},
         "image and text", "zero-shot image", "contrast", suffixes=("CLIPModel", "SiglipModel")),
    Task("zero-shot-object-detection", "ZeroShotObjectDetection",
         {"logits": {0: "image_batch"}, "pred_boxes": {0: "image_batch"}}, "queries", "zero-shot detect",
         suffixes=("OwlViTForObjectDetection", "Owlv2ForObjectDetection")),
)
_OF_ARRAYS = (
    Task("denoising", "", {"out_sample": {0: "batch", 2: "height", 3: "width"}}, "denoiser", "arrays",
         "noise", aliases=("unet",)),
    Task("vae-encoder", "", {"latent_parameters": _PICTURE}, "autoencoder", "arrays"),
    Task("vae-decoder", "", {"sample": _PICTURE}, "autoencoder", "arrays"),
)
# fmt: on
_BY_KIND: Mapping[str, tuple[Task, ...]] = {
    "text": _OF_TEXT,
    "image": _OF_IMAGES,
    "audio": _OF_SOUND,
    "time series": _OF_SERIES,
    "image and text": _OF_IMAGES_AND_TEXT,
    "arrays": _OF_ARRAYS,
}
_TABLE = tuple(replace(task, kind=kind) for kind, tasks in _BY_KIND.items() for task in tasks)

TASKS: Mapping[str, Task] = {name: task for task in _TABLE for name in (task.name, *task.aliases)}

_SEQ2SEQ_SPEECH = {
    "wrapper": "encoder-decoder",
    "outputs": {"logits": _DECODED},
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
    ("patchtst", "time-series-forecasting"): {"loader": "PatchTSTForPrediction"},
    ("patchtsmixer", "time-series-forecasting"): {"loader": "PatchTSMixerForPrediction"},
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
    matching = [task for task in _TABLE if architecture.endswith(task.endings)]
    if not matching:
        return "default"
    # The longest ending says most: OwlViTForObjectDetection is no plain object detector.
    task = max(matching, key=lambda task: max(len(s) for s in task.endings if architecture.endswith(s)))
    if task.name == "text2text" and kind in _KNOWN_TYPES:
        return _KNOWN_TYPES[kind]
    return "audio-classification" if kind in _SPEECH and task.name == "text-classification" else task.name
