"""Preserves stopped gradients and custom backward passes in a trace.

A trace records only the forward pass. `detach`, `no_grad` and the backward pass of a `torch.autograd.Function` would
be lost silently. While this module's context is active, the trace records them with one operator,
`onward::StopGradient`, which `assemble.mark_stops` turns into a marked Identity.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.overrides import TorchFunctionMode

from onward.errors import ExportError
from onward.export.torch.replace import replaced

STOP = "onward::StopGradient"
_INT64 = 7  # as ONNX numbers types
_MODE = "onward_gradients_on"

_backend: Any = torch._C
_jit: Any = torch.jit
_run_backward: Any = torch.autograd.graph._engine_run_backward
# What `Function.apply` calls in the end, also where a module has kept `Function.apply` itself under a name of its own.
_owner: Any = torch.autograd.Function.__mro__[1]


def _original_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    return vars(_backend._FunctionBase)["apply"].__get__(None, cls)(*args, **kwargs)


@contextmanager
def keeping_gradients(model: nn.Module) -> Iterator[None]:
    """Trace within it: regions without gradients and custom backward passes are kept."""
    switch, trace, data = _backend._set_grad_enabled, _jit._get_trace_graph, _backend.TensorBase.data

    def set_grad_enabled(mode: bool) -> Any:
        state = _backend._get_tracing_state()
        if state is not None:
            # a node that no pass removes: it tells where in the trace the mode changes
            # The tracer knows nothing of modes; a print has side effects, so that it stays where it is.
            graph = state.graph()
            marker = graph.insertNode(graph.create("prim::Print", [], 0))
            marker.i_(_MODE, int(mode))
        return switch(mode)

    def get_trace_graph(*args: Any, **kwargs: Any) -> Any:
        with torch.enable_grad():
            traced = trace(*args, **kwargs)
        _detach_regions(traced[0])
        return traced

    parameters = {id(parameter) for parameter in model.parameters()}
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    with replaced(
        # nothing is to be kept for a backward pass that never comes
        *((parameter, "requires_grad", False) for parameter in model.parameters()),
        (_backend, "_set_grad_enabled", set_grad_enabled),
        (_jit, "_get_trace_graph", get_trace_graph),
        (torch.utils.checkpoint, "checkpoint", _call_without_checkpoint),
        (torch.Tensor, "data", _data_in_trace(data, parameters, trained)),
        (_owner, "apply", classmethod(_apply)),
    ):
        yield


def _data_in_trace(held: Any, parameters: set[int], trained: set[int]) -> property:
    """`x.data`, a constant to the tracer: x without a gradient, and what is written there is x from then on."""

    def read(x: Any) -> Any:
        if not _jit.is_tracing():
            return held.__get__(x)
        # writes into a frozen parameter's data are writes into the parameter
        return x if id(x) in parameters - trained else x.detach()

    def write(x: Any, value: Any) -> None:
        if not _jit.is_tracing() or id(x) not in parameters:
            held.__set__(x, value)
        elif value is not x:
            # the gradient goes to the parameter, whatever its value has become
            x.copy_(value.detach() + (x - x.detach()) if id(x) in trained else value)

    return property(read, write)


def _call_without_checkpoint(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Checkpointing computes again what it did not keep: the same values and gradients."""
    own_options = (
        "use_reentrant",
        "context_fn",
        "determinism_check",
        "debug",
        "early_stop",
        "preserve_rng_state",
    )
    return function(*args, **{name: value for name, value in options.items() if name not in own_options})


def _detach_regions(graph: Any) -> None:
    """Stop the gradient of what was computed while gradients were off and is read where they are on."""
    on, off, nodes = True, set(), []
    for node in list(graph.nodes()):
        if node.kind() == "prim::Print" and node.hasAttribute(_MODE):
            on = bool(node.i(_MODE))
            node.destroy()
            continue
        if not on:
            off.add(len(nodes))
        nodes.append(node)
    if not off:
        return
    # Regions end where a value is read outside: a stop at each value inside would only make the graph longer.
    inside = {value.unique() for index in off for value in nodes[index].outputs()}
    # Values that a later node outside reads, in the order of the graph.
    stopped: dict[int, Any] = {}
    readers = [(node, list(node.inputs())) for index, node in enumerate(nodes) if index not in off]
    readers.append((graph.return_node(), list(graph.return_node().inputs())))
    for node, inputs in readers:
        for position, value in enumerate(inputs):
            if value.unique() in inside and _is_real(value):
                if value.unique() not in stopped:
                    stop = graph.create("aten::detach", [value])
                    stop.output().setType(value.type())
                    stop.insertAfter(value.node())
                    stopped[value.unique()] = stop.output()
                node.replaceInput(position, stopped[value.unique()])


def _is_real(value: Any) -> bool:
    kind = value.type()
    if kind.kind() != "TensorType":
        return False
    # None is a type that the tracer has not worked out, and may be a float.
    return kind.scalarType() in (None, "Float", "Double", "Half", "BFloat16")


def stop_symbolics() -> dict[str, Callable[..., Any]]:
    """How the tracer writes operators that say something about gradients."""
    symbolic: Any = torch.onnx.symbolic_helper  # type: ignore[reportPrivateImportUsage]

    def stop(g: Any, x: Any) -> Any:
        return g.op(STOP, x).setType(x.type())

    def embedding(g: Any, weight: Any, indices: Any, padding_idx: Any, by_frequency: Any, sparse: Any) -> Any:
        if symbolic._parse_arg(by_frequency, "b"):
            raise ExportError("an embedding with scale_grad_by_freq=True cannot be exported for training")
        rows = g.op("Gather", weight, indices)
        padding = symbolic._parse_arg(padding_idx, "i")
        if padding < 0:
            return rows
        # the same rows, but without a gradient where they are padding
        # ONNX's Gather has no padding: without this the row that torch keeps would train.
        number = g.op("Constant", value_t=torch.tensor(padding, dtype=torch.int64))
        indices = g.op("Cast", indices, to_i=_INT64)
        is_padding = symbolic._unsqueeze_helper(g, g.op("Equal", indices, number), [-1])
        return g.op("Where", is_padding, g.op(STOP, rows).setType(rows.type()), rows).setType(rows.type())

    return {
        "aten::detach": stop,
        "aten::detach_": stop,
        "prim::data": stop,
        "aten::embedding": embedding,
    }


# ---- custom autograd functions -----------------------------------------------------------------------


class _Context:
    """Stands in for the context that a Function's forward and backward share."""

    def __init__(self, count: int) -> None:
        self.saved_tensors: tuple[Any, ...] = ()
        self.needs_input_grad = (True,) * count
        self.materialize_grads = True

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    save_for_forward = save_for_backward

    def mark_dirty(self, *tensors: Any) -> None: ...

    def mark_non_differentiable(self, *tensors: Any) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """A Function in a trace: what its forward computes, with the gradient that its backward gives.

    Where backward is the derivative of forward, that is all. Where it multiplies what arrives by numbers m
    (straight-through estimators, clipped or reversed gradients, surrogates), y = f(x) is written as
    stop(f(x)) + s − stop(s) with s = x·stop(m): the same y, and dy·m for x. Any other backward that is linear in
    what arrives is written by its transpose: see `_by_transpose`.
    """
    if _backend._get_tracing_state() is None:
        return _original_apply(cls, *args, **kwargs)
    with _paused():
        kind, slopes = _classify(cls, args)
    if kind == "plain":
        return _forward(cls, args)[0]
    if kind == "linear":
        return _by_transpose(cls, args)
    if kind != "scaled":
        raise ExportError(
            f"{_describe_function(cls)} has a backward pass of its own that an ONNX model cannot say, "
            f"called {calling_line()}: it is not linear in what arrives, or not made of "
            "torch's differentiable operators. Compute the forward pass with torch's operators instead"
        )
    out, context = _forward(cls, args)
    result = out.detach()
    # A backward that scales what arrives gives its factors for ones.
    factors = cls.backward(context, torch.ones_like(result))
    factors = factors if isinstance(factors, tuple) else (factors,)
    for position, slope in slopes.items():
        x = args[position]
        passed = x if slope == 1.0 else x * factors[position].detach()
        result = result + (passed - passed.detach())
    return result


def _by_transpose(cls: Any, args: Sequence[Any]) -> Any:
    """A Function whose backward B is linear: y = stop(f(x)) + Bᵀ·(x − stop(x)), whose gradient for x is B(dy).

    Bᵀ·v is the derivative of ⟨B(u), v⟩ with respect to u. The second term is zero and there for its gradient alone.
    """
    out, context = _forward(cls, args)
    single = not isinstance(out, tuple)
    outs = [out] if single else list(out)
    real = [position for position, o in enumerate(outs) if _is_float(o)]
    results = [o.detach() if _is_float(o) else o for o in outs]
    constants_before = _baked_constants()
    # The transpose of a linear function is its vector-Jacobian product, which torch can take: twice is Bᵀ.
    with torch.enable_grad(), _SingleProducts():
        arriving = [torch.zeros_like(results[position]).requires_grad_() for position in real]
        cotangents = [
            arriving[real.index(position)] if position in real else None for position in range(len(outs))
        ]
        factors = _backward(cls)(context, *cotangents)
        factors = factors if isinstance(factors, tuple) else (factors,)
        used = [(x, factor) for x, factor in zip(args, factors) if _is_float(factor) and factor.requires_grad]
        # not `autograd.grad`, which compares shapes first, and those are values in a trace
        tangents = _run_backward(
            tuple(factor for _, factor in used),
            tuple(x - x.detach() for x, _ in used),
            False,
            False,
            tuple(arriving),
            allow_unreachable=True,
            accumulate_grad=False,
        )
    for position, tangent in zip(real, tangents):
        if tangent is not None:
            results[position] = results[position] + tangent
    if _baked_constants() > constants_before:
        raise ExportError(
            f"the backward pass of {_describe_function(cls)}, called {calling_line()}, is made of operators "
            "whose derivative keeps values of the example: write its products with torch.bmm or torch.mm"
        )
    return results[0] if single else tuple(results)


def _baked_constants() -> int:
    """How many tensors of real numbers the trace holds as constants: derivatives may keep what it does not follow."""
    graph = _backend._get_tracing_state().graph()
    return sum(
        node.kind() == "prim::Constant"
        and node.hasAttribute("value")
        and node.kindOf("value") == "t"
        and node.t("value").is_floating_point()
        and node.t("value").dim() > 0
        for node in graph.nodes()
    )


_PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)


class _SingleProducts(TorchFunctionMode):
    """Products as the one operator that computes them, whose derivative keeps the operands that the trace knows."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _PRODUCTS:
            return func(*args, **(kwargs or {}))
        a, b = args
        if a.dim() == b.dim() == 2:
            return torch.mm(a, b)
        if a.dim() == b.dim() == 3 and a.shape[0] == b.shape[0]:
            return torch.bmm(a, b)
        if a.dim() == b.dim() > 3 and a.shape[:-2] == b.shape[:-2]:
            product = torch.bmm(a.flatten(0, -3), b.flatten(0, -3))
            return product.reshape(*a.shape[:-1], b.shape[-1])
        return func(a, b)


def _is_float(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def _backward(cls: Any) -> Callable[..., Any]:
    """A Function's backward, without the decorator that forbids to differentiate it."""
    return getattr(cls.backward, "__wrapped__", cls.backward)


@contextmanager
def _paused() -> Iterator[None]:
    """Compute something that is no part of the trace."""
    state = _backend._get_tracing_state()
    _backend._set_tracing_state(None)
    try:
        with torch.enable_grad():
            yield
    finally:
        _backend._set_tracing_state(state)


def _forward(cls: Any, args: Sequence[Any]) -> tuple[Any, _Context]:
    context = _Context(len(args))
    if cls.setup_context is not torch.autograd.Function.setup_context:
        out = cls.forward(*args)
        cls.setup_context(context, args, out)
        return out, context
    return cls.forward(context, *args), context


def _classify(cls: Any, args: Sequence[Any]) -> tuple[str, dict[int, float | None]]:
    """What backward does, found by running it: "plain", "scaled" with the slope by input, or "other"."""

    def fresh() -> list[Any]:
        return [
            a.detach().clone().requires_grad_(a.is_floating_point()) if isinstance(a, torch.Tensor) else a
            for a in args
        ]

    real = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and a.is_floating_point()]
    if not real:
        return "plain", {}
    # Through torch's own machinery first: that is what the module trains with, whatever our stand-ins do.
    sample = fresh()
    out = _original_apply(cls, *sample)
    outs = [o for o in (out if isinstance(out, tuple) else (out,)) if isinstance(o, torch.Tensor)]
    outs = [o for o in outs if o.requires_grad]
    if not outs:
        return "plain", {}
    generator = torch.Generator().manual_seed(0)
    # Random rather than ones: a backward that sums, say, is right for ones by chance.
    arriving = [torch.randn(o.shape, generator=generator).to(o) for o in outs]
    leaves = [sample[i] for i in real]
    got = torch.autograd.grad(outs, leaves, arriving, allow_unused=True, retain_graph=True)
    try:
        again = fresh()
        plain, _ = _forward(cls, again)
        plains = [o for o in (plain if isinstance(plain, tuple) else (plain,)) if isinstance(o, torch.Tensor)]
        pairs = [(o, d) for o, d in zip([o for o in plains if o.is_floating_point()], arriving)]
        pairs = [(o, d) for o, d in pairs if o.requires_grad]
        expected = torch.autograd.grad(
            [o for o, _ in pairs], [again[i] for i in real], [d for _, d in pairs], allow_unused=True
        ) if pairs else [None] * len(real)  # fmt: skip
        if all(_close(a, b) for a, b in zip(got, expected)):
            return "plain", {}
    except Exception:  # forward need not work with gradients on: that is what its backward is for
        pass
    linear = "linear" if _is_linear(cls, args, outs) else "other"
    if len(outs) > 1 or isinstance(out, tuple):
        return linear, {}
    # Elementwise scaling is dy ↦ m·dy with one m: what ones give must explain what random numbers gave.
    ones = torch.autograd.grad(outs, leaves, [torch.ones_like(outs[0])], allow_unused=True)
    slopes: dict[int, float | None] = {}
    for position, gradient, factor in zip(real, got, ones):
        if gradient is None or factor is None:
            continue
        if gradient.shape != outs[0].shape or not _close(gradient, arriving[0] * factor):
            return linear, {}
        slopes[position] = 1.0 if bool((factor == 1).all()) else None
    return "scaled", slopes


def _is_linear(cls: Any, args: Sequence[Any], outs: Sequence[torch.Tensor]) -> bool:
    """Whether backward is B with B(2a − b) = 2B(a) − B(b), in operators that torch can differentiate."""
    plain = [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args]
    with torch.no_grad():
        out, context = _forward(cls, plain)
    places = [_is_float(o) for o in (out if isinstance(out, tuple) else (out,))]
    generator = torch.Generator().manual_seed(1)

    def back(arriving: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        left = iter(arriving)
        got = _backward(cls)(context, *(next(left) if real else None for real in places))
        return list(got) if isinstance(got, tuple) else [got]

    try:
        a, b = ([torch.randn(o.shape, generator=generator).to(o) for o in outs] for _ in range(2))
        leaves = [x.requires_grad_() for x in a]
        first = back(leaves)
        second, both = back(b), back([2 * x.detach() - y for x, y in zip(a, b)])
        reached = [g for g in first if isinstance(g, torch.Tensor)]
        if not reached or not all(g.requires_grad or not g.any() for g in reached):
            return False
        return all(
            s is not None and _close(t, 2 * f.detach() - s)
            for f, s, t in zip(first, second, both)
            if f is not None
        )
    except Exception:  # saved results, kernels without a derivative
        return False


def _close(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        other = b if a is None else a
        return other is None or not bool(other.any())
    # Against the largest: single numbers near zero are sums of larger ones that cancel.
    scale = float(b.abs().max()) if b.numel() else 0.0
    return a.shape == b.shape and bool(((a - b).abs() <= 1e-4 * scale + 1e-6).all())


def _describe_function(cls: Any) -> str:
    try:
        return f"{cls.__name__} ({inspect.getsourcefile(cls)}:{inspect.getsourcelines(cls.backward)[1]})"
    except (OSError, TypeError):
        return str(cls.__name__)


def calling_line() -> str:
    """Where in the user's own code, or a library's, we are: the nearest line that is not torch's or ours."""
    own = (torch.__path__[0], str(Path(__file__).parent))
    # From the inside out, so that a library's line is named and not the caller's of the whole model.
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(own):
            return f"at {frame.filename}:{frame.lineno} ({frame.line})"
    return "somewhere"
