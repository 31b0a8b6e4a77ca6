"""Train a classifier of handwritten digits on several processes, and let rank 0 export it.

    python -m onward.distributed.launch -n 2 examples/distributed_digits.py --output digits
    python -m onward.distributed.launch -n 2 --max-restarts 3 examples/distributed_digits.py --output digits
    python -m onward.distributed.launch -n 4 examples/distributed_digits.py --output digits --pipeline 2
    python examples/distributed_digits.py --output digits          # one process, without torch

Every process runs this same program. A run that was interrupted goes on from its last checkpoint. Needs
scikit-learn, for the digits.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from sklearn.datasets import load_digits

from onward import artifacts
from onward.distributed import RunnerSettings, ShardedArrays, TrainingRunner, all_or_none, connect


def digits() -> tuple[np.ndarray, np.ndarray]:
    """1797 images of 8 × 8 pixels and what they show."""
    found = load_digits()
    return (found.data / 16).astype(np.float32), found.target.astype(np.int64)


def make_artifacts(folder: Path) -> None:
    """A small perceptron, its loss and its optimizer, as files."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]>
        digits (float[batch, 64] pixels) => (float[batch, 10] logits) {
            hidden = Gemm(pixels, w1, b1)
            active = Relu(hidden)
            logits = Gemm(active, w2, b2)
        }"""
    )
    generator = np.random.default_rng(0)
    for name, shape in {"w1": (64, 32), "b1": (32,), "w2": (32, 10), "b2": (10,)}.items():
        values = generator.normal(size=shape) / np.sqrt(shape[0])
        model.graph.initializer.append(onnx.numpy_helper.from_array(values.astype(np.float32), name))
    artifacts.generate_artifacts(
        model,
        requires_grad=["w1", "b1", "w2", "b2"],
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        additional_output_names=["logits"],
        artifact_directory=folder,
    )


def main(arguments: list[str] | None = None) -> None:
    """Prepare, train, evaluate, export."""
    parser = argparse.ArgumentParser(
        description="Train on handwritten digits, on as many ranks as there are."
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--pipeline", type=int, default=1, help="stages of the pipeline")
    options = parser.parse_args(arguments)

    comm = connect(timeout=60)
    with all_or_none(comm):  # rank 0 writes the files that all ranks read
        if comm.rank == 0 and not (options.output / "training_model.onnx").exists():
            make_artifacts(options.output)

    pixels, labels = digits()
    training = ShardedArrays(pixels[:1500], labels[:1500], batch_size=50)
    test = ShardedArrays(pixels[1500:], labels[1500:], batch_size=100, shuffle=False)
    parameters = RunnerSettings(
        artifacts=options.output,
        epochs=options.epochs,
        learning_rate=5e-3,
        pipeline_parallel_size=options.pipeline,
        checkpoint_directory=options.output / "checkpoints",
        checkpoint_every=10,
    )
    with TrainingRunner(parameters, communicator=comm) as runner:
        first = runner.updates  # more than 0 where a restarted run goes on
        runner.run(training, test)
        loss = runner.end_training(test)
        runner.export_model_for_inferencing(options.output / "digits.onnx", ["logits"])
        if runner.rank == 0:
            session = ort.InferenceSession(options.output / "digits.onnx", providers=["CPUExecutionProvider"])
            (logits,) = session.run(None, {"pixels": pixels[1500:]})
            accuracy = np.mean(np.argmax(logits, axis=1) == labels[1500:])
            print(
                f"{runner.world_size} ranks, {runner.updates} updates ({runner.updates - first} in this attempt)"
            )
            print(f"test loss {loss:.4f}, accuracy {accuracy:.1%}")
    comm.close()


if __name__ == "__main__":
    main()
