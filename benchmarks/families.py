"""Takes small models of many families from torch to trained artifacts, written as their papers' code writes them.

    python benchmarks/families.py [--only NAME,…] [--seconds N]   # --write for docs/families.md

Each family is exported with default settings from a batch of four and trained with another of seven. Its first
gradient is compared with torch's in float64, five losses of SGD with torch's in float32 (twenty for those that
differentiate in forward), and the seconds of its export with those of `torch.onnx.export`.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib
import io
import json
import logging
import multiprocessing
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from onward.errors import ExportError, UnsupportedOps

Family = Callable[[], tuple[torch.nn.Module, Callable[[int], tuple[Any, ...]]]]
HERE = Path(__file__).parent
TABLES = {
    "physics": "Physics and geometry",
    "sequences": "Sequences",
    "vision": "Pictures",
    "structures": "Graphs, sets, tables, experts and types of numbers",
    "learning": "Ways of learning",
    "hugging_face": "Language models of transformers",
}
EXAMPLE, LATER = 4, 7
RATE, STEPS, LONG = 0.01, 5, 20
GRADIENT, CURVE = 1e-4, 1e-4
# Some losses amplify rounding (logarithms near zero): a curve may be this many times as far from torch's in float64 as
# torch's own in float32 is.
MULTIPLE = 4
# a curve of losses in 16 bits is as near as that type is
PRECISION = {torch.bfloat16: 3e-2, torch.float16: 4e-3}
SIXTEEN = tuple(PRECISION)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="names of families, with commas between them")
    parser.add_argument("--seconds", type=float, default=300.0, help="the most that one family may take")
    parser.add_argument("--debug", action="store_true", help="show tracebacks; no process of its own")
    parser.add_argument("--no-times", action="store_true", help="leave out torch's own exports")
    parser.add_argument("--output", type=Path, help="a JSON file for the results")
    parser.add_argument("--write", action="store_true", help="write docs/families.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    families = load_families()
    import_everything()
    names = options.only.split(",") if options.only else list(families)
    rows = {}
    for name in names:
        build = families[name]
        if options.debug:
            rows[name] = run(build, times=not options.no_times, debug=True)
        else:
            rows[name] = run_in_child(build, options.seconds, times=not options.no_times)
        print(name, json.dumps(rows[name]), flush=True)
    count = sum(row["result"] == "right" for row in rows.values())
    print(f"{count} of {len(rows)} are right")
    if options.output:
        options.output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if options.write:
        (HERE.parent / "docs" / "families.md").write_text(page(rows), encoding="utf-8")


def load_families() -> dict[str, Family]:
    """Every family by name; those that need a package which is not installed are left out."""
    sys.path.insert(0, str(HERE))
    _load_torchvision()
    families: dict[str, Family] = {}
    for title in TABLES:
        module = importlib.import_module(f"family_tables.{title}")
        needs = getattr(module, "NEEDS", {})
        for name, build in module.FAMILIES.items():
            if name in families:
                raise ValueError(f"two families are called {name}")
            if all(find_spec(package) for package in needs.get(name, ())):
                families[name] = build
    return families


def _load_torchvision() -> None:
    if find_spec("torchvision"):
        from model_zoo import _load_torchvision as load

        load()


def import_everything() -> None:
    """What the first export and the first artifacts import belongs to no family; children find it here."""
    for module in ("onward.artifacts", "onward.api", "onward.autodiff.gradient", "onnxruntime"):
        importlib.import_module(module)
    from onward.export import from_torch

    # without its check, as a runtime session's threads would not live on in a child
    from_torch(torch.nn.Linear(2, 2), torch.randn(4, 2), check=False)


def run_in_child(build: Family, seconds: float, *, times: bool) -> dict[str, Any]:
    """A row, also where a family crashes the process or takes for ever."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=lambda: sender.send(run(build, times=times)))
    child.start()
    sender.close()
    try:
        if receiver.poll(seconds):
            return receiver.recv()
        return {"result": "wrong", "reason": f"took more than {seconds:.0f} seconds"}
    except EOFError:
        return {"result": "wrong", "reason": f"the process ended with {child.exitcode}"}
    finally:
        child.join(1)
        if child.is_alive():
            child.kill()


def run(build: Family, *, times: bool, debug: bool = False) -> dict[str, Any]:
    """One family: whether it is right, how far it is from torch, and the seconds of its export."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    row: dict[str, Any] = {"result": "right"}
    try:
        model, make_batch = build()
        model.train()
        torch.manual_seed(1)
        example = make_batch(EXAMPLE)
        torch.manual_seed(2)
        later = make_batch(LATER)
        with tempfile.TemporaryDirectory() as folder:
            _follow(model, example, later, Path(folder), row, times=times)
    except Exception as error:
        if debug:
            traceback.print_exc()
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = " ".join([f"{type(error).__name__}:", *lines[:4]])
        row["reason"] = reason.replace(f"{HERE.parent}/", "")[:600]
        refused = isinstance(error, (ExportError, UnsupportedOps)) or "the model fixes axis" in str(error)
        row["result"] = "refused" if refused else "wrong"
    return row


def _follow(
    model: torch.nn.Module,
    example: tuple[Any, ...],
    later: tuple[Any, ...],
    folder: Path,
    row: dict[str, Any],
    *,
    times: bool,
) -> None:
    from onward import artifacts
    from onward.api import CheckpointState, Module, Optimizer
    from onward.export import from_torch

    original = copy.deepcopy(model)  # old hooks leave tensors in a module that cannot be copied
    # what either imports at its first call belongs to no family
    from_torch(torch.nn.Linear(2, 2), torch.randn(4, 2), folder / "first.onnx")
    if times:
        row["torch_seconds"], row["tracer_seconds"] = torch_export_seconds(model, example)
    begun = time.process_time()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            from_torch(model, example, folder / "forward.onnx")
    finally:
        row["seconds"] = round(time.process_time() - begun, 2)
    row["warnings"] = [str(w.message)[:300] for w in caught if w.filename == __file__]
    model = original
    names, tensors, first = _leaves_and_output(model, later)
    target = None
    if first.dim():
        torch.manual_seed(3)
        target = torch.randn((torch.view_as_real(first) if first.is_complex() else first).shape)
    artifacts.generate_artifacts(
        folder / "forward.onnx",
        loss=None if target is None else artifacts.LossType.MSELoss,
        optimizer=artifacts.OptimType.SGD,
        artifact_directory=folder,
    )
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(RATE)
    arrays = {name: _array(tensor) for name, tensor in zip(names, tensors)}
    if target is not None:
        double = first.dtype == torch.float64
        arrays["target"] = target.numpy().astype(np.float64 if double else np.float32)
    feeds = [arrays.get(name, arrays.get("target")) for name in module.input_names()]
    steps = LONG if getattr(model, "differentiates", False) else STEPS
    losses = []
    for step in range(steps):
        losses.append(float(np.asarray(module(*feeds)).ravel()[0]))
        if not step:
            row["gradient"] = gradient_error(model, later, target, state)
        optimizer.step()
        module.lazy_reset_grad()
    row["losses"] = [losses[0], losses[-1]]
    expected = torch_losses(copy.deepcopy(model), later, target, steps)
    row["curve"] = distance(losses, expected)
    if not row["gradient"] <= GRADIENT:
        raise AssertionError(f"a gradient is {row['gradient']:.1e} of the norm from torch's in float64")
    if not row["curve"] <= tolerance(model):
        with in_float64():
            wide = pytree.tree_map(_widen, copy.deepcopy(later))
            exact = torch_losses(widened(model), wide, _widen(target), steps)
        row["rounding"] = distance(expected, exact)
        if not distance(losses, exact) <= max(tolerance(model), MULTIPLE * row["rounding"]):
            raise AssertionError(f"the losses are {losses}, torch's {expected}, in float64 {exact}")


def distance(losses: list[float], expected: list[float]) -> float:
    """The largest relative distance of two curves."""
    return float(max(abs(a - b) / max(abs(b), 1e-3) for a, b in zip(losses, expected)))


def tolerance(model: torch.nn.Module) -> float:
    """How far losses may be from torch's."""
    types = {parameter.dtype for parameter in model.parameters()} | {getattr(model, "computes_in", None)}
    return max([CURVE, *(share for dtype, share in PRECISION.items() if dtype in types)])


def _leaves_and_output(
    model: torch.nn.Module, batch: tuple[Any, ...]
) -> tuple[list[str], list[torch.Tensor], torch.Tensor]:
    """The names and tensors of a batch, and what a copy of the module gives for it first."""
    from onward.export.torch.flatten import Adapter, bind_arguments

    adapter = Adapter(copy.deepcopy(model), *bind_arguments(model, batch, None))
    tensors = [leaf.value.detach() for leaf in adapter.inputs]
    return [leaf.name for leaf in adapter.inputs], tensors, adapter(*tensors)[0]


def _array(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return (tensor.float() if tensor.dtype in SIXTEEN else tensor).numpy()


def loss_of(model: torch.nn.Module, batch: tuple[Any, ...], target: torch.Tensor | None) -> torch.Tensor:
    """The first output, or its squared distance from the target."""
    output = model(*batch)
    while not isinstance(output, torch.Tensor):
        output = next(iter(output.values() if isinstance(output, dict) else output))
    if target is None:
        return output
    if output.is_complex():
        output = torch.view_as_real(output)
    return torch.nn.functional.mse_loss(output, target.to(output.dtype))


class _Double(TorchFunctionMode):
    """Whatever asks for 32 or 16 bits gets 64."""

    WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128} | dict.fromkeys(
        SIXTEEN, torch.float64
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("float", "half", "bfloat16") and func is not torch.empty:
            return args[0].double()
        args, kwargs = pytree.tree_map(self._widen, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _widen(self, value: Any) -> Any:
        return self.WIDER.get(value, value) if isinstance(value, torch.dtype) else value


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """New tensors have 64 bits, and none gets fewer."""
    torch.set_default_dtype(torch.float64)
    try:
        with _Double():
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def _widen(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(_Double.WIDER.get(value.dtype, value.dtype))
    return value


def widened(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of a module in float64."""
    exact = copy.deepcopy(model)
    for module in exact.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    wide = _widen(tensor.detach())
                    requires = tensor.requires_grad
                    tensors[name] = (
                        torch.nn.Parameter(wide, requires) if tensors is module._parameters else wide
                    )
    _tie_again(model, exact)
    return exact


def gradient_error(
    model: torch.nn.Module, batch: tuple[Any, ...], target: torch.Tensor | None, state: Any
) -> float:
    """The largest distance of a gradient from torch's in float64, as a share of the norm of all."""
    exact = widened(model)
    with in_float64():
        loss = loss_of(exact, pytree.tree_map(_widen, copy.deepcopy(batch)), _widen(target))
        parameters = {name: p for name, p in exact.named_parameters() if p.requires_grad}
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    reference = {
        name: (torch.view_as_real(g) if g.is_complex() else g).numpy()
        for name, g in zip(parameters, gradients)
        if g is not None
    }
    norm = float(np.sqrt(sum((g**2).sum() for g in reference.values()))) or 1.0
    untrained = [name for name, g in reference.items() if name not in state.parameters and np.any(g)]
    if untrained:
        raise AssertionError(f"no gradient of {', '.join(untrained)}")
    distances = [
        float(np.abs(np.asarray(state.parameters[name].grad, np.float64) - g).max())
        for name, g in reference.items()
        if name in state.parameters
    ]
    return max(distances) / norm


def _tie_again(model: torch.nn.Module, wide: torch.nn.Module) -> None:
    """Let parameters that are one in the module be one in its copy."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            owner, _, attribute = name.rpartition(".")
            setattr(wide.get_submodule(owner), attribute, wide.get_parameter(first[id(parameter)]))
        first.setdefault(id(parameter), name)


def torch_losses(
    model: torch.nn.Module, batch: tuple[Any, ...], target: torch.Tensor | None, steps: int
) -> list[float]:
    """What torch's own SGD goes through."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], RATE)
    losses = []
    for _ in range(steps):
        loss = loss_of(model, copy.deepcopy(batch), target)
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def torch_export_seconds(model: torch.nn.Module, example: tuple[Any, ...]) -> tuple[float | str, float | str]:
    """CPU seconds of `torch.onnx.export` as it is by default, and with the tracer."""
    as_by_default: dict[str, Any] = {"dynamo": True}
    from_tracer: dict[str, Any] = {
        "dynamo": False,
        "training": torch.onnx.TrainingMode.TRAINING,
        "opset_version": 18,
    }
    seconds: list[float | str] = []
    for options in (as_by_default, from_tracer):
        with tempfile.TemporaryDirectory() as folder, _silence():
            begun = time.process_time()
            try:
                target = str(Path(folder) / "model.onnx")
                torch.onnx.export(
                    copy.deepcopy(model), copy.deepcopy(example), target, verbose=False, **options
                )
                seconds.append(round(time.process_time() - begun, 2))
            except Exception:
                seconds.append("cannot")
    return seconds[0], seconds[1]


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Torch's exporters write whole graphs to the terminal where they fail."""
    logging.disable(logging.CRITICAL)
    backend: Any = torch._C
    printing = backend._jit_onnx_log
    backend._jit_onnx_log = lambda *parts: None
    quiet = io.StringIO()
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(quiet),
            contextlib.redirect_stderr(quiet),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        backend._jit_onnx_log = printing
        logging.disable(logging.NOTSET)


def page(rows: dict[str, dict[str, Any]]) -> str:
    """The tables in Markdown."""
    counts = {
        kind: sum(row["result"] == kind for row in rows.values()) for kind in ("right", "refused", "wrong")
    }
    lines = [
        "# Families of models",
        "",
        f"Written by `benchmarks/families.py`; do not edit. torch {torch.__version__.split('+')[0]}.",
        "",
        f"{len(rows)} small models, written as their papers' code writes them: {counts['right']} are right,",
        f"{counts['refused']} are refused, {counts['wrong']} are wrong. Each is exported with default settings from a",
        f"batch of {EXAMPLE} and trained with another of {LATER}. **gradient**: the largest distance of a gradient of",
        "the first step from torch's in float64, as a share of the norm of all. **curve**: the largest relative",
        f"distance of {STEPS} losses of SGD from torch's in float32, of {LONG} for modules that differentiate in",
        "forward. **export**: CPU seconds of `from_torch` with its checks; **torch**: of `torch.onnx.export`, as it",
        "is by default and with the tracer (–: not measured). **note**: what `from_torch` warns of.",
    ]
    for table, title in TABLES.items():
        own = importlib.import_module(f"family_tables.{table}").FAMILIES
        lines += [
            "",
            f"## {title}",
            "",
            "| family | gradient | curve | export | torch | note |",
            "|---|---|---|---|---|---|",
        ]
        lines += [_line(name, rows[name]) for name in own if name in rows]
    return "\n".join([*lines, ""])


def _line(name: str, row: dict[str, Any]) -> str:
    numbers = [f"{row[key]:.0e}" if key in row else "–" for key in ("gradient", "curve")]
    torch_seconds = " / ".join(str(row.get(key, "–")) for key in ("torch_seconds", "tracer_seconds"))
    notes = [f"**{row['result']}**: {row['reason']}"] if "reason" in row else []
    notes += [_short(line) for line in row.get("warnings", [])]
    return f"| {name} | {' | '.join(numbers)} | {row.get('seconds', '–')} | {torch_seconds} | {'; '.join(notes)} |"


def _short(line: str) -> str:
    """The first part of a warning, without bars that would end a cell."""
    return line.split(", because ")[0].split(": the module takes")[0].replace("|", "\\|")


if __name__ == "__main__":
    main()
