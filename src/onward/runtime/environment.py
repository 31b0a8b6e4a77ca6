"""The environment that bit-exact results depend on: versions, machine and number of threads.

Recorded in checkpoints with optimizer state, and compared when such a run is resumed.
"""

from __future__ import annotations

import os
import platform
import warnings
from importlib import metadata

import numpy as np
import onnxruntime as ort

from onward.errors import LimitError
from onward.reading import parse_json
from onward.runtime.processor import vectors


class EnvironmentWarning(UserWarning):
    """A resumed run continues, but not bit-exactly."""


def environment(options: ort.SessionOptions | None) -> dict[str, str | int]:
    """Versions, machine, instructions and threads.

    >>> environment(None)["onnxruntime"] == ort.__version__
    True
    """
    try:
        own = metadata.version("onward")
    except metadata.PackageNotFoundError:  # running from a source tree that is not installed
        own = "0"
    # 0 is onnxruntime's word for as many as there are, which differs from machine to machine
    chosen = 0 if options is None else int(options.intra_op_num_threads)
    return {
        "onward": own,
        "onnxruntime": ort.__version__,
        "numpy": np.__version__,
        "machine": f"{platform.system()} {platform.machine()}",
        "vectors": vectors(),
        "threads": chosen or processors(),
    }


def warn_if_changed(saved: object, options: ort.SessionOptions | None) -> None:
    """Say what differs from the environment that a checkpoint recorded, if it did."""
    if not isinstance(saved, str):
        return
    try:
        before = parse_json(saved)
    except (ValueError, LimitError):
        return
    now = environment(options)
    changed = [
        f"{key} was {before[key]}, is {now[key]}" for key in now if before.get(key, now[key]) != now[key]
    ]
    if changed:
        warnings.warn(
            f"the checkpoint comes from another environment ({'; '.join(changed)}): training goes on, but its "
            "numbers may differ in the last digits from those of an uninterrupted run",
            EnvironmentWarning,
            stacklevel=4,
        )


def processors() -> int:
    """How many processors this process may use."""
    return getattr(os, "process_cpu_count", os.cpu_count)() or 1
