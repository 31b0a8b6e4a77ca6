"""Runs a torch module to find what an export needs: names, dynamic axes, outputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from onward import contract
from onward.errors import ExportError
from onward.export.torch import axes, modules
from onward.export.torch.flatten import Adapter, Leaf
from onward.export.torch.keep_gradients import calling_line
from onward.export.torch.no_randomness import neutral_dropout

if TYPE_CHECKING:
    from onward.export.torch.axes import AxisGroup, DynamicAxes

# Numbers of an input from which on a run of the module takes longer than one for shapes alone.
_MANY = 1 << 14
_BATCH_NORM = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")


@dataclass(frozen=True)
class Plan:
    """What is known of the module before it is exported."""

    adapter: Adapter
    leaves: tuple[Leaf, ...]
    groups: tuple[AxisGroup, ...]
    output_names: tuple[str, ...]
    outputs: tuple[torch.Tensor, ...]
    output_axes: Mapping[str, Mapping[int, str]]
    names: Mapping[str, str]
    dropouts: int
    decisions: tuple[str, ...] = ()
    # the outputs that are next values of buffers and frozen parameters, by their names
    state: Mapping[str, str] = field(default_factory=dict)
    # parameters that forward writes to
    written: tuple[str, ...] = ()

    def run(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The module's outputs without randomness."""
        with neutral_dropout(self.adapter.model):
            return self.adapter(*tensors)

    def line_that_calls(self, operator: str) -> str:
        """Where the user's code, or a library's, computes one of torch's operators first; empty where it does not."""
        listener = _OperatorListener(operator)
        with suppress(Exception), listener:  # only for a message: another error would hide what it is about
            self.run([leaf.value for leaf in self.leaves])
        return listener.line

    def keeping(self, groups: Sequence[AxisGroup]) -> Plan:
        """The same plan with fewer dynamic axes."""
        by_output = axes.output_axes(self.leaves, self.output_names, groups, self.run, base=self.outputs)
        return replace(self, groups=tuple(groups), output_axes=by_output)

    def input_axes(self) -> dict[str, dict[int, str]]:
        table: dict[str, dict[int, str]] = {leaf.name: {} for leaf in self.leaves}
        for group in self.groups:
            for (index, axis), name in group.names().items():
                table[self.leaves[index].name][axis] = name
        return table


class _OperatorListener(TorchDispatchMode):
    """Notes the first line that calls an operator: the tracer's own errors have none."""

    def __init__(self, operator: str) -> None:
        super().__init__()
        self.line = ""
        self._operator = operator.strip("_")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self.line and func._schema.name.partition("::")[2].strip("_") == self._operator:
            self.line = calling_line()
        return func(*args, **(kwargs or {}))


def make_plan(
    bare: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    input_names: Sequence[str] | None,
    output_names: Sequence[str] | None,
    dynamic_axes: DynamicAxes | Literal["auto"] | None,
    *,
    observer: modules.WriteObserver | None = None,
    buffers: Mapping[str, torch.Tensor] | None = None,
) -> Plan:
    """What an export needs to know; `buffers` are the values before, where changes of them are to be carried on."""
    adapter = Adapter(bare, args, kwargs)
    names = modules.clean_names(bare)
    inputs = _chosen_names("input", input_names, [leaf.name for leaf in adapter.inputs])
    # Inputs, parameters and results share one namespace in a graph.
    inputs = [f"{name}_input" if name in names.values() else name for name in inputs]
    leaves = tuple(Leaf(name, leaf.value) for name, leaf in zip(inputs, adapter.inputs))
    if dynamic_axes is not None and dynamic_axes != "auto" and not isinstance(dynamic_axes, Mapping):
        raise TypeError(f'dynamic_axes must be "auto", a dictionary or None, not {dynamic_axes!r}')

    def run(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        with neutral_dropout(bare):
            return adapter(*tensors)

    observer = modules.WriteObserver(bare) if observer is None else observer
    with observer:
        leaves = _usable_example(leaves, run, type(bare).__name__, resize=dynamic_axes is not None)
    leaves = _with_columns(leaves, run)
    if buffers is not None:
        _refuse_lasting_changes(bare, observer.before, lambda: run([leaf.value for leaf in leaves]))
        adapter.state = tuple(modules.changed_state(bare, buffers, observer))
    declared = dynamic_axes if isinstance(dynamic_axes, Mapping) else None
    shapes = None if dynamic_axes is None else _shapes_only(bare, args, kwargs, leaves)
    groups = _groups(leaves, dynamic_axes, run, shapes)
    ones = {
        dim: size for group in groups if group.size == 1 for dim, size in _enlarged(group, leaves).items()
    }
    example = leaves
    while ones:  # a size of one invites broadcasting into the trace, and ties that are none
        values = axes.fresh_inputs(example, ones, seed=1)
        leaves = tuple(replace(leaf, value=value) for leaf, value in zip(example, values))
        groups = _groups(leaves, dynamic_axes, run, shapes)
        dynamic = {dim for group in groups for dim in group.dims}
        if dynamic.issuperset(ones):
            break
        # An axis that is not dynamic after all keeps the size that the example gave it.
        ones = {dim: size for dim, size in ones.items() if dim in dynamic}
        leaves, groups = example, _groups(example, dynamic_axes, run, shapes)
        groups = [group for group in groups if group.size > 1]
    with neutral_dropout(bare) as mode:
        outputs = adapter(*(leaf.value for leaf in leaves))
    results = _chosen_names("output", output_names, adapter.output_names)
    results = [f"{name}_output" if name in names.values() or name in inputs else name for name in results]
    state = {names[raw]: f"{names[raw]}{contract.NEXT}" for raw in adapter.state}
    results += state.values()
    for name in declared or {}:
        if name not in inputs and name not in results:
            choices = ", ".join([*inputs, *results])
            raise ValueError(f"dynamic_axes names '{name}', which is neither input nor output: {choices}")
    by_output = (
        axes.output_axes(leaves, results, groups, run, base=outputs, declared=declared)
        if shapes is None
        else axes.output_axes(_empty(leaves), results, groups, shapes, base=outputs, declared=declared)
    )
    return Plan(
        adapter,
        leaves,
        tuple(groups),
        tuple(results),
        outputs,
        by_output,
        names,
        dropouts=mode.active,
        decisions=tuple(mode.decisions),
        state=state,
        written=tuple(observer.before),
    )


def _enlarged(group: AxisGroup, leaves: Sequence[Leaf]) -> dict[tuple[int, int], int]:
    """Sizes for axes of size 1: ones that no other axis of the example has, where there is a choice."""
    # An axis that gets a size that another one has would be tied to it.
    taken = {size for leaf in leaves for size in leaf.value.shape}
    return group.sizes(next((size for size in group.others if size not in taken), group.others[0]))


def _groups(
    leaves: Sequence[Leaf], dynamic_axes: DynamicAxes | str | None, run: axes.Run, shapes: axes.Run | None
) -> list[AxisGroup]:
    """The dynamic axes; found without computing where that is possible, and then tried at other sizes together."""
    if dynamic_axes is None:
        return []

    def find(leaves: Sequence[Leaf], run: axes.Run) -> list[AxisGroup]:
        if isinstance(dynamic_axes, str):
            return axes.find_groups(leaves, run)
        return axes.declared_groups(leaves, dynamic_axes, run)

    if shapes is None:
        return find(leaves, run)
    with suppress(Exception):  # whatever it is, the module itself says it better below
        groups = find(_empty(leaves), shapes)
        # Shapes alone do not tell what the module asserts about numbers: one run at each of both sizes does.
        for index in range(2):
            sizes = {dim: n for group in groups for dim, n in group.sizes(group.others[index]).items()}
            run(axes.fresh_inputs(leaves, sizes, seed=index))
        return groups
    return find(leaves, run)


def _shapes_only(
    bare: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], leaves: Sequence[Leaf]
) -> axes.Run | None:
    """Runs of a copy of the module that compute shapes alone; None where it needs numbers, or is quick anyway.

    A ResNet-18's plan takes a third of the time. Whole numbers may be places in a table, whose bounds shapes do
    not tell: modules that take them are run.
    """
    values = [leaf.value for leaf in leaves]
    if not all(value.is_floating_point() for value in values) or max(v.numel() for v in values) < _MANY:
        return None
    try:
        # deepcopy takes what this table has for a tensor: the copy's parameters have no memory of their own.
        empty = {id(tensor): _without_numbers(tensor) for tensor in [*bare.parameters(), *bare.buffers()]}
        copied = copy.deepcopy(bare, empty)
        adapter = Adapter(copied, args, kwargs)

        def run(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
            # on the meta device: shapes follow torch's own rules, and nothing is computed
            with _ShapesOfNorms(), neutral_dropout(copied):
                return adapter(*tensors)

        run([_without_numbers(value) for value in values])
    except Exception:  # it has tensors of its own, or looks at numbers
        return None
    return run


class _ShapesOfNorms(TorchFunctionMode):
    """Batch norm keeps its input's shape: torch itself works that out from all that it would compute."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        arguments = (
            dict(zip(_BATCH_NORM, args)) | (kwargs or {}) if func is torch.nn.functional.batch_norm else {}
        )
        x = arguments.get("input")
        if x is not None and x.is_meta and x.dim() > 1:
            several = x.numel() > x.size(1) or not arguments.get(
                "training", False
            )  # torch refuses a single one
            vectors = [arguments.get(name) for name in _BATCH_NORM[1:5]]
            if several and all(vector is None or vector.numel() == x.size(1) for vector in vectors):
                return torch.empty_like(x)
        return func(*args, **(kwargs or {}))


def _empty(leaves: Sequence[Leaf]) -> list[Leaf]:
    return [replace(leaf, value=_without_numbers(leaf.value)) for leaf in leaves]


def _without_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape and type that has no memory."""
    empty = torch.empty_like(tensor, device="meta")
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


def _usable_example(leaves: tuple[Leaf, ...], run: axes.Run, owner: str, *, resize: bool) -> tuple[Leaf, ...]:
    """The example, or one of two rows if it has one that batch norm refuses to train on."""
    try:
        run([leaf.value for leaf in leaves])
        return leaves
    except ExportError:
        raise
    except Exception as error:
        # Exports run without gradients, in which `autograd.grad` inside forward is the one thing that fails.
        if not torch.is_grad_enabled() and _differentiates(leaves, run):
            return leaves
        # Batch norm refuses to train on one value per channel, and an example of one row is what most people give.
        rows = {(i, 0): 2 for i, leaf in enumerate(leaves) if leaf.value.dim() and leaf.value.size(0) == 1}
        if rows and resize:
            values = axes.fresh_inputs(leaves, rows, seed=0)
            try:
                run(values)
                return tuple(Leaf(leaf.name, value) for leaf, value in zip(leaves, values))
            except Exception:
                pass  # the first error is the one that concerns the user's arguments
        raise ExportError(f"{owner} fails on the example arguments: {error}") from error


def _refuse_lasting_changes(
    bare: torch.nn.Module, before: Mapping[str, torch.Tensor], run: Callable[[], object]
) -> None:
    """Raise where forward changes a parameter that trains, and the next update counts on it.

    A model computes with the changed value f(W) and stores W. Updates d lead to the same where f(f(W) + d) = f(W + d),
    as it is for masks, and not for clipping.
    """
    # Any two updates do: a function that passes for random ones and fails for others would be a strange forward.
    generator = torch.Generator().manual_seed(0)
    for name in before:
        parameter = bare.get_parameter(name)
        if not parameter.requires_grad:
            continue
        current = parameter.detach().clone()

        def after_run(value: torch.Tensor, parameter: torch.nn.Parameter = parameter) -> torch.Tensor:
            parameter.data = value
            run()
            return parameter.detach().clone()

        one, two = (torch.randn(current.shape, generator=generator).to(current) for _ in range(2))
        results = after_run(current + one + two), after_run(after_run(current + one) + two)
        parameter.data = current
        if not torch.allclose(*results, rtol=1e-4, atol=1e-6):
            raise ExportError(
                f"forward changes the parameter '{name}', which the optimizer trains too, and the next step counts on "
                "it: compute with a changed copy (weight.clamp(…), say), leave out an embedding's max_norm, or change "
                "it after the optimizer's step"
            )


def _with_columns(leaves: tuple[Leaf, ...], run: axes.Run) -> tuple[Leaf, ...]:
    """The same leaves; those of whole numbers by column where the module fails on rows in reverse order."""
    # One reversed run tells both kinds apart: tokens may stand anywhere, a category of one column is out of range
    # in another's table.
    tables = [leaf.value.dim() > 1 and axes.is_integer(leaf.value) for leaf in leaves]
    if not any(tables):
        return leaves
    try:
        run([leaf.value.flip(-1) if is_table else leaf.value for leaf, is_table in zip(leaves, tables)])
    except Exception:  # whatever the module raises, it does not take these numbers
        return tuple(replace(leaf, by_column=is_table) for leaf, is_table in zip(leaves, tables))
    return leaves


def _differentiates(leaves: tuple[Leaf, ...], run: axes.Run) -> bool:
    """Whether the module runs with gradients, which it computes itself; they stay on then, for all further runs."""
    torch.set_grad_enabled(True)
    try:
        run([leaf.value.detach() for leaf in leaves])
    except Exception:  # the first error is the one that concerns the user's arguments
        torch.set_grad_enabled(False)
        return False
    return True


def _chosen_names(kind: str, chosen: Sequence[str] | None, default_names: Sequence[str]) -> list[str]:
    if chosen is None:
        return list(default_names)
    if isinstance(chosen, str) or len(chosen) != len(default_names):
        raise ValueError(
            f"{kind}_names has {len(chosen)} names for {len(default_names)} {kind}s: {', '.join(default_names)}"
        )
    if len(set(chosen)) != len(chosen) or not all(chosen):
        raise ValueError(f"{kind}_names must be different and not empty: {list(chosen)}")
    return list(chosen)
