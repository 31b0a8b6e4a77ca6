"""`generate_artifacts`: turns a forward model into the files that training needs.

Begin with `generate`: it checks the arguments, `training_graph` builds the two graphs, `write` writes all files
or none. Only `write` touches the disk. Processes that only train never import this package.
"""

from __future__ import annotations

from onward.artifacts.generate import Artifacts, build_artifacts, generate_artifacts
from onward.artifacts.names import LossType, OptimType
from onward.artifacts.teacher import Distillation
from onward.autodiff.recompute.segments import ActivationBudget

__all__ = [
    "ActivationBudget",
    "Artifacts",
    "Distillation",
    "LossType",
    "OptimType",
    "build_artifacts",
    "generate_artifacts",
]
