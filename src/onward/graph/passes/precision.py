"""The types of numbers: mixed precision, models of 16 bits in float32, weights dequantized where they are read.

Mixed precision: products of matrices (and convolutions, in float16) in 16 bits, the rest as it was.
A pass over a finished training graph, forward and backward alike. Parameters stay float32, and so do
normalisations, softmax, losses, sums and every operator that is not named here. What moves or adds up numbers
follows what it reads. Casts are inserted where a type changes; outputs keep theirs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from onward.graph.builder import Builder
from onward.graph.cleanup import remove_unused
from onward.graph.nodes import new_initializer, nodes_within, only_user, producer_of, subgraphs_of
from onward.graph.save import external_part

Precision = Literal["fp32", "fp16", "bf16"]
PRECISIONS: dict[str, ir.DataType] = {
    "fp32": ir.DataType.FLOAT,
    "fp16": ir.DataType.FLOAT16,
    "bf16": ir.DataType.BFLOAT16,
}

# ONNX has no convolution of bfloat16 before opset 22.
_PRODUCTS = {
    ir.DataType.FLOAT16: frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose"}),
    ir.DataType.BFLOAT16: frozenset({"MatMul", "Gemm"}),
}
# Numbers go elsewhere and stay what they are.
_MOVES = frozenset(
    {"Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze", "Concat",
     "Split"}
)  # fmt: skip
# One rounding each: as exact as the numbers that they read.
_FOLLOWS = _MOVES | {"Add", "Div", "Mul", "Neg", "Relu", "Sub", "Where"}
_FLOAT = ir.DataType.FLOAT
# beyond this, a float16 is infinite
_LARGEST = 65504.0


def lower_precision(model: ir.Model, parameters: Collection[str], precision: Precision) -> None:
    """Convert a training graph to mixed precision; `parameters` are its trainable and frozen inputs."""
    kind = PRECISIONS[precision]
    if kind != _FLOAT:
        _Lowering(model, parameters, kind).run()


class _Lowering:
    """The graph while casts are inserted: which values are in fewer bits, and what they were cast to already."""

    def __init__(self, model: ir.Model, parameters: Collection[str], kind: ir.DataType) -> None:
        self._graph, self._kind = model.graph, kind
        self._op = Builder(model.graph)
        self._op.scope = "precision"
        self._weights = {value for value in model.graph.inputs if value.name in parameters}
        self._weights |= set(model.graph.initializers.values())
        self._nodes = list(model.graph)
        self._products = self._find_products()
        self._feeding_products = self._find_feeding_products()
        self._neutral: set[ir.Value] = set()
        self._low: set[ir.Value] = set()
        self._casts: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}

    def run(self) -> None:
        """Visit every node in order: its inputs are settled when it comes."""
        for node in self._nodes:
            if self._is_lowered(node):
                self._lower(node)
            else:
                self._raise(node)
        self._raise_outputs()

    # ---- which nodes -----------------------------------------------------------------------------

    def _find_products(self) -> set[ir.Node]:
        """Products of what the model computes from data and weights.

        Not those of positions and frequencies, which need every bit, and not sums that are written as products.
        """
        # Vectors are biases and scales; a table or matrix makes whatever it touches data of the model.
        data = {v for v in self._weights if v.dtype == _FLOAT and (v.shape is None or v.shape.rank() > 1)}
        data |= {v for v in self._graph.inputs if v.dtype == _FLOAT and v not in self._weights}
        products = set()
        for node in self._nodes:
            floats = [value for value in node.inputs if value is not None and value.dtype == _FLOAT]
            # A body may read anything: what it gives counts as data.
            if any(value in data for value in floats) or subgraphs_of(node):
                data.update(node.outputs)
            if (
                node.op_type in _PRODUCTS[self._kind]
                and not node.domain
                and all(value in data for value in floats[:2])
            ):
                products.add(node)
        return products

    def _find_feeding_products(self) -> set[ir.Node]:
        """Nodes that move numbers to products and nowhere else: a cast before them serves them all."""
        feeding: set[ir.Node] = set()
        for node in reversed(self._nodes):
            if node.op_type not in _MOVES or node.domain:
                continue
            uses = [use.node for value in node.outputs for use in value.uses()]
            outward = any(value.is_graph_output() for value in node.outputs)
            # Casting before a move costs less than after it where both read 32 bits: half the bytes are moved.
            if uses and not outward and all(user in self._products or user in feeding for user in uses):
                feeding.add(node)
        return feeding

    def _is_lowered(self, node: ir.Node) -> bool:
        numbers = self._numbers(node)
        if not numbers or node.domain:
            return False
        if node in self._products or node in self._feeding_products:
            return True
        # Everything else stays in float32: what is not known to be safe in 16 bits is not tried.
        if node.op_type not in _FOLLOWS and not self._is_sum(node):
            return False
        if self._is_neutral(node):
            self._neutral.update(node.outputs)
            return False
        deciding = [v for v in numbers if v not in self._weights and v not in self._neutral]
        if not deciding or any(value not in self._low for value in deciding):
            return False
        return not any(self._overflows(value) for value in numbers)

    def _is_sum(self, node: ir.Node) -> bool:
        """Ones times a matrix: the product adds up in float32, and rounds once."""
        return node.op_type == "MatMul" and producer_of(node.inputs[0], "ConstantOfShape") is not None

    def _is_neutral(self, node: ir.Node) -> bool:
        """Whether it gives a mask: zeros and one other number, of which casts lose nothing that matters."""
        numbers = self._numbers(node)
        if node.op_type == "Where":
            return all(
                v in self._weights and v.const_value is not None and v.const_value.size == 1 for v in numbers
            )
        return node.op_type in _MOVES and all(value in self._neutral for value in numbers)

    def _overflows(self, value: ir.Value) -> bool:
        """Whether a constant has finite numbers that float16 does not have, such as those that mask scores."""
        if self._kind != ir.DataType.FLOAT16 or value.const_value is None or value.is_graph_input():
            return False
        numbers = np.abs(value.const_value.numpy())
        # −1e9 under a mask would become −∞, and a row that is all masked NaN.
        return bool(np.any(np.isfinite(numbers) & (numbers > _LARGEST)))

    def _numbers(self, node: ir.Node) -> list[ir.Value]:
        """The inputs of a node that are floats, or were before this pass."""
        return [v for v in node.inputs if v is not None and (v.dtype == _FLOAT or v in self._low)]

    # ---- casts -----------------------------------------------------------------------------------

    def _lower(self, node: ir.Node) -> None:
        for index, value in enumerate(node.inputs):
            if value is not None and value.dtype == _FLOAT:
                node.replace_input_with(index, self._cast(value, self._kind, node))
        for value in node.outputs:
            if value.dtype == _FLOAT:
                value.type = ir.TensorType(self._kind)
                self._low.add(value)

    def _raise(self, node: ir.Node) -> None:
        for index, value in enumerate(node.inputs):
            if value is not None and value in self._low:
                node.replace_input_with(index, self._cast(value, _FLOAT, node))
        for body in subgraphs_of(node):
            # Bodies stay in float32, and read a cast that stands before their node.
            for inner in nodes_within(body):
                for index, value in enumerate(inner.inputs):
                    if value is not None and value in self._low:
                        inner.replace_input_with(index, self._cast(value, _FLOAT, node))
        if _is_mask(node):
            self._neutral.update(node.outputs)

    def _cast(self, value: ir.Value, kind: ir.DataType, before: ir.Node | None) -> ir.Value:
        """The value in another type, cast once for all that read it so."""
        key = (value, kind)
        if key not in self._casts:
            # A mask was made of truth values: it is cast from those, not from its float.
            producer = value.producer() if kind == self._kind else None
            self._op.before = before
            # Rounded once, here, and not in every step.
            if kind == self._kind and value.const_value is not None and not value.is_graph_input():
                self._casts[key] = self._op.constant(value.const_value.numpy().astype(kind.numpy()))
            elif producer is not None and _is_mask(producer):
                self._casts[key] = self._op.Cast(producer.inputs[0], to=kind)
            else:
                self._casts[key] = self._op.Cast(value, to=kind)
        return self._casts[key]

    def _raise_outputs(self) -> None:
        for index, value in enumerate(self._graph.outputs):
            if value not in self._low:
                continue
            # Losses and gradients leave in float32: sums over steps lose too much in 16 bits.
            raised = self._cast(value, _FLOAT, None)
            raised.shape = value.shape
            raised.name, value.name = value.name, self._op.namer(f"{value.name}.low")
            self._graph.outputs[index] = raised


def _is_mask(node: ir.Node) -> bool:
    """Whether it makes numbers of truth values."""
    return node.op_type == "Cast" and node.inputs[0] is not None and node.inputs[0].dtype == ir.DataType.BOOL


# --- Lets a model that computes in 16 bits compute in float32; what it stores stays as it is.
#
# Published decoders often have scales, norms and tables in float16, and the CPU has few kernels for it. Each
# stored tensor is widened where it is read; of a table, only the rows that are looked up. Works before
# normalization.


_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_NUMBERS = tuple(int(kind) for kind in _HALVES)


def has_halves(model: ir.Model) -> bool:
    """Whether a model stores or makes floating numbers of 16 bits."""
    stored = any(value.dtype in _HALVES for value in model.graph.initializers.values())
    return stored or any(value.dtype in _HALVES for value in model.graph.inputs)


def compute_in_float32(model: ir.Model) -> ir.Model:
    """Widen every number of 16 bits to float32, in place; inputs and outputs become float32 too."""
    for graph in model.graphs():
        for value in graph.inputs:
            if value.dtype in _HALVES:
                value.dtype = _FLOAT
        for node in list(graph):
            _widen(node)
    for value in list(model.graph.initializers.values()):
        if value.dtype in _HALVES:
            _widen_stored(model.graph, value)
    return model


def _widen(node: ir.Node) -> None:
    for value in node.outputs:
        if value.dtype in _HALVES:
            value.dtype = _FLOAT
    for name, attribute in list(node.attributes.items()):
        if attribute.type == ir.AttributeType.TENSOR and not attribute.is_ref():
            tensor = attribute.as_tensor()
            if tensor.dtype in _HALVES:
                wide = ir.tensor(tensor.numpy().astype("float32"), name=tensor.name)
                node.attributes[name] = ir.AttrTensor(name, wide)
        # Cast, RandomNormal and EyeLike name their type as a number.
        elif name in ("to", "dtype") and attribute.value in _NUMBERS:
            node.attributes[name] = ir.AttrInt64(name, int(_FLOAT))


def _widen_stored(graph: ir.Graph, value: ir.Value) -> None:
    """Read a stored tensor through a Cast: after the lookup where it is a table, before anything else."""
    users = list(value.uses())
    looked_up = [(node, index) for node, index in users if node.op_type == "Gather" and index == 0]
    for node, _ in looked_up:
        result = node.outputs[0]
        # A table of 32,000 rows would be widened whole for the few that a batch looks up.
        wide = _cast(node, result, after=True)
        for user, index in [use for use in result.uses() if use.node is not wide.producer()]:
            user.replace_input_with(index, wide)
        assert value.dtype is not None
        result.dtype = value.dtype
        if result.is_graph_output():
            owner = node.graph
            assert owner is not None
            wide.name, result.name = result.name, f"{result.name}.stored"
            owner.outputs[owner.outputs.index(result)] = wide
    by_graph: dict[ir.Graph, ir.Value] = {}
    for node, index in [use for use in users if use not in looked_up]:
        owner = node.graph
        assert isinstance(owner, ir.Graph)
        if owner not in by_graph:
            by_graph[owner] = _cast(node, value, after=False)
        node.replace_input_with(index, by_graph[owner])


def _cast(node: ir.Node, value: ir.Value, *, after: bool) -> ir.Value:
    cast = ir.Node("", "Cast", [value], [ir.AttrInt64("to", int(_FLOAT))], num_outputs=1)
    cast.name = f"{value.name}/widened"
    result = cast.outputs[0]
    result.name, result.shape, result.type = f"{value.name}.widened", value.shape, ir.TensorType(_FLOAT)
    owner = node.graph
    assert owner is not None
    if after:
        owner.insert_after(node, cast)
    else:  # the first of the graph: every later node may read it
        owner.insert_before(next(iter(owner)), cast)
    return result


# --- Dequantizes a weight just before each product that reads it, and again for the gradient.
#
# Otherwise a session is free to dequantize all weights first, and keeps those that the gradient reads again from the
# forward pass until then: a 4-bit model of 1.1 B parameters would need 4.4 GB for them. Each product gets a
# `DequantizeLinear` of its own, whose scales wait for the product's other operand: their shape is computed from it. The
# packed weight stays where it is, in one file; it goes by several names, so that the runtime does not merge the copies.


_WEIGHT_PRODUCTS = frozenset({"MatMul", "Gemm"})


def dequantize_per_product(model: ir.Model) -> ir.Model:
    """Give each product of a stored weight its own dequantization, in place; results are the same to the bit."""
    op = Builder(model.graph)
    order = {node: place for place, node in enumerate(model.graph)}
    for node in list(model.graph):
        if node.op_type == "DequantizeLinear" and node.domain == "":
            weight, scale = node.inputs[0], node.inputs[1]
            if weight is not None and scale is not None and _is_stored(weight):
                _split(op, node, weight, scale, order)
    return remove_unused(model)


def _is_stored(value: ir.Value | None) -> bool:
    return value is not None and value.const_value is not None and not value.is_graph_input()


def _split(
    op: Builder, node: ir.Node, weight: ir.Value, scale: ir.Value, order: Mapping[ir.Node, int]
) -> None:
    lookups = [user for user, index in node.outputs[0].uses() if user.op_type == "Gather" and index == 0]
    sizes = op.static_shape(scale)
    if not sizes:
        return
    weight, zeros, sizes, attributes, whole = _by_block(op, node, weight, sizes)
    external = weight.const_value if isinstance(weight.const_value, ir.ExternalTensor) else None
    for count, (product, index, turned) in enumerate(_products(node)):
        other = product.inputs[1 - index]
        if other is None or other.const_value is not None:
            continue
        with op.inserting(product, f"{product.name or product.op_type}/weight"):
            stored = weight
            if count and external is not None:
                # Equal nodes on equal inputs are merged by the runtime: another name keeps them apart.
                stored = _view(op, weight, external.shape.numpy(), "again")
            # Zero, but known only once the other operand exists: so the scales cannot be ready before it.
            nothing = op.Mul(op.Shape(other, start=0, end=1), [0])
            waiting = op.Reshape(scale, op.Add(nothing, sizes))
            waiting.shape = ir.Shape(sizes)
            full = op.node("DequantizeLinear", [stored, waiting, *zeros], attributes)[0]
            full = full if whole is None else op.Reshape(full, whole)
            full.shape = node.outputs[0].shape
            product.replace_input_with(index, op.Transpose(full, perm=[1, 0]) if turned else full)
        # some rows of a matrix that a product before them has whole need no matrix of their own
        for lookup in [lookup for lookup in lookups if order[lookup] > order[product]]:
            lookup.replace_input_with(0, full)


def _by_block(
    op: Builder, node: ir.Node, weight: ir.Value, sizes: tuple[int, ...]
) -> tuple[ir.Value, list[ir.Value | None], tuple[int, ...], dict[str, Any], tuple[int, ...] | None]:
    """Weight, zero points, sizes of the scales, attributes and final shape: blocks of a row as rows of their own.

    The same numbers, but the runtime's loop for one scale per row takes a tenth of the time of the one for blocks.
    """
    zeros, attributes = list(node.inputs[2:]), dict(node.attributes)
    block, axis = node.attributes.get_int("block_size", 0), node.attributes.get_int("axis", 1)
    shape = op.static_shape(weight)
    plain = shape is not None and len(shape) == 2 and axis in (1, -1) and block > 0
    # The last block of a row may be short, and is no row of its own then.
    if not plain or shape is None or shape[1] % block or not all(_is_stored(value) for value in zeros):
        return weight, zeros, sizes, attributes, None
    rows = shape[0] * (shape[1] // block)
    if sizes != (shape[0], shape[1] // block):
        return weight, zeros, sizes, attributes, None
    by_row = {**attributes, "axis": ir.AttrInt64("axis", 0)}
    del by_row["block_size"]
    zeros = [value and _view(op, value, [rows], "by_block") for value in zeros]
    return _view(op, weight, [rows, block], "by_block"), zeros, (rows,), by_row, shape


def _view(op: Builder, value: ir.Value, shape: Sequence[int], suffix: str) -> ir.Value:
    """The same bytes in another shape, under another name."""
    name = op.namer(f"{value.name}.{suffix}")
    tensor = value.const_value
    assert tensor is not None
    if isinstance(tensor, ir.ExternalTensor):
        view_tensor: ir.TensorProtocol = external_part(tensor, name, shape)
    elif tensor.dtype.bitwidth < 8:
        data = np.frombuffer(tensor.tobytes(), np.uint8)
        view_tensor = ir.PackedTensor(data, tensor.dtype, shape=ir.Shape(shape))
    else:
        view_tensor = ir.tensor(tensor.numpy().reshape(shape), dtype=tensor.dtype)
    return new_initializer(op.graph, name, view_tensor)


def _products(node: ir.Node) -> list[tuple[ir.Node, int, bool]]:
    """(product, place of the weight in it, whether transposed) of each product that reads a dequantized weight."""
    readers = []
    for user, index in node.outputs[0].uses():
        if user.op_type == "Transpose" and list(user.attributes.get_ints("perm", ())) == [1, 0]:
            readers += [(after, index, True) for after, index in user.outputs[0].uses()]
        else:
            readers.append((user, index, False))
    return [
        (user, index, turned)
        for user, index, turned in readers
        if user.op_type in _WEIGHT_PRODUCTS and index in (0, 1)
    ]


# --- Products of integers whose input is rounded when they run, and the same products of floats.
#
# Dynamic quantization, as transformers.js publishes it, writes a product as DynamicQuantizeLinear,
# MatMulInteger, Cast and Mul. Training multiplies the dequantized weight with the input as it is; the
# deployed model keeps the integers.


def multiply_in_float(model: ir.Model) -> dict[ir.Value, ir.Value]:
    """Give each such product a twin of floats in its place; returns the twins' results with the integers' own.

    The integers stay in the graph, unused, until they are removed or `multiply_in_integers` puts them back.
    """
    results: dict[ir.Value, ir.Value] = {}
    for node in list(model.graph):
        if node.op_type != "MatMulInteger" or node.domain not in ("", "ai.onnx"):
            continue
        cast = only_user(node.outputs[0], "Cast")
        scaled = None if cast is None else only_user(cast.outputs[0], "Mul")
        source, weight = producer_of(node.inputs[0], "DynamicQuantizeLinear"), node.inputs[1]
        if scaled is None or source is None or weight is None or weight.const_value is None:
            continue
        scale = _weight_scale(scaled, source)
        if scale is None or scale.const_value is None:
            continue
        result = scaled.outputs[0]
        # one scale, or one for each column
        axis = [ir.AttrInt64("axis", 1)] if scale.const_value.shape.rank() else []
        inputs = [weight, scale, *node.inputs[3:]]
        dequantized = ir.Node("", "DequantizeLinear", inputs, axis, name=f"{node.name}/weight")
        weight_value, kind = dequantized.outputs[0], ir.TensorType(ir.DataType.FLOAT)
        weight_value.name, weight_value.type = f"{weight.name}.dequantized", kind
        weight_value.shape = ir.Shape(weight.const_value.shape.numpy())
        if source.inputs[0] is not None:  # of which the quantized file may say nothing
            source.inputs[0].type = source.inputs[0].type or kind
        product = ir.Node("", "MatMul", [source.inputs[0], weight_value], name=node.name)
        twin = product.outputs[0]
        twin.name, twin.type, twin.shape = f"{result.name}.float", result.type or kind, result.shape
        model.graph.insert_after(scaled, [dequantized, product])
        _exchange(result, twin)
        results[twin] = result
    return results


def multiply_in_integers(results: Mapping[ir.Value, ir.Value]) -> None:
    """Take the integer products again wherever their twins are read."""
    for twin, result in results.items():
        _exchange(twin, result)


def _exchange(old: ir.Value, new: ir.Value) -> None:
    """Have all read another value; what was an output of the model gives it its name."""
    if old.is_graph_output():
        old.name, new.name = new.name, old.name
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)


def _weight_scale(scaled: ir.Node, source: ir.Node) -> ir.Value | None:
    """What the integers' weight is scaled by: the factor beside that of the input."""
    for factor in scaled.inputs:
        both = producer_of(factor, "Mul")
        if both is not None and source.outputs[1] in both.inputs:
            return next((value for value in both.inputs if value is not source.outputs[1]), None)
    return None
