"""`onward convert`: checkpoints to and from safetensors and state files, and artifacts of onnxruntime-training."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from onward.cli.command import command
from onward.cli.errors import CommandError
from onward.cli.output import Output, human_size
from onward.cli.paths import OverwriteOption, file_target, folder_target, plain_prefix, read_model
from onward.cli.run_folder import read_run
from onward.cli.shared_options import PrefixOption, refuse_unused


@command(
    "onward convert run/best weights.safetensors",
    "onward convert weights.safetensors checkpoint --into artifacts/checkpoint",
    "onward convert run/best state.bin --into artifacts/state.bin      # for other languages",
    "onward convert state.bin checkpoint",
    "onward convert old-artifacts artifacts      # of onnxruntime-training",
)
def convert(
    output: Output,
    source: Annotated[
        Path,
        typer.Argument(
            help="A checkpoint, a state file, a .safetensors file, or a folder of artifacts.",
            show_default=False,
        ),
    ],
    target: Annotated[Path, typer.Argument(help="What to write.", show_default=False)],
    into: Annotated[
        Path | None,
        typer.Option(
            "--into",
            metavar="CHECKPOINT",
            help="Take names, roles and everything else from this checkpoint; for a .bin target, this state file.",
        ),
    ] = None,
    freeze: Annotated[
        list[str] | None, typer.Option("--freeze", metavar="NAME", help="Parameters that do not train.")
    ] = None,
    prefix: PrefixOption = "",
    overwrite: OverwriteOption = False,
) -> None:
    """Convert between checkpoints, state files and safetensors, or bring artifacts of onnxruntime-training over."""
    if not source.exists():
        raise CommandError(f"nothing at '{source}'", "is the path right?")
    if source.is_dir():
        if into is not None or freeze:
            raise CommandError("--into and --freeze are for safetensors sources", "leave them away")
        with folder_target(target), output.working("converting"):
            summary = _convert_artifacts(output, source, target, plain_prefix(prefix))
    else:
        refuse_unused({"--prefix is for folders of artifacts": prefix})
        with file_target(target, overwrite=overwrite):
            summary = _convert_checkpoint(source, target, into=into, freeze=freeze)
    output.line(f"{target}: {summary['text']}")
    output.result({"source": source, "target": target, **summary})


def _convert_checkpoint(
    source: Path, target: Path, *, into: Path | None, freeze: list[str] | None
) -> dict[str, Any]:
    from onward import checkpoint

    # by the target's name: the source says what it is by its first bytes
    to_state = target.suffix == ".bin"
    if to_state and into is None:
        raise CommandError(
            "a state file needs the layout of its portable step",
            "name one of the same artifacts: --into artifacts/state.bin",
        )
    with warnings.catch_warnings():
        # onnxruntime-training's checkpoints have no checksum: a conversion adds one
        warnings.simplefilter("ignore", checkpoint.UncheckedCheckpointWarning)
        if source.suffix == ".safetensors":
            base = None if into is None else _load(into)
            data = checkpoint.from_safetensors(source, into=base, frozen=freeze)
        else:
            if freeze or (into is not None and not to_state):
                raise CommandError("--into and --freeze are for safetensors sources", "leave them away")
            data = _load(source)
    if to_state and into is not None:
        checkpoint.to_portable(data, target, layout=into)
    elif target.suffix == ".safetensors":
        checkpoint.to_safetensors(data, target)
    else:
        checkpoint.save(data, target)
    size = target.stat().st_size
    text = f"{len(data.trainable)} trainable and {len(data.frozen)} frozen parameters, {human_size(size)}"
    return {"text": text, "trainable": list(data.trainable), "frozen": list(data.frozen), "bytes": size}


def _load(path: Path) -> Any:
    from onward import checkpoint

    return checkpoint.from_portable(path) if checkpoint.is_portable(path) else checkpoint.load(path)


def _convert_artifacts(output: Output, source: Path, target: Path, prefix: str) -> dict[str, Any]:
    """Artifacts of the original: its eval model has the forward graph and the loss, the rest is made anew."""
    import numpy as np
    import onnx

    from onward import checkpoint
    from onward.artifacts.generate import generate_artifacts
    from onward.artifacts.write import older_members
    from onward.files import write_set
    from onward.graph.gate import read_with_data

    model, initial = source / f"{prefix}eval_model.onnx", source / f"{prefix}checkpoint"
    missing = [path.name for path in (model, initial) if not path.is_file()]
    if missing:
        hint = (
            f"name one of its checkpoints, such as {source / 'best'}"
            if read_run(source)
            else "name a folder that onnxruntime-training wrote"
        )
        raise CommandError(f"'{source}' lacks {' and '.join(missing)}", hint)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", checkpoint.UncheckedCheckpointWarning)
        data = checkpoint.load(initial)
    if data.nominal:
        raise CommandError(f"'{initial}' is nominal: it has no values", "convert the full checkpoint")
    forward = read_with_data(model)
    graph = forward.graph
    values = data.parameters()
    inputs = {value.name for value in graph.input}
    # a checkpoint of another model would be added as weights that nothing reads
    strangers = [name for name in values if name not in inputs]
    if strangers:
        raise CommandError(
            f"the checkpoint has '{strangers[0]}', which the eval model does not take",
            "do both files belong together?",
        )
    for value in [value for value in graph.input if value.name in values]:
        array = np.asarray(values[value.name])
        kind = value.type.tensor_type
        shape = [dim.dim_value for dim in kind.shape.dim]
        if kind.HasField("shape") and shape != list(array.shape):
            raise CommandError(
                f"the checkpoint's '{value.name}' has shape {list(array.shape)}, the eval model takes {shape}",
                "do both files belong together?",
            )
        # the original's eval model takes its parameters as inputs; a forward model has them inside
        graph.input.remove(value)
        graph.initializer.append(onnx.numpy_helper.from_array(array, value.name))
    # before the long part: what cannot be brought over shows at once
    optimizer = _find_optimizer(source / f"{prefix}optimizer_model.onnx")
    # the models and the state that belongs to them, or neither
    with write_set(target, older=older_members(target, prefix)) as aside:
        generate_artifacts(
            forward,
            requires_grad=list(data.trainable),
            frozen_params=list(data.frozen),
            loss=None,  # the eval model's first output is the loss already
            optimizer=optimizer,
            artifact_directory=aside,
            prefix=prefix,
            additional_output_names=[value.name for value in graph.output[1:]] or None,
        )
        if data.optimizer or data.properties:  # momenta and properties go on where they stopped
            state = checkpoint.load(aside / f"{prefix}checkpoint")
            state.optimizer, state.properties = data.optimizer, data.properties
            checkpoint.save(state, aside / f"{prefix}checkpoint")
    output.note("the eval model has no active dropout: export the model again if training should have it")
    text = f"artifacts of {len(data.trainable)} trainable and {len(data.frozen)} frozen parameters"
    return {"text": text, "trainable": list(data.trainable), "frozen": list(data.frozen)}


def _find_optimizer(path: Path) -> Any:
    """The update rule of the original's optimizer model, with its options."""
    import onnx

    from onward.onnxblock import optim

    if not path.is_file():
        return optim.AdamW()
    model = read_model(path)
    clip = None
    for node in model.graph.node:
        values = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        if node.op_type == "InplaceClipGradNorm":
            clip = optim.ClipGradNorm(values.get("max_norm", 1.0))
        if node.op_type == "AdamWOptimizer":
            return optim.AdamW(
                betas=(values.get("alpha", 0.9), values.get("beta", 0.999)),
                # the original's defaults, which its files leave out: torch's epsilon is 1e-8
                eps=values.get("epsilon", 1e-6),
                weight_decay=values.get("weight_decay", 0.0),
                bias_correction=bool(values.get("correct_bias", 1)),
                clip_grad=clip,
                decay_last=values.get("adam_mode", 0) == 1,  # the same curve as before
            )
        if node.op_type == "SGDOptimizerV2":
            return optim.SGD(clip_grad=clip)
    if any(entry.key.startswith("onward.") for entry in model.metadata_props):
        raise CommandError(
            f"'{path.parent}' holds artifacts of Onward already", f"train them: onward train {path.parent}"
        )
    raise CommandError(
        f"'{path}' has no optimizer of onnxruntime-training", "is it one that generate_artifacts wrote?"
    )
