"""A conservative dialect: the same numbers in the operators that runtimes other than the CPU's and CUDA's read alike.

Each form stands for one thing that a runtime was seen to lack or to compute otherwise, and is put in only where a
device needs it: on the CPU most of them cost time. They work in place, in the bodies of Scan, Loop and If too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from onward.contract import SEED
from onward.graph.cleanup import remove_unused
from onward.graph.nodes import without_large_tensors
from onward.graph.proto.device_forms import expand_batch_norm
from onward.graph.proto.known_shapes import specialize_shapes
from onward.graph.proto.replacements import Inserter, Types, has_rank, rewrite_nodes, static_shape, types_of
from onward.graph.protobuf import (
    attribute_of,
    copy_of,
    inner_graphs,
    remove_unread,
    set_nodes,
    values_read_by,
)

# HardSigmoid is a mask where its slope is this steep: 1 for every float32 above zero that is not denormal.
_STEEP = 1e30
# Parts of a Split that every runtime can write in one kernel.
_PARTS = 7
_WHOLE = (onnx.TensorProto.INT64, onnx.TensorProto.UINT64)


def write_sizes(model: onnx.ModelProto) -> None:
    """Sizes as constants, without the inputs that only told a size: OpenVINO mixes up the others beside such a one."""
    specialize_shapes(model, {})
    graph = model.graph
    read = {name for node in graph.node for name in values_read_by(node)} | {v.name for v in graph.output}
    inputs = [value for value in graph.input if value.name in read]
    del graph.input[:]
    graph.input.extend(inputs)


def write_masks(model: onnx.ModelProto) -> None:
    """HardSigmoid(x) with a beta of 0 as Clip(3e38·x, 0, 1): OpenVINO reads an explicit 0 as the default of 0.5.

    A beta of 1e-30 would be one operator less and not quite zero at zero, which an update by signs would follow.
    """

    def rewrite(node: onnx.NodeProto, add: Inserter, types: Types) -> bool:
        steep = attribute_of(node, "alpha", 0.2)
        if node.op_type != "HardSigmoid" or steep < _STEEP or attribute_of(node, "beta", 0.5) != 0.0:
            return False
        kind = onnx.helper.tensor_dtype_to_np_dtype(types[node.input[0]].elem_type)
        factor, low, high = (
            add.constant(name, np.array(number, kind))
            for name, number in (("steep", steep), ("none", 0), ("one", 1))
        )
        scaled = add.node("Mul", [node.input[0], factor], f"{node.output[0]}/scaled")
        add.node("Clip", [scaled, low, high], node.output[0])
        return True

    rewrite_nodes(model, rewrite)


def write_matrix_products(model: onnx.ModelProto) -> None:
    """Products with a vector as products of matrices: WebGPU has no MatMul with an operand of one dimension."""

    def rewrite(node: onnx.NodeProto, add: Inserter, types: Types) -> bool:
        if node.op_type != "MatMul" or any(not has_rank(types, name) for name in node.input):
            return False
        first, second = (len(types[name].shape.dim) == 1 for name in node.input)
        if not (first or second):
            return False
        x, y = node.input
        result = f"{node.output[0]}/matrix"
        rows = add.over_axes("Unsqueeze", x, [0], f"{result}/rows") if first else x
        columns = add.over_axes("Unsqueeze", y, [1], f"{result}/columns") if second else y
        add.node("MatMul", [rows, columns], result)
        add.over_axes("Squeeze", result, [-2] * first + [-1] * second, node.output[0])
        return True

    rewrite_nodes(model, rewrite)


def write_scans_forward(model: onnx.ModelProto) -> None:
    """A Scan from behind as one from the front over reversed inputs: onnx's reference has no directions."""

    def rewrite(node: onnx.NodeProto, add: Inserter, types: Types) -> bool:
        if node.op_type != "Scan" or node.domain:
            return False
        scanned = attribute_of(node, "num_scan_inputs")
        states = len(node.input) - scanned
        ways_in = attribute_of(node, "scan_input_directions", [0] * scanned)
        ways_out = attribute_of(node, "scan_output_directions", [0] * (len(node.output) - states))
        if not any(ways_in) and not any(ways_out):
            return False
        axes_in = attribute_of(node, "scan_input_axes", [0] * scanned)
        axes_out = attribute_of(node, "scan_output_axes", [0] * len(ways_out))
        forward = copy_of(node)
        directions = ("scan_input_directions", "scan_output_directions")
        attributes = [attribute for attribute in node.attribute if attribute.name not in directions]
        del forward.attribute[:]
        forward.attribute.extend(attributes)
        for index, (way, axis) in enumerate(zip(ways_in, axes_in), start=states):
            if way:
                forward.input[index] = add.reversal(
                    node.input[index], axis, f"{node.output[0]}/reversed{index}"
                )
        turned = []
        for index, (way, axis) in enumerate(zip(ways_out, axes_out), start=states):
            if way and node.output[index]:
                forward.output[index] = f"{node.output[index]}/reversed"
                turned.append((forward.output[index], axis, node.output[index]))
        add.nodes.append(forward)
        for value, axis, output in turned:
            add.reversal(value, axis, output)
        return True

    rewrite_nodes(model, rewrite)


def write_scatters(model: onnx.ModelProto) -> None:
    """A ScatterND that adds rows as a ScatterElements: OpenVINO's ScatterND only replaces."""

    def rewrite(node: onnx.NodeProto, add: Inserter, types: Types) -> bool:
        if node.op_type != "ScatterND" or attribute_of(node, "reduction", b"none") != b"add":
            return False
        data, indices, updates = node.input
        shape = static_shape(types, data, first=1)
        if shape is None or not has_rank(types, indices):
            return False
        last = types[indices].shape.dim[-1:]
        if not last or last[0].dim_value != 1:
            return False
        result = node.output[0]
        rows = add.constant("rows", np.array([-1, *shape], np.int64))
        one_each = add.constant("one_each", np.array([-1, *[1] * len(shape)], np.int64))
        values = add.node("Reshape", [updates, rows], f"{result}/updates")
        flat = add.node("Reshape", [indices, one_each], f"{result}/flat")
        sizes = add.node("Shape", [values], f"{result}/sizes")
        repeated = add.node("Expand", [flat, sizes], f"{result}/indices")
        add.node("ScatterElements", [data, repeated, values], result, axis=0, reduction="add")
        return True

    rewrite_nodes(model, rewrite)


def write_layer_statistics(model: onnx.ModelProto) -> None:
    """A LayerNormalization that hands out its statistics as reductions: OpenVINO's hands out none."""

    def rewrite(node: onnx.NodeProto, add: Inserter, types: Types) -> bool:
        if node.op_type != "LayerNormalization" or len(node.output) < 2 or not has_rank(types, node.input[0]):
            return False
        x, scale = node.input[:2]
        y, mean, inverse = [*node.output, ""][:3]
        rank = len(types[x].shape.dim)
        axes = list(range(attribute_of(node, "axis", -1) % rank, rank))
        kind = onnx.helper.tensor_dtype_to_np_dtype(types[x].elem_type)
        mean = add.over_axes("ReduceMean", x, axes, mean or f"{y}/mean", keepdims=1)
        centred = add.node("Sub", [x, mean], f"{y}/centred")
        square = add.node("Mul", [centred, centred], f"{y}/square")
        epsilon = add.constant("epsilon", np.array(attribute_of(node, "epsilon", 1e-5), kind))
        variance = add.over_axes("ReduceMean", square, axes, f"{y}/variance", keepdims=1)
        variance = add.node("Add", [variance, epsilon], f"{y}/raised")
        deviation = add.node("Sqrt", [variance], f"{y}/deviation")
        inverse = add.node("Reciprocal", [deviation], inverse or f"{y}/inverse")
        normal = add.node("Mul", [centred, inverse], f"{y}/normal")
        shift = node.input[2] if len(node.input) > 2 else ""
        scaled = add.node("Mul", [normal, scale], f"{y}/scaled" if shift else y)
        if shift:
            add.node("Add", [scaled, shift], y)
        return True

    rewrite_nodes(model, rewrite)


def write_doubles(model: onnx.ModelProto) -> None:
    """Sin, Cos and the places of maxima in float64, which WebGPU leaves to the CPU.

    WebGPU promises sines to 5e-4 alone, and its MaxPool has no places.
    """

    def rewrite(node: onnx.NodeProto, add: Inserter, types: Types) -> bool:
        places = node.op_type == "MaxPool" and len(node.output) == 2 and node.output[1]
        single = node.input[:1] and types.get(node.input[0]) is not None
        if node.op_type not in ("Sin", "Cos") and not places:
            return False
        if not single or types[node.input[0]].elem_type != onnx.TensorProto.FLOAT:
            return False
        result = node.output[0]
        exact = copy_of(node)
        exact.input[0] = add.node("Cast", [node.input[0]], f"{result}/exact", to=onnx.TensorProto.DOUBLE)
        if node.op_type == "Cos":  # the CPU has no cosine of float64 either
            quarter = add.constant("quarter", np.array(np.pi / 2))
            exact.op_type, exact.input[0] = (
                "Sin",
                add.node("Add", [exact.input[0], quarter], f"{result}/turned"),
            )
        exact.output[0] = f"{result}/double"
        add.nodes.append(exact)
        add.node("Cast", [exact.output[0]], result, to=onnx.TensorProto.FLOAT)
        return True

    rewrite_nodes(model, rewrite)


def write_splits(model: onnx.ModelProto) -> None:
    """A Split into many parts as a Slice for each: WebGPU binds ten buffers to a kernel."""
    constants = {tensor.name: tensor for tensor in model.graph.initializer}

    def rewrite(node: onnx.NodeProto, add: Inserter, types: Types) -> bool:
        sizes = constants.get(node.input[1]) if node.op_type == "Split" and len(node.input) > 1 else None
        if sizes is None or len(node.output) <= _PARTS:
            return False
        ends = np.cumsum(onnx.numpy_helper.to_array(sizes))
        axis = add.constant("axis", np.array([attribute_of(node, "axis", 0)], np.int64))
        for index, (output, end) in enumerate(zip(node.output, ends)):
            start = ends[index - 1] if index else 0
            bounds = [
                add.constant(f"{name}{index}", np.array([number], np.int64))
                for name, number in (("from", start), ("to", end))
            ]
            if output:
                add.node("Slice", [node.input[0], *bounds, axis], output)
        return True

    rewrite_nodes(model, rewrite)


def write_depths(model: onnx.ModelProto) -> None:
    """The depth of a OneHot as a number of rank 0: onnx's reference takes no vector of one."""

    def rewrite(node: onnx.NodeProto, add: Inserter, types: Types) -> bool:
        depth = node.input[1] if node.op_type == "OneHot" else ""
        if not depth or not has_rank(types, depth) or not len(types[depth].shape.dim):
            return False
        number = add.over_axes("Squeeze", depth, [0], f"{node.output[0]}/depth")
        same = copy_of(node)
        same.input[1] = number
        add.nodes.append(same)
        return True

    rewrite_nodes(model, rewrite)


def write_loop_conditions(model: onnx.ModelProto) -> None:
    """A Loop that runs as often as its count says, with a condition: onnx's reference runs none without."""

    def rewrite(node: onnx.NodeProto, add: Inserter, types: Types) -> bool:
        if node.op_type != "Loop" or not node.input[0] or node.input[1]:
            return False
        same = copy_of(node)
        same.input[1] = add.constant("condition", np.array(True))
        add.nodes.append(same)
        return True

    rewrite_nodes(model, rewrite)


def write_groups(model: onnx.ModelProto) -> None:
    """Transposed convolutions of groups one by one: WebGPU 1.27 computes some of them wrong."""

    def rewrite(node: onnx.NodeProto, add: Inserter, types: Types) -> bool:
        groups = attribute_of(node, "group", 1) if node.op_type == "ConvTranspose" else 1
        kernels = static_shape(types, node.input[1]) if groups > 1 else None
        if kernels is None or kernels[0] == groups:  # each channel alone is right
            return False
        y, parts = node.output[0], [f"{node.output[0]}/group{index}" for index in range(groups)]
        for index, part in enumerate(parts):
            inputs = []
            for name, axis, width in zip(
                node.input, (1, 0, 0), (kernels[0] // groups, kernels[0] // groups, kernels[1])
            ):
                bounds = (("from", index * width), ("to", (index + 1) * width), ("axis", axis))
                where = [add.constant(f"{k}{len(add.nodes)}", np.array([n], np.int64)) for k, n in bounds]
                inputs.append(add.node("Slice", [name, *where], f"{part}/input{len(inputs)}"))
            own = copy_of(node)
            own.name, own.input[:], own.output[:] = part, inputs, [part]
            next(attribute for attribute in own.attribute if attribute.name == "group").i = 1
            add.nodes.append(own)
        add.node("Concat", parts, y, axis=1)
        return True

    rewrite_nodes(model, rewrite)


def write_log_softmax(model: onnx.ModelProto) -> None:
    """LogSoftmax as x − max − log Σ exp: WebGPU leaves it to the CPU, and with it a language model's scores."""

    def rewrite(node: onnx.NodeProto, add: Inserter, types: Types) -> bool:
        # before opset 13 the axes from one on were meant
        if node.op_type != "LogSoftmax" or add.opset < 13:
            return False
        x, y = node.input[0], node.output[0]
        axis = attribute_of(node, "axis", -1)
        largest = add.over_axes("ReduceMax", x, [axis], f"{y}/largest", keepdims=1)
        lowered = add.node("Sub", [x, largest], f"{y}/lowered")
        powers = add.node("Exp", [lowered], f"{y}/powers")
        total = add.over_axes("ReduceSum", powers, [axis], f"{y}/total", keepdims=1)
        add.node("Sub", [lowered, add.node("Log", [total], f"{y}/log")], y)
        return True

    rewrite_nodes(model, rewrite)


def write_one_hots(model: onnx.ModelProto) -> None:
    """A OneHot of known depth as a comparison with 0, 1, 2 …: WebGPU leaves it to the CPU, with all of its result."""
    constants = {tensor.name: tensor for tensor in model.graph.initializer}

    def rewrite(node: onnx.NodeProto, add: Inserter, types: Types) -> bool:
        if node.op_type != "OneHot" or not {*node.input[1:]} <= constants.keys():
            return False
        indices, y = node.input[0], node.output[0]
        depth, values = (onnx.numpy_helper.to_array(constants[name]) for name in node.input[1:])
        if not has_rank(types, indices) or values.dtype != np.float32:
            return False
        rank, count = len(types[indices].shape.dim), int(depth.reshape(-1)[0])
        axis = attribute_of(node, "axis", -1) % (rank + 1)
        places = np.arange(count, dtype=np.int32).reshape(-1, *[1] * (rank - axis))
        narrow = add.node("Cast", [indices], f"{y}/narrow", to=onnx.TensorProto.INT32)
        low = add.node("Less", [narrow, add.constant("none", np.array(0, np.int32))], f"{y}/low")
        raised = add.node("Add", [narrow, add.constant("depth", np.array(count, np.int32))], f"{y}/raised")
        place = add.node("Where", [low, raised, narrow], f"{y}/place")
        column = add.over_axes("Unsqueeze", place, [axis], f"{y}/column")
        hit = add.node("Equal", [column, add.constant("places", places)], f"{y}/hit")
        on, off = (add.constant(name, np.array(values[i])) for name, i in (("on", 1), ("off", 0)))
        add.node("Where", [hit, on, off], y)
        return True

    rewrite_nodes(model, rewrite)


def write_columns(model: onnx.ModelProto) -> None:
    """A Col2Im of images as a transposed convolution of each channel with unit kernels: WebGPU leaves it to the CPU.

    Channels count as images: WebGPU 1.27 computes transposed convolutions of groups wrong.
    """
    constants = {tensor.name: tensor for tensor in model.graph.initializer}

    def rewrite(node: onnx.NodeProto, add: Inserter, types: Types) -> bool:
        if node.op_type != "Col2Im" or not {*node.input[1:]} <= constants.keys():
            return False
        columns, y = node.input[0], node.output[0]
        size, kernel = (onnx.numpy_helper.to_array(constants[name]) for name in node.input[1:])
        rows = types[columns].shape.dim[1].dim_value if has_rank(types, columns) else 0
        if len(size) != 2 or not rows:
            return False
        strides, dilations = (np.array(attribute_of(node, name, [1, 1])) for name in ("strides", "dilations"))
        pads = np.array(attribute_of(node, "pads", [0, 0, 0, 0]))
        room = size + pads[:2] + pads[2:] - dilations * (kernel - 1) - 1
        window = int(np.prod(kernel))
        unit = np.eye(window, dtype=np.float32).reshape(window, 1, *kernel)
        apart = add.constant("apart", np.array([-1, window, *(room // strides + 1)], np.int64))
        images = add.node("Reshape", [columns, apart], f"{y}/columns")
        summed = add.node(
            "ConvTranspose", [images, add.constant("kernels", unit)], f"{y}/images",
            kernel_shape=kernel.tolist(), strides=strides.tolist(), dilations=dilations.tolist(),
            pads=pads.tolist(), output_padding=(room % strides).tolist(),
        )  # fmt: skip
        together = add.constant("together", np.array([-1, rows // window, *size], np.int64))
        add.node("Reshape", [summed, together], y)
        return True

    rewrite_nodes(model, rewrite)


# By name, as the report of a device lists them.
FORMS: Mapping[str, Callable[[onnx.ModelProto], None]] = {
    "known sizes": write_sizes,
    "masks": write_masks,
    "matrix products": write_matrix_products,
    "batch statistics": expand_batch_norm,
    "forward scans": write_scans_forward,
    "scattered elements": write_scatters,
    "layer statistics": write_layer_statistics,
    "float64 on the host": write_doubles,
    "slices": write_splits,
    "depths of rank 0": write_depths,
    "loop conditions": write_loop_conditions,
    "groups apart": write_groups,
    "log softmax": write_log_softmax,
    "comparisons for one-hots": write_one_hots,
    "transposed convolutions": write_columns,
}
# Faster on WebGPU, which would leave the operators to the CPU: each costs copies of large values.
_FOR_WEBGPU = ("log softmax", "comparisons for one-hots", "transposed convolutions")
# For files that any runtime may read: all but those that need a batch's sizes, or a provider that leaves float64 to the
# CPU. They cost the CPU up to 5 % of a step with batch norm, 1 % without.
_PORTABLE = [
    name for name in FORMS if name not in ("known sizes", "float64 on the host", "groups apart", *_FOR_WEBGPU)
]
# For pages: what WebGPU lacks or computes wrong, too. What fails all the same, onnxruntime-web runs on WebAssembly.
WEBGPU_FORMS = ("matrix products", "batch statistics", "slices", "groups apart", *_FOR_WEBGPU)
# Forms in which a device gets every model where it computes them right, for speed.
FASTER_FORMS: dict[str, Sequence[str]] = {"webgpu": _FOR_WEBGPU}
# Random numbers that are drawn on the host: no rewrite in place, as the model falls into two (`split_random`).
HOST_RANDOM = "host random numbers"


def apply_forms(model: onnx.ModelProto, forms: Iterable[str]) -> None:
    """Put these forms into a model, in place; names that are no rewrite are left to the caller."""
    for name in forms:
        if name in FORMS:
            FORMS[name](model)


def in_portable_forms(model: ir.Model) -> ir.Model:
    """The model in the forms that runtimes read alike; its large constants are not copied."""
    proto = without_large_tensors(model)
    apply_forms(proto, _PORTABLE)
    written = ir.from_proto(proto)
    own = {value.name for value in model.graph.inputs}
    for value in [value for value in written.graph.inputs if value.name not in own]:
        written.graph.inputs.remove(value)
        value.const_value = model.graph.initializers[value.name or ""].const_value
        written.graph.initializers.add(value)
    # what only the replaced operators read: runtimes warn of constants that nothing reads
    return remove_unused(written)


def split_random(model: onnx.ModelProto) -> onnx.ModelProto | None:
    """Move what int64 arithmetic makes of the seed into a model of its own, which is returned; None without a seed.

    Dropout's masks come from products of int64 that wrap. A runtime that keeps int64 in 32 bits draws other masks, so
    they are computed by the CPU's; what is left in `model` reads the first results of other types as inputs.
    """
    graph = model.graph
    seed = next((value for value in graph.input if value.name == SEED), None)
    if seed is None:
        return None
    types = types_of(onnx.shape_inference.infer_shapes(model).graph)
    constants = {tensor.name for tensor in graph.initializer}
    # Every value that the seed and constants determine and that is still a whole number of 64 bits.
    drawn: set[str] = {SEED}
    moved: set[str] = set()  # nodes, by their first outputs
    handed_over: list[str] = []
    fixed = _constant_nodes(graph, constants)
    for node in graph.node:
        inputs = [name for name in node.input if name]
        if any(name in drawn for name in inputs) and all(n in drawn or n in fixed for n in inputs):
            moved.add(node.output[0])
            for name in node.output:
                whole = name in types and types[name].elem_type in _WHOLE
                (drawn.add if whole else handed_over.append)(name)
    read_on = {name for node in graph.node if node.output[0] not in moved for name in node.input}
    read_on |= {value.name for value in graph.output}
    if read_on & drawn or not handed_over:
        return None  # something else reads the hash as whole numbers
    host = copy_of(model)
    set_nodes(host.graph, [n for n in graph.node if n.output[0] in moved or n.output[0] in fixed])
    del host.graph.output[:], host.graph.input[:], host.graph.value_info[:]
    host.graph.input.append(seed)
    outputs = [name for name in handed_over if name in read_on]
    host.graph.output.extend(onnx.helper.make_value_info(n, _as_type(types[n])) for n in outputs)
    remove_unread(host.graph)
    graph.input.remove(seed)
    graph.input.extend(onnx.helper.make_value_info(name, _as_type(types[name])) for name in outputs)
    set_nodes(graph, [node for node in graph.node if node.output[0] not in moved])
    return host


def _constant_nodes(graph: onnx.GraphProto, constants: set[str]) -> set[str]:
    """Names of values that constants alone determine."""
    fixed = set(constants)
    for node in graph.node:
        if all(name in fixed for name in node.input if name) and not list(inner_graphs(node)):
            fixed.update(node.output)
    return fixed


def _as_type(kind: onnx.TypeProto.Tensor) -> onnx.TypeProto:
    wrapped = onnx.TypeProto()
    wrapped.tensor_type.CopyFrom(kind)
    return wrapped
