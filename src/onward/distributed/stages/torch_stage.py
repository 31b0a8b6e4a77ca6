"""A stage as torch sees it: a module of one vector, whose backward pass the runtime computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from onward.distributed.stages.schedule import Flow

__all__ = ["make_stage_module"]


class _Run(torch.autograd.Function):
    """Forward and backward by the flow; the anchor makes torch ask for a gradient of the first stage."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, received: torch.Tensor, index: int, flow: Flow
    ) -> torch.Tensor:
        ctx.received, ctx.index, ctx.flow = received.detach(), index, flow
        return torch.from_numpy(flow.run_forward(ctx.received.numpy().reshape(-1), index))

    @staticmethod
    def backward(ctx: Any, *arriving: torch.Tensor) -> tuple:
        vector = arriving[0].contiguous().numpy().reshape(-1)
        passed = ctx.flow.run_backward(ctx.received.numpy().reshape(-1), ctx.index, vector)
        if not ctx.needs_input_grad[1]:
            return None, None, None, None
        return None, torch.from_numpy(passed), None, None


class _Stage(torch.nn.Module):
    def __init__(self, flow: Flow) -> None:
        super().__init__()
        self._flow = flow
        self.anchor = torch.nn.Parameter(torch.zeros(1))

    def forward(self, received: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return _Run.apply(self.anchor, received, int(index[0]), self._flow)  # type: ignore[return-value]


def make_stage_module(flow: Flow) -> torch.nn.Module:
    """The stage of a flow, for `torch.distributed.pipelining.PipelineStage`."""
    return _Stage(flow)
