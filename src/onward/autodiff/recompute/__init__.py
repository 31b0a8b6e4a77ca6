"""Activation recomputation: `recompute=` in `generate_artifacts`.

Begin with `segments` (what the user asked for); `budget` chooses by memory and `rewrite` changes the graph.
"""
