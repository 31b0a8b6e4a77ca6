"""Losses as functions from values to a value, in standard operators.

Begin with `functions`: each loss follows the torch function of its name; those of embeddings are there too.
This package builds nodes through `graph.builder` and is independent of files, parameters and gradients.
"""

from __future__ import annotations

from onward.losses.functions import (
    LossFunction,
    LossWithTargets,
    bce_with_logits,
    cosine_embedding,
    cross_entropy,
    ctc,
    gaussian_nll,
    huber,
    kl_div,
    l1,
    mse,
    multiple_negatives,
    nll,
    reduce,
    smooth_l1,
    split_rows,
    target_inputs,
    triplet_margin,
)

__all__ = [
    "LossFunction",
    "LossWithTargets",
    "bce_with_logits",
    "cosine_embedding",
    "cross_entropy",
    "ctc",
    "gaussian_nll",
    "huber",
    "kl_div",
    "l1",
    "mse",
    "multiple_negatives",
    "nll",
    "reduce",
    "smooth_l1",
    "split_rows",
    "target_inputs",
    "triplet_margin",
]
