"""Train one model on many ranks, over torch.distributed; on one rank, without torch."""

from onward.distributed.agreement import all_or_none
from onward.distributed.comm import Communicator, LocalCommunicator, TorchCommunicator, connect
from onward.distributed.data_parallel import ShardedArrays, ShardedSampler
from onward.distributed.errors import DistributedError
from onward.distributed.runner import TrainingRunner
from onward.distributed.settings import RunnerSettings

__all__ = [
    "Communicator",
    "DistributedError",
    "LocalCommunicator",
    "RunnerSettings",
    "ShardedArrays",
    "ShardedSampler",
    "TorchCommunicator",
    "TrainingRunner",
    "all_or_none",
    "connect",
]
