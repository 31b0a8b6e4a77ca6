"""Writes a static site that trains some artifacts in the browser: copies files, no build step.

The page is one of ours (`page/`), or a folder of the caller's. What the site consists of is written into
`site.json`, from which the page's service worker keeps it usable without a network.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from onward import contract
from onward.checkpoint import store
from onward.errors import MAKE_ARTIFACTS, ModelError, OnwardError
from onward.model_metadata import read_table
from onward.runtime.sessions import read_model
from onward.runtime.signature import read_signature
from onward.web.packages import node_modules, package_files

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
    `webgpu` adds the 27 MB that WebGPU needs. `packages` is a `node_modules` folder; without it the npm
    packages are looked for, then fetched. A site that is there already is replaced as a whole.

    >>> write_site("out", "site")  # doctest: +SKIP
    PosixPath('site')
    """
    source, target = Path(artifacts), Path(site)
    constants = _check_artifacts(source, prefix)
    _check_target(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    staging.chmod(0o755)
    try:
        with node_modules(None if packages is None else Path(packages)) as modules:
            for name, path in package_files(modules, webgpu=webgpu).items():
                _copy(path, staging / name)
        for name in ARTIFACTS:
            _copy(source / f"{prefix}{name}", staging / "artifacts" / name)
        for name in constants:
            _copy(source / name, staging / "artifacts" / name)
        _copy_page(Path(page) if page is not None else _default_page(), staging)
        for name, content in (files or {}).items():
            (staging / name).parent.mkdir(parents=True, exist_ok=True)
            (staging / name).write_bytes(content)
        _describe(staging, title or source.resolve().name, webgpu=webgpu)
        _replace(staging, target)
    except OSError as error:
        raise OnwardError(
            f"cannot write the site '{target}': {error.strerror or error}; what was there is as it was"
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
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
    shared = [path for path in _default_page().iterdir() if path.name != "index.html"]
    for path in [*shared, *page.iterdir()]:
        if path.is_file():
            _copy(path, staging / path.name)


def _describe(staging: Path, title: str, *, webgpu: bool) -> None:
    names = sorted(path.relative_to(staging).as_posix() for path in staging.rglob("*") if path.is_file())
    digest = hashlib.sha256()
    for name in names:
        digest.update(name.encode())
        digest.update((staging / name).read_bytes())
    about = {"title": title, "webgpu": webgpu, "version": digest.hexdigest()[:16], "files": [*names, _MARK]}
    (staging / _MARK).write_text(json.dumps(about, indent=1) + "\n", "utf-8")


def _replace(staging: Path, target: Path) -> None:
    if not target.exists():
        os.replace(staging, target)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
    os.replace(target, old / "site")
    try:
        os.replace(staging, target)
    except OSError:
        os.replace(old / "site", target)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
