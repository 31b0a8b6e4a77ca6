"""Quantizes ONNX models: int8, int4 or half precision, with the stock onnxruntime quantizers.

Works on bytes and files, and measures the effect of a scheme. Used for Hugging Face models and trained models alike.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onward.errors import ModelError
from onward.export.quantize.int8 import quantize_lookups, quantize_products
from onward.export.quantize.transposes import fold_transposes
from onward.graph.dialect import saturation
from onward.graph.gate import read_with_data
from onward.graph.load import load_model
from onward.graph.save import write_model
from onward.renamed import renamed_arguments
from onward.runtime import processor
from onward.runtime.sessions import open_session

__all__ = ["SCHEMES", "QuantizationReport", "SaturationWarning", "measure", "quantize", "scheme_name"]


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
    apply: Callable[[onnx.ModelProto, _Options], onnx.ModelProto]


@dataclass(frozen=True)
class _Options:
    reduce_range: bool
    block_size: int
    exclude: tuple[str, ...]


@dataclass(frozen=True)
class QuantizationReport:
    """The effect of a scheme on size, accuracy and speed, against the float32 model on the same inputs.

    `cosine` compares each row of the first output. `reference_cosine` does the same with integer products that
    cannot saturate: what every CPU should give. `saturating` names the nodes whose products may saturate on
    CPUs without 8-bit dot products. `speedup` is the median over the runs, on this machine, whose `cpu` has
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
            first, *rest = self.saturating
            more = f" (+{len(rest)} more)" if rest else ""
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


@renamed_arguments(output="path")
def quantize(
    model: bytes | str | PathLike[str],
    scheme: str = "int8",
    *,
    path: str | PathLike[str] | None = None,
    reduce_range: bool = True,
    block_size: int = 32,
    exclude: Iterable[str] = (),
) -> bytes | Path:
    """Quantize a model given as bytes or as a file; return bytes, or write `path` and return its path.

    `reduce_range` keeps int8 weights small enough that every CPU computes the same products. Without it they use
    the whole range: right only where all CPUs have 8-bit dot products (AVX-VNNI, AVX512-VNNI, AMX, ARM);
    on others products saturate, without an error. `block_size` is the number of weights that share one scale
    in the weight-only schemes. `exclude` names nodes to leave alone.

    >>> quantize("model.onnx", "int8", path="model-int8.onnx").name
    'model-int8.onnx'
    """
    name = scheme_name(scheme)
    if name is None:
        raise ValueError(f"quantize() needs a scheme. Known: {', '.join(SCHEMES)}")
    proto = _load(model)
    metadata = {prop.key: prop.value for prop in proto.metadata_props}
    options = _Options(reduce_range=reduce_range, block_size=block_size, exclude=tuple(exclude))
    fold_transposes(proto)  # as a training graph has them: matrices behind them would be left as they are
    with _undisturbed():
        result = SCHEMES[name].apply(proto, options)
    if reduce_range:
        result = _never_saturating(result)
    # The quantizers leave notes of their own in the metadata, or lose what was there: keep the model's.
    del result.metadata_props[:]
    onnx.helper.set_model_props(result, metadata)
    if path is None:
        if result.ByteSize() > _ONE_FILE:
            raise ModelError("the quantized model is over 2 GB and does not fit in bytes: pass path=…")
        return result.SerializeToString(deterministic=True)
    return _save(result, Path(path))


def measure(
    reference: bytes | str | PathLike[str],
    quantized: bytes | str | PathLike[str],
    feeds: Sequence[Mapping[str, np.ndarray]],
    *,
    repeats: int = 3,
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
        ratios += [_seconds(whole, feed) / _seconds(ours, feed) for _ in range(repeats)]
    cosine, exact_cosine = np.concatenate(cosines), np.concatenate(exact_cosines)
    report = QuantizationReport(
        bytes_before=_size(reference),
        bytes_after=_size(quantized),
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


# What the stock quantizer has integer forms of, beside products and lookups.
_OTHER_INTEGER_OPS = frozenset({"Attention", "Conv", "EmbedLayerNormalization", "LSTM"})


def _int8(model: onnx.ModelProto, options: _Options) -> onnx.ModelProto:
    quantize_products(model, reduce_range=options.reduce_range, exclude=options.exclude)
    quantize_lookups(model, exclude=options.exclude)
    others = sorted(_OTHER_INTEGER_OPS & {node.op_type for node in model.graph.node})
    return _dynamic(model, options, per_channel=True, op_types=others) if others else model


def _int8_tensor(model: onnx.ModelProto, options: _Options) -> onnx.ModelProto:
    return _dynamic(model, options, per_channel=False, op_types=None)


def _weight_only(model: onnx.ModelProto, options: _Options, *, bits: int) -> onnx.ModelProto:
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    quantizer = MatMulNBitsQuantizer(
        model,
        bits=bits,
        block_size=options.block_size,
        is_symmetric=False,
        nodes_to_exclude=list(options.exclude),
    )
    quantizer.process()
    matrices: onnx.ModelProto = quantizer.model.model  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
    # Embedding tables are half of a small model. Their own 4-bit operator needs opset 21; int8 does not.
    quantize_lookups(matrices, exclude=options.exclude)
    return matrices


def _int4(model: onnx.ModelProto, options: _Options) -> onnx.ModelProto:
    return _weight_only(model, options, bits=4)


def _int8_weights(model: onnx.ModelProto, options: _Options) -> onnx.ModelProto:
    return _weight_only(model, options, bits=8)


def _fp16(model: onnx.ModelProto, options: _Options) -> onnx.ModelProto:
    from onnxruntime.transformers.float16 import convert_float_to_float16

    return convert_float_to_float16(
        model, keep_io_types=True, disable_shape_infer=False, node_block_list=list(options.exclude) or None
    )


def _dynamic(
    model: onnx.ModelProto, options: _Options, *, per_channel: bool, op_types: list[str] | None
) -> onnx.ModelProto:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    # The quantizer warns at every model that has not been through its own preprocessing, which only adds
    # shapes and fusions; this mark says that we know.
    onnx.helper.set_model_props(model, {"onnx.quant.pre_process": "onnxruntime.quant"})
    with tempfile.TemporaryDirectory(prefix="onward-quantize-") as folder:
        path = Path(folder) / "model.onnx"
        large = model.ByteSize() > _ONE_FILE
        quantize_dynamic(
            model,
            path,
            op_types_to_quantize=op_types,
            per_channel=per_channel,
            reduce_range=options.reduce_range,
            weight_type=QuantType.QInt8,
            nodes_to_exclude=list(options.exclude),
            use_external_data_format=large,
        )
        return read_with_data(path)


SCHEMES: Mapping[str, Scheme] = {
    "int8": Scheme("int8 weights with one scale per channel, int8 activations found at run time", _int8),
    "int8-tensor": Scheme("the same with one scale per tensor", _int8_tensor),
    "int8-weights": Scheme("8-bit matrices in blocks, int8 embeddings, float32 arithmetic", _int8_weights),
    "int4": Scheme("4-bit matrices in blocks, int8 embeddings, float32 arithmetic", _int4),
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
    logging.disable(max(level, logging.WARNING))
    sys.path.append(str(Path(onnxruntime.__file__).parent / "transformers"))
    try:
        yield
    finally:
        logging.disable(level)
        sys.path[:] = path


def _load(model: bytes | str | PathLike[str]) -> onnx.ModelProto:
    return read_with_data(model)


def _save(model: onnx.ModelProto, path: Path) -> Path:
    if model.ByteSize() > _ONE_FILE:
        onnx.save(model, path, save_as_external_data=True, location=f"{path.name}.data")
    else:
        temporary = path.with_name(f".{path.name}.part")
        try:
            temporary.write_bytes(model.SerializeToString(deterministic=True))
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    return path


def _session(model: bytes | str | PathLike[str], threads: int) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    return open_session(model, options=options)


def _exact(
    model: bytes | str | PathLike[str], threads: int
) -> tuple[list[saturation.IntegerProduct], Any | None]:
    """A model's integer products, and a session of it in which they are unsigned; None where it has none."""
    twin = load_model(model)
    products = saturation.integer_products(twin)
    if not saturation.make_unsigned(twin, saturating_only=False):
        return products, None
    with tempfile.TemporaryDirectory(prefix="onward-exact-", ignore_cleanup_errors=True) as folder:
        ir.external_data.load_to_model(twin)
        path = Path(folder) / "model.onnx"
        write_model(twin, path)
        return products, _session(path, threads)


def _never_saturating(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same model, with products unsigned that came in quantized, or that a quantizer left too large."""
    checked = ir.from_proto(model)
    return ir.to_proto(checked) if saturation.make_unsigned(checked) else model


def _rows(session: Any, feed: Mapping[str, np.ndarray]) -> np.ndarray:
    values = np.asarray(session.run(None, dict(feed))[0], np.float64)
    return values.reshape(-1, values.shape[-1])


def _seconds(session: Any, feed: Mapping[str, np.ndarray]) -> float:
    start = time.perf_counter()
    session.run(None, dict(feed))
    return time.perf_counter() - start


def _cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return np.sum(a * b, axis=1) / np.maximum(norms, np.finfo(np.float64).tiny)


def _size(model: bytes | str | PathLike[str]) -> int:
    if isinstance(model, bytes):
        return len(model)
    path = Path(model)
    data = path.with_name(f"{path.name}.data")
    return path.stat().st_size + (data.stat().st_size if data.exists() else 0)
