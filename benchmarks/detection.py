"""How well and how fast a published detector learns drawn shapes: mAP, minutes and memory.

Draws pictures with three shapes, clutter, and one to five objects each, fine-tunes the detector on them and compares
the exported file's boxes in plain onnxruntime with those of the run. The model is a file of YOLOv8's or YOLOX's form:

    pip download --no-deps nudenet && unzip -j nudenet-*.whl nudenet/320n.onnx
    python benchmarks/detection.py 320n.onnx --epochs 20
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

import onward
from onward.data.read import Data, DataOptions

SHAPES = ("box", "ball", "wedge")


def draw(folder: Path, pictures: int, side: int, seed: int) -> Path:
    """Pictures in images/ and YOLO's lines in labels/."""
    rng = np.random.default_rng(seed)
    for part in ("images", "labels"):
        (folder / part).mkdir(parents=True)
    for number in range(pictures):
        base = rng.integers(0, 256, (8, 8, 3), np.uint8)
        picture = Image.fromarray(base).resize((side, side), Image.Resampling.BICUBIC)
        pen = ImageDraw.Draw(picture)
        for _ in range(rng.integers(10, 25)):  # clutter: lines and dots of any colour
            ends = [int(n) for n in rng.integers(0, side, 4)]
            pen.line(ends, fill=_colour(rng), width=int(rng.integers(1, 4)))
        taken: list[tuple[int, int, int, int]] = []
        lines = []
        for _ in range(rng.integers(1, 6)):
            for _attempt in range(50):
                width, height = (int(n) for n in rng.integers(side // 10, side // 3, 2))
                x, y = int(rng.integers(0, side - width)), int(rng.integers(0, side - height))
                apart = all(x >= c or x + width <= a or y >= d or y + height <= b for a, b, c, d in taken)
                if apart:
                    break
            else:
                continue
            taken.append((x, y, x + width, y + height))
            kind = int(rng.integers(0, len(SHAPES)))
            corners = (x, y, x + width - 1, y + height - 1)
            if kind == 0:
                pen.rectangle(corners, fill=_colour(rng))
            elif kind == 1:
                pen.ellipse(corners, fill=_colour(rng))
            else:
                foot = [(x, y + height - 1), (x + width - 1, y + height - 1), (x + width // 2, y)]
                pen.polygon(foot, fill=_colour(rng))
            numbers = ((x + width / 2) / side, (y + height / 2) / side, width / side, height / side)
            lines.append(f"{kind} " + " ".join(f"{one:.6f}" for one in numbers))
        picture.save(folder / "images" / f"{number}.png")
        (folder / "labels" / f"{number}.txt").write_text("\n".join(lines))
    (folder / "classes.txt").write_text("\n".join(SHAPES))
    return folder


def _colour(rng: np.random.Generator) -> tuple[int, ...]:
    return tuple(int(part) for part in rng.integers(0, 256, 3))


def main() -> None:
    """Train, and print the figures as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--pictures", type=int, default=300)
    parser.add_argument("--tests", type=int, default=100)
    parser.add_argument("--side", type=int, default=320)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--augment", action="append", default=[])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        training = draw(folder / "training", arguments.pictures, arguments.side, seed=0)
        test = draw(folder / "test", arguments.tests, arguments.side, seed=1)
        begin = time.perf_counter()
        result = onward.finetune(
            arguments.model, training, eval_data=test, epochs=arguments.epochs, device=arguments.device,
            batch_size=arguments.batch_size, augment=arguments.augment, size=_size(arguments),
            learning_rate=arguments.learning_rate,
        )  # fmt: skip
        minutes = (time.perf_counter() - begin) / 60
        exported = folder / "shapes.onnx"
        result.export(exported)
        deployed = onward.evaluate_model(exported, test, load_data, options=DataOptions(), batch_size=8)
        detector, here = onward.load(exported), result._predictor()
        file = test / "images" / "0.png"
        figures = {
            "pictures": arguments.pictures,
            "epochs": arguments.epochs,
            "mAP50": round(result.metrics["mAP50"], 4),
            "mAP50-95": round(result.metrics["mAP50_95"], 4),
            "mAP50 of the exported file": round(deployed.figures["mAP50"], 4),
            "same boxes": detector(file) == here(file),
            "minutes": round(minutes, 2),
            "peak memory GB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        }
        print(json.dumps(figures))


def load_data(inputs: object, options: object) -> Data:
    """Detection reads its data itself."""
    raise NotImplementedError


def _size(arguments: argparse.Namespace) -> int | None:
    """The side for a model that takes any."""
    from onward.pipeline.evaluate import open_source

    dims = open_source(arguments.model).inputs[0].dims or ()
    return arguments.side if len(dims) == 4 and dims[2] is None else None


if __name__ == "__main__":
    main()
