"""Compares the gradients of an exported model with those that torch computes for its module."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
from torch import nn

from onward import gradient


def assert_gradients_equal_torch(module: nn.Module, proto: Any, *inputs: torch.Tensor) -> None:
    assert isinstance(proto, onnx.ModelProto)
    parameters = dict(module.named_parameters())
    made = gradient(proto, of=proto.graph.output[0].name, wrt=list(parameters), cotangent="cotangent")
    output = module(*inputs)
    c = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
    expected = torch.autograd.grad((output * c).sum(), list(parameters.values()))
    feeds = {value.name: given.numpy() for value, given in zip(proto.graph.input, inputs)}
    got = ort.InferenceSession(made.SerializeToString()).run(None, {**feeds, "cotangent": c.numpy()})
    np.testing.assert_allclose(got[0], output.detach().numpy(), rtol=1e-5, atol=1e-6)
    for name, mine, theirs in zip(parameters, got[1:], expected, strict=True):
        np.testing.assert_allclose(mine, theirs.numpy(), rtol=1e-4, atol=1e-6, err_msg=name)
