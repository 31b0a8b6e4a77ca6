"""The checks of an export: rounding of deep networks passes, a wrong graph does not."""

from __future__ import annotations

import importlib
import platform
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
from torch import nn

from onward.errors import ExportError, ParityError
from onward.export import from_torch, parity
from onward.export.torch import check_outputs as check


class Separable(nn.Module):
    """Depthwise and pointwise convolutions, each with batch norm, as mobile networks stack them."""

    def __init__(self, width: int, expand: int, *, shuffle: bool = False) -> None:
        super().__init__()
        inner = width * expand
        self.body = nn.Sequential(
            nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU6(),
            nn.Conv2d(inner, inner, 3, padding=1, groups=inner, bias=False), nn.BatchNorm2d(inner), nn.ReLU6(),
            nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip
        self.shuffle = shuffle

    def forward(self, x):
        y = x + self.body(x)
        if self.shuffle:
            n, c, h, w = y.shape
            y = y.reshape(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)
        return y


class Grouped(nn.Module):
    """A residual block with grouped convolutions and squeeze-and-excitation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(width, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.middle = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, groups=4, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.squeeze = nn.Sequential(nn.Conv2d(width, 4, 1), nn.SiLU(), nn.Conv2d(4, width, 1), nn.Sigmoid())
        self.last = nn.Sequential(nn.Conv2d(width, width, 1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x):
        y = self.middle(self.first(x))
        y = y * self.squeeze(y.mean((2, 3), keepdim=True))
        return torch.relu(x + self.last(y))


class Dense(nn.Module):
    """Every layer reads all before it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(width)
        self.conv = nn.Conv2d(width, 4, 3, padding=1, bias=False)

    def forward(self, x):
        return torch.cat([x, self.conv(torch.relu(self.norm(x)))], 1)


def _network(block: Callable[[int], nn.Module], count: int, *, width: int) -> nn.Sequential:
    """A stem, blocks on 4 by 4 and then on single points, where three rows decide a batch norm, and a head."""
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    blocks = [block(index) for index in range(count)]
    blocks.insert(2, nn.MaxPool2d(4))
    return nn.Sequential(stem, *blocks, nn.Flatten(), nn.Linear(width, 5))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mobilenet_v2": lambda: _network(lambda _: Separable(8, 4), 12, width=8),
    "shufflenet_v2": lambda: _network(lambda _: Separable(8, 2, shuffle=True), 12, width=8),
    "regnet": lambda: _network(lambda _: Grouped(8), 16, width=8),
    "densenet": lambda: _network(lambda index: Dense(8 + 4 * index), 16, width=72),
}


def _module(name: str) -> nn.Module:
    torch.manual_seed(0)
    return NETWORKS[name]()


X = torch.randn(3, 3, 4, 4, generator=torch.Generator().manual_seed(3))


_NORMS = ("BatchNormalization", "InstanceNormalization", "LayerNormalization", "GroupNormalization")


def _epsilon(graph: onnx.GraphProto) -> None:
    """1e-3 more in a normalization in the middle, or, where norms are written out, in the sum before a root."""
    norms = [node for node in graph.node if node.op_type in _NORMS]
    norms = [node for node in norms if any(a.name == "epsilon" for a in node.attribute)]
    if norms and not any(node.op_type == "Sqrt" for node in graph.node):
        (attribute,) = [a for a in norms[len(norms) // 2].attribute if a.name == "epsilon"]
        attribute.f += 1e-3
        return
    roots = [node for node in graph.node if node.op_type == "Sqrt"]
    node = roots[len(roots) // 2]
    more = onnx.helper.make_node("Constant", [], [f"{node.input[0]}.1e-3"], value_float=1e-3)
    added = onnx.helper.make_node("Add", [node.input[0], more.output[0]], [f"{node.input[0]}.more"])
    at = list(graph.node).index(node)
    node.input[0] = added.output[0]
    graph.node.insert(at, added)
    graph.node.insert(at, more)


def _momentum(graph: onnx.GraphProto) -> None:
    """Of a batch norm that keeps statistics; others (of standardized weights) have none that counts."""
    made = {name for node in graph.node for name in node.output}
    norms = [n for n in graph.node if n.op_type == "BatchNormalization" and n.input[3] not in made]
    (attribute,) = [a for a in norms[-1].attribute if a.name == "momentum"]
    attribute.f *= 8 / 9


def _axis(graph: onnx.GraphProto) -> None:
    """Rows and columns exchanged before the second convolution."""
    node = [node for node in graph.node if node.op_type == "Conv"][1]
    name = node.input[0]
    turned = onnx.helper.make_node("Transpose", [name], [f"{name}.turned"], perm=[0, 1, 3, 2])
    at = list(graph.node).index(node)
    node.input[0] = turned.output[0]
    graph.node.insert(at, turned)


def _bias(graph: onnx.GraphProto) -> None:
    """Of a layer, or, where none has any, of a batch norm (its running mean is zero) or of a sum."""
    biased = [n for n in graph.node if n.op_type in ("Conv", "Gemm") and len(n.input) > 2]
    norms = [n for n in graph.node if n.op_type == "BatchNormalization"]
    made = {name for node in graph.node for name in node.output} | {value.name for value in graph.input}
    if biased:
        del biased[-1].input[2]
    elif norms:
        norms[-1].input[2] = norms[-1].input[3]
    else:
        node = [n for n in graph.node if n.op_type == "Add" and any(name not in made for name in n.input)][-1]
        kept = [name for name in node.input if name in made]
        node.op_type = "Identity"
        node.ClearField("input")
        node.input.extend(kept)


CHANGES = [_epsilon, _momentum, _axis, _bias]


@pytest.mark.parametrize("name", NETWORKS)
def test_deep_networks_with_batch_norm_export_for_training_and_changed_graphs_are_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One export for all: the changed copies are judged by the same comparison, right after the true graph."""
    module = importlib.import_module("onward.export.torch.from_torch")
    compare, refused = module.compare_with_torch, []

    def also_changed(plan: Any, proto: onnx.ModelProto, weights: Any, **options: Any) -> parity.Report:
        for change in CHANGES:
            damaged = onnx.ModelProto()
            damaged.CopyFrom(proto)
            change(damaged.graph)
            with pytest.raises(ParityError, match="differ from the original") as failed:
                compare(plan, damaged, weights, **options).raise_if_failed()
            assert "onnxruntime failed" not in str(failed.value)  # it runs, and gives other numbers
            refused.append(change)
        return compare(plan, proto, weights, **options)

    monkeypatch.setattr(module, "compare_with_torch", also_changed)
    proto = from_torch(_module(name), X, dynamic_axes=None, exporter="torchscript")
    assert isinstance(proto, onnx.ModelProto)
    assert refused == CHANGES


def test_the_report_says_how_far_both_are_from_float64() -> None:
    exact, plain = {"y": np.float64([1, 2])}, {"y": np.float32([1, 2.0002])}
    near = parity.compare(exact, {"y": np.float32([1.0003, 2])}, plain=plain)
    far = parity.compare(exact, {"y": np.float32([1.003, 2])}, plain=plain)
    assert near.passed and not far.passed
    assert re.search(r"FAIL y.*max abs 3\.00e-03.*own float32 is 2\.00e-04", str(far))


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="only there this division ends a process"
)
def test_a_graph_that_ends_the_process_in_onnxruntime_is_an_error_here() -> None:
    """onnxruntime folds the constants of a branch while it loads, and the least integer over -1 traps."""
    model = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["": 18]> g (bool c, int64[1] x) => (int64[1] y) {
            y = If (c) <
                then_branch = taken () => (int64[1] a) {
                    least = Constant <value_ints = [-9223372036854775808]> ()
                    minus = Constant <value_ints = [-1]> ()
                    a = Div (least, minus)
                },
                else_branch = other () => (int64[1] b) { b = Identity (x) }
            >
        }""")
    onnx.checker.check_model(model)
    assert check._is_risky(model)
    with pytest.raises(ExportError, match=r"onnxruntime crashes on the exported model \(exit code"):
        check.make_session(model, risky=True)


def test_a_graph_that_onnxruntime_merely_refuses_is_no_crash() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["": 18]> g (float[2] x) => (float[3] y) { y = Concat <axis = 9> (x) }'
    )
    with pytest.raises(ExportError, match="onnxruntime cannot load the exported model"):
        check.make_session(model, risky=True)
