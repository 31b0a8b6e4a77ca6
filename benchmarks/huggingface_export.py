"""Time to export Hugging Face models to a folder, checked against torch: Onward beside optimum.

    pip install --target OPTIMUM optimum-onnx "transformers<4.58"
    python benchmarks/huggingface_export.py --optimum OPTIMUM [--rounds 3] [--threads 1] [--shapes minilm vit]

Each tool has processes of its own, and the two take turns; both see the same transformers, the one that optimum needs.
A process exports a saved folder twice: for Onward with `from_transformers(folder, task, out)`, for optimum with
`main_export(folder, output=out, task=…)`, whose check of outputs is on by default. *Command* is the time from the start
of the process to the end of its first export, imports included; *call* is the second export alone, with everything
imported. Weights are random, at the shapes of published models.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# shape: class of the configuration, its settings, class of the model, our task, optimum's task
SHAPES: dict[str, tuple[str, dict[str, Any], str, str, str]] = {
    "MiniLM": (
        "BertConfig",
        {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
        "BertModel",
        "default",
        "feature-extraction",
    ),
    "BERT-base": ("BertConfig", {}, "BertForSequenceClassification", "text-classification", "text-classification"),
    "ViT-base": ("ViTConfig", {}, "ViTForImageClassification", "image-classification", "image-classification"),
    "SmolLM-135M": (
        "LlamaConfig",
        {
            "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
            "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True,
        },
        "LlamaForCausalLM",
        "text-generation",
        "text-generation-with-past",
    ),
    "Whisper-tiny": (
        "WhisperConfig",
        {
            "d_model": 384, "encoder_layers": 4, "decoder_layers": 4, "encoder_attention_heads": 6,
            "decoder_attention_heads": 6, "encoder_ffn_dim": 1536, "decoder_ffn_dim": 1536,
        },
        "WhisperForConditionalGeneration",
        "automatic-speech-recognition",
        "automatic-speech-recognition-with-past",
    ),
    "T5-small": (
        "T5Config",
        {"decoder_start_token_id": 0},
        "T5ForConditionalGeneration",
        "text2text",
        "text2text-generation-with-past",
    ),
}  # fmt: skip
WORDS = (
    "the",
    "ferry",
    "leaves",
    "at",
    "noon",
    "nobody",
    "expected",
    "a",
    "small",
    "library",
    "train",
    "network",
)
KINDS = ("command", "command, processor", "call", "call, processor")


def save(shape: str, folder: Path) -> None:
    """Write a model of a shape with random weights, and a small tokenizer or processor for it."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    config_class, settings, model_class, *_ = SHAPES[shape]
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**settings))
    model.save_pretrained(folder)
    if shape == "ViT-base":
        transformers.ViTImageProcessor().save_pretrained(folder)
        return
    if shape == "Whisper-tiny":
        transformers.WhisperFeatureExtractor().save_pretrained(folder)
    vocabulary = {word: index for index, word in enumerate(["[PAD]", "[UNK]", "</s>", *sorted(WORDS)])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", eos_token="</s>", model_max_length=512
    ).save_pretrained(folder)


def export(shape: str, tool: str, folder: Path, output: Path) -> dict[str, float]:
    """Seconds on the clock and of the processor."""
    ours, theirs = SHAPES[shape][3:]
    call: Any
    if tool == "onward":
        from onward.export import from_transformers

        call = lambda place: from_transformers(str(folder), ours, place)  # noqa: E731
    else:
        from optimum.exporters.onnx import main_export

        call = lambda place: main_export(str(folder), output=place, task=theirs)  # noqa: E731
    call(output / "first")
    command = time.time() - float(os.environ["STARTED"]), time.process_time()
    start, used = time.perf_counter(), time.process_time()
    call(output / "second")
    figures = (*command, time.perf_counter() - start, time.process_time() - used)
    return dict(zip(KINDS, figures))


def one(shape: str, tool: str, folder: Path, threads: int) -> None:
    """What a process of its own does."""
    import torch

    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as output:
        if tool == "save":
            save(shape, folder / shape)
        else:
            print(json.dumps(export(shape, tool, folder / shape, Path(output))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--optimum", type=Path, required=True, help="the folder that optimum is installed in")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--folder", type=Path, help="where models are kept for the next run")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        one(*arguments.one, arguments.folder, arguments.threads)
        return
    with tempfile.TemporaryDirectory() as made:
        folder = arguments.folder or Path(made)

        def run(shape: str, tool: str) -> dict[str, float]:
            paths = [str(arguments.optimum), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
            command = [sys.executable, __file__, "--optimum", str(arguments.optimum), "--folder", str(folder)]
            command += ["--threads", str(arguments.threads), "--one", shape, tool]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
            environment["STARTED"] = str(time.time())
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{shape} with {tool}:\n{done.stderr[-2000:]}")
            return json.loads(done.stdout.splitlines()[-1]) if tool != "save" else {}

        print("seconds of Onward, of optimum, and their ratio (medians)")
        print(f"{'shape':14}" + "".join(f"{kind:>27}" for kind in KINDS), flush=True)
        for shape in arguments.shapes:
            if not (folder / shape).is_dir():
                run(shape, "save")
            times: dict[str, list[dict[str, float]]] = {"onward": [], "optimum": []}
            for _ in range(arguments.rounds):
                for tool, found in times.items():
                    found.append(run(shape, tool))
            row = f"{shape:14}"
            for kind in KINDS:
                ours, theirs = (statistics.median(entry[kind] for entry in times[tool]) for tool in times)
                row += f"{ours:11.2f} {theirs:8.2f} {ours / theirs:6.2f}"
            print(row, flush=True)


if __name__ == "__main__":
    main()
