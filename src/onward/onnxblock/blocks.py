"""The small blocks that losses and models are composed of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir

from onward.onnxblock.base import Block
from onward.onnxblock.context import current_model
from onward.onnxblock.emit import emit, find_type
from onward.optim.update_rules import total_norm

if TYPE_CHECKING:
    from onward.graph.builder import Builder

__all__ = [
    "Abs",
    "Add",
    "Cast",
    "Clip",
    "Constant",
    "Div",
    "InputLike",
    "LabelEncoder",
    "Linear",
    "Log",
    "Mul",
    "Neg",
    "PassThrough",
    "Pow",
    "ReduceAllL2",
    "ReduceMean",
    "ReduceSum",
    "SequenceConstruct",
    "Sigmoid",
    "Sub",
]


class _Operator(Block):
    """A block that is one operator, named like the class."""

    def build(self, *names: str) -> str:
        kind = type(self).__name__
        return emit(names, lambda op, *values: getattr(op, kind)(*values))[0]


class Add(_Operator):
    """x + y"""


class Sub(_Operator):
    """x − y"""


class Mul(_Operator):
    """x·y"""


class Div(_Operator):
    """x / y"""


class Sigmoid(_Operator):
    """1 / (1 + e^−x)"""


class Log(_Operator):
    """ln x"""


class Neg(_Operator):
    """−x"""


class Abs(_Operator):
    """|x|"""


class SequenceConstruct(_Operator):
    """A sequence of tensors."""


class Pow(Block):
    """x to a fixed power"""

    def __init__(self, exponent: float) -> None:
        self._exponent = exponent

    def build(self, name: str) -> str:
        return emit([name], lambda op, x: op.Pow(x, self._exponent))[0]


class _Reduction(Block):
    # positional and with these defaults, as scripts written for onnxruntime-training pass them
    def __init__(self, keepdims: bool = True) -> None:
        self._keepdims = keepdims

    def build(self, name: str) -> str:
        kind = type(self).__name__
        return emit([name], lambda op, x: getattr(op, kind)(x, keepdims=int(self._keepdims)))[0]


class ReduceMean(_Reduction):
    """The mean of all elements."""


class ReduceSum(_Reduction):
    """The sum of all elements."""


class Constant(Block):
    """A number, as a float32 tensor of one element."""

    def __init__(self, value_float: float) -> None:
        self._value = value_float

    def build(self) -> str:
        # Identity: a block must name a value that a node computes, and `emit` names nodes' outputs
        return emit([], lambda op: op.Identity(np.asarray([self._value], np.float32)))[0]


class ReduceAllL2(Block):
    """√Σ‖x‖² over several tensors, or over a sequence of them"""

    def build(self, *names: str) -> str:
        return emit(names, total_norm)[0]


class Clip(Block):
    """x limited to [clip_min, clip_max]; None leaves an end open"""

    def __init__(self, clip_min: float | None = None, clip_max: float | None = None) -> None:
        self._min, self._max = clip_min, clip_max

    def build(self, name: str) -> str:
        # an end that is None is an input left out, which ONNX reads as open
        return emit([name], lambda op, x: op.Clip(x, self._min, self._max))[0]


class PassThrough(Block):
    """x itself, under another name"""

    def build(self, name: str) -> str:
        return emit([name], lambda op, x: op.Identity(x))[0]


class InputLike(Block):
    """A new graph input with the type and shape of another value."""

    def __init__(self, like: str | None = None) -> None:
        self._like = like

    def build(self, name: str | None = None) -> str:
        # optional in the signature only because onnxruntime-training's is
        if self._like is None:
            raise ValueError("InputLike needs the name of the value to be like")
        # beside the value that it is like, whose name is taken
        value = onnx.ValueInfoProto(name=name or f"{self._like}.input")
        value.type.CopyFrom(find_type(self._like))
        current_model().graph.input.append(value)
        return value.name


class LabelEncoder(Block):
    """Maps labels by a table; the attributes of ai.onnx.ml's LabelEncoder."""

    def __init__(
        self,
        default_float: float = 0.0,
        default_int64: int = -1,
        default_string: str = "_Unused",
        keys_floats: Sequence[float] | None = None,
        keys_int64s: Sequence[int] | None = None,
        keys_strings: Sequence[str] | None = None,
        values_floats: Sequence[float] | None = None,
        values_int64s: Sequence[int] | None = None,
        values_strings: Sequence[str] | None = None,
    ) -> None:
        attributes = {
            "default_float": default_float,
            "default_int64": default_int64,
            "default_string": default_string,
            "keys_floats": keys_floats,
            "keys_int64s": keys_int64s,
            "keys_strings": keys_strings,
            "values_floats": values_floats,
            "values_int64s": values_int64s,
            "values_strings": values_strings,
        }
        self._attributes: dict[str, Any] = {
            key: value for key, value in attributes.items() if value is not None
        }

    def build(self, name: str) -> str:
        model = current_model()
        # its attributes below are those of version 3
        if not any(entry.domain == "ai.onnx.ml" for entry in model.opset_import):
            model.opset_import.append(onnx.helper.make_opsetid("ai.onnx.ml", 3))
        for entry in model.opset_import:
            if entry.domain == "ai.onnx.ml":
                entry.version = min(entry.version, 3)
        kind = (
            ir.DataType.INT64 if "values_int64s" in self._attributes
            else ir.DataType.STRING if "values_strings" in self._attributes
            else ir.DataType.FLOAT
        )  # fmt: skip

        def build(op: Builder, x: ir.Value) -> ir.Value:
            (encoded,) = op.node("LabelEncoder", [x], self._attributes, domain="ai.onnx.ml")
            # set by hand: the builder infers types of ai.onnx's operators only
            encoded.type, encoded.shape = ir.TensorType(kind), x.shape
            return encoded

        return emit([name], build)[0]


class Cast(Block):
    """x as another element type (an onnx.TensorProto type)"""

    def __init__(self, to: int) -> None:
        self._to = to

    def build(self, name: str) -> str:
        return emit([name], lambda op, x: op.Cast(x, to=self._to))[0]


class Linear(Block):
    """α·x·Wᵀ + β·b with new parameters `{name}.weight` and `{name}.bias`, uniform in ±1/√in"""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, alpha: float = 1.0, beta: float = 1.0
    ) -> None:
        self._sizes = in_features, out_features
        self._bias, self._alpha, self._beta = bias, alpha, beta

    def build(self, name: str) -> str:
        model = current_model()
        # A model may have several layers, and layers of its own that are called so.
        taken = {tensor.name for tensor in model.graph.initializer}
        prefix, count = "linear", 0
        while f"{prefix}.weight" in taken:
            count += 1
            prefix = f"linear_{count}"
        inputs, outputs = self._sizes
        # torch's default for a linear layer
        limit = 1.0 / np.sqrt(inputs)
        # Another seed for each layer, the same in every run: artifacts are reproducible.
        rng = np.random.default_rng(len(taken))
        shapes = {f"{prefix}.weight": (outputs, inputs)} | (
            {f"{prefix}.bias": (outputs,)} if self._bias else {}
        )
        for key, shape in shapes.items():
            data = rng.uniform(-limit, limit, shape).astype(np.float32)
            model.graph.initializer.append(onnx.numpy_helper.from_array(data, key))
        # Gemm, not MatMul and Add: one kernel, and weights [out, in] as torch stores them
        return emit(
            [name, *shapes],
            lambda op, x, *w: op.Gemm(x, *w, alpha=self._alpha, beta=self._beta, transB=1),
            scope=prefix,
        )[0]
