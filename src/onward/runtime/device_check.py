"""Checks that a device computes what training graphs ask of it, before it trains.

The operators of `operator_cases` run on the device and on the CPU, once for each device, driver and version of the
runtime; the report is kept in the cache folder. What a device computes wrong is written in another form
(`conservative_forms`), or a model that needs it is refused with the operator's name.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import numpy as np
import onnx
import onnxruntime as ort

from onward.contract import SEED
from onward.errors import DeviceError
from onward.files import write_bytes
from onward.graph.proto.conservative_forms import (
    FASTER_FORMS,
    FORMS,
    HOST_RANDOM,
    apply_forms,
    split_random,
)
from onward.graph.proto.known_shapes import rename_inputs, resolve_symbols
from onward.graph.protobuf import attributes_of, inner_graphs, set_nodes
from onward.ort_session import create_session, quiet_options, shorten_error
from onward.reading import parse_json
from onward.runtime.cache import cache_folder
from onward.runtime.devices import Device, adapter_name, find_device, is_checked, require_device
from onward.runtime.operator_cases import OPERATOR_CASES, OperatorCase, operators_of
from onward.runtime.separate_process import Run, run_separately

State = Literal["right", "form", "wrong", "fails"]

# Part of the largest number by which results may differ: kernels of GPUs round exp, tanh and erf otherwise.
TOLERANCE = 2e-5
# Bump where a report of an older Onward would say something else.
_VERSION = 3


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of one case: right, right in another form, wrong by so much, or failing with a message."""

    state: State
    form: str = ""
    difference: float = 0.0
    message: str = ""

    def __str__(self) -> str:
        if self.state == "form":
            return f"right with {self.form}"
        if self.state == "wrong":
            return f"wrong by {self.difference:.1g}"
        return f"fails: {self.message}" if self.state == "fails" else "right"


@dataclasses.dataclass(frozen=True)
class DeviceReport:
    """What a device computes right, by the name of the case, and forms in which it is faster."""

    verdicts: Mapping[str, Verdict]
    faster: Sequence[str] = ()

    @property
    def forms(self) -> list[str]:
        """The forms that a model has to be written in."""
        names = (v.form.split(", ") for v in self.verdicts.values() if v.state == "form")
        return list(dict.fromkeys(name for several in names for name in several))

    def unfit(self) -> list[tuple[OperatorCase, Verdict]]:
        """The cases that no form makes right."""
        pairs = [(case, self.verdicts.get(str(case))) for case in OPERATOR_CASES]
        return [(case, v) for case, v in pairs if v is not None and v.state in ("wrong", "fails")]

    def fit(self, model: onnx.ModelProto, device: Device, what: str) -> onnx.ModelProto | None:
        """Write a model, in place, in the forms that the device needs; refuse it where no form helps.

        Returns the model that draws its random numbers on the CPU, where the device draws others.
        """
        apply_forms(model, [*self.forms, *self.faster])
        host = split_random(model) if HOST_RANDOM in self.forms else None
        _refuse_wrong_operators(model, self, device, what)
        return host


def check_device(device: Device) -> DeviceReport:
    """The report of a device: kept from an earlier check, or made now, which takes seconds."""
    if not is_checked(device):
        return DeviceReport({})
    identity = "|".join(
        (device.kind, str(device.number), adapter_name(device), ort.__version__, sys.platform, str(_VERSION))
    )
    return _check(device, identity)


@functools.cache
def _check(device: Device, identity: str) -> DeviceReport:
    table = "".join(f"{case}{case.text}" for case in OPERATOR_CASES) + "".join(FORMS)
    key = hashlib.sha256(f"{identity}|{table}".encode()).hexdigest()[:32]
    root = cache_folder()
    path = None if root is None else root / "devices" / f"{key}.json"
    if path is not None and path.is_file():
        report = _read_report(path.read_bytes())
        if report is not None:
            return report
    with run_separately("onward.runtime.device_check:onnxruntime_on", str(device)) as run:
        faster = [form for form in FASTER_FORMS.get(device.kind, ()) if _is_right_in(form, run)]
        report = DeviceReport(judge_cases(OPERATOR_CASES, run), faster)
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            content = {"device": identity, **dataclasses.asdict(report)}
            write_bytes(path, json.dumps(content, indent=1).encode())
        except OSError:
            pass  # a cache that cannot be written costs the next process a check, nothing else
    return report


def _read_report(content: bytes) -> DeviceReport | None:
    """A kept report; None where the file is damaged or of another table."""
    try:
        about = parse_json(content.decode())
        verdicts = {str(name): Verdict(**fields) for name, fields in about["verdicts"].items()}
        faster = [form for form in about["faster"] if form in FORMS]
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return (
        DeviceReport(verdicts, faster) if verdicts.keys() == {str(case) for case in OPERATOR_CASES} else None
    )


def onnxruntime_on(device: str | Device) -> Run:
    """onnxruntime with the provider of a device."""
    chosen = find_device(device)
    return lambda model, feeds: run_on(chosen, model, feeds)


def run_on(device: Device, model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> Sequence[np.ndarray]:
    """Run a model once on a device, for the sizes of these inputs, as a training step is."""
    fixed = _with_sizes(model, feeds)
    session = create_session(fixed, quiet_options(threads=1), providers=device.providers())
    require_device(session, device, "check of its operators")
    # copied while the session lives: some packages hand out memory that goes with it
    own = {value.name: feeds[value.name] for value in session.get_inputs()}
    return [np.array(array) for array in session.run(None, own)]


def _with_sizes(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> onnx.ModelProto:
    """A copy of a model for inputs of these sizes: some devices, and some forms, need them."""
    fixed = copy.deepcopy(model)
    resolve_symbols(fixed.graph, {name: array.shape for name, array in feeds.items()})
    return fixed


def judge_cases(cases: Iterable[OperatorCase], run: Run) -> dict[str, Verdict]:
    """Each case's verdict, by its name."""
    verdicts = {}
    for case in cases:
        model, feeds = surround(case.model, case.feeds())
        verdicts[str(case)] = judge(model, feeds, run_on(Device("cpu"), model, feeds), run)
    return verdicts


def surround(
    model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A model with a change of sign before each number that it reads and after each that it writes.

    OpenVINO leaves some operators to the CPU where they stand alone, and takes them in the midst of others.
    """
    wider, signed = copy.deepcopy(model), dict(feeds)
    graph = wider.graph
    singles = [
        v for v in [*graph.input, *graph.output] if v.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    ]
    inner = {value.name: f"{value.name}/signed" for value in singles}
    for node in graph.node:
        rename_inputs(node, inner)
        node.output[:] = [inner.get(name, name) for name in node.output]
    nodes = list(graph.node)
    for value in singles:
        is_input = value.name in feeds
        ends = [value.name, inner[value.name]] if is_input else [inner[value.name], value.name]
        negation = onnx.helper.make_node("Neg", ends[:1], ends[1:], name=f"{value.name}/sign")
        nodes.insert(0 if is_input else len(nodes), negation)
        if is_input:
            signed[value.name] = np.asarray(-signed[value.name])
    set_nodes(graph, nodes)
    return wider, signed


def judge(
    model: onnx.ModelProto,
    feeds: Mapping[str, np.ndarray],
    expected: Sequence[np.ndarray],
    run: Run,
    *,
    tolerance: float = TOLERANCE,
    forms: Sequence[str] | None = None,
) -> Verdict:
    """Compare what a runtime makes of a model with what is expected: as it is, then in each form that changes it.

    With `forms`, in all of those together instead, and in all but one of them.
    """
    model = _with_sizes(model, feeds)
    plain = _attempt(model, feeds, expected, run, tolerance)
    if plain.state == "right":
        return plain
    for name, written in _written_forms(model) if forms is None else _written_together(model, forms):
        form_run = _host_random_run(run) if HOST_RANDOM in name else run
        verdict = _attempt(written, feeds, expected, form_run, tolerance)
        if verdict.state == "right":
            return Verdict("form", name, plain.difference, plain.message)
    return plain


def _is_right_in(form: str, run: Run) -> bool:
    """Whether every case that a form rewrites is right in it."""
    for case in OPERATOR_CASES:
        model, feeds = surround(case.model, case.feeds())
        written = _with_sizes(model, feeds)
        apply_forms(written, [form])
        if written == _with_sizes(model, feeds):
            continue
        expected = run_on(Device("cpu"), model, feeds)
        if _attempt(written, feeds, expected, run, TOLERANCE).state != "right":
            return False
    return True


def _written_forms(model: onnx.ModelProto) -> Iterable[tuple[str, onnx.ModelProto]]:
    """The model in each form that says something about it, then in all of those together."""
    names = []
    for name in FORMS:
        written = _in_forms(model, [name])
        if written != model:
            names.append(name)
            yield name, written
    if any(value.name == SEED for value in model.graph.input):
        yield HOST_RANDOM, model
        if names:
            yield ", ".join([*names, HOST_RANDOM]), _in_forms(model, names)
    if len(names) > 1:
        yield ", ".join(names), _in_forms(model, names)


def _written_together(model: onnx.ModelProto, forms: Sequence[str]) -> Iterable[tuple[str, onnx.ModelProto]]:
    """The model in all of these forms, if there are any; then in all but one, for each."""
    subsets = [list(forms), *([form for form in forms if form != left_out] for left_out in forms)]
    for names in subsets:
        if names:
            yield ", ".join(names), _in_forms(model, names)


def _in_forms(model: onnx.ModelProto, forms: Sequence[str]) -> onnx.ModelProto:
    written = copy.deepcopy(model)
    apply_forms(written, forms)
    return written


def _host_random_run(run: Run) -> Run:
    """A run whose random numbers the CPU draws."""

    def split_run(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> Sequence[np.ndarray]:
        remaining = _with_sizes(model, feeds)
        host = split_random(remaining)
        if host is None:
            return run(model, feeds)
        drawn = run_on(Device("cpu"), host, {SEED: feeds[SEED]})
        names = [value.name for value in host.graph.output]
        if not remaining.graph.node:  # nothing is left to the device
            by_name = dict(zip(names, drawn))
            return [by_name[value.name] for value in model.graph.output]
        others = {name: array for name, array in feeds.items() if name != SEED}
        return run(remaining, {**others, **dict(zip(names, drawn))})

    return split_run


def _attempt(
    model: onnx.ModelProto,
    feeds: Mapping[str, np.ndarray],
    expected: Sequence[np.ndarray],
    run: Run,
    tolerance: float,
) -> Verdict:
    try:
        # a form may leave out an input
        outputs = run(model, {value.name: feeds[value.name].copy() for value in model.graph.input})
    except DeviceError:  # it is not this device that would be compared
        raise
    except Exception as error:  # whatever a runtime raises is its answer
        return Verdict("fails", message=shorten_error(error)[:300])
    difference = max((measure_difference(a, b) for a, b in zip(outputs, expected, strict=True)), default=0.0)
    return Verdict("right" if difference <= tolerance else "wrong", difference=difference)


def measure_difference(actual: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference as part of the largest number expected; infinite where shapes or types differ.

    >>> measure_difference(np.array([1.0, 4.0]), np.array([1.0, 2.0]))
    1.0
    """
    actual, expected = np.asarray(actual), np.asarray(expected)
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return float("inf")
    if not expected.size:
        return 0.0
    if expected.dtype.kind != "f":
        return 0.0 if np.array_equal(actual, expected) else float("inf")
    finite = np.isfinite(expected)
    if not np.array_equal(finite, np.isfinite(actual)):
        return float("inf")
    gap = np.abs(actual[finite].astype(np.float64) - expected[finite])
    return float(gap.max(initial=0.0) / max(1.0, np.abs(expected[finite]).max(initial=0.0)))


def _refuse_wrong_operators(model: onnx.ModelProto, report: DeviceReport, device: Device, what: str) -> None:
    """An error where a model, as a session is to get it, has an operator that the device computes wrong."""
    unfit = report.unfit()
    if not unfit:
        return
    inferred = onnx.shape_inference.infer_shapes(model).graph
    kinds = {v.name: v.type.tensor_type.elem_type for v in [*inferred.value_info, *inferred.input]}
    has_seed = any(value.name == SEED for value in model.graph.input)
    nodes = list(operators_of(model.graph))
    hits = [
        (case, verdict)
        for case, verdict in unfit
        if any(_concerns(case, node, kinds, has_seed=has_seed) for node in nodes)
    ]
    if hits:
        case, verdict = hits[0]
        more = f" ({len(hits) - 1} more: {', '.join(str(c) for c, _ in hits[1:])})" if len(hits) > 1 else ""
        raise DeviceError(
            f"device='{device}' cannot train the {what}: {case} {verdict} there, beside the CPU{more}. "
            f"`onward conform --device {device}` shows every operator; use device='cpu'"
        )


def _concerns(case: OperatorCase, node: onnx.NodeProto, kinds: Mapping[str, int], *, has_seed: bool) -> bool:
    """Whether a case says something about a node: the same operator, type and attributes that matter."""
    if node.op_type != case.operator or node.domain not in ("", "ai.onnx"):
        return False
    inputs = {value.name: value.type.tensor_type.elem_type for value in case.model.graph.input}
    if SEED in inputs:
        return has_seed
    own = next(n for n in operators_of(case.model.graph) if n.op_type == case.operator)
    kind = inputs.get(own.input[0]) if own.input else None
    if kind is not None and kinds.get(node.input[0], kind) != kind:
        return False
    # a case of strided convolutions says nothing about a node without strides
    return _unusual(own) <= _unusual(node)


def _unusual(node: onnx.NodeProto) -> set[str]:
    """The attributes of a node that are not their defaults, by name; "captures" where a body reads outer values."""
    ignored = {"axis", "axes", "perm", "kernel_shape", "to", "hidden_size", "body", "value", "keepdims"}
    plain = (0, 1, 1.0, [], b"", b"NOTSET")
    captures = any(_reads_outside(body) for body in inner_graphs(node))
    attributes = {
        name
        for name, value in attributes_of(node).items()
        if name not in ignored
        and not (isinstance(value, list) and set(value) <= {0, 1})
        and value not in plain
    }
    return attributes | {"captures"} if captures else attributes


def _reads_outside(body: onnx.GraphProto) -> bool:
    """Whether a body reads a value of the graph around it."""
    nodes = list(operators_of(body))
    own = {name for node in nodes for name in node.output}
    for graph in [body, *(inner for node in nodes for inner in inner_graphs(node))]:
        own |= {value.name for value in [*graph.input, *graph.initializer]}
    return any(name not in own for node in nodes for name in node.input if name)
