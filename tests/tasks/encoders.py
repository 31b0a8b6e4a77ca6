"""A small encoder of texts as a folder: embeddings, a layer and a tokenizer of whole words. No torch."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
from tokenizers import Tokenizer, models, pre_tokenizers

from small_models import with_weights

THINGS = ("volcano", "bicycle", "tea", "guitar", "harbour", "glacier", "chess", "bread", "orchid", "comet")
WORDS = [
    "[PAD]",
    "[UNK]",
    "the",
    "a",
    "of",
    "about",
    "history",
    "origins",
    *THINGS,
    *(f"{t}s" for t in THINGS),
]
SIZE = 12


def write_tokenizer(folder: Path, words: Sequence[str] = WORDS) -> Path:
    """A tokenizer.json of whole words."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["[PAD]", "[UNK]"])
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def encoder(seed: int = 0) -> onnx.ModelProto:
    """[texts, words] → last_hidden_state [texts, words, 12]: tanh(E[ids]·w + b)."""
    model = with_weights(
        f"""net (int64[N, T] input_ids, int64[N, T] attention_mask) => (float[N, T, {SIZE}] last_hidden_state) {{
            e = Gather(table, input_ids) m = MatMul(e, w) s = Add(m, b) last_hidden_state = Tanh(s) }}""",
        seed, table=(len(WORDS), 8), w=(8, SIZE), b=(SIZE,),
    )  # fmt: skip
    return model


def write_encoder(
    folder: Path, *, pooling: str | None = "mean", normalize: bool = True, seed: int = 0
) -> Path:
    """A sentence-transformers folder with the encoder's ONNX file."""
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(encoder(seed), folder / "model.onnx")
    write_tokenizer(folder)
    if pooling is not None:
        kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
        modules = [{"idx": i, "name": str(i), "path": "1_Pooling" if kind == "Pooling" else "",
                    "type": f"sentence_transformers.models.{kind}"} for i, kind in enumerate(kinds)]  # fmt: skip
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir(exist_ok=True)
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": pooling}))
    return folder


def write_table(path: Path, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> Path:
    """A CSV file."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)
    return path


def pairs() -> list[tuple[str, str]]:
    """What belongs together has no word in common."""
    return [(f"{first} {thing}", f"{second} {thing}s") for thing in THINGS
            for first, second in (("history of the", "origins a"), ("about the", "a"))]  # fmt: skip
