"""The one gate through which every model enters: a file, bytes or a ModelProto, checked before anyone uses it.

A model is input from strangers. What passes here is a model whose data is as long as its shapes say and lies in
the file or in plain files beside it, whose names are unique and all defined, whose operators have the inputs and
attributes that ONNX gives them, and which asks for no more than `onward.limits` allows. Works on protobuf, so
that a device that only trains loads nothing more; `load` makes an onnx-ir model of the result.
"""

from __future__ import annotations

import functools
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import google.protobuf.message
import onnx

from onward.contract import OPSET
from onward.errors import LimitError, ModelError
from onward.graph.constant_sizes import check_constants
from onward.graph.external import check_external, external_range, external_tensors, tensor_bytes, tensors
from onward.graph.protobuf import inner_graphs
from onward.graph.tensor_references import parse_with_references
from onward.limits import current, require
from onward.reading import read_bytes

ProtoSource = str | os.PathLike[str] | bytes | onnx.ModelProto

# What a protobuf message can hold.
_LARGEST_FILE = 2**31 - 1
# What an array of numpy 1 can have.
_MOST_DIMENSIONS = 32
_TENSOR = onnx.TensorProto
_FIELDS = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data", "string_data")
# where a tensor of a type keeps its numbers, and how many entries one takes
_HELD: dict[int, tuple[str, int]] = {
    _TENSOR.FLOAT: ("float_data", 1),
    _TENSOR.COMPLEX64: ("float_data", 2),
    _TENSOR.DOUBLE: ("double_data", 1),
    _TENSOR.COMPLEX128: ("double_data", 2),
    _TENSOR.INT64: ("int64_data", 1),
    _TENSOR.UINT32: ("uint64_data", 1),
    _TENSOR.UINT64: ("uint64_data", 1),
    _TENSOR.STRING: ("string_data", 1),
}


def read_proto(
    source: ProtoSource,
    *,
    base_dir: str | os.PathLike[str] | None = None,
    what: str = "",
    read_data: bool = True,
    by_reference: bool = False,
) -> onnx.ModelProto:
    """A model that passed the gate; a ModelProto that is given is returned as it is.

    `base_dir` is where external data of bytes or a ModelProto lies; a path brings its own. `what` names the
    model's role in messages ("training model"). `read_data=False` is for those who only look at the graph: data
    files need not be there. `by_reference` leaves large tensors of a large file where they are: they become
    references to external data in that file.

    >>> import onnx.parser
    >>> text = '<ir_version: 10, opset_import: ["": 21]> g (float[N] x) => (float[N] y) { y = Neg(x) }'
    >>> len(read_proto(onnx.parser.parse_model(text)).graph.node)
    1
    """
    base = None if base_dir is None else Path(base_dir)
    role = what or "model"
    if isinstance(source, onnx.ModelProto):
        proto, where = source, f"the {what} given as a ModelProto" if what else "the ModelProto"
    elif isinstance(source, bytes | bytearray | memoryview):
        where = f"the {what} given as bytes" if what else "the model given as bytes"
        proto = _parse(bytes(source), where)
    elif isinstance(source, str | os.PathLike):
        path = Path(os.fsdecode(source))
        where = f"'{path}'"
        proto = (parse_with_references(path) if by_reference else None) or _parse(_read(path, role), where)
        base = path.parent
    else:
        raise ModelError(
            "Please pass in either a string or an ONNX ModelProto for the model. "
            f"A path, bytes or an onnx_ir.Model will do too; this is of type {type(source).__name__}."
        )
    # From the cheap to the expensive: each check may rely on what those before it refused.
    _check_header(proto, where)
    if read_data:
        _check_external_data(proto, base, where)
    functions = _functions(proto, where)
    _check_size(proto, functions, where)
    for tensor in tensors(proto):
        _check_data(tensor, where)
    _check_sparse(proto, where)
    _check_graph(proto.graph, frozenset(), _Scope(where, _versions(proto.opset_import), functions))
    for function in proto.functions:
        _check_function(function, functions, where)
    check_constants(proto, functions, where)
    return proto


def read_with_data(source: ProtoSource) -> onnx.ModelProto:
    """A model that passed the gate, with the data of files beside it read into it."""
    proto = read_proto(source)
    if isinstance(source, str | os.PathLike) and any(True for _ in external_tensors(proto)):
        onnx.load_external_data_for_model(proto, os.fspath(Path(os.fsdecode(source)).parent))
    return proto


def _read(path: Path, role: str) -> bytes:
    try:
        return read_bytes(path, limit="model_bytes")
    except LimitError as error:
        # No limit of ours can be raised past what protobuf reads.
        if error.asked > _LARGEST_FILE:
            raise ModelError(f"'{path}' has more than 2 GB: save the model with external data") from None
        raise
    except FileNotFoundError:
        raise ModelError(f"no {role if role != 'model' else 'model file'} at '{path}'") from None
    except IsADirectoryError:
        raise ModelError(f"cannot read the {role} '{path}': it is a folder, not a file") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ModelError(f"cannot read the {role} '{path}': {reason}") from None


def _parse(data: bytes, where: str) -> onnx.ModelProto:
    if not data:
        raise ModelError(f"{where} is not an ONNX model: it is empty", hint="is the file whole?")
    # FlatBuffers puts its file identifier behind the root's offset.
    if data[4:8] == b"ORTM":
        raise ModelError(
            f"{where} is in ORT format, which cannot be changed: use its .onnx twin: keep the .onnx file beside it",
            hint="use the .onnx file that it came from",
        )
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(data)
    except (google.protobuf.message.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise ModelError(
            f"{where} is not an ONNX model, or is cut short: {error}",
            hint="export one first: onward export --help",
        ) from None
    return proto


def _check_header(proto: onnx.ModelProto, where: str) -> None:
    if not proto.HasField("graph"):
        raise ModelError(
            f"{where} is not an ONNX model: it holds no graph", hint="export one first: onward export --help"
        )
    if not proto.graph.output:
        raise ModelError(f"{where} is not an ONNX model that can be used: its graph has no outputs")
    if not proto.opset_import:
        raise ModelError(f"{where} is not a valid ONNX model: it names no opset")
    _require_text((entry.domain for entry in proto.opset_import), where)
    _require_text((text for entry in proto.metadata_props for text in (entry.key, entry.value)), where)
    # "" and "ai.onnx" are one domain: of two versions, nothing says which one counts.
    domains = [_domain(entry.domain) for entry in proto.opset_import]
    if len(set(domains)) != len(domains):
        raise ModelError(f"{where} imports the same operator set twice: {sorted(domains)}")
    keys = [entry.key for entry in proto.metadata_props]
    if len(set(keys)) != len(keys):
        raise ModelError(f"{where} has the same metadata key twice")


def _require_text(names: Iterable[object], where: str) -> None:
    """Refuse names that are not UTF-8, which protobuf gives out as bytes."""
    for name in names:
        if not isinstance(name, str):
            raise ModelError(f"{where} is not a valid ONNX model: the name {name!r} is not UTF-8 text")


def _domain(name: str) -> str:
    return "" if name == "ai.onnx" else name


def _versions(imports: Iterable[onnx.OperatorSetIdProto]) -> dict[str, int]:
    return {_domain(entry.domain): entry.version for entry in imports}


# ---- data ------------------------------------------------------------------------------------------------


def _check_external_data(proto: onnx.ModelProto, base: Path | None, where: str) -> None:
    named: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for tensor in external_tensors(proto):
        _require_text((text for entry in tensor.external_data for text in (entry.key, entry.value)), where)
        # Bytes and protos come from anywhere: no folder is theirs unless someone says so.
        if base is None:
            raise ModelError(
                f"{where} refers to external data (tensor '{tensor.name}'): pass the path of the "
                "model file, or the directory of its data as base_dir"
            )
        check_external(tensor, base)
        location, start, size = external_range(tensor)
        named[location].append((start, start + size))
    repeated = sum(_repeated(ranges) for ranges in named.values())
    require("shared_bytes", repeated, f"{where}: data that several tensors name again, in bytes,")


def _repeated(ranges: list[tuple[int, int]]) -> int:
    """How many bytes of a file are named more often than once, counted each time."""
    total = covered = end = 0
    for start, stop in sorted(ranges):
        total += stop - start
        covered += max(0, stop - max(start, end))
        end = max(end, stop)
    return total - covered


def _check_rank(name: str, rank: int, where: str) -> None:
    """Refuse more dimensions than an array can have everywhere; no operator has a use for so many."""
    if rank > _MOST_DIMENSIONS:
        raise ModelError(f"{where}: '{name}' has {rank:,} dimensions, and {_MOST_DIMENSIONS} is the most")


def _check_data(tensor: onnx.TensorProto, where: str) -> None:
    """Data as long as the shape says, in the one field that the type has."""
    _require_text([tensor.name], where)
    _check_rank(tensor.name, len(tensor.dims), where)
    if tensor.data_type == _TENSOR.STRING:
        if any(size < 0 for size in tensor.dims):
            raise ModelError(f"{where}: tensor '{tensor.name}' has a negative dimension: {list(tensor.dims)}")
        expected = 0
    else:
        expected = tensor_bytes(tensor.dims, tensor.data_type, tensor.name)
    count = _product(tensor.dims)
    # A part of the schema that neither onnx nor onnxruntime reads.
    if tensor.HasField("segment"):
        raise ModelError(f"{where}: tensor '{tensor.name}' is a segment of another, which is not supported")
    if tensor.data_location == _TENSOR.EXTERNAL or tensor.external_data:
        return
    filled = {name: len(getattr(tensor, name)) for name in _FIELDS}
    filled = {name: length for name, length in filled.items() if length}
    # Strings are in string_data only.
    if tensor.HasField("raw_data") and tensor.data_type != _TENSOR.STRING:
        if filled:
            raise ModelError(f"{where}: tensor '{tensor.name}' holds its data twice ({', '.join(filled)})")
        if len(tensor.raw_data) != expected:
            raise ModelError(
                f"{where}: tensor '{tensor.name}' holds {len(tensor.raw_data)} bytes, "
                f"but its shape {list(tensor.dims)} and type need {expected}"
            )
        return
    # Small integers, 16-bit floats and truth values are kept in int32_data, one entry each.
    field, entries = _HELD.get(tensor.data_type, ("int32_data", 0))
    # types of fewer than eight bits share entries
    needed = count * entries if entries else min(count, expected)
    if filled != ({field: needed} if needed else {}):
        lengths = ", ".join(f"{length} in {name}" for name, length in filled.items()) or "none"
        raise ModelError(
            f"{where}: tensor '{tensor.name}' of shape {list(tensor.dims)} needs {needed} numbers in {field}, "
            f"and holds {lengths}"
        )


def _product(dims: Iterable[int]) -> int:
    total = 1
    for size in dims:
        total *= size
        if total > 2**62:
            raise ModelError(f"a tensor of shape {list(dims)} is larger than any memory")
    return total


def _check_sparse(proto: onnx.ModelProto, where: str) -> None:
    """Sparse tensors: dense sizes within the limit, indices that fit; they become dense when loaded."""
    total = 0
    for sparse in _sparse_tensors(proto):
        name, dims = sparse.values.name, list(sparse.dims)
        total += tensor_bytes(dims, sparse.values.data_type, name)
        require("dense_bytes", total, f"{where}: its sparse tensors, in bytes when written out,")
        if len(sparse.values.dims) != 1 or sparse.indices.data_type != _TENSOR.INT64:
            raise ModelError(f"{where}: sparse tensor '{name}' needs values in one row and int64 indices")
        if sparse.values.external_data or sparse.indices.external_data:
            raise ModelError(f"{where}: sparse tensor '{name}' has external data, which is not supported")
        count, shape = sparse.values.dims[0], list(sparse.indices.dims)
        if shape not in ([count], [count, len(dims)]):
            raise ModelError(
                f"{where}: sparse tensor '{name}' has {count} values and indices of shape {shape}"
            )
        # An index outside of the shape would be written to when the tensor is made dense.
        indices = onnx.numpy_helper.to_array(sparse.indices)
        sizes = [_product(dims)] if indices.ndim == 1 else dims
        columns = [indices] if indices.ndim == 1 else list(indices.T)
        for column, size in zip(columns, sizes):
            if column.size and not (column.min() >= 0 and column.max() < size):
                raise ModelError(f"{where}: sparse tensor '{name}' has an index outside of its shape {dims}")


def _sparse_tensors(proto: onnx.ModelProto) -> Iterator[onnx.SparseTensorProto]:
    nodes = [*proto.graph.node, *(node for function in proto.functions for node in function.node)]
    for graph in [proto.graph, *_graphs_in(proto.graph.node)]:
        yield from graph.sparse_initializer
    for node in [*nodes, *(node for graph in _graphs_in(nodes) for node in graph.node)]:
        for attribute in node.attribute:
            if attribute.HasField("sparse_tensor"):
                yield attribute.sparse_tensor
            yield from attribute.sparse_tensors


def _graphs_in(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.GraphProto]:
    for node in nodes:
        for inner in inner_graphs(node):
            yield inner
            yield from _graphs_in(inner.node)


# ---- size ------------------------------------------------------------------------------------------------


FunctionKey = tuple[str, str, str]


def _functions(proto: onnx.ModelProto, where: str) -> dict[FunctionKey, onnx.FunctionProto]:
    functions: dict[FunctionKey, onnx.FunctionProto] = {}
    for function in proto.functions:
        _require_text([function.domain, function.name, function.overload], where)
        key = (_domain(function.domain), function.name, function.overload)
        if key in functions:
            raise ModelError(f"{where} defines the function '{function.domain}.{function.name}' twice")
        functions[key] = function
    return functions


def _check_size(
    proto: onnx.ModelProto, functions: Mapping[FunctionKey, onnx.FunctionProto], where: str
) -> None:
    """Nodes with functions expanded, and how deep graphs and functions are nested, counted without expanding."""
    sizes: dict[FunctionKey, tuple[int, int]] = {}
    deepest = current().nesting

    def measure(nodes: Iterable[onnx.NodeProto], calls: tuple[FunctionKey, ...]) -> tuple[int, int]:
        """The number of nodes, and the levels below these."""
        require("nesting", len(calls), f"{where}: functions that call functions, in levels,")
        count = depth = 0
        for node in nodes:
            _require_text((node.op_type, node.domain, node.overload, node.name), where)
            count += 1
            for inner in inner_graphs(node):
                more, below = measure(inner.node, calls)
                count, depth = count + more, max(depth, below + 1)
                require("nesting", depth, f"{where}: graphs inside graphs, in levels,")
            key = (_domain(node.domain), node.op_type, node.overload)
            if key in functions:
                if key in calls:
                    raise ModelError(f"{where}: the function '{node.domain}.{node.op_type}' calls itself")
                # Each function is measured once: calls that double at every level would take forever to count one by
                # one.
                if key not in sizes:
                    sizes[key] = measure(functions[key].node, (*calls, key))
                more, below = sizes[key]
                count, depth = count + more, max(depth, below + 1)
        # Capped: Python's integers grow without end, and functions of functions reach numbers of thousands of
        # digits.
        return min(count, 2**62), min(depth, deepest + 1)

    count, depth = measure(proto.graph.node, ())
    require("nodes", count, f"{where}: its nodes, with functions expanded,")
    require("nesting", depth, f"{where}: graphs and functions inside each other, in levels,")
    for graph in [proto.graph, *_graphs_in(proto.graph.node)]:
        for value in [*graph.input, *graph.output, *graph.value_info]:
            _require_text([value.name], where)
            _check_declared(value, where)
    for value in proto.graph.input:
        # Nothing fits such an input, and inference leaves all that is behind it without a type.
        if 0 in _element_types(value.type):
            raise ModelError(
                f"{where}: the input '{value.name}' is declared without the type of its elements"
            )


def _check_declared(value: onnx.ValueInfoProto, where: str) -> None:
    for kind in _element_types(value.type):
        if kind not in _TENSOR.DataType.values():
            raise ModelError(f"{where}: '{value.name}' is of type {kind}, which ONNX does not have")
    if not value.type.HasField("tensor_type"):
        return
    _check_rank(value.name, len(value.type.tensor_type.shape.dim), where)
    dims = [dim.dim_value for dim in value.type.tensor_type.shape.dim if dim.HasField("dim_value")]
    size = 1
    for dim in dims:  # a size below 1 is one that is not known
        size *= max(dim, 1)
    require("value_bytes", size, f"{where}: '{value.name}' of shape {dims}, in bytes or more,")


def _element_types(kind: onnx.TypeProto) -> Iterator[int]:
    match kind.WhichOneof("value"):
        case "tensor_type":
            yield kind.tensor_type.elem_type
        case "sparse_tensor_type":
            yield kind.sparse_tensor_type.elem_type
        case "sequence_type":
            yield from _element_types(kind.sequence_type.elem_type)
        case "optional_type":
            yield from _element_types(kind.optional_type.elem_type)
        case "map_type":
            yield kind.map_type.key_type
            yield from _element_types(kind.map_type.value_type)


# ---- names and operators ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Scope:
    """What holds for all nodes of a graph or function: where it is, its opsets, the model's functions."""

    where: str
    versions: Mapping[str, int]
    functions: Mapping[FunctionKey, onnx.FunctionProto]
    attributes: frozenset[str] = frozenset()


def _check_graph(graph: onnx.GraphProto, outer: frozenset[str], scope: _Scope) -> None:
    """Unique definitions, every use defined."""
    where = scope.where
    inputs = [value.name for value in graph.input]
    initializers = [tensor.name for tensor in graph.initializer]
    initializers += [sparse.values.name for sparse in graph.sparse_initializer]
    produced = [name for node in graph.node for name in node.output if name]
    _require_text((*inputs, *produced, *(value.name for value in graph.output)), where)
    _unique(inputs, "graph input", where)
    _unique(initializers, "initializer", where)
    _unique(produced, "node output", where)
    _unique([*produced, *set(inputs), *set(initializers) - set(inputs)], "value", where)
    if "" in initializers or "" in inputs:
        raise ModelError(f"{where} has an input or initializer without a name")
    # Whatever order nodes are in: sorting them is the loader's.
    defined = outer.union(inputs, initializers, produced)
    _check_nodes(graph.node, defined, scope)
    own = {*inputs, *initializers, *produced}
    for value in graph.output:
        if value.name in outer and value.name not in own:
            raise ModelError(
                f"{where}: a body returns '{value.name}' of the graph around it as it is, which ONNX does not allow; "
                "put an Identity between"
            )
        if value.name not in defined:
            raise ModelError(f"{where}: the graph output '{value.name}' is defined by nothing in the model")


def _check_function(
    function: onnx.FunctionProto, functions: Mapping[FunctionKey, onnx.FunctionProto], where: str
) -> None:
    where = f"{where}: function '{function.name}'"
    produced = [name for node in function.node for name in node.output if name]
    _require_text((*function.input, *function.output, *function.attribute, *produced), where)
    _require_text((entry.domain for entry in function.opset_import), where)
    _unique([*function.input, *produced], "value", where)
    defined = frozenset([*function.input, *produced])
    attributes = frozenset([*function.attribute, *(attribute.name for attribute in function.attribute_proto)])
    _check_nodes(
        function.node, defined, _Scope(where, _versions(function.opset_import), functions, attributes)
    )
    for name in function.output:
        if name not in defined:
            raise ModelError(f"{where}: the output '{name}' is defined by nothing in it")


def _check_nodes(nodes: Sequence[onnx.NodeProto], defined: frozenset[str], scope: _Scope) -> None:
    for node in nodes:
        if not node.op_type:
            raise ModelError(f"{scope.where}: node '{node.name}' has no operator type")
        for name in node.input:
            if name and name not in defined:
                raise ModelError(
                    f"{scope.where}: {node.op_type} '{node.name}' uses '{name}', which nothing in the model defines"
                )
        _check_operator(node, scope)
        for inner in inner_graphs(node):
            _check_graph(inner, defined, scope)


@dataclass(frozen=True)
class _Signature:
    """What ONNX says about an operator: counts of inputs and outputs, inputs that must be there, attributes."""

    inputs: tuple[int, int]
    outputs: tuple[int, int]
    needed: tuple[int, ...]
    attributes: Mapping[str, int]
    required: frozenset[str]


@functools.cache
def _signature(operator: str, version: int, domain: str) -> _Signature | None:
    """The signature of an operator of ONNX; None where there is none to hold a node to."""
    schema = onnx.defs.get_schema(operator, version, domain)
    # Upsample and Scatter are deprecated, and older files are full of them.
    if schema.deprecated:
        return None
    single = onnx.defs.OpSchema.FormalParameterOption.Single
    return _Signature(
        (schema.min_input, schema.max_input),
        (schema.min_output, schema.max_output),
        tuple(index for index, formal in enumerate(schema.inputs) if formal.option == single),
        # pyright knows the enumeration under another name
        {name: int(cast(Any, attribute.type).value) for name, attribute in schema.attributes.items()},
        frozenset(name for name, attribute in schema.attributes.items() if attribute.required),
    )


@functools.cache
def _newest_opset(domain: str) -> int:
    """The newest opset of a domain that the installed onnx knows; 0 where it knows none."""
    if domain == "":
        return onnx.defs.onnx_opset_version()
    return max((s.since_version for s in onnx.defs.get_all_schemas() if s.domain == domain), default=0)


def _check_operator(node: onnx.NodeProto, scope: _Scope) -> None:
    """Inputs, outputs and attributes as the operator's schema has them; other domains are the runtime's."""
    domain = _domain(node.domain)
    what = f"{scope.where}: {node.op_type} '{node.name}'"
    names = [attribute.name for attribute in node.attribute]
    _require_text(names, scope.where)
    if len(set(names)) != len(names):
        raise ModelError(f"{what} has an attribute twice")
    function = scope.functions.get((domain, node.op_type, node.overload))
    if function is not None:
        if len(node.input) > len(function.input) or len(node.output) > len(function.output):
            raise ModelError(f"{what} has more inputs or outputs than the function that it calls")
        return
    version = scope.versions.get(domain)
    if version is None and domain == "":
        version = OPSET  # read as the opset that artifacts are in
    if version is None:
        raise ModelError(f"{what} is of the domain '{domain}', which the model does not import")
    if not 1 <= version <= _newest_opset(domain):
        return
    try:
        signature = _signature(node.op_type, version, domain)
    except onnx.defs.SchemaError:
        return  # the runtime has operators of its own there; others are reported by the dialect
    if signature is None:
        return
    for kind, count, (least, most) in (
        ("inputs", len(node.input), signature.inputs),
        ("outputs", len(node.output), signature.outputs),
    ):
        if not least <= count <= most:
            allowed = f"{least}" if least == most else f"{least} to {most}"
            raise ModelError(f"{what} has {count} {kind}; the operator takes {allowed}")
    for index in signature.needed:
        if index < len(node.input) and not node.input[index]:
            raise ModelError(f"{what} lacks its input {index}, which the operator needs")
    for attribute in node.attribute:
        attribute_type = signature.attributes.get(attribute.name)
        if attribute_type is None:
            raise ModelError(f"{what} has the attribute '{attribute.name}', which the operator does not have")
        # Only within a function, where a call fills it in.
        if attribute.ref_attr_name:
            if attribute.ref_attr_name not in scope.attributes:
                raise ModelError(
                    f"{what}: attribute '{attribute.name}' refers to '{attribute.ref_attr_name}', which no function "
                    "around it has"
                )
            continue
        if attribute.type != attribute_type:
            kinds = onnx.AttributeProto.AttributeType
            actual = kinds.Name(attribute.type) if attribute.type in kinds.values() else attribute.type
            raise ModelError(
                f"{what}: attribute '{attribute.name}' is {actual}, not {kinds.Name(attribute_type)}"
            )
        # Inference and rules loop over these: a kernel of 2⁴⁰ would keep them busy for days.
        if attribute.name in ("kernel_shape", "num_outputs"):
            count = _product(attribute.ints) if attribute.name == "kernel_shape" else attribute.i
            require("nodes", count, f"{what}: what '{attribute.name}' counts")
    missing = signature.required.difference(names)
    if missing:
        raise ModelError(f"{what} lacks the attribute '{min(missing)}'")


def _unique(names: Iterable[str], kind: str, where: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ModelError(f"{where} defines the {kind} '{name}' twice")
        seen.add(name)
