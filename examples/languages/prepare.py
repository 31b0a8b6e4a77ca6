"""What the programs train on: artifacts of a small network, and the handwritten digits as a file for each input.

python examples/languages/prepare.py build/digits
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "cpp"))

from prepare import main as write_artifacts


def main(folder: Path) -> None:
    """Write the artifacts, image.bin (float32, 64 each) and labels.bin (int64)."""
    write_artifacts(folder)
    (folder / "images.bin").rename(folder / "image.bin")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/digits"))
