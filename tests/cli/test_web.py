"""`onward web`: a site that is really there, and how to look at it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import contents
from cli.npm import write_packages

ARTIFACTS = ("training_model.onnx", "eval_model.onnx", "optimizer_model.onnx", "checkpoint")


@pytest.fixture
def npm(workshop: Path) -> Path:
    return write_packages(workshop / "node_modules", webgpu=True)


def test_a_site_has_all_that_its_page_asks_for(npm: Path, run: Any) -> None:
    """The packages of the current folder are taken without asking."""
    shown = run("web", "artifacts", "new/site").stdout
    written = contents("new/site")
    for name in ARTIFACTS:
        assert written[f"artifacts/{name}"] == Path("artifacts", name).read_bytes()
    about = json.loads(Path("new/site/site.json").read_text(encoding="utf-8"))
    assert sorted(about["files"]) == sorted(name for name, content in written.items() if content is not None)
    assert (about["title"], about["webgpu"]) == ("artifacts", False)
    assert "index.html" in written and any(name.startswith("lib/onward-web/") for name in written)
    assert "onward web artifacts new/site --serve" in shown.replace("\\", "/")
    assert [path.name for path in Path("new").iterdir()] == ["site"]


def test_title_webgpu_and_prefix_reach_the_site(npm: Path, run: Any) -> None:
    run("artifacts", "model.onnx", "-l", "cross-entropy", "-o", "others", "--prefix", "v2-")
    found = run(
        "web",
        "others",
        "site",
        "--title",
        "Teach me",
        "--webgpu",
        "--prefix",
        "v2-",
        "--packages",
        npm,
        "--json",
    ).json
    about = json.loads(Path("site/site.json").read_text(encoding="utf-8"))
    assert (about["title"], about["webgpu"]) == ("Teach me", True)
    assert any("webgpu" in name for name in about["files"])
    assert Path("site/artifacts/checkpoint").read_bytes() == Path("others/v2-checkpoint").read_bytes()
    assert found["files"] == {
        path.relative_to("site").as_posix(): path.stat().st_size
        for path in Path("site").rglob("*")
        if path.is_file()
    }


def test_a_run_stands_for_its_artifacts_and_the_command_says_so(npm: Path, run: Any) -> None:
    assert "begins with the checkpoint of the artifacts" in run("web", "run", "site").stderr
    assert Path("site/artifacts/checkpoint").read_bytes() == Path("artifacts/checkpoint").read_bytes()


def test_a_site_is_replaced_and_nothing_else_is(npm: Path, run: Any) -> None:
    run("web", "artifacts", "site", "--title", "one")
    run("web", "artifacts", "site", "--title", "two")
    assert json.loads(Path("site/site.json").read_text(encoding="utf-8"))["title"] == "two"
    before = contents()
    assert "is not a site of Onward" in run("web", "artifacts", "run", code=1).stderr
    assert contents() == before


def test_a_port_that_is_taken_is_named(npm: Path, run: Any) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = run("web", "artifacts", "site", "--serve", "--port", port, "--quiet", code=1)
    assert f"port {port} cannot be used" in result.stderr and "--port 0" in result.stderr
