"""Inference with one segmentation file: a picture goes in, the mask of every class that is in it comes out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.data import preprocess
from onward.data.images import read_picture
from onward.tasks.inputs import for_each_image
from onward.tasks.protocol import Predictor
from onward.tasks.scores import resized, sigmoid, softmax

if TYPE_CHECKING:
    pass

# far apart in hue, and class 0, which mostly is the background, not coloured at all
COLOURS = np.asarray(
    [
        (230, 60, 60),
        (60, 130, 240),
        (40, 180, 90),
        (240, 180, 40),
        (160, 80, 220),
        (40, 190, 200),
        (240, 110, 180),
    ]
)


@dataclasses.dataclass(frozen=True)
class Segmenter(Predictor):
    """A loaded segmentation model. Call it with a picture (a path, a Pillow image, [height, width, 3] bytes) or a list.

    The answer is `{"score": None, "label", "mask"}` for each class that is the best one somewhere; a mask has the
    picture's size, and 255 inside.
    """

    def __call__(self, inputs: Any) -> Any:
        """The masks of one picture, or of each of a list."""
        if isinstance(inputs, list):
            return [self(item) for item in inputs]
        classes = self.classes(inputs)
        return _masks_of(classes, self.info.labels or ())

    def classes(self, picture: Any) -> np.ndarray:
        """The class number of every pixel of a picture."""
        done = self.require_preprocessing()
        opened = read_picture(picture)
        feed = {done.input: preprocess.image(opened, done.settings)[None]}
        scores = np.asarray(self.run(feed)[0], np.float32)
        planes = scores.transpose(2, 0, 1) if done.settings.get("layout") == "NHWC" else scores
        return best_classes(planes, (opened.height, opened.width))

    def draw(self, picture: Any) -> np.ndarray:
        """A picture with its classes in colours over it, [height, width, 3] bytes."""
        return colour_classes(np.asarray(read_picture(picture)), self.classes(picture))


def _masks_of(classes: np.ndarray, labels: Sequence[str]) -> list[dict[str, Any]]:
    """A mask (255 inside) for every class that is the best one somewhere."""
    return [
        {
            "score": None,
            "label": labels[number] if number < len(labels) else str(number),
            "mask": ((classes == number) * 255).astype(np.uint8),
        }
        for number in np.unique(classes)
    ]


def best_classes(planes: np.ndarray, size: Sequence[int]) -> np.ndarray:
    """[height, width] of class numbers, of scores or probabilities [classes, …] of fewer pixels."""
    scores = _scores_of(planes.astype(np.float32, copy=False))
    full = scores if scores.shape[1:] == tuple(size) else resized(scores, (size[0], size[1]))
    return full.argmax(axis=0).astype(np.uint8) if len(full) > 1 else (full[0] > 0).astype(np.uint8)


def _scores_of(planes: np.ndarray) -> np.ndarray:
    """What a softmax or sigmoid was of, where all numbers are from 0 to 1: training enlarges scores.

    Probabilities between pixels are blunter, which moves the edges: mean IoU fell from .917 to .902.
    """
    if planes.min() < 0 or planes.max() > 1.001:
        return planes
    logs = np.log(np.maximum(planes, 1e-30))
    if len(planes) > 1 and np.allclose(planes.sum(axis=0), 1, atol=1e-2):
        return logs
    return logs - np.log(np.maximum(1 - planes, 1e-30))


def colour_classes(pixels: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Pixels [height, width, 3] with each class but 0 in a colour of its own over it."""
    step = -(-classes.shape[0] // pixels.shape[0])
    classes = classes[::step, ::step][: pixels.shape[0], : pixels.shape[1]]
    colours = COLOURS[(classes.astype(int) - 1) % len(COLOURS)]
    blended = (pixels[..., :3].astype(int) + colours) // 2
    inside = (classes > 0) & (classes < 255)
    return np.where(inside[..., None], blended, pixels[..., :3]).astype(np.uint8)


# --- What exported folders answer.


@for_each_image
def segment(outputs: Mapping[str, np.ndarray], size: Any, card: Mapping[str, Any]) -> Any:
    """The masks of an image's classes."""
    return _semantic(outputs["logits"], card["labels"], size)


@for_each_image
def segment_objects(
    outputs: Mapping[str, np.ndarray],
    size: Any,
    card: Mapping[str, Any],
    *,
    subtask: str = "instance",
    threshold: float = 0.9,
    mask_threshold: float = 0.5,
    overlap_mask_area_threshold: float = 0.5,
) -> Any:
    """The masks of an image's objects; `subtask` chooses classes or both instead."""
    classes, masks, labels = outputs["class_queries_logits"], outputs["masks_queries_logits"], card["labels"]
    if str(card.get("architecture")).startswith("Mask2Former"):  # its masks are a quarter of this size
        masks = resized(masks, (384, 384))
    if subtask == "semantic":
        planes = np.einsum("qc,qhw->chw", softmax(classes)[:, :-1], sigmoid(masks))
        return _semantic(planes, labels, size)
    if subtask == "panoptic":
        return _panoptic(
            classes,
            masks,
            labels,
            size,
            threshold=threshold,
            mask_threshold=mask_threshold,
            overlap=overlap_mask_area_threshold,
        )
    if subtask != "instance":
        raise ValueError(f"subtask is {subtask!r}; choose one of instance, panoptic, semantic")
    return _objects(classes, masks, labels, size, threshold)


def _semantic(logits: np.ndarray, labels: Sequence[str], size: tuple[int, int]) -> list[dict[str, Any]]:
    """The masks of classes, of the picture's size."""
    return _masks_of(resized(np.asarray(logits, np.float32), size).argmax(axis=0), labels)


def _objects(
    classes: np.ndarray, masks: np.ndarray, labels: Sequence[str], size: tuple[int, int], threshold: float
) -> list[dict[str, Any]]:
    """A mask (255 inside) for every object as sure as the threshold; where two overlap, the later one has it."""
    queries, count = classes.shape[0], classes.shape[1] - 1
    scores = softmax(classes)[:, :-1].reshape(-1)
    best = np.argsort(-scores, kind="stable")[:queries]
    rows = (np.arange(size[0]) * masks.shape[1] / size[0]).astype(int)
    columns = (np.arange(size[1]) * masks.shape[2] / size[1]).astype(int)
    owner = np.full(size, -1)
    objects: list[tuple[float, str]] = []
    for rank in best:
        query, label = divmod(int(rank), count)
        inside = masks[query] > 0
        sure = float(scores[rank]) * float(sigmoid(masks[query])[inside].sum() / (inside.sum() + 1e-6))
        mask = inside[rows][:, columns]
        if mask.any() and sure >= threshold:
            owner[mask] = len(objects)
            objects.append((sure, labels[label]))
    return [
        {"score": score, "label": label, "mask": ((owner == index) * 255).astype(np.uint8)}
        for index, (score, label) in enumerate(objects)
    ]


def _panoptic(
    classes: np.ndarray,
    masks: np.ndarray,
    labels: Sequence[str],
    size: tuple[int, int],
    *,
    threshold: float,
    mask_threshold: float,
    overlap: float,
) -> list[dict[str, Any]]:
    """A mask (255 inside) for every object over the threshold: each pixel goes to the surest of all.

    An object of which less than `overlap` is left, of the pixels over `mask_threshold`, is dropped.
    """
    scores = softmax(classes)
    best = scores.argmax(axis=1)
    sure = scores.max(axis=1)
    confident = np.flatnonzero((best != classes.shape[1] - 1) & (sure > threshold))
    if not len(confident):
        return []
    weighed = resized(sigmoid(masks[confident]).astype(np.float32), size) * sure[
        confident, None, None
    ].astype(np.float32)
    owner = weighed.argmax(axis=0)
    segments = []
    for index, query in enumerate(confident):
        mask, whole = owner == index, int((weighed[index] >= mask_threshold).sum())
        if mask.any() and whole and mask.sum() / whole > overlap:
            label = labels[int(best[query])]
            segments.append(
                {"score": float(sure[query]), "label": label, "mask": (mask * 255).astype(np.uint8)}
            )
    return segments
