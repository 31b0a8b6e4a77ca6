"""Any model to one normal form, so that gradient rules see one opset and one spelling of each operator.

Functions are inlined, operators of other opsets and fused operators are written in those of one opset,
Constant nodes become initializers, default attributes are written out, types and shapes inferred. Signed 8-bit
weights whose products saturate on some CPUs become unsigned ones. The meaning of the model does not change:
docs/dialect.md says what comes in and what goes out.
"""

from __future__ import annotations

import functools
import os

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as passes

from onward.errors import ModelError, OnwardError
from onward.graph.dialect.branches import resolve_branches
from onward.graph.dialect.contrib import expand_contrib
from onward.graph.dialect.definitions import expand_by_definition
from onward.graph.dialect.downgrade import downgrade
from onward.graph.dialect.fold import constant_names, fold_constant_nodes
from onward.graph.dialect.required_opset import lowest_opset
from onward.graph.dialect.rewrite import Expansion, rewrite
from onward.graph.dialect.saturation import make_unsigned
from onward.graph.dialect.upgrade import OLDEST, upgrade
from onward.graph.load import ModelSource, load_model
from onward.graph.shapes.model import drop_contradictions, infer_shapes, sharpen, unknown_ranks

__all__ = ["OPSET", "normalize"]

# Every stock runtime since onnxruntime 1.18 loads it, and so does onnxruntime-web.
OPSET = 21


def normalize(source: ModelSource, *, base_dir: str | os.PathLike[str] | None = None) -> ir.Model:
    """Read a model and bring it into Onward's dialect: opset 21, or later where a type in use is newer.

    `base_dir` is where external data of bytes or a ModelProto lies; a path brings its own.

    >>> import onnx.parser
    >>> old = onnx.parser.parse_model(
    ...     '<ir_version: 7, opset_import: ["": 11]> g (float[N, 4] x) => (float[N] y)'
    ...     '{ y = ReduceSum<axes=[1], keepdims=0>(x) }')
    >>> model = normalize(old)
    >>> model.graph.opset_imports[""], [len(node.inputs) for node in model.graph]
    (21, [2])
    """
    model = load_model(source, base_dir=base_dir)
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
        expand_by_definition(model, version)
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
    sharpen(model)
    if target > OPSET:
        _drop_newer_defaults(model)
        model.graph.opset_imports[""] = lowest_opset(model, target, OPSET)
    return model


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
    """Put the bodies of the model's functions where they are called; a body may be of another opset."""
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
    """Symbols that some earlier inference invented are forgotten: ours must not collide with them."""
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
