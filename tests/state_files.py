"""State files of the portable step for tests: a small one, and ones whose only fault is what they say."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable

import numpy as np

from onward.checkpoint import CheckpointData, OptimizerGroup
from onward.checkpoint.portable import StateLayout, StatePart, StateTensor

FLOAT, INT = np.dtype(np.float32), np.dtype(np.int64)


def make_layout(w: tuple[int, ...] = (3, 5)) -> StateLayout:
    """Two parameters in one tensor, a frozen one, one slot, the counters."""
    packed = (StatePart("trainable", "w", w), StatePart("trainable", "odd\tname\\", (2,), start=64))
    slots = tuple(StatePart("slot", p.name, p.shape, "momentum0", p.start) for p in packed)
    return StateLayout(
        [
            StateTensor("scale", np.dtype(np.float16), (), (StatePart("frozen", "scale", ()),)),
            StateTensor("packed0", FLOAT, (18,), packed),
            StateTensor("packed0.momentum0", FLOAT, (18,), slots),
            *(
                StateTensor(role, INT, (1,), (StatePart(role, role, (1,)),))
                for role in ("optimizer_step", "train_step", "random_seed")
            ),
        ]
    )


def make_data() -> CheckpointData:
    rng = np.random.default_rng(0)
    w, odd = rng.normal(size=(3, 5)).astype(np.float32), np.array([1.5, -2.0], np.float32)
    return CheckpointData(
        trainable={"w": w, "odd\tname\\": odd},
        frozen={"scale": np.array(0.5, np.float16)},
        optimizer=[
            OptimizerGroup(
                "group0", 7, 0.01, {"w": {"momentum0": w * 2}, "odd\tname\\": {"momentum0": odd * 2}}
            )
        ],
        properties={"epoch": 3, "note": "two\nlines\t\\", "share": 0.25},
        extras={"seed": -5, "train_step": 9, "learning_rate": 0.1, "environment": "here"},
    )


def forge(whole: bytes, change: Callable[[str], str]) -> bytes:
    """The file with another text, and with all sizes and digests put right: only its meaning is wrong."""
    end, text = struct.unpack_from("<QQ", whole, 16)
    changed = change(whole[end : end + text].decode())
    table = "".join(
        line for line in changed.splitlines(keepends=True) if not line.startswith(("property", "extra"))
    )
    digest = hashlib.sha256(table.encode()).digest()
    made = whole[:24] + struct.pack("<Q", len(changed.encode())) + digest + whole[64:end] + changed.encode()
    return made + hashlib.sha256(made).digest()


FORGED = {
    "a tensor elsewhere": lambda text: text.replace("float32\t18\t128", "float32\t18\t192", 1),
    "a tensor past the end": lambda text: text.replace("float32\t18\t128", "float32\t1800\t128", 1),
    "a size beyond 64 bits": lambda text: text.replace("\t18\t128", "\t4294967296,4294967296,18\t128", 1),
    "a size that is no number": lambda text: text.replace("\t18\t128", "\t-18\t128", 1),
    "a size in other digits": lambda text: text.replace("\t18\t128", "\t１８\t128", 1),
    "forty dimensions": lambda text: text.replace("\t18\t128", "\t18" + ",1" * 40 + "\t128", 1),
    "a part that is larger": lambda text: text.replace("trainable\tw\t3,5", "trainable\tw\t3,500", 1),
    "parts that overlap": lambda text: text.replace("\t2\t192\n", "\t2\t128\n", 1),
    "a type that runs code": lambda text: text.replace("float32", "object", 1),
    "an unknown role": lambda text: text.replace("trainable\tw", "unknown\tw", 1),
    "a role in the wrong place": lambda text: text.replace("trainable\tw", "random_seed\tw", 1),
    "two of a name": lambda text: text.replace("odd\\tname\\\\", "w"),
    "no name": lambda text: text.replace("trainable\tw\t", "trainable\t\t", 1),
    "no counters": lambda text: text[: text.index("tensor\toptimizer_step")],
    "a counter of another type": lambda text: text.replace("train_step\tint64", "train_step\tfloat64", 1),
    "a counter of another shape": lambda text: text.replace(
        "train_step\tint64\t1\t", "train_step\tint64\t\t", 1
    ),
    "a rate that is no number": lambda text: text.replace("f:0.1\n", "f:\x1f.1\n", 1),
    "a tensor without parts": lambda text: text.replace("frozen\tscale\t\t64\n", "", 1),
    "a line too short": lambda text: text.replace("tensor\tscale\t", "tensor\t", 1),
    "an empty line": lambda text: text.replace("property", "\nproperty", 1),
    "a wrong escape": lambda text: text.replace("\\tname", "\\xname"),
    "an escape cut off": lambda text: text.replace("s:two\\n", "s:two\n\\", 1),
    "a value without a type": lambda text: text.replace("i:3", "3"),
    "an integer that is none": lambda text: text.replace("i:3", "i:three"),
    "no end of the line": lambda text: text[:-1],
    "no text": lambda text: "",
}
