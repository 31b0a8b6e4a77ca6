"""Stores matrices that a graph only ever reads transposed as it reads them.

A transposition of a constant costs time at every load, and hides the matrix from quantizers.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onward.graph.nodes import attribute


def fold_transposes(model: ir.Model) -> None:
    """Transpose every initializer that all of its readers transpose alike, in place."""
    for name, value in list(model.graph.initializers.items()):
        perm = common_transposition(value)
        # What is an input too may be fed by a caller, in the shape that it has.
        if perm is None or value.is_graph_input() or value.const_value is None:
            continue
        read_directly(value)
        array = np.ascontiguousarray(value.const_value.numpy().transpose(perm))
        # Under another name: whoever looks for the parameter must not find its transpose.
        value.name = f"{name}.transposed"
        value.const_value = ir.tensor(array, name=value.name)
        value.shape = ir.Shape(array.shape)


def common_transposition(value: ir.Value) -> list[int] | None:
    """The permutation that every reader of a value applies; None where there is none or they differ."""
    readers = value.consumers()
    perms = {tuple(attribute(node, "perm", ())) for node in readers}
    if value.is_graph_output() or any(
        node.op_type != "Transpose" or node.outputs[0].is_graph_output() for node in readers
    ):
        return None
    return list(perms.pop()) or None if len(perms) == 1 else None


def read_directly(value: ir.Value) -> None:
    """Remove the transpositions of a value: their readers read the value itself."""
    for node in list(value.consumers()):
        node.outputs[0].replace_all_uses_with(value)
        assert node.graph is not None
        node.graph.remove(node, safe=True)
