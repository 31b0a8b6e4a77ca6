"""Old names of arguments: they still work, and warn. CHANGELOG.md says for how long."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["renamed_arguments"]

Function = TypeVar("Function", bound=Callable[..., Any])


def renamed_arguments(**names: str) -> Callable[[Function], Function]:
    """Let a function take arguments by their old names too, given as `old="new"`.

    >>> @renamed_arguments(output="path")
    ... def write(path): return path
    >>> with warnings.catch_warnings(record=True) as heard:
    ...     write(output="model.onnx")
    'model.onnx'
    """

    def wrap(function: Function) -> Function:
        name = function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def call(*args: Any, **arguments: Any) -> Any:
            for old in names.keys() & arguments.keys():
                new = names[old]
                if new in arguments:
                    raise TypeError(f"{name}() got {new} twice: as {new} and by its old name, {old}")
                warnings.warn(f"{name}({old}=…) is now {new}=…", DeprecationWarning, stacklevel=2)
                arguments[new] = arguments.pop(old)
            return function(*args, **arguments)

        return call  # type: ignore[return-value]

    return wrap
