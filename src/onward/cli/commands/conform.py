"""`onward conform`: does a device or a runtime compute what training needs?"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onward.cli.choices import DeviceOption
from onward.cli.command import command
from onward.cli.errors import CommandError
from onward.cli.output import Output
from onward.cli.paths import OverwriteOption, new_file

if TYPE_CHECKING:
    from onward.runtime.separate_process import Run

_WEB, _WEB_PROVIDERS = "onnxruntime-web", {"cpu": "wasm", "webgpu": "webgpu"}
_KINDS = (".json", ".html")


@command(
    "onward conform --device webgpu -o webgpu.json -o webgpu.html",
    "onward conform --runtime reference",
    "onward conform --device openvino --only 'LayerNormalization*'",
)
def conform(
    output: Output,
    device: DeviceOption = "cpu",
    runtime: Annotated[
        str | None,
        typer.Option(
            "--runtime",
            metavar="NAME",
            help="Another runtime than onnxruntime: reference, openvino, or onnxruntime-web in a browser.",
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="PATTERN", help="Operators and networks by name; all by default."),
    ] = None,
    report: Annotated[
        list[Path] | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the report as .json or .html."),
    ] = None,
    overwrite: OverwriteOption = False,
) -> int:
    """Compare operators, gradients and whole training steps with the CPU's; exit code 1 where something is wrong."""
    from onward.conformance import RUNTIMES, check_conformance

    for path in report or ():
        if path.suffix not in _KINDS:
            raise CommandError(f"'{path}' is no report", f"its name ends with {' or '.join(_KINDS)}")
    if runtime not in (None, _WEB, *RUNTIMES):
        raise CommandError(f"no runtime '{runtime}' is known", f"there are {', '.join([*RUNTIMES, _WEB])}")
    if runtime == _WEB and device not in _WEB_PROVIDERS:
        raise CommandError(f"{_WEB} has no device '{device}'", "it has cpu (WebAssembly) and webgpu")
    with ExitStack() as stack:
        # refused before minutes of work, where a file is there
        files = {path: stack.enter_context(new_file(path, overwrite=overwrite)) for path in report or ()}
        run, name, environment = _open_runtime(stack, device, runtime)
        with output.working("comparing"):
            result = check_conformance(
                run, name=name, environment=environment,
                subjects=lambda subject: not only or any(fnmatchcase(subject, pattern) for pattern in only),
            )  # fmt: skip
        if not result.rows:
            raise CommandError(
                f"nothing is called {', '.join(only or ())}", "names stand in the report, as 'Conv*'"
            )
        for path, file in files.items():
            text = result.to_html() if path.suffix == ".html" else result.to_json()
            file.write_text(text, encoding="utf-8")
    output.table(name, ["", "", ""], [[row.subject, row.part, str(row.verdict)] for row in result.rows])
    for form, needed in result.workarounds.items():
        output.line(f"  {form}: {', '.join(needed)}")
    output.line(result.summary())
    for path in files:
        output.line(f"written: {path}")
    output.result(
        {
            "runtime": name,
            "environment": dict(result.environment),
            "passed": result.passed,
            "workarounds": result.workarounds,
            "failures": [f"{row.subject}, {row.part}: {row.verdict}" for row in result.failures],
        }
    )
    return 0 if result.passed else 1


def _open_runtime(stack: ExitStack, device: str, runtime: str | None) -> tuple[Run, str, Mapping[str, str]]:
    """What runs models, its name for the report, and what the report says of where it runs."""
    from onward.conformance import RUNTIMES, device_environment, onnxruntime_on
    from onward.runtime.devices import find_device, is_checked
    from onward.runtime.separate_process import run_separately

    if runtime == _WEB:
        from onward.web.serving import run_in_browser

        provider = _WEB_PROVIDERS[device]
        run, about = stack.enter_context(
            # beside the result, which may be JSON
            run_in_browser(provider, announce=lambda url: typer.echo(f"open {url} in a browser", err=True))
        )
        return run, f"{_WEB}, {provider}", about
    if runtime is not None:
        run = RUNTIMES[runtime]()
        if runtime != "reference":  # of the others an operator may crash the process
            run = stack.enter_context(run_separately(f"onward.conformance:{runtime}"))
        return run, runtime, {}
    chosen = find_device(device)
    run = onnxruntime_on(chosen)
    if is_checked(chosen):
        run = stack.enter_context(run_separately("onward.conformance:onnxruntime_on", str(chosen)))
    return run, f"onnxruntime on {chosen}", device_environment(chosen)
