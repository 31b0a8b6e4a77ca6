"""What every rank imports; no threads may be started here, since ranks are forked from it."""

import onnxruntime  # noqa: F401
import torch
import torch.distributed.pipelining  # noqa: F401

import onward.artifacts
import onward.autodiff.gradient
import onward.distributed.runner  # noqa: F401
