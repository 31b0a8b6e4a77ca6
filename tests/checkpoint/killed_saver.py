"""Forks savers and kills each at a random moment; prints what the checkpoint looked like afterwards as JSON.

A program of its own, so that only one thread exists when it forks.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np

from onward.checkpoint import CheckpointData, load, save
from onward.errors import CheckpointError


def content(number: int) -> CheckpointData:
    return CheckpointData(
        trainable={"w": np.full(300_000, number, np.float32)}, properties={"number": number}
    )


def save_forever(path: Path, number: int, pipe: int) -> None:
    while True:
        save(content(number), path, keep=1 + number % 2, external_threshold=0 if number % 3 else 1 << 30)
        os.write(pipe, number.to_bytes(8, "little"))
        number += 1


def acknowledged(pipe: int) -> int:
    received = b""
    while piece := os.read(pipe, 1 << 16):
        received += piece
    return int.from_bytes(received[-8:], "little") if received else -1


def main(directory: str, kills: int, seed: int) -> None:
    random.seed(seed)
    path = Path(directory) / "checkpoint"
    begun = time.perf_counter()
    for _ in range(3):
        save(content(0), path)
    longest = max(
        0.04, time.perf_counter() - begun
    )  # of three saves, however slow the disk and the machine are
    last, lost, torn, unfinished = 0, 0, 0, 0
    for _ in range(kills):
        read_end, write_end = os.pipe()
        child = os.fork()
        if not child:
            save_forever(path, last + 1, write_end)
        os.close(write_end)
        time.sleep(random.uniform(0.001, longest))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        promised = max(last, acknowledged(read_end))
        os.close(read_end)
        unfinished += any(name.endswith(".onward-tmp") for name in os.listdir(directory))
        try:
            found = load(path)
        except CheckpointError:
            torn += 1
            save(content(last), path)
            continue
        number = int(found.properties["number"])
        lost += number < promised or bool(np.any(found.trainable["w"] != number))
        last = number
    save(content(last), path)
    left = [name for name in os.listdir(directory) if name.endswith(".onward-tmp")]
    print(json.dumps({"torn": torn, "lost": lost, "unfinished": unfinished, "saves": last, "left": left}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
