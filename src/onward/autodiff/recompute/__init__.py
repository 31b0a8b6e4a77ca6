"""Activation recomputation: `recompute=` in `generate_artifacts`.

Begin with `segments` (parses the option); `budget` chooses by memory and `rewrite` changes the graph.
"""
