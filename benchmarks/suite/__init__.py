"""Sections of the benchmark, what they share, and the page that is made of their results: see `bench.py`."""
