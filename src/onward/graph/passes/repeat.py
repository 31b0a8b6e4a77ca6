"""Repeats a model over parts of its inputs, in one graph.

Works on protobuf directly, like `scalars`, since it is on the way of every start of training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx

__all__ = ["repeat"]


def repeat(
    model: onnx.ModelProto, *, shared: Sequence[Mapping[str, str]], own: Sequence[str], sizes: Sequence[int]
) -> onnx.ModelProto:
    """One copy of an elementwise model for each of `sizes`, in a row.

    The inputs named in `own`, the outputs and what is in between become `name.0`, `name.1` and so on; `own` and
    the outputs have that size. Copy i reads other inputs under the names that `shared[i]` gives them.
    """
    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    graph = whole.graph
    del graph.node[:], graph.input[:], graph.output[:], graph.value_info[:]
    constants = {tensor.name for tensor in model.graph.initializer}
    inputs = {value.name for value in model.graph.input}
    given: dict[str, onnx.ValueInfoProto] = {}
    for index, size in enumerate(sizes):
        names = {name: name for name in constants | inputs} | dict(shared[index])
        names |= {name: f"{name}.{index}" for name in own}
        for value in model.graph.input:
            copy = _named(value, names[value.name], size if value.name in own else None)
            given[copy.name] = copy
        for node in model.graph.node:
            copy = graph.node.add()
            copy.CopyFrom(node)
            copy.name = f"{node.name}.{index}"
            for place, name in enumerate(node.input):
                copy.input[place] = names.get(name, f"{name}.{index}") if name else ""
            for place, name in enumerate(node.output):
                copy.output[place] = f"{name}.{index}"
        graph.output.extend(_named(value, f"{value.name}.{index}", size) for value in model.graph.output)
    graph.input.extend(given.values())
    return whole


def _named(value: onnx.ValueInfoProto, name: str, size: int | None) -> onnx.ValueInfoProto:
    copy = onnx.ValueInfoProto()
    copy.CopyFrom(value)
    copy.name = name
    if size is not None:
        copy.type.tensor_type.shape.ClearField("dim")
        copy.type.tensor_type.shape.dim.add().dim_value = size
    return copy
