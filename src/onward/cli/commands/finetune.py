"""`onward finetune`: a model of any origin, and data of one's own, in one command."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onward.cli.choices import QuantizeChoice, TrainedChoice, only_our_errors
from onward.cli.command import Output, command
from onward.cli.errors import CommandError
from onward.cli.paths import file_target, folder_target, read_model, require_folder_target, require_new
from onward.cli.shared_options import TaskOption
from onward.cli.task_options import TaskCommand, TaskOptions, given
from onward.escape import first_of

if TYPE_CHECKING:
    from onward.pipeline.finetune import Plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `onward finetune` that all tasks have."""

    model: Annotated[
        Path,
        typer.Argument(
            help="An ONNX file, or a folder: of onward export, Hugging Face or sentence-transformers.",
            show_default=False,
        ),
    ]
    data: Annotated[
        Path,
        typer.Option(
            "--data",
            "-d",
            show_default=False,
            help="A folder of images or WAV files, a table, arrays; for a language model JSON lines.",
        ),
    ]
    target: Annotated[
        Path, typer.Option("--output", "-o", help="Where to write the result.", show_default=False)
    ]
    task: TaskOption = None
    quantize: Annotated[
        QuantizeChoice | None,
        typer.Option(
            "--quantize", help="Train for weights in fewer bits: int8, int8-static, int8-weights, int4."
        ),
    ] = None
    adapters: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER|FILE",
            help="text-generation: write the adapters there too: a folder in peft's format, or FILE.onnx_adapter for "
            "onnxruntime.",
            show_default=False,
        ),
    ] = None
    merge: Annotated[
        bool,
        typer.Option(
            "--merge/--no-merge",
            help="text-generation: add the adapters to the weights, or keep them apart so that they can be swapped.",
        ),
    ] = True
    run: Annotated[
        Path | None,
        typer.Option("--run", metavar="FOLDER", help="Keep checkpoints, history and a report there."),
    ] = None
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --run where it stopped.")
    ] = False
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")] = False


@command(
    "onward finetune model.onnx --data pictures --output mine.onnx     # a classifier",
    "onward finetune smollm --data chat.jsonl --output assistant       # a language model's folder",
    "onward finetune --task image-classification --help                # the options of one task",
    cls=TaskCommand,
)
def finetune(
    output: Output,
    options: Options,
    task_options: TaskOptions,  # type: ignore[valid-type]
) -> None:
    """Fine-tune a model on your own data: the task is found from both, and --task names another."""
    from onward import plan_finetuning

    if not options.model.is_dir():
        read_model(options.model)
    values = given(task_options)
    only_our_errors(values.get("device", "cpu"))
    with _targets(options):
        plan, scheme = _choose_quantization(
            plan_finetuning(options.model, options.data, task=options.task, options=values), options.quantize
        )
        writes_text = plan.task.name == "text-generation"
        _require_fitting(options, plan.task.name, writes_text=writes_text)
        try:
            result = plan.train(
                options.data, output_directory=options.run, progress=not output.silent, resume=options.resume
            )
        except KeyboardInterrupt:
            if options.run is None or not any(options.run.glob("checkpoint-*")):
                raise
            raise KeyboardInterrupt(
                f"stopped, and saved in '{options.run}'; go on with the same command and --resume"
            ) from None
        with output.working("writing"):
            more = {} if options.merge else {"merge": False}
            exported = result.export(options.target, quantize=scheme, **more)
            if options.adapters is not None:
                result.save_adapters(options.adapters)
    for note in getattr(result, "notes", ()):
        output.note(note)
    remark = _advise_on_quantization(getattr(exported, "quantization", None), str(scheme))
    if remark is not None:
        output.note(remark)
    integers = getattr(exported, "integers", None)
    if integers is not None:
        output.note(f"trained for {options.quantize}; {integers}")
    figures = dict(result.metrics)
    output.table("", ["", "value"], [[name, f"{value:.4g}"] for name, value in figures.items()])
    classes = getattr(result, "classes", None)
    if classes is not None:
        output.line(f"classes: {first_of(classes, 40)}")
    output.line(f"next: {_next_command(options.target, writes_text=writes_text)}")
    more = {"adapters": sorted(result.adapters)} if writes_text else {"classes": classes}
    output.result({"path": options.target, "task": plan.task.name, "metrics": figures, **more})


def _choose_quantization(plan: Plan, quantize: QuantizeChoice | None) -> tuple[Plan, str | None]:
    """The plan, which trains for a scheme where its task can, and the scheme that is left for the export."""
    if quantize in list(TrainedChoice) and hasattr(plan.options, "quantize"):
        options = dataclasses.replace(plan.options, quantize=str(quantize))
        return dataclasses.replace(plan, options=options), None
    if quantize is QuantizeChoice.INT8_STATIC:
        raise CommandError(f"{plan.task.name} is not trained for int8-static", "choose int8 or int4")
    return plan, None if quantize is None else str(quantize)


def _require_fitting(options: Options, task: str, *, writes_text: bool) -> None:
    """Refuse options of language models for other tasks, and a file for what is a folder."""
    if not writes_text and (options.adapters is not None or not options.merge):
        name = "--no-merge" if options.adapters is None else "--adapters"
        raise CommandError(f"{name} is no option of {task}", "it is one of text-generation")
    if writes_text and options.target.suffix == ".onnx":
        raise CommandError(
            f"'{options.target}' would be a file, and a language model is a folder", "name a folder"
        )


def _advise_on_quantization(report: Any, scheme: str) -> str | None:
    """A remark where quantization gained nothing: the model is no smaller, or slower on this machine."""
    if report is None:
        return None
    if report.bytes_after > 0.9 * report.bytes_before:
        return f"--quantize {scheme} changed hardly anything: the model has few weights that {scheme} stores"
    if report.speedup < 0.8:
        slower = 1 / report.speedup
        return f"{scheme} is {slower:.1f} times as slow as float on this machine: --quantize int8 may suit it"
    return None


def _next_command(target: Path, *, writes_text: bool) -> str:
    """What one does with the result."""
    if not writes_text:
        return f"onward infer {target} --data YOUR_DATA"
    from onward.errors import ModelError
    from onward.language.chat import read_template

    try:
        read_template(target)
    except ModelError:  # it continues texts, and was never told where a turn ends
        return f'onward infer {target} --prompt "YOUR TEXT"'
    return f"onward chat {target}"


@contextlib.contextmanager
def _targets(options: Options) -> Iterator[None]:
    """Refuse places that cannot be written before anything is trained."""
    model, adapters = options.model, options.adapters
    with contextlib.ExitStack() as stack:
        for path in (options.target, *([] if adapters is None else [adapters])):
            if path.suffix == (".onnx_adapter" if path is adapters else ".onnx"):
                stack.enter_context(file_target(path, overwrite=options.overwrite))
                continue
            require_folder_target(path)
            require_new(path, overwrite=options.overwrite)
            if path.resolve() in (model.resolve(), model.resolve().parent):
                raise CommandError(
                    f"'{path}' is the base's own folder", "choose another, so that the base stays as it is"
                )
            stack.enter_context(folder_target(path))
        yield
