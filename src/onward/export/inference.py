"""`for_inference`: exports a trained state for inference, checked against the evaluation model."""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from onward.api.state import CheckpointState
from onward.checkpoint import store
from onward.checkpoint.content import CheckpointData
from onward.errors import ExportError, ParityError
from onward.export.parity import Report, compare
from onward.export.quantize.quantizer import QuantizationReport, measure, quantize, scheme_name
from onward.export.quantize.static import STATIC, quantize_static
from onward.graph.load import load_model
from onward.graph.prune import prune
from onward.graph.save import write_model
from onward.renamed import renamed_arguments
from onward.runtime.devices import Device, DeviceLike, find_device
from onward.runtime.inference_model import inference_model, place_files
from onward.runtime.sessions import open_session

__all__ = ["InferenceExport", "for_inference", "sample_inputs"]


@dataclasses.dataclass(frozen=True)
class InferenceExport:
    """What was written and how far it is from the evaluation model."""

    path: Path
    size: int
    parity: Report | None
    quantization: QuantizationReport | None

    def __str__(self) -> str:
        lines = [f"{self.path} ({self.size / 1e6:.2f} MB)"]
        if self.parity is not None:
            lines.append(str(self.parity))
        if self.quantization is not None:
            lines.append(str(self.quantization))
        return "\n".join(lines)


@renamed_arguments(quantize_to="quantize")
def for_inference(
    eval_model: str | os.PathLike[str] | bytes | onnx.ModelProto,
    state: CheckpointState | CheckpointData | str | os.PathLike[str],
    outputs: Sequence[str],
    path: str | os.PathLike[str],
    *,
    quantize: bool | str | None = None,
    inputs: Mapping[str, np.ndarray] | None = None,
    rtol: float = 1e-4,
    atol: float = 1e-5,
    external_data: bool | None = None,
    opset: int | None = None,
    metadata: Mapping[str, str] | None = None,
    device: DeviceLike = "cpu",
) -> InferenceExport:
    """Export a trained model for inference, and check that its outputs equal the evaluation model's.

    `state` is a CheckpointState or the path of a checkpoint. `inputs` are used for the check (random ones of
    the model's shapes by default); a difference above the tolerances raises `ParityError` and keeps an
    existing file. `quantize` is "int8", "int8-tensor", "int4", "int8-weights", "fp16", or
    "int8-static", which finds ranges on `inputs` and is the fast one for convolutions; its effect is measured and
    reported, not judged. `external_data` puts the weights into a file of their own; `opset`
    writes the model in an older one, where its operators have the same meaning there. `metadata` is written into
    the file besides: the names of its classes, say. The check compares the written model on `device` with the
    evaluation model on the CPU.

    >>> written = for_inference("out/eval_model.onnx", "out/checkpoint", ["scores"], "model.onnx")
    >>> written.parity.passed
    True
    """
    data = _data(state)
    chosen = find_device(device)
    target = Path(path)
    scheme = STATIC if quantize == STATIC else scheme_name(quantize)
    if scheme == STATIC and inputs is None:
        raise ExportError(f"{STATIC} needs samples of the data to find ranges on: pass inputs=…")
    model = inference_model(eval_model, data, outputs)
    model.metadata_props.update(metadata or {})
    if opset is not None:
        from onward.graph.dialect.lower import lower

        model = lower(model, opset)
    feeds = dict(inputs) if inputs is not None else sample_inputs(model)
    names = [value.name or "" for value in model.graph.outputs]
    wanted = _reference(eval_model, data, names, feeds, given=inputs is not None)
    parity: Report | None = None
    quantization: QuantizationReport | None = None

    def write(folder: Path) -> None:
        nonlocal parity, quantization
        made = folder / target.name
        write_model(model, made, external=external_data)
        if wanted is not None:
            parity = compare(wanted, _run(str(made), feeds, chosen), rtol=rtol, atol=atol)
            if not parity.passed:
                raise ParityError(
                    f"the exported model differs from the evaluation model; not written:\n{parity}"
                )
        if scheme is not None:
            quantization = _quantize(made, scheme, feeds if wanted is not None else None, external_data)

    files = place_files(target, write)
    return InferenceExport(target, sum(file.stat().st_size for file in files), parity, quantization)


def _quantize(
    path: Path, scheme: str, feeds: Mapping[str, np.ndarray] | None, external: bool | None
) -> QuantizationReport | None:
    """Replace a model by its quantized form, in the same folder; measured where there are inputs for it."""
    with tempfile.TemporaryDirectory(prefix="onward-float-") as elsewhere:
        whole = Path(elsewhere) / path.name
        for file in list(path.parent.iterdir()):  # the model, and its data if that is apart
            shutil.move(file, whole.with_name(file.name))
        if scheme == STATIC:
            assert feeds is not None
            quantize_static(whole, feeds, path)
        else:
            quantize(str(whole), scheme, path=path)
        if external:
            smaller = load_model(path.read_bytes())
            path.unlink()
            write_model(smaller, path, external=True)
        return None if feeds is None else measure(str(whole), str(path), [feeds])


def sample_inputs(model: ir.Model, *, seed: int = 0, size: int = 4) -> dict[str, np.ndarray]:
    """Random inputs that fit a model: symbolic dimensions become `size`, integers stay small."""
    rng = np.random.default_rng(seed)
    feeds: dict[str, np.ndarray] = {}
    for value in model.graph.inputs:
        if value.dtype is None or value.dtype == ir.DataType.STRING:
            continue
        dims = [dim if isinstance(dim, int) else size for dim in (value.shape or ())]
        dtype = value.dtype.numpy()
        if value.dtype.is_floating_point():
            feeds[value.name or ""] = rng.standard_normal(dims).astype(dtype)
        else:
            feeds[value.name or ""] = rng.integers(0, 2, dims).astype(dtype)
    return feeds


def _data(state: CheckpointState | CheckpointData | str | os.PathLike[str]) -> CheckpointData:
    if isinstance(state, CheckpointState):
        return state.to_data()
    return state if isinstance(state, CheckpointData) else store.load(state)


def _reference(
    eval_model: str | os.PathLike[str] | bytes | onnx.ModelProto,
    data: CheckpointData,
    names: Sequence[str],
    feeds: Mapping[str, np.ndarray],
    *,
    given: bool,
) -> dict[str, np.ndarray] | None:
    """The outputs of the evaluation graph itself, parameters fed; None where random inputs do not fit it."""
    model = prune(load_model(eval_model), list(names))
    ir.external_data.load_to_model(model)
    values = {**data.trainable, **data.frozen}
    reads = {value.name for value in model.graph.inputs}
    parameters = {name: np.asarray(array) for name, array in values.items() if name in reads}
    try:
        return _run(ir.to_proto(model).SerializeToString(), {**feeds, **parameters})
    except Exception as error:
        if given:
            raise ExportError(f"the evaluation model does not run on the given inputs: {error}") from error
        return None


def _run(
    model: bytes | str, feeds: Mapping[str, np.ndarray], device: Device | None = None
) -> dict[str, np.ndarray]:
    session = open_session(model, providers=(device or Device("cpu")).providers())
    wanted = {value.name for value in session.get_inputs()}
    results = session.run(None, {name: array for name, array in feeds.items() if name in wanted})
    return {value.name: np.asarray(result) for value, result in zip(session.get_outputs(), results)}
