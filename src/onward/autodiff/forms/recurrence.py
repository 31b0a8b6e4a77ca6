"""Shared by RNN, GRU and LSTM: reading a node, running a step over time, products over all steps.

The forward pass is one product for all inputs and a Scan over time that also outputs what the backward pass reads (the
gates); the backward pass is a Scan in the other direction with a single product in each step, and one product over all
steps for each weight. Registers no rule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import onnx_ir as ir

from onward.errors import ModelError

Step = Callable[..., tuple[Sequence[ir.Value], Sequence[ir.Value]]]


def scan(
    op, step: Step, *, states: Sequence[ir.Value], sequences: Sequence[ir.Value], reverse: bool
) -> tuple[list[ir.Value], list[ir.Value]]:
    """Run `step(op, states, elements) → (states, results)` over time; the last states, all results."""
    inner = op.subgraph("step")
    inner_states = [inner.input("state", v.dtype, v.shape) for v in states]
    elements = [inner.input("element", v.dtype, None if v.shape is None else v.shape[1:]) for v in sequences]
    after, results = step(inner, inner_states, elements)
    for value in [*after, *results]:
        inner.add_output(value)
    # Scan reads and writes either way by itself: no ReverseSequence, and no copies.
    turn = int(reverse)
    outputs = op.Scan(
        *states,
        *sequences,
        body=inner,
        num_scan_inputs=len(sequences),
        scan_input_directions=[turn] * len(sequences),
        scan_output_directions=[turn] * len(results),
        outputs=len(after) + len(results),
    )
    return list(outputs[: len(after)]), list(outputs[len(after) :])


@dataclasses.dataclass
class Direction:
    """One direction of a recurrent node: its weights, initial state, and gradients as they are found."""

    index: int
    reverse: bool
    w: ir.Value  # [g·H, I]
    r: ir.Value  # [g·H, H]
    bias_w: ir.Value | None  # [g·H]
    bias_r: ir.Value | None
    h: ir.Value  # [B, H]
    c: ir.Value | None = None
    peephole: ir.Value | None = None  # [3·H]


class Recurrence:
    """A recurrent node, read: sequences have time first, whatever its layout."""

    def __init__(self, op, node: ir.Node, *, gates: int) -> None:
        self.op, self.node, self.gates = op, node, gates
        x, w, r, bias, lengths, h, c, peephole = (*node.inputs, *[None] * 8)[:8]
        assert x is not None and w is not None and r is not None
        self.batch_first = node.attributes.get_int("layout", 0) == 1
        kind = node.attributes.get_string("direction", "forward")
        self.reversals = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[kind]
        hidden = node.attributes.get_int("hidden_size", 0) or op.static_dim(r, 2)
        if not hidden:
            raise ModelError(
                f"{node.op_type} '{node.name}' has neither hidden_size nor a weight of known size"
            )
        self.hidden = hidden
        self.x = op.Transpose(x, perm=[1, 0, 2]) if self.batch_first else x
        # The inputs of all steps as rows of one matrix: one large product rather than one in each step.
        self.rows = op.Reshape(self.x, op.concat_shape(-1, op.dim(w, 2)))
        self.mask = self._mask(lengths)
        self.directions = [
            Direction(
                d,
                reverse,
                w=self._pick(w, d),
                r=self._pick(r, d),
                bias_w=None if bias is None else self._part(self._pick(bias, d), 0),
                bias_r=None if bias is None else self._part(self._pick(bias, d), 1),
                h=self._state(h, d),
                c=self._state(c, d) if node.op_type == "LSTM" else None,
                peephole=None if peephole is None else self._pick(peephole, d),
            )
            for d, reverse in enumerate(self.reversals)
        ]

    @classmethod
    def read(cls, op, node: ir.Node, *, gates: int) -> Recurrence:
        """Read a node; what is computed from its inputs is computed before it, for both passes."""
        with op.inserting(before=node):
            return cls(op, node, gates=gates)

    def _pick(self, value: ir.Value, direction: int) -> ir.Value:
        """One direction of a value that has them on its first axis."""
        if len(self.reversals) == 1:
            return self.op.Squeeze(value, [0])
        return self.op.Gather(value, np.int64(direction), axis=0)

    def _part(self, bias: ir.Value, half: int) -> ir.Value:
        size = self.gates * self.hidden
        return self.op.Slice(bias, [half * size], [(half + 1) * size], [0])

    def _state(self, value: ir.Value | None, direction: int) -> ir.Value:
        op = self.op
        if value is None:
            return self.zeros()
        if len(self.reversals) == 1:
            return op.Squeeze(value, [1 if self.batch_first else 0])
        return op.Gather(value, np.int64(direction), axis=1 if self.batch_first else 0)

    def zeros(self) -> ir.Value:
        """A state of zeros, [B, H]."""
        shape = self.op.concat_shape(self.op.dim(self.x, 1), self.hidden)
        return self.op.Expand(self.op.constant_like(0.0, self.x), shape)

    def _mask(self, lengths: ir.Value | None) -> ir.Value | None:
        """[S, B, 1]: whether a step is part of its sequence."""
        if lengths is None:
            return None
        op = self.op
        steps = op.positions(op.dim(self.x, 0))
        lengths = op.Unsqueeze(op.Cast(lengths, to=ir.DataType.INT64), [0])
        return op.Unsqueeze(op.Less(op.Unsqueeze(steps, [1]), lengths), [2])

    def project(self, direction: Direction, bias: ir.Value | None) -> ir.Value:
        """x·Wᵀ + bias for every step at once: [S, B, g·H]."""
        op = self.op
        product = op.Gemm(self.rows, direction.w, bias, transB=1)
        return self._steps(product, self.gates * self.hidden)

    def _steps(self, rows: ir.Value, width: int | None) -> ir.Value:
        """Rows of all steps back to [S, B, width]."""
        op = self.op
        shape = op.concat_shape(op.dim(self.x, 0), op.dim(self.x, 1), -1 if width is None else width)
        return op.Reshape(rows, shape)

    def previous(self, direction: Direction, states: ir.Value, first: ir.Value | None) -> ir.Value:
        """The state that each step began with: all states, moved by one step."""
        op, first = self.op, self.op.Unsqueeze(first, [0])
        if direction.reverse:
            return op.Concat(op.Slice(states, [1], [np.iinfo(np.int64).max], [0]), first, axis=0)
        return op.Concat(first, op.Slice(states, [0], [-1], [0]), axis=0)

    def where_valid(self, value: ir.Value, other: float) -> ir.Value:
        """A coefficient of the backward pass, masked where a step is past its sequence's end."""
        if self.mask is None:
            return value
        return self.op.Where(self.mask, value, self.op.constant_like(other, value))

    def hold(self) -> ir.Value | None:
        """[S, B, 1]: 1 where a step is past the end of its sequence and keeps its state."""
        if self.mask is None:
            return None
        zero, one = self.op.constant_like(0.0, self.x), self.op.constant_like(1.0, self.x)
        return self.op.Where(self.mask, zero, one)

    # ---- outputs and their gradients -------------------------------------------------------------

    def outputs(self, sequences: Sequence[ir.Value], *finals: Sequence[ir.Value]) -> list[ir.Value]:
        """The node's outputs from each direction's states over time and last states."""
        op, axis = self.op, 2 if self.batch_first else 1
        outputs = []
        for index, parts in enumerate([sequences, *finals]):
            if index == 0:
                parts = [self.where_valid(part, 0.0) for part in parts]
                parts = [op.Transpose(part, perm=[1, 0, 2]) if self.batch_first else part for part in parts]
            direction_axis = axis - min(index, 1)
            parts = [op.Unsqueeze(part, [direction_axis]) for part in parts]
            outputs.append(parts[0] if len(parts) == 1 else op.Concat(*parts, axis=direction_axis))
        return outputs

    def over_time(self, width: int) -> ir.Value:
        """The type and shape of so many numbers for each step and row."""
        steps, rows = (None, None) if self.x.shape is None else self.x.shape[:2]
        return ir.Value(type=self.x.type, shape=ir.Shape([steps, rows, width]))

    def sequence_gradient(self, dy: ir.Value | None, direction: Direction) -> ir.Value | None:
        """One direction of dY as [S, B, H]."""
        if dy is None:
            return None
        op, axis = self.op, 2 if self.batch_first else 1
        part = (
            op.Squeeze(dy, [axis])
            if len(self.reversals) == 1
            else op.Gather(dy, np.int64(direction.index), axis=axis)
        )
        part = op.Transpose(part, perm=[1, 0, 2]) if self.batch_first else part
        return self.where_valid(part, 0.0)

    def state_gradient(self, dy: ir.Value | None, direction: Direction) -> ir.Value:
        """One direction of dY_h or dY_c as [B, H]."""
        return self._state(dy, direction.index)

    def flat(self, value: ir.Value, width: int) -> ir.Value:
        """[S, B, width] as rows."""
        return self.op.Reshape(value, [-1, width])

    def input_gradient(self, parts: Sequence[ir.Value]) -> ir.Value:
        """dX from each direction's rows."""
        op = self.op
        total = parts[0] if len(parts) == 1 else op.Add(*parts)
        steps = self._steps(total, None)
        return op.Transpose(steps, perm=[1, 0, 2]) if self.batch_first else steps

    def stack(self, parts: Sequence[ir.Value], *, state: bool = False) -> ir.Value:
        """Gradients of each direction, put back on the axis of directions."""
        axis = 1 if state and self.batch_first else 0
        parts = [self.op.Unsqueeze(part, [axis]) for part in parts]
        return parts[0] if len(parts) == 1 else self.op.Concat(*parts, axis=axis)


# name: default α and β (None: the function has none)
_DEFAULTS: dict[str, tuple[float | None, float | None]] = {
    "relu": (None, None),
    "tanh": (None, None),
    "sigmoid": (None, None),
    "affine": (1.0, 0.0),
    "leakyrelu": (0.01, None),
    "thresholdedrelu": (1.0, None),
    "scaledtanh": (1.0, 1.0),
    "hardsigmoid": (0.2, 0.5),
    "elu": (1.0, None),
    "softsign": (None, None),
    "softplus": (None, None),
}


@dataclasses.dataclass(frozen=True)
class Activation:
    """One activation function; its argument is clipped to ±clip first where clip is not None."""

    name: str
    alpha: float = 0.0
    beta: float = 0.0
    clip: float | None = None

    @property
    def needs_argument(self) -> bool:
        """Whether the derivative cannot be computed from the function's value alone."""
        return self.clip is not None or self.name in ("leakyrelu", "elu")

    def apply(self, op, z: ir.Value) -> ir.Value:
        """f(z)"""
        if self.clip is not None:
            z = op.Clip(z, op.constant_like(-self.clip, z), op.constant_like(self.clip, z))
        forms: dict[str, Callable[[], ir.Value]] = {
            "relu": lambda: op.Relu(z),
            "tanh": lambda: op.Tanh(z),
            "sigmoid": lambda: op.Sigmoid(z),
            "affine": lambda: op.Add(op.Mul(z, self.alpha), self.beta),
            "leakyrelu": lambda: op.LeakyRelu(z, alpha=self.alpha),
            "thresholdedrelu": lambda: op.Where(op.Greater(z, self.alpha), z, op.constant_like(0.0, z)),
            "scaledtanh": lambda: op.Mul(op.Tanh(op.Mul(z, self.beta)), self.alpha),
            "hardsigmoid": lambda: op.HardSigmoid(z, alpha=self.alpha, beta=self.beta),
            "elu": lambda: op.Elu(z, alpha=self.alpha),
            "softsign": lambda: op.Div(z, op.Add(op.Abs(z), 1.0)),
            "softplus": lambda: op.Softplus(z),
        }
        return forms[self.name]()

    def derivative(self, op, y: ir.Value, z: ir.Value | None) -> ir.Value:
        """f′ at z, written in y = f(z) where that suffices."""

        def number(value: float) -> ir.Value:
            return op.constant_like(value, y)

        def where(condition: ir.Value, then: object, other: float) -> ir.Value:
            return op.Where(condition, then if isinstance(then, ir.Value) else number(then), number(other))  # type: ignore[arg-type]

        forms: dict[str, Callable[[], ir.Value]] = {
            "relu": lambda: where(op.Greater(y, 0.0), 1.0, 0.0),
            "tanh": lambda: op.Sub(1.0, op.Mul(y, y)),
            "sigmoid": lambda: op.Mul(y, op.Sub(1.0, y)),
            "affine": lambda: op.Expand(number(self.alpha), op.shape(y)),
            "leakyrelu": lambda: where(op.Less(z, 0.0), self.alpha, 1.0),
            "thresholdedrelu": lambda: where(op.Equal(y, 0.0), 0.0, 1.0),
            "scaledtanh": lambda: op.Mul(
                op.Sub(1.0, op.Mul(op.Mul(y, y), self.alpha**-2)), self.alpha * self.beta
            ),
            "hardsigmoid": lambda: where(op.And(op.Greater(y, 0.0), op.Less(y, 1.0)), self.alpha, 0.0),
            "elu": lambda: where(op.Less(z, 0.0), op.Add(y, self.alpha), 1.0),
            "softsign": lambda: op.Mul(op.Sub(1.0, op.Abs(y)), op.Sub(1.0, op.Abs(y))),
            "softplus": lambda: op.Sub(1.0, op.Exp(op.Neg(y))),
        }
        slope = forms[self.name]()
        if self.clip is not None:
            slope = op.Where(op.LessOrEqual(op.Abs(z), self.clip), slope, number(0.0))
        return slope


def read_activations(node: ir.Node, *, defaults: Sequence[str], directions: int) -> list[list[Activation]]:
    """The activations of each direction; α and β are consumed, in order, by the functions that have them."""
    attributes = node.attributes
    names = attributes["activations"].as_strings() if "activations" in attributes else []
    # An empty list means the defaults, as no list does.
    names = [*names] or [*defaults] * directions
    alphas = _numbers(node, "activation_alpha")
    betas = _numbers(node, "activation_beta")
    clip = attributes["clip"].as_float() if "clip" in attributes else None
    # ONNX gives a threshold of 0 or less no meaning.
    clip = clip if clip is not None and clip > 0 else None
    activations = []
    for name in names:
        if name.lower() not in _DEFAULTS:
            raise ModelError(f"{node.op_type} '{node.name}' names an activation that ONNX lacks: '{name}'")
        alpha, beta = _DEFAULTS[name.lower()]
        alpha = next(alphas, alpha) if alpha is not None else 0.0
        beta = next(betas, beta) if beta is not None else 0.0
        activations.append(Activation(name.lower(), alpha or 0.0, beta or 0.0, clip))
    each = len(defaults)
    return [activations[d * each : (d + 1) * each] for d in range(directions)]


def _numbers(node: ir.Node, attribute: str) -> Iterator[float]:
    return iter(node.attributes[attribute].as_floats() if attribute in node.attributes else ())
