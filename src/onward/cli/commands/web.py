"""`onward web`: writes a page that trains artifacts in the browser."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from onward.cli.command import command
from onward.cli.errors import CommandError
from onward.cli.output import Output, human_size
from onward.cli.paths import folder_target, plain_prefix
from onward.cli.run_folder import find_run
from onward.cli.shared_options import PrefixOption, refuse_unused

_PORT = 8000


@command(
    "onward web artifacts site",
    "onward web artifacts site --title 'Teach me digits' --webgpu --serve",
)
def web(
    output: Output,
    artifacts: Annotated[Path, typer.Argument(help="The folder of artifacts.", show_default=False)],
    site: Annotated[Path, typer.Argument(help="The folder to write.")] = Path("site"),
    title: Annotated[
        str | None, typer.Option("--title", help="The title of the page; the folder's name by default.")
    ] = None,
    webgpu: Annotated[
        bool, typer.Option("--webgpu", help="Add the 27 MB that training on WebGPU needs.")
    ] = False,
    prefix: PrefixOption = "",
    packages: Annotated[
        Path | None,
        typer.Option(
            "--packages",
            metavar="FOLDER",
            help="A node_modules folder; looked for, or fetched with npm, by default.",
        ),
    ] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Then serve it on this machine.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where to serve; 0 takes a free one.")] = _PORT,
) -> None:
    """Write a site that trains these artifacts in the browser, on stock onnxruntime-web."""
    from onward.web.site import write_site

    refuse_unused({"--port is for --serve": port != _PORT and not serve})
    run = find_run(artifacts, prefix=plain_prefix(prefix))
    if packages is not None and not packages.is_dir():
        raise CommandError(f"no folder '{packages}'", "name the node_modules folder that npm made")
    # a page begins where its visitors do; who wants to go on with a run converts its checkpoint
    if run.checkpoint != run.artifacts / f"{run.prefix}checkpoint":
        output.note("the page begins with the checkpoint of the artifacts, not with that of the run")
    with folder_target(site), output.working("writing the site"):
        write_site(run.artifacts, site, title=title, prefix=run.prefix, webgpu=webgpu, packages=packages)
    files = {p.relative_to(site).as_posix(): p.stat().st_size for p in sorted(site.rglob("*")) if p.is_file()}
    output.table(str(site), ["files", "", "size"], _summary(files))
    if not serve:
        output.line(f"next: onward web {artifacts} {site} --serve     # or any server of static files")
    # before serving, which ends with Ctrl-C only
    output.result({"site": site, "files": files})
    if serve:
        from onward.web.serving import serve as serve_site

        try:
            serve_site(site, port=port)
        except OSError as error:
            raise CommandError(
                f"port {port} cannot be used: {error.strerror}", "choose another: --port 0 takes a free one"
            ) from error


def _summary(files: Mapping[str, int]) -> list[list[object]]:
    """The parts of a site: how many files each has, and their size."""
    parts: dict[str, list[int]] = {}
    for name, size in files.items():
        folder = name.rpartition("/")[0].split("/")[:2]
        parts.setdefault("/".join(folder) or "the page", []).append(size)
    return [[name, len(sizes), human_size(sum(sizes))] for name, sizes in parts.items()]
