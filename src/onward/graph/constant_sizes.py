"""How large the constants of a model grow before it runs, found without computing them.

The runtime computes what depends on constants alone when it loads a model: 34 Concats of a value with itself turn
one number into 64 GB. Here sizes are followed instead, node by node, through functions and bodies; only values of
a few numbers are computed, since shapes depend on them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx

from onward.errors import ModelError
from onward.graph.compute import compute, run_reference
from onward.graph.external import tensor_bytes, tensors
from onward.graph.protobuf import attributes_of, inner_graphs
from onward.limits import current, require

_SMALL = 1024
# What a runtime never computes ahead, or what is another value at each run.
_LEFT = frozenset(
    {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial", "Bernoulli"}
    | {"Dropout", "If", "Loop", "Scan", "SequenceMap"}
)
Functions = Mapping[tuple[str, str, str], onnx.FunctionProto]


@dataclass
class _Constant:
    """A value that depends on constants alone: its type, and its numbers where they are few."""

    type: onnx.TypeProto | None
    tensor: onnx.TensorProto | None = None


def check_constants(proto: onnx.ModelProto, functions: Functions, where: str) -> None:
    """Refuse a model whose constants grow past the limit, which counts from 16 times the size of its data."""
    # a model of large weights may make as much of them again
    held = sum(_bytes(tensor.dims, tensor.data_type) for tensor in tensors(proto))
    budget = _Budget(where, allowance=16 * held)
    imports = list(proto.opset_import)
    _Walk(functions, imports, proto.ir_version, budget).graph(proto.graph, {})


class _Budget:
    def __init__(self, where: str, *, allowance: int) -> None:
        self._where, self._allowance, self._spent = where, allowance, 0

    def spend(self, size: int, node: onnx.NodeProto) -> None:
        self._spent += size
        require(
            "folded_bytes",
            self._spent - self._allowance,
            f"{self._where}: what {node.op_type} '{node.name}' and others make of constants, in bytes,",
        )


@dataclass
class _Walk:
    functions: Functions
    imports: list[onnx.OperatorSetIdProto]
    ir_version: int
    budget: _Budget

    @functools.cached_property
    def opset(self) -> int:
        """The version of the standard operators; the newest where none is imported."""
        versions = (entry.version for entry in self.imports if entry.domain in ("", "ai.onnx"))
        return next(versions, 0) or onnx.defs.onnx_opset_version()

    def graph(self, graph: onnx.GraphProto, outer: Mapping[str, _Constant]) -> None:
        constants = dict(outer)
        inputs = {value.name for value in graph.input}
        for name in inputs:
            constants.pop(name, None)
        for tensor in graph.initializer:
            if tensor.name not in inputs:
                constants[tensor.name] = _held(tensor)
        self.nodes(graph.node, constants)

    def nodes(self, nodes: Iterable[onnx.NodeProto], constants: dict[str, _Constant]) -> None:
        """Follow constants through nodes in whatever order they are written."""
        listed = list(nodes)
        # Files that are not sorted are legal to some readers, so the order cannot be relied on to stop a bomb.
        missing = [{name for name in node.input if name and name not in constants} for node in listed]
        readers: dict[str, list[int]] = {}
        for index, names in enumerate(missing):
            for name in names:
                readers.setdefault(name, []).append(index)
        ready = [i for i, names in enumerate(missing) if not names and listed[i].op_type not in _LEFT]
        while ready:
            node = listed[ready.pop()]
            self._follow(node, constants)
            for name in node.output:
                if name in constants:
                    for reader in readers.pop(name, ()):
                        missing[reader].discard(name)
                        if not missing[reader] and listed[reader].op_type not in _LEFT:
                            ready.append(reader)
        for node in listed:
            for inner in inner_graphs(node):
                self.graph(inner, constants)

    def _follow(self, node: onnx.NodeProto, constants: dict[str, _Constant]) -> None:
        domain = "" if node.domain == "ai.onnx" else node.domain
        function = self.functions.get((domain, node.op_type, node.overload))
        if function is not None:
            self._call(function, node, constants)
            return
        if node.op_type == "Constant" and domain == "":
            constants[node.output[0]] = _of_attribute(node)
            return
        if domain != "":
            return
        types = self._infer(node, constants)
        for name in node.output:
            if not name:
                continue
            kind = types.get(name)
            constants[name] = _Constant(kind)
            size = _size(kind)
            if size:
                self.budget.spend(size, node)
        self._compute(node, constants)

    def _call(
        self, function: onnx.FunctionProto, node: onnx.NodeProto, constants: dict[str, _Constant]
    ) -> None:
        inner = {name: constants[argument] for name, argument in zip(function.input, node.input) if argument}
        # A function has opsets of its own: Split of 13 and of 18 grow differently.
        imports = list(function.opset_import) or self.imports
        _Walk(self.functions, imports, self.ir_version, self.budget).nodes(function.node, inner)
        for name, result in zip(node.output, function.output):
            if result in inner and name:
                constants[name] = inner[result]

    def _infer(
        self, node: onnx.NodeProto, constants: Mapping[str, _Constant]
    ) -> Mapping[str, onnx.TypeProto]:
        inputs = {name: constants[name] for name in node.input if name}
        try:
            schema = onnx.defs.get_schema(node.op_type, self.opset, "")
            return onnx.shape_inference.infer_node_outputs(
                schema,
                node,
                {name: constant.type for name, constant in inputs.items() if constant.type is not None},
                {name: constant.tensor for name, constant in inputs.items() if constant.tensor is not None},
                opset_imports=self.imports,
                ir_version=min(max(self.ir_version, 3), 10),
            )
        except Exception:  # what is wrong with a node is said by those who run it
            return {}

    def _compute(self, node: onnx.NodeProto, constants: dict[str, _Constant]) -> None:
        """The numbers of a node's only output, where it and all inputs are small whole numbers."""
        if len(node.output) != 1 or len(node.attribute) > 8:
            return
        target = constants[node.output[0]]
        held = {name: constants[name].tensor for name in node.input if name}
        sizes = [_count(target.type), *(_count(constants[name].type) for name in held)]
        if any(size is None or size > _SMALL for size in sizes):
            return
        if target.type is None or target.type.tensor_type.elem_type not in (_INT32, _INT64, _BOOL):
            return
        feeds: list[np.ndarray | None] = []
        for name in node.input:
            tensor = held[name] if name else None
            if name and tensor is None:
                return
            feeds.append(None if tensor is None else onnx.numpy_helper.to_array(tensor))
        outputs = compute(node.op_type, attributes_of(node), feeds) or run_reference(node, feeds, self.opset)
        if outputs is not None:
            target.tensor = onnx.numpy_helper.from_array(outputs[0])


_INT32, _INT64, _BOOL = onnx.TensorProto.INT32, onnx.TensorProto.INT64, onnx.TensorProto.BOOL


def _held(tensor: onnx.TensorProto) -> _Constant:
    kind = onnx.helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))
    # In floats: a product of hostile dims wraps around in int64.
    small = int(np.prod(tensor.dims, dtype=np.float64)) <= _SMALL and not tensor.external_data
    return _Constant(kind, tensor if small else None)


def _of_attribute(node: onnx.NodeProto) -> _Constant:
    """The value of a Constant node."""
    for attribute in node.attribute:
        if attribute.name == "value" and attribute.HasField("t"):
            return _held(attribute.t)
        if attribute.name in ("value_int", "value_ints"):
            numbers = attribute.i if attribute.name == "value_int" else list(attribute.ints)
            return _held(onnx.numpy_helper.from_array(np.array(numbers, np.int64)))
        if attribute.name in ("value_float", "value_floats"):
            numbers = attribute.f if attribute.name == "value_float" else list(attribute.floats)
            return _held(onnx.numpy_helper.from_array(np.array(numbers, np.float32)))
    return _Constant(None)


def _count(kind: onnx.TypeProto | None) -> int | None:
    """How many numbers a value of this type has; None where that is not known."""
    if kind is None or not kind.HasField("tensor_type") or not kind.tensor_type.HasField("shape"):
        return None
    total = 1
    for dim in kind.tensor_type.shape.dim:
        if not dim.HasField("dim_value"):
            return None
        total *= max(dim.dim_value, 0)
    return total


def _size(kind: onnx.TypeProto | None) -> int | None:
    count = _count(kind)
    if count is None or kind is None:
        return None
    return _bytes([min(count, 2**60)], kind.tensor_type.elem_type)


def _bytes(dims: Iterable[int], dtype: int) -> int:
    try:
        return tensor_bytes(dims, dtype, "")
    except ModelError:
        return 0 if dtype == onnx.TensorProto.STRING else current().folded_bytes * 64
