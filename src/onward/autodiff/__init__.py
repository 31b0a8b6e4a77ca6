"""Reverse-mode differentiation of ONNX graphs, in standard ONNX operators.

Begin with `gradient` (the public function) and `engine` (reverse-mode traversal). `rules` holds one gradient per
operator, `forms` the formulations that several rules share. `prepare`, `saved` and `peephole` are
passes around the rules, which know a node's neighbours; `recompute` trades time for memory.
"""
