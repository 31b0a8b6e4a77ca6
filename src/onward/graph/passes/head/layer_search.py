"""Finds the layer that makes a model's logits: the one Gemm, MatMul or Conv from which an output follows.

Between the two may be operators that do not mix classes: softmax (also decomposed into elementary operators),
reshapes, pooling, a bias.
"""

from __future__ import annotations

import difflib

import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.nodes import producer_of, required_input, single_number

_LINEAR = {"Gemm", "MatMul", "Conv", "ConvTranspose"}
ACTIVATIONS = {"Softmax", "LogSoftmax", "Sigmoid", "HardSigmoid"}
# between the head and the output: none of these mixes classes or depends on their number
_PASSING = ACTIVATIONS | {
    *("Identity", "Cast", "Dropout", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose"),
    *("Relu", "LeakyRelu", "Clip", "Tanh", "Exp", "Log", "Neg", "Add", "Sub", "Mul", "Div", "Max", "Min"),
    *("GlobalAveragePool", "AveragePool", "GlobalMaxPool", "MaxPool", "Expand"),
    *("ReduceMean", "ReduceMax", "ReduceSum", "ReduceLogSumExp"),
    # of the scores of pixels, which segmentation networks enlarge at their end
    *("Resize", "Upsample"),
}
# layers and activations in whole numbers: what is fine-tuned is the model that they were made of
_QUANTIZED = {
    *("QLinearMatMul", "QLinearConv", "MatMulInteger", "ConvInteger", "QuantizeLinear", "DequantizeLinear"),
    *("DynamicQuantizeLinear", "QGemm", "QLinearAdd", "QLinearMul", "QLinearSigmoid", "QLinearSoftmax"),
    *("QLinearGlobalAveragePool", "QLinearAveragePool", "DynamicQuantizeMatMul", "MatMulIntegerToFloat"),
    *("MatMulNBits", "MatMulBnb4"),
}
# at most so many layers are named in an error
_MOST = 8


def find_layer(graph: ir.Graph, result: ir.Value, name: str | None) -> ir.Node:
    """The layer that makes the scores; an error with the candidates where there is no single one."""
    reached, problem = _reach(result)
    if name is not None:
        node = layer_named(graph, name)
        if node is None:
            near = difflib.get_close_matches(name, _layer_names(graph), n=3)
            hint = f"; did you mean {', '.join(repr(n) for n in near)}?" if near else ""
            raise ModelError(f"no layer, weight or value of the model is called '{name}'{hint}")
        if node not in reached or problem:
            after = f": {problem}" if problem else ""
            raise ModelError(
                f"'{name}' does not make the scores of '{result.name}'{after}. To cut the model there, name a "
                f"value instead: head='{required_input(node).name}' puts a new layer on it"
            )
        return node
    if len(reached) == 1 and not problem:
        return next(iter(reached))
    if "is quantized" in problem:
        raise ModelError(
            f"no new head for '{result.name}': {problem}. Fine-tune the float model that this one was made of, and "
            "quantize the result (onward deploy --quantize int8)"
        )
    why = problem or (
        f"{len(reached)} layers make '{result.name}' together"
        if reached
        else "no layer with weights makes it"
    )
    raise ModelError(_candidates(graph, result, why))


def _reach(result: ir.Value) -> tuple[dict[ir.Node, None], str]:
    """The layers from which an output is made, and what stands in the way of any being the head."""
    reached: dict[ir.Node, None] = {}
    problem = ""
    seen: set[ir.Value] = set()
    todo = [result]
    while todo:
        value = todo.pop()
        if value in seen or _is_constant(value):
            continue
        seen.add(value)
        node = value.producer()
        if node is None:
            problem = problem or f"the input '{value.name}' goes into the output without a layer"
        elif class_axis(node) is not None:
            reached[node] = None
        elif node.op_type == "Shape":
            continue  # sizes, not scores
        elif node.op_type in _QUANTIZED:
            problem = problem or f"the model is quantized ({node.op_type} '{node.name or value.name}')"
        elif takes_only_score(node):
            todo.append(required_input(node))
        elif node.op_type not in _PASSING or node.domain not in ("", "ai.onnx"):
            problem = problem or f"{node.op_type} '{node.name or value.name}' comes after the last layer"
        else:
            data = (
                node.inputs[:1]
                if node.op_type in ("Reshape", "Expand", "Squeeze", "Unsqueeze", "Resize", "Upsample")
                else node.inputs
            )
            todo += [operand for operand in data if operand is not None]
    return reached, problem


def takes_only_score(node: ir.Node) -> bool:
    """Whether a Gather takes the one score that there is, which is a Squeeze: `logits[:, 0]`."""
    if node.op_type != "Gather" or len(node.inputs) != 2 or single_number(node.inputs[1]) != 0.0:
        return False
    data, axis = required_input(node), node.attributes.get_int("axis", 0)
    if data.shape is None:
        layer = data.producer()
        shape = None if layer is None or class_axis(layer) is None else constant_shape(layer.inputs[1])
        return shape is not None and layer is not None and shape[class_axis(layer) or 0] == 1 and axis != 0
    return axis != 0 and data.shape[axis] == 1


def class_axis(node: ir.Node) -> int | None:
    """Which axis of a layer's weight counts classes; None for what is no layer with constant weights."""
    if node.op_type not in _LINEAR or node.domain not in ("", "ai.onnx") or len(node.inputs) < 2:
        return None
    weight = node.inputs[1]
    shape = constant_shape(weight)
    if node.op_type in ("Conv", "ConvTranspose"):
        single = shape is not None and node.attributes.get_int("group", 1) == 1
        return (0 if node.op_type == "Conv" else 1) if single else None
    if node.op_type == "Gemm":
        return None if shape is None else 0 if node.attributes.get_int("transB", 0) else 1
    if shape is None or len(shape) < 2 or any(size != 1 for size in shape[:-2]):
        return None
    return len(shape) - 1


def constant_shape(value: ir.Value | None) -> tuple[int, ...] | None:
    """The shape of a weight, also of one that is transposed, cast or dequantized on its way."""
    if value is None:
        return None
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is not None:
        return tuple(tensor.shape.numpy())
    node = value.producer()
    if node is None:
        return None
    if node.op_type in ("Identity", "Cast", "DequantizeLinear"):
        return constant_shape(node.inputs[0])
    if node.op_type == "Transpose":
        inner = constant_shape(node.inputs[0])
        if inner is not None:
            order = node.attributes.get_ints("perm", tuple(reversed(range(len(inner)))))
            return tuple(inner[axis] for axis in order)
    return None


def _is_constant(value: ir.Value) -> bool:
    return constant_shape(value) is not None


def _layers(graph: ir.Graph) -> list[ir.Node]:
    return [node for node in graph if class_axis(node) is not None]


def layer_named(graph: ir.Graph, name: str) -> ir.Node | None:
    """The layer of a name: its node's, its output's or its weight's."""
    for node in _layers(graph):
        weight = node.inputs[1]
        source = producer_of(weight)
        inner = source.inputs[0] if source is not None and source.inputs else None
        if name in (node.name, *(value.name for value in (node.outputs[0], weight, inner) if value)):
            return node
    return None


def _layer_names(graph: ir.Graph) -> list[str]:
    values = [value.name or "" for node in graph for value in node.outputs]
    return [*(node.name or "" for node in _layers(graph)), *values, *graph.initializers]


def _candidates(graph: ir.Graph, result: ir.Value, why: str) -> str:
    lines = []
    for node in list(reversed(_layers(graph)))[:_MOST]:
        shape = constant_shape(node.inputs[1])
        lines.append(f"  {node.op_type:<7} '{node.name or node.outputs[0].name}'  weight {list(shape or ())}")
    listed = "\n".join(lines) or "  none"
    features = [f"head='{required_input(node).name}'" for node in _layers(graph)] or ["head='VALUE'"]
    outputs = ", ".join(f"'{value.name}'" for value in graph.outputs)
    return (
        f"no single layer makes the scores of '{result.name}': {why}. The last layers are:\n{listed}\n"
        f"Name one of them (head=…), another output (outputs are {outputs}), or a value that a new layer is put on, "
        f"such as head='{result.name}' or {features[-1]}"
    )
