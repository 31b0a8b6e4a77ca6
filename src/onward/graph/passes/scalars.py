"""Extracts the scalar arithmetic of an optimizer model, so that it runs once per step and not for every block.

Works on protobuf directly, like `specialize`, to be fast: it runs whenever training starts.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx

__all__ = ["ScalarProgram", "Step", "split_scalars", "to_single", "without_scaling"]

_OPERATORS: dict[str, Callable[..., Any]] = {
    "Cast": float,
    "Identity": float,
    "Add": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
    "Div": operator.truediv,
    "Pow": operator.pow,
    "Sqrt": math.sqrt,
    "Neg": operator.neg,
    "Reciprocal": lambda a: 1.0 / a,
    "Min": min,
    "Max": max,
}


# An operator, the places of its inputs (None where there is one), and whether the result is float32.
Step = tuple[Callable[..., Any], int, int | None, bool]


def to_single(value: float) -> float:
    """The float32 nearest to a number.

    >>> to_single(0.1)
    0.10000000149011612
    """
    return ctypes.c_float(value).value


@dataclasses.dataclass(frozen=True)
class ScalarProgram:
    """Scalars computed from scalars, in order.

    Every value has a place in one list: the inputs first, then `constants`, then what each step makes.
    """

    constants: Sequence[float]
    steps: Sequence[Step]
    places: Mapping[str, int]

    @property
    def results(self) -> list[str]:
        """The names of what it computes."""
        return list(self.places)

    def run(self, *values: float) -> list[float]:
        """The results for given inputs, each step rounded as the model would."""
        known = [*values, *self.constants]
        for function, first, second, single in self.steps:
            value = function(known[first]) if second is None else function(known[first], known[second])
            known.append(ctypes.c_float(value).value if single else value)
        return [known[place] for place in self.places.values()]


def split_scalars(model: onnx.ModelProto, scalars: Sequence[str]) -> tuple[ScalarProgram, onnx.ModelProto]:
    """The program over the inputs named in `scalars`, and the model that takes its results as inputs.

    Scalars that the rest reads itself, and operators that the program cannot do, stay in the model.
    """
    constants = {
        tensor.name: float(onnx.numpy_helper.to_array(tensor).reshape(-1)[0])
        for tensor in model.graph.initializer
        if math.prod(tensor.dims) == 1
    }
    place = {name: index for index, name in enumerate([*scalars, *constants])}
    kinds = {value.name: value.type.tensor_type.elem_type for value in model.graph.value_info}
    steps: list[Step] = []
    rest, made = [], set()
    for node in model.graph.node:
        known = not node.domain and 0 < len(node.input) <= 2 and all(name in place for name in node.input)
        if known and node.op_type in _OPERATORS:
            single = kinds.get(node.output[0]) == onnx.TensorProto.FLOAT
            second = place[node.input[1]] if len(node.input) == 2 else None
            steps.append((_OPERATORS[node.op_type], place[node.input[0]], second, single))
            place[node.output[0]] = len(place)
            made.add(node.output[0])
        else:
            rest.append(node)
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
    return ScalarProgram(list(constants.values()), steps, {name: place[name] for name in results}), slim


def without_scaling(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy for a gradient scale of 1, without the multiplication."""
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
