"""Quantizes ONNX models that are not trained for it: int8, int4 or half precision.

Works on bytes and files, and measures the effect of a scheme. Used for Hugging Face models and trained models alike.
int8 is `onward.quantize`'s, as training has it; blocks, one scale per tensor and half precision are those of
onnxruntime's own quantizers. What cannot be quantized is an error.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from onward.errors import ModelError
from onward.export.transposes import fold_transposes
from onward.files import scratch_folder, write_set
from onward.graph.cleanup import simplify
from onward.graph.dialect import saturation
from onward.graph.dialect.lower import lower
from onward.graph.dialect.normalize import normalize
from onward.graph.load import load_model
from onward.graph.nodes import optional_input
from onward.graph.save import initializer_bytes, write_model
from onward.ort_session import quiet_options
from onward.quantize.calibration import Samples, round_model
from onward.quantize.folding import fold_quantization, quantize_at_run_time
from onward.quantize.planning import (
    QUANTIZED,
    TRAINABLE_SCHEMES,
    Quantization,
    refuse_convolutions,
    refuse_quantized,
)
from onward.runtime import processor
from onward.runtime.sessions import open_session

if TYPE_CHECKING:
    import onnx
    import onnxruntime as ort


class SaturationWarning(UserWarning):
    """A quantized model gives different results on different CPUs."""


# Below this the runtime's cosine is another than the reference's, not a rounding of it.
_SAME = 1e-4
_REMEDY = "Quantize the float model again with reduce_range=True, the default"

# One protobuf message cannot pass 2 GiB; some room is left for the graph around the weights.
_ONE_FILE = 2**31 - 2**24


@dataclass(frozen=True)
class Scheme:
    """One way to store weights: what it does, in words, and the function from model to model."""

    summary: str
    apply: Callable[[ir.Model, Quantization, Samples | None], ir.Model]


@dataclass(frozen=True)
class QuantizationReport:
    """The effect of a scheme on size, accuracy and speed, against the float32 model on the same inputs.

    `cosine` compares each row of the first output. `reference_cosine` does the same with integer products that
    cannot saturate: what every CPU should give. `saturating` names the nodes whose products may saturate on
    CPUs without 8-bit dot products. `speedup` is that of the fastest runs on this machine, whose `cpu` has
    these instructions for integer products.
    """

    bytes_before: int
    bytes_after: int
    cosine_min: float
    cosine_mean: float
    reference_cosine_min: float
    reference_cosine_mean: float
    saturating: tuple[str, ...]
    speedup: float
    cpu: str

    @property
    def warning(self) -> str | None:
        """What is wrong with the model, here or on another CPU; None where nothing is."""
        if self.cosine_min < self.reference_cosine_min - _SAME:
            return (
                f"int8 products saturate on this CPU ({self.cpu}): cosine min {self.cosine_min:.4f} mean "
                f"{self.cosine_mean:.4f}, but {self.reference_cosine_min:.4f} and "
                f"{self.reference_cosine_mean:.4f} without saturation. {_REMEDY}"
            )
        if self.saturating:
            first, *others = self.saturating
            more = f" (+{len(others)} more)" if others else ""
            return (
                f"int8 products of '{first}'{more} may saturate on CPUs without 8-bit dot products "
                f"(AVX2, AVX512 without VNNI). {_REMEDY}"
            )
        return None

    def to_dict(self) -> dict[str, float]:
        """The figures, for a JSON file."""
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"{self.bytes_before / 1e6:.1f} MB -> {self.bytes_after / 1e6:.1f} MB, "
            f"cosine min {self.cosine_min:.4f} mean {self.cosine_mean:.4f}, "
            f"{self.speedup:.2f}x as fast ({self.cpu})"
        )


def scheme_name(quantize: bool | str | None) -> str | None:
    """The scheme that a `quantize` argument means: `True` is int8, `False` none; unknown names raise.

    >>> scheme_name(True), scheme_name(False), scheme_name("int4")
    ('int8', None, 'int4')
    """
    if quantize is None or quantize is False:
        return None
    if quantize is True:
        return "int8"
    if quantize in SCHEMES:
        return quantize
    near = get_close_matches(str(quantize), SCHEMES, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"unknown quantization {quantize!r}{hint} Known: {', '.join(SCHEMES)}")


def quantize(
    model: bytes | str | PathLike[str],
    scheme: str = "int8",
    *,
    path: str | PathLike[str] | None = None,
    reduce_range: bool = True,
    block_size: int = 32,
    exclude: Iterable[str] = (),
    calibration: Samples | None = None,
    method: str = "auto",
    equalize: bool | None = None,
) -> bytes | Path:
    """Quantize a model given as bytes or as a file; return bytes, or write `path` and return its path.

    `reduce_range` keeps int8 weights small enough that every CPU computes the same products. Without it they use
    the whole range: right only where all CPUs have 8-bit dot products (AVX-VNNI, AVX512-VNNI, AMX, ARM);
    on others products saturate, without an error. `block_size` is the number of weights that share one scale
    in the weight-only schemes. `exclude` names nodes to leave alone. `calibration` are samples of the inputs, by name:
    convolutions, and "int8-static", take ranges from them by `method` (auto, minmax, percentile or error), and channels
    are balanced on them, unless `equalize` is False. A model that is quantized already, or has nothing that the scheme
    stores in fewer bits, is an error.

    >>> quantize("model.onnx", "int8", path="model-int8.onnx").name
    'model-int8.onnx'
    """
    name = scheme_name(scheme)
    if name is None:
        raise ValueError(f"quantize() needs a scheme. Known: {', '.join(SCHEMES)}")
    whole = load_model(model)
    ir.external_data.load_to_model(whole)
    metadata = dict(whole.metadata_props)
    described = {value.name for value in _results(whole) if value.type is not None}
    # what cannot be trained for, reads the same settings
    settings = Quantization(
        name if name in TRAINABLE_SCHEMES else "int8", reduce_range=reduce_range, block_size=block_size,
        exclude=tuple(exclude), calibration=method, equalize=equalize,
    )  # fmt: skip
    refuse_quantized(whole.graph.all_nodes())
    if name in ("int4", "int8-weights", "int8-tensor"):
        refuse_convolutions(name, *_weight_sizes(whole))
    fold_transposes(whole)  # as a training graph has them: matrices behind them would be left as they are
    with _undisturbed():
        result = SCHEMES[name].apply(whole, settings, calibration)
    if name != "fp16":
        _refuse_unchanged(result, name)
    if reduce_range:  # products that came in quantized, or that a quantizer left too large
        saturation.make_unsigned(result)
    # The quantizers leave notes of their own in the metadata, or lose what was there: keep the model's.
    result.metadata_props.clear()
    result.metadata_props.update(metadata)
    # Types of new values would be a large part of a small file.
    _forget_types(result.graph.initializers.values())
    _forget_types(value for value in _results(result) if value.name not in described)
    if path is None:
        if initializer_bytes(result) > _ONE_FILE:
            raise ModelError("the quantized model is over 2 GB and does not fit in bytes: pass path=…")
        return ir.to_proto(result).SerializeToString(deterministic=True)
    target = Path(path)
    with write_set(target.parent) as staging:
        write_model(result, staging / target.name)
    return target


def measure(
    reference: bytes | str | PathLike[str],
    quantized: bytes | str | PathLike[str],
    feeds: Sequence[Mapping[str, np.ndarray]],
    *,
    repeats: int = 5,
    threads: int = 0,
) -> QuantizationReport:
    """Run both models on the same inputs and report size, cosine similarity and speed.

    Rows of the first output are compared: a tensor of more axes counts one row per last axis. `threads=0`
    lets the runtime choose. A third model, the quantized one with integer products that cannot saturate, shows
    what every CPU should give; where this one gives something else, or another may, a warning says so.
    """
    if not feeds:
        raise ValueError("measure() needs at least one set of inputs")
    whole, ours = _session(reference, threads), _session(quantized, threads)
    products, exact = _exact(quantized, threads)
    cosines: list[np.ndarray] = []
    exact_cosines: list[np.ndarray] = []
    ratios: list[float] = []
    for feed in feeds:
        rows = _rows(whole, feed)
        cosines.append(_cosine(rows, _rows(ours, feed)))
        exact_cosines.append(cosines[-1] if exact is None else _cosine(rows, _rows(exact, feed)))
        # the fastest of several turns: what else the machine does makes single runs longer, never shorter
        turns = [(run_seconds(whole, feed), run_seconds(ours, feed)) for _ in range(repeats)]
        if turns:
            ratios.append(min(before for before, _ in turns) / min(after for _, after in turns))
    cosine, exact_cosine = np.concatenate(cosines), np.concatenate(exact_cosines)
    report = QuantizationReport(
        bytes_before=stored_size(reference),
        bytes_after=stored_size(quantized),
        cosine_min=float(cosine.min()),
        cosine_mean=float(cosine.mean()),
        reference_cosine_min=float(exact_cosine.min()),
        reference_cosine_mean=float(exact_cosine.mean()),
        saturating=tuple(product.node for product in products if product.saturates),
        speedup=float(np.median(ratios)) if ratios else float("nan"),
        cpu=processor.integer_products(),
    )
    if report.warning is not None:
        warnings.warn(report.warning, SaturationWarning, stacklevel=2)
    return report


# What the stock quantizer has integer forms of, beside products and lookups. Not Conv: its kernel for inputs that are
# measured at run time takes a multiple of the float one's time.
_OTHER_INTEGER_OPS = frozenset({"Attention", "EmbedLayerNormalization", "LSTM"})
_TENSOR_OPS = ["MatMul", "Gather", *sorted(_OTHER_INTEGER_OPS)]
# the first opset in which a weight has a scale for each channel
_PER_CHANNEL = 13


def _int8(model: ir.Model, settings: Quantization, samples: Samples | None) -> ir.Model:
    kernels, matrices = _weight_sizes(model)
    # Convolutions have no quick kernel for ranges that are found at run time: they take samples or stay float.
    if kernels and (samples is not None or kernels > matrices):
        return _static(model, settings, samples)
    # channels are balanced in the form that training knows; fused operators would be taken apart for it
    plain = {(node.domain, node.op_type in _OTHER_INTEGER_OPS) for node in model.graph.all_nodes()}
    if samples is not None and plain == {("", False)}:
        return _static(model, settings, samples)
    quantize_at_run_time(model, settings)
    others = sorted(_OTHER_INTEGER_OPS & {node.op_type for node in model.graph})
    return _dynamic(model, settings, per_channel=True, op_types=others) if others else model


def _int8_static(model: ir.Model, settings: Quantization, samples: Samples | None) -> ir.Model:
    if samples is None:
        raise ModelError(
            "int8-static needs samples of the data, to find ranges on: pass calibration=…",
            hint="name some with --data",
        )
    return _static(model, settings, samples)


def _static(model: ir.Model, settings: Quantization, samples: Samples | None) -> ir.Model:
    """Round by the pass that training uses, and fold at once; in the model's own opset where that is possible."""
    own = model.graph.opset_imports[""]
    rounded = normalize(model)
    round_model(rounded, settings, samples)
    fold_quantization(rounded)
    simplify(rounded, parameters=())
    if _PER_CHANNEL <= own < rounded.graph.opset_imports[""]:
        with contextlib.suppress(ModelError):
            rounded = lower(rounded, own, at_any_cost=False)
    return rounded


def _weight_sizes(model: ir.Model) -> tuple[int, int]:
    """The numbers in the weights of convolutions, and in those of products and embedding tables."""
    indices = {"Conv": (1,), "MatMul": (0, 1), "Gemm": (1,), "Gather": (0,)}
    kernels: set[ir.Value] = set()
    matrices: set[ir.Value] = set()
    for node in model.graph.all_nodes():
        weights = (optional_input(node, index) for index in indices.get(node.op_type, ()))
        (kernels if node.op_type == "Conv" else matrices).update(
            weight
            for weight in weights
            if weight is not None and weight.const_value is not None and weight.const_value.shape.rank() > 1
        )
    return _total_size(kernels), _total_size(matrices)


def _total_size(weights: Iterable[ir.Value]) -> int:
    return sum(weight.const_value.size for weight in weights if weight.const_value is not None)


def _refuse_unchanged(model: ir.Model, scheme: str) -> None:
    """Refuse a result in which nothing became smaller."""
    nodes = list(model.graph.all_nodes())
    if not any(
        node.op_type in QUANTIZED
        or (
            node.op_type == "Gather"
            and node.inputs[0] is not None
            and node.inputs[0].dtype == ir.DataType.INT8
        )
        for node in nodes
    ):
        kinds = ", ".join(sorted({node.op_type for node in nodes})[:8])
        raise ModelError(
            f"{scheme} found nothing to quantize: it stores constant float32 matrices of MatMul and Gemm, and tables "
            f"of Gather; the model's operators are {kinds}",
            hint="leave --quantize out, or choose another",
        )


def _int8_tensor(model: ir.Model, settings: Quantization, samples: Samples | None) -> ir.Model:
    return _dynamic(model, settings, per_channel=False, op_types=_TENSOR_OPS)


def _to_proto(model: ir.Model) -> onnx.ModelProto:
    """The model for a stock quantizer, which changes weights and leaves what is said of their shapes."""
    _forget_types(model.graph.initializers.values())
    return ir.to_proto(model)


def _results(model: ir.Model) -> Iterator[ir.Value]:
    return (value for node in model.graph.all_nodes() for value in node.outputs)


def _forget_types(values: Iterable[ir.Value]) -> None:
    for value in values:
        if not value.is_graph_input() and not value.is_graph_output():
            value.type = value.shape = None


def _weight_only(model: ir.Model, settings: Quantization, samples: Samples | None) -> ir.Model:
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    quantizer = MatMulNBitsQuantizer(
        _to_proto(model),
        bits=settings.bits,
        block_size=settings.block_size,
        is_symmetric=False,
        nodes_to_exclude=list(settings.exclude),
    )
    quantizer.process()
    blocks: onnx.ModelProto = quantizer.model.model  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
    # Embedding tables are half of a small model. Their own 4-bit operator needs opset 21; int8 does not.
    return quantize_at_run_time(ir.from_proto(blocks), settings, products=False)


def _fp16(model: ir.Model, settings: Quantization, samples: Samples | None) -> ir.Model:
    from onnxruntime.transformers.float16 import convert_float_to_float16

    excluded = list(settings.exclude) or None
    half = convert_float_to_float16(
        # float32 at the border, so that callers need not change
        _to_proto(model),
        keep_io_types=True,
        disable_shape_infer=False,
        node_block_list=excluded,
    )
    return ir.from_proto(half)


def _dynamic(model: ir.Model, settings: Quantization, *, per_channel: bool, op_types: list[str]) -> ir.Model:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    # The quantizer warns at every model that has not been through its own preprocessing, which only adds
    # shapes and fusions; this mark says that we know.
    model.metadata_props["onnx.quant.pre_process"] = "onnxruntime.quant"
    with scratch_folder() as folder:
        path = folder / "model.onnx"
        quantize_dynamic(
            _to_proto(model),
            path,
            op_types_to_quantize=op_types,
            per_channel=per_channel,
            reduce_range=settings.reduce_range,
            weight_type=QuantType.QInt8,
            nodes_to_exclude=list(settings.exclude),
            use_external_data_format=initializer_bytes(model) > _ONE_FILE,
        )
        result = load_model(path)
        ir.external_data.load_to_model(result)
        return result


SCHEMES: Mapping[str, Scheme] = {
    "int8": Scheme(
        "int8 weights with one scale per channel; ranges of activations found at run time, of convolutions on samples",
        _int8,
    ),
    "int8-static": Scheme("the same with all ranges found on samples", _int8_static),
    "int8-tensor": Scheme("the same with one scale per tensor", _int8_tensor),
    "int8-weights": Scheme("8-bit matrices in blocks, int8 embeddings, float32 arithmetic", _weight_only),
    "int4": Scheme("4-bit matrices in blocks, int8 embeddings, float32 arithmetic", _weight_only),
    "fp16": Scheme("half precision weights and arithmetic, float32 inputs and outputs", _fp16),
}


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Undo what the quantizers do to the process: they log to the root logger and extend `sys.path`.

    What they add to the path is a folder of theirs that is full of generic module names. They add it when
    first imported and need it later, so it is there for as long as they run.
    """
    import onnxruntime

    path, level = list(sys.path), logging.root.manager.disable
    # never less than the user's own setting
    logging.disable(max(level, logging.WARNING))
    sys.path.append(str(Path(onnxruntime.__file__).parent / "transformers"))
    try:
        yield
    finally:
        logging.disable(level)
        sys.path[:] = path


def _session(model: bytes | str | PathLike[str], threads: int) -> ort.InferenceSession:
    return open_session(model, options=quiet_options(threads=threads))


def _exact(
    model: bytes | str | PathLike[str], threads: int
) -> tuple[list[saturation.IntegerProduct], ort.InferenceSession | None]:
    """A model's integer products, and a session of it in which they are unsigned; None where it has none."""
    twin = load_model(model)
    products = saturation.integer_products(twin)
    if not saturation.make_unsigned(twin, saturating_only=False):
        return products, None
    with scratch_folder() as folder:
        ir.external_data.load_to_model(twin)
        path = folder / "model.onnx"
        write_model(twin, path)
        return products, _session(path, threads)


def _rows(session: ort.InferenceSession, feed: Mapping[str, np.ndarray]) -> np.ndarray:
    values = np.asarray(session.run(None, dict(feed))[0], np.float64)
    return values.reshape(-1, values.shape[-1])


def run_seconds(session: ort.InferenceSession, feed: Mapping[str, np.ndarray]) -> float:
    """How long one run takes."""
    start = time.perf_counter()
    session.run(None, dict(feed))
    return time.perf_counter() - start


def _cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return np.sum(a * b, axis=1) / np.maximum(norms, np.finfo(np.float64).tiny)


def stored_size(model: bytes | str | PathLike[str]) -> int:
    """The bytes of a model with the data beside it."""
    if isinstance(model, bytes):
        return len(model)
    path = Path(model)
    beside = path.parent.glob(f"{path.name}*.data")
    return path.stat().st_size + sum(data.stat().st_size for data in beside)
