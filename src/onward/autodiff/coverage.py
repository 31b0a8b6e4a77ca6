"""Which ONNX operators are differentiable: the table of the docs, made from the registry and the schemas."""

from __future__ import annotations

import dataclasses

import onnx

from onward.autodiff.registry import constant_ops, registered_ops
from onward.graph.dialect.definitions import BY_DEFINITION
from onward.graph.dialect.opsets import expanded_operators

__all__ = ["Coverage", "coverage", "summary", "table"]


@dataclasses.dataclass(frozen=True)
class Coverage:
    """One operator: its kind is "rule", "expanded", "constant" or "none", with a reason where it helps."""

    operator: str
    since: int
    kind: str
    note: str = ""


_KINDS = {
    "rule": "differentiable",
    "expanded": "differentiable, by expansion",
    "constant": "constant",
    "none": "no gradient",
}


def coverage() -> list[Coverage]:
    """Every operator of ai.onnx in the installed onnx, without deprecated ones."""
    rules, constants = registered_ops(), constant_ops()
    expanded = {*expanded_operators(), *BY_DEFINITION}
    newest: dict[str, onnx.defs.OpSchema] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain == "" and (
            schema.name not in newest or schema.since_version > newest[schema.name].since_version
        ):
            newest[schema.name] = schema
    rows = []
    for name, schema in sorted(newest.items()):
        # Upsample and Scatter come in through the dialect, and no model here still has them.
        if schema.deprecated:
            continue
        if name in rules:
            rows.append(Coverage(name, schema.since_version, "rule"))
        elif name in expanded:
            rows.append(Coverage(name, schema.since_version, "expanded", "written in older operators first"))
        elif name in constants:
            rows.append(Coverage(name, schema.since_version, "constant", constants[name]))
        else:
            rows.append(Coverage(name, schema.since_version, "none", _REASONS.get(name, "no rule yet")))
    return rows


_REASONS = {
    "ConvInteger": "integers in, integers out: quantize with QuantizeLinear and Conv, or after training",
    "QLinearConv": "integers in, integers out: quantize with QuantizeLinear and Conv, or after training",
    "QLinearMatMul": "integers in, integers out: quantize with QuantizeLinear and MatMul, or after training",
}


def summary() -> str:
    """One line about how much of ONNX can be differentiated."""
    rows = coverage()
    count = {kind: sum(row.kind == kind for row in rows) for kind in _KINDS}
    return (
        f"{len(rows)} ai.onnx operators: {count['rule'] + count['expanded']} differentiable, "
        f"{count['constant']} constant, {count['none']} without a gradient"
    )


def table() -> str:
    """The table in Markdown."""
    lines = ["| operator | newest version | gradient | note |", "|---|---|---|---|"]
    lines += [f"| {row.operator} | {row.since} | {_KINDS[row.kind]} | {row.note} |" for row in coverage()]
    return "\n".join(lines)
