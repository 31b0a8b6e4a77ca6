"""The matrix products of a training step alone, on the stock runtime: what no engine on it can be faster than.

Takes the products of the forward model with the shapes that they have on the model's batch. Each has three:
y = a·b, and for its gradients da = dy·bᵀ and db = aᵀ·dy. They are one graph of nothing else, in one session with
its one set of threads; operands are inputs, as parameters are in training, and equal ones share their buffers.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

__all__ = ["Product", "products_of", "run_products"]


@dataclasses.dataclass(frozen=True)
class Product:
    """`batch` products of [rows, inner] and [inner, columns]; `form` is forward, left or right (gradients)."""

    batch: int
    rows: int
    inner: int
    columns: int
    form: str

    @property
    def operations(self) -> int:
        return 2 * self.batch * self.rows * self.inner * self.columns

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        a, b, y = (self.rows, self.inner), (self.inner, self.columns), (self.rows, self.columns)
        first, second = {"forward": (a, b), "left": (y, b), "right": (a, y)}[self.form]
        return ((self.batch, *first), (self.batch, *second)) if self.batch > 1 else (first, second)

    @property
    def result(self) -> tuple[int, ...]:
        a, b, y = (self.rows, self.inner), (self.inner, self.columns), (self.rows, self.columns)
        shape = {"forward": y, "left": a, "right": b}[self.form]
        return (self.batch, *shape) if self.batch > 1 else shape

    def nodes(self, a: str, b: str, y: str) -> list[onnx.NodeProto]:
        """Gemm of two matrices; of stacks, a MatMul, into which the runtime folds the Transpose when it loads."""
        flip_a, flip_b = self.form == "right", self.form == "left"
        if self.batch == 1:
            return [helper.make_node("Gemm", [a, b], [y], transA=int(flip_a), transB=int(flip_b))]
        nodes = []
        if flip_a:
            nodes.append(helper.make_node("Transpose", [a], [f"{y}.a"], perm=[0, 2, 1]))
        if flip_b:
            nodes.append(helper.make_node("Transpose", [b], [f"{y}.b"], perm=[0, 2, 1]))
        operands = [f"{y}.a" if flip_a else a, f"{y}.b" if flip_b else b]
        return [*nodes, helper.make_node("MatMul", operands, [y])]


def products_of(folder: Path) -> collections.Counter[Product]:
    """How often each product occurs in a step, from one run of the forward model."""
    found: collections.Counter[Product] = collections.Counter()
    for node, first, second in _forward_products(folder):
        flags = {attribute.name: attribute.i for attribute in node.attribute}
        if node.op_type == "Gemm":
            first = first[::-1] if flags.get("transA") else first
            second = second[::-1] if flags.get("transB") else second
        shared = len(second) == 2  # one matrix for all rows: a parameter
        batch = 1 if shared else math.prod(second[:-2])
        rows = math.prod(first[:-1]) // batch
        for form in ("forward", "left", "right"):
            found[Product(batch, rows, first[-1], second[-1], form)] += 1
    return found


def _forward_products(folder: Path) -> list[tuple[onnx.NodeProto, list[int], list[int]]]:
    model = onnx.load(folder / "forward.onnx")
    nodes = {node.name: node for node in model.graph.node if node.op_type in ("Gemm", "MatMul")}
    with tempfile.TemporaryDirectory() as temporary:
        options = ort.SessionOptions()
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(temporary) / "profile")
        options.log_severity_level = 3
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.add_session_config_entry("session.disable_prepacking", "1")  # else weights are not listed
        session = ort.InferenceSession(folder / "forward.onnx", options)
        data = np.load(folder / "inputs.npz")
        session.run(None, {value.name: data[value.name] for value in session.get_inputs()})
        events = json.loads(Path(session.end_profiling()).read_text())
    found = []
    for event in events:
        name, _, kind = event["name"].rpartition("_kernel_time")
        if not kind and name in nodes:
            shapes = [next(iter(entry.values())) for entry in event["args"]["input_type_shape"]]
            found.append((nodes[name], shapes[0], shapes[1]))
    return found


def run_products(folder: Path, threads: int) -> Callable[[], None]:
    """A function that does all products of one step, each as often as it occurs."""
    wanted = products_of(folder)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    # the same product of the same operands is wanted as often as it is there
    session = ort.InferenceSession(
        _model(wanted).SerializeToString(), options, disabled_optimizers=["CommonSubexpressionElimination"]
    )
    binding = session.io_binding()
    rng = np.random.default_rng(0)
    for index, (product, count) in enumerate(wanted.items()):
        arrays = [rng.normal(0, 0.1, shape).astype(np.float32) for shape in product.shapes]
        for name, array in zip((f"a{index}", f"b{index}"), arrays):
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
        result = ort.OrtValue.ortvalue_from_shape_and_type(product.result, np.float32)
        for number in range(count):
            binding.bind_ortvalue_output(f"y{index}.{number}", result)
    return lambda: session.run_with_iobinding(binding)


def _model(wanted: collections.Counter[Product]) -> onnx.ModelProto:
    nodes, inputs, outputs = [], [], []
    for index, (product, count) in enumerate(wanted.items()):
        a, b = f"a{index}", f"b{index}"
        inputs += [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
            for name, shape in zip((a, b), product.shapes)
        ]
        for number in range(count):
            nodes += product.nodes(a, b, f"y{index}.{number}")
            outputs.append(
                helper.make_tensor_value_info(f"y{index}.{number}", TensorProto.FLOAT, product.result)
            )
    graph = helper.make_graph(nodes, "products", inputs, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
