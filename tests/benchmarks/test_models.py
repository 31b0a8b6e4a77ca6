"""The page of models and paths: a slice of it is run, and what is written says what was found."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import model_zoo  # noqa: E402
import models  # noqa: E402

ENTRIES = {entry.name: entry for entry in model_zoo.entries()}
SLICE = [
    "nn.RMSNorm",
    "nn.TransformerEncoder",
    "two towers",
    "vector-quantized autoencoder",
    "graph network",
    "gpt2",
    "depth_anything",
]


def test_there_are_enough_architectures() -> None:
    assert len(ENTRIES) >= 150


@pytest.mark.parametrize("name", SLICE)
def test_every_path_of_a_slice(name: str) -> None:
    if ENTRIES[name].family == "transformers":
        pytest.importorskip("transformers")
    row = models.run(ENTRIES[name])
    assert {path: row[path].get("error") for path in models.PATHS} == dict.fromkeys(models.PATHS)
    assert row["gradient"]["error_of_gradient"] < 1e-5


def test_the_page_is_what_the_results_say() -> None:
    results = json.loads(models.RESULTS.read_text(encoding="utf-8"))
    assert models.PAGE.read_text(encoding="utf-8") == models.page(results)
    assert set(results["rows"]) <= set(ENTRIES)


def test_a_red_cell_is_named_with_its_reason() -> None:
    row = {
        "family": "torch",
        "export": {"error": "ExportError: it does not | fit"},
        "gradient": {"error": "not exported"},
    }
    page = models.page({"versions": {"torch": "1"}, "rows": {"net": row}})
    assert "| net | **no** | **no** | **no** | **no** |" in page
    assert "- **net**, export: ExportError: it does not / fit" in page
