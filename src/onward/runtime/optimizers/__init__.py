"""Runs an optimizer model in whichever of its forms: elementwise, by parameter, or a user's own over sequences.

`make_updater` chooses: `flat` on the host, `device` on a device, `named` for rules that see whole parameters.
"""

from __future__ import annotations

import json
import os

import onnx

from onward.errors import ModelError
from onward.runtime.memory import FlatBuffer
from onward.runtime.optimizers.base import Slots, Updater
from onward.runtime.optimizers.device import DeviceUpdater
from onward.runtime.optimizers.flat import ElementwiseUpdater, HostUpdater, group_of
from onward.runtime.optimizers.named import NamedUpdater, SequenceUpdater
from onward.runtime.sessions import ModelFile, read_model

__all__ = ["ElementwiseUpdater", "Slots", "Updater", "make_updater", "wanted_order"]


def make_updater(
    source: ModelFile, parameters: FlatBuffer, gradients: FlatBuffer, *, threads: int | None = None
) -> Updater:
    """The updater that fits the model's form and the memory; as many threads as the machine has, up to eight."""
    model, options = _read(source)
    if options.get("sequences"):
        return SequenceUpdater(model, parameters, gradients)
    if options["elementwise"]:
        if not parameters.on_host:
            return DeviceUpdater(model, options, parameters, gradients)
        return HostUpdater(model, options, parameters, gradients, threads=threads or _threads())
    return NamedUpdater(model, options, parameters, gradients)


def wanted_order(source: ModelFile, parameters: FlatBuffer) -> list[str]:
    """An order of the parameters in which those of the same settings lie together."""
    _, options = _read(source)
    place = group_of(options) if options.get("elementwise") else {}
    return sorted(parameters.spans, key=lambda name: place.get(name, 0))


def _read(source: ModelFile) -> tuple[onnx.ModelProto, dict]:
    model = read_model(source, "optimizer")
    about = {entry.key: entry.value for entry in model.metadata_props}
    if "onward.optimizer" not in about and {"params", "gradients"} <= {i.name for i in model.graph.input}:
        return model, {"name": model.graph.name, "sequences": True}  # as `onnxblock.optim` builds it
    if "onward.optimizer" not in about:
        raise ModelError("this is not an optimizer model of Onward: make it with onward.artifacts")
    return model, json.loads(about["onward.optimizer"])


def _threads() -> int:
    count = getattr(os, "process_cpu_count", os.cpu_count)() or 1
    return min(count, 8)
