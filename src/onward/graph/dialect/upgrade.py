"""Rewrites operators of opsets 7 to 20 to opset 21.

One table: for each operator whose attributes, inputs or meaning changed, the version of the change and the
function that writes the newer form. Operators whose later versions only accept more types are not here.
Works in subgraphs and on models of any size: it edits nodes, not files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.nodes import ACTIVE, DROPOUT, attribute, is_used, optional_input, required_input

if TYPE_CHECKING:
    from onward.graph.builder import Builder, Operand
    from onward.graph.dialect.rewrite import Expansion

# Before it, broadcasting was an attribute and training a flag of each operator.
OLDEST = 7

_TABLE: dict[str, list[tuple[int, Expansion]]] = {}


def upgrade(node: ir.Node, version: int) -> Expansion | None:
    """The rewrite of a node of this opset version to opset 21; None where it is unchanged."""
    for below, expansion in _TABLE.get(node.op_type, ()):
        if version < below:
            return expansion
    return None


def _until(below: int, *op_types: str) -> Callable[[Expansion], Expansion]:
    """Register the form of these operators for models of opsets before `below`."""

    def register(expansion: Expansion) -> Expansion:
        for op_type in op_types:
            forms = _TABLE.setdefault(op_type, [])
            forms.append((below, expansion))
            forms.sort(key=lambda form: form[0])
        return expansion

    return register


def _rebuild(
    op: Builder,
    node: ir.Node,
    inputs: Sequence[Operand],
    *,
    without: Sequence[str] = (),
    **attributes: object,
) -> tuple[ir.Value, ...]:
    """The same operator with other inputs; keeps all attributes except those named."""
    old: dict[str, object] = {k: v for k, v in node.attributes.items() if k not in without}
    return op.node(node.op_type, inputs, {**old, **attributes}, outputs=len(node.outputs))


def _ints(node: ir.Node, name: str) -> np.ndarray | None:
    value = attribute(node, name)
    return None if value is None else np.asarray(value, np.int64)


@_until(13, "Squeeze", "Unsqueeze", "ReduceSum")
@_until(18, "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin")
@_until(18, "ReduceProd", "ReduceSumSquare")
def _axes_as_input(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    return _rebuild(op, node, [node.inputs[0], _ints(node, "axes")], without=["axes"])


@_until(18, "Split")
def _split(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    sizes = _ints(node, "split") if optional_input(node, 1) is None else optional_input(node, 1)
    count = None if sizes is not None else len(node.outputs)
    return _rebuild(op, node, [node.inputs[0], sizes], without=["split"], num_outputs=count)


@_until(10, "Slice")
def _slice(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    inputs = [node.inputs[0], _ints(node, "starts"), _ints(node, "ends"), _ints(node, "axes")]
    return _rebuild(op, node, inputs, without=["starts", "ends", "axes"])


@_until(11, "Clip")
def _clip(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    x = required_input(node)
    bounds = (attribute(node, name) for name in ("min", "max"))
    limits = [None if bound is None else op.constant_like(bound, x) for bound in bounds]
    return _rebuild(op, node, [x, *limits], without=["min", "max"])


@_until(11, "Pad")
def _pad(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    x = required_input(node)
    value = op.constant_like(attribute(node, "value", 0.0), x)
    if attribute(node, "mode", "constant") != "constant":
        value = None
    return _rebuild(op, node, [x, _ints(node, "pads"), value], without=["pads", "value"])


@_until(10, "TopK")
def _top_k(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    k = np.asarray([attribute(node, "k")], np.int64)
    return _rebuild(op, node, [node.inputs[0], k], without=["k"])


@_until(12, "Dropout")
def _dropout(op: Builder, node: ir.Node) -> Sequence[ir.Value | None]:
    """Before opset 12 the operator had no training mode: it is the identity, unless an export marked it."""
    x = required_input(node)
    if node.metadata_props.get(DROPOUT) == ACTIVE:
        ratio = op.constant(np.asarray(attribute(node, "ratio", 0.5), np.float32))
        return op.node(
            "Dropout", [x, ratio, op.constant(np.asarray(True))], outputs=2 if is_used(node, 1) else 1
        )
    if not is_used(node, 1):
        return [x]
    mask_type = node.outputs[1].dtype
    mask = op.Expand(np.ones((1,), np.bool_), op.shape(x))
    if mask_type not in (None, ir.DataType.BOOL):
        mask = op.Cast(mask, to=mask_type.value)
    return [x, mask]


@_until(14, "BatchNormalization")
def _batch_normalization(op: Builder, node: ir.Node) -> Sequence[ir.Value | None]:
    x, scale, bias, mean, var = (required_input(node, index) for index in range(5))
    if attribute(node, "spatial", 1) == 0:
        if any(is_used(node, index) for index in range(1, len(node.outputs))):
            raise ModelError("training with spatial=0 has no standard form")
        epsilon = op.constant_like(attribute(node, "epsilon", 1e-5), x)
        normal = op.Div(op.Sub(x, mean), op.Sqrt(op.Add(var, epsilon)))
        return [op.Add(op.Mul(normal, scale), bias)]
    training = len(node.outputs) > 1 and any(value.name for value in node.outputs[1:])
    attributes = {k: v for k, v in node.attributes.items() if k in ("epsilon", "momentum")}
    if not training:
        return op.node("BatchNormalization", list(node.inputs), attributes)
    outputs: list[ir.Value | None] = list(
        op.node("BatchNormalization", list(node.inputs), {**attributes, "training_mode": 1}, outputs=3)
    )
    if is_used(node, 3) or is_used(node, 4):
        axes = np.asarray([0, *range(2, op.rank(x))], np.int64)
        centre = op.ReduceMean(x, axes, keepdims=1)
        spread = op.Sub(x, centre)
        outputs.append(op.ReduceMean(x, axes, keepdims=0))
        outputs.append(op.ReduceMean(op.Mul(spread, spread), axes, keepdims=0))
    return outputs


@_until(13, "Softmax", "LogSoftmax", "Hardmax")
def _softmax(op: Builder, node: ir.Node) -> ir.Value:
    """Until opset 12 the axes from `axis` on were flattened into one."""
    x = required_input(node)
    rank = op.rank(x)
    axis = attribute(node, "axis", 1)
    axis = axis + rank if axis < 0 else axis
    if axis == rank - 1 or (
        axis < rank and all(op.static_dim(x, other) == 1 for other in range(axis + 1, rank))
    ):
        return op.node(node.op_type, [x], {"axis": axis if axis < rank else -1})[0]
    # One row per index of the leading axes, also where there are none of either kind.
    flat = op.Flatten(x, axis=axis)
    return op.Reshape(op.node(node.op_type, [flat], {"axis": -1})[0], op.shape(x), allowzero=1)


@_until(10, "Upsample")
def _upsample(op: Builder, node: ir.Node) -> ir.Value:
    scales = optional_input(node, 1)
    if scales is None:
        scales = op.constant(np.asarray(attribute(node, "scales"), np.float32))
    return _resize_by(op, node, scales)


@_until(11, "Resize")
def _resize_ten(op: Builder, node: ir.Node) -> ir.Value:
    return _resize_by(op, node, required_input(node, 1))


def _resize_by(op: Builder, node: ir.Node, scales: ir.Value) -> ir.Value:
    mode = attribute(node, "mode", "nearest")
    return op.Resize(
        node.inputs[0],
        None,
        scales,
        mode="linear" if mode == "bilinear" else mode,
        coordinate_transformation_mode="asymmetric",
        nearest_mode="floor",
    )


@_until(22, "Resize")
def _resize(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    """One spelling: inputs that are empty are left out, and a mode that opset 13 dropped is replaced."""
    inputs: list[ir.Value | None] = [node.inputs[0], *(optional_input(node, index) for index in (1, 2, 3))]
    for index in (1, 2, 3):
        value = inputs[index]
        if value is not None and value.shape is not None and op.static_shape(value) == (0,):
            inputs[index] = None
    mode = attribute(node, "coordinate_transformation_mode", "half_pixel")
    if mode != "tf_crop_and_resize":
        inputs[1] = None
    if mode == "tf_half_pixel_for_nn":
        if attribute(node, "mode", "nearest") != "nearest" or attribute(node, "nearest_mode") != "floor":
            raise ModelError(
                "coordinate_transformation_mode 'tf_half_pixel_for_nn' has a standard form with floor only"
            )
        return _rebuild(
            op, node, inputs, coordinate_transformation_mode="half_pixel", nearest_mode="round_prefer_ceil"
        )
    return _rebuild(op, node, inputs)


@_until(11, "Scatter")
def _scatter(op: Builder, node: ir.Node) -> ir.Value:
    return op.ScatterElements(*node.inputs, axis=attribute(node, "axis", 0))


@_until(21, "GroupNormalization")
def _group_normalization(op: Builder, node: ir.Node) -> ir.Value:
    """Scale and bias were one number per group; now they are one per channel."""
    x, scale, bias = (required_input(node, index) for index in range(3))
    groups = attribute(node, "num_groups")
    size = op.Div(op.dim(x, 1), [groups])
    shape = op.Concat([groups], size, axis=0)

    def per_channel(value: ir.Value) -> ir.Value:
        return op.Reshape(op.Expand(op.Unsqueeze(value, [1]), shape), [-1])

    return op.GroupNormalization(
        x, per_channel(scale), per_channel(bias), num_groups=groups, epsilon=attribute(node, "epsilon", 1e-5)
    )


@_until(16, "RoiAlign")
def _roi_align(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    return _rebuild(op, node, list(node.inputs), coordinate_transformation_mode="output_half_pixel")


@_until(20, "GridSample")
def _grid_sample(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    mode = attribute(node, "mode", "bilinear")
    return _rebuild(
        op, node, list(node.inputs), mode={"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode)
    )


@_until(20, "DFT")
def _dft(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    axis = np.asarray(attribute(node, "axis", 1), np.int64)
    return _rebuild(op, node, [node.inputs[0], optional_input(node, 1), axis], without=["axis"])


@_until(9, "Scan")
def _scan(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    """Opset 8 ran the body once per sample of a batch: a scan over samples around the scan over time."""
    if node.inputs[0] is not None:
        raise ModelError("Scan of opset 8 with sequence_lens has no standard form")
    body = attribute(node, "body")
    scanned = attribute(node, "num_scan_inputs")
    outside = [value for value in node.inputs[1:] if value is not None]
    sample = op.subgraph("sample")
    rows = []
    for value in outside:
        shape = None if value.shape is None else ir.Shape(list(value.shape)[1:])
        rows.append(sample.input(f"{value.name}_row", value.dtype, shape))
    attributes: dict[str, object] = {"body": body, "num_scan_inputs": scanned}
    if (directions := attribute(node, "directions")) is not None:
        attributes["scan_input_directions"] = directions
    results = sample.node("Scan", rows, attributes, outputs=len(node.outputs))
    sample.graph.outputs.extend(results)
    return op.node("Scan", outside, {"body": sample, "num_scan_inputs": len(outside)}, outputs=len(results))
