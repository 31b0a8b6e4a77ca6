"""The state of all stages on rank 0: each stage's leader packs what it owns and sends it there."""

from __future__ import annotations

import dataclasses

import numpy as np

from onward.checkpoint import CheckpointData, NominalTensor
from onward.distributed.comm import Communicator
from onward.distributed.settings import Grid
from onward.distributed.stages.models import Blueprint
from onward.distributed.stages.packing import Layout, layout_of

__all__ = ["gather_state"]


def gather_state(
    comm: Communicator, grid: Grid, blueprint: Blueprint, own: CheckpointData
) -> CheckpointData | None:
    """What all stages have, on rank 0; None elsewhere. `own` is the state of this rank's stage."""
    if grid.replica != 0:
        return None
    slots = _slot_names(own)
    if grid.stage != 0:
        layout = _layout(blueprint, grid.stage, slots)
        comm.send(layout.pack(_flatten(own)), to=0)
        return None
    whole = dataclasses.replace(own, trainable=dict(own.trainable), frozen=dict(own.frozen))
    state = dict(own.optimizer[0].slots) if own.optimizer else {}
    for stage in range(1, grid.pipeline):
        layout = _layout(blueprint, stage, slots)
        vector = np.zeros(layout.size, np.float32)
        comm.receive(vector, source=stage * grid.data)
        for (kind, _, name), array in zip(
            (n.partition(":") for n in layout.names), layout.unpack(vector).values()
        ):
            if kind:
                state.setdefault(name, {})[kind] = array
            elif name in blueprint.plan.trainable:
                whole.trainable[name] = array
            else:
                whole.frozen[name] = array
    if own.optimizer:
        whole.optimizer = [dataclasses.replace(own.optimizer[0], slots=state), *own.optimizer[1:]]
    return whole


def _layout(blueprint: Blueprint, stage: int, slots: list[str]) -> Layout:
    """What a stage owns: `:name` for parameters, `slot:name` for the optimizer's state."""
    plan = blueprint.plan
    owned = [name for name in blueprint.parameters[stage] if blueprint.owner[name] == stage]
    entries = [(f":{name}", plan.dtypes[name], plan.shapes[name]) for name in owned]
    for slot in slots:
        entries += [
            (f"{slot}:{name}", np.dtype(np.float32), plan.shapes[name])
            for name in owned
            if name in plan.trainable
        ]
    return layout_of([e[0] for e in entries], [e[1] for e in entries], [e[2] for e in entries])


def _flatten(data: CheckpointData) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for name, value in data.parameters().items():
        if not isinstance(value, NominalTensor):
            found[f":{name}"] = value
    for group in data.optimizer[:1]:
        for name, state in group.slots.items():
            found.update({f"{slot}:{name}": array for slot, array in state.items()})
    return found


def _slot_names(data: CheckpointData) -> list[str]:
    names: dict[str, None] = {}
    for group in data.optimizer[:1]:
        for state in group.slots.values():
            names.update(dict.fromkeys(state))
    return list(names)
