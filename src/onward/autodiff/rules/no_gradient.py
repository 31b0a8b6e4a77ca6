"""Operators without a gradient: their outputs are not real numbers, or are constant almost everywhere.

Some are declared in the module of their family instead (comparisons, ArgMax, Shape).
"""

from __future__ import annotations

from onward.autodiff.registry import no_gradient
from onward.graph.nodes import RANDOM

no_gradient("Constant", "ConstantOfShape", "EyeLike", because="of a shape only")
no_gradient(
    "BlackmanWindow",
    "HammingWindow",
    "HannWindow",
    "MelWeightMatrix",
    because="of sizes and frequencies only",
)
# dropout multiplies by its random numbers, and has a gradient
no_gradient(*sorted(RANDOM - {"Dropout"}), because="a random number is a constant of the step")
no_gradient("Hardmax", because="constant almost everywhere")
no_gradient("NonMaxSuppression", because="indices of boxes")
no_gradient("ImageDecoder", because="of bytes")
no_gradient(
    "RegexFullMatch",
    "StringConcat",
    "StringNormalizer",
    "StringSplit",
    "TfIdfVectorizer",
    because="of strings or token numbers",
)
