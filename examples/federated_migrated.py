"""Federated learning as it was written for onnxruntime-training: only the first two imports changed.

Clients train on data that stays with them; what travels is one flat buffer of parameters, which a server averages.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort

from onward import artifacts  # was: from onnxruntime.training import artifacts
from onward.api import CheckpointState, Module, Optimizer  # was: from onnxruntime.training.api import …

CLIENTS = 3


def classifier(seed: int = 0) -> onnx.ModelProto:
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18]>
        digits (float[batch, 64] image) => (float[batch, 10] logits) {
            a = Gemm <transB = 1> (image, fc1_weight, fc1_bias)  b = Relu (a)
            logits = Gemm <transB = 1> (b, fc2_weight, fc2_bias)
        }""")
    rng = np.random.default_rng(seed)
    for name, shape in {
        "fc1_weight": (64, 64),
        "fc1_bias": (64,),
        "fc2_weight": (10, 64),
        "fc2_bias": (10,),
    }.items():
        array = rng.normal(0, 0.1, shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


class Client:
    """A device: its own data, its own checkpoint, the same models."""

    def __init__(self, folder: Path, images: np.ndarray, labels: np.ndarray) -> None:
        self.images, self.labels = images, labels
        self.state = CheckpointState.load_checkpoint(str(folder / "checkpoint"))
        self.module = Module(str(folder / "training_model.onnx"), self.state, str(folder / "eval_model.onnx"))
        self.optimizer = Optimizer(str(folder / "optimizer_model.onnx"), self.module)

    def train(self, start: ort.OrtValue | None, batch: int = 20) -> np.ndarray:
        """One pass over the client's data from the server's parameters; returns the client's."""
        if start is not None:
            self.module.copy_buffer_to_parameters(start, trainable_only=True)
        self.module.train()
        for first in range(0, len(self.labels), batch):
            self.module(self.images[first : first + batch], self.labels[first : first + batch])
            self.optimizer.step()
            self.module.lazy_reset_grad()
        return self.module.get_contiguous_parameters(trainable_only=True).numpy()


def main(rounds: int = 8) -> dict[str, float]:
    """Run some rounds; return the accuracy of the average and of a client that learned alone."""
    data = np.load(Path(__file__).parent / "data" / "digits.npz")
    images, labels = data["x"].reshape(-1, 64).astype(np.float32) / 16, data["y"].astype(np.int64)
    test = images[1200:], labels[1200:]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        artifacts.generate_artifacts(
            classifier(),
            requires_grad=["fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"],
            loss=artifacts.LossType.CrossEntropyLoss,
            optimizer=artifacts.OptimType.AdamW,
            artifact_directory=str(folder),
        )
        # each client lacks a third of the digits
        shares = [(labels[:1200] % CLIENTS) != index for index in range(CLIENTS)]
        clients = [Client(folder, images[:1200][share], labels[:1200][share]) for share in shares]
        average = None
        for _ in range(rounds):
            buffers = [client.train(average) for client in clients]
            average = ort.OrtValue.ortvalue_from_numpy(np.mean(buffers, axis=0, dtype=np.float32))

        def accuracy(client: Client) -> float:
            client.module.export_model_for_inferencing(str(folder / "model.onnx"), ["logits"])
            (logits,) = ort.InferenceSession(str(folder / "model.onnx")).run(None, {"image": test[0]})
            return float(np.mean(np.argmax(np.asarray(logits), axis=1) == test[1]))

        alone = accuracy(clients[0])  # after its own training, before the next average
        clients[0].module.copy_buffer_to_parameters(average, trainable_only=True)
        together = accuracy(clients[0])
    print(f"held-out accuracy: {alone:.1%} of one client, {together:.1%} of the average of {CLIENTS}")
    return {"alone": alone, "together": together}


if __name__ == "__main__":
    main()
