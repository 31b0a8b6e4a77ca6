"""Runs training graphs on the stock runtime: sessions, buffers, steps and optimizer updates. Begin with `step`."""
