"""Specializes a training model for a known `lazy_reset_grad`: no `Where`, and one pass over memory less.

Works on protobuf directly, to be
fast: it runs whenever training starts.
"""

from __future__ import annotations

import onnx

from onward.contract import BUFFER, RESET
from onward.errors import MAKE_ARTIFACTS, ModelError

__all__ = ["FIRST_SCALE", "specialize_reset"]

# What is made of buffers before the choice: their sum with gradients, and one vector of several of them.
_SUMS = frozenset({"Add", "Concat"})
# Where the scale of a loss in float16 begins.
FIRST_SCALE = 65536.0


def specialize_reset(model: onnx.ModelProto, *, reset: bool, keep_shapes: bool = False) -> onnx.ModelProto:
    """A copy in which gradients overwrite their buffers (`reset`) or are always accumulated.

    What the file says of values inside goes, unless `keep_shapes`: `specialize_shapes` is the faster with it.
    """
    special = onnx.ModelProto()
    special.CopyFrom(model)
    graph = special.graph
    renamed: dict[str, str] = {}
    drop: set[int] = set()
    places = {node.output[0]: index for index, node in enumerate(graph.node) if node.op_type in _SUMS}
    for index, node in enumerate(graph.node):
        if node.op_type != "Where" or node.input[0] != RESET:
            continue
        _, gradient, accumulated = node.input
        if accumulated not in places:
            raise ModelError(
                f"the training model does not add up '{accumulated}', as one of generate_artifacts does: make it again",
                hint=MAKE_ARTIFACTS,
            )
        drop.add(index)
        if reset:
            drop.add(places[accumulated])
            # buffers of several vectors are joined before they are added
            drop.update(
                places[n] for n in graph.node[places[accumulated]].input if n in places and n != gradient
            )
            renamed[gradient] = node.output[0] if gradient not in renamed else renamed[gradient]
            if renamed[gradient] != node.output[0]:  # two parameters share one gradient
                graph.node.append(onnx.helper.make_node("Identity", [renamed[gradient]], [node.output[0]]))
        else:
            renamed[accumulated] = node.output[0]
    kept = [node for index, node in enumerate(graph.node) if index not in drop]
    produced = {name for node in kept for name in node.output}
    for name in [name for name in renamed if name not in produced]:
        # a gradient that is a constant or an input of the graph cannot be renamed
        kept.append(onnx.helper.make_node("Identity", [name], [renamed.pop(name)]))
    for node in kept:
        _rename(node, renamed)
    del graph.node[:]
    graph.node.extend(kept)
    gone = {RESET} | ({v.name for v in graph.input if v.name.endswith(BUFFER)} if reset else set())
    for value in [value for value in graph.input if value.name in gone]:
        graph.input.remove(value)
    if not keep_shapes:
        del graph.value_info[:]
    return special


def _rename(node: onnx.NodeProto, names: dict[str, str]) -> None:
    for field in (node.input, node.output):
        for index, name in enumerate(field):
            if name in names:
                field[index] = names[name]
    for attribute in node.attribute:
        if attribute.HasField("g"):
            for inner in attribute.g.node:
                _rename(inner, names)
