"""Export PyTorch modules. Begin with `from_torch`: `probe` runs the module, one of `tracers` exports it, `assemble`
finishes the graph and `check_outputs` compares it with torch. The only place in the core that imports torch is here.
"""

from __future__ import annotations

from onward.export.torch.from_torch import artifacts_from_torch, from_torch

__all__ = ["artifacts_from_torch", "from_torch"]
