"""Compares an exported graph in onnxruntime with its torch module, without randomness, at several sizes.

Compares outputs, the running statistics after a training step, and, for training, the gradient of every parameter.
Where float32 is not conclusive, torch in float64 is the reference and the error of torch's own float32 sets the
tolerance. `parity` decides.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from onward.export.torch.no_randomness import neutralised
from onward.export.torch.replace import replaced
from onward.graph.protobuf import attributes_of, opset_of

if TYPE_CHECKING:
    from onward.export.torch.axes import AxisGroup
    from onward.export.torch.probe import Plan

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
    # Float32 first: it settles nearly all exports, and float64 takes several times as long.
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
            if not report.passed:
                samples = [expected, *original.run_rounded(tensors)]
                # Float64 runs of rounded numbers: if torch itself may land that far off, so may we.
                noisiest = {
                    name: max((s[name] for s in samples), key=_distance(array))
                    for name, array in exact.items()
                }
                report = parity.compare(exact, got, rtol=rtol, atol=atol, case=case, plain=noisiest)
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


def record_ranks(plan: Plan, proto: onnx.ModelProto, weights: Mapping[str, torch.Tensor]) -> None:
    """Declare the ranks of what branches, loops and squeezes without axes give, as runs at all the sizes show them.

    Inference cannot know them, and a gradient needs them.
    """
    names = [name for node in proto.graph.node if _hides_rank(node) for name in node.output if name]
    if not names:
        return
    arrays: list[dict[str, np.ndarray]] = []
    try:
        exported = _Exported(plan, proto, weights, more=names)
        for _, tensors, _ in _cases(Original(plan, weights), plan.groups):
            # Every size counts: a branch that gives another rank at another size must stay undeclared.
            arrays.append(exported.run(tensors))
    except Exception:  # what is wrong with the model, the comparison says; sizes that fail show nothing
        pass
    declared = {value.name: value for value in proto.graph.value_info}
    for name in names:
        shown = [one[name] for one in arrays if isinstance(one[name], np.ndarray)]
        # Sequences have none, and what differs between runs is no rank to rely on.
        ranks = {array.ndim for array in shown}
        if len(ranks) != 1:
            continue
        rank = ranks.pop()
        if name in declared:
            shape = declared[name].type.tensor_type.shape
            if declared[name].type.tensor_type.HasField("shape") and len(shape.dim) == rank:
                continue
            proto.graph.value_info.remove(declared[name])
        kind = onnx.helper.np_dtype_to_tensor_dtype(shown[0].dtype)
        proto.graph.value_info.append(onnx.helper.make_tensor_value_info(name, kind, [None] * rank))


def _hides_rank(node: onnx.NodeProto) -> bool:
    """Whether the rank of what a node gives depends on sizes or data."""
    if node.op_type == "Squeeze":
        return len(node.input) < 2 and "axes" not in attributes_of(node)
    return node.op_type in ("If", "Loop")


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
                return self.run(widened(tensors))
        except Exception:  # a kernel without float64, a type that the module insists on
            return None

    def run_rounded(self, tensors: Sequence[torch.Tensor]) -> Iterator[dict[str, np.ndarray]]:
        """The same for inputs and weights that differ as float32 rounds them: how much that alone may do.

        Torch's own float32 is one draw of that, and may be a lucky one: a deep network with batch norm can be ten
        times as far from float64 with another number of threads.
        """
        parameters = list(self.plan.adapter.model.parameters())
        for seed in range(3):
            with in_float64(self.plan.adapter.model), rounded_numbers(parameters, tensors, seed) as inputs:
                sample = self.run(inputs)
            yield sample

    def reset(self) -> None:
        """Give the module its original buffers, and what parameters that forward writes to were."""
        changed = set(self.plan.written)
        model = self.plan.adapter.model
        parameters = [(raw, p) for raw, p in model.named_parameters() if raw in changed]
        with torch.no_grad():
            for raw, tensor in [*parameters, *model.named_buffers(remove_duplicate=False)]:
                value = self.weights.get(self.plan.names[raw])
                if value is not None and value.shape == tensor.shape:
                    tensor.copy_(value)

    def _run(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        # The counts of this run: a norm that is called twice has no single batch to correct by.
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
        # the private base of all batch norms, synchronized ones included
        kind = torch.nn.modules.batchnorm._BatchNorm
        norms = [(p, m) for p, m in self.plan.adapter.model.named_modules() if isinstance(m, kind)]
        return [(path, norm) for path, norm in norms if norm.running_mean is not None]

    def _count(self, path: str) -> Any:
        def note(module: Any, inputs: Any) -> None:
            self._rows.setdefault(path, []).append(inputs[0].numel() // inputs[0].size(1))

        return note

    def _statistics(self) -> dict[str, np.ndarray]:
        """As ONNX counts them: with the variance of the batch itself, where torch takes n/(n−1) of it."""
        statistics: dict[str, np.ndarray] = {}
        for path, norm in self._norms():
            counts = self._rows.get(path, [])
            # Without momentum the statistics are a mean over all batches, which `changed_state` carries as state.
            if len(counts) != 1 or counts[0] < 2 or not norm.momentum:
                continue
            names = [
                self.plan.names[f"{path}.{part}" if path else part]
                for part in ("running_mean", "running_var")
            ]
            if any(name not in self.weights for name in names):
                continue
            statistics[f"{names[0]}{contract.NEXT}"] = array_of(names[0], norm.running_mean)
            before = self.weights[names[1]].to(norm.running_var.dtype) * (1 - norm.momentum)
            batch = (norm.running_var - before) * (1 - 1 / counts[0])
            statistics[f"{names[1]}{contract.NEXT}"] = array_of(names[1], before + batch)
        return statistics


class _Exported:
    """The exported model in a session that takes weights as inputs: torch's memory, not a copy."""

    def __init__(
        self,
        plan: Plan,
        proto: onnx.ModelProto,
        weights: Mapping[str, torch.Tensor],
        *,
        more: Sequence[str] = (),
    ) -> None:
        self.plan = plan
        # Kernels for random numbers differ between torch and the runtime: no seed makes them agree.
        neutral = neutralised(proto)
        for name, tensor in weights.items():
            # As inputs, not initializers: the session would copy and pack gigabytes for a run or two.
            kind = assemble.element_type(name, tensor)
            neutral.graph.input.append(onnx.helper.make_tensor_value_info(name, kind, list(tensor.shape)))
        self.outputs = _statistics(neutral, weights) | {name: name for name in [*plan.output_names, *more]}
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
        tensor_of = {leaf.name: tensor for leaf, tensor in zip(self.plan.leaves, tensors)}
        feeds = {name: array_of(name, tensor) for name, tensor in tensor_of.items() if name in self.taken}
        statistics = {n: a.copy() for n, a in self.weights.items() if n + contract.NEXT in self.outputs}
        got = self.session.run(list(self.outputs.values()), feeds | self.weights | statistics)
        return dict(zip(self.outputs, got))


def _runnable(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model itself; below opset 14 batch norm can be written as it trains, but no runtime runs it so."""
    if opset_of(model) >= 14:
        return model
    import onnx_ir as ir

    from onward.graph.dialect.normalize import normalize

    return ir.to_proto(normalize(model))


def _statistics(model: onnx.ModelProto, weights: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The values that hold the next running statistics, by `<statistic>.next`; those with one writer."""
    writers_of: dict[str, list[str]] = {}
    for node in model.graph.node:
        if node.op_type == "BatchNormalization" and len(node.output) >= 3:
            for name, following in zip(node.input[3:5], node.output[1:3]):
                if name in weights and following:
                    writers_of.setdefault(f"{name}{contract.NEXT}", []).append(following)
    return {name: writers[0] for name, writers in writers_of.items() if len(writers) == 1}


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
    dims = {dim: length for group, size in sizes.items() for dim, length in group.sizes(size).items()}
    tensors = axes.fresh_inputs(original.plan.leaves, dims, seed=seed)
    label = ", ".join(f"{group.name} {size}" for group, size in sizes.items())
    return label, tensors, original.run(tensors)


def make_session(model: onnx.ModelProto, *, risky: bool = False) -> Any:
    """Load a model as it is written: the runtime's rewrites change results by more than the export does."""
    from onward.ort_session import create_session, quiet_options

    if risky:
        _try_in_a_child(model)
    # no more threads than the user lets torch have
    options = quiet_options(threads=torch.get_num_threads(), optimize=False)
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # torch computes in between
    try:
        return create_session(model, options)
    except Exception as error:
        missing = re.search(r"implementation for (\w+)\(\d+\) node with name '([^']*)'", str(error))
        if missing:
            raise ExportError(
                f"onnxruntime has no kernel on the CPU for {missing[1]} '{missing[2]}' in the type that the module "
                "computes in: export it in float32 (model.float()), or with check=False for a device that has one"
            ) from error
        raise ExportError(f"onnxruntime cannot load the exported model: {error}") from error


def _is_risky(model: onnx.ModelProto) -> bool:
    return any(node.op_type in _RISKY for graph in assemble.graphs(model.graph) for node in graph.node)


def _try_in_a_child(model: onnx.ModelProto) -> None:
    """Load a model in a process of its own first: one that crashes the runtime must not take the user's with it."""
    from onward.ort_session import LOAD_IN_CHILD

    with TemporaryDirectory(prefix="onward-") as folder:
        path = Path(folder) / "model.onnx"
        path.write_bytes(model.SerializeToString())
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-c", LOAD_IN_CHILD, str(path)], capture_output=True, timeout=300
            )
        except (OSError, subprocess.TimeoutExpired):  # no processes here, or a slow machine: go on without
            return
    # A signal: negative from the system itself, above 128 through a shell or a container's init.
    if done.returncode < 0 or done.returncode > 128:
        raise ExportError(
            f"onnxruntime crashes on the exported model (exit code {done.returncode}): "
            "the exporter wrote a graph that it cannot take"
        )


def _distance(exact: np.ndarray) -> Callable[[np.ndarray], float]:
    """The largest difference from an array, of those that are finite."""

    def distance(array: np.ndarray) -> float:
        gap = np.abs(np.asarray(array, np.float64) - exact)
        return float(gap[np.isfinite(gap)].max(initial=0.0))

    return distance


@contextmanager
def rounded_numbers(
    parameters: Sequence[torch.nn.Parameter], tensors: Sequence[torch.Tensor], seed: int
) -> Iterator[list[torch.Tensor]]:
    """Within it, parameters in float64 differ as float32 rounds them; the inputs given are like that too."""
    generator = torch.Generator().manual_seed(seed)
    with replaced(*((parameter, "data", _rounded(parameter.data, generator)) for parameter in parameters)):
        yield [_rounded(tensor, generator) for tensor in widened(tensors)]


def _rounded(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A float64 tensor with each number off by what float32 rounds; others as they are."""
    if tensor.dtype != torch.float64:
        return tensor
    # Rounding to nearest is off by half a step at most.
    step = torch.finfo(torch.float32).eps / 2
    return tensor * (1 + step * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype))


def widened(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Float32 tensors in float64, others as they are."""
    return [tensor.double() if tensor.dtype == torch.float32 else tensor for tensor in tensors]


def array_of(name: str, tensor: torch.Tensor) -> np.ndarray:
    """A tensor's numbers; shares its memory where it can."""
    if tensor.dtype == torch.bfloat16:
        raise ExportError(f"'{name}' is bfloat16, which cannot be compared on the CPU: pass check=False")
    return tensor.detach().cpu().contiguous().numpy()
