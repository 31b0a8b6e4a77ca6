"""The float model before it is quantized: batch norms go into convolutions, channels are balanced.

Neither changes what the model computes. A convolution has one integer kernel, and a batch norm behind it has none: its
factors belong into the weights before these are rounded. Balancing moves a factor for each channel out of the numbers
that are rounded with one scale for all channels, where a few large channels would leave the others few levels: into the
next convolution (Nagel et al., 2019), or into the matrix that reads them (SmoothQuant, Xiao et al., 2023).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from onward.graph.builder import Builder
from onward.graph.cleanup import remove_unused
from onward.graph.nodes import attribute, optional_input

if TYPE_CHECKING:
    from onward.quantize.planning import Plan, Product

# Behind these a positive factor may be moved: f(s·x) = s·f(x).
_HOMOGENEOUS = frozenset({"Relu", "LeakyRelu"})


def fold_batch_norms(model: ir.Model) -> int:
    """Fold batch norms that use their running statistics into the convolutions before them; returns how many.

    γ·(W·x + b − μ)/√(σ² + ε) + β = (W·γ/√…)·x + (b − μ)·γ/√… + β, under the names of the weight and of b, or of β.
    """
    op, count = Builder(model.graph), 0
    for node in list(model.graph):
        if node.op_type != "BatchNormalization" or attribute(node, "training_mode", 0) or node.domain != "":
            continue
        conv = None if node.inputs[0] is None else node.inputs[0].producer()
        # whoever else reads the convolution would see the folded numbers
        if conv is None or conv.op_type != "Conv" or not _is_own(conv.outputs[0]):
            continue
        weight, bias = _array(conv.inputs[1]), _array(optional_input(conv, 2))
        numbers = [_array(value) for value in node.inputs[1:5]]
        if weight is None or any(array is None for array in numbers):
            continue
        if optional_input(conv, 2) is not None and bias is None:
            continue
        # in float64: rounding here would be in every weight
        gamma, beta, mean, variance = (array.astype(np.float64) for array in numbers if array is not None)
        factor = gamma / np.sqrt(variance + attribute(node, "epsilon", 1e-5))
        shifted = ((0 if bias is None else bias) - mean) * factor + beta
        _set(conv.inputs[1], weight * factor.reshape(-1, *[1] * (weight.ndim - 1)))
        target = optional_input(conv, 2) if bias is not None else node.inputs[2]
        if target is None or len(target.uses()) > 1:  # another layer reads it as it is
            target = op.constant(shifted.astype(np.float32), name=f"{conv.name or 'conv'}.bias")
        _set(target, shifted)
        conv.resize_inputs(3)
        conv.replace_input_with(2, target)
        result, source = node.outputs[0], conv.outputs[0]
        name, shape = result.name, result.shape
        ir.convenience.replace_all_uses_with(result, source, replace_graph_outputs=True)
        model.graph.remove(node, safe=True)
        source.name, source.shape = name, shape
        count += 1
    if count:
        remove_unused(model)
    return count


def equalize_channels(model: ir.Model) -> int:
    """Balance the channels of convolutions that follow one another; returns how many pairs changed.

    A channel with ranges r₁ in the first weight and r₂ in the second is divided by √(r₁/r₂) in the first and
    multiplied by it in the second, so that both have √(r₁·r₂).
    """
    count = 0
    for node in model.graph:
        following = _next_convolution(node)
        if following is None:
            continue
        first, second, bias = (
            _array(node.inputs[1]), _array(following.inputs[1]), _array(optional_input(node, 2)),
        )  # fmt: skip
        if first is None or second is None or (bias is None and optional_input(node, 2) is not None):
            continue
        depthwise = attribute(following, "group", 1) == len(first) and second.shape[1] == 1
        if not depthwise and (attribute(following, "group", 1) != 1 or second.shape[1] != len(first)):
            continue
        axis = 0 if depthwise else 1
        if depthwise and len(second) != len(first):
            continue
        ranges = _channel_ranges(first, 0), _channel_ranges(second, axis)
        dead = (ranges[0] == 0) | (ranges[1] == 0)
        factor = np.sqrt(np.where(dead, 1, ranges[0]) / np.where(dead, 1, ranges[1]))
        _set(node.inputs[1], first / factor.reshape(-1, *[1] * (first.ndim - 1)))
        if bias is not None:
            _set(node.inputs[2], bias / factor)
        shape = [1] * second.ndim
        shape[axis] = -1
        _set(following.inputs[1], second * factor.reshape(shape))
        count += 1
    return count


def find_balanced(plan: Plan) -> dict[ir.Value, list[Product]]:
    """The products of matrices whose channels may be balanced, by their input: nothing else reads their weights."""
    groups: dict[ir.Value, list[Product]] = {}
    for product in plan.products:
        x = product.node.inputs[0]
        if x is None or product.mode == "weights" or product.node.op_type == "Conv":
            continue
        entry = plan.activations.get(x)
        # what an integer convolution leaves has its scale already: a factor behind it would need floats again
        if entry is None or (entry.readers is not None and entry.like is None):
            groups.setdefault(x, []).append(product)
    return {
        x: products
        for x, products in groups.items()
        if all(_readers(product.weight) <= {other.node for other in products} for product in products)
    }


def _readers(weight: ir.Value) -> set[ir.Node]:
    """The nodes that read a weight, also through a transposition."""
    readers: set[ir.Node] = set()
    for node in weight.consumers():
        readers |= _readers(node.outputs[0]) if node.op_type == "Transpose" else {node}
    return readers


def balance_products(
    model: ir.Model,
    groups: Mapping[ir.Value, Sequence[Product]],
    sizes: Mapping[str, np.ndarray],
    share: float,
) -> None:
    """Divide the channels that products read by s, and multiply their weights' rows by it: x·W = (x/s)·(s·W).

    s = max|x|^share / max|W|^(1 − share): the larger the share, the more even are the inputs, and the less the weights.
    `sizes` are max|x| of each channel. A layer norm takes the division into its weights where only these read it.
    """
    op = Builder(model.graph)
    nodes = list(model.graph)
    following = dict(zip(nodes, [*nodes[1:], None]))
    for x, products in groups.items():
        matrices = []
        for product in products:
            assert product.weight.const_value is not None
            matrix = product.weight.const_value.numpy()
            matrices.append(matrix if product.axis == 1 else matrix.T)
        rows = np.maximum.reduce([np.abs(matrix).max(axis=1) for matrix in matrices])
        # in float64, and none of them 0: a channel that never moved may still do so
        peaks = [np.maximum(part.astype(np.float64), 1e-5) for part in (sizes[x.name or ""], rows)]
        factor = peaks[0] ** share / peaks[1] ** (1 - share)
        factor = (factor / np.exp(np.mean(np.log(factor)))).astype(np.float32)
        for product, matrix in zip(products, matrices):
            scaled = matrix * factor[:, None]
            _set(product.weight, scaled if product.axis == 1 else np.ascontiguousarray(scaled.T))
        if not _divide_norm(x, {product.node for product in products}, factor):
            producer = x.producer()
            op.before, op.scope = nodes[0] if producer is None else following[producer], "balance"
            divided = op.Mul(x, 1 / factor)
            for product in products:
                product.node.replace_input_with(0, divided)


def _divide_norm(x: ir.Value, readers: Collection[ir.Node], factor: np.ndarray) -> bool:
    """Divide the weights of the layer norm that computes x; False where others read x or them."""
    node = x.producer()
    if (
        node is None
        or node.op_type != "LayerNormalization"
        or x.is_graph_output()
        or set(x.consumers()) - {*readers}
    ):
        return False
    parameters = [value for value in node.inputs[1:3] if value is not None]
    arrays = [_array(value) for value in parameters]
    shared = any(len(value.consumers()) > 1 for value in parameters)
    if shared or any(array is None or array.shape != factor.shape for array in arrays):
        return False
    for value, array in zip(parameters, arrays):
        assert array is not None
        _set(value, array / factor)
    return True


def _next_convolution(node: ir.Node) -> ir.Node | None:
    """The convolution that alone reads a convolution's result, directly or behind a Relu."""
    if node.op_type != "Conv" or node.domain != "" or not _is_own(node.outputs[0]):
        return None
    reader = next(iter(node.outputs[0].consumers()))
    if reader.op_type in _HOMOGENEOUS and _is_own(reader.outputs[0]):
        reader = next(iter(reader.outputs[0].consumers()))
    return reader if reader.op_type == "Conv" and reader is not node else None


def _channel_ranges(weight: np.ndarray, axis: int) -> np.ndarray:
    return np.abs(weight).max(axis=tuple(index for index in range(weight.ndim) if index != axis))


def _is_own(value: ir.Value) -> bool:
    """Whether one node reads a value, once, and nothing else does."""
    return len(value.uses()) == 1 and not value.is_graph_output()


def _array(value: ir.Value | None) -> np.ndarray | None:
    """The numbers of an initializer that one node alone reads; a shared one would change for the others too."""
    if value is None or not value.is_initializer() or value.is_graph_input() or value.const_value is None:
        return None
    if len(value.consumers()) > 1 and value.const_value.shape.rank() > 1:
        return None
    return value.const_value.numpy()


def _set(value: ir.Value | None, array: np.ndarray) -> None:
    assert value is not None
    value.const_value = ir.tensor(array.astype(np.float32), name=value.name)
