"""Optimizers as pure graph functions: one tensor in, one tensor out."""

from onward.optim.rules import (
    Optimizer,
    adafactor,
    adagrad,
    adam,
    adamw,
    lamb,
    lion,
    rmsprop,
    sgd,
)

__all__ = ["Optimizer", "adafactor", "adagrad", "adam", "adamw", "lamb", "lion", "rmsprop", "sgd"]
