"""DeferredInterrupt: a signal waits for the end of a batch, unless it comes twice or belongs to someone else."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest

from onward.train.loop import DeferredInterrupt

SIGNALS = [signal.SIGINT, signal.SIGTERM]


@pytest.fixture(autouse=True)
def usual_handlers() -> Any:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_waits_for_check(number: int) -> None:
    with DeferredInterrupt() as interrupt:
        interrupt.check()
        signal.raise_signal(number)
        with pytest.raises(KeyboardInterrupt):
            interrupt.check()
        interrupt.check()  # asked for once, raised once


@pytest.mark.parametrize("first", SIGNALS)
@pytest.mark.parametrize("second", SIGNALS)
def test_the_second_signal_does_not_wait(first: int, second: int) -> None:
    with DeferredInterrupt():
        signal.raise_signal(first)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(second)


def test_the_handlers_are_those_from_before() -> None:
    with pytest.raises(ZeroDivisionError), DeferredInterrupt():
        raise ZeroDivisionError
    assert [signal.getsignal(number) for number in SIGNALS] == [signal.default_int_handler] * 2


@pytest.mark.parametrize("number", SIGNALS)
def test_a_program_that_handles_a_signal_keeps_it(number: int) -> None:
    heard: list[int] = []
    signal.signal(number, lambda number, frame: heard.append(number))
    with DeferredInterrupt() as interrupt:
        signal.raise_signal(number)
        signal.raise_signal(number)
        interrupt.check()
    assert heard == [number, number]


def test_sigterm_is_left_alone_where_it_ends_the_process() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with DeferredInterrupt():
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_another_thread_changes_nothing() -> None:
    seen: list[Any] = []

    def work() -> None:
        with DeferredInterrupt() as interrupt:
            interrupt.check()
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
