"""Optimizer blocks, in the sequence form that plain sessions feed: lists of tensors in and out.

Called with `parameters()` of a training block inside `onnxblock.empty_base()`. `generate_artifacts` takes
them too, and then writes the flat form that Onward's own runtime prefers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnx_ir as ir

from onward.contract import MOMENTS
from onward.errors import ModelError
from onward.onnxblock.base import Block
from onward.onnxblock.context import current_model
from onward.onnxblock.emit import emit
from onward.optim import update_rules
from onward.optim.optimizer_model import Clipping, ParameterGroup, optimizer_model
from onward.optim.update_rules import total_norm

if TYPE_CHECKING:
    from onward.graph.builder import Builder

__all__ = [
    "SGD",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "ClipGradNorm",
    "ClipGradValue",
    "Lamb",
    "Lion",
    "OptimizerBlock",
    "RMSprop",
]

Parameters = tuple[Sequence[onnx.TensorProto], Sequence[onnx.TensorProto]]


class ClipGradNorm(Block):
    """Scales gradients by min(max_norm / (‖g‖ + 1e-6), 1), ‖g‖ over all of them together.

    Takes the name of a sequence and gives one, or names of tensors and gives as many.
    """

    def __init__(self, max_norm: float) -> None:
        if not max_norm > 0:
            raise ValueError(f"max_norm is {max_norm}: it must be positive")
        self.max_norm = max_norm

    def build(self, *gradient_names: str) -> str | list[str]:
        def clip(op: Builder, *gradients: ir.Value) -> list[ir.Value]:
            # epsilon as in torch's clip_grad_norm_: no division by zero where all gradients are
            norm = op.Add(total_norm(op, *gradients), 1e-6)
            factor = op.Min(op.Div(np.asarray([self.max_norm], np.float32), norm), 1.0)
            # one name may stand for all gradients: the sequence that optimizer blocks take
            if isinstance(gradients[0].type, ir.SequenceType):
                return [_map(op, gradients[0], lambda inner, g: inner.Mul(g, factor))]
            return [op.Mul(g, factor) for g in gradients]

        names = emit(gradient_names, clip, scope="clip")
        return names[0] if len(names) == 1 else names


class ClipGradValue(Block):
    """Limits every element of the gradients to [−max_value, max_value]."""

    def __init__(self, max_value: float) -> None:
        if not max_value > 0:
            raise ValueError(f"max_value is {max_value}: it must be positive")
        self.max_value = max_value

    def build(self, *gradient_names: str) -> str | list[str]:
        def clip(op: Builder, *gradients: ir.Value) -> list[ir.Value]:
            limit = self.max_value
            if isinstance(gradients[0].type, ir.SequenceType):
                return [_map(op, gradients[0], lambda inner, g: inner.Clip(g, -limit, limit))]
            return [op.Clip(g, -limit, limit) for g in gradients]

        names = emit(gradient_names, clip, scope="clip")
        return names[0] if len(names) == 1 else names


class OptimizerBlock(Block):
    """An update rule over all trainable parameters, as sequences; subclasses give the rule."""

    rule: update_rules.Optimizer
    clip_grad: ClipGradNorm | ClipGradValue | None = None
    _model: onnx.ModelProto | None = None

    def to_model_proto(self) -> onnx.ModelProto:
        """The optimizer model that was built; `onward.api.Optimizer` takes it."""
        if self._model is None:
            raise ModelError("Please build the optimizer model first before trying to retrieve it.")
        return self._model

    def build(self, parameters: Parameters) -> str:
        """Add the optimizer's inputs, updates and outputs; returns the name of the flag `updated_flag`."""
        # A sequence of state has the shapes of its parameters in this form; Adafactor's has rows and columns.
        if self.rule.slot_shapes is not None:
            raise ValueError(
                f"{self.rule.name} keeps state of other shapes: use it through generate_artifacts"
            )
        model = current_model()
        model.graph.name = f"{self.rule.name} optimizer"
        inputs = [("learning_rate", onnx.TensorProto.FLOAT), ("step", onnx.TensorProto.INT64)]
        for name, kind in inputs:
            # [1], not rank 0: what the optimizers of onnxruntime-training are fed
            model.graph.input.append(onnx.helper.make_tensor_value_info(name, kind, [1]))
        sequences = ["params", "gradients", *MOMENTS[: len(self.rule.slots)]]
        for name in sequences:
            model.graph.input.append(
                # no shape: a sequence's elements have one each
                onnx.helper.make_tensor_sequence_value_info(name, onnx.TensorProto.FLOAT, None)
            )
        gradients = "gradients" if self.clip_grad is None else self.clip_grad("gradients")
        assert isinstance(gradients, str)
        names = ["learning_rate", "step", "params", gradients, *sequences[2:]]
        results = emit(names, self._update, scope=self.rule.name)
        final = ["updated_flag", "updated_params", *(f"updated_{name}" for name in sequences[2:])]
        # renamed by Identity: `emit` chooses free names, and callers look these up
        for old, new in zip(results, final):
            model.graph.node.append(onnx.helper.make_node("Identity", [old], [new], name=new))
        model.graph.output.append(onnx.helper.make_tensor_value_info(final[0], onnx.TensorProto.BOOL, [1]))
        for name in final[1:]:
            model.graph.output.append(
                onnx.helper.make_tensor_sequence_value_info(name, onnx.TensorProto.FLOAT, None)
            )
        self._model = model
        return final[0]

    def optimizer_model(
        self, parameters: Mapping[str, ir.TensorProtocol], groups: Sequence[ParameterGroup] = ()
    ) -> ir.Model:
        """The flat form of the same rule, which Onward's own runtime prefers."""
        if isinstance(self.clip_grad, ClipGradNorm):
            clipping = Clipping(norm=self.clip_grad.max_norm)
        elif isinstance(self.clip_grad, ClipGradValue):
            clipping = Clipping(value=self.clip_grad.max_value)
        elif self.clip_grad is None:
            clipping = Clipping()
        else:
            raise TypeError(
                f"clip_grad must be a ClipGradNorm or ClipGradValue, got {type(self.clip_grad).__name__}"
            )
        shapes = {name: tuple(tensor.shape.numpy()) for name, tensor in parameters.items()}
        kinds = {tensor.dtype for tensor in parameters.values()}
        dtype = kinds.pop() if kinds else ir.DataType.FLOAT
        return optimizer_model(self.rule, shapes, clipping=clipping, groups=groups, dtype=dtype)

    def _update(
        self, op: Builder, rate: ir.Value, step: ir.Value, params: ir.Value, grads: ir.Value, *slots: ir.Value
    ) -> list[ir.Value]:
        decay = None
        if self.rule.weight_decay:
            decay = op.constant(np.asarray([self.rule.weight_decay], np.float32), name="weight_decay")
        scalars = update_rules.Scalars(rate, op.Cast(step, to=ir.DataType.FLOAT), decay)
        # A Loop over the parameters: the sequences' lengths are known only when it runs.
        body = op.subgraph("update")
        index = body.input("index", ir.DataType.INT64, [])
        going = body.input("going", ir.DataType.BOOL, [])
        count = 1 + len(slots)
        carried = [_sequence_input(body, f"carried{i}") for i in range(count)]
        state = {name: _at(body, slot, index) for name, slot in zip(self.rule.slots, slots)}
        parameter, state = self.rule.update(
            body, _at(body, params, index), _at(body, grads, index), state, scalars
        )
        results = [parameter, *(state[name] for name in self.rule.slots)]
        body.graph.outputs.append(body.Identity(going))
        body.graph.outputs.extend(_insert(body, old, new) for old, new in zip(carried, results))
        empty = [op.node("SequenceEmpty", [], {"dtype": int(ir.DataType.FLOAT)})[0]] * count
        updated = op.Loop(op.SequenceLength(params), True, *empty, body=body.graph, outputs=count)
        for value in updated:
            # the builder infers tensors' types only
            value.type = ir.SequenceType(ir.TensorType(ir.DataType.FLOAT))
        # onnxruntime-training's optimizer tells whether it updated; this one always does.
        flag = op.constant(np.asarray([True]), name="flag")
        return [op.Identity(flag), *updated]


class AdamW(OptimizerBlock):
    """AdamW with the defaults of the API it stands in for, and with `decay_last` its arithmetic."""

    def __init__(
        self,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        clip_grad: ClipGradNorm | ClipGradValue | None = None,
        *,
        decay_last: bool = False,
    ) -> None:
        self.rule = update_rules.adamw(
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            bias_correction=bias_correction,
            decay_last=decay_last,
        )
        self.clip_grad = clip_grad


class SGD(OptimizerBlock):
    """Stochastic gradient descent, with optional momentum."""

    def __init__(
        self,
        clip_grad: ClipGradNorm | ClipGradValue | None = None,
        *,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        self.rule = update_rules.sgd(
            momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov
        )
        self.clip_grad = clip_grad


class _ByKeyword(OptimizerBlock):
    # staticmethod: a plain function as a class attribute would be bound to the block
    _make: staticmethod

    def __init__(self, clip_grad: ClipGradNorm | ClipGradValue | None = None, **options) -> None:
        self.rule = type(self)._make(**options)
        self.clip_grad = clip_grad


class Adam(_ByKeyword):
    """Adam; options as in `onward.optim.adam`."""

    _make = staticmethod(update_rules.adam)


class Adagrad(_ByKeyword):
    """Adagrad; options as in `onward.optim.adagrad`."""

    _make = staticmethod(update_rules.adagrad)


class RMSprop(_ByKeyword):
    """RMSprop; options as in `onward.optim.rmsprop`."""

    _make = staticmethod(update_rules.rmsprop)


class Lion(_ByKeyword):
    """Lion; options as in `onward.optim.lion`."""

    _make = staticmethod(update_rules.lion)


class Lamb(_ByKeyword):
    """LAMB; options as in `onward.optim.lamb`."""

    _make = staticmethod(update_rules.lamb)


class Adafactor(_ByKeyword):
    """Adafactor; options as in `onward.optim.adafactor`."""

    _make = staticmethod(update_rules.adafactor)


def _sequence_input(op: Builder, name: str) -> ir.Value:
    value = op.input(name, None)
    value.type = ir.SequenceType(ir.TensorType(ir.DataType.FLOAT))
    return value


def _at(op: Builder, sequence: ir.Value, index: ir.Value) -> ir.Value:
    element = op.SequenceAt(sequence, index)
    # its shape is that of one parameter or another: only the type can be said
    element.type = ir.TensorType(ir.DataType.FLOAT)
    return element


def _insert(op: Builder, sequence: ir.Value, element: ir.Value) -> ir.Value:
    longer = op.SequenceInsert(sequence, element)
    longer.type = ir.SequenceType(ir.TensorType(ir.DataType.FLOAT))
    return longer


def _map(op: Builder, sequence: ir.Value, function) -> ir.Value:
    """A new sequence with `function(builder, element)` of every element."""
    body = op.subgraph("map")
    index = body.input("index", ir.DataType.INT64, [])
    going = body.input("going", ir.DataType.BOOL, [])
    carried = _sequence_input(body, "carried")
    result = _insert(body, carried, function(body, _at(body, sequence, index)))
    # ONNX has SequenceMap, which the stock runtime only knows as a function of a Loop like this one
    body.graph.outputs.extend([body.Identity(going), result])
    (empty,) = op.node("SequenceEmpty", [], {"dtype": int(ir.DataType.FLOAT)})
    mapped = op.Loop(op.SequenceLength(sequence), True, empty, body=body.graph)
    mapped.type = ir.SequenceType(ir.TensorType(ir.DataType.FLOAT))
    return mapped
