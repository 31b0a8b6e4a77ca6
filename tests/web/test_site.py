"""`write_site` writes a whole site or nothing, and refuses what the page could not train."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

from onward import artifacts
from onward.errors import CheckpointError, ModelError, OnwardError
from onward.web import write_site
from onward.web.serving import make_server
from onward.web.site import library
from web.models import forward_model, write_artifacts


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_artifacts("mlp", tmp_path_factory.mktemp("artifacts") / "mlp")


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What npm would install, in names and versions only."""
    folder = tmp_path_factory.mktemp("npm") / "node_modules"
    for name, version in json.loads((library() / "package.json").read_text("utf-8"))["dependencies"].items():
        (folder / name / "dist").mkdir(parents=True)
        (folder / name / "package.json").write_text(json.dumps({"version": version}))
    (folder / "flatbuffers" / "mjs").mkdir()
    (folder / "flatbuffers" / "mjs" / "flatbuffers.js").write_text("export {};")
    for name in ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm"):
        (folder / "onnxruntime-web" / "dist" / name).write_text(name)
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_site_has_the_artifacts_as_they_are_and_lists_its_files(
    made: Path, packages: Path, tmp_path: Path
) -> None:
    site = write_site(made, tmp_path / "deep" / "site", title="digits", packages=packages)
    written = files(site)
    for name in ("training_model.onnx", "eval_model.onnx", "optimizer_model.onnx", "checkpoint"):
        assert written[f"artifacts/{name}"] == (made / name).read_bytes()
    about = json.loads(written["site.json"])
    assert about["title"] == "digits"
    assert sorted(about["files"]) == sorted(written)
    assert [path.name for path in site.parent.iterdir()] == ["site"]


def test_a_site_is_replaced_as_a_whole(made: Path, packages: Path, tmp_path: Path) -> None:
    site = write_site(made, tmp_path / "site", packages=packages, files={"old.txt": b"old"})
    write_site(made, site, packages=packages, files={"sub/new.txt": b"new"})
    assert "old.txt" not in files(site)
    assert files(site)["sub/new.txt"] == b"new"
    assert list(tmp_path.iterdir()) == [site]


def test_two_sites_of_the_same_artifacts_are_equal(made: Path, packages: Path, tmp_path: Path) -> None:
    first, second = (write_site(made, tmp_path / name, packages=packages) for name in "ab")
    assert files(first) == files(second)


def test_a_folder_of_the_users_is_left_alone(made: Path, packages: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(OnwardError, match="is not a site of Onward"):
        write_site(made, tmp_path, packages=packages)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def spoil_checkpoint(folder: Path) -> None:
    content = bytearray((folder / "checkpoint").read_bytes())
    content[200] ^= 1
    (folder / "checkpoint").write_bytes(content)


def make_nominal(folder: Path) -> None:
    artifacts.generate_artifacts(
        forward_model("mlp"),
        requires_grad=["w1", "b1", "w2", "b2"],
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=folder,
        nominal_checkpoint=True,
    )
    (folder / "nominal_checkpoint").replace(folder / "checkpoint")


def use_sequences(folder: Path) -> None:
    model = onnx.load(folder / "optimizer_model.onnx")
    entry = next(e for e in model.metadata_props if e.key == "onward.optimizer")
    entry.value = json.dumps({**json.loads(entry.value), "sequences": True})
    onnx.save(model, folder / "optimizer_model.onnx")


def foreign_model(folder: Path) -> None:
    onnx.save(forward_model("mlp"), folder / "training_model.onnx")


REFUSED = {
    "missing": (lambda folder: (folder / "eval_model.onnx").unlink(), ModelError, "lacks eval_model.onnx"),
    "damaged": (spoil_checkpoint, CheckpointError, "the file is damaged"),
    "nominal": (make_nominal, ModelError, "the checkpoint is nominal"),
    "sequences": (use_sequences, ModelError, "works on sequences of tensors"),
    "foreign": (foreign_model, ModelError, "is not an artifact of Onward"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_page_could_not_train_is_refused(
    made: Path, packages: Path, tmp_path: Path, name: str
) -> None:
    spoil, error, said = REFUSED[name]
    copy = tmp_path / "artifacts"
    copy.mkdir()
    for path in made.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    spoil(copy)
    with pytest.raises(error, match=said):
        write_site(copy, tmp_path / "site", packages=packages)
    assert list(tmp_path.iterdir()) == [copy]


def test_missing_packages_are_named(made: Path, tmp_path: Path) -> None:
    with pytest.raises(OnwardError, match=r"npm install flatbuffers@.* onnxruntime-web@"):
        write_site(made, tmp_path / "site", packages=tmp_path / "node_modules")
    assert list(tmp_path.iterdir()) == []


def test_only_a_site_is_served(tmp_path: Path) -> None:
    with pytest.raises(OnwardError, match=r"has no index\.html"):
        make_server(tmp_path)


def test_every_name_of_the_library_is_declared_for_typescript() -> None:
    source = (library() / "src" / "core.js").read_text("utf-8")
    declared = (library() / "src" / "index.d.ts").read_text("utf-8")
    names = [
        n.strip() for part in source.split("export {")[1:] for n in part.split("}")[0].split(",") if n.strip()
    ]
    assert "Module" in names
    for name in names:
        assert any(f"{kind} {name}" in declared for kind in ("class", "function")), name
