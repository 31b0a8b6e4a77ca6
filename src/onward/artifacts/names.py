"""The built-in losses and optimizers, and their names as strings."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TypeVar

from onward.errors import did_you_mean


class LossType(enum.Enum):
    """The built-in losses."""

    MSELoss = 1
    CrossEntropyLoss = 2
    BCEWithLogitsLoss = 3
    L1Loss = 4
    NLLLoss = 5
    HuberLoss = 6
    SmoothL1Loss = 7
    KLDivLoss = 8


class OptimType(enum.Enum):
    """The built-in optimizers; `onnxblock.optim` has them with their options."""

    AdamW = 1
    SGD = 2
    Adam = 3
    Adagrad = 4
    RMSprop = 5
    Lion = 6
    Lamb = 7
    Adafactor = 8


LOSSES: Mapping[str, LossType] = {
    "mse": LossType.MSELoss,
    "cross-entropy": LossType.CrossEntropyLoss,
    "bce-with-logits": LossType.BCEWithLogitsLoss,
    "l1": LossType.L1Loss,
    "nll": LossType.NLLLoss,
    "huber": LossType.HuberLoss,
    "smooth-l1": LossType.SmoothL1Loss,
    "kl-div": LossType.KLDivLoss,
}
OPTIMIZERS: Mapping[str, OptimType] = {kind.name.lower(): kind for kind in OptimType}

Kind = TypeVar("Kind", LossType, OptimType)


def loss_type(name: str) -> LossType:
    """The loss of a name.

    >>> loss_type("cross-entropy")
    <LossType.CrossEntropyLoss: 2>
    """
    return _find(name, LOSSES, "loss")


def optimizer_type(name: str) -> OptimType:
    """The optimizer of a name.

    >>> optimizer_type("adamw")
    <OptimType.AdamW: 1>
    """
    return _find(name, OPTIMIZERS, "optimizer")


def _find(name: str, kinds: Mapping[str, Kind], what: str) -> Kind:
    # `CrossEntropyLoss`, `cross_entropy` and `cross-entropy` are one to a reader
    plain = name.strip().lower().replace("_", "-").replace(" ", "-")
    by_class = {kind.name.lower(): kind for kind in kinds.values()}
    match = kinds.get(plain) or by_class.get(plain)
    if match is None:
        hint = did_you_mean(plain, kinds)
        raise ValueError(f"no {what} is called '{name}': there are {', '.join(kinds)}{hint}")
    return match
