"""Sessions of the stock runtime: providers, options, and errors that say what to do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort

from onward.errors import ModelError

__all__ = ["ModelFile", "make_session", "providers_for", "read_model", "run_bound"]

ModelFile = str | os.PathLike[str] | bytes | onnx.ModelProto

_PROVIDERS = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "rocm": "ROCMExecutionProvider",
    "dml": "DmlExecutionProvider",
    "coreml": "CoreMLExecutionProvider",
    "openvino": "OpenVINOExecutionProvider",
}


def providers_for(device: str) -> list[str]:
    """The execution providers of a device, the CPU last; an error where the runtime lacks it."""
    kind = device.split(":", 1)[0].lower()
    if kind not in _PROVIDERS:
        raise ValueError(f"device is '{device}': choose one of {', '.join(_PROVIDERS)}")
    wanted, available = _PROVIDERS[kind], ort.get_available_providers()
    if wanted not in available:
        raise ModelError(
            f"device='{device}' needs onnxruntime's {wanted}, which the installed onnxruntime {ort.__version__} "
            f"does not have (it has {', '.join(available)}); install a package that has it, or use device='cpu'"
        )
    return list(dict.fromkeys([wanted, "CPUExecutionProvider"]))


def read_model(source: ModelFile, role: str) -> onnx.ModelProto:
    """Read a model of the artifacts; weights in external data stay there."""
    if isinstance(source, onnx.ModelProto):
        return source
    if isinstance(source, bytes):
        return onnx.load_model_from_string(source)
    file = Path(source)
    if not file.is_file():
        raise ModelError(f"no {role} model at '{file}'")
    try:
        model = onnx.load(str(file), load_external_data=False)
    except Exception as error:
        raise ModelError(f"'{file}' is not a readable ONNX model: {error}") from error
    domains = sorted({node.domain for node in model.graph.node if node.domain == "com.microsoft"})
    if domains and not any(entry.key == "onward.role" for entry in model.metadata_props):
        operators = sorted({node.op_type for node in model.graph.node if node.domain == "com.microsoft"})
        raise ModelError(
            f"'{file}' has operators of a training build of onnxruntime ({', '.join(operators[:4])}); "
            "make it again with onward.artifacts.generate_artifacts"
        )
    return model


def make_session(
    model: onnx.ModelProto | bytes | str,
    *,
    providers: list[str],
    options: ort.SessionOptions | None = None,
    what: str = "model",
) -> ort.InferenceSession:
    """Load a model; a path where it has external data, else a proto or its bytes."""
    source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else model
    chosen: Any = options or ort.SessionOptions()
    if options is None:
        chosen.log_severity_level = 3
    try:
        return ort.InferenceSession(source, chosen, providers=providers)
    except Exception as error:
        raise ModelError(f"onnxruntime cannot load the {what}: {error}") from error


def run_bound(session: ort.InferenceSession, binding: Any) -> None:
    """Run with a (native) binding, past the wrapper's checks, which cost a tiny model's step several percent."""
    native: Any = session._sess
    native.run_with_iobinding(binding, None)
