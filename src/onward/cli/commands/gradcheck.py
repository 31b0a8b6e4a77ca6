"""`onward gradcheck`: are the gradients of a model right, compared with finite differences?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from onward.cli.choices import DeviceOption
from onward.cli.command import command
from onward.cli.errors import CommandError
from onward.cli.output import Output
from onward.cli.paths import read_model

# operators that give other results at each call; dropout does in training mode only
_RANDOM = {
    "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial",
}  # fmt: skip


@command(
    "onward gradcheck model.onnx",
    "onward gradcheck model.onnx --data point.npz --wrt fc.weight",
)
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
    rtol: Annotated[float, typer.Option(min=0, help="Relative tolerance.")] = 1e-4,
    atol: Annotated[float, typer.Option(min=0, help="Absolute tolerance.")] = 1e-6,
    seed: Annotated[int, typer.Option(min=0, help="Of the random point and directions.")] = 0,
    size: Annotated[int, typer.Option(min=1, help="What dimensions that may vary become.")] = 2,
    device: DeviceOption = "cpu",
) -> None:
    """Compare a model's gradients with finite differences in float64, and with onnxruntime's float32."""
    from onward import check_gradient
    from onward.cli.data import input_specs, random_inputs
    from onward.runtime.devices import find_device

    chosen = find_device(device)
    if not rtol + atol > 0:
        raise CommandError("both tolerances are 0", "numbers that are rounded never agree to the last digit")
    specs = input_specs(model)
    point: dict[str, Any] = random_inputs(specs, size=size, seed=seed)
    if data is not None:
        # inputs that the file leaves out stay random
        point |= _read_point(data, {spec.name: spec for spec in specs})
    _refuse_random(model)
    with output.working("comparing"):
        checked = check_gradient(
            str(model), point, of=of or None, wrt=wrt or None, rtol=rtol, atol=atol, seed=seed,
            providers=chosen.providers(),
        )  # fmt: skip
    output.line(f"gradients of {model} with respect to {', '.join(checked.wrt)} are right")
    output.line(f"largest relative difference to finite differences: {checked.finite_difference:.1e}")
    output.line(
        f"largest relative difference of onnxruntime in float32 on {chosen}: {checked.onnxruntime:.1e}"
    )
    output.result(
        {
            "wrt": list(checked.wrt),
            "finite_difference": checked.finite_difference,
            "onnxruntime": checked.onnxruntime,
            "device": str(chosen),
            "passed": True,
        }
    )


def _read_point(path: Path, specs: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays of a file, in the types and shapes of the inputs that they are for."""
    from onward.data.match_inputs import fit
    from onward.data.read import read_arrays

    point = {}
    for name, array in read_arrays(path).items():
        if name not in specs:
            raise CommandError(f"'{path}' has '{name}', which is no input", f"there are {', '.join(specs)}")
        if specs[name].dims == () and array.ndim == 0:
            point[name] = array.astype(specs[name].dtype)
        else:
            point |= fit({name: array}, [specs[name]], where=str(path))[0]
    return point


def _refuse_random(model: Path) -> None:
    """Finite differences of a function that is another at every call mean nothing."""
    from onward.cli.file_contents import describe_model

    operators = sorted(_RANDOM & set(describe_model(model)["operators"]))
    if _has_dropout(model):
        operators.append("Dropout")
    if operators:
        raise CommandError(
            f"'{model}' draws random numbers ({', '.join(operators)}): it has no gradient to compare with",
            "check the model as exported for inference",
        )


def _has_dropout(model: Path) -> bool:
    """Whether a Dropout is, or may be, in training mode."""
    import onnx

    graph = read_model(model).graph
    off = {
        tensor.name
        for tensor in graph.initializer
        if tensor.data_type == onnx.TensorProto.BOOL and not onnx.numpy_helper.to_array(tensor).any()
    }
    return any(
        # without its third input it does nothing, whatever its ratio
        node.op_type == "Dropout" and len(node.input) > 2 and node.input[2] and node.input[2] not in off
        for node in graph.node
    )
