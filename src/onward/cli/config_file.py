"""Options from a TOML file: a table for each command, keys as the long options without dashes.

[train]
epochs = 20
learning-rate = 1e-3
"""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any

from onward.cli.errors import CommandError

__all__ = ["read_settings"]


def read_settings(path: Path, command: Any, name: str) -> dict[str, Any]:
    """The options that a file has for a command, by parameter name."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CommandError(
            f"cannot read '{path}': {error.strerror or error}", "is the path right?"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CommandError(
            f"'{path}' is not valid TOML: {error}", "one option a line, as in: epochs = 20"
        ) from error
    table = document.get(name, {})
    if not isinstance(table, dict):
        raise CommandError(f"'{path}': [{name}] must be a table", f"write it as [{name}] with one key a line")
    known = {_spelling(parameter): parameter for parameter in command.params}
    known |= {parameter.name.replace("_", "-"): parameter for parameter in command.params if parameter.name}
    found: dict[str, Any] = {}
    for key, value in table.items():
        parameter = known.get(key.replace("_", "-"))
        if parameter is None:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(sorted(known))}"
            raise CommandError(f"'{path}': [{name}] has the unknown option '{key}'", hint)
        if getattr(parameter, "multiple", False) and not isinstance(value, list):
            value = [value]
        found[parameter.name] = value
    return found


def _spelling(parameter: Any) -> str:
    """The long option of a parameter, without dashes."""
    longest = max(parameter.opts, key=len, default=parameter.name or "")
    return longest.lstrip("-")
