"""The node tests that ship in the onnx package as training artifacts: what trains, what is refused and why.

Every float32 input of a test becomes a trainable parameter and its first float32 output the prediction of a mean
squared error; one step of AdamW is run with Module and Optimizer. A gradient's values are not judged here:
`node_tests` does that.

    python tests/autodiff/node_artifacts.py          # the table of docs/dialect.md
"""

from __future__ import annotations

import collections
import re
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from node_tests import load, operator_of

from onward.api import CheckpointState, Module, Optimizer
from onward.artifacts import LossType, OptimType, generate_artifacts
from onward.errors import ModelError, NonFiniteError, OnwardError, UnsupportedOps

_FLOAT = onnx.TensorProto.FLOAT
# the loss has an input of this name
_RENAMED = {"target": "wanted"}
TRAINS, NONE = "a step runs", "no float32 tensor comes in, or none goes out"


def outcome(case: Any) -> tuple[str, str]:
    """What came of one test, in words that are the same for tests that end alike, and the whole message."""
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    for names in [n.input for n in model.graph.node] + [[]]:
        names[:] = [_RENAMED.get(name, name) for name in names]
    for value in model.graph.input:
        value.name = _RENAMED.get(value.name, value.name)
    graph, data = model.graph, case.data_sets[0]
    values = {value.name: _array(given) for value, given in zip(graph.input, data[0]) if given is not None}
    taken = [v for v in graph.input if v.type.tensor_type.elem_type == _FLOAT and v.name in values]
    given = [v.name for v in graph.output if v.type.tensor_type.elem_type == _FLOAT]
    if not taken or not given:
        return NONE, ""
    for value in taken:
        graph.input.remove(value)
        graph.initializer.append(onnx.numpy_helper.from_array(values[value.name], value.name))
    feeds = [values[value.name] for value in graph.input]
    wanted = _array(data[1][[v.name for v in graph.output].index(given[0])])
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(name)
        try:
            generate_artifacts(
                model,
                requires_grad=[value.name for value in taken],
                loss=LossType.MSELoss,
                optimizer=OptimType.AdamW,
                artifact_directory=folder,
                loss_input_names=given[:1],
            )
            state = CheckpointState.load_checkpoint(folder / "checkpoint")
            module = Module(folder / "training_model.onnx", state)
            optimizer = Optimizer(folder / "optimizer_model.onnx", module)
            module(*feeds, np.asarray(wanted + 1, np.float32))
            optimizer.step()
        except NonFiniteError as error:
            return "the loss or its gradient at the test's data is not finite", str(error)
        except UnsupportedOps as error:
            operators = sorted({line.split()[0] for line in str(error).splitlines()[1:] if line[:2] == "  "})
            named = f"no gradient of {', '.join(operators)}"
            return named if operators else "no gradient with respect to a setting (scales)", str(error)
        except (OnwardError, ValueError, TypeError) as error:
            line = str(error).splitlines()[0]
            kind = (
                "refused" if isinstance(error, ModelError | ValueError | TypeError) else type(error).__name__
            )
            like = re.sub(r"'[^']*'|\d+", "…", line)[:110]
            return f"{kind}: {like}", str(error)
        except Exception as error:
            return f"raw {type(error).__name__}", str(error)
    return TRAINS, ""


def _array(value: Any) -> Any:
    if isinstance(value, onnx.TensorProto):
        return onnx.numpy_helper.to_array(value)
    return value if isinstance(value, list) else np.asarray(value)


def table(cases: Sequence[Any]) -> str:
    found: dict[str, list[str]] = collections.defaultdict(list)
    for case in cases:
        verdict, message = outcome(case)
        found[verdict].append(operator_of(case))
        if verdict.startswith("raw"):
            print(f"{case.name}: {verdict}: {message[:300]}", file=sys.stderr)
    lines = ["| what comes of it | tests | operators |", "|---|---|---|"]
    for verdict, operators in sorted(found.items(), key=lambda item: -len(item[1])):
        names = sorted(set(operators))
        shown = "" if verdict in (TRAINS, NONE) else ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
        lines.append(f"| {verdict} | {len(operators)} | {shown} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(
        table(
            load()[
                int(sys.argv[1]) if len(sys.argv) > 1 else 0 :: int(sys.argv[2]) if len(sys.argv) > 2 else 1
            ]
        )
    )
