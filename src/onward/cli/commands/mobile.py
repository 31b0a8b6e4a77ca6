"""`onward mobile`: writes projects for Android and iOS that train artifacts on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onward.cli.command import command
from onward.cli.errors import CommandError
from onward.cli.output import Output
from onward.cli.paths import folder_target, plain_prefix
from onward.cli.shared_options import PrefixOption


@command(
    "onward artifacts digits.onnx --loss cross-entropy --portable -o artifacts",
    "onward mobile artifacts -o app --data samples",
)
def mobile(
    output: Output,
    artifacts: Annotated[
        Path, typer.Argument(help="The folder of artifacts, made with --portable.", show_default=False)
    ],
    target: Annotated[Path, typer.Option("--output", "-o", help="The folder to write.")] = Path("app"),
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            metavar="FOLDER",
            help="What the app trains on: for each input a file NAME.bin, its samples one after another.",
        ),
    ] = None,
    prefix: PrefixOption = "",
) -> None:
    """Write projects for Android and iOS that train these artifacts on the device, on stock onnxruntime."""
    from onward.mobile import write_app

    for folder in (artifacts, data):
        if folder is not None and not folder.is_dir():
            raise CommandError(f"no folder '{folder}'", "is the path right?")
    with folder_target(target), output.working("writing the projects"):
        sizes = write_app(artifacts, target, prefix=plain_prefix(prefix), data=data)
    output.sizes(str(target), sizes)
    output.line(f"next: open {target}/android in Android Studio, or {target}/ios/Digits.swiftpm in Xcode")
    output.result({"target": target, "files": sizes})
