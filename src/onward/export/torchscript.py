"""Export through torch's TorchScript tracer: the path that keeps parameter names and training semantics.

Returns a graph whose parameters are still inputs, named as in the module. Knows the tracer's options and
nothing of sizes, parity or files.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import onnx
import torch

from onward.errors import ExportError
from onward.export.modules import traceable
from onward.export.structure import Adapter

__all__ = ["OPSETS", "trace"]

# Below 14 BatchNormalization has no training_mode; 22 is the newest that the tracer accepts.
OPSETS = range(14, 23)


def trace(
    adapter: Adapter,
    tensors: Sequence[torch.Tensor],
    *,
    opset: int,
    fold: bool,
    input_names: Sequence[str],
    output_names: Sequence[str],
    dynamic_axes: Mapping[str, Mapping[int, str]],
) -> onnx.ModelProto:
    """Trace the adapter in the mode its parts are in.

    With `fold`, weights are embedded and constants folded, which renames them: for inference only. Without,
    no value is stored and every parameter is an input of the graph.
    """
    file = io.BytesIO()
    try:
        with traceable(adapter.model):
            torch.onnx.export(
                adapter,
                tuple(tensors),
                file,  # type: ignore[arg-type]  # this path takes a file object
                dynamo=False,
                opset_version=opset,
                export_params=fold,
                do_constant_folding=fold,
                keep_initializers_as_inputs=False,
                # Whoever calls has set the modes; any other value would override a mix of them.
                training=torch.onnx.TrainingMode.PRESERVE if not fold else torch.onnx.TrainingMode.EVAL,
                input_names=list(input_names),
                output_names=list(output_names),
                dynamic_axes={name: dict(axes) for name, axes in dynamic_axes.items() if axes},
                verbose=False,
            )
    except ExportError:
        raise
    except Exception as error:  # the tracer raises errors of many kinds, and the module's own
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ExportError(
            f"{type(adapter.model).__name__} cannot be exported at opset {opset}: {reason[0]}"
        ) from error
    return onnx.load_model_from_string(file.getvalue())
