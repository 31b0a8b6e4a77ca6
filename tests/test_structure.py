"""The shape of the source tree: how deep imports go, names that mean one thing, promises that CONTRIBUTING makes.

The direction of imports is import-linter's: see the contracts in pyproject.toml.
"""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src"

# Base names that several modules have because they are about the same thing in different packages.
SHARED_NAMES = {
    "artifacts": "the package and its command",
    "check": "the gradient check and the command that runs it",
    "checkpoint": "the package, and loading it into a model in onnxblock",
    "data": "the package, and how the command line reads it",
    "distributed": "the package and its command",
    "doctor": "the report and its command",
    "errors": "the errors of a package",
    "export": "the package and its command",
    "finetune": "the function and its command",
    "forms": "ways to write an operation: for all passes, and for gradients alone",
    "head": "a new last layer: the public function, and the pass over a graph",
    "load": "loading a model: as a graph, or as a pipeline for inference",
    "lora": "adapters: the public functions, the pass over a graph, and the command",
    "loss": "losses as blocks, and gradients of ONNX's loss operators",
    "optim": "optimizers, and the same as blocks",
    "quantized": "quantized operators: their expansion and their gradients",
    "train": "the package and its command",
    "trainer": "the trainer and its deprecated name",
    "web": "the package and its command",
}


def _modules() -> dict[str, Path]:
    found = {}
    for path in (SOURCE / "onward").rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = _modules()


@functools.cache
def _tree(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"))


def _imports(name: str) -> set[str]:
    """The modules that one imports, inside functions too, but not those for type checkers alone."""
    skipped = {
        id(inner)
        for node in ast.walk(_tree(name))
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    named: list[str] = []
    for node in ast.walk(_tree(name)):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            named += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            named += [f"{node.module}.{alias.name}" for alias in node.names]
    found = set()
    for target in named:
        while target and target not in MODULES:
            target = target.rpartition(".")[0]
        if target and target != name:
            found.add(target)
    return found


def test_no_chain_of_imports_is_longer_than_fourteen_modules() -> None:
    graph = {name: _imports(name) for name in MODULES}
    longest: dict[str, list[str]] = {}

    def chain(name: str, above: tuple[str, ...] = ()) -> list[str]:
        assert name not in above, f"modules import each other: {' -> '.join([*above, name])}"
        if name not in longest:
            below = (chain(target, (*above, name)) for target in graph[name])
            longest[name] = [name, *max(below, key=len, default=[])]
        return longest[name]

    deepest = max((chain(name) for name in MODULES), key=len)
    assert len(deepest) <= 14, " -> ".join(deepest)


def _code_lines(path: Path) -> list[tuple[int, str]]:
    """Lines that say something: no blanks, brackets or comments, and no imports, which ruff writes and sorts."""
    text = path.read_text(encoding="utf-8")
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            skipped.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = ((number, " ".join(line.split())) for number, line in enumerate(text.splitlines(), 1))
    return [(n, line) for n, line in lines if n not in skipped and len(line) > 3 and not line.startswith("#")]


def test_no_two_places_share_six_lines() -> None:
    places = defaultdict(list)
    for path in sorted((SOURCE / "onward").rglob("*.py")):
        lines = _code_lines(path)
        for start in range(len(lines) - 5):
            key = tuple(line for _, line in lines[start : start + 6])
            places[key].append(f"{path.relative_to(SOURCE)}:{lines[start][0]}")
    shared = [" and ".join(found) for found in places.values() if len(found) > 1]
    assert not shared, "the same six lines: " + "; ".join(shared)


def test_no_two_modules_of_one_name_mean_different_things() -> None:
    by_name = defaultdict(list)
    for name in MODULES:
        by_name[name.rpartition(".")[2]].append(name)
    repeated = {name: paths for name, paths in by_name.items() if len(paths) > 1}
    assert set(repeated) == set(SHARED_NAMES), {n: repeated.get(n) for n in set(repeated) ^ set(SHARED_NAMES)}
