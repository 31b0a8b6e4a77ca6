"""The shape of the source tree: how deep imports go, names that mean one thing, promises that CONTRIBUTING makes.

The direction of imports is import-linter's: see the contracts in pyproject.toml.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src"

# Base names that several modules have because they are about the same thing in different packages.
SHARED_NAMES = {
    "artifacts": "the package and its command",
    "chat": "templates of conversations, and the command that holds one",
    "check": "the gradient check and the command that runs it",
    "data": "the package, and how the command line reads it",
    "distributed": "the package and its command",
    "doctor": "the report and its command",
    "errors": "the errors of a package",
    "evaluate": "the function and its command",
    "export": "the package and its command",
    "finetune": "the function, its command, and the same of a language model",
    "forms": "ways to write an operation: for all passes, and for gradients alone",
    "head": "a new last layer: the public function, and the pass over a graph",
    "load": "loading a model: as a graph, or as a pipeline for inference",
    "lora": "adapters: the public functions, the pass over a graph, and the command",
    "loss": "losses as blocks, and gradients of ONNX's loss operators",
    "optim": "optimizers, and the same as blocks",
    "quantize": "the pass over a graph that training uses, and quantizing files: their schemes, measured and chosen",
    "tasks": "the package, and Hugging Face's table of tasks",
    "train": "the package and its command",
    "web": "the package and its command",
    "mobile": "the package and its command",
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


def test_no_chain_of_imports_is_longer_than_twelve_modules() -> None:
    graph = {name: _imports(name) for name in MODULES}
    longest: dict[str, list[str]] = {}

    def chain(name: str, above: tuple[str, ...] = ()) -> list[str]:
        assert name not in above, f"modules import each other: {' -> '.join([*above, name])}"
        if name not in longest:
            below = (chain(target, (*above, name)) for target in graph[name])
            longest[name] = [name, *max(below, key=len, default=[])]
        return longest[name]

    deepest = max((chain(name) for name in MODULES), key=len)
    assert len(deepest) <= 12, " -> ".join(deepest)


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


# --- The door of each package: what docs/api lists is public; nothing else offers names, or is used by the docs.

ROOT = SOURCE.parent


def _public_modules() -> set[str]:
    """The modules that docs/api lists, whole or a name of theirs."""
    entries = {
        entry
        for page in (ROOT / "docs" / "api").glob("*.md")
        for entry in re.findall(r"^::: (\S+)", page.read_text(encoding="utf-8"), re.MULTILINE)
    }
    modules = set()
    for entry in entries:
        while entry not in MODULES:
            entry = entry.rpartition(".")[0]
            assert entry, "docs/api lists a module that is not there"
        modules.add(entry)
    return modules


def _is_package(name: str) -> bool:
    return MODULES[name].name == "__init__.py"


def test_only_public_modules_offer_names() -> None:
    offering = {
        name
        for name in MODULES
        if any(
            isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
            for node in _tree(name).body
        )
    }
    assert {name for name in offering if not _is_package(name)} <= _public_modules()


def test_the_docs_and_examples_import_public_modules_only() -> None:
    public = _public_modules() | {name for name in MODULES if _is_package(name)}
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.py")]
    private = {
        (page.name, name)
        for page in pages
        for name in re.findall(
            r"^\s*(?:>>> )?from (onward[\w.]*) import", page.read_text("utf-8"), re.MULTILINE
        )
        if name not in public
    }
    assert not private


def test_one_module_makes_the_sessions_of_onnxruntime() -> None:
    text = "InferenceSession("
    naming = {name for name, path in MODULES.items() if text in path.read_text(encoding="utf-8")}
    makers = {"ort.InferenceSession", "LimitedSession"}
    assert naming == {"onward.ort_session"}, f"make sessions with ort_session.create_session, not in {naming}"
    # nor by way of another name for the class
    for name in MODULES:
        for node in ast.walk(_tree(name)):
            if isinstance(node, ast.Assign) and name != "onward.ort_session":
                assert ast.unparse(node.value) not in makers, f"{name}, line {node.lineno}"


# --- One of each.


def _calls(name: str) -> set[str]:
    """The methods that a module calls, by their written form."""
    return {ast.unparse(node.func) for node in ast.walk(_tree(name)) if isinstance(node, ast.Call)}


def test_there_is_one_training_loop_and_one_history() -> None:
    """Engines apply updates; the loop alone asks them to, and the trainer's trial of learning rates."""
    histories = {
        name
        for name in MODULES
        for node in ast.walk(_tree(name))
        if isinstance(node, ast.ClassDef) and node.name == "History"
    }
    assert histories == {"onward.train.history"}
    assert {name for name in MODULES if "engine.backward" in _calls(name)} == {
        "onward.train.loop",
        "onward.train.trainer",
    }
    steps = {name for name in MODULES if any(call.endswith("optimizer.step") for call in _calls(name))}
    assert steps == {
        "onward.api.train_steps",  # several steps in one call, without data or epochs
        "onward.cli.commands.bench",  # measures one step
        "onward.distributed.stages.pipeline_parallel",
        "onward.federated.client",  # a device's round, without torch or a run's files
        "onward.train.engines",
    }
