"""Detects the dynamic axes of a module's inputs by running it, and makes fresh inputs at other sizes.

An axis counts as dynamic when the module itself accepts two other sizes of it; whether the exported model does too
is checked later.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from onward.errors import ExportError

if TYPE_CHECKING:
    from onward.export.torch.flatten import Leaf

Run = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
DynamicAxes = Mapping[str, Mapping[int, str] | Sequence[int] | Sequence[str | None]]
_Dim = tuple[int, int]  # which input, which axis
# factor and offset of an axis whose size follows another's: factor · size + offset
_Relation = tuple[int, int]
_EQUAL: _Relation = (1, 0)
# Runs of the module that a search for axes in proportion may take: many axes are fixed by weights and follow nothing.
_RELATION_RUNS = 200


@dataclass(frozen=True)
class AxisGroup:
    """Input axes whose sizes change together: a name, the example's size and two others that work.

    `relations` say how each axis follows that size (a picture and one of twice its height); none means that all are
    equal. `labels` are names for the axes where users gave several.
    """

    name: str
    dims: tuple[_Dim, ...]
    size: int
    others: tuple[int, int]
    relations: tuple[_Relation, ...] = ()
    labels: tuple[str, ...] = ()
    # whether the module takes these sizes alone: a stride of 2 makes 4 rows of 8, and of 7
    exact: bool = True

    def sizes(self, size: int) -> dict[_Dim, int]:
        """The size of each axis when that of the group is this one."""
        return _sizes(self.dims, self.relations, size)

    def names(self) -> dict[_Dim, str]:
        """What each axis is called in the model: `height`, and `2*height` for one in proportion."""
        relations = self.relations or (_EQUAL,) * len(self.dims)
        labels = self.labels or (self.name,) * len(self.dims)
        return {
            dim: label if self.labels else self._spell(relation, index)
            for index, (dim, label, relation) in enumerate(zip(self.dims, labels, relations))
        }

    def _spell(self, relation: _Relation, index: int) -> str:
        factor, offset = relation
        if relation == _EQUAL:
            return self.name
        if offset or not self.exact:  # shape inference knows products of names, not sums
            return f"{self.name}_{index}"
        return f"{factor}*{self.name}"


def _sizes(dims: Sequence[_Dim], relations: Sequence[_Relation], size: int) -> dict[_Dim, int]:
    if not relations:
        return dict.fromkeys(dims, size)
    return {dim: factor * size + offset for dim, (factor, offset) in zip(dims, relations)}


def fresh_inputs(
    leaves: Sequence[Leaf], sizes: Mapping[_Dim, int], *, seed: int, shuffle: bool = True
) -> list[torch.Tensor]:
    """New values like the example's at the given sizes; sizes not given stay.

    Floats are drawn with the example's mean and spread, inside its range. Integers are the example's own, each row in
    another order, so that they remain valid indices and every row has as many of each as the module may count on (end
    tokens, say); each column where columns are tables of their own; a vector in order stays in order. Masks (zeros
    and ones) are repeated.
    """
    # A generator of its own: a check that fails fails again, and torch's random state stays the user's.
    generator = torch.Generator().manual_seed(seed)
    return [
        _fresh(leaf, {a: n for (i, a), n in sizes.items() if i == index}, generator, shuffle)
        for index, leaf in enumerate(leaves)
    ]


def _fresh(leaf: Leaf, sizes: Mapping[int, int], generator: torch.Generator, shuffle: bool) -> torch.Tensor:
    example = leaf.value
    tiled = example.detach()
    for axis, size in sizes.items():
        # Rows of the example again rather than new numbers: tokens and classes stay those that the module takes.
        tiled = tiled.index_select(axis, torch.arange(size, device=tiled.device) % tiled.size(axis))
    tiled = tiled.clone()
    if tiled.is_meta:  # a shape alone
        return tiled
    # Lengths of packed sequences have to descend, offsets of bags to ascend from where they start.
    if tiled.dim() == 1 and is_integer(example) and (_descends(example) or _descends(-example)):
        return tiled.sort(descending=_descends(example)).values
    if tiled.numel() == 0 or not shuffle or bool(((example == 0) | (example == 1)).all()):
        return tiled
    if example.is_floating_point():
        # Half precision would round mean and spread; float64 holds any type's.
        wide = example.detach().double()
        # drawn on the CPU, where one seed gives the same numbers on every machine
        noise = torch.randn(tiled.shape, generator=generator, dtype=torch.float64).to(example.device)
        return _reflected(wide.mean() + noise * wide.std(correction=0), wide).to(example.dtype)
    if example.is_complex():
        return tiled
    if not tiled.dim():
        return tiled
    axis = 0 if leaf.by_column else -1
    order = torch.rand(tiled.shape, generator=generator).argsort(axis).to(example.device)
    return tiled.gather(axis, order)


def _reflected(drawn: torch.Tensor, example: torch.Tensor) -> torch.Tensor:
    """Numbers beyond the example's range (logarithms take no negative ones, say) turned back at its ends."""
    finite = example[example.isfinite()]
    # One value alone has no range: reflecting at both its ends would be the same number everywhere.
    if not finite.numel() or bool(finite.min() == finite.max()):
        return drawn
    low, width = finite.min(), finite.max() - finite.min()
    return low + width - ((drawn - low) % (2 * width) - width).abs()


def is_integer(values: torch.Tensor) -> bool:
    """Whether a tensor holds whole numbers."""
    return not (values.is_floating_point() or values.is_complex() or values.dtype == torch.bool)


def _descends(values: torch.Tensor) -> bool:
    """Whether these numbers get smaller."""
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
    groups: list[AxisGroup] = []
    refused: list[AxisGroup] = []
    for name, dims in by_name.items():
        sizes = {leaves[i].value.size(axis) for i, axis in dims}
        if len(sizes) > 1:
            raise ValueError(
                f"dynamic axis '{name}' has different sizes in the example arguments: {sorted(sizes)}"
            )
        others = _accepted(leaves, dims, run)
        group = AxisGroup(name, tuple(dims), sizes.pop(), others or (0, 0))
        (refused if others is None else groups).append(group)
    related, refused = _related_names(leaves, refused, run)
    if refused:
        name, dims = refused[0].name, refused[0].dims
        where = ", ".join(f"{leaves[i].name}[{axis}]" for i, axis in dims)
        raise ExportError(
            f"dynamic axis '{name}' ({where}): the module itself does not accept other sizes of it. "
            "Name every input axis that varies together with it, or leave it out"
        )
    return groups + related


def _related_names(
    leaves: Sequence[Leaf], groups: list[AxisGroup], run: Run
) -> tuple[list[AxisGroup], list[AxisGroup]]:
    """Names that vary only together, each in its proportion: the groups that they make, and what is left over."""
    related: list[AxisGroup] = []
    # The smallest first: the others are its multiples, or larger by a difference.
    left = sorted(groups, key=lambda group: group.size)
    for base in list(left):
        if base not in left:
            continue
        partners = [group for group in left if group is not base]
        for members in [*([base, partner] for partner in partners), [base, *partners]]:
            dims = tuple(dim for group in members for dim in group.dims)
            labels = tuple(group.name for group in members for _ in group.dims)
            for relations in _possible_relations(base.size, [group.size for group in members]):
                spread = tuple(r for group, r in zip(members, relations) for _ in group.dims)
                others = _accepted(leaves, dims, run, spread)
                if others is not None:
                    related.append(AxisGroup(base.name, dims, base.size, others, spread, labels))
                    left = [group for group in left if group not in members]
                    break
            if base not in left:
                break
    return related, left


def _possible_relations(base: int, sizes: Sequence[int]) -> Iterator[tuple[_Relation, ...]]:
    """Ways in which sizes may follow the smallest: in proportion, or by as much more."""
    if base and all(size % base == 0 for size in sizes):
        yield tuple((size // base, 0) for size in sizes)
    if any(size != base for size in sizes):
        yield tuple((1, size - base) for size in sizes)


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
    """The axes that can change size, tied together where the module needs them equal or in proportion."""
    dims = [(i, axis) for i, leaf in enumerate(leaves) for axis in range(leaf.value.dim())]
    size = {dim: leaves[dim[0]].value.size(dim[1]) for dim in dims}
    groups: list[AxisGroup] = []
    refused: list[_Dim] = []
    # Same position and same size: batch with batch, sequence with sequence. Equal sizes across positions (as many
    # features as rows) are mostly chance.
    for together in _partition(dims, key=lambda dim: (dim[1], size[dim])):
        for part, others in _separate(leaves, together, run):
            if others is None:
                refused += part
            else:
                groups.append(AxisGroup("", tuple(part), size[part[0]], others))
    groups += _find_related(leaves, refused, run)
    # After all others: a column of targets looks free until one sees that no output grows with it.
    groups = [group for group in groups if not _is_broadcast(leaves, group, run)]
    groups.sort(key=lambda group: min(group.dims))
    return _named(groups, leaves)


def _separate(
    leaves: Sequence[Leaf], together: list[_Dim], run: Run
) -> Iterator[tuple[list[_Dim], tuple[int, int] | None]]:
    """Axes of one size in the parts that vary by themselves; None for what the module does not vary."""
    others = _accepted(leaves, together, run)
    if len(together) == 1:
        yield together, others
        return
    # Equal sizes may be chance (two sequences of one length): what can vary alone does. The first axis stays
    # together where it can: it is the batch.
    alone = {d: o for d in together if (d[1] > 0 or others is None) and (o := _accepted(leaves, [d], run))}
    yield from (([dim], o) for dim, o in alone.items())
    tied = [dim for dim in together if dim not in alone]
    if not tied:
        return
    tied_others = others if len(tied) == len(together) else _accepted(leaves, tied, run)
    if tied_others is None and len(tied) > 2:
        # one of them may have the size by chance and never change
        for dim in tied:
            left = [other for other in tied if other != dim]
            left_others = _accepted(leaves, left, run)
            if left_others is not None:
                yield left, left_others
                yield [dim], None
                return
    yield tied, tied_others


def _find_related(leaves: Sequence[Leaf], refused: Sequence[_Dim], run: Run) -> list[AxisGroup]:
    """Groups among axes that do not vary alone: image and mask, in proportion, or apart by a difference."""
    size = {dim: leaves[dim[0]].value.size(dim[1]) for dim in refused}
    left = sorted(refused, key=lambda dim: (size[dim], dim))
    groups: list[AxisGroup] = []
    budget = [_RELATION_RUNS]

    def counted(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        budget[0] -= 1
        return run(tensors)

    for base in list(left):
        if base not in left or size[base] < 2:
            continue
        for members in _candidates(
            leaves, base, [dim for dim in left if dim != base and size[dim] > 1], size
        ):
            for relations in _possible_relations(size[base], [size[dim] for dim in members]):
                if budget[0] <= 0:
                    return groups
                others = _accepted(leaves, members, counted, relations)
                if others is not None:
                    group = AxisGroup("", tuple(members), size[base], others, relations)
                    groups.append(replace(group, exact=not _takes_less(leaves, group, counted)))
                    left = [dim for dim in left if dim not in members]
                    break
            if base not in left:
                break
    return groups


def _takes_less(leaves: Sequence[Leaf], group: AxisGroup, run: Run) -> bool:
    """Whether an axis in proportion may be shorter by one with all others as they are."""
    sizes = group.sizes(group.others[0])
    for dim, (factor, _) in zip(group.dims, group.relations):
        if factor > 1:
            try:
                run(fresh_inputs(leaves, sizes | {dim: sizes[dim] - 1}, seed=0))
            except Exception:  # whatever the module raises, it does not take this size
                continue
            return True
    return False


def _candidates(
    leaves: Sequence[Leaf], base: _Dim, others: Sequence[_Dim], size: Mapping[_Dim, int]
) -> Iterator[list[_Dim]]:
    """Sets of axes that may belong together: pairs, one axis of each input counted from either end, all of one size."""
    elsewhere = [dim for dim in others if dim[0] != base[0]]

    def from_end(dim: _Dim) -> int:
        return dim[1] - leaves[dim[0]].value.dim()

    front = [dim for dim in elsewhere if dim[1] == base[1]]
    back = [dim for dim in elsewhere if from_end(dim) == from_end(base)]
    seen: list[list[_Dim]] = []
    pairs = sorted(elsewhere, key=lambda dim: (dim[1] != base[1], from_end(dim) != from_end(base), dim))
    equal = [dim for dim in others if size[dim] == size[base]]
    # one of several may have the size by chance, such as as many features as there are nodes in a graph
    all_but_one = [[dim for dim in equal if dim != chance] for chance in equal]
    for members in (*([dim] for dim in pairs), front, back, equal, *all_but_one):
        if members and members not in seen:
            seen.append(members)
            yield [base, *members]


def _is_broadcast(leaves: Sequence[Leaf], group: AxisGroup, run: Run) -> bool:
    """Whether a size of 1 changes only because torch broadcasts it: a column of targets, say, which stays one.

    Sequences may have a single element: tokens, and the second of three axes.
    """
    if group.size != 1 or len(group.dims) != 1:
        return False
    index, axis = group.dims[0]
    value = leaves[index].value
    if axis == 0 or (axis == 1 and (value.dim() == 3 or (value.dim() == 2 and is_integer(value)))):
        return False
    # Where no output changes shape, the axis was spread over the other input's.
    base = run([leaf.value for leaf in leaves])
    size = group.others[0]
    varied = run(fresh_inputs(leaves, group.sizes(size), seed=size))
    return all(before.shape == after.shape for before, after in zip(base, varied))


def _partition(dims: Sequence[_Dim], *, key: Callable[[_Dim], object]) -> list[list[_Dim]]:
    parts: dict[object, list[_Dim]] = {}
    for dim in dims:
        parts.setdefault(key(dim), []).append(dim)
    return list(parts.values())


def _accepted(
    leaves: Sequence[Leaf], dims: Sequence[_Dim], run: Run, relations: Sequence[_Relation] = ()
) -> tuple[int, int] | None:
    """Two sizes other than the example's that the module accepts for these axes, or None."""
    size = leaves[dims[0][0]].value.size(dims[0][1])
    works: list[int] = []
    # Sums first, as they differ from the example in every factor; the half and multiples are for modules that pool
    # or fold, which take even sizes alone.
    for other in dict.fromkeys((size + 1, size + 3, size - 1, size // 2, 2 * size, 3 * size)):
        sizes = _sizes(dims, relations, other)
        # A size of one broadcasts, and zero makes means of nothing: neither shows that an axis is free.
        if other == size or min(sizes.values()) < 2:
            continue
        try:
            with warnings.catch_warnings():
                # Losses broadcast targets of another size, and torch says that this is likely a mistake.
                warnings.filterwarnings("error", message="Using a target size")
                run(fresh_inputs(leaves, sizes, seed=other))
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
        # Four axes are pictures as torch lays them out: [batch, channels, height, width].
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
        varied = run(fresh_inputs(leaves, group.sizes(size), seed=size))
        for name, before, after in zip(names, base, varied):
            for axis, (old, new) in enumerate(zip(before.shape, after.shape)):
                if old != new:
                    # The name says "as long as the input's axis"; one that depends on it otherwise gets its own.
                    follows = (old, new) == (group.size, size) and axis not in result[name]
                    result[name][axis] = group.name if follows else f"{name}_dim{axis}"
    for name, spec in (declared or {}).items():
        if name in result:
            result[name] |= axis_names(name, spec, base[list(names).index(name)].dim())
    return result
