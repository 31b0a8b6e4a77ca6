"""One engine with one model, in a process of its own, which times steps when told to.

Reads `phase steps` lines from standard input and answers each with a JSON line of milliseconds. Run by
`suite/interleave.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from engines import ENGINES


def peak_memory() -> float:
    """The largest resident size of this process so far, in MB."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would count the process that started this one, too
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1024
    if sys.platform == "win32":
        return 0.0
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used / 2**20 if sys.platform == "darwin" else used / 2**10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--use", choices=("train", "infer", "generate"), default="train")
    arguments = parser.parse_args()
    phases = ENGINES[arguments.engine](arguments.folder, arguments.threads, use=arguments.use)
    if not phases:
        return
    next(iter(phases.values()))()
    answer({"phases": list(phases)})
    for line in sys.stdin:
        phase, steps = line.split()
        run, wall = phases[phase], []
        for _ in range(max(1, int(steps) // 10)):  # after a pause caches are cold and threads asleep
            run()
        used = time.process_time()
        for _ in range(int(steps)):
            start = time.perf_counter()
            run()
            wall.append((time.perf_counter() - start) * 1e3)
        used = (time.process_time() - used) * 1e3 / int(steps)
        answer({"wall": wall, "processor": used, "peak_mb": peak_memory()})


def answer(value: dict) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main()
