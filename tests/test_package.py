"""What people install: the wheel and the sdist, in a fresh environment, without torch."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import onward

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist, built from the sources of this tree."""
    folder = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def python(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment with the wheel; its dependencies are those of this one."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    scripts = folder / ("Scripts" if os.name == "nt" else "bin")
    (wheel,) = built.glob("*.whl")
    target = next(folder.rglob("site-packages"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    (target / "dependencies.pth").write_text(dependencies(folder) + "\n", encoding="utf-8")
    return scripts / ("python.exe" if os.name == "nt" else "python")


def dependencies(folder: Path) -> str:
    """A folder with links to what the wheel requires, and not to onward itself or what is optional."""
    source, target = Path(sysconfig.get_path("purelib")), folder / "dependencies"
    target.mkdir()
    unwanted = (
        "onward",
        "_onward",
        "__editable__",
        "torch",
        "transformers",
        "sklearn",
        "scikit",
        "pyarrow",
        "PIL",
    )
    for path in source.iterdir():
        if not path.name.startswith(unwanted) and path.suffix != ".pth":
            (target / path.name).symlink_to(path, target_is_directory=path.is_dir())
    return str(target)


def run(python: Path, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run([str(python), *arguments], cwd=folder, env=clean, capture_output=True, text=True)


def test_the_wheel_has_the_package_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "onward/py.typed" in names
    assert "onward/cli/app.py" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if not name.startswith(("onward/", "onward-"))]
    assert not [name for name in names if "__pycache__" in name or name.startswith("onward/tests")]


def test_every_module_of_the_sources_is_in_the_wheel(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    modules = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src" / "onward").rglob("*.py")}
    assert not modules - names


def test_the_sdist_builds_the_same_wheel(built: Path, tmp_path: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    assert (source / "README.md").is_file() and (source / "LICENSE").is_file()
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "again")],
        cwd=source, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    names = []
    for wheel in (*built.glob("*.whl"), *(tmp_path / "again").glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            names.append({info.filename: info.CRC for info in archive.infolist()})
    assert names[0] == names[1]


def test_a_fresh_environment_trains_without_torch(python: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(thirty_lines(), encoding="utf-8")
    done = run(python, "program.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("loss 0.0")
    assert (
        "site-packages" in run(python, "-c", "import onward; print(onward.__file__)", folder=tmp_path).stdout
    )
    assert run(python, "-c", "import torch", folder=tmp_path).returncode != 0


def thirty_lines() -> str:
    """The program of the README."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return text.split("```python\n", 1)[1].split("```", 1)[0]


def test_a_fresh_environment_has_the_command(python: Path, tmp_path: Path) -> None:
    done = run(python, "-c", "from onward.cli import main; main()", "--version", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"onward {version()}"


def version() -> str:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]


def test_importing_onward_imports_nothing_heavy() -> None:
    program = "import sys, onward; print(sorted({'numpy', 'onnx', 'onnxruntime', 'torch', 'rich'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_training_on_a_device_imports_neither_torch_nor_the_differentiator() -> None:
    program = (
        "import sys, onward.api, onward.train.trainer\n"
        "print([n for n in sys.modules if n.split('.')[0] in ('torch', 'transformers') or 'autodiff' in n])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


PUBLIC = ["onward", "onward.api", "onward.artifacts", "onward.checkpoint", "onward.errors", "onward.export",
          "onward.train.callbacks", "onward.train.metrics", "onward.lora", "onward.losses", "onward.onnxblock",
          "onward.optim", "onward.distributed", "onward.web"]  # fmt: skip


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_there(name: str) -> None:
    import importlib

    module = importlib.import_module(name)
    assert module.__all__
    for attribute in module.__all__:
        assert getattr(module, attribute) is not None


def test_a_name_that_is_not_there_is_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = onward.nonsense  # type: ignore[attr-defined]


def test_the_changelog_knows_this_version() -> None:
    assert f"## {version()}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_a_tag_names_the_version() -> None:
    """A release is a tag `v<version>` on the commit whose files say that version."""
    done = subprocess.run(["git", "tag", "--points-at", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    assert {tag for tag in done.stdout.split() if tag.startswith("v")} <= {f"v{version()}"}
