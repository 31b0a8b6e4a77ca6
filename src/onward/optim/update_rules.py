"""Update rules: (parameter, gradient, state, scalars) → (parameter, state).

Each is a pure function in standard operators, written as its equation; torch.optim is the numerical
reference. To add one: write a function that returns an `Optimizer`, and a row in the tests' table. The runtime
writes each new tensor over the old one as soon as it is computed: let what a rule needs of the old state flow
into the new.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.graph.builder import Builder

State = dict[str, ir.Value]


@dataclasses.dataclass(frozen=True)
class Scalars:
    """What an update reads besides tensors, each a float tensor of shape [1]; `step` counts from 1.

    `weight_decay` is None where no parameter has any.
    """

    learning_rate: ir.Value
    step: ir.Value
    weight_decay: ir.Value | None


Update = Callable[[Builder, ir.Value, ir.Value, State, Scalars], tuple[ir.Value, State]]


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """An update rule with its hyperparameters.

    `slots` are the names of its state tensors, which start as zeros. An `elementwise` rule can run
    over all parameters as one flat buffer; others see one parameter at a time.
    `slot_shapes` says how a slot's shape follows from the parameter's, where it is not the same.
    """

    name: str
    slots: tuple[str, ...]
    update: Update
    hyperparameters: Mapping[str, float | bool | int]
    elementwise: bool = True
    weight_decay: float = 0.0
    slot_shapes: Callable[[str, tuple[int, ...]], tuple[int, ...]] | None = None


def sgd(
    *, momentum: float = 0.0, dampening: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False
) -> Optimizer:
    """b ← μb + (1−d)g,  p ← p − lr·b   (nesterov: p − lr·(g + μb)); the first step sets b ← g"""
    if nesterov and (momentum <= 0 or dampening != 0):
        raise ValueError("Nesterov momentum requires a momentum and zero dampening")

    def update(op: Builder, p: ir.Value, g: ir.Value, state: State, s: Scalars) -> tuple[ir.Value, State]:
        g = _with_decay(op, p, g, s)
        if momentum == 0.0:
            return op.Sub(p, op.Mul(g, s.learning_rate)), {}
        fresh = op.Mul(g, 1.0 - dampening) if dampening else g
        buffer = op.Add(op.Mul(state["momentum0"], momentum), fresh)
        # torch starts its buffer with the gradient itself, undamped; without dampening zeros give the same.
        if dampening:
            buffer = op.Where(op.Equal(s.step, 1.0), g, buffer)
        direction = op.Add(g, op.Mul(buffer, momentum)) if nesterov else buffer
        return op.Sub(p, op.Mul(direction, s.learning_rate)), {"momentum0": buffer}

    slots = ("momentum0",) if momentum else ()
    hyper = {"momentum": momentum, "dampening": dampening, "nesterov": nesterov}
    return Optimizer("SGD", slots, update, hyper, weight_decay=weight_decay)


def _moments(op: Builder, g: ir.Value, state: State, betas: tuple[float, float]) -> tuple[ir.Value, ir.Value]:
    """m ← m + (1−β₁)(g − m),  v ← v + (1−β₂)(g² − v)"""
    m, v = state["momentum0"], state["momentum1"]
    # written so that the old moment is read before the new one is written: the two share their memory
    m = op.Add(m, op.Mul(op.Sub(g, m), 1.0 - betas[0]))
    v = op.Add(v, op.Mul(op.Sub(op.Mul(g, g), v), 1.0 - betas[1]))
    return m, v


def _adam_step(
    op: Builder,
    m: ir.Value,
    v: ir.Value,
    s: Scalars,
    betas: tuple[float, float],
    eps: float,
    bias_correction: bool,
    *,
    scaled_eps: bool = True,
) -> ir.Value:
    """lr/(1−β₁ᵗ) · m / (√v/√(1−β₂ᵗ) + ε), with the scalars gathered: lr·√c₂/c₁ · m / (√v + ε·√c₂)

    Without `scaled_eps`, ε is not multiplied by √c₂.
    """
    if not bias_correction:
        return op.Mul(op.Div(m, op.Add(op.Sqrt(v), eps)), s.learning_rate)
    # in double: 1 − 0.999 has four digits less in float32
    step = op.Cast(s.step, to=ir.DataType.DOUBLE)
    first = op.Sub(1.0, op.Pow(np.asarray([betas[0]]), step))
    root = op.Sqrt(op.Sub(1.0, op.Pow(np.asarray([betas[1]]), step)))
    kind = op.dtype(s.learning_rate)
    second = op.Cast(root, to=kind)
    rate = op.Mul(s.learning_rate, op.Cast(op.Div(root, first), to=kind))
    small = op.Mul(second, eps) if scaled_eps else eps
    return op.Mul(op.Div(m, op.Add(op.Sqrt(v), small)), rate)


def adam(
    *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0,
    bias_correction: bool = True,
) -> Optimizer:  # fmt: skip
    """Adam with weight decay added to the gradient, as torch.optim.Adam"""

    def update(op: Builder, p: ir.Value, g: ir.Value, state: State, s: Scalars) -> tuple[ir.Value, State]:
        g = _with_decay(op, p, g, s)
        m, v = _moments(op, g, state, betas)
        step = _adam_step(op, m, v, s, betas, eps, bias_correction)
        return op.Sub(p, step), {"momentum0": m, "momentum1": v}

    hyper = {"beta1": betas[0], "beta2": betas[1], "eps": eps, "bias_correction": bias_correction}
    return Optimizer("Adam", ("momentum0", "momentum1"), update, hyper, weight_decay=weight_decay)


def adamw(
    *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.01,
    bias_correction: bool = True, decay_last: bool = False,
) -> Optimizer:  # fmt: skip
    """p ← p·(1 − lr·wd) − Adam's step, as torch.optim.AdamW

    With `decay_last` in the order of onnxruntime-training: p ← (p − lr·√c₂/c₁ · m/(√v + ε))·(1 − lr·wd).
    """

    def update(op: Builder, p: ir.Value, g: ir.Value, state: State, s: Scalars) -> tuple[ir.Value, State]:
        m, v = _moments(op, g, state, betas)
        p = p if decay_last else _decayed(op, p, s)
        step = _adam_step(op, m, v, s, betas, eps, bias_correction, scaled_eps=not decay_last)
        p = op.Sub(p, step)
        return _decayed(op, p, s) if decay_last else p, {"momentum0": m, "momentum1": v}

    hyper = {"beta1": betas[0], "beta2": betas[1], "eps": eps, "bias_correction": bias_correction}
    hyper |= {"decay_last": True} if decay_last else {}
    return Optimizer("AdamW", ("momentum0", "momentum1"), update, hyper, weight_decay=weight_decay)


def adagrad(*, eps: float = 1e-10, weight_decay: float = 0.0, lr_decay: float = 0.0) -> Optimizer:
    """h ← h + g²,  p ← p − lr/(1 + (t−1)·decay) · g/(√h + ε)"""

    def update(op: Builder, p: ir.Value, g: ir.Value, state: State, s: Scalars) -> tuple[ir.Value, State]:
        g = _with_decay(op, p, g, s)
        h = op.Add(state["momentum0"], op.Mul(g, g))
        rate = s.learning_rate
        if lr_decay:
            rate = op.Div(rate, op.Add(op.Mul(op.Sub(s.step, 1.0), lr_decay), 1.0))
        return op.Sub(p, op.Mul(op.Div(g, op.Add(op.Sqrt(h), eps)), rate)), {"momentum0": h}

    hyper = {"eps": eps, "lr_decay": lr_decay}
    return Optimizer("Adagrad", ("momentum0",), update, hyper, weight_decay=weight_decay)


def rmsprop(
    *,
    alpha: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    centered: bool = False,
) -> Optimizer:
    """v ← αv + (1−α)g²,  p ← p − lr·g/(√v + ε); centered subtracts the squared mean gradient from v"""
    slots = ["momentum0"] + ["momentum1"] * bool(momentum)
    mean_slot = f"momentum{len(slots)}"
    slots += [mean_slot] * centered

    def update(op: Builder, p: ir.Value, g: ir.Value, state: State, s: Scalars) -> tuple[ir.Value, State]:
        g = _with_decay(op, p, g, s)
        v = op.Add(op.Mul(state["momentum0"], alpha), op.Mul(op.Mul(g, g), 1.0 - alpha))
        new: State = {"momentum0": v}
        spread = v
        if centered:
            mean = op.Add(op.Mul(state[mean_slot], alpha), op.Mul(g, 1.0 - alpha))
            new[mean_slot] = mean
            spread = op.Sub(v, op.Mul(mean, mean))
        direction = op.Div(g, op.Add(op.Sqrt(spread), eps))
        if momentum:
            direction = op.Add(op.Mul(state["momentum1"], momentum), direction)
            new["momentum1"] = direction
        return op.Sub(p, op.Mul(direction, s.learning_rate)), new

    hyper = {"alpha": alpha, "eps": eps, "momentum": momentum, "centered": centered}
    return Optimizer("RMSprop", tuple(slots), update, hyper, weight_decay=weight_decay)


def lion(*, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0) -> Optimizer:
    """p ← p·(1 − lr·wd) − lr·sign(β₁m + (1−β₁)g),  m ← β₂m + (1−β₂)g   (Chen et al. 2023)"""

    def update(op: Builder, p: ir.Value, g: ir.Value, state: State, s: Scalars) -> tuple[ir.Value, State]:
        # the old momentum is read once, so that the new one may be written in its place
        away = op.Sub(state["momentum0"], g)
        direction = op.Sign(op.Add(g, op.Mul(away, betas[0])))
        p = _decayed(op, p, s)
        m = op.Add(g, op.Mul(away, betas[1]))
        return op.Sub(p, op.Mul(direction, s.learning_rate)), {"momentum0": m}

    hyper = {"beta1": betas[0], "beta2": betas[1]}
    return Optimizer("Lion", ("momentum0",), update, hyper, weight_decay=weight_decay)


def lamb(
    *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6, weight_decay: float = 0.0,
    bias_correction: bool = True,
) -> Optimizer:  # fmt: skip
    """p ← p − lr·(‖p‖/‖u‖)·u, u = m̂/(√v̂ + ε) + wd·p; the ratio is 1 where a norm is 0   (You et al. 2020)"""

    def update(op: Builder, p: ir.Value, g: ir.Value, state: State, s: Scalars) -> tuple[ir.Value, State]:
        m, v = _moments(op, g, state, betas)
        # The step without the rate: LAMB multiplies it by the ratio of two norms first.
        unit = dataclasses.replace(s, learning_rate=op.constant_like(1.0, s.learning_rate))
        direction = _adam_step(op, m, v, unit, betas, eps, bias_correction)
        direction = _with_decay(op, p, direction, s)
        size, length = _norm(op, p), _norm(op, direction)
        usable = op.And(op.Greater(size, 0.0), op.Greater(length, 0.0))
        # The inner Where keeps 0/0 out of the branch that is not taken: NaN times 0 is NaN.
        ratio = op.Where(usable, op.Div(size, op.Where(usable, length, 1.0)), 1.0)
        rate = op.Mul(ratio, s.learning_rate)
        return op.Sub(p, op.Mul(direction, rate)), {"momentum0": m, "momentum1": v}

    hyper = {"beta1": betas[0], "beta2": betas[1], "eps": eps, "bias_correction": bias_correction}
    return Optimizer(
        "LAMB", ("momentum0", "momentum1"), update, hyper, elementwise=False, weight_decay=weight_decay
    )


def adafactor(
    *, beta2_decay: float = -0.8, eps: tuple[float | None, float] = (None, 1e-3), d: float = 1.0,
    weight_decay: float = 0.0,
) -> Optimizer:  # fmt: skip
    """Row and column averages of g² stand in for the second moment; as torch.optim.Adafactor"""
    floor = 1.1920929e-07 if eps[0] is None else eps[0]

    def slot_shapes(slot: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        if len(shape) < 2:
            return shape if slot == "momentum0" else (0,)
        return (*shape[:-1], 1) if slot == "momentum0" else (*shape[:-2], 1, shape[-1])

    def update(op: Builder, p: ir.Value, g: ir.Value, state: State, s: Scalars) -> tuple[ir.Value, State]:
        # β₂ₜ = 1 − t^decay; the weight of the new average is t^decay
        share = op.Pow(s.step, beta2_decay)
        relative = op.Min(s.learning_rate, op.Pow(s.step, -0.5))
        scale = op.Max(_rms(op, p), eps[1])
        # The rate is relative to the size of the parameter, so that it needs no tuning for each layer.
        rate = op.Mul(relative, scale)
        p = _decayed(op, p, s)
        square = op.Mul(g, g)
        if op.rank(p) < 2:
            v = _lerp(op, state["momentum0"], square, share)
            new: State = {"momentum0": v, "momentum1": state["momentum1"]}
        else:
            rows = _lerp(op, state["momentum0"], op.ReduceMean(square, [-1], keepdims=1), share)
            columns = _lerp(op, state["momentum1"], op.ReduceMean(square, [-2], keepdims=1), share)
            mean = op.Max(op.ReduceMean(rows, [-2], keepdims=1), floor)
            # An outer product of two small averages instead of a moment for each number: that is what saves the
            # memory.
            v = op.Div(op.MatMul(rows, columns), mean)
            new = {"momentum0": rows, "momentum1": columns}
        direction = op.Mul(g, op.Reciprocal(op.Sqrt(op.Max(v, floor * floor))))
        limited = op.Div(rate, op.Max(op.Div(_rms(op, direction), d), 1.0))
        return op.Sub(p, op.Mul(direction, limited)), new

    hyper = {"beta2_decay": beta2_decay, "eps1": floor, "eps2": eps[1], "d": d}
    return Optimizer(
        "Adafactor", ("momentum0", "momentum1"), update, hyper, elementwise=False, weight_decay=weight_decay,
        slot_shapes=slot_shapes,
    )  # fmt: skip


def make(name: str, **options: Any) -> Optimizer:
    """The optimizer of a name of `OptimType`, with the defaults of `onnxblock.optim`.

    >>> make("AdamW", weight_decay=0.01).hyperparameters["eps"]
    1e-06
    """
    # the API that AdamW stands in for has another epsilon than torch, and no decay
    defaults: dict[str, Any] = {"eps": 1e-6, "weight_decay": 0.0} if name == "AdamW" else {}
    makers: list[Callable[..., Optimizer]] = [adamw, sgd, adam, adagrad, rmsprop, lion, lamb, adafactor]
    return {maker.__name__: maker for maker in makers}[name.lower()](**defaults | options)


def _with_decay(op: Builder, p: ir.Value, g: ir.Value, s: Scalars) -> ir.Value:
    """g + wd·p"""
    return g if s.weight_decay is None else op.Add(g, op.Mul(p, s.weight_decay))


def _decayed(op: Builder, p: ir.Value, s: Scalars) -> ir.Value:
    """p·(1 − lr·wd)"""
    if s.weight_decay is None:
        return p
    return op.Mul(p, op.Sub(1.0, op.Mul(s.learning_rate, s.weight_decay)))


def _lerp(op: Builder, old: ir.Value, new: ir.Value, share: ir.Value) -> ir.Value:
    return op.Add(old, op.Mul(op.Sub(new, old), share))


def total_norm(op: Builder, *values: ir.Value) -> ir.Value:
    """√Σ‖x‖², shape [1], over tensors or one sequence of tensors."""
    if len(values) == 1 and isinstance(values[0].type, ir.SequenceType):
        return op.Sqrt(_sequence_square_sum(op, values[0]))
    squares = [op.Reshape(op.ReduceSumSquare(value, keepdims=0), [1]) for value in values]
    return op.Sqrt(squares[0] if len(squares) == 1 else op.Sum(*squares))


def _sequence_square_sum(op: Builder, sequence: ir.Value) -> ir.Value:
    body = op.subgraph("sum_squares")
    index = body.input("index", ir.DataType.INT64, [])
    going = body.input("going", ir.DataType.BOOL, [])
    total = body.input("total", ir.DataType.FLOAT, [1])
    element = body.SequenceAt(sequence, index)
    added = body.Add(total, body.Reshape(body.ReduceSumSquare(element, keepdims=0), [1]))
    body.graph.outputs.extend([body.Identity(going), added])
    zero = np.zeros(1, np.float32)
    result = op.Loop(op.SequenceLength(sequence), True, zero, body=body.graph)
    result.type, result.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([1])
    return result


def _norm(op: Builder, x: ir.Value) -> ir.Value:
    return op.Reshape(op.Sqrt(op.ReduceSum(op.Mul(x, x), keepdims=0)), [1])


def _rms(op: Builder, x: ir.Value) -> ir.Value:
    return op.Reshape(op.Sqrt(op.ReduceMean(op.Mul(x, x), keepdims=0)), [1])
