"""Loads, builds and edits graphs: a typed layer over onnx-ir.

Begin with `load` (any source to a checked model) and `builder` (`op.Mul(a, 2.0)`). `dialect` converts any model to one
normal form, `shapes` infers types and shapes, `passes` rewrites whole graphs. Independent of gradients and sessions.
"""
