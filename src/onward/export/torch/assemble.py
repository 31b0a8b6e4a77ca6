"""Finishes an exported graph: names, parameters, active dropout, named axes, metadata, and the file.

Independent of the exporter. Graphs come without weights, so that large models are never in memory twice.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx import TensorProto, helper, numpy_helper

from onward.errors import ExportError, ModelError
from onward.files import write_set
from onward.graph.dialect.lower import lower
from onward.graph.dialect.normalize import normalize
from onward.graph.nodes import ACTIVE, DROPOUT, GRADIENT, STOP
from onward.graph.protobuf import attribute_of, inner_graphs, opset_of
from onward.graph.save import name_data_by_content

# Protobuf refuses messages of 2 GiB; the graph itself needs some of that.
INLINE_LIMIT = 2**31 - 2**24

_ELEMENT_TYPES = {
    torch.float32: TensorProto.FLOAT,
    torch.float64: TensorProto.DOUBLE,
    torch.float16: TensorProto.FLOAT16,
    torch.bfloat16: TensorProto.BFLOAT16,
    torch.int64: TensorProto.INT64,
    torch.int32: TensorProto.INT32,
    torch.int16: TensorProto.INT16,
    torch.int8: TensorProto.INT8,
    torch.uint8: TensorProto.UINT8,
    torch.bool: TensorProto.BOOL,
}


def graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """The graph and every body inside it."""
    yield graph
    for node in graph.node:
        for body in inner_graphs(node):
            yield from graphs(body)


def rename(model: onnx.ModelProto, new_name: Callable[[str], str]) -> None:
    """Rename every value and node in place."""
    for graph in graphs(model.graph):
        for value in [*graph.input, *graph.output, *graph.value_info, *graph.initializer]:
            value.name = new_name(value.name)
        for node in graph.node:
            node.name = new_name(node.name)
            for names in (node.input, node.output):
                for i, name in enumerate(names):
                    if name:
                        names[i] = new_name(name)


def take_parameters(
    model: onnx.ModelProto, inputs: Sequence[str], names: Mapping[str, str], *, prefix: str
) -> list[str]:
    """Remove parameters from the graph's inputs, under their final names; return those that are used.

    `names` maps a parameter's name in the module to its final name. Values of the exporter's own lose
    the adapter's scope.
    """
    final = {prefix + raw: clean for raw, clean in names.items()}
    scope = f"/{prefix.rstrip('.')}/"
    nodes = [node for graph in graphs(model.graph) for node in graph.node]
    # A shortened name may be one that the graph has already: then the long one stays.
    existing = {name for node in nodes for name in (node.name, *node.output)}

    def new_name(name: str) -> str:
        if name in final:
            return final[name]
        shorter = name[len(scope) - 1 :] if name.startswith(scope) else name
        return name if shorter in existing else shorter

    rename(model, new_name)
    # bodies of loops and branches read parameters too
    used = {name for graph in graphs(model.graph) for node in graph.node for name in node.input}
    used |= {output.name for output in model.graph.output}
    parameters = dict.fromkeys(names.values())
    graph_inputs = [value for value in model.graph.input if value.name in inputs]
    unknown = [v.name for v in model.graph.input if v.name not in inputs and v.name not in parameters]
    if unknown:
        raise ExportError(f"the exporter added inputs that are neither arguments nor parameters: {unknown}")
    del model.graph.input[:]
    model.graph.input.extend(graph_inputs)
    # The exporter may have embedded some already, or made one an Identity of another that is equal to it.
    present = {tensor.name for tensor in model.graph.initializer}
    present |= {name for node in model.graph.node for name in node.output}
    return [name for name in parameters if name in used - present]


def repair_dropout(model: onnx.ModelProto) -> None:
    """Give a Dropout without training_mode input one that is true: absent means false, so nothing drops.

    Exporters write the two-input form for attention dropout, and only where the rate is not zero. Before opset 12
    there is no such input: a mark says that the node is of a model in training mode.
    """
    old = opset_of(model) < 12
    for graph in graphs(model.graph):
        for node in graph.node:
            if old and node.op_type == "Dropout" and attribute_of(node, "ratio", 0.5) > 0:
                node.metadata_props.add(key=DROPOUT, value=ACTIVE)
                model.ir_version = max(model.ir_version, 10)  # the first in which nodes have metadata
        bare = [n for n in graph.node if n.op_type == "Dropout" and len([i for i in n.input if i]) == 2]
        if bare:
            name = "dropout.training_mode"
            true = helper.make_node(
                "Constant", [], [name], name=name, value=helper.make_tensor("", 9, [], [True])
            )
            graph.node.insert(0, true)
            for node in bare:
                del node.input[2:]
                node.input.append(name)


def mark_stops(model: onnx.ModelProto) -> None:
    """Write the exporter's StopGradient as Identity with a mark that the differentiator reads."""
    has_stops = False
    for graph in graphs(model.graph):
        for node in graph.node:
            if node.domain == "onward" and node.op_type == "StopGradient":
                node.domain, node.op_type = "", "Identity"
                node.metadata_props.add(key=GRADIENT, value=STOP)
                has_stops = True
    domains = [entry for entry in model.opset_import if entry.domain != "onward"]
    del model.opset_import[:]
    model.opset_import.extend(domains)
    if has_stops:  # the first version of the format in which nodes have metadata
        model.ir_version = max(model.ir_version, 10)


def active_dropouts(model: onnx.ModelProto) -> int:
    """How many Dropout nodes have a training_mode that is, or may be, true, or a mark that says so."""
    count = 0
    for graph in graphs(model.graph):
        # A training_mode that is computed may be true: it counts, as the check is for dropouts that are lost.
        constants = _constants(graph)
        for node in graph.node:
            count += any((entry.key, entry.value) == (DROPOUT, ACTIVE) for entry in node.metadata_props)
            if node.op_type == "Dropout" and len(node.input) > 2 and node.input[2]:
                mode = constants.get(node.input[2])
                count += mode is None or bool(mode)
    return count


def _constants(graph: onnx.GraphProto) -> dict[str, np.ndarray]:
    constants = {
        tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer if not tensor.dims
    }
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute[0].name == "value" and not node.attribute[0].t.dims:
            constants[node.output[0]] = numpy_helper.to_array(node.attribute[0].t)
    return constants


def converted(model: onnx.ModelProto, weights: Mapping[str, torch.Tensor], opset: int) -> onnx.ModelProto:
    """The graph in an older opset; `ModelError` names the operators that have no form there."""
    trained_norms = (
        node.op_type == "BatchNormalization" and attribute_of(node, "training_mode", 0)
        for graph in graphs(model.graph)
        for node in graph.node
    )
    if opset < 14 and any(trained_norms):
        raise ModelError(
            f"BatchNormalization in training mode has no form in opset {opset} that keeps its running statistics"
        )
    # Conversion looks at weights (a Clip's limits, an Upsample's scales), and must not keep them.
    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    attach(whole, weights)
    proto = ir.to_proto(lower(normalize(whole), opset))
    own_initializers = [tensor for tensor in proto.graph.initializer if tensor.name not in weights]
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(own_initializers)
    return proto


def set_axes(
    model: onnx.ModelProto,
    inputs: Mapping[str, tuple[torch.Tensor, Mapping[int, str]]],
    outputs: Mapping[str, tuple[torch.Tensor, Mapping[int, str]]],
) -> None:
    """Declare type and shape of every input and output: sizes of the tensor, names on its dynamic axes."""
    for values, table in ((model.graph.input, inputs), (model.graph.output, outputs)):
        for value in values:
            tensor, axes = table[value.name]
            shape = [axes.get(axis, size) for axis, size in enumerate(tensor.shape)]
            value.CopyFrom(helper.make_tensor_value_info(value.name, element_type(value.name, tensor), shape))


def element_type(name: str, tensor: torch.Tensor) -> int:
    if tensor.dtype not in _ELEMENT_TYPES:
        raise ExportError(f"'{name}' has dtype {tensor.dtype}, which ONNX models cannot hold here")
    return _ELEMENT_TYPES[tensor.dtype]


def record(model: onnx.ModelProto, properties: Mapping[str, object]) -> None:
    """Write metadata as JSON values."""
    helper.set_model_props(model, {key: json.dumps(value) for key, value in properties.items()})


def attach(model: onnx.ModelProto, weights: Mapping[str, torch.Tensor]) -> None:
    """Add the weights to the model as initializers, in order."""
    for name, tensor in weights.items():
        proto = model.graph.initializer.add()
        proto.name, proto.data_type = name, element_type(name, tensor)
        proto.dims.extend(tensor.shape)
        # raw bytes: typed fields are several times as slow to fill and to parse
        proto.raw_data = _buffer(tensor).tobytes()


def _buffer(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def size_of(weights: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in weights.values())


def checkable_target(path: str | os.PathLike[str]) -> Path:
    """The path, if a file can be made there; raises before any work is done."""
    target = Path(path)
    if target.is_dir():
        raise ExportError(f"cannot write '{target}': it is a directory")
    if not target.parent.is_dir():
        raise ExportError(f"cannot write '{target}': directory '{target.parent}' does not exist")
    if not os.access(target.parent, os.W_OK):
        raise ExportError(f"cannot write '{target}': no permission to write in '{target.parent}'")
    return target


def save(
    model: onnx.ModelProto, weights: Mapping[str, torch.Tensor], target: Path, *, external: bool
) -> None:
    """Save model and weights at `target`, at once or not at all; external weights go to a file named by its content."""
    try:
        # A crash halfway leaves the old file and its data, or the new ones, and never a mix.
        with write_set(target.parent) as staging:
            path = staging / target.name
            if external:
                _attach_external(model, weights, path.with_name(f"{path.name}.data"))
            else:
                attach(model, weights)
            # deterministic: two exports of one module give the same bytes
            path.write_bytes(model.SerializeToString(deterministic=True))
            name_data_by_content(path)
    except OSError as error:
        raise ExportError(f"cannot write '{target}': {error}") from error


def _attach_external(model: onnx.ModelProto, weights: Mapping[str, torch.Tensor], data: Path) -> None:
    with open(data, "wb") as file:
        for name, tensor in weights.items():
            file.write(b"\0" * (-file.tell() % 64))  # aligned, so that a reader may map the file
            proto = model.graph.initializer.add()
            proto.name, proto.data_type = name, element_type(name, tensor)
            proto.dims.extend(tensor.shape)
            proto.data_location = TensorProto.EXTERNAL
            buffer = _buffer(tensor)
            for key, value in (("location", data.name), ("offset", file.tell()), ("length", buffer.nbytes)):
                proto.external_data.add(key=key, value=str(value))
            file.write(buffer.data)
