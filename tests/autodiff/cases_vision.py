"""Cases of sampling at grids and in regions."""

import numpy as np
from cases import Case


def _grid(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Points inside and outside the image, none on an edge between pixels of the sizes used here."""
    return (rng.uniform(-1.35, 1.35, shape) * 0.999 + 0.0007).astype(np.float32)


def _image(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.uniform(-1, 1, shape).astype(np.float32)


def _sample(label: str, *, shapes=((1, 2, 3, 4), (1, 2, 3, 2)), symbolic: bool = False, **attributes) -> Case:
    return Case(
        "GridSample",
        shapes=list(shapes),
        attributes=attributes,
        sample=[_image, _grid],
        symbolic=symbolic,
        label=label,
        reference="onnxruntime",
    )


def _rois(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Regions that lie inside, leave the image, and are smaller than a pixel."""
    rois = np.array(
        [[0.31, 0.73, 4.17, 3.97], [-2.41, 1.21, 6.67, 7.13], [1.13, 1.27, 1.61, 1.83]], np.float32
    )
    return rois[: shape[0]]


def _align(label: str, *, symbolic: bool = False, batch=(0, 1, 0), **attributes) -> Case:
    return Case(
        "RoiAlign",
        shapes=[(2, 2, 5, 6), (len(batch), 4)],
        constants={2: np.array(batch, np.int64)},
        attributes={"output_height": 2, "output_width": 3, **attributes},
        sample=[_image, _rois],
        symbolic=symbolic,
        label=label,
    )


_THREE = ((1, 2, 2, 3, 3), (1, 2, 2, 2, 3))
CASES = [
    *[
        _sample(f"{mode}-{padding}-{aligned}", mode=mode, padding_mode=padding, align_corners=aligned)
        for mode in ("linear", "nearest", "cubic")
        for padding in ("zeros", "border", "reflection")
        for aligned in (0, 1)
    ],
    *[
        _sample(f"3d-{mode}-{padding}", shapes=_THREE, mode=mode, padding_mode=padding)
        for mode in ("linear", "nearest")
        for padding in ("zeros", "border", "reflection")
    ],
    _sample("linear", shapes=((2, 2, 3, 4), (2, 2, 3, 2)), symbolic=True),
    _sample("cubic", mode="cubic", padding_mode="reflection", symbolic=True),
    _sample("3d", shapes=_THREE, align_corners=1, symbolic=True),
    _sample("one-pixel", shapes=((1, 1, 1, 3), (1, 2, 3, 2)), align_corners=1, padding_mode="reflection"),
    Case(
        "AffineGrid",
        shapes=[(2, 2, 3)],
        constants={1: np.array([2, 1, 2, 3])},
        reference="onnxruntime",
        label="2d",
    ),
    Case(
        "AffineGrid",
        shapes=[(1, 2, 3)],
        constants={1: np.array([1, 1, 2, 3])},
        attributes={"align_corners": 1},
        symbolic=True,
        reference="onnxruntime",
        label="2d-aligned",
    ),
    Case(
        "AffineGrid",
        shapes=[(1, 3, 4)],
        constants={1: np.array([1, 1, 2, 2, 3])},
        reference="onnxruntime",
        label="3d",
    ),
    _align("avg", sampling_ratio=2),
    _align("avg-adaptive"),
    _align("avg-output-half-pixel", coordinate_transformation_mode="output_half_pixel", spatial_scale=0.7),
    _align("avg", symbolic=True, sampling_ratio=1),
    _align("avg-adaptive", symbolic=True),
    _align("avg-no-region", batch=(), symbolic=True),
    _align("max-no-region", batch=(), mode="max", symbolic=True),
    _align("max", mode="max", sampling_ratio=2),
    _align("max-adaptive", mode="max", spatial_scale=0.8),
    _align(
        "max-output-half-pixel", mode="max", coordinate_transformation_mode="output_half_pixel", symbolic=True
    ),
    Case(
        "MaxRoiPool",
        shapes=[(2, 2, 4, 5)],
        constants={1: np.array([[0, 0, 0, 3, 3], [1, 1, 2, 4, 3], [0, -3, 2, 9, 8]], np.float32)},
        attributes={"pooled_shape": [2, 3]},
        label="plain",
    ),
    Case(
        "MaxRoiPool",
        shapes=[(1, 2, 4, 5)],
        constants={1: np.array([[0, 1, 0, 7, 5], [0, 12, 1, 13, 2]], np.float32)},
        attributes={"pooled_shape": [2, 2], "spatial_scale": 0.5},
        symbolic=True,
        label="scaled",
    ),
]
