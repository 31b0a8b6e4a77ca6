"""One gate reads all models: who else parses a model or opens a session from a file is listed here, with a reason."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import onward

SOURCE = Path(onward.__file__).parent
PARSING = frozenset({"load", "load_model", "load_from_string", "load_model_from_string", "ParseFromString"})
# what reads models, by module, and why that is not a way around the gate
ALLOWED: dict[str, dict[str, str]] = {
    "graph/gate.py": {"ParseFromString": "the gate"},
    "graph/tensor_references.py": {
        "ParseFromString": "the gate's own reader of large files, without their data"
    },
    "graph/dialect/definitions.py": {"ParseFromString": "function bodies of onnx itself"},
    "graph/save.py": {"load": "a file that it has just written"},
    "runtime/sessions.py": {"create_session": "behind the gate"},
    "runtime/devices.py": {"create_session": "a model of one node that it builds"},
    "runtime/kernels.py": {"create_session": "models of a few nodes that it builds"},
    "runtime/separate_process.py": {"load_from_string": "what the process that started it has built"},
    "runtime/device_check.py": {"create_session": "models of a few nodes that the table of operators has"},
    "quantize/calibration.py": {"create_session": "bytes of a model that came through the gate"},
    "quantize/folding.py": {"create_session": "constants of a model that came through the gate"},
    "export/quantize/candidates.py": {"create_session": "a file that it has just written"},
    "doctor.py": {"create_session": "models of a few nodes that it builds"},
    "runtime/inference_model.py": {"create_session": "a file that it has just written"},
    "artifacts/write.py": {"create_session": "files that it has just written"},
    "autodiff/check.py": {"create_session": "bytes of a model that came through the gate"},
    "export/huggingface/from_transformers.py": {"create_session": "bytes of what it made"},
    "export/torch/tracers.py": {"load_model_from_string": "what torch's exporter made in this process"},
    "export/torch/check_outputs.py": {"create_session": "the model that it has just exported"},
}


def readers(tree: ast.AST) -> Iterator[str]:
    """Calls that parse a model or open a session: `onnx.load(…)`, `x.ParseFromString(…)`, `create_session(…)`."""
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and node.module in ("onnx", "onnx_ir", "onnxruntime", "onward.ort_session")
        for alias in node.names
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Name) and called.id in imported & {
            *PARSING,
            "InferenceSession",
            "create_session",
        }:
            yield called.id
        elif isinstance(called, ast.Attribute):
            owner = called.value.id if isinstance(called.value, ast.Name) else ""
            library = owner in ("onnx", "ir", "onnx_ir") and called.attr in PARSING
            if library or called.attr in ("ParseFromString", "InferenceSession", "MergeFromString"):
                yield called.attr


def test_models_are_read_by_the_gate_alone() -> None:
    found: dict[str, set[str]] = defaultdict(set)
    for path in SOURCE.rglob("*.py"):
        for name in readers(ast.parse(path.read_text(encoding="utf-8"))):
            found[path.relative_to(SOURCE).as_posix()].add(name)
    assert {module: set(names) for module, names in ALLOWED.items()} == dict(found), (
        "read models with onward.graph.gate.read_proto or onward.graph.load.load_model, and open sessions with "
        "onward.runtime.sessions.open_session"
    )


def test_the_search_finds_each_way() -> None:
    code = """
import onnx, onnx_ir as ir, onnxruntime as ort
from onnx import load_model
from onnxruntime import InferenceSession
onnx.load("a"); ir.load("a"); onnx.load_model("a"); load_model("a")
ort.InferenceSession("a"); InferenceSession("a"); onnx.ModelProto().ParseFromString(b"")
json.load("a"); pipeline.load("a")
"""
    assert sorted(readers(ast.parse(code))) == sorted(
        [
            "load",
            "load",
            "load_model",
            "load_model",
            "InferenceSession",
            "InferenceSession",
            "ParseFromString",
        ]
    )
