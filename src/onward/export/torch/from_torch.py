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
from torch.utils import _pytree as pytree

from onward import contract
from onward.contract import EXPORT_OPSET
from onward.errors import ExportError, ModelError, ParityError
from onward.export import parity
from onward.export.torch import assemble, modules
from onward.export.torch.check_gradient import check_gradient
from onward.export.torch.check_outputs import compare_with_torch, groups_that_follow, record_ranks
from onward.export.torch.flatten import Adapter, bind_arguments, real_parts
from onward.export.torch.float64 import halves_in_float32, is_half
from onward.export.torch.patches import plain_control_flow
from onward.export.torch.probe import Plan, make_plan
from onward.export.torch.tracers import MissingOperator

if TYPE_CHECKING:
    from onward.export.torch.axes import DynamicAxes

Exporter = Literal["auto", "torchscript", "primitives", "dynamo"]
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
    path = _target_of(path, exporter_options)
    training = _accept_torchs_keywords(training, exporter_options)
    opset = opset if opset_version is None else opset_version
    _check_exporter(exporter, opset)
    level = _check_level(check, training=training)
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    target = None if path is None else assemble.checkable_target(path)
    bare = modules.unwrap(model)
    modules.refuse_unusable(bare, training=training)
    arguments = bind_arguments(bare, args, kwargs)
    # before the work: a large model takes minutes until it would be refused
    external = _needs_external_data(bare, target, external_data)
    arguments, notes = _widen_halves(bare, arguments)
    with (
        _collect_warnings() as heard,
        modules.borrowed(bare) as observer,
        halves_in_float32(bare),
        plain_control_flow(),
        modules.prepared(bare, training=training),
    ):
        settings = _Settings(
            opset, training, level, rtol, atol, dynamic_axes == "auto", not training and not external, heard
        )
        plan, values = _read_module(
            bare, arguments, input_names, output_names, dynamic_axes, observer, training=training
        )
        if notes:  # the parameters themselves have 16 bits again when the file is written
            values = {name: tensor.detach() for name, tensor in values.items()}
        exported, more_notes = _export_with(exporter, plan, values, settings)
        properties = _properties(bare, exported, training=training)
    for note in (*notes, *_describe_limits(plan, exported, more_notes)):
        warnings.warn(note, stacklevel=2)
    assemble.record(exported.proto, properties)
    if target is None:
        assemble.attach(exported.proto, exported.weights)
        return exported.proto
    assemble.save(exported.proto, exported.weights, target, external=external)
    return target


@dataclass(frozen=True)
class _Settings:
    """What is asked of an export, whichever exporter does it."""

    opset: int
    training: bool
    level: str | None
    rtol: float
    atol: float
    auto_axes: bool
    may_fold: bool
    heard: _TracerWarnings


def _widen_halves(model: torch.nn.Module, arguments: Any) -> tuple[Any, list[str]]:
    """The arguments in float32 where they have 16 bits, and a note where anything has."""
    tensors = [*model.parameters(), *model.buffers(), *pytree.tree_leaves(arguments)]
    halves = [t for t in tensors if isinstance(t, torch.Tensor) and is_half(t)]
    if not halves:
        return arguments, []
    note = (
        f"{type(model).__name__} holds numbers of 16 bits ({halves[0].dtype}): the exported model holds them, and "
        "computes, in float32, as an optimizer needs it; precision= of generate_artifacts computes in 16 bits"
    )
    return pytree.tree_map_only(torch.Tensor, lambda t: t.float() if is_half(t) else t, arguments), [note]


def _read_module(
    model: torch.nn.Module,
    arguments: tuple[tuple[Any, ...], Mapping[str, Any]],
    input_names: Sequence[str] | None,
    output_names: Sequence[str] | None,
    dynamic_axes: DynamicAxes | Literal["auto"] | None,
    observer: modules.WriteObserver,
    *,
    training: bool,
) -> tuple[Plan, dict[str, torch.Tensor]]:
    """The plan for a module, and its initial parameters and buffers by name."""
    # Only the initial values count: running the module moves batch norm's statistics.
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers(remove_duplicate=False)}
    values = dict(model.named_parameters(remove_duplicate=False)) | buffers
    plan = make_plan(
        model,
        *arguments,
        input_names,
        output_names,
        dynamic_axes,
        observer=observer,
        buffers=buffers if training else None,
    )
    return plan, values | observer.before


def _describe_limits(plan: Plan, exported: _Exported, notes: list[str]) -> Iterator[str]:
    """What the exported model does not do as the module does, to warn of."""
    for location in exported.decisions:
        yield (
            f"{type(plan.adapter.model).__name__} decides by the data {location}: the export always takes the branch "
            "that the example arguments took"
        )
    yield from notes
    fixed = [group.name for group in plan.groups if group not in exported.plan.groups]
    if fixed:
        yield (
            f"the export fixes {', '.join(fixed)} at the example's size: the module takes others, "
            "but what it does with them cannot be exported for any size"
        )
    if exported.not_compared is not None:
        yield f"the gradient was not compared with torch's: {exported.not_compared}"


def _export_with(
    exporter: Exporter, plan: Plan, values: Mapping[str, torch.Tensor], settings: _Settings
) -> tuple[_Exported, list[str]]:
    """The export by one exporter, or by the first that can, and what there is to say of that.

    The tracer at this opset, or a newer one from which the graph is converted; primitive operators; torch.export.
    """
    if exporter != "auto":
        return _export(plan, values, settings, exporter=exporter, traced=settings.opset), []
    # Newer opsets have more operators; what is converted down loses only those.
    newer = max(settings.opset, EXPORT_OPSET)
    reason: Exception | None = None
    notes: list[str] = []
    attempts: tuple[tuple[Exporter, int, str], ...] = (
        ("torchscript", settings.opset, ""),
        ("torchscript", newer, f"exported at opset {newer} and converted"),
        ("primitives", newer, "exported through torch's primitive operators"),
        ("dynamo", newer, "exported through torch.export"),
    )
    for name, traced, through in attempts:
        if reason is not None and (
            traced not in _opsets(name) or (name, traced) == ("torchscript", settings.opset)
        ):
            continue
        try:
            exported = _export(plan, values, settings, exporter=name, traced=traced)
        except (ExportError, ParityError) as error:
            if reason is not None:
                notes.append(f"{through.capitalize()}: {str(error).splitlines()[0]}")
            reason = reason or error
            if isinstance(error, MissingOperator) and name == "primitives":
                from onward.export.torch.tracers import has_form

                if not has_form(error.operator):
                    break  # torch.export would take a minute to say so
        except ModelError as error:  # what the opset asked for lacks
            notes.append(f"A newer export cannot be converted either: {error}")
        except Exception:
            if reason is None:
                raise
        else:
            why = "" if reason is None else str(reason).splitlines()[0]
            return exported, [f"{through}, because the tracer cannot: {why}"] if through else []
    assert reason is not None
    if isinstance(reason, MissingOperator) and (line := plan.line_that_calls(reason.operator)):
        notes.insert(0, f"It is called {line}. Compute it outside the model, or with operators that ONNX has")
    # what the first one said is nearer to what users write
    raise type(reason)("\n".join([str(reason), *dict.fromkeys(notes)])) from None


@dataclass(frozen=True)
class _Exported:
    """A graph, its weights, what is left of the plan, and why its gradient was not compared, if it was not.

    `decisions` are the lines whose branch the trace took once and for all.
    """

    proto: onnx.ModelProto
    weights: dict[str, torch.Tensor]
    plan: Plan
    exporter: Exporter
    not_compared: str | None
    decisions: tuple[str, ...]


def _export(
    plan: Plan, values: Mapping[str, torch.Tensor], settings: _Settings, *, exporter: Exporter, traced: int
) -> _Exported:
    """Export with one of torch's exporters and check the result; axes that do not follow become fixed."""
    trace = _tracer(exporter, fold=settings.may_fold and exporter == "torchscript")
    opset, rtol, atol = settings.opset, settings.rtol, settings.atol

    def export(plan: Plan) -> tuple[onnx.ModelProto, dict[str, torch.Tensor]]:
        proto, used = _graph(trace, plan, opset=traced, training=settings.training)
        by_clean = {clean: real_parts(values[raw]) for raw, clean in plan.names.items()}
        weights = {name: by_clean[name] for name in used}
        _keep_state(proto, plan, weights)
        if traced != opset:
            proto = assemble.converted(proto, weights, opset)
        if settings.training:
            record_ranks(plan, proto, weights)
        return proto, weights

    try:
        proto, weights = export(plan)
    except ExportError:
        # Some operators take one size only (pooling to a grid, say): the batch may still be free.
        if not settings.auto_axes or not plan.groups:
            raise
        plan, proto, weights = _export_with_fewer_axes(plan, export)
    not_compared = None
    # Libraries that know of tracing decide by data in ordinary runs only, as transformers does to leave out masks.
    decisions = (
        tuple(filter(settings.heard.took_branch, plan.decisions))
        if exporter == "torchscript"
        else plan.decisions
    )
    if settings.level:
        report = compare_with_torch(plan, proto, weights, rtol=rtol, atol=atol)
        if not report.passed and settings.auto_axes and plan.groups:
            # Only now, as it costs a comparison for each axis: most exports follow at all sizes.
            follow = groups_that_follow(plan, proto, weights, rtol=rtol, atol=atol)
            plan = plan.keeping(follow)
            proto, weights = export(plan)
            report = compare_with_torch(plan, proto, weights, rtol=rtol, atol=atol)
        subject = f"{type(plan.adapter.model).__name__} at opset {opset} ({exporter})"
        notes = (*settings.heard, *(f"it decides by the data {location}" for location in decisions))
        parity.merge(report, notes=notes).raise_if_failed(subject)
        if settings.level == "gradient":
            not_compared = check_gradient(plan, proto, weights, subject=subject)
    if settings.training:
        _require_dropout(plan, proto, opset)
    return _Exported(proto, weights, plan, exporter, not_compared, decisions)


def _keep_state(proto: onnx.ModelProto, plan: Plan, weights: Mapping[str, torch.Tensor]) -> None:
    """Leave out the next values of buffers that no later step reads."""
    # A counter that nothing reads (num_batches_tracked) would be an input and an output of every step.
    unread = {following for name, following in plan.state.items() if name not in weights}
    for output in [value for value in proto.graph.output if value.name in unread]:
        proto.graph.output.remove(output)


def _export_with_fewer_axes(
    plan: Plan, export: Callable[[Plan], tuple[onnx.ModelProto, dict[str, torch.Tensor]]]
) -> tuple[Plan, onnx.ModelProto, dict[str, torch.Tensor]]:
    """The batch alone free, or all but the batch (kernels made from the input, say), or none."""
    # The batch is what training needs to vary most.
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


def _target_of(path: str | os.PathLike[str] | None, options: dict[str, Any]) -> str | os.PathLike[str] | None:
    """The path, which `torch.onnx.export` calls f."""
    if "f" not in options:
        return path
    if path is not None:
        raise TypeError("from_torch() got both a path and f, which are the same: give one")
    target = options.pop("f")
    if not isinstance(target, str | os.PathLike | None):
        raise TypeError(
            f"f must be a path, not {type(target).__name__}: from_torch() without it returns the model"
        )
    return target


# What to say about keywords of `torch.onnx.export` that mean nothing here.
_ELSEWHERE = {
    "dynamic_shapes": 'axes are named with dynamic_axes={"x": {0: "batch"}}, and found without it',
    "dynamo": 'the exporter is chosen by exporter="dynamo", and by itself without it',
}


def _accept_torchs_keywords(training: bool | torch.onnx.TrainingMode, options: Mapping[str, Any]) -> bool:
    """The keywords of `torch.onnx.export`'s training call, which mean what is done here in any case."""
    if isinstance(training, torch.onnx.TrainingMode):
        if training is torch.onnx.TrainingMode.PRESERVE:
            raise ValueError(
                "training=TrainingMode.PRESERVE: say True (as it trains) or False (for inference)"
            )
        training = training is torch.onnx.TrainingMode.TRAINING
    fixed_options = {
        "export_params": True,
        "keep_initializers_as_inputs": False,
        "verbose": False,
        "dynamo": False,
    }
    for name, value in options.items():
        if name == "do_constant_folding":
            if training and value:
                raise ValueError("do_constant_folding=True would rename or remove parameters: leave it out")
        elif name in _ELSEWHERE and value not in (None, fixed_options.get(name)):
            raise ValueError(f"{name}={value!r}: from_torch does not take it; {_ELSEWHERE[name]}")
        elif name in _ELSEWHERE:
            continue
        elif name not in fixed_options:
            raise TypeError(f"from_torch() got an unexpected keyword argument '{name}'")
        elif value is not None and bool(value) != fixed_options[name] and name != "verbose":
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
        if _needs_external_data(modules.unwrap(model), folder, export_options.pop("external_data", "auto")):
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
    del proto.graph.value_info[:]  # inferred at the exporter's sizes, under names of its own
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


def _properties(bare: torch.nn.Module, exported: _Exported, *, training: bool) -> dict[str, object]:
    plan, names, present = exported.plan, exported.plan.names, exported.weights.keys()
    origin: dict[str, object] = {contract.EXPORT: {"exporter": exported.exporter, "training": training}}
    if not training:
        return origin
    trains_by_name = {
        names[raw]: p.requires_grad for raw, p in bare.named_parameters() if names[raw] in present
    }
    statistics = [
        names[f"{path}.{name}" if path else name]
        for path, module in bare.named_modules()
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
        for name in ("running_mean", "running_var")
        if getattr(module, name) is not None
    ]
    return origin | {
        contract.REQUIRES_GRAD: [name for name, trains in trains_by_name.items() if trains],
        contract.FROZEN_PARAMS: [name for name, trains in trains_by_name.items() if not trains],
        contract.BUFFERS: [name for name in dict.fromkeys([*statistics, *plan.state]) if name in present],
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
    exporters = get_args(Exporter)
    if name not in exporters:
        raise ValueError(f"exporter must be one of {', '.join(exporters)}, not {name!r}")
    allowed = _opsets("torchscript" if name == "auto" else name)
    if not isinstance(opset, int) or opset not in allowed:
        raise ValueError(f"opset must be {allowed[0]} to {allowed[-1]} for exporter={name!r}, not {opset!r}")


def _opsets(exporter: str) -> range:
    from onward.export.torch import primitives, tracers

    return primitives.OPSETS if exporter == "primitives" else tracers.OPSETS[exporter]


def _tracer(exporter: str, *, fold: bool) -> Callable[..., onnx.ModelProto]:
    from onward.export.torch import primitives, tracers

    if exporter == "torchscript":
        return partial(tracers.trace_torchscript, fold=fold)
    return primitives.trace if exporter == "primitives" else tracers.trace_dynamo


@contextmanager
def _collect_warnings() -> Iterator[_TracerWarnings]:
    """Collect what torch would print: it is of use only where the export fails."""
    # They log by themselves at several levels, whatever the filter of warnings says.
    loggers = [logging.getLogger(name) for name in ("torch", "torch.onnx", "torch.export", "onnxscript")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield _TracerWarnings(caught)
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)


@dataclass(frozen=True)
class _TracerWarnings:
    caught: list[warnings.WarningMessage]

    def __iter__(self) -> Iterator[str]:
        """Warnings of the tracer about values that it took for constants, each once."""
        said = [str(w.message).splitlines()[0] for w in self.caught if "TracerWarning" in w.category.__name__]
        return iter(dict.fromkeys(said))

    def took_branch(self, location: str) -> bool:
        """Whether the tracer itself asked a tensor for a truth value at a line, as `calling_line` says it."""
        return any(
            "Python boolean" in str(w.message) and location.startswith(f"at {w.filename}:{w.lineno} ")
            for w in self.caught
        )


def _require_dropout(plan: Plan, proto: onnx.ModelProto, opset: int) -> None:
    active = assemble.active_dropouts(proto)
    # Counting nodes is enough otherwise: the tracer unrolls, so that each call of a dropout is a node.
    has_bodies = len(list(assemble.graphs(proto.graph))) > 1  # a loop's body stands for many
    if plan.dropouts > active and not has_bodies:
        raise ExportError(
            f"{plan.dropouts} dropouts are active in the module but only {active} in the export: "
            "it would train without them"
            + (". Dropout can be told to drop since opset 12" if opset < 12 else "")
        )


def _needs_external_data(model: torch.nn.Module, target: Path | None, choice: bool | Literal["auto"]) -> bool:
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
