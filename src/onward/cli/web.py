"""`onward web`: artifacts to a page that trains in the browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onward.cli.frame import CommandError, Output, command, examples, human_size

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("web", epilog=examples("onward web artifacts site"))(web)


@command
def web(
    output: Output,
    artifacts: Annotated[Path, typer.Argument(help="The folder of artifacts.", show_default=False)],
    site: Annotated[Path, typer.Argument(help="The folder to write.")] = Path("site"),
) -> None:
    """Write a site that trains these artifacts in the browser, on stock onnxruntime-web."""
    if not artifacts.is_dir():
        raise CommandError(f"no folder '{artifacts}'", "make artifacts with: onward artifacts model.onnx")
    from onward.web import write_site

    write_site(artifacts, site)
    files = {str(p.relative_to(site)): p.stat().st_size for p in sorted(site.rglob("*")) if p.is_file()}
    output.table(str(site), ["file", "size"], [[name, human_size(size)] for name, size in files.items()])
    output.line(f"serve it: python -m http.server --directory {site}")
    output.result({"site": site, "files": files})
