"""The two exporters of torch: the TorchScript tracer, which keeps parameter names and training semantics, and dynamo.

Both return a graph whose parameters are still inputs, named as in the module. Dynamo is for what the tracer cannot
follow, and for when torch removes that.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import Any

import onnx
import torch

from onward.errors import ExportError
from onward.export.torch.complex_numbers import dft_symbolic
from onward.export.torch.flatten import Adapter, NamedAxes
from onward.export.torch.keep_gradients import keeping_gradients, stop_symbolics
from onward.export.torch.patches import traceable
from onward.export.torch.replace import replaced

# What each accepts: the operator library of torch.export is written for 18; later ones follow.
OPSETS = {"torchscript": range(7, 23), "dynamo": range(18, 24)}


def trace_torchscript(
    adapter: torch.nn.Module,
    tensors: Sequence[torch.Tensor],
    *,
    inputs: NamedAxes,
    outputs: NamedAxes,
    opset: int,
    fold: bool = False,
) -> onnx.ModelProto:
    """Trace a module, which may be an adapter around a model, in the mode its parts are in.

    With `fold`, weights are embedded and constants folded, which renames them: for inference only. Without,
    no value is stored and every parameter is an input of the graph.
    """
    file = io.BytesIO()
    model = adapter.model if isinstance(adapter, Adapter) else adapter
    try:
        with ExitStack() as stack:
            stack.enter_context(traceable(model))
            # Where it fails, the tracer would print the whole graph: it overrides its own switch for that.
            stack.enter_context(replaced((_backend, "_jit_onnx_log", lambda *parts: None)))
            stack.enter_context(replaced((_backend, _INFERENCE, _infer_from_small_tensors)))
            # Where gradients stop matters to what is to be trained: from_torch's own adapters.
            trains = not fold and isinstance(adapter, Adapter)
            if trains:
                stack.enter_context(keeping_gradients(adapter))
            stack.enter_context(_translations(opset, stop_symbolics() if trains else {}))
            torch.onnx.export(
                adapter,
                tuple(tensors),
                file,  # type: ignore[arg-type]  # this path takes a file object
                dynamo=False,
                opset_version=opset,
                export_params=fold,
                # Folding renames what it transposes: a parameter would be called onnx::MatMul_352.
                do_constant_folding=fold,
                keep_initializers_as_inputs=False,
                # Whoever calls has set the modes; any other value would override a mix of them.
                training=torch.onnx.TrainingMode.PRESERVE if not fold else torch.onnx.TrainingMode.EVAL,
                input_names=list(inputs),
                output_names=list(outputs),
                dynamic_axes={name: dict(axes) for name, axes in {**inputs, **outputs}.items() if axes},
                verbose=False,
            )
    except ExportError:
        raise
    except torch.onnx.errors.UnsupportedOperatorError as error:
        # the error has no field for it
        operator = str(error).split("'")[1].removeprefix("aten::")
        raise MissingOperator(
            f"{type(model).__name__} cannot be exported at opset {opset}: ONNX has no form of torch's {operator}"
            f"{_line_in(error)}",
            operator,
        ) from error
    except Exception as error:  # the tracer raises errors of many kinds, and the module's own
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ExportError(
            f"{type(model).__name__} cannot be exported at opset {opset}: {reason[0]}"
        ) from error
    # Not checked here: weights are missing yet, and the comparison with torch loads it anyway.
    return onnx.load_model_from_string(file.getvalue())


_backend: Any = torch._C
_INFERENCE = "_jit_pass_onnx_graph_shape_type_inference"
_infer_shapes: Any = getattr(_backend, _INFERENCE)
_LARGEST_SHAPE = 1024  # numbers that sizes may be read from


def _infer_from_small_tensors(graph: Any, tensors: Mapping[str, torch.Tensor], opset: int) -> None:
    """The tracer's inference of shapes: it copies all the weights that it gets, though the graph has their shapes."""
    small = {name: tensor for name, tensor in tensors.items() if tensor.numel() <= _LARGEST_SHAPE}
    _infer_shapes(graph, small, opset)


def _line_in(error: Exception) -> str:
    """Where the user's code, or a library's, calls what cannot be exported, as far as the tracer's message says."""
    lines = re.findall(r"# (\S+?\.py:\d+)", str(error))
    outside = [line for line in lines if not line.startswith(torch.__path__[0])]
    return f", called at {outside[0]}" if outside else ""


class MissingOperator(ExportError):
    """The module uses an operator that the tracer cannot write."""

    def __init__(self, message: str, operator: str = "") -> None:
        super().__init__(message)
        self.operator = operator


@contextmanager
def _translations(opset: int, more: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Operators that the tracer does not know or writes wrongly, for as long as we trace."""
    registry: Any = torch.onnx
    table = {**_OWN, **more}
    for name, translation in table.items():
        registry.register_custom_op_symbolic(name, translation, opset)
    try:
        yield
    finally:
        for name in table:
            registry.unregister_custom_op_symbolic(name, opset)


def _cumsum(g: Any, x: Any, dim: Any, dtype: Any) -> Any:
    """Running sum; of booleans it counts, where the tracer's own would sum booleans."""
    symbolic: Any = torch.onnx.symbolic_helper  # type: ignore[reportPrivateImportUsage]
    axis = g.op("Constant", value_t=torch.tensor(symbolic._parse_arg(dim, "i"), dtype=torch.int64))
    scalar_type = None if symbolic._is_none(dtype) else symbolic._parse_arg(dtype, "i")
    if scalar_type is not None:
        x = g.op("Cast", x, to_i=symbolic.scalar_type_to_onnx[scalar_type])
    # As torch does: sums of small integers are int64.
    elif x.type().scalarType() in ("Bool", "Byte", "Char", "Short", "Int"):
        x = g.op("Cast", x, to_i=int(onnx.TensorProto.INT64))
    return g.op("CumSum", x, axis)


def _diff(g: Any, x: Any, n: Any, dim: Any, prepend: Any, append: Any) -> Any:
    """y[i] = x[i+1] - x[i] along one axis, of x with values before and after it."""
    symbolic: Any = torch.onnx.symbolic_helper  # type: ignore[reportPrivateImportUsage]
    axis = symbolic._parse_arg(dim, "i")
    if symbolic._parse_arg(n, "i") != 1:
        return symbolic._unimplemented("diff", "n other than 1", x)
    parts = [part for part in (prepend, x, append) if not symbolic._is_none(part)]
    whole = g.op("Concat", *parts, axis_i=axis) if len(parts) > 1 else x

    def constant(*values: int) -> Any:
        return g.op("Constant", value_t=torch.tensor(values, dtype=torch.int64))

    after = g.op("Slice", whole, constant(1), constant(2**62), constant(axis))
    before = g.op("Slice", whole, constant(0), constant(-1), constant(axis))
    return g.op("Sub", after, before)


def _scatter_reduce(g: Any, x: Any, dim: Any, index: Any, source: Any, reduce: Any, include_self: Any) -> Any:
    """x with what falls on each place reduced into it; the tracer's own asks for ranks at run time."""
    symbolic: Any = torch.onnx.symbolic_helper  # type: ignore[reportPrivateImportUsage]
    axis, kind = symbolic._parse_arg(dim, "i"), symbolic._parse_arg(reduce, "s")
    dtype = symbolic._try_get_scalar_type(source).dtype()

    def full(number: float, like: Any) -> Any:
        value = torch.tensor([number], dtype=dtype)
        return g.op("ConstantOfShape", g.op("Shape", like), value_t=value)

    def scatter(base: Any, values: Any, how: str) -> Any:
        return g.op("ScatterElements", base, index, values, axis_i=axis, reduction_s=how).setType(x.type())

    how, neutral = {
        "sum": ("add", 0.0),
        "mean": ("add", 0.0),
        "prod": ("mul", 1.0),
        "amax": ("max", -torch.inf),
        "amin": ("min", torch.inf),
    }[kind]
    includes_self = symbolic._parse_arg(include_self, "b")
    # Without x itself: its places are overwritten with what changes no result, before anything is reduced there.
    base = x if includes_self else scatter(x, full(neutral, source), "none")
    total = scatter(base, source, how)
    if kind != "mean":
        return total
    count = scatter(full(1.0 if includes_self else 0.0, x), full(1.0, source), "add")
    return g.op("Div", total, g.op("Max", count, g.op("Constant", value_t=torch.tensor(1.0, dtype=dtype))))


def _drawn(g: Any, x: Any, kind: str, **numbers: float) -> Any:
    symbolic: Any = torch.onnx.symbolic_helper  # type: ignore[reportPrivateImportUsage]
    dtype = symbolic._try_get_scalar_type(x)
    attributes = {f"{name}_f": value for name, value in numbers.items()}
    return g.op(kind, x, dtype_i=dtype.onnx_type(), **attributes).setType(x.type())


def _uniform(g: Any, x: Any, low: Any, high: Any, generator: Any = None) -> Any:
    """`x.uniform_(low, high)`"""
    symbolic: Any = torch.onnx.symbolic_helper  # type: ignore[reportPrivateImportUsage]
    bounds = {"low": symbolic._parse_arg(low, "f"), "high": symbolic._parse_arg(high, "f")}
    return _drawn(g, x, "RandomUniformLike", **bounds)


def _normal(g: Any, mean: Any, deviation: Any, sizes: Any, generator: Any, dtype: Any, *unused: Any) -> Any:
    """`x.normal_(mean, deviation)`, which the tracer turns into numbers of x's sizes; `torch.normal` is `randn`."""
    symbolic: Any = torch.onnx.symbolic_helper  # type: ignore[reportPrivateImportUsage]
    kind = int(onnx.TensorProto.FLOAT)
    if not symbolic._is_none(dtype):
        kind = symbolic.scalar_type_to_onnx[symbolic._parse_arg(dtype, "i")]
    shape = (
        g.op("Concat", *symbolic._unpack_list(sizes), axis_i=0) if symbolic._is_packed_list(sizes) else sizes
    )
    # RandomNormal takes its shape as an attribute, RandomNormalLike from a tensor, whose sizes may be open.
    like = g.op("ConstantOfShape", shape)
    numbers = {"mean_f": symbolic._parse_arg(mean, "f"), "scale_f": symbolic._parse_arg(deviation, "f")}
    return g.op("RandomNormalLike", like, dtype_i=kind, **numbers)


def _exponential(g: Any, x: Any, rate: Any, generator: Any = None) -> Any:
    """`x.exponential_(rate)`: −ln(1 − u)/rate"""
    symbolic: Any = torch.onnx.symbolic_helper  # type: ignore[reportPrivateImportUsage]
    dtype = symbolic._try_get_scalar_type(x).dtype()

    def number(value: float) -> Any:
        return g.op("Constant", value_t=torch.tensor(value, dtype=dtype))

    # 1 − u is never zero, as u is below one: its logarithm is finite.
    survival = g.op("Sub", number(1.0), _drawn(g, x, "RandomUniformLike", low=0.0, high=1.0))
    return g.op("Div", g.op("Log", survival), number(-symbolic._parse_arg(rate, "f"))).setType(x.type())


def _xor(g: Any, x: Any, y: Any) -> Any:
    """Exclusive or of booleans, or of the bits of integers, which the tracer takes for booleans."""
    symbolic: Any = torch.onnx.symbolic_helper  # type: ignore[reportPrivateImportUsage]
    if symbolic._is_bool(x) and symbolic._is_bool(y):
        return g.op("Xor", x, y)
    if g.opset < 18:
        return symbolic._unimplemented("__xor_", "integers before opset 18", x)
    return g.op("BitwiseXor", x, y)


def _unary(operator: str) -> Callable[..., Any]:
    return lambda g, x: g.op(operator, x).setType(x.type())


def _copy(g: Any, x: Any, source: Any, non_blocking: Any = None) -> Any:
    """`x.copy_(source)`: the source in x's type, spread over its shape"""
    symbolic: Any = torch.onnx.symbolic_helper  # type: ignore[reportPrivateImportUsage]
    kind = symbolic._try_get_scalar_type(x)
    cast = source if kind is None else g.op("Cast", source, to_i=kind.onnx_type())
    return g.op("Expand", cast, g.op("Shape", x)).setType(x.type())


_OWN: dict[str, Callable[..., Any]] = {
    "onward::dft": dft_symbolic,
    "aten::__xor_": _xor,
    "aten::bitwise_xor": _xor,
    **{f"aten::{name.lower()}": _unary(name) for name in ("Acosh", "Asinh", "Atanh", "Cosh", "Sinh")},
    "aten::copy": _copy,
    "aten::copy_": _copy,
    "aten::cumsum": _cumsum,
    "aten::diff": _diff,
    "aten::exponential": _exponential,
    "aten::normal": _normal,
    "aten::scatter_reduce": _scatter_reduce,
    "aten::uniform": _uniform,
}


# ---- torch.export ----------------------------------------------------------------------------------------


def trace_dynamo(
    adapter: Adapter,
    tensors: Sequence[torch.Tensor],
    *,
    inputs: NamedAxes,
    outputs: NamedAxes,
    opset: int,
) -> onnx.ModelProto:
    """Export the adapter in the mode its parts are in, without weights, through torch.export.

    Batch norm keeps its training mode, which torch would lose, and weights the names that the module has.
    """
    import onnx_ir as ir
    from onnx import inliner
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass

    # AUTO rather than named dimensions: relations between sizes (a multiple of four, say) are the module's
    # business, and an axis that turns out to be fixed is found by running the result.
    auto = torch.export.Dim.AUTO
    shapes = tuple(dict.fromkeys(axes, auto) or None for axes in inputs.values())
    try:
        # Where it fails, torch.export prints the whole graph.
        with traceable(adapter.model), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
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
                custom_translation_table=_dynamo_translations(),
            )
    except ExportError:
        raise
    except Exception as error:
        raise ExportError(
            f"{type(adapter.model).__name__} cannot be exported at opset {opset}: {_innermost_cause(error)}"
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

        # private, and the only list of what torch.export can write
        table = ONNXRegistry.from_torchlib()
        packet = getattr(torch.ops.aten, operator)
        return any(table.is_registered(getattr(packet, overload)) for overload in packet.overloads())
    except Exception:  # its tables are torch's own business, and may move
        return True


def _dynamo_translations() -> dict[Any, Any]:
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


def _innermost_cause(error: BaseException) -> str:
    """The innermost cause in one line: the outer ones are instructions for reporting bugs to torch."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _remove_unused(graph: onnx.GraphProto) -> None:
    """Drop nodes that lead to no output; whole nodes only, so batch norm keeps its statistics outputs."""
    needed = {output.name for output in graph.output}
    live_nodes: list[onnx.NodeProto] = []
    # Nodes are in order of computation: backwards, every reader comes before its writer.
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
