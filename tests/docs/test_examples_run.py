"""Every Python block of README.md and docs/ runs, each page from top to bottom in an empty folder.

No block is left out. What needs a GPU or a package that is not installed runs up to the call that says so.
"""

from __future__ import annotations

import ast
import json
import re
import traceback
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from onward.errors import DeviceError, OnwardError

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^```python[^\n]*\n(?P<code>.*?)^```$", re.M | re.S)
# packages that `make test` does not install: they limit the versions of others too much
_NOT_INSTALLED = {"flwr"}


def blocks(page: Path) -> list[tuple[int, str]]:
    """The line and text of each block."""
    text = page.read_text(encoding="utf-8")
    return [(text[: match.start("code")].count("\n"), match["code"]) for match in _BLOCK.finditer(text)]


def stand_in_for_the_hub() -> None:
    """Small models under the names that a page uses; what a folder's name says is not downloaded."""
    from export.tiny_transformers import tiny_pair

    for task, name in (
        ("pooling", "sentence-transformers/all-MiniLM-L6-v2"),
        ("text-classification", "my-bert"),
    ):
        for part in tiny_pair("bert", task):
            part.save_pretrained(name)


def stand_in_for_a_language_model() -> None:
    """A small model that writes, with a chat template, and a conversation to learn from."""
    from export.huggingface_types import tiny_of

    model, tokenizer = tiny_of("llama", "text-generation")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} </s> {% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )
    for part in (model, tokenizer):
        part.save_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct")
    line = {"messages": [{"role": "user", "content": "why"}, {"role": "assistant", "content": "at noon"}]}
    Path("chat.jsonl").write_text(json.dumps(line), encoding="utf-8")


def stand_in_for_all_that_is_exported() -> None:
    """What the page on exporting uses: encoders from the hub, and a folder that writes."""
    from onward.export import from_transformers

    stand_in_for_the_hub()
    stand_in_for_a_language_model()
    from_transformers("HuggingFaceTB/SmolLM2-135M-Instruct", "text-generation", "smollm")


def stand_in_for_artifacts() -> None:
    """Artifacts of a small classifier, and a checkpoint as a page in a browser would save it."""
    import onnx.parser

    from onward.artifacts import generate_artifacts

    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        net (float[N, 2] x) => (float[N, 3] scores) <float[2, 3] w = {1, 2, 3, 4, 5, 6}> { scores = MatMul (x, w) }""")
    generate_artifacts(model, loss="cross-entropy", optimizer="adamw", artifact_directory="artifacts")
    Path("checkpoint").write_bytes(Path("artifacts/checkpoint").read_bytes())


PREPARE = {
    "browser": stand_in_for_artifacts,
    "gpu": stand_in_for_artifacts,
    "language-models": stand_in_for_a_language_model,
    "language-model-options": stand_in_for_all_that_is_exported,
    "preferences": stand_in_for_all_that_is_exported,
    "exporting-from-hugging-face": stand_in_for_all_that_is_exported,
    "fine-tuning-hugging-face": stand_in_for_the_hub,
}


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    PREPARE.get(page.stem, lambda: None)()
    assert failure_in(page) is None


def failure_in(page: Path) -> str | None:
    """Run the blocks of a page one after the other; the traceback of the first that fails."""
    namespace = {"__name__": "__main__"}
    for line, code in blocks(page):
        try:
            # the line numbers of a traceback are then those of the page
            tree = ast.parse("\n" * line + code, str(page))
            for statement in tree.body:
                execute(compile(ast.Module([statement], []), str(page), "exec"), namespace)
        except Exception:
            return traceback.format_exc()
    return None


def execute(statement: CodeType, namespace: dict[str, Any]) -> None:
    """Run a statement; a device or a package that is not here may end it, when all before has run."""
    try:
        exec(statement, namespace)
    except DeviceError:
        pass
    except (ModuleNotFoundError, OnwardError) as error:
        missing = error if isinstance(error, ModuleNotFoundError) else error.__cause__
        if getattr(missing, "name", None) not in _NOT_INSTALLED:
            raise


def test_no_block_is_left_out() -> None:
    every = [*PAGES, *(ROOT / "docs").glob("*/*.md")]
    assert not [page.name for page in every if "<!-- not run" in page.read_text(encoding="utf-8")]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.stem)
def test_a_page_that_needs_torch_says_so(page: Path) -> None:
    code = "\n".join(code for _, code in blocks(page))
    if re.search(r"\b(import|from) (torch|transformers)\b", code):
        assert "pip install" in page.read_text(encoding="utf-8")


def test_links_between_pages_lead_somewhere() -> None:
    broken = []
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]:
        for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", page.read_text(encoding="utf-8")):
            if not (page.parent / target).exists():
                broken.append(f"{page.name}: {target}")
    assert not broken
