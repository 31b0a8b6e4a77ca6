"""`onward deploy`: exports a trained run for inference, checked and optionally quantized."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onward.cli.choices import DeployChoice, DeviceOption
from onward.cli.command import command
from onward.cli.errors import CommandError
from onward.cli.output import Output, human_size
from onward.cli.paths import (
    OverwriteOption,
    new_file,
    plain_prefix,
    read_model,
    require_new,
)
from onward.cli.run_folder import RunFiles, find_run, forward_outputs
from onward.cli.shared_options import CheckpointOption, MapOption, PrefixOption, parse_pairs, refuse_unused
from onward.errors import DataError, OnwardError
from onward.escape import first_of

if TYPE_CHECKING:
    from onward.export.inference import InferenceExport

# What takes ranges from the data of the run, where it is there.
_CALIBRATED = (DeployChoice.AUTO, DeployChoice.INT8, DeployChoice.INT8_STATIC)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `onward deploy`."""

    run: Annotated[Path, typer.Argument(help="The folder of a run, or of artifacts.", show_default=False)]
    model: Annotated[Path, typer.Argument(help="The file to write.")] = Path("trained.onnx")
    checkpoint: CheckpointOption = None
    outputs: Annotated[
        list[str] | None,
        typer.Option("--outputs", metavar="NAME", help="Outputs; those of the forward model by default."),
    ] = None
    quantize: Annotated[
        DeployChoice | None,
        typer.Option("--quantize", help="Store weights in fewer bits; auto takes the best of what fits."),
    ] = None
    keep_accuracy: Annotated[
        float | None,
        typer.Option(
            "--keep-accuracy",
            metavar="POINTS",
            min=0,
            help="int8, auto: how many hundredths of the metric may be lost; int8 leaves layers float for it.",
        ),
    ] = None
    force: Annotated[
        bool, typer.Option("--force", help="Write a quantized file that is larger or slower than float too.")
    ] = False
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data", "-d", metavar="[INPUT=]PATH", help="Compare on these inputs, not random ones."
        ),
    ] = None
    mapping: MapOption = None
    samples: Annotated[int, typer.Option(min=1, help="How many samples of --data to compare on.")] = 64
    rtol: Annotated[float, typer.Option(min=0, help="Relative tolerance of the comparison.")] = 1e-4
    atol: Annotated[float, typer.Option(min=0, help="Absolute tolerance of the comparison.")] = 1e-5
    external_data: Annotated[
        bool, typer.Option("--external-data", help="Put weights into a file beside it.")
    ] = False
    prefix: PrefixOption = ""
    overwrite: OverwriteOption = False
    device: DeviceOption = "cpu"


@command(
    "onward deploy run trained.onnx",
    "onward deploy run small.onnx --quantize auto --data pictures      # tries what fits, and measures",
    "onward deploy run small.onnx --quantize int8 --data pictures --keep-accuracy 0.5",
    "onward deploy artifacts embeddings.onnx --checkpoint run/best --outputs hidden",
)
def deploy(output: Output, options: Options) -> None:
    """Export a trained model for inference; its outputs are compared with those of the eval model first."""
    from onward.export import for_inference
    from onward.info.metadata import info_to_metadata

    quantize, model = options.quantize, options.model
    trained = find_run(options.run, options.checkpoint, prefix=plain_prefix(options.prefix))
    eval_model = trained.artifacts / f"{trained.prefix}eval_model.onnx"
    if not eval_model.is_file():
        raise CommandError(f"no {eval_model.name} in '{trained.artifacts}'", "make the artifacts again")
    names = list(options.outputs or forward_outputs(eval_model))
    if not names:
        raise CommandError(
            "the model has no output besides its loss", "name values of its graph with --outputs"
        )
    if options.keep_accuracy is not None and quantize not in (DeployChoice.INT8, DeployChoice.AUTO):
        raise CommandError("--keep-accuracy goes with --quantize int8 or auto", "add it")
    refuse_unused(
        {
            "--force is for --quantize": options.force and quantize is None,
            "--samples is for --data": options.samples != Options.samples and not options.data,
            "--map is for --data": options.mapping and not options.data,
        }
    )
    data, samples = _choose_inputs(options, trained, eval_model, names)
    # all of them give ranges; a few show a wrong export as well as many
    inputs = None if samples is None else {name: array[: options.samples] for name, array in samples.items()}
    tokenizer = _find_tokenizer(trained)
    beside = model.with_name(f"{model.stem}.tokenizer.json")
    if tokenizer is not None:
        # before the long part, as for the model
        require_new(beside, overwrite=options.overwrite)
    settings = {
        "inputs": inputs, "calibration": samples, "rtol": options.rtol, "atol": options.atol,
        "external_data": options.external_data or None, "metadata": info_to_metadata(trained.info),
        "device": options.device,
    }  # fmt: skip
    measurement: dict[str, Any] = {}
    with new_file(model, overwrite=options.overwrite) as aside, output.working("exporting and comparing"):
        if quantize is DeployChoice.AUTO or options.keep_accuracy is not None:
            score = _make_score(options, trained, data)
            exported, measurement = _export_measured(
                options, trained, eval_model, names, settings, score, aside
            )
        else:
            exported = for_inference(
                str(eval_model), trained.checkpoint, names, aside,
                quantize=None if quantize is None else str(quantize), force=options.force, **settings,
            )  # fmt: skip
            if exported.quantization is not None and data:
                measurement = _score_both(options, trained, eval_model, names, settings, data, aside)
        if tokenizer is not None:
            shutil.copyfile(tokenizer, aside.with_name(beside.name))
    output.line(
        f"{model}: {human_size(exported.size)}, outputs {', '.join(names)}, weights of {trained.checkpoint}"
    )
    if trained.info.labels:
        output.line(f"classes: {first_of(trained.info.labels, 40)}")
    if exported.parity is not None:
        output.line(f"parity with the eval model: {str(exported.parity).splitlines()[0]}")
    elif exported.integers is not None:
        output.line(str(exported.integers))
    else:
        output.note("parity was not checked: random inputs do not fit this model; give some with --data")
    if exported.quantization is not None:
        output.line(f"{quantize}: {exported.quantization}")
    _show_measurement(output, measurement)
    output.result(
        {
            "path": model,
            "bytes": exported.size,
            "outputs": names,
            "classes": trained.info.labels,
            "checkpoint": trained.checkpoint,
            "parity": None if exported.parity is None else exported.parity.to_dict(),
            "quantization": None if exported.quantization is None else exported.quantization.to_dict(),
            **measurement,
        }
    )


# --- Deployments that are decided by measurement: `--quantize auto`, and `--keep-accuracy`.

Score = Callable[[Path], float]
_NO_LABELS = "--keep-accuracy needs data with labels, to compute the metric on"


def _export_measured(
    options: Options,
    trained: RunFiles,
    eval_model: Path,
    names: list[str],
    settings: dict[str, Any],
    score: Score,
    target: Path,
) -> tuple[InferenceExport, dict[str, Any]]:
    """Export the float model, quantize and measure it, and write the winner; what is to be said of it."""
    from onward.export import for_inference
    from onward.export.quantize import candidates
    from onward.files import scratch_folder

    # half a hundredth: less than a metric of a few hundred samples can tell
    allowed_loss = 0.005
    if options.keep_accuracy is not None:
        allowed_loss = options.keep_accuracy / 100
    with scratch_folder() as folder:
        # under the name that it will have: data files are named after it, inside of the model too
        whole = folder / target.name
        exported = for_inference(str(eval_model), trained.checkpoint, names, whole, **settings)
        measured = None
        with contextlib.suppress(OnwardError):  # the data has no labels to score
            measured = score(whole)
        if options.quantize is DeployChoice.AUTO:
            tried = candidates.try_schemes(
                whole, settings["inputs"], folder, calibration=settings["calibration"],
                score=None if measured is None else score, allowed_loss=allowed_loss,
            )  # fmt: skip
            best = candidates.choose_best(tried)
            path = best.path
            result = {"candidates": [one.to_dict() for one in tried], "chosen": best.name}
        else:
            if measured is None:
                raise CommandError(_NO_LABELS, "name it with --data")
            path = folder / "small" / target.name
            path.parent.mkdir()
            layers = candidates.quantize_sensitively(
                whole, path, settings["calibration"], score=score, allowed_loss=allowed_loss
            )
            result = {"float_layers": layers, "metric": score(path), "metric_before": measured}
        shutil.copyfile(path, target)
        for weights in path.parent.glob(f"{path.name}*.data"):
            shutil.copyfile(weights, target.parent / weights.name)
    return dataclasses.replace(exported, path=target, size=target.stat().st_size), result


def _score_both(
    options: Options,
    trained: RunFiles,
    eval_model: Path,
    names: list[str],
    settings: dict[str, Any],
    data: list[str],
    small: Path,
) -> dict[str, Any]:
    """The metric of a quantized file and of the float one that it was made of; nothing for data without labels."""
    from onward.export import for_inference
    from onward.files import scratch_folder

    score = _make_score(options, trained, data)
    with contextlib.suppress(OnwardError), scratch_folder() as folder:
        metric = score(small)  # first: data without labels fails here, before anything else is made
        whole = folder / small.name
        for_inference(str(eval_model), trained.checkpoint, names, whole, **settings)
        return {"metric": metric, "metric_before": score(whole)}
    return {}


def _make_score(options: Options, trained: RunFiles, data: list[str]) -> Score:
    """A function that computes the task's metric of a file; it fails where the data has no labels for it."""
    from onward import evaluate_model
    from onward.cli.data import load_data
    from onward.data.read import DataOptions
    from onward.train.callbacks import improves

    reading = DataOptions(mapping=parse_pairs(options.mapping or [], "--map"), label=trained.options.label)
    if not data:
        raise CommandError(_NO_LABELS, "name it with --data")
    source = Path(data[0].partition("=")[2] or data[0])

    def score(path: Path) -> float:
        evaluation = evaluate_model(
            path, source, lambda inputs, reading: load_data(data, inputs, reading), options=reading
        )
        # the first figure is the task's main one; of an error rate, a larger one would win, so the next counts
        figures = evaluation.figures
        rising = next((name for name in figures if improves(name) > 0), None)
        return figures[rising] if rising is not None else -next(iter(figures.values()))

    return score


def _show_measurement(output: Output, result: dict[str, Any]) -> None:
    """The table of what was tried, or the layers that stay float."""
    if "candidates" in result:
        rows = [
            [
                one["name"], human_size(one["size"]) if one["size"] else "",
                f"{one['milliseconds']:.3g} ms" if one["size"] else "",
                f"{one['cosine_mean']:.4f}" if one["size"] else "",
                "" if one["metric"] is None else f"{one['metric']:.4f}",
                "taken" if one["name"] == result["chosen"] else one["refusal"],
            ]
            for one in result["candidates"]
        ]  # fmt: skip
        output.table("--quantize auto", ["", "size", "time", "cosine", "metric", ""], rows)
        if result["chosen"] == "float":
            output.note("the float model was written: nothing smaller is as fast and as good")
    elif "metric" in result:
        layers = first_of(result["float_layers"], 40) if result.get("float_layers") else "none"
        behind = f"; layers left float: {layers}" if "float_layers" in result else ""
        output.line(f"metric {result['metric']:.4f}, {result['metric_before']:.4f} before{behind}")


# --- What the outputs are compared on.


def _choose_inputs(
    options: Options, trained: RunFiles, eval_model: Path, names: list[str]
) -> tuple[list[str], dict[str, Any] | None]:
    """The data that was named, or is taken from the run, and samples of it; None where random ones do."""
    # the training data, where it is still there; a function is not called for it
    run_data = [
        source for source in trained.options.data or [] if Path(source.partition("=")[2] or source).exists()
    ]
    data = options.data or []
    if options.quantize in _CALIBRATED and not data:
        data = run_data
        if not data and options.quantize is not DeployChoice.INT8:
            raise CommandError(f"{options.quantize} needs samples of the data", "name some with --data")
    if data:
        calibrated = options.quantize in _CALIBRATED
        return data, _read_inputs(options, trained, eval_model, names, data, calibrated=calibrated)
    if run_data:
        with contextlib.suppress(CommandError, DataError):  # data that has changed: random inputs do as well
            # nobody asked for a comparison on these: a few show a wrong export as well as many
            few = dataclasses.replace(options, samples=min(options.samples, 16))
            return [], _read_inputs(few, trained, eval_model, names, run_data, calibrated=False)
    return [], None


def _read_inputs(
    options: Options,
    trained: RunFiles,
    eval_model: Path,
    names: list[str],
    data: list[str],
    *,
    calibrated: bool,
) -> dict[str, Any]:
    """The samples to compare on, and more to take ranges from, for the inputs that the outputs need."""
    from onward.cli.data import load_samples, user_inputs
    from onward.data.match_inputs import calibration_rows

    specs = user_inputs(eval_model)
    # an exported model has no labels: they go with the loss
    labels = _labels_only(eval_model, names)
    ranges = calibration_rows(spec for spec in specs if spec.name not in labels) if calibrated else 0
    fixed = [spec.dims[0] for spec in specs if spec.dims and spec.dims[0]]  # fixed batches
    most = min([max(options.samples, ranges), *fixed])
    arrays = load_samples(data, specs, trained.data_options(mapping=options.mapping), most)
    return {name: array for name, array in arrays.items() if name not in labels}


def _labels_only(model: Path, outputs: list[str]) -> set[str]:
    """Inputs that none of the outputs needs: labels."""
    graph = read_model(model).graph
    makers = {name: node for node in graph.node for name in node.output}
    needed, todo = set(), list(outputs)
    while todo:
        name = todo.pop()
        if name in needed:
            continue
        needed.add(name)
        if name in makers:
            todo += _reads(makers[name])
    return {value.name for value in graph.input} - needed


def _reads(node: Any) -> list[str]:
    names = list(node.input)
    for attribute in node.attribute:
        # branches and bodies of loops read values of the graph around them
        for inner in attribute.g.node:
            names += _reads(inner)
    return [name for name in names if name]


def _find_tokenizer(trained: RunFiles) -> Path | None:
    """The tokenizer of a model that was trained on texts."""
    from onward.data.text import find_tokenizer

    if trained.info.preprocessing is None or trained.info.preprocessing.kind != "text":
        return None
    return find_tokenizer(trained.folder, trained.artifacts)
