"""Reverse-mode differentiation of ONNX graphs, in standard ONNX operators.

Begin with `gradient` (the public function) and `engine` (reverse-mode traversal). `rules` holds one gradient per
operator, `forms` the formulations that several rules share. Around the rules, `prepare`, `saved` and `peephole` know what
lies around a node; `recompute` trades time for memory.
"""
