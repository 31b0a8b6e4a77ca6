"""Decoders as model builders publish them: fused operators, 4-bit weights in a file of their own, a cache."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from safetensors.numpy import load_file

import onward
from export.huggingface_types import tiny_of
from onward import finetune
from onward.errors import ModelError
from onward.export import from_transformers
from onward.graph.passes.precision import multiply_in_float, multiply_in_integers
from onward.hub.model_folder import open_language_model
from onward.language.finetune import load_adapters
from onward.language.training_models import Recipe, build_language_artifacts, open_base
from onward.lora import LoRA
from onward.pipeline import load as load_any
from onward.train.trainer import Trainer

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import language_model
import ready_made


def load(folder: Path) -> Any:
    """A folder's pipeline."""
    return load_any(folder)


SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    "form",
    [
        ready_made.Form(),
        ready_made.Form(half=True, zeros=True, packed=True),
        ready_made.Form(bits=8, rotary_apart=True),
        ready_made.Form(tied=True, zeros=True, part_bytes=20_000),
    ],
    ids=["4 bits", "float16, zero points, one product", "8 bits, rotary apart", "tied, several files"],
)
def test_a_ready_made_base_trains_and_writes(tmp_path: Path, form: ready_made.Form) -> None:
    ready_made.write_base(tmp_path / "base", SIZES, language_model.words(96), form=form)
    before = {path.name: path.read_bytes() for path in (tmp_path / "base").iterdir()}
    session = ort.InferenceSession(tmp_path / "base" / "model.onnx", providers=["CPUExecutionProvider"])
    ids = np.asarray([[5, 6, 7, 8, 9, 10]])
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    if form.rotary_apart:
        feeds["position_ids"] = np.arange(6)[None]
    for value in session.get_inputs():
        if value.name.startswith("past_key_values."):
            feeds[value.name] = np.zeros((1, 2, 0, 16), np.float16 if form.half else np.float32)
    logits = torch.tensor(np.asarray(session.run(["logits"], feeds)[0], np.float32))
    expected = torch.nn.functional.cross_entropy(logits[0, :-1], torch.tensor(ids[0, 1:]))
    opened = open_base(tmp_path / "base")
    trainer = Trainer(
        build_language_artifacts(opened, LoRA(rank=4, targets=["*attn.q*"]), Recipe(slices=3)),
        progress=False,
    )
    given = {**feeds, "labels": ids}
    loss = trainer.module(*[given[name] for name in trainer.module.input_names()])
    # the runtime multiplies 4-bit weights with inputs of 8 bits, training with floats
    assert float(np.asarray(loss)) == pytest.approx(float(expected), rel=0.02)
    lines = [{"prompt": "w9 w8", "completion": " w7 w6"}, {"text": "w1 w2 w3 w4"}]
    result = finetune(tmp_path / "base", lines, epochs=30, learning_rate=1e-2, max_length=32, progress=False)
    assert result.history.epochs[-1]["loss"] < 0.1 * result.history.epochs[0]["loss"]
    assert load(result.export(tmp_path / "out"))("w9 w8", max_new_tokens=4).split() == ["w7", "w6"]
    # packed weights are multiplied as they are, and not dequantized for each token
    kinds = Counter(node.op_type for node in onnx.load(tmp_path / "out" / "model.onnx").graph.node)
    assert (
        kinds["MatMulNBits"] == (5 if form.packed else 7) * 2 + 1
        and not kinds["DequantizeLinear"]
        and kinds["GroupQueryAttention"] == 2
    )
    assert {path.name: path.read_bytes() for path in (tmp_path / "base").iterdir()} == before


def test_weights_are_dequantized_for_each_product_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready_made.write_base(tmp_path, SIZES, language_model.words(96))
    ids = np.asarray([[5, 6, 7, 8, 9, 10]])
    given = {"input_ids": ids, "attention_mask": np.ones_like(ids), "labels": ids}
    gradients = []
    for late in (True, False):
        if not late:
            monkeypatch.setattr("onward.language.training_models.dequantize_per_product", lambda model: model)
        made = build_language_artifacts(
            open_base(tmp_path), LoRA(rank=4, targets=["*q_proj*", "*down_proj*"]), Recipe(slices=3)
        )
        layers = [
            node
            for node in made.training.graph
            if node.op_type == "DequantizeLinear" and "layers" in (node.inputs[0].name or "")  # type: ignore[union-attr]
        ]
        users = [len(node.outputs[0].uses()) for node in layers]
        assert max(users) == (1 if late else 2), users
        assert all(isinstance(node.inputs[0].const_value, ir.ExternalTensor) for node in layers)  # type: ignore[union-attr]
        trainer = Trainer(made, progress=False)
        for name in made.trainable:  # B starts at zero, and A's gradient with it
            array = np.asarray(trainer.state.parameters[name].data)
            trainer.state.parameters[name].data = np.full_like(array, 0.01)
        trainer.module(*[given[name] for name in trainer.module.input_names()])
        gradients.append({name: trainer.state.parameters[name].grad for name in made.trainable})
    for name, gradient in gradients[0].items():
        assert np.abs(gradient).max() > 0
        np.testing.assert_array_equal(gradient, gradients[1][name])


def published(folder: Path, *, name: str = "model_q4.onnx", form: ready_made.Form | None = None) -> Path:
    """A base as a repository of a hub has it: models in a folder of their own."""
    ready_made.write_base(folder / "onnx", SIZES, language_model.words(96), form=form, name=name)
    for beside in ("config.json", "tokenizer.json"):
        (folder / "onnx" / beside).rename(folder / beside)
    return folder


def test_a_published_folder_is_loaded_and_trained_as_it_is(tmp_path: Path) -> None:
    folder = published(tmp_path / "base", form=ready_made.Form(tied=True, part_bytes=20_000))
    lines = [{"prompt": "w9 w8", "completion": " w7 w6"}]
    prompts = ["w9 w8", "w1 w2 w3 w4"]
    together = load(folder)(prompts, max_new_tokens=4)
    # the runtime's attention counts from the first column on: prompts of other lengths are read one by one
    assert together == [
        load(folder / "onnx" / "model_q4.onnx")(prompt, max_new_tokens=4) for prompt in prompts
    ]
    options: Any = {"epochs": 20, "learning_rate": 1e-2, "progress": False}
    result = finetune(folder, lines, **options)
    assert load(result.export(tmp_path / "out"))("w9 w8", max_new_tokens=4).split() == ["w7", "w6"]
    ready_made.write_base(tmp_path / "more", SIZES, language_model.words(96), name="model_q4f16.onnx", seed=1)
    for path in (tmp_path / "more").glob("*.onnx*"):
        path.rename(folder / "onnx" / path.name)
    with pytest.raises(ModelError, match=r"several models: onnx/model_q4.onnx, onnx/model_q4f16.onnx"):
        finetune(folder, lines, **options)
    chosen = onward.finetune(folder / "onnx" / "model_q4.onnx", lines, hold_out=0.0, **options)
    assert chosen.history.steps[0]["loss"] == result.history.steps[0]["loss"]  # type: ignore[union-attr]


def test_a_folder_for_onnxruntime_genai_needs_no_other_settings(tmp_path: Path) -> None:
    ready_made.write_base(tmp_path, SIZES, language_model.words(96), name="decoder.onnx")
    (tmp_path / "config.json").unlink()
    settings = {"decoder": {"filename": "decoder.onnx"}, "eos_token_id": [0, 7], "context_length": 64}
    (tmp_path / "genai_config.json").write_text(json.dumps({"model": {**settings, "type": "llama"}}))
    _, _, card = open_language_model(tmp_path)
    assert (card["generation"]["eos_ids"], card["tokenizer"]["max_length"]) == ([0, 7], 64)
    assert isinstance(load(tmp_path)("w9 w8", max_new_tokens=3), str)
    assert finetune(tmp_path, [{"text": "w1 w2"}], progress=False).adapters


def test_a_file_of_weights_that_was_not_downloaded_is_named(tmp_path: Path) -> None:
    folder = published(tmp_path, form=ready_made.Form(part_bytes=20_000))
    (folder / "onnx" / "model_q4.onnx_data_2").unlink()
    for attempt in (load, lambda f: finetune(f, [{"text": "w1 w2"}], progress=False)):
        with pytest.raises(ModelError, match=r"its weights are in model_q4\.onnx_data_2, which is missing"):
            attempt(folder)


def test_queries_keys_and_values_of_one_product_have_adapters_of_their_own(tmp_path: Path) -> None:
    """As in transformers, where they are three layers: peft's names and shapes, both ways."""
    ready_made.write_base(
        tmp_path / "base", SIZES, language_model.words(96), form=ready_made.Form(packed=True)
    )
    lora = LoRA(rank=2, targets=["*q_proj*", "*v_proj*"])
    result = finetune(
        tmp_path / "base", [{"text": "w1 w2 w3"}], lora=lora, epochs=5, learning_rate=1e-2, progress=False
    )
    result.save_adapters(tmp_path / "adapters")
    tensors = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    at = "base_model.model.model.layers.0.self_attn"
    shapes = {name: value.shape for name, value in tensors.items() if name.startswith(f"{at}.")}
    assert shapes == {
        f"{at}.q_proj.lora_A.weight": (2, 64), f"{at}.q_proj.lora_B.weight": (64, 2),
        f"{at}.v_proj.lora_A.weight": (2, 64), f"{at}.v_proj.lora_B.weight": (32, 2),
    }  # fmt: skip
    assert all(np.abs(value).max() > 0 for value in tensors.values())
    again = load_adapters(tmp_path / "base", tmp_path / "adapters")
    one, two = (load(r.export(tmp_path / f"out-{index}")) for index, r in enumerate((result, again)))
    assert one("w1", max_new_tokens=4) == two("w1", max_new_tokens=4)
    # the default is one for each too, and a name of the whole product means one for all
    options: Any = {"epochs": 1, "progress": False}
    default = finetune(tmp_path / "base", [{"text": "w1 w2"}], **options)
    assert sum("_proj.MatMul.weight.lora_a" in name for name in default.adapters) == 2 * 4
    whole = finetune(tmp_path / "base", [{"text": "w1 w2"}], lora=LoRA(targets="*qkv_proj*"), **options)
    assert sum("qkv_proj" in name for name in whole.adapters) == 2 * 2 == len(whole.adapters)


def dynamically_quantized(folder: Path, source: Path, kind: Any) -> None:
    """A folder as transformers.js has it, with products of integers."""
    from onnxruntime.quantization import quantize_dynamic

    (folder / "onnx").mkdir(parents=True)
    quantize_dynamic(source / "model.onnx", folder / "onnx" / "model_int8.onnx", weight_type=kind)
    model = onnx.load(folder / "onnx" / "model_int8.onnx")
    del model.metadata_props[:]
    onnx.save(model, folder / "onnx" / "model_int8.onnx")
    shutil.copyfile(source / "tokenizer.json", folder / "tokenizer.json")
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "eos_token_id": 5,
        "pad_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(settings))


def test_a_base_of_integer_products_trains_and_keeps_them(tmp_path: Path) -> None:
    from onnxruntime.quantization import QuantType

    from_transformers(tiny_of("llama", "text-generation"), "text-generation", tmp_path / "ours", opset=18)
    dynamically_quantized(tmp_path / "base", tmp_path / "ours", QuantType.QInt8)
    lines = [{"prompt": "where does the path end", "completion": " at a bridge"}]
    result = finetune(tmp_path / "base", lines, epochs=3, learning_rate=3e-2, progress=False)
    assert result.history.epochs[-1]["loss"] < 0.95 * result.history.epochs[0]["loss"]
    answers = []
    for merge in (True, False):
        result.export(tmp_path / f"out-{merge}", merge=merge)
        kinds = Counter(
            node.op_type for node in onnx.load(tmp_path / f"out-{merge}" / "model.onnx").graph.node
        )
        assert kinds["MatMulInteger"] == 15
        answers.append(load(tmp_path / f"out-{merge}")("where does the path end", max_new_tokens=4))
    assert answers[0] == answers[1] != load(tmp_path / "base")("where does the path end", max_new_tokens=4)


@pytest.mark.parametrize(("kind", "by_column"), [("QInt8", False), ("QUInt8", False), ("QInt8", True)])
def test_a_product_of_integers_has_a_twin_of_floats(tmp_path: Path, kind: str, by_column: bool) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    rng = np.random.default_rng(0)
    weight = rng.normal(size=(8, 6)).astype(np.float32)
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 18]> net (float[N, 8] x) => (float[N, 6] y) { y = MatMul(x, w) }"""
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    onnx.save(model, tmp_path / "float.onnx")
    quantize_dynamic(
        tmp_path / "float.onnx",
        tmp_path / "integers.onnx",
        weight_type=QuantType[kind],
        per_channel=by_column,
    )
    x = rng.normal(size=(3, 8)).astype(np.float32)

    def run(model: onnx.ModelProto) -> np.ndarray:
        session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        return np.asarray(session.run(["y"], {"x": x})[0])

    integers = onnx.load(tmp_path / "integers.onnx")
    opened = ir.from_proto(integers)
    twins = multiply_in_float(opened)
    assert len(twins) == 1
    np.testing.assert_allclose(run(ir.to_proto(opened)), x @ weight, atol=0.05)
    multiply_in_integers(twins)
    np.testing.assert_array_equal(run(ir.to_proto(opened)), run(integers))


def test_an_output_layer_of_one_block_is_sliced_too(tmp_path: Path) -> None:
    """One zero point of 4 bits a row: half a byte, which no file is cut at."""
    sizes = {**SIZES, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    ready_made.write_base(
        tmp_path / "base", sizes, language_model.words(96), form=ready_made.Form(zeros=True)
    )
    result = finetune(tmp_path / "base", [{"text": "w1 w2 w3"}], epochs=2, progress=False)
    assert np.isfinite(result.history.epochs[-1]["loss"])
