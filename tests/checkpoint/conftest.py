"""Leaves out of collection what runs only beside the original runtime."""

collect_ignore = ["fixtures/make_with_original.py"]
