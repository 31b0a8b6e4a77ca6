"""Writes the good seeds of `corpus`: a small file for each way that a format is written. Bad ones come by hand."""

from __future__ import annotations

import io
import json
import struct
import wave
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pyarrow
import pyarrow.parquet
from PIL import Image
from readers import CORPUS

from onward import artifacts, checkpoint
from onward.checkpoint import portable
from onward.federated.update import Update
from state_files import make_data, make_layout

HEAD = '<ir_version: 10, opset_import: ["": 21, "f": 1]>'
MODELS = {
    "functions": HEAD + " g (float[N, 3] x) => (float[N, 2] y)"
    "<float[3, 2] w = {1, 2, 3, 4, 5, 6}, int64[1] s = {2}>"
    "{ m = MatMul(x, w) e = ConstantOfShape(s) a = Add(m, e) y = f.Twice(a) }"
    '<domain: "f", opset_import: ["": 21]> Twice (x) => (y) { y = Add(x, x) }',
    "loop": HEAD + " g (float[2] x) => (float[2] y)<int64 n = {3}, bool c = {1}, float[2] w = {1, 2}> {"
    " k = Mul(x, w) y = Loop(n, c, k) <body = b (int64 i, bool ci, float[2] a) => (bool co, float[2] o) {"
    " co = Identity(ci) o = Mul(a, w) }> }",
    "conv": HEAD + " g (float[1, 1, 4, 4] x) => (float[1, 4] y)<float[1, 1, 2, 2] w = {1, 2, 3, 4}> {"
    " a = Conv<kernel_shape=[2, 2], strides=[2, 2]>(x, w) b = Relu(a) y = Flatten(b) }",
    "shapes": HEAD + " g (float[N, 4] x) => (float[A, B] y)<int64[2] p = {2, -1}, float[4] w = {1, 2, 3, 4}> {"
    " s = Shape(x) c = Gather<axis=0>(s, i) i = Constant<value = int64 {1}>() m = Mul(x, w)"
    " r = Reshape(m, p) q, t = TopK<axis=0>(r, k) k = Constant<value = int64[1] {1}>() y = Softmax(q) }",
}  # fmt: skip


def put(name: str, file: str, data: bytes | str) -> Path:
    path = CORPUS / name / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def models() -> None:
    for target in ("gate", "model", "session", "gradient"):
        for name, text in MODELS.items():
            put(target, f"good-{name}.onnx", onnx.parser.parse_model(text).SerializeToString())
    simple = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> n (float[N, 2] x) => (float[N, 3] y)'
        "<float[2, 3] w = {1, 2, 3, 4, 5, 6}> { m = MatMul(x, w) y = Tanh(m) }"
    )
    made = artifacts.build_artifacts(
        simple, requires_grad=["w"], loss=artifacts.LossType.CrossEntropyLoss, optimizer="AdamW"
    )
    put("module", "good.onnx", onnx_bytes(made.training))
    checkpoint.save(made.checkpoint, CORPUS / "module" / "checkpoint")


def onnx_bytes(model: object) -> bytes:
    import onnx_ir

    return onnx_ir.to_proto(model).SerializeToString()  # type: ignore[call-overload]


def states() -> None:
    data = make_data()
    checkpoint.save(data, put("checkpoint", "good", b""))
    portable.to_portable(data, put("state", "good.bin", b""), layout=make_layout())
    sent = Update.between({"w": np.zeros(3, np.float32)}, {"w": np.ones(3, np.float32)}, examples=5)
    put("update", "good", sent.to_bytes())
    weights = checkpoint.CheckpointData(
        trainable={"w": np.ones((3, 2), np.float32)}, frozen={"b": np.ones(2)}
    )
    checkpoint.to_safetensors(weights, put("safetensors", "good.safetensors", b""))


def tables() -> None:
    put("csv", "good.csv", 'a,b,"c d"\n1,2.5,"x, y"\n3,,z\n')
    put("tsv", "good.tsv", "a\tb\n1\tx\n2\ty\n")
    rows = [{"a": 1, "b": "x", "c": [1, 2]}, {"a": None, "b": "y", "c": [3, 4.5]}]
    put("jsonl", "good.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    lines = [{"messages": chat}, {"prompt": "a", "completion": "bc"}, {"text": "some text"}]
    put("conversations", "good.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    table = pyarrow.table({"a": [1, 2, 3], "b": ["x", "y", "z"], "c": [[1.5], [2.5], [3.5]]})
    for compression in ("none", "zstd"):
        file = io.BytesIO()
        pyarrow.parquet.write_table(table, file, compression=compression)
        put("parquet", f"good-{compression}.parquet", file.getvalue())
    file = io.BytesIO()
    np.save(file, np.arange(6, dtype=np.float32).reshape(2, 3))
    put("npy", "good.npy", file.getvalue())
    for name, save in (("plain", np.savez), ("packed", np.savez_compressed)):
        file = io.BytesIO()
        save(file, x=np.arange(4.0), y=np.arange(3))
        put("npz", f"good-{name}.npz", file.getvalue())


def media() -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (5, 6, 3), dtype=np.uint8)
    for name, image in (("rgb", Image.fromarray(pixels)), ("palette", Image.fromarray(pixels).convert("P"))):
        file = io.BytesIO()
        image.save(file, "PNG")
        put("png", f"good-{name}.png", file.getvalue())
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels).save(file, "JPEG", exif=exif)
    put("jpeg", "good.jpg", file.getvalue())
    for width in (1, 2, 3, 4):
        file = io.BytesIO()
        with wave.open(file, "wb") as sound:
            sound.setnchannels(2)
            sound.setsampwidth(width)
            sound.setframerate(8000)
            sound.writeframes(struct.pack("<24B", *range(24)))
        put("wav", f"good-{8 * width}.wav", file.getvalue())


def settings() -> None:
    options = {"epochs": 3, "data": ["d.npz"], "prefix": "", "no_shuffle": False, "learning_rate": 0.1}
    put("run", "good.json", json.dumps({"artifacts": "artifacts", "options": options, "classes": ["a"]}))
    put(
        "config",
        "good.toml",
        "[train]\nepochs = 3\nlearning-rate = 1e-3\ndata = [\"d.npz\", 'e.npz']\n[check]\n",
    )
    image = {"size": {"height": 4, "width": 5}, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    image |= {
        "do_resize": True,
        "resample": 2,
        "do_normalize": True,
        "rescale_factor": 0.00392,
        "channels": 3,
    }
    put("preprocessing", "good-image.json", json.dumps({"kind": "image", "input": "x", **image}))
    sound = {"kind": "sound", "input": "x", "sampling_rate": 8000, "length": 20, "layout": "T1"}
    put("preprocessing", "good-sound.json", json.dumps(sound))
    text = {"kind": "text", "input": "x", "tokenizer": "t.json", "max_length": 8, "pad_id": 0, "column": None}
    put("preprocessing", "good-text.json", json.dumps(text))
    del image["channels"]
    cropped = {
        **image,
        "do_center_crop": True,
        "crop_size": {"height": 4, "width": 4},
        "size": {"shortest_edge": 5},
    }
    put("preprocessor_config", "good-crop.json", json.dumps(cropped))
    put("preprocessor_config", "good-size.json", json.dumps(image))
    card = {
        "format": 1,
        "task": "pooling",
        "inputs": {"x": {}},
        "outputs": {"y": {}},
        "tokenizer": {"pad_id": 0},
    }
    put("card", "good.json", json.dumps(card))
    tokenizer = {
        "padding": None,
        "truncation": {"max_length": 9},
        "added_tokens": [{"content": "[PAD]", "id": 3}],
    }
    put("tokenizer", "good.json", json.dumps(tokenizer))
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] | trim }}{{ eos_token }}{% endfor %}"
    put("chat", "good.json", json.dumps({"chat_template": template, "eos_token": {"content": "</s>"}}))
    config = {"architectures": ["XForCausalLM"], "eos_token_id": [1, 2], "max_position_embeddings": 64}
    put("language", "good.json", json.dumps(config))
    put("language", "model.onnx", onnx.parser.parse_model(MODELS["loop"]).SerializeToString())
    put("language", "tokenizer.json", "{}")
    put(
        "peft", "good.json", json.dumps({"r": 2, "lora_alpha": 4, "target_modules": ["a"], "use_dora": False})
    )
    rows = [{"step": 1, "loss": 0.5}, {"step": 2, "loss": None}]
    history = {"steps": rows, "epochs": [{"step": 2, "epoch": 1}], "confusion": [[1]], "classes": ["a"]}
    put("history", "good.json", json.dumps(history))
    from safetensors.numpy import save_file

    prefix = "base_model.model.a.lora_"
    parts = {
        f"{prefix}A.weight": np.ones((2, 3), np.float32),
        f"{prefix}B.weight": np.ones((4, 2), np.float32),
    }
    save_file(parts, CORPUS / "peft" / "adapter_model.safetensors")


if __name__ == "__main__":
    models()
    states()
    tables()
    media()
    settings()
