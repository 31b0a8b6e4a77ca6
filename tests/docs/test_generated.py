"""Pages that are made by programs are what those programs make today."""

from __future__ import annotations

import importlib.util
import json
import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def load_program(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    return program


def test_the_options_of_the_command_line_are_current_and_all_are_explained() -> None:
    program = load_program("generate_cli")
    made = program.page()
    assert program.PAGE.read_text(encoding="utf-8") == made, "run: python docs/generate_cli.py"
    assert "| `--clip-norm` `FLOAT` |" in made.split("## onward distributed")[1].split("\n## ")[0]
    rows = [line for line in made.splitlines() if line.startswith("| `")]
    assert len(rows) > 150 and not [row for row in rows if row.endswith("|  |")]


def test_the_table_of_operators_is_current() -> None:
    program = load_program("generate_operators")
    made = program.page()
    assert program.PAGE.read_text(encoding="utf-8") == made, "run: python docs/generate_operators.py"
    assert "| Conv |" in made


def test_the_table_of_commands_has_every_command() -> None:
    from onward.cli.app import app

    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `onward (\w+)", page, re.M))
    commands = {command.name for command in app.registered_commands}
    groups = {group.name for group in app.registered_groups}
    assert listed == commands | groups


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    missing = [page.name for page in (ROOT / "docs").glob("*.md") if f" {page.name}\n" not in text]
    assert not missing


def test_the_readme_counts_published_models_as_the_benchmark_did() -> None:
    page = (ROOT / "docs" / "published-models.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if re.match(r"\| [a-z-]+ \| `", line)]
    slopes = [re.search(r"\| (\d\.\d+)[^|]*\| [^|]*\|$", row) for row in rows]
    right = [slope for slope in slopes if slope and abs(float(slope[1]) - 1) < 0.02]
    assert f"{len(right)} of {len(rows)} ONNX models" in page
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"[{len(right)} of {len(rows)} published models]" in readme


def test_the_table_of_hugging_face_types_has_every_pair_that_is_tried() -> None:
    program = load_program("generate_huggingface")
    assert program.listed() == program.rows(), "run: python docs/generate_huggingface.py"
    assert len({kind for kind, _, _ in program.rows()}) >= 70
    # a slice of it, exported anew
    for kind, task in (
        ("electra", "token-classification"),
        ("olmo", "text-generation"),
        ("swin", "image-classification"),
    ):
        assert program.difference(kind, task) < 1e-5


def test_the_notebooks_are_the_start_pages() -> None:
    program = load_program("generate_notebooks")
    for path, text in program.notebooks().items():
        assert path.read_text(encoding="utf-8") == text, "run: python docs/generate_notebooks.py"
        document = json.loads(text)
        first, *codes = ["".join(cell["source"]) for cell in document["cells"] if cell["cell_type"] == "code"]
        assert first == program.install(program.STARTS[path.stem])
        links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
        assert not [link for link in links if not (path.parent / link).exists()]
        page = (ROOT / "docs" / f"{path.stem}.md").read_text(encoding="utf-8")
        assert codes and all(code.strip() in page for code in codes)


def test_the_citation_names_this_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {project['version']}\n" in citation
