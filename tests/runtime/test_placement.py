"""Which nodes a device leaves to the host, and why: told from what the runtime says of a session."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import onnx.parser
import pytest

from onward.runtime import sessions
from onward.runtime.devices import CPU, Device
from onward.runtime.sessions import HostNode, host_nodes

MODEL = """<ir_version: 10, opset_import: ["": 18]> g (float[n, 4] x) => (float[n, 4] y) <int64[1] one = {1}> {
    s = Shape (x)  t = Mul (s, one)  r = Expand (x, t)  y = Det_like (r) }"""


def parts(*owners: tuple[str, list[tuple[str, str]]]) -> Any:
    """A session that says which provider has which nodes."""
    made = [
        SimpleNamespace(
            ep_name=name, get_nodes=lambda n=nodes: [SimpleNamespace(op_type=o, name=w) for o, w in n]
        )
        for name, nodes in owners
    ]
    return SimpleNamespace(get_provider_graph_assignment_info=lambda: made)


def test_nodes_on_the_host_are_listed_with_their_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    model = onnx.parser.parse_model(MODEL.replace("Det_like", "Erf"))
    for node in model.graph.node:
        node.name = node.op_type
    found = parts(
        ("CUDAExecutionProvider", [("Expand", "Expand")]),
        (CPU, [("Shape", "Shape"), ("Mul", "Mul"), ("Erf", "Erf"), ("FusedThing", "new")]),
    )
    monkeypatch.setattr(sessions, "make_session", lambda *_, **__: found)
    nodes = host_nodes(model, Device("cuda"))
    assert nodes[:3] == [
        HostNode("Shape", "Shape", "computes sizes, which the runtime keeps in host memory"),
        HostNode("Mul", "Mul", "computes sizes, which the runtime keeps in host memory"),
        HostNode("Erf", "Erf", "CUDAExecutionProvider has no kernel for it (float)"),
    ]
    assert nodes[3].operator == "FusedThing" and "no kernel" in nodes[3].reason


def test_the_runtime_says_where_nodes_are() -> None:
    """On the CPU provider, every node is on the host."""
    model = onnx.parser.parse_model(MODEL.replace("Det_like", "Erf"))
    assert "Erf" in {node.operator for node in host_nodes(model, Device("cpu"))}
