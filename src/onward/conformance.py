"""Checks whether a runtime computes what training needs: operators forward and backward, and whole training steps.

A runtime comes in through a small function, `Run`: a model and its inputs go in, its outputs come out. What it computes
is compared with onnxruntime's CPU provider, first as the graphs are, then in the forms that stand for what some
runtimes lack (`onward.graph.proto.conservative_forms`). The report is meant to be sent: it says what ran where.
"""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

from onward.artifacts.generate import Artifacts, build_artifacts
from onward.autodiff.gradient import vector_jacobian
from onward.contract import BUFFER, RESET, SEED
from onward.errors import DeviceError
from onward.escape import html_text
from onward.graph.passes.lora import LoRA
from onward.runtime.device_check import Verdict, judge, onnxruntime_on, run_on, surround
from onward.runtime.devices import Device, adapter_name
from onward.runtime.operator_cases import OPERATOR_CASES, OperatorCase
from onward.runtime.separate_process import Run

__all__ = [
    "RUNTIMES",
    "Conformance",
    "Row",
    "Run",
    "check_conformance",
    "onnxruntime_on",
    "openvino",
    "reference",
]

# Part of the largest number by which a whole step may differ: its kernels' differences add up.
_STEP_TOLERANCE = 1e-4
_SIZE = 4  # rows of a batch
_HEADER = '<ir_version: 10, opset_import: ["": 21]>'


@dataclasses.dataclass(frozen=True)
class Row:
    """One thing that was compared: an operator or a network, which part of it, and what became of it."""

    subject: str
    part: str
    verdict: Verdict


@dataclasses.dataclass(frozen=True)
class Conformance:
    """What a runtime computes right. `environment` says where it ran."""

    runtime: str
    environment: Mapping[str, str]
    rows: Sequence[Row]

    @property
    def passed(self) -> bool:
        """Whether everything is right, as it is or in another form."""
        return not self.failures

    @property
    def failures(self) -> list[Row]:
        """What no form makes right."""
        return [row for row in self.rows if row.verdict.state in ("wrong", "fails")]

    @property
    def workarounds(self) -> dict[str, list[str]]:
        """Each form that was needed, with what needed it."""
        needed: dict[str, list[str]] = {}
        for row in self.rows:
            if row.verdict.state == "form":
                needed.setdefault(row.verdict.form, []).append(f"{row.subject}, {row.part}")
        return needed

    def to_json(self) -> str:
        """The report as JSON."""
        rows = [
            {"subject": row.subject, "part": row.part, **_finite(dataclasses.asdict(row.verdict))}
            for row in self.rows
        ]
        content = {"runtime": self.runtime, "environment": dict(self.environment), "passed": self.passed}
        return json.dumps({**content, "rows": rows}, indent=1, allow_nan=False)

    def to_html(self) -> str:
        """The report as a page."""
        body = "".join(
            f'<tr class="{row.verdict.state}"><td>{html_text(row.subject)}<td>{html_text(row.part)}'
            f"<td>{html_text(row.verdict)}"
            for row in self.rows
        )
        about = "".join(
            f"<li>{html_text(name)}: {html_text(value)}" for name, value in self.environment.items()
        )
        title = html_text(f"Conformance of {self.runtime}")
        return _PAGE.format(title=title, about=about, body=body, summary=html_text(self.summary()))

    def summary(self) -> str:
        """One line: how much is right."""
        counts = {
            state: sum(row.verdict.state == state for row in self.rows)
            for state in ("right", "form", "wrong", "fails")
        }
        return (
            f"{counts['right']} of {len(self.rows)} right, {counts['form']} with a workaround, "
            f"{counts['wrong']} wrong, {counts['fails']} failing"
        )


_PAGE = """<!doctype html><meta charset="utf-8"><title>{title}</title>
<style>body{{font:15px system-ui;margin:2em auto;max-width:60em}}td{{padding:.15em 1em .15em 0}}
.form td{{background:#fff6d5}}.wrong td,.fails td{{background:#fddcdc}}</style>
<h1>{title}</h1><ul>{about}</ul><p>{summary}</p><table>{body}</table>
"""


def check_conformance(
    run: Run,
    *,
    name: str = "runtime",
    environment: Mapping[str, str] | None = None,
    subjects: Callable[[str], bool] = lambda subject: True,
    progress: Callable[[str], object] = lambda subject: None,
) -> Conformance:
    """Compare a runtime with onnxruntime's CPU provider; `subjects` chooses by name what is compared.

    >>> report = check_conformance(reference(), name="onnx.reference", subjects=lambda subject: subject == "Tanh")
    >>> [(row.subject, row.part, str(row.verdict)) for row in report.rows]
    [('Tanh', 'forward', 'right'), ('Tanh', 'backward', 'right')]
    """
    rows: list[Row] = []
    for case in OPERATOR_CASES:
        if subjects(str(case)):
            progress(str(case))
            rows += _operator_rows(case, run)
    forms = dict.fromkeys(
        form for row in rows if row.verdict.state == "form" for form in row.verdict.form.split(", ")
    )
    for network in NETWORKS:
        if subjects(network.name):
            progress(network.name)
            for part, model, feeds in network.steps():
                verdict = judge(
                    model, feeds, _expected(model, feeds), run, tolerance=_STEP_TOLERANCE, forms=[*forms]
                )
                rows.append(Row(network.name, part, verdict))
    return Conformance(name, {**_machine(), **(environment or {})}, rows)


def _operator_rows(case: OperatorCase, run: Run) -> Iterator[Row]:
    model, feeds = surround(case.model, case.feeds())
    yield Row(str(case), "forward", judge(model, feeds, _expected(model, feeds), run))
    if case.smooth:
        model, feeds = _backward(case)
        yield Row(str(case), "backward", judge(model, feeds, _expected(model, feeds), run))


def _backward(case: OperatorCase) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """The gradients of a case's inputs, for random gradients of its outputs."""
    feeds = case.feeds()
    model, outputs, _ = vector_jacobian(case.model)
    results = dict(zip([v.name for v in case.model.graph.output], _expected(case.model, feeds)))
    rng = np.random.default_rng(1)
    for output in outputs:
        feeds[f"{output}_cotangent"] = np.asarray(rng.normal(size=results[output].shape), np.float32)
    names = {value.name for value in model.graph.input}
    return surround(model, {name: array for name, array in feeds.items() if name in names})


def _expected(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> Sequence[np.ndarray]:
    return run_on(Device("cpu"), model, feeds)


# ---- whole steps -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Network:
    """A small network as a graph in ONNX's textual syntax: its inputs but the first are its weights."""

    name: str
    text: str
    optimizer: str = "sgd"
    lora: LoRA | None = None
    words: int = 0  # of the vocabulary, where it reads text

    def model(self) -> onnx.ModelProto:
        """The network with random weights."""
        model = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(f"{_HEADER} network {self.text}"))
        graph, rng = model.graph, np.random.default_rng(0)
        weights = list(graph.input)[1:]
        del graph.input[1:]
        for value in weights:
            shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
            array = np.asarray(rng.normal(size=shape) * 0.4, np.float32)
            # batch norm's running variance
            array = np.abs(array) + np.float32(0.5) if value.name.startswith("var") else array
            graph.initializer.append(onnx.numpy_helper.from_array(array, value.name))
        return model

    def artifacts(self) -> Artifacts:
        """What trains the network."""
        model = self.model()
        weights = [
            tensor.name
            for tensor in model.graph.initializer
            if tensor.data_type == onnx.TensorProto.FLOAT and tensor.name[0] == "w"
        ]
        return build_artifacts(
            model, loss="cross-entropy", optimizer=self.optimizer, lora=self.lora, portable=True,
            requires_grad=[] if self.lora else weights,
        )  # fmt: skip

    def steps(self) -> Iterator[tuple[str, onnx.ModelProto, dict[str, np.ndarray]]]:
        """The training model and the whole step, each with inputs."""
        artifacts = self.artifacts()
        checkpoint, layout = artifacts.checkpoint, artifacts.state_layout
        assert layout is not None
        arrays = {**checkpoint.trainable, **checkpoint.frozen}
        training, step = ir.to_proto(artifacts.training), ir.to_proto(artifacts.portable["train_step"])
        feeds = self._batch(training)
        feeds |= {name: np.asarray(array) for name, array in arrays.items()}
        feeds |= {f"{name}{BUFFER}": np.zeros_like(array) for name, array in checkpoint.trainable.items()}
        feeds |= {RESET: np.ones(1, bool), SEED: np.full(1, 7, np.int64)}
        yield "loss and gradients", training, _only(training, feeds)
        state = {"learning_rate": np.full(1, 0.1, np.float32)}
        for tensor in layout.tensors:
            vector: Any = np.zeros(int(np.prod(tensor.shape)), tensor.dtype)
            for part in tensor.parts:
                if part.name in arrays and part.role != "slot":
                    start, values = part.start // tensor.dtype.itemsize, np.asarray(arrays[part.name])
                    vector[start : start + values.size] = values.reshape(-1)
            state[tensor.name] = vector.reshape(tensor.shape)
        yield "updated weights", step, _only(step, {**feeds, **state})

    def _batch(self, training: onnx.ModelProto) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(2)
        first, labels = training.graph.input[:2]
        shape = [dim.dim_value or _SIZE for dim in first.type.tensor_type.shape.dim]
        x = rng.integers(0, self.words, shape) if self.words else rng.normal(size=shape).astype(np.float32)
        # a generator has a label for each word
        count = _SIZE if self.name != "generator" else int(np.prod(shape))
        return {first.name: x, labels.name: rng.integers(0, 3, count)}


def _only(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {value.name: feeds[value.name] for value in model.graph.input}


_MLP = """(float[n,6] x, float[8,6] w1, float[8] w2, float[3,8] w3, float[3] w4) => (float[n,3] y) {
    a = Gemm <transB=1> (x, w1, w2)  r = Relu (a)  y = Gemm <transB=1> (r, w3, w4) }"""
_ATTENTION = """
    q = MatMul (e, wq)  k = MatMul (e, wk)  v = MatMul (e, wv)
    kt = Transpose <perm=[0,2,1]> (k)  s = MatMul (q, kt)  scaled = Mul (s, root)"""

NETWORKS: tuple[Network, ...] = (
    Network("MLP", _MLP, "adamw"),
    Network("CNN with batch norm", """(float[n,3,8,8] x, float[4,3,3,3] w1, float[4] w2, float[4] w3, float[4] mean,
        float[4] var, float[4,4,3,3] w4, float[3,4] w5, float[3] w6) => (float[n,3] y) {
        a = Conv <pads=[1,1,1,1]> (x, w1)
        b, next_mean, next_var = BatchNormalization <training_mode=1> (a, w2, w3, mean, var)
        r = Relu (b)  p = MaxPool <kernel_shape=[2,2], strides=[2,2]> (r)
        c = Conv <pads=[1,1,1,1], strides=[2,2]> (p, w4)  g = GlobalAveragePool (c)
        f = Flatten (g)  y = Gemm <transB=1> (f, w5, w6) }"""),
    Network("encoder with dropout", f"""(int64[n,5] x, float[9,6] w1, float[5,6] w2, float[6,6] wq, float[6,6] wk,
        float[6,6] wv, float[6] w3, float[6] w4, float[6,12] w5, float[12,6] w6, float[3,6] w7, float[3] w8)
        => (float[n,3] y) <float root = {{0.4}}, float rate = {{0.2}}, bool yes = {{1}}, int64[1] words = {{1}}> {{
        found = Gather (w1, x)  e = Add (found, w2) {_ATTENTION}
        a = Softmax <axis=-1> (scaled)  d = Dropout (a, rate, yes)  o = MatMul (d, v)  sum = Add (o, e)
        l = LayerNormalization <axis=-1> (sum, w3, w4)
        h = MatMul (l, w5)  u = Gelu (h)  z = MatMul (u, w6)  m = ReduceMean <keepdims=0> (z, words)
        y = Gemm <transB=1> (m, w7, w8) }}""", words=9),
    Network("LSTM", """(float[5,4,3] x, float[1,16,3] w1, float[1,16,4] w2, float[1,32] w3, float[3,4] w4, float[3] w5)
        => (float[4,3] y) <int64[1] way = {0}> {
        all, last = LSTM <hidden_size=4> (x, w1, w2, w3)  h = Squeeze (last, way)
        y = Gemm <transB=1> (h, w4, w5) }"""),
    Network("LoRA", _MLP, "adamw", lora=LoRA(rank=2)),
    Network("generator", f"""(int64[4,5] x, float[9,6] w1, float[6,6] wq, float[6,6] wk, float[6,6] wv, float[6,9] w2)
        => (float[20,9] y) <float root = {{0.4}}, float low = {{-10000}}, float one = {{1}}, int64[2] square = {{5, 5}},
        int64[2] rows = {{-1, 9}}, float[5,1] places = {{0,1,2,3,4}}> {{
        found = Gather (w1, x)  wave = Sin (places)  e = Add (found, wave) {_ATTENTION}
        full = Expand (one, square)  seen = Trilu <upper=0> (full)  open = Cast <to=9> (seen)
        masked = Where (open, scaled, low)  a = Softmax <axis=-1> (masked)  o = MatMul (a, v)
        l = MatMul (o, w2)  y = Reshape (l, rows) }}""", "sgd", words=9),
)  # fmt: skip


# ---- runtimes --------------------------------------------------------------------------------------


def reference() -> Run:
    """onnx's own reference implementation: what the standard says, in numpy."""
    from onnx.reference import ReferenceEvaluator

    def run(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> Sequence[np.ndarray]:
        # sums of products may overflow where the standard's formulas are written down as they are
        with np.errstate(all="ignore"):
            results: Any = ReferenceEvaluator(model).run(None, dict(feeds))
        return results

    return run


def openvino(device: str = "CPU") -> Run:
    """OpenVINO without onnxruntime; `device` is OpenVINO's name of it."""
    try:
        import openvino as ov  # type: ignore[import-not-found]
    except ImportError as error:
        raise DeviceError(
            "the runtime 'openvino' needs the package openvino: pip install openvino"
        ) from error
    core = ov.Core()

    def run(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> Sequence[np.ndarray]:
        hint = {"INFERENCE_PRECISION_HINT": "f32"}
        compiled = core.compile_model(core.read_model(model.SerializeToString()), device, hint)
        results = compiled(dict(feeds))
        return [np.array(results[index]) for index in range(len(model.graph.output))]

    return run


# By name, as `onward conform --runtime` takes them.
RUNTIMES: Mapping[str, Callable[[], Run]] = {"reference": reference, "openvino": openvino}


def device_environment(device: Device) -> dict[str, str]:
    """What a report says of a device."""
    return {"device": str(device), "provider": device.provider, "adapter": adapter_name(device)}


def _machine() -> dict[str, str]:
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "onnxruntime": ort.__version__,
        "onnx": onnx.__version__,
    }


def _finite(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Without infinities, which JSON does not have."""
    return {name: None if value == float("inf") else value for name, value in fields.items()}
