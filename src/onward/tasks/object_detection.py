"""Object detection: trains a published detector on pictures with boxes, and asks a trained one.

The class layers are replaced where the classes are others, the rest goes on from what it has learned. The file that
comes out has the input and the output of the original, with the new number of classes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from onward.data.boxes import BoxedPicture, find_boxed_pictures
from onward.data.images import Pictures
from onward.data.labels import order_of_labels
from onward.data.preprocess import letterbox
from onward.data.read import Data
from onward.data.scenes import SceneAugmentation, Window, scene_preprocessing
from onward.errors import DataError, ModelError
from onward.escape import first_of
from onward.graph.load import load_model
from onward.graph.passes.head.detector_head import DETR, YOLOV8, detector_family, open_detector
from onward.losses.anchors import Anchors
from onward.losses.functions import LossWithTargets
from onward.runtime.sessions import open_session
from onward.tasks.average_precision import average_precision
from onward.tasks.classification import class_names
from onward.tasks.detector import (
    FAMILIES,
    Detector,
    Family,
    draw_boxes,
    family_of,
    find_strides,
    select_boxes,
)
from onward.tasks.figures import class_table
from onward.tasks.protocol import Adapted, Arrays, Scores, Source
from onward.tasks.scene_tasks import open_graph, scene_batches, scene_figures
from onward.tasks.scores import joint_metrics

if TYPE_CHECKING:
    from onward.data.match_inputs import InputSpec
    from onward.info.model_info import ModelInfo
    from onward.tasks.options import ObjectDetection as Options
    from onward.train.report import Figure

predictor = Detector
COLUMNS = ("class", "AP50", "AP50-95", "objects")
TARGET_NAME = "objects"
_AUGMENTATIONS = ("flip", "crop", "scale", "colour", "mosaic")
# COCO's evaluation takes all boxes that the model is a little sure of; people look at those it is surer of
_LEAST_SCORE, _SHOWN_SCORE, _OVERLAP = 0.001, 0.25, 0.6
# the share of an object that must be left in a window
_LEAST_LEFT = 0.3


def read(data: Any, source: Source, options: Options, *, like: Data | None = None) -> Data:
    """Pictures at the model's size, and their boxes in its pixels: [pictures, objects, 5], with class −1 for none."""
    if not isinstance(data, str | Path):
        raise DataError("boxes are read from files", "give the path of a folder, a data.yaml or a JSON file")
    names = class_names(options)
    classes = list(like.classes or ()) if like is not None else names if isinstance(names, list) else None
    if options.classes is None and classes is None:
        classes = list(source.info.class_names or ()) or None
    boxed = find_boxed_pictures(Path(data), classes)
    if isinstance(names, int) and names != len(boxed.classes):
        raise DataError(f"--classes {names}: '{data}' has {len(boxed.classes)}: {first_of(boxed.classes)}")
    # by reference: the graph shows the family, and weights may be large
    family = detector_family(load_model(source.model, by_reference=True))
    preprocessing = like.preprocessing if like is not None else None
    if preprocessing is None:
        defaults = FAMILIES[family or YOLOV8].settings
        preprocessing = scene_preprocessing(
            source.inputs, source.info, boxed.pictures[0].file, normalize=options.normalize, size=options.size,
            defaults=defaults,
        )  # fmt: skip
        if not source.info.outputs and "letterbox" not in preprocessing.settings:
            # a file of Ultralytics states its size, and not that pictures keep their form
            form = {key: defaults[key] for key in ("letterbox", "pad_value") if key in defaults}
            own = {**preprocessing.settings, **form}
            preprocessing = type(preprocessing)("image", preprocessing.input, own)
    spec = next(spec for spec in source.inputs if spec.name == preprocessing.input)
    pictures = Pictures([one.file for one in boxed.pictures], preprocessing.settings, dtype=spec.dtype)
    objects = stack_objects([_in_model_pixels(one, preprocessing.settings) for one in boxed.pictures])
    return Data(
        {preprocessing.input: pictures, TARGET_NAME: objects},
        classes=boxed.classes,
        preprocessing=preprocessing,
        splits=boxed.splits,
        notes=[f"{len(boxed.pictures)} images, {int((objects[..., 0] >= 0).sum())} objects"],
    )


def _in_model_pixels(picture: BoxedPicture, settings: Any) -> np.ndarray:
    """The boxes of a picture where the model sees them."""
    down, across, top, left = letterbox(picture.size, settings)
    boxes = picture.boxes.copy()
    boxes[:, 1:] = boxes[:, 1:] * [across, down, across, down] + [left, top, left, top]
    return boxes


def stack_objects(rows: Sequence[np.ndarray]) -> np.ndarray:
    """[pictures, objects, 5] of lists of boxes; a row of class −1 where a picture has fewer."""
    stacked = np.zeros((len(rows), max([1, *map(len, rows)]), 5), np.float32)
    stacked[..., 0] = -1
    for index, boxes in enumerate(rows):
        stacked[index, : len(boxes)] = boxes
    return stacked


def adapt(source: Source, data: Data, options: Options) -> Adapted:
    """The detector with class layers for the data's classes, and with the values before its sigmoids."""
    labels, own = list(data.classes or ()), list(source.info.class_names or ())
    if options.head is not None:
        raise ModelError(
            "a detector has a class layer for each level, which are found", hint="leave head away"
        )
    loaded = load_model(source.model)
    ir.external_data.load_to_model(loaded)
    prepared, frozen = open_graph(loaded)
    shape = prepared.graph.outputs[0].shape
    if detector_family(prepared) == DETR and own and shape is not None and shape[2] == len(own):
        raise ModelError(
            f"the model's {len(own)} classes are scored each by itself, without one for nothing",
            hint="of detectors with queries those of DETR's and YOLOS' kind are trained here",
        )
    # the order counts: rows of the class layers are numbers
    keeps_head = own == labels
    if options.classes is None and not keeps_head:
        raise ModelError(f"the model's classes are {first_of(own)}, and the data's {first_of(labels)}")
    head = open_detector(prepared, None if keeps_head else labels, seed=options.seed)
    note = f"{head.note}: {first_of(labels)}"
    size = _size_of(data)
    return Adapted(
        ir.to_proto(prepared), labels, note, loss_inputs=head.values, outputs=head.outputs, judged=head.outputs,
        frozen=[name for name in (*frozen, *head.constants) if name in prepared.graph.initializers],
        output_kinds=dict.fromkeys(head.outputs, head.family),
        details={
            "family": head.family, "loss": _loss_of(FAMILIES[head.family], source, data), "outputs": head.outputs,
            "size": size,
        },
    )  # fmt: skip


def _size_of(data: Data) -> tuple[int, int]:
    """The height and width of the pictures that the model sees."""
    size = data.settings["size"]
    return int(size["height"]), int(size["width"])


def _loss_of(family: Family, source: Source, data: Data) -> Callable[..., Any]:
    """The family's loss for pictures of this size."""
    size = _size_of(data)
    assert data.preprocessing is not None
    name = data.preprocessing.input
    others = [spec.name for spec in source.inputs if spec.name != name]
    if others:
        raise ModelError(
            f"a detector that is trained here takes pictures alone, and this one '{others[0]}' too"
        )
    if family.anchors is None:
        return functools.partial(family.loss, size=size)
    # strides are stated nowhere, and shapes in published files are often open: the number of anchors tells them
    outputs = open_session(source.model).run(None, {name: np.asarray(data.arrays[name][:1])})
    count = family.anchors([np.asarray(output) for output in outputs])
    return functools.partial(family.loss, anchors=Anchors.of(size, find_strides(size, count)))


def loss(options: Options, data: Data, adapted: Adapted) -> LossWithTargets:
    """CIoU or GIoU, cross-entropy and, where boxes come from distributions, the distribution loss."""
    # as many rows as the fullest picture of a batch has: one shape, so that targets are assigned in the graph
    return LossWithTargets(
        adapted.details["loss"], [(TARGET_NAME, ir.DataType.FLOAT, [None, "objects_most", 5])]
    )


def metrics(options: Options, adapted: Adapted) -> dict[str, Callable[[Arrays, Arrays], float]]:
    """COCO's mean average precision at an overlap of a half, and over ten overlaps."""

    def judge(outputs: Arrays, inputs: Arrays) -> dict[str, float]:
        return _score(_detections(outputs, adapted), inputs[TARGET_NAME], adapted.labels or [])[0]

    # both come of one matching, which is the slow part
    return joint_metrics(("mAP50", "mAP50_95"), judge)


def _detections(outputs: Arrays, adapted: Adapted) -> list[np.ndarray]:
    about = adapted.details
    arrays = [outputs[name] for name in about["outputs"]]
    return select_boxes(arrays, about["family"], about["size"], threshold=_LEAST_SCORE, overlap=_OVERLAP)


def batches(data: Data, specs: Sequence[InputSpec], options: Options, *, training: bool) -> Any:
    """Batches of pictures and objects; in training both are changed alike."""
    return scene_batches(
        data, specs, options, training=training, target=TARGET_NAME, augmentations=_AUGMENTATIONS,
        change=functools.partial(move_boxes, size=_size_of(data)), finish=Mosaic,
    )  # fmt: skip


def move_boxes(objects: np.ndarray, window: Window, *, size: tuple[int, int]) -> np.ndarray:
    """Boxes as a window shows them; those of which little is left are none."""
    height, width = size
    moved = objects.copy()
    x = (objects[:, [1, 3]] / width - window.left) / window.width
    y = (objects[:, [2, 4]] / height - window.top) / window.height
    if window.mirrored:
        x = 1 - x[:, ::-1]
    # rows of class −1 have no area
    whole = np.maximum((x[:, 1] - x[:, 0]) * (y[:, 1] - y[:, 0]), 1e-12)
    x, y = np.clip(x, 0, 1), np.clip(y, 0, 1)
    left = (x[:, 1] - x[:, 0]) * (y[:, 1] - y[:, 0]) / whole
    moved[:, 1:] = np.stack([x[:, 0] * width, y[:, 0] * height, x[:, 1] * width, y[:, 1] * height], axis=1)
    moved[(left < _LEAST_LEFT) | (objects[:, 0] < 0)] = (-1, 0, 0, 0, 0)
    return moved


def show(outputs: Arrays, inputs: Arrays, data: Data, adapted: Adapted) -> list[Figure]:
    """The scores of classes, and the pictures on which most objects are missed or made up."""
    labels, objects = adapted.labels or [], inputs[TARGET_NAME]
    rows = _detections(outputs, adapted)
    figures = class_table("Classes", COLUMNS, _score(rows, objects, labels)[1])
    sure = [one[one[:, 0] > _SHOWN_SCORE] for one in rows]
    truth = [one[one[:, 0] >= 0] for one in objects]
    agreement = []
    for boxes, own in zip(sure, truth):
        precision = average_precision([boxes], [own], len(labels))[:, 0]
        # on a picture without objects no box is right
        agreement.append(float(np.nan_to_num(np.nanmean(precision))) if len(own) else float(not len(boxes)))

    def draw(row: int, pixels: np.ndarray) -> list[np.ndarray]:
        step = _size_of(data)[1] / pixels.shape[1]
        return [
            draw_boxes(pixels, np.concatenate([one[:, :1], one[:, 1:] / step], axis=1), labels)
            for one in (truth[row], sure[row][:, 1:])
        ]

    return figures + scene_figures(
        "The boxes of the data (left), and what the model says", agreement, inputs, data, target=TARGET_NAME,
        draw=draw,
        describe=lambda row: f"{len(truth[row])} objects, {len(sure[row])} boxes over {_SHOWN_SCORE}",
    )  # fmt: skip


def scores(outputs: Arrays, data: Data, info: ModelInfo) -> Scores:
    """mAP50 and mAP50-95 of a deployed model, and a row for each class."""
    family, arrays = family_of(outputs, info), list(outputs.values())
    rows = select_boxes(arrays, family, _size_of(data), threshold=_LEAST_SCORE, overlap=_OVERLAP)
    objects = np.array(data.arrays[TARGET_NAME])
    # data may number the classes in another order than the model
    order = order_of_labels(data.classes or (), info.labels)
    if order is not None:
        there = objects[..., 0] >= 0
        objects[there, 0] = order[objects[there, 0].astype(int)]
    return _score(rows, objects, list(info.labels or data.classes or ()))


def _score(rows: Sequence[np.ndarray], objects: np.ndarray, labels: Sequence[str]) -> Scores:
    truth = [one[one[:, 0] >= 0] for one in objects]
    table = average_precision(rows, truth, len(labels))
    counts = np.bincount(np.concatenate([one[:, 0] for one in truth]).astype(int), minlength=len(labels))
    per_class = [
        [label, float(line[0]), float(line.mean()), int(counts[number])]
        for number, (label, line) in enumerate(zip(labels, table))
    ]
    figures = {"mAP50": float(np.nanmean(table[:, 0])), "mAP50_95": float(np.nanmean(table))}
    return figures, per_class


@dataclasses.dataclass(frozen=True)
class Mosaic:
    """`scene`'s changes, and then a share of the pictures made of four: objects are seen smaller, and beside others."""

    scene: SceneAugmentation

    def __call__(self, batch: Sequence[Any], rng: np.random.Generator) -> list[Any]:
        changed = self.scene(batch, rng)
        share = self.scene.strengths.get("mosaic", 0.0)
        if not share:
            return changed
        pictures, objects = changed[self.scene.pictures], changed[self.scene.targets]
        mixed, mixed_objects = [], []
        for own in range(len(pictures)):
            if rng.random() >= share:
                mixed.append(pictures[own])
                mixed_objects.append(objects[own])
                continue
            # of the same batch: others would have to be decoded for it
            others = [own, *rng.integers(0, len(pictures), 3)]
            split = rng.uniform(0.3, 0.7, 2)
            picture, rows = self._join([pictures[i] for i in others], [objects[i] for i in others], split)
            mixed.append(picture)
            mixed_objects.append(rows)
        changed[self.scene.pictures] = np.stack(mixed)
        most = max([1, *(int((rows[:, 0] >= 0).sum()) for rows in mixed_objects)])
        stacked = np.zeros((len(mixed), most, 5), np.float32)
        stacked[..., 0] = -1
        for index, rows in enumerate(mixed_objects):
            present = rows[rows[:, 0] >= 0]
            stacked[index, : len(present)] = present
        changed[self.scene.targets] = stacked
        return changed

    def _join(
        self, pictures: list[np.ndarray], objects: list[np.ndarray], split: np.ndarray
    ) -> tuple[Any, Any]:
        """Four pictures, each shrunk into its quarter; `split` is where the quarters meet, in shares of the sides."""
        last = self.scene.settings.get("layout") == "NHWC"
        planes = [one.transpose(2, 0, 1) if last else one for one in pictures]
        height, width = planes[0].shape[1:]
        top, left = round(split[0] * height), round(split[1] * width)
        canvas = np.empty_like(planes[0])
        rows = []
        for index, (one, boxes) in enumerate(zip(planes, objects)):
            down, across = index // 2, index % 2
            region = (
                slice(top, None) if down else slice(0, top),
                slice(left, None) if across else slice(0, left),
            )
            tall, wide = (height - top if down else top), (width - left if across else left)
            # the whole picture, at the size of its quarter
            window = Window(
                -(top if down else 0) / tall, -(left if across else 0) / wide, height / tall, width / wide
            )
            canvas[(slice(None), *region)] = window.cut(one, 0, linear=True)[(slice(None), *region)]
            rows.append(self.scene.change(boxes, window))
        joined = canvas.transpose(1, 2, 0) if last else canvas
        return joined, np.concatenate(rows)
