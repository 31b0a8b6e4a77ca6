"""Writes a set of artifacts: all of them, or none."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import onnx_ir as ir

from onward import contract
from onward.checkpoint.portable import StateLayout, to_portable
from onward.checkpoint.store import save
from onward.errors import ModelError
from onward.files import CommittedError, write_set
from onward.graph.cleanup import simplify
from onward.graph.passes.inference_mode import to_inference
from onward.graph.prune import prune, values_of
from onward.graph.save import (
    EXTERNAL_THRESHOLD,
    constants_beside,
    initializer_bytes,
    name_data_by_content,
    write_model,
)
from onward.model_metadata import read_names

if TYPE_CHECKING:
    from onward.checkpoint.content import CheckpointData

_log = logging.getLogger(__name__)


def older_members(directory: Path, prefix: str = "") -> list[str]:
    """The names that are there of a set of artifacts: a new set leaves none of an older one beside it."""
    steps = "(train|accumulate|eval|gradient|update)_step"
    names = rf"((training|eval|optimizer)_model|{steps})\.(onnx|ort)|{steps}\.json|(nominal_)?checkpoint"
    if (directory / f"{prefix}train_step.onnx").is_file():
        # elsewhere these are what somebody made of a trained checkpoint
        names += r"|(nominal_)?state\.bin|inference_model\.onnx(\.[0-9a-f]{16}\.data)?"
    pattern = re.compile(rf"{re.escape(prefix)}({names}|constants\.[0-9a-f]{{16}}\.data)")
    paths = list(directory.iterdir()) if directory.is_dir() else []
    older = [path.name for path in paths if pattern.fullmatch(path.name) and not path.is_dir()]
    # the tokenizer of an exported model is read beside its artifacts
    exported = not prefix and (directory / contract.PIPELINE / contract.CARD).is_file()
    return [*older, contract.PIPELINE] if exported else older


def write_artifacts(
    directory: Path,
    models: Mapping[str, ir.Model],
    checkpoints: Mapping[str, CheckpointData],
    *,
    prefix: str = "",
    ort_format: bool = False,
    custom_op_library: str | os.PathLike[str] | None = None,
    more: Callable[[Path], object] | None = None,
) -> list[Path]:
    """Write `{prefix}{name}.onnx` for each model and `{prefix}{name}` for each checkpoint; returns the files.

    Constants that lie in files beside the model that they came from go to one file, `constants.<digest>.data`.
    Everything is written into a temporary folder inside the directory first, where `more` adds files, then
    committed as one set (`onward.files`).
    """
    try:
        with write_set(directory, older=older_members(directory, prefix)) as staging:
            with constants_beside(list(models.values()), staging, f"{prefix}constants"):
                for name, model in models.items():
                    write_model(model, staging / f"{prefix}{name}.onnx", external=False, refer=True)
                    _open(
                        staging / f"{prefix}{name}.onnx",
                        custom_op_library,
                        ort_format=ort_format,
                        for_devices=model.metadata_props.get(contract.PRECISION) == "bf16",
                    )
            for name, data in checkpoints.items():
                save(data, staging / f"{prefix}{name}")
            if more is not None:
                more(staging)
            names = sorted(path.name for path in staging.iterdir())
        return [directory / name for name in names]
    except OSError as error:
        state = "" if isinstance(error, CommittedError) else "; nothing was written or changed"
        raise ModelError(
            f"cannot write artifacts to '{directory}': {error.strerror or error}{state}"
        ) from error


def _open(
    path: Path, custom_op_library: str | os.PathLike[str] | None, *, ort_format: bool, for_devices: bool
) -> None:
    """Open a model in a session, as its users will; with `ort_format`, also write it as `.ort` beside it.

    A model `for_devices` need not run on the CPU: bfloat16 has no kernels there.
    """
    from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NoKernel

    from onward.ort_session import create_session, quiet_options

    # it is not run: threads would only be started, and a plan of memory takes the square of the number of values
    options = quiet_options(threads=1, optimize=False)
    options.enable_mem_reuse = False
    if ort_format:
        options.optimized_model_filepath = str(path.with_suffix(".ort"))
        # the session itself writes it when it loads: Python has no other converter at hand than a command line tool
        options.add_session_config_entry("session.save_model_format", "ORT")
    if custom_op_library is not None:
        options.register_custom_ops_library(os.fspath(custom_op_library))
    try:
        create_session(path, options)
    except Exception as error:
        if isinstance(error, NoKernel) and not ort_format:  # a device may have it
            level = logging.DEBUG if for_devices else logging.WARNING
            _log.log(level, "'%s' does not run on the CPU: %s", path.name, error)
            return
        what = "turn '{}' into ORT format" if ort_format else "load '{}', which was made of this model"
        raise ModelError(
            f"onnxruntime cannot {what.format(path.name)}; nothing was written: {error}",
            hint="onward inspect shows the model's operators; those of other domains need custom_op_library",
        ) from error


def write_portable(
    folder: Path,
    prefix: str,
    evaluation: ir.Model,
    layout: StateLayout,
    checkpoint: CheckpointData,
    *,
    steps: Mapping[str, ir.Model],
    nominal: CheckpointData | None,
) -> None:
    """Write the state file, the inference model over its weights, and the metadata of both steps into a folder."""
    state = folder / f"{prefix}state.bin"
    to_portable(checkpoint, state, layout=layout)
    if nominal is not None:
        to_portable(nominal, folder / f"{prefix}nominal_state.bin", layout=layout)
    # onnxruntime's bindings for Node.js and Swift do not show a model's metadata
    for name in ("train_step", "accumulate_step"):
        about = json.dumps(dict(steps[name].metadata_props), indent=1, sort_keys=True)
        (folder / f"{prefix}{name}.json").write_text(about + "\n", encoding="utf-8")
    # It reads the state file itself: a file of weights beside it could be of another update, after a crash for one.
    model = _inference_model(evaluation, layout, state)
    path = folder / f"{prefix}inference_model.onnx"
    if initializer_bytes(model) - layout.weights_size > EXTERNAL_THRESHOLD:
        large = [
            v for v in model.graph.initializers.values() if not isinstance(v.const_value, ir.ExternalTensor)
        ]
        tensors = [value.const_value for value in large if value.const_value is not None]
        moved = ir.external_data.convert_tensors_to_external(tensors, folder, f"{path.name}.data")
        for value, tensor in zip(large, moved):
            value.const_value = tensor
    ir.save(model, path)
    name_data_by_content(path)


def _inference_model(evaluation: ir.Model, layout: StateLayout, data: Path) -> ir.Model:
    """The evaluation model's own outputs, with weights that lie in a file at the offsets of the state's."""
    model = evaluation.clone()
    about = model.metadata_props
    values = values_of(model.graph)
    outputs = [name for name in read_names(about, contract.OUTPUTS) if name in values]
    prune(model, outputs or [about[contract.LOSS]])
    to_inference(model)
    # an update changes them in the file: folding one into a constant would freeze what it was when this was written
    names = [part.name for part, _, _ in layout.parts() if part.role != "slot"]
    simplify(model, parameters=names)
    inputs = {value.name: value for value in model.graph.inputs}
    for part, dtype, offset in layout.parts():
        value = inputs.get(part.name) if part.role in ("frozen", "statistic", "trainable") else None
        if value is None:
            continue
        model.graph.inputs.remove(value)
        value.const_value = ir.ExternalTensor(
            data.name,
            offset,
            prod(part.shape) * dtype.itemsize,
            ir.DataType.from_numpy(dtype),
            shape=ir.Shape(part.shape),
            name=part.name,
            base_dir=data.parent,
        )
        model.graph.register_initializer(value)
    # they speak of inputs that are constants now: a reader would look for them in vain
    for key in (contract.TRAINABLE, contract.FROZEN, contract.LABELS, contract.LOSS):
        about.pop(key, None)
    about.update({contract.ROLE: "inference", contract.STATE_DIGEST: layout.digest.hex()})
    return model
