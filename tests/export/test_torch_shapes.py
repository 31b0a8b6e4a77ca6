"""Shapes that come after the example's: a training step computes what torch does, or the file says that they are fixed.

Every row of the table is a module with its loss, example shapes and shapes of later batches: 200 pairs in all.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from onward import gradient
from onward.artifacts import build_artifacts
from onward.export import from_torch

Shapes = tuple[tuple[int, ...], ...]


class WithLoss(nn.Module):
    """A network and a loss of what it gives and of the other inputs."""

    def __init__(self, net: nn.Module, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.net, self.loss = net, loss

    def forward(self, x, *others):
        return self.loss(self.net(x), *others)


def squared(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return ((a - b) ** 2).mean()


def weighted_pixels(scores: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (F.cross_entropy(scores, labels, reduction="none") * weights).mean()


class Tokens(nn.Module):
    """A mean of embeddings for each position so far."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(5, 4), nn.Linear(4, 5)

    def forward(self, tokens):
        rows = self.table(tokens)
        counts = torch.arange(1, tokens.shape[1] + 1).to(rows.dtype)
        return self.out(rows.cumsum(1) / counts.unsqueeze(-1)).transpose(1, 2)


class Graph(nn.Module):
    """Two rounds over an adjacency matrix, whose two axes have the size of the nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, nodes, edges):
        x = edges @ self.first(nodes).tanh()
        return ((edges.transpose(1, 2) @ self.second(x) + self.second(x)) ** 2).mean()


def upsampled(factor: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3 * factor**2, 3, padding=1), nn.PixelShuffle(factor))


@dataclass(frozen=True)
class Row:
    name: str
    build: Callable[[], nn.Module]
    example: Shapes
    later: tuple[Shapes, ...]
    # the inputs that hold class numbers
    labels: tuple[int, ...] = ()


def _batches(*shapes: tuple[int, ...]) -> tuple[Shapes, ...]:
    """These shapes behind batches of 1, 2, 5 and none."""
    return tuple(tuple((n, *shape) for shape in shapes) for n in (1, 2, 5, 0))


def _pictures(
    sizes: list[tuple[int, int]], *makers: Callable[[int, int], tuple[int, ...]]
) -> tuple[Shapes, ...]:
    return tuple(tuple((n, *make(h, w)) for make in makers) for n in (1, 3) for h, w in sizes)


SQUARE_AND_OBLONG = [(6, 6), (6, 9), (9, 6), (12, 5), (1, 7)]
EVEN = [(6, 6), (6, 8), (8, 6), (10, 4)]
_segment = lambda: WithLoss(nn.Conv2d(2, 5, 3, padding=1), F.cross_entropy)  # noqa: E731
_column = lambda loss: lambda: WithLoss(nn.Linear(2, 1), loss)  # noqa: E731
_to_picture = (lambda h, w: (2, h, w), lambda h, w: (h, w))
_enlarge = (lambda h, w: (2, h, w), lambda h, w: (3, 2 * h, 2 * w))

ROWS = [
    *(
        Row(f"column of targets, {name}, batch {n}", _column(loss), ((n, 2), (n, 1)), _batches((2,), (1,)))
        for name, loss in (("mse", F.mse_loss), ("by hand", squared), ("huber", F.huber_loss), ("l1", F.l1_loss))
        for n in (1, 2, 4)
    ),
    *(
        Row(f"classes, batch {n}", lambda: WithLoss(nn.Linear(3, 5), F.cross_entropy), ((n, 3), (n,)),
            _batches((3,), ()), labels=(1,))
        for n in (1, 3, 5)
    ),
    *(
        Row(f"picture and mask {size}", _segment, ((n, 2, *size), (n, *size)),
            _pictures(SQUARE_AND_OBLONG, *_to_picture), labels=(1,))
        for n, size in ((2, (6, 6)), (1, (8, 8)), (2, (6, 8)))
    ),
    *(
        Row(f"picture, mask and weights {size}", lambda: WithLoss(nn.Conv2d(2, 5, 3, padding=1), weighted_pixels),
            ((2, 2, *size), (2, *size), (2, *size)), _pictures(SQUARE_AND_OBLONG, *_to_picture, lambda h, w: (h, w)),
            labels=(1,))
        for size in ((6, 6), (5, 7))
    ),
    *(
        Row(f"enlarged twice {size}", lambda: WithLoss(upsampled(2), F.mse_loss),
            ((2, 2, *size), (2, 3, 2 * size[0], 2 * size[1])), _pictures(SQUARE_AND_OBLONG, *_enlarge))
        for size in ((6, 6), (4, 7))
    ),
    Row("reduced by a stride of 2", lambda: WithLoss(nn.Conv2d(2, 3, 3, stride=2, padding=1), F.mse_loss),
        ((2, 2, 8, 8), (2, 3, 4, 4)),
        _pictures(EVEN, lambda h, w: (2, h, w), lambda h, w: (3, h // 2, w // 2))
        + _pictures([(7, 7), (9, 4)], lambda h, w: (2, h, w), lambda h, w: (3, (h + 1) // 2, (w + 1) // 2))),
    Row("windows without padding", lambda: WithLoss(nn.Conv2d(2, 3, 3), F.mse_loss), ((2, 2, 8, 8), (2, 3, 6, 6)),
        _pictures([(8, 8), (9, 6), (5, 5), (4, 10)], lambda h, w: (2, h, w), lambda h, w: (3, h - 2, w - 2))),
    *(
        Row(f"tokens and labels {size}", lambda: WithLoss(Tokens(), F.cross_entropy), (size, size),
            tuple(((n, s), (n, s)) for n in (1, 2, 4) for s in (1, 3, 4, 6)), labels=(0, 1))
        for size in ((2, 4), (1, 3), (3, 3))
    ),
    *(
        Row(f"nodes and edges {nodes}", Graph, ((2, nodes, 3), (2, nodes, nodes)),
            tuple(((n, s, 3), (n, s, s)) for n in (1, 3) for s in (1, 3, 6, 8)))
        for nodes in (3, 4)
    ),
]  # fmt: skip
PAIRS = sum(len(row.later) for row in ROWS)


def test_the_table_has_two_hundred_pairs():
    assert PAIRS >= 200


def _draw(row: Row, shapes: Shapes) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(len(str(shapes)))
    return [
        torch.randint(5, shape, generator=generator)
        if index in row.labels
        else torch.randn(shape, generator=generator)
        for index, shape in enumerate(shapes)
    ]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_later_batches_are_as_in_torch(row):
    torch.manual_seed(0)
    module = row.build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        proto = from_torch(module, tuple(_draw(row, row.example)))
    assert isinstance(proto, onnx.ModelProto)
    parameters = dict(module.named_parameters())
    name = proto.graph.output[0].name
    session = ort.InferenceSession(gradient(proto, of=name, wrt=list(parameters)).SerializeToString())
    names = [value.name for value in proto.graph.input]
    for shapes in (row.example, *row.later):
        inputs = _draw(row, shapes)
        expected = module(*inputs)
        got = session.run(None, {name: value.numpy() for name, value in zip(names, inputs)})
        if (
            shapes[0][0] == 0
        ):  # a mean of nothing is NaN in torch and 0 in onnxruntime: nothing is learned from it
            assert all(not np.any(np.nan_to_num(array)) for array in got)
            continue
        np.testing.assert_allclose(
            got[0], expected.detach().numpy(), rtol=1e-5, atol=1e-6, err_msg=str(shapes)
        )
        for name, mine, theirs in zip(
            parameters, got[1:], torch.autograd.grad(expected, list(parameters.values()))
        ):
            message = f"{name} at {shapes}"
            np.testing.assert_allclose(mine, theirs.numpy(), rtol=1e-4, atol=1e-6, err_msg=message)


def _of_positive_rows(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    rows = (x.sum(1) > 0).nonzero().squeeze()
    return (h[rows].relu() @ torch.ones(4, 2)).sum()


def _squeezed(h: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return (h.unsqueeze(0).squeeze().softmax(-1) * torch.arange(4.0)).sum()


@pytest.mark.parametrize(
    ("function", "exporter"),
    [
        (_of_positive_rows, "torchscript"),
        (_of_positive_rows, "primitives"),
        (_of_positive_rows, "dynamo"),
        (_squeezed, "torchscript"),
    ],
)
def test_a_squeeze_of_no_named_axis_trains_because_the_example_shows_its_rank(function, exporter) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 4)

        def forward(self, x):
            return function(self.linear(x), x)

    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*gradient was not compared")
        proto = from_torch(Net(), torch.randn(6, 8), exporter=exporter)
    assert build_artifacts(proto).trainable == ["linear.weight", "linear.bias"]


class Categories(nn.Module):
    """Columns of a record, each with a table of its own size: a number of one column is none of another."""

    def __init__(self) -> None:
        super().__init__()
        self.tables, self.out = nn.ModuleList([nn.Embedding(2, 3), nn.Embedding(50, 3)]), nn.Linear(6, 1)

    def forward(self, x):
        return self.out(torch.cat([table(x[:, i]) for i, table in enumerate(self.tables)], 1))


def test_columns_of_categories_keep_their_own_numbers() -> None:
    proto = from_torch(Categories(), torch.tensor([[0, 41], [1, 7], [1, 20]]))  # its check draws other rows
    assert proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"


def test_numbers_for_the_check_lie_in_the_examples_range() -> None:
    class Odds(nn.Linear):
        def forward(self, x):
            return super().forward(torch.log(x / (1 - x)))

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # outside of it the gradient is not finite, and so not compared
        from_torch(Odds(3, 2), torch.rand(16, 3))
