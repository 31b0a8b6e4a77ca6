"""Deprecated name of `onward.train`; it goes away in 0.3."""

from __future__ import annotations

import sys
import warnings

from onward.train import batches, callbacks, history, metrics, report, schedules

__all__ = ["batches", "callbacks", "history", "metrics", "report", "schedules"]
__path__: list[str] = []  # so that `import onward.fit.callbacks` looks in sys.modules
for _name in __all__:
    sys.modules[f"{__name__}.{_name}"] = globals()[_name]
warnings.warn("onward.fit is now onward.train", DeprecationWarning, stacklevel=2)
