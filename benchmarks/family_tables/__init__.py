"""Families of models, one table for each field; a function builds a module and the arguments of a batch."""
