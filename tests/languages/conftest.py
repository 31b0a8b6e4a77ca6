"""Writes the table of languages at the end of a run, where that was asked for."""

from __future__ import annotations


def pytest_sessionfinish() -> None:
    from languages import matrix
    from languages.test_programs import MODELS

    matrix.write(list(MODELS))
