"""Low-rank adapters: y = x·W becomes y + s·(x·Aᵀ)·Bᵀ, with W left as it is; and back into W.

Finds the weights of MatMul, Gemm and 1x1 Conv, also through a Transpose or a dequantization, and adds nodes
beside the product. Metadata marks each sum, so that merging finds it. Independent of training.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onward import contract
from onward.errors import ModelError
from onward.graph.builder import Builder
from onward.graph.cleanup import remove_unused
from onward.graph.compute import run_reference
from onward.graph.nodes import new_initializer, producer_of, required_input, subgraphs_of
from onward.model_metadata import read_table

_NOTE = contract.LORA
# what may stand between a stored weight and the product that reads it
_PATH = frozenset({"Transpose", "Identity", "Cast", "DequantizeLinear", "Slice", "Reshape", "Sub"})
_PACKED = "MatMulNBits"
_SUFFIX = re.compile(r"(_quantized|_as_\dbit|_(DQ_)?[Qq]\d+\w*)+$")
# weights that say nothing of the module they belong to: numbers of an exporter, and tables that another layer shares
_UNNAMED = re.compile(
    r"(onnx::\w+|val_\d+|\d+)$|(.*\.)?(embed\w*|\w*_embeddings?|wte|shared)\.weight(\.transposed)?$"
)
_OPERATOR = re.compile(r"(MatMul|Gemm|Conv|Transpose|DequantizeLinear)[A-Z]*(_\w*)?$")


@dataclasses.dataclass(frozen=True)
class LoRA:
    """What to adapt and how: `targets` are names or patterns of weights (or of the nodes that read them).

    The product is scaled by alpha / rank; `dropout` is that of the adapters' input while training.
    """

    rank: int = 8
    alpha: float = 16.0
    targets: str | Sequence[str] = "*"
    dropout: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank is {self.rank}: it must be 1 or more")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout is {self.dropout}: it must be 0 or more, and less than 1")


@dataclasses.dataclass(frozen=True)
class _Product:
    """A node that multiplies by a stored weight, and the graph it is in."""

    node: ir.Node
    weight: ir.Value
    label: str
    inputs: int
    outputs: int
    parts: tuple[tuple[str, int], ...] = ()


def add_adapters(
    model: ir.Model, lora: LoRA, *, joined: Mapping[str, Sequence[int]] | None = None
) -> list[str]:
    """Add adapters to the targeted products, in place; returns the names of the new parameters.

    The model must be in the dialect, or have its weights in onnxruntime's packed products. B starts at zero, so that
    outputs do not change at first. `joined` has the sizes of queries, keys and values in products that compute all
    three (see `joined_projections`): each can then be a target of its own.
    """
    op = Builder(model.graph)
    products = [
        (inner, product)
        for inner, graph in _graphs(op, model.graph)
        for product in _with_parts(_products(graph), joined or {})
    ]
    patterns = [lora.targets] if isinstance(lora.targets, str) else list(lora.targets)
    chosen = [
        (inner, product)
        for inner, product in products
        if any(_matches(product, p) or _matching_parts(product, [p]) for p in patterns)
    ]
    for pattern in patterns:
        if not any(
            _matches(product, pattern) or _matching_parts(product, [pattern]) for _, product in products
        ):
            names = sorted({product.label for _, product in products})
            shown = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
            raise ModelError(
                f"LoRA: '{pattern}' matches no weight of a MatMul, Gemm or 1x1 Conv; the model has {shown or 'none'}",
                hint="name weights or patterns, such as 'encoder.*'",
            )
    adapters: dict[str, tuple[ir.Value, ir.Value]] = {}
    following = _successors(graph for _, graph in _graphs(op, model.graph))
    for inner, product in chosen:
        whole = any(_matches(product, pattern) for pattern in patterns)
        targeted = [product] if whole else _matching_parts(product, patterns)
        for target in targeted:
            if target.label not in adapters:
                adapters[target.label] = _parameters(op, target, lora)
            if op.static_shape(adapters[target.label][0]) != _a_shape(target, lora):
                raise ModelError(f"LoRA: '{target.label}' is used in two shapes; leave it out of the targets")
        inner.before = following[product.node]
        if whole:
            _attach(inner, product, [(adapters[product.label], product.outputs)], lora)
        else:
            _attach(inner, product, [(adapters.get(label), size) for label, size in product.parts], lora)
    return [value.name or "" for pair in adapters.values() for value in pair]


def adaptable(model: ir.Model, *, joined: Mapping[str, Sequence[int]] | None = None) -> list[str]:
    """The names of what adapters can stand beside: weights, and parts of weights that `joined` has the sizes of."""
    products = [
        product
        for _, graph in _graphs(Builder(model.graph), model.graph)
        for product in _with_parts(_products(graph), joined or {})
    ]
    parts = [label for product in products for label, _ in product.parts]
    return list(dict.fromkeys([*(product.label for product in products), *parts]))


def joined_projections(model: ir.Model) -> dict[str, tuple[int, int, int]]:
    """Sizes of queries, keys and values in weights that compute all three for onnxruntime's attention, by name.

    Looks at a model as it is published, before its attention is written in standard operators.
    """
    sizes = {}
    for node in model.graph:
        if node.op_type != "GroupQueryAttention" or node.inputs[0] is None or node.inputs[1] is not None:
            continue
        value = node.inputs[0]
        while source := producer_of(value, "Add", "Identity"):
            value = source.inputs[0]
        source = producer_of(value, "MatMul", "Gemm", _PACKED)
        product = None if source is None else next(iter(_products([source])), None)
        queries, keys = (node.attributes.get_int(name, 0) for name in ("num_heads", "kv_num_heads"))
        if product is not None and queries and keys and product.outputs % (queries + 2 * keys) == 0:
            size = product.outputs // (queries + 2 * keys)
            sizes[product.label] = (queries * size, keys * size, keys * size)
    return sizes


def merge_adapters(model: ir.Model, *, dequantize: bool = False) -> ir.Model:
    """Merge adapters into the weights that they adapt, in place; returns the model.

    Adapters of quantized weights stay separate, unless `dequantize` converts these weights to float.
    """
    op = Builder(model.graph)
    replaced: list[tuple[str, ir.Value]] = []
    merged: dict[tuple[ir.Value | None, str], ir.Value] = {}
    for inner, graph in _graphs(op, model.graph):
        for node in list(graph):
            if _NOTE in node.metadata_props:
                replaced += _merge(op, inner, node, dequantize, merged)
    remove_unused(model)
    for name, weight in replaced:
        if name not in model.graph.initializers:  # nothing else reads the old one
            weight.name = name
    return model


# ---- finding ---------------------------------------------------------------------------------------


def _graphs(op: Builder, graph: ir.Graph) -> Iterator[tuple[Builder, ir.Graph]]:
    yield op, graph
    for node in list(graph):
        for inner in subgraphs_of(node):
            yield from _graphs(Builder(inner, parent=op), inner)


def _successors(graphs: Iterable[ir.Graph]) -> dict[ir.Node, ir.Node | None]:
    """The node after each node of its graph."""
    lists = [list(graph) for graph in graphs]
    return {node: after for nodes in lists for node, after in zip(nodes, [*nodes[1:], None])}


def _products(graph: Iterable[ir.Node]) -> Iterator[_Product]:
    for node in list(graph):
        if (
            node.domain == "com.microsoft" and node.op_type == _PACKED
        ):  # of a model that is not in the dialect
            if (weight := _stored(node.inputs[1])) is not None:
                inputs, outputs = (node.attributes.get_int(name, 0) for name in ("K", "N"))
                yield _Product(node, weight, _label(node, weight), inputs, outputs)
            continue
        if node.domain != "" or node.op_type not in ("MatMul", "Gemm", "Conv") or len(node.inputs) < 2:
            continue
        operand = node.inputs[1]
        weight = _stored(operand)
        dims = None if operand is None or operand.shape is None else list(operand.shape)
        if weight is None or dims is None or not all(isinstance(dim, int) for dim in dims):
            continue
        sizes = [int(dim) for dim in dims]  # type: ignore[arg-type]
        if node.op_type == "Conv":
            plain = len(sizes) > 2 and node.attributes.get_int("group", 1) == 1
            if not plain or any(size != 1 for size in sizes[2:]):
                continue
            outputs, inputs = sizes[:2]
        elif len(sizes) != 2:
            continue
        else:
            inputs, outputs = sizes
            if node.op_type == "Gemm" and node.attributes.get_int("transB", 0):
                inputs, outputs = outputs, inputs
        yield _Product(node, weight, _label(node, weight), inputs, outputs)


def _label(node: ir.Node, weight: ir.Value) -> str:
    """The weight's name, without what quantization adds; by its node where it has none of this module."""
    # A quantized base and its float original get adapters of the same names, which then fit both.
    label = _SUFFIX.sub("", weight.name or "")
    path = [part for part in (node.name or "").strip("/").split("/") if not _OPERATOR.match(part)]
    module = ".".join(path)
    if not module or not (node.name or "").startswith("/") or not _UNNAMED.match(label):
        return label
    return label if label.startswith(f"{module}.") else f"{module}.weight"


def _with_parts(products: Iterable[_Product], joined: Mapping[str, Sequence[int]]) -> Iterator[_Product]:
    for product in products:
        sizes = joined.get(product.label)
        stem = next((name for name in ("qkv_proj", "qkv") if name in product.label), None)
        if sizes is None or stem is None or sum(sizes) != product.outputs:
            yield product
            continue
        named = [product.label.replace(stem, f"{letter}_proj") for letter in "qkv"]
        yield dataclasses.replace(product, parts=tuple(zip(named, sizes)))


def _matching_parts(product: _Product, patterns: Sequence[str]) -> list[_Product]:
    return [
        dataclasses.replace(product, label=label, outputs=size, parts=())
        for label, size in product.parts
        if any(label == pattern or fnmatch.fnmatchcase(label, pattern) for pattern in patterns)
    ]


def _stored(value: ir.Value | None) -> ir.Value | None:
    """The initializer that a product's operand is made of."""
    while value is not None and not value.is_initializer():
        producer = value.producer()
        if producer is None or producer.op_type not in _PATH or producer.domain != "":
            return None
        value = producer.inputs[0]
    return None if value is None or value.is_graph_input() else value


def _matches(product: _Product, pattern: str) -> bool:
    if product.parts and "qkv" not in pattern:  # queries, keys and values are targets of their own
        return False
    names = (product.label, product.weight.name or "", product.node.name or "")
    return any(name == pattern or fnmatch.fnmatchcase(name, pattern) for name in names)


# ---- adding ----------------------------------------------------------------------------------------


def _a_shape(product: _Product, lora: LoRA) -> tuple[int, ...]:
    return (lora.rank, product.inputs, *_ones(product))


def _ones(product: _Product) -> tuple[int, ...]:
    """The kernel's spatial dimensions, all of size 1."""
    operand = product.node.inputs[1]
    assert operand is not None and operand.shape is not None
    return (1,) * (operand.shape.rank() - 2) if product.node.op_type == "Conv" else ()


def _parameters(op: Builder, product: _Product, lora: LoRA) -> tuple[ir.Value, ir.Value]:
    """A [rank, in], uniform in ±1/√in and the same in every run; B [out, rank], zeros"""
    # Python's own hash of a string differs between runs
    rng = np.random.default_rng([lora.seed, zlib.crc32(product.label.encode())])
    limit = 1.0 / np.sqrt(product.inputs)
    first = rng.uniform(-limit, limit, _a_shape(product, lora)).astype(np.float32)
    # The paper's start: B = 0, so that the first step begins at the base's own loss.
    second = np.zeros((product.outputs, lora.rank, *_ones(product)), np.float32)
    a, b = f"{product.label}.lora_a", f"{product.label}.lora_b"
    return _initializer(op, a, first), _initializer(op, b, second)


def _initializer(op: Builder, name: str, data: np.ndarray) -> ir.Value:
    if name in op.graph.initializers:
        raise ModelError(f"LoRA: the model has a '{name}' already; merge its adapters first")
    return new_initializer(op.graph, op.namer(name), ir.tensor(data))


def _attach(
    op: Builder,
    product: _Product,
    adapters: Sequence[tuple[tuple[ir.Value, ir.Value] | None, int]],
    lora: LoRA,
) -> None:
    """Adds what the adapters of a product compute to its result: one for all columns, or one for each part of them."""
    node, result = product.node, product.node.outputs[0]
    op.scope = f"{node.name or node.op_type}/lora"
    x = required_input(node)
    # A file that is not in the dialect says nothing of the types inside; the scales of a packed weight do.
    scales = node.inputs[2] if node.op_type == _PACKED else None
    dtype = op.dtype(x if scales is None else scales)
    x.dtype, result.dtype = x.dtype or dtype, result.dtype or dtype
    if dtype != ir.DataType.FLOAT:
        x = op.Cast(x, to=ir.DataType.FLOAT)
    if lora.dropout:
        # peft's place for it: before A, and not on what the base computes.
        x = op.Dropout(x, np.float32(lora.dropout), np.bool_(True))
    scale = lora.alpha / lora.rank
    if node.op_type == "Gemm":
        scale *= node.attributes.get_float("alpha", 1.0)
        if node.attributes.get_int("transA", 0):
            x = op.Transpose(x, perm=[1, 0])
    added_parts = []
    for adapter, size in adapters:
        if adapter is None:
            # Columns without an adapter get zeros, so that one Add serves them all.
            rows = op.node("Shape", [x], {"end": -1})[0]
            shape = op.Concat(rows, [size], axis=0)
            added_parts.append(op.Expand(np.float32(0.0), shape))
            continue
        a, b = adapter
        if node.op_type == "Conv":
            copied = ("auto_pad", "pads", "strides")
            same = {name: node.attributes[name] for name in copied if name in node.attributes}
            low = op.node("Conv", [x, a], dict(same))[0]
            added_parts.append(op.Conv(op.Mul(low, scale), b))
        else:
            low = op.MatMul(x, op.Transpose(a, perm=[1, 0]))
            added_parts.append(op.MatMul(op.Mul(low, scale), op.Transpose(b, perm=[1, 0])))
    added = added_parts[0] if len(added_parts) == 1 else op.Concat(*added_parts, axis=-1)
    if dtype != ir.DataType.FLOAT:
        added = op.Cast(added, to=dtype)
    users, is_result = list(result.uses()), result.is_graph_output()
    total = op.Add(result, added)
    # In the file: merging may be years later, by a program that never saw the settings.
    note: dict[str, Any] = {"weight": product.weight.name, "scale": lora.alpha / lora.rank}
    if len(adapters) == 1 and adapters[0][0] is not None:
        note |= {"a": adapters[0][0][0].name, "b": adapters[0][0][1].name}
    else:
        note["parts"] = [
            [size] if pair is None else [size, pair[0].name, pair[1].name] for pair, size in adapters
        ]
    producer = total.producer()
    assert producer is not None
    producer.metadata_props[_NOTE] = json.dumps(note)
    total.shape = result.shape
    for user, index in users:
        user.replace_input_with(index, total)
    if is_result:
        total.name, result.name = result.name, op.namer(f"{result.name}.base")
        op.graph.outputs[op.graph.outputs.index(result)] = total
    op.before, op.scope = None, ""


# ---- merging ---------------------------------------------------------------------------------------


def _merge(
    root: Builder,
    op: Builder,
    total: ir.Node,
    dequantize: bool,
    merged: dict[tuple[ir.Value | None, str], ir.Value],
) -> list[tuple[str, ir.Value]]:
    """Merges one adapted product; returns the weight that it read as stored, by name, and the new one."""
    note = read_table(total.metadata_props, _NOTE)
    base = total.inputs[0]
    node = producer_of(base)
    if base is None or node is None or node.inputs[1] is None:
        raise ModelError(f"LoRA: the product that '{total.name}' adapts is gone: merge before other changes")
    if node.op_type == _PACKED:
        return []
    # two branches of a decoder read one weight, and share what it becomes
    key = (node.inputs[1], total.metadata_props[_NOTE])
    operand, weight = node.inputs[1], merged.get(key) or _merged_weight(root, node, note, dequantize)
    if weight is None:
        return []
    merged[key] = weight
    node.replace_input_with(1, weight)
    result = total.outputs[0]
    name, was_result = result.name, result.is_graph_output()
    ir.convenience.replace_all_uses_with(result, base, replace_graph_outputs=True)
    op.graph.remove(total, safe=True)
    if was_result:
        base.name = name
    return [(operand.name or "", weight)] if operand.is_initializer() else []


def _merged_weight(
    root: Builder, node: ir.Node, note: Mapping[str, Any], dequantize: bool
) -> ir.Value | None:
    """The weight of a product with what its adapters add; None for a quantized one that is to stay so."""
    changes = [
        np.zeros((entry[0], 1)) if len(entry) == 1 else _change(root, *entry[1:])
        for entry in note.get("parts") or [[0, note["a"], note["b"]]]
    ]
    inputs = max(change.shape[1] for change in changes)
    delta = note["scale"] * np.concatenate(  # [out, in]
        [np.broadcast_to(change, (len(change), inputs)) for change in changes]
    )
    if node.op_type == "MatMul" or (node.op_type == "Gemm" and not node.attributes.get_int("transB", 0)):
        delta = delta.T
    current = _computed(node.inputs[1], dequantize)
    if current is None:
        return None
    # in float64, so that the sum is rounded once
    merged = (current.astype(np.float64) + delta.reshape(current.shape)).astype(current.dtype)
    # Another layer may read the weight without an adapter (tied embeddings): it keeps the old one.
    name = root.namer(f"{note['weight']}.merged")
    return new_initializer(root.graph, name, ir.tensor(np.ascontiguousarray(merged)))


def _change(root: Builder, first: str, second: str) -> np.ndarray:
    """B·A [out, in] of one adapter"""
    a, b = (root.const_value(root.graph.initializers.get(name)) for name in (first, second))
    if a is None or b is None:
        raise ModelError(
            f"LoRA: '{first}' and '{second}' have no values in this model: "
            "export it for inferencing first, which puts the parameters inside"
        )
    a, b = (tensor.reshape(tensor.shape[:2]).astype(np.float64) for tensor in (a, b))
    return b @ a


def _computed(value: ir.Value | None, dequantize: bool) -> np.ndarray | None:
    """The numbers of a product's operand; None for quantized ones that are to stay so."""
    if value is None:
        return None
    if value.is_initializer():
        return None if value.const_value is None or value.is_graph_input() else value.const_value.numpy()
    producer = value.producer()
    if producer is None or (producer.op_type not in ("Transpose", "Identity") and not dequantize):
        return None
    feeds: list[np.ndarray | None] = []
    for operand in producer.inputs:
        numbers = _computed(operand, dequantize)
        if operand is not None and numbers is None:
            return None
        feeds.append(numbers)
    # The weight as its product reads it: transposed, and dequantized where that is asked for.
    results = run_reference(ir.to_proto(producer), feeds)
    if results is None:
        raise ModelError(
            f"LoRA: {producer.op_type} '{producer.name}', which makes a weight, cannot be computed"
        )
    return results[0]
