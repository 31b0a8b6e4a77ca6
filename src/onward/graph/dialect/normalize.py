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
from onward.graph.dialect.lower import relabel
from onward.graph.dialect.opsets import OLDEST, downgrade, upgrade
from onward.graph.dialect.rewrite import Expansion, rewrite
from onward.graph.dialect.saturation import make_unsigned
from onward.graph.fold import constant_array, constant_names, evaluate, fold_constants
from onward.graph.load import ModelSource, load_model
from onward.graph.nodes import subgraphs_of
from onward.graph.shapes.dims import forget_invented
from onward.graph.shapes.model import (
    drop_contradictions,
    infer_shapes,
    settle_symbols,
    sharpen,
    spell_out_squeezes,
    unknown_ranks,
)
from onward.limits import require


def _resolve_branches(graph: ir.Graph, arrays: dict[ir.Value, np.ndarray]) -> bool:
    """Replace each If whose condition is known by its branch; returns whether there was one.

    Types and shapes must be inferred; where this returns True, inferring again finds more. `arrays` collects what is
    known before the model runs, in order: each value is computed once.
    """

    def array_of(value: ir.Value) -> np.ndarray | None:
        return arrays[value] if value in arrays else constant_array(value, set())

    changed = False
    for node in list(graph):
        if node.op_type == "If" and node.domain == "":
            condition = None if node.inputs[0] is None else array_of(node.inputs[0])
            # torch writes an If for each squeeze of a size it does not trust; once shapes are known, most
            # have one branch left.
            if condition is not None and condition.size == 1:
                _take(graph, node, "then_branch" if condition.item() else "else_branch")
                changed = True
                continue
        for body in subgraphs_of(node):
            changed = _resolve_branches(body, arrays) or changed
        arrays.update(zip(node.outputs, evaluate(node, array_of) or ()))
    return changed


def _take(graph: ir.Graph, node: ir.Node, name: str) -> None:
    branch = node.attributes[name].as_graph()
    results = list(branch.outputs)
    branch.outputs.clear()
    # Their names are unique in the whole model: NameFix has run before.
    for initializer in list(branch.initializers.values()):
        branch.initializers.pop(initializer.name or "")
        graph.register_initializer(initializer)
    for inner in list(branch):
        branch.remove(inner)
        graph.insert_before(node, inner)
    for outer, result in zip(node.outputs, results):
        # The If's output may be the model's, and has to keep its name.
        copy = ir.Node("", "Identity", [result], num_outputs=1, name=f"{node.name}/{outer.name}")
        value = copy.outputs[0]
        value.type, value.shape = outer.type, outer.shape
        graph.insert_before(node, copy)
        ir.convenience.replace_all_uses_with(outer, value, replace_graph_outputs=True)
        value.name = outer.name
    graph.remove(node, safe=True)


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
        # onnx-ir wraps what goes wrong in a pass several times; the innermost says which node it was.
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise ModelError(f"the model is not valid ONNX: {cause}") from error


def _spell_out_conditions(model: ir.Model) -> None:
    """Give a Loop whose inputs end in an empty condition one that is true: a file loses empty names at the end."""
    for node in list(model.graph.all_nodes()):
        if node.op_type != "Loop" or node.domain or any(value is not None for value in node.inputs[1:]):
            continue
        always = ir.Node(
            "", "Constant", [], [ir.AttrTensor("value", ir.tensor(np.array(True)))], num_outputs=1
        )
        value = always.outputs[0]
        value.name, value.type = f"{node.outputs[0].name}.always", ir.TensorType(ir.DataType.BOOL)
        value.shape = ir.Shape([])
        assert node.graph is not None
        node.graph.insert_before(node, always)
        node.resize_inputs(2)
        node.replace_input_with(1, value)


def _name_branches_apart(model: ir.Model) -> None:
    """Give values of different branches different names: what is lifted out of both must not meet."""
    seen: set[str | None] = set()
    for graph in model.graphs():
        held = [*graph.inputs, *graph.initializers.values(), *(v for node in graph for v in node.outputs)]
        for value in {id(value): value for value in held}.values():
            name, count = value.name, 1
            while value.name and value.name in seen:
                value.name, count = f"{name}.branch_{count}", count + 1
            seen.add(value.name)


def _normalize(model: ir.Model) -> ir.Model:
    version = _version(model)
    _inline(model, version)
    _name_branches_apart(model)
    _spell_out_conditions(model)
    # After lifting, a Constant node and a weight look the same, and only the weight may train.
    constants = constant_names(model)  # before they become initializers like those that train
    _lift_constants(model)
    _forget_symbols(model)
    # Without shapes yet: what a file declares about them is not to be trusted before inference.
    fold_constants(model, constants=constants, opset=version, sizes=False)
    drop_contradictions(model)
    target = max(version, OPSET)
    expansion = functools.partial(_expansion, version=version)
    # Inference of a whole model takes a while, and most new exports need no rewrite.
    if version > OPSET or any(expansion(node) is not None for node in model.graph.all_nodes()):
        infer_shapes(model)
        expand_by_definition(model, version, infer=infer_shapes)
        rewrite(model, expansion, opset=target, infer=infer_shapes)
    model.graph.opset_imports[""] = target
    # Opset 21 came with IR version 10; the checker refuses it in an older one.
    model.ir_version = max(model.ir_version or 10, 10)
    for node in model.graph.all_nodes():
        # onnx-ir writes a node's own version where one is set, and inlined functions may have had another.
        node.version = None
    _lift_constants(model)
    make_unsigned(model)
    ir.passes.Sequential(
        passes.AddDefaultAttributesPass(), passes.NameFixPass(), passes.RemoveUnusedOpsetsPass()
    )(model)
    model.graph.opset_imports[""] = target
    infer_shapes(model)
    branches = any(node.op_type == "If" for node in model.graph.all_nodes())
    # Each branch taken makes shapes known that decide the next one.
    while (branches and _resolve_branches(model.graph, {})) or (
        unknown_ranks(model.graph) and fold_constants(model, constants=constants, opset=target)
    ):
        passes.NameFixPass()(model)
        infer_shapes(model)
    settle_symbols(model)
    _require_moderate(model)
    sharpen(model)
    if spell_out_squeezes(model):
        infer_shapes(model)
        sharpen(model)
    if target > OPSET:
        relabel(model, OPSET)
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
    axis, joined = node.attributes.get_int("axis", 0), node.outputs[0].shape
    shapes = [value.shape for value in node.inputs if value is not None and value.shape is not None]
    lengths = [length for shape in shapes if shape.rank() and isinstance(length := shape[axis], int)]
    if joined is not None and len(lengths) == len(node.inputs):
        dims = list(joined)
        # onnx before 1.23 adds them up in 32 bits.
        dims[axis] = sum(lengths)
        node.outputs[0].shape = ir.Shape(dims)


def _version(model: ir.Model) -> int:
    imports = model.graph.opset_imports
    if "ai.onnx" in imports:
        # Both spellings mean the standard operators; some converters write the long one.
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
            if value.shape is not None:
                value.shape = forget_invented(value.shape)
