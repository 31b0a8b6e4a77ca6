"""Save and load a checkpoint past 2 GB, optimizer state included: time against a plain write, and memory.

    python benchmarks/checkpoint_large.py [--mib 3072] [--directory DIR]

Parameters are a third of the size, two moments the rest. The plain write puts the same bytes into a file and
flushes it to the disk once. Needs about twice the size on disk; everything is removed afterwards.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from onward.checkpoint import CheckpointData, OptimizerGroup, load, save


def state_of(mib: int) -> CheckpointData:
    rng = np.random.default_rng(0)
    elements = (mib << 20) // 4 // 3 // 8
    trainable = {f"layer{i}.weight": rng.random(elements, np.float32) for i in range(8)}
    slots = {
        name: {slot: rng.random(elements, np.float32) for slot in ("momentum0", "momentum1")}
        for name in trainable
    }
    return CheckpointData(trainable=dict(trainable), optimizer=[OptimizerGroup(step=1, slots=slots)])


def all_arrays(data: CheckpointData) -> list[np.ndarray]:
    parameters = [array for array in data.trainable.values() if isinstance(array, np.ndarray)]
    return parameters + [
        array for group in data.optimizer for slots in group.slots.values() for array in slots.values()
    ]


def plain_write(arrays: list[np.ndarray], path: Path) -> None:
    with open(path, "wb", buffering=0) as file:
        for array in arrays:
            view = array.view(np.uint8).data
            while view:
                view = view[file.write(view) :]
        os.fsync(file.fileno())


class PeakMemory:
    """The largest growth of this process's own memory (not of file pages) while the block runs."""

    def __enter__(self) -> PeakMemory:
        self.base = self.peak = self._now()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.01):
            self.peak = max(self.peak, self._now())

    @staticmethod
    def _now() -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                return int(line.split()[1]) >> 10
        return 0

    @property
    def grown(self) -> int:
        return self.peak - self.base


def timed(call) -> tuple[float, int, object]:
    with PeakMemory() as memory:
        start = time.perf_counter()
        result = call()
        seconds = time.perf_counter() - start
    return seconds, memory.grown, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=3072)
    parser.add_argument("--directory", default=None)
    arguments = parser.parse_args()
    data = state_of(arguments.mib)
    arrays = all_arrays(data)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        plain, _, _ = timed(lambda: plain_write(arrays, Path(directory) / "plain"))
        os.unlink(Path(directory) / "plain")
        path = Path(directory) / "checkpoint"
        saving, save_memory, _ = timed(lambda: save(data, path))
        size = path.stat().st_size
        loading, load_memory, found = timed(lambda: load(path))
        assert isinstance(found, CheckpointData)
        same = all(np.array_equal(a, b) for a, b in zip(arrays, all_arrays(found), strict=True))
    mib = size / 2**20
    print(f"size           {mib:8.0f} MiB")
    print(f"plain write    {plain:8.2f} s")
    print(f"save           {saving:8.2f} s   {saving / plain:.2f} times the plain write")
    print(f"  memory       {save_memory:8d} MiB")
    print(f"load           {loading:8.2f} s")
    print(f"  memory       {load_memory:8d} MiB ({load_memory / mib:.2f} times the size)")
    print(f"equal          {same}")
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
