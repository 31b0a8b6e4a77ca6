"""A model of any origin, opened to train or to evaluate it; and its scores on data with targets."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

from onward.data.match_inputs import specs_of
from onward.data.read import Data, DataOptions
from onward.errors import DataError
from onward.graph.gate import read_proto
from onward.hub.model_folder import find_base
from onward.hub.read_info import read_info
from onward.runtime.devices import find_device
from onward.runtime.sessions import open_session
from onward.tasks import find_task
from onward.tasks.choose_task import choose_task
from onward.tasks.classifier import find_tokenizer_of
from onward.tasks.protocol import Source
from onward.train.evaluation import join
from onward.train.metrics import find_metrics

if TYPE_CHECKING:
    from onward.data.match_inputs import InputSpec
    from onward.tasks.protocol import Arrays
    from onward.train.batches import Batches

Loader = Callable[[Sequence["InputSpec"], DataOptions], Data]


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The task of a model, its figures, and a row for each class, whose cells `columns` names."""

    task: str
    figures: dict[str, float]
    classes: list[list[Any]]
    columns: Sequence[str]
    samples: int
    notes: list[str]


def open_source(model: str | os.PathLike[str] | onnx.ModelProto) -> Source:
    """A model of any origin, with what is known of it; its weights are not read."""
    file: Path | onnx.ModelProto
    path: Path | None = None
    if isinstance(model, onnx.ModelProto):
        file = model
    else:
        path = Path(model)
        file = find_base(path)[1] if path.is_dir() else path
    proto = read_proto(file, read_data=False, by_reference=True)  # weights are not needed yet
    info = read_info(file if path is None or not path.is_dir() else path)
    output = proto.graph.output[0]
    dims = output.type.tensor_type.shape.dim
    # of [batch, classes] alone: the last size of boxes or states is no number of classes
    width = dims[-1].dim_value if len(dims) == 2 and dims[-1].HasField("dim_value") else None
    return Source(file, path, specs_of(proto.graph), width, output.name, info)


def evaluate_model(
    model: Path,
    data: Any,
    load: Loader,
    *,
    task: str | None = None,
    options: DataOptions,
    metrics: Sequence[str] = (),
    batch_size: int = 64,
    device: Any = "cpu",
) -> Evaluation:
    """Run a model over data and compare its answers with the targets.

    `load` reads the data for inputs with options; `options` are those of the user, to which the model's own are added.
    """
    source = open_source(model)
    chosen, _ = choose_task(source.info, source.inputs, data, {}) if task is None else (find_task(task), "")
    functions = chosen.functions
    # perplexity needs labels of every token, and detection its own matching: they do not fit arrays of targets
    own_evaluation = getattr(functions, "evaluate", None)
    if own_evaluation is not None:
        values = chosen.options({"batch_size": batch_size, "device": device})
        figures, count = own_evaluation(data, source, values)
        return Evaluation(chosen.name, figures, [], functions.COLUMNS, count, [])
    # a model that is fixed to one sample takes no more
    fixed = any(spec.dims and spec.dims[0] == 1 for spec in source.inputs)
    values = chosen.options({"batch_size": 1 if fixed else batch_size})
    target = getattr(functions, "TARGET", None)
    if target is None:  # the task reads its data itself
        if options.mapping or options.label:
            raise DataError(f"--map and --label are no options of {chosen.name}", "leave them away")
        loaded = functions.read(data, source, values)
    else:
        loaded = load([*source.inputs, target], _reading(source, options))
    if not loaded.arrays:
        raise DataError(
            "a model for inference is evaluated on files, not on a function", "save the data as .npz"
        )
    summarize = getattr(functions, "summarize", None)
    outputs = _run(
        source, functions.batches(loaded, source.inputs, values, training=False), device,
        (lambda part: part) if summarize is None else lambda part: summarize(part, loaded),
    )  # fmt: skip
    figures, rows = functions.scores(outputs, loaded, source.info)
    if metrics:
        inputs = {} if target is None else {target.name: np.asarray(loaded.arrays[target.name])}
        figures |= {name: float(metric(outputs, inputs)) for name, metric in find_metrics(metrics).items()}
    return Evaluation(chosen.name, figures, rows, functions.COLUMNS, loaded.samples or 0, loaded.notes)


def _reading(source: Source, options: DataOptions) -> DataOptions:
    info, path = source.info, source.model
    beside = find_tokenizer_of(path, info) if isinstance(path, Path) else None
    return dataclasses.replace(
        options,
        classes=info.class_names,
        # which output is which class is settled: data that only alphabetical order could number is refused
        data_names_classes=False,
        preprocessing=info.preprocessing,
        tokenizer=beside,
        near=[] if source.path is None else [source.path],
        class_count=source.width,
    )


def _run(
    source: Source, batches: Batches, device: Any, summarize: Callable[[Arrays], Arrays]
) -> dict[str, np.ndarray]:
    """The model's outputs over all samples, or what is to be kept of them."""
    session = open_session(source.model, providers=find_device(device).providers())
    names = [value.name for value in session.get_outputs()]
    # outputs are reduced batch by batch where a task can: those of segmentation would not fit into memory
    parts = []
    for batch in batches.epoch(0):
        outputs = session.run(names, {spec.name: array for spec, array in zip(source.inputs, batch)})
        parts.append(summarize(dict(zip(names, map(np.asarray, outputs)))))
    return {name: join([part[name] for part in parts]) for name in parts[0]}
