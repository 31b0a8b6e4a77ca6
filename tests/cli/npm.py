"""What npm would install for a site, in names and versions only."""

from __future__ import annotations

import json
from pathlib import Path

from onward.web.site import _RUNTIME, library


def write_packages(folder: Path, *, webgpu: bool = False) -> Path:
    wanted = json.loads((library() / "package.json").read_text("utf-8"))["dependencies"]
    for name, version in wanted.items():
        (folder / name / "dist").mkdir(parents=True)
        (folder / name / "package.json").write_text(json.dumps({"version": version}), "utf-8")
    (folder / "flatbuffers" / "mjs").mkdir()
    for kind in ("wasm", "webgpu") if webgpu else ("wasm",):
        for name in _RUNTIME[kind]:
            (folder / "onnxruntime-web" / "dist" / name).write_text(name, "utf-8")
    return folder
