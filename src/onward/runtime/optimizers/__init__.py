"""Runs optimizer models of any form: elementwise, by parameter, or custom ones over sequences.

`make_updater` chooses: `vector` for elementwise rules, on the host or a device; `updater` has those for rules that see
whole parameters and for a device whose memory has no address.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from onward import contract
from onward.errors import MAKE_ARTIFACTS, ModelError
from onward.model_metadata import read_table
from onward.runtime.environment import processors
from onward.runtime.optimizers.updater import (
    ElementwiseUpdater,
    NamedUpdater,
    ResidentUpdater,
    Rule,
    SequenceUpdater,
    Slots,
    Updater,
    group_of,
)
from onward.runtime.optimizers.vector import DeviceUpdater, HostUpdater
from onward.runtime.sessions import ModelFile, read_model, require_one_set

if TYPE_CHECKING:
    from onward.runtime.memory import FlatBuffer

__all__ = ["ElementwiseUpdater", "Slots", "Updater", "group_order", "make_updater"]


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
    rule = _read(source)
    about = {entry.key: entry.value for entry in rule.model.metadata_props}
    require_one_set("optimizer", about.get(contract.ARTIFACTS, ""), artifacts_id)
    try:
        return _make_updater(rule, parameters, gradients, threads)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ModelError(
            f"the optimizer model does not fit what its metadata says ({type(error).__name__}: {error}); "
            "make the artifacts again",
            hint=MAKE_ARTIFACTS,
        ) from error


def _make_updater(rule: Rule, parameters: FlatBuffer, gradients: FlatBuffer, threads: int | None) -> Updater:
    if rule.options.get("sequences"):
        return SequenceUpdater(rule.model, parameters, gradients)
    report = None
    if parameters.device.memory == "resident":
        # graphs in ONNX's textual syntax: only where they are needed
        from onward.runtime.device_check import check_device

        report = check_device(parameters.device)
    if rule.options["elementwise"]:
        if report is not None:
            return ResidentUpdater(rule, parameters, gradients, report)
        if not parameters.on_host:
            return DeviceUpdater(rule, parameters, gradients)
        return HostUpdater(rule, parameters, gradients, threads=threads or min(processors(), 8))
    if report is not None:
        report.fit(rule.model, parameters.device, "optimizer model")
    return NamedUpdater(rule, parameters, gradients)


def group_order(source: ModelFile, parameters: FlatBuffer) -> list[str]:
    """An order of the parameters in which those of the same settings lie together."""
    options = _read(source).options
    groups = group_of(options) if options.get("elementwise") else {}
    return sorted(parameters.spans, key=lambda name: groups.get(name, 0))


def _read(source: ModelFile) -> Rule:
    model = read_model(source, "optimizer")
    about = {entry.key: entry.value for entry in model.metadata_props}
    if contract.OPTIMIZER not in about and {"params", "gradients"} <= {i.name for i in model.graph.input}:
        return Rule(model, {"name": model.graph.name, "sequences": True})  # as `onnxblock.optim` builds it
    if contract.OPTIMIZER not in about:
        raise ModelError(
            "this is not an optimizer model of Onward: make it with onward.artifacts", hint=MAKE_ARTIFACTS
        )
    return Rule(model, read_table(about, contract.OPTIMIZER))
