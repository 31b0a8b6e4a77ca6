"""Artifacts to train from: a directory of files, or models in memory."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx

from onward import contract
from onward.checkpoint import store
from onward.errors import MAKE_ARTIFACTS, ModelError
from onward.info.metadata import info_from_metadata
from onward.model_metadata import read_names, read_table
from onward.runtime.sessions import ModelBeside, ModelFile, read_model

if TYPE_CHECKING:
    from onward.artifacts.generate import Artifacts
    from onward.checkpoint.content import CheckpointData


@dataclasses.dataclass(frozen=True)
class ArtifactFiles:
    """The models of a training run, and where its initial state comes from."""

    name: str
    training: ModelFile
    evaluation: ModelFile | None
    optimizer: ModelFile | None
    state: Path | CheckpointData
    outputs: list[str]
    # how a model that others trained is best trained on: learning_rate, warmup, clip_norm
    defaults: dict[str, Any] = dataclasses.field(default_factory=dict)
    classes: list[str] | None = None
    # loss and optimizer, in words
    about: dict[str, str] = dataclasses.field(default_factory=dict)

    def settings(
        self, *, learning_rate: float | str | None, warmup: float | None, clip_norm: float | None
    ) -> tuple[float | str, float, float | None]:
        """Learning rate, warmup and clipping: as given, else as recorded, else 1e-3, none and none."""
        rate = self.defaults.get("learning_rate", 1e-3) if learning_rate is None else learning_rate
        start = float(self.defaults.get("warmup", 0.0) if warmup is None else warmup)
        clip_norm = self.defaults.get("clip_norm") if clip_norm is None else clip_norm
        return rate, start, clip_norm or None

    def require_evaluation(self) -> ModelFile:
        """The eval model; an error where the artifacts have none."""
        if self.evaluation is None:
            raise ModelError(
                "Eval model was not provided: the artifacts have no eval_model.onnx", hint=MAKE_ARTIFACTS
            )
        return self.evaluation

    def load_checkpoint(self) -> CheckpointData:
        """The initial state."""
        if isinstance(self.state, Path):
            return store.load(self.state)
        # tables of its own: a run writes into them, and the artifacts may start another
        return dataclasses.replace(
            self.state,
            trainable=dict(self.state.trainable),
            frozen=dict(self.state.frozen),
            properties=dict(self.state.properties),
            extras=dict(self.state.extras),
        )


def find_artifacts(
    artifacts: str | os.PathLike[str] | Artifacts | ArtifactFiles, prefix: str = ""
) -> ArtifactFiles:
    """What `generate_artifacts` wrote into a directory, or `build_artifacts` returned."""
    if isinstance(artifacts, ArtifactFiles):
        return artifacts
    if not isinstance(artifacts, str | os.PathLike):
        return _in_memory(artifacts)
    directory = Path(artifacts)
    if not directory.is_dir():
        raise ModelError(
            f"no directory of artifacts at '{directory}': make it with generate_artifacts",
            hint=MAKE_ARTIFACTS,
        )
    training = directory / f"{prefix}training_model.onnx"
    state = directory / f"{prefix}checkpoint"
    missing = [path.name for path in (training, state) if not path.is_file()]
    if missing:
        raise ModelError(
            f"'{directory}' lacks {' and '.join(missing)}: make them with generate_artifacts",
            hint=MAKE_ARTIFACTS,
        )
    evaluation = directory / f"{prefix}eval_model.onnx"
    optimizer = directory / f"{prefix}optimizer_model.onnx"
    return read_artifacts(
        training,
        evaluation if evaluation.is_file() else None,
        optimizer if optimizer.is_file() else None,
        state,
    )


def read_artifacts(
    training: Path, evaluation: Path | None, optimizer: Path | None, state: Path
) -> ArtifactFiles:
    """A set of these files."""
    return ArtifactFiles(
        name=training.parent.resolve().name,
        training=training,
        evaluation=evaluation,
        optimizer=optimizer,
        state=state,
        **about(
            read_model(training, "training"),
            None if optimizer is None else read_model(optimizer, "optimizer"),
        ),
    )


def _in_memory(artifacts: Artifacts) -> ArtifactFiles:
    import onnx_ir as ir

    def proto(model: ir.Model) -> onnx.ModelProto | ModelBeside:
        folders = {
            os.path.realpath(value.const_value.base_dir)
            for value in model.graph.initializers.values()
            if isinstance(value.const_value, ir.ExternalTensor)
        }
        # a session finds external data in one folder only
        if len(folders) > 1:
            ir.external_data.load_to_model(model)
            folders = set()
        built = ir.to_proto(model)
        return ModelBeside(built, Path(folders.pop())) if folders else built

    training = proto(artifacts.training)
    optimizer = None if artifacts.optimizer is None else ir.to_proto(artifacts.optimizer)
    return ArtifactFiles(
        name="artifacts in memory",
        training=training,
        evaluation=proto(artifacts.evaluation),
        optimizer=optimizer,
        state=artifacts.checkpoint,
        **about(training.proto if isinstance(training, ModelBeside) else training, optimizer),
    )


def about(model: onnx.ModelProto, optimizer: onnx.ModelProto | None) -> dict[str, Any]:
    """What the models say of themselves: outputs, classes, loss and optimizer, and how to train on."""
    own = {entry.key: entry.value for entry in model.metadata_props}
    rule = {} if optimizer is None else {entry.key: entry.value for entry in optimizer.metadata_props}
    words = {"loss": own.get(contract.LOSS_NAME, ""), "optimizer": _optimizer_name(rule)}
    defaults = read_table(own, contract.DEFAULTS)
    labels = info_from_metadata(own).class_names
    return {
        "outputs": read_names(own, contract.OUTPUTS),
        "classes": None if labels is None else list(labels),
        "about": {name: value for name, value in words.items() if value},
        "defaults": {
            name: float(value)
            for name, value in defaults.items()
            if name in ("learning_rate", "warmup", "clip_norm")
            and isinstance(value, int | float)
            and 0 <= value < 1e30  # neither NaN nor infinite
        },
    }


def _optimizer_name(about: Mapping[str, str]) -> str:
    rule = read_table(about, contract.OPTIMIZER)
    decay = rule.get("weight_decay")
    shown = f", weight decay {decay:g}" if decay and isinstance(decay, int | float) else ""
    return f"{rule.get('name', '')}{shown}"
