"""What a client sends: the difference that its training made, with how many examples it stands for."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from onward.api.state import CheckpointState
from onward.checkpoint import CheckpointData, decode, encode, from_portable, is_portable, load
from onward.errors import OnwardError

Arrays: TypeAlias = Mapping[str, np.ndarray]
Source: TypeAlias = CheckpointData | CheckpointState | str | os.PathLike[str]
_EXAMPLES, _LAYOUT = "examples", "layout"


class UpdateError(OnwardError):
    """An update of a client that the server does not take."""

    hint = "clients and server must train the same artifacts; look at the client that sent this update"


def layout_digest(parameters: Arrays) -> str:
    """What tells the parameters of one model from another's: a sha256 over names, types and shapes.

    >>> layout_digest({"w": np.zeros(3, np.float32)})[:8]
    '8cf9b568'
    """
    # Sorted: two programs may list the same parameters in another order.
    lines = [f"{name}\t{array.dtype}\t{list(array.shape)}\n" for name, array in sorted(parameters.items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def parameters_of(source: Source, statistics: Sequence[str] = ()) -> dict[str, np.ndarray]:
    """Copies of what clients train: the trainable parameters and the named batch-norm statistics.

    `source` is a checkpoint, its path, the path of a portable state (`state.bin`) or a `CheckpointState`. The
    names of the statistics are in `module.signature.statistics`.

    >>> data = CheckpointData(trainable={"w": np.ones(2, np.float32)}, frozen={"b": np.zeros(1, np.float32)})
    >>> parameters_of(data)
    {'w': array([1., 1.], dtype=float32)}
    """
    if isinstance(source, CheckpointState):
        names = [name for name, parameter in source.parameters if parameter.requires_grad]
        # Copies: on the host a parameter's data is the memory that the next step writes.
        return {name: np.array(source.parameters[name].data) for name in [*names, *statistics]}
    if not isinstance(source, CheckpointData):
        source = from_portable(source) if is_portable(source) else load(source)
    if source.nominal:
        raise ValueError("the checkpoint is nominal: it has no parameter values")
    arrays = source.parameters()
    missing = [name for name in statistics if name not in arrays]
    if missing:
        raise ValueError(f"the checkpoint has no statistic '{missing[0]}'")
    return {name: np.array(arrays[name]) for name in [*source.trainable, *statistics]}


@dataclasses.dataclass(frozen=True)
class Update:
    """The difference that a client's training made to each parameter, and how many examples it saw.

    `layout` tells which model it belongs to.
    """

    difference: Arrays
    examples: int
    layout: str

    @classmethod
    def between(
        cls, before: Source | Arrays, after: Source | Arrays, *, examples: int, statistics: Sequence[str] = ()
    ) -> Update:
        """The update that leads from one set of parameters to another: of checkpoints, state files or arrays.

        >>> Update.between({"w": np.zeros(2)}, {"w": np.ones(2)}, examples=5).difference["w"]
        array([1., 1.])
        """
        old, new = (
            source if isinstance(source, Mapping) else parameters_of(source, statistics)
            for source in (before, after)
        )
        if layout_digest(old) != layout_digest(new):
            raise ValueError(
                "the parameters before and after differ in names, types or shapes: of two models?"
            )
        return cls({name: new[name] - old[name] for name in old}, examples, layout_digest(old))

    def to_bytes(self) -> bytes:
        """The update as a checkpoint file's bytes, with a checksum.

        >>> update = Update.between({"w": np.zeros(2)}, {"w": np.ones(2)}, examples=5)
        >>> Update.from_bytes(update.to_bytes()).examples
        5
        """
        # a checkpoint's own bytes: its reader bounds every size and checks a digest
        stream = io.BytesIO()
        about = {_EXAMPLES: self.examples, _LAYOUT: self.layout}
        encode(CheckpointData(trainable=dict(self.difference), properties=about), stream)
        return stream.getvalue()

    @classmethod
    def from_bytes(cls, content: bytes, *, sender: str = "<bytes>") -> Update:
        """Read what `to_bytes` wrote, verified; `sender` is for messages."""
        data = decode(content, path=sender)
        examples, layout = data.properties.get(_EXAMPLES), data.properties.get(_LAYOUT)
        # A checkpoint decodes as well as an update does; only an update has both properties and nothing frozen.
        if not isinstance(examples, int) or not isinstance(layout, str) or data.frozen or data.nominal:
            raise UpdateError(
                f"what '{sender}' sent is a checkpoint and no update: make it with Update.to_bytes"
            )
        arrays = {name: np.asarray(array) for name, array in data.trainable.items()}
        return cls(arrays, examples, layout)
