"""What the gradients of RNN, GRU and LSTM read: the gates and states of every step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

if TYPE_CHECKING:
    from onward.autodiff.forms.recurrence import Recurrence

__all__ = ["saved_runs"]


def saved_runs(
    layer: Recurrence,
    functions: Sequence[Any],
    widths: Callable[..., Mapping[str, int]],
    forward: Callable[..., Mapping[str, ir.Value]],
) -> list[dict[str, Any]]:
    """What each direction's forward pass keeps, by name; None where `widths` is 0.

    `widths(layer, direction, functions)` says how many times the hidden size each has.
    `forward(op, layer, direction, functions)` writes the pass as a Scan: it returns these values, and the last states
    "h" and, of an LSTM, "c". The rest of the graph reads the Scan then.
    """
    op, node = layer.op, layer.node
    tables = [widths(layer, d, f) for d, f in zip(layer.directions, functions)]
    names = [(d, name) for d, table in enumerate(tables) for name, width in table.items() if width]

    def compute() -> list[ir.Value]:
        runs = [forward(op, layer, d, f) for d, f in zip(layer.directions, functions)]
        finals = [name for name in ("h", "c") if name in runs[0]]
        _read_instead(node, layer.outputs(*([run[name] for run in runs] for name in ("hs", *finals))))
        return [runs[d][name] for d, name in names]

    likes = [layer.over_time(tables[d][name] * layer.hidden) for d, name in names]
    found: list[dict[str, Any]] = [dict.fromkeys(table) for table in tables]
    for (d, name), value in zip(names, op.save(node, likes, compute)):
        found[d][name] = value
    return found


def _read_instead(node: ir.Node, values: Sequence[ir.Value]) -> None:
    """Let the rest of the graph read other values than a node's outputs; outputs of the model stay the node's own."""
    for old, new in zip(node.outputs, values):
        new.shape = old.shape if new.shape is None else new.shape
        for use in list(old.uses()):
            use.node.replace_input_with(use.idx, new)
