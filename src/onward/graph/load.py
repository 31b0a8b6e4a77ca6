"""The one gate through which every model enters: a path, bytes, a ModelProto or an onnx-ir model.

What comes out is a model whose external data is safe to read, whose names are unique and all defined, and
whose nodes are sorted. Tensors in other files stay there until someone asks for their numbers. The caller's
object is never changed. Knows nothing of operators.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

import google.protobuf.message
import numpy as np
import onnx
import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.external import check_external, check_location, external_tensors, tensor_bytes
from onward.graph.nodes import subgraphs_of

__all__ = ["ModelSource", "load_model"]

ModelSource = str | os.PathLike[str] | bytes | onnx.ModelProto | ir.Model

# What a protobuf message can hold.
_LARGEST_FILE = 2**31 - 1


def load_model(source: ModelSource, *, base_dir: str | os.PathLike[str] | None = None) -> ir.Model:
    """Read a model; the caller owns the result and may change it.

    `base_dir` is where external data of bytes or a ModelProto lies; a path brings its own.

    >>> import onnx.parser
    >>> text = '<ir_version: 10, opset_import: ["": 21]> g (float[N] x) => (float[N] y) { y = Neg(x) }'
    >>> [node.op_type for node in load_model(onnx.parser.parse_model(text)).graph]
    ['Neg']
    """
    base = None if base_dir is None else Path(base_dir)
    if isinstance(source, ir.Model):
        _check_model_references(source)
        return _sorted(source.clone())
    if isinstance(source, onnx.ModelProto):
        proto, where = source, "the ModelProto"
    elif isinstance(source, bytes | bytearray | memoryview):
        where = "the bytes given"
        proto = _parse(bytes(source), where)
    elif isinstance(source, str | os.PathLike):
        path = Path(os.fsdecode(source))
        where = f"'{path}'"
        proto = _parse(_read(path), where)
        base = path.parent
    else:
        raise ModelError(
            "Please pass in either a string or an ONNX ModelProto for the model. "
            f"A path, bytes or an onnx_ir.Model will do too; this is a {type(source).__name__}."
        )
    _check_header(proto, where)
    external = list(external_tensors(proto))
    if external and base is None:
        raise ModelError(
            f"{where} refers to external data (tensor '{external[0].name}'): pass the path of the "
            "model file, or the directory of its data as base_dir"
        )
    for tensor in external:
        check_external(tensor, base or Path())
    _check_graph(proto.graph, frozenset(), where)
    try:
        model = ir.from_proto(proto)
    except Exception as error:
        raise ModelError(f"{where} is not a valid ONNX model: {error}") from error
    if base is not None:
        for holder in [model.graph, *(function.graph for function in model.functions.values())]:
            ir.external_data.set_base_dir(holder, os.path.realpath(base))
    _add_sparse(model, proto)
    _open_negative_sizes(model)
    return _sorted(model)


def _read(path: Path) -> bytes:
    try:
        # Asking for the kind first: opening a FIFO would wait for ever.
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise ModelError(f"'{path}' is not a file")
        if status.st_size > _LARGEST_FILE:
            raise ModelError(f"'{path}' has more than 2 GB: save the model with external data")
        return path.read_bytes()
    except FileNotFoundError:
        raise ModelError(f"no model file at '{path}'") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read the model file '{path}': {error}") from None


def _parse(data: bytes, where: str) -> onnx.ModelProto:
    if not data:
        raise ModelError(f"{where} is empty: not an ONNX model")
    if data[4:8] == b"ORTM":
        raise ModelError(
            f"{where} is in ORT format, which cannot be changed: use the .onnx file that it came from"
        )
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(data)
    except (google.protobuf.message.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise ModelError(f"{where} is not an ONNX model, or is cut short: {error}") from None
    return proto


def _check_header(proto: onnx.ModelProto, where: str) -> None:
    if not proto.HasField("graph"):
        raise ModelError(f"{where} is not an ONNX model: it holds no graph")
    if not proto.graph.output:
        raise ModelError(f"{where} is not a usable model: its graph has no outputs")
    if not proto.opset_import:
        raise ModelError(f"{where} is not a valid ONNX model: it names no opset")
    domains = [entry.domain if entry.domain != "ai.onnx" else "" for entry in proto.opset_import]
    if len(set(domains)) != len(domains):
        raise ModelError(f"{where} imports the same operator set twice: {sorted(domains)}")


def _check_graph(graph: onnx.GraphProto, outer: frozenset[str], where: str) -> None:
    """Unique definitions, every use defined, data as long as its shape says."""
    inputs = [value.name for value in graph.input]
    initializers = [tensor.name for tensor in graph.initializer]
    produced = [name for node in graph.node for name in node.output if name]
    _unique(inputs, "graph input", where)
    _unique(initializers, "initializer", where)
    _unique(produced, "node output", where)
    _unique([*produced, *set(inputs), *set(initializers) - set(inputs)], "value", where)
    if "" in initializers or "" in inputs:
        raise ModelError(f"{where} has an input or initializer without a name")
    for tensor in graph.initializer:
        _check_data(tensor, where)
    known = outer.union(inputs, initializers, produced)
    known = known.union(sparse.values.name for sparse in graph.sparse_initializer)
    for node in graph.node:
        if not node.op_type:
            raise ModelError(f"{where}: node '{node.name}' has no operator type")
        for name in node.input:
            if name and name not in known:
                raise ModelError(
                    f"{where}: {node.op_type} '{node.name}' uses '{name}', which nothing in the model defines"
                )
        for inner in _inner_graphs(node):
            _check_graph(inner, known, where)
    for value in graph.output:
        if outer and value.name in outer and value.name not in {*inputs, *initializers, *produced}:
            raise ModelError(
                f"{where}: a body returns '{value.name}' of the graph around it as it is, which ONNX does not allow; "
                "put an Identity between"
            )
        if value.name not in known:
            raise ModelError(f"{where}: the graph output '{value.name}' is defined by nothing in the model")


def _inner_graphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _unique(names: Iterable[str], kind: str, where: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ModelError(f"{where} defines the {kind} '{name}' twice")
        seen.add(name)


def _check_data(tensor: onnx.TensorProto, where: str) -> None:
    if tensor.data_type == onnx.TensorProto.STRING:
        return
    expected = tensor_bytes(tensor.dims, tensor.data_type, tensor.name)
    if tensor.data_location == onnx.TensorProto.EXTERNAL or not tensor.HasField("raw_data"):
        return
    if len(tensor.raw_data) != expected:
        raise ModelError(
            f"{where}: initializer '{tensor.name}' holds {len(tensor.raw_data)} bytes, "
            f"but its shape {list(tensor.dims)} and type need {expected}"
        )


def _check_model_references(model: ir.Model) -> None:
    for graph in model.graphs():
        held = [(value.name or "", value.const_value) for value in graph.initializers.values()]
        for node in graph:
            held += [
                (node.name or attr.name, attr.as_tensor())
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
    """onnx-ir leaves sparse initializers of the main graph out; here they become dense ones."""
    users = {
        value.name: value for node in model.graph.all_nodes() for value in node.inputs if value is not None
    }
    for sparse in proto.graph.sparse_initializer:
        dims = list(sparse.dims)
        count = tensor_bytes(dims, sparse.values.data_type, sparse.values.name)
        values = onnx.numpy_helper.to_array(sparse.values)
        if sparse.values.external_data or count > _LARGEST_FILE:
            raise ModelError(f"sparse initializer '{sparse.values.name}' is too large to be made dense")
        dense = np.zeros(dims, values.dtype)
        indices = onnx.numpy_helper.to_array(sparse.indices)
        try:
            if indices.ndim == 1:
                dense.reshape(-1)[indices] = values
            else:
                dense[tuple(indices.T)] = values
        except IndexError as error:
            raise ModelError(f"sparse initializer '{sparse.values.name}': {error}") from None
        value = users.get(sparse.values.name) or ir.Value(name=sparse.values.name)
        value.const_value = ir.tensor(dense, name=value.name)
        value.dtype, value.shape = value.const_value.dtype, ir.Shape(dims)
        model.graph.register_initializer(value)


def _open_negative_sizes(model: ir.Model) -> None:
    """Some exporters write −1 for a size that is not known."""
    for graph in model.graphs():
        for value in [*graph.inputs, *(output for node in graph for output in node.outputs)]:
            if value.shape is not None and any(isinstance(dim, int) and dim < 0 for dim in value.shape):
                value.shape = ir.Shape(
                    [None if isinstance(dim, int) and dim < 0 else dim for dim in value.shape]
                )


def _sorted(model: ir.Model) -> ir.Model:
    try:
        if not _in_order(model.graph, set()):
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
