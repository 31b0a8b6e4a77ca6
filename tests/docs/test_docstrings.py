"""The examples in docstrings run, each module's in a folder with the files that examples speak of.

`# doctest: +SKIP` is for what cannot run in a test: a server that runs on, packages from the network.
"""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path

import pytest

import onward
from small_models import write_classifier


def sources() -> dict[str, str]:
    """Every module that has an example that runs, with its text."""
    root = Path(onward.__path__[0])
    found = {}
    for module in pkgutil.walk_packages(onward.__path__, "onward."):
        path = root.joinpath(*module.name.split(".")[1:])
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        found[module.name] = file.read_text(encoding="utf-8")
    return {
        name: text
        for name, text in found.items()
        if any(">>> " in line and "+SKIP" not in line for line in text.splitlines())
    }


def artifacts_and_a_model() -> None:
    """`out` with the artifacts of a small classifier, and `model.onnx`, which it became."""
    from onward.export import for_inference

    write_classifier(Path("out"))
    for_inference("out/eval_model.onnx", "out/checkpoint", ["scores"], "model.onnx")


def hub() -> None:
    """Tiny models under the names that examples use."""
    from docs.test_examples_run import stand_in_for_the_hub

    stand_in_for_the_hub()


def classifier_artifacts() -> None:
    """`artifacts` of a tiny text classifier."""
    from onward.export import artifacts_from_transformers

    hub()
    artifacts_from_transformers("my-bert", "text-classification", "artifacts")


def artifacts_of_both_kinds() -> None:
    artifacts_and_a_model()
    classifier_artifacts()


def embedder() -> None:
    """`embedder`: a tiny sentence encoder as a folder for `onward.load`."""
    from onward.export import from_transformers

    hub()
    from_transformers("sentence-transformers/all-MiniLM-L6-v2", "pooling", "embedder")


PREPARE: dict[str, Callable[[], None]] = {
    "onward.distributed.runner": artifacts_and_a_model,
    "onward.export.huggingface.from_transformers": hub,
    "onward.export.inference": artifacts_of_both_kinds,
    "onward.export.quantize.quantizer": artifacts_and_a_model,
    "onward.pipeline.load": embedder,
    "onward.train.trainer": artifacts_and_a_model,
}


@pytest.mark.parametrize("name", sources())
def test_the_examples_of_a_module_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    PREPARE.get(name, lambda: None)()
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0
