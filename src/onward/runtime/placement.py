"""Which nodes of a model would run on the host where a device is asked for, and why."""

from __future__ import annotations

import dataclasses

import onnx
import onnxruntime as ort

from onward.graph.gate import read_proto
from onward.runtime.devices import CPU, Device
from onward.runtime.sessions import make_session

__all__ = ["HostNode", "host_nodes"]

_RECORD = "session.record_ep_graph_assignment_info"
_OF_SHAPES = frozenset({"Shape", "Size", "NonZero", "ConstantOfShape", "Range"})


@dataclasses.dataclass(frozen=True)
class HostNode:
    """A node that a device leaves to the host."""

    operator: str
    name: str
    reason: str


def host_nodes(model: onnx.ModelProto | str, device: Device) -> list[HostNode]:
    """The nodes that onnxruntime would not run on the device, as it has optimized the model: loads it there."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry(_RECORD, "1")
    proto = read_proto(model)
    session = make_session(model, device=device, options=options)
    kinds = _kinds(proto)
    made = {node.name: node for node in proto.graph.node}
    return [
        HostNode(node.op_type, node.name, _reason(node.op_type, made.get(node.name), kinds, device))
        for part in session.get_provider_graph_assignment_info()
        if part.ep_name == CPU
        for node in part.get_nodes()
    ]


def _reason(operator: str, node: onnx.NodeProto | None, kinds: dict[str, int], device: Device) -> str:
    given = [] if node is None else [kinds[name] for name in node.input if name in kinds]
    whole = onnx.TensorProto.INT64, onnx.TensorProto.INT32, onnx.TensorProto.BOOL
    if operator in _OF_SHAPES or (given and all(kind in whole for kind in given)):
        return "computes sizes, which the runtime keeps in host memory"
    if not given:
        return f"{device.provider} has no kernel for it, or it reads sizes"
    names = ", ".join(dict.fromkeys(onnx.TensorProto.DataType.Name(kind).lower() for kind in given))
    return f"{device.provider} has no kernel for it ({names})"


def _kinds(model: onnx.ModelProto) -> dict[str, int]:
    """The type of every value that is known."""
    try:
        graph = onnx.shape_inference.infer_shapes(model).graph
    except Exception:  # of a model of 2 GB and more, what its file says
        graph = model.graph
    kinds = {tensor.name: tensor.data_type for tensor in graph.initializer}
    for value in [*graph.value_info, *graph.input, *graph.output]:
        kinds[value.name] = value.type.tensor_type.elem_type
    return kinds
