"""Reverse-mode differentiation of ONNX graphs, in standard ONNX operators.

Begin with `gradient` (the public function) and `engine` (reverse-mode traversal). `rules` holds one gradient per
operator, `forms` the formulations that several rules share, `recompute` trades time for memory.
"""
