"""Optimizers as pure functions that build graphs."""

from onward.optim.optimizer_model import ParameterGroup
from onward.optim.update_rules import Optimizer, adafactor, adagrad, adam, adamw, lamb, lion, rmsprop, sgd

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
