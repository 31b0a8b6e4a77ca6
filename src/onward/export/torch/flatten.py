"""Flattens a module's structured arguments and results into named tensors.

Supports tuples, lists, mappings, named tuples and dataclasses. Everything that is not a tensor is part of the
structure and is passed unchanged.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from onward.errors import ExportError

# Tensors by name, in order, each with names for its dynamic axes.
NamedAxes = Mapping[str, Mapping[int, str]]

_Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Leaf:
    """One tensor among the arguments or results, and the name it gets in the ONNX model.

    `by_column` says that whole numbers are places in a table of each column (categories of a record): they may not
    change columns.
    """

    name: str
    value: torch.Tensor
    by_column: bool = False


@dataclass(frozen=True)
class _Slot:
    index: int


def bind_arguments(
    model: torch.nn.Module, args: Any, kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call's arguments as `(args, kwargs)`; a lone tensor or mapping is accepted for convenience.

    A mapping whose keys are all parameters of `forward` (a tokenizer's result, say) means keyword arguments.
    """
    # of forward, not of the module: `__call__` takes anything
    signature = inspect.signature(model.forward)
    if isinstance(args, Mapping):
        if kwargs is None and _accepts_keywords(signature, args):
            args, kwargs = (), args
        else:
            args = (args,)
    elif isinstance(args, list):
        args = tuple(args)
    # A named tuple is one argument with parts, not the list of arguments.
    elif not isinstance(args, tuple) or hasattr(args, "_fields"):
        args = (args,)
    keywords = dict(kwargs or {})
    try:
        signature.bind(*args, **keywords)
    except TypeError as error:
        raise TypeError(
            f"the example arguments do not fit {type(model).__name__}.forward{signature}: {error}"
        ) from None
    return args, keywords


def _accepts_keywords(signature: inspect.Signature, mapping: Mapping[Any, Any]) -> bool:
    parameters = signature.parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return all(isinstance(key, str) for key in mapping)
    return all(key in parameters for key in mapping)


class Adapter(torch.nn.Module):
    """Calls `model` from flat tensors and returns a flat tuple of tensors.

    `output_names` and `result` are filled by the first call. The wrapped module is the attribute `model`, so
    every parameter's name starts with `Adapter.PREFIX`.
    """

    PREFIX = "model."

    def __init__(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        super().__init__()
        self.model = model
        self.training = model.training  # the adapter's own flag; train() would reach into the module
        leaves: list[tuple[_Path, torch.Tensor]] = []
        positional = _positional_names(model, len(args))
        self._args = tuple(_strip(value, (name,), leaves) for name, value in zip(positional, args))
        self._kwargs = {name: _strip(value, (name,), leaves) for name, value in kwargs.items()}
        if not leaves:
            raise TypeError("the example arguments hold no torch.Tensor: there is nothing to feed the model")
        names = _leaf_names([path for path, _ in leaves], default="input")
        self._complex = [value.is_complex() for _, value in leaves]
        self.inputs = tuple(Leaf(name, real_parts(value)) for name, (_, value) in zip(names, leaves))
        self.output_names: tuple[str, ...] = ()
        # buffers and frozen parameters that forward changes: their values after it are outputs too
        self.state: tuple[str, ...] = ()

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tensors = tuple(
            torch.view_as_complex(value) if is_complex else value
            for value, is_complex in zip(tensors, self._complex)
        )
        args = [_fill(part, tensors) for part in self._args]
        kwargs = {name: _fill(part, tensors) for name, part in self._kwargs.items()}
        result = self.model(*args, **kwargs)
        leaves: list[tuple[_Path, torch.Tensor]] = []
        _require_tensors(_strip(result, (), leaves), type(self.model).__name__)
        self.output_names = tuple(_leaf_names([path for path, _ in leaves], default="output"))
        seen = {id(tensor) for tensor in tensors} | {id(parameter) for parameter in self.model.parameters()}
        outputs: list[torch.Tensor] = []
        for _, tensor in leaves:
            # A result that is itself an input, a parameter or an earlier result needs a value of its own.
            outputs.append(real_parts(tensor.clone() if id(tensor) in seen else tensor))
            seen.add(id(tensor))
        outputs += [real_parts(attrgetter(name)(self.model).detach().clone()) for name in self.state]
        return tuple(outputs)


def real_parts(tensor: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs of reals on a last axis, which is how the file holds them."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _positional_names(model: torch.nn.Module, count: int) -> list[str]:
    names: list[str] = []
    for parameter in inspect.signature(model.forward).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}_{i}" for i in range(count - len(names))]
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    return names[:count]


def _strip(value: Any, path: _Path, leaves: list[tuple[_Path, torch.Tensor]]) -> Any:
    """A copy of the structure with numbered slots for tensors, which are appended to `leaves`."""
    if isinstance(value, torch.Tensor):
        leaves.append((path, value))
        return _Slot(len(leaves) - 1)
    if isinstance(value, Mapping):
        return _with_items(
            value, {key: _strip(item, (*path, str(key)), leaves) for key, item in value.items()}
        )
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return _with_fields(value, {n: _strip(getattr(value, n), (*path, n), leaves) for n in names})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_strip(getattr(value, n), (*path, n), leaves) for n in value._fields))  # type: ignore[attr-defined]
    if isinstance(value, (list, tuple)):
        return type(value)([_strip(item, (*path, i), leaves) for i, item in enumerate(value)])
    return value


def _fill(part: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The inverse of `_strip`."""
    if isinstance(part, _Slot):
        return tensors[part.index]
    if isinstance(part, Mapping):
        return _with_items(part, {key: _fill(item, tensors) for key, item in part.items()})
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        names = [field.name for field in dataclasses.fields(part)]
        return _with_fields(part, {n: _fill(getattr(part, n), tensors) for n in names})
    if isinstance(part, tuple) and hasattr(part, "_fields"):
        return type(part)(*(_fill(item, tensors) for item in part))
    if isinstance(part, (list, tuple)):
        return type(part)([_fill(item, tensors) for item in part])
    return part


def _with_items(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if dataclasses.is_dataclass(mapping):  # a mapping that checks its fields when built, as model outputs do
        return items
    if type(mapping) is dict:
        return items
    # Not the class called anew: batch encodings and model outputs take other arguments than a table of items.
    twin = copy.copy(mapping)
    for key, item in items.items():
        twin[key] = item  # type: ignore[index]
    return twin


def _with_fields(instance: Any, fields: dict[str, Any]) -> Any:
    twin = copy.copy(instance)
    for name, value in fields.items():
        # frozen dataclasses refuse the ordinary way
        object.__setattr__(twin, name, value)
    return twin


def _require_tensors(part: Any, owner: str, where: str = "result") -> None:
    if part is None or isinstance(part, _Slot):
        return
    if isinstance(part, Mapping):
        items = [(str(key), item) for key, item in part.items()]
    elif dataclasses.is_dataclass(part) and not isinstance(part, type):
        items = [(field.name, getattr(part, field.name)) for field in dataclasses.fields(part)]
    elif isinstance(part, (list, tuple)):
        items = [(str(i), item) for i, item in enumerate(part)]
    else:
        raise ExportError(
            f"{owner} returns a {type(part).__name__} in {where}; an ONNX model returns tensors only. "
            "Wrap the module in one that returns the tensors you want."
        )
    for name, item in items:
        _require_tensors(item, owner, f"{where}.{name}")


def _leaf_names(paths: Sequence[_Path], *, default: str) -> list[str]:
    """Short names (the last key, with the indices below it) where they are unique, else whole paths."""
    short = [_joined(path, start=_last_key(path), default=default) for path in paths]
    if len(set(short)) == len(short):
        return short
    return [_joined(path, start=0, default=default) for path in paths]


def _last_key(path: _Path) -> int:
    return max((i for i, part in enumerate(path) if isinstance(part, str)), default=0)


def _joined(path: _Path, *, start: int, default: str) -> str:
    parts = [str(part) for part in path[start:]]
    if not parts or isinstance(path[start], int):
        parts = [default, *parts]
    return "_".join(parts)
