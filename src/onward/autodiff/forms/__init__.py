"""Formulations that gradient rules share: windows, products over time, sampling. Registers no rule."""
