"""Exports a torch module to ONNX, for training or inference, and generates training artifacts.

In this order: run the module to find names and dynamic axes, export it, finish the graph, compare both at sizes that
were not traced, then write.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, get_args

import onnx
import torch

from onward import contract
from onward.contract import EXPORT_OPSET
from onward.errors import ExportError, ModelError, ParityError
from onward.export import parity
from onward.export.torch import assemble, modules
from onward.export.torch.check_gradient import check_gradient
from onward.export.torch.check_outputs import compare_with_torch, groups_that_follow
from onward.export.torch.flatten import Adapter, bind_arguments
from onward.export.torch.probe import Plan, make_plan

if TYPE_CHECKING:
    from onward.export.torch.axes import DynamicAxes

__all__ = ["artifacts_from_torch", "from_torch"]

Exporter = Literal["auto", "torchscript", "dynamo"]
Check = Literal["outputs", "gradient"]


def from_torch(
    model: torch.nn.Module,
    args: Any = (),
    path: str | os.PathLike[str] | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    training: bool | torch.onnx.TrainingMode = True,
    opset: int = EXPORT_OPSET,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    dynamic_axes: DynamicAxes | Literal["auto"] | None = "auto",
    exporter: Exporter = "auto",
    check: bool | Check = True,
    rtol: float = 1e-5,
    atol: float = 1e-6,
    external_data: bool | Literal["auto"] = "auto",
    opset_version: int | None = None,
    **exporter_options: Any,
) -> onnx.ModelProto | Path:
    """Export a module in training or inference mode; return the model, or the path if one is given.

    In training mode every parameter is an initializer under its own name, dropout is active, batch norm uses
    batch statistics, and `metadata_props` say which parameters the module trains (`onward.requires_grad`),
    which it does not (`onward.frozen_params`) and which buffers are running statistics (`onward.buffers`).
    The module is not changed. Weights over 2 GB, or with `external_data=True`, go to `<path>.data`.

    With `check`, outputs are compared with torch's on fresh inputs at other sizes, without dropout, and for
    training (`check="gradient"`) one backward pass with torch autograd; `ParityError` shows what differs, and
    nothing is written. `check="outputs"` skips gradients. `detach`, `no_grad`, `padding_idx` and straight-through
    functions are kept: gradients stop in the exported model where they stop in the module. `opset` is 7 to 22; where
    the tracer has no form for an old one, a newer export is converted, and what cannot be is named.

    >>> import torch
    >>> proto = from_torch(torch.nn.Linear(4, 2), torch.randn(3, 4))
    >>> [tensor.name for tensor in proto.graph.initializer]
    ['weight', 'bias']
    """
    training = _accept_torchs_keywords(training, exporter_options)
    opset = opset if opset_version is None else opset_version
    _check_exporter(exporter, opset)
    level = _check_level(check, training=training)
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    target = None if path is None else assemble.checkable_target(path)
    bare = modules.unwrap(model)
    modules.refuse_unusable(bare, training=training)
    positional, keywords = bind_arguments(bare, args, kwargs)
    external_data_needed = _weights_outside(bare, target, external_data)
    said: list[str] = []
    with _quiet() as heard, modules.borrowed(bare), modules.prepared(bare, training=training):
        # Only the initial values count: running the module moves batch norm's statistics.
        original = {
            name: buffer.detach().clone() for name, buffer in bare.named_buffers(remove_duplicate=False)
        }
        values = dict(bare.named_parameters(remove_duplicate=False)) | original
        plan = make_plan(bare, positional, keywords, input_names, output_names, dynamic_axes)
        changed = modules.changed_buffers(bare, original) if training else []
        said += [
            f"{type(bare).__name__} decides by the data {place}: the export always takes the branch that the "
            "example arguments took"
            for place in plan.decisions
        ]

        def attempt(chosen: Exporter, traced: int = opset) -> _Exported:
            return _export(
                plan,
                values,
                exporter=chosen,
                opset=opset,
                traced=traced,
                training=training,
                fold=not training and chosen == "torchscript" and not external_data_needed,
                auto_axes=dynamic_axes == "auto",
                level=level,
                tolerances=(rtol, atol),
                heard=heard,
            )

        if exporter != "auto":
            made = attempt(exporter)
        else:
            made, note = _first_that_works(attempt, opset)
            said += note
        properties = _properties(
            bare, made.plan.names, list(made.weights), training=training, exporter=made.exporter
        )
    moving = [made.plan.names[raw] for raw in changed if made.plan.names[raw] in made.weights]
    if moving:
        said.append(
            f"{type(bare).__name__} changes its buffers {', '.join(moving)} in forward: the exported model reads "
            "them, but every step starts from the values of now. Only running statistics of batch norm move along"
        )
    fixed = [group.name for group in plan.groups if group not in made.plan.groups]
    if fixed:
        said.append(
            f"the export fixes {', '.join(fixed)} at the example's size: the module takes others, "
            "but what it does with them cannot be exported for any size"
        )
    if made.not_compared is not None:
        said.append(f"the gradient was not compared with torch's: {made.not_compared}")
    for line in said:
        warnings.warn(line, stacklevel=2)
    assemble.record(made.proto, properties)
    if target is None:
        assemble.attach(made.proto, made.weights)
        return made.proto
    assemble.save(made.proto, made.weights, target, external=external_data_needed)
    return target


def _first_that_works(attempt: Callable[..., _Exported], opset: int) -> tuple[_Exported, list[str]]:
    """The tracer at this opset, or at a newer one from which the graph is converted, or torch.export."""
    newer = max(opset, EXPORT_OPSET)
    reason: Exception | None = None
    conversion = ""
    for exporter, traced, through in (
        ("torchscript", opset, ""),
        ("torchscript", newer, f"exported at opset {newer} and converted"),
        ("dynamo", newer, "exported through torch.export"),
    ):
        if reason is not None and (
            traced not in _opsets(exporter) or (exporter, traced) == ("torchscript", opset)
        ):
            continue
        try:
            made = attempt(exporter, traced)
        except (ExportError, ParityError) as error:
            reason = reason or error
        except ModelError as error:  # what the opset asked for lacks
            conversion = conversion or f"\nA newer export cannot be converted either: {error}"
        except Exception:
            if reason is None:
                raise
        else:
            why = "" if reason is None else str(reason).splitlines()[0]
            return made, [f"{through}, because the tracer cannot: {why}"] if through else []
    assert reason is not None
    # what the first one said is nearer to what users write
    raise (type(reason)(f"{reason}{conversion}") if conversion else reason) from None


@dataclass(frozen=True)
class _Exported:
    """A graph, its weights, what is left of the plan, and why its gradient was not compared, if it was not."""

    proto: onnx.ModelProto
    weights: dict[str, torch.Tensor]
    plan: Plan
    exporter: Exporter
    not_compared: str | None


def _export(
    plan: Plan,
    values: Mapping[str, torch.Tensor],
    *,
    exporter: Exporter,
    opset: int,
    traced: int,
    training: bool,
    fold: bool,
    auto_axes: bool,
    level: str | None,
    tolerances: tuple[float, float],
    heard: _Heard,
) -> _Exported:
    """Export with one of torch's exporters and check the result; axes that do not follow become fixed."""
    trace = _tracer(exporter, fold=fold)
    rtol, atol = tolerances

    def export(plan: Plan) -> tuple[onnx.ModelProto, dict[str, torch.Tensor]]:
        proto, used = _graph(trace, plan, opset=traced, training=training)
        by_clean = {clean: values[raw] for raw, clean in plan.names.items()}
        weights = {name: by_clean[name] for name in used}
        return (proto if traced == opset else assemble.converted(proto, weights, opset)), weights

    try:
        proto, weights = export(plan)
    except ExportError:
        # Some operators take one size only (pooling to a grid, say): the batch may still be free.
        if not auto_axes or not plan.groups:
            raise
        plan, proto, weights = _with_fewer_axes(plan, export)
    not_compared = None
    if level:
        report = compare_with_torch(plan, proto, weights, rtol=rtol, atol=atol)
        if not report.passed and auto_axes and plan.groups:
            follow = groups_that_follow(plan, proto, weights, rtol=rtol, atol=atol)
            plan = plan.keeping(follow)
            proto, weights = export(plan)
            report = compare_with_torch(plan, proto, weights, rtol=rtol, atol=atol)
        subject = f"{type(plan.adapter.model).__name__} at opset {opset} ({exporter})"
        notes = (*heard, *(f"it decides by the data {place}" for place in plan.decisions))
        parity.merge(report, notes=notes).raise_if_failed(subject)
        if level == "gradient":
            not_compared = check_gradient(plan, proto, weights, subject=subject)
    if training:
        _require_dropout(plan, proto, opset)
    return _Exported(proto, weights, plan, exporter, not_compared)


def _with_fewer_axes(
    plan: Plan, export: Callable[[Plan], tuple[onnx.ModelProto, dict[str, torch.Tensor]]]
) -> tuple[Plan, onnx.ModelProto, dict[str, torch.Tensor]]:
    """The batch alone free, or all but the batch (kernels made from the input, say), or none."""
    batch = [group for group in plan.groups if group.name == "batch"]
    others = [group for group in plan.groups if group.name != "batch"]
    reason: ExportError | None = None
    for groups in [batch, others, []] if batch and others else [[]]:
        try:
            narrower = plan.keeping(groups)
            return narrower, *export(narrower)
        except ExportError as error:
            reason = reason or error
    assert reason is not None
    raise reason


def _accept_torchs_keywords(training: bool | torch.onnx.TrainingMode, options: Mapping[str, Any]) -> bool:
    """The keywords of `torch.onnx.export`'s training call, which mean what is done here in any case."""
    if isinstance(training, torch.onnx.TrainingMode):
        if training is torch.onnx.TrainingMode.PRESERVE:
            raise ValueError(
                "training=TrainingMode.PRESERVE: say True (as it trains) or False (for inference)"
            )
        training = training is torch.onnx.TrainingMode.TRAINING
    known = {"export_params": True, "keep_initializers_as_inputs": False, "verbose": False, "dynamo": False}
    for name, value in options.items():
        if name == "do_constant_folding":
            if training and value:
                raise ValueError("do_constant_folding=True would rename or remove parameters: leave it out")
        elif name not in known:
            raise TypeError(f"from_torch() got an unexpected keyword argument '{name}'")
        elif value is not None and bool(value) != known[name] and name != "verbose":
            raise ValueError(f"{name}={value!r} is not what from_torch does: leave it out")
    return training


def artifacts_from_torch(
    model: torch.nn.Module,
    args: Any = (),
    *,
    loss: Any,
    optimizer: Any,
    directory: str | os.PathLike[str],
    requires_grad: Sequence[str] | None = None,
    frozen_params: Sequence[str] | None = None,
    artifact_options: Mapping[str, Any] | None = None,
    **export_options: Any,
) -> Path:
    """Export a module in training mode and generate its training artifacts in `directory`; return that.

    Which parameters train follows the module's `requires_grad` unless named here. `export_options` are those
    of `from_torch`; `artifact_options` go to `onward.artifacts.generate_artifacts`.

    >>> import tempfile, torch
    >>> from onward import artifacts
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     folder = artifacts_from_torch(
    ...         torch.nn.Linear(4, 2), torch.randn(3, 4), loss=artifacts.LossType.MSELoss,
    ...         optimizer=artifacts.OptimType.AdamW, directory=directory)
    ...     (folder / "training_model.onnx").exists()
    True
    """
    if not export_options.pop("training", True):
        raise ValueError("artifacts need a model exported for training: leave out training=False")
    from onward import artifacts  # late: exporting alone needs no differentiator

    folder = Path(directory)
    with ExitStack() as stack:
        path = None
        if _weights_outside(modules.unwrap(model), folder, export_options.pop("external_data", "auto")):
            path = Path(stack.enter_context(TemporaryDirectory(prefix="onward-"))) / "forward.onnx"
            export_options["external_data"] = True
        exported = from_torch(model, args, path, training=True, **export_options)
        artifacts.generate_artifacts(
            exported,
            requires_grad=requires_grad,
            frozen_params=frozen_params,
            loss=loss,
            optimizer=optimizer,
            artifact_directory=folder,
            **dict(artifact_options or {}),
        )
    return folder


def _graph(
    export: Callable[..., onnx.ModelProto], plan: Plan, *, opset: int, training: bool
) -> tuple[onnx.ModelProto, list[str]]:
    input_axes = plan.input_axes()
    proto = export(
        plan.adapter,
        [leaf.value for leaf in plan.leaves],
        inputs=input_axes,
        outputs={name: plan.output_axes.get(name, {}) for name in plan.output_names},
        opset=opset,
    )
    used = assemble.take_parameters(proto, list(input_axes), plan.names, prefix=Adapter.PREFIX)
    assemble.mark_stops(proto)
    if training:
        assemble.repair_dropout(proto)
    assemble.set_axes(
        proto,
        {leaf.name: (leaf.value, input_axes[leaf.name]) for leaf in plan.leaves},
        {name: (v, plan.output_axes[name]) for name, v in zip(plan.output_names, plan.outputs)},
    )
    return proto, used


def _properties(
    bare: torch.nn.Module, names: Mapping[str, str], used: Sequence[str], *, training: bool, exporter: str
) -> dict[str, object]:
    origin: dict[str, object] = {contract.EXPORT: {"exporter": exporter, "training": training}}
    if not training:
        return origin
    present = set(used)
    wanted = {names[raw]: p.requires_grad for raw, p in bare.named_parameters() if names[raw] in present}
    statistics = [
        names[f"{path}.{name}" if path else name]
        for path, module in bare.named_modules()
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
        for name in ("running_mean", "running_var")
        if getattr(module, name) is not None
    ]
    return origin | {
        contract.REQUIRES_GRAD: [name for name, trains in wanted.items() if trains],
        contract.FROZEN_PARAMS: [name for name, trains in wanted.items() if not trains],
        contract.BUFFERS: [name for name in statistics if name in present],
    }


def _check_level(check: bool | Check, *, training: bool) -> str | None:
    if check not in (True, False, "outputs", "gradient"):
        raise ValueError(f'check must be True, False, "outputs" or "gradient", not {check!r}')
    if check == "gradient" and not training:
        raise ValueError('check="gradient" is for training: a model for inference has no gradient')
    if isinstance(check, str):
        return check
    return None if not check else ("gradient" if training else "outputs")


def _check_exporter(name: str, opset: int) -> None:
    known = get_args(Exporter)
    if name not in known:
        raise ValueError(f"exporter must be one of {', '.join(known)}, not {name!r}")
    allowed = _opsets("torchscript" if name == "auto" else name)
    if not isinstance(opset, int) or opset not in allowed:
        raise ValueError(f"opset must be {allowed[0]} to {allowed[-1]} for exporter={name!r}, not {opset!r}")


def _opsets(exporter: str) -> range:
    from onward.export.torch import dynamo, torchscript

    return (torchscript if exporter == "torchscript" else dynamo).OPSETS


def _tracer(exporter: str, *, fold: bool) -> Callable[..., onnx.ModelProto]:
    from onward.export.torch import dynamo, torchscript

    return partial(torchscript.trace, fold=fold) if exporter == "torchscript" else dynamo.trace


@contextmanager
def _quiet() -> Iterator[_Heard]:
    """Collect what torch would print: it is of use only where the export fails."""
    loggers = [logging.getLogger(name) for name in ("torch", "torch.onnx", "torch.export", "onnxscript")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield _Heard(caught)
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)


@dataclass(frozen=True)
class _Heard:
    caught: list[warnings.WarningMessage]

    def __iter__(self) -> Iterator[str]:
        """Warnings of the tracer about values that it took for constants, each once."""
        said = [str(w.message).splitlines()[0] for w in self.caught if "TracerWarning" in w.category.__name__]
        return iter(dict.fromkeys(said))


def _require_dropout(plan: Plan, proto: onnx.ModelProto, opset: int) -> None:
    active = assemble.active_dropouts(proto)
    has_bodies = len(list(assemble.graphs(proto.graph))) > 1  # a loop's body stands for many
    if plan.dropouts > active and not has_bodies:
        raise ExportError(
            f"{plan.dropouts} dropouts are active in the module but only {active} in the export: "
            "it would train without them"
            + (". Dropout can be told to drop since opset 12" if opset < 12 else "")
        )


def _weights_outside(model: torch.nn.Module, target: Path | None, choice: bool | Literal["auto"]) -> bool:
    tensors = {str(id(tensor)): tensor for tensor in [*model.parameters(), *model.buffers()]}
    size = assemble.size_of(tensors)
    large = size >= assemble.INLINE_LIMIT
    if choice is False and large:
        raise ExportError(
            f"the model holds {size / 2**30:.1f} GiB, more than one ONNX file can: allow external_data"
        )
    if target is None and (large or choice is True):
        raise ExportError("weights kept outside the model need a file to be beside: give a path")
    return large or choice is True
