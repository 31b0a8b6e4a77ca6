"""Adapters that a session exchanges: the stock runtime's files, and what they give beside one base."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

import onward
from export.huggingface_types import tiny_of
from onward import finetune
from onward.errors import ModelError
from onward.export import from_transformers
from onward.lora import LoRA

TEXTS = {"poet": "where does the path end at a bridge", "clerk": "prices rose by March economists had said"}
PROMPT = "where does the path"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, two adapters of other ranks and targets beside it, apart and merged; and another base of its shapes."""
    root = tmp_path_factory.mktemp("adapters")
    for name, seed in (("base", 0), ("other", 1)):
        model, tokenizer = tiny_of("llama", "text-generation")
        if seed:
            model.model.layers[0].self_attn.q_proj.weight.data += 1.0
        from_transformers((model, tokenizer), "text-generation", root / name, opset=18)
    for name, rank, targets in (("poet", 4, ["*q_proj*", "*v_proj*"]), ("clerk", 2, ["*v_proj*"])):
        result = finetune(
            root / "base", [{"text": TEXTS[name]}], lora=LoRA(rank=rank, alpha=8.0, targets=targets),
            epochs=8, learning_rate=3e-2, progress=False,
        )  # fmt: skip
        result.export(root / f"merged-{name}")
        if name == "poet":
            result.export(root / "apart", merge=False)
        result.save_adapters(root / "apart" / f"{name}.onnx_adapter")
    stranger = finetune(
        root / "other", [{"text": TEXTS["poet"]}], lora=LoRA(targets="*q_proj*"), progress=False
    )
    stranger.save_adapters(root / "stranger.onnx_adapter")
    whole = finetune(
        root / "base", [{"text": TEXTS["poet"]}], lora=LoRA(targets="*down_proj*"), progress=False
    )
    whole.save_adapters(root / "elsewhere.onnx_adapter")
    return root


def logits(folder: Path, adapter: Path | None = None) -> np.ndarray:
    """The scores after a prompt, by the stock runtime alone."""
    session = ort.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    ids = np.asarray([[7, 8, 9, 10, 11]])
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(5)[None]}
    for value in session.get_inputs():
        if value.name.startswith("past_key_values."):
            feeds[value.name] = np.zeros((1, value.shape[1], 0, value.shape[3]), np.float32)
    options: Any = ort.RunOptions()
    if adapter is not None:
        loaded: Any = ort.LoraAdapter()
        loaded.Load(str(adapter))
        options.add_active_adapter(loaded)
    taken = {value.name: feeds[value.name] for value in session.get_inputs()}
    return np.asarray(session.run(["logits"], taken, options)[0])


@pytest.mark.parametrize("name", ["poet", "clerk"])
def test_the_stock_runtime_computes_with_an_adapter_what_the_merged_model_does(
    folders: Path, name: str
) -> None:
    apart = logits(folders / "apart", folders / "apart" / f"{name}.onnx_adapter")
    merged = logits(folders / f"merged-{name}")
    np.testing.assert_allclose(apart, merged, atol=1e-5 * np.abs(merged).max())
    base = logits(folders / "base")
    np.testing.assert_allclose(logits(folders / "apart"), base, atol=1e-5 * np.abs(base).max())
    assert np.abs(merged - base).max() > 1e-2 * np.abs(base).max()


def test_a_loaded_model_swaps_adapters_without_growing(folders: Path) -> None:
    model: Any = onward.load(folders / "apart")
    session = model.session
    expected = {name: onward.load(folders / f"merged-{name}")(PROMPT, max_new_tokens=5) for name in TEXTS}
    expected[None] = onward.load(folders / "base")(PROMPT, max_new_tokens=5)
    assert model.use("poet")(PROMPT, max_new_tokens=5) == expected["poet"] != expected[None]

    def swap(times: int) -> int:
        for number in range(times):
            name = ("poet", "clerk", None)[number % 3]
            assert model.use(name)(PROMPT, max_new_tokens=5) == expected[name]
        gc.collect()
        # what is in use now: the most that there was may have been another test's
        fields = Path("/proc/self/status").read_text().split() if sys.platform == "linux" else ["VmRSS:", "0"]
        return int(fields[fields.index("VmRSS:") + 1])

    before = swap(9)
    assert swap(99) - before < 4096  # KB
    assert model.session is session


def test_an_adapter_of_another_base_is_refused(folders: Path) -> None:
    model: Any = onward.load(folders / "apart")
    with pytest.raises(ModelError, match="its weights are not those that it was trained beside"):
        model.use(folders / "stranger.onnx_adapter")
    with pytest.raises(ModelError, match=r"which has no place for '.*down_proj"):
        model.use(folders / "elsewhere.onnx_adapter")
    with pytest.raises(ModelError, match=r"no adapter 'painter': .* has adapter, clerk, poet"):
        model.use("painter")
    (folders / "broken.onnx_adapter").write_bytes(b"no adapter")
    with pytest.raises(ModelError, match="no adapter of onnxruntime's"):
        model.use(folders / "broken.onnx_adapter")
    with pytest.raises(ModelError, match="has no place for adapters"):
        onward.load(folders / "merged-poet").use("poet")  # type: ignore[union-attr]
