"""Checkpoint data for the tests: small, seeded, with every part filled; and equality to the last bit."""

from __future__ import annotations

import io

import numpy as np

from onward.checkpoint import CheckpointData, NominalTensor, OptimizerGroup, encode


def sample(seed: int = 0, *, width: int = 24) -> CheckpointData:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return np.asarray(rng.standard_normal(shape), np.float32)

    trainable = {"encoder.weight": normal(width, 5), "encoder.bias": normal(width), "scale": normal()}
    slots = {
        name: {"momentum0": normal(*array.shape), "momentum1": np.abs(normal(*array.shape))}
        for name, array in trainable.items()
    }
    return CheckpointData(
        trainable=dict(trainable),
        frozen={"norm.mean": normal(width), "steps": np.array(seed, np.int64)},
        optimizer=[OptimizerGroup("group0", 7 + seed, 0.25, slots)],
        properties={"epoch": seed, "loss": 0.5, "note": "größer"},
        extras={"learning_rate": 0.1, "scheduler": "cosine", "random_state": 2**100 + seed},
        accumulation={name: normal(*array.shape) for name, array in trainable.items()},
    )


def encoded(data: CheckpointData, **options: int) -> bytes:
    stream = io.BytesIO()
    encode(data, stream, **options)
    return stream.getvalue()


def fingerprint(data: CheckpointData) -> object:
    """Everything in a checkpoint as comparable values, floats and arrays by their bits, order included."""
    return (
        [_tensors(data.trainable), _tensors(data.frozen), _tensors(data.accumulation)],
        [
            (
                g.name,
                g.step,
                np.float32(g.initial_learning_rate),
                [(name, _tensors(s)) for name, s in g.slots.items()],
            )
            for g in data.optimizer
        ],
        sorted((name, repr(value)) for name, value in data.properties.items()),
        sorted((name, repr(value)) for name, value in data.extras.items()),
        data.nominal,
    )


def _tensors(tensors) -> list:
    return [
        (name, t) if isinstance(t, NominalTensor) else (name, str(t.dtype), t.shape, t.tobytes())
        for name, t in tensors.items()
    ]
