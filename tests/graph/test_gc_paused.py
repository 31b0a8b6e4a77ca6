"""Building a graph leaves the garbage collector as it was."""

from __future__ import annotations

import gc

import pytest

from onward.graph.gc_paused import gc_paused


@pytest.mark.parametrize("enabled", [True, False])
def test_collection_is_off_inside_and_as_before_outside(enabled: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(ZeroDivisionError), gc_paused():
            assert not gc.isenabled()
            with gc_paused():
                pass
            assert not gc.isenabled()
            raise ZeroDivisionError
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()
