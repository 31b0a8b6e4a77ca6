"""`onward export`: a PyTorch module or a Hugging Face model to ONNX."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from onward.cli.choices import QuantizeChoice
from onward.cli.command import command
from onward.cli.errors import CommandError
from onward.cli.output import Output
from onward.cli.paths import OverwriteOption, file_target, folder_target, refuse_strangers
from onward.cli.python_entry import import_entry, is_entry
from onward.cli.shared_options import refuse_unused


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `onward export`."""

    source: Annotated[
        str,
        typer.Argument(
            help="module:function that returns a torch module and example inputs, or a Hugging Face folder or id.",
            show_default=False,
        ),
    ]
    target: Annotated[
        Path, typer.Option("--output", "-o", metavar="PATH", help="The file or folder to write.")
    ]
    task: Annotated[str, typer.Option(help="Hugging Face: the task; 'auto' reads the configuration.")] = (
        "auto"
    )
    training: Annotated[
        bool | None,
        typer.Option(
            "--training/--inference",
            help="Keep dropout and batch norm as they train (the default for torch).",
        ),
    ] = None
    artifacts: Annotated[
        bool, typer.Option("--artifacts", help="Hugging Face: write training artifacts with the task's loss.")
    ] = False
    quantize: Annotated[
        QuantizeChoice | None, typer.Option(help="Hugging Face: store weights in fewer bits.")
    ] = None
    pooling: Annotated[str | None, typer.Option(help="Hugging Face: mean, cls or max.")] = None
    opset: Annotated[int | None, typer.Option(help="The ONNX opset.")] = None
    check: Annotated[bool, typer.Option("--check/--no-check", help="Compare outputs with torch's.")] = True
    overwrite: OverwriteOption = False


@command(
    "onward export my_model:build --output model.onnx",
    "onward export ./all-MiniLM-L6-v2 --task pooling --output minilm --quantize int8",
    "onward export ./bert --task text-classification --artifacts --output artifacts",
)
def export(output: Output, options: Options) -> None:
    """Export a model to ONNX, its outputs compared with the original's."""
    source, target, artifacts = options.source, options.target, options.artifacts
    if not is_entry(source):
        # a mistyped path has the form of an id on the hub: without this it would be looked up there
        _require_folder(source)
    opset: dict[str, Any] = {} if options.opset is None else {"opset": options.opset}
    _refuse_options_of_others(options)
    # the bars of other libraries would run through ours, and through pipes
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    # a torch module has no configuration or tokenizer to go beside it
    one_file = is_entry(source) or (target.suffix == ".onnx" and not artifacts)
    if not one_file and target.is_dir():
        names = [path.name for path in target.iterdir() if not path.name.startswith(".")]
        refuse_strangers(
            target,
            names,
            ours="training_model.onnx" if artifacts else "onward.json",
            overwrite=options.overwrite,
        )
    # before the long part: a path that cannot be written shows now
    reserved = file_target(target, overwrite=options.overwrite) if one_file else folder_target(target)
    with reserved, output.working("exporting and comparing"):
        if is_entry(source):
            _from_torch(source, target, training=options.training is not False, check=options.check, **opset)
        elif artifacts:
            from onward.export import artifacts_from_transformers

            artifacts_from_transformers(source, options.task, target, pooling=options.pooling, **opset)
        else:
            from onward.export import from_transformers

            from_transformers(
                source, options.task, target, quantize=False if options.quantize is None else str(options.quantize),
                training=bool(options.training), pooling=options.pooling, check=options.check, **opset,
            )  # fmt: skip
    files = sorted(target.iterdir()) if target.is_dir() else [target]
    sizes = {file.name: file.stat().st_size for file in files if file.is_file()}
    output.sizes(str(target), sizes)
    output.result({"path": target, "files": sizes})


def _refuse_options_of_others(options: Options) -> None:
    """Refuse options of Hugging Face models for torch modules, and those of models for artifacts."""
    quantize, artifacts = options.quantize, options.artifacts
    # an export has no data to take ranges from
    if quantize is QuantizeChoice.INT8_STATIC:
        raise CommandError("int8-static needs data", "use it with onward deploy, or choose int8")
    if is_entry(options.source):
        if quantize or artifacts:
            raise CommandError(
                "--quantize and --artifacts are for Hugging Face models",
                "for torch: onward artifacts on the exported file, onward deploy --quantize after training",
            )
        refuse_unused(
            {
                "--task is for Hugging Face models": options.task != "auto",
                "--pooling is for Hugging Face models": options.pooling is not None,
            }
        )
    if artifacts:
        # the files that train are float, have no other form, and are compared when they are made
        refuse_unused(
            {
                "--quantize is for a model, and --artifacts are to be trained": quantize is not None,
                "--training is for a model, and --artifacts are always of one that trains": options.training
                is not None,
                "--no-check is for a model without --artifacts": not options.check,
            }
        )


def _require_folder(source: str) -> None:
    """Refuse what is neither a folder nor can be the name of a model on the Hugging Face hub."""
    path = Path(source)
    if path.is_dir():
        return
    module = re.match(r"^(.*?)(?:\.py)?:([A-Za-z_]\w*)$", source)
    if module:
        name = Path(module[1]).name
        raise CommandError(
            f"'{source}' is not module:function", f"go to the module's folder and write {name}:{module[2]}"
        )
    if path.exists():
        raise CommandError(
            f"'{source}' is a file", "export takes module:function, or the folder of a Hugging Face model"
        )
    if not re.match(r"^[\w][\w.-]*(/[\w][\w.-]*)?$", source):
        raise CommandError(f"no folder '{source}'", "is the path right?")


def _from_torch(entry: str, target: Path, **options: Any) -> None:
    pair = import_entry(entry)
    # a module is callable too, and calling it would run it
    pair = pair() if callable(pair) and not hasattr(pair, "forward") else pair
    if not isinstance(pair, tuple) or len(pair) != 2 or not hasattr(pair[0], "forward"):
        raise CommandError(
            f"'{entry}' must return (module, example inputs)", "for example: return Net(), torch.randn(2, 3)"
        )
    from onward.export import from_torch  # after what may fail: it imports torch

    model, args = pair
    from_torch(model, args, target, **options)
