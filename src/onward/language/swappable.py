"""Adapters that a running session exchanges: inputs of the model that may be left out, and files of their values.

The files are those of onnxruntime's `LoraAdapter` (`.onnx_adapter`), for the stock runtime and onnxruntime-genai. B has
the scale in it, and the rank of an input is free: one session runs adapters of any rank, and none at all.
"""

from __future__ import annotations

import dataclasses
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from onward.errors import ModelError
from onward.escape import first_of
from onward.files import write_bytes
from onward.graph.load import load_model
from onward.graph.passes.lora import LoRA, add_adapters

SUFFIX = ".onnx_adapter"
BASE_DIGEST = "onward.adapter_base"
# bytes of each weight that the digest of a base looks at
_SAMPLE = 1024


def add_adapter_inputs(
    model: ir.Model, lora: LoRA, *, joined: Mapping[str, Sequence[int]] | None = None
) -> list[str]:
    """Adapters as inputs, in place, that are empty where nobody gives them; returns their names."""
    # a scale of 1: what adapters were trained with is in their values
    free = dataclasses.replace(lora, alpha=float(lora.rank), dropout=0.0)
    names = add_adapters(model, free, joined=joined)
    for name in names:
        value = model.graph.initializers[name]
        assert value.shape is not None and value.name is not None
        sizes = list(value.shape.numpy())
        axis = 0 if name.endswith(".lora_a") else 1
        # one symbol for A and B of a pair, whose product needs them equal
        rank = f"{name.rpartition('.')[0]}.rank"
        value.shape = ir.Shape([*sizes[:axis], rank, *sizes[axis + 1 :]])
        sizes[axis] = 0
        # an input with a value of its own may be left out, and a product over a rank of 0 adds nothing
        value.const_value = ir.tensor(np.zeros(sizes, np.float32), name=name)
        model.graph.inputs.append(value)
    for node in model.graph.all_nodes():  # an encoder's decoder may have its steps as two branches
        if "/lora/" in (node.name or ""):
            for value in node.outputs:
                value.shape = None  # with a rank in it the runtime would plan buffers for this one rank
    return names


def scaled_values(adapters: Mapping[str, np.ndarray], lora: LoRA) -> dict[str, np.ndarray]:
    """The values of adapters for a model that takes them as inputs."""
    scale = np.float32(lora.alpha / lora.rank)
    return {
        name: np.ascontiguousarray(value * scale if name.endswith(".lora_b") else value, np.float32)
        for name, value in adapters.items()
    }


def write_adapter(path: str | os.PathLike[str], values: Mapping[str, np.ndarray], *, base: int) -> Path:
    """Write values for the inputs of a model as a file of onnxruntime's; `base` is the digest of what they suit."""
    from onward.files import scratch_folder

    document: Any = ort.AdapterFormat()
    document.set_adapter_version(1)
    document.set_model_version(base)
    document.set_parameters({name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in values.items()})
    # the runtime writes to a path alone, and not all or nothing
    with scratch_folder() as folder:
        document.export_adapter(str(folder / "adapter"))
        return write_bytes(path, (folder / "adapter").read_bytes())


def base_digest(model: Path) -> int:
    """A number of 31 bits for the weights of a base: their names, their shapes and the beginning of each."""
    digest = 0
    for name, value in sorted(load_model(model, by_reference=True).graph.initializers.items()):
        tensor = value.const_value
        if tensor is not None:
            digest = zlib.crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), digest)
            # reading a whole base takes longer than to load it
            digest = zlib.crc32(memoryview(tensor.tobytes())[:_SAMPLE], digest)
    # the version in the file is a signed number of 32 bits
    return digest & 0x7FFFFFFF


class SwappingSession:
    """A session that runs with one of several adapters, or with none; in all else it is the session."""

    def __init__(self, session: Any, folder: Path) -> None:
        self._session, self._folder = session, folder
        self._options: Any = None
        self._adapter: Any = None
        self.inputs = {value.name: list(value.shape) for value in session.get_overridable_initializers()}
        about = session.get_modelmeta().custom_metadata_map
        self._base = about.get(BASE_DIGEST)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run(self, names: Sequence[str], feed: Mapping[str, Any]) -> list[Any]:
        """Run with the adapter in use."""
        return self._session.run(names, feed, self._options)

    def use(self, name: str | os.PathLike[str] | None) -> None:
        """Run with another adapter from now on: the name of one in the folder, a file, or None for the base alone."""
        if name is None:
            self._options = self._adapter = None
            return
        path = self._find(name)
        self._require_fit(path)
        adapter: Any = ort.LoraAdapter()
        adapter.Load(str(path))
        options: Any = ort.RunOptions()
        options.add_active_adapter(adapter)
        # the runtime's options point at the adapter without owning it: it must live as long as they do
        self._options, self._adapter = options, adapter

    def names(self) -> list[str]:
        """The adapters of the folder."""
        return sorted(path.stem for path in self._folder.glob(f"*{SUFFIX}"))

    def _find(self, name: str | os.PathLike[str]) -> Path:
        for path in (Path(name), self._folder / f"{name}{SUFFIX}"):
            if path.suffix == SUFFIX and path.is_file():
                return path
        raise ModelError(
            f"no adapter '{name}': '{self._folder}' has {first_of(self.names()) or 'none'}",
            hint="name one of these, or the path of an .onnx_adapter file",
        )

    def _require_fit(self, path: Path) -> None:
        try:
            reader: Any = ort.AdapterFormat
            document = reader.read_adapter(str(path))
            parameters = document.get_parameters()
        except Exception as error:  # the runtime raises plain RuntimeErrors
            raise ModelError(f"'{path}' is no adapter of onnxruntime's: {error}") from error
        stranger = f"'{path}' belongs to another base than '{self._folder}'"
        for name, value in parameters.items():
            expected = self.inputs.get(name)
            if expected is None:
                raise ModelError(f"{stranger}, which has no place for '{name}'")
            shape = value.shape()
            if len(shape) != len(expected) or any(
                isinstance(size, int) and size != own for size, own in zip(expected, shape)
            ):
                raise ModelError(f"{stranger}: '{name}' has the shape {shape}, and {expected} is needed")
        if self._base and document.get_model_version() not in (0, int(self._base)):
            raise ModelError(f"{stranger}: its weights are not those that it was trained beside")


class FixedInputs:
    """A session that is fed the same values in each run."""

    def __init__(self, session: Any, values: Mapping[str, np.ndarray]) -> None:
        self._session, self._values = session, values

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run(self, names: Sequence[str], feed: Mapping[str, Any]) -> list[Any]:
        """Run with these values beside the feed."""
        return self._session.run(names, {**feed, **self._values})


def takes_adapters(session: Any) -> bool:
    """Whether a model has inputs for adapters that may be left out."""
    return any(value.name.endswith(".lora_a") for value in session.get_overridable_initializers())
