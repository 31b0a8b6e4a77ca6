"""What a gradient test case is; the cases themselves are in `cases_<family>.py`, one row each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

Sampler = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Away from zero, where many operators have a kink."""
    x = rng.uniform(0.15, 1.5, shape) * rng.choice([-1.0, 1.0], shape)
    return x.astype(np.float32)


def positive(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.uniform(0.2, 2.0, shape).astype(np.float32)


def unit(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Inside (−0.9, 0.9)."""
    return rng.uniform(-0.9, 0.9, shape).astype(np.float32)


def distinct(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """No two elements are equal or near, so that maxima and orders are stable."""
    count = int(np.prod(shape))
    return ((rng.permutation(count) - count / 2 + 0.3) * 0.37).reshape(shape).astype(np.float32)


def between(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Like `distinct`, and equal to none of those numbers."""
    return (distinct(rng, shape) + 0.13).astype(np.float32)


def beyond(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Like `distinct`, and equal to none of those numbers, nor of those between."""
    return (distinct(rng, shape) + 0.25).astype(np.float32)


@dataclasses.dataclass
class Case:
    """One operator with its attributes at given shapes; or a whole model by `model_text`.

    `shapes` gives one float input each, sampled by `sample` (one sampler, or one for each input).
    `constants` are fixed inputs by position (np arrays; not differentiated); a position given there is not
    in `shapes`. `symbolic` makes every dimension of the float inputs symbolic in the model.
    """

    op: str
    shapes: Sequence[tuple[int, ...]] = ()
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)
    sample: Sampler | Sequence[Sampler] = normal
    constants: dict[int, np.ndarray | None] = dataclasses.field(default_factory=dict)
    outputs: int = 1
    of: Sequence[int] | None = None
    opset: int = 21
    domain: str = ""
    symbolic: bool = False
    wrt: Sequence[str] | None = None
    label: str = ""
    rtol: float = 1e-4
    runtime_rtol: float = 1e-4
    reference: str = "onnx"
    text: str = ""
    feeds: dict[str, np.ndarray] | None = None

    def __str__(self) -> str:
        attrs = ",".join(f"{k}={v}" for k, v in self.attributes.items() if not isinstance(v, onnx.GraphProto))
        shape = "x".join(str(s).replace(" ", "") for s in self.shapes)
        sym = "-symbolic" if self.symbolic else ""
        return f"{self.op}{sym}-{self.label or shape + attrs}"[:90]

    def inputs(self, seed: int = 0) -> dict[str, np.ndarray]:
        if self.feeds is not None:
            return self.feeds
        rng = np.random.default_rng(seed)
        samplers = (
            list(self.sample) if isinstance(self.sample, Sequence) else [self.sample] * len(self.shapes)
        )
        return {f"x{i}": f(rng, tuple(s)) for i, (s, f) in enumerate(zip(self.shapes, samplers))}

    def model(self) -> onnx.ModelProto:
        if self.text:
            return onnx.parser.parse_model(self.text)
        feeds = self.inputs()
        names: list[str] = []
        pending = list(feeds)
        initializers = []
        for position in range(len(self.shapes) + len(self.constants)):
            if position in self.constants:
                array = self.constants[position]
                if array is None:
                    names.append("")
                else:
                    names.append(f"c{position}")
                    initializers.append(onnx.numpy_helper.from_array(np.asarray(array), f"c{position}"))
            else:
                names.append(pending.pop(0))
        values = []
        for name, array in feeds.items():
            kind = helper.np_dtype_to_tensor_dtype(array.dtype)
            dims = [f"{name}_d{i}" for i in range(array.ndim)] if self.symbolic else array.shape
            values.append(helper.make_tensor_value_info(name, kind, dims))
        wanted = range(self.outputs) if self.of is None else self.of
        outs = [f"y{i}" for i in range(self.outputs)]
        node = helper.make_node(self.op, names, outs, domain=self.domain, name="node", **self.attributes)
        graph = helper.make_graph(
            [node],
            "case",
            values,
            [helper.make_empty_tensor_value_info(outs[i]) for i in wanted],
            initializers,
        )
        opsets = [helper.make_opsetid("", self.opset)]
        if self.domain:
            opsets.append(helper.make_opsetid(self.domain, 1))
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10 if self.opset < 23 else 11)
        inferred = onnx.shape_inference.infer_shapes(model)
        kinds = {v.name: v.type for v in inferred.graph.output}
        for value in model.graph.output:
            value.CopyFrom(helper.make_value_info(value.name, kinds[value.name]))
            if not value.type.tensor_type.elem_type and not value.type.HasField("sequence_type"):
                value.type.tensor_type.elem_type = TensorProto.FLOAT
        return model
