"""The error of this package: ranks that failed, are lost, or do not fit together."""

from __future__ import annotations

from onward.errors import OnwardError

__all__ = ["DistributedError", "OtherStageFailed"]


class DistributedError(OnwardError):
    """Training on several ranks that cannot start or go on."""


class OtherStageFailed(DistributedError):
    """This rank could not go on because of another one, which knows the reason."""

    def __init__(self) -> None:
        super().__init__("another stage of the pipeline failed")
