"""The digits demo, clicked through: draw, teach, save, start over, load."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

from onward.api import CheckpointState
from web.browser import MODULES, ROOT, Browser
from web.conftest import serving
from web.strokes import DIGITS, STAR, Stroke


@pytest.fixture(scope="module")
def address(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    demo = runpy.run_path(str(ROOT / "examples" / "web_digits" / "build.py"))
    site = tmp_path_factory.mktemp("demo") / "site"
    assert demo["build"](site, epochs=6, packages=MODULES) > 0.95
    with serving(site) as address:
        yield address


@pytest.fixture
def demo(browser: Browser, address: str) -> Browser:
    browser("goto", url=address)
    browser.wait("document.documentElement.dataset.ready")
    assert browser("text", selector="#status") == "Ready. Draw on the pad."
    return browser


def draw(page: Browser, strokes: list[Stroke]) -> str:
    """What the model reads in a drawing."""
    for stroke in strokes:
        page("draw", selector="#pad", points=stroke)
    page.wait("document.querySelector('#guess[aria-busy=false]')?.textContent.match(/[0-9]/)")
    return page("text", selector="#guess")


def teach(page: Browser, digit: int) -> None:
    page("click", selector=f"#digits button:nth-child({digit + 1})")
    page.wait("!document.getElementById('practise').disabled")


def test_learns_a_sign_that_it_has_never_seen(demo: Browser, tmp_path: Path) -> None:
    assert draw(demo, DIGITS[7]) == "7"
    demo("click", selector="#clear")
    before = draw(demo, STAR)
    lesson = (int(before) + 1) % 10  # anything but what it believes
    teach(demo, lesson)
    assert (
        demo("text", selector="#status")
        == f"It took that for a {before}. Now it reads {lesson}. Draw another one."
    )
    assert draw(demo, STAR) == str(lesson)
    assert demo("text", selector="#first") == "0 of 1"
    assert demo("text", selector="#mine") == "1 of 1"
    assert float(demo("text", selector="#others").split()[0]) > 95
    demo("click", selector="#practise")
    demo.wait("document.getElementById('status').textContent.startsWith('Practised')")
    demo.wait("document.getElementById('chart').getAttribute('aria-label').includes('at step 160')")

    demo("download", selector="#download", path=str(tmp_path / "hand"))
    assert CheckpointState.load_checkpoint(tmp_path / "hand").parameters["fc"].requires_grad
    demo("click", selector="#forget")
    demo.wait("document.getElementById('status').textContent.startsWith('It has forgotten')")
    demo("click", selector="#clear")
    assert draw(demo, STAR) == before
    demo("upload", selector="#upload", path=str(tmp_path / "hand"))
    demo.wait("document.getElementById('status').textContent.startsWith('Loaded')")
    demo("click", selector="#clear")
    assert draw(demo, STAR) == str(lesson)
    assert demo("problems") == []


def test_works_with_the_keyboard_alone(demo: Browser) -> None:
    demo.evaluate("() => document.getElementById('pad').focus()")
    for key in ["ArrowUp"] * 7 + [" "] + ["ArrowDown"] * 15 + ["1"]:
        demo("press", selector=":focus", key=key)
    demo.wait("document.querySelectorAll('#gallery li').length === 1")
    assert demo("text", selector="#gallery").startswith("1")


def test_asks_for_a_drawing_before_it_learns(demo: Browser) -> None:
    demo("click", selector="#digits button:nth-child(4)")
    demo.wait("document.getElementById('status').textContent.startsWith('Draw something first')")
    assert demo.evaluate("() => document.querySelectorAll('#gallery li').length") == 0


def test_a_damaged_file_gives_a_message_and_changes_nothing(demo: Browser, tmp_path: Path) -> None:
    (tmp_path / "hand").write_bytes(b"not a checkpoint at all")
    demo("upload", selector="#upload", path=str(tmp_path / "hand"))
    demo.wait("!document.getElementById('problem').hidden")
    assert demo("text", selector="#problem").startswith("checkpoint 'hand': not a checkpoint")
    assert draw(demo, DIGITS[1]) == "1"


def test_every_control_has_a_name(demo: Browser) -> None:
    unnamed = demo.evaluate(
        "() => [...document.querySelectorAll('button, input, select, canvas[tabindex]')].filter((e) => "
        "!(e.innerText?.trim() || e.getAttribute('aria-label') || e.labels?.[0]?.innerText.trim())).length"
    )
    assert unnamed == 0


def test_fits_on_a_phone(demo: Browser) -> None:
    demo("viewport", width=360, height=740)
    try:
        assert demo.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    finally:
        demo("viewport", width=1100, height=900)
