"""Converts any model to one normal form, so that gradient rules see one opset and one form of each operator.

Begin with `normalize`, which calls the rest: `upgrade` (opsets 7 to 20), `downgrade` (22 and later), `contrib` (fused
operators), `definitions` (ONNX functions). `lower` converts a model to an older opset at the end.
"""
