"""State files of the portable step (`state.bin`): every state tensor at an offset that follows from its layout.

docs/portable-format.md specifies the bytes. A header, the tensors, a table in text, a checksum; other languages read
and write it with a dozen lines. Here it becomes `CheckpointData` and back.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from math import prod

import numpy as np

from onward.checkpoint import content, integrity
from onward.checkpoint.atomic import open_regular, read_all, replace_file
from onward.checkpoint.content import (
    CheckpointData,
    NominalTensor,
    OptimizerGroup,
    PropertyValue,
    code_of,
    dtype_of,
    little_endian_bytes,
    native_array,
    parse_extra,
    spell_extra,
    supported_codes,
)
from onward.errors import CheckpointError

__all__ = [
    "MAGIC",
    "WEIGHTS",
    "StateLayout",
    "StatePart",
    "StateTensor",
    "aligned",
    "from_portable",
    "is_portable",
    "read_layout",
    "table_line",
    "to_portable",
]

MAGIC = b"ONWDSTAT"
VERSION = 1
ALIGNMENT = 64
ROLES = ("frozen", "statistic", "trainable", "slot", "optimizer_step", "train_step", "random_seed")
WEIGHTS, _COUNTERS = ROLES[:3], ROLES[4:]
# fixed and first: a program in another language finds all places without reading the table
_HEADER = struct.Struct("<8sIIQQ32s")
_DIGEST = 32
_NOMINAL = 1  # the flag of a file without tensors; its digest is zeros, so that programs refuse it as another model's
# a table of a million tensors has some hundred megabytes
_MOST_TEXT = 1 << 28
# The checkpoint's scalars that are tensors of the state, or say something of one process only.
_NOT_EXTRAS = ("seed", "train_step", "environment", "invalid", "skipped_in_a_row")
_RATE, _INITIAL_RATE = "learning_rate", "initial_learning_rate"
_ESCAPES = {"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"}


@dataclass(frozen=True, slots=True)
class StatePart:
    """What a checkpoint keeps under a name: a parameter, a slot of the optimizer's state, a counter.

    `start` counts bytes from where the tensor begins that it is part of; `slot` is empty but for slots.
    """

    role: str
    name: str
    shape: tuple[int, ...]
    slot: str = ""
    start: int = 0


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A tensor that the portable step takes as an input, and the parts that it is made of."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    parts: tuple[StatePart, ...]

    @property
    def nbytes(self) -> int:
        """How many bytes its numbers take."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class StateLayout:
    """The tensors of a state in their order, and where each begins in the file.

    >>> weight = StatePart("trainable", "w", (3, 2))
    >>> layout = StateLayout([StateTensor("w", np.dtype(np.float32), (3, 2), (weight,))])
    >>> layout.offsets, layout.weights_size, layout.end
    ([64], 128, 128)
    """

    tensors: Sequence[StateTensor]
    offsets: list[int] = field(init=False)
    end: int = field(init=False)
    weights_size: int = field(init=False)

    def __post_init__(self) -> None:
        position, weights, offsets = ALIGNMENT, ALIGNMENT, []
        for tensor in self.tensors:
            offsets.append(position)
            position += aligned(tensor.nbytes)
            # weights come first in every state, so that inference reads one range
            if tensor.parts[0].role in WEIGHTS:
                weights = position
        object.__setattr__(self, "offsets", offsets)
        object.__setattr__(self, "end", position)
        object.__setattr__(self, "weights_size", weights)

    def parts(self) -> Iterator[tuple[StatePart, np.dtype, int]]:
        """Every part with its type and where it begins in the file."""
        for tensor, offset in zip(self.tensors, self.offsets):
            for part in tensor.parts:
                yield part, tensor.dtype, offset + part.start

    def text(self) -> str:
        """The table as it stands in files: a line for each tensor, and one for each of its parts after it."""
        lines = []
        for tensor, offset in zip(self.tensors, self.offsets):
            lines.append(
                table_line("tensor", tensor.name, str(tensor.dtype), _dims(tensor.shape), str(offset))
            )
            for part in tensor.parts:
                more = [part.slot] if part.role == "slot" else []
                lines.append(
                    table_line(part.role, part.name, _dims(part.shape), str(offset + part.start), *more)
                )
        return "".join(lines)

    @property
    def digest(self) -> bytes:
        """What tells the state of one model from another's: the sha256 of the table."""
        return sha256(self.text().encode()).digest()


def aligned(size: int) -> int:
    """A number of bytes, rounded up to where the next thing may begin."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def is_portable(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins as a state file does."""
    try:
        with open_regular(path) as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def to_portable(
    data: CheckpointData, path: str | os.PathLike[str], *, layout: StateLayout | str | os.PathLike[str]
) -> None:
    """Save a checkpoint's data as a state file of this layout (or that of another state file), atomically.

    State of the optimizer that the data lacks starts from zero. Nominal data become a file without tensors.
    """
    if not isinstance(layout, StateLayout):
        layout = read_layout(layout)
    tensors: Iterable[bytes | memoryview] = ()
    if data.nominal:
        _check_same(data, layout, OptimizerGroup())
    else:
        # checked now, written later: a mismatch must show before a file is begun
        tensors = _tensor_bytes(layout.tensors, _finder(data, layout))
    text = (layout.text() + _scalars(data)).encode()

    def write(stream: integrity.Writable) -> None:
        hashing = integrity.HashingWriter(stream)
        hashing.write(_header(layout, len(text), nominal=data.nominal))
        for piece in tensors:
            hashing.write(piece)
        hashing.write(text)
        stream.write(hashing.digest())

    replace_file(path, write)


def from_portable(path: str | os.PathLike[str]) -> CheckpointData:
    """A state file as checkpoint data, after verifying all of it; arrays are read-only."""
    name = os.fspath(path)
    buffer, layout, lines = _read(name)
    if _is_nominal(buffer):
        return _nominal_data(layout, lines)
    data = CheckpointData()
    group = OptimizerGroup()
    counters: dict[str, int] = {}
    for part, dtype, offset in layout.parts():
        array = native_array(buffer.data, offset, code=code_of(dtype), dims=part.shape)
        if part.role in ("frozen", "statistic"):
            data.frozen[part.name] = array
        elif part.role == "trainable":
            data.trainable[part.name] = array
        elif part.role == "slot":
            group.slots.setdefault(part.name, {})[part.slot] = array
        else:
            counters[part.role] = int(array[0])
    for kind, key, value in lines:
        (data.properties if kind == "property" else data.extras)[key] = value
    # the optimizer counts updates, the model counts steps: with accumulation they differ, and random numbers
    # follow the second
    group.step = counters["optimizer_step"]
    rate = data.extras.pop(_INITIAL_RATE, data.extras.get(_RATE, group.initial_learning_rate))
    group.initial_learning_rate = float(rate)
    data.extras["seed"], data.extras["train_step"] = counters["random_seed"], counters["train_step"]
    data.optimizer = [group]
    try:
        content.check(data)
    except (TypeError, ValueError) as error:
        raise CheckpointError(name, str(error)) from error
    return data


def _nominal_data(layout: StateLayout, lines: Iterable[tuple[str, str, PropertyValue]]) -> CheckpointData:
    """Names and types of the parameters; there is no state to count or to continue."""
    data = CheckpointData(nominal=True)
    for part, dtype, _ in layout.parts():
        if part.role in WEIGHTS:
            tensors = data.trainable if part.role == "trainable" else data.frozen
            tensors[part.name] = NominalTensor(code_of(dtype))
    data.properties.update((key, value) for kind, key, value in lines if kind == "property")
    return data


def read_layout(path: str | os.PathLike[str]) -> StateLayout:
    """The layout of a state file, verified."""
    return _read(os.fspath(path))[1]


# ---- writing ---------------------------------------------------------------------------------------


def _dims(shape: tuple[int, ...]) -> str:
    return ",".join(map(str, shape))


def table_line(*fields: str) -> str:
    """A line of a table in text, as files and metadata have them: fields with tabs between, escaped."""
    return "\t".join("".join(_ESCAPES.get(c, c) for c in field) for field in fields) + "\n"


def _scalars(data: CheckpointData) -> str:
    lines = [table_line("property", key, spell_extra(value)) for key, value in data.properties.items()]
    extras = {key: value for key, value in data.extras.items() if key not in _NOT_EXTRAS}
    for group in data.optimizer:
        if group.name == "group0":
            extras[_INITIAL_RATE] = float(group.initial_learning_rate)
            # a device has no scheduler: without a rate in the file it would not know where to begin
            extras.setdefault(_RATE, float(group.initial_learning_rate))
    return "".join(lines + [table_line("extra", key, spell_extra(value)) for key, value in extras.items()])


def _finder(data: CheckpointData, layout: StateLayout) -> Callable[[StatePart, np.dtype], np.ndarray]:
    """What gives the array of a part, after checking that the data and the layout belong together."""
    if data.nominal:
        raise ValueError("a nominal checkpoint has no values to save; load the parameters first")
    # the whole step has no buffers of gradients: they would be lost without a word
    if data.accumulation:
        raise ValueError(
            "the checkpoint was saved between a training step and the optimizer's: a portable state has no "
            "gradients; save it after optimizer.step() and lazy_reset_grad()"
        )
    group = next((group for group in data.optimizer if group.name == "group0"), OptimizerGroup())
    counters = {
        "optimizer_step": group.step,
        "train_step": data.whole_number("train_step", group.step),
        "random_seed": data.whole_number("seed"),
    }
    _check_same(data, layout, group)

    def find(part: StatePart, dtype: np.dtype) -> np.ndarray:
        if part.role in counters:
            return np.asarray([counters[part.role]], np.int64)
        if part.role == "slot":
            array = group.slots.get(part.name, {}).get(part.slot)
            if array is None:  # a checkpoint that was saved before the first update
                return np.zeros(part.shape, dtype)
        else:
            array = (data.trainable if part.role == "trainable" else data.frozen)[part.name]
        assert not isinstance(array, NominalTensor)
        if tuple(array.shape) != part.shape or array.dtype != dtype:
            raise ValueError(
                f"'{part.name}' is {array.dtype}{list(array.shape)} in the checkpoint and "
                f"{dtype}{list(part.shape)} in the portable step: do they belong together?"
            )
        return array

    return find


def _check_same(data: CheckpointData, layout: StateLayout, group: OptimizerGroup) -> None:
    parts = [part for part, _, _ in layout.parts()]
    for role, tensors in (("trainable", data.trainable), ("frozen", data.frozen)):
        roles = ("frozen", "statistic") if role == "frozen" else (role,)
        expected = {part.name for part in parts if part.role in roles}
        if expected != tensors.keys():
            missing, more = sorted(expected - tensors.keys()), sorted(tensors.keys() - expected)
            problem = (
                f"lacks the {role} parameter '{missing[0]}'"
                if missing
                else f"has '{more[0]}' as {role} besides"
            )
            raise ValueError(f"the checkpoint {problem} of the portable step: do they belong together?")
    expected = {(part.name, part.slot) for part in parts if part.role == "slot"}
    actual = {(parameter, slot) for parameter, slots in group.slots.items() for slot in slots}
    if actual and actual != expected:
        parameter, slot = sorted(actual ^ expected)[0]
        raise ValueError(
            f"the checkpoint's optimizer state differs from the portable step's ('{slot}' of '{parameter}'): was it "
            "saved with another optimizer?"
        )


def _header(layout: StateLayout, text: int, *, nominal: bool = False) -> bytes:
    if nominal:
        return _HEADER.pack(MAGIC, VERSION, _NOMINAL, ALIGNMENT, text, bytes(_DIGEST))
    return _HEADER.pack(MAGIC, VERSION, 0, layout.end, text, layout.digest)


def _is_nominal(header: np.ndarray) -> bool:
    return _HEADER.unpack(header[: _HEADER.size].tobytes())[2] == _NOMINAL


def _tensor_bytes(
    tensors: Iterable[StateTensor], find: Callable[[StatePart, np.dtype], np.ndarray]
) -> Iterator[bytes | memoryview]:
    for tensor in tensors:
        written = 0
        for part in tensor.parts:
            piece = little_endian_bytes(find(part, tensor.dtype))
            # gaps are zeros, so that equal states are equal files
            yield bytes(part.start - written)
            yield piece
            written = part.start + len(piece)
        yield bytes(aligned(tensor.nbytes) - written)


# ---- reading ---------------------------------------------------------------------------------------


def _read(name: str) -> tuple[np.ndarray, StateLayout, list[tuple[str, str, PropertyValue]]]:
    try:
        with open_regular(name) as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(_HEADER.size)
            end, text_size, digest = _check_header(head, size, name)
            file.seek(0)
            buffer = read_all(file, size)
    except OSError as error:
        raise CheckpointError(name, error.strerror or str(error)) from error
    # the header is covered too; its own checks above only bound what is read
    if sha256(buffer[: size - _DIGEST].data).digest() != buffer[size - _DIGEST :].tobytes():
        raise CheckpointError(
            name, "the file is damaged: its content does not match its checksum", field="sha256",
            offset=size - _DIGEST,
        )  # fmt: skip
    buffer.flags.writeable = False
    try:
        text = buffer[end : end + text_size].tobytes().decode()
        layout, scalars = _parse(text)
    except (ValueError, KeyError, OverflowError) as error:
        raise CheckpointError(
            name, f"its table is not one of a state: {error}", field="table", offset=end
        ) from error
    expected = (ALIGNMENT, bytes(_DIGEST)) if _is_nominal(buffer) else (layout.end, layout.digest)
    if (end, digest) != expected:
        raise CheckpointError(name, "its table does not fit its header", field="table", offset=end)
    return buffer, layout, scalars


def _check_header(head: bytes, size: int, name: str) -> tuple[int, int, bytes]:
    if len(head) < _HEADER.size or head[: len(MAGIC)] != MAGIC:
        raise CheckpointError(name, "this is not a state file of a portable step", field="magic", offset=0)
    _, version, flags, end, text, digest = _HEADER.unpack(head)
    if version != VERSION or flags not in (0, _NOMINAL):
        raise CheckpointError(
            name, f"written by a newer Onward (version {version}, flags {flags:#x}); update to read it",
            field="version", offset=8,
        )  # fmt: skip
    # Python's integers do not overflow: the sum is what it says
    if text > _MOST_TEXT or end % ALIGNMENT or end < ALIGNMENT or end + text + _DIGEST != size:
        raise CheckpointError(
            name, f"the file is damaged: its header says {end + text + _DIGEST} bytes, there are {size}",
            field="size", offset=16,
        )  # fmt: skip
    return end, text, digest


def _parse(text: str) -> tuple[StateLayout, list[tuple[str, str, PropertyValue]]]:
    if not text.endswith("\n"):
        raise ValueError("the last line has no end")
    kinds = {str(dtype_of(code)): dtype_of(code) for code in supported_codes()}
    tensors: list[StateTensor] = []
    scalars: list[tuple[str, str, PropertyValue]] = []
    position = ALIGNMENT
    # not splitlines: it also splits at characters that a name may have
    for line in text[:-1].split("\n"):
        kind, *fields = [_unescape(field) for field in line.split("\t")]
        # places are computed, never believed: a line only repeats them for programs that read no table
        if kind == "tensor" and len(fields) == 4 and not scalars:
            name, dtype, dims, offset = fields
            if dtype not in kinds or not name or _count(offset) != position:
                raise ValueError(f"tensor '{name}' is a '{dtype}' at {offset}, expected at {position}")
            tensors.append(StateTensor(name, kinds[dtype], _shape(dims), ()))
            position += aligned(tensors[-1].nbytes)
        elif kind in ROLES and len(fields) == 3 + (kind == "slot") and tensors and not scalars:
            offset = position - aligned(tensors[-1].nbytes)
            tensors[-1] = _with_part(tensors[-1], kind, fields, offset)
        elif kind in ("property", "extra") and len(fields) == 2:
            scalars.append((kind, fields[0], parse_extra(fields[1])))
        else:
            raise ValueError(f"a line begins with '{kind}' and has {len(fields)} fields more")
    _check_table(tensors)
    return StateLayout(tensors), scalars


def _with_part(tensor: StateTensor, role: str, fields: Sequence[str], offset: int) -> StateTensor:
    """The tensor with one part more, which begins where the one before it ends."""
    name, dims, start, *slot = fields
    last = tensor.parts[-1] if tensor.parts else None
    end = 0 if last is None else aligned(last.start + prod(last.shape) * tensor.dtype.itemsize)
    part = StatePart(role, name, _shape(dims), slot[0] if slot else "", end)
    past = end + prod(part.shape) * tensor.dtype.itemsize
    if not name or _count(start) != offset + end or past > tensor.nbytes or (last and last.role != role):
        raise ValueError(f"'{name}' does not lie in '{tensor.name}' where it should")
    return replace(tensor, parts=(*tensor.parts, part))


def _check_table(tensors: Sequence[StateTensor]) -> None:
    if not all(tensor.parts for tensor in tensors):
        raise ValueError("a tensor has no parts")
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise ValueError("two tensors have the same name")
    parts = [(tensor, part) for tensor in tensors for part in tensor.parts]
    if len({(part.name, part.slot) for _, part in parts if part.role not in _COUNTERS}) != len(parts) - 3:
        raise ValueError("two parts have the same name")
    places = [ROLES.index(part.role) for _, part in parts]
    if places != sorted(places):
        raise ValueError("tensors are not in the order of their roles")
    counters = [(tensor, part) for tensor, part in parts if part.role in _COUNTERS]
    if [part.role for _, part in counters] != list(_COUNTERS) or any(
        tensor.shape != (1,) or part.shape != (1,) or tensor.dtype != np.int64 for tensor, part in counters
    ):
        raise ValueError("the counters are not one int64 each")


def _shape(text: str) -> tuple[int, ...]:
    shape = tuple(_count(dim) for dim in text.split(",")) if text else ()
    if len(shape) > 32 or prod(dim for dim in shape if dim) >= 2**60:
        raise ValueError(f"the shape [{text}] is beyond all files")
    return shape


def _count(text: str) -> int:
    # int() takes signs, spaces, underscores and the digits of all scripts; C takes none of these
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise ValueError(f"'{text}' is not a count")
    return int(text)


def _unescape(field: str) -> str:
    if "\\" not in field:
        return field
    parts, characters = [], iter(field)
    plain = {value[1]: key for key, value in _ESCAPES.items()}
    for character in characters:
        parts.append(plain[next(characters, "")] if character == "\\" else character)
    return "".join(parts)
