"""Decides by measurement: quantizes a model in the ways that fit its operators, and takes what is worth it.

Each way is measured on samples of the data: size, time in plain onnxruntime, likeness to the float model's answers, and
the task's metric where the caller can compute it. A file that is larger or slower than the float one never wins.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onward.errors import ExportError, OnwardError
from onward.export.quantize.quantizer import QuantizationReport, measure, quantize, run_seconds, stored_size
from onward.graph.dialect.normalize import normalize
from onward.graph.gate import read_with_data
from onward.ort_session import create_session
from onward.quantize.calibration import layer_errors
from onward.quantize.planning import Quantization

_SCHEMES = ("int8", "int8-static", "int8-weights", "int4")
# Repeated measurements of one model differ by this share.
_NOISE = 0.05
# Of smaller models names and scales weigh as much as weights, and a run is shorter than what disturbs it.
_TINY = 1 << 16
# Rows of the first output must be this like the float model's where there is no metric.
_LEAST_COSINE = 0.99


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to store a model, measured; `refusal` says why it cannot be taken."""

    name: str
    path: Path
    size: int
    milliseconds: float
    speedup: float
    cosine_mean: float
    cosine_min: float
    metric: float | None
    refusal: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The figures, for a JSON file."""
        return {**dataclasses.asdict(self), "path": str(self.path)}


def try_schemes(
    whole: Path,
    feeds: Mapping[str, np.ndarray],
    folder: Path,
    *,
    calibration: Mapping[str, np.ndarray] | None = None,
    score: Callable[[Path], float] | None = None,
    allowed_loss: float = 0.005,
    repeats: int = 9,
) -> list[Candidate]:
    """Quantize a float model in every way that fits, into `folder`; the float model is the first candidate.

    `feeds` are samples of the data to compare on, `calibration` those to take ranges from. `score` computes the metric
    of a file, larger being better, of which `allowed_loss` may be lost.
    """
    reference = score(whole) if score is not None else None
    candidates = [
        Candidate(
            "float", whole, stored_size(whole), _milliseconds(whole, feeds, repeats), 1.0, 1.0, 1.0, reference
        )
    ]
    for number, name in enumerate(_SCHEMES):
        # a folder for each: data beside a model is named after it, and the winner keeps its name
        path = folder / str(number) / whole.name
        path.parent.mkdir(exist_ok=True)
        try:
            quantize(whole, name, path=path, calibration=feeds if calibration is None else calibration)
        except OnwardError as error:
            candidates.append(_failed(name, path, str(error)))
            continue
        if any(_same_nodes(path, other.path) for other in candidates[1:] if not other.refusal):
            continue  # a model without matrices, say: int8 is static already
        report = measure(whole, path, [feeds], repeats=repeats)
        candidate = Candidate(
            name, path, stored_size(path), candidates[0].milliseconds / report.speedup, report.speedup,
            report.cosine_mean, report.cosine_min, None if score is None else score(path),
        )  # fmt: skip
        refusal = judge(candidate, candidates[0], allowed_loss=allowed_loss)
        candidates.append(dataclasses.replace(candidate, refusal=refusal))
    return candidates


def judge(candidate: Candidate, whole: Candidate, *, allowed_loss: float) -> str:
    """Why a candidate is no better than the float model; empty where it is."""
    if candidate.size >= whole.size:
        return "larger than float"
    # A slower file is no gain even if smaller: whoever wants that asks for it by name.
    if candidate.speedup < 1 - _NOISE:
        return f"{1 / candidate.speedup:.1f} times as slow as float"
    if candidate.metric is not None and whole.metric is not None:
        lost = whole.metric - candidate.metric
        return f"loses {lost:.4g} of the metric" if lost > allowed_loss else ""
    if candidate.cosine_mean < _LEAST_COSINE:
        return f"cosine {candidate.cosine_mean:.3f}"
    return ""


def choose_best(candidates: Sequence[Candidate]) -> Candidate:
    """The fastest that may be taken, and of those that are as fast the smallest; float where there is none."""
    whole, *others = candidates
    accepted = [candidate for candidate in others if not candidate.refusal]
    if not accepted:
        return whole
    fastest = max(candidate.speedup for candidate in accepted)
    return min(
        (one for one in accepted if one.speedup >= fastest * (1 - _NOISE)),
        key=lambda one: (one.size, one.name),
    )


def quantize_sensitively(
    whole: Path,
    target: Path,
    feeds: Mapping[str, np.ndarray],
    *,
    score: Callable[[Path], float],
    allowed_loss: float,
    scheme: str = "int8",
) -> list[str]:
    """Write an int8 model whose most sensitive layers stay float, as few as keep the metric; returns their names.

    Layers are ordered by how much rounding each alone changes the answers; the number that stays float is doubled until
    the metric is met, then halved back.
    """
    settings = Quantization(scheme)
    layers = list(layer_errors(normalize(whole), settings, feeds))
    least = score(whole) - allowed_loss

    def is_enough(count: int) -> bool:
        quantize(whole, scheme, path=target, calibration=feeds, exclude=layers[:count])
        return score(target) >= least

    # Doubling and halving: each trial quantizes the whole model and runs the metric, so that few of them matter.
    enough, short = 0, -1
    while not is_enough(enough):
        short, enough = enough, max(1, 2 * enough)
        if enough >= len(layers):
            raise ExportError(
                f"no layer can be {scheme} without losing more than {allowed_loss:.4g} of the metric; not written",
                hint="train for it: onward finetune --quantize int8",
            )
    while enough - short > 1:
        middle = (enough + short) // 2
        if is_enough(middle):
            enough = middle
        else:
            short = middle
    is_enough(enough)  # the file on disk is that of the last trial
    return layers[:enough]


def refuse_worse(report: QuantizationReport, scheme: str) -> None:
    """Refuse a quantized file that is larger or slower than the float one, where it is large enough to tell."""
    if report.bytes_before < _TINY:
        return
    if report.bytes_after >= report.bytes_before:
        what = f"is larger than the float model: {report.bytes_after:,} bytes, and {report.bytes_before:,} before"
    elif report.speedup < 1 - _NOISE:
        what = f"is {1 / report.speedup:.1f} times as slow as the float model on this machine"
    else:
        return
    raise ExportError(
        f"{scheme} {what}; not written",
        hint="take --quantize auto, which measures all ways, or --force to write it all the same",
    )


def _failed(name: str, path: Path, reason: str) -> Candidate:
    nan = float("nan")
    return Candidate(name, path, 0, nan, nan, nan, nan, None, reason.partition(";")[0].partition("\n")[0])


def _same_nodes(path: Path, other: Path) -> bool:
    return path.stat().st_size == other.stat().st_size and read_with_data(path) == read_with_data(other)


def _milliseconds(path: Path, feeds: Mapping[str, np.ndarray], repeats: int) -> float:
    session = create_session(path)
    # The median: a pause of the machine is one long run, not a slower model.
    seconds = [run_seconds(session, feeds) for _ in range(repeats + 1)]
    return float(np.median(seconds[1:])) * 1e3  # the first one allocates
