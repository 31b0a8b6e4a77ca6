"""Detects the dynamic axes of a module's inputs by running it, and makes fresh inputs at other sizes.

An axis counts as dynamic when the module itself accepts two other sizes of it; whether the exported model does too
is checked later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from onward.errors import ExportError

if TYPE_CHECKING:
    from onward.export.torch.flatten import Leaf

__all__ = ["AxisGroup", "DynamicAxes", "Run", "declared_groups", "find_groups", "fresh_inputs", "output_axes"]

Run = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
DynamicAxes = Mapping[str, Mapping[int, str] | Sequence[int] | Sequence[str | None]]
_Dim = tuple[int, int]  # which input, which axis


@dataclass(frozen=True)
class AxisGroup:
    """Input axes that have one size between them: its name, the example's size and two others that work."""

    name: str
    dims: tuple[_Dim, ...]
    size: int
    others: tuple[int, int]


def fresh_inputs(
    leaves: Sequence[Leaf], sizes: Mapping[_Dim, int], *, seed: int, shuffle: bool = True
) -> list[torch.Tensor]:
    """New values like the example's at the given sizes; sizes not given stay.

    Floats are drawn with the example's mean and spread and stay non-negative if it is. Integers are
    the example's own, each row in another order, so that they remain valid indices and every row has as many of
    each as the module may count on (end tokens, say); a vector that descends still does. Masks (zeros and ones) are
    repeated.
    """
    generator = torch.Generator().manual_seed(seed)
    return [
        _fresh(leaf.value, {a: n for (i, a), n in sizes.items() if i == index}, generator, shuffle)
        for index, leaf in enumerate(leaves)
    ]


def _fresh(
    example: torch.Tensor, sizes: Mapping[int, int], generator: torch.Generator, shuffle: bool
) -> torch.Tensor:
    tiled = example.detach()
    for axis, size in sizes.items():
        tiled = tiled.index_select(axis, torch.arange(size, device=tiled.device) % tiled.size(axis))
    tiled = tiled.clone()
    if tiled.is_meta:  # a shape alone
        return tiled
    if tiled.dim() == 1 and _descends(example):  # lengths of packed sequences have to
        return tiled.sort(descending=True).values
    if tiled.numel() == 0 or not shuffle or bool(((example == 0) | (example == 1)).all()):
        return tiled
    if example.is_floating_point():
        wide = example.detach().double()
        noise = torch.randn(tiled.shape, generator=generator, dtype=torch.float64).to(example.device)
        drawn = wide.mean() + noise * wide.std(correction=0)
        return (drawn.abs() if bool((example >= 0).all()) else drawn).to(example.dtype)
    if example.is_complex():
        return tiled
    if not tiled.dim():
        return tiled
    order = torch.rand(tiled.shape, generator=generator).argsort(-1).to(example.device)
    return tiled.gather(-1, order)


def _descends(values: torch.Tensor) -> bool:
    """Whether these are integers that get smaller."""
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool or values.numel() < 2:
        return False
    steps = values.diff()
    return bool((steps <= 0).all()) and bool((steps < 0).any())


def declared_groups(leaves: Sequence[Leaf], axes: DynamicAxes, run: Run) -> list[AxisGroup]:
    """The groups that a user named: `{"x": {0: "batch"}}`, `{"x": ["batch", None]}` or `{"x": [0]}`."""
    position = {leaf.name: i for i, leaf in enumerate(leaves)}
    by_name: dict[str, list[_Dim]] = {}
    for input_name, spec in axes.items():
        if input_name not in position:
            continue  # an output: `output_axes` reads it
        index = position[input_name]
        for axis, name in axis_names(input_name, spec, leaves[index].value.dim()).items():
            by_name.setdefault(name, []).append((index, axis))
    groups = []
    for name, dims in by_name.items():
        found = {leaves[i].value.size(axis) for i, axis in dims}
        if len(found) > 1:
            raise ValueError(
                f"dynamic axis '{name}' has different sizes in the example arguments: {sorted(found)}"
            )
        others = _accepted(leaves, dims, run)
        if others is None:
            where = ", ".join(f"{leaves[i].name}[{axis}]" for i, axis in dims)
            raise ExportError(
                f"dynamic axis '{name}' ({where}): the module itself does not accept other sizes of it. "
                "Name every input axis that varies together with it, or leave it out"
            )
        groups.append(AxisGroup(name, tuple(dims), found.pop(), others))
    return groups


def axis_names(
    owner: str, spec: Mapping[int, str] | Sequence[int] | Sequence[str | None], rank: int
) -> dict[int, str]:
    """One input's or output's axes as {axis: name}, with negative axes counted from the end."""
    if isinstance(spec, Mapping):
        named = dict(spec)
    elif all(isinstance(item, int) for item in spec):
        named = {int(axis): f"{owner}_dim{axis}" for axis in spec}  # type: ignore[arg-type]
    else:
        named = {axis: name for axis, name in enumerate(spec) if name is not None}
    result: dict[int, str] = {}
    for axis, name in named.items():
        if not isinstance(axis, int) or not isinstance(name, str) or not name:
            raise TypeError(
                f"dynamic_axes['{owner}'] must map axis numbers to names, not {axis!r} to {name!r}"
            )
        if not -rank <= axis < rank:
            raise ValueError(f"dynamic_axes['{owner}'] names axis {axis}, but it has {rank} axes")
        result[axis % rank] = name
    return result


def find_groups(leaves: Sequence[Leaf], run: Run) -> list[AxisGroup]:
    """The axes that can change size, tied together where the module needs them equal."""
    dims = [(i, axis) for i, leaf in enumerate(leaves) for axis in range(leaf.value.dim())]
    size = {dim: leaves[dim[0]].value.size(dim[1]) for dim in dims}
    found: list[tuple[list[_Dim], tuple[int, int]]] = []
    refused: list[_Dim] = []
    for together in _partition(dims, key=lambda dim: (dim[1], size[dim])):
        others = _accepted(leaves, together, run)
        if others is None:
            refused += together
            continue
        # Equal sizes may be chance (two sequences of one length): what can vary alone does.
        alone = {
            d: o for d in together if len(together) > 1 and d[1] > 0 and (o := _accepted(leaves, [d], run))
        }
        rest = [dim for dim in together if dim not in alone]
        rest_others = (
            others if len(rest) == len(together) else (_accepted(leaves, rest, run) if rest else None)
        )
        found += [([dim], o) for dim, o in alone.items()]
        if rest_others is not None:
            found.append((rest, rest_others))
    for together in _partition(refused, key=lambda dim: size[dim]):
        if len(together) > 1 and len({axis for _, axis in together}) > 1:
            others = _accepted(leaves, together, run)
            if others is not None:
                found.append((together, others))
    found.sort(key=lambda item: min(item[0]))
    groups = [AxisGroup("", tuple(group), size[group[0]], others) for group, others in found]
    return _named(groups, leaves)


def _partition(dims: Sequence[_Dim], *, key: Callable[[_Dim], object]) -> list[list[_Dim]]:
    parts: dict[object, list[_Dim]] = {}
    for dim in dims:
        parts.setdefault(key(dim), []).append(dim)
    return list(parts.values())


def _accepted(leaves: Sequence[Leaf], dims: Sequence[_Dim], run: Run) -> tuple[int, int] | None:
    """Two sizes other than the example's that the module accepts for these axes, or None."""
    size = leaves[dims[0][0]].value.size(dims[0][1])
    works: list[int] = []
    for other in dict.fromkeys((size + 1, size + 3, size - 1, size // 2, 2 * size, 3 * size)):
        if other < 2 or other == size:
            continue
        try:
            run(fresh_inputs(leaves, dict.fromkeys(dims, other), seed=other))
        except Exception:  # whatever the module raises, it does not take this size
            continue
        works.append(other)
        if len(works) == 2:
            return works[0], works[1]
    return None


def _named(groups: Sequence[AxisGroup], leaves: Sequence[Leaf]) -> list[AxisGroup]:
    taken: set[str] = set()
    named = []
    for group in groups:
        index, axis = min(group.dims)
        leaf = leaves[index]
        choices = [f"{leaf.name}_dim{axis}"]
        if axis == 0 and sum(a == 0 for _, a in group.dims) == len([x for x in leaves if x.value.dim()]):
            choices.insert(0, "batch")
        elif axis == 1 and leaf.value.dim() <= 3:
            choices.insert(0, "sequence")
        elif leaf.value.dim() == 4 and axis in (2, 3):
            choices.insert(0, "height" if axis == 2 else "width")
        name = next(choice for choice in choices if choice not in taken)
        taken.add(name)
        named.append(replace(group, name=name))
    return named


def output_axes(
    leaves: Sequence[Leaf],
    names: Sequence[str],
    groups: Sequence[AxisGroup],
    run: Run,
    *,
    base: Sequence[torch.Tensor],
    declared: DynamicAxes | None = None,
) -> dict[str, dict[int, str]]:
    """Each output's dynamic axes: an axis that follows a group takes its name, any other gets its own."""
    result: dict[str, dict[int, str]] = {name: {} for name in names}
    for group in groups:
        size = group.others[0]
        varied = run(fresh_inputs(leaves, dict.fromkeys(group.dims, size), seed=size))
        for name, before, after in zip(names, base, varied):
            for axis, (old, new) in enumerate(zip(before.shape, after.shape)):
                if old != new:
                    follows = (old, new) == (group.size, size) and axis not in result[name]
                    result[name][axis] = group.name if follows else f"{name}_dim{axis}"
    for name, spec in (declared or {}).items():
        if name in result:
            result[name] |= axis_names(name, spec, base[list(names).index(name)].dim())
    return result
