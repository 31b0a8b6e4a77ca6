"""The contents of a file or folder (a model, a checkpoint, artifacts or a run) as plain data."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onward import contract
from onward.cli.errors import CommandError
from onward.cli.paths import read_model
from onward.cli.run_folder import EarlierRun, read_run
from onward.errors import LimitError, OnwardError
from onward.reading import names_of

_MODELS = ("training_model", "eval_model", "optimizer_model")


def describe(path: Path, *, prefix: str = "") -> dict[str, Any]:
    """The contents of a path; `kind` says what it is."""
    if path.is_dir():
        return {**_describe_folder(path, prefix), "info": _describe_info(path, prefix)}
    if not path.is_file():
        raise CommandError(
            f"nothing at '{path}'", "name a model, a checkpoint, or a folder of artifacts or a run"
        )
    if path.suffix == ".onnx":
        return {**describe_model(path), "info": _describe_info(path, prefix)}
    if path.suffix == ".safetensors":
        return _describe_safetensors(path)
    return describe_checkpoint(path)


def describe_model(path: Path) -> dict[str, Any]:
    """Inputs, outputs, operators, parameters and metadata of a model; weights are not read."""
    proto = read_model(path)
    graph = proto.graph
    about = {entry.key: entry.value for entry in proto.metadata_props}
    trainable, frozen = _roles(about)
    parameters = [_tensor(t.name, t.data_type, list(t.dims), t.name in trainable) for t in graph.initializer]
    # training models take their parameters as inputs
    fed = [value for value in graph.input if value.name in {*trainable, *frozen}]
    # before IR 4 every initializer was an input as well
    constant = {tensor.name for tensor in graph.initializer}
    outside = sorted({e.value for t in graph.initializer for e in t.external_data if e.key == "location"})
    return {
        "kind": "model",
        "path": str(path),
        "bytes": path.stat().st_size,
        "external_data": outside,
        "role": about.get(contract.ROLE, "forward"),
        "producer": f"{proto.producer_name} {proto.producer_version}".strip(),
        "opsets": {entry.domain or "ai.onnx": entry.version for entry in proto.opset_import},
        "ir_version": proto.ir_version,
        "inputs": [_value(v) for v in graph.input if v.name not in constant and v not in fed],
        "outputs": [_value(v) for v in graph.output],
        "parameters": parameters or [_fed(v, v.name in trainable) for v in fed],
        "operators": dict(Counter(_operators(graph)).most_common()),
        "metadata": about,
    }


def _describe_info(path: Path, prefix: str) -> list[tuple[str, str, str]]:
    """What the model is for, each fact with its source; sources that disagree are shown, not refused."""
    from onward.hub.read_info import read_info

    try:
        return read_info(path, prefix=prefix).facts()
    # to see what is wrong with a file is what inspect is for
    except OnwardError as error:
        return [("problem", str(error), "")]


def describe_checkpoint(path: Path) -> dict[str, Any]:
    """Parameters, optimizer state, properties and integrity of a checkpoint, which is read and verified."""
    from onward import checkpoint

    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        data = checkpoint.from_portable(path) if checkpoint.is_portable(path) else checkpoint.load(path)
    has_trailer = not any(issubclass(w.category, checkpoint.UncheckedCheckpointWarning) for w in heard)
    parameters = [
        _array(name, array, trains)
        for tensors, trains in ((data.trainable, True), (data.frozen, False))
        for name, array in tensors.items()
    ]
    return {
        "kind": "checkpoint",
        "path": str(path),
        "bytes": path.stat().st_size,
        "integrity": "checksum verified"
        if has_trailer
        else "no checksum (another program wrote it); structure verified",
        "nominal": data.nominal,
        "parameters": parameters,
        "optimizer": [
            {
                "group": group.name,
                "step": group.step,
                "initial_learning_rate": group.initial_learning_rate,
                "slots": sorted({slot for slots in group.slots.values() for slot in slots}),
                "bytes": sum(array.nbytes for slots in group.slots.values() for array in slots.values()),
            }
            for group in data.optimizer
        ],
        "properties": dict(data.properties),
        # the position of a run and its random state are pages of JSON
        "extras": {name: value for name, value in data.extras.items() if len(str(value)) < 200},
    }


def _describe_folder(folder: Path, prefix: str) -> dict[str, Any]:
    run = read_run(folder)
    # a run before artifacts: a folder may be both, and the run says more
    if run:
        return _describe_run(folder, run)
    paths = {name: folder / f"{prefix}{name}.onnx" for name in _MODELS}
    models = {name: describe_model(path) for name, path in paths.items() if path.is_file()}
    if not models and (folder / "onward.json").is_file():  # a folder of `onward export`
        return describe_model(folder / "model.onnx")
    if not models and not prefix and _describe_info(folder, prefix):
        return {"kind": "folder", "path": str(folder)}
    if not models:
        raise CommandError(
            f"'{folder}' holds neither artifacts nor a run", "is the folder (or --prefix) right?"
        )
    state = folder / f"{prefix}checkpoint"
    return {
        "kind": "artifacts",
        "path": str(folder),
        "models": models,
        "checkpoint": describe_checkpoint(state) if state.is_file() else None,
    }


def _describe_run(folder: Path, run: EarlierRun) -> dict[str, Any]:
    from onward.errors import CheckpointError
    from onward.train.history import History

    checkpoints: list[dict[str, Any]] = []
    for path in [*sorted(folder.glob("checkpoint-*")), folder / "best"]:
        # links for readers of the original, which look for large tensors there
        if path.is_file() and path.suffix != ".data":
            row: dict[str, Any] = {"file": path.name, "bytes": path.stat().st_size, "step": None}
            try:
                contents = describe_checkpoint(path)
                row["integrity"] = contents["integrity"]
                if contents["optimizer"]:
                    row["step"] = contents["optimizer"][0]["step"]
            except CheckpointError as error:
                # shown in its row: one damaged file must not hide the others
                row["integrity"] = f"DAMAGED: {error.reason}"
            checkpoints.append(row)
    return {
        "kind": "run",
        "path": str(folder),
        "artifacts": str(run.artifacts),
        "options": {
            name: value for name, value in run.options.to_json().items() if value not in (None, [], "")
        },
        "classes": run.classes,
        "checkpoints": checkpoints,
        "epochs": History.load(folder / "history.json").epochs,
    }


def _describe_safetensors(path: Path) -> dict[str, Any]:
    from onward import checkpoint

    data = checkpoint.from_safetensors(path)
    return {
        "kind": "safetensors",
        "path": str(path),
        "bytes": path.stat().st_size,
        "integrity": "structure verified (the format has no checksum)",
        "parameters": [
            _array(name, array, name in data.trainable) for name, array in data.parameters().items()
        ],
    }


def _roles(about: Mapping[str, str]) -> tuple[set[str], set[str]]:
    """Names that the file's metadata calls trainable and frozen."""

    def names(*keys: str) -> set[str]:
        return {name for key in keys for name in _json_list(about.get(key, "[]"))}

    return names(contract.TRAINABLE, contract.REQUIRES_GRAD), names(contract.FROZEN, contract.FROZEN_PARAMS)


def _json_list(text: str) -> list[str]:
    try:
        return names_of(text)
    except (ValueError, LimitError):
        return []


def _operators(graph: Any) -> list[str]:
    names = []
    for node in graph.node:
        names.append(node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}")
        for attribute in node.attribute:
            for inner in [attribute.g, *attribute.graphs]:
                names += _operators(inner)
    return names


def _value(value: Any) -> dict[str, Any]:
    import onnx

    kind = value.type.tensor_type
    if not kind.elem_type:
        return {"name": value.name, "type": value.type.WhichOneof("value") or "unknown", "shape": None}
    dims = [d.dim_value if d.HasField("dim_value") else d.dim_param or "?" for d in kind.shape.dim]
    shape = dims if kind.HasField("shape") else None
    return {
        "name": value.name,
        "type": onnx.TensorProto.DataType.Name(kind.elem_type).lower(),
        "shape": shape,
    }


def _fed(value: Any, trainable: bool) -> dict[str, Any]:
    """A parameter that is an input: its values are in the checkpoint."""
    shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim if dim.HasField("dim_value")]
    return _tensor(value.name, value.type.tensor_type.elem_type, shape, trainable)


def _array(name: str, array: Any, trainable: bool) -> dict[str, Any]:
    import numpy as np

    described = {"name": name, "type": str(array.dtype), "trainable": trainable}
    if not isinstance(array, np.ndarray):  # nominal: a name and a type
        return {**described, "shape": None, "values": 0, "bytes": 0}
    return {**described, "shape": list(array.shape), "values": array.size, "bytes": array.nbytes}


def _tensor(name: str, code: int, shape: list[int], trainable: bool) -> dict[str, Any]:
    import onnx_ir as ir

    kind = ir.DataType(code)
    count = math.prod(shape)
    width = 0 if kind in (ir.DataType.STRING, ir.DataType.UNDEFINED) else kind.itemsize
    return {
        "name": name,
        "type": kind.name.lower(),
        "shape": shape,
        "values": count,
        "bytes": int(count * width),
        "trainable": trainable,
    }
