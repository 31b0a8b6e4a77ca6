"""`generate_artifacts`: a forward model to everything that training needs.

Begin with `generate`: it reads the request, `training_graph` builds the two graphs, `write` puts all files
in place or none. Only `write` touches the disk. Processes that only train never import this package.
"""

from __future__ import annotations

from onward.artifacts.generate import (
    ActivationBudget,
    Artifacts,
    build_artifacts,
    generate_artifacts,
)
from onward.artifacts.names import LossType, OptimType

__all__ = ["ActivationBudget", "Artifacts", "LossType", "OptimType", "build_artifacts", "generate_artifacts"]
