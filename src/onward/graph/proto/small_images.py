"""Convolves all small images of a batch at once, where the runtime would make one product for each.

The runtime's Conv multiplies image by image; with more output channels than an image has positions it also writes out
the columns of each, and its threads wait for one another: 2 to 9 times the time of one product for all. Here the batch
is the last spatial axis of one three-dimensional convolution. Sums are added up in another order, nothing else changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx

from onward.graph.proto.replacements import Inserter
from onward.graph.protobuf import attributes_of, opset_of, set_nodes

# Images from which on this is faster, measured with two threads: forward, and for the gradient of the input.
_MANY, _MANY_GRADIENTS = 8, 32
# Positions of an image from which on Conv and ConvTranspose use the threads well by themselves.
_LARGE = 256

_Dims = Mapping[str, Sequence[int | None]]


@dataclasses.dataclass(frozen=True)
class _SmallConvolution:
    """A convolution of images of known size: its sizes without the batch, and the padding of an equal Conv."""

    inputs: int
    outputs: int
    size: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[int, ...]
    transposed: bool

    @property
    def positions(self) -> tuple[int, ...]:
        rank = len(self.size)
        return tuple(
            (size + self.pads[i] + self.pads[rank + i] - (k - 1) * d - 1) // s + 1
            for i, (size, k, s, d) in enumerate(zip(self.size, self.kernel, self.strides, self.dilations))
        )


def has_small_images(model: onnx.ModelProto) -> bool:
    """Whether a model has such convolutions, whatever its batch."""
    return next(_candidates(model.graph, _sizes(model.graph)), None) is not None


def batch_convolutions(model: onnx.ModelProto, dims: _Dims) -> int:
    """Rewrite such convolutions of a model whose values have these shapes; how many there were."""
    graph = model.graph
    chosen = {}
    for index, convolution in _candidates(graph, dims):
        batch = dims[graph.node[index].input[0]][0]
        if batch is not None:
            chosen[index] = convolution, batch
    if not chosen:
        return 0
    add, nodes = Inserter(graph, opset_of(model)), []
    for index, node in enumerate(graph.node):
        add.begin(node)
        if index in chosen:
            _convolve_batch(add, node, *chosen[index])
        nodes += add.nodes or [node]
    set_nodes(graph, nodes)
    return len(chosen)


def _sizes(graph: onnx.GraphProto) -> dict[str, list[int | None]]:
    """What the file says of shapes; None where a size is open."""
    return {
        value.name: [
            dim.dim_value if dim.HasField("dim_value") else None for dim in value.type.tensor_type.shape.dim
        ]
        for value in [*graph.value_info, *graph.input]
        if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    }


def _candidates(graph: onnx.GraphProto, dims: _Dims) -> Iterator[tuple[int, _SmallConvolution]]:
    """Convolutions of many small images by weights that are no constants, which have kernels of their own."""
    fixed = {tensor.name for tensor in graph.initializer} - {value.name for value in graph.input}
    fixed |= {node.output[0] for node in graph.node if node.op_type == "Constant"}
    for index, node in enumerate(graph.node):
        # Constant weights are reordered at load for kernels that need no columns.
        if node.op_type not in ("Conv", "ConvTranspose") or node.domain or node.input[1] in fixed:
            continue
        x = dims.get(node.input[0], ())
        convolution = _read(node, x, dims.get(node.input[1], ()))
        if convolution is None:
            continue
        positions = int(np.prod(convolution.positions))
        small = 0 < positions < (_LARGE if convolution.transposed else convolution.outputs)
        if small and (x[0] is None or x[0] >= (_MANY_GRADIENTS if convolution.transposed else _MANY)):
            yield index, convolution


def _read(node: onnx.NodeProto, x: Sequence[int | None], w: Sequence[int | None]) -> _SmallConvolution | None:
    """A convolution that can be written so, or None."""
    rank = len(x) - 2
    if rank not in (1, 2) or None in x[1:] or None in w or len(w) != len(x) or max(w[2:]) == 1:  # type: ignore[type-var]
        return None
    options = attributes_of(node)
    if options.get("group", 1) != 1 or options.get("auto_pad", b"NOTSET") != b"NOTSET":
        return None
    sizes = [tuple(int(n or 0) for n in part) for part in (x[2:], w[2:])]
    strides, dilations = (tuple(options.get(name) or (1,) * rank) for name in ("strides", "dilations"))
    pads = tuple(options.get("pads") or (0,) * 2 * rank)
    outputs, inputs = int(w[0] or 0), int(w[1] or 0)
    transposed = node.op_type == "ConvTranspose"
    if transposed:
        spans = [(k - 1) * d for k, d in zip(sizes[1], dilations)]
        pads = tuple(span - pad for span, pad in zip([*spans, *spans], pads))
        outputs, inputs = inputs, outputs
        # A stride puts zeros between the places of dy: no plain convolution of it.
        if any(options.get("output_padding") or ()) or options.get("output_shape") or max(strides) > 1:
            return None
    if min(pads) < 0 or inputs != x[1]:
        return None
    return _SmallConvolution(inputs, outputs, *sizes, strides, dilations, pads, transposed)  # type: ignore[arg-type]


def _convolve_batch(add: Inserter, node: onnx.NodeProto, conv: _SmallConvolution, batch: int) -> None:
    """Add the nodes and constants that compute the same."""
    result, rank = node.output[0], len(conv.size)

    def shaped(value: str, shape: Sequence[int], name: str) -> str:
        sizes = add.constant(f"{name}.shape", np.asarray(shape, np.int64))
        return add.node("Reshape", [value, sizes], f"{result}/{name}")

    x, w, *bias = node.input
    last = [*range(1, rank + 2), 0]
    x = add.node("Transpose", [x], f"{result}/batch_last", perm=last)
    x = shaped(x, [1, conv.inputs, *conv.size, batch], "images")
    if conv.transposed:  # the kernel turned around, its channels exchanged; a product is faster than a slice
        taps = int(np.prod(conv.kernel))
        turn = add.constant("turn", np.eye(taps, dtype=np.float32)[::-1].copy())
        w = add.node(
            "MatMul", [shaped(w, [conv.inputs, conv.outputs, taps], "taps"), turn], f"{result}/turned"
        )
        w = add.node("Transpose", [w], f"{result}/exchanged", perm=[1, 0, 2])
    w = shaped(w, [conv.outputs, conv.inputs, *conv.kernel, 1], "kernel")
    begin, end = conv.pads[:rank], conv.pads[rank:]
    y = add.node(
        "Conv", [x, w, *bias], f"{result}/together",
        strides=[*conv.strides, 1], dilations=[*conv.dilations, 1], pads=[*begin, 0, *end, 0],
    )  # fmt: skip
    y = shaped(y, [conv.outputs, *conv.positions, batch], "results")
    add.node("Transpose", [y], result, perm=[rank + 1, *range(rank + 1)])
