"""Sounds are read as pictures of lines are: a network over waves learns their characters, and so does an export."""

from __future__ import annotations

import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner

import onward
from onward.cli.app import app
from onward.data.read import DataOptions
from onward.errors import DataError
from onward.pipeline.evaluate import evaluate_model
from small_models import with_weights

RATE, LENGTH = 8000, 512
# each character is a tone
TONES = {"a": 500.0, "b": 1000.0, "c": 1700.0, "d": 2600.0}


def say(text: str) -> np.ndarray:
    time = np.arange(LENGTH) / RATE
    tones = [np.sin(2 * np.pi * TONES[character] * time) * np.hanning(LENGTH) for character in text]
    return (0.7 * np.concatenate(tones)).astype(np.float32)


def save_wave(path: Path, samples: np.ndarray, rate: int = RATE) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((samples * 32000).astype("<i2").tobytes())


def write_sounds(folder: Path, characters: str = "abcd", count: int = 48, seed: int = 0) -> Path:
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    lines = []
    for number in range(count):
        text = "".join(rng.choice(list(characters), int(rng.integers(2, 6))))
        save_wave(folder / f"{number}.wav", say(text))
        lines.append(f"{number}.wav\t{text}")
    (folder / "labels.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder


def listener(path: Path) -> Path:
    """[N, T] waves → scores of blank, a, b, c for every 128 samples; the file says the rate and the alphabet."""
    model = with_weights(
        """net (float[N, T] wave) => (float[N, F, 4] scores) {
        x = Unsqueeze(wave, one) c = Conv<strides=[16], kernel_shape=[64]>(x, w, b) r = Abs(c)
        d = Conv<strides=[8], kernel_shape=[16]>(r, w2, b2) s = Relu(d) t = Transpose<perm=[0, 2, 1]>(s)
        m = MatMul(t, v) scores = Add(m, z) }""",
        w=(24, 1, 64), b=(24,), w2=(24, 24, 16), b2=(24,), v=(24, 4), z=(4,),
    )  # fmt: skip
    scale = {"w": 0.2, "w2": 0.1, "v": 0.3}
    for tensor in model.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor) * scale.get(tensor.name, 0)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array.astype(np.float32), tensor.name))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1]), "one"))
    about = {"kind": "sound", "input": "wave", "sampling_rate": RATE}
    for key, value in (
        ("onward.preprocessing", json.dumps(about)),
        ("onward.classes", json.dumps(["<blank>", "a", "b", "c"])),
        ("onward.task", json.dumps({"task": "text-recognition", "outputs": {"scores": "ctc"}})),
    ):
        model.metadata_props.add(key=key, value=value)
    onnx.save(model, path)
    return path


def teach(model: Path, data: Path, **options: Any) -> Any:
    settings = {"epochs": 12, "batch_size": 8, "learning_rate": 0.02, "warmup": 0, "progress": False}
    return onward.finetune(model, data, **{**settings, **options})


def test_a_network_over_waves_learns_a_new_character(tmp_path: Path) -> None:
    path = listener(tmp_path / "listener.onnx")
    result = teach(path, write_sounds(tmp_path / "sounds"))
    assert result.task == "text-recognition"
    assert result.classes == ["<blank>", "a", "b", "c", "d"]
    assert result.metrics["cer"] < 0.05
    result.export(tmp_path / "mine.onnx")
    loaded = onward.load(tmp_path / "mine.onnx")
    save_wave(tmp_path / "word.wav", say("dabba"))
    answers = loaded([tmp_path / "word.wav", (say("cad"), RATE), say("bad")])
    assert [answer["text"] for answer in answers] == ["dabba", "cad", "bad"]
    # another rate is brought to the model's
    assert loaded((np.repeat(say("cad"), 2), 2 * RATE))["text"] == "cad"
    said = CliRunner().invoke(
        app, ["infer", str(tmp_path / "mine.onnx"), "--data", str(tmp_path / "word.wav")]
    )
    assert said.exit_code == 0 and "dabba" in said.stdout
    fresh = write_sounds(tmp_path / "fresh", count=20, seed=4)
    evaluation = evaluate_model(tmp_path / "mine.onnx", fresh, None, options=DataOptions())  # type: ignore[arg-type]
    assert evaluation.figures["cer"] < 0.05 and evaluation.samples == 20


def test_an_export_of_wav2vec_trains_and_answers_as_before_and_after(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    from onward.export import from_transformers

    tokens = ["<pad>", "<s>", "</s>", "<unk>", "|", "A", "B", "C"]
    (tmp_path / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    tokenizer = transformers.Wav2Vec2CTCTokenizer(
        str(tmp_path / "vocab.json"), unk_token="<unk>", pad_token="<pad>", word_delimiter_token="|"
    )
    extractor = transformers.Wav2Vec2FeatureExtractor(sampling_rate=RATE, return_attention_mask=False)
    processor = transformers.Wav2Vec2Processor(feature_extractor=extractor, tokenizer=tokenizer)
    processor.save_pretrained(tmp_path / "model")
    config = transformers.Wav2Vec2Config(
        vocab_size=len(tokens), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
        conv_dim=(8, 8), conv_stride=(8, 8), conv_kernel=(16, 8), num_feat_extract_layers=2, pad_token_id=0,
        num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2,
    )  # fmt: skip
    transformers.Wav2Vec2ForCTC(config).eval().save_pretrained(tmp_path / "model")
    from_transformers(tmp_path / "model", "automatic-speech-recognition", tmp_path / "published")
    # of a rate of zero the weights stay, and so does what the export says
    data = write_sounds(tmp_path / "sounds", "abc", count=16)
    same = teach(tmp_path / "published", data, epochs=1, learning_rate=0.0)
    assert same.classes == ["<blank>", "<s>", "</s>", "<unk>", " ", "A", "B", "C"]
    pipeline = onward.load(tmp_path / "published")
    sound = data / "3.wav"
    assert same.predict(sound)["text"].strip() == pipeline(str(sound))["text"]
    result = teach(tmp_path / "published", data, epochs=5, alphabet="replace")
    losses = [epoch["loss"] for epoch in result.history.epochs]
    assert result.classes == ["<blank>", "A", "B", "C"] and losses[-1] < losses[0] / 2
    result.export(tmp_path / "mine.onnx")
    shapes = [value.type.tensor_type.shape for value in onnx.load(tmp_path / "mine.onnx").graph.output]
    assert [len(shape.dim) for shape in shapes] == [3] and shapes[0].dim[2].dim_value == 4
    assert onward.load(tmp_path / "mine.onnx")(sound) == result.predict(sound)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0.wav\tab\n1.wav\ta?\n", r"line 2: the text 'a\?' has '\?', which is not in the alphabet"),
        ("0.wav\tab\n9.wav\tab\n", "line 2: no file"),
        ("0.wav\tab\nbroken.wav\tab\n", "line 2: cannot read the sound"),
    ],
)
def test_a_wrong_list_of_sounds_is_one_error_that_names_the_line(
    text: str, message: str, tmp_path: Path
) -> None:
    data = write_sounds(tmp_path / "sounds", "abc", count=2)
    (data / "broken.wav").write_bytes(b"no sound")
    (data / "labels.txt").write_text(text)
    with pytest.raises(DataError, match=message):
        teach(listener(tmp_path / "m.onnx"), data, alphabet="keep")
