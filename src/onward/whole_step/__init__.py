"""A training step and its update in one graph: for other languages, and for many steps in one run."""
