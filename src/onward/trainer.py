"""Deprecated name of `onward.train.trainer`; it goes away in 0.3."""

from __future__ import annotations

import warnings

from onward.train.trainer import Trainer

__all__ = ["Trainer"]
warnings.warn("onward.trainer is now onward.train.trainer", DeprecationWarning, stacklevel=2)
