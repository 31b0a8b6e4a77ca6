"""Writes a static site that trains some artifacts in the browser: copies files, no build step.

The page is one of ours (`page/`), or a folder of the caller's. What the site consists of is written into
`site.json`, from which the page's service worker keeps it usable without a network.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from onward import contract
from onward.checkpoint import store
from onward.errors import MAKE_ARTIFACTS, ModelError, OnwardError
from onward.files import CommittedError, replace_folder
from onward.graph.gate import read_proto
from onward.graph.proto.conservative_forms import WEBGPU_FORMS, apply_forms
from onward.model_metadata import read_table
from onward.runtime.sessions import read_model
from onward.runtime.signature import read_signature

__all__ = ["ARTIFACTS", "write_site"]

ARTIFACTS = ("training_model.onnx", "eval_model.onnx", "optimizer_model.onnx", "checkpoint")
_MARK = "site.json"


def write_site(
    artifacts: str | os.PathLike[str],
    site: str | os.PathLike[str],
    *,
    title: str | None = None,
    prefix: str = "",
    webgpu: bool = False,
    page: str | os.PathLike[str] | None = None,
    files: Mapping[str, bytes] | None = None,
    packages: str | os.PathLike[str] | None = None,
) -> Path:
    """Write a static site that trains these artifacts in the browser; returns its folder.

    `page` is a folder whose files take the place of the default page's; `files` are further files by name.
    `webgpu` adds the 27 MB that WebGPU needs, and writes the models in operators that it has. `packages` is a
    `node_modules` folder; without it the npm packages are looked for, then fetched. A site that is there already is
    replaced as a whole.

    >>> write_site("out", "site")  # doctest: +SKIP
    PosixPath('site')
    """
    source, target = Path(artifacts), Path(site)
    constants = _check_artifacts(source, prefix)
    _check_target(target)
    try:
        with replace_folder(target) as staging:
            with node_modules(None if packages is None else Path(packages)) as modules:
                for name, path in package_files(modules, webgpu=webgpu).items():
                    _copy(path, staging / name)
                    if name.startswith(f"{_LIBRARY}/"):
                        _resolve_imports(staging / name, depth=name.count("/") - 1)
            for name in ARTIFACTS:
                _copy(source / f"{prefix}{name}", staging / "artifacts" / name)
                if webgpu and name.endswith(".onnx"):
                    _write_webgpu_forms(staging / "artifacts" / name)
            for name in constants:
                _copy(source / name, staging / "artifacts" / name)
            _copy_page(Path(page) if page is not None else _default_page(), staging)
            for name, content in (files or {}).items():
                (staging / name).parent.mkdir(parents=True, exist_ok=True)
                (staging / name).write_bytes(content)
            _describe(staging, title or source.resolve().name, webgpu=webgpu)
    except OSError as error:
        state = "" if isinstance(error, CommittedError) else "; what was there is as it was"
        raise OnwardError(f"cannot write the site '{target}': {error.strerror or error}{state}") from error
    return target


def _check_artifacts(source: Path, prefix: str) -> set[str]:
    """Reject artifacts that the page cannot use; the names of the files with constants that they refer to."""
    missing = [f"{prefix}{name}" for name in ARTIFACTS if not (source / f"{prefix}{name}").is_file()]
    if missing:
        raise ModelError(
            f"'{source}' lacks {', '.join(missing)}: make artifacts with onward.artifacts.generate_artifacts",
            hint=MAKE_ARTIFACTS,
        )
    constants: set[str] = set()
    for name, role in (("training_model.onnx", "training"), ("eval_model.onnx", "eval")):
        model = read_model(source / f"{prefix}{name}", role)
        read_signature(model, str(source / f"{prefix}{name}"), role)
        for tensor in model.graph.initializer:
            constants |= {entry.value for entry in tensor.external_data if entry.key == "location"}
    for name in constants:
        if Path(name).name != name or not (source / name).is_file():
            raise ModelError(f"the models refer to constants in '{name}', which is no file in '{source}'")
    optimizer = read_model(source / f"{prefix}optimizer_model.onnx", "optimizer")
    about = {entry.key: entry.value for entry in optimizer.metadata_props}
    if read_table(about, contract.OPTIMIZER).get("sequences"):
        raise ModelError(
            "this optimizer works on sequences of tensors, which browsers cannot run: choose one of onward.optim"
        )
    if store.load(source / f"{prefix}checkpoint").nominal:
        raise ModelError("the checkpoint is nominal: a page needs parameter values to start from")
    return constants


def _write_webgpu_forms(path: Path) -> None:
    """Write a model, whose external data stays where it is, in operators that browsers have for WebGPU."""
    model = read_proto(path, read_data=False)
    apply_forms(model, WEBGPU_FORMS)
    path.write_bytes(model.SerializeToString())


def _check_target(target: Path) -> None:
    if target.exists() and not (
        target.is_dir() and (not any(target.iterdir()) or (target / _MARK).is_file())
    ):
        raise OnwardError(
            f"'{target}' is there and is not a site of Onward: choose another folder",
            hint="choose another folder",
        )


def _default_page() -> Path:
    return Path(__file__).parent / "page"


def _copy_page(page: Path, staging: Path) -> None:
    if not (page / "index.html").is_file():
        raise OnwardError(f"'{page}' has no index.html")
    # a page of the user's own imports the default one's scripts, so those are always there
    shared = [path for path in _default_page().iterdir() if path.name != "index.html"]
    for path in [*shared, *page.iterdir()]:
        if path.is_file():
            _copy(path, staging / path.name)


def _describe(staging: Path, title: str, *, webgpu: bool) -> None:
    # sorted: the version that the service worker compares is the same for the same files on any file system
    names = sorted(path.relative_to(staging).as_posix() for path in staging.rglob("*") if path.is_file())
    digest = hashlib.sha256()
    for name in names:
        digest.update(name.encode())
        digest.update((staging / name).read_bytes())
    about = {"title": title, "webgpu": webgpu, "version": digest.hexdigest()[:16], "files": [*names, _MARK]}
    (staging / _MARK).write_text(json.dumps(about, indent=1) + "\n", "utf-8")


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


# --- Collects the JavaScript of a site: our own library, and two packages from npm.
#
# The library is part of Onward. onnxruntime-web (its WebAssembly is 14 MB) and flatbuffers are not: they are
# taken from a `node_modules` folder, or fetched with npm where there is none.


_NPM = "install Node.js, or run in a folder whose node_modules has them"

_LIBRARY = "lib/onward-web"
# What the library imports by the names of packages, and where that is from lib on.
_PACKAGES = {
    "flatbuffers": "flatbuffers/flatbuffers.js",
    "onnxruntime-web/wasm": "onnxruntime-web/ort.wasm.min.mjs",
    "onnxruntime-web/webgpu": "onnxruntime-web/ort.webgpu.min.mjs",
}
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
def node_modules(folder: Path | None = None) -> Iterator[Path]:
    """A folder with the npm packages: this one, or ours, the one here, or a fresh one that npm fills."""
    versions = json.loads((library() / "package.json").read_text("utf-8"))["dependencies"]
    ours = [library() / "node_modules", Path.cwd() / "node_modules"]
    for modules in ours if folder is None else [folder]:
        if all(_version(modules, name) == version for name, version in versions.items()):
            yield modules
            return
    needed = " ".join(f"{name}@{version}" for name, version in versions.items())
    if folder is not None:
        raise OnwardError(f"'{folder}' lacks {needed}: run npm install {needed} beside it", hint=_NPM)
    npm = shutil.which("npm")
    if npm is None:
        raise OnwardError(
            f"a site needs {needed} from npm, and there is no npm here: install Node.js, or run "
            f"npm install {needed} elsewhere and pass that node_modules folder (packages=…)",
            hint=_NPM,
        )
    with tempfile.TemporaryDirectory(prefix="onward-npm-") as fresh:
        command = [npm, "install", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", fresh]
        # --ignore-scripts: nothing that a package brings along runs here
        done = subprocess.run([*command, *needed.split()], capture_output=True, text=True, check=False)
        if done.returncode:
            raise OnwardError(f"npm could not fetch {needed}: {done.stderr.strip()[-400:]}", hint=_NPM)
        yield Path(fresh) / "node_modules"


def package_files(modules: Path, *, webgpu: bool) -> dict[str, Path]:
    """Every file of the packages that a site needs, by its place in the site."""
    files: dict[str, Path] = {}
    source = library() / "src"
    for path in sorted(source.rglob("*.js")):
        files[f"{_LIBRARY}/{path.relative_to(source).as_posix()}"] = path
    for path in sorted((modules / "flatbuffers" / "mjs").glob("*.js")):
        # which checkpoints have none of
        if path.stem != "flexbuffers":
            files[f"lib/flatbuffers/{path.name}"] = path
    kinds = ("wasm", "webgpu") if webgpu else ("wasm",)
    for name in [name for kind in kinds for name in _RUNTIME[kind]]:
        files[f"lib/onnxruntime-web/{name}"] = modules / "onnxruntime-web" / "dist" / name
    missing = [str(path) for path in files.values() if not path.is_file()]
    if missing:
        raise OnwardError(f"'{missing[0]}' is missing: run npm install again", hint=_NPM)
    return files


def _resolve_imports(script: Path, *, depth: int) -> None:
    """Let a script of the library import packages by where they are: a page's import map says nothing to a worker."""
    text = script.read_text("utf-8")
    for name, target in _PACKAGES.items():
        for quoted in (f'from "{name}"', f'import("{name}")'):
            text = text.replace(quoted, quoted.replace(name, "../" * depth + target))
    script.write_text(text, "utf-8")


def _version(modules: Path, name: str) -> str | None:
    try:
        return json.loads((modules / name / "package.json").read_text("utf-8"))["version"]
    except (OSError, ValueError, KeyError):
        return None
