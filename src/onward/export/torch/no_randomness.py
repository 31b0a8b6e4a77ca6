"""Takes the randomness out of a torch module and of its export, with the same values, so that they can be compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import onnx
import torch
from onnx import TensorProto, helper
from torch import nn
from torch.overrides import TorchFunctionMode

from onward.export.torch import assemble
from onward.export.torch.keep_gradients import calling_line
from onward.export.torch.patches import alpha_dropout_constants
from onward.export.torch.replace import replaced
from onward.graph.protobuf import attributes_of, set_nodes

# What a uniform draw gives. Not a half: a Bernoulli draw is `u < p` in some exports and an operator in others, and
# rates of exactly a half are common (DropPath). Bfloat16 can hold it.
UNIFORM = 0.5 - 2**-9


class Neutral(TorchFunctionMode):
    """Within it nothing is random: dropout is the identity, random functions return fixed values.

    `active` counts the dropouts that would have dropped something. The same stand-ins are put into the ONNX
    model for comparison: uniform draws give `UNIFORM`, Bernoulli draws 1 where p is more, normal draws their mean.
    """

    def __init__(self) -> None:
        super().__init__()
        self.active = 0
        # the lines of the module that ask a tensor whether it is true
        self.decisions: dict[str, None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        # Only torch's own functions pass here: sizes that are compared in Python decide nothing about data.
        if name == "__bool__" and not hasattr(args[0], _SETTLED):
            self.decisions[calling_line()] = None
        if name in _DROPOUTS:
            bound = dict(zip(("input", "p", "training"), args)) | kwargs
            on = bound.get("training", bound.get("train", True)) and bound.get("p", 0.5) > 0
            self.active += bool(on)
            if not on or "alpha" not in name:
                return bound["input"]
            scale, shift, _ = alpha_dropout_constants(
                bound.get("p", 0.5)
            )  # that stay where nothing is dropped
            return bound["input"] * scale + shift
        if name in ("rrelu", "rrelu_"):
            bound = dict(zip(("input", "lower", "upper", "training"), args)) | kwargs
            if bound.get("training", False):
                lower, upper = bound.get("lower", 1 / 8), bound.get("upper", 1 / 3)
                slope = lower + (upper - lower) * UNIFORM
                return torch.nn.functional.leaky_relu(bound["input"], slope)
        if name == "scaled_dot_product_attention":
            bound = dict(zip(("query", "key", "value", "attn_mask", "dropout_p"), args)) | kwargs
            self.active += bound.get("dropout_p", 0.0) > 0
            return func(*args[5:], **(bound | {"dropout_p": 0.0}))
        if name == "multi_head_attention_forward":
            # by position, as torch's layer calls it: dropout_p is the eleventh
            args = list(args)
            on = kwargs.get("training", True)
            if len(args) > 10:
                self.active += bool(on and args[10] > 0)
                args[10] = 0.0
            return func(*args, **kwargs)
        if name in _DRAWS:
            drawn = _DRAWS[name](func(*args, **kwargs), args, kwargs)
            if name == "rand":
                setattr(drawn, _FROM_ZERO_TO_ONE, True)
            return drawn
        result = func(*args, **kwargs)
        if (
            name in ("lt", "__lt__")
            and hasattr(args[0], _FROM_ZERO_TO_ONE)
            and (isinstance(args[1], int | float) and not 0 < args[1] < 1)
        ):
            setattr(result, _SETTLED, True)  # layer drop at rate 0: the same answer at each draw
        return result


# Attributes of tensors: what was drawn evenly, and a comparison of it that has one answer.
_FROM_ZERO_TO_ONE, _SETTLED = "onward_drawn", "onward_settled"

_DROPOUTS = {
    "dropout",
    "dropout_",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "alpha_dropout_",
    "feature_dropout",
    "feature_dropout_",
    "feature_alpha_dropout",
}


def _bernoulli(drawn: torch.Tensor, args: Any, kwargs: Any) -> torch.Tensor:
    p = kwargs.get("p", args[1] if len(args) > 1 else None)
    p = args[0] if p is None or isinstance(p, torch.Generator) else p
    return drawn.copy_((torch.as_tensor(p) > UNIFORM).to(drawn.dtype).expand_as(drawn))


def _bernoulli_(drawn: torch.Tensor, args: Any, kwargs: Any) -> torch.Tensor:
    """The rate of the method that draws in place is 0.5 unless given; the tensor's own numbers mean nothing."""
    return _bernoulli(drawn, (), {"p": kwargs.get("p", args[1] if len(args) > 1 else 0.5)})


def _between(drawn: torch.Tensor, args: Any, kwargs: Any) -> torch.Tensor:
    bound = dict(zip(("self", "from", "to"), args)) | kwargs
    low, high = bound.get("from", 0.0), bound.get("to", 1.0)
    return drawn.fill_(low + (high - low) * UNIFORM)


_DRAWS: dict[str, Callable[[torch.Tensor, Any, Any], torch.Tensor]] = {
    "rand": lambda drawn, args, kwargs: drawn.fill_(UNIFORM),
    "rand_like": lambda drawn, args, kwargs: drawn.fill_(UNIFORM),
    "randn": lambda drawn, args, kwargs: drawn.zero_(),
    "randn_like": lambda drawn, args, kwargs: drawn.zero_(),
    "normal": lambda drawn, args, kwargs: drawn.copy_(
        torch.as_tensor(kwargs.get("mean", (*args, 0.0)[0])).detach()
    ),
    "randperm": lambda drawn, args, kwargs: drawn.copy_(torch.arange(drawn.numel())),
    "uniform_": _between,
    "normal_": lambda drawn, args, kwargs: drawn.fill_(kwargs.get("mean", args[1] if len(args) > 1 else 0.0)),
    "exponential_": lambda drawn, args, kwargs: drawn.fill_(
        -math.log1p(-UNIFORM) / kwargs.get("lambd", args[1] if len(args) > 1 else 1.0)
    ),
    "bernoulli": _bernoulli,
    "bernoulli_": _bernoulli_,
}


@contextmanager
def neutral_dropout(model: nn.Module) -> Iterator[Neutral]:
    """Run torch without randomness, in its own kernels: the reference for the exported model."""
    recurrent = [m for m in model.modules() if isinstance(m, nn.RNNBase) and m.dropout > 0]
    mode = Neutral()
    # Recurrent kernels drop inside, between layers, where no function mode sees it.
    mode.active += sum(m.num_layers - 1 for m in recurrent if m.training)
    with replaced(*((module, "dropout", 0.0) for module in recurrent)), mode:
        yield mode


def neutralised(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of an exported model in which nothing is random: what `Neutral` is for torch."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for graph in assemble.graphs(copy.graph):
        set_nodes(graph, [neutral for node in graph.node for neutral in _neutral(node)])
    return copy


def _neutral(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    out = node.output[0] if node.output else ""
    if node.op_type == "Dropout":
        return [helper.make_node("Identity", node.input[:1], [out])]
    attributes = attributes_of(node)
    if node.op_type in ("RandomUniform", "RandomNormal", "RandomUniformLike", "RandomNormalLike"):
        uniform = node.op_type.startswith("RandomUniform")
        low, high = attributes.get("low", 0.0), attributes.get("high", 1.0)
        number = low + (high - low) * UNIFORM if uniform else attributes.get("mean", 0.0)
        # The shape is the node's input's, or an attribute: either way the result has fixed numbers of it.
        kind = attributes.get("dtype", TensorProto.FLOAT)
        value = helper.make_tensor("", kind, [1], [number])
        shape = out + ".shape"
        return [
            helper.make_node("Shape", node.input[:1], [shape])
            if node.input
            else helper.make_node("Constant", [], [shape], value_ints=attributes["shape"]),
            helper.make_node("ConstantOfShape", [shape], [out], value=value),
        ]
    if node.op_type == "Bernoulli":
        number = helper.make_tensor("", TensorProto.FLOAT, [], [UNIFORM])
        return [
            helper.make_node("Constant", [], [out + ".number"], value=number),
            # the probabilities may be float64 or half
            helper.make_node("CastLike", [out + ".number", node.input[0]], [out + ".like"]),
            helper.make_node("Greater", [node.input[0], out + ".like"], [out + ".drawn"]),
            helper.make_node("Cast", [out + ".drawn"], [out], to=attributes.get("dtype", TensorProto.FLOAT)),
        ]
    return [node]
