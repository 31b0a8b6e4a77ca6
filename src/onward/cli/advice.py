"""Warnings about a loss that does not fit the model's output, with the option that fixes it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from onward.cli.choices import LossChoice
from onward.cli.model_file import read_model

__all__ = ["advice"]

# the operators after which a loss should not come, and what it takes instead
_UNFIT = {
    LossChoice.CROSS_ENTROPY: ("Softmax", "scores before a Softmax"),
    LossChoice.BCE_WITH_LOGITS: ("Sigmoid", "scores before a Sigmoid"),
    LossChoice.NLL: ("Softmax", "logarithms of probabilities, which LogSoftmax gives"),
}


def advice(model: Path, loss: LossChoice, loss_input: Sequence[str] = ()) -> str | None:
    """A warning about a loss on the model's output; None if there is no problem."""
    if loss not in _UNFIT:
        return None
    graph = read_model(model).graph
    if not graph.output:
        return None
    read = loss_input[0] if loss_input else graph.output[0].name
    operator, wanted = _UNFIT[loss]
    maker = next((node for node in graph.node if read in node.output), None)
    if maker is None or maker.op_type != operator or maker.domain not in ("", "ai.onnx"):
        return None
    remark = f"'{read}' comes out of a {operator}, and {loss} takes {wanted}"
    fix = "use --loss cross-entropy" if loss is LossChoice.NLL else "add"
    return f"{remark}: {fix} --loss-input {maker.input[0]}"
