"""Run an exported graph in onnxruntime beside the module it came from, without randomness, at several sizes.

Knows a plan, a graph and its weights; the verdict is `parity`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import torch

from onward.errors import ExportError
from onward.export import parity
from onward.export.torch import assemble, axes
from onward.export.torch.axes import AxisGroup
from onward.export.torch.probe import Plan

__all__ = ["compare_with_torch", "groups_that_follow"]


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
    feed_weights = {name: _array(name, tensor) for name, tensor in weights.items()}
    for name, tensor in weights.items():
        if not isinstance(tensor, torch.nn.Parameter):
            # onnxruntime's training batch norm may write new statistics into the memory of the old ones.
            feed_weights[name] = feed_weights[name].copy()
    session = _session(proto, weights)
    # An input that the module accepts and ignores is not in the graph.
    taken = {value.name for value in session.get_inputs()}
    reports = []
    for case, tensors, expected in _cases(plan, plan.groups if groups is None else groups):
        given = {leaf.name: tensor for leaf, tensor in zip(plan.leaves, tensors) if leaf.name in taken}
        feeds = {name: _array(name, tensor) for name, tensor in given.items()}
        reference = {name: _array(name, value) for name, value in zip(plan.output_names, expected)}
        try:
            got = dict(zip(plan.output_names, session.run(list(plan.output_names), feeds | feed_weights)))
        except Exception as error:  # onnxruntime's errors share no base but this
            reason = f"onnxruntime failed: {str(error).splitlines()[0]}"
            failed = parity.Difference("run", np.inf, np.inf, False, (), reason, case)
            reports.append(parity.Report((failed,), rtol=rtol, atol=atol))
        else:
            reports.append(parity.compare(reference, got, rtol=rtol, atol=atol, case=case))
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


def _cases(
    plan: Plan, groups: Sequence[AxisGroup]
) -> Iterator[tuple[str, list[torch.Tensor], tuple[torch.Tensor, ...]]]:
    """What to run: a label, fresh inputs, and the module's outputs for them."""
    tensors = axes.fresh_inputs(plan.leaves, {}, seed=0)
    yield "the exported sizes", tensors, plan.run(tensors)
    for turn in range(2 if groups else 0):
        together = {group: group.others[turn] for group in groups}
        try:
            cases = [_case(plan, together, seed=turn + 1)]
        except Exception:  # sizes that the module takes one by one but not together
            cases = [_case(plan, {group: size}, seed=turn + 1) for group, size in together.items()]
        yield from cases


def _case(
    plan: Plan, sizes: Mapping[AxisGroup, int], *, seed: int
) -> tuple[str, list[torch.Tensor], tuple[torch.Tensor, ...]]:
    dims = {dim: size for group, size in sizes.items() for dim in group.dims}
    tensors = axes.fresh_inputs(plan.leaves, dims, seed=seed)
    label = ", ".join(f"{group.name} {size}" for group, size in sizes.items())
    return label, tensors, plan.run(tensors)


def _session(proto: onnx.ModelProto, weights: Mapping[str, torch.Tensor]) -> Any:
    """A session over the neutralised model that takes weights as inputs: torch's memory, not a copy."""
    import onnxruntime

    neutral = assemble.neutralised(proto)
    for name, tensor in weights.items():
        kind = assemble.element_type(name, tensor)
        neutral.graph.input.append(onnx.helper.make_tensor_value_info(name, kind, list(tensor.shape)))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 4
    try:
        return onnxruntime.InferenceSession(
            neutral.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:
        raise ExportError(f"onnxruntime cannot load the exported model: {error}") from error


def _array(name: str, tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        raise ExportError(f"'{name}' is bfloat16, which cannot be compared on the CPU: pass check=False")
    return tensor.detach().cpu().contiguous().numpy()
