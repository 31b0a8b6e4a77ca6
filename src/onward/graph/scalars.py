"""Takes the scalar arithmetic out of an optimizer model, so that it is done once a step and not for every block.

Works on protobuf alone, like `specialize`: it is on the way of every start of training.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping

import numpy as np
import onnx

__all__ = ["ScalarProgram", "split_scalars", "without_scaling"]

_OPERATORS: dict[str, Callable[..., float]] = {
    "Cast": lambda a: a,
    "Identity": lambda a: a,
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "Div": lambda a, b: a / b,
    "Pow": lambda a, b: a**b,
    "Sqrt": math.sqrt,
    "Neg": lambda a: -a,
    "Reciprocal": lambda a: 1.0 / a,
    "Min": min,
    "Max": max,
}


@dataclasses.dataclass(frozen=True)
class ScalarProgram:
    """Scalars computed from scalars: (operator, inputs, output, in float32) in order, over known constants."""

    constants: Mapping[str, float]
    steps: list[tuple[Callable[..., float], list[str], str, bool]]
    results: list[str]

    def run(self, values: Mapping[str, float]) -> dict[str, float]:
        """The results for given inputs, each step rounded as the model would."""
        known = {**self.constants, **values}
        for function, inputs, output, single in self.steps:
            value = function(*[known[name] for name in inputs])
            known[output] = float(np.float32(value)) if single else value
        return {name: known[name] for name in self.results}


def split_scalars(model: onnx.ModelProto, scalars: Collection[str]) -> tuple[ScalarProgram, onnx.ModelProto]:
    """The program over the inputs named in `scalars`, and the model that takes its results as inputs.

    Scalars that the rest reads itself, and operators that the program cannot do, stay in the model.
    """
    constants = {
        tensor.name: float(onnx.numpy_helper.to_array(tensor).reshape(-1)[0])
        for tensor in model.graph.initializer
        if math.prod(tensor.dims) == 1
    }
    known = {*scalars, *constants}
    kinds = {value.name: value.type.tensor_type.elem_type for value in model.graph.value_info}
    steps, rest = [], []
    for node in model.graph.node:
        if node.op_type in _OPERATORS and not node.domain and known.issuperset(node.input):
            single = kinds.get(node.output[0]) == onnx.TensorProto.FLOAT
            steps.append((_OPERATORS[node.op_type], list(node.input), node.output[0], single))
            known.add(node.output[0])
        else:
            rest.append(node)
    made = {output for _, _, output, _ in steps}
    read = [name for node in rest for name in node.input]
    results = [name for name in dict.fromkeys(read) if name in made]
    slim = onnx.ModelProto()
    slim.CopyFrom(model)
    graph = slim.graph
    del graph.node[:], graph.value_info[:]
    graph.node.extend(rest)
    for value in [value for value in graph.input if value.name in scalars and value.name not in read]:
        graph.input.remove(value)
    for tensor in [tensor for tensor in graph.initializer if tensor.name not in read]:
        graph.initializer.remove(tensor)
    graph.input.extend(
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in results
    )
    return ScalarProgram(constants, steps, results), slim


def without_scaling(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy for a gradient scale of 1: the gradient is read as it is."""
    plain = onnx.ModelProto()
    plain.CopyFrom(model)
    graph = plain.graph
    for node in [
        n for n in graph.node if n.op_type == "Mul" and list(n.input) == ["gradient", "gradient_scale"]
    ]:
        for other in graph.node:
            for index, name in enumerate(other.input):
                if name == node.output[0]:
                    other.input[index] = "gradient"
        graph.node.remove(node)
    if not any("gradient_scale" in node.input for node in graph.node):
        for value in [value for value in graph.input if value.name == "gradient_scale"]:
            graph.input.remove(value)
    return plain
