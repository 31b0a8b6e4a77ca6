"""Specializes a model for known input shapes: what depends on sizes alone is computed before the run.

Symbolic dimensions become numbers, onnx's inference propagates them, and shape arithmetic, redundant reshapes and
dead code are removed. It delays the first step with each new batch shape.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress

import numpy as np
import onnx

from onward.contract import CONV_WEIGHT
from onward.errors import LimitError
from onward.graph.compute import COMPUTABLE, compute, measure
from onward.graph.protobuf import attributes_of, inner_graphs, remove_unread, set_nodes
from onward.graph.shapes.dims import number_of
from onward.reading import parse_json

# Numbers up to which a tensor may be a list of sizes or places.
_SMALL = 1 << 14
# Each round follows sizes through one more operator that onnx's inference cannot; two or three are common.
_ROUNDS = 8

_Dims = tuple[int, ...]
# Change nothing where the result has the shape of the input.
_RESHAPES = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten"})
_SAME_WHERE_SHAPES_ARE = _RESHAPES | {"Expand", "Tile", "ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin"}


def specialize_shapes(model: onnx.ModelProto, shapes: Mapping[str, Sequence[int]]) -> None:
    """Specialize a model in place for inputs of these shapes, by name.

    Inputs that are not named keep the shapes of the file, with symbols that other inputs tell replaced. Results
    are bit-exact.
    """
    graph = model.graph
    dims = resolve_symbols(graph, shapes)
    constants = _Constants(graph)
    _fold(graph, dims, constants)
    for _ in range(_ROUNDS):
        if all(name in dims for node in graph.node for name in node.output if name):
            break
        inferred = _infer(model)
        dims.update(_static_shapes(inferred))
        constants.learn_types(inferred)
        if not _fold(graph, dims, constants):
            break
    # Before unchanging ones go: of two reshapes the second may then be one that changes nothing.
    _merge_reshapes(graph, dims, constants)
    _drop_unchanging(graph, dims, constants)
    remove_unread(graph)
    del graph.value_info[:]


def has_processor_forms(model: onnx.ModelProto) -> bool:
    """Whether a convolution's weight gradient is a product for each tap, or a convolution with a large kernel."""
    notes = (e.value for node in model.graph.node for e in node.metadata_props if e.key == CONV_WEIGHT)
    return any('"gathered"' in note or '"folded"' in note for note in notes)


def leaves_images_open(model: onnx.ModelProto) -> bool:
    """Whether a convolution's weight gradient was formulated without knowing the sizes of its images."""
    graph = model.graph
    read = set()
    for note in (e.value for node in graph.node for e in node.metadata_props if e.key == CONV_WEIGHT):
        with suppress(ValueError, LimitError):  # one that is damaged says nothing
            read.add(str(parse_json(note).get("x")))
    return any(
        value.name in read
        and any(not dim.HasField("dim_value") for dim in value.type.tensor_type.shape.dim[2:])
        for value in [*graph.value_info, *graph.input]
    )


def resolve_symbols(graph: onnx.GraphProto, shapes: Mapping[str, Sequence[int]]) -> dict[str, _Dims]:
    """Write numbers into what the file says of shapes, for inputs of these; returns the shapes that are known."""
    symbols = _set_inputs(graph, shapes)
    for value in [*graph.input, *graph.output, *graph.value_info]:
        _replace_symbols(value, symbols)
    return _static_shapes(graph)


def _set_inputs(graph: onnx.GraphProto, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Write the sizes into the inputs; returns what each symbol stands for."""
    sizes_by_symbol: dict[str, set[int]] = {}
    for value in graph.input:
        # Inputs that are sequences have no one shape.
        if value.name not in shapes or value.type.WhichOneof("value") != "tensor_type":
            continue
        kind, shape = value.type.tensor_type, shapes[value.name]
        if kind.HasField("shape"):
            have = kind.shape.dim
            if len(have) != len(shape) or any(d.dim_value not in (0, n) for d, n in zip(have, shape)):
                expected = [d.dim_param or d.dim_value or "?" for d in have]
                raise ValueError(
                    f"input '{value.name}' has the shape {list(shape)}; the model expects {expected}"
                )
            for dim, size in zip(have, shape):
                if dim.dim_param:
                    sizes_by_symbol.setdefault(dim.dim_param, set()).add(size)
        kind.shape.ClearField("dim")
        kind.shape.dim.extend(onnx.TensorShapeProto.Dimension(dim_value=size) for size in shape)
    # one that inputs contradict stays open: the run decides what that means
    return {symbol: sizes.pop() for symbol, sizes in sizes_by_symbol.items() if len(sizes) == 1}


def _replace_symbols(value: onnx.ValueInfoProto, symbols: Mapping[str, int]) -> None:
    """Put numbers in the place of symbols and of what is computed of them, like 2*batch*length."""
    for dim in value.type.tensor_type.shape.dim:
        size = number_of(dim.dim_param, symbols) if dim.dim_param else None
        if size is not None:
            dim.dim_value = size


class _Constants:
    """What is known of a graph's values: its own constants, and those computed."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        fed = {value.name for value in graph.input}
        self._tensors = {
            tensor.name: tensor
            for tensor in graph.initializer
            if tensor.name not in fed
            and tensor.data_location != onnx.TensorProto.EXTERNAL
            and math.prod(tensor.dims) <= _SMALL
        }
        self._arrays: dict[str, np.ndarray] = {}
        self._types: dict[str, np.dtype] = {}
        self.learn_types(graph)

    def learn_types(self, graph: onnx.GraphProto) -> None:
        """Take over what a graph says of its values' types."""
        for value in [*graph.value_info, *graph.input]:
            kind = value.type.tensor_type.elem_type
            if kind:
                self._types[value.name] = onnx.helper.tensor_dtype_to_np_dtype(kind)

    def example(self, name: str) -> np.ndarray | None:
        """An empty array of a value's type, for what reads nothing else of it; None where the type is not known."""
        return np.empty(0, self._types[name]) if name in self._types else None

    def __contains__(self, name: str) -> bool:
        return name in self._arrays or name in self._tensors

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._arrays:
            self._arrays[name] = onnx.numpy_helper.to_array(self._tensors[name])
        return self._arrays[name]

    def add(self, name: str, array: np.ndarray) -> None:
        self._arrays[name] = array


def _infer(model: onnx.ModelProto) -> onnx.GraphProto:
    """The graph with what inference says of its values; large constants are no more than a type to it."""
    graph = model.graph
    skeleton = onnx.ModelProto(ir_version=model.ir_version, functions=model.functions)
    skeleton.opset_import.extend(model.opset_import)
    bare = skeleton.graph
    bare.name = graph.name or "g"
    bare.node.extend(graph.node)
    bare.input.extend(graph.input)
    bare.output.extend(graph.output)
    bare.value_info.extend(graph.value_info)
    fed = {value.name for value in graph.input}
    for tensor in graph.initializer:
        if math.prod(tensor.dims) <= _SMALL and tensor.data_location != onnx.TensorProto.EXTERNAL:
            bare.initializer.append(tensor)
        # Its type and shape are enough: the data would be copied for inference.
        elif tensor.name not in fed:
            bare.input.append(
                onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
            )
    try:
        return onnx.shape_inference.infer_shapes(skeleton).graph
    except Exception:  # what the file says is what is known; the runtime finds what is wrong
        return onnx.GraphProto()


def _static_shapes(graph: onnx.GraphProto) -> dict[str, _Dims]:
    shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    for value in [*graph.value_info, *graph.input, *graph.output]:
        if value.type.tensor_type.HasField("shape"):
            dims = value.type.tensor_type.shape.dim
            if all(dim.HasField("dim_value") for dim in dims):
                shapes[value.name] = tuple(dim.dim_value for dim in dims)
    return shapes


def _fold(graph: onnx.GraphProto, dims: dict[str, _Dims], constants: _Constants) -> bool:
    """Compute what is known now and take its nodes away; whether there was any."""
    results = {value.name for value in graph.output}
    remaining, tensors = [], []
    for node in graph.node:
        outputs = _outputs(node, dims, constants) if node.output[0] not in constants else None
        for name, array in zip(node.output, outputs or []):
            constants.add(name, array)
            dims[name] = array.shape
        # An output has to be computed by a node.
        if outputs is None or not results.isdisjoint(node.output):
            remaining.append(node)
        else:
            tensors += [
                onnx.numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name)
                for name, array in zip(node.output, outputs)
            ]
    # Protobuf copies every node when the list is set anew.
    if tensors:
        set_nodes(graph, remaining)
        graph.initializer.extend(tensors)
    return bool(tensors)


def _outputs(
    node: onnx.NodeProto, dims: Mapping[str, _Dims], constants: _Constants
) -> list[np.ndarray] | None:
    if node.domain not in ("", "ai.onnx"):
        return None
    if node.op_type in ("Shape", "Size"):
        options, shape = attributes_of(node), dims.get(node.input[0])
        if shape is None:
            return None
        sizes = measure(node.op_type, shape, options.get("start"), options.get("end"))
        return None if sizes is None else [sizes]
    if node.op_type == "CastLike" and node.input[0] in constants:
        # OpenVINO fails at a graph ("Output names mismatch") where a constant reaches it by way of the CPU's CastLike.
        like = constants.example(node.input[1])
        return None if like is None else compute(node.op_type, {}, [constants[node.input[0]], like])
    if node.op_type not in COMPUTABLE or any(name and name not in constants for name in node.input):
        return None
    if any(math.prod(dims.get(name, ())) > _SMALL for name in node.output):
        return None
    return compute(node.op_type, attributes_of(node), [constants[n] if n else None for n in node.input])


def _merge_reshapes(graph: onnx.GraphProto, dims: Mapping[str, _Dims], constants: _Constants) -> None:
    """Let a reshaping of a reshaped value read the value itself."""
    producers = {name: node for node in graph.node if node.op_type in _RESHAPES for name in node.output}
    added: dict[_Dims, str] = {}
    for node in graph.node:
        if node.op_type not in _RESHAPES or node.domain or node.input[0] not in producers:
            continue
        before = producers[node.input[0]]
        shape = dims.get(node.output[0])
        # A 0 in Reshape's target means "as in the input", and not an empty axis.
        if shape is None or 0 in shape or not all(_is_settled(one, constants) for one in (node, before)):
            continue
        source = before.input[0]
        name = added.setdefault(shape, f"{node.output[0]}/shape")
        if name not in constants:
            constants.add(name, np.asarray(shape, np.int64))
            graph.initializer.append(onnx.numpy_helper.from_array(constants[name], name))
        node.op_type = "Reshape"
        del node.input[:], node.attribute[:]
        node.input.extend([source, name])


def _drop_unchanging(graph: onnx.GraphProto, dims: Mapping[str, _Dims], constants: _Constants) -> None:
    """Let the readers of a node that gives back its input read that."""
    results = {value.name for value in graph.output}
    renamed: dict[str, str] = {}
    remaining = []
    for node in graph.node:
        rename_inputs(node, renamed)
        if node.output[0] not in results and _changes_nothing(node, dims, constants):
            renamed[node.output[0]] = node.input[0]
        else:
            remaining.append(node)
    if renamed:
        set_nodes(graph, remaining)


def _changes_nothing(node: onnx.NodeProto, dims: Mapping[str, _Dims], constants: _Constants) -> bool:
    if node.domain or not node.input or len(node.output) != 1:
        return False
    kind = node.op_type
    if kind == "Identity" or (kind == "Concat" and len(node.input) == 1):
        return True
    shape = dims.get(node.output[0])
    if shape is None or dims.get(node.input[0]) != shape:
        return False
    # Of the same size, and forwards: then it is the whole.
    if kind == "Slice":
        steps = node.input[4] if len(node.input) > 4 else ""
        return not steps or (steps in constants and bool(np.all(constants[steps] > 0)))
    if kind == "Pad":
        return node.input[1] in constants and not np.any(constants[node.input[1]])
    if kind == "Transpose":
        return list(attributes_of(node).get("perm", [])) == list(range(len(shape)))
    return kind in _SAME_WHERE_SHAPES_ARE and _is_settled(node, constants)


def _is_settled(node: onnx.NodeProto, constants: _Constants) -> bool:
    """Whether nothing but its first input has to be computed: one that waits for other values keeps an order."""
    return all(name in constants for name in node.input[1:] if name)


def rename_inputs(node: onnx.NodeProto, renamed: Mapping[str, str]) -> None:
    """Let a node, and the bodies in it, read other values."""
    for index, name in enumerate(node.input):
        if name in renamed:
            node.input[index] = renamed[name]
    for body in inner_graphs(node):
        for inner in body.node:
            rename_inputs(inner, renamed)
        for value in body.output:  # a body may give back what it captures
            if value.name in renamed:
                body.node.append(onnx.helper.make_node("Identity", [renamed[value.name]], [value.name]))
