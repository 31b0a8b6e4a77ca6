"""Options from a TOML file: a table for each command, keys as the long options without dashes.

[train]
epochs = 20
learning-rate = 1e-3

Such a file never runs code: module:function is for the command line only.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from pathlib import Path
from typing import Any

from onward.cli.errors import CommandError
from onward.cli.python_entry import names_code
from onward.errors import LimitError
from onward.limits import require
from onward.reading import read_text, require_shallow

__all__ = ["read_settings"]

# A string that does not end runs to the end of its line, so that the search is linear in hostile text too.
_QUOTED = re.compile(r"\"(?:[^\"\\\n]|\\[^\n])*+(?:\"|\\?$)|'[^'\n]*+(?:'|$)", re.MULTILINE)
_PARTS = re.compile(r"[=,{}\[\]\n#]")


def read_settings(path: Path, command: Any, name: str) -> dict[str, Any]:
    """The options that a file has for a command, by parameter name."""
    try:
        text = read_text(path)
        _require_shallow(text)
        document = tomllib.loads(text)
    except OSError as error:
        raise CommandError(
            f"cannot read '{path}': {error.strerror or error}", "is the path right?"
        ) from error
    except LimitError as error:
        raise CommandError(f"'{path}' is rejected: {error}", error.hint) from error
    except (ValueError, RecursionError) as error:
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
        code = names_code(value)
        if code is not None:
            raise CommandError(
                f"'{path}': [{name}] {key} names Python code, '{code}', and a file never runs code here",
                f"if you trust that code, name it on the command line: {_option(parameter)} {code}".replace(
                    "  ", " "
                ),
            )
        if getattr(parameter, "multiple", False) and not isinstance(value, list):
            value = [value]
        found[parameter.name] = value
    return found


def _require_shallow(text: str) -> None:
    """Refuse brackets and dotted keys that nest deep: the parser's memory grows with the square of the dots."""
    require_shallow(text)
    for part in _PARTS.split(_QUOTED.sub("", text)):
        require("text_nesting", part.count("."), "a dotted key")


def _option(parameter: Any) -> str:
    """How a parameter is named on the command line; nothing for an argument."""
    return f"--{_spelling(parameter)}" if any(text.startswith("-") for text in parameter.opts) else ""


def _spelling(parameter: Any) -> str:
    """The long option of a parameter, without dashes."""
    longest = max(parameter.opts, key=len, default=parameter.name or "")
    return longest.lstrip("-")
