"""Activation recomputation: `recompute=` in `generate_artifacts`.

Begin with `segments` (parses the option, or chooses by memory); `copies` changes the graph.
"""
