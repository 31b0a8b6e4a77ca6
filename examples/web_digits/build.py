"""Writes the demo: a digits model that learns a visitor's handwriting in the page.

    python examples/web_digits/build.py site            # writes a static site
    python examples/web_digits/build.py site --serve    # and serves it at http://localhost:8000/

Other people's digits train the model here, in Python; the visitor's own train it there, from the same files.
"""

from __future__ import annotations

import argparse
import io
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnx.parser

from onward import Trainer, artifacts
from onward.api import CheckpointState
from onward.web import serve, write_site

HERE = Path(__file__).parent
TRAINING, REPLAYED = 1400, 700


def forward_model() -> onnx.ModelProto:
    """Two convolutions with batch norm and dropout; 8×8 pixels in, ten scores out."""
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18]>
        digits (float[batch, 1, 8, 8] image) => (float[batch, 10] scores)
        <int64[2] flat = {0, -1}, float rate = {0.25}, bool training = {1}> {
            a = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (image, conv1)
            b, mean_next, var_next = BatchNormalization <training_mode = 1> (a, scale, bias, mean, var)
            c = Relu (b)
            d = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (c, conv2, conv2_bias)
            e = Relu (d)
            f = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (e)
            g = Reshape (f, flat)
            h = Dropout (g, rate, training)
            scores = Gemm <transB = 1> (h, fc, fc_bias)
        }""")
    rng = np.random.default_rng(0)
    arrays = {
        "conv1": rng.normal(0, np.sqrt(2 / 9), (16, 1, 3, 3)),
        "scale": np.ones(16), "bias": np.zeros(16), "mean": np.zeros(16), "var": np.ones(16),
        "conv2": rng.normal(0, np.sqrt(2 / 144), (32, 16, 3, 3)), "conv2_bias": np.zeros(32),
        "fc": rng.normal(0, np.sqrt(1 / 512), (10, 512)), "fc_bias": np.zeros(10),
    }  # fmt: skip
    for name, array in arrays.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    return model


def load_digits() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Images of 0 to 1 and labels, to train on and to test with."""
    data = np.load(HERE.parent / "data" / "digits.npz")
    images, labels = data["x"].reshape(-1, 1, 8, 8).astype(np.float32) / 16, data["y"].astype(np.int64)
    order = np.random.default_rng(0).permutation(len(labels))
    train, test = order[:TRAINING], order[TRAINING:]
    return (images[train], labels[train]), (images[test], labels[test])


def build(site: Path, *, epochs: int = 10, packages: Path | None = None) -> float:
    """Train the model on other people's digits, write the site, and return its accuracy on the test images."""
    train, test = load_digits()
    model = forward_model()
    statistics = ["mean", "var"]
    with tempfile.TemporaryDirectory() as folder:
        artifacts.generate_artifacts(
            model,
            requires_grad=[t.name for t in model.graph.initializer if t.name in _TRAINABLE],
            frozen_params=statistics,
            loss=artifacts.LossType.CrossEntropyLoss,
            optimizer=artifacts.OptimType.AdamW,
            artifact_directory=folder,
        )
        trainer = Trainer(folder, learning_rate=3e-3, schedule="cosine", metrics=["accuracy"], progress=False)
        trainer.fit(train, epochs=epochs, batch_size=32)
        accuracy = trainer.evaluate(test)["accuracy"]
        # without optimizer state: the visitor's training starts its own
        CheckpointState.save_checkpoint(trainer.state, Path(folder) / "checkpoint")
        images = io.BytesIO()
        np.savez_compressed(
            images,
            replay_images=np.round(train[0][:REPLAYED] * 16).astype(np.uint8),
            replay_labels=train[1][:REPLAYED],
            test_images=np.round(test[0] * 16).astype(np.uint8),
            test_labels=test[1],
        )
        write_site(
            folder,
            site,
            title="digits",
            page=HERE / "page",
            files={"digits.npz": images.getvalue()},
            packages=packages,
        )
    return accuracy


_TRAINABLE = {"conv1", "scale", "bias", "conv2", "conv2_bias", "fc", "fc_bias"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("site", type=Path, help="folder to write")
    parser.add_argument("--serve", action="store_true", help="serve it afterwards")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 lets a phone on the same network in")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    accuracy = build(given.site)
    print(f"Wrote {given.site}: the model starts with {accuracy:.1%} of other people's digits right.")
    if given.serve:
        serve(given.site, host=given.host, port=given.port)


if __name__ == "__main__":
    main()
