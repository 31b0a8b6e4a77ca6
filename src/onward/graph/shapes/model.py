"""Infers types and shapes of every value of a model, its subgraphs included.

Uses onnx's inference with data propagation, on a copy without large tensors, so that models of any size work. Where it
leaves a rank unknown that the length of a shape vector determines, the rank is filled in here and inference
continues. Symbolic dimensions keep their names.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.builder import Builder, NodeInference, forget_copied_size
from onward.graph.nodes import optional_input, subgraphs_of, without_large_tensors
from onward.graph.protobuf import inner_graphs
from onward.graph.shapes.dims import Dim, dims_of

_log = logging.getLogger("onward")
# Each round finds at least one more rank; graphs need two or three.
_ROUNDS = 8

# Their schemas infer nothing, or nothing without their definitions; the result is like the first input.
_AS_INPUT = frozenset({"GroupNormalization", "MeanVarianceNormalization"})


def infer_shapes(model: ir.Model) -> None:
    """Set the type and shape of every value that can be known."""
    for _ in range(_ROUNDS):
        _infer_once(model)
        if not (_fill_ranks(model.graph) or _correct_squeezes(model.graph) or _correct_outputs(model)):
            return


def drop_contradictions(model: ir.Model) -> None:
    """Forget shapes that the file declares and its weights do not give; the rest of what it says stays."""
    try:
        proto = without_large_tensors(model)
        onnx.shape_inference.infer_shapes(
            proto, strict_mode=True, data_prop=_joins_are_short(proto.graph, {})
        )
        return
    except Exception as error:  # also for what strictness has against other models
        # Strict mode also refuses custom operators and missing types, which are no contradictions.
        if "existing shape differ in dimension" not in str(error):
            return
    # strict inference names one contradiction; without what is declared, it finds every value's own shape
    declared = [(v, v.shape) for node in model.graph for v in node.outputs if v.shape is not None]
    for value, _ in declared:
        value.shape = None
    _infer_once(model)
    wrong = []
    for value, shape in declared:
        if value.shape is None or _agree(value.shape, shape):
            value.shape = shape
        else:
            wrong.append(f"'{value.name}' is declared {shape} and is {value.shape}")
    more = f" (+{len(wrong) - 3} more)" if len(wrong) > 3 else ""
    _log.warning(
        "the model declares shapes that contradict its weights; they are dropped: %s%s",
        "; ".join(wrong[:3]), more,
    )  # fmt: skip


def settle_symbols(model: ir.Model) -> bool:
    """Give open sizes of inputs the numbers that the operators require; whether there were any.

    A recurrent layer whose initial state is fixed to a batch of one takes no other, whatever the file declares.
    """
    open_sizes = {dim for value in model.graph.inputs for dim in _dims(value) or () if isinstance(dim, str)}
    required: dict[str, int] = {}
    for node in model.graph:
        for one, other in _equal_sizes(node):
            name, number = (one, other) if isinstance(one, str) else (other, one)
            if isinstance(name, str) and isinstance(number, int) and name in open_sizes:
                if name not in required:
                    _log.warning(
                        "%s '%s' requires '%s' to be %d, though the model declares it open",
                        node.op_type, node.name, name, number,
                    )  # fmt: skip
                required.setdefault(name, number)
    if required:
        rename_dimensions(model, required)
    return bool(required)


def rename_dimensions(model: ir.Model, names: Mapping[str, Dim]) -> None:
    """Say that sizes of the inputs are others, and infer all other shapes anew."""
    for value in model.graph.inputs:
        if value.shape is not None:
            dims = [names.get(dim, dim) if isinstance(dim, str) else dim for dim in dims_of(value.shape)]
            value.shape = ir.Shape(dims)
    for node in model.graph:
        for value in node.outputs:
            dims = _dims(value) if value.is_graph_output() else None
            value.shape = None if dims is None else ir.Shape([None if dim in names else dim for dim in dims])
    infer_shapes(model)


def _equal_sizes(node: ir.Node) -> Iterator[tuple[Dim, Dim]]:
    """Pairs of sizes that must be equal for the operator to run, where one of them is not broadcast."""
    if node.domain not in ("", "ai.onnx") or node.op_type not in ("RNN", "GRU", "LSTM"):
        return
    source, *states = (None if v is None else _dims(v) for v in (node.inputs[0], *node.inputs[5:7]))
    by_batch = node.attributes.get_int("layout", 0)
    for state in states:
        if source is not None and state is not None and len(source) == len(state) == 3:
            yield source[0 if by_batch else 1], state[0 if by_batch else 1]


def _agree(one: ir.Shape, other: ir.Shape) -> bool:
    return one.rank() == other.rank() and all(
        a == b for a, b in zip(one, other) if isinstance(a, int) and isinstance(b, int)
    )


def _correct_outputs(model: ir.Model) -> bool:
    """Give outputs the rank that they have where the model says another, which the runtime only warns of."""
    inference, opset = NodeInference(), model.graph.opset_imports.get("", 1)
    corrected = False
    for value in model.graph.outputs:
        node = value.producer()
        if node is None or node.domain or subgraphs_of(node) or value.shape is None:
            continue
        # Inference of one node without an input's type sets nothing, and would look like a correction.
        if any(operand is not None and operand.type is None for operand in node.inputs):
            continue
        before = [(output.type, output.shape) for output in node.outputs]
        declared_rank = value.shape.rank()
        # ONNX believes what an output is declared to be; of one node alone it looks at the inputs
        with contextlib.suppress(ModelError):  # what is wrong with it is said elsewhere
            inference.describe(node, opset)
        if value.shape is not None and value.shape.rank() != declared_rank:
            corrected = True
            continue
        for output, (kind, shape) in zip(node.outputs, before):
            output.type, output.shape = kind, shape
    return corrected


def _correct_squeezes(graph: ir.Graph) -> bool:
    """Give a Squeeze without axes the shape that it has where the file says none, or one that cannot be.

    Sizes of the model's inputs that are free are taken to be more than one.
    """
    free = _free_sizes(graph)
    corrected = False
    for node in graph:
        if (source := _squeezed_by_size(node)) is None:
            continue
        dims, output = dims_of(source), node.outputs[0]
        remaining = [dim for dim in dims if dim != 1]
        # Published files declare the input's own symbol here, for a rank that the result cannot have.
        if output.shape is not None and _may_be_squeezed(remaining, dims_of(output.shape), free):
            continue
        settled = all(isinstance(dim, int) or dim in free for dim in remaining)
        if output.shape is None and not settled:
            continue
        for value in _computed_from(output):  # what is said of them may come from the wrong shape
            rank = None if value.shape is None or not value.is_graph_output() else value.shape.rank()
            value.shape = None if rank is None else ir.Shape([None] * rank)
        output.shape = ir.Shape(remaining) if settled else None
        corrected = True
    return corrected


def spell_out_squeezes(model: ir.Model) -> bool:
    """Name the axes that a Squeeze without axes removes, where sizes say; whether there was one.

    Its result has one rank then, at a batch of one too, as the gradients behind it need.
    """
    op, free = Builder(model.graph), _free_sizes(model.graph)
    changed = False
    for node in model.graph:
        if (source := _squeezed_by_size(node)) is None:
            continue
        dims, output = dims_of(source), node.outputs[0]
        if not all(isinstance(dim, int) or dim in free for dim in dims):
            continue
        axes = [axis for axis, dim in enumerate(dims) if dim == 1]
        if output.shape is not None and output.shape.rank() != len(dims) - len(axes):
            continue  # the file says that a free size is always one
        if axes:
            node.resize_inputs(2)
            node.replace_input_with(1, op.constant(np.array(axes, np.int64)))
        else:  # an empty list of axes would mean all of them once more
            node.op_type = "Identity"
        changed = True
    return changed


def _squeezed_by_size(node: ir.Node) -> ir.Shape | None:
    """The shape of what a Squeeze without axes reads."""
    if node.op_type != "Squeeze" or node.domain or "axes" in node.attributes:
        return None
    source = node.inputs[0]
    return None if source is None or optional_input(node, 1) is not None else source.shape


def _free_sizes(graph: ir.Graph) -> set[str]:
    """The symbols of the graph's inputs."""
    sizes = [dim for value in graph.inputs if value.shape is not None for dim in dims_of(value.shape)]
    return {dim for dim in sizes if isinstance(dim, str)}


def _may_be_squeezed(remaining: Sequence[Dim], declared: Sequence[Dim], free: Collection[Dim]) -> bool:
    """Whether a shape may be what is left of these dimensions: of them, sizes that are not fixed may be one."""
    lengths = {0}  # how much of the declared shape the dimensions so far may be
    for dim in remaining:
        longer = {n + 1 for n in lengths if n < len(declared) and _may_be(dim, declared[n], free)}
        lengths = longer if isinstance(dim, int) else lengths | longer
    return len(declared) in lengths


def _may_be(dim: Dim, declared: Dim, free: Collection[Dim]) -> bool:
    if isinstance(declared, int):
        return declared != 1 and (declared == dim or not isinstance(dim, int))
    return not isinstance(dim, int) or declared not in free


def _computed_from(value: ir.Value) -> list[ir.Value]:
    """What the graph's nodes compute from a value."""
    reached: dict[ir.Value, None] = {}
    waiting = [value]
    while waiting:
        for use in waiting.pop().uses():
            for output in use.node.outputs:
                if output not in reached:
                    reached[output] = None
                    waiting.append(output)
    return list(reached)


def sharpen(model: ir.Model) -> None:
    """Give every unknown dimension of the main graph a name, and find those that are equal to another.

    Inference names unknown dimensions apart although many are the batch or the sequence again: those that
    come from shape arithmetic are followed here, and what depends on them is inferred anew.
    """
    op = Builder(model.graph)
    taken = {str(dim) for value in _values(model.graph) if value.shape is not None for dim in value.shape}
    names = (f"d{index}" for index in itertools.count() if f"d{index}" not in taken)
    renamed: dict[str, str] = {}
    changed: set[ir.Value] = set()
    for node in model.graph:
        before = [_dims(output) for output in node.outputs]
        # Bounds that folding made constant were unknown when inference came by.
        vague = node.op_type == "Slice" and _has_constant_bounds(node)
        if (vague or any(value in changed for value in node.inputs)) and not subgraphs_of(node):
            _infer_sharper(op, node)
        op.symbols.refine(node)
        for output, old in zip(node.outputs, before):
            if output.shape is None or not isinstance(output.type, ir.TensorType):
                continue
            dims = [_name(dim, renamed, names) for dim in _dims(output) or ()]
            if tuple(dims) != _dims(output):
                output.shape = ir.Shape(dims)
            if _dims(output) != old:
                changed.add(output)


def _has_constant_bounds(node: ir.Node) -> bool:
    """Whether constants say what a slice of an axis of known size is, as they may not have done before folding."""
    if any(v is None or v.const_value is None or v.is_graph_input() for v in node.inputs[1:]):
        return False
    source, result = (_dims(value) for value in (node.inputs[0], node.outputs[0]) if value is not None)
    if source is None or result is None or len(source) != len(result):
        return False
    return any(isinstance(old, int) and not isinstance(new, int) for old, new in zip(source, result))


def _infer_sharper(op: Builder, node: ir.Node) -> None:
    """Infer a node from sharper inputs, and keep of the old shape what the new one does not know."""
    before = [(output.type, _dims(output)) for output in node.outputs]
    op.infer(node)
    for output, (kind, old) in zip(node.outputs, before):
        new = _dims(output)
        if old is None:
            continue
        if new is None or len(new) != len(old):
            output.type, output.shape = kind, ir.Shape(old)
        else:
            output.shape = ir.Shape([o if n is None or isinstance(o, int) else n for n, o in zip(new, old)])


def _name(dim: Dim, renamed: dict[str, str], names: Iterator[str]) -> Dim:
    if dim is None:
        return next(names)
    if isinstance(dim, str) and dim.startswith("unk__"):
        if dim not in renamed:
            renamed[dim] = next(names)
        return renamed[dim]
    return dim


def _dims(value: ir.Value) -> tuple[Dim, ...] | None:
    return None if value.shape is None else dims_of(value.shape)


def _values(graph: ir.Graph) -> list[ir.Value]:
    return [*graph.inputs, *(output for node in graph for output in node.outputs)]


def unknown_ranks(graph: ir.Graph) -> list[ir.Value]:
    """The node outputs, bodies included, of which no type or no rank is known."""
    return [
        value
        for node in graph.all_nodes()
        for value in node.outputs
        if value.name
        and (value.type is None or (isinstance(value.type, ir.TensorType) and value.shape is None))
    ]


def _infer_once(model: ir.Model) -> None:
    proto = without_large_tensors(model)
    try:
        inferred = onnx.shape_inference.infer_shapes(
            proto, check_type=False, strict_mode=False, data_prop=_joins_are_short(proto.graph, {})
        )
    except Exception as error:
        raise ModelError(f"the types in the model contradict each other: {error}".strip()) from error
    _merge(model.graph, inferred.graph)


# What ONNX follows the numbers of a vector through, one by one.
_FOLLOWED = frozenset({"Identity", "Cast", "Add", "Sub", "Mul", "Gather", "Slice", "Squeeze", "Unsqueeze"})
_LONGEST_JOIN = 1 << 16


def _joins_are_short(graph: onnx.GraphProto, lengths: dict[str, int]) -> bool:
    """Whether ONNX may follow numbers: it writes out each join, and a vector joined with itself 40 times never ends."""
    for value in graph.input:
        dims = value.type.tensor_type.shape.dim
        if len(dims) == 1:
            lengths[value.name] = max(dims[0].dim_value, 1)
    lengths.update((tensor.name, tensor.dims[0]) for tensor in graph.initializer if len(tensor.dims) == 1)
    for node in graph.node:
        counts = [lengths.get(name, 1) for name in node.input]
        if node.op_type == "Concat":
            lengths[node.output[0]] = sum(counts)
            # onnx writes the propagated numbers of each Concat out: doubled 40 times, they fill any memory.
            if sum(counts) > _LONGEST_JOIN:
                return False
        elif node.op_type in _FOLLOWED and counts:
            lengths[node.output[0]] = max(counts)
        if not all(_joins_are_short(body, dict(lengths)) for body in inner_graphs(node)):
            return False
    return True


def _merge(graph: ir.Graph, proto: onnx.GraphProto) -> None:
    types = {info.name: info.type for info in [*proto.value_info, *proto.output, *proto.input]}
    for value in [*graph.inputs, *(value for node in graph for value in node.outputs)]:
        info = types.get(value.name or "")
        if info is not None and info.WhichOneof("value") is not None:
            _take(value, info)
    for node, node_proto in zip(graph, proto.node):
        forget_copied_size(node)
        for body, body_proto in zip(subgraphs_of(node), inner_graphs(node_proto)):
            # Bodies have value_info of their own in protobuf.
            _merge(body, body_proto)


def _take(value: ir.Value, info: onnx.TypeProto) -> None:
    kind = ir.serde.deserialize_type_proto_for_type(info)
    # ONNX writes UNDEFINED where it knows a shape and no type.
    if kind is not None and getattr(kind, "dtype", None) != ir.DataType.UNDEFINED:
        value.type = kind
    shape = ir.serde.deserialize_type_proto_for_shape(info)
    if shape is not None:
        value.shape = shape


def _fill_ranks(graph: ir.Graph) -> bool:
    """Give a rank to what onnx leaves open although a shape vector's length tells it."""
    changed = False
    for node in graph.all_nodes():
        if node.domain not in ("", "ai.onnx") or not node.inputs:
            continue
        source = node.inputs[0]
        for value, rank in zip(node.inputs, _input_ranks(node)):
            if value is not None and value.shape is None and rank is not None:
                value.shape = ir.Shape([None] * rank)
                changed = True
        if node.op_type in _AS_INPUT and source is not None and node.outputs[0].shape is None:
            node.outputs[0].type, node.outputs[0].shape = source.type, source.shape
            changed = changed or source.shape is not None
            continue
        open_ranks = [value for value in node.outputs if value.name and value.shape is None]
        rank = rank_from_lengths(node) if open_ranks else None
        if rank is None:
            continue
        for value in open_ranks:
            value.shape = ir.Shape([None] * rank)
            # Its first input is a shape; the type is the attribute's, float where there is none.
            if value.type is None and node.inputs[0] is not None and node.op_type != "ConstantOfShape":
                value.type = node.inputs[0].type
            changed = value.type is not None or changed
    return changed


def _input_ranks(node: ir.Node) -> Sequence[int | None]:
    """The ranks that an operator's inputs must have, also where a branch decides about them."""
    match node.op_type:
        case "Conv" | "ConvTranspose":
            weights = node.inputs[1]
            return [None if weights is None or weights.shape is None else weights.shape.rank()]
        case "Gemm":
            return [2, 2]
        # Which inputs are optional does not matter: zip stops at those that are there.
        case "RNN" | "GRU" | "LSTM":
            return [3, 3, 3, 2, 1, 3, 3, 2]
        case _:
            return []


_KEEP_RANK = frozenset(
    {
        *("Split", "Slice", "Pad", "Resize", "ScatterND", "ScatterElements", "CumSum", "Trilu", "Clip"),
        *("CenterCropPad", "MaxUnpool", "Conv"),
        "ConvTranspose",  # of which ONNX's inference says nothing at all where sizes are symbolic
    }
)


def rank_from_lengths(node: ir.Node) -> int | None:
    """The rank of a node's first output, where the length of a shape vector or an input's rank tells it."""

    def rank_of(index: int) -> int | None:
        value = optional_input(node, index)
        return None if value is None or value.shape is None else value.shape.rank()

    def length_of(index: int) -> int | None:
        value = optional_input(node, index)
        length = (
            value.shape[0] if value is not None and value.shape is not None and rank_of(index) == 1 else None
        )
        return length if isinstance(length, int) else None

    match node.op_type:
        case "Reshape":
            return length_of(1)
        case "ConstantOfShape":
            return length_of(0)
        case "Expand":
            rank, length = rank_of(0), length_of(1)
            return None if rank is None or length is None else max(rank, length)
        case "Unsqueeze" | "Squeeze":
            rank, length = rank_of(0), length_of(1)
            if rank is None or length is None:
                return None
            return rank + length if node.op_type == "Unsqueeze" else rank - length
        case "Tile":
            return rank_of(0) if rank_of(0) is not None else length_of(1)
        case name if name.startswith("Reduce"):
            rank, removed = rank_of(0), length_of(1)
            if rank is None or node.attributes.get_int("keepdims", 1):
                return rank
            return None if removed is None else rank - removed
        # [batch, frames, bins, real and imaginary]
        case "STFT":
            return 4
        case name:
            return rank_of(0) if name in _KEEP_RANK else None
