"""Train on the stock runtime: the names and behaviour of `onnxruntime.training.api`."""

from onward.api.module import Module
from onward.api.optimizer import Optimizer
from onward.api.schedulers import (
    ConstantLRScheduler,
    CosineLRScheduler,
    LinearLRScheduler,
    LRScheduler,
    OneCycleLRScheduler,
    PolynomialLRScheduler,
    StepLRScheduler,
)
from onward.api.state import CheckpointState, Parameter, Parameters, Properties

__all__ = [
    "CheckpointState",
    "ConstantLRScheduler",
    "CosineLRScheduler",
    "LRScheduler",
    "LinearLRScheduler",
    "Module",
    "OneCycleLRScheduler",
    "Optimizer",
    "Parameter",
    "Parameters",
    "PolynomialLRScheduler",
    "Properties",
    "StepLRScheduler",
]
