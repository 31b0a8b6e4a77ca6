"""Gradient graphs of models in other precisions: every constant that a rule adds must take the model's type."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from cases_elementwise import CASES as ELEMENTWISE
from cases_indexing import CASES as INDEXING
from cases_linalg import CASES as LINALG
from cases_loss import CASES as LOSS
from cases_norm import CASES as NORM
from cases_recurrent import CASES as RECURRENT
from cases_reduce import CASES as REDUCE
from cases_shape import CASES as SHAPE
from cases_signal import CASES as SIGNAL
from onnx import TensorProto, helper, numpy_helper

from onward.autodiff.gradient import vector_jacobian

# One case an operator, with its main form; casts have types of their own.
FAMILIES = [ELEMENTWISE, REDUCE, SHAPE, INDEXING, LINALG, LOSS, NORM, RECURRENT, SIGNAL]
FIRST = {case.op: case for family in FAMILIES for case in reversed(family) if not case.text}
OWN_TYPES = {
    "Cast": "has types of its own",
    "CastLike": "has types of its own",
    "MeanVarianceNormalization": "the standard's body adds a float32, so that no other type is valid",
}
CASES = [case for op, case in sorted(FIRST.items()) if op not in OWN_TYPES]
# Their statistics are float32 by default, whatever the model's type: stash_type.
STASHED = {"LayerNormalization"}
PRECISIONS = {"double": TensorProto.DOUBLE, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}


def takes(op: str, precision: str) -> bool:
    """Whether the standard has the operator in a precision at all."""
    schema = onnx.defs.get_schema(op, 21)
    kinds = next(
        c.allowed_type_strs for c in schema.type_constraints if "tensor(float)" in c.allowed_type_strs
    )
    return f"tensor({precision})" in kinds


PAIRS = [(case, precision) for case in CASES for precision in PRECISIONS if takes(case.op, precision)]


def in_precision(model: onnx.ModelProto, kind: int) -> onnx.ModelProto:
    """A float32 model's twin of another floating type."""
    for value in [*model.graph.input, *model.graph.output]:
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = kind
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            array = numpy_helper.to_array(tensor).astype(helper.tensor_dtype_to_np_dtype(kind))
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return model


@pytest.mark.parametrize(("case", "precision"), PAIRS, ids=[f"{case.op}-{name}" for case, name in PAIRS])
def test_gradients_have_the_type_of_the_model(case, precision):
    kind = PRECISIONS[precision]
    derived, _, _ = vector_jacobian(in_precision(case.model(), kind), wrt=case.wrt)
    onnx.checker.check_model(derived, full_check=True)
    assert {output.type.tensor_type.elem_type for output in derived.graph.output} == {kind}
    if case.op not in STASHED:
        assert not [t.name for t in derived.graph.initializer if t.data_type == TensorProto.FLOAT]


@pytest.mark.parametrize("case", [c for c in ELEMENTWISE if c.op == "Relu" and not c.label], ids=str)
def test_half_precision_runs_on_onnxruntime(case):
    import onnxruntime

    derived, of, _ = vector_jacobian(in_precision(case.model(), TensorProto.FLOAT16))
    session = onnxruntime.InferenceSession(derived.SerializeToString(), providers=["CPUExecutionProvider"])
    x = case.inputs()["x0"].astype(np.float16)
    (dx,) = session.run(None, {"x0": x, f"{of[0]}_cotangent": np.ones_like(x)})
    np.testing.assert_array_equal(dx, (x > 0).astype(np.float16))
