"""Opens a published detector for training: new class layers, and the values before its sigmoids and its decoding.

Four families are known by the end of their graph, whatever their layers are called:

- YOLOv8 and what came of it: `Concat(boxes, Sigmoid(logits))`, [samples, 4 + classes, anchors], boxes decoded inside
  from distributions over distances.
- YOLOX: `Transpose(Concat over levels(Reshape(Concat(box, Sigmoid(objectness), Sigmoid(logits)))))`,
  [samples, anchors, 5 + classes], boxes as the layers give them.
- PicoDet (generalized focal loss): for each level an output of scores [samples, anchors, classes], and one of
  distributions over distances [samples, anchors, 4 · bins], often of one layer that has the rows of both.
- DETR and YOLOS: scores [samples, queries, classes + 1], the last for nothing, and boxes that a sigmoid made.

In the first three a class layer is a 1×1 convolution for each level; new ones have an output for each new class. In
the fourth it is one linear layer, whose row for nothing stays.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.builder import Builder
from onward.graph.cleanup import remove_unused
from onward.graph.nodes import producer_of, required_input
from onward.graph.passes.head.layer_search import constant_shape
from onward.graph.passes.head.new_layer import (
    NewHead,
    correct_metadata,
    infer_shapes_behind,
    parameter,
    replace_rows,
)

YOLOV8, YOLOX, PICODET, DETR = "yolov8", "yolox", "picodet", "detr"
# what stands between the layers of the levels and the scores of all anchors, and computes nothing
_ARRANGING = {"Reshape", "Flatten", "Concat", "Split", "Slice", "Transpose", "Identity", "Cast"}
# a new class is rare at first: most anchors see none, and would drown the others in the first steps
_PRIOR = 0.01
# where other programs read the names of classes from: Ultralytics', PaddlePaddle's
_NAMES, _CHARACTERS = "names", "character"


@dataclasses.dataclass(frozen=True)
class DetectorHead:
    """A detector that is open for training.

    `values` are the names of what the family's loss reads, [samples, classes | 4 | … , anchors], in its order: the
    logits; the boxes, decoded in YOLOv8 and as the layers give them in YOLOX; the objectness of YOLOX, or the logits
    of the distances' distributions. DETR's are its outputs. `constants` are weights that no training may change.
    """

    family: str
    outputs: Sequence[str]
    values: Sequence[str]
    constants: Sequence[str]
    note: str


@dataclasses.dataclass
class _Level:
    """The layers of one level of the pyramid, by what they give.

    Where one layer gives both classes and boxes, `rows` are those of each.
    """

    classes: ir.Node
    boxes: ir.Node | None = None
    objectness: ir.Node | None = None
    rows: tuple[slice, slice] | None = None


@dataclasses.dataclass
class _End:
    """What the end of a detector's graph is made of; `classes` is their number."""

    family: str
    levels: list[_Level]
    classes: int
    # YOLOv8: the values that hold the logits and the distances of all anchors
    logits: ir.Value | None = None
    distances: ir.Value | None = None
    boxes: ir.Value | None = None
    # PicoDet: the outputs of each level, by their places
    scores_at: Sequence[int] = ()
    boxes_at: Sequence[int] = ()


def detector_family(model: ir.Model) -> str | None:
    """The family of a detector, or None where its end is none that is known here."""
    end = _find_end(model.graph)
    return None if end is None else end.family


def open_detector(model: ir.Model, names: Sequence[str] | None, *, seed: int = 0) -> DetectorHead:
    """Expose what a loss reads, in place; `names` are those of new classes, None keeps the head as it is."""
    graph = model.graph
    end = _find_end(graph)
    if end is None:
        raise ModelError(
            "the model ends like no detector that can be trained here",
            hint="known are YOLOv8's form (boxes and sigmoid scores in one output, decoded), YOLOX's (raw grid), "
            "PicoDet's (scores and distances of each level) and DETR's (scores and boxes of queries)",
        )
    if end.family == DETR:
        return _open_detr(model, end, names, seed)
    op, parameters = Builder(graph), []
    dims = [None if output.shape is None else list(output.shape) for output in graph.outputs]
    for index, level in enumerate(end.levels):
        if level.rows is not None:
            _separate(op, level, index)
    old = end.classes
    count = old if names is None else len(names)
    if names is not None:
        for index, level in enumerate(end.levels):
            parameters += _replace_classes(op, level.classes, count, f"head.{index}", seed + index)
    logits = _join_levels(op, [level.classes.outputs[0] for level in end.levels], count)
    values, class_axes = _OPENERS[end.family](op, end, logits, count)
    for value, name in zip(values, ("logits", *_NAMES_OF_VALUES[end.family])):
        if name is not None:
            value.name = op.namer(f"detector_{name}")
    outputs = list(graph.outputs)
    # what joins outputs that the file has apart is a part of the graph only as an output of its own
    graph.outputs.extend(value for value in values if not value.uses())
    graph.sort()
    remove_unused(model)
    note = f"the model's own {old} classes go on"
    if names is not None:
        head = NewHead("the class layers", graph.outputs[0].name or "", parameters, old, [])
        written = {_NAMES: str(dict(enumerate(names)))}
        if _CHARACTERS in model.metadata_props:
            written[_CHARACTERS] = "\n".join(names)
        correct_metadata(model, head, count, names)
        model.metadata_props.update(written)
        note = f"{len(end.levels)} class layers had {old} classes and have {count} now"
    infer_shapes_behind(model, parameters)
    for position, output in enumerate(outputs):
        _declare(output, dims[position], class_axes.get(position), count - old)
    return DetectorHead(
        end.family,
        [output.name or "" for output in outputs],
        [value.name or "" for value in values],
        _expectation_weights(graph),
        note,
    )


# what a family's opener returns: the values of its loss, and which axis of which output counts classes
_Opened = tuple[list[ir.Value], Mapping[int, int]]


def _open_yolov8(op: Builder, end: _End, logits: ir.Value, count: int) -> _Opened:
    assert end.logits is not None and end.boxes is not None
    values = [logits, end.boxes]
    if end.distances is not None:
        layers = [level.boxes for level in end.levels if level.boxes is not None]
        distances = _join_levels(op, [one.outputs[0] for one in layers], _layer_width(layers[0]))
        end.distances.replace_all_uses_with(distances)
        values.append(distances)
    end.logits.replace_all_uses_with(logits)
    return values, {0: 1}


def _open_yolox(op: Builder, end: _End, logits: ir.Value, count: int) -> _Opened:
    boxes, objectness = (
        _join_levels(op, [layer.outputs[0] for level in end.levels if (layer := getattr(level, kind))], width)
        for kind, width in (("boxes", 4), ("objectness", 1))
    )
    rows = op.Concat(boxes, op.Sigmoid(objectness), op.Sigmoid(logits), axis=1)
    _replace_output(op, 0, op.Transpose(rows, perm=[0, 2, 1]))
    return [logits, boxes, objectness], {0: 2}


def _open_picodet(op: Builder, end: _End, logits: ir.Value, count: int) -> _Opened:
    layers = [level.boxes for level in end.levels if level.boxes is not None]
    width = _layer_width(layers[0])
    for level, layer, scores_at, boxes_at in zip(end.levels, layers, end.scores_at, end.boxes_at):
        scores = op.Sigmoid(_join_levels(op, [level.classes.outputs[0]], count))
        _replace_output(op, scores_at, op.Transpose(scores, perm=[0, 2, 1]))
        sides = _join_levels(op, [layer.outputs[0]], width)
        _replace_output(op, boxes_at, op.Transpose(sides, perm=[0, 2, 1]))
    distances = _join_levels(op, [layer.outputs[0] for layer in layers], width)
    return [logits, distances], dict.fromkeys(end.scores_at, 2)


def _open_detr(model: ir.Model, end: _End, names: Sequence[str] | None, seed: int) -> DetectorHead:
    logits, boxes = model.graph.outputs
    dims = None if logits.shape is None else list(logits.shape)
    note = f"the model's own {end.classes} classes go on"
    if names is not None:
        rows = [*[None] * len(names), end.classes]
        head = replace_rows(model, logits, end.classes + 1, rows, head=None, seed=seed)
        # what is counted there are the classes and nothing, and what is named are the classes
        correct_metadata(model, head, len(names), names)
        model.metadata_props[_NAMES] = str(dict(enumerate(names)))
        _declare(logits, dims, 2, len(names) - end.classes)
        note = f"the class layer had {end.classes} classes and has {len(names)} now"
    outputs = [logits.name or "", boxes.name or ""]
    return DetectorHead(DETR, outputs, outputs, [], note)


_OPENERS: Mapping[str, Callable[[Builder, _End, ir.Value, int], _Opened]] = {
    YOLOV8: _open_yolov8,
    YOLOX: _open_yolox,
    PICODET: _open_picodet,
}
# of the values behind the logits; None is one of the file's own, which keeps its name
_NAMES_OF_VALUES: Mapping[str, Sequence[str | None]] = {
    YOLOV8: (None, "distances"),
    YOLOX: (None, "objectness"),
    PICODET: ("distances",),
}


def _find_end(graph: ir.Graph) -> _End | None:
    """The layers at the end of a detector; None where it is no family that is known."""
    if len(graph.outputs) != 1:
        return _find_detr(graph) or _find_picodet(graph)
    last = graph.outputs[0].producer()
    if last is not None and last.op_type == "Concat":
        return _find_yolov8(last)
    if last is not None and last.op_type == "Transpose" and (joined := producer_of(last.inputs[0], "Concat")):
        return _find_yolox(joined)
    return None


def _find_yolov8(last: ir.Node) -> _End | None:
    sigmoid = producer_of(last.inputs[-1], "Sigmoid")
    if sigmoid is None or len(last.inputs) != 2:
        return None
    logits = required_input(sigmoid)
    layers = _layers_of(logits)
    if not layers:
        return None
    split = logits.producer()
    if split is None or split.op_type not in ("Split", "Slice"):
        levels = [_Level(layer) for layer in layers]
        return _End(YOLOV8, levels, _layer_width(layers[0]), logits, None, required_input(last))
    # a level's box layer and its class layer, joined and taken apart again behind all levels
    levels = [_Level(classes, boxes) for boxes, classes in zip(layers[0::2], layers[1::2])]
    if len(layers) % 2 or len({_layer_width(level.classes) for level in levels}) > 1:
        return None
    others = split.outputs if split.op_type == "Split" else [
        user.outputs[0] for user in required_input(split).consumers() if user.op_type == "Slice"
    ]  # fmt: skip
    distances = [value for value in others if value is not logits]
    if len(distances) != 1:
        return None
    return _End(YOLOV8, levels, _layer_width(levels[0].classes), logits, distances[0], required_input(last))


def _find_yolox(joined: ir.Node) -> _End | None:
    if len(joined.inputs) == 3 and producer_of(joined.inputs[1], "Sigmoid"):
        # as it is written here: the levels are joined first, and then what they say
        parts = [joined.inputs[0], *(required_input(node) for value in joined.inputs[1:]
                                     if (node := producer_of(value, "Sigmoid")))]  # fmt: skip
        kinds = [_layers_of(part) for part in parts if part is not None]
        if len(kinds) != 3 or not kinds[0] or len({len(layers) for layers in kinds}) != 1:
            return None
        levels = [_Level(classes, boxes, objectness) for boxes, objectness, classes in zip(*kinds)]
        return _End(YOLOX, levels, _layer_width(levels[0].classes))
    levels = []
    for value in joined.inputs:
        reshape = producer_of(value, "Reshape", "Flatten")
        if reshape is None:
            return None
        parts = producer_of(reshape.inputs[0], "Concat")
        if parts is None or len(parts.inputs) != 3:
            return None
        boxes = producer_of(parts.inputs[0], "Conv")
        sigmoids = [producer_of(part, "Sigmoid") for part in parts.inputs[1:]]
        layers = [one and producer_of(one.inputs[0], "Conv") for one in sigmoids]
        if boxes is None or layers[0] is None or layers[1] is None:
            return None
        if _layer_width(boxes) != 4 or _layer_width(layers[0]) != 1:
            return None
        levels.append(_Level(layers[1], boxes, layers[0]))
    return _End(YOLOX, levels, _layer_width(levels[0].classes)) if levels else None


def _find_detr(graph: ir.Graph) -> _End | None:
    if len(graph.outputs) != 2:
        return None
    logits, boxes = graph.outputs
    layer = producer_of(logits, "Add", "MatMul", "Gemm")
    if layer is None or logits.shape is None or logits.shape.rank() != 3 or not producer_of(boxes, "Sigmoid"):
        return None
    count, sides = logits.shape[2], None if boxes.shape is None else boxes.shape[-1]
    if sides != 4 or not isinstance(count, int) or count < 2:
        return None
    return _End(DETR, [], count - 1)


@dataclasses.dataclass(frozen=True)
class _Part:
    """The layer whose rows an output has, which of its rows, and whether they went through a sigmoid."""

    layer: ir.Node
    rows: slice
    scored: bool

    @property
    def width(self) -> int:
        return self.rows.stop - self.rows.start


def _find_picodet(graph: ir.Graph) -> _End | None:
    parts = [_part_of(output) for output in graph.outputs]
    scores_at = [position for position, part in enumerate(parts) if part is not None and part.scored]
    boxes_at = [position for position, part in enumerate(parts) if part is not None and not part.scored]
    if not scores_at or len(scores_at) != len(boxes_at) or None in parts:
        return None
    levels, widths = [], set()
    for scores, boxes in zip(
        (parts[position] for position in scores_at), (parts[position] for position in boxes_at)
    ):
        assert scores is not None and boxes is not None
        rows = (scores.rows, boxes.rows) if scores.layer is boxes.layer else None
        wholes = [part.rows == slice(0, _layer_width(part.layer)) for part in (scores, boxes)]
        if rows is None and not all(wholes):
            return None
        levels.append(_Level(scores.layer, boxes.layer, rows=rows))
        widths.add((scores.width, boxes.width))
    if len(widths) != 1:
        return None
    classes, sides = widths.pop()
    # a distribution has two bins or more for each of the four sides
    if sides % 4 or sides < 8:
        return None
    return _End(PICODET, levels, classes, scores_at=scores_at, boxes_at=boxes_at)


def _part_of(output: ir.Value) -> _Part | None:
    """The rows of a layer that an output is, arranged in another way."""
    value, scored, rows = output, False, None
    while (node := value.producer()) is not None:
        if node.op_type == "Conv":
            shape, dims = constant_shape(node.inputs[1]), output.shape
            if shape is None:
                return None
            part = _Part(node, rows or slice(0, shape[0]), scored)
            return part if dims is None or dims[-1] == part.width else None
        if node.op_type == "Split" and rows is None and node.attributes.get_int("axis", 0) == 1:
            sizes = _sizes_of_split(node)
            position = node.outputs.index(value)
            if sizes is None:
                return None
            rows = slice(sum(sizes[:position]), sum(sizes[: position + 1]))
        elif node.op_type == "Sigmoid" and not scored:
            scored = True
        elif node.op_type == "Concat" and len(node.inputs) == 1:
            pass  # what an earlier training here has written for a level
        elif node.op_type not in _ARRANGING - {"Concat", "Split", "Slice"}:
            return None
        value = required_input(node)
    return None


def _sizes_of_split(node: ir.Node) -> list[int] | None:
    if len(node.inputs) > 1:
        tensor = None if node.inputs[1] is None else ir.convenience.get_const_tensor(node.inputs[1])
        return None if tensor is None else tensor.numpy().tolist()
    stated = node.attributes.get_ints("split", ())
    return list(stated) or None


def _separate(op: Builder, level: _Level, index: int) -> None:
    """Two layers of one that has the rows of classes and of boxes."""
    assert level.rows is not None
    layer = level.classes
    attributes = {name: attribute.value for name, attribute in layer.attributes.items()}
    weights = [value for value in layer.inputs[1:] if value is not None]
    arrays = [_constant(layer, value) for value in weights]
    parts = []
    for rows, kind in zip(level.rows, ("classes", "boxes")):
        own = [
            parameter(op, f"level.{index}.{kind}.{name}", array[rows])
            for name, array in zip(("weight", "bias"), arrays)
        ]
        node = op.Conv(layer.inputs[0], *own, **attributes).producer()
        assert node is not None
        parts.append(node)
    level.classes, level.boxes = parts


def _constant(layer: ir.Node, value: ir.Value) -> np.ndarray:
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is None:
        raise ModelError(f"'{value.name}' of the layer '{layer.name}' is no constant")
    return tensor.numpy()


def _layers_of(value: ir.Value) -> list[ir.Node]:
    """The convolutions that a value is put together of, in order; none where anything else takes part."""
    node = value.producer()
    if node is None:
        return []
    if node.op_type == "Conv":
        return [node]
    if node.op_type not in _ARRANGING:
        return []
    parts = node.inputs if node.op_type == "Concat" else node.inputs[:1]
    layers = [_layers_of(part) for part in parts if part is not None]
    return [node for part in layers for node in part] if all(layers) else []


def _layer_width(layer: ir.Node) -> int:
    shape = constant_shape(layer.inputs[1])
    if shape is None:
        raise ModelError(f"the weight of '{layer.name}' is no constant")
    return shape[0]


def _replace_classes(op: Builder, layer: ir.Node, count: int, name: str, seed: int) -> list[str]:
    shape = (count, *(constant_shape(layer.inputs[1]) or ())[1:])
    weight = np.random.default_rng(seed).normal(0, 0.01, shape).astype(np.float32)
    bias = np.full(count, -math.log((1 - _PRIOR) / _PRIOR), np.float32)
    values = [parameter(op, f"{name}.weight", weight), parameter(op, f"{name}.bias", bias)]
    layer.replace_input_with(1, values[0])
    if len(layer.inputs) < 3:
        layer.resize_inputs(3)
    layer.replace_input_with(2, values[1])
    layer.outputs[0].shape = None
    return [value.name or "" for value in values]


def _join_levels(op: Builder, values: Sequence[ir.Value], width: int) -> ir.Value:
    """[samples, width, anchors] of the maps of all levels, row by row."""
    return op.Concat(*(op.Reshape(value, [0, width, -1]) for value in values), axis=2)


def _replace_output(op: Builder, position: int, value: ir.Value) -> None:
    output = op.graph.outputs[position]
    name, output.name = output.name, None
    value.name = name
    value.type = output.type
    op.graph.outputs[position] = value


def _declare(output: ir.Value, dims: list | None, class_axis: int | None, more: int) -> None:
    """The output's shape as the file had it, but for the classes: programs read it."""
    if dims is not None:
        output.shape = ir.Shape(
            [
                dim + more if axis == class_axis and isinstance(dim, int) else dim
                for axis, dim in enumerate(dims)
            ]
        )


def _expectation_weights(graph: ir.Graph) -> list[str]:
    """The weights 0, 1, 2 … by which a distribution becomes its mean: a number line, which is nothing to learn."""
    names = []
    for name, value in graph.initializers.items():
        tensor = value.const_value
        if tensor is None or value.dtype != ir.DataType.FLOAT or not 2 <= tensor.size <= 64:
            continue
        numbers = tensor.numpy().ravel()
        if np.array_equal(numbers, np.arange(numbers.size)):
            names.append(name)
    return names
