"""Whole networks exported from PyTorch: every parameter's gradient equals torch autograd's."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from architectures import ARCHITECTURES

from onward.autodiff.gradient import vector_jacobian
from onward.export import from_torch

ROWS = [(name, 18) for name in ARCHITECTURES] + [("resnet", 14), ("bert", 14), ("unet", 21), ("gpt2", 21)]


def without_dropout(module: torch.nn.Module) -> torch.nn.Module:
    """Random layers and their rates switched off; batch norm stays in training mode."""
    for layer in module.modules():
        for name in (
            "p",
            "dropout",
            "attention_dropout",
            "activation_dropout",
            "dropout_prob",
            "drop_prob",
            "rate",
        ):
            if isinstance(getattr(layer, name, None), float):
                setattr(layer, name, 0.0)
    return module.train()


@pytest.mark.parametrize("name, opset", ROWS)
def test_gradients_equal_torch(name, opset):
    torch.set_num_threads(1)
    architecture = ARCHITECTURES[name]
    module = without_dropout(architecture.module())
    args, kwargs = architecture.args()
    model = from_torch(module, args, kwargs=kwargs, training=True, opset=opset, check=False)
    kept = {tensor.name for tensor in model.graph.initializer}
    parameters = {n: p for n, p in module.named_parameters() if n in kept and p.requires_grad}
    output = model.graph.output[0].name
    derived, _, _ = vector_jacobian(model, of=[output], wrt=list(parameters))
    onnx.checker.check_model(derived, full_check=True)
    assert {node.domain for node in derived.graph.node} <= {""}

    args, kwargs = architecture.args(seed=7)  # data that the export has not seen
    results = module(*args, **kwargs)
    first = results if isinstance(results, torch.Tensor) else next(iter(_tensors(results)))
    cotangent = torch.randn(first.shape, generator=torch.Generator().manual_seed(3))
    expected = torch.autograd.grad((first * cotangent).sum(), list(parameters.values()), allow_unused=True)

    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = ort.InferenceSession(derived.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = dict(zip([i.name for i in model.graph.input], [*args, *kwargs.values()]))
    feeds.update({key: value for key, value in kwargs.items() if key in feeds})
    feeds = {key: value.numpy() for key, value in feeds.items()} | {f"{output}_cotangent": cotangent.numpy()}
    got = dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds)))
    scale = max(float(g.abs().max()) for g in expected if g is not None)
    for key, want in zip(parameters, expected):
        want = np.zeros(parameters[key].shape, np.float32) if want is None else want.numpy()
        error = np.abs(got[f"{key}_grad"] - want).max()
        # a bias before a batch norm has no gradient but rounding, on the scale of the whole network's
        limit = 2e-5 * max(float(np.abs(want).max()), 0.1 * scale)
        assert error <= limit, f"{key}: {error:.2e} off, gradient up to {np.abs(want).max():.2e}"


def _tensors(results):
    values = results.values() if hasattr(results, "values") else results
    return [value for value in values if isinstance(value, torch.Tensor)]
