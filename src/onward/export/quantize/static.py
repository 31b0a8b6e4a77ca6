"""Static int8: ranges of activations are found once, on samples of the data, and are constants of the model.

Convolutions run as integers without measuring every input first, which is what makes the dynamic form slow for them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from os import PathLike, fspath
from pathlib import Path

import numpy as np
import onnx

from onward.errors import ModelError
from onward.graph.gate import read_proto, read_with_data

__all__ = ["STATIC", "quantize_static"]

STATIC = "int8-static"
# rows that are fed at once while ranges are found
_ROWS = 8


def quantize_static(
    model: str | PathLike[str],
    samples: Mapping[str, np.ndarray],
    output: str | PathLike[str],
    *,
    exclude: Iterable[str] = (),
) -> Path:
    """Write the model with int8 weights and activations; `samples` are inputs like those to come.

    Weights have a scale for each channel and use seven bits of eight, so that products saturate on no CPU.
    """
    from onward.export.quantize.quantizer import _undisturbed

    with _undisturbed():
        from onnxruntime import quantization
        from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(quantization.CalibrationDataReader):
        def __init__(self) -> None:
            count = max((len(array) for array in samples.values()), default=0)
            self._parts = iter(
                [{n: a[i : i + _ROWS] for n, a in samples.items()} for i in range(0, count, _ROWS)]
            )

        def get_next(self) -> dict[str, np.ndarray] | None:  # type: ignore[override]
            return next(self._parts, None)

    if not samples or not all(len(array) for array in samples.values()):
        raise ModelError(f"{STATIC} needs samples of the data: none were given")
    whole = read_proto(fspath(model))
    metadata = {entry.key: entry.value for entry in whole.metadata_props}
    with tempfile.TemporaryDirectory(prefix="onward-quantize-") as folder, _undisturbed():
        prepared, made = Path(folder) / "prepared.onnx", Path(folder) / "made.onnx"
        quant_pre_process(fspath(model), str(prepared), skip_symbolic_shape=True)
        quantization.quantize_static(
            str(prepared), str(made), Reader(),
            quant_format=quantization.QuantFormat.QDQ,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
            per_channel=True, reduce_range=True, nodes_to_exclude=list(exclude),
        )  # fmt: skip
        result = read_with_data(made)
    del result.metadata_props[:]
    onnx.helper.set_model_props(result, metadata)
    onnx.save(result, fspath(output))
    return Path(output)
