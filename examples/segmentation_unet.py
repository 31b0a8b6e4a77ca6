"""Segmentation: a small U-Net finds discs in noise. Convolutions down, transposed ones up, a skip between."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnx.parser

from onward import Trainer, artifacts


def unet(seed: int = 0) -> onnx.ModelProto:
    """Two resolutions; what the first sees is put beside what the second knows."""
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18]>
        unet (float[batch, 1, height, width] image) => (float[batch, 1, height, width] logits) {
            a = Conv <pads = [1, 1, 1, 1]> (image, down1_w, down1_b)
            fine = Relu (a)
            b = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (fine)
            c = Conv <pads = [1, 1, 1, 1]> (b, down2_w, down2_b)
            d = Relu (c)
            e = Conv <pads = [2, 2, 2, 2], dilations = [2, 2]> (d, middle_w, middle_b)
            coarse = Relu (e)
            up = ConvTranspose <kernel_shape = [2, 2], strides = [2, 2]> (coarse, up_w, up_b)
            both = Concat <axis = 1> (up, fine)
            f = Conv <pads = [1, 1, 1, 1]> (both, join_w, join_b)
            g = Relu (f)
            logits = Conv (g, out_w, out_b)
        }""")
    shapes = {
        "down1_w": (8, 1, 3, 3), "down1_b": (8,), "down2_w": (16, 8, 3, 3), "down2_b": (16,),
        "middle_w": (16, 16, 3, 3), "middle_b": (16,), "up_w": (16, 8, 2, 2), "up_b": (8,),
        "join_w": (8, 16, 3, 3), "join_b": (8,), "out_w": (1, 8, 1, 1), "out_b": (1,),
    }  # fmt: skip
    rng = np.random.default_rng(seed)
    for name, shape in shapes.items():
        scale = 0.0 if len(shape) == 1 else np.sqrt(2 / np.prod(shape[1:]))
        array = rng.normal(0, scale, shape) if scale else np.zeros(shape)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    return model


def discs(samples: int, size: int = 24, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Noisy pictures with one disc each, and where it is."""
    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[:size, :size]
    x, y = rng.uniform(6, size - 6, (2, samples, 1, 1))
    radius = rng.uniform(3, 6, (samples, 1, 1))
    mask = (rows - y) ** 2 + (columns - x) ** 2 < radius**2
    image = mask * 1.0 + rng.normal(0, 0.7, mask.shape)
    return image[:, None].astype(np.float32), mask[:, None].astype(np.float32)


def overlap(outputs: dict, inputs: dict) -> float:
    """Intersection over union of what was found and what is there."""
    found, there = outputs["logits"] > 0, list(inputs.values())[-1] > 0.5
    return float(np.sum(found & there) / np.sum(found | there))


def main(epochs: int = 6) -> dict[str, float]:
    """Train and return the figures before and after."""
    model = unet()
    train, test = discs(256, seed=1), discs(64, seed=2)
    with tempfile.TemporaryDirectory() as folder:
        artifacts.generate_artifacts(
            model,
            requires_grad=["*_w", "*_b"],
            loss=artifacts.LossType.BCEWithLogitsLoss,
            optimizer=artifacts.OptimType.AdamW,
            artifact_directory=folder,
        )
        trainer = Trainer(Path(folder), learning_rate=5e-3, schedule="cosine", metrics={"overlap": overlap})
        before = trainer.evaluate(test)["overlap"]
        trainer.fit(train, test, epochs=epochs, batch_size=16)
        after = trainer.evaluate(test)["overlap"]
        # the shapes are symbolic: the same weights take pictures of another size
        larger = trainer.evaluate(discs(16, size=40, seed=3))["overlap"]
    print(f"intersection over union: {before:.2f} before, {after:.2f} after, {larger:.2f} on larger pictures")
    return {"before": before, "after": after, "larger": larger}


if __name__ == "__main__":
    main()
