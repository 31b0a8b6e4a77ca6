"""From a torch module to an ONNX model, for training or inference, and from there to training artifacts.

The order of things: run the module to learn names and dynamic axes, export it, finish the graph, compare both
at sizes that the export has not seen, and only then write.
"""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import onnx
import torch

from onward.errors import ExportError
from onward.export import assemble, axes, modules, parity
from onward.export.axes import AxisGroup, DynamicAxes
from onward.export.structure import Adapter, Leaf, bind_arguments

__all__ = ["artifacts_from_torch", "from_torch"]

Exporter = Literal["torchscript", "dynamo"]


def from_torch(
    model: torch.nn.Module,
    args: Any = (),
    path: str | os.PathLike[str] | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    training: bool = True,
    opset: int = 18,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    dynamic_axes: DynamicAxes | Literal["auto"] | None = "auto",
    exporter: Exporter = "torchscript",
    check: bool = True,
    rtol: float = 1e-5,
    atol: float = 1e-6,
    external_data: bool | Literal["auto"] = "auto",
) -> onnx.ModelProto | Path:
    """Export a module as it trains, or for inference; return the model, or the path if one is given.

    In training mode every parameter is an initializer under its own name, dropout drops, batch norm uses
    batch statistics, and `metadata_props` say which parameters the module trains (`onward.requires_grad`),
    which it does not (`onward.frozen_params`) and which buffers are running statistics (`onward.buffers`).
    The module is given back as it was. Weights over 2 GB, or with `external_data=True`, go to `<path>.data`.

    With `check`, outputs are compared with torch's on fresh inputs at other sizes, dropout neutralised;
    `ParityError` shows what differs, and nothing is written.

    >>> import torch
    >>> proto = from_torch(torch.nn.Linear(4, 2), torch.randn(3, 4))
    >>> [tensor.name for tensor in proto.graph.initializer]
    ['weight', 'bias']
    """
    export = _exporter(exporter, opset)
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    target = None if path is None else assemble.checkable_target(path)
    bare = modules.unwrap(model)
    modules.refuse_unusable(bare, training=training)
    positional, keywords = bind_arguments(bare, args, kwargs)
    with _quiet() as heard, modules.borrowed(bare), modules.prepared(bare, training=training):
        # Only the initial values count: running the module moves batch norm's statistics.
        original = {
            name: buffer.detach().clone() for name, buffer in bare.named_buffers(remove_duplicate=False)
        }
        plan = _plan(bare, positional, keywords, input_names, output_names, dynamic_axes)
        fold = not training and exporter == "torchscript" and _size(bare) < assemble.INLINE_LIMIT
        proto, used = _graph(export, plan, opset=opset, fold=fold, training=training)
        values = dict(bare.named_parameters(remove_duplicate=False)) | original
        by_clean = {clean: values[raw] for raw, clean in plan.names.items()}
        weights = {name: by_clean[name] for name in used}
        if training and plan.dropouts > assemble.active_dropouts(proto) and not _has_bodies(proto):
            raise ExportError(
                f"{plan.dropouts} dropouts are active in the module but only "
                f"{assemble.active_dropouts(proto)} in the export: it would train without them"
            )
        if check:
            report = _compare(plan, proto, weights, rtol=rtol, atol=atol)
            subject = f"{type(bare).__name__} at opset {opset} ({exporter})"
            parity.merge(report, notes=tuple(heard)).raise_if_failed(subject)
    assemble.record(proto, _properties(bare, plan.names, used, training=training, exporter=exporter))
    large = assemble.size_of(weights) >= assemble.INLINE_LIMIT
    if target is None:
        if large or external_data is True:
            raise ExportError("weights kept outside the model need a file to be beside: give a path")
        assemble.attach(proto, weights)
        return proto
    assemble.save(proto, weights, target, external=large or external_data is True)
    return target


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
    >>> folder = artifacts_from_torch(                                               # doctest: +SKIP
    ...     torch.nn.Linear(4, 2), torch.randn(3, 4), loss=artifacts.LossType.MSELoss,
    ...     optimizer=artifacts.OptimType.AdamW, directory=tempfile.mkdtemp())
    """
    if not export_options.pop("training", True):
        raise ValueError("artifacts need a model exported for training: leave out training=False")
    from onward import artifacts  # late: exporting alone needs no differentiator

    proto = cast(onnx.ModelProto, from_torch(model, args, training=True, **export_options))
    recorded = {prop.key: prop.value for prop in proto.metadata_props}
    trainable = requires_grad if requires_grad is not None else _json_list(recorded["onward.requires_grad"])
    frozen = frozen_params if frozen_params is not None else _json_list(recorded["onward.frozen_params"])
    chosen = set(trainable)
    artifacts.generate_artifacts(  # type: ignore[attr-defined]
        proto,
        requires_grad=list(trainable),
        frozen_params=[name for name in frozen if name not in chosen],
        loss=loss,
        optimizer=optimizer,
        artifact_directory=directory,
        **dict(artifact_options or {}),
    )
    return Path(directory)


@dataclass(frozen=True)
class _Plan:
    """What is known of the module before it is exported."""

    adapter: Adapter
    leaves: tuple[Leaf, ...]
    groups: tuple[AxisGroup, ...]
    output_names: tuple[str, ...]
    outputs: tuple[torch.Tensor, ...]
    output_axes: Mapping[str, Mapping[int, str]]
    names: Mapping[str, str]
    dropouts: int

    def run(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The module's outputs without randomness."""
        with modules.neutral_dropout(self.adapter.model):
            return self.adapter(*tensors)

    def input_axes(self) -> dict[str, dict[int, str]]:
        table: dict[str, dict[int, str]] = {leaf.name: {} for leaf in self.leaves}
        for group in self.groups:
            for index, axis in group.dims:
                table[self.leaves[index].name][axis] = group.name
        return table


def _plan(
    bare: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    input_names: Sequence[str] | None,
    output_names: Sequence[str] | None,
    dynamic_axes: DynamicAxes | Literal["auto"] | None,
) -> _Plan:
    adapter = Adapter(bare, args, kwargs)
    names = modules.clean_names(bare)
    inputs = _chosen_names("input", input_names, [leaf.name for leaf in adapter.inputs])
    inputs = [f"{name}_input" if name in names.values() else name for name in inputs]
    leaves = tuple(Leaf(name, leaf.value) for name, leaf in zip(inputs, adapter.inputs))
    if dynamic_axes is not None and dynamic_axes != "auto" and not isinstance(dynamic_axes, Mapping):
        raise TypeError(f'dynamic_axes must be "auto", a dictionary or None, not {dynamic_axes!r}')

    def run(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        with modules.neutral_dropout(bare):
            return adapter(*tensors)

    leaves = _usable_example(leaves, run, type(bare).__name__, resize=dynamic_axes is not None)
    declared = dynamic_axes if isinstance(dynamic_axes, Mapping) else None
    groups = _groups(leaves, dynamic_axes, run)
    ones = {dim: group.others[0] for group in groups if group.size == 1 for dim in group.dims}
    if ones:  # a size of one invites broadcasting into the trace, and ties that are none
        values = axes.fresh_inputs(leaves, ones, seed=1)
        leaves = tuple(Leaf(leaf.name, value) for leaf, value in zip(leaves, values))
        groups = _groups(leaves, dynamic_axes, run)
    with modules.neutral_dropout(bare) as mode:
        outputs = adapter(*(leaf.value for leaf in leaves))
    results = _chosen_names("output", output_names, adapter.output_names)
    results = [f"{name}_output" if name in names.values() or name in inputs else name for name in results]
    for name in declared or {}:
        if name not in inputs and name not in results:
            known = ", ".join([*inputs, *results])
            raise ValueError(f"dynamic_axes names '{name}', which is neither input nor output: {known}")
    by_output = axes.output_axes(leaves, results, groups, run, base=outputs, declared=declared)
    return _Plan(
        adapter, leaves, tuple(groups), tuple(results), outputs, by_output, names, dropouts=mode.active
    )


def _groups(leaves: Sequence[Leaf], dynamic_axes: DynamicAxes | str | None, run: axes.Run) -> list[AxisGroup]:
    if dynamic_axes is None:
        return []
    if isinstance(dynamic_axes, str):
        return axes.find_groups(leaves, run)
    return axes.declared_groups(leaves, dynamic_axes, run)


def _usable_example(leaves: tuple[Leaf, ...], run: axes.Run, owner: str, *, resize: bool) -> tuple[Leaf, ...]:
    """The example, or one of two rows if it has one that batch norm refuses to train on."""
    try:
        run([leaf.value for leaf in leaves])
        return leaves
    except ExportError:
        raise
    except Exception as error:
        rows = {(i, 0): 2 for i, leaf in enumerate(leaves) if leaf.value.dim() and leaf.value.size(0) == 1}
        if rows and resize:
            values = axes.fresh_inputs(leaves, rows, seed=0)
            try:
                run(values)
                return tuple(Leaf(leaf.name, value) for leaf, value in zip(leaves, values))
            except Exception:
                pass  # the first error is the one that concerns the user's arguments
        raise ExportError(f"{owner} fails on the example arguments: {error}") from error


def _chosen_names(kind: str, chosen: Sequence[str] | None, found: Sequence[str]) -> list[str]:
    if chosen is None:
        return list(found)
    if isinstance(chosen, str) or len(chosen) != len(found):
        raise ValueError(f"{kind}_names has {len(chosen)} names for {len(found)} {kind}s: {', '.join(found)}")
    if len(set(chosen)) != len(chosen) or not all(chosen):
        raise ValueError(f"{kind}_names must be different and not empty: {list(chosen)}")
    return list(chosen)


def _graph(
    export: Callable[..., onnx.ModelProto], plan: _Plan, *, opset: int, fold: bool, training: bool
) -> tuple[onnx.ModelProto, list[str]]:
    input_axes = plan.input_axes()
    proto = export(
        plan.adapter,
        [leaf.value for leaf in plan.leaves],
        opset=opset,
        fold=fold,
        input_names=list(input_axes),
        output_names=plan.output_names,
        dynamic_axes=input_axes | dict(plan.output_axes),
    )
    used = assemble.take_parameters(proto, list(input_axes), plan.names, prefix=Adapter.PREFIX)
    if training:
        assemble.repair_dropout(proto)
    assemble.set_axes(
        proto,
        {leaf.name: (leaf.value, input_axes[leaf.name]) for leaf in plan.leaves},
        {name: (v, plan.output_axes[name]) for name, v in zip(plan.output_names, plan.outputs)},
    )
    return proto, used


def _compare(
    plan: _Plan, proto: onnx.ModelProto, weights: Mapping[str, torch.Tensor], *, rtol: float, atol: float
) -> parity.Report:
    """Both models on fresh inputs at the traced sizes and, where axes are dynamic, at two others."""
    feed_weights = {name: _array(name, tensor) for name, tensor in weights.items()}
    session = _session(proto, weights)
    reports = []
    for seed in range(3 if plan.groups else 1):
        sizes = {g.name: g.others[seed - 1] for g in plan.groups} if seed else {}
        dims = {dim: sizes[g.name] for g in plan.groups for dim in g.dims if sizes}
        case = ", ".join(f"{name} {size}" for name, size in sizes.items()) or "the exported sizes"
        tensors = axes.fresh_inputs(plan.leaves, dims, seed=seed)
        expected = plan.run(tensors)
        feeds = {leaf.name: _array(leaf.name, tensor) for leaf, tensor in zip(plan.leaves, tensors)}
        reference = {name: _array(name, value) for name, value in zip(plan.output_names, expected)}
        try:
            got = dict(zip(plan.output_names, session.run(list(plan.output_names), feeds | feed_weights)))
        except Exception as error:
            reason = f"onnxruntime failed: {str(error).splitlines()[0]}"
            failed = parity.Difference("run", np.inf, np.inf, False, (), reason, case)
            reports.append(parity.Report((failed,), rtol=rtol, atol=atol))
        else:
            reports.append(parity.compare(reference, got, rtol=rtol, atol=atol, case=case))
    return parity.merge(*reports)


def _session(proto: onnx.ModelProto, weights: Mapping[str, torch.Tensor]) -> Any:
    """A session over the neutralised model that takes weights as inputs: torch's memory, not a copy."""
    import onnxruntime

    neutral = assemble.neutralised(proto)
    for name, tensor in weights.items():
        kind = assemble.element_type(name, tensor)
        neutral.graph.input.append(onnx.helper.make_tensor_value_info(name, kind, list(tensor.shape)))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 4
    try:
        return onnxruntime.InferenceSession(
            neutral.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:
        raise ExportError(f"onnxruntime cannot load the exported model: {error}") from error


def _array(name: str, tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        raise ExportError(f"'{name}' is bfloat16, which cannot be compared on the CPU: pass check=False")
    return tensor.detach().cpu().contiguous().numpy()


def _properties(
    bare: torch.nn.Module, names: Mapping[str, str], used: Sequence[str], *, training: bool, exporter: str
) -> dict[str, object]:
    origin: dict[str, object] = {"onward.export": {"exporter": exporter, "training": training}}
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
        "onward.requires_grad": [name for name, trains in wanted.items() if trains],
        "onward.frozen_params": [name for name, trains in wanted.items() if not trains],
        "onward.buffers": [name for name in statistics if name in present],
    }


def _exporter(name: str, opset: int) -> Callable[..., onnx.ModelProto]:
    if name == "torchscript":
        from onward.export.torchscript import OPSETS, trace
    elif name == "dynamo":
        from onward.export.dynamo import OPSETS, trace
    else:
        raise ValueError(f'exporter must be "torchscript" or "dynamo", not {name!r}')
    if not isinstance(opset, int) or opset not in OPSETS:
        raise ValueError(f"opset must be {OPSETS[0]} to {OPSETS[-1]} for exporter={name!r}, not {opset!r}")
    return trace


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


def _has_bodies(proto: onnx.ModelProto) -> bool:
    return len(list(assemble.graphs(proto.graph))) > 1


def _size(model: torch.nn.Module) -> int:
    return assemble.size_of({str(id(tensor)): tensor for tensor in [*model.parameters(), *model.buffers()]})


def _json_list(text: str) -> list[str]:
    return list(json.loads(text))
