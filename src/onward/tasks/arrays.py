"""Tasks of arrays: forecasts of time series, and models that take arrays by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from onward.pipeline.load import Pipeline


def forecast(pipeline: Pipeline, inputs: Any) -> np.ndarray:
    """The next values of a time series."""
    past = np.asarray(inputs, np.float32)
    if past.ndim not in (2, 3):
        raise ValueError(
            f"a time series is [time, channels] or a batch of them, got shape {list(past.shape)}"
        )
    future = pipeline.run({"past_values": past if past.ndim == 3 else past[None]})["prediction_outputs"]
    return future if past.ndim == 3 else future[0]


def run_arrays(pipeline: Pipeline, inputs: Any) -> np.ndarray:
    """The model's output for arrays by name, or for one array where it takes one; numbers become its own types."""
    names = [value.name for value in pipeline.session.get_inputs()]
    arrays = dict(inputs) if isinstance(inputs, Mapping) else {names[0]: inputs}
    if set(arrays) != set(names):
        raise TypeError(
            f"task {pipeline.task!r} takes the arrays {', '.join(names)}; given: {', '.join(arrays)}"
        )
    types = {value.name: value.type for value in pipeline.session.get_inputs()}
    feed = {
        name: np.asarray(array, np.int64 if types[name] == "tensor(int64)" else np.float32)
        for name, array in arrays.items()
    }
    return next(iter(pipeline.run(feed).values()))
