"""What engines of several ranks share: sums, errors, what they gather, and the weight of a batch."""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from onward.distributed.agreement import (
    all_or_none,
    raise_together,
    receive_bytes,
    same_everywhere,
    send_bytes,
)
from onward.train.batches import batch_weight

if TYPE_CHECKING:
    from onward.distributed.comm import Communicator
    from onward.distributed.settings import RunnerSettings
    from onward.runtime.memory import ModelMemory
    from onward.runtime.signature import Signature
    from onward.train.engines import Table


class RankEngine:
    """What engines of several ranks have in common: their sums, their errors and what they gather."""

    _comm: Communicator

    def sum(self, values: Sequence[float]) -> list[float]:
        totals = np.array(values, np.float64)
        self._comm.all_reduce(totals)
        return totals.tolist()

    def all_or_none(self) -> AbstractContextManager[None]:
        return all_or_none(self._comm)

    def raise_together(self, failure: Exception | None) -> NoReturn:
        raise_together(self._comm, failure)
        raise AssertionError("no rank raised")

    def collect(self, tables: Sequence[Table]) -> list[list[Table]] | None:
        comm, content = self._comm, b""
        with all_or_none(comm):
            content = encode_tables(tables) if comm.rank else b""
        if comm.rank:
            # to rank 0 alone, which judges: the others need the figures only
            send_bytes(comm, content, to=0)
            return None
        others = (decode_tables(receive_bytes(comm, source=rank)) for rank in range(1, comm.world))
        return [list(tables), *others]


def encode_tables(tables: Sequence[Table]) -> bytes:
    """Tables of arrays as bytes, without pickle.

    >>> decode_tables(encode_tables([{"x": np.arange(2)}, {}]))
    [{'x': array([0, 1])}, {}]
    """
    names = list(dict.fromkeys(name for table in tables for name in table))
    arrays = {
        # bfloat16 is no type of numpy's file format
        f"{index} {names.index(name)}": array.astype(np.float32) if array.dtype.kind == "V" else array
        for index, table in enumerate(tables)
        for name, array in table.items()
    }
    stream = io.BytesIO()
    np.savez(stream, names=np.array(names, np.str_), count=np.array(len(tables)), **arrays)  # type: ignore[arg-type]
    return stream.getvalue()


def decode_tables(content: bytes) -> list[Table]:
    """What `encode_tables` made."""
    with np.load(io.BytesIO(content), allow_pickle=False) as archive:
        names = archive["names"].tolist()
        tables: list[Table] = [{} for _ in range(int(archive["count"]))]
        for key in archive.files[2:]:
            index, name = key.split()
            tables[int(index)][names[int(name)]] = archive[key]
    return tables


def reconcile(comm: Communicator, memory: ModelMemory, *, how: str) -> None:
    """Replace batch-norm statistics by the mean over the ranks, or by rank 0's; make sure of the same parameters.

    Statistics are linear in what each batch adds, so the mean needs to be taken only where it is looked at.
    """
    for part in memory.statistics if comm.world > 1 else ():
        flat = part.whole.read().astype(np.float32)
        if how == "rank0":
            comm.broadcast(flat)
        else:
            comm.all_reduce(flat)
            flat /= np.float32(comm.world)
        part.whole.write(flat)
    same_everywhere(comm, [memory.parameters.whole, *(part.whole for part in memory.statistics)])


def weight_of(signature: Signature, batch: Sequence[Any], parameters: RunnerSettings) -> float:
    """What a mean over a batch counts: labels that are not ignored, else samples; or what the user says."""
    return batch_weight(signature, batch) if parameters.count is None else float(parameters.count(batch))
