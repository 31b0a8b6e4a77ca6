"""Runs optimizer models of any form: elementwise, by parameter, or custom ones over sequences.

`make_updater` chooses: `host` on the host, `device` on a device, `named` for rules that see whole parameters.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import onnx

from onward import contract
from onward.errors import MAKE_ARTIFACTS, ModelError
from onward.model_metadata import read_table
from onward.runtime.optimizers.device import DeviceUpdater
from onward.runtime.optimizers.host import HostUpdater
from onward.runtime.optimizers.named import NamedUpdater, SequenceUpdater
from onward.runtime.optimizers.updater import ElementwiseUpdater, Slots, Updater, group_of
from onward.runtime.sessions import ModelFile, read_model, require_one_set

if TYPE_CHECKING:
    from onward.runtime.memory import FlatBuffer

__all__ = ["ElementwiseUpdater", "Slots", "Updater", "make_updater", "wanted_order"]


def make_updater(
    source: ModelFile,
    parameters: FlatBuffer,
    gradients: FlatBuffer,
    *,
    threads: int | None = None,
    artifacts_id: str = "",
) -> Updater:
    """The updater that fits the model's form and the memory; as many threads as the machine has, up to eight.

    `artifacts_id` is that of the training model: an optimizer model of other artifacts is refused.
    """
    model, options = _read(source)
    about = {entry.key: entry.value for entry in model.metadata_props}
    require_one_set("optimizer", about.get(contract.ARTIFACTS, ""), artifacts_id)
    try:
        return _make_updater(model, options, parameters, gradients, threads)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ModelError(
            f"the optimizer model does not fit what its metadata says ({type(error).__name__}: {error}); "
            "make the artifacts again",
            hint=MAKE_ARTIFACTS,
        ) from error


def _make_updater(
    model: onnx.ModelProto, options: dict, parameters: FlatBuffer, gradients: FlatBuffer, threads: int | None
) -> Updater:
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
    if contract.OPTIMIZER not in about and {"params", "gradients"} <= {i.name for i in model.graph.input}:
        return model, {"name": model.graph.name, "sequences": True}  # as `onnxblock.optim` builds it
    if contract.OPTIMIZER not in about:
        raise ModelError(
            "this is not an optimizer model of Onward: make it with onward.artifacts", hint=MAKE_ARTIFACTS
        )
    return model, read_table(about, contract.OPTIMIZER)


def _threads() -> int:
    count = getattr(os, "process_cpu_count", os.cpu_count)() or 1
    return min(count, 8)
