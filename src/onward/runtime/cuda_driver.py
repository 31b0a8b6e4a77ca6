"""What NVIDIA's driver says of itself and of the GPUs it sees: why CUDA does not start, in one sentence.

Asks the driver's own library, as onnxruntime names neither its version nor what is missing.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

_WINDOWS = os.name == "nt"
_DRIVER = "nvcuda.dll" if _WINDOWS else "libcuda.so.1"
_FETCH = "pip install 'onnxruntime-gpu[cuda,cudnn]'"


def driver_version() -> tuple[int, int] | None:
    """The newest CUDA that the driver supports; None where there is no driver.

    >>> version = driver_version()
    >>> version is None or version > (0, 0)
    True
    """
    driver = _load(_DRIVER)
    if driver is None:
        return None
    number = ctypes.c_int(0)
    driver.cuDriverGetVersion(ctypes.byref(number))
    return number.value // 1000, number.value % 1000 // 10


def why_cuda_fails(number: int, built: str) -> str:
    """What is missing for GPU `number` where onnxruntime was built for CUDA `built`, and what to do about it."""
    version, major = driver_version(), built.partition(".")[0]
    needed = f"CUDA {built or 'that onnxruntime was built for'}"
    if version is None:
        return f"there is no NVIDIA driver ({_DRIVER} is not found): install one that supports {needed}"
    if major.isdecimal() and version[0] < int(major):
        return (
            f"the NVIDIA driver supports CUDA {version[0]}.{version[1]} at most, and onnxruntime was built for "
            f"{needed}: update the driver, or install an onnxruntime-gpu for CUDA {version[0]}"
        )
    count = _count()
    if count <= number:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        note = "" if hidden is None else f" (CUDA_VISIBLE_DEVICES is '{hidden}')"
        seen = "no GPU" if count == 0 else "1 GPU, cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
        return f"the driver sees {seen}{note}: `nvidia-smi` lists what is there; choose one of those"
    missing = [name for name in _libraries(major) if _load(name) is None]
    if missing:
        return f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not found: {_FETCH}"
    return f"are all libraries of {needed} and cuDNN 9 installed ({_FETCH})? `onward doctor` says more"


def _libraries(major: str) -> list[str]:
    """What onnxruntime's provider loads, by the names that systems know it by."""
    if not major.isdecimal():
        return []
    if _WINDOWS:
        return [f"cudart64_{major}.dll", f"cublas64_{major}.dll", "cudnn64_9.dll"]
    return [f"libcudart.so.{major}", f"libcublas.so.{major}", "libcudnn.so.9"]


def _count() -> int:
    driver, count = _load(_DRIVER), ctypes.c_int(0)
    if driver is None or driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def _load(name: str) -> Any:
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None
