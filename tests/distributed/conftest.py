"""Ranks are processes of their own: they must find the tests and what lies beside them by the same names."""

import os
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_PATHS = [str(Path(__file__).parent), str(_ROOT / "src"), str(_ROOT)]
sys.path.extend(path for path in _PATHS if path not in sys.path)
os.environ["PYTHONPATH"] = os.pathsep.join([*_PATHS, *filter(None, [os.environ.get("PYTHONPATH")])])
