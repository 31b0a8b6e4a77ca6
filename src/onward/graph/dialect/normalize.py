"""Converts any model to one normal form, so that gradient rules see one opset and one form of each operator.

Functions are inlined, operators of other opsets and fused operators are converted to those of one opset,
Constant nodes become initializers, default attributes are written out, types and shapes inferred. Signed 8-bit
weights whose products saturate on some CPUs become unsigned ones. The result of the model does not change:
docs/dialect.md lists supported inputs and outputs.
"""

from __future__ import annotations

import functools
import math
import os

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as passes

from onward.contract import OPSET
from onward.errors import ModelError, OnwardError
from onward.graph.dialect.contrib import expand_contrib
from onward.graph.dialect.definitions import expand_by_definition
from onward.graph.dialect.downgrade import downgrade
from onward.graph.dialect.fold import constant_names, fold_constant_nodes
from onward.graph.dialect.rewrite import Expansion, rewrite
from onward.graph.dialect.saturation import make_unsigned
from onward.graph.dialect.upgrade import OLDEST, upgrade
from onward.graph.load import ModelSource, load_model
from onward.graph.nodes import subgraphs_of
from onward.graph.shapes.model import drop_contradictions, infer_shapes, sharpen, unknown_ranks
from onward.limits import require

__all__ = ["lowest_opset", "normalize", "resolve_branches"]


# Operators between a shape and a condition; numpy computes each.
_EVALUATE = {
    "Identity": lambda x: x,
    "Equal": np.equal,
    "Less": np.less,
    "LessOrEqual": np.less_equal,
    "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal,
    "Not": np.logical_not,
    "And": np.logical_and,
    "Or": np.logical_or,
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
}
_SMALL = 64


def resolve_branches(model: ir.Model) -> bool:
    """Replace each If whose condition is known by its branch; returns whether there was one.

    Types and shapes must be inferred; where this returns True, inferring again finds more.
    """
    return _resolve(model.graph)


def _resolve(graph: ir.Graph) -> bool:
    changed = False
    for node in list(graph):
        if node.op_type == "If" and node.domain in ("", "ai.onnx"):
            condition = _value_of(node.inputs[0])
            if condition is not None and condition.size == 1:
                _take(graph, node, "then_branch" if condition.item() else "else_branch")
                changed = True
                continue
        for body in subgraphs_of(node):
            changed = _resolve(body) or changed
    return changed


def _take(graph: ir.Graph, node: ir.Node, name: str) -> None:
    branch = node.attributes[name].as_graph()
    results = list(branch.outputs)
    branch.outputs.clear()
    for initializer in list(branch.initializers.values()):
        branch.initializers.pop(initializer.name or "")
        graph.register_initializer(initializer)
    for inner in list(branch):
        branch.remove(inner)
        graph.insert_before(node, inner)
    for outer, result in zip(node.outputs, results):
        copy = ir.Node("", "Identity", [result], num_outputs=1, name=f"{node.name}/{outer.name}")
        value = copy.outputs[0]
        value.type, value.shape = outer.type, outer.shape
        graph.insert_before(node, copy)
        ir.convenience.replace_all_uses_with(outer, value, replace_graph_outputs=True)
        value.name = outer.name
    graph.remove(node, safe=True)


def _value_of(value: ir.Value | None) -> np.ndarray | None:
    """The numbers in a value, if they are few and known before the model runs."""
    if value is None or value.is_graph_input():
        return None
    if value.const_value is not None:
        return value.const_value.numpy() if value.const_value.size <= _SMALL else None
    node = value.producer()
    if node is None or node.domain not in ("", "ai.onnx"):
        return None
    if node.op_type in ("Shape", "Size"):
        return _measured(node)
    function = _EVALUATE.get(node.op_type)
    if function is None:
        return None
    inputs = [_value_of(x) for x in node.inputs]
    known = [x for x in inputs if x is not None and x.dtype.kind in "iub"]
    return np.asarray(function(*known)) if len(known) == len(inputs) else None


def _measured(node: ir.Node) -> np.ndarray | None:
    source = node.inputs[0]
    shape = None if source is None else source.shape
    if shape is None or not all(isinstance(dim, int) for dim in shape):
        return None
    dims = np.asarray(list(shape), np.int64)
    if node.op_type == "Size":
        return np.asarray(dims.prod(), np.int64)
    end = node.attributes.get_int("end", None)
    return dims[node.attributes.get_int("start", 0) or 0 : end]


def lowest_opset(model: ir.Model, version: int, floor: int) -> int:
    """The lowest opset from `floor` on in which every node exists with the types that it has here."""
    needed = floor
    for node in model.graph.all_nodes():
        if node.domain in ("", "ai.onnx"):
            needed = _needed(node, needed, version)
    return needed


def _needed(node: ir.Node, floor: int, version: int) -> int:
    for opset in range(floor, version + 1):
        try:
            schema = onnx.defs.get_schema(node.op_type, opset, "")
        except onnx.defs.SchemaError:
            continue
        if set(node.attributes) <= set(schema.attributes) and _types_fit(node, schema):
            return opset
    return version


def _types_fit(node: ir.Node, schema: onnx.defs.OpSchema) -> bool:
    allowed = {c.type_param_str: set(c.allowed_type_strs) for c in schema.type_constraints}
    for values, formals in ((node.inputs, schema.inputs), (node.outputs, schema.outputs)):
        if len(values) > len(formals) and (
            not formals or formals[-1].option != onnx.defs.OpSchema.FormalParameterOption.Variadic
        ):
            return False
        for index, value in enumerate(values):
            if value is None or not isinstance(value.type, ir.TensorType):
                continue
            formal = formals[min(index, len(formals) - 1)]
            name = f"tensor({value.type.dtype.name.lower()})"
            names = allowed.get(formal.type_str, {formal.type_str})
            if name not in names:
                return False
    return True


def normalize(
    source: ModelSource, *, base_dir: str | os.PathLike[str] | None = None, owned: bool = False
) -> ir.Model:
    """Load a model and convert it to Onward's dialect: opset 21, or later where a type in use is newer.

    `base_dir` is where external data of bytes or a ModelProto lies; a path brings its own. `owned` says that a
    model which `load_model` returned may be changed: no copy of it is made.

    >>> import onnx.parser
    >>> old = onnx.parser.parse_model(
    ...     '<ir_version: 7, opset_import: ["": 11]> g (float[N, 4] x) => (float[N] y)'
    ...     '{ y = ReduceSum<axes=[1], keepdims=0>(x) }')
    >>> model = normalize(old)
    >>> model.graph.opset_imports[""], [len(node.inputs) for node in model.graph]
    (21, [2])
    """
    model = source if owned and isinstance(source, ir.Model) else load_model(source, base_dir=base_dir)
    try:
        return _normalize(model)
    except (OnwardError, MemoryError):
        raise
    except Exception as error:
        # Attributes of the wrong kind, missing inputs and the like surface wherever they are first read.
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise ModelError(f"the model is not valid ONNX: {cause}") from error


def _normalize(model: ir.Model) -> ir.Model:
    version = _version(model)
    _inline(model, version)
    constants = constant_names(model)
    _lift_constants(model)
    _forget_symbols(model)
    fold_constant_nodes(model, version, constants, sizes=False)
    drop_contradictions(model)
    target = max(version, OPSET)
    expansion = functools.partial(_expansion, version=version)
    if version > OPSET or any(expansion(node) is not None for node in model.graph.all_nodes()):
        infer_shapes(model)
        expand_by_definition(model, version, infer=infer_shapes)
        rewrite(model, expansion, opset=target, infer=infer_shapes)
    model.graph.opset_imports[""] = target
    model.ir_version = max(model.ir_version or 10, 10)
    for node in model.graph.all_nodes():
        node.version = None
    _lift_constants(model)
    make_unsigned(model)
    ir.passes.Sequential(
        passes.AddDefaultAttributesPass(),
        passes.NameFixPass(),
        passes.RemoveUnusedOpsetsPass(),
    )(model)
    model.graph.opset_imports[""] = target
    infer_shapes(model)
    while resolve_branches(model) or (
        unknown_ranks(model.graph) and fold_constant_nodes(model, target, constants)
    ):
        passes.NameFixPass()(model)
        infer_shapes(model)
    _require_moderate(model)
    sharpen(model)
    if target > OPSET:
        _drop_newer_defaults(model)
        model.graph.opset_imports[""] = lowest_opset(model, target, OPSET)
    return model


def _require_moderate(model: ir.Model) -> None:
    """Refuse values that no machine holds: the gate sees what a model declares, this what follows from it."""
    for node in model.graph.all_nodes():
        if node.op_type == "Concat":
            _add_up(node)
        for value in node.outputs:
            if value.shape is not None:
                size = math.prod(dim for dim in value.shape if isinstance(dim, int) and dim > 0)
                require("value_bytes", size, f"'{value.name}' of shape {value.shape}, in bytes or more,")


def _add_up(node: ir.Node) -> None:
    """Set the length of a join again: onnx before 1.23 adds up in 32 bits, and long ones seem short."""
    axis, found = node.attributes.get_int("axis", 0), node.outputs[0].shape
    shapes = [None if value is None else value.shape for value in node.inputs]
    known = [shape for shape in shapes if shape is not None and shape.rank() and isinstance(shape[axis], int)]
    if found is not None and len(known) == len(shapes):
        dims = list(found)
        dims[axis] = sum(int(shape[axis]) for shape in known)  # type: ignore[arg-type]
        node.outputs[0].shape = ir.Shape(dims)


def _version(model: ir.Model) -> int:
    imports = model.graph.opset_imports
    if "ai.onnx" in imports:
        imports[""] = imports.pop("ai.onnx")
    for node in model.graph.all_nodes():
        if node.domain == "ai.onnx":
            node.domain = ""
    version = imports.setdefault("", OPSET)
    newest = onnx.defs.onnx_opset_version()
    if version < OLDEST:
        raise ModelError(
            f"the model is of opset {version}; opsets {OLDEST} to {newest} are understood. "
            "Export it again, or convert it with onnx.version_converter"
        )
    if version > newest:
        raise ModelError(
            f"the model is of opset {version}, but the installed onnx knows {newest}: update onnx"
        )
    return version


def _expansion(node: ir.Node, *, version: int) -> Expansion | None:
    if node.domain != "":
        return expand_contrib(node)
    own = node.version or version
    return expand_contrib(node) or upgrade(node, own) or downgrade(node, own)


def _inline(model: ir.Model, version: int) -> None:
    """Inline the model's functions; a function may be of another opset."""
    if not model.functions:
        return
    for function in model.functions.values():
        imports = function.opset_imports
        own = imports.get("", imports.get("ai.onnx", version))
        if own != version:
            for node in function.all_nodes():
                if node.domain in ("", "ai.onnx"):
                    node.version = own
        imports.pop("ai.onnx", None)
        imports[""] = version
        for domain, number in model.graph.opset_imports.items():
            if domain in imports:
                imports[domain] = number
    try:
        passes.InlinePass()(model)
    except Exception as error:
        raise ModelError(f"the model's functions cannot be inlined: {error}") from error
    model.functions.clear()


def _lift_constants(model: ir.Model) -> None:
    ir.passes.Sequential(
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        passes.LiftSubgraphInitializersToMainGraphPass(),
        passes.RemoveInitializersFromInputsPass(),
    )(model)


def _forget_symbols(model: ir.Model) -> None:
    """Remove symbols that an earlier inference generated: ours must not collide with them."""
    for graph in model.graphs():
        for value in [v for node in graph for v in node.outputs]:
            if value.shape is not None and any(_invented(dim) for dim in value.shape):
                value.shape = ir.Shape([None if _invented(dim) else dim for dim in value.shape])


def _invented(dim: int | ir.SymbolicDim) -> bool:
    return isinstance(dim, ir.SymbolicDim) and (dim.value or "").startswith("unk__")


def _drop_newer_defaults(model: ir.Model) -> None:
    """Attributes that opset 21 lacks, at their defaults, would hold the model at a newer opset."""
    for node in model.graph.all_nodes():
        if node.domain != "":
            continue
        try:
            older = onnx.defs.get_schema(node.op_type, OPSET, "")
            newer = onnx.defs.get_schema(node.op_type, model.graph.opset_imports[""], "")
        except onnx.defs.SchemaError:
            continue
        for name in [name for name in node.attributes if name not in older.attributes]:
            default = newer.attributes[name].default_value if name in newer.attributes else None
            if default is not None and ir.from_proto(default) == node.attributes[name]:
                del node.attributes[name]
