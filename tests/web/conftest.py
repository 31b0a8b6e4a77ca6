"""One browser and one server for all tests in the browser."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest

from onward.graph.proto.conservative_forms import WEBGPU_FORMS, apply_forms
from onward.web.serving import make_server
from onward.web.site import write_site
from web.browser import MODULES, Browser, why_not
from web.models import MODELS, OPTIMIZERS, make_data, write_artifacts


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if (missing := why_not()) is not None:
        pytest.skip(missing)
    browser = Browser()
    yield browser
    browser.close()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Artifacts of every model, by its name."""
    folder = tmp_path_factory.mktemp("models")
    written = {name: write_artifacts(name, folder / name) for name in MODELS}
    for prefix, rule in OPTIMIZERS.items():
        write_artifacts("mlp", written["mlp"], optimizer=rule, prefix=prefix)
    return written


@pytest.fixture(scope="session")
def harness_address(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where the library, the artifacts and the data of every model are served."""
    files: dict[str, bytes] = {}
    for name, folder in models.items():
        files |= {f"{name}/{path.name}": path.read_bytes() for path in folder.iterdir()}
        files |= {f"{name}-gpu/{path.name}": for_webgpu(path) for path in folder.iterdir()}
        data = make_data(name)
        files |= {f"{name}/x.bin": data.x.tobytes(), f"{name}/labels.bin": data.labels.tobytes()}
    site = tmp_path_factory.mktemp("harness") / "site"
    page = Path(__file__).parent / "page"
    write_site(models["mlp"], site, page=page, files=files, webgpu=True, packages=MODULES)
    with serving(site) as address:
        yield address


def for_webgpu(path: Path) -> bytes:
    """A file of artifacts as `write_site` writes it for WebGPU."""
    if path.suffix != ".onnx":
        return path.read_bytes()
    model = onnx.load(path, load_external_data=False)
    apply_forms(model, WEBGPU_FORMS)
    return model.SerializeToString()


@pytest.fixture
def harness(browser: Browser, harness_address: str) -> Browser:
    """The browser on the page of tests/web/page."""
    if browser.evaluate("() => location.href") != harness_address:
        browser("goto", url=harness_address)
        browser.wait("window.ready")
    return browser


class serving:
    """A server for a folder, in the background; gives its address."""

    def __init__(self, folder: Path) -> None:
        self._server = make_server(folder)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> str:
        self._thread.start()
        return f"http://localhost:{self._server.server_address[1]}/"

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
