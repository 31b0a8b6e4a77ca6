"""`onward gradcheck`: are the gradients of a model right, compared with finite differences?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from onward.cli.frame import CommandError, Output, command, examples

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "gradcheck",
        epilog=examples(
            "onward gradcheck model.onnx", "onward gradcheck model.onnx --data point.npz --wrt fc.weight"
        ),
    )(gradcheck)


@command
def gradcheck(
    output: Output,
    model: Annotated[Path, typer.Argument(help="An ONNX file.", show_default=False)],
    data: Annotated[
        Path | None,
        typer.Option("--data", "-d", help="The point, as .npz by input; random numbers by default."),
    ] = None,
    of: Annotated[
        list[str] | None, typer.Option("--of", metavar="OUTPUT", help="Every floating one by default.")
    ] = None,
    wrt: Annotated[
        list[str] | None,
        typer.Option(
            "--wrt", metavar="NAME", help="Inputs or initializers; every floating input by default."
        ),
    ] = None,
    rtol: Annotated[float, typer.Option(help="Relative tolerance.")] = 1e-4,
    atol: Annotated[float, typer.Option(help="Absolute tolerance.")] = 1e-6,
    seed: Annotated[int, typer.Option(help="Of the random point and directions.")] = 0,
    size: Annotated[int, typer.Option(min=1, help="What dimensions that may vary become.")] = 2,
) -> None:
    """Compare a model's gradients with finite differences in float64, and with onnxruntime's float32."""
    import numpy as np

    from onward import check_gradient
    from onward.cli.fitting import input_specs
    from onward.cli.samples import random_inputs

    if not model.is_file():
        raise CommandError(f"no model at '{model}'", "is the path right?")
    point: dict[str, Any] = random_inputs(input_specs(str(model)), size=size, seed=seed)
    if data is not None:
        with np.load(data, allow_pickle=False) as file:
            point |= {name: file[name] for name in file.files if name in point}
    _refuse_random(model)
    checked = check_gradient(
        str(model), point, of=of or None, wrt=wrt or None, rtol=rtol, atol=atol, seed=seed
    )
    output.line(f"gradients of {model} with respect to {', '.join(checked.wrt)} are right")
    output.line(f"largest relative difference to finite differences: {checked.finite_difference:.1e}")
    output.line(f"largest relative difference of onnxruntime in float32: {checked.onnxruntime:.1e}")
    output.result(
        {
            "wrt": list(checked.wrt),
            "finite_difference": checked.finite_difference,
            "onnxruntime": checked.onnxruntime,
            "passed": True,
        }
    )


def _refuse_random(model: Path) -> None:
    """Finite differences of a function that is another at every call mean nothing."""
    from onward.cli.describe import describe_model

    random = {
        "RandomNormal",
        "RandomNormalLike",
        "RandomUniform",
        "RandomUniformLike",
        "Bernoulli",
        "Multinomial",
    }
    found = sorted(random & set(describe_model(model)["operators"]))
    if _has_dropout(model):
        found.append("Dropout")
    if found:
        raise CommandError(
            f"'{model}' draws random numbers ({', '.join(found)}): it has no gradient to compare with",
            "check the model as exported for inference",
        )


def _has_dropout(model: Path) -> bool:
    """Whether a Dropout is, or may be, in training mode."""
    import onnx

    graph = onnx.load(str(model), load_external_data=False).graph
    off = {
        tensor.name
        for tensor in graph.initializer
        if tensor.data_type == onnx.TensorProto.BOOL and not onnx.numpy_helper.to_array(tensor).any()
    }
    return any(
        node.op_type == "Dropout" and len(node.input) > 2 and node.input[2] and node.input[2] not in off
        for node in graph.node
    )
