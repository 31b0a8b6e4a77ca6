"""The example, in which one rank is killed in the first attempt."""

import os
import runpy
import signal
import sys
from pathlib import Path

from onward.distributed.data_parallel import DataParallel

if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    backward = DataParallel.backward

    def dying(self, batches, *, step, failure=None):
        if step == 37:
            os.kill(os.getpid(), signal.SIGKILL)
        return backward(self, batches, step=step, failure=failure)

    DataParallel.backward = dying

example = Path(__file__).parents[2] / "examples" / "distributed_digits.py"
sys.argv[0] = str(example)
runpy.run_path(str(example), run_name="__main__")
