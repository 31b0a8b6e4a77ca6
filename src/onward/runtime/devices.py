"""Devices: which execution provider runs a session, and where the memory of training is.

Four kinds of memory. *host*: numpy arrays that sessions read and write in place. *device*: OrtValues on the
device, bound by address. *resident*: OrtValues that have no address; what one run writes, the next reads. *copied*:
numpy arrays that are passed to the session at every run, for providers whose memory is not accessible from Python:
slower, but correct.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import io
import os
import platform
import warnings
from typing import Literal

import numpy as np
import onnxruntime as ort

from onward.errors import DeviceError
from onward.ort_session import CPU, PLUG_INS, Provider, create_session, plug_in_devices, shorten_error
from onward.runtime.cuda_driver import why_cuda_fails

__all__ = ["CPU", "Device", "DeviceLike", "adapter_name", "find_device", "is_checked", "why_not"]

Memory = Literal["auto", "host", "device", "resident", "copied"]

_PROVIDERS = {
    "cpu": CPU,
    "cuda": "CUDAExecutionProvider",
    "rocm": "ROCMExecutionProvider",
    "migraphx": "MIGraphXExecutionProvider",
    "dml": "DmlExecutionProvider",
    "coreml": "CoreMLExecutionProvider",
    "openvino": "OpenVINOExecutionProvider",
    "webgpu": "WebGpuExecutionProvider",
}
_MEMORY: dict[str, Memory] = {"cpu": "host", "cuda": "device", "webgpu": "resident"}
_PACKAGES = {
    "cuda": "pip install onward[gpu] (see docs/gpu.md)",
    "webgpu": "pip install onward[webgpu] (see docs/gpu.md)",
}
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
    memory: Memory = "auto"

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

    def providers(self, *, capture: bool = False) -> list[Provider]:
        """What a session is to be given, the CPU last."""
        if self.kind == "cpu":
            return [CPU]
        options = {"device_id": str(self.number)} if self.kind in _NUMBERED else {}
        if self.number and self.provider in PLUG_INS:
            options["device_id"] = str(self.number)
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


def is_checked(device: Device) -> bool:
    """Whether what a device computes is compared with the CPU's before it trains (`device_check`).

    The CPU is what others are compared with, and CUDA's kernels have tests of their own.
    """
    return device.kind not in ("cpu", "cuda")


def require_device(session: ort.InferenceSession, device: Device, what: str) -> None:
    """Refuse a session that the runtime has made for another device than it was asked for."""
    if session.get_providers()[0] != device.provider:
        raise DeviceError(
            f"onnxruntime would run the {what} on {session.get_providers()[0]} and not on device='{device}': "
            "see what it printed above, and `onward doctor`"
        )


def adapter_name(device: Device) -> str:
    """What the runtime says of the hardware behind a device; where it says nothing, the operating system.

    >>> adapter_name(Device("cpu")) != ""
    True
    """
    if device.provider not in ort.get_available_providers():
        devices = plug_in_devices(device.provider)
        if device.number < len(devices):
            chosen = devices[device.number]
            about = dict(chosen.device.metadata)
            words = [
                chosen.device.vendor,
                about.get("Description", ""),
                chosen.ep_metadata.get("version", ""),
            ]
            return " ".join(word for word in words if word)
    # a driver comes with the system's updates, or is chosen by this variable
    return " ".join([platform.platform(), os.environ.get("VK_ICD_FILENAMES", "")]).strip()


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
    if provider not in available and not plug_in_devices(provider):
        if provider in PLUG_INS and importlib.util.find_spec(PLUG_INS[provider]) is not None:
            return (
                f"{PLUG_INS[provider]} is installed, but sees no device of this machine; look at its driver"
            )
        package = _PACKAGES.get(kind, "install a package that has it")
        return (
            f"it needs onnxruntime's {provider}, which the installed onnxruntime {ort.__version__} does not have "
            f"(it has {', '.join(available)}); {package}"
        )
    count = 1 if provider in available else len(plug_in_devices(provider))
    if kind not in _NUMBERED and number >= count:
        return f"onnxruntime's {provider} offers {count} of them, counted from 0"
    if kind == "cuda":
        # Lets the runtime find the CUDA libraries of pip packages. It prints what it misses: said once, below.
        with contextlib.redirect_stdout(io.StringIO()):
            ort.preload_dlls()
    try:
        options = {"device_id": str(number)} if kind in _NUMBERED else {}
        # Tried, not told by the list of providers: a build lists CUDA also where its libraries are missing.
        session = create_session(_tiny_model(), providers=[(provider, options), CPU])
        if session.get_providers()[0] != provider:
            return (
                f"onnxruntime could not start its {provider} and would have run on the CPU instead; "
                f"{_what_is_missing(kind, number)}"
            )
        if kind == "cuda":
            # A session may start where memory cannot be had: a GPU that another process has filled, for one.
            ort.OrtValue.ortvalue_from_shape_and_type([1], np.float32, "cuda", number)
    except Exception as error:
        # the rest is a stack of the runtime's own functions
        return f"onnxruntime's {provider} does not start ({shorten_error(error)}); {_what_is_missing(kind, number)}"
    return None


def _what_is_missing(kind: str, number: int) -> str:
    if kind != "cuda":
        return "install what it needs"
    return why_cuda_fails(number, str(getattr(ort, "cuda_version", "") or ""))


def _tiny_model() -> bytes:
    import onnx.parser

    text = '<ir_version: 8, opset_import: ["": 17]> probe (float[n] x) => (float[n] y) { y = Identity (x) }'
    return onnx.parser.parse_model(text).SerializeToString()
