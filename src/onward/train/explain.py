"""Errors of a training step in the user's terms: the row of the data, the operator whose gradient is infinite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

from onward.errors import NonFiniteError
from onward.runtime.sessions import open_session, read_model

if TYPE_CHECKING:
    from onward.runtime.signature import Signature
    from onward.train.artifact_set import ArtifactFiles
    from onward.train.batches import Batch, Batches
    from onward.train.engines import Engine
    from onward.train.progress import Position
    from onward.train.window import Window


# the input whose zeros make the slope infinite
_AT_ZERO = {"Sqrt": 0, "Log": 0, "Reciprocal": 0, "Div": 1, "Pow": 0}


class Explainer:
    """Explains the errors of a run's updates."""

    def __init__(self, engine: Engine, files: ArtifactFiles, batches: Batches, position: Position) -> None:
        self._engine, self._files, self._batches, self._position = engine, files, batches, position

    def of_batch(self, error: Exception, window: Window) -> Exception:
        """The error of a batch, with the row of the data that it is about."""
        if window.last is None:
            return error
        explained = _name_row(error, self._engine.module.signature, window.last, self._rows())
        if explained is not error:
            # the error of the step stays in the traceback
            explained.__cause__ = error
        return explained

    def of_update(self, error: NonFiniteError, window: Window) -> NonFiniteError:
        """The error of a gradient, with the operator that it comes from."""
        return _name_operator(error, self._engine, self._files, window.last, self._rows())

    def _rows(self) -> np.ndarray | None:
        position, engine = self._position, self._engine
        return self._batches.rows(
            position.epoch, position.batch - 1, rank=engine.replica, world=engine.replicas
        )


def _name_row(error: Exception, signature: Signature, batch: Batch, rows: np.ndarray | None) -> Exception:
    """The same error, with the row of the data instead of the position in a shuffled batch."""
    if rows is None:
        return error
    if isinstance(error, NonFiniteError):
        for name, value in zip(signature.inputs, batch):
            array = np.asarray(value)
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                row = rows[int(np.argwhere(~np.isfinite(array))[0][0])]
                return NonFiniteError(
                    f"{error}; '{name}' itself is not finite in row {row} of the training data (from 0)"
                )
        return error
    if not isinstance(error, ValueError):
        return error
    for index, classes, ignored in signature.labels:
        labels = np.asarray(batch[index])
        invalid = (labels < 0) | (labels >= classes)
        invalid &= labels != ignored if ignored is not None else True
        if invalid.any():
            where = np.argwhere(invalid)[0]
            return ValueError(
                f"'{signature.inputs[index]}' has label {labels[tuple(where)]} in row {rows[int(where[0])]} of the "
                f"training data (from 0): the model has {classes} classes, so labels are 0 to {classes - 1}"
            )
    return error


def _name_operator(
    error: NonFiniteError, engine: Engine, files: ArtifactFiles, batch: Batch | None, rows: np.ndarray | None
) -> NonFiniteError:
    """The same error, with the operator whose gradient is infinite, where there is one."""
    if files.evaluation is None or batch is None:
        return error
    try:
        model = read_model(files.evaluation, "eval")
        feeds = dict(zip(engine.module.signature.inputs, map(np.asarray, batch)))
        feeds |= {name: np.asarray(parameter.data) for name, parameter in engine.state.parameters}
        slope = find_infinite_slope(model, feeds)
    except Exception:  # an explanation only: what went wrong is the error itself
        return error
    if slope is None:
        return error
    words, sample = slope
    row = f", in row {rows[sample]} of the training data (from 0)" if rows is not None else ""
    return NonFiniteError(
        f"{str(error).split('.')[0]}. {words}{row}: its gradient is infinite there. Freeze the weights before it "
        "(frozen_params, --freeze), or add a small number to that input in the model"
    )


def find_infinite_slope(model: onnx.ModelProto, feeds: Mapping[str, Any]) -> tuple[str, int] | None:
    """The first operator of a forward model that divides by 0 in its gradient, in words, and the sample's number.

    >>> import onnx.parser
    >>> model = onnx.parser.parse_model('''<ir_version: 10, opset_import: ["": 21]>
    ...     net (float[N] x) => (float[N] y) { y = Sqrt(x) }''')
    >>> find_infinite_slope(model, {"x": np.array([1, 0], np.float32)})
    ("Sqrt 'y' has the input 0", 1)
    """
    watched = onnx.ModelProto()
    watched.CopyFrom(model)
    outputs = {value.name for value in watched.graph.output}
    inputs = {value.name for value in watched.graph.input}
    constants = {tensor.name for tensor in watched.graph.initializer}
    nodes = [
        (node, node.input[_AT_ZERO[node.op_type]])
        for node in watched.graph.node
        if node.op_type in _AT_ZERO and node.input[_AT_ZERO[node.op_type]] not in constants
    ]
    for _, name in nodes:
        if name not in outputs | inputs:
            outputs.add(name)
            watched.graph.output.add(name=name)
    names = list(dict.fromkeys(name for _, name in nodes if name not in inputs))
    session = open_session(watched.SerializeToString())
    fed = {value.name for value in session.get_inputs()}
    values = dict(feeds) | dict(
        zip(names, session.run(names, {k: v for k, v in feeds.items() if k in fed}) if names else [])
    )
    for node, name in nodes:
        array = np.asarray(values[name])
        at_zero = array <= 0 if node.op_type in ("Sqrt", "Log") else array == 0
        if array.dtype.kind != "f" or not at_zero.any():
            continue
        index = np.argwhere(at_zero)[0]
        row = int(index[0]) if len(index) else 0
        return f"{node.op_type} '{node.output[0]}' has the input {array[tuple(index)]:g}", row
    return None
