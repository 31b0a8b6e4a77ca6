"""The programs of examples/languages, built with what is there: compilers on PATH, or what toolchains.py fetched.

Bindings that no reachable registry has are stood in for by the shims beside this file, over the same C API.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import onnxruntime

from cpp.conftest import find_headers
from web.browser import MODULES

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "languages"
SHIMS = Path(__file__).with_name("shims")
TOOLCHAINS = ROOT / "build" / "toolchains"  # what `make languages` fetches: see toolchains.py
# What was built stays: Kotlin's compiler takes longer than all tests together.
BUILDS = ROOT / "build" / "languages"
WARNINGS = ("-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow", "-Werror")
SANITIZERS = ("-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


class MissingError(Exception):
    """What a language needs and this machine lacks."""


_PEAK_MEMORY = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


@dataclass(frozen=True)
class Program:
    """How to run what was built."""

    words: Sequence[str | Path]
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, *words: object) -> subprocess.CompletedProcess[str]:
        command = [str(word) for word in (*self.words, *words)]
        environment = {**os.environ, **self.environment}
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)

    def peak_memory(self, *words: object) -> int:
        """The most memory that a run had, in bytes."""
        environment = {**os.environ, **self.environment}
        # a small process between: a child's figure begins with the memory of the process that started it
        between = [sys.executable, "-c", _PEAK_MEMORY, *map(str, (*self.words, *words))]
        output = subprocess.run(between, capture_output=True, text=True, check=True, env=environment).stdout
        return int(output.split()[-1]) * (1 if sys.platform == "darwin" else 1024)


def which(name: str, what: str) -> str:
    program = shutil.which(name)
    if program is None:
        raise MissingError(f"there is no {what} ({name})")
    return program


def fetched(name: str, what: str) -> Path:
    path = TOOLCHAINS / name
    if not path.exists():
        raise MissingError(f"there is no {what}: `make languages` fetches it")
    return path


def compile_with(
    *words: object, environment: dict[str, str] | None = None, folder: Path | None = None
) -> None:
    done = subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, cwd=folder,
        env={**os.environ, **(environment or {})},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def built(
    name: str, sources: Sequence[Path], build: Callable[[Path], object], *, of: Sequence[object] = ()
) -> Path:
    """A folder that `build` has filled from these sources, and from no older ones."""
    digest = hashlib.sha256(repr((*of, onnxruntime.__version__)).encode())
    for source in sources:
        for path in sorted(source.rglob("*")) if source.is_dir() else [source]:
            if path.is_file():
                digest.update(path.read_bytes())
    target = BUILDS / f"{name}-{digest.hexdigest()[:16]}"
    if not target.is_dir():
        partial = target.with_suffix(f".{os.getpid()}")
        partial.mkdir(parents=True)
        try:
            build(partial)
            with contextlib.suppress(OSError):  # another worker of the tests was quicker
                partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return target


@cache
def library() -> Path:
    """The wheel's own library, with links under the names that programs look for."""
    capi = Path(onnxruntime.__file__).parent / "capi"
    files = sorted(capi.glob("libonnxruntime.so.*")) or sorted(capi.glob("libonnxruntime*.dylib"))
    if not files:
        raise MissingError("the installed wheel has no shared library of onnxruntime")

    def link(folder: Path) -> None:
        for name in ("libonnxruntime.so", "libonnxruntime.so.1", files[0].name):
            if not (folder / name).is_symlink():
                (folder / name).symlink_to(files[0])

    return built("onnxruntime", [], link, of=[files[0]]) / "libonnxruntime.so"


def headers() -> Path:
    folder = find_headers()
    if folder is None:
        raise MissingError(
            "there are no headers of onnxruntime: `make headers` fetches them, or set ONNXRUNTIME_INCLUDE_DIR"
        )
    return folder


@cache
def shim() -> Path:
    """The library under the stand-ins for bindings."""

    def build(folder: Path) -> None:
        compile_with(
            which("cc", "C compiler"), "-O1", *WARNINGS[:2], "-Werror", "-fPIC", "-shared", "-isystem", headers(),
            "-I", EXAMPLES / "c", "-o", folder / "libruntime.so", SHIMS / "runtime.c", library(),
            f"-Wl,-rpath,{library().parent}",
        )  # fmt: skip

    return built("shim", [SHIMS / "runtime.c", SHIMS / "runtime.h"], build)


def build_c() -> Program:
    return _build_with_cmake("c", "C", [EXAMPLES / "c"])


def build_cpp() -> Program:
    return _build_with_cmake("cpp", "CXX", [EXAMPLES / "c", EXAMPLES / "cpp"])


def _build_with_cmake(name: str, language: str, sources: Sequence[Path]) -> Program:
    cmake = which("cmake", "CMake")
    which("c++" if language == "CXX" else "cc", "compiler")
    flags = " ".join((*SANITIZERS, *WARNINGS))

    def build(folder: Path) -> None:
        compile_with(
            cmake, "-S", EXAMPLES / name, "-B", folder, f"-DCMAKE_{language}_FLAGS={flags}",
            f"-DONNXRUNTIME_INCLUDE_DIR={headers()}", f"-DONNXRUNTIME_LIBRARY={library()}",
        )  # fmt: skip
        compile_with(cmake, "--build", folder)

    return Program([built(name, sources, build, of=[library(), flags]) / "train"], ASAN)


# with a quarantine the sanitizer itself takes more memory with each step
ASAN = {"ASAN_OPTIONS": "detect_leaks=1:quarantine_size_mb=0:thread_local_quarantine_size_kb=0"}
# a heap that is collected often: what grows then is not the collector's
JVM = ("-Xmx48m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")


def build_java() -> Program:
    java, javac = which("java", "Java runtime"), which("javac", "Java compiler")
    jar = fetched("onnxruntime.jar", "Java binding of onnxruntime")
    sources = EXAMPLES / "java" / "src" / "main" / "java"

    def build(folder: Path) -> None:
        compile_with(javac, "-Xlint:all", "-Werror", "-cp", jar, "-d", folder, *sources.glob("*.java"))

    classes = built("java", [sources], build)
    return Program([java, *JVM, "-cp", f"{jar}:{classes}", "Train"])


def build_kotlin() -> Program:
    java, jar = which("java", "Java runtime"), fetched("onnxruntime.jar", "Java binding of onnxruntime")
    kotlin = fetched("kotlin", "Kotlin compiler")
    sources = EXAMPLES / "kotlin" / "src" / "main" / "kotlin"

    def build(folder: Path) -> None:
        files = sources.glob("*.kt")
        compile_with(
            "bash", kotlin / "bin" / "kotlinc", "-Werror", "-cp", jar, "-d", folder / "train.jar", *files
        )

    program = built("kotlin", [sources], build) / "train.jar"
    standard = kotlin / "lib" / "kotlin-stdlib.jar"
    return Program([java, *JVM, "-cp", f"{jar}:{program}:{standard}", "TrainKt"])


def build_csharp() -> Program:
    host = fetched("dotnet", ".NET SDK")
    binding = fetched("onnxruntime-unity", "C# binding of onnxruntime") / "csharp"
    environment = {
        "LD_LIBRARY_PATH": str(fetched("openssl", "OpenSSL 1.1, which this .NET needs")),
        "DOTNET_SYSTEM_GLOBALIZATION_INVARIANT": "1",
        "DOTNET_CLI_TELEMETRY_OPTOUT": "1",
        "COMPlus_GCHeapHardLimit": "0x4000000",
    }
    dotnet = host / "dotnet"
    compiler = next((host / "sdk").glob("*/Roslyn/bincore/csc.dll"))
    assemblies = next((host / "packs" / "Microsoft.NETCore.App.Ref").glob("*/ref/*"))

    def build(folder: Path) -> None:
        references = folder / "references.rsp"
        references.write_text("".join(f"-r:{path}\n" for path in assemblies.glob("*.dll")))
        shared = (dotnet, compiler, "-nologo", "-unsafe", "-langversion:8.0", f"@{references}")
        runtime = folder / "Microsoft.ML.OnnxRuntime.dll"
        sources = sorted(binding.glob("**/*.cs"))
        compile_with(*shared, "-target:library", f"-out:{runtime}", *sources, environment=environment)
        program = sorted((EXAMPLES / "csharp").glob("*.cs"))
        compile_with(
            *shared,
            "-warnaserror",
            f"-r:{runtime}",
            f"-out:{folder / 'Train.dll'}",
            *program,
            environment=environment,
        )
        framework = '{"name": "Microsoft.NETCore.App", "version": "3.1.0"}'
        settings = f'{{"runtimeOptions": {{"framework": {framework}}}}}'
        (folder / "Train.runtimeconfig.json").write_text(settings)
        (folder / "libonnxruntime.so").symlink_to(library())

    folder = built("csharp", [EXAMPLES / "csharp"], build, of=[library()])
    return Program([dotnet, folder / "Train.dll"], environment)


def build_go() -> Program:
    go = shutil.which("go")
    if go is None:
        go = str(fetched("go", "Go compiler") / "bin" / "go")

    def build(folder: Path) -> None:
        for path in (EXAMPLES / "go").iterdir():
            shutil.copy(path, folder)
        with open(folder / "go.mod", "a", encoding="utf-8") as file:
            file.write(f"replace github.com/yalue/onnxruntime_go => {SHIMS / 'go'}\n")
        environment = {
            "CGO_CFLAGS": f"-I{SHIMS}", "CGO_LDFLAGS": f"-L{shim()} -lruntime -Wl,-rpath,{shim()}",
            "GOFLAGS": "-mod=mod", "GOPROXY": "off", "GOCACHE": str(BUILDS / "go-cache"), "CGO_ENABLED": "1",
        }  # fmt: skip
        compile_with(go, "vet", ".", environment=environment, folder=folder)
        compile_with(go, "build", "-o", "program", ".", environment=environment, folder=folder)

    return Program([built("go", [EXAMPLES / "go", SHIMS / "go"], build, of=[shim()]) / "program"])


def build_rust() -> Program:
    cargo = which("cargo", "Rust compiler")

    def build(folder: Path) -> None:
        shutil.copytree(EXAMPLES / "rust", folder / "train")
        patches = [
            word for name in ("ort", "sha2")
            for word in ("--config", f"patch.crates-io.{name}.path='{SHIMS / name}'")
        ]  # fmt: skip
        flags = f"-L{shim()} -lruntime -Clink-arg=-Wl,-rpath,{shim()} -Dwarnings"
        target = {"RUSTFLAGS": flags, "CARGO_TARGET_DIR": str(folder / "target")}
        compile_with(cargo, "build", "--offline", *patches, environment=target, folder=folder / "train")

    sources = [EXAMPLES / "rust" / "src", EXAMPLES / "rust" / "Cargo.toml", SHIMS / "ort", SHIMS / "sha2"]
    return Program([built("rust", sources, build, of=[shim()]) / "target" / "debug" / "train"])


def build_node() -> Program:
    node = which("node", "Node.js")
    if not (MODULES / "onnxruntime-node").is_dir():
        raise MissingError("there are no npm packages (make test gets them)")

    def build(folder: Path) -> None:
        (folder / "node_modules").symlink_to(MODULES)
        for path in (EXAMPLES / "node").iterdir():
            shutil.copy(path, folder)

    folder = built("node", [EXAMPLES / "node"], build)
    return Program([node, "--max-semi-space-size=1", folder / "train.mjs"])


@dataclass(frozen=True)
class Swift:
    """Debian's compiler, which may be newer than this system: it and its programs run on the libraries beside it."""

    root: Path

    @property
    def runtime(self) -> Path:
        return self.root / "usr" / "libexec" / "swift" / "lib" / "swift" / "linux"

    @property
    def system(self) -> Path:
        return self.root / "usr" / "lib" / "x86_64-linux-gnu"

    @property
    def loader(self) -> list[str | Path]:
        """What runs a program on the libraries beside the compiler, and those of the stand-in."""
        here = (self.system, self.runtime, self.runtime.parent / "host" / "compiler", self.runtime.parents[1])
        libraries = ":".join(map(str, (*here, shim(), library().parent)))
        return [self.root / "usr" / "lib64" / "ld-linux-x86-64.so.2", "--library-path", libraries]

    @property
    def tools(self) -> Path:
        return self.runtime.parents[2] / "bin"

    def compile(self, folder: Path, name: str, files: Sequence[Path], *options: object) -> None:
        """A module in `folder`, which has those that it imports."""
        compile_with(
            *self.loader, self.tools / "swift-frontend", "-frontend", "-warnings-as-errors", "-sdk", self.root,
            "-resource-dir", self.runtime.parent, "-I", SHIMS, "-I", folder, "-module-cache-path", folder / "cache",
            "-module-name", name, *options, *files,
        )  # fmt: skip

    def compile_bindings(self, folder: Path) -> None:
        """The stand-ins for the modules that Linux does not have."""
        for name in ("OnnxRuntimeBindings", "CryptoKit"):
            self.compile(
                folder, name, [SHIMS / "swift" / f"{name}.swift"], "-c", "-O", "-parse-as-library",
                "-emit-module-path", folder / f"{name}.swiftmodule", "-o", folder / f"{name}.o",
            )  # fmt: skip

    def link(self, folder: Path) -> None:
        gcc = next(self.system.parent.glob("gcc/x86_64-linux-gnu/*"))
        names = (
            "runtime",
            "Foundation",
            "FoundationEssentials",
            "swiftCore",
            "swiftGlibc",
            "swiftSwiftOnoneSupport",
        )
        compile_with(
            *self.loader, self.tools / "lld", "-flavor", "gnu", f"--sysroot={self.root}", "-pie", "-dynamic-linker",
            self.loader[0], "--allow-shlib-undefined", self.system / "Scrt1.o", self.system / "crti.o",
            gcc / "crtbeginS.o", self.runtime / "x86_64" / "swiftrt.o", *folder.glob("*.o"),
            *(f"-L{path}" for path in (self.runtime, self.system, gcc, shim())), *(f"-l{name}" for name in names),
            "-lm", "-lc", "-lgcc_s", gcc / "crtendS.o", self.system / "crtn.o", "-o", folder / "train",
        )  # fmt: skip


def find_swift() -> Swift:
    return Swift(fetched("swift", "Swift compiler"))


def build_swift() -> Program:
    swift, sources = find_swift(), EXAMPLES / "swift" / "Sources" / "train"

    def build(folder: Path) -> None:
        swift.compile_bindings(folder)
        files = sorted(sources.glob("*.swift"))
        swift.compile(folder, "train", files, "-c", "-O", "-o", folder / "train.o")
        swift.link(folder)

    folder = built("swift", [sources, SHIMS / "swift"], build, of=[shim(), swift.root])
    return Program([*swift.loader, folder / "train"])


# The names say which programs run over the real binding.
LANGUAGES: dict[str, Callable[[], Program]] = {
    "C": build_c,
    "C++": build_cpp,
    "Java": build_java,
    "Kotlin": build_kotlin,
    "C#": build_csharp,
    "Node.js": build_node,
    "Go, over a stand-in for its binding": build_go,
    "Rust, over a stand-in for its binding": build_rust,
    "Swift, over a stand-in for its binding": build_swift,
}
