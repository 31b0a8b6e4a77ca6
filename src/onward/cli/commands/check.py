"""`onward check`: can this model be trained, which operators prevent it, and what would a step cost?"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from onward import contract
from onward.cli.advice import advice
from onward.cli.choices import DeviceOption, LossChoice, OptimizerChoice, loss_of, optimizer_of
from onward.cli.command import CommandError, Output, command, examples, human_size
from onward.cli.commands.artifacts import Freeze, Loss, Model, Optimizer, Train, known_names
from onward.cli.model_file import read_model
from onward.model_metadata import read_table
from onward.run_limits import Watch

__all__ = ["footprint", "register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "check",
        epilog=examples(
            "onward check model.onnx",
            "onward check model.onnx -l cross-entropy --batch-size 8 --json",
        ),
    )(check)


@command
def check(
    output: Output,
    model: Model,
    loss: Loss = LossChoice.MSE,
    optimizer: Optimizer = OptimizerChoice.ADAMW,
    train: Train = None,
    freeze: Freeze = None,
    batch_size: Annotated[int, typer.Option("--batch-size", "-b", min=1, help="For the estimates.")] = 32,
    steps: Annotated[
        int, typer.Option(min=0, help="Steps to measure on random inputs; 0 measures none.")
    ] = 5,
    seconds: Annotated[
        float,
        typer.Option(min=0.1, help="Measure for about this long; a large model on a smaller batch then."),
    ] = 10.0,
    device: DeviceOption = "cpu",
) -> int:
    """Can this model be trained? Exit code 0 if so, 2 if operators lack a gradient; nothing is written."""
    with _deadline(output):
        return _check(output, model, loss, optimizer, train, freeze, batch_size, steps, seconds, device)


def _check(
    output: Output,
    model: Any,
    loss: Any,
    optimizer: Any,
    train: Any,
    freeze: Any,
    batch_size: Any,
    steps: Any,
    seconds: Any,
    device: str,
) -> int:
    from onward.artifacts.generate import build_artifacts
    from onward.cli.commands.check import footprint
    from onward.errors import UnsupportedOps
    from onward.runtime.devices import find_device

    read_model(model)
    find_device(device)
    remark = advice(model, loss)
    if remark:
        output.note(remark)
    started = time.perf_counter()
    try:
        with output.working("differentiating"), known_names():
            made = build_artifacts(
                str(model),
                requires_grad=list(train) if train else None,
                frozen_params=list(freeze) if freeze else None,
                loss=loss_of(loss),
                optimizer=optimizer_of(optimizer),
            )
    except UnsupportedOps as error:
        head, *rest = str(error).splitlines()
        output.line(f"no: {head}")
        for line in rest[:-1]:
            output.line(line)
        output.line("freeze those parameters with --freeze, or add a rule: docs/adding-a-gradient.md")
        output.result(
            {"trainable": False, "reason": head, "operators": [_unsupported(line) for line in rest[:-1]]}
        )
        return 2
    spent = time.perf_counter() - started
    sizes = footprint(made, batch_size)
    measured = {"seconds": None, "note": "not asked for"}
    if steps:
        with output.working("measuring steps"):
            measured = _measure(made, batch_size, steps, budget=seconds, device=device)
    rows = [
        ["parameters that train", f"{sizes['trainable_values']:,} values in {len(made.trainable)}"],
        ["frozen parameters", f"{sizes['frozen_values']:,} values in {len(made.frozen)}"],
        ["nodes: training / eval", f"{sizes['training_nodes']:,} / {sizes['eval_nodes']:,}"],
        ["memory: parameters and gradients", human_size(sizes["parameter_bytes"] + sizes["gradient_bytes"])],
        ["memory: optimizer state", human_size(sizes["optimizer_bytes"])],
        [
            f"memory: values of a step, batch {batch_size}",
            human_size(sizes["activation_bytes"]) + sizes["remark"],
        ],
        ["memory in all, about", human_size(sizes["total_bytes"])],
        ["time per step", _time(measured)],
    ]
    output.line("yes: every operator between the loss and the parameters has a gradient")
    output.table("", ["", ""], rows)
    output.result(
        {"trainable": True, "remark": remark, "batch_size": batch_size, "build_seconds": spent, **sizes,
         "seconds_per_step": measured["seconds"], "measurement": measured["note"]}
    )  # fmt: skip
    return 0


def _unsupported(line: str) -> dict[str, str]:
    operator, _, rest = line.strip().partition(" ")
    node, _, reached = rest.strip().partition("  ")
    return {"operator": operator, "node": node.removeprefix("node ").strip("'"), "reached": reached.strip()}


def _measure(made: Any, batch_size: int, steps: int, *, budget: float, device: str) -> dict[str, Any]:
    """The median time of a few steps on random inputs; a note where such inputs do not fit.

    One step on a small batch tells how long the others will take: what does not fit into the budget is measured on
    fewer samples and multiplied.
    """
    from onward.cli.commands.bench import time_steps

    try:
        small = min(2, batch_size)
        # the first step on a device prepares those that follow
        cold = 0 if device == "cpu" else 1
        found = time_steps(made, batch_size=small, steps=1, warmup=cold, evaluate=False, device=device)
        first = found["step"]["median"]
        room = int(small * budget / (first * (steps + 1)))
        size = min(batch_size, max(small, room))
        if first * (steps + 1) > budget:
            steps = 1
        found = time_steps(
            made,
            batch_size=size,
            steps=steps,
            warmup=1 if first < budget / 2 else 0,
            evaluate=False,
            device=device,
        )
    except (CommandError, ValueError, RuntimeError) as error:
        return {
            "seconds": None,
            "note": f"not measured: random inputs do not fit ({str(error).splitlines()[0][:120]})",
        }
    note = f"median of {steps} steps on random inputs"
    if size < batch_size:
        note += f", {size} samples at a time and multiplied: more would take over {budget:g} s"
    return {"seconds": found["step"]["median"] * batch_size / size, "note": note}


def _time(measured: dict[str, Any]) -> str:
    if measured["seconds"] is None:
        return str(measured["note"])
    return f"{1e3 * measured['seconds']:.2f} ms ({measured['note']}, this machine)"


@contextlib.contextmanager
def _deadline(output: Output) -> Iterator[None]:
    """End the process where the check takes more time or memory than its limits: a loop of the model may never end.

    Nothing is written by a check, so that nothing is left behind.
    """
    watching, done = Watch("check", "the check"), threading.Event()

    def watch() -> None:
        while not done.wait(0.1):
            over = watching.look()
            if over is not None and not done.is_set():
                hint = f"where you trust the file, raise it: --limit {over.limit}={over.asked}"
                output.fail(f"the check took more than the limit {over.limit}, {over.allowed:,}", hint)
                sys.stderr.flush()
                sys.stdout.flush()
                os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def footprint(made: Any, batch_size: int) -> dict[str, Any]:
    """Sizes of artifacts in memory; `activation_bytes` is the most that is alive at once, run node by node."""
    state = made.checkpoint
    trained = sum(array.nbytes for array in state.trainable.values())
    frozen = sum(array.nbytes for array in state.frozen.values())
    slots = _slots(made.optimizer)
    peak, unknown = _peak(made.training.graph, batch_size)
    sizes = {
        "trainable_values": sum(array.size for array in state.trainable.values()),
        "frozen_values": sum(array.size for array in state.frozen.values()),
        "training_nodes": sum(1 for _ in made.training.graph.all_nodes()),
        "eval_nodes": sum(1 for _ in made.evaluation.graph.all_nodes()),
        "parameter_bytes": trained + frozen,
        "gradient_bytes": trained,
        "optimizer_bytes": slots * trained,
        "activation_bytes": peak,
        "values_of_unknown_size": unknown,
        "remark": f" (and {unknown} values of unknown size)" if unknown else "",
    }
    parts = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes")
    return {**sizes, "total_bytes": sum(sizes[part] for part in parts)}


def _slots(optimizer: Any) -> int:
    """How many numbers the optimizer remembers for each parameter, from its file."""

    if optimizer is None:
        return 0
    about = read_table(optimizer.metadata_props, contract.OPTIMIZER)
    return len(about.get("slots", ("momentum0", "momentum1")))


def _peak(graph: Any, batch_size: int) -> tuple[int, int]:
    """The most bytes of values that live at once, and how many have no known size."""
    nodes = list(graph)
    last: dict[Any, int] = {}
    for index, node in enumerate(nodes):
        for value in node.inputs:
            if value is not None:
                last[value] = index
    for value in graph.outputs:
        last[value] = len(nodes)
    alive = peak = unknown = 0
    freed: dict[int, int] = {}
    for index, node in enumerate(nodes):
        for value in node.outputs:
            size = _bytes(value, batch_size)
            if size is None:
                unknown += 1
                continue
            alive += size
            end = last.get(value, index)
            freed[end] = freed.get(end, 0) + size
        peak = max(peak, alive)
        alive -= freed.pop(index, 0)
    return peak, unknown


def _bytes(value: Any, batch_size: int) -> int | None:
    if value.shape is None or value.dtype is None or value.dtype.name in ("STRING", "UNDEFINED"):
        return None
    count = 1
    for dim in value.shape:
        # every dimension without a number counts as the batch, which is what it mostly is
        count *= dim if isinstance(dim, int) else batch_size
    return int(count * value.dtype.itemsize)
