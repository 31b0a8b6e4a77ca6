"""Detects the CPU's instruction sets that matter for the runtime's speed.

Reads them from Linux, macOS or numpy (elsewhere). No file that Onward writes depends on them; speed does, and so
does the rounding of sums.
"""

from __future__ import annotations

import contextlib
import functools
import platform
import re
import subprocess
from pathlib import Path

# Ours: the names in /proc/cpuinfo on x86 and ARM, of sysctl on a Mac, and in numpy's table.
INSTRUCTION_SETS: dict[str, frozenset[str]] = {
    "AVX2": frozenset({"avx2", "AVX2"}),
    "FMA": frozenset({"fma", "FMA3"}),
    "AVX512F": frozenset({"avx512f", "AVX512F"}),
    "AVX-VNNI": frozenset({"avx_vnni"}),
    "AVX512-VNNI": frozenset({"avx512_vnni", "AVX512VNNI", "AVX512_ICL"}),
    "AVX512-BF16": frozenset({"avx512_bf16"}),
    "AMX-INT8": frozenset({"amx_int8"}),
    "NEON": frozenset({"asimd", "neon", "ASIMD", "NEON", "hw.optional.neon", "hw.optional.AdvSIMD"}),
    "DOTPROD": frozenset({"asimddp", "ASIMDDP", "hw.optional.arm.FEAT_DotProd"}),
    "I8MM": frozenset({"i8mm", "hw.optional.arm.FEAT_I8MM"}),
    "SVE": frozenset({"sve", "SVE"}),
}
# Products of 8-bit integers in one instruction, summed in 32 bits; the best comes first.
_DOT_PRODUCTS = ("AMX-INT8", "AVX512-VNNI", "AVX-VNNI", "I8MM", "DOTPROD")


@functools.cache
def instruction_sets() -> tuple[str, ...]:
    """The instruction sets that matter here and that this processor has, by their usual names.

    >>> set(instruction_sets()) <= set(INSTRUCTION_SETS)
    True
    """
    flags = _flags()
    return tuple(name for name, names in INSTRUCTION_SETS.items() if names & flags)


def integer_products() -> str:
    """The instructions that multiply 8-bit integers here, in words.

    >>> "unknown" in integer_products() or bool(instruction_sets())
    True
    """
    sets = instruction_sets()
    best = next((name for name in _DOT_PRODUCTS if name in sets), None)
    if best is not None:
        return best
    return f"{vectors()}, no 8-bit dot products" if sets else "unknown instructions"


def vectors() -> str:
    """The widest vectors of floats here, by which the last digits of sums may differ.

    >>> vectors() in {"AVX512F", "AVX2", "SVE", "NEON", "baseline"}
    True
    """
    sets = instruction_sets()
    return next((name for name in ("AVX512F", "AVX2", "SVE", "NEON") if name in sets), "baseline")


@functools.cache
def name_of_processor() -> str:
    """What the processor calls itself, where the system tells."""
    if platform.system() == "Linux":
        try:
            text = Path("/proc/cpuinfo").read_text("utf-8", "replace")
        except OSError:
            text = ""
        line = re.search(r"^(?:model name|CPU part)\s*:(.*)$", text, re.MULTILINE)
        if line is not None:
            return line[1].strip()
    if platform.system() == "Darwin":
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
            brand = subprocess.run(
                command, capture_output=True, text=True, timeout=10, check=False
            ).stdout.strip()
            if brand:
                return brand
    return platform.processor() or platform.machine()


def _flags() -> frozenset[str]:
    if platform.system() == "Linux":
        return _linux(Path("/proc/cpuinfo"))
    if platform.system() == "Darwin":
        return _mac()
    return _numpy()


def _linux(path: Path) -> frozenset[str]:
    try:
        text = path.read_text("utf-8", "replace")
    except OSError:
        return _numpy()
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return frozenset() if line is None else frozenset(line[1].split())


def _mac() -> frozenset[str]:
    try:
        listed = subprocess.run(
            ["/usr/sbin/sysctl", "hw.optional", "machdep.cpu.features", "machdep.cpu.leaf7_features"],
            capture_output=True, text=True, timeout=10, check=False,
        ).stdout  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return _numpy()
    pairs = dict(line.split(":", 1) for line in listed.splitlines() if ":" in line)
    words = " ".join(value for key, value in pairs.items() if key.startswith("machdep")).lower().split()
    return frozenset(words) | {key for key, value in pairs.items() if value.strip() == "1"}


def _numpy() -> frozenset[str]:
    """What numpy found when it was imported: no public name, so nothing where it is not there."""
    import numpy as np

    core = getattr(np, "_core", None) or getattr(np, "core", None)
    features = getattr(getattr(core, "_multiarray_umath", None), "__cpu_features__", {})
    return frozenset(name for name, has in features.items() if has)
