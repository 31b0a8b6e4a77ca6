"""A time series: ONNX's LSTM operator learns to forecast a noisy rhythm, and beats "as it was last time"."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnx.parser

from onward import Trainer, artifacts
from onward.train.callbacks import EarlyStopping

HIDDEN, WINDOW = 24, 32


def forecaster(seed: int = 0) -> onnx.ModelProto:
    """The last state of an LSTM over a window, and a linear layer that reads the next value from it."""
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 18]>
        forecaster (float[batch, steps, 1] window) => (float[batch, 1] next) <int64[1] first = {{0}}> {{
            sequence = Transpose <perm = [1, 0, 2]> (window)
            all, last, cell = LSTM <hidden_size = {HIDDEN}> (sequence, lstm_w, lstm_r, lstm_b)
            state = Squeeze (last, first)
            next = Gemm <transB = 1> (state, out_w, out_b)
        }}""")
    rng = np.random.default_rng(seed)
    shapes = {
        "lstm_w": (1, 4 * HIDDEN, 1), "lstm_r": (1, 4 * HIDDEN, HIDDEN), "lstm_b": (1, 8 * HIDDEN),
        "out_w": (1, HIDDEN), "out_b": (1,),
    }  # fmt: skip
    for name, shape in shapes.items():
        array = rng.uniform(-1, 1, shape) / np.sqrt(HIDDEN)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    return model


def rhythm(samples: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Windows of two beating sines with noise, and the value that follows."""
    rng = np.random.default_rng(seed)
    start = rng.uniform(0, 200, (samples, 1))
    time = start + np.arange(WINDOW + 1)
    values = np.sin(time / 3) * np.cos(time / 17) + rng.normal(0, 0.05, time.shape)
    return values[:, :-1, None].astype(np.float32), values[:, -1:].astype(np.float32)


def main(epochs: int = 20) -> dict[str, float]:
    """Train and return the errors of the naive forecast and the learned one."""
    train, test = rhythm(768, seed=1), rhythm(256, seed=2)
    naive = float(np.mean(np.square(test[0][:, -1] - test[1])))
    with tempfile.TemporaryDirectory() as folder:
        artifacts.generate_artifacts(
            forecaster(),
            requires_grad=["lstm_*", "out_*"],
            loss=artifacts.LossType.MSELoss,
            optimizer=artifacts.OptimType.AdamW,
            artifact_directory=folder,
        )
        trainer = Trainer(
            Path(folder),
            learning_rate=1e-2,
            schedule="cosine",
            clip_norm=1.0,
            callbacks=[EarlyStopping("eval_loss", patience=6)],
        )
        trainer.fit(train, test, epochs=epochs, batch_size=32)
        learned = trainer.evaluate(test)["loss"]
    print(f"mean squared error: {naive:.4f} naive, {learned:.4f} learned (the noise alone is 0.0025)")
    return {"naive": naive, "learned": learned}


if __name__ == "__main__":
    main()
