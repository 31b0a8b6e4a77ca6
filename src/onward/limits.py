"""How much an untrusted file may ask for, in one place.

A small file can describe a large computation: functions that call each other, views over one file, a constant
that doubles with each node. Whoever reads such a file compares what it asks for with these limits before memory
or time is spent. Each error names the limit and how to raise it.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator

from onward.errors import LimitError

_MIB, _GIB = 2**20, 2**30


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits; `docs/security.md` says what each protects.

    Sizes are in bytes, times in seconds.
    """

    model_bytes: int = 2 * _GIB - 1  # a model file, without external data: what protobuf can hold
    nodes: int = 1_000_000  # nodes of a model, functions expanded
    nesting: int = 32  # graphs inside graphs, functions inside functions
    folded_bytes: int = _GIB  # what constants of a model grow to before it runs
    dense_bytes: int = _GIB  # sparse tensors of a model, written out
    shared_bytes: int = _GIB  # external data that several tensors of a model name again
    value_bytes: int = 16 * _GIB  # one value, by the shape that the model declares
    unpacked_bytes: int = 4 * _GIB  # what a data file grows to when read, counted from 16 times its size
    text_bytes: int = 64 * _MIB  # a JSON or TOML file, a line of a table
    text_nesting: int = 64  # lists and tables inside each other in JSON and TOML
    check_seconds: int = 300  # the time that `onward check` or a gradient check may take
    check_bytes: int = 8 * _GIB  # the memory that these may take
    run_seconds: int = 600  # the time that one run of a loaded model may take
    run_bytes: int = 16 * _GIB  # the memory that one run of a loaded model may take


_DEFAULTS = Limits()
_limits: contextvars.ContextVar[Limits] = contextvars.ContextVar("onward_limits")


def current() -> Limits:
    """The limits that hold here.

    >>> current().nesting
    32
    """
    return _limits.get(_DEFAULTS)


@contextlib.contextmanager
def override(**values: int) -> Iterator[Limits]:
    """Change limits for a block.

    >>> with override(nodes=5_000_000) as chosen:
    ...     chosen.nodes
    5000000
    """
    names = [field.name for field in dataclasses.fields(Limits)]
    for name, value in values.items():
        if name not in names:
            raise ValueError(f"there is no limit '{name}'; there are {', '.join(names)}")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"the limit {name} is {value!r}: it must be a whole number from 1")
    token = _limits.set(dataclasses.replace(current(), **values))
    try:
        yield current()
    finally:
        _limits.reset(token)


def require(name: str, amount: int, what: str) -> None:
    """Raise `LimitError` where an amount is over the limit of this name; `what` asks for it."""
    allowed = getattr(current(), name)
    if amount > allowed:
        raise LimitError(what, name, amount, allowed)
