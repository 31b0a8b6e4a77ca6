"""A compiler, onnxruntime's headers and its library, and what they make of the tests' program."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import onnxruntime
import pytest

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Toolchain:
    """What C++ programs are built with here."""

    compiler: str
    headers: Path
    library: Path

    def build(self, source: Path, target: Path, *options: str) -> Path:
        command = [
            self.compiler, "-std=c++17", *options, "-isystem", self.headers, "-I", ROOT / "cpp" / "include", source,
            "-o", target, self.library, f"-Wl,-rpath,{self.library.parent}",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert not done.stderr, done.stderr  # a warning of the header's is its users' warning
        return target


def find_headers() -> Path | None:
    """ONNXRUNTIME_INCLUDE_DIR, where systems install them, what `make headers` fetched, or further up."""
    places = [Path(os.environ["ONNXRUNTIME_INCLUDE_DIR"])] if "ONNXRUNTIME_INCLUDE_DIR" in os.environ else []
    for base in (Path("/usr/include"), Path("/usr/local/include"), Path("/opt/homebrew/include")):
        places += [base, base / "onnxruntime", base / "onnxruntime" / "core" / "session"]
    places.append(ROOT / "build" / "toolchains" / "headers")
    for folder in ROOT.parents[:3]:
        places += [folder / "onnxruntime-headers", *sorted(folder.glob("*/onnxruntime-headers"))]
    return next((place for place in places if (place / "onnxruntime_cxx_api.h").is_file()), None)


@pytest.fixture(scope="session")
def toolchain(tmp_path_factory: pytest.TempPathFactory) -> Toolchain:
    compiler = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)
    headers = find_headers()
    capi = Path(onnxruntime.__file__).parent / "capi"
    library = next(
        (file for end in ("so*", "*dylib") for file in sorted(capi.glob(f"libonnxruntime.{end}"))), None
    )
    missing = [
        what
        for what, found in (
            ("a C++ compiler", compiler),
            ("onnxruntime's headers (set ONNXRUNTIME_INCLUDE_DIR)", headers),
            ("onnxruntime's library in the installed wheel", library),
        )
        if found is None
    ]
    if compiler is None or headers is None or library is None:
        pytest.skip(f"C++ is not tested: there is no {' and no '.join(missing)}")
    # programs look for it under the name that it gives itself, which the wheel leaves out
    links = tmp_path_factory.mktemp("onnxruntime")
    names = ["libonnxruntime.so", "libonnxruntime.so.1", library.name]
    for name in dict.fromkeys(names):
        (links / name).symlink_to(library)
    return Toolchain(compiler, headers, links / library.name)


@pytest.fixture(scope="session")
def driver(toolchain: Toolchain, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tests' program under the address sanitizer, which ends it with a code of its own."""
    target = tmp_path_factory.mktemp("cpp") / "driver"
    warnings = ("-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow")
    source = Path(__file__).with_name("driver.cpp")
    return toolchain.build(source, target, "-O0", "-g1", "-fsanitize=address", *warnings)
