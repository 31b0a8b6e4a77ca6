"""Exports through torch.export (dynamo), for when torch removes the TorchScript tracer.

Fixes what it gets wrong for training: batch norm that it would export in inference mode, and weights that it
embeds under the last of their names.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from typing import TYPE_CHECKING, Any

import onnx
import torch

from onward.errors import ExportError
from onward.export.torch.patches import traceable

if TYPE_CHECKING:
    from onward.export.torch.flatten import Adapter, NamedAxes

# Its operator library is written for 18; later ones follow.
OPSETS = range(18, 24)


def trace(
    adapter: Adapter,
    tensors: Sequence[torch.Tensor],
    *,
    inputs: NamedAxes,
    outputs: NamedAxes,
    opset: int,
) -> onnx.ModelProto:
    """Export the adapter in the mode its parts are in, without weights."""
    import onnx_ir as ir
    from onnx import inliner
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass

    # AUTO rather than named dimensions: relations between sizes (a multiple of four, say) are the module's
    # business, and an axis that turns out to be fixed is found by running the result.
    auto = torch.export.Dim.AUTO
    shapes = tuple(dict.fromkeys(axes, auto) or None for axes in inputs.values())
    try:
        # Where it fails, torch.export prints the whole graph.
        with traceable(adapter.model), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            program = torch.export.export(adapter, tuple(tensors), dynamic_shapes=(shapes,), strict=False)
            exported = torch.onnx.export(
                program,
                (),
                dynamo=True,
                opset_version=opset,
                optimize=False,  # it merges weights away, and their names with them
                verbose=False,
                input_names=list(inputs),
                output_names=list(outputs),
                custom_translation_table=_translations(),
            )
    except ExportError:
        raise
    except Exception as error:
        raise ExportError(
            f"{type(adapter.model).__name__} cannot be exported at opset {opset}: {_reason(error)}"
        ) from error
    assert exported is not None
    module_tensors = {name for name, _ in adapter.named_parameters(remove_duplicate=False)}
    module_tensors |= {name for name, _ in adapter.named_buffers(remove_duplicate=False)}
    for name in module_tensors.intersection(exported.model.graph.initializers):
        del exported.model.graph.initializers[name]
    # Stack traces: where files lie on one machine is no part of a model, and takes most of a small one.
    ClearMetadataAndDocStringPass()(exported.model)
    proto = ir.to_proto(exported.model)
    if proto.functions:
        proto = inliner.inline_local_functions(proto)
    _remove_unused(proto.graph)
    return proto


def has_form(operator: str) -> bool:
    """Whether torch.export can write a primitive operator; True where torch does not tell."""
    try:
        from torch.onnx._internal.exporter._registration import ONNXRegistry

        table = ONNXRegistry.from_torchlib()
        packet = getattr(torch.ops.aten, operator)
        return any(table.is_registered(getattr(packet, overload)) for overload in packet.overloads())
    except Exception:  # its tables are torch's own business, and may move
        return True


def _translations() -> dict[Any, Any]:
    from onnxscript import opset18

    op: Any = opset18  # its annotations speak of values while it runs, not while it is traced

    def batch_norm(
        input: Any,
        weight: Any = None,
        bias: Any = None,
        running_mean: Any = None,
        running_var: Any = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Any:
        """Normalise with the batch's statistics; outputs 1 and 2 are the running ones after this step."""
        channels = op.Shape(input, start=1, end=2)
        one, zero = (
            op.CastLike(op.Expand(op.Constant(value_floats=[v]), channels), input) for v in (1.0, 0.0)
        )
        normal, mean, variance = op.BatchNormalization(
            input,
            one if weight is None else weight,
            zero if bias is None else bias,
            zero if running_mean is None else running_mean,
            one if running_var is None else running_var,
            epsilon=eps,
            momentum=1.0 - momentum,
            training_mode=1,
        )
        return normal, op.Identity(mean), op.Identity(variance), mean, variance

    def without_statistics(
        input: Any, weight: Any, bias: Any, training: bool = True, momentum: float = 0.1, eps: float = 1e-5
    ) -> Any:
        return batch_norm(input, weight, bias, None, None, training, momentum, eps)[:3]

    aten = torch.ops.aten
    # torch writes these in inference form, with outputs that are off by a third and more
    return {
        aten._native_batch_norm_legit_functional.default: batch_norm,
        aten._native_batch_norm_legit.no_stats: without_statistics,
    }


def _reason(error: BaseException) -> str:
    """The innermost cause in one line: the outer ones are instructions for reporting bugs to torch."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _remove_unused(graph: onnx.GraphProto) -> None:
    """Drop nodes that lead to no output; whole nodes only, so batch norm keeps its statistics outputs."""
    needed = {output.name for output in graph.output}
    live_nodes: list[onnx.NodeProto] = []
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            live_nodes.append(node)
            needed.update(node.input)
            needed.update(_outer_names(node))
    del graph.node[:]
    graph.node.extend(reversed(live_nodes))
    initializers = [tensor for tensor in graph.initializer if tensor.name in needed]
    del graph.initializer[:]
    graph.initializer.extend(initializers)


def _outer_names(node: onnx.NodeProto) -> set[str]:
    bodies = [a.g for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]
    names = {name for body in bodies for inner in body.node for name in inner.input}
    for body in bodies:
        for inner in body.node:
            names |= _outer_names(inner)
    return names | {output.name for body in bodies for output in body.output}
