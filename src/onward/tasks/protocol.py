"""What a task's module has, and what goes between its functions.

`onward.finetune`, `onward evaluate`, `onward.load` and the report are written over these functions alone: a new task is
a module that has them and a line in `TASKS`. Tasks whose samples have one label or number each take `read` and
`batches` from `labelled`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from onward.errors import ModelError

if TYPE_CHECKING:
    import onnx

    from onward.checkpoint.content import CheckpointData
    from onward.data.match_inputs import InputSpec
    from onward.data.read import Data
    from onward.info.model_info import ModelInfo
    from onward.info.preprocessing import Preprocessing
    from onward.train.artifact_set import ArtifactFiles
    from onward.train.callbacks import Callback
    from onward.train.history import History
    from onward.train.metrics import Metric
    from onward.train.report import Figure

Arrays = Mapping[str, np.ndarray]
_TYPES = {
    "tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(float16)": np.float16,
    "tensor(int64)": np.int64, "tensor(int32)": np.int32, "tensor(uint8)": np.uint8,
}  # fmt: skip
# the figures of an evaluation, and a row for each class: its name, then numbers
Scores = tuple[dict[str, float], list[list[Any]]]


@dataclasses.dataclass(frozen=True)
class Source:
    """A model to train or to evaluate: its file, or the model itself; and what is known of it."""

    model: Path | onnx.ModelProto
    # what the user named: the file, or the folder that it is in
    path: Path | None
    inputs: list[InputSpec]
    # how many scores the first output has for a sample, where it has two dimensions
    width: int | None
    output: str
    info: ModelInfo


@dataclasses.dataclass(frozen=True)
class Fitted:
    """The figures and the weights of the best epoch, or of the average over all updates; and some samples."""

    figures: dict[str, float]
    history: History
    state: CheckpointData
    samples: dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class OwnTraining:
    """What a task does itself, where the result is no file with a head: a language model beside its base.

    `prepare` computes what training needs of samples and only the model can tell; `callbacks` are those of a run
    that is evaluated on this data; `result` is what `onward.finetune` returns, for the figures and the notes of a run.
    """

    artifacts: ArtifactFiles
    prepare: Callable[[Data], None]
    callbacks: Callable[[Data, Data | None], Sequence[Callback]]
    result: Callable[[Fitted, list[str]], Any]


@dataclasses.dataclass(frozen=True)
class Adapted:
    """A model with a head for the user's data.

    `loss_inputs` are the values of its graph that the loss reads (the first output where it is None), `outputs` those
    that the deployed file has (all of the model's), `judged` those that metrics and the report read (all but the
    loss). `output_kinds` and `problem_type` are those of `ModelInfo`. `frozen` are weights that do not train, whatever
    the options say. `details` are what the task itself wants to remember. With `own` the task has made the training
    models itself.
    """

    model: Any
    labels: list[str] | None
    note: str
    loss_inputs: Sequence[str] | None = None
    outputs: Sequence[str] | None = None
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    own: OwnTraining | None = None
    judged: Sequence[str] | None = None
    frozen: Sequence[str] = ()
    # none by default: a loss wants scores, so that a softmax at the end of the model is gone
    output_kinds: Mapping[str, str] = dataclasses.field(default_factory=dict)
    problem_type: str | None = None

    def describe(self, info: ModelInfo, data: Data, task: str) -> ModelInfo:
        """What the trained model is for: the data's classes and preprocessing, in the words of Hugging Face."""
        return info.replace(
            # several labels are a type of problem there, not a task
            task=task.replace("multi-label", "classification"),
            labels=None if self.labels is None else tuple(self.labels),
            problem_type=self.problem_type,
            inputs=info.inputs if data.preprocessing is None else (data.preprocessing,),
            outputs=self.output_kinds,
            source="the data",
        )


@dataclasses.dataclass(frozen=True)
class Predictor:
    """What `onward.load` gives for a deployed file: call it with an input or a list of them."""

    session: Any
    info: ModelInfo
    tokenizer: Any = None

    @property
    def preprocessing(self) -> Preprocessing | None:
        """How an input is prepared."""
        return self.info.preprocessing

    def run(self, feed: Mapping[str, np.ndarray]) -> np.ndarray:
        """The model's first output, for arrays that become the types it takes."""
        types = {value.name: _TYPES.get(value.type) for value in self.session.get_inputs()}
        # callers give numbers as Python has them, and sessions take their own types only
        typed = {
            name: array.astype(types.get(name) or array.dtype, copy=False) for name, array in feed.items()
        }
        # the first alone: others may be states as large as the input
        return np.asarray(self.session.run([self.session.get_outputs()[0].name], typed)[0])

    def require_preprocessing(self) -> Preprocessing:
        """The same; an error where the model does not say."""
        if self.preprocessing is None:
            raise ModelError("the model does not say how its input is prepared: run it with onnxruntime")
        return self.preprocessing


class Functions(Protocol):
    """The functions of a task's module. `options` is an object of the task's own dataclass.

    A task whose outputs are too large to be kept, or whose data has forms that training does not, has a function
    `evaluate(data, source, options)` besides, which returns the figures of a deployed model and the number of samples.
    Another with large outputs has `summarize(outputs, data)`: what `scores` needs of those of a batch.
    """

    # columns of `onward evaluate`'s table of classes
    COLUMNS: Sequence[str]

    def read(self, data: Any, source: Source, options: Any, *, like: Data | None = None) -> Data:
        """Samples with their targets; `like` is training data with whose classes others are to be read."""
        ...

    def adapt(self, source: Source, data: Data, options: Any) -> Adapted:
        """The model with a head for the data, and with the values that the loss needs."""
        ...

    def loss(self, options: Any, data: Data, adapted: Adapted) -> Any:
        """What `build_artifacts` takes as the loss, in standard operators."""
        ...

    def metrics(self, options: Any, adapted: Adapted) -> Mapping[str, str | Metric]:
        """What is computed on the evaluation data after each epoch."""
        ...

    def batches(self, data: Data, specs: Sequence[InputSpec], options: Any, *, training: bool) -> Any:
        """What `Trainer.fit` takes, for a training model with these inputs; augmented in training."""
        ...

    def show(self, outputs: Arrays, inputs: Arrays, data: Data, adapted: Adapted) -> list[Figure]:
        """What the report shows of an evaluation: the worst samples, a table of classes."""
        ...

    def scores(self, outputs: Arrays, data: Data, info: ModelInfo) -> Scores:
        """The figures of a deployed model on data, from all its outputs."""
        ...

    def predictor(self, session: Any, info: ModelInfo, tokenizer: Any) -> Predictor:
        """What `onward.load` gives for a deployed file; often a class of them."""
        ...
