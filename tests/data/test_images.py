"""The size of pictures for a model that takes any."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("PIL")
from PIL import Image

from onward.data.images import read_images
from onward.data.match_inputs import InputSpec

OPEN, FIXED = (None, 3, None, None), (None, 3, 48, 48)


@pytest.mark.parametrize(
    ("sizes", "dims", "settings", "expected"),
    [
        ([(64, 40)] * 3, OPEN, {}, (40, 64)),
        ([(64, 40), (64, 41)], OPEN, {}, (224, 224)),
        ([(28, 28)] * 2, OPEN, {}, (224, 224)),
        ([(300, 200)] * 2, OPEN, {}, (224, 224)),
        ([(64, 40)] * 2, FIXED, {}, (48, 48)),
        ([(64, 40)] * 2, OPEN, {"size": {"height": 96, "width": 96}}, (96, 96)),
        ([(64, 40)] * 2, (None, None, None, 3), {}, (40, 64)),
    ],
)
def test_pictures_of_one_small_size_stay_as_they_are(
    sizes: list[tuple[int, int]], dims: tuple, settings: dict, expected: tuple[int, int], tmp_path: Path
) -> None:
    files = []
    for number, size in enumerate(sizes):
        files.append(tmp_path / f"{number}.png")
        Image.new("RGB", size).save(files[-1])
    spec = InputSpec("x", np.dtype(np.float32), dims)
    arrays, preprocessing = read_images(files, [spec], None, settings)
    shape = arrays["x"].shape[1:]
    assert (shape[:2] if dims[-1] == 3 else shape[1:]) == expected
    # the deployed file prepares what comes later in the same way
    assert preprocessing.settings["size"] == dict(zip(("height", "width"), expected))
