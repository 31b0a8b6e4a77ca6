"""`onward check`: can this model be trained, which operators prevent it, and what would a step cost?"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onward import contract
from onward.cli.choices import DeviceOption, LossChoice, OptimizerChoice, loss_of, optimizer_of
from onward.cli.command import command
from onward.cli.errors import CommandError
from onward.cli.output import Output, human_size
from onward.cli.paths import read_model
from onward.cli.shared_options import FreezeOption, OptimizerOption, TrainOption, advise_on_loss, known_names
from onward.model_metadata import read_table
from onward.run_limits import Watch

if TYPE_CHECKING:
    import onnx_ir as ir

    from onward.artifacts.generate import Artifacts
    from onward.errors import UnsupportedOps


@command(
    "onward check model.onnx",
    "onward check model.onnx -l cross-entropy --batch-size 8 --json",
)
def check(
    output: Output,
    model: Annotated[Path, typer.Argument(help="The forward model, an ONNX file.", show_default=False)],
    loss: Annotated[
        LossChoice,
        typer.Option("--loss", "-l", help="The loss; 'none' if the model's first output already is it."),
    ] = LossChoice.MSE,
    optimizer: OptimizerOption = OptimizerChoice.ADAMW,
    train: TrainOption = None,
    freeze: FreezeOption = None,
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
    from onward.artifacts.generate import build_artifacts
    from onward.errors import UnsupportedOps
    from onward.runtime.devices import find_device

    # from the first read on: a hostile model may hang in any of the steps below
    with _deadline(output):
        read_model(model)
        find_device(device)
        remark = advise_on_loss(model, loss)
        if remark:
            output.note(remark)
        started = time.perf_counter()
        try:
            with output.working("differentiating"), known_names():
                artifacts = build_artifacts(
                    str(model),
                    requires_grad=list(train) if train else None,
                    frozen_params=list(freeze) if freeze else None,
                    loss=loss_of(loss),
                    optimizer=optimizer_of(optimizer),
                )
        except UnsupportedOps as error:
            _report_unsupported(output, error)
            return 2
        result = {"build_seconds": time.perf_counter() - started, **footprint(artifacts, batch_size)}
        measured: dict[str, Any] = {"seconds": None, "note": "not asked for"}
        if steps:
            with output.working("measuring steps"):
                measured = _measure(artifacts, batch_size, steps, budget=seconds, device=device)
        result |= {"seconds_per_step": measured["seconds"], "measurement": measured["note"]}
        _report(output, artifacts, batch_size, result)
        output.result({"trainable": True, "remark": remark, "batch_size": batch_size, **result})
    return 0


def _report(output: Output, artifacts: Artifacts, batch_size: int, result: dict[str, Any]) -> None:
    time_per_step = result["measurement"]
    if result["seconds_per_step"] is not None:
        time_per_step = f"{1e3 * result['seconds_per_step']:.2f} ms ({time_per_step}, this machine)"
    unknown = result["values_of_unknown_size"]
    remark = f" (and {unknown} values of unknown size)" if unknown else ""
    rows = [
        ["parameters that train", f"{result['trainable_values']:,} values in {len(artifacts.trainable)}"],
        ["frozen parameters", f"{result['frozen_values']:,} values in {len(artifacts.frozen)}"],
        ["nodes: training / eval", f"{result['training_nodes']:,} / {result['eval_nodes']:,}"],
        [
            "memory: parameters and gradients",
            human_size(result["parameter_bytes"] + result["gradient_bytes"]),
        ],
        ["memory: optimizer state", human_size(result["optimizer_bytes"])],
        [
            f"memory: values of a step, batch {batch_size}",
            human_size(result["activation_bytes"]) + remark,
        ],
        ["memory in all, about", human_size(result["total_bytes"])],
        ["time per step", time_per_step],
    ]
    output.line("yes: every operator between the loss and the parameters has a gradient")
    output.table("", ["", ""], rows)


def _report_unsupported(output: Output, error: UnsupportedOps) -> None:
    head, *operators, _ = str(error).splitlines()  # the last line says what to do in Python
    for line in (f"no: {head}", *operators):
        output.line(line)
    output.line("freeze those parameters with --freeze, or add a rule: docs/adding-a-gradient.md")
    output.result({"trainable": False, "reason": head, "operators": list(map(_unsupported, operators))})


def _unsupported(line: str) -> dict[str, str]:
    operator, _, where = line.strip().partition(" ")
    node, _, reached = where.strip().partition("  ")
    return {"operator": operator, "node": node.removeprefix("node ").strip("'"), "reached": reached.strip()}


def _measure(
    artifacts: Artifacts, batch_size: int, steps: int, *, budget: float, device: str
) -> dict[str, Any]:
    """The median time of a few steps on random inputs; a note where such inputs do not fit.

    One step on a small batch tells how long the others will take: what does not fit into the budget is measured on
    fewer samples and multiplied.
    """
    from onward.cli.commands.bench import time_steps

    try:
        small = min(2, batch_size)
        # the first step on a device prepares those that follow
        cold = 0 if device == "cpu" else 1
        times = time_steps(artifacts, batch_size=small, steps=1, warmup=cold, evaluate=False, device=device)
        first = times["step"]["median"]
        size = min(batch_size, max(small, int(small * budget / (first * (steps + 1)))))
        if first * (steps + 1) > budget:
            steps = 1
        warmup = 1 if first < budget / 2 else 0
        times = time_steps(
            artifacts, batch_size=size, steps=steps, warmup=warmup, evaluate=False, device=device
        )
    except (CommandError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0][:120]
        return {"seconds": None, "note": f"not measured: random inputs do not fit ({reason})"}
    note = f"median of {steps} steps on random inputs"
    if size < batch_size:
        note += f", {size} samples at a time and multiplied: more would take over {budget:g} s"
    return {"seconds": times["step"]["median"] * batch_size / size, "note": note}


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
                # not sys.exit: the main thread may be inside of onnxruntime, which does not come back
                os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def footprint(artifacts: Artifacts, batch_size: int) -> dict[str, int]:
    """Sizes of artifacts in memory; `activation_bytes` is the most that is alive at once, run node by node."""
    state: Any = artifacts.checkpoint  # with values, as it was just made
    # gradients have the size of what they are of
    trained = sum(array.nbytes for array in state.trainable.values())
    peak, unknown = _peak(artifacts.training.graph, batch_size)
    parts = {
        "parameter_bytes": trained + sum(array.nbytes for array in state.frozen.values()),
        "gradient_bytes": trained,
        "optimizer_bytes": _count_slots(artifacts.optimizer) * trained,
        "activation_bytes": peak,
    }
    return {
        "trainable_values": sum(array.size for array in state.trainable.values()),
        "frozen_values": sum(array.size for array in state.frozen.values()),
        "training_nodes": sum(1 for _ in artifacts.training.graph.all_nodes()),
        "eval_nodes": sum(1 for _ in artifacts.evaluation.graph.all_nodes()),
        **parts,
        "values_of_unknown_size": unknown,
        "total_bytes": sum(parts.values()),
    }


def _count_slots(optimizer: ir.Model | None) -> int:
    """How many numbers the optimizer remembers for each parameter, from its file."""
    if optimizer is None:
        return 0
    about = read_table(optimizer.metadata_props, contract.OPTIMIZER)
    return len(about.get("slots", ("momentum0", "momentum1")))


def _peak(graph: ir.Graph, batch_size: int) -> tuple[int, int]:
    """The most bytes of values that live at once, and how many have no known size."""
    nodes = list(graph)
    last: dict[ir.Value, int] = {}
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
            # counted apart: a sum with a guess in it would look as exact as the others
            if size is None:
                unknown += 1
                continue
            alive += size
            end = last.get(value, index)
            freed[end] = freed.get(end, 0) + size
        peak = max(peak, alive)
        alive -= freed.pop(index, 0)
    return peak, unknown


def _bytes(value: ir.Value, batch_size: int) -> int | None:
    if value.shape is None or value.dtype is None or value.dtype.name in ("STRING", "UNDEFINED"):
        return None
    count = 1
    for dim in value.shape:
        # every dimension without a number counts as the batch, which is what it mostly is
        count *= dim if isinstance(dim, int) else batch_size
    return int(count * value.dtype.itemsize)
