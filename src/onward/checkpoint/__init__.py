"""Checkpoints: content (`content`), binary format (`codec`, SPEC.md), files (`store`), safetensors (`interchange`)."""

from onward.checkpoint.codec import UncheckedCheckpointWarning, decode, encode
from onward.checkpoint.content import CheckpointData, NominalTensor, OptimizerGroup, check_property
from onward.checkpoint.interchange import from_safetensors, to_safetensors
from onward.checkpoint.portable import from_portable, is_portable, to_portable
from onward.checkpoint.store import (
    Latest,
    SkippedCheckpointWarning,
    load,
    load_latest,
    rotate,
    save,
    save_step,
)

__all__ = [
    "CheckpointData",
    "Latest",
    "NominalTensor",
    "OptimizerGroup",
    "SkippedCheckpointWarning",
    "UncheckedCheckpointWarning",
    "check_property",
    "decode",
    "encode",
    "from_portable",
    "from_safetensors",
    "is_portable",
    "load",
    "load_latest",
    "rotate",
    "save",
    "save_step",
    "to_portable",
    "to_safetensors",
]
