"""Optimizers as pure functions that build graphs."""

from onward.optim.graph import ParameterGroup
from onward.optim.rules import Optimizer, adafactor, adagrad, adam, adamw, lamb, lion, rmsprop, sgd

__all__ = [
    "Optimizer",
    "ParameterGroup",
    "adafactor",
    "adagrad",
    "adam",
    "adamw",
    "lamb",
    "lion",
    "rmsprop",
    "sgd",
]
