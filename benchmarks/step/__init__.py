"""Training steps of several engines side by side: see `bench.py` one folder up."""
