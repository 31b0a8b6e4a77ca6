"""Writes docs/operators.md from the registry of gradients: run it after adding a rule."""

from __future__ import annotations

from pathlib import Path

from onward.autodiff.coverage import summary, table

PAGE = Path(__file__).with_name("operators.md")


def page() -> str:
    """The text of the page."""
    return f"""# Operators

{summary()}. This page is generated from the registry.

- **differentiable**: there is a rule. **by expansion**: the operator is decomposed into others first.
- **constant**: its gradient is zero almost everywhere, or it carries no real numbers; backpropagation stops there.
- **no gradient**: an error, with the parameters that reach it; [you can add one](adding-a-gradient.md).

Every rule is checked against finite differences in float64, and against onnxruntime in float32. Fused operators of
other domains are [expanded](dialect.md#fused-operators).

{table()}
"""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8", newline="\n")
