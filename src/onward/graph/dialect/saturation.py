"""Finds integer products that saturate on some CPUs, and rewrites them so that they cannot.

A CPU without 8-bit dot products (AVX2, and AVX-512 without VNNI) multiplies unsigned activations by signed
weights two at a time: a₀·w₀ + a₁·w₁ in 16 bits, which saturates. Activations reach 255, so two weights that
the kernel pairs may add up to 128 at most. Larger ones give wrong products on these CPUs and right ones on others.
Unsigned weights take another instruction, which does not saturate: w + 128 with a zero point of 128 more is
the same product everywhere, at less speed.

Covers the integer operators, and the quantized pairs (QuantizeLinear, DequantizeLinear) that the runtime fuses into
them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onward.graph.nodes import attribute, new_initializer, optional_input, producer_of, required_input

_LARGEST_ACTIVATION = 255
_LOWEST, _HIGHEST = -(2**15), 2**15 - 1

_MICROSOFT = "com.microsoft"


class _Inputs(NamedTuple):
    """Which inputs of an operator are a weight, its zero point, and its scale, if it has one."""

    weight: int
    zero: int
    scale: int | None = None


_OPERATORS: dict[tuple[str, str], tuple[_Inputs, ...]] = {
    ("", "MatMulInteger"): (_Inputs(1, 3),),
    ("", "ConvInteger"): (_Inputs(1, 3),),
    ("", "QLinearMatMul"): (_Inputs(3, 5, 4),),
    ("", "QLinearConv"): (_Inputs(3, 5, 4),),
    (_MICROSOFT, "DynamicQuantizeMatMul"): (_Inputs(1, 3, 2),),
    (_MICROSOFT, "MatMulIntegerToFloat"): (_Inputs(1, 5, 3),),
    (_MICROSOFT, "QGemm"): (_Inputs(3, 5, 4),),
    (_MICROSOFT, "QAttention"): (_Inputs(1, 7, 4),),
    (_MICROSOFT, "DynamicQuantizeLSTM"): (_Inputs(1, 9, 8), _Inputs(2, 11, 10)),
}
_CONVOLUTIONS = frozenset({"ConvInteger", "QLinearConv", "Conv"})
# In place of an axis: any two of the numbers behind one index of the first axis, which counts a convolution's outputs.
_OUTPUTS = 0
_FLOAT_PRODUCTS = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose"})
# what the runtime moves a dequantization across
_MOVES = frozenset({"Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity"})


@dataclasses.dataclass(frozen=True)
class IntegerProduct:
    """A product with signed 8-bit weights, and the worst sums of two terms that a CPU may form in 16 bits."""

    node: str
    weight: str
    lowest: int
    highest: int

    @property
    def saturates(self) -> bool:
        """Whether some activations give a wrong product on a CPU without 8-bit dot products."""
        return self.lowest < _LOWEST or self.highest > _HIGHEST


@dataclasses.dataclass(frozen=True)
class _Use:
    """A node's signed weight. The pairs are neighbours along `axis`, or any two of one output or of all (None)."""

    node: ir.Node
    inputs: _Inputs
    axis: int | None

    @property
    def weight(self) -> ir.Value:
        return required_input(self.node, self.inputs.weight)

    def product(self) -> IntegerProduct:
        # In 16 bits: −(−128) is not an int8.
        values = _constant(self.weight).astype(np.int16)
        above, below = np.maximum(values, 0), np.maximum(-values, 0)
        highest, lowest = (_worst_pair(part, self.axis) for part in (above, below))
        return IntegerProduct(
            self.node.name or self.node.op_type,
            self.weight.name or "",
            -_LARGEST_ACTIVATION * lowest,
            _LARGEST_ACTIVATION * highest,
        )

    def zero_point(self) -> np.ndarray | None:
        """The zero point of the weight; None where it cannot be known from the file."""
        value = optional_input(self.node, self.inputs.zero)
        if value is not None:
            tensor = ir.convenience.get_const_tensor(value)
            return None if tensor is None else tensor.numpy()
        scale = None if self.inputs.scale is None else optional_input(self.node, self.inputs.scale)
        if scale is None:
            return np.zeros((), np.int8)
        if scale.shape is None or not scale.shape.is_static():
            return None
        return np.zeros(scale.shape.numpy(), np.int8)


def integer_products(model: ir.Model) -> list[IntegerProduct]:
    """Every product of a model with constant signed 8-bit weights, and its worst pairs.

    >>> import onnx.parser
    >>> text = '''<ir_version: 10, opset_import: ["": 21]> g (uint8[N, 2] a) => (int32[N, 1] y)
    ...     <int8[2, 1] w = {100, 29}> { y = MatMulInteger(a, w) }'''
    >>> [(p.highest, p.saturates) for p in integer_products(ir.from_proto(onnx.parser.parse_model(text)))]
    [(32895, True)]
    """
    return [use.product() for use in _uses(model)]


def make_unsigned(model: ir.Model, *, saturating_only: bool = True) -> int:
    """Store weights whose products may saturate as unsigned ones, in place; returns how many products changed.

    The model computes what it did where nothing saturated. A weight whose zero point the graph computes stays.
    """
    changed = 0
    moved: dict[ir.Value, ir.Value] = {}
    for use in list(_uses(model)):
        zero = use.zero_point()
        # Unsigned weights are the slower ones on CPUs that have 8-bit dot products.
        if zero is None or (saturating_only and not use.product().saturates):
            continue
        old, old_zero = use.weight, optional_input(use.node, use.inputs.zero)
        if old not in moved:
            moved[old] = _initializer(model, f"{old.name}_unsigned", _constant(old))
        use.node.replace_input_with(use.inputs.weight, moved[old])
        # The zero point is optional while it is 0, and 128 from now on.
        if use.inputs.zero >= len(use.node.inputs):
            use.node.resize_inputs(use.inputs.zero + 1)
        name = f"{old.name}_zero_unsigned" if old_zero is None else f"{old_zero.name}_unsigned"
        use.node.replace_input_with(use.inputs.zero, _initializer(model, name, zero))
        changed += 1
    for old, new in moved.items():  # under its old name, unless something else reads the signed weight
        if not old.uses() and old.is_initializer() and not old.is_graph_output():
            assert old.graph is not None
            del old.graph.initializers[old.name or ""]
            new.name = old.name
    return changed


def _uses(model: ir.Model) -> Iterator[_Use]:
    quantizes = any(n.op_type in ("QuantizeLinear", "DynamicQuantizeLinear") for n in model.graph.all_nodes())
    for node in model.graph.all_nodes():
        domain = "" if node.domain == "ai.onnx" else node.domain
        for inputs in _OPERATORS.get((domain, node.op_type), ()):
            if _signed(optional_input(node, inputs.weight)) and not _signed_activations(node):
                yield _Use(node, inputs, _axis(node))
        # Without quantized activations a dequantized weight is multiplied as a float.
        if quantizes and domain in ("", _MICROSOFT) and node.op_type == "DequantizeLinear":
            axes = set(_products_of(node.outputs[0]))
            if axes and _signed(node.inputs[0]):
                yield _Use(node, _Inputs(0, 2, 1), axes.pop() if len(axes) == 1 else None)


def _signed_activations(node: ir.Node) -> bool:
    """Whether a node multiplies two signed numbers: it does so in wider integers on every CPU."""
    activation = node.inputs[0]
    # The type of a quantized activation is that of its zero point.
    if (maker := producer_of(activation, "QuantizeLinear")) is not None:
        activation = optional_input(maker, 2)  # of the output's type, which may not have been inferred
    return activation is not None and activation.dtype == ir.DataType.INT8


def _products_of(value: ir.Value, *, moved: bool = False) -> Iterator[int | None]:
    """The axis of the pairs, for every product that reads a dequantized weight."""
    for user, index in value.uses():
        if user.op_type in _FLOAT_PRODUCTS:
            yield None if moved or index != 1 else _axis(user)
        elif user.op_type in _MOVES:
            yield from _products_of(user.outputs[0], moved=True)


def _axis(node: ir.Node) -> int | None:
    if node.op_type in _CONVOLUTIONS:
        return _OUTPUTS  # the order in which a kernel reads channels and pixels is its own
    if node.op_type == "ConvTranspose":
        return None
    return -1 if attribute(node, "transB", 0) else -2


def _signed(value: ir.Value | None) -> bool:
    tensor = None if value is None or value.is_graph_input() else ir.convenience.get_const_tensor(value)
    return (
        tensor is not None and tensor.dtype == ir.DataType.INT8 and len(tensor.shape) > 1 and tensor.size > 0
    )


def _constant(value: ir.Value) -> np.ndarray:
    tensor = ir.convenience.get_const_tensor(value)
    assert tensor is not None
    return tensor.numpy()


def _worst_pair(values: np.ndarray, axis: int | None) -> int:
    """The largest sum of two: neighbours (0 and 1, 2 and 3, …) along an axis, or any two, of one output or of all."""
    if axis == _OUTPUTS:
        return int(np.sort(values.reshape(len(values), -1), axis=1)[:, -2:].sum(axis=1).max())
    if axis is None:
        return int(np.sort(values, axis=None)[-2:].sum())
    values = np.moveaxis(values, axis, 0)
    # The kernel pads an odd row with zeros.
    if len(values) % 2:
        values = np.concatenate([values, np.zeros_like(values[:1])])
    return int((values[0::2] + values[1::2]).max())


def _initializer(model: ir.Model, name: str, signed: np.ndarray) -> ir.Value:
    """A constant of the model: signed 8-bit numbers, 128 added."""
    value = model.graph.initializers.get(name)
    if value is None:
        value = new_initializer(
            model.graph, name, ir.tensor((signed.astype(np.int16) + 128).astype(np.uint8))
        )
    return value
