"""A loss of your own from blocks: quantile regression, which answers "how late will it be at worst?"."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnx.parser

from onward import Trainer, artifacts, onnxblock


class Pinball(onnxblock.Block):
    """mean(max(q·e, (q−1)·e)) with e = target − forecast, which is mean((q − ½)·e + ½·|e|)."""

    def __init__(self, quantile: float) -> None:
        self._lean = onnxblock.blocks.Constant(quantile - 0.5)
        self._half = onnxblock.blocks.Constant(0.5)
        self._subtract, self._absolute = onnxblock.blocks.Sub(), onnxblock.blocks.Abs()
        self._first, self._second = onnxblock.blocks.Mul(), onnxblock.blocks.Mul()
        self._add, self._mean = onnxblock.blocks.Add(), onnxblock.blocks.ReduceMean(keepdims=False)

    def build(self, forecast: str) -> str:
        """Add the loss and an input `target`; returns the name of the loss."""
        target = onnxblock.blocks.InputLike(forecast)("target")
        error = self._subtract(target, forecast)
        leaning = self._first(error, self._lean())
        spread = self._second(self._absolute(error), self._half())
        return self._mean(self._add(leaning, spread))


def network(seed: int = 0) -> onnx.ModelProto:
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18]>
        delays (float[batch, 1] hour) => (float[batch, 1] delay) {
            a = Gemm <transB = 1> (hour, w1, b1)  b = Tanh (a)  delay = Gemm <transB = 1> (b, w2, b2)
        }""")
    rng = np.random.default_rng(seed)
    for name, shape in {"w1": (32, 1), "b1": (32,), "w2": (1, 32), "b2": (1,)}.items():
        array = rng.normal(0, 0.7, shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def delays(samples: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Delays that grow and scatter more around the rush hour."""
    rng = np.random.default_rng(seed)
    hour = rng.uniform(-2, 2, (samples, 1))
    rush = np.exp(-(hour**2))
    return hour.astype(np.float32), (rush + rng.exponential(0.1 + 0.5 * rush)).astype(np.float32)


def main(epochs: int = 25) -> dict[float, float]:
    """Train one model for each quantile; return the share of held-out delays below its forecast."""
    train, test = delays(2000, seed=1), delays(2000, seed=2)
    covered = {}
    for quantile in (0.5, 0.9):
        with tempfile.TemporaryDirectory() as folder:
            artifacts.generate_artifacts(
                network(),
                requires_grad=["w*", "b*"],
                loss=Pinball(quantile),
                optimizer=artifacts.OptimType.AdamW,
                artifact_directory=folder,
            )
            trainer = Trainer(Path(folder), learning_rate=1e-2, schedule="cosine")
            trainer.fit(train, epochs=epochs, batch_size=64)
            forecast = trainer.predict(test[0])
        covered[quantile] = float(np.mean(test[1] <= forecast))
        print(f"forecast of the {quantile:.0%} quantile: {covered[quantile]:.1%} of delays are below it")
    return covered


if __name__ == "__main__":
    main()
