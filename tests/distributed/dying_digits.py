"""The example, in which one rank is killed in the first attempt."""

import os
import runpy
import signal
import sys
from pathlib import Path

from onward.distributed.data_parallel import DataParallel
from onward.distributed.rank_environment import read_environment

if os.environ["RANK"] == "1" and read_environment().attempt == 0:
    backward = DataParallel.backward

    def dying(self, window):
        if window.end == 38:
            os.kill(os.getpid(), signal.SIGKILL)
        return backward(self, window)

    DataParallel.backward = dying

example = Path(__file__).parents[2] / "examples" / "distributed_digits.py"
sys.argv[0] = str(example)
runpy.run_path(str(example), run_name="__main__")
