"""Collects the JavaScript of a site: our own library, and two packages from npm.

The library is part of Onward. onnxruntime-web (its WebAssembly is 14 MB) and flatbuffers are not: they are
taken from a `node_modules` folder, or fetched with npm where there is none.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from onward.errors import OnwardError

__all__ = ["library", "node_modules", "package_files"]

_NPM = "install Node.js, or run in a folder whose node_modules has them"

_RUNTIME = {
    "wasm": ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm"),
    "webgpu": (
        "ort.webgpu.min.mjs",
        "ort-wasm-simd-threaded.asyncify.mjs",
        "ort-wasm-simd-threaded.asyncify.wasm",
    ),
}


def library() -> Path:
    """The folder of onward-web: package.json and src."""
    here = Path(__file__).resolve()
    for folder in (here.parent / "onward-web", here.parents[3] / "web"):
        if (folder / "src" / "index.js").is_file():
            return folder
    raise OnwardError("this installation lacks the files of onward-web: install Onward again")


@contextmanager
def node_modules(given: Path | None = None) -> Iterator[Path]:
    """A folder with the npm packages: the one given, ours, the one here, or a fresh one that npm fills."""
    wanted = _wanted()
    places = [given] if given is not None else [library() / "node_modules", Path.cwd() / "node_modules"]
    for place in places:
        if all(_version(place, name) == version for name, version in wanted.items()):
            yield place
            return
    needed = " ".join(f"{name}@{version}" for name, version in wanted.items())
    if given is not None:
        raise OnwardError(f"'{given}' lacks {needed}: run npm install {needed} beside it", hint=_NPM)
    npm = shutil.which("npm")
    if npm is None:
        raise OnwardError(
            f"a site needs {needed} from npm, and there is no npm here: install Node.js, or run "
            f"npm install {needed} elsewhere and pass that node_modules folder (packages=…)",
            hint=_NPM,
        )
    with tempfile.TemporaryDirectory(prefix="onward-npm-") as folder:
        command = [npm, "install", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", folder]
        done = subprocess.run([*command, *needed.split()], capture_output=True, text=True, check=False)
        if done.returncode:
            raise OnwardError(f"npm could not fetch {needed}: {done.stderr.strip()[-400:]}", hint=_NPM)
        yield Path(folder) / "node_modules"


def package_files(modules: Path, *, webgpu: bool) -> dict[str, Path]:
    """Every file of the packages that a site needs, by its place in the site."""
    files: dict[str, Path] = {}
    source = library() / "src"
    for path in sorted(source.rglob("*.js")):
        files[f"lib/onward-web/{path.relative_to(source).as_posix()}"] = path
    for path in sorted((modules / "flatbuffers" / "mjs").glob("*.js")):
        if path.stem not in ("flexbuffers",):
            files[f"lib/flatbuffers/{path.name}"] = path
    kinds = ("wasm", "webgpu") if webgpu else ("wasm",)
    for name in [name for kind in kinds for name in _RUNTIME[kind]]:
        files[f"lib/onnxruntime-web/{name}"] = modules / "onnxruntime-web" / "dist" / name
    missing = [str(path) for path in files.values() if not path.is_file()]
    if missing:
        raise OnwardError(f"'{missing[0]}' is missing: run npm install again", hint=_NPM)
    return files


def _wanted() -> dict[str, str]:
    return json.loads((library() / "package.json").read_text("utf-8"))["dependencies"]


def _version(modules: Path, name: str) -> str | None:
    try:
        return json.loads((modules / name / "package.json").read_text("utf-8"))["version"]
    except (OSError, ValueError, KeyError):
        return None
