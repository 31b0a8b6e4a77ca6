"""Gradients at the data of the node tests that ship in the onnx package, against finite differences.

A node test counts if it is in ai.onnx operators, has a float32 or float64 tensor among its inputs and one
among its outputs, and stock onnxruntime reproduces its expected outputs. Its gradients are computed on stock
onnxruntime, in the test's own precision, and compared with differences along random directions: in float64
on onnxruntime or else on the reference evaluator, whichever reproduces the expected outputs; where neither
does, in the test's precision.

    python tests/autodiff/node_tests.py --summary            # counts, and what fails, by operator
    python tests/autodiff/node_tests.py --only Conv --verbose
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime

from onward.autodiff.check import reference_evaluator, to_double
from onward.autodiff.gradient import vector_jacobian
from onward.errors import UnsupportedOps

# Inputs that choose what is computed. Nobody differentiates by them, although outputs may vary with them.
SETTINGS = {
    ("Resize", 1): "region of interest: geometry",
    ("Resize", 2): "scales: geometry, they also decide the output's shape",
    ("Upsample", 1): "scales: geometry",
    ("Dropout", 1): "ratio of dropped elements",
}
DIRECTIONS = 3
# Elements tried one by one where a random direction crosses a kink.
ELEMENTS = 40
# Inputs of more elements than this are too many for the reference evaluator's loops.
REFERENCE_ELEMENTS = 1500
_FLOATING = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE)

Run = Callable[[dict[str, Any]], list[Any]]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of one node test: right, wrong, not smooth, unsupported or error."""

    name: str
    op: str
    verdict: str
    detail: str = ""
    evaluator: str = ""


@dataclasses.dataclass(frozen=True)
class Forward:
    """The model as a function, and how exactly its differences can be trusted."""

    run: Run
    kind: str
    step: float
    rtol: float


def load() -> list[Any]:
    """Every node test of the installed onnx."""
    from onnx.backend.test import loader

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [case for case in loader.load_model_tests(kind="node") if case.data_sets]


def counted(cases: Sequence[Any]) -> Iterator[Any]:
    """The tests that count."""
    for case in cases:
        graph = case.model.graph
        if not _floating(graph.input) or not _floating(graph.output):
            continue
        if any(node.domain not in ("", "ai.onnx") for node in graph.node):
            continue
        try:
            outputs = _session(case.model)(_feeds(case))
        except Exception:
            continue  # stock onnxruntime has no kernel for it
        if _reproduces(case, outputs):
            yield case


def judge(case: Any) -> Outcome:
    """Compare the gradients of one test with finite differences."""
    op = operator_of(case)
    of = _floating(case.model.graph.output)
    settings = {index for (name, index) in SETTINGS if name == op}
    wrt = [
        name
        for name in _floating(case.model.graph.input)
        if not any(_is_input(case.model, op, index, name) for index in settings)
    ]
    if not wrt:
        return Outcome(case.name, op, "right", "nothing but settings")
    try:
        derived, _, _ = vector_jacobian(case.model, of=of, wrt=wrt)
    except UnsupportedOps as error:
        return Outcome(case.name, op, "unsupported", str(error).splitlines()[1].strip())
    except Exception as error:
        return Outcome(case.name, op, "error", f"building: {type(error).__name__}: {error}")
    feeds = _feeds(case)
    forward = _forward(case)
    rng = np.random.default_rng(0)
    names = [value.name for value in case.model.graph.output]
    first = dict(zip(names, forward.run(feeds)))
    # Outputs that are infinite have no weight: masks write such scores.
    finite = {name: np.isfinite(first[name]) for name in of}
    weights = {name: np.asarray(rng.uniform(0.5, 1.5, np.shape(first[name])) * finite[name]) for name in of}
    kinds = {value.name: value.type.tensor_type.elem_type for value in derived.graph.input}
    cotangents = {
        f"{name}_cotangent": weight.astype(
            onnx.helper.tensor_dtype_to_np_dtype(kinds.get(f"{name}_cotangent", 1))
        )
        for name, weight in weights.items()
    }
    try:
        gradients = [np.asarray(g, np.float64) for g in _session(derived)({**feeds, **cotangents})]
    except Exception as error:
        return Outcome(case.name, op, "error", f"running: {str(error)[:300]}")

    def loss(moved: dict[str, np.ndarray]) -> float:
        outputs = dict(zip(names, forward.run({**feeds, **moved})))
        if any(outputs[name].shape != weights[name].shape for name in of):
            return float("nan")
        parts = [outputs[name][where] * weights[name][where] for name, where in finite.items()]
        return float(sum(np.sum(part, dtype=np.float64) for part in parts))

    points = {name: np.asarray(feeds[name]) for name in wrt}
    for name, gradient in zip(wrt, gradients):
        if gradient.shape != points[name].shape:
            return Outcome(
                case.name, op, "wrong", f"shape {gradient.shape} of the gradient of {name}", forward.kind
            )
    verdict, detail = _compare(loss, points, dict(zip(wrt, gradients)), forward, rng)
    return Outcome(case.name, op, verdict, detail, forward.kind)


def operator_of(case: Any) -> str:
    """The operator that a test is about, also where its definition was expanded."""
    nodes = case.model.graph.node
    if len(nodes) == 1:
        return nodes[0].op_type
    return "_".join(part for part in case.name.removeprefix("test_").split("_") if part != "expanded")


def _compare(loss, points, gradients, forward: Forward, rng) -> tuple[str, str]:
    def directions():
        for _ in range(DIRECTIONS):
            yield {name: rng.uniform(-1, 1, x.shape) for name, x in points.items()}

    kinked = False
    for direction in directions():
        found, smooth, expected, tolerance = _along(loss, points, direction, gradients, forward)
        kinked = kinked or not smooth
        if smooth and not abs(found - expected) <= tolerance:
            detail = f"{expected:.6g} where differences give {found:.6g}"
            return _by_element(loss, points, gradients, forward, rng, "wrong", detail)
    if kinked:
        return _by_element(loss, points, gradients, forward, rng, "not smooth", "")
    return "right", ""


def _by_element(loss, points, gradients, forward: Forward, rng, verdict: str, detail: str) -> tuple[str, str]:
    """Elements one by one: those at a kink say nothing, all others must agree."""
    places = [(name, index) for name, x in points.items() for index in range(x.size)]
    chosen = rng.permutation(len(places))[:ELEMENTS]
    kinks = 0
    for number in chosen:
        name, index = places[number]
        direction = {key: np.zeros(x.shape) for key, x in points.items()}
        direction[name].reshape(-1)[index] = 1.0
        found, smooth, expected, tolerance = _along(loss, points, direction, gradients, forward)
        if not smooth:
            kinks += 1
        elif not abs(found - expected) <= tolerance:
            return "wrong", f"{expected:.6g} where differences give {found:.6g} at {name}.flat[{index}]"
    if verdict == "wrong":
        return verdict, detail
    if not kinks:
        return "right", "element by element"
    return verdict, f"{kinks} of {len(chosen)} elements at a kink, the others right"


def _along(loss, points, direction, gradients, forward: Forward) -> tuple[float, bool, float, float]:
    """The derivative along a direction, whether it exists, what the gradient says, and the tolerance."""
    step = forward.step

    def at(t: float) -> float:
        return loss({name: _moved(x, t * direction[name], forward) for name, x in points.items()})

    here, ahead, behind = at(0.0), at(step), at(-step)
    half_ahead, half_behind = at(step / 2), at(-step / 2)
    right, left = (half_ahead - here) / (step / 2), (here - half_behind) / (step / 2)
    coarse, fine = (ahead - behind) / (2 * step), (half_ahead - half_behind) / step
    moving = {name: direction[name] != 0 for name in points}
    terms = [gradients[name][where] * direction[name][where] for name, where in moving.items()]
    expected = float(sum(np.sum(term) for term in terms))
    size = float(sum(np.sum(np.abs(term)) for term in terms))
    scale = max(abs(fine), abs(expected), 1e-3 * size) if np.isfinite(size) else abs(fine)
    noise = abs(here) * forward.rtol * 1e-6 / step
    limit = forward.rtol * scale + noise + 1e-7
    smooth = bool(np.isfinite([here, fine, coarse]).all()) and (
        abs(right - left) <= 30 * limit and abs(coarse - fine) <= 3 * limit
    )
    return fine, smooth, expected, limit + forward.rtol * 0.3 * (size if np.isfinite(size) else 0.0)


def _moved(x: np.ndarray, change: np.ndarray, forward: Forward) -> np.ndarray:
    moved = np.asarray(x.astype(np.float64) + change)
    return moved.astype(x.dtype) if forward.kind == "own precision" else moved


def _forward(case: Any) -> Forward:
    double = to_double(case.model)
    feeds = {name: _double(x) for name, x in _feeds(case).items()}
    evaluators = [("onnxruntime", _session)]
    if sum(np.size(x) for x in feeds.values() if isinstance(x, np.ndarray)) <= REFERENCE_ELEMENTS:
        evaluators.append(("reference", _reference))
    for kind, make in evaluators:
        try:
            run = make(double)
            if not _reproduces(case, run(feeds)):
                continue
            if not _rounds(case, run, feeds):
                return Forward(
                    lambda values, run=run: run({k: _double(v) for k, v in values.items()}), kind, 1e-5, 1e-3
                )
        except Exception:
            continue
    return Forward(_session(case.model), "own precision", 2e-3, 2e-2)


def _rounds(case: Any, run: Run, feeds: dict[str, Any]) -> bool:
    """Whether float64 goes in and comes out, but float32 was in between."""
    shift = 1e-5 * np.pi
    moved = {
        name: x + shift if isinstance(x, np.ndarray) and x.dtype == np.float64 else x
        for name, x in feeds.items()
    }
    before, after = run(feeds), run(moved)
    changed = [
        b
        for a, b in zip(before, after)
        if isinstance(b, np.ndarray) and b.dtype == np.float64 and (a != b).any()
    ]
    changed = [x for x in changed if np.isfinite(x).any() and (x != np.round(x)).any()]
    return bool(changed) and all(np.array_equal(x, x.astype(np.float32), equal_nan=True) for x in changed)


def _session(model: onnx.ModelProto) -> Run:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    known = {value.name for value in session.get_inputs()}
    return lambda feeds: session.run(None, {name: x for name, x in feeds.items() if name in known})


def _reference(model: onnx.ModelProto) -> Run:
    evaluator = reference_evaluator(model)

    def run(feeds: dict[str, Any]) -> list[Any]:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return evaluator.run(None, feeds)

    return run


def _feeds(case: Any) -> dict[str, Any]:
    names = [value.name for value in case.model.graph.input]
    values = {name: x for name, x in zip(names, case.data_sets[0][0]) if x is not None}
    return {name: np.asarray(x) if isinstance(x, np.generic) else x for name, x in values.items()}


def _double(x: Any) -> Any:
    return np.asarray(x, np.float64) if isinstance(x, np.ndarray) and x.dtype == np.float32 else x


def _floating(values: Any) -> list[str]:
    return [
        value.name
        for value in values
        if value.type.HasField("tensor_type") and value.type.tensor_type.elem_type in _FLOATING
    ]


def _is_input(model: onnx.ModelProto, op: str, index: int, name: str) -> bool:
    return any(
        node.op_type == op and index < len(node.input) and node.input[index] == name
        for node in model.graph.node
    )


def _reproduces(case: Any, outputs: Sequence[Any]) -> bool:
    for got, want in zip(outputs, case.data_sets[0][1]):
        if isinstance(want, list) or isinstance(got, list):
            continue
        got, want = np.asarray(got), np.asarray(want)
        if got.shape != want.shape:
            return False
        if want.dtype.kind in "fiub" and not np.allclose(
            got.astype(np.float64),
            want.astype(np.float64),
            rtol=case.rtol,
            atol=max(case.atol, 1e-5),
            equal_nan=True,
        ):
            return False
    return True


def summary(outcomes: Sequence[Outcome]) -> str:
    """Counts, and every test that is neither right nor at a kink, by operator."""
    counts = collections.Counter(outcome.verdict for outcome in outcomes)
    evaluators = collections.Counter(outcome.evaluator for outcome in outcomes if outcome.evaluator)
    lines = [f"{len(outcomes)} node tests count: " + ", ".join(f"{n} {v}" for v, n in counts.most_common())]
    lines.append("differences from: " + ", ".join(f"{k} {n}" for k, n in evaluators.most_common()))
    failing = collections.defaultdict(list)
    for outcome in outcomes:
        if outcome.verdict not in ("right", "not smooth"):
            failing[outcome.op].append(outcome)
    for op, rows in sorted(failing.items()):
        kinds = ", ".join(f"{n} {v}" for v, n in collections.Counter(r.verdict for r in rows).items())
        lines.append(f"{op}: {kinds}; e.g. {rows[0].name}: {rows[0].detail[:160]}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--summary", action="store_true", help="counts and failures by operator")
    parser.add_argument("--only", default="", help="tests with this in their name or operator")
    parser.add_argument("--verbose", action="store_true", help="every test that is not right")
    arguments = parser.parse_args()
    started = time.perf_counter()
    wish = arguments.only.lower()
    chosen = [c for c in load() if wish in c.name.lower() or wish in operator_of(c).lower()]
    outcomes = []
    for case in counted(chosen):
        begun = time.perf_counter()
        outcome = judge(case)
        outcomes.append(outcome)
        if arguments.verbose and outcome.verdict != "right":
            print(f"{outcome.verdict:<12} {outcome.name}  {outcome.detail[:200]}  [{outcome.evaluator}]")
        if (took := time.perf_counter() - begun) > 1 and arguments.verbose:
            print(f"slow         {outcome.name}  {took:.1f} s")
    print(summary(outcomes))
    print(f"{time.perf_counter() - started:.0f} s")
    return int(any(outcome.verdict not in ("right", "not smooth") for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
