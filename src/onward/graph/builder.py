"""Builds nodes: `op.Mul(a, 2.0)`.

Works on values, never names. Promotes Python numbers and numpy arrays to constants of the type in the operator's
schema, infers the type and shape of every result, reuses a node that already computes the same value, and gives
unique names. Independent of gradients.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.nodes import (
    GRADIENT,
    SMALL,
    STOP,
    Namer,
    attributes_key,
    captured_values,
    computation_key,
    key_of,
    new_initializer,
    subgraphs_of,
    type_proto,
)
from onward.graph.shapes.dims import Symbols, dims_of, forget_invented

_Dim = int | ir.SymbolicDim


class NodeInference:
    """Infers nodes; nodes alike are inferred once."""

    def __init__(self) -> None:
        self._seen: dict[tuple, list] = {}

    def describe(self, node: ir.Node, opset: int) -> None:
        """Set the types and shapes of a node's outputs, read in this opset, which stays the same."""
        # Operators of other domains have no schema here: their outputs keep what the file says of them.
        schema = find_schema(node.op_type, opset, node.domain)
        if schema is None or _describe_elementwise(node):
            return
        seen = self._seen
        signature = None if node.op_type == "DFT" else _signature(node)  # its sizes have names of their own
        if signature is not None and signature in seen:
            for value, (dtype, shape) in zip(node.outputs, seen[signature]):
                if dtype is not None:
                    value.type, value.shape = ir.TensorType(dtype), None if shape is None else ir.Shape(shape)
            return
        types: dict[str, onnx.TypeProto] = {}
        data: dict[str, onnx.TensorProto] = {}
        # Inference of a body needs the types of what it reads from outside; protobuf cannot refer to our
        # values.
        captured = captured_values(node) if subgraphs_of(node) else []
        for value in (*node.inputs, *captured):
            if value is None or value.type is None:
                continue
            types[value.name or ""] = type_proto(value)
            tensor = value.const_value
            if tensor is not None and tensor.size <= SMALL and not value.is_graph_input():
                data[value.name or ""] = ir.serde.serialize_tensor(tensor)
        try:
            inferred = onnx.shape_inference.infer_node_outputs(
                schema,
                ir.serde.serialize_node(node),
                types,
                data,
                opset_imports=[onnx.helper.make_opsetid("", opset)],
                ir_version=10,
            )
        except Exception as error:
            # onnx raises RuntimeError, InferenceError or its own types, depending on where in C++ it
            # stopped.
            raise ModelError(f"cannot build {node.op_type} '{node.name}': {error}".strip()) from error
        for value in node.outputs:
            type_and_shape = inferred.get(value.name or "")
            if type_and_shape is not None:
                value.type = ir.serde.deserialize_type_proto_for_type(type_and_shape)
                value.shape = ir.serde.deserialize_type_proto_for_shape(type_and_shape)
                value.shape = None if value.shape is None else forget_invented(value.shape)
                forget_copied_size(node)
                if node.attributes.get_int("ceil_mode", 0) and value.shape is not None:
                    # inference counts windows that start in the padding, which the runtime leaves out
                    value.shape = ir.Shape([*value.shape[:2], *[None] * (value.shape.rank() - 2)])
        if signature is not None and all(
            v.type is None or type(v.type) is ir.TensorType for v in node.outputs
        ):
            seen[signature] = [
                (v.dtype, None if v.shape is None else tuple(v.shape))
                if (v.name or "") in inferred
                else (None, None)
                for v in node.outputs
            ]


# Their result has the type and shape of the first input; the others, if any, are numbers or vectors beside it.
_LIKE_FIRST = frozenset(
    {
        *("Abs", "Ceil", "Clip", "Cos", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish"),
        *("Identity", "LeakyRelu", "Log", "Neg", "Not", "Reciprocal", "Relu", "Round", "Sigmoid", "Sign"),
        *("Sin", "Softplus", "Sqrt", "Tanh"),
    }
)
# Their inputs have one type, which is the result's, and are broadcast.
_ARITHMETIC = frozenset({"Add", "Div", "Max", "Min", "Mul", "Sub"})


def _describe_elementwise(node: ir.Node) -> bool:
    """Describe half of all nodes without ONNX's inference, which has to be asked in protobuf; whether it was one."""
    op_type, inputs = node.op_type, node.inputs
    if node.domain != "" or not inputs or len(node.outputs) != 1:
        return False
    if op_type in _LIKE_FIRST:
        inputs = inputs[:1]
    elif op_type not in _ARITHMETIC:
        return False
    dtype, dims = None, ()
    for value in inputs:
        if value is None or type(value.type) is not ir.TensorType or value.shape is None:
            return False
        # Not broadcast but wrong, and ONNX's own inference has the better message.
        if dtype is not None and value.type.dtype != dtype:
            return False
        dtype = value.type.dtype
        joined = _broadcast(dims, value.shape.dims)
        if joined is None:
            return False
        dims = joined
    assert dtype is not None
    node.outputs[0].type, node.outputs[0].shape = ir.TensorType(dtype), ir.Shape(dims)
    return True


def _broadcast(one: tuple[_Dim, ...], other: tuple[_Dim, ...]) -> tuple[_Dim, ...] | None:
    """The sizes of two shapes broadcast, where they are the same or 1; None where it takes more to tell."""
    # An unnamed size is not equal to another unnamed one, so that even equal tuples tell nothing then.
    if not one or one == other:
        return other if _all_named(other) else None
    if len(one) < len(other):
        one, other = other, one
    dims = []
    offset = len(one) - len(other)
    for axis, dim in enumerate(one):
        beside = 1 if axis < offset else other[axis - offset]
        if dim == 1:
            dim = beside
        elif beside not in (1, dim):
            return None
        dims.append(dim)
    return tuple(dims) if _all_named(dims) else None


def _all_named(dims: Iterable[_Dim]) -> bool:
    """Whether every size is a number or has a name."""
    return all(isinstance(dim, int) or dim.value is not None for dim in dims)


@functools.cache
def find_schema(op_type: str, opset: int, domain: str) -> onnx.defs.OpSchema | None:
    """The schema of an operator in an opset; None for other domains."""
    if domain not in ("", "ai.onnx"):
        return None
    try:
        return onnx.defs.get_schema(op_type, opset, domain)
    except onnx.defs.SchemaError:
        raise ModelError(f"operator {op_type} does not exist in opset {opset}") from None


def _signature(node: ir.Node) -> tuple | None:
    """All that inference looks at; None where that is too much to compare."""
    attrs = attributes_key(node.attributes)
    if attrs is None:
        return None
    inputs = []
    for value in node.inputs:
        if value is None or value.type is None:
            inputs.append(None)
            continue
        if type(value.type) is not ir.TensorType:
            return None
        dims = None if value.shape is None else dims_of(value.shape)
        tensor = value.const_value
        is_small = tensor is not None and tensor.size <= SMALL and not value.is_graph_input()
        if tensor is not None and tensor.dtype == ir.DataType.STRING:
            return None
        inputs.append((value.type.dtype, dims, tensor.tobytes() if is_small and tensor is not None else None))
    return (node.op_type, node.domain, attrs, tuple(inputs), tuple(bool(v.name) for v in node.outputs))


def forget_copied_size(node: ir.Node) -> None:
    """Forget sizes that inference copies though they may be others: two values of one name have one size.

    A transform's along its axis, where it is a name and the transform cuts or pads: it gets a name of its own, since
    the runtime infers the same. Those of a sequence's elements, which need not be alike.
    """
    value = node.outputs[0] if node.outputs else None
    if value is None or value.shape is None or node.op_type not in ("DFT", "SequenceAt"):
        return
    if node.op_type == "SequenceAt":
        value.shape = forget_invented(value.shape)
    elif node.attributes.get_int("onesided", 0) or (len(node.inputs) > 1 and node.inputs[1] is not None):
        sizes = enumerate(value.shape)
        value.shape = ir.Shape(
            [d if isinstance(d, int) or i == 0 else f"{value.name}.size{i}" for i, d in sizes]
        )


# --- Builds nodes.


Operand = ir.Value | None | bool | int | float | Sequence[Any] | np.ndarray | np.generic


class Builder:
    """Appends nodes to one graph; each operator of the opset is a method.

    >>> graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="g")
    >>> op = Builder(graph)
    >>> y = op.Add(np.ones((2, 3), np.float32), 1.0)
    >>> y.dtype, y.shape
    (FLOAT, Shape([2, 3]))
    """

    def __init__(self, graph: ir.Graph, *, parent: Builder | None = None, share: bool = False) -> None:
        self.graph = graph
        self.parent = parent
        self.root: Builder = parent.root if parent else self
        self.opset: int = self.root.opset if parent else graph.opset_imports[""]
        self.namer: Namer = self.root.namer if parent else Namer(graph)
        self.symbols: Symbols = self.root.symbols if parent else Symbols()
        self._inference = self.root._inference if parent else NodeInference()
        self.scope = ""
        # Where new nodes go: at the end of the graph, or before this node.
        self.before: ir.Node | None = None
        # A node on sizes takes as long as any other small node, in every step.
        self._sizes: dict[tuple[int | str, ...], ir.Value] = {}
        # Rules write the same 0, 1 and axes hundreds of times.
        self._constants: dict[tuple, ir.Value] = {}
        # None where nodes are inserted in the middle: an equal node may come later in the graph than who
        # wants it.
        self._reusable: dict[tuple, tuple[ir.Value, ...]] | None = None
        if share:
            self._reusable = {}
            for node in graph:
                self._remember(node)

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        if not op_type[:1].isupper():
            raise AttributeError(op_type)

        def emit(*inputs: Operand, outputs: int | None = None, **attributes: Any) -> Any:
            results = self.node(op_type, inputs, attributes, outputs=outputs or 1)
            return results if outputs is not None else results[0]

        return emit

    def node(
        self,
        op_type: str,
        inputs: Sequence[Operand],
        attributes: dict[str, Any] | None = None,
        *,
        outputs: int = 1,
        domain: str = "",
    ) -> tuple[ir.Value, ...]:
        """Append a node and return its outputs; attributes that are None are left out, a builder is its graph."""
        schema = find_schema(op_type, self.opset, domain)
        values = self._promote(inputs, schema)
        while values and values[-1] is None:  # a file loses empty names at the end
            values.pop()
        attrs = {
            name: _attribute(name, value)
            for name, value in sorted(
                (attributes or {}).items()
            )  # files do not depend on the order of arguments
            if value is not None
        }
        key = key_of(op_type, domain, values, attrs, outputs)
        # Also from the graphs around: a body may read their values, never the other way.
        if reused := self._lookup(key):
            return reused
        # The scope is the forward node's name: profilers and error messages of the runtime show it for its
        # gradient.
        prefix = self._scoped(op_type)
        node = ir.Node(domain, op_type, values, attrs, num_outputs=outputs, name=self.namer(prefix))
        for index, value in enumerate(node.outputs):
            value.name = self.namer(f"{prefix}.{index}" if outputs > 1 else f"{prefix}.out")
        # What other domains give has to be described by whoever emits them.
        if schema is not None:
            self.infer(node)
        self.insert(node)
        self._remember(node, key)
        return tuple(node.outputs)

    def constant(self, data: np.ndarray | np.generic, *, name: str = "const") -> ir.Value:
        """An initializer of the outermost graph that holds `data`; equal small constants are one."""
        # Of the outermost graph: all bodies can read it, and equal ones in several bodies are one.
        root, array = self.root, np.asarray(data)
        key = (str(array.dtype), array.shape, array.tobytes()) if array.size <= SMALL else None
        existing = None if key is None else root._constants.get(key)
        if existing is not None and existing.is_initializer():  # a pass may have removed it since
            return existing
        # ascontiguousarray makes vectors of scalars
        tensor = ir.tensor(np.ascontiguousarray(array).reshape(array.shape))
        value = new_initializer(root.graph, root.namer(name), tensor)
        if key is not None:
            root._constants[key] = value
        return value

    def constant_like(self, number: float, like: ir.Value) -> ir.Value:
        """A scalar constant of another value's element type."""
        return self.constant(np.asarray(number, dtype=self.dtype(like).numpy()))

    # ---- properties of a value ------------------------------------------------------------------

    def dtype(self, value: ir.Value) -> ir.DataType:
        """The element type of a value."""
        if value.dtype is None:
            raise ModelError(f"the type of '{value.name}' is unknown: run shape inference on the model first")
        return value.dtype

    def rank(self, value: ir.Value) -> int:
        """The number of dimensions of a value."""
        if value.shape is None:
            node = value.producer()
            where = f", which {node.op_type} '{node.name}' gives," if node is not None else ""
            raise ModelError(
                f"the number of dimensions of '{value.name}'{where} is unknown; declare a shape of that rank for it "
                "in the model (graph.value_info; symbolic dimensions are fine), or give the model's inputs a shape"
            )
        return value.shape.rank()

    def static_shape(self, value: ir.Value) -> tuple[int, ...] | None:
        """All dimensions as numbers, or None where one is not known."""
        if value.shape is None or not all(isinstance(dim, int) for dim in value.shape):
            return None
        return tuple(int(dim) for dim in value.shape.dims)  # type: ignore[arg-type]

    def static_dim(self, value: ir.Value, axis: int) -> int | None:
        """One dimension as a number, or None where it is not known."""
        if value.shape is None:
            return None
        dim = value.shape[axis]
        return dim if isinstance(dim, int) else None

    def shape(self, value: ir.Value) -> ir.Value:
        """The shape as an int64 vector: a constant where it is known, else a Shape node, as `sizes` has it."""
        static = self.static_shape(value)
        if static is not None:
            return self.constant(np.asarray(static, np.int64), name="shape")
        return self.sizes(value, 0)

    def dim(self, value: ir.Value, axis: int) -> ir.Value:
        """One dimension as an int64 vector of length 1."""
        static = self.static_dim(value, axis)
        if static is not None:
            return self.constant(np.asarray([static], np.int64), name="dim")
        if value.shape is not None:
            axis %= value.shape.rank()
        return self.sizes(value, axis, axis + 1 or None)

    def sizes(self, value: ir.Value, start: int, end: int | None = None) -> ir.Value:
        """Some dimensions as an int64 vector; one Shape node for all values whose dimensions have the same names."""
        dims = () if value.shape is None else dims_of(value.shape)[start:end]
        names = tuple(dim for dim in dims if dim is not None)
        # a body, or a place in the middle, may lie before the node that another value's sizes come from
        if not names or len(names) < len(dims) or self.parent is not None or self.before is not None:
            return self.Shape(value, start=start or None, end=end)
        if names not in self._sizes:
            self._sizes[names] = self.Shape(value, start=start or None, end=end)
        return self._sizes[names]

    def concat_shape(self, *parts: int | ir.Value) -> ir.Value:
        """A shape from numbers and int64 vectors, in order: a constant where every part is."""
        constants = [
            np.asarray([part]) if isinstance(part, int) else self.const_value(part) for part in parts
        ]
        if all(part is not None for part in constants):
            return self.constant(np.concatenate(constants).astype(np.int64), name="shape")  # type: ignore[arg-type]
        vectors = [np.asarray([part], np.int64) if isinstance(part, int) else part for part in parts]
        return self.Concat(*vectors, axis=0)

    def const_value(self, value: ir.Value | None) -> np.ndarray | None:
        """The numbers in a value that is constant (an initializer that is not an input), else None."""
        if value is None or value.is_graph_input():
            return None
        tensor = value.const_value
        if tensor is None and (node := value.producer()) is not None and node.op_type == "Constant":
            tensor = ir.convenience.get_const_tensor(value)
        return None if tensor is None else tensor.numpy()

    # ---- forms that many rules need --------------------------------------------------------------

    def zeros_like(self, value: ir.Value) -> ir.Value:
        """Zeros of a value's shape and type."""
        zero = self.constant(np.zeros((), dtype=self.dtype(value).numpy()), name="zero")
        return self.Expand(zero, self.shape(value))

    def stop_gradient(self, value: ir.Value) -> ir.Value:
        """The same numbers, which are a constant to the differentiator."""
        stopped = self.node("Identity", [value])[0]
        producer = stopped.producer()
        assert producer is not None
        producer.metadata_props[GRADIENT] = STOP
        return stopped

    def positions(self, length: ir.Value) -> ir.Value:
        """0, 1, … up to a length that is an int64 vector of one."""
        return self.Range(0, self.Squeeze(length, [0]), 1)

    def sum_to(self, gradient: ir.Value, target: ir.Value) -> ir.Value:
        """Sum a broadcast gradient back to the shape of `target`; a no-op where static shapes show it is not needed."""
        # What static shapes show costs nothing in the step.
        plan = _reduction(gradient.shape, target.shape)
        if plan is None:
            return self._sum_to_dynamic(gradient, target)
        leading, reduced = plan
        if leading or reduced:
            axes = [*range(leading), *(axis + leading for axis in reduced)]
            if leading and not reduced:
                gradient = self.sum_leading(gradient, leading)
            else:
                gradient = self.ReduceSum(gradient, axes, keepdims=1)
                if leading:
                    gradient = self.Squeeze(gradient, list(range(leading)))
        return gradient

    def sum_leading(self, value: ir.Value, count: int) -> ir.Value:
        """Sum over the first `count` axes; where one axis is left, as a product with ones, which is faster."""
        rank = self.rank(value)
        if rank != count + 1 or self.dtype(value) not in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
            return self.ReduceSum(value, list(range(count)), keepdims=0)
        width = self.static_dim(value, -1)
        if rank > 2:  # in the form in which a product's gradient reads the same rows
            value = self.Reshape(value, [-1, width]) if width else self.Flatten(value, axis=count)
        one = ir.tensor(np.ones(1, self.dtype(value).numpy()))
        return self.MatMul(self.ConstantOfShape(self.dim(value, 0), value=one), value)

    def _sum_to_dynamic(self, gradient: ir.Value, target: ir.Value) -> ir.Value:
        """The axes are known at run time only: those where the (left-padded) target has another size."""
        shape = self.Shape(target)
        have = self.Shape(gradient)
        if gradient.shape is not None and target.shape is not None:
            missing = gradient.shape.rank() - target.shape.rank()
            padding = self.constant(np.ones(missing, np.int64)) if missing else None
        else:
            missing = None
            padding = self.ConstantOfShape(
                self.Sub(self.Shape(have), self.Shape(shape)), value=ir.tensor(np.ones(1, np.int64))
            )
        target_shape = shape if missing == 0 else self.Concat(padding, shape, axis=0)
        # A size of 1 that the gradient also has is not summed: sums of one number cost a copy.
        differs = self.Not(self.Equal(target_shape, have))
        axes = self.Squeeze(self.NonZero(differs), [0])
        # without axes a ReduceSum would be over all of them
        summed = self.ReduceSum(gradient, axes, keepdims=1, noop_with_empty_axes=1)
        return self.Reshape(summed, shape) if missing != 0 else summed

    @contextlib.contextmanager
    def inserting(
        self, before: ir.Node | None, scope: str | None = None, *, share: bool = False
    ) -> Iterator[None]:
        """Insert new nodes before an existing one, in a scope of names; with `share`, equal ones become one."""
        state, outer_scope = (self.before, self._reusable), self.scope
        # nodes after that place cannot be reused
        # Values made earlier in this place may be reused, what comes later in the graph may not.
        self.before, self._reusable = before, {} if share else None
        self.scope = outer_scope if scope is None else scope
        try:
            yield
        finally:
            self.before, self._reusable = state
            self.scope = self.scope if scope is None else outer_scope

    def subgraph(self, name: str = "body") -> Builder:
        """A builder of a subgraph of this graph, for If, Loop or Scan."""
        graph = ir.Graph(
            [], [], nodes=[], opset_imports=dict(self.root.graph.opset_imports), name=self.namer(name)
        )
        inner = Builder(graph, parent=self)
        inner.scope = self.scope
        return inner

    def input(
        self, name: str, dtype: ir.DataType | None, shape: Iterable[int | str | None] | ir.Shape | None = None
    ) -> ir.Value:
        """Add an input to this graph."""
        value = ir.Value(
            name=self.namer(name),
            type=None if dtype is None else ir.TensorType(dtype),
            shape=None if shape is None else ir.Shape(shape),
        )
        self.graph.inputs.append(value)
        return value

    def add_output(self, value: ir.Value) -> ir.Value:
        """Add an output to this graph: an Identity where the value is an output already or not computed here."""
        producer = value.producer()
        if producer is None or producer.graph is not self.graph or value.is_graph_output():
            # An output of a graph has to be computed in it, once, under its own name.
            node = ir.Node("", "Identity", [value], num_outputs=1, name=self.namer(self._scoped("Identity")))
            copy = node.outputs[0]
            copy.name = self.namer(self._scoped("Identity.out"))
            copy.type, copy.shape = value.type, None if value.shape is None else ir.Shape(value.shape)
            self.graph.append(node)
            value = copy
        self.graph.outputs.append(value)
        return value

    def add_inputs(self, values: Iterable[ir.Value]) -> None:
        """Make values that nothing computes inputs of this graph."""
        self.graph.inputs.extend(values)

    def inserting_first(self) -> contextlib.AbstractContextManager[None]:
        """Insert new nodes before all others, which are not reused."""
        return self.inserting(next(iter(self.graph), None), share=True)

    def insert(self, node: ir.Node) -> None:
        """Add a node where new nodes go."""
        if self.before is not None:
            self.graph.insert_before(self.before, node)
        else:
            self.graph.append(node)

    def _scoped(self, name: str) -> str:
        return f"{self.scope}/{name}" if self.scope else name

    # ---- inside ----------------------------------------------------------------------------------

    def _promote(self, inputs: Sequence[Operand], schema: onnx.defs.OpSchema | None) -> list[ir.Value | None]:
        if schema is None:
            return [v if v is None or isinstance(v, ir.Value) else self.constant(_plain(v)) for v in inputs]
        kinds = [_formal(schema, index) for index in range(len(inputs))]
        types: dict[str, ir.DataType] = {}
        for value, kind in zip(inputs, kinds):
            if isinstance(value, ir.Value) and value.dtype is not None:
                # Python numbers follow the tensors that share their type variable: op.Mul(half, 2.0) stays
                # in float16.
                types.setdefault(kind, value.dtype)
        promoted: list[ir.Value | None] = []
        for value, kind in zip(inputs, kinds):
            if value is None or isinstance(value, ir.Value):
                promoted.append(value)
            elif isinstance(value, np.ndarray | np.generic):
                promoted.append(self.constant(value))
            elif kind in types:
                promoted.append(self.constant(np.asarray(value, dtype=types[kind].numpy())))
            else:
                promoted.append(self.constant(_plain(value)))
        return promoted

    def infer(self, node: ir.Node) -> None:
        """Infer the types and shapes of a node's outputs: ONNX's inference, then ours."""
        self.root._inference.describe(node, self.opset)
        self.root.symbols.refine(node)

    def _lookup(self, key: tuple | None) -> tuple[ir.Value, ...] | None:
        builder: Builder | None = self
        while builder is not None and key is not None:
            if builder._reusable is not None and (results := builder._reusable.get(key)):
                return results
            builder = builder.parent
        return None

    def _remember(self, node: ir.Node, key: tuple | None = None) -> None:
        if self._reusable is not None:
            key = key or computation_key(node)
            if key is not None:
                self._reusable.setdefault(key, tuple(node.outputs))


def _attribute(name: str, value: Any) -> ir.Attr:
    """The most frequent kinds here: the general conversion asks for protocols, a third of a node's time."""
    if isinstance(value, ir.Attr):
        return value
    if isinstance(value, Builder):
        return ir.AttrGraph(name, value.graph)
    if type(value) is int:
        return ir.AttrInt64(name, value)
    if type(value) is float:
        return ir.AttrFloat32(name, value)
    if type(value) is list and value and all(type(item) is int for item in value):
        return ir.AttrInt64s(name, value)
    return ir.convenience.convert_attribute(name, value)


def _plain(value: Any) -> np.ndarray:
    array = np.asarray(value)
    if isinstance(value, np.ndarray | np.generic) and array.size:
        return array
    # numpy makes int64 of lists on Linux, int32 on old Windows: shapes must be int64 everywhere.
    if not array.size or array.dtype.kind == "i":  # an empty list is one of axes, or the shape of a scalar
        return array.astype(np.int64)
    return array.astype(np.float32) if array.dtype == np.float64 else array


@functools.cache
def _formal(schema: onnx.defs.OpSchema, index: int) -> str:
    """The type variable of an input; the last formal input repeats when it is variadic."""
    formal = schema.inputs[min(index, len(schema.inputs) - 1)]
    heterogeneous = (
        formal.option == onnx.defs.OpSchema.FormalParameterOption.Variadic and not formal.is_homogeneous
    )
    return f"{formal.type_str}#{index}" if heterogeneous else formal.type_str


def _reduction(have: ir.Shape | None, want: ir.Shape | None) -> tuple[int, list[int]] | None:
    """(leading axes to sum away, target axes to sum to 1), or None where only the run can tell."""
    if have is None or want is None:
        return None
    leading = have.rank() - want.rank()
    if leading < 0:
        return None
    reduced = []
    for axis, target in enumerate(want):
        source = have[axis + leading]
        # A target of 1 is summed to, whatever the size of the gradient is; a symbol that is 1 at run time
        # cannot be told.
        if target == 1:
            if source != 1:
                reduced.append(axis)
        elif not isinstance(target, int) and (target.value is None or source != target):
            return None
    return leading, reduced
