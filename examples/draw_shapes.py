"""Draws circles, crosses and rings, a folder for each: pictures to try an image classifier with.

    python examples/draw_shapes.py pictures      # pictures/train/circle/0.png …, pictures/test/…

Needs Pillow: pip install "onward[data]".
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

SIDE = 64
CLASSES = ("circle", "cross", "ring")


def draw(kind: str, rng: np.random.Generator) -> Image.Image:
    """One shape somewhere, of any size and colour, on a background that is not even."""
    shade = rng.integers(110, 256, (4, 4, 3), np.uint8)
    picture = Image.fromarray(shade).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    pen = ImageDraw.Draw(picture)
    colour = tuple(int(part) for part in rng.integers(0, 100, 3))
    radius = int(rng.integers(12, 24))
    x, y = (int(part) for part in rng.integers(radius, SIDE - radius, 2))
    box = (x - radius, y - radius, x + radius, y + radius)
    if kind == "circle":
        pen.ellipse(box, fill=colour)
    elif kind == "ring":
        pen.ellipse(box, outline=colour, width=radius // 3)
    else:
        pen.line(box, fill=colour, width=radius // 3)
        pen.line((box[0], box[3], box[2], box[1]), fill=colour, width=radius // 3)
    noise = rng.normal(0, 8, (SIDE, SIDE, 3))
    return Image.fromarray(np.clip(np.asarray(picture) + noise, 0, 255).astype(np.uint8))


def main(folder: Path, *, train: int = 40, test: int = 10) -> None:
    """Write pictures of each class to train on, and others to test with."""
    rng = np.random.default_rng(0)
    for part, count in (("train", train), ("test", test)):
        for kind in CLASSES:
            target = folder / part / kind
            target.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                draw(kind, rng).save(target / f"{number}.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    main(parser.parse_args().folder)
