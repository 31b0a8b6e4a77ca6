"""`onward deploy`: exports a trained run for inference, checked and optionally quantized."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from onward import contract
from onward.cli.choices import DeviceOption, QuantizeChoice
from onward.cli.command import CommandError, Output, command, examples, human_size
from onward.cli.model_file import read_model
from onward.cli.output_paths import Overwrite, file_target, plain_prefix
from onward.cli.run_folder import find
from onward.errors import DataError
from onward.escape import first_of
from onward.model_metadata import read_names

__all__ = ["forward_outputs", "register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "deploy",
        epilog=examples(
            "onward deploy run trained.onnx",
            "onward deploy run trained-int8.onnx --quantize int8 --data digits.npz",
            "onward deploy artifacts embeddings.onnx --checkpoint run/best --outputs hidden",
        ),
    )(deploy)


@command
def deploy(
    output: Output,
    run: Annotated[Path, typer.Argument(help="The folder of a run, or of artifacts.", show_default=False)],
    model: Annotated[Path, typer.Argument(help="The file to write.")] = Path("trained.onnx"),
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", "-c", help="'best', 'latest' or a file; best by default.")
    ] = None,
    outputs: Annotated[
        list[str] | None,
        typer.Option("--outputs", metavar="NAME", help="Outputs; those of the forward model by default."),
    ] = None,
    quantize: Annotated[
        QuantizeChoice | None, typer.Option("--quantize", help="Store weights in fewer bits.")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data", "-d", metavar="[INPUT=]PATH", help="Compare on these inputs, not random ones."
        ),
    ] = None,
    mapping: Annotated[
        list[str] | None,
        typer.Option("--map", metavar="INPUT=ARRAY", help="Which array of the data is which input."),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="How many samples of --data to compare on.")] = 64,
    rtol: Annotated[float, typer.Option(min=0, help="Relative tolerance of the comparison.")] = 1e-4,
    atol: Annotated[float, typer.Option(min=0, help="Absolute tolerance of the comparison.")] = 1e-5,
    external_data: Annotated[
        bool, typer.Option("--external-data", help="Put weights into a file beside it.")
    ] = False,
    prefix: Annotated[str, typer.Option(help="The prefix of the artifacts' file names.")] = "",
    overwrite: Overwrite = False,
    device: DeviceOption = "cpu",
) -> None:
    """Export a trained model for inference; its outputs are compared with those of the eval model first."""
    from onward.export import for_inference

    found = find(run, checkpoint, prefix=plain_prefix(prefix))
    eval_model = found.artifacts / f"{found.prefix}eval_model.onnx"
    if not eval_model.is_file():
        raise CommandError(f"no {eval_model.name} in '{found.artifacts}'", "make the artifacts again")
    names = list(outputs or forward_outputs(eval_model))
    if not names:
        raise CommandError(
            "the model has no output besides its loss", "name values of its graph with --outputs"
        )
    # the training data, where it is still there; a function is not called for it
    known = [source for source in found.data or [] if Path(source.partition("=")[2] or source).exists()]
    if quantize is QuantizeChoice.INT8_STATIC and not data:
        data = known
        if not data:
            raise CommandError("int8-static needs samples of the data", "name some with --data")
    inputs = None
    if data:
        inputs = _inputs(found, run, eval_model, names, data, mapping, samples)
    elif known:
        with contextlib.suppress(CommandError, DataError):  # data that has changed: random inputs do as well
            inputs = _inputs(found, run, eval_model, names, known, mapping, min(samples, 16))
    tokenizer = _tokenizer(found, run)
    beside = model.with_name(f"{model.stem}.tokenizer.json")
    if tokenizer is not None and beside.exists() and not overwrite:
        raise CommandError(
            f"'{beside}' already exists", "replace it with --overwrite, or choose another name"
        )
    with file_target(model, overwrite=overwrite), output.working("exporting and comparing"):
        made = for_inference(
            str(eval_model), found.checkpoint, names, model,
            quantize=None if quantize is None else str(quantize),
            inputs=inputs, rtol=rtol, atol=atol, external_data=external_data or None,
            metadata=found.metadata(), device=device,
        )  # fmt: skip
        if tokenizer is not None:
            shutil.copyfile(tokenizer, beside)
    output.line(
        f"{made.path}: {human_size(made.size)}, outputs {', '.join(names)}, weights of {found.checkpoint}"
    )
    if found.classes:
        output.line(f"classes: {first_of(found.classes, 40)}")
    if made.parity is not None:
        output.line(f"parity with the eval model: {str(made.parity).splitlines()[0]}")
    else:
        output.note("parity was not checked: random inputs do not fit this model; give some with --data")
    if made.quantization is not None:
        output.line(f"{quantize}: {made.quantization}")
        if made.quantization.speedup < 0.8:
            better = (
                ""
                if quantize is QuantizeChoice.INT8_STATIC
                else (
                    "; --quantize int8-static finds ranges once, on the training data, which suits convolutions"
                )
            )
            slower = 1 / made.quantization.speedup
            output.note(f"this model is {slower:.1f} times as slow as the float one on this machine{better}")
    output.result(
        {
            "path": made.path,
            "bytes": made.size,
            "outputs": names,
            "classes": found.classes,
            "checkpoint": found.checkpoint,
            "parity": None if made.parity is None else made.parity.to_dict(),
            "quantization": None if made.quantization is None else made.quantization.to_dict(),
        }
    )


def forward_outputs(eval_model: Path) -> list[str]:
    """The outputs of the forward model that an eval model was made of."""
    proto = read_model(eval_model)
    about = {entry.key: entry.value for entry in proto.metadata_props}
    return read_names(about, contract.OUTPUTS) or [value.name for value in proto.graph.output[1:]]


def _tokenizer(found: Any, run: Path) -> Path | None:
    """The tokenizer of a model that was trained on texts."""
    from onward.data.text import find_tokenizer

    if not found.preprocessing or found.preprocessing.get("kind") != "text":
        return None
    return find_tokenizer(run, found.artifacts)


def _inputs(
    found: Any,
    run: Path,
    eval_model: Path,
    names: list[str],
    data: list[str],
    mapping: list[str] | None,
    samples: int,
) -> dict[str, Any]:
    """The samples to compare on, for the inputs that the outputs need."""
    import numpy as np

    from onward.cli.data import input_specs, load_data

    state_names = _parameter_names(eval_model)
    specs = [spec for spec in input_specs(str(eval_model)) if spec.name not in state_names]
    loaded = load_data(data, specs, found.data_options(mapping=mapping, place=run))
    if loaded.arrays is None:
        raise CommandError("--data takes files here, not a function", "save some samples as .npz")
    samples = min([samples, *(spec.dims[0] for spec in specs if spec.dims and spec.dims[0])])  # fixed batches
    labels = _labels_only(eval_model, names)
    return {name: np.asarray(array[:samples]) for name, array in loaded.arrays.items() if name not in labels}


def _parameter_names(model: Path) -> set[str]:
    about = {entry.key: entry.value for entry in read_model(model).metadata_props}
    return {*read_names(about, contract.TRAINABLE), *read_names(about, contract.FROZEN)}


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
        for inner in attribute.g.node:
            names += _reads(inner)
    return [name for name in names if name]
