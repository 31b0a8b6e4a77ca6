"""Train one model on many ranks, over torch.distributed; on one rank, without torch."""

from onward.distributed.agreement import all_or_none
from onward.distributed.comm import Communicator, LocalCommunicator, TorchCommunicator, connect
from onward.distributed.errors import DistributedError
from onward.distributed.parameters import Parameters
from onward.distributed.runner import History, TrainingRunner
from onward.distributed.sampler import ShardedArrays, ShardedSampler

__all__ = [
    "Communicator",
    "DistributedError",
    "History",
    "LocalCommunicator",
    "Parameters",
    "ShardedArrays",
    "ShardedSampler",
    "TorchCommunicator",
    "TrainingRunner",
    "all_or_none",
    "connect",
]
