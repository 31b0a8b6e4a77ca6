"""Random inputs for a model: for measuring and checking without data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from onward.limits import require

if TYPE_CHECKING:
    from onward.data.match_inputs import InputSpec

__all__ = ["random_inputs"]


def random_inputs(
    inputs: Sequence[InputSpec], *, size: int = 2, seed: int = 0, classes: Mapping[str, int] | None = None
) -> dict[str, np.ndarray]:
    """Random arrays: dimensions that may vary become `size`, whole numbers stay below the number of classes."""
    rng = np.random.default_rng(seed)
    made = {}
    for spec in inputs:
        dims = [size if dim is None else dim for dim in ((size,) if spec.dims is None else spec.dims)]
        require(
            "value_bytes", 8 * math.prod(dims), f"random numbers for '{spec.name}' of shape {dims}, in bytes,"
        )
        if spec.dtype.kind == "f":
            made[spec.name] = rng.standard_normal(dims).astype(spec.dtype)
        else:
            made[spec.name] = rng.integers(0, (classes or {}).get(spec.name, 2), dims).astype(spec.dtype)
    return made
