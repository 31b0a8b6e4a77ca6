"""Torch autograd as a second opinion on products, normalizations, softmax, losses and transforms."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F

from onward.autodiff.gradient import vector_jacobian

LABELS = np.array([[1, 0, -1], [2, 2, 1]], np.int64)
CHOSEN = torch.tensor(LABELS)

# name: inputs, node, the same in torch
CASES: dict[str, tuple[dict[str, tuple[int, ...]], str, Callable[..., torch.Tensor]]] = {
    "MatMul broadcast": ({"a": (2, 1, 3, 4), "b": (5, 4, 2)}, "MatMul(a, b)", torch.matmul),
    "MatMul vector": ({"a": (4,), "b": (2, 4, 3)}, "MatMul(a, b)", torch.matmul),
    "Gemm": (
        {"a": (4, 3), "b": (5, 4), "c": (5,)},
        "Gemm<transA=1, transB=1, alpha=0.5, beta=2.0>(a, b, c)",
        lambda a, b, c: 0.5 * a.T @ b.T + 2 * c,
    ),
    "Einsum": (
        {"a": (2, 3, 4), "b": (4, 2, 5)},
        'Einsum<equation="bij,jbk->bik">(a, b)',
        lambda a, b: torch.einsum("bij,jbk->bik", a, b),
    ),
    "Det": ({"a": (2, 5, 5)}, "Det(a)", torch.linalg.det),
    "LayerNormalization": (
        {"x": (3, 5, 7), "w": (7,), "b": (7,)},
        "LayerNormalization(x, w, b)",
        lambda x, w, b: F.layer_norm(x, (7,), w, b),
    ),
    "BatchNormalization": (
        {"x": (4, 3, 5, 2), "w": (3,), "b": (3,)},
        "BatchNormalization<training_mode=1>(x, w, b, zeros, ones)",
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
    ),
    "InstanceNormalization": (
        {"x": (4, 3, 5, 2), "w": (3,), "b": (3,)},
        "InstanceNormalization(x, w, b)",
        lambda x, w, b: F.instance_norm(x, weight=w, bias=b),
    ),
    "GroupNormalization": (
        {"x": (2, 6, 5), "w": (6,), "b": (6,)},
        "GroupNormalization<num_groups=3>(x, w, b)",
        lambda x, w, b: F.group_norm(x, 3, w, b),
    ),
    "LRN": (
        {"x": (2, 7, 3, 3)},
        "LRN<size=5, alpha=0.3, beta=0.6, bias=1.5>(x)",
        lambda x: F.local_response_norm(x, 5, 0.3, 0.6, 1.5),
    ),
    "LpNormalization p=1": (
        {"x": (3, 4)},
        "LpNormalization<axis=1, p=1>(x)",
        lambda x: F.normalize(x, p=1, dim=1),
    ),
    "Softmax": ({"x": (3, 4, 5)}, "Softmax<axis=1>(x)", lambda x: torch.softmax(x, 1)),
    "LogSoftmax": ({"x": (3, 4, 5)}, "LogSoftmax<axis=1>(x)", lambda x: torch.log_softmax(x, 1)),
    "SoftmaxCrossEntropyLoss": (
        {"x": (2, 3, 3), "w": (3,)},
        "SoftmaxCrossEntropyLoss<ignore_index=-1>(x, labels, w)",
        lambda x, w: F.cross_entropy(x, CHOSEN, w.detach(), ignore_index=-1),
    ),
    "NegativeLogLikelihoodLoss": (
        {"x": (2, 3, 3), "w": (3,)},
        'NegativeLogLikelihoodLoss<ignore_index=-1, reduction="none">(x, labels, w)',
        lambda x, w: F.nll_loss(x, CHOSEN, w.detach(), ignore_index=-1, reduction="none"),
    ),
    "DFT": (
        {"x": (2, 6, 2)},
        "DFT<inverse=1>(x)",
        lambda x: torch.view_as_real(torch.fft.ifft(torch.view_as_complex(x))),
    ),
    "DFT one-sided": (
        {"x": (2, 6, 1)},
        "DFT<onesided=1>(x)",
        lambda x: torch.view_as_real(torch.fft.rfft(x.squeeze(-1))),
    ),
}
# Torch has no gradient with respect to class weights; finite differences check ours.
NOT_IN_TORCH = {("SoftmaxCrossEntropyLoss", "w"), ("NegativeLogLikelihoodLoss", "w")}


@pytest.mark.parametrize("name", CASES)
def test_gradient_equals_autograd(name):
    shapes, node, function = CASES[name]
    rng = np.random.default_rng(0)
    arrays = {key: rng.uniform(0.3, 1.5, s).astype(np.float32) for key, s in shapes.items()}
    arrays = {
        k: a * rng.choice([-1, 1], a.shape).astype(np.float32) if k != "w" else a for k, a in arrays.items()
    }
    tensors = {key: torch.tensor(a.astype(np.float64), requires_grad=True) for key, a in arrays.items()}
    result = function(*tensors.values())
    cotangent = rng.uniform(0.5, 1.5, tuple(result.shape)).astype(np.float32)
    result.backward(torch.tensor(cotangent.astype(np.float64)))

    inputs = ", ".join(f"float[{','.join(map(str, s))}] {key}" for key, s in shapes.items())
    dims = f"[{','.join(map(str, result.shape))}]" if result.ndim else ""
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g ({inputs}) => (float{dims} y) '
        "<float[3] zeros = {0, 0, 0}, float[3] ones = {1, 1, 1}, int64[2,3] labels = {1, 0, -1, 2, 2, 1}> "
        f"{{ y{', m, v' if name == 'BatchNormalization' else ''} = {node} }}"
    )
    wrt = [key for key in shapes if (name, key) not in NOT_IN_TORCH]
    derived, _, _ = vector_jacobian(model, wrt=wrt)
    session = onnxruntime.InferenceSession(derived.SerializeToString(), providers=["CPUExecutionProvider"])
    known = {value.name for value in session.get_inputs()}
    feeds = {k: v for k, v in {**arrays, "y_cotangent": cotangent}.items() if k in known}
    for key, gradient in zip(wrt, session.run(None, feeds)):
        expected = tensors[key].grad
        assert expected is not None
        np.testing.assert_allclose(gradient, expected.numpy(), rtol=1e-4, atol=1e-5, err_msg=key)
