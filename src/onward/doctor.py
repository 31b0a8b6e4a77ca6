"""Reports on the environment: versions, execution providers, instruction sets, threads, extras.

`CHECKS` are functions without arguments that each return one `Section` of findings; a new subject is one more
function. A check that fails is a finding too.
"""

from __future__ import annotations

import dataclasses
import enum
import os
import platform
import re
import sys
import warnings
from collections.abc import Callable
from importlib import metadata
from typing import Any

__all__ = ["CHECKS", "Finding", "Section", "State", "diagnose"]


class State(enum.StrEnum):
    """OK, ABSENT (optional, not there) or WRONG (something will not work)."""

    OK = "ok"
    ABSENT = "absent"
    WRONG = "wrong"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing looked at: what it is, what was found and, where something is missing, what gets it."""

    name: str
    value: str
    state: State = State.OK
    fix: str = ""


@dataclasses.dataclass(frozen=True)
class Section:
    """The findings of one check."""

    title: str
    findings: tuple[Finding, ...]


def diagnose() -> list[Section]:
    """Run every check.

    >>> [section.title for section in diagnose()]
    ['versions', 'providers', 'gpu', 'processor', 'threads', 'optional packages']
    """
    return [_guarded(check) for check in CHECKS]


def _guarded(check: Callable[[], Section]) -> Section:
    try:
        return check()
    except Exception as error:  # a package that is broken in a way that nobody foresaw
        title = check.__name__.strip("_")
        return Section(title, (Finding(title, f"{type(error).__name__}: {error}", State.WRONG),))


# ---- versions --------------------------------------------------------------------------------------

# Distributions that bring the same `onnxruntime` module: the one installed last overwrites the others.
_RUNTIMES = (
    "onnxruntime", "onnxruntime-gpu", "onnxruntime-directml", "onnxruntime-rocm", "onnxruntime-migraphx",
    "onnxruntime-openvino", "onnxruntime-training", "onnxruntime-silicon", "onnxruntime-qnn", "onnxruntime-webgpu",
)  # fmt: skip
_REQUIREMENT = re.compile(r"^(?P<name>[\w.-]+)(?:\[[^]]*\])?(?P<bounds>[^;]*)(?:;(?P<marker>.*))?$")


def _versions() -> Section:
    findings = [
        Finding("python", f"{platform.python_version()} ({sys.executable})"),
        Finding("onward", _version("onward") or "a source tree that is not installed"),
    ]
    runtimes = [name for name in _RUNTIMES if _version(name)]
    for name, least in _required().items():
        installed = _version(name)
        if name == "onnxruntime" and installed is None and runtimes:
            continue  # another distribution of the same module
        findings.append(_package(name, installed, least))
    findings += [Finding(name, _version(name) or "") for name in runtimes if name != "onnxruntime"]
    if len(runtimes) > 1:
        findings.append(
            Finding(
                "onnxruntime",
                f"{' and '.join(runtimes)} are installed together, in the same folder",
                State.WRONG,
                _instead(runtimes[-1]),
            )
        )
    return Section("versions", tuple(findings))


def _package(name: str, installed: str | None, least: str) -> Finding:
    command = f"pip install '{name}>={least}'" if least else f"pip install {name}"
    if installed is None:
        return Finding(name, "not installed", State.WRONG, command)
    if least and _order(installed) < _order(least):
        return Finding(name, f"{installed}: Onward needs {least}", State.WRONG, command)
    return Finding(name, installed)


def _required() -> dict[str, str]:
    """What Onward needs, with the oldest version of each."""
    return {name: least for name, least, extra in _requirements() if extra is None} or dict.fromkeys(
        ("numpy", "onnx", "onnx-ir", "onnxruntime"), ""
    )


def _requirements() -> list[tuple[str, str, str | None]]:
    """Name, oldest version and extra of everything that the installed Onward asks for."""
    try:
        lines = metadata.requires("onward") or []
    except metadata.PackageNotFoundError:
        return []
    requirements = []
    for line in lines:
        match = _REQUIREMENT.match(line.replace(" ", ""))
        if match is not None:
            least = re.search(r">=([\w.]+)", match["bounds"])
            extra = re.search(r"""extra==['"]([\w.-]+)""", match["marker"] or "")
            requirements.append((match["name"], least[1] if least else "", extra[1] if extra else None))
    return requirements


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


# ---- providers -------------------------------------------------------------------------------------

# device: its provider, the systems that have it, and the package that brings it
_DEVICES: dict[str, tuple[str, tuple[str, ...], str]] = {
    "cpu": ("CPUExecutionProvider", ("Linux", "Darwin", "Windows"), "onnxruntime"),
    "cuda": ("CUDAExecutionProvider", ("Linux", "Windows"), "onnxruntime-gpu"),
    "rocm": ("ROCMExecutionProvider", ("Linux",), "onnxruntime-rocm"),
    "dml": ("DmlExecutionProvider", ("Windows",), "onnxruntime-directml"),
    "coreml": ("CoreMLExecutionProvider", ("Darwin",), "onnxruntime"),
    "openvino": ("OpenVINOExecutionProvider", ("Linux", "Windows"), "onnxruntime-openvino"),
    "webgpu": ("WebGpuExecutionProvider", ("Linux", "Darwin", "Windows"), "onnxruntime-webgpu"),
}
# Plug-ins of the stock runtime, which need no other.
_PLUG_INS = {"webgpu": "pip install 'onward[webgpu]'"}


def _providers() -> Section:
    import onnxruntime as ort

    from onward.ort_session import plug_in_devices
    from onward.runtime.devices import Device, adapter_name, why_not

    available = ort.get_available_providers()
    findings = []
    for device, (provider, systems, package) in _DEVICES.items():
        adapters = range(len(plug_in_devices(provider)))
        if provider not in available and adapters:
            findings += [
                Finding(str(Device(device, n)), f"{provider} on {adapter_name(Device(device, n))}")
                for n in adapters
            ]
        elif provider in available:
            # why_not lets the runtime find the CUDA libraries of pip packages
            problem = why_not("cuda") if device == "cuda" else _does_not_start(provider)
            findings.append(
                Finding(device, provider)
                if problem is None
                else Finding(device, f"{provider} is installed but does not start: {problem}", State.WRONG)
            )
        elif platform.system() not in systems:
            findings.append(Finding(device, f"not on {platform.system()}", State.ABSENT))
        else:
            value = f"the installed onnxruntime {ort.__version__} was built without {provider}"
            fix = _PLUG_INS.get(device) or _instead(package)
            findings.append(Finding(device, value, State.ABSENT, fix))
    return Section("providers", tuple(findings))


def _instead(package: str) -> str:
    """What installs one distribution of the module; they overwrite each other, so those that are there go first."""
    there = " ".join(name for name in _RUNTIMES if _version(name)) or "onnxruntime"
    # the runtime's own extras bring the CUDA libraries that it was built for
    requirement = "'onnxruntime-gpu[cuda,cudnn]'" if package == "onnxruntime-gpu" else package
    return f"pip uninstall -y {there} && pip install {requirement}"


def _does_not_start(provider: str) -> str | None:
    """Why a session cannot use a provider that the runtime lists; None where it can."""
    import numpy as np

    from onward.ort_session import create_session

    x = np.ones((1, 4), np.uint8)
    try:
        with warnings.catch_warnings():  # that it is not used is said below
            warnings.simplefilter("ignore")
            session = create_session(_product(np.ones((4, 1), np.int8)), providers=[provider], fallback=True)
        session.run(None, {"a": x})
    except Exception as error:
        return str(error).splitlines()[0]
    return None if provider in session.get_providers() else "a session that asks for it runs without it"


def _product(weights: Any) -> bytes:
    """A model of one integer product."""
    from onnx import TensorProto, helper, numpy_helper

    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["a", "w"], ["y"])],
        "product",
        [helper.make_tensor_value_info("a", TensorProto.UINT8, ["n", len(weights)])],
        [helper.make_tensor_value_info("y", TensorProto.INT32, ["n", weights.shape[1]])],
        [numpy_helper.from_array(weights, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return model.SerializeToString()


# ---- gpu -------------------------------------------------------------------------------------------

_SMI = ("nvidia-smi", "--query-gpu=index,name,driver_version,memory.total", "--format=csv,noheader")


def _gpu() -> Section:
    """NVIDIA GPUs, what onnxruntime was built for, and whether training starts there."""
    import onnxruntime as ort

    from onward.runtime.cuda_driver import driver_version
    from onward.runtime.devices import why_not

    cards, problem = _cards()
    findings = [Finding(f"cuda:{number}", about) for number, about in cards]
    if problem:
        findings.append(Finding("driver", problem, State.ABSENT))
    supported = driver_version()
    if supported is not None:
        findings.append(Finding("driver", f"supports CUDA {supported[0]}.{supported[1]}"))
    built = getattr(ort, "cuda_version", "")
    if built:
        findings.append(Finding("onnxruntime was built for", f"CUDA {built}"))
    trouble = why_not("cuda")
    if trouble is None:
        findings.append(Finding("training", "starts on cuda"))
    elif cards:
        # a GPU without a runtime for it is an offer; a runtime that does not start is wrong, and says what it needs
        state, fix = (State.WRONG, "") if built else (State.ABSENT, _instead("onnxruntime-gpu"))
        findings.append(Finding("training", f"does not start on cuda: {trouble}", state, fix))
    return Section("gpu", tuple(findings))


def _cards() -> tuple[list[tuple[str, str]], str]:
    """Number and description of each GPU, or why none is seen."""
    import subprocess

    try:
        query = subprocess.run(_SMI, capture_output=True, text=True, timeout=20, check=False)
    except FileNotFoundError:
        return [], "no NVIDIA driver (nvidia-smi is not there)"
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"nvidia-smi fails: {error}"
    if query.returncode:
        return [], f"nvidia-smi fails: {(query.stdout + query.stderr).strip().splitlines()[0]}"
    rows = [[part.strip() for part in line.split(",")] for line in query.stdout.splitlines() if line.strip()]
    return [(row[0], f"{row[1]}, driver {row[2]}, {row[3]}") for row in rows if len(row) == 4], ""


# ---- processor and threads -------------------------------------------------------------------------


def _processor() -> Section:
    from onward.runtime.processor import instruction_sets, integer_products

    findings = [
        Finding("machine", f"{platform.system()} {platform.machine()}, {sys.byteorder}-endian"),
        Finding("instruction sets", " ".join(instruction_sets()) or "none that Onward knows of"),
        Finding("int8 products", integer_products()),
        _full_range(),
    ]
    if sys.byteorder != "little":
        findings[0] = dataclasses.replace(
            findings[0], state=State.WRONG, fix="onnxruntime has no packages for big-endian machines"
        )
    return Section("processor", tuple(findings))


def _full_range() -> Finding:
    """Whether the runtime saturates here: tried, not told from the names of instructions."""
    import numpy as np

    from onward.ort_session import create_session

    session = create_session(_product(np.full((64, 16), 127, np.int8)))
    # the largest products there are: x86 without VNNI adds pairs of them in 16 bits, and saturates
    sums = session.run(None, {"a": np.full((4, 64), 255, np.uint8)})[0]
    right = bool(np.all(sums == 64 * 127 * 255))
    value = (
        "right" if right else "saturate: use models that were quantized with reduce_range=True, the default"
    )
    return Finding("int8 products of full range", value)


def _threads() -> Section:
    from onward.runtime.environment import processors

    findings = [
        Finding(
            "processors",
            f"{processors()} of {os.cpu_count()} may be used; onnxruntime chooses its threads from these",
        )
    ]
    limit = os.environ.get("OMP_NUM_THREADS")
    if limit is not None:
        findings.append(Finding("OMP_NUM_THREADS", f"{limit} (numpy and torch; onnxruntime takes no notice)"))
    return Section("threads", tuple(findings))


# ---- optional packages -----------------------------------------------------------------------------

_NOT_FOR_USERS = frozenset({"dev", "docs", "all"})


def _extras() -> Section:
    extras: dict[str, list[tuple[str, str]]] = {}
    for name, least, extra in _requirements():
        if extra is not None and extra not in _NOT_FOR_USERS:
            extras.setdefault(extra, []).append((name, least))
    findings = []
    for extra, packages in extras.items():
        looked = [_package(name, _version(name), least) for name, least in packages]
        value = ", ".join(f"{finding.name} {finding.value}" for finding in looked)
        missing = any(finding.state is not State.OK for finding in looked)
        fix = f"pip install 'onward[{extra}]'" if missing else ""
        findings.append(Finding(extra, value, State.ABSENT if missing else State.OK, fix))
    if not findings:
        findings.append(Finding("extras", "unknown: Onward runs from a source tree that is not installed"))
    return Section("optional packages", tuple(findings))


CHECKS: tuple[Callable[[], Section], ...] = (_versions, _providers, _gpu, _processor, _threads, _extras)
