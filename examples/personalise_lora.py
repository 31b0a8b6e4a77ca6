"""LoRA: a frozen model learns one user's way of writing digits through a few numbers that travel alone."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort

from onward import Trainer, artifacts
from onward.lora import LoRA, merge_lora, save_lora


def classifier(seed: int = 0) -> onnx.ModelProto:
    """64 pixels, two hidden layers, ten digits."""
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18]>
        digits (float[batch, 64] image) => (float[batch, 10] logits) {
            a = Gemm <transB = 1> (image, fc1_w, fc1_b)  b = Relu (a)
            c = Gemm <transB = 1> (b, fc2_w, fc2_b)  d = Relu (c)
            logits = Gemm <transB = 1> (d, fc3_w, fc3_b)
        }""")
    rng = np.random.default_rng(seed)
    for index, (out, size) in enumerate([(128, 64), (128, 128), (10, 128)], start=1):
        weight = rng.normal(0, np.sqrt(2 / size), (out, size)).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(weight, f"fc{index}_w"))
        model.graph.initializer.append(
            onnx.numpy_helper.from_array(np.zeros(out, np.float32), f"fc{index}_b")
        )
    return model


def load() -> tuple[np.ndarray, np.ndarray]:
    data = np.load(Path(__file__).parent / "data" / "digits.npz")
    return data["x"].reshape(-1, 64).astype(np.float32) / 16, data["y"].astype(np.int64)


def accuracy(model: str | bytes, images: np.ndarray, labels: np.ndarray) -> float:
    (logits,) = ort.InferenceSession(model).run(None, {"image": images})
    return float(np.mean(np.argmax(np.asarray(logits), axis=1) == labels))


def main(epochs: int = 8) -> dict[str, float]:
    """Train a base, then adapters on mirrored digits; return accuracies and sizes."""
    images, labels = load()
    mirrored = np.ascontiguousarray(images.reshape(-1, 8, 8)[:, :, ::-1]).reshape(-1, 64)
    loss, optimizer = artifacts.LossType.CrossEntropyLoss, artifacts.OptimType.AdamW
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        artifacts.generate_artifacts(
            classifier(),
            requires_grad=["fc*"],
            loss=loss,
            optimizer=optimizer,
            artifact_directory=work / "base",
        )
        base = Trainer(work / "base", learning_rate=3e-3)
        base.fit((images[:1000], labels[:1000]), epochs=epochs)
        base.export(work / "base.onnx")

        # the user writes mirrored digits: 300 samples of theirs, 4 numbers of rank
        artifacts.generate_artifacts(
            str(work / "base.onnx"), lora=LoRA(rank=4, alpha=8), loss=loss, optimizer=optimizer,
            artifact_directory=work / "personal",
        )  # fmt: skip
        personal = Trainer(work / "personal", learning_rate=1e-2)
        personal.fit((mirrored[1000:1300], labels[1000:1300]), epochs=3 * epochs)
        save_lora(personal.state, work / "adapters.safetensors")
        personal.export(work / "adapted.onnx")
        onnx.save(merge_lora(str(work / "adapted.onnx")), str(work / "merged.onnx"))

        test = mirrored[1300:], labels[1300:]
        found = {
            "before": accuracy(str(work / "base.onnx"), *test),
            "adapted": accuracy(str(work / "adapted.onnx"), *test),
            "merged": accuracy(str(work / "merged.onnx"), *test),
            "base_bytes": (work / "base.onnx").stat().st_size,
            "adapter_bytes": (work / "adapters.safetensors").stat().st_size,
        }
    print(f"the user's digits: {found['before']:.0%} before, {found['adapted']:.0%} with adapters, "
          f"{found['merged']:.0%} merged")  # fmt: skip
    print(f"the adapters are {found['adapter_bytes']} bytes, the model is {found['base_bytes']}")
    return found


if __name__ == "__main__":
    main()
