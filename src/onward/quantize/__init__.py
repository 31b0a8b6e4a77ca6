"""Quantization as a pass on the graph: rounding is inserted, its scales are parameters, and training is as ever.

Begin with `planning`, which chooses what is quantized, and `fake_quantization`, the pass. `preparation` rewrites the
float model first (batch norms, balanced channels), `calibration` observes the ranges of activations, and `folding`
writes the file with integer weights that onnxruntime runs with integer kernels. Files, schemes and measurements are in
`onward.export.quantize`.
"""

from __future__ import annotations

from onward.quantize.planning import Quantization

__all__ = ["Quantization"]
