"""`onward.gradient`: a plain ONNX model that also outputs gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnx_ir as ir

from onward.autodiff import registry
from onward.autodiff.engine import DifferentiableBuilder, backward, find_path
from onward.autodiff.peephole import improve
from onward.autodiff.prepare import prepare
from onward.autodiff.sequences import zeros
from onward.errors import ModelError
from onward.graph.dialect.normalize import normalize
from onward.graph.gc_paused import gc_paused
from onward.graph.nodes import ancestors, captured_values, is_differentiable, stops_gradient, subgraphs_of
from onward.graph.passes.explicit_state import make_statistics_explicit
from onward.graph.passes.finish import finish
from onward.graph.prune import find_value, find_values
from onward.graph.shapes.bodies import infer_graph

if TYPE_CHECKING:
    from onward.graph.load import ModelSource

__all__ = ["add_gradients", "find_value", "gradient", "vector_jacobian"]


@gc_paused()
def gradient(
    model: ModelSource,
    of: str | None = None,
    wrt: Sequence[str] | str | None = None,
    *,
    cotangent: str | None = None,
) -> onnx.ModelProto:
    """A model with the given one's inputs and outputs, and `{name}_grad` for each name in `wrt`.

    `of` is the value to differentiate (default: the first output). Where it is not a scalar, name an input
    to be added with `cotangent`: the gradient is then that of Σ cotangent·value. `wrt` names inputs or
    initializers (default: every floating input).

    >>> import onnx.parser
    >>> square = onnx.parser.parse_model(
    ...     '<ir_version: 10, opset_import: ["": 21]> g (float[N] x) => (float y) {'
    ...     '  xx = Mul(x, x)  y = ReduceSum<keepdims=0>(xx) }')
    >>> [output.name for output in gradient(square, of="y", wrt=["x"]).graph.output]
    ['y', 'x_grad']
    """
    prepared = normalize(model)
    graph = prepared.graph
    op = DifferentiableBuilder(graph)
    make_statistics_explicit(op)
    target = graph.outputs[0] if of is None else find_value(graph, of)
    if wrt is None:
        sources = [value for value in graph.inputs if is_differentiable(value)]
    else:
        sources = find_values(graph, [wrt] if isinstance(wrt, str) else wrt)
    _require_real([target, *sources])
    if not sources:
        raise ModelError(
            "nothing to differentiate with respect to: the model has no floating input; name some in wrt"
        )
    if cotangent is not None:
        seed = _cotangent(op, cotangent, target)
    else:
        seed = _one(op, target)
    for value, derivative in add_gradients(op, {target: seed}, sources).items():
        _append_output(op, derivative, value)
    return ir.to_proto(finish(prepared))


@gc_paused()
def vector_jacobian(
    model: ModelSource, *, of: Sequence[str] | None = None, wrt: Sequence[str] | None = None
) -> tuple[onnx.ModelProto, list[str], list[str]]:
    """A model from the inputs and `{output}_cotangent` for each of `of` to `{name}_grad` for each of `wrt`.

    Returns it with the names used: by default every floating output and input.
    """
    prepared = normalize(model)
    graph = prepared.graph
    op = DifferentiableBuilder(graph)
    make_statistics_explicit(op)
    targets = [v for v in graph.outputs if is_differentiable(v)] if of is None else find_values(graph, of)
    sources = [v for v in graph.inputs if is_differentiable(v)] if wrt is None else find_values(graph, wrt)
    targets, sources = list(dict.fromkeys(targets)), list(dict.fromkeys(sources))
    _require_real([*targets, *sources])
    names = [v.name or "" for v in targets], [v.name or "" for v in sources]
    seeds = {value: _cotangent(op, f"{value.name}_cotangent", value) for value in targets}
    # A product alone: the model's own outputs would be computed for nothing.
    graph.outputs.clear()
    for value, derivative in add_gradients(op, seeds, sources).items():
        _append_output(op, derivative, value)
    return ir.to_proto(finish(prepared)), *names


def _require_real(values: Sequence[ir.Value]) -> None:
    for value in values:
        if not is_differentiable(value):
            raise ModelError(f"'{value.name}' is {value.type}: only floating tensors have gradients")


def _cotangent(op: DifferentiableBuilder, name: str, value: ir.Value) -> ir.Value:
    """An input for the incoming gradient of a value; for an optional, of its content."""
    kind = value.type
    seed = op.input(name, None, value.shape)
    # The gradient of an optional is that of what it holds, so that nothing is packed.
    seed.type = kind.elem_type if isinstance(kind, ir.OptionalType) else kind
    return seed


def _append_output(op: DifferentiableBuilder, derivative: ir.Value, value: ir.Value) -> None:
    # Not through the builder, which would find an Identity of the model and so rename one of its values.
    node = ir.Node("", "Identity", [derivative], num_outputs=1, name=op.namer(f"{value.name}_grad/Identity"))
    op.graph.append(node)
    (named,) = node.outputs
    named.name = _claim(op, f"{value.name}_grad")
    named.type = derivative.type
    named.shape = value.shape
    op.graph.outputs.append(named)


def _claim(op: DifferentiableBuilder, name: str) -> str:
    """Name an output as requested, renaming an inner value that has the name."""
    if op.namer.is_free(name):
        return op.namer(name)
    for value in (value for node in op.graph for value in node.outputs):
        # A gradient of a gradient model: it holds `x_grad` already, and the caller asks for that name.
        if value.name == name and not value.is_graph_output():
            value.name = op.namer(f"{name}/inside")
            return name
    return op.namer(name)


def add_gradients(
    op: DifferentiableBuilder, cotangents: dict[ir.Value, ir.Value], wrt: Sequence[ir.Value]
) -> dict[ir.Value, ir.Value]:
    """Like `backward`, with zeros where nothing depends on a value."""
    infer_graph(op)  # ONNX drops the shapes of loops, which gradients of their states need
    prepare(op.graph, cotangents)
    forward = set(op.graph)  # peephole rewrites leave these alone
    gradients = improve(op, forward, backward(op, cotangents, wrt))
    return {value: zeros(op, value) if dx is None else dx for value, dx in gradients.items()}


def _one(op: DifferentiableBuilder, target: ir.Value) -> ir.Value:
    if not isinstance(target.type, ir.TensorType):
        raise ModelError(f"'{target.name}' is {target.type}: name a cotangent input (cotangent='…')")
    dims = op.static_shape(target)
    # A loss of shape [1] or [1, 1] is common, and as good as a scalar.
    if target.shape is not None and any(isinstance(d, int) and d != 1 for d in target.shape):
        raise ModelError(
            f"'{target.name}' has shape [{', '.join(map(str, target.shape))}], not one element: "
            "differentiate a scalar, or name a cotangent input (cotangent='…')"
        )
    one = np.ones((1,) if dims is None else dims, dtype=op.dtype(target).numpy())
    return op.constant(one, name="one") if dims is not None else op.Expand(op.constant(one), op.Shape(target))


# --- Says why a parameter gets no gradient: the operators on its way to the loss that nothing trains through.


# Operators that only look at the shape of what they read: they stop nothing.
_OF_SHAPES = frozenset({"Shape", "Size", "ConstantOfShape", "EyeLike"})


def untrainable(graph: ir.Graph, loss: ir.Value, parameters: Sequence[ir.Value]) -> list[str]:
    """One sentence for each parameter that reaches the loss only through operators without a slope.

    A parameter that does not reach the loss at all is none of them: freezing parts of a model is common.
    """
    active = find_path(graph, {loss}, parameters).active
    idle = [value for value in parameters if value not in active]
    if not idle:
        return []
    # A parameter that a stop keeps from an unused output is none of the user's concern.
    needed = ancestors([loss])
    lines = []
    for value in idle:
        stops = _stops(graph, value, needed)
        if stops:
            shown = ", ".join(f"{node.op_type} '{node.name}'" for node in stops[:3])
            lines.append(
                f"'{value.name}' gets no gradient: {shown} between it and the loss "
                f"{'is' if len(stops) == 1 else 'are'} constant almost everywhere, so nothing can train through "
                f"{'it' if len(stops) == 1 else 'them'}"
            )
    return lines


def _reads(node: ir.Node) -> list[ir.Value]:
    captured = captured_values(node) if subgraphs_of(node) else []
    return [value for value in [*node.inputs, *captured] if value is not None]


def _stops(graph: ir.Graph, source: ir.Value, needed: set[ir.Value]) -> list[ir.Node]:
    reached, stops = {source}, []
    for node in graph:
        if not any(value in reached for value in _reads(node)) or node.op_type in _OF_SHAPES:
            continue
        if not any(output in needed for output in node.outputs):
            continue
        # Round and Sign: a slope of zero nearly everywhere, which no optimizer can follow.
        if registry.is_constant(node.op_type, node.domain):
            stops.append(node)
        elif not stops_gradient(node):
            reached.update(node.outputs)
    return stops
