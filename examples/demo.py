"""The whole life of a model on the stock runtime: differentiate, train, resume, export, run. No torch."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
from rich.console import Console

import onward
from onward import Trainer, artifacts
from onward.autodiff.coverage import summary
from onward.export import for_inference
from onward.train.callbacks import Callback

console = Console(soft_wrap=True)


def say(title: str) -> None:
    console.print(f"\n[bold cyan]{title}[/]")


def forward_model(seed: int = 0) -> onnx.ModelProto:
    """A small convolutional network with batch norm and dropout, as any exporter might write it."""
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18]>
        digits (float[batch, 1, 8, 8] image) => (float[batch, 10] logits)
        <int64[2] flat = {0, -1}, float rate = {0.2}, bool training = {1}> {
            a = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (image, conv1_weight)
            b, m1, v1 = BatchNormalization <training_mode = 1> (a, bn1_scale, bn1_bias, bn1_mean, bn1_var)
            c = Relu (b)
            d = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (c)
            e = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (d, conv2_weight, conv2_bias)
            f = Relu (e)
            g = Reshape (f, flat)
            h, mask = Dropout (g, rate, training)
            logits = Gemm <transB = 1> (h, fc_weight, fc_bias)
        }""")
    rng = np.random.default_rng(seed)
    shapes = {"conv1_weight": (16, 1, 3, 3), "conv2_weight": (32, 16, 3, 3), "conv2_bias": (32,)}
    shapes |= {"fc_weight": (10, 512), "fc_bias": (10,)}
    arrays = {
        name: rng.normal(0, np.sqrt(2 / max(np.prod(shape[1:]), 1)) if len(shape) > 1 else 0, shape)
        for name, shape in shapes.items()
    }
    arrays |= {
        "bn1_scale": np.ones(16),
        "bn1_bias": np.zeros(16),
        "bn1_mean": np.zeros(16),
        "bn1_var": np.ones(16),
    }
    for name, array in arrays.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    return model


def load_digits() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    data = np.load(Path(__file__).parent / "data" / "digits.npz")
    images, labels = data["x"].reshape(-1, 1, 8, 8).astype(np.float32) / 16, data["y"].astype(np.int64)
    order = np.random.default_rng(0).permutation(len(labels))
    train, test = order[:1400], order[1400:]
    return (images[train], labels[train]), (images[test], labels[test])


def main() -> None:
    started = time.perf_counter()
    train, test = load_digits()
    model = forward_model()

    say("1. Gradients of any ONNX model, as a plain ONNX model")
    small = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18]> g (float[n, 4] x, float[4, 3] w) => (float loss)'
        "{ h = MatMul (x, w)  a = Tanh (h)  s = Mul (a, a)  loss = ReduceSum <keepdims = 0> (s) }"
    )
    derived = onward.gradient(small, of="loss", wrt=["w"])
    console.print(
        f"   outputs {[value.name for value in derived.graph.output]}, {len(derived.graph.node)} nodes"
    )
    rng = np.random.default_rng(1)
    point = {"x": rng.normal(size=(5, 4)).astype(np.float32), "w": rng.normal(size=(4, 3)).astype(np.float32)}
    checked = onward.check_gradient(small, point, of=["loss"], wrt=["w"])
    console.print(f"   finite differences agree to {checked.finite_difference:.1e}")
    console.print(f"   {summary()}")

    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        say("2. Artifacts: training, eval and optimizer model, and a checkpoint")
        statistics = ["bn1_mean", "bn1_var"]
        trainable = [t.name for t in model.graph.initializer if "_" in t.name and t.name not in statistics]
        artifacts.generate_artifacts(
            model,
            requires_grad=trainable,
            frozen_params=statistics,
            loss=artifacts.LossType.CrossEntropyLoss,
            optimizer=artifacts.OptimType.AdamW,
            artifact_directory=work / "artifacts",
        )
        for file in sorted((work / "artifacts").iterdir()):
            console.print(f"   {file.name:22} {file.stat().st_size / 1024:6.1f} KB")

        say("3. Train on the stock runtime")
        options = {
            "learning_rate": 3e-3,
            "schedule": "cosine",
            "metrics": ["accuracy"],
            "progress": False,
            "output_directory": work / "run",
        }
        trainer = Trainer(work / "artifacts", **options)
        before = trainer.evaluate(test)
        console.print(f"   before: held-out accuracy {before['accuracy']:.1%}")
        # half of the epochs, as if the machine had gone down then; the schedule is that of the whole run
        interrupted = Trainer(work / "artifacts", callbacks=[StopAfter(4)], **options)
        interrupted.fit(train, test, epochs=8, batch_size=32)
        trainer.fit(train, test, epochs=8, batch_size=32, resume=True)
        for row in trainer.history.epochs:
            console.print(
                f"   epoch {row['epoch']}  loss {row['loss']:.4f}  held-out loss {row['eval_loss']:.4f}  "
                f"accuracy {row['accuracy']:.1%}  {row['samples_per_second']:.0f} images/s"
                + ("   (resumed here)" if row["epoch"] == 5 else "")
            )
        after = trainer.evaluate(test)

        say("4. Export for inference and run it on stock onnxruntime")
        report = for_inference(
            work / "artifacts" / "eval_model.onnx", trainer.state, ["logits"], work / "digits.onnx",
            inputs={"image": test[0]},
        )  # fmt: skip
        session = ort.InferenceSession(str(work / "digits.onnx"))
        (logits,) = session.run(None, {"image": test[0]})
        deployed = float(np.mean(np.argmax(np.asarray(logits), axis=1) == test[1]))
        assert report.parity is not None
        console.print(
            f"   one file of {report.size / 1024:.1f} KB, inputs {[i.name for i in session.get_inputs()]}"
        )
        console.print(f"   largest difference to the eval model: {report.parity.max_abs:.1e}")
        console.print(
            f"   held-out accuracy: [bold]{before['accuracy']:.1%} before, {after['accuracy']:.1%} after training, "
            f"{deployed:.1%} in the exported file[/]"
        )
    console.print(
        f"\nDone in {time.perf_counter() - started:.1f} s, onnxruntime {ort.__version__}, no torch."
    )


class StopAfter(Callback):
    """Ends a run after some epochs."""

    def __init__(self, epochs: int) -> None:
        self._epochs = epochs

    def on_epoch(self, trainer: Trainer, row: dict) -> bool:
        return row["epoch"] >= self._epochs


if __name__ == "__main__":
    main()
