"""`onward infer`: the outputs of a model on data, printed, written or drawn."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onward.cli.choices import DeviceOption
from onward.cli.command import command
from onward.cli.errors import CommandError
from onward.cli.output import Output
from onward.cli.paths import OverwriteOption, folder_target, new_file, read_model, require_new
from onward.cli.run_folder import export_run, find_run
from onward.cli.shared_options import (
    BatchSizeOption,
    DataOption,
    Generation,
    LabelOption,
    MapOption,
    parse_pairs,
    refuse_unused,
)
from onward.escape import csv_cell, printable
from onward.files import scratch_folder, write_set

if TYPE_CHECKING:
    import numpy as np

    from onward.data.read import DataOptions
    from onward.info.model_info import ModelInfo

# samples or pictures whose answers are printed
_SHOWN = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `onward infer`, but for those of text that a model writes."""

    model: Annotated[
        Path,
        typer.Argument(
            help="An ONNX file, a run, or a folder that `onward export` wrote.", show_default=False
        ),
    ]
    data: DataOption = None
    text: Annotated[
        list[str] | None, typer.Option("--text", "-t", help="Text, for a folder of `onward export`.")
    ] = None
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", help="Text that a language model is to continue.")
    ] = None
    answers: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the outputs as .npz or .csv.")
    ] = None
    outputs: Annotated[list[str] | None, typer.Option("--outputs", metavar="NAME", help="Only these.")] = None
    mapping: MapOption = None
    label: LabelOption = None
    batch_size: BatchSizeOption = 256
    device: DeviceOption = "cpu"
    top_k: Annotated[
        int | None,
        typer.Option(
            "--top-k", "-k", min=1, help="So many labels for each sample; of text, draw from so many words."
        ),
    ] = None
    save: Annotated[
        Path | None,
        typer.Option("--save", metavar="FOLDER", help="Boxes, masks: write the images with them drawn in."),
    ] = None
    overwrite: OverwriteOption = False


@command(
    "onward infer model.onnx --data images.npz --output answers.npz",
    "onward infer detector.onnx --data pictures --save drawn     # boxes and masks on the images",
    'onward infer ./minilm --text "some text"       # a folder that onward export wrote',
    'onward infer smollm --prompt "Once upon a time" --max-new-tokens 50',
)
def infer(output: Output, options: Options, generation: Generation) -> None:
    """Run a model on data and print, or write, its outputs."""
    model, answers = options.model, options.answers
    if options.prompt:
        if options.text or options.data or answers is not None:
            raise CommandError(
                "--prompt goes without --text, --data and --output", "ask for one after the other"
            )
        _refuse_data_options(options, "data, and --prompt is none")
        _continue_prompts(output, options, options.prompt, generation)
        return
    if generation != Generation():
        raise CommandError("the options of text are for --prompt", "give a --prompt, or leave them away")
    if answers is not None and answers.suffix not in (".npz", ".csv"):
        raise CommandError(f"'{answers}' must end in .npz or .csv", "choose one of them")
    if options.text:
        if options.data or answers is not None:
            raise CommandError("--text goes without --data and --output", "ask for one after the other")
        if options.device != "cpu":
            raise CommandError(
                "--text runs on the CPU", "leave --device away, or give the tokens with --data"
            )
        _refuse_data_options(options, "data, and --text is none")
        refuse_unused({"--top-k is for --data and --prompt": options.top_k})
        _answer_texts(output, model, options.text)
        return
    if options.data and answers is None and options.outputs is None and _writes_down_speech(model):
        _refuse_data_options(options, "arrays, and this model takes sounds")
        _answer_texts(output, model, [str(path) for path in options.data])
        return
    if answers is None and options.outputs is None and _answers_on_pictures(model):
        refuse_unused(
            {
                "--map is for arrays, and this model answers pictures": options.mapping,
                "--label is for tables, and this model answers pictures": options.label,
                "--top-k is for classes, and this model finds things in pictures": options.top_k,
                "--batch-size is for arrays, and this model takes picture by picture": options.batch_size
                != Options.batch_size,
            }
        )
        _answer_pictures(output, model, options.data, options.save, overwrite=options.overwrite)
        return
    if options.save is not None:
        raise CommandError("--save draws boxes and masks, and this model has none", "leave it away")
    with contextlib.ExitStack() as stack:
        # refused before minutes of work, where a file is there
        file = (
            None if answers is None else stack.enter_context(new_file(answers, overwrite=options.overwrite))
        )
        result = _run_model(output, options)
        if file is not None:
            _write_answers(file, result)
    _report(output, options, result)


def _refuse_data_options(options: Options, why: str) -> None:
    refuse_unused(
        {
            f"--outputs is for {why}": options.outputs,
            f"--map is for {why}": options.mapping,
            f"--label is for {why}": options.label,
            f"--batch-size is for {why}": options.batch_size != Options.batch_size,
            "--save draws boxes and masks on pictures": options.save,
            "--overwrite is for --output and --save": options.overwrite,
        }
    )


@dataclasses.dataclass(frozen=True)
class _Result:
    """The outputs of a model, and for each sample the file that it came from and its likeliest labels, if any."""

    outputs: dict[str, np.ndarray]
    files: list[str]
    labels: list[list[dict[str, Any]]] | None
    # whether each sample may have several labels, all of which hold
    together: bool

    @property
    def answers(self) -> list[list[dict[str, Any]]] | None:
        """The labels that hold, or the likeliest alone."""
        if self.labels is None or self.together:
            return self.labels
        return [best[:1] for best in self.labels]


def _report(output: Output, options: Options, result: _Result) -> None:
    arrays, labels, files = result.outputs, result.labels, result.files
    samples = len(next(iter(arrays.values())))
    shapes = {name: list(array.shape) for name, array in arrays.items()}
    document: dict[str, Any] = {"samples": samples, "outputs": shapes, "file": options.answers}
    if options.answers is not None:
        output.line(f"{options.answers}: " + ", ".join(f"{name} {shape}" for name, shape in shapes.items()))
    else:
        document["values"] = arrays
        if labels is not None:
            _show_labels(output, labels, files)
        else:
            for name, array in arrays.items():
                rows = [[index, _short(row)] for index, row in enumerate(array[:10])]
                output.table(f"{name} {list(array.shape)}", ["sample", "value"], rows)
    if labels is not None:
        several = result.together or (options.top_k or 1) > 1
        document["labels"] = labels if several else [best[0] for best in labels]
    if files:
        document["files"] = files
    output.result(document)


def _show_labels(output: Output, labels: list[list[dict[str, Any]]], files: list[str]) -> None:
    width = max(map(len, labels), default=0) or 1
    rows = []
    for index, best in enumerate(labels[:_SHOWN]):
        cells = [f"{one['label']} {one['score']:.1%}" for one in best]
        rows.append([files[index] if files else index, *cells, *[""] * (width - len(best))])
    title = "1 sample" if len(labels) == 1 else f"{len(labels)} samples"
    output.table(title, ["sample", "label", *[""] * (width - 1)], rows)
    if len(labels) > _SHOWN:
        output.line(f"and {len(labels) - _SHOWN} more: --output answers.csv writes all")


def _continue_prompts(output: Output, options: Options, prompts: list[str], generation: Generation) -> None:
    """What a language model writes after each prompt."""
    pipeline = generation.load(options.model)
    settings = generation.settings(top_k=options.top_k, max_new_tokens=128)
    if len(prompts) == 1 and not output.silent:
        texts, before = [""], prompts[0]  # not shown before it was accepted
        for piece in pipeline.stream(prompts[0], **settings):
            print(printable(f"{before}{piece}"), end="", flush=True)
            texts[0] += piece
            before = ""
        print(printable(before), flush=True)
    else:
        texts = pipeline(prompts, **settings)
        for prompt, text in zip(prompts, texts):
            output.line(f"{prompt}{text}")
    output.result({"prompts": prompts, "texts": texts})


def _answer_texts(output: Output, folder: Path, texts: list[str]) -> None:
    from onward import load

    if not folder.is_dir() and not _reads_texts(folder):
        raise CommandError(
            f"--text needs a folder that `onward export` wrote, or a model that was trained on texts, not '{folder}'",
            "or use --data",
        )
    pipeline: Any = load(folder)
    answers = [pipeline(text) for text in texts]
    for text, answer in zip(texts, answers):
        output.line(f"{text!r}: {_short(answer)}")
    output.result({"task": getattr(pipeline, "task", "text-classification"), "answers": answers})


def _writes_down_speech(model: Path) -> bool:
    from onward.hub.read_info import read_info

    return model.is_dir() and read_info(model).task == "automatic-speech-recognition"


def _reads_texts(model: Path) -> bool:
    from onward.hub.read_info import read_info

    done = read_info(model).preprocessing
    return done is not None and done.kind == "text"


def _choose_labels(
    arrays: dict[str, np.ndarray], info: ModelInfo, top_k: int | None
) -> list[list[dict[str, Any]]] | None:
    """The likeliest classes of every sample, where the model has classes and its first output scores them.

    Of a model whose labels may hold together, those that hold, unless `top_k` says how many.
    """
    from onward.tasks.classifier import answer_labels, choose_labels

    scores = next(iter(arrays.values()))
    if info.labels is None or info.is_regression or scores.ndim != 2 or scores.shape[1] != len(info.labels):
        return None
    answers = answer_labels(scores, info, top_k=None)
    if info.is_multi_label and top_k is None:
        return [choose_labels(answer) for answer in answers]
    return [answer[: top_k or 1] for answer in answers]


def _run_model(output: Output, options: Options) -> _Result:
    import numpy as np

    from onward.cli.data import input_specs, load_data
    from onward.hub.read_info import read_info
    from onward.runtime.devices import find_device
    from onward.runtime.sessions import open_session

    device = find_device(options.device)
    with scratch_folder() as folder:
        path, reading = _find_model(options, folder)
        read_model(path)
        info = read_info(path)
        if reading is None:
            reading = _own_reading(path, options, info)
        session = open_session(path, providers=device.providers())
        names = _choose_names(options.outputs, [value.name for value in session.get_outputs()])
        loaded = load_data(options.data or (), input_specs(path), reading)
        for note in loaded.notes:
            output.note(note)
        if not loaded.arrays:
            raise CommandError("infer takes files, not a function", "save the inputs as .npz")
        size = options.batch_size
        parts = [
            session.run(
                names, {n: np.asarray(array[start : start + size]) for n, array in loaded.arrays.items()}
            )
            for start in output.track(range(0, loaded.samples or 0, size), "inference")
        ]
    outputs = {
        name: np.concatenate([np.atleast_1d(np.asarray(part[i])) for part in parts])
        for i, name in enumerate(names)
    }
    files = next((array.files for array in loaded.arrays.values() if hasattr(array, "files")), [])
    return _Result(
        outputs,
        [str(file) for file in files],
        _choose_labels(outputs, info, options.top_k),
        together=info.is_multi_label and options.top_k is None,
    )


def _choose_names(named: list[str] | None, outputs: list[str]) -> list[str]:
    """The outputs that were named, each of which must be there, or all."""
    for name in named or ():
        if name not in outputs:
            near = difflib.get_close_matches(name, outputs, n=1)
            raise CommandError(
                f"the model has no output '{name}'",
                f"did you mean '{near[0]}'?" if near else f"it has {', '.join(outputs)}",
            )
    return list(dict.fromkeys(named or outputs))


def _find_model(options: Options, scratch: Path) -> tuple[Path, DataOptions | None]:
    """The model's file, and how its data is read where that is a run, which is exported into a scratch folder."""
    model = options.model
    if not model.is_dir():
        return model, None
    if (model / "model.onnx").is_file():
        return model / "model.onnx", None
    run = find_run(model)
    reading = run.data_options(mapping=options.mapping, label=options.label)
    return export_run(run, scratch / "model.onnx", options.outputs), reading


def _own_reading(model: Path, options: Options, info: ModelInfo) -> DataOptions:
    """How data is read for a model file, as it says itself."""
    from onward.data.read import DataOptions
    from onward.tasks.classifier import find_tokenizer_of

    preprocessing = info.preprocessing
    reads_texts = preprocessing is not None and preprocessing.kind == "text"
    return DataOptions(
        mapping=parse_pairs(options.mapping or (), "--map"),
        label=options.label,
        classes=info.class_names,
        preprocessing=preprocessing,
        tokenizer=find_tokenizer_of(model, info) if reads_texts else None,
    )


def _write_answers(path: Path, result: _Result) -> None:
    """Write .npz, or .csv with a row for each sample."""
    import numpy as np

    # of several labels a cell as training data has it
    answers = [
        ["|".join(str(one[key]) for one in answer) for key in ("label", "score")]
        for answer in result.answers or ()
    ]
    arrays: dict[str, Any] = result.outputs
    files = result.files
    if path.suffix == ".npz":
        if answers:
            arrays = {**arrays, "label": arrays.get("label", np.asarray([label for label, _ in answers]))}
        np.savez(path, **arrays)
        return
    flat = {name: array.reshape(len(array), -1) for name, array in arrays.items()}
    header = [
        name if array.shape[1] == 1 else f"{name}_{index}"
        for name, array in flat.items()
        for index in range(array.shape[1])
    ]
    if files:
        header.insert(0, "file")
    if answers:
        header += ["label", "probability"]
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(map(csv_cell, header))
        for index, row in enumerate(np.concatenate(list(flat.values()), axis=1).tolist()):
            cells = [*files[index : index + 1], *row, *(answers[index] if answers else ())]
            writer.writerow(map(csv_cell, cells))


def _short(value: Any) -> str:
    import numpy as np

    if isinstance(value, np.ndarray):
        return np.array2string(value, precision=4, threshold=16, edgeitems=4, max_line_width=10**6)
    return str(value)


# ---- what is in pictures: boxes and masks, printed and drawn; lines of text, printed -------------------


def _answers_on_pictures(model: Path) -> bool:
    """Whether a model's answers are what is in pictures: boxes, masks or a line of text."""
    from onward.hub.read_info import read_info
    from onward.tasks import TASKS

    if not model.is_file():
        return False
    task = TASKS.get(read_info(model).task or "")
    return task is not None and task.kind in ("scene", "lettering")


def _answer_pictures(
    output: Output, model: Path, data: list[str] | None, save: Path | None, *, overwrite: bool
) -> None:
    """Print what a model finds in pictures; with `save`, write the pictures with it drawn into a folder."""
    from onward import load

    detector: Any = load(model)
    if save is not None and not hasattr(detector, "draw"):
        raise CommandError("--save draws boxes and masks, and this model reads text", "leave it away")
    files = _pictures(data)
    answers = [detector(file) for file in output.track(files, "inference")]
    if save is not None:
        _draw(detector, files, save, overwrite=overwrite)
    rows = [[str(file), *_cells(answer)] for file, answer in zip(files[:_SHOWN], answers)]
    output.table(f"{len(files)} images", ["image", "", "what is in it"], rows)
    if save is not None:
        output.line(f"{save}: {len(files)} images")
    output.result({"samples": len(files), "files": list(map(str, files)), "answers": answers, "saved": save})


def _cells(answer: Any) -> list[Any]:
    """An answer in two cells: a text with its score, or how many objects there are and which."""
    if isinstance(answer, dict):
        return [f"{answer['score']:.0%}", printable(answer["text"])]
    return [len(answer), printable(", ".join(map(_words, answer[:8])))]


def _words(answer: dict[str, Any]) -> str:
    if answer["score"] is None:  # a mask says how much of the picture it covers
        return f"{answer['label']} {(answer['mask'] > 0).mean():.0%}"
    return f"{answer['label']} {answer['score']:.0%}"


def _pictures(data: list[str] | None) -> list[Path]:
    from onward.data.images import PICTURES
    from onward.data.layouts import files_in
    from onward.data.sound import SOUNDS

    if not data:
        raise CommandError("no data was given", "name it with --data: an image, or a folder of images")
    # readers read what is said, too
    suffixes = PICTURES | SOUNDS
    files = []
    for name in data:
        path = Path(name)
        if not path.exists():
            raise CommandError(f"no data at '{path}'", "is the path right?")
        files += (
            files_in(path, suffixes) if path.is_dir() else [path] if path.suffix.lower() in suffixes else []
        )
    if not files:
        raise CommandError(f"no image in {', '.join(data)}", "name an image, or a folder of images")
    return files


def _draw(detector: Any, files: list[Path], save: Path, *, overwrite: bool) -> None:
    """All pictures, or none where one cannot be drawn; two of one name do not replace each other."""
    from PIL import Image

    require_new(save, overwrite=overwrite)
    with folder_target(save), write_set(save) as staging:
        for number, file in enumerate(files):
            name = f"{file.stem}.png"
            if (staging / name).exists():
                name = f"{file.stem}-{number}.png"
            Image.fromarray(detector.draw(file)).save(staging / name)
