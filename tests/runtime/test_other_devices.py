"""Devices other than the CPU and CUDA, on onnxruntimes of their own (`make devices`): right, or refused by name.

WebGPU runs in software: Chromium brings a Vulkan for the CPU. ONWARD_ALL_CASES trains every network.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_PACKAGES = _ROOT / "build" / "devices"
_CHROMIUM = Path("/usr/lib/chromium")
_ALL = ["MLP", "CNN with batch norm", "encoder with dropout", "LSTM", "LoRA", "generator"]
_SHORT = {
    "webgpu": ["MLP", "CNN with batch norm", "LoRA"],
    "openvino": ["MLP", "encoder with dropout", "LSTM", "LoRA"],
}


def train(device: str, folder: Path) -> dict[str, dict]:
    """What `device_steps.py` measures, in a process of its own as another onnxruntime is in it."""
    package = _PACKAGES / f"onnxruntime-{device}"
    if not (package / "onnxruntime").is_dir():
        pytest.skip(f"onnxruntime-{device} is not there: `make devices` fetches it")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(package), str(_ROOT / "src")])}
    if device == "webgpu":
        library = _CHROMIUM / "libvk_swiftshader.so"
        if not library.is_file():
            pytest.skip("WebGPU in software needs the Vulkan of Debian's chromium")
        icd = folder / "icd.json"
        content = {"library_path": str(library), "api_version": "1.0.5"}
        icd.write_text(json.dumps({"file_format_version": "1.0.0", "ICD": content}))
        environment |= {
            "VK_ICD_FILENAMES": str(icd), "LD_LIBRARY_PATH": str(_CHROMIUM), "XDG_RUNTIME_DIR": str(folder),
        }  # fmt: skip
    names = _ALL if os.environ.get("ONWARD_ALL_CASES") else _SHORT[device]
    script = str(Path(__file__).with_name("device_steps.py"))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script, device, *names],
        env=environment, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    if "No supported adapters" in done.stderr:
        pytest.skip("WebGPU sees no adapter here")
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert list(results) == names
    return results


def test_webgpu_follows_the_cpu_with_its_state_on_the_device(tmp_path: Path) -> None:
    for name, result in train("webgpu", tmp_path).items():
        assert "refused" not in result, f"{name}: {result}"
        assert result["loss"] < 1e-4 and result["weights"] < 1e-4, f"{name}: {result}"
        assert abs(result["moved"]) > 1e-3, name
        # the seed, the loss, and the scalars of the update; never parameters, gradients or optimizer state
        assert result["copied"] - result["batch"] <= 64, f"{name}: {result}"
        assert result["copied"] - result["batch"] < result["parameters"]


def test_openvino_is_right_or_refused_with_a_reason(tmp_path: Path) -> None:
    results = train("openvino", tmp_path)
    for name, result in results.items():
        if "refused" in result:
            assert "device='openvino'" in result["refused"] and "onward conform" in result["refused"], name
        else:
            assert result["loss"] < 1e-4 and result["weights"] < 1e-4, f"{name}: {result}"
    assert not [name for name, result in results.items() if "refused" in result and name != "LSTM"]
