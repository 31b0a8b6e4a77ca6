"""Exports a module as a graph of torch's primitive operators (ATen), which is then traced as any other module.

Recording a module so writes out what a trace cannot take: derivatives that forward itself computes
(`torch.autograd.grad`, `torch.func`), what compositions are made of, and complex numbers, which become pairs of reals
(`complex_numbers`). Sizes stay symbols.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import onnx
import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from onward.errors import ExportError
from onward.export.torch import complex_numbers, missing_functions, missing_layers
from onward.export.torch.complex_numbers import Pair
from onward.export.torch.flatten import Adapter, NamedAxes, real_parts
from onward.export.torch.missing_arrays import FOLLOWED_LENGTHS
from onward.export.torch.patches import one_dropout
from onward.export.torch.replace import Replacement, replaced
from onward.export.torch.tracers import trace_torchscript

# The operator for Fourier transforms is of 17.
OPSETS = range(17, 23)

_aten: Any = torch.ops.aten
_backend: Any = torch._C
_own: Any = torch.ops.onward
_library = torch.library.Library("onward", "FRAGMENT")
_library.define("stop(Tensor x) -> Tensor")
_library.define("dropout_mask(Tensor x, float p) -> Tensor")
_library.impl("stop", torch.clone, "CompositeExplicitAutograd")
_library.impl("dropout_mask", lambda x, p: torch.ones_like(x), "CompositeExplicitAutograd")


def trace(
    adapter: Adapter, tensors: Sequence[torch.Tensor], *, inputs: NamedAxes, outputs: NamedAxes, opset: int
) -> onnx.ModelProto:
    """Export the adapter in the mode its parts are in, without weights; complex parameters as pairs of reals."""
    try:
        graph = _record(adapter, tensors, list(inputs.values()))
    except ExportError:
        raise
    except Exception as error:  # whatever torch raises where it cannot follow the module
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ExportError(
            f"{type(adapter.model).__name__} cannot be written in torch's primitive operators: {reason[0]}"
        ) from error
    complex_state = {name for name, tensor in _state(adapter).items() if tensor.is_complex()}
    with replaced(*_real_parameters(adapter.model)):
        recorded = _Recorded(adapter, graph, complex_state)
        return trace_torchscript(recorded, tensors, inputs=inputs, outputs=outputs, opset=opset)


# ---- recording ----------------------------------------------------------------------------------------


# Functions whose primitive operators are kernels that nothing takes apart.
_KERNELS = frozenset({"cdist", "pdist", "inverse", "inv", "solve", "cholesky", "slogdet", "ctc_loss"})
# They are recorded as what they are composed of.
_COMPOSED: list[Replacement] = [
    entry for entry in (*missing_functions.MISSING, *missing_layers.MISSING) if entry[1] in _KERNELS
]


def _record(
    adapter: Adapter, tensors: Sequence[torch.Tensor], axes: Sequence[Mapping[int, str]]
) -> GraphModule:
    """The adapter as a function of its parameters and inputs, in operators that change nothing in place."""
    from torch._decomp import core_aten_decompositions
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    # not one symbol for all axes that have the same size in the example
    fake = FakeTensorMode(shape_env=ShapeEnv(duck_shape=False), allow_non_fake_inputs=True)

    def without_numbers(tensor: torch.Tensor, dynamic: Mapping[int, str], *, trains: bool) -> torch.Tensor:
        kinds = [DimDynamic.DYNAMIC if axis in dynamic else DimDynamic.STATIC for axis in range(tensor.dim())]
        context: Any = StatelessSymbolicContext(dynamic_sizes=kinds)
        return fake.from_tensor(tensor.detach(), symbolic_context=context).requires_grad_(trains)

    weights = {name: without_numbers(t, {}, trains=t.requires_grad) for name, t in _state(adapter).items()}
    examples = [without_numbers(t, names, trains=False) for t, names in zip(tensors, axes)]

    def call(weights: dict[str, torch.Tensor], *values: torch.Tensor) -> Any:
        return torch.func.functional_call(adapter, weights, values)

    table: dict[Any, Any] = {
        key: rule for key, rule in core_aten_decompositions().items() if key not in _AS_THEY_ARE
    }
    table |= _BACKWARD_PASSES
    # `torch.func.jvp`, `jacfwd` and `hessian` by reverse mode: torch's forward mode makes numbers of sizes
    transforms: Any = importlib.import_module("torch._functorch.eager_transforms")
    patches = (*_COMPOSED, FOLLOWED_LENGTHS, (transforms, "_jvp_with_argnums", _jvp))
    with fake, torch.enable_grad(), one_dropout(_masked), replaced(*patches), _Stops():
        first = make_fx(call, tracing_mode="symbolic", decomposition_table=table)(weights, *examples)
    # in a second step, as torch does not differentiate writes into complex tensors once they are rewritten
    with fake, torch.no_grad():
        weights = {name: value.detach() for name, value in weights.items()}
        examples = [value.detach() for value in examples]
        # Functional only now: writes become values, which a graph can hold.
        again = make_fx(torch.func.functionalize(first), tracing_mode="symbolic", decomposition_table=table)
        second = again(weights, *examples)
    # what only the backward passes inside would have read
    second.graph.eliminate_dead_code()
    return second


def _jvp(
    function: Callable[..., Any], primals: tuple[Any, ...], tangents: Any, argnums: Any, *, strict: bool = False,
    has_aux: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """f(x) and J·t, the derivative of u ↦ Jᵀ·u, which is the same for every u"""
    varied = range(len(primals)) if argnums is None else (argnums,) if isinstance(argnums, int) else argnums
    positions = [position % len(primals) for position in varied]

    def of_varied(*values: Any) -> Any:
        replaced = dict(zip(positions, values))
        return function(*(replaced.get(position, primal) for position, primal in enumerate(primals)))

    results: Any = torch.func.vjp(of_varied, *(primals[p] for p in positions), has_aux=has_aux)
    output, pull_back = results[0], results[1]
    transposed: Any = torch.func.vjp(pull_back, pytree.tree_map(torch.zeros_like, output))
    # The cotangent of the transposed function is where the tangent goes in.
    (moved,) = transposed[1](tangents if isinstance(tangents, tuple) else (tangents,))
    return output, moved, *results[2:]


def _state(adapter: Adapter) -> dict[str, torch.Tensor]:
    return {**dict(adapter.named_parameters()), **dict(adapter.named_buffers())}


def _masked(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    """Dropout as a product, whose mask is an operator of its own."""
    return input * _own.dropout_mask(input.detach(), p) if training and p > 0 else input


class _Stops(TorchFunctionMode):
    """Marks where the module stops gradients: autograd itself detaches what it keeps, which stops nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "__set__" and getattr(getattr(func, "__self__", None), "__name__", "") == "data":
            with torch.no_grad():
                return args[0].copy_(args[1])
        if name == "__get__":  # of a property
            name = getattr(getattr(func, "__self__", None), "__name__", "")
            if name not in ("data", "T", "mT", "H", "mH", "real", "imag"):
                return func(*args, **kwargs)
        if name in ("detach", "detach_", "data"):
            return _stopped(args[0]).detach()
        if name in _JOINING and any(map(_is_wrapped, pytree.tree_leaves(args[:1]))):
            return _join(name, *args, **kwargs)
        if name == "split" and _is_wrapped(args[0]) and isinstance(args[1], list | tuple):
            return _divide(*args, **kwargs)
        if not torch.is_grad_enabled():
            # What is written stays itself; what is read there has no gradient.
            written = int(name in _WRITING or (name.endswith("_") and not name.endswith("__")))
            target, read = args[:written], args[written:]
            out = {key: kwargs.pop(key) for key in ("out",) if key in kwargs}
            read, kwargs = pytree.tree_map_only(torch.Tensor, _stopped, (read, kwargs))
            return func(*target, *read, **kwargs, **out)
        # Without create_graph the result is a constant to what follows: recorded like the rest, and stopped.
        if func is torch.autograd.grad and not kwargs.get("create_graph", False):
            gradients = func(*args, **(kwargs | {"create_graph": True}))
            return tuple(None if gradient is None else _stopped(gradient).detach() for gradient in gradients)
        return func(*args, **kwargs)


_JOINING = frozenset({"cat", "concat", "concatenate", "stack"})
_is_wrapped: Any = _backend._functorch.is_functorch_wrapped_tensor
_WRITING = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__set__"})


def _stopped(x: torch.Tensor) -> torch.Tensor:
    return _own.stop(x.detach()) if x.requires_grad else x


def _join(name: str, tensors: Sequence[torch.Tensor], dim: int = 0, **other: Any) -> torch.Tensor:
    """`cat` and `stack` under `torch.func`, where `vmap` makes numbers of sizes: a sum of padded parts."""
    dim = other.get("axis", dim)
    if name == "stack":
        tensors = [tensor.unsqueeze(dim) for tensor in tensors]
    axis = dim % tensors[0].dim()
    before, total = 0, sum(tensor.shape[axis] for tensor in tensors)
    padded = []
    for tensor in tensors:
        after = total - before - tensor.shape[axis]
        padded.append(F.pad(tensor, [*[0, 0] * (tensor.dim() - 1 - axis), before, after]))
        before += tensor.shape[axis]
    return sum(padded[1:], padded[0])


def _divide(x: torch.Tensor, sizes: Sequence[int], dim: int = 0) -> tuple[torch.Tensor, ...]:
    """`split`, whose derivative would join the parts with `cat`; `jacrev` splits even where there is one part."""
    if len(sizes) == 1:
        return (x,)
    starts = itertools.accumulate(sizes, initial=0)
    return tuple(x.index_select(dim, torch.arange(start, start + size)) for start, size in zip(starts, sizes))


# ---- backward passes of torch's layers, which torch computes in kernels that have no form in ONNX ----------


def _convolution_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias_sizes: Any, stride: Any, padding: Any,
    dilation: Any, transposed: bool, output_padding: Any, groups: int, mask: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """y = x ∗ w   ⇒   dx is the transposed convolution of dy with w, dw the convolution of x with dy

    A transposed convolution is the backward pass of an ordinary one: x and dy exchange their parts.
    """
    rank = x.dim() - 2
    dx = dw = db = None
    stride, padding, dilation = (_each(value, rank) for value in (stride, padding, dilation))
    if mask[0] and transposed:
        dx = torch.convolution(dy, weight, None, stride, padding, dilation, False, [0] * rank, groups)
    elif mask[0]:
        reach = [dilation[a] * (weight.shape[a + 2] - 1) + 1 for a in range(rank)]
        spare = _rows_without_window(x, dy, reach, stride, padding)
        dx = torch.convolution(dy, weight, None, stride, padding, dilation, True, spare, groups)
    if mask[1]:
        pieces = []
        read, written = (dy, x) if transposed else (x, dy)
        for own, above in zip(read.chunk(groups, 1), written.chunk(groups, 1)):
            own, above = own.transpose(0, 1), above.transpose(0, 1)
            piece = torch.convolution(own, above, None, dilation, padding, stride, False, [0] * rank, 1)
            for axis in range(rank):
                piece = piece.narrow(axis + 2, 0, weight.shape[axis + 2])
            pieces.append(piece.transpose(0, 1))
        dw = torch.cat(pieces)
    if mask[2]:
        db = dy.sum([0, *range(2, rank + 2)])
    return dx, dw, db


def _each(value: Sequence[int], rank: int) -> list[int]:
    return [*value] * (rank if len(value) == 1 else 1)


def _rows_without_window(
    x: torch.Tensor, dy: torch.Tensor, reach: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> list[int]:
    """How many rows at the end of each axis no window begins in: a transposed convolution does not know of them."""
    return [
        int(x.shape[a + 2]) - ((dy.shape[a + 2] - 1) * stride[a] - 2 * padding[a] + reach[a])
        if stride[a] > 1
        else 0
        for a in range(len(stride))
    ]


def _avg_pool_backward(
    dy: torch.Tensor, x: torch.Tensor, kernel: Any, stride: Any, padding: Any, ceil_mode: bool,
    count_include_pad: bool, divisor_override: int | None,
) -> torch.Tensor:  # fmt: skip
    """Each number goes to its window in equal shares."""
    rank = x.dim() - 2 if x.dim() > 3 else x.dim() - 1
    size = _each(kernel, rank)
    step, pads = _each(stride or kernel, rank), _each(padding, rank)
    if ceil_mode or (not count_include_pad and divisor_override is None):
        share = dy / _counts(x, dy, size, step, pads, count_include_pad, divisor_override)
    else:
        share = dy / (divisor_override or math.prod(size))
    flat = share.reshape(-1, 1, *share.shape[-rank:])
    like = x.reshape(-1, 1, *x.shape[-rank:])
    ends = [int(like.shape[a + 2]) + pads[a] - (flat.shape[a + 2] - 1) * step[a] for a in range(rank)]
    ones = torch.ones(1, 1, *size, dtype=x.dtype)
    full = torch.convolution(flat, ones, None, step, [0] * rank, [1] * rank, True, [0] * rank, 1)
    edges = [(-pads[a], int(ends[a]) - size[a]) for a in range(rank)]  # cut or fill up to x
    return F.pad(full, [n for pair in reversed(edges) for n in pair]).reshape(x.shape)


def _counts(
    x: torch.Tensor, dy: torch.Tensor, size: Sequence[int], step: Sequence[int], pads: Sequence[int],
    count_include_pad: bool, divisor_override: int | None,
) -> torch.Tensor:  # fmt: skip
    """By how much each window's sum is divided, where that depends on how much of it lies inside."""
    if divisor_override is not None:
        return torch.full((), float(divisor_override))
    rank = len(size)
    counts = torch.ones((), dtype=x.dtype)
    for axis in range(-rank, 0):
        length, windows = x.shape[axis], dy.shape[axis]
        begin = torch.arange(windows) * step[axis] - pads[axis]
        end = torch.clamp(begin + size[axis], max=length + pads[axis])
        if not count_include_pad:
            begin, end = torch.clamp(begin, min=0), torch.clamp(end, max=length)
        counts = counts.unsqueeze(-1) * (end - begin).to(x.dtype)
    return counts


def _max_pool_backward(rank: int) -> Callable[..., torch.Tensor]:
    def backward(
        dy: torch.Tensor, x: torch.Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool,
        indices: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Each number goes to the place that was the largest of its window."""
        zeros = torch.zeros_like(x).flatten(-rank)
        return zeros.scatter_add(-1, indices.flatten(-rank), dy.flatten(-rank)).reshape(x.shape)

    return backward


def _adaptive_avg_pool_backward(rank: int) -> Callable[..., torch.Tensor]:
    def backward(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Axis by axis a product with the matrix that spreads each cell over its rows."""
        for axis in range(-rank, 0):
            size, cells = int(x.shape[axis]), int(dy.shape[axis])
            spread = torch.zeros(cells, size)
            for cell in range(cells):
                begin, end = cell * size // cells, -((cell + 1) * size // -cells)
                spread[cell, begin:end] = 1 / (end - begin)
            dy = (dy.transpose(axis, -1) @ spread.to(x.dtype)).transpose(axis, -1)
        return dy

    return backward


def _replication_pad_backward(dy: torch.Tensor, x: torch.Tensor, padding: Sequence[int]) -> torch.Tensor:
    """What was copied from an edge is added to it."""
    for index in range(len(padding) // 2):
        axis, before = -1 - index, padding[2 * index]
        size = x.shape[axis]
        rows = (torch.arange(dy.shape[axis]) - before).clamp(min=0).clamp(max=size - 1)
        shape = [*dy.shape]
        shape[axis] = size
        dy = torch.zeros(shape, dtype=dy.dtype).index_add(dy.dim() + axis, rows, dy)
    return dy


_BACKWARD_PASSES: dict[Any, Callable[..., Any]] = {
    _aten.convolution_backward.default: _convolution_backward,
    _aten.avg_pool2d_backward.default: _avg_pool_backward,
    _aten.avg_pool3d_backward.default: _avg_pool_backward,
    _aten.max_pool2d_with_indices_backward.default: _max_pool_backward(2),
    _aten.max_pool3d_with_indices_backward.default: _max_pool_backward(3),
    _aten._adaptive_avg_pool2d_backward.default: _adaptive_avg_pool_backward(2),
    _aten._adaptive_avg_pool3d_backward.default: _adaptive_avg_pool_backward(3),
    _aten.replication_pad1d_backward.default: _replication_pad_backward,
    _aten.replication_pad2d_backward.default: _replication_pad_backward,
    _aten.replication_pad3d_backward.default: _replication_pad_backward,
}


# ---- writing what was recorded -------------------------------------------------------------------------


def _real_parameters(model: torch.nn.Module) -> Iterator[Replacement]:
    """Complex parameters and buffers as pairs of reals, which is what the file holds."""
    for module in model.modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None and tensor.is_complex():
                real = real_parts(tensor.detach())
                yield module, name, torch.nn.Parameter(real) if name in module._parameters else real


class _Recorded(Adapter):
    """Runs a recorded graph in the functions of Python that the tracer follows."""

    def __init__(self, adapter: Adapter, graph: GraphModule, complex_state: set[str]) -> None:
        torch.nn.Module.__init__(self)
        self.model, self.training = adapter.model, adapter.training
        self._complex_state = complex_state
        # in a list, so that it is no part of this module: its constants are no parameters
        self._graphs = [graph]

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weights = {
            name: Pair(value[..., 0], value[..., 1]) if name in self._complex_state else value
            for name, value in _state(self).items()
        }
        results = _Writer(self._graphs[0]).run(weights, *tensors)
        return tuple(complex_numbers.to_real(result) for result in results)


class _Writer(Interpreter):
    def run_node(self, n: Node) -> Any:
        self._node = n
        return super().run_node(n)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return complex_numbers.to_pair(super().get_attr(target, args, kwargs))

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if not isinstance(target, torch._ops.OpOverload):  # arithmetic of sizes
            arithmetic: Any = _SIZES.get(target, target)
            return super().call_function(arithmetic, args, kwargs)
        name = target._schema.name.partition("::")[2]
        # where the results lie is not the graph's business
        kwargs = {key: value for key, value in kwargs.items() if key not in _PLACEMENT}

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._call(name, args, kwargs)

        # Sizes are never complex, and are asked for often: they take the short way.
        values = pytree.tree_leaves((args, kwargs))
        result = self._node.meta.get("val")
        if name in ("sym_size", "sym_numel"):
            return call(*args)
        if any(isinstance(value, Pair | complex) for value in values) or (
            isinstance(result, torch.Tensor) and result.is_complex()
        ):
            return complex_numbers.write(name, args, kwargs, call)
        return call(*args, **kwargs)

    def _call(self, name: str, args: Any, kwargs: Any) -> Any:
        if name in _FUNCTIONS:
            return _FUNCTIONS[name](*args, **kwargs)
        # By the functions that Python shows, as the tracer's stand-ins replace those: operators would pass them by.
        owners = [(torch, name), (torch.Tensor, name), (_backend._nn, name)]
        for owner, own_name in [*owners, (torch.linalg, name.removeprefix("linalg_"))]:
            function = getattr(owner, own_name, None)
            if function is not None:
                return function(*args, **kwargs)
        raise ExportError(f"torch's operator '{name}' has no form here, in {self._line()}")

    def _line(self) -> str:
        lines = [line.strip() for line in (self._node.stack_trace or "").splitlines() if line.strip()]
        return lines[-2] if len(lines) > 1 else "the module's forward"


def _float(size: Any) -> Any:
    return size.to(torch.get_default_dtype()) if isinstance(size, torch.Tensor) else float(size)


# Arithmetic of sizes that would make numbers of them, which a trace holds as constants.
_SIZES: dict[Any, Callable[..., Any]] = {
    torch.sym_float: _float,
    torch.sym_int: lambda size: size.to(torch.int64) if isinstance(size, torch.Tensor) else int(size),
    torch.sym_max: lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)),
    torch.sym_min: lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)),
}
_PLACEMENT = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking"})


def _slice(x: Any, axis: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    end = None if isinstance(end, int) and end >= 2**62 else end
    return x[(*[slice(None)] * (axis % x.dim()), slice(start, end, step))]


def _slice_scatter(
    x: Any, source: Any, axis: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Any:
    """x with some rows of an axis replaced"""
    axis %= x.dim()
    end = None if isinstance(end, int) and end >= 2**62 else end
    rows = torch.arange(x.size(axis))[start:end:step]
    places = rows.reshape(-1, *[1] * (x.dim() - axis - 1)).expand_as(source)
    return torch.scatter(x, axis, places, source)


def _select_scatter(x: Any, source: Any, axis: int, index: int) -> Any:
    index = index if not isinstance(index, int) or index >= 0 else index + x.size(axis)
    return _slice_scatter(x, source.unsqueeze(axis), axis, index, index + 1)


def _diagonal_scatter(x: Any, source: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """x with a diagonal replaced"""
    rows, columns = (torch.arange(x.size(axis)) for axis in (dim1, dim2))
    on_diagonal = columns.unsqueeze(0) - rows.unsqueeze(1) == offset
    last = x.movedim((dim1, dim2), (-2, -1))
    # element i lies in row i above the main diagonal, in column i below it
    element = (rows.unsqueeze(1) if offset >= 0 else columns.unsqueeze(0)).clamp(max=source.size(-1) - 1)
    spread = source.index_select(-1, (element + torch.zeros_like(on_diagonal, dtype=torch.int64)).flatten())
    return torch.where(on_diagonal, spread.reshape(last.shape), last).movedim((-2, -1), (dim1, dim2))


def _index(x: Any, indices: Sequence[Any]) -> Any:
    return x[tuple(slice(None) if index is None else index for index in indices)]


def _index_put(x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    """Elements replaced or added to; axes before the indexed ones are moved behind them."""
    if accumulate:
        indices = _without_masks(indices)
    indices = [i if i is None or i.dtype == torch.bool else i.to(torch.int64) for i in indices]
    indexed = [axis for axis, index in enumerate(indices) if index is not None]
    first = indexed[0]
    if first == 0 and indexed == list(range(len(indexed))):
        places = [indices[axis] for axis in indexed]
        return _scatter_add(x, places, values) if accumulate else torch.index_put(x, tuple(places), values)
    # torch moves such axes to the front, which ONNX's ScatterND cannot say.
    if indexed != list(range(first, first + len(indexed))):
        raise ExportError("an assignment with indices on axes that are not neighbours cannot be exported")
    places = torch.broadcast_tensors(*(indices[axis] for axis in indexed))
    rank, depth = len(places[0].shape), len(indexed)
    behind = list(x.shape[first + depth :])
    values = values.expand(*x.shape[:first], *places[0].shape, *behind)
    order = [*indexed, *(axis for axis in range(x.dim()) if axis not in indexed)]
    moved = values.movedim(tuple(range(first, first + rank)), tuple(range(rank)))
    result = _index_put(x.permute(order), places, moved, accumulate)
    return result.permute([order.index(axis) for axis in range(x.dim())])


def _without_masks(indices: Sequence[Any]) -> list[Any]:
    """A mask is the places at which it is true, along its own axes."""
    places: list[Any] = []
    for index in indices:
        if index is None:
            places.append(None)
        elif index.dtype == torch.bool:
            places += torch.nonzero(index).unbind(1)
        else:
            places.append(index)
    return places


def _scatter_add(x: Any, places: Sequence[Any], values: Any) -> Any:
    """Values added at places of the first axes, some of which may be the same: the tracer's own takes the last."""
    # ScatterElements along one flat axis: repeated places add up there.
    row: Any = 0
    for axis, index in enumerate(places):
        row = row * x.size(axis) + torch.where(index < 0, index + x.size(axis), index)
    behind = list(x.shape[len(places) :])
    flat = x.reshape(-1, *behind)
    values = values.expand(*row.shape, *behind).reshape(-1, *behind)
    row = row.reshape(-1, *[1] * len(behind)).expand_as(values)
    return flat.scatter_add(0, row, values).reshape(x.shape)


def _sum(x: Any, axes: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    """No axes are all of them"""
    return torch.sum(x, axes, keepdim, dtype=dtype) if axes else torch.sum(x, dtype=dtype)


def _squeeze(x: Any, axes: Any = None) -> Any:
    if axes is None:
        return torch.squeeze(x)
    for axis in sorted((a % x.dim() for a in ([axes] if isinstance(axes, int) else axes)), reverse=True):
        x = x.squeeze(axis)
    return x


def _norm_of_batch(x: Any, weight: Any, bias: Any, *others: Any) -> tuple[Any, ...]:
    """With running statistics or without: the operator has an overload for either."""
    mean, variance = others[:-3] or (None, None)
    training, momentum, eps = others[-3:]
    return _batch_norm(x, weight, bias, mean, variance, training, momentum, eps)


def _batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, momentum: float, eps: float
) -> tuple[Any, ...]:
    """The normalized x, the batch's mean and 1/deviation, and the running statistics"""
    y = F.batch_norm(x, mean, variance, weight, bias, training, momentum, eps)
    axes = [0, *range(2, x.dim())]
    own_mean = x.mean(axes)
    deviation = (x.var(axes, correction=0) + eps).rsqrt()
    return y, own_mean, deviation, mean, variance


def _inference_norm(
    x: Any, weight: Any, bias: Any, mean: Any, variance: Any, momentum: float, eps: float
) -> tuple[Any, ...]:
    return _batch_norm(x, weight, bias, mean, variance, False, momentum, eps)


def _layer_norm(x: Any, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> tuple[Any, ...]:
    axes = list(range(-len(shape), 0))
    deviation = (x.var(axes, correction=0, keepdim=True) + eps).rsqrt()
    return F.layer_norm(x, shape, weight, bias, eps), x.mean(axes, keepdim=True), deviation


def _group_norm(
    x: Any, weight: Any, bias: Any, n: Any, c: Any, space: Any, groups: int, eps: float
) -> tuple[Any, ...]:
    grouped = x.reshape(x.size(0), groups, -1)
    deviation = (grouped.var(-1, correction=0) + eps).rsqrt()
    return F.group_norm(x, groups, weight, bias, eps), grouped.mean(-1), deviation


def _to_copy(x: Any, *, dtype: torch.dtype | None = None) -> Any:
    return x.clone() if dtype is None else x.to(dtype)


def _full(size: Any, value: Any, *, dtype: torch.dtype | None = None) -> Any:
    return torch.full(size, value, dtype=dtype)


def _zeros_of(size: Any, *, dtype: torch.dtype | None = None) -> Any:
    return torch.zeros(size, dtype=dtype)


def _cast_to(x: Any, dtype: torch.dtype) -> Any:
    return x.to(dtype)


# Operators that Python calls differently, or that the tracer takes in another form.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "_adaptive_avg_pool2d": lambda x, size: F.adaptive_avg_pool2d(x, size),
    "_adaptive_avg_pool3d": lambda x, size: F.adaptive_avg_pool3d(x, size),
    "alias": lambda x: x,
    "_neg_view": lambda x: -x,
    "resolve_conj": lambda x: x,
    "resolve_neg": lambda x: x,
    "alias_copy": lambda x: x,
    "bernoulli": lambda x, p=None: torch.bernoulli(x if p is None else torch.full_like(x, p)),
    "clone": lambda x: x.clone(),
    "constant_pad_nd": lambda x, pad, value=0: F.pad(x, list(pad), value=value),
    "convert_element_type": _cast_to,
    "copy": lambda x, source: source.expand_as(x).to(x.dtype),
    "copy_": lambda x, source: source,  # the module's buffers, whose values are outputs where they count
    "detach": lambda x: x,
    "diagonal_scatter": _diagonal_scatter,
    "dft": lambda x, inverse, onesided: torch.ops.onward.dft(x, inverse, onesided),
    "dropout_mask": lambda x, p: F.dropout(torch.ones_like(x), p, True),
    "empty": _zeros_of,
    "empty_permuted": lambda size, order, dtype=None: _zeros_of(size, dtype=dtype),
    "empty_strided": lambda size, strides, dtype=None: _zeros_of(size, dtype=dtype),
    "expand": lambda x, size, implicit=False: x.expand(size),
    "full": _full,
    "index": _index,
    "index_put": _index_put,
    "lift_fresh_copy": lambda x: x,
    "native_batch_norm": _batch_norm,
    "native_group_norm": _group_norm,
    "native_layer_norm": _layer_norm,
    "_native_batch_norm_legit": _norm_of_batch,
    "_native_batch_norm_legit_functional": _batch_norm,
    "_native_batch_norm_legit_no_training": _inference_norm,
    "scalar_tensor": lambda value, dtype=None: torch.full((), value, dtype=dtype),
    "select_scatter": _select_scatter,
    "slice": _slice,
    "slice_scatter": _slice_scatter,
    "squeeze": _squeeze,
    "stop": lambda x: x.detach(),
    "sum": _sum,
    "sym_numel": lambda x: x.numel(),
    "sym_size": lambda x, axis: x.size(axis),
    "view": lambda x, size: x.reshape(size),
    "_log_softmax": lambda x, axis, half: torch.log_softmax(x, axis),
    "_softmax": lambda x, axis, half: torch.softmax(x, axis),
    "_to_copy": _to_copy,
    "_unsafe_view": lambda x, size: x.reshape(size),
}
# Operators that ONNX has as they are, and that a decomposition would only make longer.
_AS_THEY_ARE = frozenset(
    {
        _aten.native_batch_norm.default,
        _aten._native_batch_norm_legit.default,
        _aten._native_batch_norm_legit_functional.default,
        _aten.native_layer_norm.default,
        _aten.native_group_norm.default,
        _aten.embedding.default,
        _aten.gelu.default,
        _aten.leaky_relu.default,
    }
)
