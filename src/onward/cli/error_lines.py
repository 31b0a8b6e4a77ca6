"""Any error as one line and a hint: what to say about files that cannot be used, and about our own errors.

The library's errors name Python functions and arguments; the hints here name commands and options.
"""

from __future__ import annotations

import errno
import re

from onward.cli.errors import CommandError
from onward.errors import DataError

__all__ = ["explain"]

_FILES = {
    errno.ENOENT: ("there is no '{}'", "is the path right?"),
    errno.EISDIR: ("'{}' is a folder, and a file is needed", "name a file"),
    errno.ENOTDIR: ("'{}' cannot be: a part of its path is a file, not a folder", "choose another path"),
    errno.EEXIST: ("'{}' is a file, and a folder is needed there", "choose another path"),
    errno.EACCES: ("'{}' may not be read or written", "look at its permissions, or choose another path"),
    errno.EPERM: ("'{}' may not be read or written", "look at its permissions, or choose another path"),
    errno.EROFS: ("'{}' is on a file system that cannot be written", "choose another path"),
    errno.ENOSPC: ("no space is left for '{}'", "free some, or choose another disk"),
    errno.ENAMETOOLONG: ("the name '{}' is too long", "choose a shorter one"),
}
_HINTS = {
    "NonFiniteError": "lower --learning-rate, clip gradients with --clip-norm, or look for NaN in the data",
    "ParityError": "loosen --rtol/--atol only if you know why the outputs differ",
    "UnsupportedOps": "freeze those parameters with --freeze, or add a rule: docs/adding-a-gradient.md",
    "CheckpointError": "name a checkpoint that onward train or onward artifacts wrote; is it whole?",
    "MemoryError": "use a smaller --batch-size, or a machine with more memory",
}
# what the library says, and which option or command answers it
_ANSWERS = (
    (r"needs a single number|loss=…", "choose a loss with --loss"),
    (r"external data of tensor", "the file with the weights belongs beside the model"),
    (
        r"not a readable ONNX model|no optimizer model|Eval model was not|generate_artifacts|directory of artifacts",
        "make artifacts with: onward artifacts model.onnx",
    ),
    (r"lora=LoRA|no adapters", "train some with: onward artifacts model.onnx --lora 8"),
    (r"from_transformers|onward\.json", "make such a folder with: onward export SOURCE --output FOLDER"),
    (r"could not be found|not found in the graph|not a graph value", "onward inspect shows the names"),
    (r"is not an ONNX model", "export one first: onward export --help"),
    (r"not a site of Onward", "choose another folder"),
    (r"frozen and require", "leave it out of --train, or out of --freeze"),
    (r"matches no weight", "name weights or patterns, such as 'encoder.*'"),
    (r"the step failed on inputs", "onward inspect shows which shapes the model takes"),
    (r"cannot make batches of", "docs/cli.md says what a module:function may return"),
    (r"npm", "install Node.js, or run in a folder whose node_modules has them"),
)
_EXTRAS = {
    "torch": "torch",
    "onnxscript": "torch",
    "transformers": "transformers",
    "tokenizers": "text",
    "pyarrow": "data",
    "PIL": "data",
}


def explain(error: BaseException) -> tuple[str, str]:
    """What to print about an error: a line, and what to do."""
    if isinstance(error, CommandError | DataError):
        return _line(str(error)), error.hint or "--debug shows where it happened"
    if isinstance(error, ModuleNotFoundError):
        extra = _EXTRAS.get((error.name or "").split(".")[0])
        hint = (
            f"pip install 'onward[{extra}]'"
            if extra
            else "is it installed, and the current folder the right one?"
        )
        return f"the module '{error.name}' is not there", hint
    if isinstance(error, OSError) and error.filename and error.errno in _FILES:
        text, hint = _FILES[error.errno]
        return text.format(error.filename2 or error.filename), hint
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    kind = type(error).__name__
    return _line(text) or kind, _hint(text, [base.__name__ for base in type(error).__mro__])


def _line(text: str) -> str:
    """One line: lists, which some errors have below their first line, follow it after semicolons."""
    parts = [re.sub(r"\s+", " ", line).strip() for line in text.strip().splitlines()]
    head, *rest = [part for part in parts if part] or [""]
    if not rest:
        return head
    return f"{head} {'; '.join(rest)}" if head.endswith(":") else "; ".join([head, *rest])


def _hint(text: str, kinds: list[str]) -> str:
    for pattern, hint in _ANSWERS:
        if re.search(pattern, text):
            return hint
    return next((_HINTS[kind] for kind in kinds if kind in _HINTS), "--debug shows where it happened")
