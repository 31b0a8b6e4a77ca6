"""Makes every session of onnxruntime: what all of them are given, in one place.

Knows no model: who calls has checked it, or has built it, and says what its failure means.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime as ort

if TYPE_CHECKING:
    import onnx

CPU = "CPUExecutionProvider"
# An input of a run, and an execution provider with or without options.
Feed = np.ndarray | ort.OrtValue
Provider = str | tuple[str, dict[str, str]]
# Packages that add a provider to the stock runtime when they are registered with it.
PLUG_INS = {
    "WebGpuExecutionProvider": "onnxruntime_ep_webgpu",
    "OpenVINOExecutionProvider": "onnxruntime_ep_openvino",
}

# How OpenVINO names the node that it cannot read, and its lines that say where in its own sources and not what.
_NODE_IN_ERROR = re.compile(
    r"ONNX node '<Node\((?P<operator>\w+)\): (?P<name>[^>]*)>':\s*(?P<reason>.+)", re.DOTALL
)
_PLACE_IN_SOURCES = re.compile(r"Exception from |Check '|FrontEnd API|Errors during|.*:$")

# Loads the model that its argument names, in a process of its own: a graph that crashes the runtime takes that one.
# A script, as the child need not find Onward on its path.
LOAD_IN_CHILD = f"""
import sys, onnxruntime
options = onnxruntime.SessionOptions()
options.log_severity_level = 4
try:
    onnxruntime.InferenceSession(sys.argv[1], options, providers=["{CPU}"])
except Exception:
    pass
"""


def quiet_options(*, threads: int = 0, optimize: bool = True) -> ort.SessionOptions:
    """Options of a session that prints nothing; 0 threads are as many as there are cores."""
    options = ort.SessionOptions()
    # what went wrong is in the error, where names are escaped; the log would print a file's names as they are
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return options


def create_session(
    model: onnx.ModelProto | bytes | str | os.PathLike[str],
    options: ort.SessionOptions | None = None,
    *,
    providers: Sequence[Provider] = (CPU,),
    disabled_optimizers: Sequence[str] = (),
    fallback: bool = False,
    kind: type[ort.InferenceSession] | None = None,
) -> ort.InferenceSession:
    """Load a model, from its file where it has external data; `kind` is a subclass with runs of its own.

    Without `fallback`, a provider that does not start is an error: onnxruntime would go on on the CPU and print a page.
    """
    if isinstance(model, str | os.PathLike):
        source = os.fspath(model)
    else:
        source = model if isinstance(model, bytes) else model.SerializeToString()
    make = kind or ort.InferenceSession
    settled: Any = quiet_options() if options is None else options
    name, settings = _name_and_settings(providers[0]) if providers else (CPU, {})
    if name in PLUG_INS and name not in ort.get_available_providers():
        number = int(settings.get("device_id", 0))
        # options that an earlier session of the same device was made with have it already
        if not settled.has_providers():
            settled.add_provider_for_devices([plug_in_devices(name)[number]], {})
        providers = []  # the runtime refuses providers by name beside those
    return make(
        source,
        settled,
        providers=list(providers),
        disabled_optimizers=list(disabled_optimizers),
        enable_fallback=int(fallback),
    )


def array_of(value: Feed) -> np.ndarray:
    """An input of a run as numpy."""
    return value.numpy() if isinstance(value, ort.OrtValue) else value


def shape_of(value: Feed) -> tuple[int, ...]:
    """The shape of an input of a run."""
    return tuple(value.shape()) if isinstance(value, ort.OrtValue) else value.shape


def shorten_error(error: Exception) -> str:
    """What an error of the runtime says: of OpenVINO's page the operator and the reason, else the first line.

    >>> shorten_error(RuntimeError("[ONNXRuntimeError] : 1 : FAIL : no kernel\\nstack"))
    'no kernel'
    >>> shorten_error(RuntimeError("Exception from core.cpp:154:\\nCheck 'false' failed at a.cpp:1:\\nno such node"))
    'no such node'
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    named = _NODE_IN_ERROR.search(str(error))
    if named is not None:
        return f"{named['operator']} '{named['name']}': {_first_reason(named['reason'].splitlines())}"
    # functions of the provider stand before what it says
    lines[0] = lines[0].rpartition(" : FAIL : ")[2].rpartition(" [OpenVINO-EP] ")[2]
    return _first_reason(lines)


def _first_reason(lines: Sequence[str]) -> str:
    return next((line for line in lines if line and not _PLACE_IN_SOURCES.match(line)), lines[0])


def _name_and_settings(provider: Provider) -> tuple[str, dict[str, str]]:
    return (provider, {}) if isinstance(provider, str) else provider


@functools.cache
def plug_in_devices(provider: str) -> Sequence[Any]:
    """The devices on which a plug-in of the runtime offers a provider; none where it is not installed."""
    register = getattr(ort, "register_execution_provider_library", None)
    if provider not in PLUG_INS or register is None:  # onnxruntime 1.23
        return ()
    try:
        package = importlib.import_module(PLUG_INS[provider])
        register(PLUG_INS[provider], package.get_library_path())
    except Exception:  # not installed, or of another version of the runtime: no device
        return ()
    return tuple(device for device in ort.get_ep_devices() if device.ep_name == provider)
