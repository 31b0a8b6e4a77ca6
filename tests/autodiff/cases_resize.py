"""Cases of Resize: every mode, coordinate transformation and way to say the size.

Where the corners are aligned or cropped to, scales give whole sizes: there the reference evaluator takes the
unrounded size, and onnxruntime the rounded one.
"""

import numpy as np
from cases import Case


def _by_scales(
    label: str,
    scales,
    shape: tuple[int, ...] = (1, 1, 3, 4),
    *,
    roi=None,
    symbolic: bool = False,
    **attributes,
) -> Case:
    return Case(
        "Resize",
        shapes=[shape],
        constants={1: roi, 2: np.asarray(scales, np.float32)},
        attributes=attributes,
        symbolic=symbolic,
        label=label,
    )


def _by_sizes(
    label: str,
    sizes,
    shape: tuple[int, ...] = (1, 1, 3, 4),
    *,
    roi=None,
    symbolic: bool = False,
    **attributes,
) -> Case:
    return Case(
        "Resize",
        shapes=[shape],
        constants={1: roi, 2: None, 3: np.asarray(sizes, np.int64)},
        attributes=attributes,
        symbolic=symbolic,
        label=label,
    )


COORDINATES = ["half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric"]
ROUNDINGS = ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"]
ROI = np.array([0, 0, 0.2, 0.1, 1, 1, 0.9, 1.3], np.float32)

CASES = [
    *[
        _by_scales(
            f"{mode}-{how}-{name}", scales, (1, 1, 4, 4), mode=mode, coordinate_transformation_mode=how
        )
        for mode in ("nearest", "linear", "cubic")
        for how in COORDINATES
        for name, scales in (("up", [1, 1, 1.25, 2]), ("down", [1, 1, 0.75, 0.5]))
    ],
    *[
        _by_scales(
            f"{rounding}-{how}", [1, 1, 2, 0.7], nearest_mode=rounding, coordinate_transformation_mode=how
        )
        for rounding in ROUNDINGS
        for how in ("half_pixel", "asymmetric")
    ],
    *[
        _by_scales(
            f"whole-{rounding}-{how}", [1, 1, 3, 2], nearest_mode=rounding, coordinate_transformation_mode=how
        )
        for rounding in ROUNDINGS
        for how in ("half_pixel", "asymmetric", "half_pixel_symmetric")
    ],
    _by_scales("whole", [1, 1, 2, 2], symbolic=True),
    _by_scales("whole-1d", [1, 1, 3], (2, 2, 3)),
    _by_scales("same", [1, 1, 1, 1], mode="linear"),
    _by_scales("batch-axis", [2, 1.5], (2, 3)),
    _by_scales("linear", [1, 1, 1.5, 0.6], mode="linear", symbolic=True),
    _by_scales("cubic", [1, 1, 1.5, 0.6], mode="cubic", symbolic=True),
    _by_scales("linear-1d", [1, 1, 1.7], (1, 2, 4), mode="linear"),
    _by_scales("linear-3d", [1, 1, 2, 1.5, 0.7], (1, 1, 2, 2, 3), mode="linear"),
    _by_scales("nearest-3d", [1, 1, 1.5, 2, 1], (1, 1, 2, 2, 2), mode="nearest"),
    _by_scales("cubic-coefficient", [1, 1, 1.5, 2], mode="cubic", cubic_coeff_a=-0.5),
    _by_scales("cubic-exclude-outside", [1, 1, 1.5, 0.7], mode="cubic", exclude_outside=1),
    _by_scales("linear-antialias", [1, 1, 0.6, 0.6], (1, 1, 4, 5), mode="linear", antialias=1),
    _by_scales("cubic-antialias", [1, 1, 0.6, 0.6], (1, 1, 4, 5), mode="cubic", antialias=1),
    _by_scales(
        "antialias-outside", [1, 1, 0.6, 0.6], (1, 1, 4, 5), mode="cubic", antialias=1, exclude_outside=1
    ),
    _by_scales("axes", [2, 1.5], mode="linear", axes=[3, 2]),
    _by_sizes("nearest", [1, 1, 5, 8]),
    _by_sizes("nearest-whole", [1, 1, 6, 8]),
    _by_sizes("linear", [1, 1, 5, 3], mode="linear", symbolic=True),
    _by_sizes("cubic", [1, 1, 5, 3], mode="cubic"),
    _by_sizes("axes", [5, 3], mode="linear", axes=[2, 3]),
    _by_sizes("not-larger", [7, 5], mode="linear", axes=[2, 3], keep_aspect_ratio_policy="not_larger"),
    _by_sizes("not-smaller", [7, 5], mode="linear", axes=[2, 3], keep_aspect_ratio_policy="not_smaller"),
    _by_sizes(
        "nearest-not-larger", [7, 5], axes=[2, 3], keep_aspect_ratio_policy="not_larger", symbolic=True
    ),
    _by_scales(
        "crop-linear",
        [1, 1, 1.25, 1.5],
        (1, 1, 4, 4),
        roi=ROI,
        mode="linear",
        coordinate_transformation_mode="tf_crop_and_resize",
        extrapolation_value=10.0,
    ),
    _by_sizes(
        "crop-cubic", [1, 1, 4, 3], roi=ROI, mode="cubic", coordinate_transformation_mode="tf_crop_and_resize"
    ),
    _by_sizes(
        "crop-axes",
        [4, 3],
        roi=np.array([0.2, 0.1, 0.9, 1.3], np.float32),
        mode="linear",
        coordinate_transformation_mode="tf_crop_and_resize",
        axes=[2, 3],
        symbolic=True,
    ),
]
