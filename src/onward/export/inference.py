"""Exports a trained state for inference, as a file or a folder for `onward.load`, checked with the evaluation model."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

from onward import contract
from onward.api.state import CheckpointState
from onward.checkpoint import store
from onward.checkpoint.content import CheckpointData
from onward.errors import ExportError, ParityError
from onward.export.huggingface.folder import CARD, MAKE_FOLDER, MODEL, PIPELINE, read_card, staged, write_card
from onward.export.parity import Report, compare, merge
from onward.export.quantize.candidates import refuse_worse
from onward.export.quantize.quantizer import QuantizationReport, measure, quantize, scheme_name
from onward.files import scratch_folder
from onward.graph.gate import read_proto
from onward.graph.load import load_model
from onward.graph.prune import prune
from onward.graph.save import write_model
from onward.model_metadata import read_table
from onward.runtime.devices import Device, DeviceLike, find_device
from onward.runtime.inference_model import inference_model, place_files
from onward.runtime.sessions import open_session

__all__ = ["InferenceExport", "for_inference", "sample_inputs", "save_pipeline"]


@dataclasses.dataclass(frozen=True)
class IntegerAgreement:
    """How the integer kernels of a model that was trained for them agree with the training graph, row by row.

    A row is equal within 1e-4 of the largest output. Others differ where a sum of floats rounds to the other side of
    a tie than the integer sum; `error` is Σd²/Σy² over all rows, and `largest` the largest difference.
    """

    rows: int
    equal: int
    largest: float
    error: float

    def __str__(self) -> str:
        return (
            f"integer kernels: {self.equal} of {self.rows} rows equal the training graph's; "
            f"in the others ties round differently, by {self.largest:.2g} at most"
        )


# What the runtime's fusions of constant weights may change, as a share of an output's scale.
_FUSED = 1e-2
# What rounding to the other side of ties may add up to, as a share of the outputs' energy.
_TIES = 1e-3


@dataclasses.dataclass(frozen=True)
class InferenceExport:
    """What was written and how far it is from the evaluation model."""

    path: Path
    size: int
    parity: Report | None
    quantization: QuantizationReport | None
    integers: IntegerAgreement | None = None

    def __str__(self) -> str:
        lines = [f"{self.path} ({self.size / 1e6:.2f} MB)"]
        if self.parity is not None:
            lines.append(str(self.parity))
        if self.integers is not None:
            lines.append(str(self.integers))
        if self.quantization is not None:
            lines.append(str(self.quantization))
        return "\n".join(lines)


def for_inference(
    eval_model: str | os.PathLike[str] | bytes | onnx.ModelProto,
    state: CheckpointState | CheckpointData | str | os.PathLike[str],
    outputs: Sequence[str],
    path: str | os.PathLike[str],
    *,
    quantize: bool | str | None = None,
    inputs: Mapping[str, np.ndarray] | None = None,
    calibration: Mapping[str, np.ndarray] | None = None,
    rtol: float = 1e-4,
    atol: float = 1e-5,
    external_data: bool | None = None,
    opset: int | None = None,
    metadata: Mapping[str, str] | None = None,
    device: DeviceLike = "cpu",
    force: bool = True,
) -> InferenceExport:
    """Export a trained model for inference, and check that its outputs equal the evaluation model's.

    `state` is a CheckpointState or the path of a checkpoint. `inputs` are used for the check (random ones of
    the model's shapes by default); a difference above the tolerances raises `ParityError` and keeps an
    existing file. `quantize` is "int8", "int8-static", "int8-tensor", "int4", "int8-weights" or "fp16"; convolutions
    and "int8-static" take ranges from `calibration`, samples that are `inputs` by default. Its effect is measured and
    reported, not judged. A model that was trained with `quantize=` is folded into integers without it, and `integers`
    says how the kernels agree with training. `external_data` puts the weights into a file of their own; `opset` writes
    the model in an older one, where its operators have the same meaning there. `metadata` is written into the file
    besides: the names of its classes, say. Without `force`, a quantized file that is larger or slower than the float
    one is an error. The check compares the written model on `device` with the evaluation model on the CPU.

    >>> written = for_inference("out/eval_model.onnx", "out/checkpoint", ["scores"], "model.onnx")
    >>> written.parity.passed
    True
    """
    data = _data(state)
    chosen = find_device(device)
    target = Path(path)
    scheme = scheme_name(quantize)
    model = inference_model(eval_model, data, outputs)
    scheme, is_folded = _remaining_scheme(model, scheme)
    model.metadata_props.update(metadata or {})
    if opset is not None:
        from onward.graph.dialect.lower import lower

        model = lower(model, opset)
    feeds = dict(inputs) if inputs is not None else sample_inputs(model)
    names = [value.name or "" for value in model.graph.outputs]
    expected = _reference(eval_model, data, names, feeds, user_inputs=inputs is not None)
    parity: Report | None = None
    quantization: QuantizationReport | None = None
    integers: IntegerAgreement | None = None

    def write(folder: Path) -> None:
        nonlocal parity, quantization, integers
        # What is quantized is written elsewhere first: only its smaller form is part of the set.
        with scratch_folder(folder) if scheme is not None else contextlib.nullcontext(folder) as whole:
            path = whole / target.name
            write_model(model, path, external=external_data)
            if expected is not None and is_folded:
                integers = _compare_integers(expected, _run(str(path), feeds, chosen))
            elif expected is not None:
                parity = compare(expected, _run(str(path), feeds, chosen), rtol=rtol, atol=atol)
                if not parity.passed and parity.max_rel <= _FUSED:
                    plain = _reference(eval_model, data, names, feeds, user_inputs=True, optimized=False)
                    answers = _run(str(path), feeds, chosen, optimized=False)
                    parity = _judge_unfused(parity, plain or expected, answers)
                if not parity.passed:
                    raise ParityError(
                        f"the exported model differs from the evaluation model; not written:\n{parity}"
                    )
            if scheme is not None:
                samples = feeds if expected is not None else None
                ranges = inputs if calibration is None else calibration
                quantization = _quantize(path, folder / target.name, scheme, samples, ranges, external_data)
                if quantization is not None and not force:
                    refuse_worse(quantization, scheme)

    files = place_files(target, write)
    return InferenceExport(target, sum(file.stat().st_size for file in files), parity, quantization, integers)


def _judge_unfused(
    fused: Report, expected: Mapping[str, np.ndarray], answers: Mapping[str, np.ndarray]
) -> Report:
    """The report where both models ran node by node, if they agree; else that of the optimized file.

    Constant weights let the runtime fold batch norms into convolutions and fuse layers, which rounds otherwise, and a
    network may amplify that.
    """
    unfused = compare(expected, answers, rtol=fused.rtol, atol=fused.atol)
    note = f"onnxruntime's fusions round up to {fused.max_rel:.1e} of the scale away"
    return merge(unfused, notes=(note,)) if unfused.passed else fused


def _remaining_scheme(model: ir.Model, scheme: str | None) -> tuple[str | None, bool]:
    """The scheme that is still to be applied, and whether the model came folded from training for one."""
    if contract.QUANTIZATION not in model.metadata_props:
        return scheme, False
    trained = read_table(model.metadata_props, contract.QUANTIZATION).get("scheme")
    if scheme not in (None, trained):
        raise ExportError(
            f"the model was trained for {trained}, and is quantized already: it cannot be {scheme} too",
            hint="leave --quantize out, or train without it",
        )
    return None, True


def _compare_integers(
    expected: Mapping[str, np.ndarray], answers: Mapping[str, np.ndarray]
) -> IntegerAgreement:
    """Count the rows in which integer kernels give what training gave; an error where ties do not explain it."""
    rows = equal = 0
    largest = error = 0.0
    for name, right in expected.items():
        if right.dtype.kind != "f" or not right.ndim:
            continue
        wide = right.reshape(len(right), -1).astype(np.float64)
        difference = np.abs(answers[name].reshape(wide.shape) - wide)
        rows += len(wide)
        equal += int(np.sum(difference.max(axis=1, initial=0.0) <= 1e-4 * np.abs(wide).max(initial=0.0)))
        largest = max(largest, float(difference.max(initial=0.0)))
        error = max(error, float(np.sum(difference**2) / max(np.sum(wide**2), 1e-30)))
    agreement = IntegerAgreement(rows, equal, largest, error)
    if not error <= _TIES:
        raise ParityError(
            f"the folded model differs from the training graph by more than ties; not written: {agreement}"
        )
    return agreement


def _quantize(
    whole: Path,
    target: Path,
    scheme: str,
    feeds: Mapping[str, np.ndarray] | None,
    calibration: Mapping[str, np.ndarray] | None,
    external: bool | None,
) -> QuantizationReport | None:
    """Write a model's quantized form; measured where there are inputs for it, calibrated on the user's alone."""
    quantize(str(whole), scheme, path=target, calibration=calibration)
    if external:
        write_model(load_model(target.read_bytes()), target, external=True)
    return None if feeds is None else measure(str(whole), str(target), [feeds])


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
            # zero and one are in every vocabulary and every set of classes
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
    user_inputs: bool,
    optimized: bool = True,
) -> dict[str, np.ndarray] | None:
    """The outputs of the evaluation graph itself, parameters fed; None where random inputs do not fit it."""
    model = prune(load_model(eval_model), list(names))
    ir.external_data.load_to_model(model)
    values = {**data.trainable, **data.frozen}
    reads = {value.name for value in model.graph.inputs}
    parameters = {name: np.asarray(array) for name, array in values.items() if name in reads}
    try:
        return _run(ir.to_proto(model).SerializeToString(), {**feeds, **parameters}, optimized=optimized)
    except Exception as error:
        if user_inputs:
            raise ExportError(f"the evaluation model does not run on the given inputs: {error}") from error
        return None


def _run(
    model: bytes | str,
    feeds: Mapping[str, np.ndarray],
    device: Device | None = None,
    *,
    optimized: bool = True,
) -> dict[str, np.ndarray]:
    options = ort.SessionOptions()
    if not optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = open_session(model, providers=(device or Device("cpu")).providers(), options=options)
    input_names = {value.name for value in session.get_inputs()}
    results = session.run(None, {name: array for name, array in feeds.items() if name in input_names})
    return {value.name: np.asarray(result) for value, result in zip(session.get_outputs(), results)}


# ---- a folder of a Hugging Face model -----------------------------------------------------------------------


def save_pipeline(
    artifacts: str | os.PathLike[str],
    state: CheckpointState | CheckpointData | str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    quantize: bool | str = False,
    inputs: Mapping[str, np.ndarray] | None = None,
    rtol: float = 1e-4,
    atol: float = 1e-5,
) -> InferenceExport:
    """Write a trained Hugging Face model as a folder for `onward.load`: model, tokenizer, `onward.json`.

    `artifacts` is a directory that `artifacts_from_transformers` wrote, `state` what training has made of its
    checkpoint. The model's outputs are compared with the evaluation model's, on `inputs` or on some sentences;
    `quantize` makes it smaller afterwards, and what that costs is measured on the same and recorded. Neither torch
    nor transformers is imported, so that it works where the model was trained.

    >>> import onward
    >>> trainer = onward.Trainer("artifacts")
    >>> written = save_pipeline("artifacts", trainer.state, "classifier", quantize="int8")
    >>> sorted(onward.load("classifier")("some text"))
    ['label', 'score']
    """
    scheme = scheme_name(quantize)
    source = Path(artifacts)
    if not (source / PIPELINE / CARD).is_file():
        raise ExportError(
            f"'{source}': no {PIPELINE}/{CARD}; save_pipeline takes the directory of artifacts_from_transformers. "
            "Other models: for_inference writes the file alone",
            hint=MAKE_FOLDER,
        )
    card = read_card(source / PIPELINE)
    sample = card.pop("sample", None)
    feeds = inputs if inputs is not None else _arrays(sample)
    with staged(Path(directory), single=False) as stage:
        exported = for_inference(
            _eval_model_of(source),
            state,
            list(card["outputs"]),
            stage / MODEL,
            quantize=scheme,
            inputs=feeds,
            rtol=rtol,
            atol=atol,
        )
        # The tokenizer's files are copied as they are: whatever its library reads, it reads again.
        for file in (source / PIPELINE).iterdir():
            if file.name != CARD and file.is_file():
                shutil.copyfile(file, stage / file.name)
        write_card(_final_card(card, exported, scheme, stage / MODEL), stage)
    return InferenceExport(Path(directory) / MODEL, exported.size, exported.parity, exported.quantization)


def _eval_model_of(directory: Path) -> Path:
    candidates = sorted(directory.glob("*eval_model.onnx"))
    if len(candidates) != 1:
        raise ExportError(f"'{directory}': expected one eval_model.onnx, found {len(candidates)}")
    return candidates[0]


def _arrays(sample: Mapping[str, Any] | None) -> dict[str, np.ndarray] | None:
    return None if sample is None else {name: np.asarray(rows, np.int64) for name, rows in sample.items()}


def _final_card(
    card: Mapping[str, Any], exported: InferenceExport, scheme: str | None, path: Path
) -> dict[str, Any]:
    """The card of what was really written: inputs that the model ignores are gone from it."""
    model = read_proto(path)
    taken = {value.name for value in model.graph.input}
    done = {**card, "inputs": {name: axes for name, axes in card["inputs"].items() if name in taken}}
    opset = next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    done |= {"opset": opset, "quantize": scheme}
    if exported.parity is not None:
        done["parity"] = exported.parity.to_dict()
    if exported.quantization is not None:
        done["quantization"] = exported.quantization.to_dict()
    return done
