"""Loads models as onnx-ir: from a path, bytes, a ModelProto or an onnx-ir model.

What is not an onnx-ir model yet passes the `gate`. The nodes of the result are sorted, sparse initializers are
dense, tensors in other files are read lazily. The caller owns the result, and its own object is never
changed.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.external import check_location, tensor_bytes
from onward.graph.gate import read_proto
from onward.graph.nodes import subgraphs_of

ModelSource = str | os.PathLike[str] | bytes | onnx.ModelProto | ir.Model


def load_model(
    source: ModelSource, *, base_dir: str | os.PathLike[str] | None = None, by_reference: bool = False
) -> ir.Model:
    """Read a model; the caller owns the result and may change it.

    `base_dir` is where external data of bytes or a ModelProto lies; a path brings its own. `by_reference` leaves
    the large tensors of a large file there, as external data.

    >>> import onnx.parser
    >>> text = '<ir_version: 10, opset_import: ["": 21]> g (float[N] x) => (float[N] y) { y = Neg(x) }'
    >>> [node.op_type for node in load_model(onnx.parser.parse_model(text)).graph]
    ['Neg']
    """
    if isinstance(source, ir.Model):
        _check_model_references(source)
        # The caller's own object stays as it is: passes work in place.
        return _sorted(source.clone())
    proto = read_proto(source, base_dir=base_dir, by_reference=by_reference)
    is_file = isinstance(source, str | os.PathLike)
    base = Path(os.fsdecode(source)).parent if is_file else None if base_dir is None else Path(base_dir)
    where = f"'{os.fsdecode(source)}'" if is_file else "the model"
    try:
        model = ir.from_proto(proto)
    except Exception as error:
        raise ModelError(f"{where} is not a valid ONNX model: {error}") from error
    if base is not None:
        for holder in [model.graph, *(function.graph for function in model.functions.values())]:
            # The real folder: what the gate has checked must be what is read later, wherever links then point.
            ir.external_data.set_base_dir(holder, os.path.realpath(base))
    _add_sparse(model, proto)
    _open_negative_sizes(model)
    return _sorted(model)


def _check_model_references(model: ir.Model) -> None:
    for graph in model.graphs():
        held = [(value.name or "", value.const_value) for value in graph.initializers.values()]
        for node in graph:
            held += [
                (node.name or attr.name, attr.value)
                for attr in node.attributes.values()
                if attr.type == ir.AttributeType.TENSOR and not attr.is_ref()
            ]
        for name, tensor in held:
            if isinstance(tensor, ir.ExternalTensor):
                check_location(
                    name,
                    os.fspath(tensor.location),
                    Path(tensor.base_dir),
                    offset=tensor.offset or 0,
                    length=tensor.length,
                    expected=tensor_bytes(tensor.shape.numpy(), tensor.dtype.value, name),
                )


def _add_sparse(model: ir.Model, proto: onnx.ModelProto) -> None:
    """onnx-ir drops sparse initializers of the main graph; here they become dense ones."""
    users = {
        value.name: value for node in model.graph.all_nodes() for value in node.inputs if value is not None
    }
    for sparse in proto.graph.sparse_initializer:
        dims = list(sparse.dims)
        values = onnx.numpy_helper.to_array(sparse.values)
        dense = np.zeros(dims, values.dtype)
        indices = onnx.numpy_helper.to_array(sparse.indices)
        if indices.ndim == 1:
            dense.reshape(-1)[indices] = values
        else:
            dense[tuple(indices.T)] = values
        value = users.get(sparse.values.name) or ir.Value(name=sparse.values.name)
        value.const_value = ir.tensor(dense, name=value.name)
        value.dtype, value.shape = value.const_value.dtype, ir.Shape(dims)
        model.graph.register_initializer(value)


def _open_negative_sizes(model: ir.Model) -> None:
    """Replace −1, which some exporters write for an unknown size."""
    for graph in model.graphs():
        for value in [*graph.inputs, *(output for node in graph for output in node.outputs)]:
            if value.shape is not None and any(isinstance(dim, int) and dim < 0 for dim in value.shape):
                value.shape = ir.Shape(
                    [None if isinstance(dim, int) and dim < 0 else dim for dim in value.shape]
                )


def _sorted(model: ir.Model) -> ir.Model:
    try:
        if not _in_order(model.graph, set()):
            # Only where it is needed: sorting also changes the order among nodes that were in order.
            model.graph.sort()
        for function in model.functions.values():
            function.sort()
    except ValueError as error:
        raise ModelError(f"the model's nodes form a cycle: {error}") from None
    return model


def _in_order(graph: ir.Graph, done: set[ir.Node]) -> bool:
    """Whether each node comes after those whose results it or its bodies read: sorting takes a while."""
    for node in graph:
        for value in node.inputs:
            if value is not None and (producer := value.producer()) is not None and producer not in done:
                return False
        if not all(_in_order(inner, done) for inner in subgraphs_of(node)):
            return False
        done.add(node)
    return True
