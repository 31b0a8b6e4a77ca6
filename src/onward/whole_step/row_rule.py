"""An elementwise optimizer over rows [1, N], with x ± s·t of vectors as one Gemm: one pass over memory, not two.

The graph's own scalars stay in it, unlike in `graph.proto.optimizer_models`, which does the same for `Optimizer`. On
x86-64 both round between multiply and add, so results are bit-exact there.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onward import contract
from onward.contract import SCALARS
from onward.graph.builder import Builder
from onward.whole_step.update_units import drop_scaling


def over_rows(optimizer: ir.Model, *, scaled: bool) -> ir.Model:
    """A copy whose vectors are rows; unless `scaled`, without the factor that limits gradients.

    Nothing is fused that reads `x` as a factor to make `x.next`: the two may share memory, and a Gemm writes what it
    adds before it reads its factors.
    """
    model = optimizer.clone()
    graph = model.graph
    for value in [value for value in graph.inputs if value.name == "gradient_scale" and not scaled]:
        drop_scaling(value)
        graph.inputs.remove(value)
    for value in [*graph.inputs, *graph.outputs]:
        if value.name not in SCALARS and value.shape is not None and value.shape.rank() == 1:
            value.shape = ir.Shape([1, value.shape[0]])
    op = Builder(graph)
    scalars = {value for value in graph.inputs if value.name in SCALARS}
    scalars |= {value for value in graph.initializers.values() if _size(value) == 1}
    for node in list(graph):
        if all(value in scalars for value in node.inputs):
            scalars.update(node.outputs)
        else:
            for value in node.outputs:
                # of inner vectors the rank has changed; the runtime infers it again
                value.shape = value.shape if value.is_graph_output() else None
    as_matrix: dict[tuple[ir.Value, bool], ir.Value] = {}
    for node in list(graph):
        product = node.inputs[1] if node.op_type == "Sub" and not node.domain else None
        if node.op_type == "Add" and not node.domain:
            product = next((value for value in node.inputs if _factors(value, scalars)), None)
        factors = _factors(product, scalars)
        if product is None or factors is None:
            continue
        scalar, vector = factors
        added = next((value for value in node.inputs if value is not product), None)
        result = node.outputs[0]
        # Gemm writes what it adds over its output first: not where that is the memory of a factor.
        if added is None or added in scalars or result.name == f"{vector.name}{contract.NEXT}":
            continue
        negative = node.op_type == "Sub"
        with op.inserting(node):
            if (scalar, negative) not in as_matrix:
                as_matrix[scalar, negative] = _matrix(op, scalar, negative=negative)
            fused = op.Gemm(as_matrix[scalar, negative], vector, added)
        fused.name, fused.type, fused.shape = result.name, result.type, result.shape
        ir.convenience.replace_all_uses_with(result, fused, replace_graph_outputs=True)
        graph.remove(node, safe=True)
        multiply = product.producer()
        assert multiply is not None
        graph.remove(multiply, safe=True)
    return model


def _size(value: ir.Value) -> int:
    return -1 if value.const_value is None else value.const_value.size


def _factors(value: ir.Value | None, scalars: set[ir.Value]) -> tuple[ir.Value, ir.Value] | None:
    """The scalar and the vector of a product that nothing else reads."""
    node = None if value is None else value.producer()
    if value is None or node is None or node.op_type != "Mul" or node.domain:
        return None
    one, other = node.inputs
    if one is None or other is None or len(value.uses()) != 1 or value.is_graph_output():
        return None
    if (one in scalars) == (other in scalars):
        return None
    return (one, other) if one in scalars else (other, one)


def _matrix(op: Builder, scalar: ir.Value, *, negative: bool) -> ir.Value:
    constant = op.const_value(scalar)
    if constant is not None:
        number = constant.reshape(1, 1)
        return op.constant(-number if negative else number, name="factor")
    return op.Reshape(op.Neg(scalar) if negative else scalar, np.array([1, 1], np.int64))
