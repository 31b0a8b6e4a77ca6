"""Chooses what to quantize in a model, as settings say and as onnxruntime's CPU kernels compute in integers.

Convolutions and what joins them (sums, pools, concatenations) with ranges from calibration; products of matrices with
ranges found at run time, unless their input has one already; embedding tables. Everything else stays float.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
from collections.abc import Collection, Iterable
from typing import Any, Literal

import onnx_ir as ir

from onward import contract
from onward.errors import ModelError
from onward.graph.nodes import attribute, optional_input
from onward.reading import parse_json

Mode = Literal["static", "dynamic", "weights"]
Range = tuple[float, float]

# What the runtime has integer kernels of where all inputs and the output are quantized.
_JOINS = frozenset({"Add", "Mul", "Concat", "AveragePool", "GlobalAveragePool", "LeakyRelu", "Sigmoid"})
# What only moves or selects numbers: the runtime runs it on integers where scales before and after are the same.
_MOVES = frozenset({"MaxPool", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Slice"})
# Bounds that the quantizer's own saturation replaces: the scale is taken behind them.
_BOUNDS = frozenset({"Relu", "Clip"})
# What a quantized model has and a float one has not.
QUANTIZED = frozenset(
    {
        *("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "ConvInteger"),
        *("QLinearConv", "QLinearMatMul", "MatMulNBits", "DynamicQuantizeMatMul", "QGemm", "QAttention"),
        *("DynamicQuantizeLSTM", "QEmbedLayerNormalization", "GatherBlockQuantized"),
    }
)
# Smaller tables, of segments say, are no part of a file's size.
_TABLE_ROWS = 64


@dataclasses.dataclass(frozen=True)
class Quantization:
    """What to quantize and how.

    `scheme` is "int8" (convolutions with observed ranges, products of matrices with ranges found at run time),
    "int8-static" (observed ranges for all), or the weights of matrices alone in blocks: "int8-weights" and "int4".
    `reduce_range` keeps integer products right on CPUs without 8-bit dot products. `exclude` names nodes or weights to
    leave alone; patterns count. `calibration` is "minmax", "percentile", "error", or "auto" for the best of them on the
    samples. Channels are balanced first where that brings the answers on the samples nearer to the float model's;
    with `equalize` those of convolutions are in any case, or (False) none.
    """

    scheme: str = "int8"
    # CPUs without VNNI add pairs of products in 16 bits, and saturate there
    reduce_range: bool = True
    # small enough that an outlier costs its own block only
    block_size: int = 32
    exclude: tuple[str, ...] = ()
    calibration: str = "auto"
    equalize: bool | None = None

    def __post_init__(self) -> None:
        if self.scheme not in TRAINABLE_SCHEMES:
            names = ", ".join(TRAINABLE_SCHEMES)
            raise ValueError(f"quantize is {self.scheme!r}: what can be trained is one of {names}")
        # MatMulNBits has kernels for these alone
        if self.block_size < 16 or self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size is {self.block_size}: it must be a power of two, 16 or more")

    @property
    def bits(self) -> int:
        """The bits of a weight."""
        return 4 if self.scheme == "int4" else 8


TRAINABLE_SCHEMES = ("int8", "int8-static", "int8-weights", "int4")


@dataclasses.dataclass(frozen=True)
class Product:
    """A convolution or product with a constant weight; `axis` of the weight counts its outputs."""

    node: ir.Node
    weight: ir.Value
    axis: int
    mode: Mode

    @property
    def label(self) -> str:
        """Its name for people: the node's, or the weight's."""
        return self.node.name or self.weight.name or self.node.op_type


@dataclasses.dataclass
class Activation:
    """A value to round: for the nodes in `readers`, or (None) for all that read it.

    With `like`, it has the scale of another one, of which it is a part in another order.
    """

    value: ir.Value
    readers: list[tuple[ir.Node, int]] | None
    like: ir.Value | None = None


@dataclasses.dataclass
class Plan:
    """What is quantized in a model."""

    products: list[Product]
    activations: dict[ir.Value, Activation]
    tables: list[ir.Value]

    @property
    def observed(self) -> list[str]:
        """The names of the values whose ranges calibration has to observe."""
        return [value.name or "" for value, entry in self.activations.items() if entry.like is None]


@dataclasses.dataclass(frozen=True)
class QuantizedOperand:
    """What is written on a node whose weight, or table, is rounded: what folding has to know.

    `rows` are the outputs of a matrix and `columns` its inputs.
    """

    weight: str
    mode: str
    axis: int = 0
    bits: int = 8
    block: int = 0
    rows: int = 0
    columns: int = 0
    bias: str = ""


def read_mark(node: ir.Node) -> QuantizedOperand | None:
    """What is written on a node; None where its operand is not rounded."""
    text = node.metadata_props.get(contract.QUANTIZED)
    if text is None:
        return None
    try:
        return QuantizedOperand(**parse_json(text))
    except (ValueError, TypeError) as error:
        raise ModelError(
            f"node '{node.name}': '{contract.QUANTIZED}' in its metadata is not Onward's ({error})",
            hint="make the artifacts again",
        ) from error


def write_mark(node: ir.Node, mark: QuantizedOperand) -> None:
    """Write on a node what `read_mark` reads."""
    node.metadata_props[contract.QUANTIZED] = json.dumps(dataclasses.asdict(mark))


def plan_quantization(
    model: ir.Model, settings: Quantization, *, adapters: Collection[str] = (), calibrated: bool = True
) -> Plan:
    """Choose what to quantize; without calibration data (`calibrated`), what needs none.

    A model that is quantized already, or has nothing to quantize, is an error.
    """
    refuse_quantized(model.graph.all_nodes())
    tables = dict.fromkeys(node.inputs[0] for node in find_lookups(model.graph, settings))
    plan = Plan([], {}, [table for table in tables if table is not None])
    weight_only = settings.scheme in ("int8-weights", "int4")
    for node in model.graph:
        product = find_product(node, settings)
        if product is None or product.weight.name in adapters:
            if not weight_only:
                _plan_join(plan, node)
            continue
        if weight_only:
            if node.op_type != "Conv":
                plan.products.append(dataclasses.replace(product, mode="weights"))
            continue
        x = node.inputs[0]
        assert x is not None
        # an integer convolution has the range of its input in the file: it cannot be found at run time
        if node.op_type == "Conv" and not calibrated:
            continue
        if node.op_type == "Conv" or settings.scheme == "int8-static" or x in plan.activations:
            _plan_static(plan, product, x)
        else:
            plan.products.append(dataclasses.replace(product, mode="dynamic"))
    _keep_last_convolutions(plan, model.graph)
    _refuse_nothing(model, plan, settings, calibrated=calibrated)
    return plan


def find_product(node: ir.Node, settings: Quantization) -> Product | None:
    """The node as a product with a constant float weight, unless it is excluded; else None."""
    if node.domain != "" or node.op_type not in ("Conv", "MatMul", "Gemm"):
        return None
    operand = node.inputs[1]
    weight = stored_weight(operand)
    if weight is None or operand is None or len(weight.shape or ()) < 2:
        return None
    if _is_excluded(node, weight, settings.exclude):
        return None
    if node.op_type == "Conv":
        return Product(node, weight, 0, "static")
    if len(weight.shape or ()) != 2:
        return None
    if node.op_type == "Gemm":
        plain = attribute(node, "alpha", 1.0) == 1.0 and attribute(node, "beta", 1.0) == 1.0
        # the integer forms have no place for these factors
        if not plain or attribute(node, "transA", 0):
            return None
    # exporters leave a Transpose behind the stored matrix, which the runtime folds away
    transposed = operand is not weight
    axis = 0 if bool(attribute(node, "transB", 0)) != transposed else 1
    return Product(node, weight, axis, "dynamic")


def stored_weight(value: ir.Value | None) -> ir.Value | None:
    """The constant float matrix or kernel that a product reads, also through a transposition; else None."""
    if value is None:
        return None
    producer = value.producer()
    if producer is not None and producer.op_type == "Transpose" and len(value.shape or ()) == 2:
        value = producer.inputs[0]
    if value is None or not value.is_initializer() or value.is_graph_input():
        return None
    has_numbers = value.const_value is not None and value.const_value.size > 0
    return value if value.dtype == ir.DataType.FLOAT and has_numbers else None


def _is_excluded(node: ir.Node, weight: ir.Value, patterns: Collection[str]) -> bool:
    names = (node.name or "", weight.name or "")
    return any(name == p or fnmatch.fnmatchcase(name, p) for name in names for p in patterns)


def _plan_static(plan: Plan, product: Product, x: ir.Value) -> None:
    """Round the input for this product; a convolution's result for all, as integer convolutions give integers."""
    plan.products.append(dataclasses.replace(product, mode="static"))
    entry = plan.activations.setdefault(x, Activation(x, []))
    if entry.readers is not None:
        entry.readers.append((product.node, 0))
    if product.node.op_type == "Conv":
        result = _behind_bounds(product.node.outputs[0])
        plan.activations.setdefault(result, Activation(result, None)).readers = None


def _plan_join(plan: Plan, node: ir.Node) -> None:
    """Round the result of an operator whose inputs are all rounded for everyone, where integer kernels go on."""
    if node.domain != "" or node.op_type not in _JOINS | _MOVES or not node.outputs:
        return
    inputs = [value for value in node.inputs if value is not None]
    inputs = inputs[:1] if node.op_type in _MOVES else inputs
    if not inputs or not all(v in plan.activations and plan.activations[v].readers is None for v in inputs):
        return
    if node.op_type in _MOVES:
        # one scale for both: the first value that has it, not one that borrows it
        like = plan.activations[inputs[0]].like or inputs[0]
        result = node.outputs[0]
        plan.activations[result] = Activation(result, None, like)
        return
    result = _behind_bounds(node.outputs[0])
    goes_on = {"Conv", "Gemm", "MatMul", *_JOINS, *_MOVES}
    if any(user.op_type in goes_on for user in result.consumers()):
        plan.activations[result] = Activation(result, None)


def _behind_bounds(value: ir.Value) -> ir.Value:
    """The value behind a Relu or Clip that alone reads it: the quantizer's range has these bounds in it."""
    consumers = list(value.consumers())
    if len(consumers) != 1 or value.is_graph_output() or consumers[0].op_type not in _BOUNDS:
        return value
    node = consumers[0]
    if node.op_type == "Clip":
        low = optional_input(node, 1)
        tensor = None if low is None else ir.convenience.get_const_tensor(low)
        # a lower bound above 0 is none that a quantizer with a zero of its own can have
        if tensor is None or float(tensor.numpy()) != 0.0:
            return value
    return node.outputs[0]


def _keep_last_convolutions(plan: Plan, graph: ir.Graph) -> None:
    """Leave convolutions float whose results are the model's answers: rounding those to 8 bits cannot be trained away.

    One that is the model's only product is quantized after all.
    """
    last = [
        product
        for product in plan.products
        if product.node.op_type == "Conv" and _is_answer(_behind_bounds(product.node.outputs[0]))
    ]
    if not last or len(last) == len(plan.products):
        return
    for product in last:
        plan.products.remove(product)
        x, result = product.node.inputs[0], _behind_bounds(product.node.outputs[0])
        todo = [result]
        while todo:  # and what only moves its results
            value = todo.pop()
            if plan.activations.pop(value, None) is not None:
                todo += [output for node in value.consumers() for output in node.outputs]
        entry = None if x is None else plan.activations.get(x)
        if entry is not None and entry.readers is not None:
            entry.readers = [(node, index) for node, index in entry.readers if node is not product.node]
            if not entry.readers and x is not None:
                del plan.activations[x]


def _is_answer(value: ir.Value) -> bool:
    """Whether a value is an output of the model, or becomes one by being moved alone."""
    if value.is_graph_output():
        return True
    consumers = list(value.consumers())
    moves = _MOVES | {"Concat"}
    return bool(consumers) and all(n.op_type in moves and _is_answer(n.outputs[0]) for n in consumers)


def find_lookups(graph: ir.Graph, settings: Quantization) -> list[ir.Node]:
    """The nodes that look up rows of embedding tables: constant matrices of many rows."""
    lookups = []
    for node in graph:
        table = node.inputs[0] if node.op_type == "Gather" and node.domain == "" else None
        if table is None or not table.is_initializer() or table.is_graph_input() or table.const_value is None:
            continue
        shape = table.const_value.shape.numpy()
        # a scale for each row needs rows: other axes and ranks are no tables of words
        wide = len(shape) == 2 and shape[0] >= _TABLE_ROWS and attribute(node, "axis", 0) == 0
        if wide and table.dtype == ir.DataType.FLOAT and not _is_excluded(node, table, settings.exclude):
            lookups.append(node)
    return lookups


def refuse_quantized(nodes: Iterable[Any]) -> None:
    """Refuse nodes, of a protobuf or a graph, of which one is quantized."""
    for node in nodes:
        if node.op_type in QUANTIZED:
            raise ModelError(
                f"the model is quantized already ({node.op_type} '{node.name}'): "
                "quantize the float model that it was made of",
                hint="name the float model",
            )


def refuse_convolutions(scheme: str, kernels: int, matrices: int) -> None:
    """Refuse to store matrices alone where most numbers are in the kernels of convolutions."""
    if kernels > matrices:
        raise ModelError(
            f"{scheme} stores matrices, and {kernels / (kernels + matrices):.0%} of this model's weights are in "
            "convolutions, for which onnxruntime has no such kernel: int8 with samples of the data suits them",
            hint="use --quantize int8 --data …",
        )


def _refuse_nothing(model: ir.Model, plan: Plan, settings: Quantization, *, calibrated: bool) -> None:
    kinds = {node.op_type for node in model.graph}
    weights = {product.weight: product.weight.const_value for product in plan.products}
    quantized = sum(tensor.size for tensor in weights.values() if tensor is not None)
    kernels = [node.inputs[1] for node in model.graph if node.op_type == "Conv"]
    unseen = sum(w.const_value.size for w in kernels if w is not None and w.const_value is not None)
    if not calibrated and unseen > quantized and settings.scheme in ("int8", "int8-static"):
        raise ModelError(
            f"{settings.scheme} of {len(kernels)} convolutions needs samples of the data, to find the ranges of their "
            "inputs: pass calibration=…",
            hint="name some with --data",
        )
    if settings.scheme in ("int8-weights", "int4"):
        refuse_convolutions(settings.scheme, unseen, quantized)
    if plan.products or (plan.tables and settings.scheme != "int8-static"):
        return
    raise ModelError(
        f"{settings.scheme}: the model has no Conv, MatMul or Gemm with a constant float32 weight to quantize; its "
        f"operators are {', '.join(sorted(kinds)[:8])}",
        hint="choose another --quantize, or leave it out",
    )
