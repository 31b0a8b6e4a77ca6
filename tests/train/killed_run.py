"""A training run in a process of its own, to be killed: `python killed_run.py <artifacts> <output> <tests>`."""

from __future__ import annotations

import sys
from pathlib import Path

artifacts, output, tests = map(Path, sys.argv[1:])
sys.path.insert(0, str(tests))

from trainer_runs import data, make  # noqa: E402

print("ready", flush=True)
make(artifacts, output).fit(data(), data(1), epochs=3, batch_size=5, save_every=2, resume=True)
print("done", flush=True)
