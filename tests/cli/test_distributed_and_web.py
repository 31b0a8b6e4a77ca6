"""`onward distributed` and `onward web`: training elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def test_distributed_trains_on_two_processes(artifacts: Path, run: Any) -> None:
    options = ("-d", "data.npz", "--eval-data", "data.npz", "-e", 8, "--lr", 0.02)
    found = run("distributed", "artifacts", *options, "-p", 2, "-o", "many", "--json").json
    assert found["losses"][-1] < found["losses"][0]
    # the same shuffling on one process: equal up to the order in which gradients are summed
    one = run("train", "artifacts", *options, "-o", "one", "--json").json
    assert found["eval_loss"] == pytest.approx(one["epochs"][-1]["eval_loss"], rel=1e-3)
    run("deploy", "many", "model-many.onnx")


BAD_DISTRIBUTED = [
    (["nowhere", "-d", "data.npz"], "no artifacts in 'nowhere'"),
    (["artifacts"], "no data was given"),
    (["artifacts", "-d", "data.npz", "-p", 3, "--stages", 2], "cannot be divided into pipelines"),
    (["artifacts", "-d", "data.npz", "--nodes", 2], "need --master"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_DISTRIBUTED, ids=[case[1] for case in BAD_DISTRIBUTED])
def test_distributed_refuses(artifacts: Path, run: Any, arguments: list[Any], message: str) -> None:
    assert message in run("distributed", *arguments, code=1).stderr
