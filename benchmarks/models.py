"""Take many architectures through every path, and write docs/models.md: one command for one page.

    python benchmarks/models.py [--only NAME,…] [--family NAME] [--missing] [--stale] [--seconds N]

Each row is a process of its own: export for training (outputs and statistics compared with torch), artifacts and
three steps of AdamW, the gradient of the first of them against torch autograd, export for inference.
Results are kept in docs/models.json, so that the page can be made in pieces: `--missing` runs what has no
result yet, `--stale` also what another state of the code gave, quick rows first; `--seconds` stops starting rows
after that time.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import multiprocessing
import os
import re
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from model_zoo import CHANGES, Entry, entries

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "docs" / "models.json", ROOT / "docs" / "models.md"
FAMILIES = {
    "torch": "Layers and small networks", "transformers": "Hugging Face types",
    "torchvision": "torchvision", "timm": "timm",
}  # fmt: skip
PATHS = ("export", "gradient", "train", "inference")
TIMEOUT = 900
# of AdamW, whose first steps move every weight by as much: deep networks need the smaller ones
RATES = (1e-4, 1e-5, 1e-6)
# A ReLU or max pooling within rounding of a tie may fall on either side, in any engine: then other inputs are drawn.
DRAWS = 3


def run(entry: Entry) -> dict[str, Any]:
    """Every path of one architecture: figures where it works, the reason where it does not."""
    torch.manual_seed(0)
    row: dict[str, Any] = {"family": entry.family}
    model, args, kwargs = entry.build()
    row["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    with tempfile.TemporaryDirectory() as folder:
        steps = (
            ("export", lambda: export(model, args, kwargs, Path(folder), changes=entry.changes)),
            ("gradient", lambda: gradient(model, args, kwargs, Path(folder))),
            ("train", lambda: train(Path(folder))),
            ("inference", lambda: inference(model, args, kwargs)),
        )
        for name, step in steps:
            if name in ("gradient", "train") and "error" in row.get("export", {}):
                row[name] = {"error": "not exported"}
                continue
            begun = time.monotonic()
            try:
                row[name] = {**step(), "seconds": round(time.monotonic() - begun, 1)}
            except Exception as error:
                row[name] = {"error": _line(error)}
                if os.environ.get("MODELS_DEBUG"):
                    traceback.print_exc()
    return row


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join([type(error).__name__ + ":", *lines[:3]])[:400]


def export(
    model: torch.nn.Module, args: Any, kwargs: Any, folder: Path, *, changes: bool = False
) -> dict[str, Any]:
    """For training, with its checks; with `changes`, graphs that were changed must not pass them."""
    from onward.export import from_torch

    refused: dict[str, bool] = {}
    with (
        warnings.catch_warnings(record=True) as heard,
        _judging_changes(refused) if changes else nullcontext(),
    ):
        warnings.simplefilter("always")
        # gradients have a column of their own, through the artifacts
        from_torch(model, args, folder / "forward.onnx", kwargs=kwargs or None, check="outputs")
    # where packages are installed says nothing about the model
    said = [
        re.sub(r"\S*site-packages/", "", str(w.message)) for w in heard if issubclass(w.category, UserWarning)
    ]
    proto = onnx.load(folder / "forward.onnx", load_external_data=False)
    origin = next(json.loads(e.value) for e in proto.metadata_props if e.key == "onward.export")
    shapes = [[d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in proto.graph.input]
    axes = sorted({size for shape in shapes for size in shape if isinstance(size, str)})
    if not all(refused.values()):
        raise AssertionError(
            f"changed graphs pass: {', '.join(n for n, caught in refused.items() if not caught)}"
        )
    row = {"exporter": origin["exporter"], "axes": axes, "said": [line[:200] for line in said]}
    return {**row, "changes_refused": sorted(refused)} if changes else row


@contextmanager
def _judging_changes(refused: dict[str, bool]) -> Iterator[None]:
    """Within it, the comparison of an export also judges changed copies of the graph, at the exported sizes."""
    module = importlib.import_module("onward.export.torch.from_torch")
    compare = module.compare_with_torch

    def also_changed(plan: Any, proto: onnx.ModelProto, weights: Any, **options: Any) -> Any:
        report = compare(plan, proto, weights, **options)
        if report.passed and not refused:
            for change in CHANGES:
                copy = onnx.ModelProto()
                copy.CopyFrom(proto)
                try:
                    change(copy.graph)
                except (IndexError, ValueError):  # no batch norm, no bias
                    continue
                judged = compare(plan, copy, weights, **{**options, "groups": []})
                ran = not any("onnxruntime failed" in difference.reason for difference in judged)
                if judged.passed and _largest(judged) <= 2 * _largest(report):
                    continue  # the numbers are those of the true graph: no comparison of numbers could tell
                refused[change.__name__[1:]] = ran and not judged.passed
        return report

    module.compare_with_torch = also_changed
    try:
        yield
    finally:
        module.compare_with_torch = compare


def _largest(report: Any) -> float:
    return max(difference.max_abs for difference in report)


def gradient(model: torch.nn.Module, args: Any, kwargs: Any, folder: Path) -> dict[str, Any]:
    """Of the mean square of the first output against random numbers, through the artifacts; against torch."""
    from onward.api import CheckpointState, Module
    from onward.artifacts import LossType, OptimType, generate_artifacts
    from onward.export.torch.flatten import Adapter, bind_arguments
    from onward.export.torch.float64 import in_float64
    from onward.export.torch.modules import borrowed, clean_names, prepared

    generate_artifacts(
        folder / "forward.onnx", loss=LossType.MSELoss, optimizer=OptimType.AdamW, artifact_directory=folder
    )
    names = clean_names(model)
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    found: dict[str, Any] = {}
    with borrowed(model), prepared(model, training=True), torch.enable_grad():
        adapter = Adapter(model, *bind_arguments(model, args, kwargs))
        chosen = {names[raw]: p for raw, p in model.named_parameters() if p.requires_grad}

        def autograd(inputs: list[torch.Tensor], goal: torch.Tensor) -> tuple[float, dict[str, np.ndarray]]:
            loss = torch.nn.functional.mse_loss(adapter(*inputs)[0], goal)
            got = torch.autograd.grad(loss, list(chosen.values()), allow_unused=True)
            return float(loss.detach()), {n: g.double().numpy() for n, g in zip(chosen, got) if g is not None}

        for draw in range(DRAWS):
            generator = torch.Generator().manual_seed(draw)
            tensors = [leaf.value for leaf in adapter.inputs]
            if draw:
                tensors = [
                    torch.randn(t.shape, generator=generator) if t.is_floating_point() else t for t in tensors
                ]
            first = adapter(*tensors)[0]
            target = torch.randn(first.shape, generator=torch.Generator().manual_seed(1))
            loss, plain = autograd(tensors, target)
            with in_float64(model):
                wide = [t.double() if t.dtype == torch.float32 else t for t in tensors]
                try:
                    exact_loss, exact = autograd(wide, target.double())
                except Exception:
                    exact_loss, exact = loss, plain
            given = {leaf.name: t.numpy() for leaf, t in zip(adapter.inputs, tensors)}
            feeds = [(given | {"target": target.numpy()})[name] for name in module.input_names()]
            mine = float(module(*feeds))
            module.lazy_reset_grad()
            got = {name: state.parameters[name].grad for name in plain if name in state.parameters}
            shared = [name for name in got if got[name] is not None and name in exact]
            missing = sorted(n for n in exact if n not in shared and np.any(exact[n]))
            if missing:
                raise AssertionError(f"no gradient of {', '.join(missing[:3])}")
            error, own = _apart(got, exact, shared), _apart(plain, exact, shared)
            np.savez(folder / "batch.npz", *feeds)
            found = {"error_of_gradient": error, "torchs_own": own, "loss": mine, "draws": draw + 1}
            near = abs(mine - exact_loss) <= max(1e-3 * max(1.0, abs(loss)), 10 * abs(loss - exact_loss))
            if near and error <= max(1e-4, 10 * own):
                return found
    raise AssertionError(
        f"gradient {found['error_of_gradient']:.1e} from float64, torch's own {found['torchs_own']:.1e}; loss "
        f"{found['loss']} and {loss}, with {DRAWS} draws of the inputs"
    )


def _apart(some: dict[str, Any], exact: dict[str, np.ndarray], shared: list[str]) -> float:
    norm = float(np.sqrt(sum((exact[n] ** 2).sum() for n in exact))) or 1.0
    return float(np.sqrt(sum(((some[n] - exact[n]) ** 2).sum() for n in shared))) / norm


def train(folder: Path) -> dict[str, Any]:
    """Three steps of AdamW on one batch: the loss goes down, at the largest rate that does not overshoot."""
    with np.load(folder / "batch.npz") as batch:
        feeds = [batch[name] for name in batch.files]
    losses: list[float] = []
    for rate in RATES:
        losses = _steps(folder, feeds, rate)
        if losses[-1] < losses[0]:
            return {"losses": losses, "rate": rate}
    raise AssertionError(f"the loss does not go down: {losses}")


def _steps(folder: Path, feeds: list[np.ndarray], rate: float) -> list[float]:
    from onward.api import CheckpointState, Module, Optimizer

    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(rate)
    losses = []
    for _ in range(4):
        losses.append(float(module(*feeds)))
        optimizer.step()
        module.lazy_reset_grad()
    return losses


def inference(model: torch.nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """For inference, compared with torch at other sizes too."""
    from onward.export import from_torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        proto = from_torch(model, args, kwargs=kwargs or None, training=False)
    return {"nodes": len(proto.graph.node)}


def in_a_child(entry: Entry) -> dict[str, Any]:
    """A row, also where it crashes or takes for ever."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def work() -> None:
        try:
            theirs.send(run(entry))
        except Exception as error:
            theirs.send({"family": entry.family, "export": {"error": _line(error)}})

    child = context.Process(target=work)
    child.start()
    theirs.close()
    try:
        if ours.poll(TIMEOUT):
            return ours.recv()
        return {"family": entry.family, "export": {"error": f"took more than {TIMEOUT} seconds"}}
    except EOFError:
        return {"family": entry.family, "export": {"error": f"the process ended with {child.exitcode}"}}
    finally:
        child.join(1)
        if child.is_alive():
            child.kill()


# Why a cell is red, in words; what is not here says it in its own error.
REASONS: dict[str, str] = {}


def page(results: dict[str, Any]) -> str:
    versions = results["versions"]
    rows = results["rows"]
    green = sum(all("error" not in row.get(path, {"error": ""}) for path in PATHS) for row in rows.values())
    known = len({entry.name for entry in entries()})
    lines = [
        "# Models and paths",
        "",
        f"Written by `benchmarks/models.py`; do not edit. {', '.join(f'{k} {v}' for k, v in versions.items())}.",
        "",
        f"{len(rows)} of {known} architectures were run, with random weights; {green} have no red cell.",
        _states(rows),
        "**export**: `from_torch` for training, compared with torch in outputs and running statistics, at other sizes",
        "too. **gradient**: of the artifacts' first step against torch autograd in float64, as a share of its norm",
        "(torch's own float32 in brackets where that is above 1e-6); where a ReLU or a max pooling is within rounding",
        "of a tie, which either engine may break otherwise, other inputs are drawn, up to twice (draws). **train**:",
        "three steps of AdamW on one batch lower the loss, at the largest rate of 1e-4, 1e-5, 1e-6 that does not",
        "overshoot. **inference**: `from_torch(training=False)`, compared with torch too. *refused*: the same",
        "comparison refuses the graph with another epsilon of one norm, another momentum of one batch norm, rows and",
        "columns exchanged before one convolution (axis), or one bias less; left out is what a network does not have,",
        "and what changes none of its numbers.",
    ]
    for family, title in FAMILIES.items():
        chosen = {name: row for name, row in rows.items() if row["family"] == family}
        if not chosen:
            continue
        lines += [
            "",
            f"## {title}",
            "",
            "| model | export | gradient | train | inference |",
            "|---|---|---|---|---|",
        ]
        for name, row in chosen.items():
            cells = [_cell(path, row.get(path, {"error": "not run"})) for path in PATHS]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    red = {n: row for n, row in rows.items() if any("error" in row.get(p, {"error": ""}) for p in PATHS)}
    if red:
        lines += ["", "## Red cells", ""]
        for name, row in red.items():
            path = next(p for p in PATHS if "error" in row.get(p, {"error": "not run"}))
            reason = REASONS.get(name) or row.get(path, {"error": "not run"})["error"]
            lines.append(f"- **{name}**, {path}: {_plain(reason)}")
    return "\n".join(lines) + "\n"


def _states(rows: dict[str, Any]) -> str:
    """Of how many states of the code the rows are."""
    counts = Counter(row.get("state", "") for row in rows.values()).most_common()
    if len(counts) < 2:
        return "All rows were made by the same version of the code."
    others = len(rows) - counts[0][1]
    return f"{counts[0][1]} rows were made by the same version of the code, the other {others} by others."


def _seconds(row: dict[str, Any] | None) -> float:
    """What a row took when it was last run; much, where it never was."""
    return sum(row.get(path, {}).get("seconds", 0.0) for path in PATHS) if row else TIMEOUT


def _source() -> str:
    """A digest of the package's code: which state a row is of."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "src" / "onward").rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _plain(text: str) -> str:
    return text.replace("|", "/").replace("<", "&lt;").replace(str(ROOT), "")


def _cell(path: str, result: dict[str, Any]) -> str:
    if "error" in result:
        return "**no**"
    if path == "export":
        axes = ", ".join(result["axes"]) or "fixed sizes"
        caught = result.get("changes_refused")
        return (
            axes
            + (" (torch.export)" if result["exporter"] == "dynamo" else "")
            + (f"; refused: {', '.join(caught)}" if caught else "")
        )
    if path == "gradient":
        own = f" ({result['torchs_own']:.0e})" if result["torchs_own"] > 1e-6 else ""
        draws = f", {result['draws']} draws" if result.get("draws", 1) > 1 else ""
        return f"{result['error_of_gradient']:.0e}{own}{draws}"
    if path == "train":
        return f"{result['losses'][0]:.3g} → {result['losses'][-1]:.3g}"
    return "yes"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="names, with commas between")
    parser.add_argument("--family", choices=list(FAMILIES))
    parser.add_argument(
        "--missing", action="store_true", help="only rows that have no result yet, or a red cell"
    )
    parser.add_argument(
        "--stale",
        action="store_true",
        help="as --missing, and rows of another state of the code; quick ones first",
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no row after that time")
    options = parser.parse_args()
    import transformers

    torch.set_num_threads(1)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": {}}
    results["versions"] = {
        "torch": torch.__version__.partition("+")[0],
        "onnx": onnx.__version__,
        "onnxruntime": onnxruntime.__version__,
        "transformers": transformers.__version__,
        **{name: version(name) for name in ("torchvision", "timm") if find_spec(name)},
    }
    known, begun, state = entries(), time.monotonic(), _source()
    only = set(filter(None, options.only.split(",")))
    for entry in (
        sorted(known, key=lambda e: _seconds(results["rows"].get(e.name))) if options.stale else known
    ):
        old = results["rows"].get(entry.name)
        done = old is not None and all("error" not in old.get(path, {"error": ""}) for path in PATHS)
        done = done and (not options.stale or old.get("state") == state)
        if (only and entry.name not in only) or (options.family and entry.family != options.family):
            continue
        if find_spec(entry.family) is None:  # a family is named by the package that it comes from
            continue
        if ((options.missing or options.stale) and done) or time.monotonic() - begun > options.seconds:
            continue
        row = {**in_a_child(entry), "state": state}
        results["rows"][entry.name] = row
        bad = [f"{path}: {row[path]['error']}" for path in PATHS if "error" in row.get(path, {})]
        print(f"{entry.name:32} {'; '.join(bad) or 'ok'}", flush=True)
        order = {e.name: results["rows"][e.name] for e in known if e.name in results["rows"]}
        results["rows"] = order
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        PAGE.write_text(page(results))


if __name__ == "__main__":
    main()
