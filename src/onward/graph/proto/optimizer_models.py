"""Rewrites of optimizer models, which compute the update of one parameter elementwise.

`split_scalars` extracts the arithmetic of scalars, so that it runs once per step and not for every block of every
parameter; `fuse_multiply_add` writes x ± s·t of vectors as a Gemm with a single row; `repeat` makes one graph of the
rule for several parameters.

The fusion works on protobuf because `Optimizer` needs it at every start, with the scalars outside;
`whole_step.row_rule` does it on onnx-ir when a step is built, with the scalars inside.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from onward import contract
from onward.graph.protobuf import copy_of

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
    slots: Mapping[str, int]

    @property
    def results(self) -> list[str]:
        """The names of what it computes."""
        return list(self.slots)

    def run(self, *values: float) -> list[float]:
        """The results for given inputs, each step rounded as the model would."""
        numbers = [*values, *self.constants]
        for function, first, second, single in self.steps:
            value = function(numbers[first]) if second is None else function(numbers[first], numbers[second])
            numbers.append(ctypes.c_float(value).value if single else value)
        return [numbers[slot] for slot in self.slots.values()]


def split_scalars(model: onnx.ModelProto, scalars: Sequence[str]) -> tuple[ScalarProgram, onnx.ModelProto]:
    """The program over the inputs named in `scalars`, and the model that takes its results as inputs.

    Scalars that the rest reads itself, and operators that the program cannot do, stay in the model.
    """
    constants = {
        tensor.name: float(onnx.numpy_helper.to_array(tensor).reshape(-1)[0])
        for tensor in model.graph.initializer
        if math.prod(tensor.dims) == 1
    }
    slots = {name: index for index, name in enumerate([*scalars, *constants])}
    kinds = {value.name: value.type.tensor_type.elem_type for value in model.graph.value_info}
    steps: list[Step] = []
    remaining, computed = [], set()
    for node in model.graph.node:
        is_scalar = not node.domain and 0 < len(node.input) <= 2 and all(name in slots for name in node.input)
        if is_scalar and node.op_type in _OPERATORS:
            single = kinds.get(node.output[0]) == onnx.TensorProto.FLOAT
            second = slots[node.input[1]] if len(node.input) == 2 else None
            steps.append((_OPERATORS[node.op_type], slots[node.input[0]], second, single))
            slots[node.output[0]] = len(slots)
            computed.add(node.output[0])
        else:
            remaining.append(node)
    read = [name for node in remaining for name in node.input]
    results = [name for name in dict.fromkeys(read) if name in computed]
    slim = copy_of(model)
    graph = slim.graph
    del graph.node[:], graph.value_info[:]
    graph.node.extend(remaining)
    for value in [value for value in graph.input if value.name in scalars and value.name not in read]:
        graph.input.remove(value)
    for tensor in [tensor for tensor in graph.initializer if tensor.name not in read]:
        graph.initializer.remove(tensor)
    graph.input.extend(
        onnx.helper.make_tensor_value_info(name, kinds.get(name, onnx.TensorProto.FLOAT), [1])
        for name in results
    )
    return ScalarProgram(list(constants.values()), steps, {name: slots[name] for name in results}), slim


def number_type(model: onnx.ModelProto) -> int:
    """The element type of the parameter that a model updates, and so of its gradient, state and scalars."""
    kinds = {value.name: value.type.tensor_type.elem_type for value in model.graph.input}
    return kinds.get("parameter", onnx.TensorProto.FLOAT)


def without_scaling(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy for a gradient scale of 1, without the multiplication."""
    plain = copy_of(model)
    graph = plain.graph
    scalings = [
        n for n in graph.node if n.op_type == "Mul" and list(n.input) == ["gradient", "gradient_scale"]
    ]
    for node in scalings:
        for other in graph.node:
            for index, name in enumerate(other.input):
                if name == node.output[0]:
                    other.input[index] = "gradient"
        graph.node.remove(node)
    if not any("gradient_scale" in node.input for node in graph.node):
        for value in [value for value in graph.input if value.name == "gradient_scale"]:
            graph.input.remove(value)
    return plain


def leaves_alone(
    run: Callable[[dict[str, np.ndarray]], Sequence[Any]],
    inputs: Collection[str],
    state: Sequence[str],
    shape: tuple[int, ...],
    dtype: np.dtype,
) -> bool:
    """Whether a rule keeps a parameter with zero gradient, state and weight decay exactly as it is, at any step.

    `run` computes the next values of `state` (the parameter and its slots) for those of the rule's inputs.
    """
    zeros = np.zeros(shape, dtype)
    parameter = np.linspace(-2, 2, zeros.size, dtype=dtype).reshape(shape)
    before = {name: parameter if name == "parameter" else zeros for name in state}
    feeds = {
        **before,
        "gradient": zeros,
        "learning_rate": np.full(1, 0.1, dtype),
        "gradient_scale": np.ones(1, dtype),
        "weight_decay": np.zeros(1, dtype),
    }
    for step in (1, 2, 1000):
        # Bias correction depends on the step: what holds at the first may not later.
        feeds["step"] = np.full(1, step, np.int64)
        # copies: a runtime may write into what it is fed
        after = run({name: array.copy() for name, array in feeds.items() if name in inputs})
        if not all(np.array_equal(new, old) for new, old in zip(after, before.values(), strict=True)):
            return False
    return True


def as_rows(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy whose vectors [N] and scalars [1] are matrices of one row: an elementwise graph does not care."""
    rows = copy_of(model)
    for value in [*rows.graph.input, *rows.graph.output]:
        shape = value.type.tensor_type.shape
        if len(shape.dim) == 1:
            shape.dim.insert(0, onnx.TensorShapeProto.Dimension(dim_value=1))
    del rows.graph.value_info[:]
    return rows


def fuse_multiply_add(
    model: onnx.ModelProto, program: ScalarProgram, scalars: Sequence[str]
) -> tuple[ScalarProgram, onnx.ModelProto]:
    """A model of rows with its multiply-adds fused, and the program with the negative scalars that it needs.

    `scalars` are the program's inputs. An output `x.next` may lie in the memory of the input `x`, which a Gemm
    fills before it reads its factors: where `x` is a factor, nothing is fused.
    """
    fused = copy_of(model)
    graph = fused.graph
    constants = {t.name: t for t in graph.initializer if np.prod(t.dims, dtype=np.int64) == 1}
    computed = {**{name: index for index, name in enumerate(scalars)}, **program.slots}
    kind = number_type(model)
    steps, slots = list(program.steps), dict(program.slots)
    size = len(scalars) + len(program.constants) + len(steps)
    outputs = {value.name for value in graph.output}
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    fused_away: list[onnx.NodeProto] = []
    for node in graph.node:
        factor = _factor(node, {*constants, *computed})
        users = readers.get(node.output[0], [])
        if factor is None or len(users) != 1 or node.output[0] in outputs:
            continue
        scalar, vector = factor
        user = users[0]
        added = [name for name in user.input if name != node.output[0]]
        negative = user.op_type == "Sub" and user.input[1] == node.output[0]
        if (user.op_type != "Add" and not negative) or len(added) != 1:
            continue
        if added[0] in constants or added[0] in computed or user.output[0] == f"{vector}{contract.NEXT}":
            continue
        if scalar in constants:
            name = f"{scalar}/{'negative' if negative else 'row'}"
            if not any(tensor.name == name for tensor in graph.initializer):
                value = onnx.numpy_helper.to_array(constants[scalar]).reshape(1, 1)
                graph.initializer.append(onnx.numpy_helper.from_array(-value if negative else value, name))
        elif negative:
            name = f"{scalar}/negative"
            if name not in slots:
                steps.append((operator.neg, computed[scalar], None, False))
                slots[name] = size
                size += 1
            if not any(value.name == name for value in graph.input):
                graph.input.append(onnx.helper.make_tensor_value_info(name, kind, [1, 1]))
        else:
            name = scalar
        user.op_type = "Gemm"
        user.input[:] = [name, vector, added[0]]
        fused_away.append(node)
    for node in fused_away:
        graph.node.remove(node)
    _drop_unread(graph)
    return ScalarProgram(program.constants, steps, slots), fused


def _factor(node: onnx.NodeProto, scalars: Collection[str]) -> tuple[str, str] | None:
    """The scalar and the vector that a node multiplies."""
    if node.op_type != "Mul" or node.domain:
        return None
    one, other = node.input
    if (one in scalars) == (other in scalars):
        return None
    return (one, other) if one in scalars else (other, one)


def _drop_unread(graph: onnx.GraphProto) -> None:
    read = {name for node in graph.node for name in node.input}
    for value in [value for value in graph.input if value.name not in read]:
        graph.input.remove(value)
    for tensor in [tensor for tensor in graph.initializer if tensor.name not in read]:
        graph.initializer.remove(tensor)


def repeat(
    model: onnx.ModelProto,
    *,
    shared: Sequence[Mapping[str, str]],
    own: Sequence[str],
    shapes: Sequence[Sequence[int]],
) -> onnx.ModelProto:
    """One copy of an elementwise model for each of `shapes`, in a row.

    The inputs named in `own`, the outputs and what is in between become `name.0`, `name.1` and so on; `own` and
    the outputs have that shape. Copy i reads other inputs under the names that `shared[i]` gives them.
    """
    whole = copy_of(model)
    graph = whole.graph
    del graph.node[:], graph.input[:], graph.output[:], graph.value_info[:]
    constants = {tensor.name for tensor in model.graph.initializer}
    inputs = {value.name for value in model.graph.input}
    inputs_by_name: dict[str, onnx.ValueInfoProto] = {}
    for index, shape in enumerate(shapes):
        names = {name: name for name in constants | inputs} | dict(shared[index])
        names |= {name: f"{name}.{index}" for name in own}
        for value in model.graph.input:
            copy = _renamed(value, names[value.name], shape if value.name in own else None)
            inputs_by_name[copy.name] = copy
        for node in model.graph.node:
            copy = copy_of(node)
            copy.name = f"{node.name}.{index}"
            for position, name in enumerate(node.input):
                copy.input[position] = names.get(name, f"{name}.{index}") if name else ""
            for position, name in enumerate(node.output):
                copy.output[position] = f"{name}.{index}"
            graph.node.append(copy)
        graph.output.extend(_renamed(value, f"{value.name}.{index}", shape) for value in model.graph.output)
    graph.input.extend(inputs_by_name.values())
    return whole


def _renamed(value: onnx.ValueInfoProto, name: str, shape: Sequence[int] | None) -> onnx.ValueInfoProto:
    copy = copy_of(value)
    copy.name = name
    if shape is not None:
        dims = copy.type.tensor_type.shape
        dims.ClearField("dim")
        dims.dim.extend(onnx.TensorShapeProto.Dimension(dim_value=size) for size in shape)
    return copy
