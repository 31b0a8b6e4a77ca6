"""The error of this package: ranks that failed, are lost, or do not fit together."""

from __future__ import annotations

from onward.errors import OnwardError

__all__ = ["DistributedError"]


class DistributedError(OnwardError):
    """Training on several ranks that cannot start or go on."""
