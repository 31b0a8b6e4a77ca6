"""The error of a command that was used wrongly, and any error as one line and a hint.

The library's errors name Python functions and arguments; what to do at the command line they carry as `hint`.
"""

from __future__ import annotations

import errno
import importlib.metadata
import re

from onward.errors import DataError, OnwardError


class CommandError(Exception):
    """A mistake in how a command was used; `hint` says what to do."""

    def __init__(self, message: str, hint: str = "") -> None:
        self.hint = hint
        super().__init__(message)


# the sections of docs/errors.md, which are named after classes of errors
SECTIONS = frozenset(
    {
        "CheckpointError", "DataError", "DeviceError", "DeviceMemoryError", "DistributedError", "ExportError",
        "GradientMismatch", "LimitError", "ModelError", "NonFiniteError", "OnwardError", "OptionError",
        "ParityError", "PrivacyBudgetError", "UnsupportedOps", "UpdateError",
    }
)  # fmt: skip

_FILES = {
    errno.ENOENT: ("there is no '{}'", "is the path right?"),
    errno.EISDIR: ("'{}' is a folder, and a file is needed", "name a file"),
    errno.ENOTDIR: ("'{}' cannot be: a part of its path is a file, not a folder", "choose another path"),
    errno.EEXIST: ("'{}' is a file, and a folder is needed there", "choose another path"),
    errno.EACCES: ("'{}' may not be read or written", "look at its permissions, or choose another path"),
    errno.EPERM: ("'{}' may not be read or written", "look at its permissions, or choose another path"),
    errno.EROFS: ("'{}' is on a file system that cannot be written", "choose another path"),
    errno.ENOSPC: ("no space is left for '{}'", "free some, or choose another disk"),
    errno.EFBIG: ("'{}' would be larger than a file may be here", "raise the limit, or choose another disk"),
    errno.ENAMETOOLONG: ("the name '{}' is too long", "choose a shorter one"),
}
_EXTRAS = {
    "torch": "torch",
    "onnxscript": "torch",
    "transformers": "transformers",
    "tokenizers": "text",
    "jinja2": "text",
    "pyarrow": "data",
    "PIL": "data",
    "yaml": "data",
}


# where sets of files are written before they take their names (`onward.files`): users know the folder above
_ASIDE = re.compile(r"/?\.onward-[0-9a-f]{16}([/\\]files)?(?=[/\\'\": ]|$)")


def explain(error: BaseException) -> tuple[str, str]:
    """What to print about an error: a line, and what to do, with the page that says more."""
    line, hint = _line_and_hint(error)
    line = _ASIDE.sub("", line)
    page = page_of(error)
    return line, f"{hint}; see {page}" if page else hint


def page_of(error: BaseException) -> str:
    """The address of what the documentation says about this kind of error; nothing for errors of Python's own kinds."""
    if not isinstance(error, OnwardError):
        return ""
    section = next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in SECTIONS)
    return f"{_errors_page()}#{section.lower()}"


def _errors_page() -> str:
    """On the project's site, once the package names one; else in the repository."""
    try:
        addresses = importlib.metadata.metadata("onward").get_all("Project-URL") or []
    except importlib.metadata.PackageNotFoundError:
        addresses = []
    for name, _, address in (entry.partition(", ") for entry in addresses):
        if name.lower() == "documentation":
            return f"{address.rstrip('/')}/errors/"
    return "docs/errors.md"


def _line_and_hint(error: BaseException) -> tuple[str, str]:
    if isinstance(error, CommandError | DataError):
        return _line(str(error)), error.hint or "--debug shows where it happened"
    if isinstance(error, ModuleNotFoundError):
        extra = _EXTRAS.get((error.name or "").split(".")[0])
        hint = "is it installed, and the current folder the right one?"
        return f"the module '{error.name}' is not there", f"pip install 'onward[{extra}]'" if extra else hint
    # by number: strerror is in the language of the system, and does not say which file
    if isinstance(error, OSError) and error.filename and error.errno in _FILES:
        text, hint = _FILES[error.errno]
        # filename2 is the target of a rename, which the user named; the other is ours
        return text.format(error.filename2 or error.filename), hint
    # str of a KeyError is the repr of its text, in quotes
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return _line(text) or type(error).__name__, _hint(error)


def _line(text: str) -> str:
    """One line: lists, which some errors have below their first line, follow it after semicolons."""
    parts = [re.sub(r"\s+", " ", line).strip() for line in text.strip().splitlines()]
    head, *more = [part for part in parts if part] or [""]
    if not more:
        return head
    return f"{head} {'; '.join(more)}" if head.endswith(":") else "; ".join([head, *more])


def _hint(error: BaseException) -> str:
    """What the error itself says to do; else that of what it came from."""
    seen: BaseException | None = error
    # what was raised last explains, what was raised first often knows the remedy
    while seen is not None:
        if hint := getattr(seen, "hint", ""):
            return str(hint)
        seen = seen.__cause__
    if isinstance(error, MemoryError):
        return "use a smaller --batch-size, or a machine with more memory"
    return "--debug shows where it happened"
