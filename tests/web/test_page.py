"""The page that `write_site` writes, used as a person would: files in, buttons, messages, files out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from onward.api import CheckpointState, Module
from onward.web.site import write_site
from web.browser import MODULES, Browser
from web.conftest import serving
from web.models import make_data


@pytest.fixture(scope="module")
def site(browser: Browser, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_site(
        models["cnn"], tmp_path_factory.mktemp("page") / "site", title="a CNN", packages=MODULES
    )


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    with serving(site) as address:
        yield address


@pytest.fixture
def page(browser: Browser, address: str) -> Browser:
    browser("goto", url=address)
    browser.wait("document.documentElement.dataset.ready")
    return browser


@pytest.fixture(scope="module")
def data_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "train.npz"
    data = make_data("cnn", batches=40)
    np.savez_compressed(path, x=data.x.reshape(len(data.x), 64), labels=data.labels)
    return path


def train(page: Browser, file: Path, *, epochs: int) -> None:
    page("upload", selector="#data-file", path=str(file))
    page.wait("!document.getElementById('train').disabled")
    page("fill", selector="#epochs", value=str(epochs))
    page("fill", selector="#rate", value="0.01")
    page("click", selector="#train")


def problem(page: Browser) -> str:
    page.wait("!document.getElementById('problem').hidden")
    return page("text", selector="#problem")


def test_trains_a_dropped_file_and_gives_a_checkpoint_to_python(
    page: Browser, data_file: Path, models: dict[str, Path], tmp_path: Path
) -> None:
    assert page("text", selector="#title") == "Train a CNN"
    train(page, data_file, epochs=3)
    page.wait("document.getElementById('status').textContent.startsWith('Done')")
    rows = page.evaluate(
        "() => [...document.querySelectorAll('tbody tr')].map((r) => [...r.cells].map((c) => c.innerText))"
    )
    assert [row[0] for row in rows] == ["1", "2", "3"]
    assert float(rows[2][2]) < float(rows[0][2])
    page("click", selector="#evaluate")
    page.wait("document.getElementById('status').textContent.startsWith('On the held-out data')")
    assert float(rows[2][2]) == float(page("text", selector="#status").split("loss ")[1].split(",")[0])
    page("download", selector="#download", path=str(tmp_path / "checkpoint"))
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(models["cnn"] / "training_model.onnx", state, models["cnn"] / "eval_model.onnx").eval()
    data = make_data("cnn", batches=40)
    assert float(module(data.x, data.labels)) < 0.5 * float(rows[0][1])
    assert page("problems") == []


def test_pauses_resumes_and_stops(page: Browser, data_file: Path) -> None:
    train(page, data_file, epochs=2000)
    page.wait("document.getElementById('progress').value > 0")
    page("click", selector="#pause")
    step = "document.getElementById('chart').getAttribute('aria-label')"
    # while it trains, the label changes with every frame
    page.evaluate(
        f"async () => {{ for (let last; last !== {step};) {{ last = {step}; "
        "await new Promise((done) => setTimeout(done, 150)); } }"
    )
    paused = page.evaluate(f"() => {step}")
    assert page("text", selector="#pause") == "Resume"
    page("click", selector="#pause")
    page.wait(f"{step} !== {paused!r}")
    page("click", selector="#stop")
    page.wait("document.getElementById('status').textContent.startsWith('Stopped after')")


def test_a_checkpoint_comes_back_and_a_damaged_one_is_refused(
    page: Browser, data_file: Path, models: dict[str, Path], tmp_path: Path
) -> None:
    train(page, data_file, epochs=2)
    page.wait("document.getElementById('status').textContent.startsWith('Done')")
    page("download", selector="#download", path=str(tmp_path / "trained"))
    page("click", selector="#evaluate")
    page.wait("document.getElementById('status').textContent.startsWith('On the')")
    trained = page("text", selector="#status")
    content = bytearray((tmp_path / "trained").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "damaged").write_bytes(content)
    page("upload", selector="#upload", path=str(tmp_path / "damaged"))
    assert problem(page).startswith("checkpoint 'damaged': the file is damaged")
    page("upload", selector="#upload", path=str(models["mlp"] / "checkpoint"))
    page.wait("document.getElementById('problem').textContent.includes('belong together')")
    page.wait("!document.getElementById('evaluate').disabled")
    page("click", selector="#evaluate")
    page.wait("document.getElementById('status').textContent.startsWith('On the')")
    assert page("text", selector="#status") == trained
    page("upload", selector="#upload", path=str(models["cnn"] / "checkpoint"))
    page.wait("document.getElementById('status').textContent.startsWith('Loaded')")
    page("upload", selector="#upload", path=str(tmp_path / "trained"))
    page.wait("document.getElementById('status').textContent === 'Loaded trained.'")
    page("click", selector="#evaluate")
    page.wait("document.getElementById('status').textContent.startsWith('On the')")
    assert page("text", selector="#status") == trained


def table(x: np.ndarray, labels: np.ndarray) -> str:
    rows = [",".join([*map(repr, row), str(label)]) for row, label in zip(x.tolist(), labels)]
    return "\n".join(rows).replace("inf", "Infinity")


def images() -> tuple[np.ndarray, np.ndarray]:
    data = make_data("cnn", batches=4)
    return data.x.reshape(64, 64), data.labels


def too_large() -> str:
    x, labels = images()
    x[:, 7] = np.inf
    return table(x, labels)


BAD_DATA = {
    "infinite": (too_large, "the loss is NaN at training step"),
    "labels": (lambda: table(images()[0], images()[1] + 5), "the model has 10 classes, so labels are 0 to 9"),
    "shape": (
        lambda: table(images()[0][:, 1:], images()[1]),
        "has shape [64, 63] in the file, the model takes [batch, 1, 8, 8]",
    ),
    "words": (lambda: "1,2\n3,oops\n", "'oops' is not a number"),
}


@pytest.mark.parametrize("name", BAD_DATA)
def test_bad_data_gives_a_clear_message(page: Browser, tmp_path: Path, name: str) -> None:
    make, said = BAD_DATA[name]
    (tmp_path / "data.csv").write_text(make())
    page("upload", selector="#data-file", path=str(tmp_path / "data.csv"))
    if name in ("infinite", "labels"):  # values are looked at when they are trained on
        page.wait("!document.getElementById('train').disabled")
        page("click", selector="#train")
    assert said in problem(page)


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("training_model.onnx", "training model 'artifacts/training_model.onnx' cannot be read: 404"),
        ("checkpoint", "checkpoint 'artifacts/checkpoint': cannot be read: 404"),
    ],
)
def test_a_missing_file_gives_a_clear_message(
    browser: Browser, site: Path, address: str, missing: str, said: str
) -> None:
    path = site / "artifacts" / missing
    content = path.read_bytes()
    path.unlink()
    try:
        browser("goto", url=address)
        assert said in problem(browser)
    finally:
        path.write_bytes(content)


def test_works_without_a_network(browser: Browser, site: Path, data_file: Path) -> None:
    with serving(site) as address:
        browser("goto", url=address)
        browser.wait("document.documentElement.dataset.offline === 'ready'")
    browser("goto", url=address)
    browser.wait("document.documentElement.dataset.ready")
    train(browser, data_file, epochs=1)
    browser.wait("document.getElementById('status').textContent.startsWith('Done')")
