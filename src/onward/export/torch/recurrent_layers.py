"""Recurrent layers that exporters do not take whole, one layer at a time: with dropout between them, or projections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from onward.errors import ExportError

_STEPS = {"LSTM": torch.lstm, "GRU": torch.gru, "RNN_TANH": torch.rnn_tanh, "RNN_RELU": torch.rnn_relu}


def layer_by_layer(self: nn.RNNBase, input: torch.Tensor, hx: Any = None) -> Any:
    """What LSTM, GRU and RNN compute: exporters take no dropout inside, and ONNX's LSTM has no projection."""
    if isinstance(input, nn.utils.rnn.PackedSequence):
        kind = "a recurrent layer with dropout" if not self.proj_size else "an LSTM with proj_size"
        raise ExportError(f"{kind} takes a PackedSequence: export it over padded tensors")
    batched = input.dim() == 3
    batch_axis = 0 if self.batch_first else 1
    x = input if batched else input.unsqueeze(batch_axis)
    lstm = isinstance(self, nn.LSTM)
    directions = 2 if self.bidirectional else 1
    if hx is None:
        depth, batch = self.num_layers * directions, x.size(batch_axis)
        hidden = x.new_zeros(depth, batch, self.proj_size or self.hidden_size)
        states = (hidden, x.new_zeros(depth, batch, self.hidden_size)) if lstm else (hidden,)
    else:
        states = tuple(hx) if lstm else (hx,)
        states = states if batched else tuple(state.unsqueeze(1) for state in states)
    ends: list[Sequence[torch.Tensor]] = []
    for layer in range(self.num_layers):
        rows = slice(layer * directions, (layer + 1) * directions)
        x, *ended = _run_layer(self, x, [state[rows] for state in states], self.all_weights[rows])
        ends.append(ended)
        if layer + 1 < self.num_layers:
            x = F.dropout(x, self.dropout, training=self.training)
    final = tuple(torch.cat(parts) for parts in zip(*ends))
    if not batched:
        x, final = x.squeeze(batch_axis), tuple(state.squeeze(1) for state in final)
    return x, final if lstm else final[0]


def _run_layer(
    self: nn.RNNBase, x: torch.Tensor, states: list[torch.Tensor], weights: Sequence[Sequence[torch.Tensor]]
) -> tuple[torch.Tensor, ...]:
    """The outputs of one layer, and its last states; `weights` and the states' rows are by direction."""
    if self.proj_size:
        return _project_steps(self, x, states, weights)
    flat = [weight for group in weights for weight in group]
    step = _STEPS[self.mode]
    state = states if self.mode == "LSTM" else states[0]
    return step(x, state, flat, self.bias, 1, 0.0, self.training, self.bidirectional, self.batch_first)


def _project_steps(
    self: nn.RNNBase, x: torch.Tensor, states: list[torch.Tensor], weights: Sequence[Sequence[torch.Tensor]]
) -> tuple[torch.Tensor, ...]:
    """An LSTM whose hidden state is projected, step by step."""
    x = x.transpose(0, 1) if self.batch_first else x
    outputs, ends = [], []
    for direction, (w_in, w_hidden, *more) in enumerate(weights):
        gates = F.linear(x, w_in, more[0] + more[1] if self.bias else None)
        h, c = (state[direction] for state in states)
        order = range(int(x.shape[0]))
        steps = []
        for step in reversed(order) if direction else order:
            i, f, g, o = (gates[step] + F.linear(h, w_hidden)).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = F.linear(o.sigmoid() * c.tanh(), more[-1])
            steps.append(h)
        outputs.append(torch.stack(steps[::-1] if direction else steps))
        ends.append((h, c))
    y = torch.cat(outputs, -1)
    return (y.transpose(0, 1) if self.batch_first else y, *(torch.stack(part) for part in zip(*ends)))
