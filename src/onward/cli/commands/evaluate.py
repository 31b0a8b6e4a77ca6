"""`onward evaluate` and `onward infer`: metrics and predictions of a model."""

from __future__ import annotations

import contextlib
import difflib
from pathlib import Path
from typing import Annotated, Any

import typer

from onward.cli.choices import DeviceOption, MetricChoice
from onward.cli.command import CommandError, Output, command, examples
from onward.cli.model_file import read_model
from onward.cli.output_paths import Overwrite, new_file
from onward.cli.run_folder import find
from onward.cli.shared_options import DataOption, LabelOption, MapOption
from onward.escape import csv_cell

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(
        "evaluate",
        epilog=examples("onward evaluate run --data test.npz --metric accuracy --metric f1"),
    )(evaluate)
    app.command(
        "infer",
        epilog=examples(
            "onward infer model.onnx --data images.npz --output answers.npz",
            'onward infer ./minilm --text "some text"       # a folder that onward export wrote',
        ),
    )(infer)


@command
def evaluate(
    output: Output,
    run: Annotated[Path, typer.Argument(help="The folder of a run, or of artifacts.", show_default=False)],
    data: DataOption = None,
    metric: Annotated[
        list[MetricChoice] | None, typer.Option("--metric", "-m", help="Besides the loss.")
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", "-c", help="'best', 'latest' or a file; best by default.")
    ] = None,
    mapping: MapOption = None,
    label: LabelOption = None,
    batch_size: Annotated[int, typer.Option("--batch-size", "-b", min=1, help="Samples at a time.")] = 64,
    device: DeviceOption = "cpu",
    prefix: Annotated[str, typer.Option(help="The prefix of the artifacts' file names.")] = "",
) -> None:
    """The loss and metrics of a run's best checkpoint over some data, dropout off."""
    import numpy as np

    from onward import Trainer
    from onward import checkpoint as checkpoints
    from onward.cli.data import input_specs, load_data

    found = find(run, checkpoint, prefix=prefix)
    trainer = Trainer(
        found.artifacts, metrics=[str(name) for name in metric or []], progress=False, prefix=found.prefix,
        device=device,
    )  # fmt: skip
    for name, array in checkpoints.load(found.checkpoint).parameters().items():
        trainer.state.parameters[name].data = np.asarray(array)
    model = str(found.artifacts / f"{found.prefix}training_model.onnx")
    loaded = load_data(
        data or (),
        input_specs(model, trainer.module.input_names()),
        found.data_options(mapping=mapping, label=label, place=run),
    )
    for note in loaded.notes:
        output.note(note)
    with output.working("evaluating"):
        figures = trainer.evaluate(loaded.value, batch_size=batch_size)
    output.table("", ["", "value"], [[name, f"{value:.6g}"] for name, value in figures.items()])
    output.result({"checkpoint": found.checkpoint, "samples": loaded.samples, **figures})


@command
def infer(
    output: Output,
    model: Annotated[
        Path,
        typer.Argument(
            help="An ONNX file, a run, or a folder that `onward export` wrote.", show_default=False
        ),
    ],
    data: DataOption = None,
    text: Annotated[
        list[str] | None, typer.Option("--text", "-t", help="Text, for a folder of `onward export`.")
    ] = None,
    answers: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the outputs as .npz or .csv.")
    ] = None,
    outputs: Annotated[
        list[str] | None, typer.Option("--outputs", metavar="NAME", help="Only these.")
    ] = None,
    mapping: MapOption = None,
    label: LabelOption = None,
    batch_size: Annotated[int, typer.Option("--batch-size", "-b", min=1, help="Samples at a time.")] = 256,
    device: DeviceOption = "cpu",
    top_k: Annotated[int, typer.Option("--top-k", "-k", min=1, help="So many labels for each sample.")] = 1,
    overwrite: Overwrite = False,
) -> None:
    """Run a model on data and print, or write, its outputs."""
    if answers is not None and answers.suffix not in (".npz", ".csv"):
        raise CommandError(f"'{answers}' must end in .npz or .csv", "choose one of them")
    if text and (data or answers is not None):
        raise CommandError("--text goes without --data and --output", "ask for one after the other")
    if text and device != "cpu":
        raise CommandError("--text runs on the CPU", "leave --device away, or give the tokens with --data")
    if text:
        return _answer_text(output, model, text)
    with contextlib.ExitStack() as stack:
        file = None if answers is None else stack.enter_context(new_file(answers, overwrite=overwrite))
        found, files, classes = _run_model(output, model, data, outputs, mapping, label, batch_size, device)
        labels = _labels(found, classes, top_k)
        inputs = len(next(iter(found.values())))
        if file is not None:
            _write(file, found, labels, files)
    if answers is not None:
        output.line(
            f"{answers}: " + ", ".join(f"{name} {list(array.shape)}" for name, array in found.items())
        )
    elif labels is not None:
        rows = [
            [files[index] if files else index, *(f"{one['label']} {one['score']:.1%}" for one in best)]
            for index, best in enumerate(labels[:20])
        ]
        output.table(
            f"{inputs} samples", ["sample", *("label" if k == 0 else "" for k in range(len(labels[0])))], rows
        )
    else:
        for name, array in found.items():
            rows = [[index, _short(row)] for index, row in enumerate(array[:10])]
            output.table(f"{name} {list(array.shape)}", ["sample", "value"], rows)
    shown = {name: list(array.shape) for name, array in found.items()}
    whole: dict[str, Any] = {} if answers is not None else {"values": found}
    if labels is not None:
        whole["labels"] = labels if top_k > 1 else [best[0] for best in labels]
    if labels is not None and len(labels) > 20 and answers is None:
        output.line(f"and {len(labels) - 20} more: --output answers.csv writes all")
    if files:
        whole["files"] = files
    output.result({"samples": inputs, "outputs": shown, "file": answers, **whole})
    return None


def _answer_text(output: Output, folder: Path, texts: list[str]) -> None:
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


def _reads_texts(model: Path) -> bool:
    from onward.data.preprocessing import KEY, Preprocessing

    about = {entry.key: entry.value for entry in read_model(model).metadata_props}
    return KEY in about and Preprocessing.from_json(about[KEY], str(model)).kind == "text"


def _labels(
    found: dict[str, Any], classes: list[str] | None, top_k: int
) -> list[list[dict[str, Any]]] | None:
    """The likeliest classes of every sample, where the model has classes and its first output scores them."""
    from onward.pipeline.classifier import answer_labels

    scores = next(iter(found.values()))
    if classes is None or scores.ndim != 2 or scores.shape[1] != len(classes):
        return None
    return [answer[:top_k] for answer in answer_labels(scores, classes, top_k=None)]


def _run_model(
    output: Output,
    model: Path,
    data: list[str] | None,
    outputs: list[str] | None,
    mapping: list[str] | None,
    label: str | None,
    batch_size: int,
    device: str,
) -> tuple[dict[str, Any], list[str], list[str] | None]:
    """The outputs, the files that the samples came from, and the names of the classes."""
    import tempfile

    import numpy as np

    from onward.cli.data import input_specs, load_data, parse_pairs
    from onward.data.read import DataOptions
    from onward.runtime.devices import find_device
    from onward.runtime.sessions import open_session

    place = find_device(device)
    options_of = DataOptions(mapping=parse_pairs(mapping or (), "--map"), label=label)
    with tempfile.TemporaryDirectory(prefix="onward-") as folder:
        path = model
        if model.is_dir():
            if (model / "model.onnx").is_file():
                path = model / "model.onnx"
            else:
                found = find(model)
                options_of = found.data_options(mapping=mapping, label=label, place=model)
                path = _exported(found, Path(folder) / "model.onnx", outputs)
        if options_of.preprocessing is None and options_of.classes is None:
            options_of = _own_options(path, options_of)
        read_model(path)
        session = open_session(path, providers=place.providers())
        known = [value.name for value in session.get_outputs()]
        names = list(dict.fromkeys(outputs or known))
        for name in names:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                raise CommandError(
                    f"the model has no output '{name}'",
                    f"did you mean '{near[0]}'?" if near else f"it has {', '.join(known)}",
                )
        specs = input_specs(str(path))
        loaded = load_data(data or (), specs, options_of)
        for note in loaded.notes:
            output.note(note)
        if loaded.arrays is None:
            raise CommandError("infer takes files, not a function", "save the inputs as .npz")
        count = loaded.samples or 0
        parts = [
            session.run(
                names,
                {n: np.asarray(array[start : start + batch_size]) for n, array in loaded.arrays.items()},
            )
            for start in output.track(range(0, count, batch_size), "inference")
        ]
        joined = {
            name: np.concatenate([np.atleast_1d(np.asarray(part[i])) for part in parts])
            for i, name in enumerate(names)
        }
    files = next((array.files for array in loaded.arrays.values() if hasattr(array, "files")), [])
    return (
        joined,
        [str(file) for file in files],
        None if options_of.classes is None else list(options_of.classes),
    )


def _own_options(model: Path, given: Any) -> Any:
    """What a deployed model says of its classes and its input."""
    import dataclasses

    from onward.data.preprocessing import KEY, Preprocessing
    from onward.pipeline.classifier import classes_of, find_tokenizer_of

    about = {entry.key: entry.value for entry in read_model(model).metadata_props}
    done = Preprocessing.from_json(about[KEY], str(model)) if KEY in about else None
    tokenizer = find_tokenizer_of(model, done) if done is not None and done.kind == "text" else None
    return dataclasses.replace(
        given, classes=classes_of(about, str(model)), preprocessing=done, tokenizer=tokenizer
    )


def _exported(found: Any, path: Path, outputs: list[str] | None) -> Path:
    from onward.cli.commands.deploy import forward_outputs
    from onward.export import for_inference

    eval_model = found.artifacts / f"{found.prefix}eval_model.onnx"
    for_inference(str(eval_model), found.checkpoint, outputs or forward_outputs(eval_model), path)
    return path


def _write(
    path: Path, arrays: dict[str, Any], labels: list[list[dict[str, Any]]] | None, files: list[str]
) -> None:
    import csv

    import numpy as np

    best = [] if labels is None else [answer[0] for answer in labels]
    if path.suffix == ".npz":
        named = (
            {"label": np.asarray([one["label"] for one in best])} if best and "label" not in arrays else {}
        )
        np.savez(path, **{**arrays, **named})
        return
    flat = {name: array.reshape(len(array), -1) for name, array in arrays.items()}
    header = [
        name if array.shape[1] == 1 else f"{name}_{index}"
        for name, array in flat.items()
        for index in range(array.shape[1])
    ]
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        rows = np.concatenate(list(flat.values()), axis=1).tolist()
        writer.writerow(
            [
                *(["file"] if files else []),
                *map(csv_cell, header),
                *(["label", "probability"] if best else []),
            ]
        )
        writer.writerows(
            [
                *([csv_cell(name)] if files else []),
                *row,
                *((csv_cell(one["label"]), one["score"]) if best else ()),
            ]
            for name, row, one in zip(files or rows, rows, best or rows)
        )


def _short(value: Any) -> str:
    import numpy as np

    if isinstance(value, np.ndarray):
        return np.array2string(value, precision=4, threshold=16, edgeitems=4, max_line_width=10**6)
    return str(value)
