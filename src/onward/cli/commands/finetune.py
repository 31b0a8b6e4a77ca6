"""`onward finetune`: a model of any origin, and data of one's own, in one command."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from onward.cli.choices import QuantizeChoice, TrainedChoice, only_our_errors
from onward.cli.command import command
from onward.cli.errors import CommandError
from onward.cli.output import Output, human_size
from onward.cli.paths import file_target, folder_target, read_model, require_folder_target, require_new
from onward.cli.shared_options import TaskOption, parse_rate
from onward.escape import first_of
from onward.tasks import OPTIONS, find_task
from onward.tasks.check_options import Option, OptionError, fields_of, parts_of

if TYPE_CHECKING:
    from onward.pipeline.finetune import Plan


# --- The options of tasks on the command line: one of each name in any task's dataclass.
#
# Until the model and the data are read nobody knows the task, so a command takes them all and the task refuses those
# that are not its own. Help for one task shows its options alone, with its defaults.

_FLAGS = frozenset({"lora"})  # options that are more than a flag in Python


class TaskCommand(TyperCommand):
    """A command with the options of all tasks, whose help with --task shows those of one."""

    _help_task: str | None = None

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read --task before the rest where help is wanted: options are shown in the order they are read."""
        words = [part for argument in args for part in argument.split("=", 1)]
        if {"--help", "-h"} & set(args) and "--task" in words[:-1]:
            try:
                self._help_task = find_task(words[words.index("--task") + 1]).name
            except OptionError as error:
                wrong = typer.BadParameter(str(error))
                wrong.hint = error.hint  # type: ignore[attr-defined]
                raise wrong from error
        return super().parse_args(ctx, args)

    def get_params(self, ctx: Any) -> list[Any]:
        """All parameters, or those that one task has, with its defaults."""
        parameters = super().get_params(ctx)
        if self._help_task is None:
            return parameters
        own = fields_of(OPTIONS[self._help_task])
        shown = []
        for parameter in parameters:
            if parameter.name in own:
                parameter: Any = copy.copy(parameter)
                field, _, option = own[parameter.name]
                parameter.help, parameter.default = option.help, _shown(field.default)
            elif parameter.name in ALL_OPTIONS or (
                # they name and place adapters of language models
                parameter.name in ("adapters", "merge") and self._help_task != "text-generation"
            ):
                continue
            shown.append(parameter)
        return shown


def _shown(default: Any) -> Any:
    return None if isinstance(default, bool) or default in (None, (), "data") else default


def _annotation(name: str, kind: Any, option: Option) -> Any:
    """An option of the command line for a field, which is None where it is not given."""
    parts = parts_of(kind)
    choices = [
        choice for part in parts for choice in typing.get_args(part) if typing.get_origin(part) is Literal
    ]
    names = (f"--{name.replace('_', '-')}", *option.flags)
    settings: dict[str, Any] = {"help": option.help + _defaults(name), "metavar": option.metavar}
    if kind is bool or name in _FLAGS:
        return Annotated[bool, typer.Option(*names, help=settings["help"])]
    if "auto" in choices:
        return Annotated[str | None, typer.Option(*names, parser=parse_rate, **settings)]
    if any(typing.get_origin(part) is Sequence for part in parts) and str not in parts:
        return Annotated[list[str] | None, typer.Option(*names, **settings)]
    if choices:
        settings["metavar"] = option.metavar or "|".join(map(str, _choices(name)))
    value = next((part for part in parts if part in (int, float, Path) and str not in parts), str)
    if value in (int, float):
        settings |= {"min": option.least, "max": option.most}
    return Annotated[value | None, typer.Option(*names, **settings)]


def _choices(name: str) -> list[Any]:
    """The values of an option in all tasks."""
    kinds = [fields_of(options)[name][1] for options in OPTIONS.values() if name in fields_of(options)]
    parts = [
        part
        for kind in kinds
        for part in (kind, *typing.get_args(kind))
        if typing.get_origin(part) is Literal
    ]
    return list(dict.fromkeys(choice for part in parts for choice in typing.get_args(part)))


def _defaults(name: str) -> str:
    """The default of an option, and those of tasks that have another; for the help."""
    by_value: dict[Any, list[str]] = {}
    for task, options in OPTIONS.items():
        if name in fields_of(options):
            by_value.setdefault(_shown(fields_of(options)[name][0].default), []).append(task)
    if set(by_value) == {None} or len(by_value) > 2:
        return ""
    most = max(by_value, key=lambda value: len(by_value[value]))
    others = [
        f"{', '.join(tasks)} {value}"
        for value, tasks in by_value.items()
        if value != most and value is not None
    ]
    words = [*([] if most is None else [str(most)]), *others]
    return (
        f" Default: {'; '.join(words)}."
        if "Default" not in fields_of(OPTIONS[by_value[most][0]])[name][2].help
        else ""
    )


def _fields() -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for options in OPTIONS.values():
        for name, (_, kind, option) in fields_of(options).items():
            if not option.python and name not in fields:
                fields[name] = _annotation(name, kind, option)
    return fields


def _unset(kind: Any) -> bool | None:
    """The value of an option that is not given; a flag has two values only."""
    return False if typing.get_args(kind)[0] is bool else None


ALL_OPTIONS = _fields()
TaskOptions = dataclasses.make_dataclass(
    "TaskOptions",
    [(name, kind, dataclasses.field(default=_unset(kind))) for name, kind in ALL_OPTIONS.items()],
    frozen=True,
)


def given(options: Any) -> dict[str, Any]:
    """The options that the user gave, on the command line or in a config file."""
    return {
        name: value for name, value in vars(options).items() if value not in (None, []) and value is not False
    }


# --- The command.


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
        writes_text = plan.task.kind == "lines"
        _require_fitting(options, plan.task.name, writes_text=writes_text)
        if scheme is not None and writes_text and plan.task.name != "text-generation":
            _require_plain_decoder(options.model)
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
    comparison = {} if options.quantize is None else _show_quantization(output, options, result, exported)
    figures = dict(result.metrics)
    output.table("", ["", "value"], [[name, f"{value:.4g}"] for name, value in figures.items()])
    classes = getattr(result, "classes", None)
    if classes is not None:
        output.line(f"classes: {first_of(classes, 40)}")
    output.line(f"next: {_next_command(options.target, plan.task.name)}")
    more = {"adapters": sorted(result.adapters)} if writes_text else {"classes": classes}
    output.result({"path": options.target, "task": plan.task.name, "metrics": figures, **comparison, **more})


def _show_quantization(output: Output, options: Options, result: Any, exported: Any) -> dict[str, Any]:
    """Say what fewer bits changed: of a model that was trained for them, or that was quantized after training."""
    integers = getattr(exported, "integers", None)
    if integers is not None:
        output.note(f"trained for {options.quantize}; {integers}")
    report = getattr(exported, "quantization", None)
    remark = _advise_on_quantization(report, str(options.quantize))
    if remark is not None:
        output.note(remark)
    changes = result.compare_with_float(options.target) if hasattr(result, "compare_with_float") else {}
    if not changes:
        behind = "" if report is None else f": {report}"
        output.note(f"{options.quantize}: quantized after training, not trained for{behind}")
        return {} if report is None else {"quantization": report.to_dict()}
    rows = [
        [name, *(human_size(int(value)) if name == "bytes" else f"{value:.4g}" for value in values)]
        for name, values in changes.items()
    ]
    output.table("", ["", "float", str(options.quantize)], rows)
    return {"before": {name: values[0] for name, values in changes.items()},
            "after": {name: values[1] for name, values in changes.items()}}  # fmt: skip


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
    # of all models that write, a decoder alone has adapters that stand apart
    if task != "text-generation" and (options.adapters is not None or not options.merge):
        name = "--no-merge" if options.adapters is None else "--adapters"
        raise CommandError(f"{name} is no option of {task}", "it is one of text-generation")
    if writes_text and options.target.suffix == ".onnx":
        raise CommandError(
            f"'{options.target}' would be a file, and a language model is a folder", "name a folder"
        )


def _require_plain_decoder(model: Path) -> None:
    """Refuse a decoder of two branches before it is trained: weights inside of branches cannot be quantized."""
    merged = next(iter(sorted(model.rglob("decoder_model_merged*.onnx"))), None) if model.is_dir() else None
    if merged is not None:
        raise CommandError(
            f"'{merged}' has its weights in branches, which --quantize does not look into",
            "leave --quantize away, or give a folder with decoder_model.onnx and decoder_with_past_model.onnx",
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


def _next_command(target: Path, task: str) -> str:
    """What one does with the result."""
    if task == "text2text":
        return f'onward infer {target} --text "YOUR TEXT"'
    if task != "text-generation":
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
