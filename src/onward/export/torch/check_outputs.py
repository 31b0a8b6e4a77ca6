"""Compares an exported graph in onnxruntime with its torch module, without randomness, at several sizes.

Compares outputs, the running statistics after a training step, and, for training, the gradient of every parameter.
Where float32 is not conclusive, torch in float64 is the reference and the error of torch's own float32 sets the
tolerance. `parity` decides.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import torch

from onward import contract
from onward.errors import ExportError
from onward.export import parity
from onward.export.torch import assemble, axes
from onward.export.torch.float64 import in_float64

if TYPE_CHECKING:
    from onward.export.torch.axes import AxisGroup
    from onward.export.torch.probe import Plan

__all__ = ["Original", "compare_with_torch", "groups_that_follow", "make_session"]

# Operators that hold bodies or sequences: graphs with them have been seen to crash onnxruntime.
_RISKY = frozenset(
    {"If", "Loop", "Scan", "SequenceAt", "SequenceMap", "SplitToSequence", "ConcatFromSequence"}
)


def compare_with_torch(
    plan: Plan,
    proto: onnx.ModelProto,
    weights: Mapping[str, torch.Tensor],
    *,
    rtol: float,
    atol: float,
    groups: Sequence[AxisGroup] | None = None,
) -> parity.Report:
    """Both models on fresh inputs at the traced sizes and, where axes are dynamic, at two others."""
    original = Original(plan, weights)
    exported = _Exported(plan, proto, weights)
    reports = []
    for case, tensors, expected in _cases(original, plan.groups if groups is None else groups):
        try:
            got = exported.run(tensors)
        except Exception as error:  # onnxruntime's errors share no base but this
            reason = f"onnxruntime failed: {str(error).splitlines()[0]}"
            failed = parity.Difference("run", np.inf, np.inf, False, (), reason, case)
            reports.append(parity.Report((failed,), rtol=rtol, atol=atol))
            continue
        report = parity.compare(expected, got, rtol=rtol, atol=atol, case=case)
        if not report.passed and (exact := original.run_exactly(tensors)) is not None:
            report = parity.compare(exact, got, rtol=rtol, atol=atol, case=case, plain=expected)
        reports.append(report)
    return parity.merge(*reports)


def groups_that_follow(
    plan: Plan, proto: onnx.ModelProto, weights: Mapping[str, torch.Tensor], *, rtol: float, atol: float
) -> list[AxisGroup]:
    """The dynamic axes that the exported model has not fixed, each tried alone."""
    return [
        group
        for group in plan.groups
        if compare_with_torch(plan, proto, weights, rtol=rtol, atol=atol, groups=[group]).passed
    ]


@dataclass
class Original:
    """The module: what it gives for some inputs, always from its original statistics."""

    plan: Plan
    weights: Mapping[str, torch.Tensor]
    _rows: dict[str, list[int]] = field(default_factory=dict)

    def run(self, tensors: Sequence[torch.Tensor]) -> dict[str, np.ndarray]:
        """Outputs by name, and the running statistics after the run under `<name>.next`."""
        outputs = self._run(tensors)
        named = {name: array_of(name, value) for name, value in zip(self.plan.output_names, outputs)}
        return named | self._statistics()

    def run_exactly(self, tensors: Sequence[torch.Tensor]) -> dict[str, np.ndarray] | None:
        """The same in float64; None where the module cannot be run so."""
        try:
            with in_float64(self.plan.adapter.model):
                named = self.run(widened(tensors))
        except Exception:  # a kernel without float64, a type that the module insists on
            return None
        finite = all(np.isfinite(array).all() for array in named.values() if array.dtype.kind == "f")
        return named if finite else None

    def reset(self) -> None:
        """Give the module its original buffers: a run in training mode moves them."""
        with torch.no_grad():
            for raw, buffer in self.plan.adapter.model.named_buffers(remove_duplicate=False):
                value = self.weights.get(self.plan.names[raw])
                if value is not None and value.shape == buffer.shape:
                    buffer.copy_(value)

    def _run(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        self._rows.clear()
        self.reset()
        hooks = [
            norm.register_forward_pre_hook(self._count(path)) for path, norm in self._norms() if norm.training
        ]
        try:
            return self.plan.run(tensors)
        finally:
            for hook in hooks:
                hook.remove()

    def _norms(self) -> list[tuple[str, Any]]:
        kind = torch.nn.modules.batchnorm._BatchNorm
        found = [(p, m) for p, m in self.plan.adapter.model.named_modules() if isinstance(m, kind)]
        return [(path, norm) for path, norm in found if norm.running_mean is not None]

    def _count(self, path: str) -> Any:
        def note(module: Any, inputs: Any) -> None:
            self._rows.setdefault(path, []).append(inputs[0].numel() // inputs[0].size(1))

        return note

    def _statistics(self) -> dict[str, np.ndarray]:
        """As ONNX counts them: with the variance of the batch itself, where torch takes n/(n−1) of it."""
        found: dict[str, np.ndarray] = {}
        for path, norm in self._norms():
            counts = self._rows.get(path, [])
            if len(counts) != 1 or counts[0] < 2 or not norm.momentum:
                continue
            names = [
                self.plan.names[f"{path}.{part}" if path else part]
                for part in ("running_mean", "running_var")
            ]
            if any(name not in self.weights for name in names):
                continue
            found[f"{names[0]}{contract.NEXT}"] = array_of(names[0], norm.running_mean)
            before = self.weights[names[1]].to(norm.running_var.dtype) * (1 - norm.momentum)
            batch = (norm.running_var - before) * (1 - 1 / counts[0])
            found[f"{names[1]}{contract.NEXT}"] = array_of(names[1], before + batch)
        return found


class _Exported:
    """The exported model in a session that takes weights as inputs: torch's memory, not a copy."""

    def __init__(self, plan: Plan, proto: onnx.ModelProto, weights: Mapping[str, torch.Tensor]) -> None:
        self.plan = plan
        neutral = assemble.neutralised(proto)
        for name, tensor in weights.items():
            kind = assemble.element_type(name, tensor)
            neutral.graph.input.append(onnx.helper.make_tensor_value_info(name, kind, list(tensor.shape)))
        self.outputs = {name: name for name in plan.output_names} | _statistics(neutral, weights)
        present = {value.name for value in neutral.graph.output}
        for name in self.outputs.values():
            if name not in present:
                neutral.graph.output.append(onnx.ValueInfoProto(name=name))
        self.session = make_session(_runnable(neutral), risky=_is_risky(neutral))
        self.taken = {value.name for value in self.session.get_inputs()}
        self.weights = {name: array_of(name, tensor) for name, tensor in weights.items()}
        for name, tensor in weights.items():
            if not isinstance(tensor, torch.nn.Parameter):
                # onnxruntime's training batch norm may write new statistics into the memory of the old ones.
                self.weights[name] = self.weights[name].copy()

    def run(self, tensors: Sequence[torch.Tensor]) -> dict[str, np.ndarray]:
        # An input that the module accepts and ignores is not in the graph.
        given = {leaf.name: tensor for leaf, tensor in zip(self.plan.leaves, tensors)}
        feeds = {name: array_of(name, tensor) for name, tensor in given.items() if name in self.taken}
        statistics = {n: a.copy() for n, a in self.weights.items() if n + contract.NEXT in self.outputs}
        got = self.session.run(list(self.outputs.values()), feeds | self.weights | statistics)
        return dict(zip(self.outputs, got))


def _runnable(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model itself; below opset 14 batch norm can be written as it trains, but no runtime runs it so."""
    if max(entry.version for entry in model.opset_import if entry.domain == "") >= 14:
        return model
    import onnx_ir as ir

    from onward.graph.dialect.normalize import normalize

    return ir.to_proto(normalize(model))


def _statistics(model: onnx.ModelProto, weights: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The values that hold the next running statistics, by `<statistic>.next`; those with one writer."""
    found: dict[str, list[str]] = {}
    for node in model.graph.node:
        if node.op_type == "BatchNormalization" and len(node.output) >= 3:
            for name, following in zip(node.input[3:5], node.output[1:3]):
                if name in weights and following:
                    found.setdefault(f"{name}{contract.NEXT}", []).append(following)
    return {name: writers[0] for name, writers in found.items() if len(writers) == 1}


def _cases(
    original: Original, groups: Sequence[AxisGroup]
) -> Iterator[tuple[str, list[torch.Tensor], dict[str, np.ndarray]]]:
    """What to run: a label, fresh inputs, and what the module gives for them."""
    tensors = axes.fresh_inputs(original.plan.leaves, {}, seed=0)
    yield "the exported sizes", tensors, original.run(tensors)
    for turn in range(2 if groups else 0):
        together = {group: group.others[turn] for group in groups}
        try:
            cases = [_case(original, together, seed=turn + 1)]
        except Exception:  # sizes that the module takes one by one but not together
            cases = [_case(original, {group: size}, seed=turn + 1) for group, size in together.items()]
        yield from cases


def _case(
    original: Original, sizes: Mapping[AxisGroup, int], *, seed: int
) -> tuple[str, list[torch.Tensor], dict[str, np.ndarray]]:
    dims = {dim: size for group, size in sizes.items() for dim in group.dims}
    tensors = axes.fresh_inputs(original.plan.leaves, dims, seed=seed)
    label = ", ".join(f"{group.name} {size}" for group, size in sizes.items())
    return label, tensors, original.run(tensors)


def make_session(model: onnx.ModelProto, *, risky: bool = False) -> Any:
    """Load a model as it is written: the runtime's rewrites change results by more than the export does."""
    import onnxruntime

    if risky:
        _try_in_a_child(model)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 4
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # torch computes in between
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        return onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:
        raise ExportError(f"onnxruntime cannot load the exported model: {error}") from error


def _is_risky(model: onnx.ModelProto) -> bool:
    return any(node.op_type in _RISKY for graph in assemble.graphs(model.graph) for node in graph.node)


_LOAD = """
import sys, onnxruntime
options = onnxruntime.SessionOptions()
options.log_severity_level = 4
try:
    onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
except Exception:
    pass
"""


def _try_in_a_child(model: onnx.ModelProto) -> None:
    """Load a model in a process of its own first: one that crashes the runtime must not take the user's with it."""
    with TemporaryDirectory(prefix="onward-") as folder:
        path = Path(folder) / "model.onnx"
        path.write_bytes(model.SerializeToString())
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-c", _LOAD, str(path)], capture_output=True, timeout=300
            )
        except (OSError, subprocess.TimeoutExpired):  # no processes here, or a slow machine: go on without
            return
    if done.returncode < 0 or done.returncode > 128:
        raise ExportError(
            f"onnxruntime crashes on the exported model (exit code {done.returncode}): "
            "the exporter wrote a graph that it cannot take"
        )


def widened(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Float32 tensors in float64, others as they are."""
    return [tensor.double() if tensor.dtype == torch.float32 else tensor for tensor in tensors]


def array_of(name: str, tensor: torch.Tensor) -> np.ndarray:
    """A tensor's numbers; shares its memory where it can."""
    if tensor.dtype == torch.bfloat16:
        raise ExportError(f"'{name}' is bfloat16, which cannot be compared on the CPU: pass check=False")
    return tensor.detach().cpu().contiguous().numpy()
