"""Saves models: as one file, or with external data beside it where protobuf cannot hold it."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from onward.files import name_by_content
from onward.graph.external import external_tensors

# protobuf ends at 2 GiB for the whole message; the graph itself needs some of it
EXTERNAL_THRESHOLD = 1800 * 2**20
# Constants of this many bytes and more are kept once, beside the models that hold them, and mapped by the runtime.
_SHARED = 128 * 2**20
# smaller tensors stay in the model: a reference to them would be as long
_SMALLEST_OUTSIDE = 1024


def initializer_bytes(model: ir.Model) -> int:
    """How many bytes the initializers of a model take."""
    return sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)


def write_model(
    model: ir.Model, path: str | os.PathLike[str], *, external: bool | None = None, refer: bool = False
) -> list[Path]:
    """Write a model and return its files; `external` forces (or forbids) a data file beside it, named by its content.

    Tensors that lie in other files are read into it, or, with `refer`, stay references to these.

    Not atomic: callers write to a staging folder (`onward.files`).
    """
    target = Path(path)
    if external is None:
        external = initializer_bytes(model) > EXTERNAL_THRESHOLD
    tensors = {name: value.const_value for name, value in model.graph.initializers.items()}
    try:
        if not external:
            if not refer:
                for name, tensor in tensors.items():
                    if isinstance(tensor, ir.ExternalTensor):
                        model.graph.initializers[name].const_value = _read(tensor)
            ir.save(model, target)
            return [target]
        # onnx-ir writes the tensors one after the other, without a second copy of the model in memory.
        ir.save(model, target, external_data=f"{target.name}.data", size_threshold_bytes=_SMALLEST_OUTSIDE)
        return [target, *name_data_by_content(target)]
    finally:
        # saving points the model's tensors at the new file, which the caller is about to move
        for name, tensor in tensors.items():
            model.graph.initializers[name].const_value = tensor


def name_data_by_content(path: Path) -> list[Path]:
    """Give the file `<model>.data` beside a model a name that holds its digest, in the model too; returns its new path.

    The rename of the graph alone then replaces graph and data: an old graph never meets new data.
    """
    data = path.with_name(f"{path.name}.data")
    if not data.is_file():
        return []
    model = onnx.load(path, load_external_data=False)
    name = name_by_content(data, path.name)
    for tensor in external_tensors(model):
        for entry in tensor.external_data:
            if entry.key == "location" and entry.value == data.name:
                entry.value = name
    # Deterministic: two runs give the same bytes, so that files can be compared by their digest.
    path.write_bytes(model.SerializeToString(deterministic=True))
    return [path.with_name(name)]


def _read(tensor: ir.ExternalTensor) -> ir.TensorProtocol:
    """A tensor of another file, in memory."""
    # numpy has no such types: the bytes stay packed, two or more numbers in each.
    if tensor.dtype.bitwidth < 8:
        data = np.frombuffer(tensor.tobytes(), np.uint8)
        return ir.PackedTensor(data, tensor.dtype, shape=tensor.shape, name=tensor.name)
    return ir.tensor(tensor.numpy().copy(), dtype=tensor.dtype, name=tensor.name)


def external_part(
    tensor: ir.ExternalTensor,
    name: str,
    shape: Sequence[int],
    *,
    skip: int = 0,
    dtype: ir.DataType | None = None,
) -> ir.ExternalTensor:
    """Some of the bytes of a tensor in another file, from byte `skip` on, as a tensor of its own; nothing is read."""
    kind = dtype or tensor.dtype
    return ir.ExternalTensor(
        tensor.location,
        (tensor.offset or 0) + skip,
        math.prod(shape) * kind.bitwidth // 8,
        kind,
        shape=ir.Shape(shape),
        name=name,
        base_dir=tensor.base_dir,
    )


@contextlib.contextmanager
def constants_beside(models: Sequence[ir.Model], folder: Path, stem: str) -> Iterator[None]:
    """Within it, models that are saved in `folder` refer to one file there for what they read from elsewhere.

    Constants that come from another model's external data, or that take 128 MiB and more in a model, are written to
    one file, each once however many of the models hold it: a frozen base is read by training and evaluation from one
    place, with no copy of it in memory. Its name is `stem` and its digest, so that no model meets those of another
    set. Where there are none, no file is made.
    """
    moved = []
    for model in models:
        many = initializer_bytes(model) >= _SHARED
        moved += [
            value
            for value in model.graph.initializers.values()
            if isinstance(value.const_value, ir.ExternalTensor) or (value.const_value is not None and many)
        ]
    held = [(value, value.const_value) for value in moved]
    large = {id(t): t for _, t in held if t is not None and t.nbytes >= _SMALLEST_OUTSIDE}
    whole = _wholes(list(large.values()))
    try:
        tensors = list({id(tensor): tensor for tensor, _ in whole.values()}.values())
        written = _write_constants(tensors, folder, stem) if tensors else []
        new = dict(zip(map(id, tensors), written))
        for value, tensor in held:
            assert tensor is not None
            if id(tensor) in whole:
                root, skip = whole[id(tensor)]
                stored = new[id(root)]
                shape = tensor.shape.numpy()
                value.const_value = external_part(
                    stored, tensor.name or "", shape, skip=skip, dtype=tensor.dtype
                )
            else:
                value.const_value = _read(tensor) if isinstance(tensor, ir.ExternalTensor) else tensor
        yield
    finally:
        for value, tensor in held:
            value.const_value = tensor


def _write_constants(
    tensors: Sequence[ir.TensorProtocol], folder: Path, stem: str
) -> list[ir.ExternalTensor]:
    written = ir.external_data.convert_tensors_to_external(tensors, folder, f"{stem}.data")
    name = name_by_content(folder / f"{stem}.data", stem)
    return [
        ir.ExternalTensor(
            name,
            tensor.offset,
            tensor.length,
            tensor.dtype,
            shape=tensor.shape,
            name=tensor.name,
            base_dir=folder,
        )
        for tensor in written
        if isinstance(tensor, ir.ExternalTensor)
    ]


def _wholes(tensors: Sequence[ir.TensorProtocol]) -> dict[int, tuple[ir.TensorProtocol, int]]:
    """By the id of each tensor: the largest one that holds its bytes, and from which byte on. Most hold their own."""
    roots: dict[int, tuple[ir.TensorProtocol, int]] = {id(t): (t, 0) for t in tensors}
    stored = [tensor for tensor in tensors if isinstance(tensor, ir.ExternalTensor)]
    # The longest of those that begin at one byte comes first: the others are parts of it.
    stored.sort(key=lambda tensor: (os.fspath(tensor.path), tensor.offset or 0, -tensor.nbytes))
    whole: ir.ExternalTensor | None = None
    for tensor in stored:
        start = tensor.offset or 0
        if whole is not None and tensor.path == whole.path:
            skip = start - (whole.offset or 0)
            if skip + tensor.nbytes <= whole.nbytes:
                roots[id(tensor)] = whole, skip
                continue
        whole = tensor
    return roots
