"""Devices: which execution provider runs a session, and where the memory of training is.

Three kinds of memory. *host*: numpy arrays that sessions read and write in place. *device*: OrtValues on the
device, bound by address. *copied*: numpy arrays that are passed to the session at every run, for providers
whose memory is not accessible from Python: slower, but correct.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from typing import Any, Literal

import numpy as np
import onnxruntime as ort

from onward.errors import DeviceError
from onward.runtime.cuda_driver import why_cuda_fails

__all__ = ["CPU", "Device", "DeviceLike", "find_device", "why_not"]

CPU = "CPUExecutionProvider"
_PROVIDERS = {
    "cpu": CPU,
    "cuda": "CUDAExecutionProvider",
    "rocm": "ROCMExecutionProvider",
    "migraphx": "MIGraphXExecutionProvider",
    "dml": "DmlExecutionProvider",
    "coreml": "CoreMLExecutionProvider",
    "openvino": "OpenVINOExecutionProvider",
}
_MEMORY: dict[str, Literal["host", "device"]] = {"cpu": "host", "cuda": "device"}
# Options by which a provider learns which of several devices it is to use.
_NUMBERED = {"cuda", "rocm", "migraphx", "dml"}


@dataclasses.dataclass(frozen=True)
class Device:
    """Where training runs.

    `tf32` lets CUDA multiply float32 matrices with 10 bits of mantissa: faster, and less accurate; off by
    default, as in PyTorch. `graphs` records steps and updates as CUDA graphs where the model allows it.
    `deterministic` asks for kernels that give the same bits in every run: slower, mostly for convolutions. `memory`
    is chosen by the kind of device; tests choose it to run the way of a device over the CPU provider.

    >>> Device("cpu").memory
    'host'
    """

    kind: str
    number: int = 0
    tf32: bool = False
    graphs: bool = True
    deterministic: bool = False
    memory: Literal["auto", "host", "device", "copied"] = "auto"

    def __post_init__(self) -> None:
        if self.kind not in _PROVIDERS:
            raise ValueError(
                f"device is '{self.kind}': choose one of auto, {', '.join(_PROVIDERS)}, or cuda:1 and so on"
            )
        if self.memory == "auto":
            object.__setattr__(self, "memory", _MEMORY.get(self.kind, "copied"))

    def __str__(self) -> str:
        return f"{self.kind}:{self.number}" if self.number else self.kind

    @property
    def provider(self) -> str:
        """The name of its execution provider."""
        return _PROVIDERS[self.kind]

    @property
    def captures(self) -> bool:
        """Whether runs may be recorded and replayed as one."""
        return self.graphs and self.kind == "cuda"

    def providers(self, *, capture: bool = False) -> list[Any]:
        """What a session is to be given, the CPU last."""
        if self.kind == "cpu":
            return [CPU]
        options = {"device_id": str(self.number)} if self.kind in _NUMBERED else {}
        if self.kind == "cuda":
            # the arena would otherwise grow in powers of two, up to twice what is needed
            options["arena_extend_strategy"] = "kSameAsRequested"
            options["use_tf32"] = str(int(self.tf32))
            if self.deterministic:
                # cuDNN's fastest kernels are found by timing, which differs from run to run
                options["cudnn_conv_algo_search"] = "DEFAULT"
            if capture:
                options["enable_cuda_graph"] = "1"
        return [(self.provider, options), CPU]


DeviceLike = str | Device


def find_device(device: DeviceLike) -> Device:
    """The device of a name ("cpu", "cuda:1", "auto"); an error where this machine does not have it.

    >>> find_device("cpu")
    Device(kind='cpu', number=0, tf32=False, graphs=True, deterministic=False, memory='host')
    """
    if isinstance(device, str):
        name = device.lower()
        if name == "auto":
            return _best()
        kind, _, number = name.partition(":")
        if kind not in _PROVIDERS or not (number == "" or number.isdecimal()):
            raise ValueError(
                f"device is '{device}': choose one of auto, {', '.join(_PROVIDERS)}, or cuda:1 and so on"
            )
        device = Device(kind, int(number or 0))
    if device.kind != "cpu":
        problem = _problem(device.kind, device.number)
        if problem is not None:
            raise DeviceError(f"device='{device}' cannot be used: {problem}, or use device='cpu'")
    return device


def why_not(name: str) -> str | None:
    """Why a device of this name cannot be used and what to do about it; None where it works.

    >>> why_not("cpu") is None
    True
    """
    kind, _, number = name.partition(":")
    return None if kind == "cpu" else _problem(kind, int(number or 0))


def _best() -> Device:
    """CUDA where it works, else the CPU; a warning where it is installed and does not work."""
    problem = _problem("cuda", 0)
    if problem is None:
        return Device("cuda")
    if _PROVIDERS["cuda"] in ort.get_available_providers():
        warnings.warn(f"device='auto' takes the CPU, because {problem}", RuntimeWarning, stacklevel=3)
    return Device("cpu")


@functools.cache
def _problem(kind: str, number: int) -> str | None:
    """Why a device cannot be used and what to do about it; None where it works."""
    provider, available = _PROVIDERS[kind], ort.get_available_providers()
    if provider not in available:
        package = (
            "pip install onward[gpu] (see docs/gpu.md)" if kind == "cuda" else "install a package that has it"
        )
        return (
            f"it needs onnxruntime's {provider}, which the installed onnxruntime {ort.__version__} does not have "
            f"(it has {', '.join(available)}); {package}"
        )
    if kind == "cuda":
        _preload()
    try:
        session = ort.InferenceSession(
            _tiny_model(),
            _quiet(),
            providers=[(provider, {"device_id": str(number)}) if kind in _NUMBERED else provider, CPU],
            enable_fallback=0,  # it would print a page and go on on the CPU
        )
        if session.get_providers()[0] != provider:
            return (
                f"onnxruntime could not start its {provider} and would have run on the CPU instead; "
                f"{_what_is_missing(kind, number)}"
            )
        if kind == "cuda":
            ort.OrtValue.ortvalue_from_shape_and_type([1], np.float32, "cuda", number)
    except Exception as error:
        said = str(error).splitlines()[0].rpartition(" : FAIL : ")[2]
        return f"onnxruntime's {provider} does not start ({said}); {_what_is_missing(kind, number)}"
    return None


def _preload() -> None:
    """Let the runtime find the CUDA libraries of pip packages; it prints what it misses, so say it once."""
    import contextlib
    import io

    preload = getattr(ort, "preload_dlls", None)
    if preload is not None:
        with contextlib.redirect_stdout(io.StringIO()):
            preload()


def _what_is_missing(kind: str, number: int) -> str:
    if kind != "cuda":
        return "install what it needs"
    return why_cuda_fails(number, str(getattr(ort, "cuda_version", "") or ""))


def _quiet() -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    return options


def _tiny_model() -> bytes:
    import onnx

    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", ["x"], ["y"])],
        "probe",
        [value("x", onnx.TensorProto.FLOAT, ["n"])],
        [value("y", onnx.TensorProto.FLOAT, ["n"])],
    )
    opset = onnx.helper.make_opsetid("", 17)
    return onnx.helper.make_model(graph, opset_imports=[opset], ir_version=8).SerializeToString()
