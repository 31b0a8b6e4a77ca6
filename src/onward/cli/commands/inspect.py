"""`onward inspect`: summarizes a model, a checkpoint, artifacts or a run."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from onward.cli.command import CommandError, Output, command, examples, human_size
from onward.cli.output_paths import Overwrite, new_file

__all__ = ["register", "render_page"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "inspect",
        epilog=examples(
            "onward inspect model.onnx",
            "onward inspect artifacts --html page.html",
            "onward inspect run",
            "onward inspect artifacts --device cuda      # what would run on the CPU there, and why",
        ),
    )(inspect)


@command
def inspect(
    output: Output,
    path: Annotated[
        Path,
        typer.Argument(help="A model, a checkpoint, or a folder of artifacts or a run.", show_default=False),
    ],
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a page instead.")] = None,
    all_parameters: Annotated[bool, typer.Option("--all", "-a", help="Show every parameter.")] = False,
    prefix: Annotated[str, typer.Option(help="The prefix of the artifacts' file names.")] = "",
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="NAME", help="List the nodes that this device leaves to the CPU."),
    ] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", "-b", min=1, help="With --device.")] = 8,
    overwrite: Overwrite = False,
) -> None:
    """Show what a file or folder holds; checkpoints are verified on the way."""
    from onward.cli.file_contents import describe

    if device is not None:
        _show_host_nodes(output, path, prefix, device, batch_size)
        return
    found = describe(path, prefix=prefix)
    if html is not None:
        from onward.cli.commands.inspect import render_page

        with new_file(html, overwrite=overwrite) as file:
            file.write_text(render_page(found, sections(found)), encoding="utf-8")
    output.result(found)
    if html is not None:
        output.line(f"page: {html}")
        return
    limit = None if all_parameters else 30
    for section in sections(found):
        _show(output, section, limit)


def _show_host_nodes(output: Output, path: Path, prefix: str, device: str, batch_size: int) -> None:
    from onward.cli.data import input_specs
    from onward.cli.samples import random_inputs
    from onward.runtime.devices import find_device
    from onward.runtime.placement import host_nodes
    from onward.runtime.step import TrainingStep

    place = find_device(device)
    if place.kind == "cpu":
        raise CommandError("on the CPU every node runs on the CPU", "name another device: --device cuda")
    model: Any = str(path)
    if path.is_dir():
        model = str(path / f"{prefix}training_model.onnx")
        step = TrainingStep(model, device=place)
        samples = random_inputs(input_specs(model, step.signature.inputs), size=batch_size)
        shapes = {name: array.shape for name, array in samples.items()}
        model, _ = step.prepared(reset=True, shapes=shapes if place.memory == "device" else None)
    nodes = host_nodes(model, place)
    rows = [[node.operator, node.name, node.reason] for node in nodes]
    if rows:
        output.table(f"nodes that {place} leaves to the CPU", ["operator", "name", "why"], rows)
    else:
        output.line(f"every node runs on {place}")
    output.result({"device": str(place), "nodes": [dataclasses.asdict(node) for node in nodes]})


def sections(found: Mapping[str, Any]) -> list[tuple[str, list[str], list[list[Any]]]]:
    """The picture as tables: title, columns, rows. The page is made of the same ones."""
    kind = found["kind"]
    if kind == "model":
        return _model(found)
    if kind == "artifacts":
        tables = [
            table for name, model in found["models"].items() for table in _model(model, name, brief=True)
        ]
        return tables + (_checkpoint(found["checkpoint"]) if found["checkpoint"] else [])
    if kind == "run":
        return _run(found)
    return _checkpoint(found)


def _model(
    found: Mapping[str, Any], title: str = "", *, brief: bool = False
) -> list[tuple[str, list[str], list[list[Any]]]]:
    about = [
        ["role", found["role"]],
        ["size", human_size(found["bytes"])],
        ["operators", f"{sum(found['operators'].values())} nodes, {len(found['operators'])} kinds"],
        ["opset", ", ".join(f"{domain} {version}" for domain, version in found["opsets"].items())],
        ["producer", found["producer"]],
    ]
    if found["external_data"]:
        about.append(["weights in", ", ".join(found["external_data"])])
    tables = [(title or found["path"], ["", ""], about)]
    if not brief:
        tables += [
            (
                "inputs",
                ["name", "type", "shape"],
                [[v["name"], v["type"], _shape(v["shape"])] for v in found["inputs"]],
            ),
            (
                "outputs",
                ["name", "type", "shape"],
                [[v["name"], v["type"], _shape(v["shape"])] for v in found["outputs"]],
            ),
            _parameters(found["parameters"]),
            (
                "operators",
                ["operator", "nodes"],
                [[name, count] for name, count in found["operators"].items()],
            ),
            (
                "metadata",
                ["key", "value"],
                [[k, v if len(v) < 120 else v[:117] + "…"] for k, v in found["metadata"].items()],
            ),
        ]
    return tables


def _checkpoint(found: Mapping[str, Any]) -> list[tuple[str, list[str], list[list[Any]]]]:
    parameters = found["parameters"]
    trained = [p for p in parameters if p["trainable"]]
    about = [
        ["size", human_size(found["bytes"])],
        ["integrity", found["integrity"]],
        ["trainable", f"{sum(p['values'] for p in trained):,} values in {len(trained)} parameters"],
        ["frozen", f"{sum(p['values'] for p in parameters) - sum(p['values'] for p in trained):,} values in "
                   f"{len(parameters) - len(trained)} parameters"],
    ]  # fmt: skip
    tables = [(found["path"], ["", ""], about), _parameters(parameters)]
    groups = found.get("optimizer", [])
    rows = [
        [
            g["group"],
            g["step"],
            f"{g['initial_learning_rate']:g}",
            ", ".join(g["slots"]),
            human_size(g["bytes"]),
        ]
        for g in groups
    ]
    tables.append(("optimizer state", ["group", "step", "initial rate", "slots", "size"], rows))
    tables.append(("properties", ["name", "value"], [[k, v] for k, v in found.get("properties", {}).items()]))
    return tables


def _run(found: Mapping[str, Any]) -> list[tuple[str, list[str], list[list[Any]]]]:
    columns = list(dict.fromkeys(key for row in found["epochs"] for key in row))
    return [
        (
            found["path"],
            ["", ""],
            [["artifacts", found["artifacts"]], *([k, v] for k, v in found["options"].items())],
        ),
        (
            "checkpoints",
            ["file", "step", "size", "integrity"],
            [
                [c["file"], c.get("step") or "", human_size(c["bytes"]), c["integrity"]]
                for c in found["checkpoints"]
            ],
        ),
        (
            "epochs",
            [column.replace("_", " ") for column in columns],
            [
                [f"{row[c]:.4g}" if isinstance(row.get(c), float) else row.get(c, "") for c in columns]
                for row in found["epochs"]
            ],
        ),
    ]


def _parameters(parameters: list[dict[str, Any]]) -> tuple[str, list[str], list[list[Any]]]:
    rows = [
        [p["name"], p["type"], _shape(p["shape"]), human_size(p["bytes"]), "trains" if p["trainable"] else ""]
        for p in parameters
    ]
    return ("parameters", ["name", "type", "shape", "size", ""], rows)


def _shape(dims: list[Any] | None) -> str:
    return "?" if dims is None else f"[{', '.join(str(dim) for dim in dims)}]"


def _show(output: Output, section: tuple[str, list[str], list[list[Any]]], limit: int | None) -> None:
    title, columns, rows = section
    if not rows:
        return
    output.table(title, columns, rows if limit is None else rows[:limit])
    if limit is not None and len(rows) > limit:
        output.line(f"… and {len(rows) - limit} more (--all shows them)")
    output.line("")


_STYLE = """
:root { color-scheme: light dark; --line: #8884; --bar: #2563eb; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.4rem; overflow-wrap: anywhere; } h2 { font-size: 1.05rem; margin: 1.6rem 0 .4rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; }
td, th { padding: .25rem .8rem .25rem 0; text-align: left; border-bottom: 1px solid var(--line);
  overflow-wrap: anywhere; vertical-align: top; }
.bar { height: .55rem; background: var(--bar); border-radius: 3px; min-width: 1px; }
.bars td:last-child { width: 45%; } code { font-size: .95em; }
details { margin: 1rem 0; } summary { cursor: pointer; font-weight: 600; }
"""


def render_page(found: Mapping[str, Any], sections: Iterable[Sequence[Any]]) -> str:
    """The page of what was found in a file, in sections: title, columns and rows."""
    title = html.escape(f"{found['kind']}: {found['path']}")
    body = "".join(_section(*section) for section in sections)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{_STYLE}</style></head><body>
<h1>{title}</h1>
{body}
</body></html>
"""


def _section(title: str, columns: list[str], rows: list[list[Any]]) -> str:
    if not rows:
        return ""
    counts = [row[1] for row in rows] if title == "operators" else []
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    lines = []
    for index, row in enumerate(rows):
        cells = "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row)
        if counts:
            cells += (
                f'<td><div class="bar" style="width:{100 * counts[index] / max(counts):.1f}%"></div></td>'
            )
        lines.append(f"<tr>{cells}</tr>")
    more = "<th></th>" if counts else ""
    shown = f"<thead><tr>{head}{more}</tr></thead>" if any(columns) else ""
    table = f'<table class="{"bars" if counts else ""}">{shown}<tbody>{"".join(lines)}</tbody></table>'
    if len(rows) > 12:
        return f"<details open><summary>{html.escape(title)} ({len(rows)})</summary>{table}</details>"
    return f"<h2>{html.escape(title)}</h2>{table}"
