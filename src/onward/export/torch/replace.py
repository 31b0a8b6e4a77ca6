"""Sets attributes for as long as a context lasts: functions of torch, parts of modules, entries of configurations.

The one way in which an export changes what is not its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

# an object, the name of its attribute, and the value for as long as the context lasts
Replacement = tuple[Any, str, Any]


@contextmanager
def replaced(*replacements: Replacement) -> Iterator[None]:
    """Give attributes other values, and give back the old ones; what was inherited is inherited again.

    >>> import torch
    >>> with replaced((torch.nn.functional, "relu", torch.tanh)):
    ...     float(torch.nn.functional.relu(torch.tensor(-100.0)))
    -1.0
    """
    with ExitStack() as stack:
        for owner, name, value in replacements:
            stack.callback(_restore(owner, name))
            setattr(owner, name, value)
        yield


def _restore(owner: Any, name: str) -> Callable[[], None]:
    if name in vars(owner):
        return partial(setattr, owner, name, vars(owner)[name])
    # A method set on an instance hides its class's; children of modules and configurations' properties are in neither.
    inherited = isinstance(owner, type) or callable(getattr(type(owner), name, None))
    if inherited or not hasattr(owner, name):
        return partial(delattr, owner, name)
    return partial(setattr, owner, name, getattr(owner, name))
