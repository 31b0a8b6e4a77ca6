"""The errors of this package: ranks that failed, were lost, or are inconsistent."""

from __future__ import annotations

from onward.errors import OnwardError


class DistributedError(OnwardError):
    """Distributed training cannot start or continue."""


class RankLost(DistributedError):
    """Another rank died or did not respond: what a restart from the last checkpoint may heal."""


class OtherStageFailed(DistributedError):
    """This rank stopped because of an error on another rank."""

    def __init__(self) -> None:
        super().__init__("another stage of the pipeline failed")
