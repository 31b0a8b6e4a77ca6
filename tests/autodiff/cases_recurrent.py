"""Cases of recurrent operators that ONNX's evaluator can run; `test_recurrent.py` has every attribute."""

from cases import Case


def _shapes(gates: int, *, bias: bool = True) -> list[tuple[int, ...]]:
    steps, batch, inputs, hidden = 2, 2, 2, 2
    shapes = [(steps, batch, inputs), (1, gates * hidden, inputs), (1, gates * hidden, hidden)]
    return [*shapes, (1, 2 * gates * hidden)] if bias else shapes


_HIDDEN = {"hidden_size": 2}

CASES = [
    Case("RNN", shapes=_shapes(1), attributes=_HIDDEN, outputs=2),
    Case("RNN", shapes=_shapes(1, bias=False), attributes=_HIDDEN, outputs=2, of=[1], symbolic=True),
    Case("GRU", shapes=_shapes(3, bias=False), attributes=_HIDDEN, outputs=2),
    Case("GRU", shapes=_shapes(3, bias=False), attributes=_HIDDEN | {"linear_before_reset": 1}, outputs=2),
    Case("LSTM", shapes=_shapes(4, bias=False), attributes=_HIDDEN, outputs=3, of=[0, 1]),
    Case("LSTM", shapes=_shapes(4, bias=False), attributes=_HIDDEN, outputs=2, symbolic=True),
]
