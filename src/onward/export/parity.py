"""Compare the outputs of an exported model with those of the original.

Works on numpy arrays: callers run both models and pass two
dictionaries. An output passes when

    max|got - reference|  <=  atol + rtol * max|reference| + multiple * own

so the error is measured against the scale of the whole tensor. An elementwise relative error would mean
nothing for an element near zero: rounding in the layers before it has the scale of its neighbours. Where the
reference is in float64, `own` is how far the original's own float32 is from it: deep networks with batch norm
amplify rounding, and an export cannot be asked to round better than the original does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from onward.errors import ParityError

__all__ = ["MULTIPLE", "Difference", "Report", "compare", "merge"]

# How many times as far from float64 as the original's own float32 a result may be. Two roundings of the same
# network are seldom more than twice as far from the truth as one another.
MULTIPLE = 4.0


@dataclass(frozen=True)
class Difference:
    """How far one output is from its reference; `reason` is set where the two cannot even be compared."""

    name: str
    max_abs: float
    max_rel: float
    passed: bool
    shape: tuple[int, ...] = ()
    reason: str = ""
    case: str = ""
    own: float | None = None

    def __str__(self) -> str:
        mark = "ok  " if self.passed else "FAIL"
        where = f" at {self.case}" if self.case else ""
        if self.reason:
            return f"{mark} {self.name}{where}: {self.reason}"
        figures = f"max abs {self.max_abs:.2e}, rel {self.max_rel:.2e}"
        if self.own is not None:
            figures += f" from float64; the original's own float32 is {self.own:.2e} from it"
        return f"{mark} {self.name} {list(self.shape)}{where}: {figures}"


@dataclass(frozen=True)
class Report:
    """Every output's difference, and the tolerances that judged it."""

    differences: tuple[Difference, ...]
    rtol: float
    atol: float
    notes: tuple[str, ...] = field(default=())

    @property
    def passed(self) -> bool:
        """Whether every output is within tolerance; an empty report proves nothing and does not pass."""
        return bool(self.differences) and all(difference.passed for difference in self.differences)

    @property
    def max_abs(self) -> float:
        """The largest absolute error over all outputs; infinite where one cannot be compared."""
        return max((difference.max_abs for difference in self.differences), default=0.0)

    @property
    def max_rel(self) -> float:
        """The largest error relative to its tensor's scale; infinite where one cannot be compared."""
        return max((difference.max_rel for difference in self.differences), default=0.0)

    def __iter__(self) -> Iterator[Difference]:
        return iter(self.differences)

    def __str__(self) -> str:
        verdict = "within" if self.passed else "outside"
        lines = [
            f"{verdict} tolerance (rtol {self.rtol:g}, atol {self.atol:g}): "
            f"max abs {self.max_abs:.2e}, rel {self.max_rel:.2e}"
        ]
        lines += [f"  {difference}" for difference in self.differences]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)

    def raise_if_failed(self, subject: str = "exported model") -> Report:
        """Return the report itself, or raise `ParityError` that shows it."""
        if not self.passed:
            raise ParityError(f"{subject}: outputs differ from the original\n{self}")
        return self

    def to_dict(self) -> dict[str, object]:
        """Figures for a JSON file: tolerances, the two maxima and the verdict."""
        return {
            "passed": self.passed,
            "max_abs": self.max_abs,
            "max_rel": self.max_rel,
            "rtol": self.rtol,
            "atol": self.atol,
        }


def compare(
    reference: Mapping[str, np.ndarray],
    got: Mapping[str, np.ndarray],
    *,
    rtol: float = 1e-5,
    atol: float = 1e-6,
    case: str = "",
    plain: Mapping[str, np.ndarray] | None = None,
) -> Report:
    """Compare outputs by name; missing ones, other shapes and other kinds of dtype fail.

    Outputs that only `got` has are ignored: an exported model may expose more than the original. `plain` is
    given where the reference is in float64: the original's own outputs in float32, which say how much rounding
    alone may do.

    >>> import numpy as np
    >>> report = compare({"y": np.float32([1, 2])}, {"y": np.float32([1, 2.1])}, rtol=1e-5, atol=1e-6)
    >>> report.passed, round(report.max_rel, 2)
    (False, 0.05)
    """
    differences = tuple(
        _difference(
            name,
            np.asarray(value),
            got.get(name),
            rtol=rtol,
            atol=atol,
            case=case,
            plain=None if plain is None else plain.get(name),
        )
        for name, value in reference.items()
    )
    return Report(differences, rtol=rtol, atol=atol)


def merge(*reports: Report, notes: tuple[str, ...] = ()) -> Report:
    """One report of several comparisons, for example the same model at several input sizes."""
    if not reports:
        raise ValueError("merge() needs at least one report")
    differences = tuple(difference for report in reports for difference in report.differences)
    gathered = tuple(note for report in reports for note in report.notes) + notes
    return Report(
        differences, rtol=max(r.rtol for r in reports), atol=max(r.atol for r in reports), notes=gathered
    )


def _difference(
    name: str,
    reference: np.ndarray,
    got: np.ndarray | None,
    *,
    rtol: float,
    atol: float,
    case: str,
    plain: np.ndarray | None,
) -> Difference:
    def incomparable(reason: str) -> Difference:
        return Difference(name, np.inf, np.inf, False, reference.shape, reason, case)

    if got is None:
        return incomparable("missing from the exported model's outputs")
    got = np.asarray(got)
    if got.shape != reference.shape:
        return incomparable(f"shape {list(got.shape)}, expected {list(reference.shape)}")
    if _kind(got) != _kind(reference):
        return incomparable(f"dtype {got.dtype}, expected {reference.dtype}")
    if reference.size == 0:
        return Difference(name, 0.0, 0.0, True, reference.shape, "", case)
    # subtracted in float64: halves would round the difference, and unsigned integers wrap
    wide = np.complex128 if _kind(reference) == "c" else np.float64
    a, b = reference.astype(wide), got.astype(wide)
    # The same NaN or infinity in the same place is agreement; anywhere else it is an infinite difference.
    agree = _agree(a, b)
    finite = np.isfinite(a) & np.isfinite(b)
    if plain is not None and plain.shape == got.shape:
        # What overflows in the original's own float32 may overflow here: float64 has the range for it.
        agree |= _agree(plain, got) & ~np.isfinite(got)
    if not np.all(agree | finite):
        count = int(np.size(a) - np.count_nonzero(agree | finite))
        return incomparable(f"{count} values are NaN or infinite in only one of the two")
    largest = float(np.abs(b[finite] - a[finite]).max()) if finite.any() else 0.0
    scale = float(np.abs(a[finite]).max()) if finite.any() else 0.0
    relative = 0.0 if largest == 0.0 else (largest / scale if scale > 0.0 else np.inf)
    own = None if plain is None else _largest(plain, reference)
    # Against the tensor's largest number: elements near zero are sums of larger ones that cancel.
    allowed = atol + rtol * scale + (MULTIPLE * own if own is not None and np.isfinite(own) else 0.0)
    return Difference(name, largest, relative, largest <= allowed, reference.shape, "", case, own)


def _agree(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a == b) | (np.isnan(a) & np.isnan(b))


def _largest(a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference of two arrays; infinite where only one of them is finite."""
    if a.shape != b.shape or _kind(a) != "f":
        return 0.0
    a, b = a.astype(np.float64), b.astype(np.float64)
    compared = ~_agree(a, b)
    with np.errstate(invalid="ignore"):  # inf - inf, counted as infinite below
        differences = np.abs(a[compared] - b[compared])
    return float(np.nan_to_num(differences, nan=np.inf, posinf=np.inf).max(initial=0.0))


def _kind(array: np.ndarray) -> str:
    """Float, integer, bool …; bfloat16 and float8 arrays (numpy kind "V") count as float."""
    return {"V": "f", "u": "i"}.get(array.dtype.kind, array.dtype.kind)
