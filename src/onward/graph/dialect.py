"""Any model to one normal form, so that gradient rules see one opset and one spelling of each operator.

Functions are inlined, Constant nodes become initializers, default attributes are written out, types and
shapes inferred. The meaning of the model does not change.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as passes

from onward.errors import ModelError
from onward.graph.load import ModelSource, load_model

__all__ = ["OPSET", "normalize"]

# Every stock runtime since onnxruntime 1.18 loads it, and so does onnxruntime-web.
OPSET = 21


def normalize(source: ModelSource) -> ir.Model:
    """Read a model and bring it into Onward's dialect."""
    model = load_model(source)
    if not model.graph.opset_imports:
        raise ModelError("the model names no opset")
    version = model.graph.opset_imports.get("", OPSET)
    if model.functions:
        passes.InlinePass()(model)
    if version < OPSET:
        model = ir.from_proto(onnx.version_converter.convert_version(ir.to_proto(model), OPSET))
    model.graph.opset_imports[""] = OPSET
    model.ir_version = max(model.ir_version or 10, 10)
    sequence = ir.passes.Sequential(
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        passes.LiftSubgraphInitializersToMainGraphPass(),
        passes.RemoveInitializersFromInputsPass(),
        passes.AddDefaultAttributesPass(),
        passes.NameFixPass(),
        passes.ShapeInferencePass(check_type=True, strict_mode=False, data_prop=True),
    )
    return sequence(model).model
