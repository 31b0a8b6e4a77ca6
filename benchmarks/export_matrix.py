"""Export every architecture of the table in every way, and write docs/architectures.md.

    python benchmarks/export_matrix.py [--only bert,gpt2] [--exporter torchscript]

Each cell is one call of `onward.export.from_torch`, whose parity gate compares the export with torch on fresh
inputs at two sizes that it was not exported at; the figure is the largest error relative to its tensor. Takes
about ten minutes on one core, most of it for the dynamo exporter. Rows that are not run again stay.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
import warnings
from pathlib import Path

import onnx
import onnxruntime
import torch
import transformers

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import onward.export.torch as front  # noqa: E402
from export.architectures import ARCHITECTURES, Architecture  # noqa: E402

OPSETS = {"torchscript": (14, 17, 18, 21), "dynamo": (14, 17, 18, 21)}
IMPOSSIBLE = {("dynamo", 14), ("dynamo", 17)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(ARCHITECTURES))
    parser.add_argument("--exporter", choices=[*OPSETS, "both"], default="both")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "architectures.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    chosen = options.only.split(",")
    kept_rows, reasons = previous(options.output, chosen)
    tables = []
    for exporter in OPSETS:
        rows = []
        for name in ARCHITECTURES:
            if name not in chosen or options.exporter not in (exporter, "both"):
                rows += [kept_rows[exporter, name]] if (exporter, name) in kept_rows else []
                continue
            cells = []
            for training in (True, False):
                for opset in OPSETS[exporter]:
                    cell, reason = attempt(ARCHITECTURES[name], exporter, training, opset)
                    cells.append(cell)
                    if reason:
                        reasons.append(f"- {name}, {exporter}, {mode(training)}, opset {opset}: {reason}")
                    print(name, exporter, mode(training), opset, cell, reason, flush=True)
            rows.append([name, axes_of(ARCHITECTURES[name]), *cells])
        tables.append(table(exporter, rows))
    options.output.write_text(page(tables, reasons), encoding="utf-8")


def previous(path: Path, chosen: list[str]) -> tuple[dict[tuple[str, str], list[str]], list[str]]:
    """The page's rows, and its failures of architectures that are not run again."""
    rows: dict[tuple[str, str], list[str]] = {}
    reasons: list[str] = []
    exporter = ""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        if line.startswith("## "):
            exporter = line.split('"')[1] if '"' in line else ""
        name = line.strip("|- ").split(" ")[0].rstrip(",")
        if exporter and name in ARCHITECTURES:
            rows[exporter, name] = [cell.strip() for cell in line.strip("| ").split("|")]
        elif line.startswith("- ") and name in ARCHITECTURES and name not in chosen:
            reasons.append(line)
    return rows, reasons


def attempt(architecture: Architecture, exporter: str, training: bool, opset: int) -> tuple[str, str]:
    """The cell's text, and the reason where it is not a figure."""
    if (exporter, opset) in IMPOSSIBLE:
        return "–", ""
    figures: list[float] = []
    compare = front.compare_with_torch

    def listening(*args, **kwargs):
        report = compare(*args, **kwargs)
        figures.append(report.max_rel)
        return report

    args, kwargs = architecture.args()
    front.compare_with_torch = listening
    started = time.perf_counter()
    try:
        module = architecture.module()
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # an axis that the export had to fix is a failure here
            model = front.from_torch(
                module, args, kwargs=kwargs, training=training, opset=opset, exporter=exporter
            )
    except Exception as error:
        return "✗", f"{type(error).__name__}: {str(error).splitlines()[0]}"
    finally:
        front.compare_with_torch = compare
    found = {d.dim_param for value in model.graph.input for d in value.type.tensor_type.shape.dim} - {""}
    if found != architecture.axes:
        return "✗", f"dynamic axes {sorted(found)}, expected {sorted(architecture.axes)}"
    names = {tensor.name for tensor in model.graph.initializer}
    lost = [name for name, _ in architecture.module().named_parameters() if training and name not in names]
    if lost:
        return "✗", f"parameters not in the graph: {lost}"
    print(f"{time.perf_counter() - started:.1f} s", end=" ")
    return f"{figures[-1]:.0e}".replace("e-0", "e-"), ""


def axes_of(architecture: Architecture) -> str:
    return ", ".join(sorted(architecture.axes))


def mode(training: bool) -> str:
    return "train" if training else "inference"


def table(exporter: str, rows: list[list[str]]) -> str:
    columns = [f"{mode(training)} {opset}" for training in (True, False) for opset in OPSETS[exporter]]
    lines = ["| architecture | dynamic axes | " + " | ".join(columns) + " |"]
    lines.append("|" + "---|" * (len(columns) + 2))
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return f'## `exporter="{exporter}"`\n\n' + "\n".join(lines) + "\n"


def page(tables: list[str], reasons: list[str]) -> str:
    versions = ", ".join(
        f"{package.__name__} {re.sub('[+].*', '', package.__version__)}"
        for package in (torch, onnx, onnxruntime, transformers)
    )
    failures = "\n".join(reasons) if reasons else "Nothing else failed."
    return f"""# Architectures

Written by `benchmarks/export_matrix.py`; do not edit. {versions}.

Every cell is one export by `onward.export.from_torch` of a small random model with its dropout on, compared
with torch on fresh inputs at the exported sizes and at two others (dropout neutralised, batch norm in its mode).
The number is the largest error of any output relative to its tensor's largest value; the gate is 1e-5. In `train`
columns every parameter is in the graph under its own name. The axes are found by the export itself.

{chr(10).join(tables)}
## Impossible

- `dynamo` below opset 18: its operator library starts there. Use the default exporter.
- Opsets below 14 in any way: BatchNormalization has no training mode there.

## Failures

{failures}
"""


if __name__ == "__main__":
    main()
