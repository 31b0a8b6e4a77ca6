"""Builds the inference model: the evaluation model with embedded weights, pruned to the chosen outputs.

The file is written beside its target, loaded by the stock runtime as a check, and then renamed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import onnx_ir as ir

from onward import contract
from onward.checkpoint.content import CheckpointData, NominalTensor
from onward.errors import SEE_NAMES, ExportError, ModelError, did_you_mean
from onward.files import write_set
from onward.graph.cleanup import simplify
from onward.graph.load import load_model
from onward.graph.passes.inference_mode import to_inference
from onward.graph.prune import prune, values_of
from onward.graph.save import write_model
from onward.ort_session import create_session
from onward.quantize.folding import fold_quantization, is_rounded
from onward.runtime.sessions import ModelBeside, ModelFile


def export(
    eval_model: ModelFile,
    state: CheckpointData,
    outputs: Sequence[str],
    path: str | os.PathLike[str],
    *,
    external_data: bool | None = None,
) -> list[Path]:
    """Write the inference model of an evaluation model and a state; returns the files."""
    return write_inference_model(
        inference_model(eval_model, state, outputs), path, external_data=external_data
    )


def inference_model(
    eval_model: ModelFile,
    state: CheckpointData,
    outputs: Sequence[str],
) -> ir.Model:
    """The evaluation model pruned to `outputs`, with the state's parameters embedded.

    Any value of the evaluation graph may be an output: the embeddings of a classifier, say.
    """
    state.require_values()
    if isinstance(outputs, str) or not outputs:
        raise ModelError("Expected a non empty vector of graph output names: a list with at least one name.")
    if isinstance(eval_model, ModelBeside):
        model = load_model(eval_model.proto, base_dir=eval_model.folder)
    else:
        model = load_model(eval_model)
    graph = model.graph
    values = values_of(graph)
    for name in outputs:
        if name not in values:
            raise ModelError(
                f"Expected graph output for inference graph {name} could not be found: the eval model has no value of "
                f"that name{did_you_mean(name, values, most=3)}",
                hint=SEE_NAMES,
            )
    # a name given twice would be two outputs of one name, which no runtime takes
    prune(model, list(dict.fromkeys(outputs)))
    ir.external_data.load_to_model(model)  # files beside the eval model are not beside the new one
    _embed(graph, state)
    # before the constants are folded: a Dropout in between keeps them apart
    to_inference(model)
    if is_rounded(model):
        fold_quantization(model)
    simplify(model, parameters=())
    about = model.metadata_props
    for key in (contract.TRAINABLE, contract.FROZEN, contract.LABELS, contract.LOSS, contract.ROLE):
        about.pop(key, None)
    about[contract.ROLE] = "inference"
    about[contract.TRAINED] = json.dumps({"parameters": len(state.trainable) + len(state.frozen)})
    return model


def to_bytes(model: ir.Model) -> bytes:
    """A model as the bytes of one file."""
    return ir.to_proto(model).SerializeToString()


def write_inference_model(
    model: ir.Model, path: str | os.PathLike[str], *, external_data: bool | None = None
) -> list[Path]:
    """Write a model for inference so that an older file stays until the new one has been loaded."""
    target = Path(path)

    def write(folder: Path) -> None:
        write_model(model, folder / target.name, external=external_data)

    return place_files(target, write)


def place_files(target: Path, write: Callable[[Path], object]) -> list[Path]:
    """Let `write` fill a temporary folder, load `target`'s new file from there, then move all beside it."""
    if not target.parent.is_dir():
        raise ExportError(f"cannot write '{target}': there is no folder '{target.parent}'")
    if target.is_dir():
        raise ExportError(f"cannot write '{target}': it is a folder")
    try:
        with write_set(target.parent) as staging:
            write(staging)
            _load(staging / target.name)
            names = [path.name for path in staging.iterdir()]
        return [target.parent / name for name in sorted(names)]
    except OSError as error:
        raise ExportError(f"cannot write '{target}': {error.strerror or error}") from error


def _embed(graph: ir.Graph, state: CheckpointData) -> None:
    """Parameters that the graph reads as inputs become its initializers."""
    values = {**state.trainable, **state.frozen}
    for value in [value for value in graph.inputs if value.name in values]:
        array = values[value.name or ""]
        assert not isinstance(array, NominalTensor)
        graph.inputs.remove(value)
        value.const_value = ir.tensor(array, name=value.name)
        graph.register_initializer(value)


def _load(path: Path) -> None:
    try:
        create_session(path)
    except Exception as error:
        raise ExportError(
            f"onnxruntime cannot load the exported model; nothing was replaced: {error}"
        ) from error
