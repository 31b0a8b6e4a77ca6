"""What importing Onward brings in, seen in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"
HEAVY = ("torch", "transformers", "onnx", "onnxruntime", "onnx_ir", "onnxscript", "numpy")


def loaded(code: str) -> set[str]:
    """The modules that are loaded after some code ran."""
    program = f"import sys\nsys.path.insert(0, {str(SOURCE)!r})\n{code}\nprint(*sys.modules, sep='\\n')"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(found.stdout.split())


def test_importing_onward_imports_nothing_heavy() -> None:
    modules = loaded("import onward")
    assert "onward" in modules
    assert not modules & set(HEAVY)
    assert {name for name in modules if name.startswith("onward")} == {"onward"}


MAKING = (
    "onward.autodiff",
    "onward.artifacts",
    "onward.onnxblock",
    "onward.losses",
    "onward.optim",
    "onward.artifacts.training_graph",
)
FRONTS = {
    "api": ("import onward.api", ("torch", "transformers", "onnx_ir", "onnx.reference", *MAKING)),
    "Trainer": ("from onward import Trainer", ("torch", "transformers", "onnx_ir", *MAKING)),
    "inference": ("import onward.runtime.inference_model", ("torch", "transformers", *MAKING)),
    "export": ("from onward.export import for_inference", ("torch", "transformers", *MAKING)),
    "artifacts": ("import onward.artifacts", ("torch", "transformers", "onward.api", "onward.train.trainer")),
    "checkpoint": ("import onward.checkpoint", ("torch", "onnx_ir", "onnxruntime", *MAKING)),
}


@pytest.mark.parametrize(("code", "banned"), FRONTS.values(), ids=FRONTS)
def test_a_front_door_does_not_import(code: str, banned: tuple[str, ...]) -> None:
    modules = loaded(code)
    assert not {m for m in modules if any(m == name or m.startswith(f"{name}.") for name in banned)}


def test_every_public_name_is_there() -> None:
    look = "for name in onward.__all__: getattr(onward, name)"
    modules = loaded(f"import onward\n{look}\nassert set(dir(onward)) >= set(onward.__all__)")
    assert {"onward.train.trainer", "onward.artifacts"} <= modules  # the names were really looked up


def test_training_from_files_needs_no_differentiator(tmp_path: Path) -> None:
    from small_models import write_classifier

    folder = write_classifier(tmp_path)
    code = f"""
import numpy as np
from onward.api import CheckpointState, Module, Optimizer
state = CheckpointState.load_checkpoint({str(folder / "checkpoint")!r})
module = Module({str(folder / "training_model.onnx")!r}, state, {str(folder / "eval_model.onnx")!r})
optimizer = Optimizer({str(folder / "optimizer_model.onnx")!r}, module)
x, labels = np.ones((2, 4), np.float32), np.zeros(2, np.int64)
module(x, labels); optimizer.step(); module.lazy_reset_grad(); module.eval()(x, labels)
CheckpointState.save_checkpoint(state, {str(tmp_path / "later")!r}, include_optimizer_state=True)
module.export_model_for_inferencing({str(tmp_path / "model.onnx")!r}, ["scores"])
"""
    modules = loaded(code)
    assert (tmp_path / "model.onnx").is_file()
    assert not {m for m in modules if m.startswith(MAKING) or m in ("torch", "transformers")}
