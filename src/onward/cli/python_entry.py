"""`module:function` on the command line: the only thing there that runs a user's own code.

A file never gets here: what names code in a run's folder or in a configuration file is refused by those who read
them, with `names_code`.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

from onward.cli.errors import CommandError

_ENTRY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def is_entry(text: str) -> bool:
    """Whether a text is `module:function` and not a path."""
    # a file may be called "a:b": what is there is data
    return names_code(text) is not None and not Path(text).exists()


def names_code(value: Any) -> str | None:
    """The first `module:function` in an option's value or list of values; None where there is none."""
    for text in value if isinstance(value, list | tuple) else [value]:
        if isinstance(text, str) and _ENTRY.fullmatch(text):
            return text
    return None


def import_entry(text: str) -> Any:
    """What `module:name` names; modules of the current folder count."""
    module_name, _, attribute = text.partition(":")
    here = str(Path.cwd())
    # the console script has its own folder first, not the user's
    if here not in sys.path:
        sys.path.insert(0, here)
    # a program that calls commands may have written the module just now
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # the module itself is missing, not one that it imports
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise CommandError(
                f"'{text}': there is no module '{error.name}'",
                f"write it without .py: {module_name.removesuffix('.py')}:{attribute}"
                if module_name.endswith(".py")
                else "write module:function; the module may be a .py file of the current folder",
            ) from error
        raise
    if not hasattr(module, attribute):
        raise CommandError(f"'{text}': the module has no '{attribute}'", "write module:function")
    return getattr(module, attribute)
