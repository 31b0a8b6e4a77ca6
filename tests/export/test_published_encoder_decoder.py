"""Folders of encoder-decoders as optimum and onnx-community lay them out, against Onward's own of the same model."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import onnx
import pytest

from export.published_parts import publish_parts
from export.tiny_transformers import tiny_pair
from onward.errors import ModelError
from onward.export import from_transformers
from onward.export.huggingface.cards import generation_settings
from onward.language.decoding import Options
from onward.pipeline.load import load

TEXTS = ["the ferry leaves at noon", "nobody expected a small library to train a network on the phone", "why"]
LAYOUTS = {
    "two branches in one graph": ("encoder_model.onnx", "decoder_model_merged.onnx"),
    "a graph for each": ("encoder_model.onnx", "decoder_model.onnx", "decoder_with_past_model.onnx"),
    "without a cache": ("encoder_model.onnx", "decoder_model.onnx"),
}


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny T5 in a folder of Onward's own, beside the settings and the tokenizer that others publish."""
    folder = tmp_path_factory.mktemp("published")
    model, tokenizer = tiny_pair("t5", "text2text", bad_words_ids=[[5]])
    from_transformers((model, tokenizer), "text2text", folder / "ours", check=False)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder / "theirs")
    model.generation_config.save_pretrained(folder / "theirs")
    tokenizer.save_pretrained(folder / "theirs")
    return folder


def published(ours: Path, folder: Path, layout: str, place: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    for file in (ours / "theirs").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    publish_parts(ours / "ours", folder / place, LAYOUTS[layout])
    return folder


@pytest.mark.parametrize(("layout", "place"), [*zip(LAYOUTS, ["onnx", "", "onnx"])])
def test_a_published_encoder_decoder_writes_what_our_own_folder_writes(
    ours: Path, tmp_path: Path, layout: str, place: str
) -> None:
    theirs = load(published(ours, tmp_path, layout, place))
    own = load(ours / "ours")
    for options in ({}, {"num_beams": 3}, {"do_sample": True, "seed": 3}):
        expected = own(TEXTS, max_new_tokens=7, **options)
        assert any(expected) and theirs(TEXTS, max_new_tokens=7, **options) == expected


def test_tokens_that_are_forced_or_forbidden_may_have_any_number() -> None:
    """Marian ends with token 0 and must not write its padding; mT5 ends with token 1."""
    config = SimpleNamespace(eos_token_id=0, forced_eos_token_id=0, bad_words_ids=[[4], [0], [1, 2]])
    settings = generation_settings(config, SimpleNamespace(repetition_penalty=1.0))
    options = Options.read({}, settings, max_new_tokens=3)
    assert (options.last, options.suppress, options.ends) == (0, (4,), {0})
    assert "repetition_penalty" not in settings
    ends = generation_settings(config, SimpleNamespace(forced_eos_token_id=1))
    assert Options.read({}, ends, max_new_tokens=3).last == 1


def test_files_of_one_precision_belong_together(ours: Path, tmp_path: Path) -> None:
    folder = published(ours, tmp_path, "two branches in one graph", "onnx")
    for name in LAYOUTS["two branches in one graph"]:
        file = folder / "onnx" / name
        file.rename(file.with_stem(f"{file.stem}_quantized"))
    expected = load(ours / "ours")(TEXTS, max_new_tokens=5)
    assert load(folder)(TEXTS, max_new_tokens=5) == expected
    chosen = folder / "onnx" / "decoder_model_merged_quantized.onnx"
    (folder / "onnx" / "encoder_model_q4.onnx").write_bytes(b"")
    assert load(chosen)(TEXTS, max_new_tokens=5) == expected
    with pytest.raises(
        ModelError, match=r"several encoders: encoder_model_q4\.onnx, encoder_model_quantized\.onnx"
    ):
        load(folder)
    chosen.unlink()
    with pytest.raises(ModelError, match=r"decoder_model_merged_quantized\.onnx .* needed"):
        load(folder / "onnx" / "encoder_model_quantized.onnx")


@pytest.mark.parametrize(
    ("file", "wrong", "message"),
    [
        ("generation_config.json", {"decoder_start_token_id": "a"}, "decoder_start_token_id"),
        ("generation_config.json", {"bad_words_ids": 3}, "bad_words_ids .* are 3"),
        (
            "config.json",
            {"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper"},
            "for audio",
        ),
    ],
)
def test_settings_that_do_not_fit_are_named(
    ours: Path, tmp_path: Path, file: str, wrong: dict[str, object], message: str
) -> None:
    folder = published(ours, tmp_path, "two branches in one graph")
    settings = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**settings, **wrong}))
    with pytest.raises(ModelError, match=message):
        load(folder)


def test_a_decoder_that_wants_something_else_is_refused(ours: Path, tmp_path: Path) -> None:
    folder = published(ours, tmp_path, "two branches in one graph")
    file = folder / "decoder_model_merged.onnx"
    model = onnx.load(file)
    model.graph.input.append(onnx.helper.make_tensor_value_info("inputs_embeds", onnx.TensorProto.FLOAT, [1]))
    onnx.save(model, file)
    with pytest.raises(ModelError, match="an input 'inputs_embeds'"):
        load(folder)
    encoder = onnx.load(folder / "encoder_model.onnx")
    encoder.graph.output[0].name = "other"
    encoder.graph.node[-1].output[0] = "other"
    onnx.save(encoder, folder / "encoder_model.onnx")
    with pytest.raises(ModelError, match="needs the outputs last_hidden_state; it has other"):
        load(folder)
