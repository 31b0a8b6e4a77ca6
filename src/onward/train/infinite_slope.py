"""Explains a gradient that is not finite although the loss is: an operator has an infinite slope at its input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx

from onward.runtime.sessions import open_session

__all__ = ["infinite_slope"]

# the input whose zeros make the slope infinite
_AT_ZERO = {"Sqrt": 0, "Log": 0, "Reciprocal": 0, "Div": 1, "Pow": 0}


def infinite_slope(model: onnx.ModelProto, feeds: Mapping[str, Any]) -> tuple[str, int] | None:
    """The first operator of a forward model that divides by 0 in its gradient, in words, and the sample's number.

    >>> import onnx.parser
    >>> model = onnx.parser.parse_model('''<ir_version: 10, opset_import: ["": 21]>
    ...     net (float[N] x) => (float[N] y) { y = Sqrt(x) }''')
    >>> infinite_slope(model, {"x": np.array([1, 0], np.float32)})
    ("Sqrt 'y' has the input 0", 1)
    """
    watched = onnx.ModelProto()
    watched.CopyFrom(model)
    known = {value.name for value in watched.graph.output}
    inputs = {value.name for value in watched.graph.input}
    constants = {tensor.name for tensor in watched.graph.initializer}
    nodes = [
        (node, node.input[_AT_ZERO[node.op_type]])
        for node in watched.graph.node
        if node.op_type in _AT_ZERO and node.input[_AT_ZERO[node.op_type]] not in constants
    ]
    for _, name in nodes:
        if name not in known | inputs:
            known.add(name)
            watched.graph.output.add(name=name)
    names = list(dict.fromkeys(name for _, name in nodes if name not in inputs))
    session = open_session(watched.SerializeToString())
    taken = {value.name for value in session.get_inputs()}
    values = dict(feeds) | dict(
        zip(names, session.run(names, {k: v for k, v in feeds.items() if k in taken}) if names else [])
    )
    for node, name in nodes:
        array = np.asarray(values[name])
        bad = array <= 0 if node.op_type in ("Sqrt", "Log") else array == 0
        if array.dtype.kind != "f" or not bad.any():
            continue
        place = np.argwhere(bad)[0]
        row = int(place[0]) if len(place) else 0
        return f"{node.op_type} '{node.output[0]}' has the input {array[tuple(place)]:g}", row
    return None
