"""ONNX's reference evaluator, corrected where a finite difference would notice.

Its Erf rounds to float32; its Loop stacks only vectors and takes an absent condition for false; its Scan
knows no axes or directions; its SequenceMap sees no captured values; its SequenceInsert cannot insert at the
end; what its Optional packs, OptionalGetElement does not unpack. Those are written here by the standard's
text; operators on images are in `reference_images`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from onward.autodiff.reference_images import IMAGE_OPS

__all__ = ["Erf", "Loop", "Optional", "Scan", "SequenceInsert", "SequenceMap", "reference_evaluator"]


def reference_evaluator(model: onnx.ModelProto) -> ReferenceEvaluator:
    """An evaluator of a model in numpy."""
    return ReferenceEvaluator(
        model, new_ops=[*IMAGE_OPS, Erf, Loop, Optional, Scan, SequenceInsert, SequenceMap]
    )


class Erf(OpRun):
    """Erf in the precision of its input."""

    op_domain = ""

    def _run(self, x):  # type: ignore[override]
        return (np.asarray(np.vectorize(math.erf, otypes=[np.float64])(x)).astype(x.dtype),)


class SequenceInsert(OpRun):
    """SequenceInsert at any position from −n to n."""

    op_domain = ""

    def _run(self, sequence, tensor, position=None):  # type: ignore[override]
        longer = list(sequence)
        longer.insert(len(longer) if position is None else int(np.asarray(position).item()), tensor)
        return (longer,)


class Optional(OpRun):
    """Optional: numpy needs no wrapper around what is there."""

    op_domain = ""

    def _run(self, value=None, type=None):  # type: ignore[override]
        return (value,)


class _WithBody(OpRun):
    op_domain = ""

    def need_context(self) -> bool:
        return True

    def _turn(self, context: dict[str, Any], arguments: list[Any]) -> list[Any]:
        body: Any = self.body  # type: ignore[attr-defined]
        return body.run(None, {**context, **dict(zip(body.input_names, arguments))})


class Loop(_WithBody):
    """Loop: trip count and condition, states, and what each turn emits, stacked."""

    def _run(self, trips=None, going=None, *states, context=None, **_):  # type: ignore[override]
        limit = None if trips is None else int(np.asarray(trips).item())
        proceed = True if going is None else bool(np.asarray(going).item())
        current, emitted, turn = list(states), [], 0
        while proceed and (limit is None or turn < limit):
            flag, *rest = self._turn(context or {}, [np.asarray(turn, np.int64), np.asarray(True), *current])
            current = rest[: len(states)]
            emitted.append(rest[len(states) :])
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
    """What was emitted turn by turn as one array each; without a turn, an empty one of the declared type."""
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
