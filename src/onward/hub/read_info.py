"""`read_info`: one reader for what any model file or folder says of itself."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx

from onward import contract
from onward.errors import ModelError
from onward.export.huggingface.folder import CARD, MODEL
from onward.graph.gate import read_proto
from onward.hub.folder_files import info_beside, read_settings
from onward.info.metadata import info_from_metadata, is_changed, origin_from_table
from onward.info.model_info import ModelInfo, combine
from onward.info.preprocessing import Preprocessing
from onward.model_metadata import read_names

__all__ = ["read_info"]

_RUN = "run.json"


def read_info(model: str | os.PathLike[str] | onnx.ModelProto, *, prefix: str = "") -> ModelInfo:
    """What a model is for, from all that is known of it; an error where two sources disagree.

    `model` is in memory, a file, or a folder: of artifacts, of a run, of `onward export`, or of Hugging Face.
    `prefix` stands before the names of artifacts.

    >>> read_info("artifacts").sources["labels"]  # doctest: +SKIP
    "'artifacts/training_model.onnx'"
    """
    if isinstance(model, onnx.ModelProto):
        return _info_in(model, "the model")
    path = Path(model)
    if path.is_file():
        return _info_of_file(path)
    if not path.is_dir():
        raise ModelError(f"no model at '{path}'")
    if (path / _RUN).is_file():
        return _info_of_run(path, prefix)
    for name in (f"{prefix}training_model.onnx", MODEL, f"onnx/{MODEL}"):
        if (path / name).is_file():
            return _info_of_file(path / name)
    models = sorted(file for part in (path, path / "onnx") for file in part.glob("*.onnx"))
    # several models of one folder say the same, or the folder's files do
    return _info_of_file(models[0]) if models else info_beside(path)


def _info_of_file(path: Path) -> ModelInfo:
    """A model file with the files beside it, unless training or a new head has made it another model."""
    proto = read_proto(path, read_data=False, by_reference=True)
    about = _metadata(proto)
    own = _info_in(proto, f"'{path}'")
    folder = path.parent.parent if path.parent.name == "onnx" else path.parent
    # no name says what an input is, and only pictures have four dimensions
    images = [name for name, dims in _inputs(proto).items() if dims is not None and len(dims) == 4]
    sounds = [name for name in _inputs(proto) if name in ("input_values", "input_features")]
    beside = info_beside(folder, images=images, sounds=sounds)
    # a file's own tokenizer is named after it, since several models may lie in one folder
    named = path.with_name(f"{path.stem}.tokenizer.json")
    if named.is_file():
        own = own.replace(tokenizer=named, source=f"'{named}'")
    described = path.name == MODEL and (folder / CARD).is_file()
    if is_changed(about) and not described:
        if contract.HEAD in about:  # the labels of the old head, which the folder's files still have
            beside = beside.replace(labels=None, problem_type=None)
        return own.over(beside)
    # a fine-tuned model keeps the base's config.json, which names the base's task
    if own.task is not None and not described:
        beside = beside.replace(task=None)
    return combine(own, beside)


def _info_of_run(folder: Path, prefix: str) -> ModelInfo:
    """A run with the artifacts that it trains: what its data had is the run's to say, and the labels of both agree."""
    document = read_settings(folder / _RUN)
    options = document.get("options")
    prefix = prefix or str((options if isinstance(options, Mapping) else {}).get("prefix") or "")
    where = f"'{folder / _RUN}'"
    labels, preprocessing = document.get("classes"), document.get("preprocessing")
    if labels is not None and not (
        isinstance(labels, list) and all(isinstance(name, str) for name in labels)
    ):
        raise ModelError(f"{where}: its classes are not a list of names")
    run = ModelInfo.stated(
        where,
        labels=None if labels is None else tuple(labels),
        inputs=() if not preprocessing else (Preprocessing.from_dict(preprocessing, where),),
    )
    origin = document.get("origin")
    run_origin = origin_from_table(origin if isinstance(origin, dict) else {})
    artifacts_path = document.get("artifacts")
    # the path in the file is relative to the run: both may have been moved together
    training = (
        folder / artifacts_path / f"{prefix}training_model.onnx"
        if isinstance(artifacts_path, str)
        else folder
    )
    if not training.is_file():
        return run
    artifacts = _info_of_file(training)
    if run_origin:
        run_origin = dataclasses.replace(run_origin, base=artifacts.origin.base)
        run = run.replace(origin=run_origin, source=where)
    return combine(run, run.replace(labels=None).over(artifacts))


def _info_in(proto: onnx.ModelProto, where: str) -> ModelInfo:
    sizes: dict[str, int | None] = {}
    for value in proto.graph.output:
        dims = value.type.tensor_type.shape.dim
        sizes[value.name] = dims[-1].dim_value if dims and dims[-1].HasField("dim_value") else None
    makers = {name: node.op_type for node in proto.graph.node for name in node.output}
    # a model that ends in a softmax says so by its graph, whatever its metadata leaves out
    ends = {name: "probabilities" for name in sizes if makers.get(name) in ("Softmax", "Sigmoid")}
    stated = info_from_metadata(_metadata(proto), where, inputs=list(_inputs(proto)), outputs=sizes)
    return stated.over(ModelInfo.stated(f"the graph of {where}", outputs=ends))


def _metadata(proto: onnx.ModelProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in proto.metadata_props}


def _inputs(proto: onnx.ModelProto) -> dict[str, Any]:
    """The inputs that data is for, with their dimensions: a training model takes its weights as inputs too."""
    about = _metadata(proto)
    weights = {tensor.name for tensor in proto.graph.initializer}
    weights |= {*read_names(about, contract.TRAINABLE), *read_names(about, contract.FROZEN)}
    return {
        value.name: list(value.type.tensor_type.shape.dim)
        if value.type.tensor_type.HasField("shape")
        else None
        for value in proto.graph.input
        if value.name not in weights and not value.name.endswith(contract.BUFFER)
    }
