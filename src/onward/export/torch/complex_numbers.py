"""Writes operators over complex numbers, which ONNX lacks, over pairs of real tensors.

What an operator does to a pair is its maths. Gradients follow from it, and are torch's: a real loss L has the
gradient ∂L/∂re + i·∂L/∂im. Fourier transforms are ONNX's DFT over such pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from onward.errors import ExportError

_Call = Callable[..., Any]
_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64, torch.complex32: torch.float16}


@dataclass(frozen=True)
class Pair:
    """A complex tensor, or number: re + i·im."""

    re: Any
    im: Any

    def size(self, axis: int) -> Any:
        return self.re.size(axis)

    def numel(self) -> Any:
        return self.re.numel()

    @property
    def shape(self) -> Any:
        return self.re.shape


def to_pair(value: Any) -> Any:
    """A complex tensor as a pair; anything else as it is."""
    if isinstance(value, torch.Tensor) and value.is_complex():
        parts = torch.view_as_real(value)
        return Pair(parts[..., 0], parts[..., 1])
    return value


def to_real(value: Any) -> Any:
    """A pair as one tensor whose last axis holds real and imaginary parts."""
    return torch.stack([value.re, value.im], -1) if isinstance(value, Pair) else value


def write(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], call: _Call) -> Any:
    """The result of a primitive operator of which an argument or the result is complex.

    `call` applies the same operator to real arguments.
    """
    if name in _RULES:
        return _RULES[name](*args, **kwargs)
    if name in _PARTWISE:
        if name in _JOINING:
            args = _each(args, "", promote=True)
        return Pair(
            call(*_each(args, "re"), **_each(kwargs, "re")), call(*_each(args, "im"), **_each(kwargs, "im"))
        )
    if name in _FACTORIES:
        return _constant(name, args, kwargs, call)
    raise ExportError(
        f"'{name}' of complex numbers cannot be exported: compute it from real and imaginary parts "
        "(torch.view_as_real, or x.real and x.imag)"
    )


# Linear operators that do to both parts what they do to a real tensor. Of some, real arguments next to complex ones
# are complex numbers too.
_JOINING = frozenset({"cat", "copy", "index_put", "scatter", "select_scatter", "slice_scatter"})
_PARTWISE = _JOINING | {
    *("alias", "clone", "constant_pad_nd", "cumsum", "detach", "diagonal", "expand", "flip", "gather"),
    *("index", "index_select", "mean", "neg", "permute", "repeat", "resolve_conj", "resolve_neg", "roll"),
    *("select", "slice", "split", "split_with_sizes", "squeeze", "stop", "sum", "t", "transpose"),
    *("tril", "triu", "unbind", "unfold", "unsqueeze", "view", "_neg_view", "_unsafe_view"),
}
_FACTORIES = frozenset(
    {"full", "full_like", "ones", "ones_like", "scalar_tensor", "zeros", "zeros_like", "empty"}
)


def _each(value: Any, part: str, *, promote: bool = False) -> Any:
    """Arguments with one part of every complex one, or, to promote them, with a pair for every real tensor."""
    if isinstance(value, tuple | list):
        return type(value)(_each(item, part, promote=promote) for item in value)
    if isinstance(value, dict):
        return {key: _each(item, part, promote=promote) for key, item in value.items()}
    if promote:
        return _pair(value) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
    return getattr(value, part) if isinstance(value, Pair) else value


def _constant(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], call: _Call) -> Pair:
    kwargs = {key: _REAL.get(value, value) if key == "dtype" else value for key, value in kwargs.items()}
    args = tuple(value.re if isinstance(value, Pair) else value for value in args)
    numbers = [value for value in args if isinstance(value, complex)]
    number = numbers[0] if numbers else 0j
    re = call(*(value.real if isinstance(value, complex) else value for value in args), **kwargs)
    im = call(*(value.imag if isinstance(value, complex) else value for value in args), **kwargs)
    return Pair(re, im if number.imag else torch.zeros_like(re))


def _pair(value: Any) -> Pair:
    if isinstance(value, Pair):
        return value
    if isinstance(value, complex):
        return Pair(value.real, value.imag)
    return Pair(value, torch.zeros_like(value) if isinstance(value, torch.Tensor) else 0.0)


def _is_complex(value: Any) -> bool:
    return isinstance(value, Pair | complex)


def _add(a: Any, b: Any, *, alpha: float = 1) -> Pair:
    a, b = _pair(a), _pair(b)
    if alpha != 1:
        b = _mul(b, alpha)
    return Pair(a.re + b.re, a.im + b.im)


def _sub(a: Any, b: Any, *, alpha: float = 1) -> Pair:
    return _add(a, _mul(b, -alpha))


def _mul(a: Any, b: Any) -> Pair:
    """(a + bi)(c + di) = ac − bd + (ad + bc)i"""
    return _bilinear(lambda x, y: x * y)(a, b)


def _bilinear(product: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Pair]:
    """A product of complex operands by real ones; of one real operand, only the parts of the other."""

    def of(a: Any, b: Any) -> Pair:
        if not _is_complex(b):
            a = _pair(a)
            return Pair(product(a.re, b), product(a.im, b))
        if not _is_complex(a):
            b = _pair(b)
            return Pair(product(a, b.re), product(a, b.im))
        a, b = _pair(a), _pair(b)
        return Pair(product(a.re, b.re) - product(a.im, b.im), product(a.re, b.im) + product(a.im, b.re))

    return of


_mm = _bilinear(lambda a, b: torch.matmul(a, b))


def _addmm(bias: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Pair:
    product = _mm(a, b)
    return _add(bias if beta == 1 else _mul(bias, beta), product, alpha=alpha)


def _convolution(x: Any, weight: Any, bias: Any, *options: Any) -> Pair:
    y = _bilinear(lambda a, b: torch.convolution(a, b, None, *options))(x, weight)
    if bias is None:
        return y
    shape = [1, -1, *[1] * (y.re.dim() - 2)]
    return _add(y, Pair(*(part.reshape(shape) for part in _parts(bias))))


def _parts(value: Any) -> tuple[Any, Any]:
    value = _pair(value)
    return value.re, value.im


def _conj(z: Any) -> Any:
    return Pair(z.re, -z.im) if isinstance(z, Pair) else z


def _squared(z: Pair) -> Any:
    return z.re * z.re + z.im * z.im


def _div(a: Any, b: Any) -> Pair:
    """a·conj(b)/|b|²"""
    if not _is_complex(b):
        return Pair(_pair(a).re / b, _pair(a).im / b)
    return _div(_mul(a, _conj(_pair(b))), _squared(_pair(b)))


def _abs(z: Pair) -> Any:
    """√(re² + im²), with a gradient of zero at zero, as torch has it."""
    # √ has an infinite slope at zero, and inf · 0 would be NaN: a one stands there meanwhile.
    total = _squared(z)
    some = total > 0
    return torch.where(some, torch.where(some, total, torch.ones_like(total)).sqrt(), torch.zeros_like(total))


def _sgn(z: Pair) -> Pair:
    """z/|z|, and 0 at 0"""
    size = _abs(z)
    return _div(z, torch.where(size > 0, size, torch.ones_like(size)))


def _angle(z: Pair) -> Any:
    return torch.atan2(z.im, z.re)


def _polar(size: Any, angle: Any) -> Pair:
    return Pair(size * angle.cos(), size * angle.sin())


def _exp(z: Pair) -> Pair:
    return _polar(z.re.exp(), z.im)


def _log(z: Pair) -> Pair:
    return Pair(_squared(z).log() / 2, _angle(z))


def _pow(z: Any, exponent: Any) -> Pair:
    """Whole powers by products, others by exp(n·log z)"""
    # Products are exact, and right for zero, whose logarithm is not.
    if isinstance(exponent, int | float) and float(exponent).is_integer() and abs(exponent) <= 8:
        result = Pair(torch.ones_like(z.re), torch.zeros_like(z.re))
        for _ in range(abs(int(exponent))):
            result = _mul(result, z)
        return _div(1.0, result) if exponent < 0 else result
    base = (
        _log(z) if isinstance(z, Pair) else z.log() if isinstance(z, torch.Tensor) else torch.tensor(z).log()
    )
    return _exp(_pair(_mul(_pair(base), exponent)))


def _tanh(z: Pair) -> Pair:
    """(sinh 2a + i·sin 2b)/(cosh 2a + cos 2b)"""
    # one division of reals instead of that of two complex exponentials
    below = torch.cosh(2 * z.re) + torch.cos(2 * z.im)
    return Pair(torch.sinh(2 * z.re) / below, torch.sin(2 * z.im) / below)


def _to_copy(x: Any, *, dtype: torch.dtype | None = None, **unused: Any) -> Any:
    if dtype is None or dtype.is_complex:
        kind = None if dtype is None else _REAL[dtype]
        return Pair(*(part if kind is None else part.to(kind) for part in _parts(x)))
    return _parts(x)[0].to(dtype)


def _vector_norm(x: Pair, order: float = 2, *rest: Any, **options: Any) -> Any:
    return torch.linalg.vector_norm(_abs(x), order, *rest, **options)


def _where(condition: Any, a: Any, b: Any) -> Pair:
    def choose(x: Any, y: Any) -> Any:
        like = x if isinstance(x, torch.Tensor) else y
        return torch.where(condition, _tensor_like(x, like), _tensor_like(y, like))

    a, b = _pair(a), _pair(b)
    return Pair(choose(a.re, b.re), choose(a.im, b.im))


def _tensor_like(value: Any, like: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.full_like(like, value)


# ---- Fourier transforms -------------------------------------------------------------------------------


def _transform(x: Any, axis: int, *, inverse: bool, onesided: bool = False) -> Pair:
    """One axis of a signal transformed; the inverse is divided by its length, as ONNX has it."""
    rank = _parts(x)[0].dim()
    signal = torch.stack([x.re, x.im], -1) if isinstance(x, Pair) else x.unsqueeze(-1)
    signal = signal.transpose(axis % rank, rank - 1)
    shape = list(signal.shape[:-2])
    # ONNX's DFT wants [batch, length, 1 or 2].
    signal = signal.reshape(-1, signal.shape[-2], signal.shape[-1])
    result = torch.ops.onward.dft(signal, inverse, onesided)
    result = result.reshape(*shape, result.shape[-2], 2).transpose(axis % rank, rank - 1)
    return Pair(result[..., 0], result[..., 1])


def _scaled(x: Any, count: Any, normalization: int, *, divided: bool) -> Any:
    """By 1, 1/√n or 1/n, as torch numbers them; `divided` says that 1/n is in the transform already."""
    power = {0: 0.0, 1: -0.5, 2: -1.0}[normalization] + (1.0 if divided else 0.0)
    if power == 0:
        return x
    count = count.to(torch.float32) if isinstance(count, torch.Tensor) else float(count)
    factor = count**power
    return Pair(x.re * factor, x.im * factor) if isinstance(x, Pair) else x * factor


def _all_axes(x: Any, axes: Any, normalization: int, *, inverse: bool) -> Any:
    for axis in axes:
        count = x.size(axis)
        x = _scaled(_transform(x, axis, inverse=inverse), count, normalization, divided=inverse)
    return x


def _fft_c2c(x: Any, axes: Any, normalization: int, forward: bool) -> Any:
    return _all_axes(x, axes, normalization, inverse=not forward)


def _fft_r2c(x: Any, axes: Any, normalization: int, onesided: bool) -> Any:
    """The last of the axes from real numbers, the others from what that gives."""
    *others, last = axes
    count = x.size(last)
    first = _scaled(
        _transform(x, last, inverse=False, onesided=onesided), count, normalization, divided=False
    )
    return _all_axes(first, others, normalization, inverse=False)


def _fft_c2r(x: Pair, axes: Any, normalization: int, length: Any) -> Any:
    """Bins above the half are mirror images; the imaginary parts of the first and of the middle one count nothing."""
    *others, last = axes
    x = _all_axes(x, others, normalization, inverse=True)
    axis = last % x.re.dim()
    places = torch.arange(length)
    # ONNX's inverse transform has no one-sided form: the mirrored half is gathered, conjugated.
    below = places <= length // 2
    bins = torch.where(below, places, length - places)
    sign = torch.where(below, 1.0, -1.0).to(x.re.dtype).reshape(-1, *[1] * (x.re.dim() - 1 - axis))
    whole = Pair(x.re.index_select(axis, bins), x.im.index_select(axis, bins) * sign)
    return _scaled(_transform(whole, axis, inverse=True), length, normalization, divided=True).re


_RULES: dict[str, Callable[..., Any]] = {
    "abs": _abs,
    "add": _add,
    "addmm": _addmm,
    "angle": _angle,
    "baddbmm": _addmm,
    "bmm": _mm,
    "complex": lambda re, im: Pair(re, im),
    "conj": _conj,
    "conj_physical": _conj,
    "_conj": _conj,
    "_conj_physical": _conj,
    "convolution": _convolution,
    "cos": lambda z: Pair(z.re.cos() * torch.cosh(z.im), -z.re.sin() * torch.sinh(z.im)),
    "cosh": lambda z: Pair(torch.cosh(z.re) * z.im.cos(), torch.sinh(z.re) * z.im.sin()),
    "div": _div,
    "eq": lambda a, b: (_parts(a)[0] == _parts(b)[0]) & (_parts(a)[1] == _parts(b)[1]),
    "exp": _exp,
    "_fft_c2c": _fft_c2c,
    "_fft_c2r": _fft_c2r,
    "_fft_r2c": _fft_r2c,
    "imag": lambda z: z.im,
    "linalg_vector_norm": _vector_norm,
    "log": _log,
    "masked_fill": lambda z, mask, value: _where(mask, value, z),
    "mm": _mm,
    "mul": _mul,
    "ne": lambda a, b: (_parts(a)[0] != _parts(b)[0]) | (_parts(a)[1] != _parts(b)[1]),
    "polar": _polar,
    "pow": _pow,
    "real": lambda z: z.re,
    "reciprocal": lambda z: _div(1.0, z),
    "rsqrt": lambda z: _div(1.0, _pow(z, 0.5)),
    "rsub": lambda a, b, alpha=1: _sub(b, _mul(a, alpha)),
    "sgn": _sgn,
    "sigmoid": lambda z: _div(1.0, _add(_exp(_mul(z, -1.0)), 1.0)),
    "sin": lambda z: Pair(z.re.sin() * torch.cosh(z.im), z.re.cos() * torch.sinh(z.im)),
    "sinh": lambda z: Pair(torch.sinh(z.re) * z.im.cos(), torch.cosh(z.re) * z.im.sin()),
    "sqrt": lambda z: _pow(z, 0.5),
    "sub": _sub,
    "tanh": _tanh,
    "_to_copy": _to_copy,
    "view_as_complex": lambda x: Pair(x[..., 0], x[..., 1]),
    "view_as_real": to_real,
    "where": _where,
}


_library = torch.library.Library("onward", "FRAGMENT")
_library.define("dft(Tensor x, bool inverse, bool onesided) -> Tensor")


def _dft(x: torch.Tensor, inverse: bool, onesided: bool) -> torch.Tensor:
    """What ONNX's DFT computes along the last but one axis."""
    signal = torch.view_as_complex(x.contiguous()) if x.shape[-1] == 2 else x.squeeze(-1)
    if onesided:
        result = torch.fft.rfft(signal)
    else:
        result = torch.fft.ifft(signal) if inverse else torch.fft.fft(signal)
    return torch.view_as_real(result)


_library.impl("dft", _dft, "CompositeExplicitAutograd")


def dft_symbolic(g: Any, x: Any, inverse: Any, onesided: Any) -> Any:
    """How the tracer writes `onward::dft`."""
    symbolic: Any = torch.onnx.symbolic_helper  # type: ignore[reportPrivateImportUsage]
    flags = {"inverse_i": symbolic._parse_arg(inverse, "b"), "onesided_i": symbolic._parse_arg(onesided, "b")}
    return g.op("DFT", x, axis_i=1, **{key: int(value) for key, value in flags.items()})
