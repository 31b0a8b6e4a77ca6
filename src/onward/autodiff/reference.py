"""ONNX's reference evaluator, corrected where its errors would affect finite differences.

Its Erf rounds to float32; its Loop stacks only vectors and treats an absent condition as false; its Scan
ignores axes and directions; its SequenceMap sees no captured values; its SequenceInsert cannot insert at the
end; what its Optional packs, OptionalGetElement does not unpack. They are implemented here by the
specification, as are operators on images that the evaluator has wrong or lacks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from onward.run_limits import require_time


class _Standard(OpRun):
    op_domain = ""


class ConvTranspose(_Standard):
    """ConvTranspose: each input spreads the kernel over the output; what pads say is cut away."""

    def _run(self, x, w, b=None, **attributes):  # type: ignore[override]
        rank, group = x.ndim - 2, attributes.get("group") or 1
        strides = attributes.get("strides") or [1] * rank
        dilations = attributes.get("dilations") or [1] * rank
        extra = attributes.get("output_padding") or [0] * rank
        kernel = w.shape[2:]
        full = [(n - 1) * s + (k - 1) * d + 1 + e
                for n, s, k, d, e in zip(x.shape[2:], strides, kernel, dilations, extra)]  # fmt: skip
        begin, size = _output_range(full, list(x.shape[2:]), strides, attributes)
        room = [max(f, a + n) for f, a, n in zip(full, begin, size)]
        images = x.reshape(x.shape[0], group, -1, *x.shape[2:])
        weights = w.reshape(group, -1, *w.shape[1:])
        y = np.zeros((x.shape[0], group, w.shape[1], *room), x.dtype)
        for tap in itertools.product(*map(range, kernel)):
            target = tuple(
                slice(t * d, t * d + (n - 1) * s + 1, s)
                for t, d, n, s in zip(tap, dilations, x.shape[2:], strides)
            )
            y[(..., *target)] += np.einsum("ngc...,gco->ngo...", images, weights[(..., *tap)])
        y = y.reshape(x.shape[0], -1, *room)
        y = y[(..., *(slice(a, a + n) for a, n in zip(begin, size)))]
        return (y if b is None else y + b.reshape(-1, *[1] * rank),)


def _output_range(full: list[int], size_in: list[int], strides: Sequence[int], attributes: dict):
    """(where the output begins in the full one, its size)."""
    rank, auto_pad = len(full), attributes.get("auto_pad") or "NOTSET"
    shape = attributes.get("output_shape")
    if not shape and auto_pad in ("NOTSET", "VALID"):
        pads = (attributes.get("pads") if auto_pad == "NOTSET" else None) or [0] * 2 * rank
        return pads[:rank], [f - a - e for f, a, e in zip(full, pads[:rank], pads[rank:])]
    sizes = list(shape)[-rank:] if shape else [n * s for n, s in zip(size_in, strides)]
    totals = [max(f - n, 0) for f, n in zip(full, sizes)]
    begin = [t // 2 if auto_pad == "SAME_UPPER" else t - t // 2 for t in totals]
    return begin, sizes if shape else [f - t for f, t in zip(full, totals)]


class MaxPool(_Standard):
    """MaxPool with the place of each first maximum, counted over the whole input."""

    def _run(self, x, **attributes):  # type: ignore[override]
        kernel = attributes["kernel_shape"]
        rank = len(kernel)
        strides = attributes.get("strides") or [1] * rank
        dilations = attributes.get("dilations") or [1] * rank
        begin, count = _windows(x.shape[2:], kernel, strides, dilations, attributes)
        best = np.full((*x.shape[:2], *count), -np.inf, x.dtype)
        index = np.zeros(best.shape, np.int64)
        order = "F" if attributes.get("storage_order") else "C"
        spatial = np.arange(math.prod(x.shape[2:])).reshape(x.shape[2:], order=order)
        offset = np.arange(math.prod(x.shape[:2])).reshape(*x.shape[:2], *[1] * rank) * spatial.size
        for tap in itertools.product(*map(range, kernel)):
            places = [
                np.arange(c) * s + t * d - a for c, s, t, d, a in zip(count, strides, tap, dilations, begin)
            ]
            inside = np.ones(count, bool)
            for axis, (coordinates, n) in enumerate(zip(places, x.shape[2:])):
                good = (coordinates >= 0) & (coordinates < n)
                inside &= good.reshape([-1 if i == axis else 1 for i in range(rank)])
            where = np.ix_(*[np.clip(coordinates, 0, n - 1) for coordinates, n in zip(places, x.shape[2:])])
            read = x[(slice(None), slice(None), *where)]
            better = inside & (read > best)
            best = np.where(better, read, best)
            index = np.where(better, spatial[where] + offset, index)
        return (best, index)[: len(self.onnx_node.output)]


def _windows(size: Sequence[int], kernel, strides, dilations, attributes: dict):
    """(padding before, number of windows) along each axis."""
    rank, auto_pad = len(kernel), attributes.get("auto_pad") or "NOTSET"
    pads = (attributes.get("pads") if auto_pad == "NOTSET" else None) or [0] * 2 * rank
    begins, counts = [], []
    for i, n in enumerate(size):
        span = (kernel[i] - 1) * dilations[i] + 1
        begin, free = pads[i], n + pads[i] + pads[i + rank] - span
        if auto_pad.startswith("SAME"):
            count = -(-n // strides[i])
            total = max((count - 1) * strides[i] + span - n, 0)
            begin = total // 2 if auto_pad == "SAME_UPPER" else total - total // 2
        elif attributes.get("ceil_mode"):
            count = -(-free // strides[i]) + 1
            count -= (count - 1) * strides[i] >= n + begin
        else:
            count = free // strides[i] + 1
        begins.append(begin)
        counts.append(count)
    return begins, counts


class MaxUnpool(_Standard):
    """MaxUnpool: indices count over the whole output."""

    def _run(self, x, indices, shape=None, **attributes):  # type: ignore[override]
        if shape is None:
            kernel = attributes["kernel_shape"]
            rank = len(kernel)
            strides = attributes.get("strides") or [1] * rank
            pads = attributes.get("pads") or [0] * 2 * rank
            shape = [*x.shape[:2]]
            shape += [
                (n - 1) * s + k - a - e
                for n, s, k, a, e in zip(x.shape[2:], strides, kernel, pads[:rank], pads[rank:])
            ]
        y = np.zeros(math.prod(map(int, shape)), x.dtype)
        y[indices.reshape(-1)] = x.reshape(-1)
        return (y.reshape([int(n) for n in shape]),)


class GlobalMaxPool(_Standard):
    """GlobalMaxPool over any number of spatial axes."""

    def _run(self, x):  # type: ignore[override]
        return (x.max(axis=tuple(range(2, x.ndim)), keepdims=True),)


class GlobalLpPool(_Standard):
    """GlobalLpPool: the p-norm of each channel."""

    def _run(self, x, p=None):  # type: ignore[override]
        p = p or 2
        total = np.sum(np.abs(x) ** p, axis=tuple(range(2, x.ndim)), keepdims=True)
        return ((total ** (1 / p)).astype(x.dtype),)


class MaxRoiPool(_Standard):
    """MaxRoiPool: the maximum of each of pooled_shape bins of a region with whole coordinates."""

    def _run(self, x, rois, pooled_shape=None, spatial_scale=None):  # type: ignore[override]
        assert pooled_shape is not None
        y = np.zeros((len(rois), x.shape[1], *pooled_shape), x.dtype)
        for r, (batch, *corners) in enumerate(rois):
            scaled = np.asarray(corners) * (spatial_scale or 1.0)
            left, top, right, bottom = (math.floor(c + 0.5) for c in scaled)
            for bin_ in np.ndindex(*pooled_shape):
                cuts = []
                for axis, (low, high) in enumerate([(top, bottom), (left, right)]):
                    step = max(high - low + 1, 1) / pooled_shape[axis]
                    ends = math.floor(bin_[axis] * step) + low, math.ceil((bin_[axis] + 1) * step) + low
                    cuts.append(slice(*np.clip(ends, 0, x.shape[2 + axis])))
                part = x[int(batch)][:, cuts[0], cuts[1]]
                if part.size:
                    y[(r, slice(None), *bin_)] = part.max(axis=(1, 2))
        return (y,)


IMAGE_OPS = [ConvTranspose, GlobalLpPool, GlobalMaxPool, MaxPool, MaxRoiPool, MaxUnpool]


def reference_evaluator(model: onnx.ModelProto) -> ReferenceEvaluator:
    """An evaluator of a model in numpy."""
    return ReferenceEvaluator(
        model, new_ops=[*IMAGE_OPS, Erf, Loop, Optional, Scan, SequenceInsert, SequenceMap]
    )


class Erf(_Standard):
    """Erf in the precision of its input."""

    def _run(self, x):  # type: ignore[override]
        return (np.asarray(np.vectorize(math.erf, otypes=[np.float64])(x)).astype(x.dtype),)


class SequenceInsert(_Standard):
    """SequenceInsert at any position from −n to n."""

    def _run(self, sequence, tensor, position=None):  # type: ignore[override]
        longer = list(sequence)
        longer.insert(len(longer) if position is None else int(np.asarray(position).item()), tensor)
        return (longer,)


class Optional(_Standard):
    """Optional: numpy needs no wrapper around what is there."""

    def _run(self, value=None, type=None):  # type: ignore[override]
        return (value,)


class _WithBody(_Standard):
    def need_context(self) -> bool:
        return True

    def _turn(self, context: dict[str, Any], arguments: list[Any]) -> list[Any]:
        require_time()  # a loop may never end
        body: Any = self.body  # type: ignore[attr-defined]
        return body.run(None, {**context, **dict(zip(body.input_names, arguments))})


class Loop(_WithBody):
    """Loop: trip count and condition, states, and the scan outputs of each iteration, stacked."""

    def _run(self, trips=None, going=None, *states, context=None, **_):  # type: ignore[override]
        limit = None if trips is None else int(np.asarray(trips).item())
        proceed = True if going is None else bool(np.asarray(going).item())
        current, emitted, turn = list(states), [], 0
        while proceed and (limit is None or turn < limit):
            flag, *results = self._turn(
                context or {}, [np.asarray(turn, np.int64), np.asarray(True), *current]
            )
            current = results[: len(states)]
            emitted.append(results[len(states) :])
            proceed = bool(np.asarray(flag).item())
            turn += 1
        return (*current, *_stacks(self, emitted, 1 + len(states), [], []))


class Scan(_WithBody):
    """Scan: states and slices of inputs, along any axis in either direction."""

    def _run(self, *inputs, context=None, **attributes):  # type: ignore[override]
        scanned = attributes["num_scan_inputs"]
        states, stacked = list(inputs[: len(inputs) - scanned]), inputs[len(inputs) - scanned :]
        axes = attributes.get("scan_input_axes") or [0] * scanned
        ways = attributes.get("scan_input_directions") or [0] * scanned
        length = stacked[0].shape[axes[0]]
        count, emitted = len(states), []
        for turn in range(length):
            slices = [
                np.take(x, length - 1 - turn if way else turn, axis=axis)
                for x, axis, way in zip(stacked, axes, ways)
            ]
            results = self._turn(context or {}, [*states, *slices])
            states = results[:count]
            emitted.append(results[count:])
        axes_out = attributes.get("scan_output_axes") or []
        ways_out = attributes.get("scan_output_directions") or []
        return (*states, *_stacks(self, emitted, count, list(axes_out), list(ways_out)))


class SequenceMap(_WithBody):
    """SequenceMap: the body on the elements of sequences, beside tensors that stay the same."""

    def _run(self, *inputs, context=None, **_):  # type: ignore[override]
        results = [
            self._turn(context or {}, [x[index] if isinstance(x, list) else x for x in inputs])
            for index in range(len(inputs[0]))
        ]
        return tuple([row[i] for row in results] for i in range(len(self.onnx_node.output)))


def _stacks(node: Any, emitted: list[list[Any]], skip: int, axes: list[int], ways: list[int]) -> list[Any]:
    """The scan outputs of all iterations, one array each; without an iteration, an empty one of the declared type."""
    declared = list(node.body.proto_.output)[skip:]
    stacks = []
    for index, value in enumerate(declared):
        axis = axes[index] if axes else 0
        parts = [row[index] for row in emitted]
        if parts:
            stacks.append(np.stack(parts[::-1] if ways and ways[index] else parts, axis=axis))
            continue
        kind = value.type.tensor_type
        dims = [dim.dim_value for dim in kind.shape.dim]
        dims.insert(axis if axis >= 0 else axis + len(dims) + 1, 0)
        stacks.append(np.zeros(dims, onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)))
    return stacks
