"""Estimates the memory of a training step from its graph: parameters, gradients, optimizer state, live activations."""

from __future__ import annotations

from typing import Any

from onward import contract
from onward.model_metadata import read_table

__all__ = ["footprint"]


def footprint(made: Any, batch_size: int) -> dict[str, Any]:
    """Sizes of artifacts in memory; `activation_bytes` is the most that is alive at once, run node by node."""
    state = made.checkpoint
    trained = sum(array.nbytes for array in state.trainable.values())
    frozen = sum(array.nbytes for array in state.frozen.values())
    slots = _slots(made.optimizer)
    peak, unknown = _peak(made.training.graph, batch_size)
    sizes = {
        "trainable_values": sum(array.size for array in state.trainable.values()),
        "frozen_values": sum(array.size for array in state.frozen.values()),
        "training_nodes": sum(1 for _ in made.training.graph.all_nodes()),
        "eval_nodes": sum(1 for _ in made.evaluation.graph.all_nodes()),
        "parameter_bytes": trained + frozen,
        "gradient_bytes": trained,
        "optimizer_bytes": slots * trained,
        "activation_bytes": peak,
        "values_of_unknown_size": unknown,
        "remark": f" (and {unknown} values of unknown size)" if unknown else "",
    }
    parts = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes")
    return {**sizes, "total_bytes": sum(sizes[part] for part in parts)}


def _slots(optimizer: Any) -> int:
    """How many numbers the optimizer remembers for each parameter, from its file."""

    if optimizer is None:
        return 0
    about = read_table(optimizer.metadata_props, contract.OPTIMIZER)
    return len(about.get("slots", ("momentum0", "momentum1")))


def _peak(graph: Any, batch_size: int) -> tuple[int, int]:
    """The most bytes of values that live at once, and how many have no known size."""
    nodes = list(graph)
    last: dict[Any, int] = {}
    for index, node in enumerate(nodes):
        for value in node.inputs:
            if value is not None:
                last[value] = index
    for value in graph.outputs:
        last[value] = len(nodes)
    alive = peak = unknown = 0
    freed: dict[int, int] = {}
    for index, node in enumerate(nodes):
        for value in node.outputs:
            size = _bytes(value, batch_size)
            if size is None:
                unknown += 1
                continue
            alive += size
            end = last.get(value, index)
            freed[end] = freed.get(end, 0) + size
        peak = max(peak, alive)
        alive -= freed.pop(index, 0)
    return peak, unknown


def _bytes(value: Any, batch_size: int) -> int | None:
    if value.shape is None or value.dtype is None:
        return None
    count = 1
    for dim in value.shape:
        # every dimension without a number counts as the batch, which is what it mostly is
        count *= dim if isinstance(dim, int) else batch_size
    return int(count * value.dtype.itemsize)
