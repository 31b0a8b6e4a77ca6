"""Image segmentation: a class for every pixel. Trains a network on pictures with masks, and asks a trained one.

The network may give scores or probabilities, of as many pixels as the picture has or of fewer; one channel is the
score of class 1 against class 0. The deployed file has the output that the original had.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from onward.data.images import Pictures
from onward.data.labels import order_of_labels
from onward.data.masks import IGNORED, Masks, find_masked_pictures
from onward.data.read import Data
from onward.data.scenes import scene_preprocessing
from onward.errors import DataError, ModelError
from onward.escape import first_of
from onward.graph.load import load_model
from onward.graph.passes.head import new_head
from onward.graph.passes.head.final_activation import expose_pixel_scores
from onward.losses.functions import LossWithTargets, bce_with_logits, cross_entropy
from onward.runtime.sessions import open_session
from onward.tasks.classification import class_names
from onward.tasks.figures import class_table
from onward.tasks.protocol import Adapted, Arrays, Scores, Source
from onward.tasks.scene_tasks import open_graph, scene_batches, scene_figures
from onward.tasks.segmenter import Segmenter, best_classes, colour_classes

if TYPE_CHECKING:
    from onward.data.match_inputs import InputSpec
    from onward.graph.builder import Builder
    from onward.info.model_info import ModelInfo
    from onward.tasks.options import ImageSegmentation as Options
    from onward.train.report import Figure

predictor = Segmenter
COLUMNS = ("class", "IoU", "accuracy", "pixels")
TARGET_NAME = "masks"
_AUGMENTATIONS = ("flip", "crop", "scale", "colour")


def read(data: Any, source: Source, options: Options, *, like: Data | None = None) -> Data:
    """Pictures and their masks, at the size that the model takes; or (pictures, masks) as arrays."""
    if isinstance(data, tuple | list | Mapping):
        return _take_arrays(data, source, options, like)
    names = class_names(options)
    classes = list(like.classes or ()) if like is not None else names if isinstance(names, list) else None
    if classes is None and names is None and options.classes is None:
        classes = list(source.info.class_names or ()) or None
    masked = find_masked_pictures(Path(data), classes)
    if isinstance(names, int) and names < len(masked.classes):
        raise DataError(
            f"--classes {names}: the masks of '{data}' have {len(masked.classes)}", "count class 0 too"
        )
    preprocessing = like.preprocessing if like is not None else None
    if preprocessing is None:
        preprocessing = scene_preprocessing(
            source.inputs, source.info, masked.pictures[0], normalize=options.normalize, size=options.size
        )
    spec = next(spec for spec in source.inputs if spec.name == preprocessing.input)
    settings = preprocessing.settings
    return Data(
        {
            preprocessing.input: Pictures(masked.pictures, settings, dtype=spec.dtype),
            TARGET_NAME: Masks(masked.masks, settings["size"], binary=masked.binary),
        },
        classes=masked.classes if not isinstance(names, int) else [str(number) for number in range(names)],
        preprocessing=preprocessing,
        splits=masked.splits,
        notes=masked.notes,
    )


def _take_arrays(data: Any, source: Source, options: Options, like: Data | None) -> Data:
    """Pictures as the model takes them, and masks of their size."""
    arrays = list(data.values()) if isinstance(data, Mapping) else list(data)
    if len(arrays) != 2:
        raise DataError(f"the data has {len(arrays)} arrays", "give (pictures, masks)")
    pictures, masks = (np.asarray(array) for array in arrays)
    if pictures.ndim != 4 or masks.ndim != 3 or len(pictures) != len(masks) or not len(masks):
        raise DataError(
            f"pictures of shape {list(pictures.shape)} and masks of shape {list(masks.shape)} do not fit",
            "masks are [samples, height, width]",
        )
    sides = pictures.shape[1:3] if pictures.shape[1] not in (1, 3) else pictures.shape[2:]
    if masks.shape[1:] != sides:
        raise DataError(
            f"masks have {list(masks.shape[1:])} pixels, and pictures {list(sides)}", "make them alike"
        )
    names = class_names(options)
    listed = list(like.classes or ()) if like is not None else names if isinstance(names, list) else None
    most = int(masks[masks != IGNORED].max(initial=0))
    classes = listed or [str(number) for number in range(names if isinstance(names, int) else most + 1)]
    if masks.min() < 0 or most >= len(classes):
        row = int(np.argwhere((masks < 0) | ((masks >= len(classes)) & (masks != IGNORED)))[0][0])
        raise DataError(
            f"row {row} of the masks has class {most}, and there are {len(classes)}: {first_of(classes)}",
            f"numbers are 0 to {len(classes) - 1}, and {IGNORED} is no class",
        )
    spec = next(spec for spec in source.inputs if spec.dims is not None and len(spec.dims) == 4)
    return Data(
        {spec.name: pictures.astype(spec.dtype), TARGET_NAME: masks.astype(np.uint8)}, classes=classes
    )


def adapt(source: Source, data: Data, options: Options) -> Adapted:
    """The model with a head for the classes, and with the class of each pixel beside its own outputs."""
    arrays, labels = data.arrays, list(data.classes or ())
    name = next(name for name in arrays if name != TARGET_NAME)
    channels_last = data.settings.get("layout") == "NHWC"
    picture = np.asarray(arrays[name][:1])
    scores = _run_once(source, name, picture)
    axis = 3 if channels_last else 1
    width, own = scores.shape[axis], list(source.info.class_names or ())
    sides, of_picture = (
        tuple(shape[1:3] if channels_last else shape[2:4]) for shape in (scores.shape, picture.shape)
    )
    loaded = load_model(source.model)
    ir.external_data.load_to_model(loaded)
    # one channel tells two classes apart, and a network that has one keeps it
    count = 1 if width == 1 and len(labels) == 2 else len(labels)
    keeps_head = (
        options.head is None and width == count and (not own or own == labels or options.classes is None)
    )
    if options.classes is None and not keeps_head:
        raise ModelError(
            f"the model's head has {width} classes, and the data {len(labels)}", hint="leave classes away"
        )
    if keeps_head:
        note = f"the model's own head goes on: it has {first_of(labels)}"
    else:
        # metadata has no names for a single channel
        new_head(
            loaded, classes=count, names=labels if count > 1 else None, head=options.head, output=source.output,
            scores=False, seed=options.seed,
        )  # fmt: skip
        note = f"a new head for {first_of(labels)}: the model had {width} channels"
    output = loaded.graph.outputs[0].name if not keeps_head else source.output
    outputs = [value.name or "" for value in loaded.graph.outputs]
    prepared, frozen = open_graph(loaded)
    pixels = expose_pixel_scores(
        prepared, output or "", channels_last=channels_last, enlarge=sides != of_picture, classes=count
    )
    return Adapted(
        ir.to_proto(prepared), labels, note, loss_inputs=[pixels.scores], outputs=outputs, judged=[pixels.classes],
        frozen=frozen, output_kinds=source.info.outputs, problem_type=source.info.problem_type,
    )  # fmt: skip


def _run_once(source: Source, name: str, picture: np.ndarray) -> np.ndarray:
    """The model's output for one picture, which shows how large it is; an error where it is no scores of pixels."""
    # published networks seldom state the size of their output
    session = open_session(source.model)
    names = [value.name for value in session.get_inputs()]
    if names != [name]:
        raise ModelError(
            f"a segmentation network takes pictures alone, and this one takes {', '.join(names)}"
        )
    scores = np.asarray(session.run([source.output], {name: picture})[0])
    if scores.ndim != 4:
        raise ModelError(
            f"'{source.output}' has shape {list(scores.shape)}, and scores of pixels have four dimensions",
            hint="is it a segmentation network?",
        )
    if scores.dtype.kind != "f":
        raise ModelError(
            f"'{source.output}' has {scores.dtype}: the classes of pixels, not their scores",
            hint="export the network without its argmax",
        )
    return scores


def loss(options: Options, data: Data, adapted: Adapted) -> LossWithTargets:
    """Cross-entropy over the pixels, and Dice over the classes."""
    binary = adapted.labels is not None and len(adapted.labels) == 2
    compute = functools.partial(segmentation_loss, dice=options.dice, binary=binary)
    # bytes: whole numbers of 64 bits for each pixel would be larger than the pictures
    return LossWithTargets(compute, [(TARGET_NAME, ir.DataType.UINT8, [None, "mask_height", "mask_width"])])


def segmentation_loss(
    op: Builder, scores: ir.Value, masks: ir.Value, *, dice: float = 1.0, binary: bool = False
) -> ir.Value:
    """cross-entropy + dice·(1 − mean over classes of (2·Σ p·y + 1) / (Σ p + Σ y + 1)), over the pixels that count

    `scores` are [samples, classes, height, width]; one channel is the score of class 1.
    """
    numbers = op.Cast(masks, to=ir.DataType.INT64)
    kind = op.dtype(scores)
    # Dice has no weight for pixels that nobody named: they are multiplied away
    counted = op.Unsqueeze(op.Cast(op.Not(op.Equal(numbers, IGNORED)), to=kind), [1])
    single = binary and op.static_dim(scores, 1) == 1
    if single:
        targets = op.Unsqueeze(op.Cast(op.Equal(numbers, 1), to=kind), [1])
        each = bce_with_logits(op, scores, targets, reduction="none")
        # a batch may have no pixel that counts
        number = op.Max(op.ReduceSum(counted, keepdims=0), 1.0)
        total = op.Div(op.ReduceSum(op.Mul(each, counted), keepdims=0), number)
        shares = op.Sigmoid(scores)
    else:
        total = cross_entropy(op, scores, numbers, ignore_index=IGNORED)
        classes = op.static_dim(scores, 1)
        if classes is None:
            raise ModelError(
                "the number of classes of the scores is unknown: run shape inference on the model"
            )
        each_class = np.arange(classes, dtype=np.int64).reshape(1, -1, 1, 1)
        targets = op.Cast(op.Equal(op.Unsqueeze(numbers, [1]), each_class), to=kind)
        shares = op.Softmax(scores, axis=1)
    if not dice:
        return total
    shares = op.Mul(shares, counted)
    axes = [0, 2, 3]
    both = op.ReduceSum(op.Mul(shares, targets), axes, keepdims=0)
    sizes = op.Add(op.ReduceSum(shares, axes, keepdims=0), op.ReduceSum(targets, axes, keepdims=0))
    # the ones: a class that is in no mask, and that nothing is taken for, costs nothing
    overlap = op.Div(op.Add(op.Mul(both, 2.0), 1.0), op.Add(sizes, 1.0))
    return op.Add(total, op.Mul(op.Sub(1.0, op.ReduceMean(overlap, keepdims=0)), dice))


def metrics(options: Options, adapted: Adapted) -> dict[str, Callable[[Arrays, Arrays], float]]:
    """The mean over classes of the intersection over union."""
    labels = adapted.labels or []

    def miou(outputs: Arrays, inputs: Arrays) -> float:
        return _score(_classes_of(outputs, adapted), inputs[TARGET_NAME], labels)[0]["miou"]

    return {"miou": miou}


def _classes_of(outputs: Arrays, adapted: Adapted) -> np.ndarray:
    return outputs[next(iter(adapted.judged or ()))]


def batches(data: Data, specs: Sequence[InputSpec], options: Options, *, training: bool) -> Any:
    """Batches of pictures and masks; in training both are changed alike."""
    return scene_batches(
        data, specs, options, training=training, target=TARGET_NAME, augmentations=_AUGMENTATIONS,
        change=lambda mask, window: window.cut(mask, IGNORED, linear=False),
    )  # fmt: skip


def show(outputs: Arrays, inputs: Arrays, data: Data, adapted: Adapted) -> list[Figure]:
    """The scores of classes, and the pictures on which the model agrees least with the masks, both drawn over them."""
    labels, masks = adapted.labels or [], inputs[TARGET_NAME]
    classes = _classes_of(outputs, adapted)
    _, rows = _score(classes, masks, labels)
    figures = class_table("Classes", COLUMNS, rows)
    agreement = [float(np.mean((one == mask)[mask != IGNORED])) for one, mask in zip(classes, masks)]

    def describe(row: int) -> str:
        present = [labels[number] for number in np.unique(masks[row]) if number < len(labels)]
        return f"{agreement[row]:.1%} of the pixels agree; it has {first_of(present)}"

    return figures + scene_figures(
        "The mask (left), and what the model says", agreement, inputs, data, target=TARGET_NAME, describe=describe,
        draw=lambda row, pixels: [colour_classes(pixels, part[row]) for part in (masks, classes)],
    )  # fmt: skip


def summarize(outputs: Arrays, data: Data) -> Arrays:
    """The class of each pixel of a batch: scores of all pixels of all pictures would not fit into memory."""
    scores = np.asarray(next(iter(outputs.values())), np.float32)
    settings = data.settings
    if scores.ndim != 4:
        raise DataError(
            f"outputs of shape {list(scores.shape)} are no scores of pixels", "is it a segmentation model?"
        )
    planes = scores.transpose(0, 3, 1, 2) if settings.get("layout") == "NHWC" else scores
    size = data.arrays[TARGET_NAME].shape[1:]
    return {"classes": np.stack([best_classes(one, size) for one in planes])}


def scores(outputs: Arrays, data: Data, info: ModelInfo) -> Scores:
    """Mean IoU and the share of pixels that are right, and a row for each class."""
    masks = np.array(data.arrays[TARGET_NAME])
    # data may number the classes in another order than the model
    order = order_of_labels(data.classes or (), info.labels)
    if order is not None:
        counted = masks != IGNORED
        masks[counted] = order[masks[counted]]
    return _score(outputs["classes"], masks, list(info.labels or data.classes or ()))


def _score(classes: np.ndarray, masks: np.ndarray, labels: Sequence[str]) -> Scores:
    counted = masks != IGNORED
    truth, answers = masks[counted].astype(np.int64), classes[counted].astype(np.int64)
    # a model may give classes that its list has no names for
    count = max(len(labels), int(truth.max(initial=0)) + 1, int(answers.max(initial=0)) + 1)
    pairs = np.bincount(truth * count + answers, minlength=count * count).reshape(count, count)
    hits, present, called = np.diag(pairs), pairs.sum(axis=1), pairs.sum(axis=0)
    union = present + called - hits
    # a class that is nowhere, and nothing is taken for, has no score and is left out of the mean
    iou = np.where(union > 0, hits / np.maximum(union, 1), np.nan)
    names = [*labels, *(str(number) for number in range(len(labels), count))]
    rows = [
        [name, float(iou[i]), float(hits[i] / present[i]) if present[i] else float("nan"), int(present[i])]
        for i, name in enumerate(names)
    ]
    figures = {
        "miou": float(np.nanmean(iou)),
        "pixel_accuracy": float(hits.sum() / max(int(present.sum()), 1)),
    }
    return figures, rows
