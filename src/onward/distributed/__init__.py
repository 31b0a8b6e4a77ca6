"""Train one model on many ranks, over torch.distributed; on one rank, without torch."""

import warnings

from onward.distributed.agreement import all_or_none
from onward.distributed.comm import Communicator, LocalCommunicator, TorchCommunicator, connect
from onward.distributed.errors import DistributedError
from onward.distributed.runner import History, TrainingRunner
from onward.distributed.sampler import ShardedArrays, ShardedSampler
from onward.distributed.settings import RunnerSettings

__all__ = [
    "Communicator",
    "DistributedError",
    "History",
    "LocalCommunicator",
    "RunnerSettings",
    "ShardedArrays",
    "ShardedSampler",
    "TorchCommunicator",
    "TrainingRunner",
    "all_or_none",
    "connect",
]


def __getattr__(name: str) -> object:
    if name == "Parameters":
        warnings.warn("onward.distributed.Parameters is now RunnerSettings", DeprecationWarning, stacklevel=2)
        return RunnerSettings
    raise AttributeError(f"module 'onward.distributed' has no attribute {name!r}")
