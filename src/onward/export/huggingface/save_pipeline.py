"""Saves trained artifacts of a Hugging Face model as a folder for `onward.load`.

Uses the `pipeline` folder that `artifacts_from_transformers` writes: the tokenizer and `onward.json`. Imports neither
torch nor transformers, so that it works where the model was trained.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.errors import ExportError
from onward.export.huggingface.folder import CARD, MAKE_FOLDER, MODEL, PIPELINE, read_card, staged, write_card
from onward.export.inference import InferenceExport, for_inference
from onward.export.quantize.quantizer import scheme_name
from onward.graph.gate import read_proto

if TYPE_CHECKING:
    from onward.api.state import CheckpointState
    from onward.checkpoint.content import CheckpointData

__all__ = ["save_pipeline"]


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
    `quantize` makes it smaller afterwards, and what that costs is measured on the same and recorded.

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
            _eval_model(source),
            state,
            list(card["outputs"]),
            stage / MODEL,
            quantize=scheme,
            inputs=feeds,
            rtol=rtol,
            atol=atol,
        )
        for file in (source / PIPELINE).iterdir():
            if file.name != CARD and file.is_file():
                shutil.copyfile(file, stage / file.name)
        write_card(_finished(card, exported, scheme, stage / MODEL), stage)
    return InferenceExport(Path(directory) / MODEL, exported.size, exported.parity, exported.quantization)


def _eval_model(directory: Path) -> Path:
    candidates = sorted(directory.glob("*eval_model.onnx"))
    if len(candidates) != 1:
        raise ExportError(f"'{directory}': expected one eval_model.onnx, found {len(candidates)}")
    return candidates[0]


def _arrays(sample: Mapping[str, Any] | None) -> dict[str, np.ndarray] | None:
    return None if sample is None else {name: np.asarray(rows, np.int64) for name, rows in sample.items()}


def _finished(
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
