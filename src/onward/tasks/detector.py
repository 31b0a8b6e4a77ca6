"""Inference with a detector: a picture goes in, its labelled boxes come out.

What differs between families of published detectors is in `FAMILIES`: their loss, their boxes, and how their authors
prepare pictures. How a family is opened for training stands in `graph.passes.head.detector_head`; its name there is
the one here. Exported folders have other detectors, whose boxes are queries.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.data import preprocess
from onward.data.images import read_picture
from onward.errors import DataError, ModelError
from onward.graph.passes.head.detector_head import DETR, PICODET, YOLOV8, YOLOX
from onward.losses.anchors import Anchors, decoded_loss, distances_loss, raw_grid_loss
from onward.losses.queries import set_loss
from onward.tasks.average_precision import overlaps
from onward.tasks.classifier import candidate_texts
from onward.tasks.inputs import each, for_each_image, open_image, pixels
from onward.tasks.protocol import Predictor
from onward.tasks.scores import sigmoid, softmax
from onward.tasks.segmenter import COLOURS

if TYPE_CHECKING:
    from onward.info.model_info import ModelInfo
    from onward.pipeline.load import Pipeline

Outputs = Sequence[np.ndarray]
Size = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Family:
    """A family's functions over the outputs of its files, which come in the file's order.

    `anchors` counts them, where the boxes are not those of queries, `fits` says whether outputs are of the family (the
    number of classes may be unknown), and `decode` gives corners [samples, anchors, 4] in pixels of the model's
    picture, and scores for each class.
    """

    loss: Callable[..., Any]
    anchors: Callable[[Outputs], int] | None
    fits: Callable[[Outputs, int | None], bool]
    decode: Callable[[Outputs, Size], tuple[np.ndarray, np.ndarray]]
    settings: Mapping[str, Any]


def _corners(centres: np.ndarray, sides: np.ndarray) -> np.ndarray:
    return np.concatenate([centres - sides / 2, centres + sides / 2], axis=2)


def _decode_yolov8(outputs: Outputs, size: Size) -> tuple[np.ndarray, np.ndarray]:
    rows = outputs[0].transpose(0, 2, 1)
    return _corners(rows[..., :2], rows[..., 2:4]), rows[..., 4:]


def _decode_yolox(outputs: Outputs, size: Size) -> tuple[np.ndarray, np.ndarray]:
    output = outputs[0]
    anchors = Anchors.of(size, find_strides(size, output.shape[1]))
    corner = anchors.centres.T - anchors.strides[:, None] / 2
    centres = output[..., :2] * anchors.strides[:, None] + corner
    # the bound of the loss: an untrained layer's numbers would overflow
    sides = np.exp(np.minimum(output[..., 2:4], 10.0)) * anchors.strides[:, None]
    return _corners(centres, sides), output[..., 5:] * output[..., 4:5]


def _decode_picodet(outputs: Outputs, size: Size) -> tuple[np.ndarray, np.ndarray]:
    scores, distances = (np.concatenate(part, axis=1) for part in _levels(outputs))
    anchors = Anchors.of(size, find_strides(size, scores.shape[1]))
    bins = distances.shape[2] // 4
    shares = softmax(distances.reshape(*distances.shape[:2], 4, bins))
    sides = (shares * np.arange(bins)).sum(axis=3) * anchors.strides[:, None]
    centres = anchors.centres.T
    return np.concatenate([centres - sides[..., :2], centres + sides[..., 2:]], axis=2), scores


def _decode_detr(outputs: Outputs, size: Size) -> tuple[np.ndarray, np.ndarray]:
    logits, boxes = outputs
    boxes = boxes * np.asarray([size[1], size[0]] * 2, np.float32)
    # the last class is nothing
    return _corners(boxes[..., :2], boxes[..., 2:]), softmax(logits)[..., :-1]


def _are_queries(outputs: Outputs, classes: int | None) -> bool:
    if len(outputs) != 2 or any(output.ndim != 3 for output in outputs):
        return False
    logits, boxes = outputs
    return (
        logits.shape[1] == boxes.shape[1]
        and boxes.shape[2] == 4
        and logits.shape[2] == (logits.shape[2] if classes is None else classes + 1)
    )


def _levels(outputs: Outputs) -> tuple[Outputs, Outputs]:
    """The scores and the distances of the levels: first all of one kind, or by turns."""
    half = len(outputs) // 2
    anchors = [output.shape[1] for output in outputs]
    in_turns = half > 1 and anchors[0::2] == anchors[1::2]
    return (outputs[0::2], outputs[1::2]) if in_turns else (outputs[:half], outputs[half:])


def _are_picodets(outputs: Outputs, classes: int | None) -> bool:
    if len(outputs) < 2 or len(outputs) % 2 or any(output.ndim != 3 for output in outputs):
        return False
    scores, distances = _levels(outputs)
    return all(
        one.shape[1] == other.shape[1]
        and one.shape[2] == (classes or one.shape[2])
        and other.shape[2] % 4 == 0
        for one, other in zip(scores, distances)
    )


FAMILIES: Mapping[str, Family] = {
    YOLOV8: Family(
        decoded_loss,
        lambda outputs: outputs[0].shape[2],
        lambda outputs, classes: (
            outputs[0].ndim == 3
            and outputs[0].shape[1] == (outputs[0].shape[1] if classes is None else classes + 4)
            and outputs[0].shape[1] < outputs[0].shape[2]
        ),
        _decode_yolov8,
        {"do_rescale": True, "do_normalize": False, "resample": 2, "letterbox": "centre", "pad_value": 114},
    ),
    # before PicoDet's: a single level's distances have two bins or more for each side
    DETR: Family(
        set_loss,
        None,
        _are_queries,
        _decode_detr,
        {
            "do_rescale": True, "do_normalize": True, "resample": 2,
            "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225],
        },
    ),
    PICODET: Family(
        distances_loss,
        lambda outputs: sum(scores.shape[1] for scores in _levels(outputs)[0]),
        _are_picodets,
        _decode_picodet,
        # stretched to the model's size; RapidLayout gives blue first
        {
            "do_rescale": True, "do_normalize": True, "do_flip_channel_order": True, "resample": 2,
            "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225],
        },
    ),
    YOLOX: Family(
        raw_grid_loss,
        lambda outputs: outputs[0].shape[1],
        lambda outputs, classes: outputs[0].ndim == 3 and (classes is None or outputs[0].shape[2] == classes + 5),
        _decode_yolox,
        # bytes as they are, blue first, and the picture in the corner
        {
            "do_rescale": False, "do_normalize": False, "do_flip_channel_order": True, "resample": 2,
            "letterbox": "corner", "pad_value": 114,
        },
    ),
}  # fmt: skip


def family_of(outputs: Mapping[str, np.ndarray], info: ModelInfo) -> str:
    """The family that outputs are of: as the model says, or by their shapes."""
    stated = [info.outputs[name] for name in outputs if info.outputs.get(name) in FAMILIES]
    if stated:
        return stated[0]
    count = None if info.labels is None else len(info.labels)
    arrays = list(outputs.values())
    for name, family in FAMILIES.items():
        if (len(arrays) > 1) == (name in (PICODET, DETR)) and family.fits(arrays, count):
            return name
    shapes = " and ".join(str(list(array.shape)) for array in arrays[:4])
    raise DataError(
        f"outputs of shape {shapes} are none of a detector that is known here",
        "boxes are [samples, 4 + classes, anchors], [samples, anchors, 5 + classes], scores and distances of levels, "
        "or scores and boxes of queries",
    )


def find_strides(size: Size, count: int) -> tuple[int, ...]:
    """The pixels between the anchors of each level, for a picture of this size and so many anchors.

    >>> find_strides((320, 320), 2100)
    (8, 16, 32)
    """
    # the usual strides first: small pictures have counts that several sets explain
    for first, levels in itertools.product((8, 4, 16, 2, 32), range(1, 6)):
        strides = tuple(first << level for level in range(levels))
        if sum(-(-size[0] // stride) * -(-size[1] // stride) for stride in strides) == count:
            return strides
    raise ModelError(
        f"{count} anchors for pictures of {size[0]} × {size[1]}: no levels with one anchor for each cell have as many"
    )


# pairs of a box and a class that are looked at, the best first: more never change an answer
_CANDIDATES = 600
_MOST = 300


@dataclasses.dataclass(frozen=True)
class Detector(Predictor):
    """A loaded detector. Call it with a picture (a path, a Pillow image, [height, width, 3] bytes) or a list.

    The answer is `{"score", "label", "box": {"xmin", "ymin", "xmax", "ymax"}}` for each box over `threshold`, best
    first, in pixels of the picture; of boxes of one class that overlap by more than `overlap` the best stays.
    """

    def __call__(self, inputs: Any, *, threshold: float = 0.25, overlap: float = 0.6) -> Any:
        """The boxes of one picture, or of each of a list."""
        if isinstance(inputs, list):
            return [self(item, threshold=threshold, overlap=overlap) for item in inputs]
        picture = read_picture(inputs)
        labels = self.info.labels or ()
        return [
            {
                "score": float(score),
                "label": labels[int(number)] if number < len(labels) else str(int(number)),
                "box": dict(
                    zip(("xmin", "ymin", "xmax", "ymax"), (round(float(edge), 1) for edge in corners))
                ),
            }
            for score, number, *corners in self._boxes(picture, threshold, overlap)
        ]

    def draw(self, picture: Any, *, threshold: float = 0.25) -> np.ndarray:
        """A picture with its boxes, [height, width, 3] bytes."""
        opened = read_picture(picture)
        return draw_boxes(np.asarray(opened), self._boxes(opened, threshold, 0.6)[:, 1:], self.info.labels)

    def _boxes(self, picture: Any, threshold: float, overlap: float) -> np.ndarray:
        """Rows of score, class and corners in pixels of the picture."""
        done = self.require_preprocessing()
        pixels = preprocess.image(picture, done.settings)[None]
        names = [value.name for value in self.session.get_outputs()]
        outputs = dict(zip(names, map(np.asarray, self.session.run(names, {done.input: pixels}))))
        height, width = (int(done.settings["size"][side]) for side in ("height", "width"))
        (rows,) = select_boxes(
            list(outputs.values()), family_of(outputs, self.info), (height, width), threshold=threshold,
            overlap=overlap,
        )  # fmt: skip
        size = preprocess.picture_size(picture)
        down, across, top, left = preprocess.letterbox(size, done.settings)
        rows[:, 2:] = (rows[:, 2:] - [left, top, left, top]) / [across, down, across, down]
        rows[:, 2:] = np.clip(rows[:, 2:], 0, [size[1], size[0], size[1], size[0]])
        return rows


def select_boxes(
    outputs: Sequence[np.ndarray], family: str, size: tuple[int, int], *, threshold: float, overlap: float
) -> list[np.ndarray]:
    """Of each picture rows of score, class and corners in the model's pixels, best first."""
    corners, scores = FAMILIES[family].decode(outputs, size)
    return [_suppress(*pair, threshold, overlap) for pair in zip(corners.astype(np.float64), scores)]


def _suppress(corners: np.ndarray, scores: np.ndarray, threshold: float, overlap: float) -> np.ndarray:
    """The best boxes of each class; those that overlap a better one of their class go."""
    anchors, classes = np.nonzero(scores > threshold)
    values = scores[anchors, classes]
    order = np.argsort(-values, kind="stable")[:_CANDIDATES]
    anchors, classes, values = anchors[order], classes[order], values[order]
    boxes = corners[anchors]
    # one matrix for all classes, in which boxes of other classes are no rivals
    rivals = (overlaps(boxes, boxes) > overlap) & (classes[:, None] == classes[None])
    stays = np.ones(len(order), bool)
    for index in range(len(order)):
        if stays[index]:
            stays[index + 1 :] &= ~rivals[index, index + 1 :]
    rows = np.concatenate([values[:, None], classes[:, None], boxes], axis=1)[stays]
    return rows[:_MOST]


def draw_boxes(pixels: np.ndarray, boxes: np.ndarray, labels: Sequence[str] | None) -> np.ndarray:
    """A copy of pixels with the outlines of boxes (rows of class and corners), each class in a colour of its own.

    Names are written where Pillow is there.
    """
    drawn = np.array(pixels[..., :3])
    height, width = drawn.shape[:2]
    thick = max(1, round(max(height, width) / 300))
    for number, *corners in boxes:
        x1, y1, x2, y2 = (round(edge) for edge in corners)
        colour = COLOURS[int(number) % len(COLOURS)]
        for rows, columns in (
            # a negative index would count from the other side
            (slice(max(y1, 0), max(y1 + thick, 0)), slice(max(x1, 0), max(x2, 0))),
            (slice(max(y2 - thick, 0), max(y2, 0)), slice(max(x1, 0), max(x2, 0))),
            (slice(max(y1, 0), max(y2, 0)), slice(max(x1, 0), max(x1 + thick, 0))),
            (slice(max(y1, 0), max(y2, 0)), slice(max(x2 - thick, 0), max(x2, 0))),
        ):
            drawn[rows, columns] = colour
    return _write_names(drawn, boxes, labels) if labels and len(boxes) else drawn


def _write_names(drawn: np.ndarray, boxes: np.ndarray, labels: Sequence[str]) -> np.ndarray:
    try:
        from PIL import Image, ImageDraw
    except ImportError:
        return drawn
    picture = Image.fromarray(drawn)
    pen = ImageDraw.Draw(picture)
    for number, x1, y1, *_ in boxes:
        if int(number) < len(labels):
            # Pillow's own font has these letters only
            text = labels[int(number)].encode("latin-1", "replace").decode("latin-1")
            colour = tuple(int(part) for part in COLOURS[int(number) % len(COLOURS)])
            pen.text((max(x1, 0) + 2, max(y1 - 11, 0)), text, fill=colour)
    return np.asarray(picture)


# --- What exported folders answer.


@for_each_image
def detect(
    outputs: Mapping[str, np.ndarray], size: Any, card: Mapping[str, Any], *, threshold: float = 0.5
) -> Any:
    """The labelled boxes of one image."""
    labels, logits = card["labels"], outputs["logits"]
    # A class more than there are labels means "nothing"; without it each class is scored by itself.
    if logits.shape[-1] > len(labels):
        scores = softmax(logits)[:, :-1]
        return _boxes(scores, outputs["pred_boxes"], labels, size, threshold)
    queries = np.repeat(np.arange(len(logits)), len(labels))
    pairs = np.where(  # a row for each pair of a box and a class
        np.arange(len(labels)) == np.tile(np.arange(len(labels)), len(logits))[:, None],
        np.repeat(sigmoid(logits), len(labels), axis=0),
        -1.0,
    )
    # transformers keeps as many pairs as RT-DETR has queries, and 100 of other detectors
    most = len(logits) if str(card.get("architecture")).startswith(("RTDetr", "DFine", "Deimv2")) else 100
    best = np.argsort(-pairs.max(axis=1), kind="stable")[:most]
    return _boxes(pairs[best], outputs["pred_boxes"][queries[best]], labels, size, threshold)


def detect_zero_shot(
    pipeline: Pipeline,
    inputs: Any,
    candidate_labels: str | Sequence[str] | None = None,
    *,
    threshold: float = 0.1,
    top_k: int | None = None,
) -> Any:
    """The boxes of what the call names."""
    labels, texts = candidate_texts(candidate_labels, "{}", "pipeline(image, ['a cat', 'a dog'])")
    feed, _ = pipeline.encode(texts)

    def answer(item: Any) -> list[dict[str, Any]]:
        item = open_image(pipeline, item)
        outputs = pipeline.run({**feed, "pixel_values": pixels(pipeline, item)[None]})
        scores = sigmoid(outputs["logits"][0])
        size = preprocess.picture_size(item)
        detections = [  # each label by itself: a box may have several
            box
            for index, label in enumerate(labels)
            for box in _boxes(
                scores[:, index : index + 1], outputs["pred_boxes"][0], [label], size, threshold
            )
        ]
        return sorted(detections, key=lambda entry: -entry["score"])[:top_k]

    return each(inputs, answer)


def _boxes(
    scores: np.ndarray, centres: np.ndarray, labels: Sequence[str], size: tuple[int, int], threshold: float
) -> list[dict[str, Any]]:
    """Boxes over the threshold, in the model's order; `scores` [boxes, labels], `centres` with sizes, 0 to 1."""
    height, width = size
    best = scores.argmax(axis=-1)
    x, y, w, h = np.asarray(centres, np.float64).T
    corners = np.stack([x - w / 2, y - h / 2, x + w / 2, y + h / 2], axis=1) * [width, height, width, height]
    return [
        {
            "score": float(scores[index, best[index]]),
            "label": labels[best[index]],
            "box": dict(zip(("xmin", "ymin", "xmax", "ymax"), (int(edge) for edge in corners[index]))),
        }
        for index in range(len(scores))
        if scores[index, best[index]] > threshold
    ]
