"""Every "onward[extra]" in messages and docs brings the package that the hint is for."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from onward.cli.errors import _EXTRAS

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
HINT = re.compile(r"""(?:\bonward|pip install ["']?\.)\[([a-z,]+)\]""")
# what stands beside a hint when it is for this package, and the package's name where the word is another
SUBJECTS = {
    "jinja2": "jinja2", "tokenizers": "tokenizers", "torch": "torch", "torch.distributed": "torch",
    "transformers": "transformers", "Hugging Face": "transformers", "PyTorch": "torch", "Parquet": "pyarrow",
    "pictures": "pillow", "images": "pillow", "Flower": "flwr", "CUDAExecutionProvider": "onnxruntime-gpu",
}  # fmt: skip
MODULES = {"PIL": "pillow", "yaml": "pyyaml"}
# the package of each hint in the source: a message has one subject
IN_SOURCE = {
    "runtime/devices.py": "onnxruntime",  # of CUDA and of the plug-in for WebGPU
    "doctor.py": "onnxruntime-ep-webgpu",
    "language/chat.py": "jinja2",
    "cli/training_run.py": "torch",
    "data/text.py": "tokenizers",
    "federated/flower.py": "flwr",
    "federated/privacy.py": "dp-accounting",
    "distributed/comm.py": "torch",
}


def packages(extra: str) -> set[str]:
    names: set[str] = set()
    for line in EXTRAS[extra]:
        name = re.match(r"[\w.-]+", line)
        assert name is not None
        inner = re.match(r"onward\[([\w,]+)\]", line)
        names |= set().union(*map(packages, inner[1].split(","))) if inner else {name[0].lower()}
    return names


def hints(files: list[Path]) -> list[tuple[str, str, str]]:
    """File, line and extras of each hint."""
    return [
        (str(file.relative_to(ROOT)), line, match[1])
        for file in files
        for line in file.read_text("utf-8").splitlines()
        for match in HINT.finditer(line)
    ]


PAGES = [file for folder in ("docs", "examples") for file in sorted((ROOT / folder).rglob("*.md"))]
IN_DOCS = hints([ROOT / "README.md", *PAGES])


@pytest.mark.parametrize(("file", "line", "extras"), IN_DOCS)
def test_a_hint_in_the_docs_names_extras_that_bring_its_subject(file: str, line: str, extras: str) -> None:
    brought = set().union(*map(packages, extras.split(",")))
    if line.startswith("|") or "#" in line:  # a row or a comment says what the extra is for
        for word, package in SUBJECTS.items():
            others = [match for match in HINT.findall(line) if match != extras]
            if (
                not others
                and re.search(rf"(?<![\w.]){re.escape(word)}(?![\w.])", line)
                and "no torch" not in line
            ):
                assert package in brought, f"{file}: {line}"
    assert brought


def test_each_hint_in_the_source_brings_the_package_that_it_is_for() -> None:
    source = ROOT / "src" / "onward"
    seen = hints(sorted(source.rglob("*.py")))
    assert len(seen) >= 7
    for file, line, extra in seen:
        name = Path(file).relative_to("src/onward").as_posix()
        assert name in IN_SOURCE, f"say in IN_SOURCE which package this hint is for: {name}: {line.strip()}"
        # a hint for one of onnxruntime's packages is for any of them
        names = {package.removesuffix("-gpu") for package in packages(extra)}
        assert IN_SOURCE[name] in names | packages(extra), f"{name}: {line.strip()}"


@pytest.mark.parametrize(("module", "extra"), _EXTRAS.items())
def test_the_hint_for_a_missing_module_brings_it(module: str, extra: str) -> None:
    assert MODULES.get(module, module) in packages(extra)


def test_the_readme_installs_from_a_clone_and_names_what_pictures_need() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    assert "pip install onward" not in readme  # until a package index has it
    assert 'pip install ".[data]"' in readme.split("## Three commands")[1].split("```")[0]


def test_the_doctor_says_that_jinja2_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from onward import doctor

    lines = [f"{line}; extra == 'text'" for line in EXTRAS["text"]]
    monkeypatch.setattr(doctor.metadata, "requires", lambda _: lines)
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "jinja2" else "99.0")
    (finding,) = doctor._extras().findings
    assert "jinja2 not installed" in finding.value and finding.fix == "pip install 'onward[text]'"
