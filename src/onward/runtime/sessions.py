"""Sessions of the stock runtime: providers, options, mapped weights, and errors that say what to do."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import os
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx.external_data_helper import load_external_data_for_tensor

from onward import contract
from onward.errors import MAKE_ARTIFACTS, DeviceError, ModelError
from onward.files import scratch_folder
from onward.graph.external import external_range
from onward.graph.gate import ProtoSource, read_proto
from onward.ort_session import Provider, create_session, quiet_options, shorten_error
from onward.run_limits import run_limited
from onward.runtime.cache import graph_path, keep_graph, read_graph
from onward.runtime.devices import CPU, Device, is_checked, require_device
from onward.runtime.tensors import HostTensor, Tensor


@dataclasses.dataclass(frozen=True)
class ModelBeside:
    """A model in memory whose external data lies in a folder."""

    proto: onnx.ModelProto
    folder: Path


ModelFile = str | os.PathLike[str] | bytes | onnx.ModelProto | ModelBeside

_STOP_SPINNING = "session.force_spinning_stop"
# On the CPU provider the operator that it makes takes four times as long as those that it replaces.
_SLOW_ON_CPU = ["SkipLayerNormFusion"]
# CUDA's Gemm writes its bias all over the result first and adds to that: a product and a sum are faster.
_SLOW_ON_CUDA = ["MatMulAddFusion"]
# Numbers of a model's parameters, and its nodes, from which on it is large.
_LARGE, _MANY = 1 << 18, 3000
# Smaller external constants are read into the model: the runtime simplifies graphs by what it knows to be constant.
_SMALLEST_MAPPED = 2**16


def read_model(source: ModelFile, role: str) -> onnx.ModelProto:
    """Read a model of the artifacts; weights in external data stay there."""
    if not isinstance(source, str | os.PathLike | bytes | onnx.ModelProto | ModelBeside):
        raise TypeError(
            f"the {role} model is of type {type(source).__name__}: pass its path, its bytes or a ModelProto"
        )
    if isinstance(source, str | os.PathLike) and os.fsdecode(source).endswith(".ort"):
        # ORT format is for inference: its graph cannot be specialized for a batch.
        twin = Path(os.fsdecode(source)).with_suffix(".onnx")
        source = twin if twin.is_file() else source  # the same model, in the form that training can change
    if isinstance(source, ModelBeside):
        model = read_proto(source.proto, base_dir=source.folder, what=f"{role} model")
    else:
        model = read_proto(source, what=f"{role} model")
    # A training build's own gradients are com.microsoft operators, which the stock runtime loads by no means.
    operators = sorted({node.op_type for node in model.graph.node if node.domain == "com.microsoft"})
    if operators and not any(entry.key == contract.ROLE for entry in model.metadata_props):
        raise ModelError(
            f"the {role} model has operators of a training build of onnxruntime ({', '.join(operators[:4])}); "
            "convert its folder with `onward convert`, or make it again with onward.artifacts.generate_artifacts",
            hint=MAKE_ARTIFACTS,
        )
    return model


class LimitedSession(ort.InferenceSession):
    """A session whose runs stay within the limits, and whose errors are ours."""

    def run(self, output_names: Any, input_feed: Any, run_options: ort.RunOptions | None = None) -> Any:
        """Run it, as `InferenceSession.run` does."""
        return run_limited(super().run, output_names, input_feed, run_options)


def open_session(
    source: ProtoSource,
    *,
    providers: Sequence[Provider] = ("CPUExecutionProvider",),
    options: ort.SessionOptions | None = None,
    what: str = "model",
) -> ort.InferenceSession:
    """A session of an untrusted model, which is checked first; its options are left as they are."""
    read_proto(source, what=what)
    try:
        return create_session(
            source,
            options,
            providers=providers,
            disabled_optimizers=unwanted_fusions(providers),
            fallback=True,
            kind=LimitedSession,
        )
    except Exception as error:
        shown = f" '{os.fspath(source)}'" if isinstance(source, str | os.PathLike) else ""
        raise ModelError(
            f"onnxruntime cannot load the {what}{shown}: {error}", hint="is the model whole and valid?"
        ) from error


def make_session(
    model: onnx.ModelProto | bytes | str,
    *,
    device: Device | None = None,
    options: ort.SessionOptions | None = None,
    what: str = "model",
    capture: bool = False,
) -> ort.InferenceSession:
    """Load a model on a device (the CPU): a path where it has external data, else a proto or its bytes.

    `capture` asks for a session whose first run is recorded and replayed by those that follow.
    """
    device = device or Device("cpu")
    source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else model
    chosen = options or quiet_options()
    many = isinstance(model, onnx.ModelProto) and len(model.graph.node) > _MANY
    keeps = many and options is None and device.provider == CPU
    if options is None:
        # planning one block for all activations saved no time and cost a fifth to a quarter more memory
        chosen.enable_mem_pattern = False
        # looking for a buffer of the same shape for each value takes the square of their number: 20 s for a decoder
        # of 30 layers; the arena gives out freed memory as well
        chosen.enable_mem_reuse = not many
    if device.deterministic:
        chosen.use_deterministic_compute = True
    if not isinstance(model, onnx.ModelProto) or _reads(model) > _LARGE:
        _rest_between_runs(chosen)
    try:
        providers = device.providers(capture=capture)
        if keeps and isinstance(source, bytes):
            return _open_cached(source, chosen, providers)
        session = create_session(
            source, chosen, providers=providers, disabled_optimizers=unwanted_fusions(providers)
        )
    except Exception as error:
        if is_checked(device):
            raise DeviceError(
                f"device='{device}' cannot run the {what}: {shorten_error(error)}. `onward conform --device {device}` "
                "shows every operator; use device='cpu'"
            ) from error
        raise ModelError(
            f"onnxruntime cannot load the {what}: {error}{_advice(model, device, error)}"
        ) from error
    require_device(session, device, what)
    return session


def _open_cached(
    source: bytes, options: ort.SessionOptions, providers: Sequence[Provider]
) -> ort.InferenceSession:
    """A session of a large graph: as an earlier one optimized it, or optimized now and kept."""
    path = graph_path(source)
    ready = None if path is None else read_graph(path)
    if ready is not None:
        # optimized already: doing it again would take the time that the cache saves
        level = options.graph_optimization_level
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        try:
            return create_session(ready, options, providers=providers)
        except Exception:  # not what this runtime wrote: make it again
            options.graph_optimization_level = level
    with contextlib.ExitStack() as stack:
        target = None
        if path is not None:
            with contextlib.suppress(OSError):  # nowhere to write: nothing is kept
                # by the session itself: Python has no other way to get the optimized graph
                target = stack.enter_context(scratch_folder()) / "graph.onnx"
                options.optimized_model_filepath = str(target)
        session = create_session(
            source, options, providers=providers, disabled_optimizers=unwanted_fusions(providers)
        )
        if path is not None and target is not None:
            keep_graph(path, target.read_bytes())
        return session


def _advice(model: onnx.ModelProto | bytes | str, device: Device, error: Exception) -> str:
    """What to do where a provider lacks the kernels of a precision."""
    if "NOT_IMPLEMENTED" not in str(error) or not isinstance(model, onnx.ModelProto):
        return ""
    precision = {entry.key: entry.value for entry in model.metadata_props}.get(contract.PRECISION, "fp32")
    if precision == "fp32":
        double = any(v.type.tensor_type.elem_type == onnx.TensorProto.DOUBLE for v in model.graph.input)
        lacks = f". {device.provider} lacks this operator in float64"
        return (
            f"{lacks}: call model.float() before the export, and make the artifacts again" if double else ""
        )
    other = "precision='fp16' or 'fp32'" if precision == "bf16" else "precision='fp32'"
    return (
        f". The model is in {precision}, for which {device.provider} lacks this operator: train on a device that has "
        f"it (device='cuda'), or make the artifacts again with {other}"
    )


def unwanted_fusions(providers: Sequence[Provider]) -> list[str]:
    """Names of the runtime's optimizers that make a model slower on these providers."""
    if list(providers) == [CPU]:
        return _SLOW_ON_CPU
    first = providers[0][0] if providers and isinstance(providers[0], tuple) else next(iter(providers), CPU)
    return _SLOW_ON_CUDA if first == "CUDAExecutionProvider" else []


def _reads(model: onnx.ModelProto) -> int:
    """How many numbers a model takes as inputs of known size: its parameters, mostly."""
    shapes = [[dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in model.graph.input]
    return sum(math.prod(shape) for shape in shapes)


def _rest_between_runs(options: ort.SessionOptions) -> None:
    """Let the threads of a session stop spinning when a run ends: on few cores, the optimizer's need them then.

    Waking them again takes some 20 µs, which a small model, whose optimizer needs no threads, would notice.

    Left as it is where the options say something about it.
    """
    try:
        options.get_session_config_entry(_STOP_SPINNING)
    except RuntimeError:  # not set
        options.add_session_config_entry(_STOP_SPINNING, "1")


def require_one_set(role: str, identity: str, expected: str) -> None:
    """Refuse a model of other artifacts than the training model's; those without an id go with any."""
    if identity and expected and identity != expected:
        raise ModelError(
            f"the {role} model belongs to other artifacts ({identity}) than the training model ({expected}): "
            "take all of them from one folder of generate_artifacts",
            hint="take all models from one folder that onward artifacts wrote",
        )


def session_beside(
    model: onnx.ModelProto,
    path: str,
    *,
    device: Device,
    options: ort.SessionOptions | None,
    capture: bool = False,
) -> ort.InferenceSession:
    """Load a changed model as if it lay where `path` does; the file made for that is removed at once."""
    try:
        # onnxruntime resolves external data beside the file that it loads, so a changed model must lie there
        # for a moment.
        handle, name = tempfile.mkstemp(prefix=".onward-", suffix=".onnx", dir=Path(path).resolve().parent)
    except OSError as error:
        raise ModelError(
            f"'{path}' has external data, so its folder must be writable to load it for training: "
            f"{error.strerror or error}"
        ) from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(model.SerializeToString())
        what = f"training model '{path}'"
        return make_session(name, device=device, options=options, what=what, capture=capture)
    finally:
        os.unlink(name)


# --- Which nodes of a model would run on the host where a device is asked for, and why.


_RECORD = "session.record_ep_graph_assignment_info"
_OF_SHAPES = frozenset({"Shape", "Size", "NonZero", "ConstantOfShape", "Range"})


@dataclasses.dataclass(frozen=True)
class HostNode:
    """A node that a device leaves to the host."""

    operator: str
    name: str
    reason: str


def host_nodes(model: onnx.ModelProto | str, device: Device) -> list[HostNode]:
    """The nodes that onnxruntime would not run on the device, as it has optimized the model: loads it there."""
    options = quiet_options()
    options.add_session_config_entry(_RECORD, "1")
    # for the names and types of what the runtime's list names only
    proto = read_proto(model)
    session = make_session(model, device=device, options=options)
    kinds = _types_of_values(proto)
    by_name = {node.name: node for node in proto.graph.node}
    return [
        HostNode(node.op_type, node.name, _reason(node.op_type, by_name.get(node.name), kinds, device))
        for part in session.get_provider_graph_assignment_info()
        if part.ep_name == CPU
        for node in part.get_nodes()
    ]


def _reason(operator: str, node: onnx.NodeProto | None, kinds: dict[str, int], device: Device) -> str:
    input_kinds = [] if node is None else [kinds[name] for name in node.input if name in kinds]
    whole = onnx.TensorProto.INT64, onnx.TensorProto.INT32, onnx.TensorProto.BOOL
    if operator in _OF_SHAPES or (input_kinds and all(kind in whole for kind in input_kinds)):
        return "computes sizes, which the runtime keeps in host memory"
    if not input_kinds:
        return f"{device.provider} has no kernel for it, or it reads sizes"
    names = ", ".join(dict.fromkeys(onnx.TensorProto.DataType.Name(kind).lower() for kind in input_kinds))
    return f"{device.provider} has no kernel for it ({names})"


def _types_of_values(model: onnx.ModelProto) -> dict[str, int]:
    """The type of every value that is known."""
    try:
        graph = onnx.shape_inference.infer_shapes(model).graph
    except Exception:  # of a model of 2 GB and more, what its file says
        graph = model.graph
    kinds = {tensor.name: tensor.data_type for tensor in graph.initializer}
    for value in [*graph.value_info, *graph.input, *graph.output]:
        kinds[value.name] = value.type.tensor_type.elem_type
    return kinds


# --- Constants in files beside a model, mapped once for all sessions of a process. On the CPU a session takes them as
# inputs that are bound to the mapped memory: no copy of them, neither as they are nor repacked, and it is ready sooner.


@dataclasses.dataclass(eq=False)
class _File:
    """A mapped file, and copies of what lies in it at addresses that do not fit its type."""

    path: Path
    data: np.ndarray
    copies: dict[tuple[int, int], np.ndarray]


# Weak: the mapping ends with the last session that reads it, so that the file can be replaced (Windows).
_files: weakref.WeakValueDictionary[tuple, _File] = weakref.WeakValueDictionary()


class _Constant(HostTensor):
    """A constant in mapped memory, which is never written; ONNX packs numbers of fewer than eight bits."""

    def __init__(self, file: _File, offset: int, size: int, shape: list[int], kind: int) -> None:
        self._file = file  # keeps the mapping
        width = onnx.helper.tensor_dtype_to_np_dtype(kind).itemsize
        super().__init__(_part(file, offset, size, width))
        self._dims, self._kind = shape, kind

    def bind_input(self, binding: ort.IOBinding, name: str) -> None:
        binding.bind_input(name, "cpu", 0, self._kind, self._dims, self.array.ctypes.data)


def _part(file: _File, offset: int, size: int, width: int) -> np.ndarray:
    """Bytes of a file: the mapping itself, or a copy where numbers of that width would lie across its words."""
    if offset % width == 0:
        return file.data[offset : offset + size]
    for (start, length), aligned in file.copies.items():
        if start <= offset and offset + size <= start + length and (offset - start) % width == 0:
            return aligned[offset - start : offset - start + size]
    # read, not copied from the mapping, whose pages would count as memory too
    aligned = np.fromfile(file.path, np.uint8, size, offset=offset)
    file.copies[offset, size] = aligned
    return aligned


def has_external_constants(model: onnx.ModelProto) -> bool:
    """Whether a model's graph refers to data in other files."""
    return any(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in model.graph.initializer)


def constants_as_inputs(model: onnx.ModelProto, folder: Path) -> tuple[onnx.ModelProto, dict[str, Tensor]]:
    """A copy of a model that takes its large external constants as inputs, and what to bind to these."""
    changed = copy.deepcopy(model)
    graph = changed.graph
    inline, mapped = [], {}
    # the largest first: others may be parts of them
    for tensor in sorted(graph.initializer, key=lambda tensor: -math.prod(tensor.dims)):
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            inline.append(tensor)
            continue
        location, offset, size = external_range(tensor)
        shape, kind = list(tensor.dims), tensor.data_type
        # A mapped constant is an input, and the runtime folds and fuses nothing that it does not know.
        if size < _SMALLEST_MAPPED:
            load_external_data_for_tensor(tensor, os.fspath(folder))
            tensor.data_location = onnx.TensorProto.DEFAULT
            del tensor.external_data[:]
            inline.append(tensor)
            continue
        mapped[tensor.name] = _Constant(_mapped(folder / location), offset, size, shape, kind)
        graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, kind, shape))
    graph.initializer.clear()
    graph.initializer.extend(inline)
    return changed, mapped


def _mapped(path: Path) -> _File:
    status = path.stat()
    # a file that was replaced has another inode or time: its old mapping must not be given out for it
    key = (os.path.realpath(path), status.st_ino, status.st_size, status.st_mtime_ns)
    file = _files.get(key)
    if file is None:
        try:
            file = _File(path, np.memmap(path, np.uint8, mode="r"), {})
        except (OSError, ValueError) as error:
            raise ModelError(f"cannot map '{path}', which holds a model's weights: {error}") from error
        _files[key] = file
    return file
