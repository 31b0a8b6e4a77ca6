"""Operators on images for the reference evaluator, where ONNX's own are missing or wrong.

Its ConvTranspose takes the wrong weights for groups and ignores output_shape, its MaxPool of stride 1 has no
Indices, its GlobalMaxPool reduces the wrong axes unless there are two, its MaxUnpool places maxima otherwise
than onnxruntime; GlobalLpPool and MaxRoiPool it lacks. Those are written here by the standard's text.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from onnx.reference.op_run import OpRun

__all__ = [
    "IMAGE_OPS",
    "ConvTranspose",
    "GlobalLpPool",
    "GlobalMaxPool",
    "MaxPool",
    "MaxRoiPool",
    "MaxUnpool",
]


class ConvTranspose(OpRun):
    """ConvTranspose: each input spreads the kernel over the output; what pads say is cut away."""

    op_domain = ""

    def _run(self, x, w, b=None, **attributes):  # type: ignore[override]
        rank, group = x.ndim - 2, attributes.get("group") or 1
        strides = attributes.get("strides") or [1] * rank
        dilations = attributes.get("dilations") or [1] * rank
        extra = attributes.get("output_padding") or [0] * rank
        kernel = w.shape[2:]
        full = [(n - 1) * s + (k - 1) * d + 1 + e
                for n, s, k, d, e in zip(x.shape[2:], strides, kernel, dilations, extra)]  # fmt: skip
        begin, size = _kept(full, list(x.shape[2:]), strides, attributes)
        room = [max(f, a + n) for f, a, n in zip(full, begin, size)]
        images = x.reshape(x.shape[0], group, -1, *x.shape[2:])
        weights = w.reshape(group, -1, *w.shape[1:])
        y = np.zeros((x.shape[0], group, w.shape[1], *room), x.dtype)
        for tap in itertools.product(*map(range, kernel)):
            place = tuple(
                slice(t * d, t * d + (n - 1) * s + 1, s)
                for t, d, n, s in zip(tap, dilations, x.shape[2:], strides)
            )
            y[(..., *place)] += np.einsum("ngc...,gco->ngo...", images, weights[(..., *tap)])
        y = y.reshape(x.shape[0], -1, *room)
        y = y[(..., *(slice(a, a + n) for a, n in zip(begin, size)))]
        return (y if b is None else y + b.reshape(-1, *[1] * rank),)


def _kept(full: list[int], size_in: list[int], strides: Sequence[int], attributes: dict):
    """(where the output begins in the full one, its size)."""
    rank, auto_pad = len(full), attributes.get("auto_pad") or "NOTSET"
    shape = attributes.get("output_shape")
    if not shape and auto_pad in ("NOTSET", "VALID"):
        pads = (attributes.get("pads") if auto_pad == "NOTSET" else None) or [0] * 2 * rank
        return pads[:rank], [f - a - e for f, a, e in zip(full, pads[:rank], pads[rank:])]
    wanted = list(shape)[-rank:] if shape else [n * s for n, s in zip(size_in, strides)]
    totals = [max(f - n, 0) for f, n in zip(full, wanted)]
    begin = [t // 2 if auto_pad == "SAME_UPPER" else t - t // 2 for t in totals]
    return begin, wanted if shape else [f - t for f, t in zip(full, totals)]


class MaxPool(OpRun):
    """MaxPool with the place of each first maximum, counted over the whole input."""

    op_domain = ""

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
            for axis, (place, n) in enumerate(zip(places, x.shape[2:])):
                good = (place >= 0) & (place < n)
                inside &= good.reshape([-1 if i == axis else 1 for i in range(rank)])
            where = np.ix_(*[np.clip(place, 0, n - 1) for place, n in zip(places, x.shape[2:])])
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


class MaxUnpool(OpRun):
    """MaxUnpool: indices count over the whole output."""

    op_domain = ""

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


class GlobalMaxPool(OpRun):
    """GlobalMaxPool over any number of spatial axes."""

    op_domain = ""

    def _run(self, x):  # type: ignore[override]
        return (x.max(axis=tuple(range(2, x.ndim)), keepdims=True),)


class GlobalLpPool(OpRun):
    """GlobalLpPool: the p-norm of each channel."""

    op_domain = ""

    def _run(self, x, p=None):  # type: ignore[override]
        p = p or 2
        total = np.sum(np.abs(x) ** p, axis=tuple(range(2, x.ndim)), keepdims=True)
        return ((total ** (1 / p)).astype(x.dtype),)


class MaxRoiPool(OpRun):
    """MaxRoiPool: the maximum of each of pooled_shape bins of a region with whole coordinates."""

    op_domain = ""

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
