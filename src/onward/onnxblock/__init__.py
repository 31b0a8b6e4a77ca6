"""Compose losses, forward models and training graphs from blocks, by names, on an ONNX model.

The names and behaviour of `onnxruntime.training.onnxblock`.
"""

from onward.onnxblock import blocks, loss, optim
from onward.onnxblock.base import (
    Block,
    ForwardBlock,
    TrainingBlock,
    load_checkpoint_to_model,
    save_checkpoint,
)
from onward.onnxblock.context import base, custom_op_library, empty_base

__all__ = [
    "Block",
    "ForwardBlock",
    "TrainingBlock",
    "base",
    "blocks",
    "custom_op_library",
    "empty_base",
    "load_checkpoint_to_model",
    "loss",
    "optim",
    "save_checkpoint",
]
