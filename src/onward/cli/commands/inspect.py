"""`onward inspect`: summarizes a model, a checkpoint, artifacts or a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from onward.cli.command import command
from onward.cli.errors import CommandError
from onward.cli.output import Output, human_size
from onward.cli.paths import OverwriteOption, new_file
from onward.cli.shared_options import PrefixOption, refuse_unused
from onward.escape import html_text

_BATCH = 8
# a title, columns and rows
Section = tuple[str, list[str], list[list[Any]]]


@command(
    "onward inspect model.onnx",
    "onward inspect artifacts --html page.html",
    "onward inspect run",
    "onward inspect artifacts --device cuda      # what would run on the CPU there, and why",
)
def inspect(
    output: Output,
    path: Annotated[
        Path,
        typer.Argument(help="A model, a checkpoint, or a folder of artifacts or a run.", show_default=False),
    ],
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a page instead.")] = None,
    all_parameters: Annotated[bool, typer.Option("--all", "-a", help="Show every parameter.")] = False,
    prefix: PrefixOption = "",
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="NAME", help="List the nodes that this device leaves to the CPU."),
    ] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", "-b", min=1, help="With --device.")] = _BATCH,
    overwrite: OverwriteOption = False,
) -> None:
    """Show what a file or folder holds; checkpoints are verified on the way."""
    from onward.cli.file_contents import describe

    refuse_unused(
        {
            "--batch-size is for --device": device is None and batch_size != _BATCH,
            "--html is for contents, and --device lists nodes": device is not None and html is not None,
            "--all is for contents, and --device lists nodes": device is not None and all_parameters,
            "--overwrite is for --html": overwrite and html is None,
            "--prefix is for a folder": prefix and path.is_file(),
        }
    )
    if device is not None:
        _show_host_nodes(output, path, prefix, device, batch_size)
        return
    contents = describe(path, prefix=prefix)
    if html is not None:
        # aside first: a page that is open in a browser is never half of one
        with new_file(html, overwrite=overwrite) as file:
            file.write_text(render_page(contents, sections(contents)), encoding="utf-8")
    output.result(contents)
    if html is not None:
        output.line(f"page: {html}")
        return
    # a screen of them; the page shows all
    limit = None if all_parameters else 30
    for section in sections(contents):
        _show(output, section, limit)


def _show_host_nodes(output: Output, path: Path, prefix: str, device: str, batch_size: int) -> None:
    from onward.cli.data import input_specs, random_inputs
    from onward.runtime.devices import find_device
    from onward.runtime.sessions import host_nodes
    from onward.runtime.step import TrainingStep

    chosen = find_device(device)
    if chosen.kind == "cpu":
        raise CommandError("on the CPU every node runs on the CPU", "name another device: --device cuda")
    model: Any = str(path)
    if path.is_dir():
        training = path / f"{prefix}training_model.onnx"
        step = TrainingStep(str(training), device=chosen)
        # the step is specialized to shapes on a device, and other nodes may be left then
        samples = random_inputs(input_specs(training, step.signature.inputs), size=batch_size)
        shapes = {name: array.shape for name, array in samples.items()}
        model, _ = step.prepared(reset=True, shapes=shapes if chosen.memory == "device" else None)
    nodes = host_nodes(model, chosen)
    rows = [[node.operator, node.name, node.reason] for node in nodes]
    if rows:
        output.table(f"nodes that {chosen} leaves to the CPU", ["operator", "name", "why"], rows)
    else:
        output.line(f"every node runs on {chosen}")
    output.result({"device": str(chosen), "nodes": [dataclasses.asdict(node) for node in nodes]})


def sections(contents: Mapping[str, Any]) -> list[Section]:
    """The picture as tables: title, columns, rows. The page is made of the same ones."""
    kind = contents["kind"]
    info = ("what it is for", ["", "", "read from"], [list(fact) for fact in contents.get("info", [])])
    if kind == "folder":
        return [info]
    if kind == "model":
        return [*_model(contents), info]
    if kind == "artifacts":
        tables = [
            table for name, model in contents["models"].items() for table in _model(model, name, brief=True)
        ]
        return [info, *tables, *(_checkpoint(contents["checkpoint"]) if contents["checkpoint"] else [])]
    if kind == "run":
        return [info, *_run(contents)]
    return _checkpoint(contents)


def _model(contents: Mapping[str, Any], title: str = "", *, brief: bool = False) -> list[Section]:
    about = [
        ["role", contents["role"]],
        ["size", human_size(contents["bytes"])],
        ["operators", f"{sum(contents['operators'].values())} nodes, {len(contents['operators'])} kinds"],
        ["opset", ", ".join(f"{domain} {version}" for domain, version in contents["opsets"].items())],
        ["producer", contents["producer"]],
    ]
    if contents["external_data"]:
        about.append(["weights in", ", ".join(contents["external_data"])])
    tables = [(title or contents["path"], ["", ""], about)]
    if not brief:
        metadata = contents["metadata"].items()
        tables += [
            ("inputs", ["name", "type", "shape"], _values(contents["inputs"])),
            ("outputs", ["name", "type", "shape"], _values(contents["outputs"])),
            _parameters(contents["parameters"]),
            ("operators", ["operator", "nodes"], list(map(list, contents["operators"].items()))),
            # settings of a run are long lines: --json shows them whole
            ("metadata", ["key", "value"], [[k, v if len(v) < 120 else v[:117] + "…"] for k, v in metadata]),
        ]
    return tables


def _checkpoint(contents: Mapping[str, Any]) -> list[Section]:
    parameters = contents["parameters"]
    trained = [p for p in parameters if p["trainable"]]
    about = [
        ["size", human_size(contents["bytes"])],
        ["integrity", contents["integrity"]],
        ["trainable", f"{sum(p['values'] for p in trained):,} values in {len(trained)} parameters"],
        ["frozen", f"{sum(p['values'] for p in parameters) - sum(p['values'] for p in trained):,} values in "
                   f"{len(parameters) - len(trained)} parameters"],
    ]  # fmt: skip
    tables = [(contents["path"], ["", ""], about), _parameters(parameters)]
    rows = []
    for group in contents.get("optimizer", []):
        rate, slots = f"{group['initial_learning_rate']:g}", ", ".join(group["slots"])
        rows.append([group["group"], group["step"], rate, slots, human_size(group["bytes"])])
    tables.append(("optimizer state", ["group", "step", "initial rate", "slots", "size"], rows))
    properties = contents.get("properties", {}).items()
    tables.append(("properties", ["name", "value"], list(map(list, properties))))
    return tables


def _run(contents: Mapping[str, Any]) -> list[Section]:
    epochs = contents["epochs"]
    # of all rows: a run that was resumed with another metric has columns that its first epochs lack
    keys = list(dict.fromkeys(key for row in epochs for key in row))
    about = [["artifacts", contents["artifacts"]], *map(list, contents["options"].items())]
    checkpoints = [
        [one["file"], one["step"] or "", human_size(one["bytes"]), one["integrity"]]
        for one in contents["checkpoints"]
    ]
    figures = [
        [f"{row[key]:.4g}" if isinstance(row.get(key), float) else row.get(key, "") for key in keys]
        for row in epochs
    ]
    return [
        (contents["path"], ["", ""], about),
        ("checkpoints", ["file", "step", "size", "integrity"], checkpoints),
        ("epochs", [key.replace("_", " ") for key in keys], figures),
    ]


def _values(values: list[dict[str, Any]]) -> list[list[Any]]:
    return [[value["name"], value["type"], _shape(value["shape"])] for value in values]


def _parameters(parameters: list[dict[str, Any]]) -> Section:
    rows = [
        [p["name"], p["type"], _shape(p["shape"]), human_size(p["bytes"]), "trains" if p["trainable"] else ""]
        for p in parameters
    ]
    return ("parameters", ["name", "type", "shape", "size", ""], rows)


def _shape(dims: list[Any] | None) -> str:
    return "?" if dims is None else f"[{', '.join(str(dim) for dim in dims)}]"


def _show(output: Output, section: Section, limit: int | None) -> None:
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


def render_page(contents: Mapping[str, Any], sections: Iterable[Sequence[Any]]) -> str:
    """The page of what is in a file, in sections: title, columns and rows."""
    title = html_text(f"{contents['kind']}: {contents['path']}")
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
    head = "".join(f"<th>{html_text(column)}</th>" for column in columns)
    lines = []
    for index, row in enumerate(rows):
        cells = "".join(f"<td>{html_text(cell)}</td>" for cell in row)
        if counts:
            cells += (
                f'<td><div class="bar" style="width:{100 * counts[index] / max(counts):.1f}%"></div></td>'
            )
        lines.append(f"<tr>{cells}</tr>")
    more = "<th></th>" if counts else ""
    shown = f"<thead><tr>{head}{more}</tr></thead>" if any(columns) else ""
    table = f'<table class="{"bars" if counts else ""}">{shown}<tbody>{"".join(lines)}</tbody></table>'
    if len(rows) > 12:
        return f"<details open><summary>{html_text(title)} ({len(rows)})</summary>{table}</details>"
    return f"<h2>{html_text(title)}</h2>{table}"
