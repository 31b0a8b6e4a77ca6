"""The sandbox of chat templates: Jinja's, with bounds on what one rendering may write, hold and take.

A template comes from the model's folder. Jinja's own sandbox keeps it from Python's objects; memory and time are
bounded here, since `{% set x = x ~ x %}` needs no attribute at all. Each operation that makes a value is counted after
it ran, and one that makes more than a few times its inputs (padding, replacing, formats) is judged before.
Jinja2 is imported here, at the top: import this module inside of functions.
"""

from __future__ import annotations

import contextvars
import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

# Characters that one rendering may make, all intermediate values together: the longest contexts are a tenth of it.
_CHARACTERS = 1 << 26
_SECONDS = 10.0
# the largest factor, width or product of numbers
_LARGEST_NUMBER = 1 << 20
# a format with a width of millions, or with one from its arguments
_WIDE = re.compile(r"%[^%a-zA-Z]*(\d{7}|\*)|\{[^{}]*\d{7}")


class Spending:
    """What one rendering has taken so far."""

    def __init__(self) -> None:
        self._characters = 0
        self._deadline = time.monotonic() + _SECONDS
        # Lists do not change in this sandbox, so a size stays true. The list is held too: its id is not used again.
        self._sizes: dict[int, tuple[Any, int]] = {}

    def size(self, value: Any) -> int:
        """The characters of a value as text; a list that is twice inside another is written twice, and counts so."""
        if isinstance(value, str | bytes):
            return len(value)
        if not isinstance(value, list | tuple | Mapping):
            return 16
        entry = self._sizes.get(id(value))
        if entry is None:
            parts = [*value.keys(), *value.values()] if isinstance(value, Mapping) else value
            entry = value, 2 + sum(self.size(part) + 2 for part in parts)
            self._sizes[id(value)] = entry
        return entry[1]

    def add(self, count: int) -> None:
        """Count characters, or refuse them; every step comes here, so time is looked at here as well."""
        self._characters += count
        if self._characters > _CHARACTERS:
            raise TemplateError(f"it makes more than {_CHARACTERS >> 20} million characters")
        if time.monotonic() > self._deadline:
            raise TemplateError(f"it takes longer than {_SECONDS:.0f} seconds")


_spending: contextvars.ContextVar[Spending] = contextvars.ContextVar("onward_template")


def _count(value: Any) -> Any:
    spending = _spending.get()
    spending.add(spending.size(value))
    return value


# ---- operations whose result can be much larger than what goes in ------------------------------------


def _size(value: Any) -> int:
    return _spending.get().size(value)


def _number(value: Any) -> int:
    """A width, which some filters take as a text as well."""
    return len(value) if isinstance(value, str) else int(value)


def _replaced(text: Any, old: Any = "", new: Any = "", *_: Any, **__: Any) -> int:
    # an empty text is found before each character
    return str(text).count(str(old)) * len(str(new))


def _formatted(form: Any, *args: Any, **kwargs: Any) -> int:
    if _WIDE.search(str(form)):
        raise TemplateError("it formats a text to a large width")
    # a field may be named again and again
    return (str(form).count("{") + str(form).count("%")) * (_size(args) + _size(kwargs))


def _padded(text: Any, width: Any = 80, *_: Any, **__: Any) -> int:
    return _number(width)


def _indented(text: Any, width: Any = 4, *_: Any, indent: Any = 0, tabsize: Any = 0, **__: Any) -> int:
    # one for each line, item or tab, of which there are at most as many as characters
    return max(_number(width or 0), _number(indent or 0), _number(tabsize or 0)) * _size(text)


def _joined(items: Any, separator: Any = "", *_: Any, d: Any = "", **__: Any) -> int:
    if not isinstance(items, list | tuple | str | Mapping):  # a generator: its items are counted as they come
        return 0
    return len(items) * (len(str(separator)) + len(str(d))) + _size(items)


def _wrapped(text: Any, *args: Any, **kwargs: Any) -> int:
    words = [value for value in (*args, *kwargs.values()) if isinstance(value, str)]
    return _size(text) * max(map(len, words), default=1)


def _translated(text: Any, table: Any = (), *_: Any) -> int:
    return _size(text) * _size(table)


_GROWTH: dict[str, Callable[..., int]] = {
    "center": _padded, "ljust": _padded, "rjust": _padded, "zfill": _padded, "slice": _padded, "batch": _padded,
    "expandtabs": _indented, "indent": _indented, "tojson": _indented, "pprint": _indented,
    "replace": _replaced, "format": _formatted, "format_map": _formatted, "strftime_now": _formatted,
    "wordwrap": _wrapped, "urlize": _wrapped, "xmlattr": _wrapped, "translate": _translated,
}  # fmt: skip


def _require_growth(name: str, *args: Any, **kwargs: Any) -> None:
    growth = _GROWTH.get(name)
    amount = 0 if growth is None else growth(*args, **kwargs)
    if amount > _CHARACTERS:
        raise TemplateError(f"it makes a text of {amount:,} characters with {name}")


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that is judged before it runs and counted after."""
    # Jinja gives some filters its environment or context first: they carry a mark, which functools.wraps copies.
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if name == "join" and len(args) > first:
            items = args[first]
            listed = items if isinstance(items, list | tuple | str | Mapping) else list(_turns(items))
            args = (*args[:first], listed, *args[first + 1 :])
            _spending.get().add(_joined(*args[first:], **kwargs))
        _require_growth(name, *args[first:], **kwargs)
        return _count(function(*args, **kwargs))

    return run


def _turns(items: Iterable[Any]) -> Iterator[Any]:
    """The items of a loop, each counted: loops inside loops may turn for ever without making anything."""
    spending = _spending.get()
    for item in items:
        spending.add(1)
        yield item


# ---- the environment ---------------------------------------------------------------------------------


class _Counted(NodeTransformer):
    """Has what Jinja compiles to plain Python counted as well: loops, `~`, and lists and dicts written out."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _call("count_turns", [node.iter], node)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        self.generic_visit(node)
        return _call("join_texts", node.nodes, node)

    def visit_List(self, node: nodes.List) -> nodes.Call:
        self.generic_visit(node)
        return _call("count_value", [node], node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Call:
        self.generic_visit(node)
        return _call("count_value", [node], node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        self.generic_visit(node)
        return node if node.ctx == "store" else _call("count_value", [node], node)


def _call(name: str, arguments: Sequence[nodes.Node], node: nodes.Node) -> nodes.Call:
    # an attribute of the environment, not a global: a template can hide a global behind a variable of its own
    return nodes.Call(nodes.EnvironmentAttribute(name), list(arguments), [], None, None, lineno=node.lineno)


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which one rendering makes a bounded number of characters in a bounded time."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], finalize=_count
        )
        self.filters = {name: _bounded(name, function) for name, function in self.filters.items()}
        self.globals.pop("lipsum")

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Set a filter, within the bounds of all."""
        self.filters[name] = _bounded(name, function)

    def compiled(self, source: str) -> Callable[..., str]:
        """A function that renders the template; each call is bounded by itself."""
        token = _spending.set(Spending())  # constants are computed while it compiles
        try:
            template = self.from_string(source)
        finally:
            _spending.reset(token)

        def render(**values: Any) -> str:
            token = _spending.set(Spending())
            try:
                return template.render(**values)
            finally:
                _spending.reset(token)

        return render

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = _Counted().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    count_turns = staticmethod(_turns)
    count_value = staticmethod(_count)

    @staticmethod
    def join_texts(*values: Any) -> str:
        """What `~` does."""
        _spending.get().add(sum(map(_size, values)))
        return "".join(map(str, values))

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """The text of a template, a macro or a block of `set`."""
        return _count("".join(parts))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            _require_growth("format", left, right)
        elif operator == "+" and isinstance(left, str | list | tuple):
            _spending.get().add(_size(left) + _size(right))
        elif operator == "*":
            sizes = [len(x) if isinstance(x, str | list | tuple) else abs(x) for x in (left, right)]
            if sizes[0] * sizes[1] > _LARGEST_NUMBER:
                raise TemplateError("it computes something large with *")
        elif operator == "**" and (abs(right) > 64 or abs(left) > _LARGEST_NUMBER):
            raise TemplateError("it computes something large with **")
        return _count(super().call_binop(context, operator, left, right))

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        method = getattr(function, "__wrapped__", function)
        owner, name = getattr(method, "__self__", None), getattr(function, "__name__", "")
        if isinstance(owner, str):
            if name == "join" and args:
                args = (listed := list(_turns(args[0])), *args[1:])
                _spending.get().add(_joined(listed, owner))
            _require_growth(name, owner, *args, **kwargs)
        elif name == "strftime_now":
            _require_growth(name, *args, **kwargs)
        return _count(super().call(context, function, *args, **kwargs))
