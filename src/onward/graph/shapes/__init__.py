"""Infers types and shapes of every value, symbolic sizes included.

Begin with `model`, which infers a whole graph; `node` asks ONNX about one node, `bodies` handles If, Loop and
Scan, `symbolic` follows shape arithmetic, and `dims` computes with sizes that have names.
"""
