"""Writes the file to deploy: integer weights, constant scales, integer operators. From a rounded graph or a float one.

A convolution keeps its QuantizeLinear and DequantizeLinear around it, which onnxruntime fuses into QLinearConv; a
product whose input is rounded at run time becomes MatMulInteger; weights in blocks become MatMulNBits. Levels and
scales are computed by the runtime with the operators that training used, so they are the same numbers. What differs
from training: biases are rounded to the 32 bits of the integer sums, and a sum of floats may round to the other side
of a tie.

What needs no calibration is written straight from a float graph (`quantize_at_run_time`), in its own opset.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onward import contract
from onward.errors import ModelError
from onward.graph.builder import Builder
from onward.graph.cleanup import remove_unused
from onward.graph.nodes import attribute, optional_input, subgraphs_of
from onward.graph.prune import prune
from onward.model_metadata import read_table
from onward.ort_session import create_session, quiet_options
from onward.quantize.fake_quantization import quantize_rows
from onward.quantize.planning import (
    Product,
    Quantization,
    QuantizedOperand,
    find_lookups,
    find_product,
    read_mark,
)

_MICROSOFT = "com.microsoft"
_MOST_BIAS = 2**31 - 1


def is_rounded(model: ir.Model) -> bool:
    """Whether a model was rounded for training, and not folded yet."""
    return contract.QUANTIZATION in model.metadata_props and any(read_mark(node) for node in model.graph)


def fold_quantization(model: ir.Model) -> ir.Model:
    """Fold a rounded model whose parameters are initializers, in place; returns it."""
    graph = model.graph
    about = read_table(model.metadata_props, contract.QUANTIZATION)
    operands = [(node, mark) for node in graph if (mark := read_mark(node)) is not None]
    products = [(node, mark) for node, mark in operands if mark.mode != "table"]
    if not products and about.get("products"):
        raise ModelError(
            "the eval model has lost the marks of its quantized layers: make the artifacts again"
        )
    writer = _Writer(graph, _evaluate(model, _needed_values(graph, products)))
    _fix_scales(writer.op, graph, writer.arrays)
    for node, mark in operands:
        writer.fold(node, mark)
        node.metadata_props.pop(contract.QUANTIZED, None)  # it is folded: nothing is left to know
    _remove_bounds(writer.op, graph)
    if any(node.domain == _MICROSOFT for node in graph):
        graph.opset_imports[_MICROSOFT] = 1
    return remove_unused(model)


def quantize_at_run_time(model: ir.Model, settings: Quantization, *, products: bool = True) -> ir.Model:
    """Make tables and `products` with constant matrices int8 in place; ranges of inputs are found at run time.

    Writes the forms that folding a rounded graph gives, in the model's own opset and beside operators that training
    does not know.
    """
    writer = _Writer(model.graph)
    op = writer.op
    inputs: dict[ir.Value, tuple[ir.Value, ...]] = {}
    for node in list(model.graph) if products else ():
        product = find_product(node, settings)
        x = node.inputs[0] if node.inputs else None
        if product is None or x is None or node.op_type == "Conv":
            continue
        op.before, op.scope = node, node.name or node.op_type
        for operand in node.inputs:
            if operand is not None:  # files need not say the type, which is the matrix's
                operand.dtype = ir.DataType.FLOAT
        if x not in inputs:
            inputs[x] = op.DynamicQuantizeLinear(x, outputs=3)
        compute = functools.partial(_quantize_matrix, product, pairs=settings.reduce_range)
        weight = writer.store(product.weight.name or "", "dynamic", product.axis, compute)
        writer.write_product(node, inputs[x], weight)
    for node in find_lookups(model.graph, settings):
        table = node.inputs[0]
        assert table is not None
        op.before, op.scope = node, node.name or node.op_type
        writer.write_lookup(node, QuantizedOperand(table.name or "", "table"))
    return remove_unused(model)


def _quantize_matrix(product: Product, *, pairs: bool) -> dict[str, np.ndarray]:
    """A matrix [inputs, outputs] in 8 bits, with a scale for each output.

    127 is the largest weight of an output or, with `pairs`, its largest two neighbours together: rows 0 and 1, 2 and
    3, … are the pairs that a CPU adds in 16 bits (see `graph.dialect.saturation`).
    """
    assert product.weight.const_value is not None
    matrix = product.weight.const_value.numpy()
    matrix = matrix if product.axis == 1 else matrix.T
    # symmetric: with a zero point each product would need a correction for its input's sum
    sizes = np.abs(matrix)
    if pairs:
        sizes = np.concatenate([sizes, np.zeros_like(sizes[: len(sizes) % 2])])
        sizes = sizes[0::2] + sizes[1::2]
    scales = np.maximum(sizes.max(axis=0), np.finfo(np.float32).tiny) / np.float32(127)
    return {"int8": np.rint(matrix / scales).astype(np.int8), "scale": scales.astype(np.float32)}


# ---- numbers ---------------------------------------------------------------------------------------------


def _quantizer(node: ir.Node) -> ir.Node:
    """The QuantizeLinear of a product's weight, behind what only moves its numbers."""
    value = node.inputs[1]
    while value is not None and (producer := value.producer()) is not None:
        if producer.op_type == "QuantizeLinear":
            return producer
        value = producer.inputs[0]
    raise ModelError(f"the weight of '{node.name}' is not rounded any more: make the artifacts again")


def _needed_values(graph: ir.Graph, products: Iterable[tuple[ir.Node, QuantizedOperand]]) -> list[ir.Value]:
    """What has to be computed: weights and their scales, and the scales of activations."""
    needed: dict[ir.Value, None] = {}
    for node, _ in products:
        quantizer = _quantizer(node)
        needed |= {value: None for value in quantizer.inputs[:2] if value is not None}
    for node in graph:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear") and node.domain == "":
            scale = node.inputs[1]
            if scale is not None and _is_constant(scale, {}):
                needed[scale] = None
    return list(needed)


def _is_constant(value: ir.Value, memory: dict[ir.Value, bool]) -> bool:
    """Whether a value is computed of initializers alone."""
    if value not in memory:
        producer = value.producer()
        if producer is None:
            memory[value] = value.is_initializer() and not value.is_graph_input()
        else:
            inputs = [v for v in producer.inputs if v is not None]
            memory[value] = not subgraphs_of(producer) and all(_is_constant(v, memory) for v in inputs)
    return memory[value]


def _evaluate(model: ir.Model, values: Iterable[ir.Value]) -> dict[ir.Value, np.ndarray]:
    """The numbers of values that are computed of initializers alone, as the runtime computes them."""
    arrays, computed = {}, {}
    for value in values:
        if value.const_value is not None:
            arrays[value] = value.const_value.numpy()
        elif value.name:
            computed[value.name] = value
    if computed:
        part = prune(model.clone(), list(computed))
        ir.external_data.load_to_model(part)
        session = create_session(ir.to_proto(part).SerializeToString(), quiet_options(optimize=False))
        results = session.run(list(computed), {})
        arrays |= {computed[name]: np.asarray(array) for name, array in zip(computed, results)}
    return arrays


def _levels(node: ir.Node, arrays: Mapping[ir.Value, np.ndarray], bits: int) -> tuple[np.ndarray, np.ndarray]:
    """The integers of a weight in the layout in which it is rounded, and its scales."""
    quantizer = _quantizer(node)
    x, scale = quantizer.inputs[:2]
    assert x is not None and scale is not None
    weight, scales = arrays[x], arrays[scale]
    axis = attribute(quantizer, "axis", 1) % weight.ndim
    shape = [1] * weight.ndim
    shape[axis] = -1
    half = 2 ** (bits - 1)
    # as the runtime's kernel: float32 division, and ties to even
    levels = np.clip(np.rint(weight / scales.reshape(shape)), -half, half - 1)
    return levels.astype(np.int16), scales


def _fix_scales(op: Builder, graph: ir.Graph, arrays: Mapping[ir.Value, np.ndarray]) -> None:
    """Learned scales become constants."""
    for node in graph:
        if node.op_type not in ("QuantizeLinear", "DequantizeLinear") or node.domain != "":
            continue
        scale = node.inputs[1]
        if scale is not None and scale in arrays and scale.const_value is None and arrays[scale].ndim == 0:
            node.replace_input_with(1, op.constant(arrays[scale], name=f"{node.name}.scale"))


# ---- forms -----------------------------------------------------------------------------------------------


class _Writer:
    """Puts integer forms in the place of float nodes; what several nodes read is stored once."""

    def __init__(self, graph: ir.Graph, arrays: Mapping[ir.Value, np.ndarray] | None = None) -> None:
        self.op = Builder(graph)
        self.arrays = arrays or {}
        self._stored: dict[tuple[str, str, int], tuple[ir.Value, ...]] = {}

    def store(
        self, weight: str, form: str, axis: int, compute: Callable[[], Mapping[str, np.ndarray]]
    ) -> tuple[ir.Value, ...]:
        """A weight's constants in one form; `compute` gives them by the endings of their names."""
        key = (weight, form, axis)
        if key not in self._stored:
            self._stored[key] = tuple(
                self.op.constant(np.ascontiguousarray(array), name=f"{weight}.{ending}")
                for ending, array in compute().items()
            )
        return self._stored[key]

    def fold(self, node: ir.Node, mark: QuantizedOperand) -> None:
        """Write one rounded node in the form that its mark names."""
        self.op.before, self.op.scope = node, node.name or node.op_type
        forms = {"table": self.write_lookup, "weights": self._fold_blocks, "dynamic": self._fold_dynamic}
        forms.get(mark.mode, self._fold_static)(node, mark)

    def _fold_static(self, node: ir.Node, mark: QuantizedOperand) -> None:
        """x̂·ŵ + b with b in steps of both scales, which the runtime runs as one integer kernel."""
        transposed = node.op_type == "MatMul" and mark.axis == 0
        axis = 1 if transposed else mark.axis

        def compute() -> dict[str, np.ndarray]:
            levels, scales = _levels(node, self.arrays, 8)
            return {"int8": (levels.T if transposed else levels).astype(np.int8), "scale": scales}

        levels, scales = self.store(mark.weight, "static", axis, compute)
        op = self.op
        numbers = op.const_value(scales)
        assert numbers is not None
        zero = op.constant(np.zeros(numbers.size, np.int8), name="zero_points")
        # a pair for each product: the runtime fuses one only where nothing else reads it
        node.replace_input_with(1, op.DequantizeLinear(levels, scales, zero, axis=axis))
        bias = op.const_value(op.graph.initializers.get(mark.bias))
        dequantized = None if node.inputs[0] is None else node.inputs[0].producer()
        input_scale = None if dequantized is None else op.const_value(dequantized.inputs[1])
        if bias is None or input_scale is None:
            return
        step = numbers * input_scale.reshape(())
        # a bias of one number is for all columns of a Gemm alike
        steps = np.rint(np.broadcast_to(bias.reshape(-1), step.shape) / step)
        steps = np.clip(steps, -_MOST_BIAS, _MOST_BIAS).astype(np.int32)
        stored_bias = (
            op.constant(steps, name=f"{mark.bias}.int32"),
            op.constant(step, name=f"{mark.bias}.scale"),
        )
        node.replace_input_with(2, op.DequantizeLinear(*stored_bias, axis=0))

    def _fold_dynamic(self, node: ir.Node, mark: QuantizedOperand) -> None:
        def compute() -> dict[str, np.ndarray]:
            levels, scales = _levels(node, self.arrays, 8)
            return {"int8": (levels if mark.axis == 1 else levels.T).astype(np.int8), "scale": scales}

        dequantized = None if node.inputs[0] is None else node.inputs[0].producer()
        assert dequantized is not None and dequantized.op_type == "DequantizeLinear"
        self.write_product(node, dequantized.inputs, self.store(mark.weight, "dynamic", mark.axis, compute))

    def write_product(
        self, node: ir.Node, quantized_input: Sequence[ir.Value | None], weight: Sequence[ir.Value]
    ) -> None:
        """(q(x) − z)·ŵ as integers, times both scales: what the runtime fuses into one kernel with the quantizer."""
        op, (x, scale, zero), (levels, scales) = self.op, quantized_input, weight
        product = op.Cast(op.MatMulInteger(x, levels, zero), to=ir.DataType.FLOAT.value)
        self._replace(node, op.Mul(product, op.Mul(scale, scales)))

    def _fold_blocks(self, node: ir.Node, mark: QuantizedOperand) -> None:
        """MatMulNBits, whose blocks are rows of [outputs, inputs], two 4-bit levels in a byte."""

        def compute() -> dict[str, np.ndarray]:
            levels, scales = _levels(node, self.arrays, mark.bits)
            # without zero points MatMulNBits takes the middle of unsigned levels for 0
            blocks = (levels + 2 ** (mark.bits - 1)).astype(np.uint8).reshape(mark.rows, -1, mark.block)
            packed = blocks if mark.bits == 8 else blocks[:, :, 0::2] | (blocks[:, :, 1::2] << 4)
            return {"blocks": packed, "scales": scales}

        packed, scales = self.store(mark.weight, "weights", mark.axis, compute)
        (result,) = self.op.node(
            "MatMulNBits",
            [node.inputs[0], packed, scales],
            {"K": mark.columns, "N": mark.rows, "bits": mark.bits, "block_size": mark.block},
            domain=_MICROSOFT,
        )
        result.dtype = ir.DataType.FLOAT
        self._replace(node, result)

    def write_lookup(self, node: ir.Node, mark: QuantizedOperand) -> None:
        """Rows looked up as integers, and the scale of each."""
        op, (table, ids) = self.op, node.inputs

        def compute() -> dict[str, np.ndarray]:
            assert table is not None and table.const_value is not None
            levels, scales = quantize_rows(table.const_value.numpy())
            return {"rows": levels, "row_scales": scales}

        rows, scales = (self._gather(table, ids) for table in self.store(mark.weight, "table", 0, compute))
        self._replace(node, op.Mul(op.Cast(rows, to=ir.DataType.FLOAT.value), scales))

    def _gather(self, table: ir.Value, ids: ir.Value | None) -> ir.Value:
        # not by the builder, which wants to know the type of the ids: files need not say it
        name = self.op.namer(f"{self.op.scope}/Gather")
        node = ir.Node("", "Gather", [table, ids], name=name)
        node.outputs[0].name, node.outputs[0].type = f"{name}.out", table.type
        self.op.insert(node)
        return node.outputs[0]

    def _replace(self, node: ir.Node, result: ir.Value) -> None:
        """Let all read the new product, a Gemm's bias added, in place of the node."""
        old, bias = node.outputs[0], optional_input(node, 2)
        if bias is not None:
            result = self.op.Add(result, bias)
        result.shape, result.type = old.shape, old.type
        name = old.name
        ir.convenience.replace_all_uses_with(old, result, replace_graph_outputs=True)
        self.op.graph.remove(node, safe=True)
        result.name = name


def _remove_bounds(op: Builder, graph: ir.Graph) -> None:
    """Remove a Relu or Clip whose bounds the quantizer behind it has: saturating gives the same integers."""
    for node in list(graph):
        if node.op_type not in ("Relu", "Clip") or node.outputs[0].is_graph_output() or node.domain != "":
            continue
        readers = list(node.outputs[0].consumers())
        if len(readers) != 1 or readers[0].op_type != "QuantizeLinear":
            continue
        scale, zero = (op.const_value(value) for value in readers[0].inputs[1:3])
        if scale is None or zero is None or scale.ndim or int(zero) != 0 or zero.dtype != np.uint8:
            continue
        high = np.inf if node.op_type == "Relu" else op.const_value(optional_input(node, 2))
        low = 0.0 if node.op_type == "Relu" else op.const_value(optional_input(node, 1))
        high = np.inf if high is None and optional_input(node, 2) is None else high
        if high is None or low is None or float(low) > 0 or float(scale) * 255 > float(high):
            continue
        assert node.inputs[0] is not None
        node.outputs[0].replace_all_uses_with(node.inputs[0])
        graph.remove(node, safe=True)
