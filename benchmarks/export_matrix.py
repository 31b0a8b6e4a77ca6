"""Export every architecture and every Hugging Face task of the tables in every way; write docs/architectures.md.

    python benchmarks/export_matrix.py [--only bert,gpt2] [--section torchscript|dynamo|tasks]

Each cell is one call of `onward.export.from_torch` or `from_transformers`, whose parity gate compares the export
with torch at sizes that it was not exported at; the figure is the largest error relative to its tensor. Takes
about fifteen minutes on one core, most of it for the dynamo exporter. Rows that are not run again stay.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnxruntime
import torch
import transformers

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import onward.export.torch.from_torch as front  # noqa: E402
from export.architectures import ARCHITECTURES, Architecture  # noqa: E402
from export.tiny_transformers import tiny_pair  # noqa: E402
from onward.export import from_transformers  # noqa: E402
from onward.export.huggingface import from_transformers as tracing  # noqa: E402

IMPOSSIBLE = {("dynamo", 14), ("dynamo", 17)}
TASKS_NOTE = """Text goes through a tokenizer, alone and in a padded batch; a generator is compared with an
empty cache and with full ones. In `train` columns the model has dropout and no cache, and its parameters
their own names.

"""


# One row each: a tiny configuration of tests/export/tiny_transformers.py, and what it is exported for.
TASKS = (
    *(("bert", task) for task in ("default", "pooling", "question-answering", "text-classification")),
    *(("bert", task) for task in ("token-classification", "fill-mask")),
    ("roberta", "text-classification"),
    ("distilbert", "pooling"),
    ("deberta", "token-classification"),
    *((architecture, "text-generation") for architecture in ("gpt2", "llama", "opt")),
    *((architecture, "text2text") for architecture in ("t5", "bart")),
    *((architecture, "image-classification") for architecture in ("vit", "resnet")),
    *((architecture, "audio-classification") for architecture in ("wav2vec2", "whisper")),
    ("clip", "zero-shot-image-classification"),
)
HEADINGS = {
    "torchscript": '`exporter="torchscript"`',
    "dynamo": '`exporter="dynamo"`',
    "tasks": "Hugging Face tasks, by `from_transformers`",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="architectures, with commas between them")
    parser.add_argument("--section", choices=list(HEADINGS), help="one of the tables; all without it")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "architectures.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    kept = previous(options.output)
    chosen = options.only.split(",") if options.only else None
    tables = []
    reasons = []
    for section in HEADINGS:
        rows = []
        names = [", ".join(row) for row in TASKS] if section == "tasks" else list(ARCHITECTURES)
        for name in names:
            left = options.section not in (None, section)
            if left or (chosen is not None and name.split(",")[0] not in chosen):
                rows += kept.rows.get((section, name), [])
                reasons += kept.reasons.get((section, name), [])
                continue
            axes = [] if section == "tasks" else [axes_of(ARCHITECTURES[name])]
            cells = []
            for training in (True, False):
                for opset in (14, 17, 18, 21):
                    cell, reason = attempt(section, name, training, opset)
                    cells.append(cell)
                    if reason:
                        reasons.append(f"- {section}: {name}: {mode(training)}, opset {opset}: {reason}")
                    print(section, name, mode(training), opset, cell, reason, flush=True)
            rows.append("| " + " | ".join([name, *axes, *cells]) + " |")
        tables.append(table(section, rows))
    options.output.write_text(page(tables, reasons), encoding="utf-8")


@dataclass
class Kept:
    """What the page says already, by section and name."""

    rows: dict[tuple[str, str], list[str]]
    reasons: dict[tuple[str, str], list[str]]


def previous(path: Path) -> Kept:
    kept = Kept({}, {})
    section = None
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        if line.startswith("## "):
            section = next((key for key, heading in HEADINGS.items() if heading == line[3:]), None)
        elif line.startswith("| ") and section is not None:
            kept.rows[section, line.split("|")[1].strip()] = [line]
        elif line.startswith("- ") and line.count(": ") > 2:
            where, name, _ = line[2:].split(": ", 2)
            kept.reasons.setdefault((where, name), []).append(line)
    return kept


def attempt(section: str, name: str, training: bool, opset: int) -> tuple[str, str]:
    """The cell's text, and the reason where it is not a figure."""
    if (section, opset) in IMPOSSIBLE:
        return "–", ""
    started = time.perf_counter()
    try:
        with warnings.catch_warnings():
            if section == "tasks":
                figure, wrong = task_export(*name.split(", "), training=training, opset=opset)
            else:
                warnings.simplefilter("error")  # an axis that the export had to fix is a failure here
                figure, wrong = torch_export(ARCHITECTURES[name], section, training=training, opset=opset)
    except Exception as error:
        return "✗", f"{type(error).__name__}: {str(error).splitlines()[0]}"
    if wrong:
        return "✗", wrong
    print(f"{time.perf_counter() - started:.1f} s", end=" ")
    return f"{figure:.0e}".replace("e-0", "e-"), ""


def torch_export(
    architecture: Architecture, exporter: str, *, training: bool, opset: int
) -> tuple[float, str]:
    args, kwargs = architecture.args()
    with listening() as figures:
        model = front.from_torch(
            architecture.module(), args, kwargs=kwargs, training=training, opset=opset, exporter=exporter
        )
    found = {d.dim_param for value in model.graph.input for d in value.type.tensor_type.shape.dim} - {""}
    if found != architecture.axes:
        return 0.0, f"dynamic axes {sorted(found)}, expected {sorted(architecture.axes)}"
    return figures[-1], lost(architecture.module(), model) if training else ""


def task_export(architecture: str, task: str, *, training: bool, opset: int) -> tuple[float, str]:
    model, tokenizer = tiny_pair(architecture, task)
    with listening() as figures:
        exported = from_transformers((model, tokenizer), task, opset=opset, training=training)
    if not training:
        return figures[-1], ""
    # What the task's outputs do not depend on is not in its graph: the mask vector of spectrogram masking,
    # which is off in an export, and a pooler behind the hidden states.
    unused = ("masked_spec_embed", *(["pooler.dense"] if task in ("default", "pooling") else []))
    return figures[-1], lost(model, onnx.load_from_string(exported), but=unused)


def lost(module: torch.nn.Module, model: onnx.ModelProto, *, but: tuple[str, ...] = ()) -> str:
    names = {tensor.name for tensor in model.graph.initializer}
    wanted = [name for name, _ in module.named_parameters() if not any(part in name for part in but)]
    missing = [name for name in wanted if name not in names]
    return f"parameters not in the graph: {missing}" if missing else ""


@contextmanager
def listening() -> Iterator[list[float]]:
    """The largest relative error of every comparison with torch, as they are made."""
    figures: list[float] = []
    gates = [(front, "compare_with_torch"), (tracing, "_check_parity")]
    originals = [getattr(owner, name) for owner, name in gates]

    def heard(compare):
        def listen(*args, **kwargs):
            report = compare(*args, **kwargs)
            figures.append(report.max_rel)
            return report

        return listen

    for (owner, name), original in zip(gates, originals):
        setattr(owner, name, heard(original))
    try:
        yield figures
    finally:
        for (owner, name), original in zip(gates, originals):
            setattr(owner, name, original)


def axes_of(architecture: Architecture) -> str:
    return ", ".join(sorted(architecture.axes))


def mode(training: bool) -> str:
    return "train" if training else "inference"


def table(section: str, rows: list[str]) -> str:
    columns = [f"{mode(training)} {opset}" for training in (True, False) for opset in (14, 17, 18, 21)]
    first = ["model, task"] if section == "tasks" else ["architecture", "dynamic axes"]
    lines = ["| " + " | ".join([*first, *columns]) + " |", "|" + "---|" * (len(first) + len(columns)), *rows]
    note = TASKS_NOTE if section == "tasks" else ""
    return f"## {HEADINGS[section]}\n\n{note}" + "\n".join(lines) + "\n"


def page(tables: list[str], reasons: list[str]) -> str:
    versions = ", ".join(
        f"{package.__name__} {re.sub('[+].*', '', package.__version__)}"
        for package in (torch, onnx, onnxruntime, transformers)
    )
    failures = "\n".join(reasons) if reasons else "Nothing else failed."
    return f"""# Architectures

Written by `benchmarks/export_matrix.py`; do not edit. {versions}.

Every cell is one export of a small random model with its dropout on, by `onward.export.from_torch` unless said,
compared with torch on fresh inputs at the exported sizes and at two others (dropout neutralised, batch norm
in its mode). The number is the largest error of any output relative to its tensor's largest value; the gate is
1e-5. In `train` columns every parameter is in the graph under its own name. The axes are found by the export itself.

{chr(10).join(tables)}
## Impossible

- `dynamo` below opset 18: its operator library starts there. Use the default exporter.
- Opsets below 14 in any way: BatchNormalization has no training mode there.

## Failures

{failures}
"""


if __name__ == "__main__":
    main()
