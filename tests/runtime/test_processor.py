"""What each system says of its processor, in the names that we use."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from onward.runtime import processor

HASWELL = "processor\t: 0\nflags\t\t: fpu sse2 avx fma avx2 bmi2\n\nprocessor\t: 1\nflags\t\t: fpu sse2\n"
SAPPHIRE = "flags : avx2 fma avx512f avx512_vnni avx512_bf16 amx_tile amx_int8 avx_vnni\n"
GRAVITON = "BogoMIPS\t: 243.75\nFeatures\t: fp asimd aes crc32 asimddp sve i8mm\n"
APPLE = "hw.optional.neon: 1\nhw.optional.arm.FEAT_DotProd: 1\nhw.optional.arm.FEAT_I8MM: 0\n"
INTEL_MAC = "machdep.cpu.features: FPU FMA SSE4.2\nmachdep.cpu.leaf7_features: SMEP AVX2 BMI2\n"


@pytest.fixture(autouse=True)
def fresh() -> Any:
    processor.instruction_sets.cache_clear()
    yield
    processor.instruction_sets.cache_clear()


@pytest.mark.parametrize(
    ("system", "text", "sets", "products"),
    [
        ("Linux", HASWELL, "AVX2 FMA", "AVX2, no 8-bit dot products"),
        ("Linux", SAPPHIRE, "AVX2 FMA AVX512F AVX-VNNI AVX512-VNNI AVX512-BF16 AMX-INT8", "AMX-INT8"),
        ("Linux", GRAVITON, "NEON DOTPROD I8MM SVE", "I8MM"),
        ("Linux", "vendor: unknown\n", "", "unknown instructions"),
        ("Darwin", APPLE, "NEON DOTPROD", "DOTPROD"),
        ("Darwin", INTEL_MAC, "AVX2 FMA", "AVX2, no 8-bit dot products"),
    ],
    ids=["haswell", "sapphire rapids", "graviton", "riscv", "apple", "intel mac"],
)
def test_instruction_sets(
    monkeypatch: pytest.MonkeyPatch, system: str, text: str, sets: str, products: str
) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(Path, "read_text", lambda *_: text)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=text))
    assert " ".join(processor.instruction_sets()) == sets
    assert processor.integer_products() == products


def test_elsewhere_numpy_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Windows")
    assert set(processor.instruction_sets()) <= set(processor.INSTRUCTION_SETS)
