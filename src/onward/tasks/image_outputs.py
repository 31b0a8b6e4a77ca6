"""Answers that are images, or places in one: depth, keypoints, pictures, hidden patches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.tasks.inputs import for_each_image, pixels
from onward.tasks.scores import resized

if TYPE_CHECKING:
    from onward.pipeline.load import Pipeline


Outputs = Mapping[str, np.ndarray]


@for_each_image
def depth(outputs: Outputs, size: tuple[int, int], card: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Depth at the picture's size, and the same as a picture from 0 to 255."""
    full = resized(np.asarray(outputs["predicted_depth"], np.float32), size, cubic=True)
    spread = full.max() - full.min()
    scaled = (full - full.min()) / (spread if spread > 0 else 1.0) * 255
    return {"predicted_depth": full, "depth": scaled.astype(np.uint8)}


@for_each_image
def keypoints(outputs: Outputs, size: tuple[int, int], card: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The hottest pixel of each map, in pixels of the picture."""
    heatmaps, labels = outputs["heatmaps"], card.get("labels") or ()
    height, width = heatmaps.shape[-2:]
    results = []
    for index, heat in enumerate(heatmaps):
        row, column = np.unravel_index(int(heat.argmax()), heat.shape)
        results.append(
            {
                "label": labels[index] if index < len(labels) else str(index),
                "score": float(heat[row, column]),
                "x": (float(column) + 0.5) * size[1] / width,
                "y": (float(row) + 0.5) * size[0] / height,
            }
        )
    return results


@for_each_image
def picture(outputs: Outputs, size: tuple[int, int], card: Mapping[str, Any]) -> np.ndarray:
    """[channels, height, width] from 0 to 1 as [height, width, channels] bytes."""
    return (np.clip(outputs["reconstruction"], 0, 1).transpose(1, 2, 0) * 255).round().astype(np.uint8)


def reconstruct(pipeline: Pipeline, inputs: Any, mask: Any = None) -> np.ndarray:
    """The pixels behind a mask."""
    if mask is None:
        raise TypeError("masked images need a mask, True for each hidden patch: pipeline(image, mask)")
    feed = {
        "pixel_values": pixels(pipeline, inputs)[None],
        "bool_masked_pos": np.asarray(mask, bool).reshape(1, -1),
    }
    return pipeline.run(feed)["reconstruction"][0]
