"""Compares the first run of a model on a device with the CPU's.

The operators that `device_check` knows are not all that a model may have, nor in every form: nothing is to train
silently wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.contract import BUFFER, OUT
from onward.errors import DeviceError
from onward.ort_session import array_of

if TYPE_CHECKING:
    import onnxruntime as ort

    from onward.ort_session import Feed
    from onward.runtime.devices import Device
    from onward.runtime.tensors import Tensor

# Part of the largest number by which an output may differ: rounding adds up from layer to layer, and what is computed
# wrong is off by far more.
_TOLERANCE = 1e-3


def run_reference(
    session: ort.InferenceSession, tensors: Mapping[str, Tensor], feeds: Mapping[str, Feed]
) -> dict[str, np.ndarray]:
    """Every output of a session on the CPU by name, from what is in the memory of training and a batch."""
    arrays = {name: array_of(value) for name, value in feeds.items()}
    inputs: dict[str, np.ndarray] = {}
    for name in (value.name for value in session.get_inputs()):
        if name in tensors:
            inputs[name] = tensors[name].read()
        elif name in arrays:
            inputs[name] = arrays[name]
        else:  # the sum of gradients of the user's own inputs is not kept
            inputs[name] = np.zeros_like(arrays[name.removesuffix(BUFFER)])
    names = [value.name for value in session.get_outputs()]
    results: list[Any] = list(session.run(None, inputs))
    return dict(zip(names, results))


def require_same(
    actual: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], device: Device, what: str
) -> None:
    """Refuse a device that computes other numbers than the CPU for outputs that both have."""
    floats = [name for name, array in expected.items() if array.dtype.kind == "f" and name in actual]
    largest = {name: float(np.abs(expected[name]).max(initial=0.0)) for name in floats}
    # A gradient that is zero in theory is nothing but rounding, so all of them are measured beside the largest.
    gradients = max((size for name, size in largest.items() if name.endswith(OUT)), default=0.0)
    for name in sorted(floats, key=lambda name: name.endswith(OUT)):
        if not np.isfinite(largest[name]):
            continue
        gap = float(np.abs(actual[name].astype(np.float64) - expected[name]).max(initial=0.0))
        unit = gradients if name.endswith(OUT) else 1.0
        if gap <= _TOLERANCE * (largest[name] + 0.01 * unit):
            continue
        subject = f"gradient of '{name.removesuffix(OUT)}'" if name.endswith(OUT) else f"output '{name}'"
        raise DeviceError(
            f"device='{device}' computes the {what} wrong: its {subject} is off by {gap:.1g}, of numbers up to "
            f"{largest[name]:.1g}, beside the CPU; parameters are unchanged. `onward conform --device {device}` "
            "shows every operator; use device='cpu'"
        )
