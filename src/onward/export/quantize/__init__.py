"""Quantizes ONNX models: int8, int4 or half precision. Begin with `quantizer`."""

from __future__ import annotations

from onward.export.quantize.quantizer import SCHEMES, QuantizationReport, SaturationWarning, measure, quantize

__all__ = ["SCHEMES", "QuantizationReport", "SaturationWarning", "measure", "quantize"]
