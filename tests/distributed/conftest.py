"""Ranks are processes of their own: they import what lies beside the tests."""

import os
import sys
from pathlib import Path

_HERE = str(Path(__file__).parent)
_ROOT = Path(__file__).parents[2]
if _HERE not in sys.path:
    sys.path.insert(0, _HERE)
os.environ["PYTHONPATH"] = os.pathsep.join(
    [_HERE, str(_ROOT), str(_ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
)
